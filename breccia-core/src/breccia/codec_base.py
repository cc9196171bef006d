"""What every codec is: its facts, and how the generic algorithm encodes, decodes, multiplies and divides by its codes.

The methods are integer arithmetic on FP32 bits in backend primitives (`Ops`) that avoids FP32 subnormals, so that flush-to-zero
modes and rewriting compilers cannot change a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import RecipeError
from .fp32 import f32_bits
from .locks import cached_property

if TYPE_CHECKING:
    from .arrays.ops import Array, Ops

_MIN_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Codec:
    """One number format of `bits` bits.

    `dtype` is its dtype name ("float8_e4m3fn") in torch, JAX, ml_dtypes and safetensors'
    table; None where no framework has a dtype with one code per item.
    """

    name: str
    bits: int
    dtype: str | None
    source: str

    @property
    def max(self) -> float:
        """Largest finite value a cast writes; larger input saturates."""
        raise RecipeError(f"codec {self.name!r} does not declare its largest value")

    def value(self, code: int) -> float:
        """The value of `code`."""
        raise RecipeError(f"codec {self.name!r} does not declare its values")

    @cached_property
    def table(self) -> tuple[int, ...]:
        """FP32 bit pattern of every code, for codecs of at most 8 bits."""
        return tuple(f32_bits(self.value(code)) for code in range(1 << self.bits))

    def encode(self, ops: Ops, y: Array, word: Array | None = None) -> Array:
        """int32 codes of FP32 `y`: rounded to nearest, or stochastically by the random int32 `word`; saturating.

        Ties go to the even code; in E8M0, upwards (docs/spec/numerics.md, section 2).

        NaN and Inf are written as the codec's own codes; a codec without NaN saturates Inf, and writes NaN unspecified.
        """
        raise RecipeError(f"codec {self.name!r} does not say how to encode")

    def read(self, ops: Ops, stored: Array) -> Array:
        """FP32 values of stored items, exactly."""
        return self.decode(ops, ops.load(stored))

    def decode(self, ops: Ops, codes: Array) -> Array:
        """FP32 values of int32 codes, exactly."""
        return ops.bitcast_to_float(ops.take(self.table, codes))

    def multiply(self, ops: Ops, v: Array, stored: Array) -> Array:
        """fl(v * scale) for scales stored in this codec."""
        return v * self.read(ops, stored)

    def divide(self, ops: Ops, x: Array, stored: Array, global_scale: Array | None = None) -> tuple[Array, Array]:
        """(x times the reciprocal of the scale, whether the scale is usable); one reciprocal per scale.

        The scale is `stored` times `global_scale`, the FP32 global scale, if there is one. Usable scales are normal numbers
        with a normal reciprocal; elsewhere the first result is 0.
        """
        scale = self.read(ops, stored)
        if global_scale is not None:
            scale = scale * global_scale
        magnitude = ops.maximum(scale, -scale)
        usable = (magnitude >= _MIN_NORMAL) & (magnitude <= 1 / _MIN_NORMAL)
        inverse = ops.div(1.0, ops.where(usable, scale, 1.0))
        return ops.where(usable, x * inverse, 0.0), usable

    def encode_exponent(self, ops: Ops, n: Array) -> Array:
        """Codes of 2^n for int32 `n`, clipped to the codec's range."""
        raise RecipeError(f"codec {self.name!r} cannot store the power-of-two scales of this rule")

    def accept(self, ops: Ops, stored: Array) -> Array:
        """Codes of supplied scales; NaN for those that are not valid positive scales."""
        return ops.where(self.read(ops, stored) > 0, ops.load(stored), self.need_nan())

    @property
    def scale_min(self) -> float:
        """Smallest scale written for a nonzero block; 0 if the scale may underflow to 0."""
        return 0.0

    @property
    def scale_max(self) -> float:
        """Largest scale written: 2^126 at most, so that its FP32 reciprocal is a normal number."""
        return min(self.max, 2.0**126)

    @property
    def zero_scale(self) -> int:
        """Code of an all-zero block's scale."""
        return 0

    @property
    def nan_code(self) -> int | None:
        """Code written for NaN; None where the codec has none."""
        return None

    def need_nan(self) -> int:
        """`nan_code`, for scales, which must be able to represent NaN. Raises RecipeError."""
        if self.nan_code is None:
            raise RecipeError(f"scales stored as {self.name} cannot represent NaN, which the numerics contract requires.")
        return self.nan_code
