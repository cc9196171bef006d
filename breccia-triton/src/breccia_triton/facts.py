"""What kernels read and write, as facts that are the same in every framework: shapes, dtypes by name, alignment.

Imports no framework.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from breccia import Format, InStorage, Layout, ScaledTensor, ScalingRecipe
from breccia.backend import PLAIN, TENSOR, Block, Shape, checks, packing, part_shapes

from .geometry import Source, Tile, divided_up, in_memory
from .specs import CONVERTED, Spec, Unsupported
from .tuning.choices import codecs_of

#: Whether Triton interprets kernels, on arrays of any device: slowly, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
#: Triton's pointers to numbers, by their dtype; and to codes and scales, by their bytes.
NUMBERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
POINTERS = {1: "*u8", 2: "*i16", 4: "*i32"}
#: Tensors of fewer elements have positions of 32 bits, past the end of the last tile too.
LARGE = 2**31 - 2**20
#: The most programs along the second and third axis of a grid.
GRID = 65535


@dataclass(frozen=True)
class Hardware:
    """What kernels may use. ptx: an NVIDIA GPU's instructions. fp8: its instructions that convert to FP8.

    name: of the device, by which the choices for it are found; empty for the default ones. resident: how many warps
    are sure to run at the same time, so that programs can wait for each other; 0 if none are.
    """

    ptx: bool = False
    fp8: bool = False
    name: str = ""
    resident: int = 0


@dataclass(frozen=True)
class Argument:
    """The type of an argument as Triton spells it ("*bf16", "i32"), and whether 16 divides it."""

    type: str
    aligned: bool = False


@dataclass(frozen=True)
class Component:
    """A component of a ScaledTensor: an array in memory. aligned: 16 divides its address."""

    shape: Shape
    dtype: str
    aligned: bool = True


def matrices_of(shape: Shape, block: Block, axis: int) -> tuple[int, int, int]:
    """(matrices, rows, columns) of a contiguous tensor: leading axes count as rows where that keeps the blocks."""
    if len(shape) == 1:
        return 1, 1, shape[0]
    lead, (rows, columns) = math.prod(shape[:-2]), shape[-2:]
    if block == TENSOR:
        merged = axis == -1
    else:
        tall = in_memory(block, axis)[0]
        merged = axis == -1 and tall is not None and rows % tall == 0
    return (1, lead * rows, columns) if merged else (lead, rows, columns)


def block_of(fmt: Format, layout: Layout, axis: int) -> Block:
    """The block of one scale, that of the finest level of several."""
    return layout.plain.block(axis) if fmt.scale_record is None else fmt.scale.block


def grid_of(tile: Tile, matrices: int, rows: int, columns: int) -> tuple[tuple[int, int, int], bool]:
    """(programs along the axes of the grid, whether they are folded into one)."""
    down, along = tile.counts(rows, columns)
    folded = max(down, matrices) > GRID
    return ((matrices * down * along, 1, 1) if folded else (along, down, matrices)), folded


def itemsize(dtype: str) -> int:
    """Bytes of an item of a dtype, by its name."""
    return 1 if dtype.startswith("float8") else int("".join(filter(str.isdigit, dtype))) // 8


@dataclass(frozen=True)
class Array:
    """An array of numbers. flat: returns it as `Numbers` of a shape (matrices, rows, columns)."""

    shape: Shape
    dtype: str
    contiguous: bool
    flat: Callable[[tuple[int, int, int]], Numbers]

    @staticmethod
    def dense(shape: Shape, dtype: str) -> Array:
        """A contiguous array whose address 16 divides."""
        large = math.prod(shape) >= LARGE
        return Array(shape, dtype, True, lambda flat_shape: Numbers(flat_shape, dtype, True, False, large))


class Numbers:
    """An array of numbers as the input of a kernel, seen as (matrices, rows, columns).

    strided: it is not contiguous. large: positions in its memory need 64 bits. kind: its dtype.
    """

    def __init__(self, flat_shape: tuple[int, int, int], dtype: str, aligned: bool, strided: bool, large: bool) -> None:
        self.flat_shape, self.strided, self.large, self.kind = flat_shape, strided, large, dtype
        self.subnormals, self.itemsize = dtype != "float16", itemsize(dtype)
        self.arguments = {"x": Argument(NUMBERS[dtype], aligned)}
        strides = ("stride_matrix", "stride_row", "stride_column") if strided else ()
        self.strides = {name: Argument("i64") for name in strides}
        self.counts: dict[str, Argument] = {}
        self.groups: tuple[int, ...] = ()

    def source(self, tile: Tile) -> Source | None:
        """What a kernel is compiled for."""
        return None


class Codes:
    """A ScaledTensor as the input of a kernel, seen as (matrices, rows, columns). Raises Unsupported.

    parts: its components, None for one that is not on its device. dtypes: of the components, by the framework.
    merged: whether leading axes count as rows where possible. kind: its codecs. turned: columns of its scales are contiguous.
    """

    strided, subnormals = False, True

    def __init__(
        self, st: ScaledTensor, spec: Spec, parts: Mapping[str, Component | None], dtypes: Mapping[str, str],
        hardware: Hardware, merged: bool, turned: bool = False,
    ) -> None:  # fmt: skip
        self.spec, self.axis, self.shape = spec, st.axis, tuple(st.shape)
        fmt, layout, shape = st.recipe.format, st.layout.plain, self.shape
        self.block = block_of(fmt, layout, st.axis)
        self.storage = st.layout.storage
        for name, part in parts.items():
            if part is None:
                raise Unsupported(f"its {name} is not on its device")
            if part.dtype != dtypes[name] and not (part.dtype == "uint8" and itemsize(dtypes[name]) == 1):
                raise Unsupported(f"its {name} is {part.dtype}")
        components = {name: part for name, part in parts.items() if part is not None}
        if "global_scale" in components and components["global_scale"].shape:
            raise Unsupported("it has a global scale for each matrix")
        if self.storage == PLAIN and self.block != TENSOR:
            expected = part_shapes(fmt, st.layout, shape, st.axis)
            if any(part.shape != expected[name] for name, part in components.items()):
                raise Unsupported("its components have other shapes than those of a cast")
        if turned:  # this storage is plain scales in that order
            self.storage = "transposed"
        lead = components["scale"].shape if self.block == TENSOR else ()
        if lead:  # one scale for each of these
            merged = merged and st.axis == -1
            if len(lead) < len(shape) - 2 and not merged:
                raise Unsupported("it has one scale for several matrices")
            self.flat_shape = math.prod(lead), math.prod(shape[len(lead) : -1]), shape[-1]
        else:
            alone = self.storage != PLAIN or not merged
            self.flat_shape = matrices_of(shape, TENSOR if alone else self.block, -2 if alone else st.axis)
        self.shared = self.block == TENSOR and not lead
        self.large = math.prod(shape) >= LARGE
        self.kind, self.hardware = codecs_of(fmt), hardware
        self.ptx, self.native = hardware.ptx, fmt.element.name in CONVERTED and hardware.fp8
        self.strides: dict[str, Argument] = {}
        names = {"data": "x", "scale": "x_scale", "zero_point": "x_zero_point", "global_scale": "x_global_scale"}
        self.arguments = {
            names[name]: Argument(POINTERS[itemsize(part.dtype)], name == "data" and part.aligned)
            for name, part in components.items()
        }
        count = packing(fmt.element)[0]
        self.groups = (divided_up(self.flat_shape[2 if st.axis == -1 else 1], count),) if count > 1 else ()
        self.counts = {"x_groups": Argument("i32", self.groups[0] % 16 == 0)} if self.groups else {}

    def source(self, tile: Tile) -> Source:
        """What a kernel is compiled for."""
        words = self.arguments["x"].aligned and self.flat_shape[2] % 16 == 0
        return Source.of(self.spec, self.block, self.axis, tile, words, self.shared, self.storage, self.native, self.ptx)


class Written:
    """A ScaledTensor as the output of a kernel: its components, and what the kernel needs to know of them.

    dtypes: of the components, by the framework. parts: (name, shape, dtype) of each. padded: those with padding, which is zero.
    turned: as of `Variant`; columns: the parts whose columns are contiguous.
    """

    def __init__(
        self, recipe: ScalingRecipe, shape: Shape, axis: int, storage: str, rows: int, columns: int, dtypes: Mapping[str, str],
        turned: bool = False,
    ) -> None:  # fmt: skip
        self.recipe, self.axis, self.dtypes, self.turned = recipe, axis, dtypes, turned
        fmt = recipe.format
        plain = checks.fitted_layout(recipe, shape, axis)
        self.block = plain.block(axis)
        self.layout = plain if storage == PLAIN else InStorage(plain, storage, (), 0)
        shapes = part_shapes(fmt, plain, shape, axis)
        self.scale_shape = shapes["scale"]
        self.padded: set[str] = set()
        if storage != PLAIN:
            for name in {"scale", "zero_point"} & shapes.keys():
                stored = _stored_shape(shapes[name], axis, storage, itemsize(dtypes[name]))
                self.padded |= {name} if math.prod(stored) != math.prod(shapes[name]) else set()
                shapes[name] = stored
        self.parts = [(name, shapes[name], dtypes[name]) for name in fmt.parts]
        tiles = storage == PLAIN and self.block != TENSOR and self.block[0] not in (1, None)
        self.columns = () if not turned else ("data", "scale", "zero_point") if tiles else ("data",)
        self._zero_point, self._global_scale = "zero_point" in fmt.parts, "global_scale" in fmt.parts
        count = packing(fmt.element)[0]
        self.padding = -shape[axis] % count
        self.groups = divided_up(columns if axis == -1 else rows, count)

    def arguments(self, prefix: str = "") -> dict[str, Argument]:
        """Of its components, by the names in the kernels."""
        return {prefix + name: Argument(POINTERS[itemsize(dtype)], True) for name, _, dtype in self.parts}

    def tensor(self, parts: Sequence[Any]) -> ScaledTensor:
        """The ScaledTensor with these components."""
        zero_point = global_scale = None
        if len(parts) > 2:  # in this order
            zero_point = parts[2] if self._zero_point else None
            global_scale = parts[-1] if self._global_scale else None
        data, scale = parts[0], parts[1]
        return ScaledTensor.from_parts(data, scale, self.recipe, self.layout, zero_point, global_scale, self.axis, self.padding)


def _stored_shape(shape: Shape, axis: int, storage: str, size: int) -> Shape:
    """The shape of scales in a storage; see `breccia.tensors.storage`."""
    *lead, rows, columns = shape if axis == -1 else (*shape[:-2], shape[-1], shape[-2])
    if storage == "swizzle_128x4":
        return (*lead, divided_up(rows, 128), divided_up(columns, 4), 512)
    if storage in ("padded_1x4", "padded_128x4"):
        tall = 128 if storage == "padded_128x4" else 1
        return (*lead, divided_up(rows, tall) * tall, divided_up(columns, 4) * 4)
    unit = 16 // size if storage == "column_major" else 1
    return (*lead, columns, divided_up(rows, unit) * unit)
