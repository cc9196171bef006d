"""The components of a ScaledTensor: its arrays, their grids, and their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arrays.frameworks import ops_of
from ..errors import LayoutError
from ..formats import TENSOR, Block
from ..layouts import other_axis
from ..options import PLAIN
from .grids import Cut, Grid, data_grid, drops, packing, scale_grid, whole_unit

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


def scale_block(st: ScaledTensor, name: str) -> Block:
    """The block covered by each item of the component `name` (scale, zero_point or global_scale)."""
    return TENSOR if name == "global_scale" else st.layout.block(st.axis)


def is_row(st: ScaledTensor) -> bool:
    """Whether the tensor is one row with its own blocks: 1-D. Kernels decode it as a matrix of one row."""
    return len(st.data_source.shape) == 1 and st.layout.storage == PLAIN and st.layout.block() != TENSOR


def part_grids(st: ScaledTensor) -> dict[str, Grid]:
    """How each component follows the logical axes. Raises LayoutError where the layout orders blocks differently."""
    shape = st.shape
    grids = {"data": data_grid(len(shape), st.axis, st.recipe.format.element)}
    for name, part in named_leaves(st).items():
        if name != "data":
            grid = grids[name] = scale_grid(len(part.shape), len(shape), st.axis, scale_block(st, name))
            lengths = [
                -(-shape[along.axis] // along.codes) if along.codes else n for along, n in zip(grid, part.shape, strict=False)
            ]
            if len(grid) != len(part.shape) or lengths != list(part.shape):
                raise LayoutError(
                    f"structural ops need one scale for each block, in the order of blocks; layout {st.layout} stores shape "
                    f"{tuple(part.shape)} for a tensor of shape {shape}. Dequantize first.",
                    found=tuple(part.shape),
                    shape=shape,
                )
    return grids


def check_dropped(st: ScaledTensor, cuts: tuple[Cut, ...], grids: dict[str, Grid]) -> None:
    """Raise LayoutError where an integer index would drop an axis that codes or scales need.

    The contraction axis can be dropped under one scale and 8-bit codes, the other one where blocks are one row high.
    """
    dropped = [axis for axis in (-2, -1)[-len(cuts) :] if drops(cuts[axis])]
    if not dropped:
        return
    left = sum(not drops(cut) for cut in cuts)
    block, codec = st.layout.block(st.axis), st.recipe.format.element
    free = {st.axis: block == TENSOR and packing(codec) == (1, 1), other_axis(st.axis): block == TENSOR or block[0] == 1}
    needed = [axis for axis in dropped if not free[axis]]
    # A scale of whole matrices follows leading axes, one of which becomes the rows of a matrix.
    tensor_grids = [grid for name, grid in grids.items() if name != "data" and scale_block(st, name) == TENSOR]
    spans = max((sum(not drops(cuts[along.axis]) for along in grid) for grid in tensor_grids), default=0)
    if left >= st.layout.least_ndim and not needed and spans <= max(left - 2, 0):
        return
    axis = (needed or dropped)[0]
    unit = whole_unit(grids.values(), len(cuts) + axis)
    cut = "i:i+1" if unit == 1 else f"i:i+{unit}"
    keep = f"st[..., {cut}, :]" if axis == -2 else f"st[..., {cut}]"
    raise LayoutError(
        f"axis {axis} of shape {st.shape} cannot be dropped: {st.layout} and {codec.name} codes need it. "
        f"Keep it: {keep}{', i a multiple of ' + str(unit) if unit > 1 else ''}; or dequantize first.",
        axis=axis,
        shape=st.shape,
    )


def words(st: ScaledTensor) -> dict[str, Any]:
    """The components of `st` by name as NumPy arrays; float8 and bfloat16, which NumPy lacks, as unsigned integers."""
    return {name: ops_of(part).to_numpy(part) for name, part in components(st).items()}


def stored_parts(st: ScaledTensor) -> dict[str, Any]:
    """`words` in C order, little-endian."""
    return {name: a.astype(a.dtype.newbyteorder("<"), order="C", copy=False) for name, a in words(st).items()}


def digest_facts(st: ScaledTensor, stored: dict[str, Any]) -> dict[str, Any]:
    """The metadata hashed by `ScaledTensor.digest`, in addition to the bytes."""
    return {
        "recipe": st.recipe.to_dict(),
        "layout": st.layout.to_dict(),
        "axis": st.axis,
        "shape": st.shape,
        "parts": {name: [part.dtype.name, part.shape] for name, part in stored.items()},
    }
