"""Rotated formats (docs/spec/numerics.md, section 5.7) against the oracle and the Hadamard matrix, on four frameworks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import declared

import breccia
from breccia import LayoutError, Level, OptionError, RecipeError, UnsupportedError
from breccia.backend import NUMPY, CastOptions, Rotation, reference
from breccia.codecs import E2M1, E8M0
from breccia.internal import affine
from breccia.testing import oracle, oracle_rotation, strategies
from breccia.testing.compare import expect_numbers, expect_tensor, expect_written
from breccia.testing.laws import recipes as laws
from breccia.testing.places import Place

FRAMEWORKS = ("numpy", "torch", "jax", "mlx")
SPECS = (
    "nvfp4,rotation=16",
    "mxfp4,rotation=32,rotation_seed=81985529216486895",
    "int4,group_size=24,rotation=16",
    "int4,group_size=16,symmetric=false,rotation=64,rotation_seed=7",
)


def rows(columns: int = 69) -> np.ndarray:
    """Rows of whole blocks and a rest: smooth, of all exponents, tiny, so large that sums overflow, and with NaN and Inf."""
    rng = np.random.default_rng(0)
    smooth = rng.standard_normal(columns)
    wide = smooth * 2.0 ** rng.integers(-40, 40, columns)
    x = np.stack([smooth, wide, smooth * 2.0**-124, np.full(columns, 3e38), np.zeros(columns), smooth, smooth]).astype("f4")
    x[5, 3], x[6, [0, columns // 2]] = np.nan, [np.inf, -np.inf]
    return x


def hadamard(n: int) -> np.ndarray:
    """Sylvester's matrix."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


@pytest.mark.parametrize("spec", SPECS)
def test_a_rotated_cast_writes_the_oracles_bytes_and_decodes_to_its_values(spec: str) -> None:
    expect_the_oracles(spec, ("numpy", "torch", "mlx"))


@pytest.mark.long
@pytest.mark.parametrize("spec", [*SPECS, "nvfp4,rotation=32,scale_rule=mse", "int4,group_size=16,rotation=16,scale_rule=mse"])
def test_a_rotated_cast_writes_the_oracles_bytes_on_every_framework(spec: str) -> None:
    expect_the_oracles(spec, FRAMEWORKS)


def expect_the_oracles(spec: str, frameworks: tuple[str, ...]) -> None:
    recipe = breccia.recipe(spec)
    assert recipe.format.rotation is not None
    x = rows(recipe.format.rotation.block + 5)
    want = oracle.cast(x, recipe)
    decoded = oracle.dequantize(want, recipe)
    for framework in frameworks:
        place = Place(framework)
        written = breccia.cast(place.array(x), recipe)
        expect_written(place, written, want)
        expect_numbers("decoded", place, breccia.dequantize(written), decoded)


@pytest.mark.parametrize("spec", SPECS)
def test_the_generic_algorithm_writes_the_same_bytes(spec: str) -> None:
    recipe, x, place = breccia.recipe(spec), rows(), Place("numpy")
    for options in (CastOptions(), CastOptions(rounding="stochastic", seed=3)):
        expect_tensor(
            place, breccia.cast(x, recipe, rounding=options.rounding, seed=options.seed), reference.cast(x, recipe, options)
        )
    written = breccia.cast(x, recipe)
    np.testing.assert_array_equal(reference.dequantize(written), breccia.dequantize(written))
    across = breccia.cast(x.T.copy(), recipe, axis=-2)
    expect_tensor(place, across.mT, written)
    np.testing.assert_array_equal(breccia.dequantize(across).T, breccia.dequantize(written))


def test_the_kits_laws_of_recipes_hold_under_a_rotation() -> None:
    recipe = breccia.recipe("nvfp4,rotation=16,rotation_seed=9")
    laws.every_code_under_every_scale_decodes_as_the_oracle_says(recipe, Place("numpy"))
    laws.it_round_trips_through_safetensors(recipe)


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_drawn_arrays_are_rotated_as_the_oracle_rotates_them(data: Any) -> None:
    recipe = breccia.recipe(data.draw(st.sampled_from(SPECS)))
    x = data.draw(strategies.arrays((2, data.draw(st.integers(0, 40))), recipe=recipe))
    want = oracle.cast(x, recipe)
    for framework in ("numpy", "torch", "mlx"):
        place = Place(framework)
        written = breccia.cast(place.array(x), recipe)
        expect_written(place, written, want)
        expect_numbers("decoded", place, breccia.dequantize(written), oracle.dequantize(want, recipe))


