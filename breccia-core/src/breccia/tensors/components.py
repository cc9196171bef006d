"""The components of a ScaledTensor: its arrays, their grids, and tensors with others of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..arrays.frameworks import ops_of
from ..errors import LayoutError
from ..formats import TENSOR, Block
from ..options import PLAIN
from .grids import Grid, data_grid, scale_grid, whole_unit

if TYPE_CHECKING:
    from .tensor import ScaledTensor


#: The fields that hold arrays.
PARTS = ("data", "scale", "zero_point", "global_scale")


def components(st: ScaledTensor) -> dict[str, Any]:
    """The components of `st`, by name."""
    return {name: part for name in PARTS if (part := getattr(st, name)) is not None}


def named_leaves(st: ScaledTensor) -> dict[str, Any]:
    """What `st` holds, by name: its components, or arrays of their shapes from which they are made when they are read."""
    if st.held is None:
        return components(st)
    return {name: leaf for name, leaf in zip(PARTS, st.held.leaves, strict=True) if leaf is not None}


def with_parts(st: ScaledTensor, parts: dict[str, Any], **changed: Any) -> ScaledTensor:
    """A copy of `st` with exactly these components, and other fields changed."""
    return st.from_parts(**(_metadata(st) | changed | parts))


def moved(st: ScaledTensor, parts: dict[str, Any], **changed: Any) -> ScaledTensor:
    """`with_parts`, for parts made from those of `named_leaves`."""
    if st.held is None:
        return with_parts(st, parts, **changed)
    return st.from_sources(st.held.moved(tuple(map(parts.get, PARTS))), **(_metadata(st) | changed))


def _metadata(st: ScaledTensor) -> dict[str, Any]:
    return {"recipe": st.recipe, "layout": st.layout, "axis": st.axis, "padding": st.padding}


def scale_block(st: ScaledTensor, name: str) -> Block:
    """The block covered by each item of the component `name` (scale, zero_point or global_scale)."""
    return TENSOR if name == "global_scale" else st.layout.block(st.axis)


def record_bytes(st: ScaledTensor, name: str) -> int:
    """The bytes of a record of the component `name` along the contraction axis; 1 where it has one item for each block."""
    record = st.recipe.format.record(name)
    return 1 if record is None else record.nbytes


def is_row(st: ScaledTensor) -> bool:
    """Whether the tensor is one row with its own blocks: 1-D. Kernels decode it as a matrix of one row."""
    return len(st.data_source.shape) == 1 and st.layout.storage == PLAIN and st.layout.block() != TENSOR


def part_grids(st: ScaledTensor) -> dict[str, Grid]:
    """How each component follows the logical axes. Raises LayoutError where the layout orders blocks differently."""
    shape = st.shape
    grids = {"data": data_grid(len(shape), st.axis, st.recipe.format.element)}
    for name, part in named_leaves(st).items():
        if name != "data":
            items = record_bytes(st, name)
            grid = grids[name] = scale_grid(len(part.shape), len(shape), st.axis, scale_block(st, name), items)
            lengths = [
                -(-shape[along.axis] // along.codes) * along.items if along.codes else n
                for along, n in zip(grid, part.shape, strict=False)
            ]
            if len(grid) != len(part.shape) or lengths != list(part.shape):
                raise LayoutError(
                    f"structural ops need one scale for each block, in the order of blocks; layout {st.layout} stores shape "
                    f"{tuple(part.shape)} for a tensor of shape {shape}. Dequantize first.",
                    found=tuple(part.shape),
                    shape=shape,
                )
    return grids


def unit_of(st: ScaledTensor, grids: dict[str, Grid], axis: int) -> int:
    """The smallest unit of a logical axis, counted from the front, that cuts keep whole: of its components and a rotation."""
    rotation, unit = st.recipe.format.rotation, whole_unit(grids.values(), axis)
    return unit if rotation is None or axis != len(st.shape) + st.axis else math.lcm(unit, rotation.block)


def array_nbytes(part: Any) -> int:
    """The bytes of an array; placeholders such as `jax.ShapeDtypeStruct` have a shape and a dtype only."""
    nbytes = getattr(part, "nbytes", None)
    return math.prod(part.shape) * part.dtype.itemsize if nbytes is None else int(nbytes)


def words(st: ScaledTensor) -> dict[str, Any]:
    """The components of `st` by name as NumPy arrays; float8 and bfloat16, which NumPy lacks, as unsigned integers."""
    return {name: ops_of(part).to_numpy(part) for name, part in components(st).items()}
