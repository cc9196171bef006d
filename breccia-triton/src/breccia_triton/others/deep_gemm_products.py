"""DeepGEMM's product of FP8 tensors with scales of 1 x 128 and 128 x 128."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from .results import blocks, product


def deep_gemm_matmul(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """`matmul` as `breccia.matmul` documents it. a: (..., M, K); b: a weight's transpose, (K, N)."""
    import deep_gemm

    weight = b.mT

    def multiply(rows: int, into: Any) -> Any:
        y = torch.empty((rows, b.shape[-1]), dtype=getattr(torch, out_dtype), device=a.data.device) if into is None else into
        deep_gemm.fp8_gemm_nt(blocks(a, rows), (weight.data.contiguous(), weight.scale.contiguous()), y)
        return y

    return product(a, b, bias, out_dtype, out, multiply)
