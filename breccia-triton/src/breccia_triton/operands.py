"""What kernels read and write: facts of operands that are computed once, and their addresses for each call."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import Any

import torch

from breccia.backend import (
    PLAIN,
    TENSOR,
    Block,
    ScaledTensor,
    ScalingRecipe,
    Stored,
    checks,
    packing,
    part_shapes,
)
from breccia_torch.ops import TORCH

from .geometry import Source, Tile, divided_up, in_memory
from .launch import INTERPRETED, Argument, empty, type_of
from .specs import CONVERTED, Spec

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
POINTERS = {1: "*u8", 2: "*i16", 4: "*i32"}
#: Tensors of fewer elements have positions of 32 bits, past the end of the last tile too.
LARGE = 2**31 - 2**20
#: The most programs along the second and third axis of a grid.
GRID = 65535


def conversion(device: torch.device) -> tuple[bool, bool]:
    """(whether a device has instructions that convert to FP8, whether it is NVIDIA's)."""
    nvidia = not INTERPRETED and device.type == "cuda" and torch.version.cuda is not None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 9), nvidia


def matrices_of(shape: tuple[int, ...], block: Block, axis: int) -> tuple[int, int, int]:
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


def grid_of(tile: Tile, matrices: int, rows: int, columns: int) -> tuple[tuple[int, int, int], bool]:
    """(programs along the axes of the grid, whether they are folded into one)."""
    down, along = tile.counts(rows, columns)
    folded = max(down, matrices) > GRID
    return ((matrices * down * along, 1, 1) if folded else (along, down, matrices)), folded


def addresses(tensors: list[Any], numbers: int = 0) -> list[Any]:
    """Addresses; the interpreter takes tensors instead, of codes as integers, after as many arrays of numbers."""
    if INTERPRETED:
        return [*tensors[:numbers], *(a.view(WORDS[a.dtype.itemsize]) for a in tensors[numbers:])]
    return [a.data_ptr() for a in tensors]


