"""One list of recipe settings that reaches every branch of the numerics contract, and what tests ask about a setting."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import breccia
from breccia import Codec, Format, Layout, Level, ScalingRecipe
from breccia.kernels import exact
from breccia.rules import LINEAR, Rule

SPECS = """
    fp8_delayed fp8_delayed,fp8_format=E5M2,margin=3 fp8_delayed,margin=-126 fp8_delayed,margin=126
    fp8_delayed,margin=3,scale_rule=te
    fp8_current fp8_current,fp8_format=E5M2 fp8_current,scale_rule=te fp8_current,fp8_format=E5M2,scale_rule=divide
    fp8_row fp8_row,fp8_format=E5M2,scale_rule=recip
    fp8_delayed,fp8_format=E4M3FNUZ fp8_current,fp8_format=E5M2FNUZ fp8_row,fp8_format=E4M3FNUZ,scale_rule=te
    fp8_block,fp8_format=E4M3FNUZ,block_k=16 fp8_block,fp8_format=E5M2FNUZ,block_k=8,block_m=2,power_of_two_scale=true
    fp8_block fp8_block,fp8_format=E5M2,block_k=16 fp8_block,block_k=16,block_m=4
    fp8_block,block_k=8,block_m=2,power_of_two_scale=true fp8_block,block_k=16,scale_rule=recip
    fp8_block,block_k=16,scale_rule=divide fp8_block,block_k=16,scale_rule=te
    fp8_block,block_k=16,block_m=2,power_of_two_scale=true,scale_rule=te
    mxfp8 mxfp8,fp8_format=E5M2 mxfp8,scale_rule=floor mxfp8,scale_rule=even
    mxfp6 mxfp6,fp6_format=E3M2 mxfp6,fp6_format=E3M2,scale_rule=floor
    mxfp4 mxfp4,scale_rule=even
    mxint8 mxint8,scale_rule=floor mxint8,scale_rule=even
    nvfp4 nvfp4,two_level=false nvfp4,scale_format=UE5M3 nvfp4,scale_format=UE5M3,two_level=false
    int4 int4,group_size=16,scale_dtype=bf16 int4,group_size=16,scale_dtype=fp32 int4,group_size=16,signed=false
    int4,group_size=16,signed=false,symmetric=false int4,group_size=8,signed=false,scale_dtype=fp32,symmetric=false
    int4,group_size=16,scale_rule=half_range int4,group_size=16,signed=false,symmetric=false,offset=bias
    int4,group_size=8,signed=false,scale_dtype=bf16,symmetric=false,offset=bias
    int8 int8,group_size=16,scale_dtype=fp16,scale_rule=half_range int8,group_size=16,scale_dtype=bf16,scale_rule=divide
    int8,signed=false,symmetric=false int8,group_size=16,signed=false,symmetric=false,offset=bias
    int int,bits=1,group_size=16,signed=false int,bits=2,group_size=16,symmetric=false,scale_rule=divide
    int,bits=3,group_size=16,scale_dtype=bf16 int,bits=5,group_size=16,offset=bias
    int,bits=6,group_size=8,scale_dtype=fp32,scale_rule=recip,symmetric=false
    int,bits=7,group_size=null,scale_rule=half_range int,bits=8,group_size=16,signed=false,symmetric=false
    nf4 nf4,block_size=16,scale_dtype=fp16
"""
RECIPES: list[ScalingRecipe] = [breccia.recipe(spec) for spec in SPECS.split()]
#: Integers of every width, without and with an offset, in groups that end within bytes, or per row.
WIDTHS = [
    breccia.INTScaling(width, group, signed, dtype, symmetric, rule, offset)
    for width in range(1, 9)
    for group, signed, dtype, symmetric, rule, offset in (
        (12, True, "bf16", True, "half_range", "zero_point"),
        (24, False, "fp32", True, "recip", "zero_point"),
        (None, False, "fp16", False, "divide", "zero_point"),
        (24, False, "fp16", False, "linear", "bias"),
    )
    if width > 1 or not signed
]


def declared(
    element: Codec,
    *levels: Level,
    rule: Rule | tuple[Rule, ...] = LINEAR,
    offset: Any = "none",
    within: Layout | None = None,
    name: str = "declared",
    alternative: Codec | None = None,
) -> ScalingRecipe:
    """A recipe that no class of breccia declares.

    rule: that of every level, or those of each. within: its layout, where the block of its scales has no standard one.
    """

    class Declared(ScalingRecipe):
        source = "tests"
        format = Format(element, levels, offset, alternative=alternative)  # type: ignore[assignment]
        rules = rule if isinstance(rule, tuple) else (rule,) * len(levels)  # type: ignore[assignment]

        @cached_property
        def layout(self) -> Layout:
            return super().layout if within is None else within

    Declared.name = name
    return dataclasses.dataclass(frozen=True)(Declared)()


def recipe_id(recipe: ScalingRecipe) -> str:
    """A short test id: the recipe's name, and the fields that differ from their defaults."""
    default = type(recipe)()
    changed = [f.name for f in dataclasses.fields(recipe) if getattr(recipe, f.name) != getattr(default, f.name)]  # type: ignore[arg-type]
    return "-".join([recipe.name, *(f"{name}={getattr(recipe, name)}" for name in changed)])


def is_exact(source: ScalingRecipe, target: ScalingRecipe) -> bool:
    """Can `target` hold every tensor of `source` with the same decoded bits?"""
    names, scales = zip(*((r.format.element, r.format.scale.codec) for r in (source, target)), strict=True)
    return exact.renamed(*names) is not None and exact.same_scales(source, target) and exact.hold_scales(*scales)


def as_mlx(recipe: ScalingRecipe | str) -> dict[str, Any]:
    """The policy that quantizes what `mlx.nn.quantize` does, embeddings and heads too."""
    return {"preset": "mlx.nn.quantize", "default": recipe}
