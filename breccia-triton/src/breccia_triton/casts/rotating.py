"""Casts to rotated formats, and their decoding, on CUDA tensors of torch.

One kernel rotates in one pass over memory. The kernels of the format without a rotation do the rest (breccia.kernels.rotating).
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from breccia import ScaledTensor, ScalingRecipe
from breccia.backend import DEFAULT, FLOAT32, CastOptions, ProductOptions, Rotation, dtype_name
from breccia.internal import ROTATIONS, rotating, signs_of

from ..facts import GRID, NUMBERS, Argument
from ..geometry import divided_up, power_of_two
from ..launch.cache import Remembered
from ..launch.device import empty, index_of, on, stream_of
from ..launch.launcher import Launcher
from ..launch.triton_launch import Launch
from ..numerics import flushed
from ..operands import FLOATS, addresses, columns_adjacent

#: Numbers and warps of a program.
TILE, WARPS = 4096, 4
#: Columns of a program, where blocks run down the columns.
COLUMNS = 64
#: The largest block that the kernel rotates.
LARGEST = max(ROTATIONS)


@triton.jit
def _sums(y, P: tl.constexpr, N: tl.constexpr, W: tl.constexpr, H: tl.constexpr):
    """The sums and differences of elements that are H apart in y (P, N, W)."""
    low, high = tl.split(tl.permute(tl.reshape(y, (P, N // (2 * H), 2, H, W)), (0, 1, 3, 4, 2)))
    sums = flushed(tl.join(low + high, low - high))
    return tl.reshape(tl.permute(sums, (0, 1, 4, 2, 3)), (P, N, W))


@triton.jit
def rotate_kernel(
    x, z, signs, blocks, columns, P: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr, W: tl.constexpr, FACTOR: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """z (blocks, N, columns), FP32: the blocks of x rotated, or rotated back (docs/spec/numerics.md, section 5.7).

    signs: N numbers, 1 and -1. Programs: ceil(blocks / P), ceil(columns / W).
    """
    first = tl.program_id(0).to(tl.int64) * P
    place = tl.arange(0, N)[None, :, None]
    if W == 1:  # numbers that follow each other in memory: a vector is read as such
        at = first * N + tl.arange(0, P * N)
        exists = at < blocks.to(tl.int64) * N
    else:
        block = first + tl.arange(0, P)[:, None, None]
        column = tl.program_id(1) * W + tl.arange(0, W)[None, None, :]
        at = (block * N + place) * columns + column
        exists = (block < blocks) & (column < columns)
    sign = tl.load(signs + place)
    y = tl.reshape(tl.load(x + at, mask=exists, other=0.0).to(tl.float32), (P, N, W))
    y = flushed(y if BACK else y * sign)
    for step in tl.static_range(LOG):
        y = _sums(y, P, N, W, 1 << step)
    y = y * FACTOR
    tl.store(z + at, tl.reshape(flushed(y * sign if BACK else y), at.shape), mask=exists)


def cast(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`cast` as `breccia.cast` documents it, of what the kernel rotates."""
    return rotating.cast(x, recipe, options, rotated)


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    """`dequantize` as `breccia.dequantize` documents it; the kernel rotates back."""
    return rotating.dequantize(st, options, unrotated)


def rotated(x: Any, rotation: Rotation, axis: int) -> Any:
    """FP32 `x` with every whole block along `axis` rotated."""
    return _blockwise(x, rotation, axis, back=False)


def unrotated(x: Any, rotation: Rotation, axis: int) -> Any:
    """The inverse."""
    return _blockwise(x, rotation, axis, back=True)


def _blockwise(x: Any, rotation: Rotation, axis: int, back: bool) -> Any:
    length, n, axis = x.shape[axis], rotation.block, axis % x.ndim - x.ndim
    columns = x.shape[-1] if axis == -2 else 1
    many = n > LARGEST or columns > COLUMNS * GRID
    if length % n or not x.numel() or x.dtype not in FLOATS or many:
        return (rotating.unrotated if back else rotating.rotated)(x, rotation, axis)
    if axis == -2 and columns_adjacent(x):
        return _blockwise(x.mT, rotation, -1, back).mT
    x = x.resolve_neg().contiguous()
    blocks, device = x.numel() // columns // n, x.device
    with on(device):
        z = empty(tuple(x.shape), torch.float32, device)
        launcher = _launcher(dtype_name(x), x.data_ptr() % 16 == 0, rotation, blocks, columns, back, device)
        launcher.run(stream_of(index_of(device)), *addresses([x, z, _signs(rotation, device)], numbers=3))
    return z


def _launcher(
    dtype: str, aligned: bool, rotation: Rotation, blocks: int, columns: int, back: bool, device: torch.device
) -> Launcher:
    key = dtype, aligned, rotation.block, blocks, columns, back, device
    launcher = _launchers.get(key)
    if launcher is None:
        n = rotation.block
        wide = min(COLUMNS, power_of_two(columns))
        each = max(1, TILE // (n * wide))
        constants = {"P": each, "N": n, "LOG": n.bit_length() - 1, "W": wide, "FACTOR": rotation.factor, "BACK": back}
        arguments = {
            "x": Argument(NUMBERS[dtype], aligned), "z": Argument("*fp32", True),
            "signs": Argument("*fp32", True), "blocks": Argument("i32"), "columns": Argument("i32", columns % 16 == 0),
        }  # fmt: skip
        programs = divided_up(blocks, each), divided_up(columns, wide), 1
        launch = Launch(rotate_kernel, programs, arguments, constants, WARPS, (blocks, columns))
        launcher = _launchers.keep(key, Launcher(launch))
    return launcher


_launchers = Remembered()


@cache  # never forgotten: a CUDA graph reads them where they are
def _signs(rotation: Rotation, device: torch.device) -> torch.Tensor:
    return torch.tensor(signs_of(rotation), device=device)
