"""Elements of 1 to 8 bits and unsigned scales match the oracle on every framework."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from marks import jax_is_long
from recipes import declared

import breccia
from breccia import ScaledTensor, ScalingRecipe
from breccia.codecs import BF16, E2M1, E4M3, E5M2, E8M0, F16, F32, INT4, UE4M3, UE5M3, Codec, Integer, Minifloat
from breccia.formats import TENSOR, Level
from breccia.kernels import reference
from breccia.kernels.numpy.codes import code_writer
from breccia.rules import LINEAR, RCEIL, Rule
from breccia.tensors.grids import packing
from breccia.testing import oracle, strategies, vectors
from breccia.testing.compare import expect_numbers, expect_words, expect_written
from breccia.testing.places import Place

#: Every recipe and every framework but JAX in `make test`; their products in `make test-all`.
pytestmark = pytest.mark.covering(1, 2)

PLACES = [Place("numpy"), Place("torch"), Place("jax"), Place("mlx")]
WIDTHS = range(1, 9)
few = settings(max_examples=3, deadline=None)


#: Levels of scales, with the rule that writes them.
SCALES: list[tuple[tuple[Level, ...], Rule]] = [
    *(((Level(codec, (1, 16)),), LINEAR) for codec in (F32, F16, BF16, E4M3, UE4M3, UE5M3)),
    ((Level(F32, (2, 8)),), RCEIL),
    ((Level(E8M0, (1, 32)),), RCEIL),
    ((Level(F32, TENSOR),), LINEAR),
    ((Level(F32, TENSOR), Level(UE4M3, (1, 16))), LINEAR),
    ((Level(F32, TENSOR), Level(UE5M3, (1, 16))), LINEAR),
]


def here(place: Place) -> bool:
    return not place.absence


def check(
    place: Place, x: np.ndarray, recipe: ScalingRecipe, expected: oracle.Written, values: np.ndarray, by: Any = breccia
) -> None:
    """Cast and dequantize `x` at a place; also from its bytes, and of slices. by: the module whose ops are called."""
    st = by.cast(place.array(x), recipe)
    expect_written(place, st, expected)
    expect_words("bytes", place.words(st.data), vectors.packed(expected.codes, recipe.format.element))
    expect_numbers("dequantize", place, by.dequantize(st), values)

    again = breccia.from_buffer(st.data, st.scale, recipe, st.layout, None, st.global_scale, shape=st.shape)
    assert (again.shape, again.padding) == (st.shape, st.padding) == (x.shape, -x.shape[-1] % packing(recipe.format.element)[0])
    unit = math.lcm(recipe.format.scale.block[1] or 1, packing(recipe.format.element)[0])
    for what, part, kept in (
        ("its bytes", again, slice(None)),
        (f"the first {unit} columns", st[:, :unit], slice(unit)),
        (f"columns from {unit} on", st[:, unit:], slice(unit, None)),
    ):
        assert part.shape == x[:, kept].shape
        expect_numbers(f"dequantize of {what}", place, by.dequantize(part), values[:, kept])


@pytest.mark.long
@pytest.mark.parametrize("bits", WIDTHS)
@few
@given(data=some.data())
def test_elements_of_any_width_are_written_and_read_as_the_oracle_does(bits: int, data: Any) -> None:
    """Random codecs under any scales; rows that end within a block and within a group of bytes.

    On JAX by the generic algorithm, which its frontend would compile anew for each recipe.
    """
    element = data.draw(strategies.codecs(bits))
    levels, rule = data.draw(some.sampled_from(SCALES))
    recipe = declared(element, *levels, rule=rule)
    x = data.draw(strategies.arrays((2, 43), recipe=recipe))
    expected = oracle.cast(x, recipe)
    values = oracle.dequantize(expected, recipe)
    for place in filter(here, PLACES):
        check(place, x, recipe, expected, values, reference if place.framework == "jax" else breccia)


@pytest.mark.long
def test_jax_compiles_codes_of_five_bits() -> None:
    place = Place("jax")
    if place.absence:
        pytest.skip(place.absence)
    recipe = declared(Integer("five", 5, None, "this test", True), Level(UE5M3, (1, 16)))
    x = np.random.default_rng(1).standard_normal((2, 43)).astype(np.float32)
    expected = oracle.cast(x, recipe)
    check(place, x, recipe, expected, oracle.dequantize(expected, recipe))


@pytest.mark.parametrize("place", jax_is_long(PLACES), ids=str)
@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_of_any_width_fill_whole_bytes_the_first_in_the_lowest_bits(bits: int, place: Place) -> None:
    """The expected bytes are one long little-endian integer per row."""
    if place.absence:
        pytest.skip(place.absence)
    codec = Integer("wide", bits, None, "this test", False)
    for length in (0, 1, 9, 83):
        codes = np.random.default_rng([bits, length]).integers(0, 1 << bits, (3, length)).astype(np.int32)
        found = reference.pack(place.ops, place.array(codes), codec)
        expected = vectors.packed(codes, codec) if length else np.zeros((3, 0), np.uint8)
        expect_words(f"{length} codes of {bits} bits", place.words(found), expected)
        back = reference.unpack(place.ops, found, codec, length)
        expect_words(f"{length} codes of {bits} bits, back", place.words(back), codes.view(np.uint32))


@pytest.mark.parametrize("bits", [5, 7])
def test_groups_wider_than_int32_are_not_packed_in_one_word(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fault planted, groups of five and seven bytes in one word lose their upper codes."""
    monkeypatch.setattr("breccia.kernels.reference.packing._WORD", 8)
    with pytest.raises(AssertionError, match=f"9 codes of {bits} bits"):
        test_codes_of_any_width_fill_whole_bytes_the_first_in_the_lowest_bits(bits, Place("numpy"))


