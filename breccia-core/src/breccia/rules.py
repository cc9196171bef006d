"""Scale rules: from a block's amax to its stored scale.

A recipe names one rule per level. Their arithmetic is in docs/spec/numerics.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .codecs import Codec, Integer, Lookup, Minifloat, PowerOfTwo
from .errors import RecipeError
from .fp32 import F32_INF, MAGNITUDE, MANTISSA, f32, f32_bits

if TYPE_CHECKING:
    from .arrays.ops import Array, Ops

_F32_MAX = F32_INF - 1


@dataclass(frozen=True)
class Rule:
    """Base of scale rules; `name` is stable and appears in files."""

    name: str

    def scale(self, ops: Ops, statistic: Array, codec: Codec, element: Codec, qmax: float, global_scale: Array | None) -> Array:
        """int32 codes of the scales to store.

        statistic: FP32, finite, not below 2^-126 where nonzero (the caller handles zero blocks).
        qmax: largest representable magnitude at scale 1 (`Format.qmax`). global_scale: the FP32 global scale, or None.
        """
        raise RecipeError(f"scale rule {self.name!r} does not say how to scale")

    def scaled(
        self, ops: Ops, x: Array, stored: Array, codec: Codec, global_scale: Array | None, statistic: Array | None, qmax: float
    ) -> tuple[Array, Array]:
        """(`x` divided by its scale, whether the scale is usable); codes are rounded from the first, 0 for unusable scales.

        stored: the scales as written. statistic: the argument of `scale`, or None where the caller supplied the scales.
        """
        return codec.divide(ops, x, stored, global_scale)


@dataclass(frozen=True)
class Linear(Rule):
    """amax / qmax * 2^margin, rounded to the level's codec. Codes are computed from x times one reciprocal per scale."""

    margin: int = 0

    def scale(self, ops: Ops, statistic: Array, codec: Codec, element: Codec, qmax: float, global_scale: Array | None) -> Array:
        self._check(codec)
        t = self._ratio(ops, statistic, element, qmax)
        t = flushed(ops, t)
        if qmax < 1:  # else the ratio cannot overflow
            t = saturated(ops, t)
        if global_scale is not None:
            t = saturated(ops, ops.div(t, global_scale))
        if self.margin:
            t = saturated(ops, t * 2.0**self.margin)
        t = ops.minimum(ops.maximum(t, codec.scale_min), codec.scale_max)
        return codec.encode(ops, t)

    def _ratio(self, ops: Ops, statistic: Array, element: Codec, qmax: float) -> Array:
        return ops.div(statistic, qmax)

    def _check(self, codec: Codec) -> None:
        if isinstance(codec, PowerOfTwo | Lookup):
            other = "has powers of two only" if isinstance(codec, PowerOfTwo) else "is a table"
            raise RecipeError(f"rule {self.name!r} writes float scales; {codec.name} {other}: use 'rceil'.")


@dataclass(frozen=True)
class Reciprocal(Linear):
    """`Linear` with amax * fl(1 / qmax): as computed by compilers that rewrite division by constants."""

    def _ratio(self, ops: Ops, statistic: Array, element: Codec, qmax: float) -> Array:
        return statistic * f32(1.0 / qmax)


@dataclass(frozen=True)
class HalfRange(Linear):
    """`Linear` over half the width of a signed integer codec's range, 7.5 for INT4: amax / ((high - low) / 2)."""

    def _ratio(self, ops: Ops, statistic: Array, element: Codec, qmax: float) -> Array:
        if not isinstance(element, Integer) or not element.signed:
            raise RecipeError(f"rule {self.name!r} is for signed integer elements; {element.name} is not one.")
        return ops.div(statistic, math.ldexp(element.high - element.low, -1 - element.fraction_bits))


@dataclass(frozen=True)
class Divide(Linear):
    """`Linear`, with codes from x / scale: one division per element."""

    def scaled(
        self, ops: Ops, x: Array, stored: Array, codec: Codec, global_scale: Array | None, statistic: Array | None, qmax: float
    ) -> tuple[Array, Array]:
        scale = codec.read(ops, stored)
        if global_scale is not None:
            scale = scale * global_scale
        usable = normal(scale)
        return ops.where(usable, ops.div(x, ops.where(usable, scale, 1.0)), 0.0), usable


