"""What layers keep to repeat a product: on a device, the call that its kernel has prepared, with nothing between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from breccia import ScaledTensor
from breccia.backend import product_options, registry, targets

Array = Any
#: A function that repeats a product: f(x, weight, bias). It returns None for operands that the prepared call is not for.
Repeat = Callable[[Any, ScaledTensor, Any], Any]


def likeness(a: Array, table: Any) -> Callable[[Array], bool]:
    """Whether an input has the class and the metadata of `a`, and kernels are still chosen by `table`, as a function of it."""
    strided, shape, stride, dtype, device = torch.strided, a.shape, a.stride(), a.dtype, a.device

    def is_like(x: Array) -> bool:
        return (
            type(x) is torch.Tensor
            and x.dtype is dtype
            and x.shape == shape
            and x.layout is strided
            and x.stride() == stride
            and x.device == device
            and not x.is_neg()
            and registry().table is table
        )

    return is_like


def repeated(a: Array, b: ScaledTensor, bias: Array | None, out_dtype: str) -> Repeat | None:
    """The product of these operands as a function that their layer keeps; None where the kernel prepares no call for it.

    The function returns None for other operands: those in which anything differs that the choice of a kernel, or its call, may
    depend on. Operands need no gradient.
    """
    known = registry()
    table, options = known.table, product_options(out_dtype, bias)
    chosen = table.choose(known.operation("matmul"), "torch", a, b, None, options)
    prepare = chosen.kernel.prepare
    if prepare is None or chosen.checked or chosen.traced or type(a) is not torch.Tensor:
        return None
    call = targets.load(prepare)(a, b, bias, out_dtype)
    if call is None:
        return None
    is_like, of_bias = likeness(a, table), None if bias is None else (bias.dtype, bias.shape, bias.device)

    def repeat(x: Array, weight: ScaledTensor, added: Array | None) -> Array | None:
        if weight is not b or added is not bias or not is_like(x):
            return None
        if added is not None and (added.dtype, added.shape, added.device) != of_bias:
            return None
        return call(x, weight, added, None)

    return repeat
