"""What layers keep to repeat a product on a device: the call that its kernel has prepared, with nothing between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from breccia import ScaledTensor
from breccia.backend import product_options, registry, targets

Array = Any
#: A function that repeats a product: f(x, weight, bias). It returns None for operands that the prepared call is not for.
Repeat = Callable[[Any, ScaledTensor, Any], Any]


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
    strided, shape, stride, dtype, device = torch.strided, a.shape, a.stride(), a.dtype, a.device
    of_bias = None if bias is None else (bias.dtype, bias.shape, bias.device)

    def repeat(x: Array, weight: ScaledTensor, added: Array | None) -> Array | None:
        if (
            weight is not b
            or added is not bias
            or type(x) is not torch.Tensor
            or x.dtype is not dtype
            or x.shape != shape
            or x.layout is not strided
            or x.stride() != stride
            or x.device != device
            or x.is_neg()
            or (added is not None and (added.dtype, added.shape, added.device) != of_bias)
            or registry().table is not table
        ):
            return None
        return call(x, weight, added, None)

    return repeat
