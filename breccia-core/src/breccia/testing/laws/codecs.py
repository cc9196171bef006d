"""Laws of codecs: their codes and values equal the oracle's on every framework."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import numpy as np

from ...codecs import Codec, Lookup, Minifloat
from ...fp32 import F32_INF, MAGNITUDE, NORMAL, f32, f32_bits
from .. import oracle
from ..compare import expect, expect_numbers, expect_words
from ..places import Place
from .law import Law, Subject, each

#: The largest number of landmarks to test.
_MANY = 2000


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the codecs of a plug-in."""
    for codec in subject.of("codecs"):
        yield from each("codecs", codec.name, (its_declaration_is_complete,), codec)
        checks = [every_code_decodes_to_its_value, numbers_are_encoded_as_the_nearest_code]
        if (
            isinstance(codec, Minifloat | Lookup) and codec.bits <= 8
        ):  # integer codecs round after the zero point is added, which the laws of recipes test
            checks.append(stochastic_rounding_matches_the_oracle)
        for place in subject.places:
            yield from each("codecs", codec.name, checks, codec, place=place)


def its_declaration_is_complete(codec: Codec) -> None:
    expect(bool(codec.source and codec.source.strip()), f"codec {codec.name!r} has no source=; say where the format is defined")
    expect(1 <= codec.bits <= 32, f"codec {codec.name!r} has {codec.bits} bits")
    expect(math.isfinite(codec.max) and codec.max > 0, f"codec {codec.name!r}: max is {codec.max}")
    if codec.nan_code is not None:
        value = oracle.decode(codec, codec.nan_code)
        expect(math.isnan(value), f"codec {codec.name!r}: nan_code {codec.nan_code:#x} decodes to {value}")
    if codec.bits <= 16:
        largest = max(oracle.ladder(codec)[0])
        expect(
            largest == Fraction(codec.max),
            f"codec {codec.name!r}: max is {codec.max}, but its largest value is {float(largest)}",
        )


def every_code_decodes_to_its_value(codec: Codec, place: Place) -> None:
    ops = place.ops
    if codec.bits > 16:
        codes = np.concatenate([_f32_words(), np.arange(0, F32_INF, 9_999_991).astype(np.uint32)])
        expected = codes.view(np.float32)
    else:
        codes = np.arange(1 << codec.bits, dtype=np.uint32)
        expected = np.array([oracle.decode(codec, int(c)) for c in codes], np.float32)
    stored = ops.store(place.array(codes.view(np.int32)), ops.storage(codec))
    expect_numbers(f"{codec.name} codes", place, codec.read(ops, stored), expected)
    expect_words(f"{codec.name} codes, loaded", place.words(ops.load(stored)), codes)


def numbers_are_encoded_as_the_nearest_code(codec: Codec, place: Place) -> None:
    y = _landmarks(codec)
    expected = [_nearest(codec, float(v)) for v in y]
    with place.ops.errstate():
        codes = codec.encode(place.ops, place.array(y))
    expect_words(f"{codec.name} codes of {len(y)} numbers", place.words(codes), np.array(expected, np.uint32))


def stochastic_rounding_matches_the_oracle(codec: Codec, place: Place) -> None:
    y = _landmarks(codec)
    y = y[np.isfinite(y)]
    words = np.array([oracle.random_word(5, i) for i in range(len(y))], np.uint32)
    expected = [_nearest(codec, float(v), int(w)) for v, w in zip(y, words, strict=True)]
    with place.ops.errstate():
        codes = codec.encode(place.ops, place.array(y), place.array(words.view(np.int32)))
    expect_words(f"{codec.name} stochastic codes of {len(y)} numbers", place.words(codes), np.array(expected, np.uint32))


def _nearest(codec: Codec, value: float, word: int | None = None) -> int:
    """The code of an FP32 number, NaN and Inf included."""
    if math.isfinite(value):
        return oracle.encode(codec, Fraction(value), math.copysign(1.0, value) < 0, word)
    nan, inf = codec.nan_code, getattr(codec, "inf", None)
    unsigned = not getattr(codec, "signed", True)
    if math.isnan(value) or inf is None or (value < 0 and unsigned):
        assert nan is not None, codec
        return nan
    return inf | (1 << (codec.bits - 1) if value < 0 else 0)


def _landmarks(codec: Codec) -> np.ndarray:
    """FP32 numbers, none subnormal: values of the codec, midpoints between them, neighbours of both, and far larger numbers."""
    if codec.bits > 16:
        numbers = _f32_words().view(np.float32)
    else:
        values = oracle.ladder(codec)[0]
        step = max(1, 3 * len(values) // _MANY)
        ladder = [float(v) for v in values[::step]]
        middles = [float((a + b) / 2) for a, b in pairwise(values)][::step]
        near = np.array([f32(v) for v in (*ladder, *middles)], np.float32)
        beyond = np.array([1.5, 2.0, 2.0**20, 1e30], np.float32)
        with np.errstate(over="ignore"):
            beyond = beyond * np.float32(min(codec.max, 1e30))
        beside = [np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf)]
        numbers = np.concatenate([near, *beside, beyond, -beyond, -near, _f32_words().view(np.float32)])
    words = numbers.view(np.uint32) & MAGNITUDE
    numbers = numbers[(words == 0) | (words >= NORMAL)]
    words = numbers.view(np.uint32) & MAGNITUDE
    return numbers if codec.nan_code is not None else numbers[words < F32_INF]


def _f32_words() -> np.ndarray:
    """FP32 bit patterns: zeros, the smallest and largest normal numbers, some between; quiet and signalling NaN, Inf."""
    ends = [f32_bits(v) for v in (0.0, 2.0**-126, 1.0, 3.0e38, 0.1, 2.0**127)]
    words = np.array([*ends, F32_INF - 1, F32_INF, 0x7FC00000, 0x7F800001], np.uint32)
    return np.concatenate([words, words | np.uint32(0x80000000)])
