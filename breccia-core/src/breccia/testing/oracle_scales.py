"""The oracle's scales: what each rule stores for a block, by exact rationals."""

from __future__ import annotations

import math
from fractions import Fraction

from ..codecs import Codec, Integer, Lookup, Minifloat, PowerOfTwo
from ..formats import Format, Level
from ..rules import LINEAR, RCEIL, Exponent, HalfRange, Inverse, Linear, Reciprocal, Rule, Search
from .oracle_numbers import MIN_NORMAL, code_of, decode, encode, fl_finite, flush, ladder, nan_code


def linear(rule: Linear, statistic: Fraction, level: Level, fmt: Format, global_scale: Fraction | None) -> int:
    """Rule `linear` and the rules derived from it: the stored scale of a nonzero block."""
    codec = level.codec
    assert not isinstance(codec, PowerOfTwo | Lookup), codec
    if isinstance(rule, Inverse):
        return encode(codec, fl_finite(1 / multiplier(rule, statistic, Fraction(fmt.qmax(level)))))
    return nearest_scale(codec, unrounded(rule, statistic, level, fmt, global_scale))


def nearest_scale(codec: Codec, t: Fraction) -> int:
    """The stored scale nearest to a positive number, which is clamped to the scales that the codec has."""
    return encode(codec, min(max(t, Fraction(codec.scale_min)), Fraction(codec.scale_max)))


def unrounded(rule: Linear, statistic: Fraction, level: Level, fmt: Format, global_scale: Fraction | None) -> Fraction:
    """Rule `linear` and its kin: the FP32 number that the scale is rounded from."""
    element, cap = fmt.element, Fraction(fmt.qmax(level))
    if isinstance(rule, Reciprocal):
        t = fl_finite(statistic * fl_finite(1 / cap))
    elif isinstance(rule, HalfRange):
        assert isinstance(element, Integer) and element.signed, element
        t = fl_finite(statistic / Fraction(element.high - element.low, 2 ** (1 + element.fraction_bits)))
    else:
        t = fl_finite(statistic / cap)
    t = flush(t)
    if global_scale is not None:
        t = fl_finite(t / global_scale)
    return fl_finite(t * Fraction(2) ** rule.margin)


def multiplier(rule: Inverse, statistic: Fraction, cap: Fraction) -> Fraction:
    """Rule `te`: the multiplier of a block's elements."""
    m = min(fl_finite(cap / statistic), 1 / MIN_NORMAL) / Fraction(2) ** rule.margin
    m = min(max(fl_finite(m), MIN_NORMAL), 1 / MIN_NORMAL)
    return Fraction(2) ** floor_log2(m) if rule.power_of_two else m


def floor_log2(q: Fraction) -> int:
    """Largest n with 2^n <= q."""
    n = 0
    while Fraction(2) ** n <= q:
        n += 1
    while Fraction(2) ** n > q:
        n -= 1
    return n


def exponent(rule: Exponent, amax: Fraction, element: Codec, cap: Fraction) -> int:
    """Rules `rceil`, `floor`, `even`: n of the scale 2^n of a nonzero block, before clipping to the codec."""
    if rule.name == "rceil":
        n = floor_log2(amax / cap)
        return n if amax <= cap * Fraction(2) ** n else n + 1
    if rule.name == "even":
        assert isinstance(element, Minifloat | Integer), element
        # For an integer codec, the bits after the leading bit of its largest value act as mantissa bits.
        bits = element.mantissa_bits if isinstance(element, Minifloat) else floor_log2(Fraction(element.high))
        step = Fraction(2) ** (floor_log2(amax) - bits)
        amax = math.floor(amax / step + Fraction(1, 2)) * step
    return floor_log2(amax) - floor_log2(cap)


def global_number(level: Level, fmt: Format, amax: Fraction) -> Fraction:
    """The value that a cast stores for a global scale of convention "amax" or "divisor"; a tensor of zeros gets scale 1."""
    qmax = Fraction(fmt.qmax(level))
    number = max(amax, qmax * MIN_NORMAL) if amax else qmax
    return number if level.convention == "amax" else min(fl_finite(qmax / number), 1 / MIN_NORMAL)


def multiplied_by(level: Level, fmt: Format, stored: Fraction) -> Fraction:
    """The multiplier that a stored global scale stands for."""
    if level.convention == "amax":
        return fl_finite(stored / Fraction(fmt.qmax(level)))
    return stored if level.convention == "multiplier" else fl_finite(1 / stored)


def stored_scale(rule: Rule, statistic: Fraction, level: Level, fmt: Format, global_scale: Fraction | None) -> int:
    """The stored code of the scale of a nonzero finite block."""
    codec = level.codec
    if isinstance(rule, Search):
        rule = RCEIL if isinstance(codec, PowerOfTwo) else LINEAR
    if isinstance(rule, Linear):
        return linear(rule, statistic, level, fmt, global_scale)
    assert isinstance(rule, Exponent), rule
    if global_scale is not None:
        assert isinstance(codec, Lookup), codec
        statistic = flush(fl_finite(statistic / global_scale))
        if not statistic:
            return code_of(codec, ladder(codec)[0][0])
    n = exponent(rule, statistic, fmt.element, Fraction(fmt.qmax(level)))
    if isinstance(codec, Lookup):  # of powers of two
        values, _ = ladder(codec)
        return code_of(codec, min(max(Fraction(2) ** n, values[0]), values[-1]))
    if isinstance(codec, PowerOfTwo):
        return min(max(n + codec.bias, 0), codec.nan - 1)
    return code_of(codec, Fraction(2) ** min(max(n, -126), 126))


def supplied_scale(codec: Codec, code: int, signed: bool = False) -> int:
    """The stored code of a supplied scale: NaN unless it is a positive number within the codec's scale range.

    signed: or a negative one.
    """
    value = decode(codec, code)
    if signed:
        value = abs(value)
    low, high = 0.0, math.inf
    if isinstance(codec, Minifloat) and codec.bits > 8:
        low, high = codec.scale_min, codec.scale_max
    if value > 0 and low <= value <= high:
        return code
    nan = nan_code(codec)
    assert nan is not None, codec
    return nan


def zero_scale(codec: Codec) -> int:
    """The scale code of an all-zero block: 1.0 if scales cannot underflow, otherwise the smallest code."""
    return encode(codec, Fraction(1)) if isinstance(codec, Minifloat) and codec.scale_min > 0 else 0
