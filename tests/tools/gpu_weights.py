"""Quantized weights and activations on a GPU, and the bound of their products."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from weights import in_torch, tensor

from breccia.backend import reference

STORAGE, NAME, GROUPED = "mma_16x128", "cuda.weight_only", "cuda.weight_only_grouped"


@functools.cache
def weight(name: str, n: int, k: int, seed: int = 0) -> tuple[Any, Any]:
    """(The weight's transpose on the GPU in the kernel's storage, its values in FP64.)"""
    import torch

    st = tensor(name, n, k, seed)
    values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
    return in_torch(st, "cuda").to_storage(STORAGE).mT, values


def activations(m: int, k: int, dtype: str, seed: int = 0) -> Any:
    """Numbers of several binades."""
    import torch

    g = torch.Generator("cuda").manual_seed(seed + m)
    x = torch.randn(m, k, generator=g, device="cuda")
    return (x * torch.exp2(torch.randint(-3, 3, (m, k), generator=g, device="cuda"))).to(getattr(torch, dtype))


def check(found: Any, x: Any, values: Any, bias: Any = None) -> None:
    """The bound of a product with the weight that has these values (N, K)."""
    import triton_products

    triton_products.check(found, x, values.mT, bias)
