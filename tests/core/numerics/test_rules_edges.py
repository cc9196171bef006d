"""Scale rules where a step of docs/spec/numerics.md, section 5.2, decides alone, against the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from recipes import declared

from breccia import DelayedScaling, INT4Scaling, NVFP4BlockScaling
from breccia.arrays.ops import NUMPY
from breccia.codecs import BF16, E2M1, E4M3, E8M0, F16, F32, INT4, NF4, UINT4, Codec, Integer, Minifloat
from breccia.formats import TENSOR, Format, Level
from breccia.kernels import numpy as kernels
from breccia.kernels import reference
from breccia.options import CastOptions
from breccia.rules import DIVIDE, LINEAR, RCEIL, Inverse, Rule, flushed, normal, takes_signs
from breccia.testing import oracle
from breccia.testing.compare import expect_written
from breccia.testing.places import Place


@pytest.mark.parametrize("margin", [-3, 0, 3, 9])
@pytest.mark.parametrize("exponent", [-125, -120, -119, -118, -110, 100, 126])
def test_te_clamps_its_multiplier_before_the_margin_and_after_it(margin: int, exponent: int) -> None:
    """448 / amax reaches 2^126 at amax 448 * 2^-126, which is 1.75 * 2^-118."""
    recipe = DelayedScaling(margin=margin, scale_rule="te")
    x = np.array([[1.25, -0.7, 0.3, 0.0]], np.float32) * np.float32(2.0**exponent)
    found, expected = reference.cast(x, recipe), oracle.cast(x, recipe)
    assert found.scale.view(np.uint32) == expected.scale
    np.testing.assert_array_equal(found.data, expected.codes)


@pytest.mark.parametrize("cast", [reference.cast, kernels.cast], ids=["generic", "NumPy"])
def test_a_block_whose_scale_product_is_below_2_to_the_minus_126_has_zero_codes(cast: Any) -> None:
    """Section 5.3: e = s * g below 2^-126 is not usable.

    An amax of 6 * 2^-126 asks for e = 2^-126, and under g = 1.54 * 2^-126 for s = 0.649, which E4M3 rounds to 0.625.
    """
    smooth = np.resize(np.array([1.0, -0.6, 0.3, 0.9], np.float32), 16)
    x = np.stack([smooth * np.float32(n * 2.0**-126) for n in (1, 4, 6, 6.25, 7, 12, 64)])
    for g in (1.0, 1.3, 1.54, 1.7, 2.9):
        global_scale = float(np.float32(g * 2.0**-126))
        found, expected = (
            cast(x, NVFP4BlockScaling(), CastOptions(scale=global_scale)),
            oracle.cast(x, NVFP4BlockScaling(), scale=global_scale),
        )
        scales, pairs = np.asarray(found.scale).view(np.uint8), np.asarray(found.data)
        np.testing.assert_array_equal(scales, expected.scale)
        np.testing.assert_array_equal(np.stack([pairs & 15, pairs >> 4], -1).reshape(x.shape), expected.codes)
        multiplied = [float(oracle.decode(E4M3, int(code))) * global_scale for code in scales[:, 0]]
        assert expected.codes.any(1).tolist() == [e >= 2.0**-126 for e in multiplied]
        if g == 1.54:
            assert 0 < multiplied[2] < 2.0**-126


def test_only_numbers_below_the_smallest_normal_number_are_flushed() -> None:
    words = np.array([0, 1, 0x7FFFFE, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000], np.uint32)
    x = np.concatenate([words, words | np.uint32(1 << 31)]).view(np.float32)
    assert flushed(NUMPY, x).tolist() == [float(oracle.flush(Fraction(float(v)))) for v in x]


def test_a_usable_scale_and_its_reciprocal_are_normal() -> None:
    ends = [2.0**-126, 1.0, 2.0**126]
    beyond = [0.0, -1.0, 2.0**-127, 2.0**126 * (1 + 2.0**-23), 2.0**127, np.inf, -np.inf, np.nan]
    assert normal(np.array(ends + beyond, np.float32)).tolist() == [True] * 3 + [False] * 8


@pytest.mark.parametrize("cast", [reference.cast, kernels.cast], ids=["generic", "NumPy"])
def test_a_block_whose_scale_underflows_has_zero_codes_under_rule_divide(cast: Any) -> None:
    """Section 5.3 under rule `divide`: x / 0 is not what its elements become."""

    @dataclass(frozen=True)
    class Divided(NVFP4BlockScaling):
        rules = (LINEAR, DIVIDE)  # type: ignore[assignment]

    smooth = np.resize(np.array([1.0, -0.6, 0.3, 0.9], np.float32), 16)
    x = np.stack([smooth * np.float32(2.0**n) for n in (0, -10, -17, -18, -19, -20, -40)])
    expected = oracle.cast(x, Divided())
    expect_written(Place("numpy"), cast(x, Divided()), expected)
    assert expected.scale[-1, 0] == 0 and not expected.codes[-1].any() and x[-1].all()


@pytest.mark.parametrize("cast", [reference.cast, kernels.cast], ids=["generic", "NumPy"])
def test_a_block_whose_scale_product_is_above_2_to_the_126_has_zero_codes(cast: Any) -> None:
    """The other end of section 5.3. NF4's largest value is 1, so that e = s * g is about as large as the block's amax."""

    @dataclass(frozen=True)
    class Table(NVFP4BlockScaling):
        format = Format(NF4, (Level(F32, TENSOR), Level(E4M3, (1, 16))))  # type: ignore[assignment]

    smooth = np.resize(np.array([1.0, -0.6, 0.3, 0.9], np.float32), 16)
    used = []
    for n in (2.0**124, 2.0**125, 2.0**126, 1.25 * 2.0**126, 1.9 * 2.0**126, 2.0**127, 1.5 * 2.0**127):
        x = np.stack([smooth * np.float32(n), smooth * np.float32(n / 8)])
        expected = oracle.cast(x, Table())
        expect_written(Place("numpy"), cast(x, Table()), expected)
        e = Fraction(oracle.decode(E4M3, int(expected.scale[0, 0]))) * Fraction(oracle.decode(F32, expected.global_scale or 0))
        used.append(bool((expected.codes[0] != NF4.values.index(0.0)).any()))
        assert used[-1] == (oracle.fl_finite(e) <= 2**126)
    assert set(used) == {True, False}


def test_te_multiplies_a_block_of_equal_numbers_by_one_whatever_the_margin() -> None:
    """Section 5.3: a is 0 there. What is left of them beside a rounded bias is a number, not zero."""

    @dataclass(frozen=True)
    class Odd(INT4Scaling):
        rules = (Inverse("te", margin=3),)  # type: ignore[assignment]

    recipe = Odd(group_size=16, signed=False, symmetric=False, scale_dtype="bf16", offset="bias")
    x = np.full((3, 16), 1001.9, np.float32) * np.array([[1], [4], [0]], np.float32)
    expected = oracle.cast(x, recipe)
    expect_written(Place("numpy"), reference.cast(x, recipe), expected)
    assert expected.codes.max(1).tolist() == [2, 8, 0]  # 1001.9 - 1000, and four times that


PAIR = Integer("PAIR", 2, None, "this test", False)


@pytest.mark.parametrize(("codec", "rule"), [(F32, LINEAR), (E8M0, RCEIL)], ids=["linear", "rceil"])
def test_a_range_from_zero_up_is_as_wide_as_its_largest_element(codec: Codec, rule: Rule) -> None:
    """Section 5.1, to the last bit, of numbers so small that any other lower end than 0 would show."""

    @dataclass(frozen=True)
    class Pairs(INT4Scaling):
        rules = (rule,)  # type: ignore[assignment]
        format = Format(PAIR, (Level(codec, (1, 4)),), "zero_point")  # type: ignore[assignment]

    recipe = Pairs(group_size=4)
    largest = [1.0, 1.5, 1.5 + 2.0**-23, 2.0, 3.0, 3.0 + 2.0**-22, 3.0 + 3 * 2.0**-22, 4.0, 6.0]
    x = np.array([[n, n / 2, 0.0, n / 3] for n in largest], np.float32) * np.float32(2.0**-126)
    x[x < 2.0**-126] = 0
    expect_written(Place("numpy"), reference.cast(x, recipe), oracle.cast(x, recipe))


@pytest.mark.parametrize("cast", [reference.cast, kernels.cast], ids=["generic", "NumPy"])
def test_a_ratio_beyond_fp32_saturates_before_the_global_scale_divides_it(cast: Any) -> None:
    """sat(a / C) of the specification, section 5.2: only codecs whose largest number is below 1 get there."""
    codec = Minifloat("drawn", 8, None, "this test", 4, 3, 20, 0.0546875, 127, None)

    recipe = declared(codec, Level(F32, TENSOR), Level(E4M3, (1, 8)))
    x = np.full((1, 8), 3.3e38, np.float32)
    st = cast(x, recipe)
    # FLT_MAX / g with g = 3.3e38 / (0.0546875 * 448) is 25.27; the nearest E4M3 numbers are 24 and 26.
    assert st.scale.tolist() == [[0x5D]] and oracle.cast(x, recipe).scale.tolist() == [[0x5D]]


@pytest.mark.parametrize("cast", [reference.cast, kernels.cast], ids=["generic", "NumPy"])
@pytest.mark.parametrize("sense", ["amax", "divisor"])
def test_a_global_scale_is_stored_in_the_sense_that_the_recipe_names(sense: str, cast: Any) -> None:
    """Section 5.2: the amax itself, at least qmax * 2^-126, or qmax / amax, at most 2^126."""
    recipe = NVFP4BlockScaling(global_sense=sense)
    for factor in (1.0, 2.0**-120, 2.0**100):
        x = np.linspace(-2, 3, 64, dtype=np.float32).reshape(2, 32) * np.float32(factor)
        expect_written(Place("numpy"), cast(x, recipe), oracle.cast(x, recipe))


@pytest.mark.parametrize("cast", [reference.cast, kernels.cast], ids=["generic", "NumPy"])
def test_the_zero_point_of_a_block_with_inf_or_nan_is_0(cast: Any) -> None:
    recipe = INT4Scaling(symmetric=False, signed=False, group_size=8)
    x = np.linspace(1, 3, 32, dtype=np.float32).reshape(1, 32)
    x[0, 3], x[0, 12] = np.inf, np.nan
    st = cast(x, recipe)
    expect_written(Place("numpy"), st, oracle.cast(x, recipe))
    assert st.zero_point[0, :2].tolist() == [0, 0]


def test_negative_scales_need_a_float_of_more_than_8_bits_over_signed_integers() -> None:
    assert takes_signs(F16, INT4) and takes_signs(BF16, INT4)
    assert not takes_signs(E4M3, INT4) and not takes_signs(F16, UINT4) and not takes_signs(F16, E2M1)
