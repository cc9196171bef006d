"""Cutting a scaled tensor: what is left of its axes, pieces along one, other leading axes. Codes are never changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..arrays.frameworks import ops_of
from ..errors import LayoutError
from ..formats import TENSOR
from ..layouts import other_axis
from .components import moved, named_leaves, part_grids, scale_block, unit_of
from .grids import (
    Cut,
    Grid,
    check_axis,
    check_cut,
    cut_component,
    drops,
    expanded,
    inferred,
    length_of,
    packing,
    pieces,
    reshape_leading,
)

if TYPE_CHECKING:
    from .tensor import ScaledTensor


def cut(st: ScaledTensor, cuts: tuple[Cut, ...]) -> ScaledTensor:
    """Apply `cuts`, one per axis."""
    st = st.to_plain()
    flat = any(map(drops, cuts[-2:]))
    st = _with_column_scales(st) if flat else st
    shape, grids = st.shape, part_grids(st)
    _check_dropped(st, cuts, grids)
    for axis, (one, length) in enumerate(zip(cuts, shape, strict=True)):
        check_cut(one, axis, length, unit_of(st, grids, axis))
    ops = ops_of(st.data_source)
    parts = {name: cut_component(ops, part, grids[name], cuts, shape) for name, part in named_leaves(st).items()}
    along, length = cuts[st.axis], shape[st.axis]
    if isinstance(along, int) or drops(along):
        return moved(st, parts, axis=-1)  # one scale covers all, whichever axis remains
    left = tuple(length_of(one) for one in cuts if not isinstance(one, int) and not drops(one))
    layout = st.layout if along == range(length) else st.layout.along(along)
    to_the_end = isinstance(along, range) and along.stop == length
    axis = -1 if flat else st.axis
    return moved(st, parts, layout=layout.fitted(left, axis), axis=axis, padding=st.padding if to_the_end else 0)


def split(st: ScaledTensor, size: int | Sequence[int], axis: int) -> tuple[ScaledTensor, ...]:
    """`st.split(size, axis)`."""
    shape = st.shape
    axis = check_axis(axis, len(shape))
    st = st.to_plain()
    cuts: list[Cut] = [range(n) for n in shape]
    tensors: list[ScaledTensor] = []
    start = 0
    for length in pieces(size, shape[axis], axis):
        cuts[axis] = range(start, start + length) if length else range(0)
        tensors.append(cut(st, tuple(cuts)))
        start += length
    return tuple(tensors)


def reshaped(st: ScaledTensor, shape: tuple[int | Sequence[int], ...]) -> ScaledTensor:
    """`st.reshape(*shape)`."""
    st = st.to_plain()
    old, ops = st.shape, ops_of(st.data_source)
    new = inferred(shape, old)
    if new == old:
        return st
    lead = new[: len(new) - len(old[-2:])]
    parts = {
        name: ops.reshape(part, (*lead, *part.shape[-2:]))
        if name == "data"
        else reshape_leading(ops, part, lead, old, st.axis, scale_block(st, name))
        for name, part in named_leaves(st).items()
    }
    return moved(st, parts)


def _with_column_scales(st: ScaledTensor) -> ScaledTensor:
    """The tensor with PerChannel's scales (M,) as (..., M, 1), from which rows can be taken."""
    block, shape = st.layout.block(st.axis), st.shape
    if block != (1, None) or len(st.scale.shape) == len(shape):
        return st
    ops, parts = ops_of(st.data_source), named_leaves(st)
    scales = {name: part for name, part in parts.items() if name in ("scale", "zero_point")}
    wide = {name: expanded(ops, part, len(shape[:-2]), shape, st.axis, block) for name, part in scales.items()}
    return moved(st, parts | wide)


def _check_dropped(st: ScaledTensor, cuts: tuple[Cut, ...], grids: dict[str, Grid]) -> None:
    """Raise LayoutError where an integer index would drop an axis that codes or scales need.

    The contraction axis can be dropped under one scale and 8-bit codes, the other one where blocks are one row high.
    """
    dropped = [axis for axis in (-2, -1)[-len(cuts) :] if drops(cuts[axis])]
    if not dropped:
        return
    left = sum(not drops(cut) for cut in cuts)
    block, codec = st.layout.block(st.axis), st.recipe.format.element
    alone = block == TENSOR and packing(codec) == (1, 1) and st.recipe.format.rotation is None
    free = {st.axis: alone, other_axis(st.axis): block == TENSOR or block[0] == 1}
    needed = [axis for axis in dropped if not free[axis]]
    # A scale of whole matrices follows leading axes, one of which becomes the rows of a matrix.
    tensor_grids = [grid for name, grid in grids.items() if name != "data" and scale_block(st, name) == TENSOR]
    spans = max((sum(not drops(cuts[along.axis]) for along in grid) for grid in tensor_grids), default=0)
    if left >= st.layout.least_ndim and not needed and spans <= max(left - 2, 0):
        return
    axis = (needed or dropped)[0]
    unit = unit_of(st, grids, len(cuts) + axis)
    cut = "i:i+1" if unit == 1 else f"i:i+{unit}"
    keep = f"st[..., {cut}, :]" if axis == -2 else f"st[..., {cut}]"
    raise LayoutError(
        f"axis {axis} of shape {st.shape} cannot be dropped: {st.layout} and {codec.name} codes need it. "
        f"Keep it: {keep}{', i a multiple of ' + str(unit) if unit > 1 else ''}; or dequantize first.",
        axis=axis,
        shape=st.shape,
    )
