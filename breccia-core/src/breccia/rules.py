"""Scale rules: from a block's amax to its stored scale.

A recipe names one rule per level. Their arithmetic is in docs/spec/numerics.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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

    def accept(self, ops: Ops, stored: Array, codec: Codec, element: Codec) -> Array:
        """int32 codes of supplied scales; NaN for those that the rule cannot write."""
        return codec.accept(ops, stored)


@dataclass(frozen=True)
class Linear(Rule):
    """amax / qmax * 2^margin, rounded to the level's codec. Codes are computed from x times one reciprocal per scale."""

    margin: int = 0

    def scale(self, ops: Ops, statistic: Array, codec: Codec, element: Codec, qmax: float, global_scale: Array | None) -> Array:
        self._check(codec)
        return nearest_scale(ops, self.unrounded(ops, statistic, element, qmax, global_scale), codec)

    def unrounded(self, ops: Ops, statistic: Array, element: Codec, qmax: float, global_scale: Array | None) -> Array:
        """The FP32 number that the scale is rounded from."""
        t = self._ratio(ops, statistic, element, qmax)
        t = flushed(ops, t)
        if qmax < 1:  # else the ratio cannot overflow
            t = saturated(ops, t)
        if global_scale is not None:
            t = saturated(ops, ops.div(t, global_scale))
        return saturated(ops, t * 2.0**self.margin) if self.margin else t

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


@dataclass(frozen=True)
class Window:
    """The scales that a search tries besides the plain one, in this order.

    factors: encoded multiples of the unrounded plain scale. opposite: likewise, with the sign bit set, for codes whose range is
    not symmetric. steps: distances from the plain scale's code, within the codes of positive numbers, in ascending order.
    """

    factors: tuple[float, ...] = ()
    opposite: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Search(Rule):
    """Of the scales in a window, the one whose codes have the least squared error over the block; of equal ones, the first.

    The first is the plain scale: that of `rceil` for powers of two, that of `linear` for float scales. So `scale` is the plain
    rule, and `candidates` are what the generic algorithm compares. A codec without a window cannot have the rule.

    floats: of float scales of 16 and 32 bits. bytes: of those of 8 bits. powers: of powers of two.
    """

    floats: Window | None = None
    bytes: Window | None = None
    powers: Window | None = None

    def scale(self, ops: Ops, statistic: Array, codec: Codec, element: Codec, qmax: float, global_scale: Array | None) -> Array:
        self.window(codec)
        return self.plain(codec).scale(ops, statistic, codec, element, qmax, global_scale)

    def plain(self, codec: Codec) -> Rule:
        """The rule of the plain scale."""
        return RCEIL if isinstance(codec, PowerOfTwo) else LINEAR

    def window(self, codec: Codec) -> Window:
        """The window for scales of a codec. Raises RecipeError if it has none."""
        kind = "powers" if isinstance(codec, PowerOfTwo) else "bytes" if codec.bits <= 8 else "floats"
        window: Window | None = getattr(self, kind) if isinstance(codec, Minifloat | PowerOfTwo) else None
        if window is None:
            raise RecipeError(
                f"rule {self.name!r} has no window of {codec.name} scales around the plain one; use another rule."
            )
        return window

    def needless(self, codec: Codec, element: Codec) -> int:
        """How many steps at the end of the window are tried in vain: those above a plain scale that is a power of two.

        No element of its block is beyond the plain scale's codes. The numbers of codes under twice that scale that are within
        their reach are numbers of its own codes, and further ones are not nearer to an element. So it has a number as near to
        each element, and the first of the best scales is never twice as large. Products with powers of two are exact, and
        rounding keeps the order of distances, squares and sums. (That numbers below 2^-20 count as zero matters only to element
        codecs whose largest number is 2^20 to 2^22 times their least, as that of none with up to 8 bits is.)
        """
        if not isinstance(codec, PowerOfTwo) or not isinstance(element, Minifloat | Integer):
            return 0
        return sum(step > 0 for step in self.window(codec).steps)

    def tried(self, codec: Codec, element: Codec) -> Window:
        """The window without what is tried in vain. Raises RecipeError if the codec has none."""
        window = self.window(codec)
        return replace(window, steps=window.steps[: len(window.steps) - self.needless(codec, element)])

    def candidates(
        self, ops: Ops, statistic: Array, codec: Codec, element: Codec, qmax: float, global_scale: Array | None
    ) -> Array:
        """int32 codes of the scales to compare, along a new first axis, the plain ones first. Arguments as those of `scale`."""

        def stacked(arrays: list[Array]) -> Array:
            return ops.concat([ops.reshape(a, (1, *a.shape)) for a in arrays], 0)

        window, plain = self.window(codec), self.scale(ops, statistic, codec, element, qmax, global_scale)
        found = [stacked([plain])]
        opposite = window.opposite if takes_signs(codec, element) else ()
        if window.factors or opposite:
            t = LINEAR.unrounded(ops, statistic, element, qmax, global_scale)
            sign = -(1 << 31) if codec.bits == 32 else 1 << (codec.bits - 1)  # of int32
            for factors, bit in ((window.factors, 0), (opposite, sign)):
                if factors:
                    multiples = flushed(ops, saturated(ops, stacked([t * factor for factor in factors])))
                    found.append(nearest_scale(ops, multiples, codec) | bit)
        if window.steps:
            least, most = (0, codec.nan - 1) if isinstance(codec, PowerOfTwo) else (1, getattr(codec, "highest", 0))
            moved = ops.minimum(ops.maximum(stacked([plain + step for step in window.steps]), least), most)
            found.append(ops.where(plain == codec.need_nan(), plain, moved))
        return ops.concat(found, 0) if len(found) > 1 else found[0]

    def accept(self, ops: Ops, stored: Array, codec: Codec, element: Codec) -> Array:
        if not takes_signs(codec, element):
            return codec.accept(ops, stored)
        value = codec.read(ops, stored)
        magnitude = ops.maximum(value, -value)
        good = (magnitude >= codec.scale_min) & (magnitude <= codec.scale_max)
        return ops.where(good, codec.encode(ops, ops.where(good, value, 1.0)), codec.need_nan())


def takes_signs(codec: Codec, element: Codec) -> bool:
    """Whether scales may be negative: floats over signed integers, whose lowest code has no counterpart."""
    return isinstance(element, Integer) and element.signed and isinstance(codec, Minifloat) and codec.signed and codec.bits > 8


def nearest_scale(ops: Ops, t: Array, codec: Codec) -> Array:
    """int32 codes of positive FP32 numbers, clamped to the scales that a codec has."""
    return codec.encode(ops, ops.minimum(ops.maximum(t, codec.scale_min), codec.scale_max))


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
#: Multiples of 1/32, which FP32 has exactly. Steps of 1/32 help where most blocks end up, coarse ones those of few bits.
_FACTORS = tuple(n / 32 for n in (16, 20, 22, *range(24, 32)))
MSE = Search(
    "mse",
    floats=Window(factors=_FACTORS, opposite=_FACTORS[:-1]),
    bytes=Window(steps=(*range(-8, 0), *range(1, 7))),  # eight codes below: half the scale, which importances ask for
    powers=Window(steps=(-1, 1)),
)
#: The largest element of a block becomes 6 or 4, the largest codes of E2M1 (arXiv:2512.02010).
FOUR_SIX = Search("four_six", bytes=Window(factors=(1.5,)))

RULES: tuple[Rule, ...] = (LINEAR, RECIP, HALF_RANGE, DIVIDE, TE, RCEIL, FLOOR, EVEN, MSE, FOUR_SIX)
