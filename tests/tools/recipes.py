"""One list of recipe settings that reaches every branch of the numerics contract, and what tests ask about a setting."""

from __future__ import annotations

import dataclasses

from breccia import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    MXINT8BlockScaling,
    NF4Scaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.kernels import exact

RECIPES: list[ScalingRecipe] = [
    DelayedScaling(),
    DelayedScaling("E5M2", margin=3),
    DelayedScaling(margin=-126),
    DelayedScaling(margin=126),
    DelayedScaling(margin=3, scale_rule="te"),
    Float8CurrentScaling(),
    Float8CurrentScaling("E5M2"),
    Float8CurrentScaling(scale_rule="te"),
    Float8CurrentScaling("E5M2", scale_rule="divide"),
    Float8RowScaling(),
    Float8RowScaling("E5M2", scale_rule="recip"),
    Float8BlockScaling(),
    Float8BlockScaling("E5M2", block_k=16),
    Float8BlockScaling(block_k=16, block_m=4),
    Float8BlockScaling(block_k=8, block_m=2, power_of_two_scale=True),
    Float8BlockScaling(block_k=16, scale_rule="recip"),
    Float8BlockScaling(block_k=16, scale_rule="divide"),
    Float8BlockScaling(block_k=16, scale_rule="te"),
    Float8BlockScaling(block_k=16, block_m=2, power_of_two_scale=True, scale_rule="te"),
    MXFP8BlockScaling(),
    MXFP8BlockScaling("E5M2"),
    MXFP8BlockScaling(scale_rule="floor"),
    MXFP8BlockScaling(scale_rule="even"),
    MXFP6BlockScaling(),
    MXFP6BlockScaling("E3M2"),
    MXFP6BlockScaling("E3M2", scale_rule="floor"),
    MXFP4BlockScaling(),
    MXFP4BlockScaling(scale_rule="even"),
    MXINT8BlockScaling(),
    MXINT8BlockScaling(scale_rule="floor"),
    MXINT8BlockScaling(scale_rule="even"),
    NVFP4BlockScaling(),
    NVFP4BlockScaling(two_level=False),
    INT4Scaling(),
    INT4Scaling(group_size=16, scale_dtype="bf16"),
    INT4Scaling(group_size=16, scale_dtype="fp32"),
    INT4Scaling(group_size=16, signed=False),
    INT4Scaling(group_size=16, signed=False, symmetric=False),
    INT4Scaling(group_size=8, signed=False, symmetric=False, scale_dtype="fp32"),
    INT4Scaling(group_size=16, scale_rule="half_range"),
    INT4Scaling(group_size=16, signed=False, symmetric=False, offset="bias"),
    INT4Scaling(group_size=8, signed=False, symmetric=False, scale_dtype="bf16", offset="bias"),
    INT8Scaling(),
    INT8Scaling(group_size=16, scale_dtype="fp16", scale_rule="half_range"),
    INT8Scaling(group_size=16, scale_dtype="bf16", scale_rule="divide"),
    INT8Scaling(signed=False, symmetric=False),
    INT8Scaling(group_size=16, signed=False, symmetric=False, offset="bias"),
    NF4Scaling(),
    NF4Scaling(block_size=16, scale_dtype="fp16"),
]


def recipe_id(recipe: ScalingRecipe) -> str:
    """A short test id: the recipe's name, and the fields that differ from their defaults."""
    default = type(recipe)()
    changed = [f.name for f in dataclasses.fields(recipe) if getattr(recipe, f.name) != getattr(default, f.name)]  # type: ignore[arg-type]
    return "-".join([recipe.name, *(f"{name}={getattr(recipe, name)}" for name in changed)])


def is_exact(source: ScalingRecipe, target: ScalingRecipe) -> bool:
    """Can `target` hold every tensor of `source` with the same decoded bits?"""
    names, scales = zip(*((r.format.element, r.format.scale.codec) for r in (source, target)), strict=True)
    return exact.renamed(*names) is not None and exact.same_scales(source, target) and exact.hold_scales(*scales)
