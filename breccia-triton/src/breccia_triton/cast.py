"""`cast` on CUDA tensors of torch: shapes, allocations and launches around the kernels of `casting`."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from breccia.backend import (
    DEFAULT,
    TENSOR,
    Block,
    CastOptions,
    ScaledTensor,
    ScalingRecipe,
    checks,
    packing,
    part_shapes,
    reference,
)
from breccia_torch.ops import TORCH, need_dense

from .casting import amax_kernel, cast_kernel
from .geometry import Tile, Variant, divided_up, in_memory, power_of_two
from .launch import INTERPRETED, Argument, Launcher, type_of
from .plans import tiled
from .specs import CONVERTED

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_POINTERS = {1: "*u8", 2: "*i16", 4: "*i32"}
#: Programs of the pass for the amax of a tensor: enough to fill a GPU, few enough for one atomic operation each.
_PROGRAMS = 1024
#: The most programs along the second and third axis of a grid.
_GRID = 65535
#: Tensors of fewer elements have positions of 32 bits, past the end of the last tile too.
_LARGE = 2**31 - 2**20
#: Prepared calls are remembered up to this many.
_REMEMBERED = 4096


def cast(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`cast` as `breccia.cast` documents it; see `casting` for the kernels."""
    need_dense(x)
    if x.is_neg():  # an imaginary part may have torch's negative bit, which its memory lacks
        x = x.resolve_neg()
    if x.dtype not in _FLOATS:
        checks.check_cast(x, recipe)
    if options is not DEFAULT:
        if options.nonfinite == "raise":
            reference.refuse_nonfinite(TORCH, TORCH.f32(x))
        if options.out is not None:
            written = cast(x, recipe, options.replace(out=None))
            return reference.assign(TORCH, options.out, written)
    contiguous, address = x.is_contiguous(), x.data_ptr()
    supplied = options.scale is not None
    stochastic = options.rounding == "stochastic"
    device = x.device
    key = (
        recipe.interned_key, x.shape, x.dtype, device, options.axis, contiguous or x.stride(), address % 16 == 0, supplied,
        stochastic,
    )  # fmt: skip
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _REMEMBERED:
            _prepared.clear()
        prepared = _prepared[key] = Prepared(x, recipe, options.axis, supplied, stochastic)
    if prepared.generic or (supplied and not prepared.takes(options.scale, device)):
        return reference.cast(x, recipe, options)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return prepared(x, options)
    return prepared(x, options)


def conversion(device: torch.device) -> tuple[bool, bool]:
    """(whether a device has instructions that convert to FP8, whether it is NVIDIA's)."""
    nvidia = not INTERPRETED and device.type == "cuda" and torch.version.cuda is not None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 9), nvidia


_prepared: dict[Any, Prepared] = {}


