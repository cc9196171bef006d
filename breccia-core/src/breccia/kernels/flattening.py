"""Ops on scales of several levels, by the kernels for one scale per block.

The levels of a block multiply to one FP32 scale, and those of a bias to one FP32 bias. A tensor with these in their place has
the same values, bit for bit, in a format that every kernel knows: `FlatScaling`.
"""

from __future__ import annotations

from typing import Any

from ..arrays.frameworks import ops_of
from ..dispatch import calls
from ..options import DEFAULT, FLOAT32, CastOptions, ProductOptions
from ..recipes import ScalingRecipe
from ..tensors.tensor import ScaledTensor
from . import reference
from .checks import fitted_layout
from .plans import flat_recipe
from .reference.tiles import Tiles

Array = Any


def flattened(st: ScaledTensor) -> ScaledTensor:
    """`st` with one FP32 scale, and one FP32 zero-point or bias, for each of its finest blocks."""
    recipe = flat_recipe(st.recipe)
    assert recipe is not None
    st, fmt = st.to_plain(), st.recipe.format
    ops, shape = ops_of(st.data, "data"), tuple(st.shape)
    tiles = Tiles.along(ops, st.axis, shape, fmt.scale.block)
    with ops.errstate():
        scale = reference.scales_of_blocks(ops, st, tiles)
        offset = None if fmt.offset == "none" else reference.offset_of_blocks(ops, st, tiles)
    layout = fitted_layout(recipe, shape, st.axis)
    return ScaledTensor.from_parts(st.data, scale, recipe, layout, offset, None, st.axis, st.padding)


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Array:
    """The kernel of `dequantize`, on the flattened tensor."""
    return calls.dequantize(flattened(st), options)


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """The kernel of `matmul`, on flattened operands."""
    return calls.matmul(_flat(a), _flat(b), options)


def grouped_matmul(a: Any, b: Any, offsets: Array, options: ProductOptions = FLOAT32) -> Array:
    """The kernel of `grouped_matmul`, on flattened operands."""
    return calls.grouped_matmul(_flat(a), _flat(b), offsets, options)


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """The kernel of `cast` under the recipe that writes the same bytes, with the name of this one."""
    out = options.out
    st = calls.cast(x, recipe.written_as, options.replace(out=None))
    parts = (st.zero_point, st.global_scale, st.axis, st.padding)
    named = ScaledTensor.from_parts(st.data, st.scale, recipe, st.layout, *parts)
    return named if out is None else reference.assign(ops_of(x), out, named)


def _flat(x: Any) -> Any:
    return flattened(x) if isinstance(x, ScaledTensor) and x.recipe.format.features else x
