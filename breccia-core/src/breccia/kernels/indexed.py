"""`cast` with groups given by an index: the columns of each group side by side, a cast in blocks, and the codes put back."""

from __future__ import annotations

from typing import Any

from ..arrays.frameworks import ops_of, shape_of
from ..arrays.ops import Ops
from ..dispatch import calls
from ..errors import LayoutError, OptionError, UnsupportedError
from ..layouts import PerGroupIndex
from ..options import CastOptions
from ..recipes import ScalingRecipe
from ..tensors.checks import contraction_axis
from ..tensors.grids import packing
from ..tensors.tensor import ScaledTensor
from . import reference
from .checks import check_cast

Array = Any


def cast(x: Array, recipe: ScalingRecipe, index: Any, options: CastOptions) -> ScaledTensor:
    """`x` quantized under `recipe`, element k of the contraction axis in group `index[k]`, as `breccia.cast` documents."""
    check_cast(x, recipe)
    shape = shape_of(x, "x")
    axis, ops = contraction_axis(options.axis, len(shape)), ops_of(x)
    size = _group_size(recipe)
    layout = _layout(index, shape[axis])
    if options.rounding != "nearest" or options.out is not None or options.storage != "plain":
        raise OptionError("cast(group_index=...) takes neither rounding=, storage= nor out=; leave them out.")
    members: list[list[int]] = [[] for _ in range(layout.groups)]
    for k, group in enumerate(layout.index):
        members[group].append(k)
    for group, columns in enumerate(members):
        if len(columns) > size:
            raise LayoutError(
                f"group_index puts {len(columns)} elements into group {group}; a scale of {recipe.spec} is for {size} at most. "
                "Use a recipe of larger groups, or more groups.",
                group=group,
                found=len(columns),
            )
    if not all(members):  # a group without elements has the scale of zeros
        x = ops.pad(x, tuple(int(a == len(shape) + axis) for a in range(len(shape))))
    # A group is filled up with its first element, which changes no statistic.
    order = tuple(k for group in members for k in (group + [group[0] if group else shape[axis]] * (size - len(group))))
    place = {k: n for n, k in reversed(list(enumerate(order)))}
    if recipe.searches:  # nor any error: what fills a group has no weight
        options = options.replace(importance=_weights(ops, x, shape[axis], order, options.importance))
    st = calls.cast(ops.gather(x, order, axis), recipe, options)
    element = recipe.format.element
    codes = ops.gather(
        reference.unpack(ops, st.data, element, len(order), axis), tuple(map(place.get, range(shape[axis]))), axis
    )
    data = reference.pack(ops, codes, element, axis)
    padding = -shape[axis] % packing(element)[0]
    return ScaledTensor.from_parts(data, st.scale, recipe, layout, st.zero_point, st.global_scale, axis, padding)


def _weights(ops: Ops, x: Array, length: int, order: tuple[int, ...], importance: Array | None) -> Array:
    """The importance of elements in an order that repeats some: each has weight once."""
    weights = ops.broadcast(ops.constant(1.0, x), (length,)) if importance is None else ops.f32(importance)
    weights = ops.gather(ops.pad(weights, (1,)), order, 0)
    first = {k: n for n, k in reversed(list(enumerate(order)))}
    repeated = tuple(int(first[k] == n and k < length) for n, k in enumerate(order))
    return ops.where(ops.take(repeated, ops.counter(weights)[0]) != 0, weights, 0.0)


def _group_size(recipe: ScalingRecipe) -> int:
    """The elements of a group. Raises UnsupportedError for recipes whose scales have no groups along K."""
    fmt = recipe.format
    rows, size = fmt.block
    if rows != 1 or size is None or fmt.scale_codec.bits <= 8 or fmt.global_scale is not None:
        raise UnsupportedError(
            f"group_index is for recipes with one float scale per group along K, such as 'int4'; {recipe.spec} has other "
            "blocks. Cast without it.",
            recipe=recipe,
        )
    return size


def _layout(index: Any, length: int) -> PerGroupIndex:
    """The layout of an index: a sequence of integers, an array of them, or a layout itself."""
    if isinstance(index, PerGroupIndex):
        layout = index
    else:
        if hasattr(index, "dtype"):
            ops = ops_of(index, "group_index")
            if not ops.readable(index):
                raise UnsupportedError("group_index has to be known: it is part of the layout; a traced array has no values.")
            index = ops.to_numpy(index).tolist()
        layout = PerGroupIndex(tuple(index), max(index, default=0) + 1)
    if len(layout.index) != length:
        raise LayoutError(
            f"group_index has one group for each element of the contraction axis, {length} of them; got {len(layout.index)}.",
            expected=length,
            found=len(layout.index),
        )
    return layout
