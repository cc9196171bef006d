"""Pairs of recipes where the second represents all values of the first: `requantize` keeps scales and translates codes.

Computed from declarations only, so new recipes are covered automatically. Defined in docs/spec/numerics.md, section 6.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ..codecs import F32, Codec, Minifloat
from ..formats import TENSOR, Block, Format
from ..fp32 import MAGNITUDE, NORMAL
from ..layouts import Layout, PerGroupIndex
from ..recipe_bases import powers_of_two
from ..recipes import ScalingRecipe


def same_scales(source: ScalingRecipe, target: ScalingRecipe, block: Block | None = None) -> bool:
    """Whether the values of `source`'s scales are valid scales of `target`

    Both decode by the same steps, blocks of `target` lie within blocks of `source`, and if `target` requires powers of two,
    `source` writes them. Scales that are coded under others, or choose a codec, are valid in their own format alone.
    """
    if powers_of_two(target) and not powers_of_two(source):
        return False
    if {"coded_scales", "alternative"} & (source.format.features | target.format.features):
        return source.format == target.format
    steps = [
        (f.offset, f.global_scale, f.scale.convention, _qmaxes(f), f.order, f.factor, f.precision, f.rotation)
        for f in (source.format, target.format)
    ]
    return steps[0] == steps[1] and nests(block or source.format.scale.block, target.format.scale.block)


def _qmaxes(fmt: Format) -> list[float]:
    """The qmax of each level that needs it for decoding."""
    return [fmt.qmax(level) for level in fmt.levels if level.convention == "amax"]


def nests(outer: Block, inner: Block) -> bool:
    """Whether each block of sides `inner` lies within one of sides `outer`"""
    if inner == TENSOR:
        return outer == TENSOR
    return all(o is None or (i is not None and o % i == 0) for o, i in zip(outer, inner, strict=True))


@lru_cache(maxsize=256)
def renamed(source: Codec, target: Codec) -> tuple[int, ...] | None:
    """For each code of `source` the code of `target` that decodes to the same FP32 bits; None if any has no such code."""
    codes = {bits: code for code, bits in reversed(list(enumerate(target.table)))}
    target_codes = [codes.get(bits) for bits in source.table]
    return None if None in target_codes else tuple(code for code in target_codes if code is not None)


@lru_cache(maxsize=256)
def hold_scales(source: Codec, target: Codec) -> bool:
    """Whether `target` represents every scale stored in `source`, without FP32 subnormals, which some backends flush"""
    if source == target:
        return True
    if target.bits <= 8 or not isinstance(target, Minifloat):
        return False
    if source.bits > 8:
        return target == F32
    return all(_holds(target, source.value(code), source.table[code]) for code in range(1 << source.bits))


def _holds(codec: Minifloat, value: float, bits: int) -> bool:
    """Whether `codec` (16 or 32 bits) represents `value` (FP32 bits `bits`), or it is NaN"""
    if math.isnan(value) or value == 0:
        return True
    fits = bits & ((1 << (23 - codec.mantissa_bits)) - 1) == 0 and abs(value) >= 2.0 ** (1 - codec.bias)
    return fits and bits & MAGNITUDE >= NORMAL and abs(value) <= codec.max


class Translation(NamedTuple):
    """How `requantize` keeps scales and translates codes.

    recipe_only: only the recipe changes. block: that of a stored scale. codes: as of `renamed`. promised: whether the new codec
    of scales holds every scale; otherwise the values decide.
    """

    recipe_only: bool
    block: Block
    codes: tuple[int, ...] = ()
    promised: bool = True


def translation(old: ScalingRecipe, layout: Layout, axis: int, new: ScalingRecipe) -> Translation | None:
    """How a tensor of `old` becomes one of `new` without a cast; None where its values have to be cast."""
    return _translation(old, *covered(old, layout, axis), new)


@lru_cache(maxsize=1024)
def _translation(old: ScalingRecipe, grouped: bool, block: Block, new: ScalingRecipe) -> Translation | None:
    nested = same_scales(old, new, block)
    if old == new or (old.format == new.format and nested):
        return Translation(True, block)
    codes = renamed(old.format.element, new.format.element)
    if codes is None or grouped or not nested:
        return None
    return Translation(False, block, codes, hold_scales(old.format.scale.codec, new.format.scale.codec))


def keeps_parts(old: ScalingRecipe, layout: Layout, axis: int, new: ScalingRecipe) -> bool:
    """Whether `requantize` changes only the recipe, whatever the components contain"""
    conversion = translation(old, layout, axis, new)
    return conversion is not None and conversion.recipe_only


def covered(recipe: ScalingRecipe, layout: Layout, axis: int) -> tuple[bool, Block]:
    """(whether an index assigns scales, the block of a scale)"""
    grouped = isinstance(layout, PerGroupIndex)
    return grouped, recipe.format.scale.block if grouped else layout.block(axis)


def repeats(old: ScalingRecipe, layout: Layout, axis: int, new: ScalingRecipe) -> bool:
    """Whether `requantize` keeps all codes, and repeats scales of blocks for finer blocks"""
    conversion, source, target = translation(old, layout, axis, new), old.format, new.format
    if conversion is None or conversion.recipe_only or conversion.block == TENSOR or source.offset != "none":
        return False
    return (source.element, source.scale.codec) == (target.element, target.scale.codec)
