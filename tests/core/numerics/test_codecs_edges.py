"""Declared properties of the codecs compared with their publications, and edge cases of encoding."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from breccia.arrays.ops import NUMPY
from breccia.codecs import (
    BF16,
    CODECS,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    F16,
    F32,
    INTEGERS,
    NF4,
    UE4M3,
    UE5M3,
    Codec,
    Integer,
    Lookup,
    Minifloat,
)
from breccia.errors import RecipeError
from breccia.testing import oracle

#: Exponent bits, mantissa bits, bias: docs/spec/numerics.md, section 2, after OFP8, OCP MX, IEEE 754, PTX, CUDA, CDNA 3.
PUBLISHED = {
    E4M3: (4, 3, 7), E5M2: (5, 2, 15), E2M1: (2, 1, 1), E2M3: (2, 3, 1), E3M2: (3, 2, 3), UE4M3: (4, 3, 7),
    UE5M3: (5, 3, 15), E4M3FNUZ: (4, 3, 8), E5M2FNUZ: (5, 2, 16), F16: (5, 10, 15), BF16: (8, 7, 127), F32: (8, 23, 127),
}  # fmt: skip
#: The smallest scale of a nonzero block: docs/spec/numerics.md, section 5.2.
SMALLEST_SCALES = {F32: 2.0**-126, BF16: 2.0**-126, F16: 2.0**-24, E4M3: 0.0}


@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, Minifloat)], ids=lambda c: c.name)
def test_a_minifloat_has_the_published_bits_and_bias(codec: Minifloat) -> None:
    assert (codec.exponent_bits, codec.mantissa_bits, codec.bias) == PUBLISHED[codec]
    unused = codec == UE4M3  # the top bit of a byte is unused
    assert codec.signed + codec.exponent_bits + codec.mantissa_bits + unused == codec.bits
    assert codec.signed == (codec not in (UE4M3, UE5M3))


def test_the_largest_value_of_a_minifloat_has_the_largest_finite_code() -> None:
    largest = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max], np.float32)
    for codec in (c for c in PUBLISHED if c is not F32):
        sign = 1 << (codec.bits - 1)
        codes = range(sign if codec.signed else 1 << codec.bits)
        top = next(code for code in reversed(codes) if math.isfinite(oracle.decode(codec, code)))
        assert codec.max == oracle.decode(codec, top), codec.name
        assert codec.encode(NUMPY, largest).tolist() == [top, sign | top if codec.signed else 0], codec.name


def test_the_smallest_scales_are_those_of_the_spec() -> None:
    assert {codec: codec.scale_min for codec in SMALLEST_SCALES} == SMALLEST_SCALES


def test_stochastic_rounding_keeps_zero() -> None:
    """BF16 has the exponent range of FP32, so numbers below 2^-126, which count as zero, would show if they were rounded."""
    x = np.array([0.0, -0.0, 2.0**-127, -(2.0**-149)], np.float32)
    for word in (0, 0x7FFFFFFF, -1, -(1 << 31)):
        found = BF16.encode(NUMPY, x, np.full(4, word, np.int32)).tolist()
        zeros = [oracle.flush(Fraction(float(v))) for v in x]
        assert found == [oracle.encode(BF16, q, bool(s), word % 2**32) for q, s in zip(zeros, np.signbit(x), strict=True)]
        assert found == [0, 0x8000, 0, 0x8000]


@pytest.mark.parametrize("bias", [127, 128, 140])
def test_zero_is_code_zero_in_codecs_with_values_below_2_to_the_minus_126(bias: int) -> None:
    """Numbers below 2^-126 count as zero; larger ones have the codes of the oracle."""
    deep = Minifloat("deep", 8, None, "this test", 7, 1, bias, 2.0 ** (127 - bias), nan=0xFF, signed=False)
    x = np.array([0.0, -0.0, 2.0**-127, 2.0**-126, 1.5 * 2.0**-126, 2.0**-120, 2.0**-30], np.float32)
    zeros = [oracle.flush(Fraction(float(v))) for v in x]
    for word in (None, 0, 0x7FFFFFFF, -1):
        words = None if word is None else np.full(len(x), word, np.int32)
        found = deep.encode(NUMPY, x, words).tolist()
        assert found == [oracle.encode(deep, q, False, None if word is None else word % 2**32) for q in zeros]
        assert found[:3] == [0, 0, 0] and found[3] > 0


def test_a_codec_reports_what_it_does_not_declare() -> None:
    codec = Codec("bare", 8, None, "this test")
    for call, said in (
        (lambda: codec.max, "does not declare its largest value"),
        (lambda: codec.value(0), "does not declare its values"),
        (lambda: codec.encode(NUMPY, np.zeros(1, np.float32)), "does not say how to encode"),
        (lambda: codec.encode_exponent(NUMPY, np.zeros(1, np.int32)), "cannot store the power-of-two scales of this rule"),
        (lambda: codec.need_nan(), "cannot represent NaN, which the numerics contract requires"),
    ):
        with pytest.raises(RecipeError, match=f"bare.* {said}"):
            call()


def test_the_largest_number_of_a_table_encodes_without_a_division_by_zero() -> None:
    """There is no next value to compute a distance to."""
    x = np.full(3, NF4.max, np.float32)
    words = np.array([0, -1, 0x7FFFFFFF], np.int32)
    with np.errstate(all="raise"):
        codes = NF4.encode(NUMPY, x, words)
    assert codes.tolist() == [NF4.values.index(NF4.max)] * 3


@pytest.mark.parametrize("codec", [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E2M1, E2M3, E3M2], ids=lambda c: c.name)
def test_the_lowest_used_random_bit_decides(codec: Minifloat) -> None:
    """Section 5.5: rounds up if floor(f * 2^30) + (word >> 2) >= 2^30; the words here are around that threshold."""
    x, words = [], []
    for low, high, f in ((1.0, 1 + 2.0**-codec.mantissa_bits, n * 2.0**-20) for n in (1, 3, 2**19 - 1, 2**19 + 1, 2**20 - 1)):
        value = np.float32(low + (high - low) * f)
        f = (Fraction(float(value)) - Fraction(low)) / (Fraction(high) - Fraction(low))
        reaching = 2**30 - math.floor(f * 2**30)
        for word in range(reaching - 3, reaching + 2):
            x.append(value)
            words.append(min(word, 2**30 - 1) << 2)
        for bits in (18, 19, 20, 21, 22):  # the same threshold with fewer random bits
            x += [value] * 3
            step = 1 << (32 - bits)
            words += [((reaching << 2) // step * step + n * step) % 2**32 for n in (-1, 0, 1)]
    codes = codec.encode(NUMPY, np.array(x, np.float32), np.array(words, np.uint32).view(np.int32))
    expected = [oracle.encode(codec, Fraction(float(v)), False, w) for v, w in zip(x, words, strict=True)]
    assert codes.tolist() == expected and len(set(expected)) == 2


@pytest.mark.parametrize("codec", [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E2M1, E2M3, E3M2], ids=lambda c: c.name)
def test_the_lowest_random_bit_decides_far_below_the_smallest_number(codec: Minifloat) -> None:
    """Section 5.5 uses 30 bits of f; the 24-bit numbers here have bits at the last of these positions and below it."""
    smallest = 2.0 ** (1 - codec.bias - codec.mantissa_bits)
    x, words = [], []
    for exponent in range(-30, 0):
        for m in (2**23, 2**23 + 1, 2**23 + 2, 2**24 - 3, 2**24 - 1):
            f = Fraction(m, 2**24) * Fraction(2) ** exponent
            reaching = 2**30 - math.floor(f * 2**30)
            for word in (reaching - 2, reaching - 1, reaching, reaching + 1):
                x.append(smallest * float(f))
                words.append(min(word, 2**30 - 1) << 2)
    codes = codec.encode(NUMPY, np.array(x, np.float32), np.array(words, np.uint32).view(np.int32))
    expected = [oracle.encode(codec, Fraction(v), False, w) for v, w in zip(x, words, strict=True)]
    assert codes.tolist() == expected and set(expected) == {0, 1}


BIT = Lookup("bit", 1, None, "this test", (0.0, 1.0))


def test_a_one_bit_table_has_two_values() -> None:
    x = np.array([-1.0, 0.0, 0.25, 0.5, np.nextafter(np.float32(0.5), np.float32(1)), 1.0, 3.0], np.float32)
    assert BIT.encode(NUMPY, x).tolist() == [oracle.encode(BIT, Fraction(float(v))) for v in x] == [0, 0, 0, 0, 1, 1, 1]
    assert BIT.decode(NUMPY, np.array([0, 1], np.int32)).tolist() == [0.0, 1.0]


def test_the_lowest_used_random_bit_decides_in_a_table() -> None:
    """Between 0 and 1 the distance f is the number itself, so its last bit matches the lowest used bit of the word."""
    x, words = [], []
    for whole in (1, 2, 3, 2**10 + 1, 2**23 + 1, 2**24 - 1, 2**29, 2**30 - 64):
        for word in (2**30 - whole - 1, 2**30 - whole, 2**30 - whole + 1):
            for unread in (0, 3):
                x.append(whole * 2.0**-30)
                words.append((min(word, 2**30 - 1) << 2) + unread)
    codes = BIT.encode(NUMPY, np.array(x, np.float32), np.array(words, np.uint32).view(np.int32))
    expected = [oracle.encode(BIT, Fraction(v), False, w) for v, w in zip(x, words, strict=True)]
    assert codes.tolist() == expected and set(expected) == {0, 1}


def test_a_nine_bit_table_is_refused() -> None:
    with pytest.raises(RecipeError, match="codec 'wide': a table has 1 to 8 bits; got bits=9. Declare a narrower codec"):
        Lookup("wide", 9, None, "this test", tuple(map(float, range(512))))


@pytest.mark.parametrize("codec", INTEGERS.values(), ids=str)
def test_the_leading_bit_of_the_largest_integer_is_that_of_its_mantissa(codec: Integer) -> None:
    assert 1 << codec.mantissa_bits <= codec.high < 2 << codec.mantissa_bits
