"""The numbers of codecs: which numbers of one are numbers of another, times a power of two."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..codecs import Codec, Integer, Minifloat, PowerOfTwo
from ..fp32 import MANTISSA, f32, f32_bits


class Extent(NamedTuple):
    """The positive and negative ends of a codec's numbers, and the grid near zero.

    top, bottom: (the exponent, the mantissa as bits of FP32) of the largest positive number, and of the negative one of largest
        magnitude.
    last: the exponent of the smallest difference of numbers.
    least: the exponent of the smallest scale; of codecs of 16 and more bits only normal numbers count.
    bits: of a significand.
    """

    top: tuple[int, int]
    bottom: tuple[int, int]
    last: int
    least: int
    bits: int


@lru_cache(maxsize=256)
def extent(codec: Codec, zero: int = 0) -> Extent | None:
    """The extent of codes less a zero-point; None for tables."""
    if isinstance(codec, PowerOfTwo):
        return Extent((127, 0), _NONE, -codec.bias, -codec.bias, 1)
    if isinstance(codec, Integer):
        ends = (math.ldexp(end - zero, -codec.fraction_bits) for end in (codec.high, codec.low))
        top, bottom = (_NONE if end == 0 else _end(abs(end)) for end in ends)
        return Extent(top, bottom, -codec.fraction_bits, -codec.fraction_bits, codec.bits)
    if not isinstance(codec, Minifloat):
        return None
    last = 1 - codec.bias - codec.mantissa_bits
    top = _end(codec.max)
    least = last if codec.bits <= 8 else max(1 - codec.bias, -126)
    return Extent(top, top if codec.signed else _NONE, last, least, codec.mantissa_bits + 1)


#: No number has this exponent: nothing fits below it.
_NONE = (-1024, 0)


def _end(value: float) -> tuple[int, int]:
    return math.frexp(value)[1] - 1, f32_bits(value) & MANTISSA


@lru_cache(maxsize=256)
def numbers_of(codec: Codec) -> frozenset[float]:
    """The finite numbers of a codec of elements, without 0."""
    values = (codec.value(code) for code in range(1 << codec.bits))
    return frozenset(value for value in values if value != 0 and math.isfinite(value))


@lru_cache(maxsize=256)
def specials_of(codec: Codec) -> frozenset[str]:
    """Which of 0, -0, Inf, -Inf and NaN the codes of a codec of elements stand for."""
    names: set[str] = set()
    for code in range(1 << codec.bits):
        value = codec.value(code)
        if value == 0:
            names.add("-0" if math.copysign(1, value) < 0 else "0")
        elif math.isinf(value):
            names.add("Inf" if value > 0 else "-Inf")
        elif math.isnan(value):
            names.add("NaN")
    return frozenset(names)


@lru_cache(maxsize=1024)
def shifts(source: Codec, target: Codec) -> tuple[int, ...]:
    """The exponents k, ascending, for which 2^k times every number of `source` is one of `target`: consecutive integers.

    0, -0, Inf and NaN do not count.
    """
    numbers, others = numbers_of(source), numbers_of(target)
    first = min(numbers, key=abs)
    wanted = math.frexp(first)
    exponents = {math.frexp(other)[1] - wanted[1] for other in others if math.frexp(other)[0] == wanted[0]}
    return tuple(k for k in sorted(exponents) if all(math.ldexp(number, k) in others for number in numbers))


@lru_cache(maxsize=256)
def half_gap(codec: Codec) -> float:
    """Half the widest gap between neighbouring numbers of a codec of elements"""
    numbers = sorted(numbers_of(codec) | {0.0})
    return max(high - low for low, high in pairwise(numbers)) / 2


def has(codec: Codec, value: float) -> bool:
    """Whether a codec of scales has a positive finite number; of wide codecs and FP32, only normal numbers count."""
    if codec.bits <= 8:
        return value in numbers_of(codec)
    if not isinstance(codec, Minifloat) or not max(2.0 ** (1 - codec.bias), 2.0**-126) <= value <= codec.max:
        return False
    return f32_bits(value) & ((1 << (23 - codec.mantissa_bits)) - 1) == 0 and f32(value) == value


@lru_cache(maxsize=1024)
def fitting(source: Codec, target: Codec) -> int:
    """How many numbers of `source` are numbers of `target`, times the one power of two under which most are."""
    exponents: defaultdict[float, list[int]] = defaultdict(list)
    for number in numbers_of(target):
        significand, exponent = math.frexp(number)
        exponents[significand].append(exponent)
    parts = map(math.frexp, numbers_of(source))
    counts = Counter(other - exponent for significand, exponent in parts for other in exponents[significand])
    return max(counts.values(), default=0)


class Moves(NamedTuple):
    """How tensors of one scale and element codec become those of others, by powers of two moved between scales and codes.

    scales: for each scale code, the new one. rows: for each scale code, its row of `codes`. codes: in each row, for each code,
    the new one.
    """

    scales: tuple[int, ...]
    rows: tuple[int, ...]
    codes: tuple[int, ...]


@lru_cache(maxsize=1024)
def moves(element: Codec, scale: Codec, new_element: Codec, new_scale: Codec, powers_of_two: bool) -> Moves | None:
    """The smallest powers of two that move, under each scale; None if a scale has none, and for scales of 16 and more bits.

    powers_of_two: whether new scales must be such.
    """
    if scale.bits > 8 or new_scale.nan_code is None:
        return None
    codes = {bits: code for code, bits in reversed(list(enumerate(new_element.table)))}
    values = [element.value(code) for code in range(1 << element.bits)]
    exponents = sorted(shifts(element, new_element), key=abs)
    rows: dict[tuple[int, ...], int] = {}
    scales: list[int] = []
    row_of: list[int] = []

    def row(factor: float) -> tuple[int, ...] | None:
        """The codes of all values times `factor`."""
        products = [value * factor for value in values]
        found = [codes.get(f32_bits(math.nan if math.isnan(one) else one)) for one in products]
        return None if None in found else tuple(code for code in found if code is not None)

    def moved(value: float) -> Iterator[tuple[int, float]]:
        """(the code of a new scale, what codes are multiplied by)"""
        if math.isnan(value):
            yield from ((new_scale.need_nan(), 2.0**k) for k in exponents)
        elif value == 0:
            yield new_scale.zero_scale, value
        elif math.isfinite(value):
            for k in exponents:
                one = math.ldexp(abs(value), -k)
                if has(new_scale, one) and (math.frexp(one)[0] == 0.5 or not powers_of_two):
                    yield _code(new_scale, one), math.copysign(2.0**k, value)

    for stored in range(1 << scale.bits):
        found = next(((code, one) for code, factor in moved(scale.value(stored)) if (one := row(factor)) is not None), None)
        if found is None:
            return None
        scales.append(found[0])
        row_of.append(rows.setdefault(found[1], len(rows)))
    return Moves(tuple(scales), tuple(row_of), tuple(code for one in rows for code in one))


def _code(codec: Codec, value: float) -> int:
    """The code of a positive number that `codec` has; a normal one of more than 8 bits."""
    if codec.bits <= 8:
        return next(code for code in range(1 << codec.bits) if codec.value(code) == value)
    assert isinstance(codec, Minifloat)
    significand, exponent = math.frexp(value)
    return (exponent - 1 + codec.bias << codec.mantissa_bits) + int(math.ldexp(2 * significand - 1, codec.mantissa_bits))
