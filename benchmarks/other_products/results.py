"""What products of other libraries have in common: operands as matrices, and results of the op."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from breccia.backend import ProductOptions, checks
from breccia_triton.launch.device import on
from breccia_triton.launch.executable import check_out
from breccia_triton.operands import need_one_device, parts_of

#: Computes a product of matrices; gets the memory of the result, or None to allocate it.
Multiply = Callable[[int, Any], Any]


def product(a: Any, b: Any, options: ProductOptions, multiply: Multiply) -> Any:
    """`matmul` of a (..., M, K) and b (K, N) by `multiply(rows, into)`, which returns (rows, N) of `out_dtype`.

    A bias is added in FP32 to the rounded product, which is rounded again.
    """
    out_dtype, bias, out = options
    checks.check_matmul(a, b, bias)
    here = a.device if isinstance(a, torch.Tensor) else a.data.device
    need_one_device(here, [*parts_of("a", a), *parts_of("b", b), ("bias", bias)])
    dtype, shape = getattr(torch, out_dtype), (*a.shape[:-1], b.shape[-1])
    if out is not None:
        check_out(out, shape, dtype)
    rows = math.prod(shape[:-1])
    into = out.view(rows, shape[-1]) if out is not None and bias is None and out.is_contiguous() else None
    with on(here):
        result = multiply(rows, into)
        if bias is not None:
            result = (result.float() + bias.float()).to(dtype)
    if out is not None and result.data_ptr() == out.data_ptr():
        return out
    result = result.reshape(shape)
    return result if out is None else out.copy_(result)


def blocks(a: Any, rows: int) -> tuple[Any, Any]:
    """Codes (rows, K) and scales (rows, blocks of K) of a tensor with scales along its last axis, both contiguous."""
    return a.data.reshape(rows, a.shape[-1]).contiguous(), a.scale.reshape(-1, a.scale.shape[-1]).contiguous()
