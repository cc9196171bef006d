"""Quantized weights and activations on a GPU, and the bound of their products."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from weights import tensor

from breccia.backend import reference
from breccia.tensors.tensor import ScaledTensor

STORAGE, NAME, GROUPED = "mma_16x128", "cuda.weight_only", "cuda.weight_only_grouped"


def on_gpu(st: ScaledTensor) -> ScaledTensor:
    """The tensor on the GPU, in torch's storage dtypes."""
    import torch

    from breccia_torch.ops import TORCH

    dtypes = TORCH.dtypes(st.recipe.format)

    def moved(name: str, part: Any) -> Any:
        if part is None:
            return None
        words = torch.from_numpy(np.ascontiguousarray(part).reshape(-1).view(np.uint8).copy()).cuda()
        dtype = getattr(torch, dtypes.get(name, "uint8"))
        return words.view(dtype).reshape(part.shape)

    parts = {name: moved(name, getattr(st, name)) for name in ("data", "scale", "zero_point", "global_scale")}
    return ScaledTensor.from_parts(
        parts["data"], parts["scale"], st.recipe, st.layout, parts["zero_point"], parts["global_scale"], st.axis, st.padding
    )


@functools.cache
def weight(name: str, n: int, k: int, seed: int = 0) -> tuple[Any, Any]:
    """(The weight's transpose on the GPU in the kernel's storage, its values in FP64.)"""
    import torch

    st = tensor(name, n, k, seed)
    values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
    return on_gpu(st).to_storage(STORAGE).mT, values


def activations(m: int, k: int, dtype: str, seed: int = 0) -> Any:
    """Numbers of several binades."""
    import torch

    g = torch.Generator("cuda").manual_seed(seed + m)
    x = torch.randn(m, k, generator=g, device="cuda")
    return (x * torch.exp2(torch.randint(-3, 3, (m, k), generator=g, device="cuda"))).to(getattr(torch, dtype))


def check(found: Any, x: Any, values: Any, bias: Any = None) -> None:
    """The bound: K u sums of products in FP32, then one rounding to the dtype of the result."""
    import torch

    k, w = x.shape[-1], values.mT
    added = 0.0 if bias is None else bias.double()
    exact, size = x.double() @ w + added, x.double().abs() @ w.abs() + (0.0 if bias is None else bias.double().abs())
    n = (k + (bias is not None)) * 2.0**-24
    bound = n / (1 - n) * size + k * 2.0**-126
    half = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[found.dtype]
    bound = bound + half * (exact.abs() + bound) + (2.0**-25 if half else 0.0)
    assert found.shape == exact.shape
    nan = exact.isnan()
    assert torch.equal(found.isnan(), nan)
    ratio = torch.where(nan | (found.double() == exact), 0.0, (found.double() - exact).abs() / bound)
    assert ratio.max() <= 1, f"the error is {ratio.max().item():.3g} times the bound"