@given(codec=strategies.codecs())
def test_the_numpy_kernels_decline_unknown_widths_and_codecs(codec: Codec) -> None:
    unsigned = isinstance(codec, Minifloat) and not codec.signed
    if unsigned or (codec.bits not in (4, 6, 8) and not isinstance(codec, Integer)):
        assert code_writer(codec) is None


# -- scales and elements without a sign --------------------------------------------------------------------------------


@pytest.mark.parametrize("place", jax_is_long(PLACES), ids=str)
@pytest.mark.parametrize("codec", [UE4M3, UE5M3], ids=lambda c: c.name)
def test_unsigned_scales_decode_to_the_published_numbers(codec: Minifloat, place: Place) -> None:
    """By hand: code 0 is zero, then steps of the subnormal numbers; one; the largest; NaN, and bytes that no writer writes."""
    if place.absence:
        pytest.skip(place.absence)
    found = codec.read(place.ops, place.ops.store(place.array(np.arange(256, dtype=np.int32)), place.ops.storage(codec)))
    values = place.words(found).view(np.float32)
    nan, one, least = (0x7F, 0x38, 2.0**-9) if codec is UE4M3 else (0xFF, 0x78, 2.0**-17)
    assert values[[0, 1, 2, one, one + 4]].tolist() == [0.0, least, 2 * least, 1.0, 1.5]
    assert values[nan - 1] == codec.max and np.isnan(values[nan:]).all() and not np.isnan(values[:nan]).any()
    assert np.all(np.diff(values[:nan]) > 0)
    if codec is UE4M3:
        signed = E4M3.read(place.ops, place.ops.store(place.array(np.arange(127, dtype=np.int32)), place.ops.storage(E4M3)))
        assert place.words(signed).tolist() == place.words(found)[:127].tolist()


#: FP4 under UE5M3 scales, as a plug-in would declare it, and NVFP4 with block scales declared unsigned.
WIDE4 = declared(E2M1, Level(UE5M3, (1, 16)), name="wide4")
TWO4 = declared(E2M1, Level(F32, TENSOR), Level(UE4M3, (1, 16)), name="two4")


@pytest.mark.parametrize("place", jax_is_long(PLACES), ids=str)
@pytest.mark.parametrize("recipe", [WIDE4, TWO4], ids=lambda r: r.name)
def test_blocks_under_unsigned_scales_are_written_and_read_as_the_oracle_does(recipe: ScalingRecipe, place: Place) -> None:
    """Normal blocks, zeros, NaN, Inf, and amaxes far beyond the largest and far below the smallest scale."""
    if place.absence:
        pytest.skip(place.absence)
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((8, 40)) * np.exp2(rng.integers(-24, 24, (8, 1)))).astype(np.float32)
    x[0], x[1, 3], x[2, 20], x[3, 39] = 0, np.nan, np.inf, -np.inf
    x[4] *= np.float32(2.0**100)
    x[5, :16] *= np.float32(2.0**-60)
    expected = oracle.cast(x, recipe)
    check(place, x, recipe, expected, oracle.dequantize(expected, recipe))
    stochastic = oracle.cast(x, recipe, rounding="stochastic", seed=3)
    expect_written(place, breccia.cast(place.array(x), recipe, rounding="stochastic", seed=3), stochastic)


