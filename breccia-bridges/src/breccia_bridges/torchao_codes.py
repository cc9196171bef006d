"""Codes of torchao's tensors in torch: their dtypes, and their packing along either axis."""

from __future__ import annotations

from typing import Any

import torch

from breccia import Codec, ScaledTensor
from breccia.backend import E2M1, E2M3, E3M2, E4M3, E5M2, Array, ops_of, pack, unpack

from .torchao_parts import FP8

#: Formats of FP8 codes by torch's dtypes.
FP8_DTYPES = {getattr(torch, name): fmt for name, fmt in FP8.items()}


def mx_element(element: Codec) -> Any:
    """torchao's name of an MX element: a dtype, or text for FP6."""
    if element in (E2M3, E3M2):
        return f"fp6_{element.name.lower()}"
    return {E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2, E2M1.name: torch.float4_e2m1fn_x2}[element.name]


def is_transposed(data: Array) -> bool:
    """Whether a matrix lies transposed in memory."""
    return data.ndim > 1 and data.stride(-2) < data.stride(-1)


def packed(codes: Array, element: Codec, axis: int) -> Array:
    """int32 codes in breccia's packing along `axis`."""
    ops = ops_of(codes)
    return pack(ops, codes, element) if axis == -1 else pack(ops, codes.mT, element).mT


def unpacked(scaled: ScaledTensor) -> Array:
    """The codes of a plain tensor, one per int32."""
    ops, element, length = ops_of(scaled.data), scaled.recipe.format.element, scaled.shape[scaled.axis]
    if scaled.axis == -1:
        return unpack(ops, scaled.data, element, length)
    return unpack(ops, scaled.data.mT, element, length).mT
