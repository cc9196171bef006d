"""Grids: the mapping from items of a stored component to ranges of the logical tensor.

A component (codes, scales, ...) has a grid, one `Along` per stored axis. Structural ops
need only grids to cut a tensor, whatever its recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import index as as_integer
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..arrays.frameworks import dtype_name, ops_of
from ..codecs import Codec
from ..errors import LayoutError, OptionError, OutOfRangeError, ShapeError, UnsupportedError
from ..formats import TENSOR, Block, Format
from ..layouts import Layout, Shape, other_axis
from ..options import whole_number

if TYPE_CHECKING:
    from ..arrays.ops import Array, Ops


@dataclass(frozen=True, eq=False)
class Gathered:
    """Positions whose values a traced function does not have: a 1-D int32 array. single: of one position, without its axis."""

    index: Any
    single: bool

    def __iter__(self) -> Iterator[int]:
        raise UnsupportedError(
            "this layout has one entry for each position, so positions must be numbers; a traced function has none. Pass a "
            "list, or dequantize first."
        )


#: The selection along a logical axis: one position (drops the axis), a slice, or a list of positions.
Cut = int | range | tuple[int, ...] | Gathered


def drops(cut: Cut) -> bool:
    """Whether the axis is dropped."""
    return cut.single if isinstance(cut, Gathered) else isinstance(cut, int)


def length_of(cut: range | tuple[int, ...] | Gathered) -> int:
    """The length that it leaves of an axis, which may be a symbol."""
    return cut.index.shape[0] if isinstance(cut, Gathered) else len(cut)


def packing(codec: Codec) -> tuple[int, int]:
    """(codes, bytes) of `codec`'s packing group: (1, 1) for 8 bits, (2, 1) for 4, (8, 5) for 5."""
    group = math.lcm(codec.bits, 8)
    return group // codec.bits, group // 8


