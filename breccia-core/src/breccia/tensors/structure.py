"""Joining scaled tensors: `concat` along an existing axis, `stack` along a new one. Codes are never changed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any

from ..arrays.frameworks import dtype_name, ops_of, same_framework
from ..errors import LayoutError, OptionError, ShapeError, UnsupportedError
from ..formats import TENSOR, Block
from ..layouts import Layout, Shape
from ..tracing import traced_by_framework
from .components import PARTS, components, moved, named_leaves, part_grids, record_bytes, scale_block, unit_of, with_parts
from .grids import check_axis, expanded, scale_grid, spanned
from .tensor import ScaledTensor

if TYPE_CHECKING:
    from ..arrays.ops import Array, Ops


@traced_by_framework
def concat(tensors: Iterable[ScaledTensor], axis: int = 0) -> ScaledTensor:
    """Join tensors of one recipe along `axis`; the inverse of `split`.

    Their shapes must agree except along `axis`. If blocks longer than one element run along it, or codes share bytes, all
    tensors but the last must end on a block or byte boundary. A scale that does not run along `axis` (a per-tensor one, or one
    per row along K) must be identical in all tensors; along a leading axis, differing scales are kept, one per tensor.

    Raises ShapeError, LayoutError or UnsupportedError naming the mismatched tensors and the remedy.

        >>> q, k = (breccia.cast(np.full((2, 32), n, np.float32), "mxfp8") for n in (1, 2))
        >>> breccia.concat([q, k]).shape, breccia.concat([q, k], axis=-1).shape
        ((4, 32), (2, 64))
    """
    sts = _alike("concat", tensors)
    first = sts[0]
    axis = check_axis(axis, first.ndim)
    for n, st in enumerate(sts):
        if any(here != there for a, (here, there) in enumerate(zip(st.shape, first.shape, strict=True)) if a != axis):
            raise ShapeError(
                f"concat: all lengths must agree except along axis {axis}; tensors[0] has shape {first.shape}, "
                f"tensors[{n}] {st.shape}."
            )
    shape = (*first.shape[:axis], sum(st.shape[axis] for st in sts), *first.shape[axis + 1 :])
    runs_along = axis == first.ndim + first.axis
    _check_layouts("concat", [st.layout.along(()) if runs_along else st.layout for st in sts], shape, first.axis)
    sts = [st for st in sts if st.shape[axis]] or sts[:1]
    _check_ends(sts, axis)
    ops, columns = ops_of(first.data_source), _columns(sts)
    parts = {"data": ops.concat(columns.pop("data"), axis), **_joined_scales(ops, sts, columns, axis)}
    layout = reduce(lambda a, b: a.followed_by(b), (st.layout for st in sts)) if runs_along else first.layout
    return _joined_tensor(sts, parts, layout=layout.fitted(shape, first.axis), padding=sts[-1].padding)


@traced_by_framework
def stack(tensors: Iterable[ScaledTensor], axis: int = 0) -> ScaledTensor:
    """Stack tensors of one recipe and shape along a new leading `axis`, from 0 to the number of leading axes.

    Each tensor keeps its scales: of per-tensor scales, the result has one for each position of the new axis.

    Raises ShapeError, LayoutError or UnsupportedError naming the mismatched tensors and the remedy.

        >>> experts = [breccia.cast(np.full((2, 32), n, np.float32), "mxfp8") for n in (1, 2, 4)]
        >>> breccia.stack(experts).shape
        (3, 2, 32)
    """
    sts = _alike("stack", tensors)
    first = sts[0]
    shape, ndim = first.shape, first.ndim
    for n, st in enumerate(sts):
        if st.shape != shape:
            raise ShapeError(f"stack: tensors have one shape; tensors[0] has {shape}, tensors[{n}] {st.shape}.")
    if ndim < 2:
        raise ShapeError(
            f"stack needs tensors of at least two axes; these have shape {shape}. Add one: st.reshape(1, {shape[0]})."
        )
    axis = check_axis(axis, ndim + 1)
    if axis > ndim - 2:
        raise ShapeError(
            f"stack: the new axis leads the last two, so axis is 0..{ndim - 2}; got {axis}. Stack there, and move it once "
            "dequantized.",
            axis=axis,
        )
    _check_layouts("stack", [st.layout for st in sts], shape, first.axis)
    ops = ops_of(first.data_source)
    parts: dict[str, Array] = {}
    for name, column in _columns(sts).items():
        if name != "data":
            block = scale_block(first, name)
            lead = max(axis, *(spanned(len(part.shape), ndim, block) for part in column))
            column = [expanded(ops, part, lead, shape, first.axis, block) for part in column]
        parts[name] = ops.concat([ops.reshape(p, (*p.shape[:axis], 1, *p.shape[axis:])) for p in column], axis)
    return _joined_tensor(sts, parts)


def _columns(sts: list[ScaledTensor]) -> dict[str, list[Array]]:
    """By name, the component of each tensor, or what all of them hold in place of it."""
    parts_of = named_leaves if _all_hold_leaves(sts) else components
    listed = [parts_of(st) for st in sts]
    return {name: [parts[name] for parts in listed] for name in listed[0]}


def _joined_tensor(sts: list[ScaledTensor], parts: dict[str, Array], **changed: Any) -> ScaledTensor:
    """The first tensor with parts that were made from `_columns`, and other fields changed."""
    return (moved if _all_hold_leaves(sts) else with_parts)(sts[0], parts, **changed)


def _all_hold_leaves(sts: list[ScaledTensor]) -> bool:
    return all(st.held is not None for st in sts)


def _dtype(st: ScaledTensor, name: str) -> str:
    return dtype_name(getattr(st, name)) if st.held is None else str(st.held.dtype(PARTS.index(name)))


def _alike(op: str, tensors: Iterable[ScaledTensor]) -> list[ScaledTensor]:
    """The tensors as a list. Raises unless framework, recipe, axis, rank and component dtypes agree."""
    if isinstance(tensors, ScaledTensor) or not isinstance(tensors, Iterable):
        raise UnsupportedError(f"{op} takes a list of ScaledTensors, got one {type(tensors).__name__}: {op}([a, b]).")
    sts = list(tensors)
    if not sts:
        raise OptionError(f"{op} needs at least one tensor; got none.")
    for n, st in enumerate(sts):
        if not isinstance(st, ScaledTensor):
            raise UnsupportedError(
                f"{op} takes ScaledTensors; tensors[{n}] is {type(st).__name__}; cast it with the same recipe."
            )
    sts = [st.to_plain() for st in sts]
    first = sts[0]
    same_framework({f"tensors[{n}]": st.data_source for n, st in enumerate(sts)})
    for n, st in enumerate(sts):
        if st.recipe != first.recipe:
            raise UnsupportedError(
                f"{op}: tensors[0] has recipe {first.recipe!r}, tensors[{n}] {st.recipe!r}; requantize one to the other's."
            )
        if st.ndim != first.ndim:
            raise ShapeError(f"{op}: tensors[0] has shape {first.shape}, tensors[{n}] {st.shape}; reshape one to as many axes.")
        if st.axis != first.axis:
            raise LayoutError(
                f"{op}: blocks run along axis {first.axis} in tensors[0] and along {st.axis} in tensors[{n}]; "
                "transpose one (st.mT), or requantize it along the other axis."
            )
        for name in named_leaves(st):
            here, there = _dtype(st, name), _dtype(first, name)
            if here != there:
                raise UnsupportedError(
                    f"{op}: {name} is {there} in tensors[0] and {here} in tensors[{n}]; view or convert one, so that "
                    "both are stored alike."
                )
    return sts


def _check_layouts(op: str, layouts: list[Layout], shape: Shape, axis: int) -> None:
    """Raise LayoutError unless all layouts are equal, apart from `partial`."""
    first, *rest = (layout.fitted(shape, axis) for layout in layouts)
    for n, layout in enumerate(rest, 1):
        if layout != first:
            raise LayoutError(
                f"{op}: tensors[0] has layout {layouts[0]}, tensors[{n}] {layouts[n]}; requantize one to the other's."
            )


def _check_ends(sts: list[ScaledTensor], axis: int) -> None:
    unit = unit_of(sts[0], part_grids(sts[0]), axis)
    for st in sts[:-1]:
        if st.shape[axis] % unit:
            raise LayoutError(
                f"concat: along axis {axis} all tensors but the last must end at a multiple of {unit} (blocks under one "
                f"scale, or codes sharing bytes); one has length {st.shape[axis]}. Put it last, or dequantize first.",
                axis=axis,
                unit=unit,
            )


def _joined_scales(ops: Ops, sts: list[ScaledTensor], columns: dict[str, list[Array]], axis: int) -> dict[str, Array]:
    """Scale, zero_point and global_scale of `sts` joined along the logical `axis`, by name."""
    per_block, per_tensor = (
        {name: columns[name] for name in names if name in columns} for names in (("scale", "zero_point"), ("global_scale",))
    )
    return _joined(ops, sts, per_block, axis, scale_block(sts[0], "scale")) | _joined(ops, sts, per_tensor, axis, TENSOR)


def _joined(ops: Ops, sts: list[ScaledTensor], columns: dict[str, list[Array]], axis: int, block: Block) -> dict[str, Array]:
    """Components with the same block, joined along `axis`, or checked to be equal where they do not run along it."""
    ndim, along = sts[0].ndim, sts[0].axis
    spans = max((spanned(len(part.shape), ndim, block) for column in columns.values() for part in column), default=0)
    identical = all(part is column[0] for column in columns.values() for part in column)
    if spans <= axis < ndim - 2 and not identical:
        spans = axis + 1
    joined: dict[str, Array] = {}
    for name, column in columns.items():
        wide = [expanded(ops, part, spans, st.shape, along, block) for part, st in zip(column, sts, strict=True)]
        grid = scale_grid(len(wide[0].shape), ndim, along, block, record_bytes(sts[0], name))
        places = [place for place, a in enumerate(grid) if a.axis == axis and a.codes]
        if not places:
            _check_same(ops, name, wide, axis)
        joined[name] = ops.concat(wide, places[0]) if places else wide[0]
    return joined


def _check_same(ops: Ops, name: str, column: list[Array], axis: int) -> None:
    """Raise LayoutError unless all arrays are the same object or equal bit by bit."""
    for n, part in enumerate(column):
        if part is column[0]:
            continue
        try:
            differs = tuple(part.shape) != tuple(column[0].shape) or ops.any(ops.load(part) != ops.load(column[0]))
        except UnsupportedError as e:
            raise UnsupportedError(
                f"concat: {name} does not run along axis {axis}, so tensors[0] and tensors[{n}] must share it; {e}"
            ) from e
        if differs:
            raise LayoutError(
                f"concat: {name} does not run along axis {axis}, and tensors[{n}] differs from tensors[0]. stack "
                "keeps each one's scale; or requantize them together.",
                axis=axis,
            )
