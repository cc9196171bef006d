"""TransformerEngine's product of two FP8 tensors with one scale each: cuBLAS with another workspace than torch's.

`use_split_accumulator=True` is cuBLAS's mode in which sums leave the tensor core within K, as in `torch.scaled_mm`. With
32 MiB of workspace cuBLAS may also cut K into parts, and NVIDIA does not document in which dtype it adds them, so whether this
product keeps the contract cannot be proved from outside: it runs where it is named.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from breccia import UnsupportedError
from breccia.backend import FLOAT32, ProductOptions

from ..cuda.fp8_plans import kind_of
from .results import product

#: The names of TransformerEngine's dtypes by those of codecs in PTX.
_DTYPES = {"e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2"}


def transformer_engine_matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` of a (..., M, K) by b (K, N), in E4M3 or E5M2 but not both E5M2, each with one scale."""
    out_dtype = options.out_dtype
    from transformer_engine.pytorch import cpp_extensions

    if a.scale.numel() != 1:
        raise UnsupportedError(
            f"matmul: TransformerEngine multiplies tensors with one scale; a has {a.scale.numel()}, one for each matrix. "
            "Multiply its matrices one by one."
        )

    def multiply(rows: int, into: Any) -> Any:
        x, w = _storage(a, a.data.reshape(rows, a.shape[-1])), _storage(b, b.data.mT.reshape(b.shape[-1], b.shape[-2]))
        gemm: Any = cpp_extensions.general_gemm
        return gemm(w, x, out_dtype=getattr(torch, out_dtype), layout="TN", out=into, use_split_accumulator=True)[0]

    return product(a, b, options, multiply)


def _storage(st: Any, codes: Any) -> Any:
    """A matrix of codes (rows, K) and its scale as TransformerEngine holds them."""
    from transformer_engine.pytorch import DType, Float8TensorStorage

    dtype = getattr(DType, _DTYPES[kind_of(st.recipe, st.layout, st.axis)[1]])
    return Float8TensorStorage(data=codes.contiguous().view(torch.uint8), fp8_scale_inv=st.scale.reshape(1), fp8_dtype=dtype)
