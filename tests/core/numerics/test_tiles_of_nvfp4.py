"""NVFP4 with a scale for each tile of 16 x 16: the form of weights in training."""

from __future__ import annotations

import numpy as np
import pytest

import breccia
from breccia import NVFP4BlockScaling, RecipeError
from breccia.testing.laws import recipes as laws
from breccia.testing.places import Place

TILES = NVFP4BlockScaling(block_m=16)


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=pytest.mark.long)])
def test_casts_and_values_are_those_of_the_oracle(framework: str) -> None:
    place = Place(framework)
    laws.a_cast_writes_the_oracles_bytes(TILES, place)
    laws.nothing_non_finite_becomes_finite(TILES, place)
    laws.an_empty_array_stays_empty(TILES, place)


def test_stochastic_casts_are_those_of_the_oracle() -> None:
    laws.a_stochastic_cast_writes_the_oracles_bytes(TILES, Place("numpy"))


def test_rows_and_columns_decode_to_the_same_numbers() -> None:
    """So a weight is the same matrix in the forward and in the backward pass."""
    rows, columns = breccia.cast_pair(np.random.default_rng(0).standard_normal((40, 72)).astype(np.float32), TILES)
    assert rows.scale.shape == columns.scale.shape == (3, 5)
    assert (rows.dequantize() == columns.dequantize()).all() and (rows.scale == columns.scale).all()


def test_the_field_is_in_specs_and_only_there_in_json_where_it_is_not_the_default() -> None:
    assert breccia.recipe("nvfp4,block_m=16") == TILES and TILES.spec == "nvfp4,block_m=16"
    assert breccia.ScalingRecipe.from_json(TILES.to_json()) == TILES
    assert "block_m" not in NVFP4BlockScaling().to_json()
    with pytest.raises(RecipeError, match="block_m must be 1 or 16, got 32"):
        NVFP4BlockScaling(block_m=32)
