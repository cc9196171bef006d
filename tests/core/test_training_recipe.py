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
from breccia.kernels.reference import rotated
from breccia.rotations import ROTATIONS, Rotation
from breccia.training import GEMMS, PRESETS


def listed(recipe: TrainingRecipe) -> dict[str, list[tuple[object, ...]]]:
    """The operands of each GEMM, recipes as specs."""
    return {
        gemm: [(o.tensor, o.recipe and o.recipe.spec, o.axis, o.rounding, o.rotation and o.rotation.block) for o in operands]
        for gemm, operands in recipe.operands.items()
    }


def test_a_preset_says_what_each_gemm_multiplies() -> None:
    # Expected by hand: from y = x w^T, dx = dy w, dw = dy^T x, and the papers cited beside the presets.
    assert listed(TrainingRecipe("fp8_tile")) == {
        "output": [("input", "fp8_block", -1, "nearest", None), ("weight", "fp8_block,block_m=128", -1, "nearest", None)],
        "grad_input": [
            ("gradient", "fp8_block", -1, "nearest", None),
            ("weight", "fp8_block,block_m=128", -2, "nearest", None),
        ],
        "grad_weight": [
            ("gradient", "fp8_block", -2, "nearest", None),
            ("input", "fp8_block,block_m=128", -2, "nearest", None),
        ],
    }
    assert listed(TrainingRecipe("nvfp4")) == {
        "output": [("input", "nvfp4", -1, "nearest", None), ("weight", "nvfp4,block_m=16", -1, "nearest", None)],
        "grad_input": [("gradient", "nvfp4", -1, "stochastic", None), ("weight", "nvfp4,block_m=16", -2, "nearest", None)],
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
        TrainingRecipe("mxfp8", columns_from_codes=("input", "gradient")),
        TrainingRecipe("fp8_current", fast_accumulation=("output", "grad_input")),
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
        recipe.hadamard = 16  # pyright: ignore[reportAttributeAccessIssue]


def test_a_preset_equals_its_recipes_and_differs_from_others() -> None:
    assert TrainingRecipe(input="mxfp8", weight="mxfp8", gradient="mxfp8") == TrainingRecipe("mxfp8")
    assert len({TrainingRecipe(name) for name in PRESETS}) == len(PRESETS)
    # A recipe for the rows replaces the preset's for the columns.
    assert TrainingRecipe("fp8_tile", input="mxfp8").input_columns == breccia.MXFP8BlockScaling()


def test_high_precision_leaves_both_operands_of_a_gemm() -> None:
    recipe = TrainingRecipe("nvfp4", high_precision=("grad_weight",))
    assert listed(recipe)["grad_weight"] == [("gradient", None, -2, "nearest", None), ("input", None, -2, "nearest", None)]
    assert listed(recipe)["output"] == listed(TrainingRecipe("nvfp4"))["output"]
    assert TrainingRecipe("nvfp4", high_precision="grad_weight") == recipe  # pyright: ignore[reportArgumentType]
    assert recipe.stochastic


def test_columns_are_cast_from_codes_where_the_recipe_says_so() -> None:
    recipe = TrainingRecipe("mxfp8", columns_from_codes=("gradient", "input"))
    assert recipe.columns_from_codes == ("input", "gradient")
    columns = {o.tensor: o.from_codes for pair in recipe.operands.values() for o in pair if o.axis == -2}
    assert columns == {"input": True, "weight": False, "gradient": True}
    assert not any(recipe.uses(tensor)[0].from_codes for tensor in columns)


@pytest.mark.parametrize(
    ("preset", "fields", "error", "says"),
    [
        ("fp8_blok", {}, UnknownNameError, "did you mean 'fp8_block'"),
        (3, {}, UnsupportedError, "the name of a preset"),
        (None, {}, RecipeError, "needs a preset"),
        (None, {"input": "mxfp9"}, UnknownNameError, "TrainingRecipe, input=: no recipe 'mxfp9'"),
        (None, {"input": "gguf,type=IQ4_NL"}, RecipeError, "casts do not write 'gguf,type=IQ4_NL': its table has no 0"),
        ("mxfp8", {"hadamard": 4}, RecipeError, "hadamard must be one of 0, 16, 32, 64, 128, got 4"),
        ("mxfp8", {"gradient_rounding": "random"}, RecipeError, "gradient_rounding must be 'nearest' or 'stochastic'"),
        ("mxfp8", {"high_precision": ("dgrad",)}, RecipeError, "'dgrad' is not one. Known: grad_input"),
        ("mxfp8", {"high_precision": tuple(GEMMS)}, RecipeError, "nothing is quantized"),
        ("fp8_delayed", {"input_columns": "mxfp8"}, RecipeError, "one history for rows and columns"),
        ("fp8_delayed", {"hadamard": 16}, RecipeError, "hadamard changes the amax"),
        ("nvfp4", {"input": "fp8_delayed"}, RecipeError, "hadamard changes the amax"),
        (
            "fp8_row",
            {"fast_accumulation": ("forward",)},
            RecipeError,
            "fast_accumulation lists GEMMs, and 'forward' is not one",
        ),
        ("fp8_block", {"fast_accumulation": "output"}, RecipeError, "'fp8_block' of its input is not FP8 with one scale"),
        ("fp8_row", {"weight": "int8", "fast_accumulation": "output"}, RecipeError, "'int8' of its weight is not FP8"),
        (
            "fp8_row",
            {"high_precision": "output", "fast_accumulation": "output"},
            RecipeError,
            "fast_accumulation lists 'output', and its input is in high precision. Leave it out, or choose",
        ),
        ("mxfp8", {"columns_from_codes": ("x",)}, RecipeError, "columns_from_codes lists tensors, and 'x' is not one"),
        (
            "fp8_tile",
            {"columns_from_codes": "input"},
            RecipeError,
            "'fp8_block' has no float codes under scales that are powers",
        ),
        ("fp8_delayed", {"columns_from_codes": "weight"}, RecipeError, "choose a recipe such as 'mxfp8' or 'fp8_block,power_"),
        ("nvfp4", {"columns_from_codes": "weight"}, RecipeError, "'nvfp4,block_m=16' has no float codes"),
        ("mxfp8", {"input": "mxint8", "columns_from_codes": "input"}, RecipeError, "'mxint8' has no float codes"),
        ("mxfp8", {"hadamard": 16, "columns_from_codes": "gradient"}, RecipeError, "hadamard rotates its columns"),
        ("mxfp8", {"high_precision": "output", "columns_from_codes": "input"}, RecipeError, "its rows are in high precision"),
        ("mxfp8", {"weight_columns": "none", "columns_from_codes": "weight"}, RecipeError, "its columns are in high precision"),
        (
            "mxfp8",
            {"input_columns": "mxfp8,fp8_format=E5M2", "columns_from_codes": "input"},
            RecipeError,
            "'input', and its rows are E4M3 and its columns E5M2",
        ),
        (
            "mxfp8",
            {"input_columns": "mxfp8,scale_rule=floor", "columns_from_codes": "input"},
            RecipeError,
            "the scales of 'mxfp8,scale_rule=floor' may be too small for its largest values",
        ),
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


# ------------------------------------------------------------------------------------------ the rotation of grad_weight


@pytest.mark.parametrize("size", ROTATIONS[1:])
def test_grad_weight_stays_when_its_operands_are_rotated(size: int) -> None:
    rotation = Rotation(size, 0)
    operands = TrainingRecipe("mxfp8", hadamard=size).operands["grad_weight"]
    assert [(of.rotation, of.axis) for of in operands] == [(rotation, -2)] * 2
    rng = np.random.default_rng(1)
    rows = 2 * size + 5  # five after the last whole block
    dy, x = (rng.integers(-8, 9, (rows, n)).astype(np.float32) for n in (3, 5))
    rotated_dy, rotated_x = (rotated(ops_of(v), v, rotation, -2) for v in (dy, x))
    assert (rotated_x[-5:] == x[-5:]).all() and (rotated_dy[-5:] == dy[-5:]).all() and (rotated_x[:-5] != x[:-5]).any()
    found, expected = rotated_dy.astype(np.float64).T @ rotated_x, dy.astype(np.float64).T @ x
    # Sums of integers below 2^24 are exact, and so is their product with 1 / sqrt(16) or 1 / sqrt(64). The other two factors
    # are rounded, and so is the product: each operand has two relative errors of u, so each term four; FP64 adds far less.
    u = 0 if size in (16, 64) else 2.0**-24
    assert (np.abs(found - expected) <= 5 * u * (np.abs(rotated_dy).astype(np.float64).T @ np.abs(rotated_x))).all()


@pytest.mark.parametrize("left", ["input_columns", "gradient_columns"])
def test_no_operand_is_rotated_alone(left: str) -> None:
    """An operand in high precision is multiplied as it is, so the other must be too."""
    recipe = TrainingRecipe("nvfp4", **{left: "none"})  # pyright: ignore[reportArgumentType]
    assert recipe.hadamard == 16 and [of.rotation for of in recipe.operands["grad_weight"]] == [None, None]
