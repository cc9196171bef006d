"""DeepGEMM's product of FP8 tensors with scales of 1 x 128 and 128 x 128.

By its documents it adds sums of 128 along K in FP32, as the contract of products asks. It was never run here, so it runs only
where it is named: package indexes have version 1.0.0, a source archive without its CUDA files, and DeepGEMM is built from its
repository.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from breccia import UnsupportedError
from breccia.backend import FLOAT32, ProductOptions

from .results import blocks, product


def deep_gemm_matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it. a: (..., M, K); b: a weight's transpose, (K, N)."""
    out_dtype = options.out_dtype
    import deep_gemm

    gemm = getattr(deep_gemm, "fp8_gemm_nt", None)
    if gemm is None:
        raise UnsupportedError(
            f"matmul: {deep_gemm.__file__} has no fp8_gemm_nt, which DeepGEMM has since version 2; build it from "
            "github.com/deepseek-ai/DeepGEMM."
        )
    weight = b.mT

    def multiply(rows: int, into: Any) -> Any:
        y = torch.empty((rows, b.shape[-1]), dtype=getattr(torch, out_dtype), device=a.data.device) if into is None else into
        gemm(blocks(a, rows), (weight.data.contiguous(), weight.scale.contiguous()), y)
        return y

    return product(a, b, options, multiply)
