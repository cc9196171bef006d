"""The names of products in `breccia.kernels.triton`: thin, over the kernels of the table."""

from __future__ import annotations

from typing import Any

import breccia

#: Kernels of two FP8 tensors that keep the contract of products, in this order: the first one that takes a product runs it.
KERNELS = ("cuda.fp8_matmul", "torch.scaled_mm", "triton.fp8_matmul", "triton.matmul_bf16")


def scaled_matmul_triton(a: Any, b: Any, out_dtype: Any = "float32") -> Any:
    """`breccia.matmul(a, b, out_dtype)` of two FP8 tensors on a CUDA kernel: (..., M, K) by (..., K, N) to (..., M, N).

    Scales are per tensor, per row, or of blocks. The first of `KERNELS` that takes the operands on their device runs. Raises
    NoKernelError, with each kernel's reason, where none does.
    """
    return breccia.matmul(a, b, out_dtype, prefer=KERNELS)


def block_scaled_matmul_triton(a: Any, b: Any, out_dtype: Any = "float32") -> Any:
    """`scaled_matmul_triton`, under the name for scales of blocks: 1 x 128 of a, and 128 x 128 or 1 x 128 of b."""
    return scaled_matmul_triton(a, b, out_dtype)
