"""What codecs declare beside their bytes, against what was published."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from breccia.codecs import BF16, CODECS, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, NF4, Codec, Minifloat
from breccia.errors import RecipeError
from breccia.ops import NUMPY
from breccia.testing import oracle

#: Exponent bits, mantissa bits, bias: docs/spec/numerics.md, section 2, after OFP8, OCP MX and IEEE 754.
PUBLISHED = {
    E4M3: (4, 3, 7),
    E5M2: (5, 2, 15),
    E2M1: (2, 1, 1),
    E2M3: (2, 3, 1),
    E3M2: (3, 2, 3),
    F16: (5, 10, 15),
    BF16: (8, 7, 127),
    F32: (8, 23, 127),
}


@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, Minifloat)], ids=lambda c: c.name)
def test_a_minifloat_is_a_sign_an_exponent_and_a_mantissa_as_published(codec: Minifloat) -> None:
    assert (codec.exponent_bits, codec.mantissa_bits, codec.bias) == PUBLISHED[codec]
    assert 1 + codec.exponent_bits + codec.mantissa_bits == codec.bits


def test_a_codec_says_what_it_does_not_declare() -> None:
    codec = Codec("bare", 8, None, "this test")
    for call, said in (
        (lambda: codec.max, "does not declare its largest value"),
        (lambda: codec.value(0), "does not declare its values"),
        (lambda: codec.encode(NUMPY, np.zeros(1, np.float32)), "does not say how to encode"),
        (lambda: codec.encode_exponent(NUMPY, np.zeros(1, np.int32)), "cannot store the power-of-two scales of this rule"),
        (lambda: codec.need_nan(), "cannot say NaN, which the numerics contract asks of them"),
    ):
        with pytest.raises(RecipeError, match=f"bare.* {said}"):
            call()


def test_the_largest_number_of_a_table_is_written_by_any_word_without_a_division_by_zero() -> None:
    """Beyond it there is no neighbour that a distance could be measured to."""
    x = np.full(3, NF4.max, np.float32)
    words = np.array([0, -1, 0x7FFFFFFF], np.int32)
    with np.errstate(all="raise"):
        codes = NF4.encode(NUMPY, x, words)
    assert codes.tolist() == [NF4.values.index(NF4.max)] * 3


@pytest.mark.parametrize("codec", [E4M3, E5M2, E2M1, E2M3, E3M2], ids=lambda c: c.name)
def test_the_last_random_bit_that_counts_decides(codec: Minifloat) -> None:
    """Section 5.5: up where floor(f * 2^30) + (word >> 2) reaches 2^30; words about the one that just does."""
    x, words = [], []
    for low, high, f in ((1.0, 1 + 2.0**-codec.mantissa_bits, n * 2.0**-20) for n in (1, 3, 2**19 - 1, 2**19 + 1, 2**20 - 1)):
        value = np.float32(low + (high - low) * f)
        f = (Fraction(float(value)) - Fraction(low)) / (Fraction(high) - Fraction(low))
        reaching = 2**30 - math.floor(f * 2**30)
        for word in range(reaching - 3, reaching + 2):
            x.append(value)
            words.append(min(word, 2**30 - 1) << 2)
        for bits in (18, 19, 20, 21, 22):  # the same of fewer bits
            x += [value] * 3
            step = 1 << (32 - bits)
            words += [((reaching << 2) // step * step + n * step) % 2**32 for n in (-1, 0, 1)]
    codes = codec.encode(NUMPY, np.array(x, np.float32), np.array(words, np.uint32).view(np.int32))
    expected = [oracle.encode(codec, Fraction(float(v)), False, w) for v, w in zip(x, words, strict=True)]
    assert codes.tolist() == expected and len(set(expected)) == 2