class Prepared:
    """What calls of one recipe, shape, dtype, device and set of options have in common."""

    def __init__(self, x: Any, recipe: ScalingRecipe, axis: int, supplied: bool, stochastic: bool) -> None:
        self.recipe, self.axis, self.shape = recipe, axis, tuple(x.shape)
        self.generic = True
        if x.numel() == 0:
            return
        fmt, self.layout = recipe.format, checks.fitted_layout(recipe, self.shape, axis)
        block = self.layout.block(axis)
        count = packing(fmt.element)[0]
        self.matrices, self.rows, self.columns = matrices, rows, columns = self._matrix(x, fmt.element.bits, block, stochastic)
        found = tiled(recipe, block, axis, rows, columns)
        if isinstance(found, str):
            return
        spec, tile, source = found
        if supplied and fmt.global_scale is None and source != "tile" and spec.element.nan < 0:
            return
        self.generic = False
        self.two_level = spec.outer is not None
        tensor = block == TENSOR
        dtypes = {name: getattr(torch, dtype) for name, dtype in TORCH.dtypes(fmt).items()}
        shapes = part_shapes(fmt, self.layout, self.shape, axis)
        self.parts = [(name, shapes[name], dtypes[name]) for name in fmt.parts]
        self.padding = -self.shape[axis] % count
        self.scale_shape = () if self.two_level else shapes["scale"]
        self.scale_dtype = torch.float32 if self.two_level else dtypes["scale"]
        whole = "tensor" if tensor or self.two_level else source if source != "tile" else ""
        amax_pass = bool(whole) and not supplied
        large = max(x.numel(), _span(x)) >= _LARGE
        native, ptx = conversion(x.device)
        strided = not self._flat(x).is_contiguous()
        common = {"subnormals": x.dtype != torch.float16, "strided": strided, "ptx": ptx}
        integers = {"rows": Argument("i32"), "columns": Argument("i32", columns % 16 == 0)}
        inputs = {"x": Argument(type_of(x.dtype), x.data_ptr() % 16 == 0)}
        strides = {name: Argument("i64") for name in ("stride_matrix", "stride_row", "stride_column")} if strided else {}
        self.strided, self.contiguous = strided, x.is_contiguous()
        # The pass for the amax.
        self.amax: Launcher | None = None
        if amax_pass:
            self.amax_shape = (1, 1, x.numel()) if whole == "tensor" and not strided else (matrices, rows, columns)
            tile_1 = _amax_tile(whole, *self.amax_shape[1:], large)
            tiles = self.amax_shape[0] * math.prod(tile_1.counts(*self.amax_shape[1:]))
            steps = power_of_two(divided_up(tiles, _PROGRAMS)) if whole == "tensor" else 1
            self.amax_programs = (divided_up(tiles, steps), 1, 1)
            self.amax_length = 1 if whole == "tensor" else matrices * (rows if whole == "rows" else columns)
            self.amax = Launcher(
                amax_kernel,
                {
                    **inputs,
                    "amax": Argument("*i32", True),
                    "rows": Argument("i32"),
                    "columns": Argument("i64" if large else "i32", self.amax_shape[2] % 16 == 0),
                    "matrices": Argument("i32"),
                    **strides,
                },
                {"G": tile_1, "V": Variant(whole, finite=self.two_level, steps=steps, **common)},
                8,
            )
        # The cast.
        kind = "supplied" if supplied else "tile" if self.two_level else "tensor" if tensor else source
        down, along = tile.counts(rows, columns)
        folded = max(down, matrices) > _GRID
        self.programs = (matrices * down * along, 1, 1) if folded else (along, down, matrices)
        tile = replace(tile, large=large, folded=folded)
        element = fmt.element.name in CONVERTED and native
        arguments = dict(inputs)
        arguments |= {name: Argument(_POINTERS[dtypes[name].itemsize], True) for name in ("data", "scale")}
        if spec.offset != "none":
            arguments["zero_point"] = Argument(_POINTERS[dtypes["zero_point"].itemsize], True)
        if self.two_level:
            arguments["outer"] = Argument("*i32", True)
        if amax_pass:
            arguments["amax"] = Argument("*i32", True)
        if supplied:
            arguments["supplied"] = Argument(_POINTERS[self.scale_dtype.itemsize])
        if stochastic:
            arguments |= {"seed_low": Argument("i32"), "seed_high": Argument("i32")}
        self.groups = divided_up(columns if axis == -1 else rows, count)
        arguments |= {**integers, "groups": Argument("i32", self.groups % 16 == 0), **strides}
        made = Variant(
            kind,
            tensor,
            native=element,
            stochastic=stochastic,
            ragged=self.padding > 0,
            words=fmt.element.bits == 6 and not any(n % 16 for n in (columns, tile.block_columns, tile.wide)),
            **common,
        )
        self.cast = Launcher(cast_kernel, arguments, {"S": spec, "G": tile, "V": made}, tile.warps)
        self.stochastic = stochastic

    def _matrix(self, x: Any, bits: int, block: Block, stochastic: bool) -> tuple[int, int, int]:
        """(matrices, rows, columns): leading axes count as rows where that keeps the blocks. bits: of a code."""
        shape = self.shape
        if len(shape) == 1:
            return 1, 1, shape[0]
        lead, (rows, columns) = math.prod(shape[:-2]), shape[-2:]
        if block == TENSOR:
            ordered = self.axis == -1 or not stochastic  # random words follow the order of elements with K last
            if x.is_contiguous() and ordered and bits == 8 and x.numel() < _LARGE:
                return 1, 1, x.numel()
            merged = self.axis == -1
        else:
            tall = in_memory(block, self.axis)[0]
            merged = self.axis == -1 and tall is not None and rows % tall == 0
        return (1, lead * rows, columns) if merged else (lead, rows, columns)

    def _flat(self, x: Any) -> Any:
        """`x` with its leading axes merged as the kernels see them: a view where there is one."""
        return x.reshape(self.matrices, self.rows, self.columns)

    def takes(self, scale: Any, device: torch.device) -> bool:
        """Whether a supplied scale can be read as it is."""
        return (
            isinstance(scale, torch.Tensor)
            and scale.device == device
            and scale.dtype == self.scale_dtype
            and tuple(scale.shape) == tuple(self.scale_shape)
            and scale.is_contiguous()
        )

    def __call__(self, x: Any, options: CastOptions) -> ScaledTensor:
        device = x.device
        made = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in self.parts}
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        x = x if self.contiguous else self._flat(x)
        integers = [self.rows, self.columns]
        strides = list(x.stride()) if self.strided else []
        arrays = [x, made["data"], made["scale"]]
        arrays += [made[name] for name in ("zero_point", "global_scale") if name in made]
        if self.amax is not None:
            amax = torch.zeros(self.amax_length, dtype=torch.int32, device=device)
            self.amax(self.amax_programs, stream, *_pointers([x, amax]), *self.amax_shape[1:], self.amax_shape[0], *strides)
            arrays.append(amax)
        if options.scale is not None:
            arrays.append(options.scale)
        seeds = list(TORCH.words(options.seed)) if self.stochastic else []
        self.cast(self.programs, stream, *_pointers(arrays), *seeds, *integers, self.groups, *strides)
        return ScaledTensor.from_parts(
            made["data"],
            made["scale"],
            self.recipe,
            self.layout,
            made.get("zero_point"),
            made.get("global_scale"),
            self.axis,
            self.padding,
        )


def _pointers(arrays: list[Any]) -> list[Any]:
    """Addresses; the interpreter takes tensors, of integers except for the input."""
    if INTERPRETED:
        return [a if a.dtype in _FLOATS and i == 0 else a.view(_WORDS[a.dtype.itemsize]) for i, a in enumerate(arrays)]
    return [a.data_ptr() for a in arrays]


def _amax_tile(whole: str, rows: int, columns: int, large: bool) -> Tile:
    if whole == "columns":
        return Tile(1, 1, 0, 64, 1, 0, min(128, power_of_two(columns)), large)
    wide = min(8192 if rows == 1 else 1024, power_of_two(columns))
    return Tile(1, 1, 0, min(max(1, 8192 // wide), power_of_two(rows)), 1, 0, wide, large)


def _span(x: Any) -> int:
    return sum((n - 1) * abs(s) for n, s in zip(x.shape, x.stride(), strict=True))