def test_nvfp4_under_unsigned_scales_has_the_bytes_of_nvfp4() -> None:
    x = np.random.default_rng(6).standard_normal((8, 64)).astype(np.float32)
    ours, theirs = breccia.cast(x, TWO4), breccia.cast(x, breccia.NVFP4BlockScaling())
    for part in ("data", "scale", "global_scale"):
        assert getattr(ours, part).tobytes() == getattr(theirs, part).tobytes()


def test_an_invalid_supplied_unsigned_scale_is_stored_as_nan() -> None:
    """Zero, NaN, and a byte whose unused top bit is set, which would be a negative E4M3 scale."""
    recipe = declared(E2M1, Level(UE4M3, (1, 16)))
    given_codes = np.array([[0x38, 0x00, 0x7F, 0xB8]], np.uint8)
    st = breccia.cast(np.ones((1, 64), np.float32), recipe, scale=given_codes)
    assert st.scale.tolist() == [[0x38, 0x7F, 0x7F, 0x7F]]
    values = breccia.dequantize(st).reshape(4, 16)
    assert values[0].tolist() == [1.0] * 16 and np.isnan(values[1:]).all()


@pytest.mark.parametrize("place", jax_is_long(PLACES), ids=str)
def test_unsigned_elements_represent_no_negative_numbers(place: Place) -> None:
    """Numbers below zero become 0, without a sign; under a supplied scale NaN and both infinities become NaN."""
    if place.absence:
        pytest.skip(place.absence)
    recipe = declared(UE5M3, Level(F32, TENSOR))
    x = np.array([[1.0, -1.0, -0.0, 300000.0, np.nan, np.inf, -np.inf, 2.0**-18]], np.float32)
    st = breccia.cast(place.array(x), recipe, scale=1.0)
    expect_written(place, st, oracle.cast(x, recipe, scale=1.0))
    assert place.words(st.data).tolist() == [[0x78, 0, 0, 0xFE, 0xFF, 0xFF, 0xFF, 0]]


# -- products beyond FP32 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", jax_is_long(PLACES), ids=str)
@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1, INT4], ids=lambda c: c.name)
def test_a_code_times_its_scale_beyond_fp32_is_infinite_with_the_sign_of_the_code(element: Codec, place: Place) -> None:
    """Section 4: E8M0's largest scale, 2^127, times 2 and more; FP32's largest number times 2; 1.5 of it stays finite."""
    if place.absence:
        pytest.skip(place.absence)
    codes = [oracle.encode(element, Fraction(v), v < 0) for v in (1, -1, 2, -2, 4, -4, 6, -6)]
    written = np.array([codes], np.uint32)
    data = place.array(vectors.packed(written, element))
    for codec, scale in ((E8M0, 254), (F32, 0x7F7FFFFF)):
        recipe = declared(element, Level(codec, (1, 8)), rule=RCEIL)
        stored = place.array(np.array([[scale]], np.uint8 if codec is E8M0 else np.uint32))
        if codec is F32:
            stored = place.ops.bitcast_to_float(place.array(np.array([[scale]], np.int32)))
        st = ScaledTensor(data, stored, recipe, recipe.layout, shape=(1, 8))
        expected = oracle.dequantize(oracle.Written(written, np.array([[scale]], np.uint32)), recipe)
        finite = float(np.float32(2.0**127)) if codec is E8M0 else float(np.finfo(np.float32).max)
        assert expected.tolist() == [[finite, -finite, *[np.inf, -np.inf] * 3]]
        expect_numbers(f"{element.name} under {codec.name}", place, breccia.dequantize(st), expected)


@pytest.mark.parametrize("place", jax_is_long(PLACES), ids=str)
def test_a_cast_beyond_2_to_the_127_may_decode_to_infinity(place: Place) -> None:
    """MXFP8: 3.4e38 is rounded up to 256 under the scale 2^120, and 2^128 is not an FP32 number."""
    if place.absence:
        pytest.skip(place.absence)
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = 3.4e38, -3.4e38, 1.7e38
    recipe = breccia.MXFP8BlockScaling()
    st = breccia.cast(place.array(x), recipe)
    values = place.words(breccia.dequantize(st)).view(np.float32)[0, :3]
    expected = oracle.dequantize(oracle.cast(x, recipe), recipe)[0, :3]
    assert values.tolist() == expected.tolist() and np.isinf(values[:2]).all() and values[0] > 0 > values[1]
