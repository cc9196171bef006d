"""Torch's own FP8 products as kernels: `torch._scaled_mm` (cuBLAS, CUTLASS), and for blocks `torch.nn.functional.scaled_mm`."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import Any

import torch

from breccia.backend import FLOAT32, ProductOptions, checks, composites, product_options

from ...launch.cache import Remembered
from ...launch.executable import Executable
from ...operands import leading
from ..fp8.matmul import product_facts
from ..fp8.plans import kind_of

#: cuBLAS (13.0) takes rows with 1x128 blocks in multiples of this.
_ROWS = 4
#: Prepared calls.
_calls = Remembered()


def scaled_mm(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it, without fast accumulation."""
    return _multiply(a, b, options, False)


def scaled_mm_fast(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` with fast accumulation: sums stay in the tensor core, which is less than the contract of products."""
    return _multiply(a, b, options, True)


def _multiply(a: Any, b: Any, options: ProductOptions, fast: bool) -> Any:
    out_dtype, bias, out = options
    key = product_facts(a, b, bias, out_dtype), fast
    call = _calls.get(key)
    if call is None:
        call = _calls.keep(key, _executable(a, b, bias, out_dtype, fast))
    return call(a, b, bias, out)


def _executable(a: Any, b: Any, bias: Any, out_dtype: str, fast: bool) -> Executable:
    """The product of operands with these facts. What torch takes as it is, calls only pass on."""
    checks.check_matmul(a, b, bias)
    kinds = kind_of(a.recipe, a.layout, a.axis)[0], kind_of(b.recipe, b.layout, b.axis)[0]
    m, n, device, dtype = a.shape[-2], b.shape[-1], a.data.device, getattr(torch, out_dtype)
    shape, rows = (*leading(a.shape, b.shape), m, n), math.prod(a.shape[:-1])
    scales = ((), ()) if kinds[0] == "tensor" else ((rows, 1), (1, n))
    ready = len(a.shape) == len(b.shape) == 2 and a.data.is_contiguous() and b.data.mT.is_contiguous()
    ready = ready and all(x.is_contiguous() and x.shape == of for x, of in zip((a.scale, b.scale), scales, strict=True))
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]

    def of_rows(stream: int, a: Any, b: Any, added: Any, to: Any) -> None:
        left, right, scale_a, scale_b = a.data, b.data, a.scale, b.scale
        if not ready:
            left, right = _matrices(a, b, rows)
            scale_a, scale_b, to = _rows(scale_a, scales[0]), _rows(scale_b, scales[1]), to.view(rows, n)
        multiply(left, right, scale_a, scale_b, bias=added, out_dtype=dtype, use_fast_accum=fast, out=to)

    def of_blocks(stream: int, a: Any, b: Any, added: Any, to: Any) -> Any:
        return _blocks(a, b, kinds, dtype, rows, None if to is None else to.view(rows, n)).reshape(shape)

    def generic(stream: int, a: Any, b: Any, added: Any, to: Any) -> Any:
        return composites.matmul(a, b, product_options(out_dtype, added))

    if kinds[0] == "1x128":
        return Executable(device, shape, out_dtype, of_blocks, allocates=rows % _ROWS != 0)
    if kinds[0] == "tensor" and a.scale.numel() > 1:  # one for each matrix: torch has one scale, or one of each row
        return Executable(device, shape, out_dtype, generic, allocates=True)
    return Executable(device, shape, out_dtype, of_rows)


def _matrices(a: Any, b: Any, rows: int) -> tuple[Any, Any]:
    """The codes of a in rows, and of b in columns, as cuBLAS reads them."""
    n, k = b.shape[-1], a.shape[-1]
    return a.data.reshape(rows, k), b.data.mT.reshape(n, k).t()


def _rows(scale: Any, shape: tuple[int, ...]) -> Any:
    """One scale, or adjacent ones for each row: (rows,) repeats for every matrix."""
    if not shape:
        return scale.reshape(())
    rows = max(shape)
    flat = scale.reshape(-1)
    return (flat if flat.numel() == rows else flat.repeat(rows // flat.numel())).reshape(shape).contiguous()


def _blocks(a: Any, b: Any, kinds: tuple[str, str], dtype: torch.dtype, rows: int, out: Any) -> Any:
    """The product of blocks, in `out`; in memory of torch's where rows have to be padded."""
    functional: Any = torch.nn.functional  # new names, which older stubs lack
    kind = functional.ScalingType
    across = kind.BlockWise128x128 if kinds[1] == "128x128" else kind.BlockWise1x128
    left, right = _matrices(a, b, rows)
    scale_a = a.scale.reshape(rows, -1)
    if missing := -rows % _ROWS:
        left = torch.nn.functional.pad(left.view(torch.uint8), (0, 0, 0, missing)).view(left.dtype)
        scale_a = torch.nn.functional.pad(scale_a, (0, 0, 0, missing))
    scale_a = rows_adjacent(scale_a)
    scale_b = b.scale.mT.reshape(-1, b.scale.shape[-2])
    scale_b = padded(scale_b).t() if kinds[1] == "128x128" else rows_adjacent(scale_b)
    if out is None:
        return functional.scaled_mm(left, right, scale_a, kind.BlockWise1x128, scale_b, across, output_dtype=dtype)[:rows]
    # The op of `scaled_mm`, which has no `out`.
    multiply: Any = torch._scaled_mm_v2  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    kinds_of = [kind.BlockWise1x128.value], [], [scale_b], [across.value], []
    return multiply(left, right, [scale_a], *kinds_of, None, dtype, out=out)


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
