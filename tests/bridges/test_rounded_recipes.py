"""Recipes of breccia-bridges whose values are rounded to half precision, or multiplied by a constant, in every framework."""

from __future__ import annotations

import pytest

import breccia
from breccia.testing.laws import recipes as laws
from breccia.testing.places import Place
from breccia_bridges.recipes import BnbINT8Scaling, RoundedIntScaling

RECIPES = [
    RoundedIntScaling(4, 16),
    RoundedIntScaling(3, 32, "fp16"),
    RoundedIntScaling(8, 16, offset="float_zero_point"),
    RoundedIntScaling(2, 16, "fp16", "float_zero_point"),
    BnbINT8Scaling("fp32"),
]


@pytest.mark.long
@pytest.mark.parametrize("framework", ("numpy", "torch", "jax", "mlx"))
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: str(recipe.spec))
def test_casts_and_values_are_those_of_the_oracle(recipe: breccia.ScalingRecipe, framework: str) -> None:
    place = Place(framework)
    laws.a_cast_writes_the_oracles_bytes(recipe, place)
    laws.every_code_under_every_scale_decodes_as_the_oracle_says(recipe, place)
    laws.casts_write_the_bytes_of_numpy(recipe, place)
    laws.nothing_non_finite_becomes_finite(recipe, place)


def test_what_a_recipe_cannot_be_is_refused() -> None:
    with pytest.raises(breccia.RecipeError, match="scale_dtype"):
        RoundedIntScaling(scale_dtype="fp32")
    with pytest.raises(breccia.RecipeError, match="offset"):
        RoundedIntScaling(offset="zero_point")
    with pytest.raises(breccia.RecipeError, match="scale_dtype"):
        BnbINT8Scaling("bf16")