@pytest.mark.parametrize("block", [2, 16, 32])
def test_a_rotation_is_the_hadamard_matrix_with_signs(block: int) -> None:
    """In FP64. Each of the log2(block) sums and the product rounds by 2^-24 of a number of at most sum |x|, and so does the
    factor where it is no power of two.
    """
    x = np.random.default_rng(1).standard_normal((5, 2 * block)).astype(np.float32)
    rotation = Rotation(block, seed=11)
    signs = np.array([-1.0 if oracle.random_word(11, i) >> 31 else 1.0 for i in range(block)])
    exact = (x.reshape(5, 2, block) * signs) @ hadamard(block) / math.sqrt(block)
    bound = (math.log2(block) + 2) * 2.0**-24 * np.abs(x).reshape(5, 2, block).sum(-1, keepdims=True)
    rotated = reference.rotated(NUMPY, x, rotation, -1)
    assert (np.abs(rotated.reshape(exact.shape) - exact) <= bound).all()
    back = reference.unrotated(NUMPY, rotated, rotation, -1)
    assert (np.abs(back - x).reshape(exact.shape) <= 2 * math.sqrt(block) * bound).all()
    np.testing.assert_array_equal(rotated, oracle_rotation.rotate(x, rotation))
    np.testing.assert_array_equal(back, oracle_rotation.unrotate(rotated, rotation))


def test_integers_are_rotated_and_rotated_back_exactly_where_the_factor_is_a_power_of_two() -> None:
    x = np.random.default_rng(2).integers(-99, 99, (4, 128)).astype(np.float32)
    for block in (16, 64):
        rotated = reference.rotated(NUMPY, x, Rotation(block, 5), -1)
        np.testing.assert_array_equal(reference.unrotated(NUMPY, rotated, Rotation(block, 5), -1), x)


def test_an_outlier_costs_its_block_less_when_it_is_rotated() -> None:
    """One element of 50 among 127 normal ones: without a rotation they all become 0."""
    x = np.random.default_rng(3).standard_normal((64, 256)).astype(np.float32)
    x[:, 5::128] = 50

    def noise(spec: str) -> float:
        return float(np.square(breccia.dequantize(breccia.cast(x, spec)) - x).sum())

    for block in (32, 64, 128):
        assert noise(f"int4,rotation={block}") < 0.9 * noise("int4"), block


def test_a_rotation_is_recorded_in_json_fingerprints_and_specs() -> None:
    plain, rotated = breccia.recipe("nvfp4"), breccia.recipe("nvfp4,rotation=16")
    assert "rotation" not in plain.to_json() and plain.format.rotation is None
    assert breccia.ScalingRecipe.from_json(rotated.to_json()) == rotated == breccia.recipe(rotated.spec)
    assert rotated.unrotated == plain and plain.unrotated is plain
    others = breccia.NVFP4BlockScaling(rotation=16, rotation_seed=1), breccia.NVFP4BlockScaling(rotation=32)
    formats = {r.format.fingerprint() for r in (plain, rotated, *others)}
    assert len(formats) == 4 and plain.format.fingerprint() == replace(rotated.format, rotation=None).fingerprint()
    # Those that recipes had before there were rotations.
    assert plain.fingerprint() == "6fd202c574ff5f3e42191a1ab6518cfd5913a1bfd6d13fc8d3dc187266f775b0"
    assert plain.format.fingerprint() == "250418f63e626686749aaf082b7acff9bb7362f01beffcea85c643d0785a789e"


