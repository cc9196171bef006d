"""The search for scales (docs/spec/numerics.md, section 5.6) against the oracle, on four frameworks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import declared

import breccia
from breccia import INT4Scaling, Level, NVFP4BlockScaling, OptionError, RecipeError, ShapeError, UnsupportedError
from breccia.codecs import E2M1, E4M3, E8M0, F16, F32, INT4, NF4, UINT4, Codec
from breccia.formats import TENSOR
from breccia.rules import FOUR_SIX, MSE
from breccia.testing import oracle, strategies
from breccia.testing.compare import expect_written
from breccia.testing.laws import rules as laws
from breccia.testing.places import Place

NUMPY = Place("numpy")
FRAMEWORKS = ("numpy", "torch", "jax", "mlx")
#: One of each kind of window, with blocks of 16 or fewer elements where the recipe allows it, as the oracle is slow.
SPECS = (
    "nvfp4,scale_rule=mse",
    "nvfp4,scale_rule=four_six,scale_format=UE5M3",
    "mxfp4,scale_rule=mse",
    "int4,group_size=12,scale_rule=mse",
    "nf4,block_size=8,scale_dtype=bf16,scale_rule=mse",
)
MORE = (
    "nvfp4,scale_rule=four_six",
    "nvfp4,two_level=false,scale_rule=mse",
    "nvfp4,scale_format=UE5M3,global_sense=divisor,scale_rule=mse",
    "mxfp8,fp8_format=E5M2,scale_rule=mse",
    "mxfp6,scale_rule=mse",
    "mxint8,scale_rule=mse",
    "int8,scale_rule=mse",
    "int4,group_size=5,signed=false,scale_rule=mse",
    "int,bits=2,group_size=16,scale_dtype=bf16,scale_rule=mse",
    "int,bits=7,group_size=16,scale_dtype=fp32,scale_rule=mse",
)


def rows() -> np.ndarray:
    """Rows of 21 numbers: zeros; NaN and Inf in one block; all of one number; the grid of codes; tiny, huge and mixed ones."""
    rng = np.random.default_rng(0)
    smooth = rng.standard_normal(21)
    x = np.stack([smooth, smooth * 2.0 ** rng.integers(-30, 2, 21), np.full(21, -0.75), np.arange(-10, 11) * 0.5]).astype("f4")
    ends = np.stack([x[0] * np.float32(2.0**-125), x[1] * np.float32(2.0**126), np.where(np.arange(21) % 7 == 3, x[0], 0)])
    ends[0, :4], ends[2, -1] = [1e-40, 2.0**-126, -(2.0**-149), 0], 3.4e38
    holes = x[:2].copy()
    holes[0, 1], holes[1, 20] = np.nan, -np.inf
    return np.concatenate([x, ends.astype("f4"), holes])


def importances() -> list[np.ndarray | None]:
    """None; numbers of all magnitudes, zeros among them; only zeros."""
    rng = np.random.default_rng(1)
    numbers = rng.random(21) * 2.0 ** rng.integers(-45, 5, 21)
    numbers[::4] = 0
    return [None, numbers.astype(np.float32), np.zeros(21, np.float32)]


def places(*frameworks: str) -> list[Place]:
    """Those of the frameworks whose plug-in is installed: NumPy always is."""
    return [place for place in map(Place, frameworks) if not place.absence]


def check(
    place: Place, recipe: breccia.ScalingRecipe, x: np.ndarray, importance: np.ndarray | None, want: oracle.Written
) -> None:
    array = None if importance is None else place.array(importance)
    expect_written(place, breccia.cast(place.array(x), recipe, importance=array), want)


@pytest.mark.long
@pytest.mark.parametrize("spec", SPECS)
def test_blocks_of_all_kinds_are_cast_as_the_oracle_casts_them(spec: str) -> None:
    recipe, x = breccia.recipe(spec), rows()
    for importance in importances()[:2]:
        want = oracle.cast(x, recipe, importance=None if importance is None else importance.tolist())
        for place in places(*(FRAMEWORKS if spec == "mxfp4,scale_rule=mse" else ("numpy", "torch", "mlx"))):  # JAX compiles
            check(place, recipe, x, importance, want)


@pytest.mark.long
@pytest.mark.parametrize("spec", SPECS + MORE)
def test_blocks_of_all_kinds_are_cast_as_the_oracle_casts_them_under_more_recipes(spec: str) -> None:
    recipe, x = breccia.recipe(spec), rows()
    for importance in importances():
        want = oracle.cast(x, recipe, importance=None if importance is None else importance.tolist())
        for place in places(*FRAMEWORKS):
            check(place, recipe, x, importance, want)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_drawn_blocks_and_importances_are_cast_as_the_oracle_casts_them(data: Any) -> None:
    recipe = breccia.recipe(data.draw(st.sampled_from(SPECS + MORE)))
    x = data.draw(strategies.arrays((2, data.draw(st.integers(0, 20))), recipe=recipe))
    weights = data.draw(strategies.arrays((x.shape[1],), finite=True)) if data.draw(st.booleans()) else None
    importance = None if weights is None else np.abs(weights)
    want = oracle.cast(x, recipe, importance=None if importance is None else importance.tolist())
    for place in places("numpy", "torch", "mlx"):
        check(place, recipe, x, importance, want)


def test_blocks_along_the_other_axis_and_of_several_rows_have_the_same_scales() -> None:
    """A tile's rows are added along K first, whichever axis that is."""
    x = rows()[:4, :20].copy()
    importance = np.linspace(0.25, 3, 20).astype(np.float32)
    tiles = declared(INT4, Level(F16, (3, 7)), rule=MSE, name="tiles")
    for recipe in (breccia.recipe("mxfp4,scale_rule=mse"), tiles):
        want = oracle.cast(x, recipe, importance=importance.tolist())
        across = breccia.cast(x.T.copy(), recipe, axis=-2, importance=importance)
        expect_written(NUMPY, across.mT, want)
    whole = declared(INT4, Level(F32, TENSOR), rule=MSE, name="whole")
    x = np.random.default_rng(2).standard_normal((3, 5, 7)).astype(np.float32)
    expect_written(NUMPY, breccia.cast(x, whole), oracle.cast(x, whole))