def writable(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel can write into `out` as it writes into a new tensor"""
    return (
        type(out) is torch.Tensor
        and tuple(out.shape) == shape
        and out.dtype == dtype
        and out.device == device
        and out.is_contiguous()
        and out.data_ptr() % 16 == 0
    )


def span(x: Any) -> int:
    """The distance between the first and the last element of a tensor in memory."""
    return sum((n - 1) * abs(s) for n, s in zip(x.shape, x.stride(), strict=True))


class Numbers:
    """An array of numbers as the input of a kernel, seen as (matrices, rows, columns)."""

    def __init__(self, x: Any, matrices: int, rows: int, columns: int) -> None:
        self.contiguous = x.is_contiguous()
        self.flat_shape = (matrices, rows, columns)
        flat = x if self.contiguous else x.reshape(self.flat_shape)
        self.strided = not flat.is_contiguous()
        self.large = max(x.numel(), span(x)) >= LARGE
        self.subnormals, self.itemsize = x.dtype != torch.float16, x.element_size()
        self.arguments = {"x": Argument(type_of(x.dtype), x.data_ptr() % 16 == 0)}
        self.strides = {name: Argument("i64") for name in ("stride_matrix", "stride_row", "stride_column")}
        self.strides = self.strides if self.strided else {}
        self.groups: list[int] = []
        self.counts: dict[str, Argument] = {}
        self.numbers = 1

    def source(self, tile: Tile) -> Source | None:
        """What a kernel is compiled for."""
        return None

    def read(self, x: Any) -> tuple[list[Any], list[int]]:
        """(the tensors that the kernel reads, strides)."""
        flat = x if self.contiguous else x.reshape(self.flat_shape)
        return [flat], list(flat.stride()) if self.strided else []


def facts_of(st: ScaledTensor) -> tuple[Any, ...]:
    """What `Codes` depends on, for the keys of prepared calls."""
    data, zero_point, global_scale = st.data, st.zero_point, st.global_scale
    return (
        st.recipe.interned_key, st.layout.interned_key, st.axis, st.padding, data.shape, data.dtype, data.device,
        data.is_contiguous(), data.data_ptr() % 16 == 0, st.scale.shape, st.scale.dtype, st.scale.device,
        zero_point is None or (zero_point.shape, zero_point.dtype, zero_point.device),
        global_scale is None or (global_scale.shape, global_scale.dtype, global_scale.device),
    )  # fmt: skip


class Codes:
    """A ScaledTensor as the input of a kernel. `reason` says why the kernels cannot read it, or is None.

    merged: whether leading axes count as rows where possible.
    """

    def __init__(self, st: ScaledTensor, spec: Spec, merged: bool) -> None:
        self.spec, self.axis = spec, st.axis
        fmt, layout = st.recipe.format, st.layout.plain
        self.block, self.storage = layout.block(st.axis), st.layout.storage
        parts = {name: getattr(st, name) for name in fmt.parts}
        self.reason = self._refused(st, parts)
        if self.reason is not None:
            return
        shape = tuple(st.shape)
        lead = tuple(st.scale.shape) if self.block == TENSOR else ()
        if lead:  # one scale for each of these
            merged = merged and st.axis == -1
            self.matrices, self.rows, self.columns = math.prod(lead), math.prod(shape[len(lead) : -1]), shape[-1]
            if len(lead) < len(shape) - 2 and not merged:
                self.reason = "it has one scale for several matrices"
        else:
            alone = self.storage != PLAIN or not merged
            self.matrices, self.rows, self.columns = matrices_of(
                shape, TENSOR if alone else self.block, -2 if alone else st.axis
            )
        self.shared = self.block == TENSOR and not lead
        self.large = math.prod(shape) >= LARGE
        native, self.ptx = conversion(st.data.device)
        self.native = fmt.element.name in CONVERTED and native
        self.strided, self.subnormals = False, True
        self.strides: dict[str, Argument] = {}
        names = ["x", "x_scale", *(f"x_{name.replace('global_scale', 'outer')}" for name in parts if name[0] not in "ds")]
        self.arguments = {
            name: Argument(POINTERS[part.dtype.itemsize], name == "x" and part.data_ptr() % 16 == 0)
            for name, part in zip(names, parts.values(), strict=True)
        }
        count = packing(fmt.element)[0]
        self.numbers = 0
        self.groups = [divided_up(self.columns if st.axis == -1 else self.rows, count)] if count > 1 else []
        self.counts = {"x_groups": Argument("i32", self.groups[0] % 16 == 0)} if self.groups else {}

    def _refused(self, st: ScaledTensor, parts: dict[str, Any]) -> str | None:
        fmt = st.recipe.format
        dtypes = {name: getattr(torch, dtype) for name, dtype in TORCH.dtypes(fmt).items()}
        for name, part in parts.items():
            if part is None or not isinstance(part, torch.Tensor) or part.device != st.data.device:
                return f"its {name} is not on its device"
            if part.dtype != dtypes[name] and not (part.dtype == torch.uint8 and dtypes[name].itemsize == 1):
                return f"its {name} is {part.dtype}"
        if not st.data.is_contiguous():
            return "its data is not contiguous"
        if "global_scale" in parts and parts["global_scale"].ndim:
            return "it has a global scale for each matrix"
        if self.storage == PLAIN and self.block != TENSOR:
            expected = part_shapes(fmt, st.layout, tuple(st.shape), st.axis)
            if any(tuple(part.shape) != expected[name] for name, part in parts.items()):
                return "its components have other shapes than those of a cast"
        return None

    def source(self, tile: Tile) -> Source:
        """What a kernel is compiled for."""
        return Source.of(self.spec, self.block, self.axis, tile, self.shared, self.storage, self.native, self.ptx)

    def read(self, st: ScaledTensor) -> tuple[list[Any], list[int]]:
        """(the tensors that the kernel reads, strides)."""
        found = [st.data, st.scale.contiguous()]
        found += [part.contiguous() for part in (st.zero_point, st.global_scale) if part is not None]
        return found, []


class Written:
    """A ScaledTensor as the output of a kernel: its components, and what the kernel needs to know of them."""

    def __init__(self, recipe: ScalingRecipe, shape: tuple[int, ...], axis: int, storage: str, rows: int, columns: int) -> None:
        self.recipe, self.axis, self.storage = recipe, axis, storage
        fmt = recipe.format
        plain = checks.fitted_layout(recipe, shape, axis)
        self.block = plain.block(axis)
        self.layout = plain if storage == PLAIN else Stored(plain, storage, (), 0)
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in TORCH.dtypes(fmt).items()}
        shapes = part_shapes(fmt, plain, shape, axis)
        self.scale_shape = shapes["scale"]
        #: Components with padding, which is zero.
        self.padded: set[str] = set()
        if storage != PLAIN:
            for name in {"scale", "zero_point"} & shapes.keys():
                shapes[name], padded = _stored_shape(shapes[name], axis, storage, self.dtypes[name].itemsize)
                self.padded |= {name} if padded else set()
        self.parts = [(name, tuple(shapes[name]), self.dtypes[name]) for name in fmt.parts]
        count = packing(fmt.element)[0]
        self.padding = -shape[axis] % count
        self.groups = divided_up(columns if axis == -1 else rows, count)

    def arguments(self, prefix: str = "") -> dict[str, Argument]:
        """Of its components, by the names in the kernels."""
        renamed = {"global_scale": "outer"}
        return {prefix + renamed.get(name, name): Argument(POINTERS[dtype.itemsize], True) for name, _, dtype in self.parts}

    def allocated(self, device: torch.device) -> list[Any]:
        """New components, on the current device."""
        if not self.padded:
            return [empty(shape, dtype, device) for _, shape, dtype in self.parts]
        return [
            torch.zeros(shape, dtype=dtype, device=device) if name in self.padded else empty(shape, dtype, device)
            for name, shape, dtype in self.parts
        ]

    def tensor(self, parts: list[Any]) -> ScaledTensor:
        """The ScaledTensor with these components."""
        if len(parts) == 2:
            return ScaledTensor.from_parts(parts[0], parts[1], self.recipe, self.layout, None, None, self.axis, self.padding)
        named = {name: part for (name, _, _), part in zip(self.parts, parts, strict=True)}
        zero_point, global_scale = named.get("zero_point"), named.get("global_scale")
        return ScaledTensor.from_parts(
            named["data"], named["scale"], self.recipe, self.layout, zero_point, global_scale, self.axis, self.padding
        )

    def components(self, out: Any, device: torch.device) -> list[Any] | None:
        """The components of `out` where the kernel can write into them, else None."""
        if not isinstance(out, ScaledTensor) or (out.recipe, out.layout, out.axis) != (self.recipe, self.layout, self.axis):
            return None
        found = [getattr(out, name) for name, _, _ in self.parts]
        fits = all(writable(part, shape, dtype, device) for part, (_, shape, dtype) in zip(found, self.parts, strict=True))
        return found if fits else None


def _stored_shape(shape: tuple[int, ...], axis: int, storage: str, itemsize: int) -> tuple[tuple[int, ...], bool]:
    """(shape of scales in a storage, whether it has padding); see `breccia.tensors.storage`."""
    *lead, rows, columns = shape if axis == -1 else (*shape[:-2], shape[-1], shape[-2])
    if storage == "swizzle_128x4":
        return (*lead, divided_up(rows, 128), divided_up(columns, 4), 512), bool(rows % 128 or columns % 4)
    unit = 16 // itemsize if storage == "column_major" else 1
    return (*lead, columns, divided_up(rows, unit) * unit), bool(rows % unit)
