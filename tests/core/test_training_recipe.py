"""breccia.TrainingRecipe: what the GEMMs of a layer in training multiply."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest

import breccia
from breccia import RecipeError, TrainingRecipe, UnknownNameError, UnsupportedError
from breccia.backend import ops_of
from breccia.kernels.hadamard import SIGNS, hadamard
from breccia.testing.oracle import threefry2x32
from breccia.training import GEMMS, HADAMARDS, PRESETS


def listed(recipe: TrainingRecipe) -> dict[str, list[tuple[object, ...]]]:
    """The operands of each GEMM, recipes as specs."""
    return {
        gemm: [(o.tensor, o.recipe and o.recipe.spec, o.axis, o.rounding, o.hadamard) for o in operands]
        for gemm, operands in recipe.operands.items()
    }


def test_a_preset_says_what_each_gemm_multiplies() -> None:
    # Expected by hand: from y = x w^T, dx = dy w, dw = dy^T x, and the papers cited beside the presets.
    assert listed(TrainingRecipe("fp8_tile")) == {
        "output": [("input", "fp8_block", -1, "nearest", 0), ("weight", "fp8_block,block_m=128", -1, "nearest", 0)],
        "grad_input": [("gradient", "fp8_block", -1, "nearest", 0), ("weight", "fp8_block,block_m=128", -2, "nearest", 0)],
        "grad_weight": [("gradient", "fp8_block", -2, "nearest", 0), ("input", "fp8_block,block_m=128", -2, "nearest", 0)],
    }
    assert listed(TrainingRecipe("nvfp4")) == {
        "output": [("input", "nvfp4", -1, "nearest", 0), ("weight", "nvfp4,block_m=16", -1, "nearest", 0)],
        "grad_input": [("gradient", "nvfp4", -1, "stochastic", 0), ("weight", "nvfp4,block_m=16", -2, "nearest", 0)],
        "grad_weight": [("gradient", "nvfp4", -2, "stochastic", 16), ("input", "nvfp4", -2, "nearest", 16)],
    }
    assert TrainingRecipe("nvfp4").stochastic and not TrainingRecipe("fp8_tile").stochastic
    assert list(TrainingRecipe("fp8_delayed").delayed) == ["input", "weight", "gradient"]


@pytest.mark.parametrize(
    "recipe",
    [
        *map(TrainingRecipe, PRESETS),
        TrainingRecipe("nvfp4", hadamard=0, high_precision=("grad_weight",)),
        TrainingRecipe("fp8_tile", input_columns="none"),
        TrainingRecipe(input="mxfp8", weight="mxfp4", gradient=None, gradient_rounding="stochastic"),
    ],
    ids=repr,
)
def test_a_recipe_is_a_value(recipe: TrainingRecipe) -> None:
    for same in (
        TrainingRecipe.from_json(recipe.to_json()),
        TrainingRecipe.of(recipe.to_json()),
        TrainingRecipe.of(recipe.to_dict()),
        TrainingRecipe.of(recipe),
        pickle.loads(pickle.dumps(recipe)),
        copy.deepcopy(recipe),
        eval(repr(recipe)),
    ):
        assert same == recipe and hash(same) == hash(recipe) and repr(same) == repr(recipe)
    assert json.loads(recipe.to_json()) == recipe.to_dict()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.hadamard = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_a_preset_equals_its_recipes_and_differs_from_others() -> None:
    assert TrainingRecipe(input="mxfp8", weight="mxfp8", gradient="mxfp8") == TrainingRecipe("mxfp8")
    assert len({TrainingRecipe(name) for name in PRESETS}) == len(PRESETS)
    # A recipe for the rows replaces the preset's for the columns.
    assert TrainingRecipe("fp8_tile", input="mxfp8").input_columns == breccia.MXFP8BlockScaling()


def test_high_precision_leaves_both_operands_of_a_gemm() -> None:
    recipe = TrainingRecipe("nvfp4", high_precision=("grad_weight",))
    assert listed(recipe)["grad_weight"] == [("gradient", None, -2, "nearest", 0), ("input", None, -2, "nearest", 0)]
    assert listed(recipe)["output"] == listed(TrainingRecipe("nvfp4"))["output"]
    assert TrainingRecipe("nvfp4", high_precision="grad_weight") == recipe  # pyright: ignore[reportArgumentType]
    assert recipe.stochastic


@pytest.mark.parametrize(
    ("preset", "fields", "error", "says"),
    [
        ("fp8_blok", {}, UnknownNameError, "did you mean 'fp8_block'"),
        (3, {}, UnsupportedError, "the name of a preset"),
        (None, {}, RecipeError, "needs a preset"),
        (None, {"input": "mxfp9"}, UnknownNameError, "TrainingRecipe, input=: no recipe 'mxfp9'"),
        (None, {"input": "gguf,type=IQ4_NL"}, RecipeError, "casts do not write 'gguf,type=IQ4_NL': its table has no 0"),
        ("mxfp8", {"hadamard": 3}, RecipeError, "hadamard must be one of 0, 4, 16, 64, got 3"),
        ("mxfp8", {"gradient_rounding": "random"}, RecipeError, "gradient_rounding must be 'nearest' or 'stochastic'"),
        ("mxfp8", {"high_precision": ("dgrad",)}, RecipeError, "'dgrad' is not one. Known: grad_input"),
        ("mxfp8", {"high_precision": tuple(GEMMS)}, RecipeError, "nothing is quantized"),
        ("fp8_delayed", {"input_columns": "mxfp8"}, RecipeError, "one history for rows and columns"),
        ("fp8_delayed", {"hadamard": 16}, RecipeError, "hadamard changes the amax"),
    ],
)
def test_contradictions_are_named(preset: object, fields: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as e:
        TrainingRecipe(preset, **fields)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert says in str(e.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "this is not JSON"),
        ("[]", "an object with the fields input, weight"),
        ('{"inptu": null}', "no field 'inptu'; did you mean 'input'"),
    ],
)
def test_damaged_json_is_named(text: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        TrainingRecipe.from_json(text)


def test_other_types_are_named() -> None:
    with pytest.raises(UnsupportedError, match="a TrainingRecipe or the name of a preset"):
        TrainingRecipe.of(7)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------- the Hadamard transform


def sylvester(size: int) -> np.ndarray:
    """H D as an exact matrix, from its definition: (-1)^(bits of i & j), and the signs of columns."""
    signs = [-1.0 if SIGNS >> i & 1 else 1.0 for i in range(size)]
    return np.array([[(-1.0) ** (i & j).bit_count() * signs[j] for j in range(size)] for i in range(size)]) / size**0.5


def test_the_signs_are_those_of_threefry() -> None:
    low, high = threefry2x32((0, 0), (0, 0))
    assert high << 32 | low == SIGNS


@pytest.mark.parametrize("size", HADAMARDS[1:])
def test_the_transform_is_orthogonal_and_the_one_declared(size: int) -> None:
    matrix = sylvester(size)
    assert (matrix @ matrix.T == np.eye(size)).all()
    # Integers up to 8 over 64 rows stay below 2^9, times a power of two: every FP32 sum is exact, so equality is due.
    x = np.random.default_rng(0).integers(-8, 9, (2, 2 * size, 5)).astype(np.float32)
    assert (hadamard(ops_of(x), x, size) == np.einsum("ij,bgjk->bgik", matrix, x.reshape(2, 2, size, 5)).reshape(x.shape)).all()


def test_missing_rows_are_zeros_and_the_product_stays() -> None:
    rng = np.random.default_rng(1)
    x, dy = (rng.integers(-8, 9, (37, n)).astype(np.float32) for n in (5, 3))
    tx, tdy = (hadamard(ops_of(v), v, 16) for v in (x, dy))
    assert tx.shape == (48, 5) and tdy.shape == (48, 3)
    assert (tdy.T @ tx == dy.T @ x).all()  # exact, as above