@dataclass(frozen=True)
class Inverse(Linear):
    """TransformerEngine 2.x's order of operations: multiplier = qmax / amax, codes from x * multiplier, scale = 1 / multiplier.

    The multiplier is clamped to 2^-126 .. 2^126, and its mantissa cut off under `power_of_two`.
    """

    power_of_two: bool = False

    def scale(self, ops: Ops, statistic: Array, codec: Codec, element: Codec, qmax: float, global_scale: Array | None) -> Array:
        if global_scale is not None:
            raise RecipeError(f"rule {self.name!r} is for formats with one scale level; use 'linear' under a global scale.")
        self._check(codec)
        if codec.scale_max < 2.0**126:
            raise RecipeError(
                f"rule {self.name!r} needs a codec for scales up to 2^126; the largest of {codec.name} is "
                f"{codec.scale_max:g}: use 'linear'."
            )
        return codec.encode(ops, ops.div(1.0, self._multiplier(ops, statistic, qmax)))

    def scaled(
        self, ops: Ops, x: Array, stored: Array, codec: Codec, global_scale: Array | None, statistic: Array | None, qmax: float
    ) -> tuple[Array, Array]:
        if statistic is None:
            return super().scaled(ops, x, stored, codec, global_scale, statistic, qmax)
        usable = normal(codec.read(ops, stored))
        multiplier = ops.where(statistic == 0, 1.0, self._multiplier(ops, statistic, qmax))
        return ops.where(usable, x * multiplier, 0.0), usable

    def _multiplier(self, ops: Ops, statistic: Array, qmax: float) -> Array:
        m = ops.div(qmax, ops.where(statistic == 0, qmax, statistic))
        m = ops.minimum(m, 2.0**126)
        if self.margin:
            m = m * 2.0**-self.margin
        m = ops.minimum(ops.maximum(m, 2.0**-126), 2.0**126)
        return ops.bitcast_to_float(ops.bitcast_to_int(m) & F32_INF) if self.power_of_two else m


@dataclass(frozen=True)
class Exponent(Rule):
    """A power of two, computed from the bits of amax: `rceil`, `floor` or `even`.

    `rceil`: smallest 2^n with amax <= qmax * 2^n. Nothing saturates.
    `floor`: 2^(floor(log2 amax) - floor(log2 qmax)); OCP MX v1.0 section 6.3. The largest element may saturate.
    `even`: `floor` after rounding amax's mantissa to the element's mantissa bits, ties away from zero.
    Under a coarser scale, in a table of powers of two: the same of amax / scale.
    """

    def scale(self, ops: Ops, statistic: Array, codec: Codec, element: Codec, qmax: float, global_scale: Array | None) -> Array:
        if global_scale is not None:
            if not isinstance(codec, Lookup):
                raise RecipeError(f"rule {self.name!r} is for formats with one scale level; use 'linear' under a global scale.")
            statistic = flushed(ops, saturated(ops, ops.div(statistic, global_scale)))
        cap = f32_bits(qmax)
        carry = self.carry(element, cap)
        return codec.encode_exponent(ops, ((ops.bitcast_to_int(statistic) + carry) >> 23) - (cap >> 23))

    def carry(self, element: Codec, qmax: int) -> int:
        """The integer added to amax's bits that rounds its exponent field. qmax: as FP32 bits."""
        if self.name == "rceil":  # carries where amax's mantissa is larger
            return MANTISSA - (qmax & MANTISSA)
        if self.name == "floor":
            return 0
        if not isinstance(element, Minifloat | Integer):
            raise RecipeError(f"rule 'even' rounds to the element's mantissa bits; {element.name} has none.")
        return 1 << (22 - element.mantissa_bits)


def normal(scale: Array) -> Array:
    """Whether an FP32 scale is a positive normal number with a normal reciprocal"""
    return (scale >= 2.0**-126) & (scale <= 2.0**126)


def saturated(ops: Ops, y: Array) -> Array:
    """`y` with ±Inf replaced by the largest finite FP32. NaN stays."""
    u = ops.bitcast_to_int(y)
    magnitude = u & MAGNITUDE
    return ops.bitcast_to_float(ops.where(magnitude == F32_INF, (u & ~MAGNITUDE) | _F32_MAX, u))


def flushed(ops: Ops, y: Array) -> Array:
    """`y` with magnitudes below 2^-126 replaced by zero, as XLA does to results."""
    return ops.where((ops.bitcast_to_int(y) & MAGNITUDE) <= MANTISSA, 0.0, y)


LINEAR = Linear("linear")
RECIP = Reciprocal("recip")
HALF_RANGE = HalfRange("half_range")
DIVIDE = Divide("divide")
TE = Inverse("te")
RCEIL = Exponent("rceil")
FLOOR = Exponent("floor")
EVEN = Exponent("even")

RULES: tuple[Rule, ...] = (LINEAR, RECIP, HALF_RANGE, DIVIDE, TE, RCEIL, FLOOR, EVEN)
