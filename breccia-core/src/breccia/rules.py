"""Scale rules: from a block's amax to its stored scale.

A rule is a value named in a recipe, one per level. The arithmetic of each is in docs/spec/numerics.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .codecs import F32_INF, MAGNITUDE, MANTISSA, Codec, Minifloat
from .errors import RecipeError

if TYPE_CHECKING:
    from .ops import Array, Ops

_F32_MAX = F32_INF - 1


@dataclass(frozen=True)
class Rule:
    """Base of scale rules; `name` is stable and appears in files."""

    name: str

    def scale(self, ops: Ops, statistic: Array, codec: Codec, element: Codec, capacity: float, coarse: Array | None) -> Array:
        """int32 codes of the scales to store.

        statistic: FP32, finite, not below 2^-126 where nonzero (zero blocks are the caller's).
        capacity: what a scale of one can carry (`Format.capacity`). coarse: FP32 scale of the coarser level, or None.
        """
        raise RecipeError(f"scale rule {self.name!r} does not say how to scale")


@dataclass(frozen=True)
class Linear(Rule):
    """amax / capacity * 2^margin, rounded into the level's codec."""

    margin: int = 0

    def scale(self, ops: Ops, statistic: Array, codec: Codec, element: Codec, capacity: float, coarse: Array | None) -> Array:
        if not isinstance(codec, Minifloat):
            raise RecipeError(f"rule 'linear' writes float scales; {codec.name} holds powers of two: use 'rceil'.")
        t = ops.div(statistic, capacity)
        t = ops.where(ops.bits(t) <= MANTISSA, 0.0, t)  # below 2^-126: zero, on every backend
        if coarse is not None:
            t = saturated(ops, ops.div(t, coarse))
        if self.margin:
            t = saturated(ops, t * 2.0**self.margin)
        t = ops.minimum(ops.maximum(t, codec.scale_min), codec.scale_max)
        return codec.encode(ops, t)


@dataclass(frozen=True)
class Exponent(Rule):
    """A power of two, found on the bits of amax: `rceil`, `floor` or `even`.

    `rceil`: smallest 2^n with amax <= capacity * 2^n. Nothing saturates.
    `floor`: 2^(floor(log2 amax) - floor(log2 capacity)); OCP MX v1.0 section 6.3. The largest element may saturate.
    `even`: `floor` after rounding amax's mantissa to the element's mantissa bits, ties away from zero.
    """

    def scale(self, ops: Ops, statistic: Array, codec: Codec, element: Codec, capacity: float, coarse: Array | None) -> Array:
        if coarse is not None:
            raise RecipeError(f"rule {self.name!r} writes the only level of a format; use 'linear' under a coarser scale.")
        a = ops.bits(statistic)
        cap = struct.unpack("<I", struct.pack("<f", capacity))[0]
        if self.name == "even":
            if not isinstance(element, Minifloat):
                raise RecipeError(f"rule 'even' rounds to the element's mantissa bits; {element.name} has none.")
            a = a + (1 << (22 - element.mantissa_bits))
        n = (a >> 23) - (cap >> 23)
        if self.name == "rceil":
            n = ops.where((a & MANTISSA) > (cap & MANTISSA), n + 1, n)
        return codec.encode_exponent(ops, n)


def saturated(ops: Ops, y: Array) -> Array:
    """`y` with ±Inf replaced by the largest finite FP32. NaN stays."""
    u = ops.bits(y)
    magnitude = u & MAGNITUDE
    return ops.unbits(ops.where(magnitude == F32_INF, (u & ~MAGNITUDE) | _F32_MAX, u))


LINEAR = Linear("linear")
RCEIL = Exponent("rceil")
FLOOR = Exponent("floor")
EVEN = Exponent("even")

RULES: tuple[Rule, ...] = (LINEAR, RCEIL, FLOOR, EVEN)
