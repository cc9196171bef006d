"""Formats with an alternative: the sign of a block's scale says which of two codecs its elements have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from marks import here
from recipes import declared

import breccia
from breccia import Format, Level, NVFP4BlockScaling, PerBlockK, RecipeError
from breccia.codecs import E2M1, E4M3, E5M2, E8M0, F16, F32, INT4, UE4M3, Codec, Lookup, f32
from breccia.dispatch.registry import registry
from breccia.formats import TENSOR
from breccia.kernels import exact, reference
from breccia.kernels.plans import flat_recipe
from breccia.testing.laws import recipes as laws
from breccia.testing.places import Place

#: Numbers at equal distances up to 6, and at unequal ones up to 7.
EVEN_STEPS = Lookup("EVEN_STEPS", 4, None, "this test", tuple(f32(n * 6 / 7) for n in (*range(8), *range(-8, 0))))
UNEVEN = Lookup("UNEVEN", 4, None, "this test", (0.0, 0.25, 0.5, 1, 1.5, 2, 4, 7, -7, -5, -3, -2, -1, -0.75, -0.5, -0.25))
GLOBAL = declared(E2M1, Level(F32, TENSOR), Level(E4M3, (1, 16)), alternative=EVEN_STEPS, name="global")
TILES = declared(INT4, Level(E5M2, (2, 8)), rule=breccia.rules.DIVIDE, alternative=UNEVEN, name="tiles")
BOTH = [GLOBAL, TILES]
NUMPY = Place("numpy")


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("framework", ["numpy", "mlx"])
@pytest.mark.parametrize("recipe", BOTH, ids=lambda recipe: recipe.name)
def test_casts_and_values_are_those_of_the_oracle(recipe: breccia.ScalingRecipe, framework: str) -> None:
    """The plug-in if4 is tested with torch, whose operators know declared recipes only, and JAX, which compiles for seconds."""
    place = here(framework)
    laws.a_cast_writes_the_oracles_bytes(recipe, place)
    laws.every_code_under_every_scale_decodes_as_the_oracle_says(recipe, place)
    laws.casts_write_the_bytes_of_numpy(recipe, place)
    laws.nothing_non_finite_becomes_finite(recipe, place)
    laws.an_empty_array_stays_empty(recipe, place)


@pytest.mark.long
@pytest.mark.parametrize("recipe", BOTH, ids=lambda recipe: recipe.name)
def test_stochastic_casts_and_any_bit_pattern_are_those_of_the_oracle(recipe: breccia.ScalingRecipe) -> None:
    laws.a_stochastic_cast_writes_the_oracles_bytes(recipe, NUMPY)
    laws.any_bit_pattern_is_cast_as_the_oracle_casts_it(recipe)


def test_the_sign_of_a_scale_says_how_codes_decode() -> None:
    """Under 1.5 and -1.5, 0.0 and -0.0, NaN and -NaN; times a global scale of 2."""
    scale = np.array([[0x3C, 0xBC, 0x00, 0x80, 0x7F, 0xFF]], np.uint8)
    nibbles = np.arange(16, dtype=np.uint8)
    data = np.tile(nibbles[::2] | nibbles[1::2] << 4, 6)[None]
    st = breccia.from_buffer(data, scale, GLOBAL, PerBlockK(16), global_scale=np.float32(2))
    blocks = breccia.dequantize(st).reshape(6, 16)
    first, other = (np.array([codec.value(c) for c in range(16)], np.float32) for codec in (E2M1, EVEN_STEPS))
    assert (blocks[0] == first * 3).all() and (blocks[1] == other * np.float32(1.5) * 2).all()
    assert (blocks[2:4] == 0).all() and np.isnan(blocks[4:]).all()
    assert (np.signbit(blocks[1]) == (other < 0)).all()


def test_a_block_has_the_codec_of_the_smaller_largest_error() -> None:
    """Numbers of one codec get that codec; those of both, and zeros, the first."""
    first, other = ([codec.value(c) for c in range(8)] for codec in (E2M1, EVEN_STEPS))
    x = np.array([*first * 2, *other * 2, *([6, 0] * 8), *[0] * 16], np.float32)[None] * np.float32(0.5)
    st = breccia.cast(x, GLOBAL)
    assert (st.scale >> 7).tolist() == [[0, 1, 0, 0]] and (st.scale & 0x7F).tolist() == [[0x7E, 0x7E, 0x7E, 0]]
    np.testing.assert_allclose(breccia.dequantize(st), x, rtol=3 * 2.0**-24)  # of the global scale and two products
    codes = np.stack([st.data & 15, st.data >> 4], -1).reshape(4, 16)
    assert codes[:2].tolist() == [[*range(8)] * 2] * 2


def test_no_block_has_a_larger_error_than_under_the_first_codec_alone() -> None:
    """A cast compares errors in units of the scale: those of values, but for 8 roundings of FP32 of numbers up to amax."""
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    st, plain = breccia.cast(x, GLOBAL), breccia.cast(x, NVFP4BlockScaling())
    assert ((st.scale & 0x7F) == plain.scale).all() and 0 < (st.scale >> 7).mean() < 1
    errors, before = (np.abs(breccia.dequantize(t) - x).reshape(64, 16, 16).max(-1) for t in (st, plain))
    amax = np.abs(x).reshape(64, 16, 16).max(-1)
    assert (errors <= before + 8 * 2.0**-24 * amax).all()
    squared = [((breccia.dequantize(t) - x) ** 2).mean() for t in (st, plain)]
    assert squared[0] < squared[1]


def test_a_supplied_global_scale_and_a_nan_are_as_in_nvfp4() -> None:
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    x[0, 20], x[2, 0] = np.nan, np.inf
    for scale in (None, np.float32(0.01), np.float32(np.nan)):
        st, plain = (breccia.cast(x, recipe, scale=scale) for recipe in (GLOBAL, NVFP4BlockScaling()))
        nan = plain.scale == 0x7F
        assert (st.scale[nan] == 0x7F).all() and ((st.scale & 0x7F) == plain.scale).all()
        assert st.global_scale.tobytes() == plain.global_scale.tobytes()
        assert (np.isnan(breccia.dequantize(st)) == np.isnan(breccia.dequantize(plain))).all()
        assert not st.data.reshape(4, 4, 8)[nan].any()


def test_the_largest_numbers_of_a_block_are_those_of_its_codec() -> None:
    """Of gradients that stop where codes saturate, and of metrics, half a step beyond."""
    first, other = ([codec.value(c) for c in range(16)] for codec in (E2M1, EVEN_STEPS))
    x = np.clip(np.array([first, other], np.float32), -6, 6)
    st = breccia.cast(x, GLOBAL, scale=np.float32(0.5))
    assert st.scale.tolist() == [[0x40], [0xC0]] and (breccia.dequantize(st) == x).all()
    low, high = (breccia.dequantize(end) for end in reference.extremes(st))
    assert (low == np.array([[-6], [-48 / 7]], np.float32)).all() and (high == 6).all()
    for beyond, count in (([0.99, 0.42], 0), ([1.01, 0.42], 1), ([0.99, 0.44], 1)):
        larger = x.copy()
        larger[:, 7] += np.array(beyond, np.float32)  # half of a step is 1, or 3 / 7
        assert breccia.metrics(larger, st).clipped == count


def test_it_is_its_own_format() -> None:
    """No scale or code of it is taken for one of NVFP4, in either direction."""
    fmt, nvfp4 = GLOBAL.format, NVFP4BlockScaling()
    assert fmt.features == {"alternative"} and flat_recipe(GLOBAL) is None
    assert fmt.fingerprint() != nvfp4.format.fingerprint()
    other = Format(fmt.element, fmt.levels, alternative=Lookup("OTHER", 4, None, "this test", (6.0, *[0.0] * 15)))
    assert fmt.fingerprint() != other.fingerprint()
    for old, new in ((GLOBAL, nvfp4), (nvfp4, GLOBAL)):
        assert exact.translation(old, PerBlockK(16), -1, new) is None
    st = breccia.cast(np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32), GLOBAL)
    again = breccia.cast(breccia.dequantize(st), nvfp4)
    assert breccia.bytes_equal(breccia.requantize(st, nvfp4), again)


def test_kernels_that_do_not_know_it_say_so() -> None:
    st = breccia.cast(np.ones((4, 64), np.float32), GLOBAL)
    told = str(breccia.explain("dequantize", st))
    for kernel in registry().table.kernels:
        if (kernel.op, kernel.framework, kernel.kind) == ("dequantize", "numpy", "kernel") and "reference" not in kernel.name:
            assert f"{kernel.name}" in told and "does not know alternative, which global has" in told


@pytest.mark.parametrize(
    ("element", "alternative", "level", "said"),
    [
        (E2M1, INT4, Level(E4M3, (1, 16)), r"same largest value.*; got INT4 \(4 bits, up to 7.0\) and E2M1 \(4 bits, up to"),
        (INT4, breccia.Integer("INT3", 3, None, "this test", True), Level(E4M3, (1, 16)), r"as many bits .* got INT3 \(3 bits"),
        (E4M3, E4M3, Level(E4M3, (1, 16)), "neither has NaN; got E4M3"),
        (E2M1, EVEN_STEPS, Level(UE4M3, (1, 16)), "8 bits with a sign, like E4M3, and no offset; got UE4M3"),
        (E2M1, EVEN_STEPS, Level(E8M0, (1, 32)), "one level of blocks of multipliers .* got E8M0"),
        (E2M1, EVEN_STEPS, Level(F16, (1, 32)), "like E4M3, and no offset; got F16"),
        (E2M1, EVEN_STEPS, Level(E4M3, (1, 16), "divisor"), "one level of blocks of multipliers"),
    ],
)  # fmt: skip
def test_one_scale_and_its_sign_have_to_serve_both_codecs(element: Codec, alternative: Codec, level: Level, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Format(element, (level,), alternative=alternative)


@pytest.mark.parametrize("more", [{"offset": "bias"}, {"levels": (Level(E4M3, (1, 32)), Level(EVEN_STEPS, (1, 16)))}], ids=str)
def test_an_alternative_is_for_one_level_of_blocks_without_an_offset(more: dict[str, Any]) -> None:
    one: dict[str, Any] = {"levels": (Level(E4M3, (1, 16)),), "alternative": EVEN_STEPS}
    with pytest.raises(RecipeError, match="the sign bit of a block's scale says which codec its elements have"):
        Format(E2M1, **one | more)