def test_a_search_never_has_a_larger_error_than_the_plain_rule() -> None:
    """In FP64, of decoded numbers.

    The search and decoding round a number v within 2^-22 |v| of each other, which moves an error d^2 by 2^-21 |v| / |d| of it.
    Codes of at most 8 bits leave errors of 2^-8 of their numbers, on average: 2^-13.
    """
    x = np.random.default_rng(3).standard_normal((64, 96)).astype(np.float32)
    for spec in (*SPECS, *MORE):
        recipe = breccia.recipe(spec)
        plain = replace(recipe, scale_rule="rceil" if spec.startswith("mx") else "linear")
        size = recipe.format.scale.block[1] or 96
        whole = x[:, : 96 // size * size]
        searched, first = (
            np.square(np.float64(whole) - breccia.dequantize(breccia.cast(whole, each))).reshape(64, -1, size).sum(-1)
            for each in (recipe, plain)
        )
        assert (searched <= first * (1 + 2.0**-13)).all(), spec
        if recipe.format.element.bits <= 4:  # codes of more bits have little to gain
            assert (searched < first).any(), spec


def test_importance_decides_which_elements_are_kept() -> None:
    x = np.array([[7, 0.4, 0.4, 0.4]], np.float32)
    small = breccia.cast(x, "int4,group_size=4,scale_rule=mse", importance=np.array([0, 1, 1, 1], np.float32))
    large = breccia.cast(x, "int4,group_size=4,scale_rule=mse", importance=np.array([1, 0, 0, 0], np.float32))
    assert breccia.dequantize(large)[0, 0] == 7
    assert np.abs(breccia.dequantize(small)[0, 1:] - x[0, 1:]).max() < np.abs(breccia.dequantize(large)[0, 1:] - x[0, 1:]).max()


def test_an_importance_may_halve_a_scale_of_8_bits() -> None:
    """The largest element saturates at half of its number, where the others alone count: they are codes times 0.5."""
    x = np.array([[6, *(np.arange(15) % 8 * 0.25)]], np.float32)
    x[x == 1.25], x[x == 1.75] = 3, 2  # codes have no 2.5 and 3.5
    importance = np.array([0, *(1,) * 15], np.float32)
    recipe = breccia.recipe("nvfp4,two_level=false,scale_rule=mse")
    for place in places(*FRAMEWORKS):
        st = breccia.cast(place.array(x), recipe, importance=place.array(importance))
        expect_written(place, st, oracle.cast(x, recipe, importance=importance.tolist()))
    st = breccia.cast(x, recipe, importance=importance)
    assert breccia.dequantize(st)[0].tolist() == [3, *x[0, 1:].tolist()] and st.scale[0, 0] == 0x30


def test_equal_importances_choose_as_none_do() -> None:
    x = np.random.default_rng(4).standard_normal((8, 64)).astype(np.float32)
    for number in (1.0, 0.3, 1e-30, 3e38):
        st = breccia.cast(x, "nvfp4,scale_rule=mse", importance=np.full(64, number, np.float32))
        expected = breccia.cast(x, "nvfp4,scale_rule=mse")
        assert breccia.bytes_equal(st, expected) or number == 0.3  # products with 0.3 are rounded
    powers = breccia.cast(x, "nvfp4,scale_rule=mse", importance=np.full(64, 0.25, np.float32))
    assert breccia.bytes_equal(powers, breccia.cast(x, "nvfp4,scale_rule=mse"))


def test_the_lowest_code_of_signed_integers_is_used_by_negative_scales() -> None:
    """7.5 and -7.5 are both within half a step of -8 and 7 under 1; 8 alone is a code under -1."""
    x = np.array([[8, 1, 2, 3]], np.float32)
    written = breccia.cast(x, "int4,group_size=4,scale_rule=mse,scale_dtype=fp32")
    assert written.scale[0, 0] == -1 and (breccia.dequantize(written) == x).all()
    again = breccia.cast(x, written.recipe, scale=written.scale)
    assert breccia.bytes_equal(again, written)
    expect_written(NUMPY, again, oracle.cast(x, written.recipe, scale=written.scale.view(np.uint32)))


def test_stochastic_rounding_writes_other_codes_under_the_same_scales() -> None:
    x = rows()[:2]
    for spec in SPECS:
        recipe = breccia.recipe(spec)
        want = oracle.cast(x, recipe, rounding="stochastic", seed=7)
        for place in places("numpy", "torch"):
            expect_written(place, breccia.cast(place.array(x), recipe, rounding="stochastic", seed=7), want)
        nearest = breccia.cast(x, recipe)
        assert np.array_equal(nearest.scale, breccia.cast(x, recipe, rounding="stochastic", seed=7).scale, equal_nan=True)


def test_groups_by_an_index_are_searched_without_what_fills_them() -> None:
    x = np.random.default_rng(5).standard_normal((4, 12)).astype(np.float32)
    importance = np.linspace(0.1, 2, 12).astype(np.float32)
    index = [0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 1]  # five, five and two
    recipe = INT4Scaling(group_size=8, scale_rule="mse")
    st = breccia.cast(x, recipe, group_index=index, importance=importance)
    for group in range(3):
        columns = [k for k, g in enumerate(index) if g == group]
        alone = breccia.cast(x[:, columns], recipe, importance=importance[columns])
        assert (st.scale[:, group] == alone.scale[:, 0]).all()
        assert (breccia.dequantize(st)[:, columns] == breccia.dequantize(alone)).all()


def test_candidates_and_plain_scales_follow_the_laws_of_the_kit() -> None:
    for rule in (MSE, FOUR_SIX):
        laws.it_accepts_some_codec(rule)
        laws.candidates_match_the_oracle(rule, NUMPY)


def test_candidates_are_those_of_the_specification() -> None:
    """docs/spec/numerics.md, rules `mse` and `four_six`, around a plain scale of 1."""

    def candidates(rule: Any, codec: Codec, element: Codec, largest: float) -> np.ndarray:
        return rule.candidates(NUMPY.ops, np.float32([largest]), codec, element, largest, None)[:, 0]

    steps = [16, 20, 22, 24, 25, 26, 27, 28, 29, 30, 31]  # of 1/32
    floats = candidates(MSE, F32, INT4, 7.0).astype(np.int32).view(np.float32) * 32
    assert floats.tolist() == [32, *steps, *(-n for n in steps[:-1])]
    assert (candidates(MSE, E4M3, E2M1, 6.0) - 0x38).tolist() == [0, -8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6]
    assert candidates(MSE, E8M0, E2M1, 6.0).tolist() == [127, 126, 128]
    assert candidates(FOUR_SIX, E4M3, E2M1, 6.0).tolist() == [0x38, 0x3C]


def test_twice_a_power_of_two_is_tried_in_vain() -> None:
    """The oracle tries it, and laws compare what casts choose."""
    for element in (E2M1, INT4):
        assert MSE.needless(E8M0, element) == 1 and MSE.tried(E8M0, element).steps == (-1,)
    assert MSE.needless(E8M0, NF4) == 0 and MSE.tried(E8M0, NF4).steps == (-1, 1)
    assert MSE.needless(E4M3, E2M1) == 0 and MSE.tried(E4M3, E2M1) == MSE.window(E4M3)


def test_recipes_that_search_have_formats_of_their_own_name_only() -> None:
    """A rule changes codes, not how they decode."""
    searched, plain = NVFP4BlockScaling(scale_rule="mse"), NVFP4BlockScaling()
    assert searched.format.fingerprint() == plain.format.fingerprint() and searched.fingerprint() != plain.fingerprint()
    assert '"scale_rule"' not in plain.to_json()  # older readers know no such field


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("recipe", "importance", "error", "message"),
    [
        ("mxfp4", np.ones(8, "f4"), OptionError, "mxfp4 searches for none; use 'mxfp4' with scale_rule='mse'."),
        ("fp8_block", np.ones(8, "f4"), OptionError, "fp8_block searches for none; its recipe has no such rule: leave it out."),
        ("mxfp4,scale_rule=mse", np.ones(7, "f4"), ShapeError, r"axis \(-1\), shape \(8,\); got shape \(7,\)"),
        ("mxfp4,scale_rule=mse", np.ones((1, 8), "f4"), ShapeError, r"got shape \(1, 8\)"),
        ("mxfp4,scale_rule=mse", np.ones(8, "f8"), UnsupportedError, "array of float32, float16, bfloat16; got float64"),
        ("mxfp4,scale_rule=mse", [1.0] * 8, UnsupportedError, "got list"),
        ("mxfp4,scale_rule=mse", np.array([1, -1] * 4, "f4"), OptionError, "it holds negative numbers, NaN or Inf"),
        ("mxfp4,scale_rule=mse", np.array([1, np.nan] * 4, "f4"), OptionError, "it holds negative numbers, NaN or Inf"),
        ("mxfp4,scale_rule=mse", np.array([1, np.inf] * 4, "f4"), OptionError, "it holds negative numbers, NaN or Inf"),
    ],
)  # fmt: skip
def test_an_importance_that_does_not_fit_is_refused(recipe: str, importance: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        breccia.cast(np.ones((2, 8), np.float32), recipe, importance=importance)


def test_an_importance_of_another_framework_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UnsupportedError, match="importance"):
        breccia.cast(np.ones((2, 8), np.float32), "mxfp4,scale_rule=mse", importance=torch.ones(8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: INT4Scaling(symmetric=False, signed=False, scale_rule="mse"), "searches scales of symmetric codes"),
        (lambda: INT4Scaling(scale_rule="four_six"), "must be one of 'linear', 'recip', 'divide', 'half_range', 'mse'"),
        (lambda: NVFP4BlockScaling(scale_rule="te"), "must be one of 'linear', 'mse', 'four_six', got 'te'"),
    ],
)
def test_recipes_without_the_rule_refuse_it(make: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make()


@pytest.mark.parametrize(
    ("rule", "codec", "message"),
    [
        (FOUR_SIX, E8M0, "rule 'four_six' has no window of E8M0 scales around the plain one"),
        (FOUR_SIX, F16, "rule 'four_six' has no window of F16 scales"),
        (MSE, INT4, "rule 'mse' has no window of INT4 scales"),
    ],
)
def test_a_codec_that_the_rule_has_no_window_for_is_refused(rule: Any, codec: Codec, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        rule.window(codec)


def test_a_format_with_an_offset_is_refused() -> None:
    recipe = declared(UINT4, Level(F16, (1, 8)), rule=MSE, offset="bias", name="biased")
    with pytest.raises(
        RecipeError, match="rule 'mse' searches for scales of formats whose values are codes times scales; biased"
    ):
        breccia.cast(np.ones((2, 8), np.float32), recipe)


def test_a_scale_that_underflows_competes_with_those_that_do_not() -> None:
    """Under the global scale of a large number, the plain scale of a small block rounds to 0, and code 1 keeps it."""
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16:] = 2688, 6 * 2.0**-11
    plain, searched = (breccia.cast(x, NVFP4BlockScaling(scale_rule=rule)) for rule in ("linear", "mse"))
    assert plain.scale[0, 1] == 0 and searched.scale[0, 1] == 1
    assert breccia.dequantize(searched)[0, 16] > 0 == breccia.dequantize(plain)[0, 16]
    assert E4M3.value(1) == 2.0**-9 and E2M1.max == 6
