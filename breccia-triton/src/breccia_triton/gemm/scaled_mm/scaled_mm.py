"""Torch's own FP8 products as kernels: `torch._scaled_mm` (cuBLAS, CUTLASS), and for blocks `torch.nn.functional.scaled_mm`."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from breccia.backend import FLOAT32, ProductOptions, checks, composites

from ...launch.device import on
from ...launch.executable import check_out
from ...operands import leading
from ..fp8.plans import kind_of

#: cuBLAS (13.0) takes rows with 1x128 blocks in multiples of this.
_ROWS = 4


def scaled_mm(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it, without fast accumulation."""
    return _multiply(a, b, options, False)


def scaled_mm_fast(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` with fast accumulation: sums stay in the tensor core, which is less than the contract of products."""
    return _multiply(a, b, options, True)


def _multiply(a: Any, b: Any, options: ProductOptions, fast: bool) -> Any:
    out_dtype, bias, out = options
    checks.check_matmul(a, b, bias)
    dtype = getattr(torch, out_dtype)
    kinds = kind_of(a.recipe, a.layout, a.axis)[0], kind_of(b.recipe, b.layout, b.axis)[0]
    if kinds[0] == "tensor" and a.scale.numel() > 1:  # one for each matrix: torch has one scale, or one of each row
        return composites.matmul(a, b, options)
    shape = (*leading(a.shape, b.shape), a.shape[-2], b.shape[-1])
    if out is not None:
        check_out(out, shape, dtype)
    rows, k = a.data.numel() // a.shape[-1], a.shape[-1]
    left = a.data.reshape(rows, k)  # cuBLAS reads a by rows, and b by columns
    right = b.data.mT.reshape(b.shape[-1], k).t()
    with on(a.data.device):
        if kinds[0] == "1x128":
            result = _blocks(a, b, left, right, kinds, dtype, rows)[:rows]
        else:
            shapes = ((), ()) if kinds[0] == "tensor" else ((rows, 1), (1, b.shape[-1]))
            scale_a, scale_b = (_rows(st.scale, shape) for st, shape in zip((a, b), shapes, strict=True))
            multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
            result = multiply(left, right, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    result = result.reshape(shape)
    return result if out is None else out.copy_(result)


def _rows(scale: Any, shape: tuple[int, ...]) -> Any:
    """One scale, or one for each row: (rows,) repeats for every matrix."""
    if not shape:
        return scale.reshape(())
    rows = max(shape)
    flat = scale.reshape(-1)
    return (flat if flat.numel() == rows else flat.repeat(rows // flat.numel())).reshape(shape)


def _blocks(a: Any, b: Any, left: Any, right: Any, kinds: tuple[str, str], dtype: torch.dtype, rows: int) -> Any:
    functional: Any = torch.nn.functional  # new names, which older stubs lack
    kind = functional.ScalingType
    across = kind.BlockWise128x128 if kinds[1] == "128x128" else kind.BlockWise1x128
    scale_a = a.scale.reshape(rows, -1)
    if missing := -rows % _ROWS:
        left = torch.nn.functional.pad(left.view(torch.uint8), (0, 0, 0, missing)).view(left.dtype)
        scale_a = torch.nn.functional.pad(scale_a, (0, 0, 0, missing))
    scale_a = rows_adjacent(scale_a)
    scale_b = b.scale.mT.reshape(-1, b.scale.shape[-2])
    scale_b = padded(scale_b).t() if kinds[1] == "128x128" else rows_adjacent(scale_b)
    return functional.scaled_mm(left, right, scale_a, kind.BlockWise1x128, scale_b, across, output_dtype=dtype)


def padded(scale: Any) -> Any:
    """Scales of 128x128 tiles (tiles of N, tiles of K) with tiles of K in multiples of 4, which torch asks for."""
    missing = -scale.shape[-1] % 4
    return torch.nn.functional.pad(scale, (0, missing)) if missing else scale.contiguous()


def rows_adjacent(scale: Any) -> Any:
    """Scales (rows, blocks of K) in the order that cuBLAS reads, in which casts down the columns leave them; else a copy.

    torch asks for these strides of one row too.
    """
    if scale.stride() == (1, scale.shape[0]) and scale.data_ptr() % 16 == 0:
        return scale
    return scale.new_empty_strided(scale.shape, (1, scale.shape[0])).copy_(scale)
