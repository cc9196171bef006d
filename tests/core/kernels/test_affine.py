"""The values of codes under given scales: zero + step times the number of the code, for every recipe."""

from __future__ import annotations

import numpy as np
import pytest
from recipes import RECIPES, recipe_id

import breccia
from breccia import ScalingRecipe, UnsupportedError
from breccia.internal import affine
from breccia.testing.two_codecs import TwoCodecs

X = np.random.default_rng(0).standard_normal((48, 96)).astype(np.float32)
WRITTEN = [recipe for recipe in RECIPES if not recipe.decode_only and recipe.format.alternative is None]


@pytest.mark.parametrize("recipe", WRITTEN, ids=recipe_id)
def test_codes_decode_to_zero_plus_step_times_their_number(recipe: ScalingRecipe) -> None:
    st = breccia.cast(X, recipe)
    zero, step = affine.affine(st)
    codec = recipe.format.element
    numbers = np.array([codec.value(code) for code in range(1 << codec.bits)])
    n = numbers[affine.codes_of(st) & ((1 << codec.bits) - 1)]
    terms = step * n
    # `dequantize` rounds a product of a code and at most three scales and a sum: four roundings of 2^-24 of the larger term.
    # So do the two values that the step is the difference of, and n multiplies their errors.
    allowed = 2.0**-22 * (np.abs(terms) + (1 + 2 * np.abs(n)) * (np.abs(zero) + np.abs(step))).astype(np.float64)
    assert (np.abs(zero + terms - breccia.dequantize(st)) <= allowed).all()


@pytest.mark.parametrize("recipe", WRITTEN[::4], ids=recipe_id)
def test_the_codes_of_a_tensor_make_the_same_tensor(recipe: ScalingRecipe) -> None:
    st = breccia.cast(X, recipe)
    assert breccia.bytes_equal(affine.with_codes(st, affine.codes_of(st)), st)


def test_blocks_that_choose_between_two_codecs_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="choose between .* and .*, so that the number of a code depends on its block"):
        affine.affine(breccia.cast(X, TwoCodecs()))


def test_a_codec_without_zero_has_its_numbers_too() -> None:
    numbers, codes = affine.numbers_of_codec(breccia.recipe("nf4").format.element)
    assert (np.diff(numbers) > 0).all() and len(codes) == 16
