"""The generic algorithm writes and reads what the oracle says, byte for byte, on NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from recipes import RECIPES, recipe_id

import breccia
from breccia.kernels import reference
from breccia.options import CastOptions
from breccia.testing import oracle
from breccia.testing.compare import expect_numbers, expect_written, written
from breccia.testing.examples import every_decodable, special_rows, wide
from breccia.testing.places import Place, words

#: Every recipe and every framework in `make test`; their products in `make test-all`.
pytestmark = pytest.mark.covering(1, 2)

NUMPY = Place("numpy")


def assert_written(scaled: breccia.ScaledTensor, expected: oracle.Written) -> None:
    expect_written(NUMPY, scaled, expected)


def assert_decoded(scaled: breccia.ScaledTensor, expected: oracle.Written) -> None:
    expect_numbers("decoded", NUMPY, reference.dequantize(scaled), oracle.dequantize(expected, scaled.recipe))


INPUTS = {
    "ordinary": wide((6, 64), seed=1, exponents=2),
    "wide": wide((12, 64), seed=2, exponents=100),
    "specials": special_rows(32),
    "partial": wide((7, 37), seed=3),
    "one column": wide((5, 1), seed=4),
    "three axes": wide((2, 3, 20), seed=5),
    "zeros": np.zeros((4, 48), np.float32),
}


@pytest.mark.parametrize("name", INPUTS)
def test_cast_and_dequantize_equal_the_oracle(recipe: breccia.ScalingRecipe, name: str) -> None:
    x = INPUTS[name]
    scaled, expected = reference.cast(x, recipe), oracle.cast(x, recipe)
    assert_written(scaled, expected)
    assert_decoded(scaled, expected)


def test_stochastic_cast_equals_the_oracle(recipe: breccia.ScalingRecipe) -> None:
    x = np.concatenate([wide((5, 37), seed=6, exponents=30), special_rows(37)])
    seed = 0xDEADBEEFCAFE1234
    scaled = reference.cast(x, recipe, CastOptions(rounding="stochastic", seed=seed))
    assert_written(scaled, oracle.cast(x, recipe, rounding="stochastic", seed=seed))


@pytest.mark.parametrize("scale", [1.0, 0.037, 2.0**-126, 2.0**126, 3e38, 2.0**100, 2.0**-140, 0.0, -1.0, float("inf")])
def test_a_supplied_scale_is_used_as_the_oracle_uses_it(scale: float) -> None:
    x = special_rows(32)
    for recipe in (breccia.DelayedScaling(), breccia.Float8CurrentScaling("E5M2"), breccia.NVFP4BlockScaling()):
        scaled = reference.cast(x, recipe, CastOptions(scale=scale))
        expected = oracle.cast(x, recipe, scale=float(np.float32(scale)))
        assert_written(scaled, expected)
        assert_decoded(scaled, expected)


def test_a_pair_uses_one_scale_for_both_as_the_oracle_does() -> None:
    x = wide((6, 32), seed=7)
    for recipe in (breccia.DelayedScaling(), breccia.NVFP4BlockScaling()):
        rows, columns = breccia.cast_pair(x, recipe, scale=0.037)
        assert_written(rows, oracle.cast(x, recipe, scale=float(np.float32(0.037))))
        assert_written(columns.mT, oracle.cast(np.ascontiguousarray(x.T), recipe, scale=float(np.float32(0.037))))


ONE_LEVEL = [r for r in RECIPES if r.format.global_scale is None and r.format.scale.block[0] is not None]


@pytest.mark.long
@pytest.mark.parametrize("recipe", ONE_LEVEL, ids=recipe_id)
def test_supplied_block_scales_are_used_as_the_oracle_uses_them(recipe: breccia.ScalingRecipe) -> None:
    """Stored scales of another tensor, including every kind of invalid scale."""
    x, other = special_rows(48), wide(special_rows(48).shape, seed=9, exponents=20)
    scale = np.array(reference.cast(other, recipe).scale)
    faults = scale.reshape(-1).view(f"u{scale.itemsize}")
    rng = np.random.default_rng(1)
    faults[rng.integers(0, faults.size, faults.size // 3)] = rng.integers(0, 1 << (8 * scale.itemsize), faults.size // 3)
    scaled = reference.cast(x, recipe, CastOptions(scale=scale))
    expected = oracle.cast(x, recipe, scale=words(scale).astype(np.uint32))
    assert_written(scaled, expected)
    assert_decoded(scaled, expected)


@pytest.mark.long
@pytest.mark.covering(1, 1)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    x=hnp.arrays(
        np.uint32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=20), elements=st.integers(0, 2**32 - 1)
    )
)
def test_any_bit_pattern_is_cast_as_the_oracle_casts_it(recipe: breccia.ScalingRecipe, x: np.ndarray) -> None:
    values = x.view(np.float32)
    scaled, expected = reference.cast(values, recipe), oracle.cast(values, recipe)
    assert_written(scaled, expected)
    assert_decoded(scaled, expected)


@pytest.mark.long
@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.format.scale.block[0] == 1], ids=recipe_id)
def test_every_code_under_every_scale_decodes_as_the_oracle_decodes_it(recipe: breccia.ScalingRecipe) -> None:
    scaled = every_decodable(recipe)
    assert_decoded(scaled, written(NUMPY, scaled))


@pytest.mark.parametrize("sense", ["divisor", "amax"])
def test_other_scale_conventions_decode_as_the_oracle_decodes_them(sense: str) -> None:
    from dataclasses import dataclass

    from breccia.codecs import E2M1, E4M3, F32
    from breccia.formats import TENSOR, Format, Level

    @dataclass(frozen=True)
    class Foreign(breccia.NVFP4BlockScaling):
        @property
        def format(self) -> Format:
            return Format(E2M1, (Level(F32, TENSOR, sense), Level(E4M3, (1, 16))))

    ours = reference.cast(wide((4, 32), seed=8, exponents=3), breccia.NVFP4BlockScaling())
    foreign = breccia.from_buffer(ours.data, ours.scale, Foreign(), ours.layout, global_scale=np.float32(733.7))
    assert_decoded(foreign, written(NUMPY, foreign))


def test_recipe_ids_are_distinct() -> None:
    assert len({recipe_id(r) for r in RECIPES}) == len(RECIPES)