def packed_length(codec: Codec, length: int) -> int:
    """Bytes along the packed axis that hold `length` codes."""
    codes, size = packing(codec)
    return -(-length // codes) * size


def part_shapes(fmt: Format, layout: Layout, shape: Shape, axis: int = -1, supplied: Shape | None = None) -> dict[str, Shape]:
    """The shape of each component of a cast of an array of `shape`, under a layout fitted to it. Raises LayoutError.

    supplied: the shape of a supplied scale, which is kept: in place of one for the tensor it may be one for each matrix.
    """
    data = list(shape)
    data[axis] = packed_length(fmt.element, shape[axis])
    scales, global_scale = layout.scale_shapes(shape, axis)[0], ()
    if supplied is not None:
        scales, global_scale = (supplied, global_scale) if fmt.global_scale is None else (scales, supplied)
    every = {"data": tuple(data), "scale": scales, "zero_point": scales, "global_scale": global_scale}
    return {name: in_records(fmt, name, every[name], axis) for name in fmt.parts}


def in_records(fmt: Format, part: str, shape: Shape, axis: int) -> Shape:
    """The stored shape of the component `part`, with `shape` blocks: of records, their bytes along the contraction axis."""
    record = fmt.record(part)
    if record is None:
        return shape
    stored = list(shape)
    stored[axis] *= record.nbytes
    return tuple(stored)


def cast_nbytes(fmt: Format, layout: Layout, shape: Shape, axis: int = -1) -> int:
    """Bytes of all components of a cast of an array of `shape`, under a layout fitted to it. Raises LayoutError.

    Each item takes whole bytes: codes of less than 8 bits are packed into bytes, and zero-points (no codec) are bytes.
    """
    shapes = part_shapes(fmt, layout, shape, axis)
    return sum(math.prod(shapes[part]) * (max(codec.bits, 8) // 8 if codec else 1) for part, codec in fmt.parts.items())


class Along(NamedTuple):
    """A stored axis along the logical axis `axis`: `items` per `codes` positions, or in total (None)."""

    axis: int
    codes: int | None = 1
    items: int = 1


Grid = tuple[Along, ...]


def data_grid(ndim: int, axis: int, element: Codec) -> Grid:
    """How codes of `element`, packed along `axis`, follow a logical shape of `ndim` axes."""
    return tuple(Along(a, *packing(element)) if a == ndim + axis else Along(a) for a in range(ndim))


def scale_grid(stored: int, ndim: int, axis: int, block: Block, items: int = 1) -> Grid:
    """How a scale of `stored` axes, one for each block (m, k), follows a logical shape of `ndim` axes.

    items: the bytes of a record along the contraction axis, for scales that are stored in records.
    """
    if block == TENSOR:
        return tuple(Along(a) for a in range(stored))
    other = ndim + other_axis(axis)
    if stored < ndim:  # PerChannel's (M,)
        return (Along(other),)
    sides = dict(zip((other, ndim + axis), block, strict=True))
    return tuple(Along(a, sides.get(a, 1), items if a == ndim + axis else 1) for a in range(ndim))


def check_axis(axis: Any, ndim: int) -> int:
    """`axis` counted from the front. Raises ShapeError for an invalid axis."""
    number = whole_number("axis", axis)
    if not -ndim <= number < ndim:
        raise ShapeError(
            f"axis must lie in {-ndim}..{ndim - 1} for a tensor of {ndim} axes; got {number}.", axis=number, ndim=ndim
        )
    return number % ndim


# ------------------------------------------------------------------------------------------------ reading an index


def read_index(index: Any, shape: Shape) -> tuple[Cut, ...]:
    """One cut for each axis of `shape`, from a basic index: integers, slices, an Ellipsis, or a tuple of them."""
    items = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    gaps = [n for n, item in enumerate(items) if item is Ellipsis]
    named = len(items) - len(gaps)
    if len(gaps) > 1:
        raise UnsupportedError(f"an index has one Ellipsis at most; got {len(gaps)} in {index!r}.")
    if named > len(shape):
        raise OutOfRangeError(f"too many indices: {named} for a tensor of {len(shape)} axes (shape {shape}).", shape=shape)
    gap = gaps[0] if gaps else len(items)
    full = [*items[:gap], *[slice(None)] * (len(shape) - named), *items[gap + 1 :]]
    return tuple(_cut(item, axis, length) for axis, (item, length) in enumerate(zip(full, shape, strict=True)))


def _cut(item: Any, axis: int, length: int) -> Cut:
    if not isinstance(item, slice):
        return read_position(item, axis, length)
    try:
        positions = range(length)[item]
    except TypeError:
        raise UnsupportedError(f"a slice has integers, or nothing, for start, stop and step; got {item!r}.") from None
    except ValueError:
        raise OptionError(f"a slice's step is not zero; got {item!r}.") from None
    if not positions:
        return range(0)
    return positions if len(positions) > 1 else range(positions[0], positions[0] + 1)


def read_position(item: Any, axis: int, length: int) -> int:
    """A non-negative position from an integer that may count from the end. Raises OutOfRangeError."""
    position = None
    if not isinstance(item, bool) and tuple(getattr(item, "shape", ())) == ():
        try:
            position = as_integer(item)
        except TypeError:
            position = None
    if position is None:
        what = "None" if item is None else type(item).__name__
        raise UnsupportedError(
            f"a tensor is indexed by integers, slices and an Ellipsis; got {what} for axis {axis}. For a list of positions use "
            "st.select(axis, positions); for a new axis, st.reshape(...); for anything else, breccia.dequantize(st) first."
        )
    if not -length <= position < length:
        raise OutOfRangeError(
            f"index {position} is out of range for axis {axis} of length {length}.", index=position, axis=axis
        )
    return position % length


def read_positions(index: Any, axis: int, length: int) -> Cut:
    """An integer, or a list or 1-D integer array of them, each read by `read_position`; traced ones are gathered by."""
    shape = getattr(index, "shape", None)
    if shape is not None and not (ops := ops_of(index, "index")).readable(index):
        return _gathered(ops, index, length)
    if shape is not None and tuple(shape) != ():
        array = ops_of(index, "index").to_numpy(index)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise _no_positions(tuple(shape), array.dtype.name)
        index = array.tolist()
    if isinstance(index, Iterable) and shape is None:
        index = list(index)  # type: ignore[reportUnknownVariableType]
    if isinstance(index, list):
        return tuple(read_position(item, axis, length) for item in index)  # type: ignore[reportUnknownVariableType]
    return read_position(index, axis, length)


def _gathered(ops: Ops, index: Array, length: int) -> Gathered:
    shape, dtype = tuple(index.shape), dtype_name(index)
    if len(shape) > 1 or not dtype.startswith(("int", "uint")):
        raise _no_positions(shape, dtype)
    index = ops.to_int32(index)
    index = ops.where(index < 0, index + length, index)
    return Gathered(index if shape else ops.reshape(index, (1,)), not shape)


def _no_positions(shape: Shape, dtype: str) -> UnsupportedError:
    return UnsupportedError(
        f"select takes an integer, or a list or 1-D array of integers; got an array of shape {shape} and dtype {dtype}. "
        "Positions of a mask are its nonzero()."
    )


# ------------------------------------------------------------------------------------------------ cutting


def whole_unit(grids: Iterable[Grid], axis: int) -> int:
    """The smallest unit of a logical axis that cuts must keep whole: the least common multiple of blocks and packing groups."""
    return math.lcm(*(along.codes or 1 for grid in grids for along in grid if along.axis == axis))


def check_cut(cut: Cut, axis: int, length: int, unit: int) -> None:
    """Raise LayoutError where `cut` splits a unit: a block, or codes that share bytes."""
    if unit == 1 or cut == range(length) or (isinstance(cut, range) and not cut):
        return
    why = f"axis {axis} (length {length}) is stored in units of {unit} elements: blocks under one scale, or codes sharing bytes"
    if not isinstance(cut, range):
        raise LayoutError(
            f"{why}. Single positions of it cannot be picked; slice it at multiples of {unit}, or dequantize first.",
            axis=axis,
            unit=unit,
        )
    if cut.step != 1 or cut.start % unit or (cut.stop % unit and cut.stop != length):
        asked = f"{cut.start}:{cut.stop}" + (f":{cut.step}" if cut.step != 1 else "")
        raise LayoutError(
            f"{why}. A slice of it has step 1 and starts and stops at multiples of {unit} or at the end; got {asked}.",
            axis=axis,
            unit=unit,
        )


def cut_component(ops: Ops, part: Array, grid: Grid, cuts: tuple[Cut, ...], shape: Shape) -> Array:
    """Apply checked `cuts` of the logical `shape` to a stored component; returns it unchanged where they keep everything."""
    key: list[int | slice] = []
    for place, along in enumerate(grid):
        cut = cuts[along.axis]
        if along.codes is None or cut == range(shape[along.axis]):
            key.append(slice(None))
        elif isinstance(cut, int):
            key.append(cut)
        elif isinstance(cut, Gathered):
            part = ops.gather(part, cut.index, place)
            key.append(0 if cut.single else slice(None))
        elif isinstance(cut, tuple) or cut.step < 0:  # torch has no negative steps
            part = ops.gather(part, tuple(cut), place)
            key.append(slice(None))
        else:
            start, stop = cut.start // along.codes * along.items, -(-cut.stop // along.codes) * along.items
            key.append(slice(start, stop, cut.step))
    return part if all(k == slice(None) for k in key) else part[(*key, ...)]


# ------------------------------------------------------------------------------------------------ leading axes


def spanned(stored: int, ndim: int, block: Block) -> int:
    """The number of leading axes that a scale of `stored` axes spans; -1 for PerChannel's (M,), which spans none."""
    if block == TENSOR:
        return stored
    return max(ndim - 2, 0) if stored == ndim else -1


def expanded(ops: Ops, scale: Array, lead: int, shape: Shape, axis: int, block: Block) -> Array:
    """`scale` repeated to span at least the first `lead` leading axes of `shape`."""
    stored, ndim = tuple(scale.shape), len(shape)
    if spanned(len(stored), ndim, block) >= lead:
        return scale
    if block == TENSOR:
        return ops.broadcast(ops.reshape(scale, (*stored, *(1,) * (lead - len(stored)))), shape[:lead])
    column, full = [1] * ndim, list(shape)
    column[other_axis(axis)], full[axis] = stored[0], 1
    return ops.broadcast(ops.reshape(scale, tuple(column)), tuple(full))


def reshape_leading(ops: Ops, scale: Array, lead: Shape, shape: Shape, axis: int, block: Block) -> Array:
    """`scale` for the logical `shape` with its leading axes replaced by `lead`."""
    spans = spanned(len(scale.shape), len(shape), block)
    if spans < 0 or (block == TENSOR and spans == 0):
        return scale
    lead_ndim = len(shape[:-2])
    wide = expanded(ops, scale, lead_ndim, shape, axis, block)
    return ops.reshape(wide, (*lead, *wide.shape[lead_ndim:]))


def inferred(shape: tuple[Any, ...], old: Shape) -> Shape:
    """`shape` with its -1 filled in, as a reshape of `old` that keeps the last two axes. Raises ShapeError."""
    asked: tuple[Any, ...] = tuple(shape[0]) if len(shape) == 1 and hasattr(shape[0], "__iter__") else shape
    new = [whole_number("shape", n) for n in asked]
    matrix, lead = old[-2:], new[: max(len(new) - len(old[-2:]), 0)]
    if lead.count(-1) == 1 and (known := math.prod(n for n in lead if n != -1)):
        lead[lead.index(-1)] = math.prod(old[:-2]) // known
    if tuple(new[len(lead) :]) != matrix or min(lead, default=0) < 0 or math.prod(lead) != math.prod(old[:-2]):
        raise ShapeError(
            f"reshape changes leading axes: {tuple(new)} must end in {', '.join(map(str, matrix))} and hold the "
            f"{math.prod(old[:-2])} matrices (or rows) of shape {old}, with one -1 at most before them.",
            shape=old,
            asked=tuple(new),
        )
    return (*lead, *matrix)


def pieces(size: Any, length: int, axis: int) -> list[int]:
    """The lengths of `split`'s pieces. Raises OptionError if they do not add up."""
    if hasattr(size, "__iter__"):
        lengths = [whole_number("split lengths", n) for n in size]
        if min(lengths, default=0) < 0 or sum(lengths) != length:
            raise OptionError(f"split lengths are >= 0 and add up to {length}, the length of axis {axis}; got {lengths}.")
        return lengths
    step = whole_number("split size", size)
    if step < 1:
        raise OptionError(f"split takes a length >= 1, or a list of lengths that add up to {length}; got {step}.")
    return [min(step, length - start) for start in range(0, length, step)] or [0]