def test_tensors_are_cut_and_joined_at_whole_blocks_of_a_rotation() -> None:
    x = rows(160)[:2]
    whole = breccia.cast(x, "mxfp4,rotation=64")
    pieces = whole.split(64, axis=-1)
    assert [piece.shape for piece in pieces] == [(2, 64), (2, 64), (2, 32)]
    np.testing.assert_array_equal(np.concatenate([breccia.dequantize(p) for p in pieces], -1), breccia.dequantize(whole))
    assert breccia.bytes_equal(breccia.concat(pieces, axis=-1), whole)
    np.testing.assert_array_equal(breccia.dequantize(whole[1:]), breccia.dequantize(whole)[1:])
    with pytest.raises(LayoutError, match=r"stored in units of 64 elements.*multiples of 64"):
        whole[:, :32]
    with pytest.raises(LayoutError, match="must end at a multiple of 64"):
        breccia.concat([pieces[2], pieces[0]], axis=-1)


def test_products_decode_a_rotated_weight() -> None:
    """Within the bound of section 9 for the decoded weight: gamma of K over the sum of |a| |b|."""
    rng = np.random.default_rng(4)
    w = breccia.cast(rng.standard_normal((24, 128)).astype(np.float32), "int4,group_size=32,rotation=32")
    a = rng.standard_normal((5, 128)).astype(np.float32)
    values = breccia.dequantize(w).astype(np.float64).T
    gamma = 128 * 2.0**-24 / (1 - 128 * 2.0**-24)
    found = breccia.matmul(a, w.mT)
    assert (np.abs(found - a.astype(np.float64) @ values) <= gamma * (np.abs(a) @ np.abs(values))).all()


def test_explain_says_which_kernel_rotates_and_why_others_do_not_run() -> None:
    said = str(breccia.explain("cast", "nvfp4,rotation=16", on="numpy:cpu"))
    assert "-> rotated.cast" in said and "skipped: does not know rotation, which nvfp4,rotation=16 has" in said
    assert "skipped: the format has no rotation" in str(breccia.explain("cast", "nvfp4", on="numpy:cpu"))


def test_requantizing_out_of_a_rotation_rounds_the_values() -> None:
    x = rows()[:2]
    rotated, plain = breccia.cast(x, "mxfp4,rotation=16"), breccia.MXFP4BlockScaling()
    again = breccia.requantize(rotated, plain)
    expect_tensor(Place("numpy"), again, breccia.cast(breccia.dequantize(rotated), plain))
    for pair in ((rotated.recipe, plain), (plain, rotated.recipe)):
        found = breccia.exactness(*pair)
        assert (found.kind, found.exact) == ("inexact", False) and found.why.startswith("values are sums of codes"), found
    assert breccia.exactness(plain, rotated.recipe).bound == 4 * breccia.exactness(rotated.recipe, plain).bound


def test_what_a_rotation_excludes_is_refused_by_name() -> None:
    x, spec = rows()[:2], "mxfp4,rotation=16,scale_rule=mse"
    for bad, message in (
        ("nvfp4,rotation=24", "rotation must be one of 0, 16, 32, 64, 128, got 24"),
        ("nvfp4,rotation_seed=3", "rotation_seed=3 draws the signs of a rotation, and rotation is 0; set rotation, or omit"),
        ("int4,rotation=16,rotation_seed=-1", "a rotation's seed is an integer of 0 to 2\\^64 - 1; got -1"),
        ("int4,rotation_seed=-1", "a rotation's seed is an integer of 0 to 2\\^64 - 1; got -1"),
    ):
        with pytest.raises(RecipeError, match=message):
            breccia.recipe(bad)
    with pytest.raises(RecipeError, match="a rotation's block is a power of two from 2 on; got 12"):
        Rotation(12)
    with pytest.raises(OptionError, match="the rotation of mxfp4,scale_rule=mse,rotation=16 mixes 16 of them in every code"):
        breccia.cast(x, breccia.recipe(spec), importance=np.ones(69, np.float32))
    with pytest.raises(OptionError, match=r'clip="scale" has a range.*Pass clip_min and clip_max, or clip=None'):
        reference.extremes(breccia.cast(x, breccia.recipe(spec)))
    with pytest.raises(UnsupportedError, match=r"a value is a sum of 16 codes.*cast without rotation"):
        affine.affine(breccia.cast(x, breccia.recipe(spec)))
    other = declared(E2M1, Level(E8M0, (1, 32)), name="other")
    object.__setattr__(other.format, "rotation", Rotation(16))
    with pytest.raises(RecipeError, match="give it fields rotation and rotation_seed, or override unrotated"):
        _ = other.unrotated
