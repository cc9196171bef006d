"""Torch's products of MXFP8 and NVFP4 tensors on block-scaled tensor cores (`torch.nn.functional.scaled_mm`, cuBLAS).

Not run on such hardware (compute capability 10.0 and more): tests check the arguments and the bytes of scales.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import Any

import torch

from breccia import ScaledTensor, UnsupportedError
from breccia.backend import E2M1, FLOAT32, ProductOptions, checks

from ...launch.device import on
from ...launch.executable import check_out
from ...operands import need_one_device, parts_of

#: The order of scales that cuBLAS reads.
STORAGE = "swizzle_128x4"


def block_scaled_mm(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` of two MXFP8, or of two NVFP4 tensors, a (..., M, K) by one matrix b (K, N).

    Scales in other storages are rearranged at each call. Raises UnsupportedError for more than one global scale of an operand.
    """
    out_dtype, bias, out = options
    checks.check_matmul(a, b, bias)
    device, dtype = a.data.device, getattr(torch, out_dtype)
    need_one_device(device, [*parts_of("a", a), *parts_of("b", b), ("bias", bias)])
    shape = (*a.shape[:-1], b.shape[-1])
    if out is not None:
        check_out(out, shape, dtype)
    functional: Any = torch.nn.functional  # new names, which older stubs lack
    with on(device):
        left, right = _ScaledMMOperand("a", a), _ScaledMMOperand("b", b.mT)
        result = functional.scaled_mm(
            left.codes,
            right.codes.t(),
            left.scales,
            left.kinds,
            right.scales,
            right.kinds,
            swizzle_a=left.orders,
            swizzle_b=right.orders,
            bias=bias,
            output_dtype=dtype,
        ).reshape(shape)
    return result if out is None else out.copy_(result)


class _ScaledMMOperand:
    """An operand (..., rows, K) as torch takes it: codes (rows, K), scales in cuBLAS's order, and what they are.

    Codes of 4 bits are pairs of torch's dtype (rows, K / 2).
    """

    def __init__(self, name: str, st: ScaledTensor) -> None:
        functional: Any = torch.nn.functional
        kinds, orders = functional.ScalingType, functional.SwizzleType
        st = matrix_of(st).to_storage(STORAGE)
        packed = st.recipe.format.element == E2M1
        self.codes = st.data.contiguous().view(torch.float4_e2m1fn_x2) if packed else st.data.contiguous()
        scale = st.scale.contiguous().reshape(-1)
        self.scales = [scale.view(torch.float8_e4m3fn if packed else torch.float8_e8m0fnu)]
        self.kinds = [kinds.BlockWise1x16 if packed else kinds.BlockWise1x32]
        self.orders = [orders.SWIZZLE_32_4_4]
        if st.global_scale is not None:
            if st.global_scale.numel() != 1:
                raise UnsupportedError(
                    f"matmul: torch.block_scaled_mm takes one global scale of {name}; it has {st.global_scale.numel()}. "
                    "Multiply its matrices one by one."
                )
            self.scales.append(st.global_scale.reshape(()))
            self.kinds.append(kinds.TensorWise)
            self.orders.append(orders.NO_SWIZZLE)


def matrix_of(st: ScaledTensor) -> ScaledTensor:
    """A tensor (..., rows, K) with blocks along K as one matrix; itself, if it is one."""
    if len(st.shape) == 2:
        return st
    st = st.to_plain()
    rows = math.prod(st.shape[:-1])
    data, scale = (x.reshape(rows, x.shape[-1]) for x in (st.data, st.scale))
    return ScaledTensor.from_parts(data, scale, st.recipe, st.layout, None, st.global_scale, st.axis, st.padding)
