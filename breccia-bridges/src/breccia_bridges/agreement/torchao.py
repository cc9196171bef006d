"""torchao: MXTensor, NVFP4Tensor, Float8Tensor, IntxUnpackedToInt8Tensor, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from breccia import (
    Codec,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.backend import E2M1, E2M3, E3M2, E4M3, E5M2, INT4, UINT4

from . import DIVIDED, Library, Quantizer, Setting, Written, installed, packed


def _bytes(tensor: Any) -> np.ndarray:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy()


def _mx(element: Codec, mode: str) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import torch
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        elements: dict[str, Any] = {
            "E4M3": torch.float8_e4m3fn,
            "E5M2": torch.float8_e5m2,
            "E2M3": "fp6_e2m3",
            "E3M2": "fp6_e3m2",
            "E2M1": torch.float4_e2m1fn_x2,
        }
        t = MXTensor.to_mx(torch.from_numpy(x), elements[element.name], 32, ScaleCalculationMode(mode))
        data = _bytes(t.qdata)
        data = packed(data, element) if element.bits == 6 else data
        return Written(data, t.dequantize(torch.float32).numpy(), _bytes(t.scale))

    return write


def _nvfp4(two_level: bool) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import torch
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

        hp = torch.from_numpy(x)
        tensor_scale = per_tensor_amax_to_scale(hp.abs().max()) if two_level else None
        t = NVFP4Tensor.to_nvfp4(hp, per_tensor_scale=tensor_scale)
        global_scale = None if tensor_scale is None else tensor_scale.numpy()
        return Written(_bytes(t.qdata), t.dequantize(torch.float32).numpy(), _bytes(t.scale), global_scale)

    return write


def _float8(granularity: str, *sizes: Any, element: str = "float8_e4m3fn") -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import torch
        import torchao.quantization as q

        t = q.Float8Tensor.from_hp(torch.from_numpy(x), getattr(torch, element), getattr(q, granularity)(*sizes))
        scale = t.scale.reshape(()) if granularity == "PerTensor" else t.scale
        return Written(_bytes(t.qdata), t.dequantize().numpy(), scale.numpy())

    return write


def _intx(group: int, bits: int, mapping: str) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import torch
        from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType

        dtype, kind = getattr(torch, f"int{bits}"), MappingType[mapping]
        t = IntxUnpackedToInt8Tensor.from_hp(torch.from_numpy(x), (1, group), dtype, mapping_type=kind)
        codes, offset = t.qdata.numpy(), None
        if kind is MappingType.ASYMMETRIC:  # codes and zero-points start at -8, breccia's at 0
            codes, offset = codes + 8, (t.zero_point.numpy() + 8).astype(np.uint8)
        data = packed(codes, UINT4 if offset is not None else INT4) if bits == 4 else codes.view(np.uint8)
        return Written(data, t.dequantize().numpy(), t.scale.numpy(), zero_point=offset)

    return write


_MX: tuple[tuple[Codec, Callable[..., ScalingRecipe]], ...] = (
    (E4M3, lambda **rule: MXFP8BlockScaling("E4M3", **rule)),
    (E5M2, lambda **rule: MXFP8BlockScaling("E5M2", **rule)),
    (E2M3, lambda **rule: MXFP6BlockScaling("E2M3", **rule)),
    (E3M2, lambda **rule: MXFP6BlockScaling("E3M2", **rule)),
    (E2M1, MXFP4BlockScaling),
)
_FLOOR = "FLOOR takes the exponent of amax unrounded, so a block's largest elements may saturate."
_EVEN = "EVEN rounds amax to the element's mantissa bits before it takes the exponent."
_RCEIL = "The exponent is ceil(log2(amax / largest)) in FP32: just above largest · 2^k it is k, and the block saturates."
_CEIL = "CEIL rounds amax up to a power of two, regardless of the element's largest value; no rule of breccia does."


def _modes(element: Codec, recipe: Callable[..., ScalingRecipe]) -> tuple[Quantizer, ...]:
    name = f"MXTensor, {element.name}"
    return (
        Quantizer(f"{name}, FLOOR", _mx(element, "floor"), Setting(recipe(), _FLOOR), Setting(recipe(scale_rule="floor"))),
        Quantizer(f"{name}, EVEN", _mx(element, "even"), Setting(recipe(), _EVEN), Setting(recipe(scale_rule="even"))),
        Quantizer(f"{name}, RCEIL", _mx(element, "rceil"), Setting(recipe(), _RCEIL)),
        Quantizer(f"{name}, CEIL", _mx(element, "ceil"), Setting(recipe(), _CEIL)),
    )


_INT4 = partial(INT4Scaling, 32, scale_dtype="fp32")
_ASYMMETRIC = partial(_INT4, signed=False, symmetric=False)

LIBRARIES = (
    Library(
        "torchao",
        installed("torchao"),
        (
            *(quantizer for element, recipe in _MX for quantizer in _modes(element, recipe)),
            Quantizer(
                "NVFP4Tensor, per_tensor_scale",
                _nvfp4(True),
                Setting(
                    NVFP4BlockScaling(),
                    "Block scales are at least 2^-6; codes are x · ((1 / g) / s) and values q · (g · s), while breccia's are "
                    "x · (1 / (s · g)) and (q · s) · g.",
                ),
            ),
            Quantizer(
                "NVFP4Tensor",
                _nvfp4(False),
                Setting(
                    NVFP4BlockScaling(two_level=False),
                    "Block scales are at least 2^-6, the smallest normal number of E4M3; breccia's may be subnormal.",
                ),
            ),
            Quantizer(
                "Float8Tensor, PerTensor",
                _float8("PerTensor"),
                Setting(Float8CurrentScaling(), DIVIDED),
                Setting(Float8CurrentScaling(scale_rule="divide")),
            ),
            Quantizer(
                "Float8Tensor, PerRow",
                _float8("PerRow"),
                Setting(Float8RowScaling(), DIVIDED),
                Setting(Float8RowScaling(scale_rule="divide")),
            ),
            Quantizer(
                "Float8Tensor, PerBlock 128×128",
                _float8("PerBlock", [128, 128]),
                Setting(Float8BlockScaling(block_m=128), DIVIDED),
                Setting(Float8BlockScaling(block_m=128, scale_rule="divide")),
            ),
            Quantizer(
                "IntxUnpackedToInt8Tensor, int4, groups of 32",
                _intx(32, 4, "SYMMETRIC"),
                Setting(_INT4(), "The scale is amax / 7.5, half the width of the codes' range; breccia's is amax / 7."),
                Setting(_INT4(scale_rule="half_range")),
            ),
            Quantizer(
                "IntxUnpackedToInt8Tensor, int8, groups of 32",
                _intx(32, 8, "SYMMETRIC"),
                Setting(
                    INT8Scaling(32), "The scale is amax / 127.5, half the width of the codes' range; breccia's is amax / 127."
                ),
                Setting(INT8Scaling(32, scale_rule="half_range")),
            ),
            Quantizer(
                "IntxUnpackedToInt8Tensor, int4, ASYMMETRIC",
                _intx(32, 4, "ASYMMETRIC"),
                Setting(_ASYMMETRIC(), "Zero-points come from a division by the scale; breccia's come from its reciprocal."),
                Setting(
                    _ASYMMETRIC(scale_rule="divide"),
                    "Codes come from the reciprocal of the scale, zero-points from a division; breccia uses one for both.",
                ),
            ),
        ),
    ),
)
