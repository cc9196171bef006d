"""torchao: MXTensor, NVFP4Tensor, Float8Tensor and IntxUnpackedToInt8Tensor, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..comparing import NotSupported
from ..sets import Case
from . import Adapter
from .dtypes import MX
from .shapes import back, bytes_of, matrix, nibbles, padded, plain, tensor


def _bytes(t: Any) -> np.ndarray:
    import torch

    return t.contiguous().view(torch.uint8).numpy()


def _element(case: Case) -> Any:
    import torch

    name = case.format.element.name
    floats = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "E2M1": torch.float4_e2m1fn_x2}
    return floats.get(name) or {"E2M3": "fp6_e2m3", "E3M2": "fp6_e3m2"}[name]


def _mx(mode: str, case: Case) -> dict[str, np.ndarray]:
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    plain(case)
    if case.dtype == "float16":
        raise NotSupported("MXTensor takes FP32 and BF16")
    t = MXTensor.to_mx(tensor(case, 32), _element(case), 32, ScaleCalculationMode(mode))
    codes = nibbles(_bytes(t.qdata)) if case.format.element.bits == 4 else _bytes(t.qdata)
    decoded = t.dequantize(torch.float32).numpy()
    return {"codes": back(case, codes), "scale": back(case, _bytes(t.scale), "scale"), "decoded": back(case, decoded)}


def _mx_decoded(case: Case) -> np.ndarray:
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common import KernelPreference

    element, scale = _element(case), torch.from_numpy(matrix(case, "scale").copy()).view(torch.float8_e8m0fnu)
    codes = padded(matrix(case, "codes"), 32)
    codes = torch.from_numpy(bytes_of(codes) if case.format.element.bits == 4 else codes)
    codes = codes.view(element) if case.format.element.bits == 8 else codes
    t = MXTensor(codes, scale, element, 32, torch.float32, KernelPreference.EMULATED, None, False)
    return back(case, t.dequantize(torch.float32).numpy())


def _nvfp4(case: Case) -> dict[str, np.ndarray]:
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    plain(case)
    if case.dtype == "float16":
        raise NotSupported("NVFP4Tensor takes FP32 and BF16")
    x = tensor(case, 16)
    of_tensor = per_tensor_amax_to_scale(x.abs().max()) if case.format.has_global_scale else None
    t = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=of_tensor)
    parts = {"codes": back(case, nibbles(_bytes(t.qdata))), "scale": back(case, _bytes(t.scale), "scale")}
    parts |= {} if of_tensor is None else {"global_scale": of_tensor.to(torch.float32).numpy()}
    return parts | {"decoded": back(case, t.dequantize(torch.float32).numpy())}


def _nvfp4_decoded(case: Case) -> np.ndarray:
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    codes = torch.from_numpy(bytes_of(padded(matrix(case, "codes"), 16)))
    scale = torch.from_numpy(matrix(case, "scale").copy()).view(torch.float8_e4m3fn)
    of_tensor = torch.from_numpy(np.array(case.array("global_scale"))) if case.format.has_global_scale else None
    return back(case, NVFP4Tensor(codes, scale, 16, torch.float32, of_tensor).dequantize(torch.float32).numpy())


def _float8(case: Case) -> dict[str, np.ndarray]:
    import torchao.quantization as q

    plain(case)
    m, k = case.format.block
    per = q.PerTensor() if m is None else q.PerRow() if k is None else q.PerBlock([m, k])
    t = q.Float8Tensor.from_hp(tensor(case, k or 1), _element(case), per)
    parts = {"codes": back(case, _bytes(t.qdata)), "scale": back(case, t.scale.float().numpy(), "scale")}
    return parts | {"decoded": back(case, t.dequantize().float().numpy())}


def _float8_decoded(case: Case) -> np.ndarray:
    import torch
    from torchao.quantization import Float8Tensor

    m, k = case.format.block
    codes = padded(matrix(case, "codes"), k or 1)
    of = torch.from_numpy(codes).view(_element(case))
    scale = torch.from_numpy(np.array(matrix(case, "scale")).reshape(1 if m is None else len(codes), -1))
    return back(case, Float8Tensor(of, scale, [m or len(codes), k or codes.shape[1]], dtype=torch.float32).dequantize().numpy())


def _intx(case: Case) -> dict[str, np.ndarray]:
    import torch
    from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType

    plain(case)
    _, group = case.format.block
    x, bits = tensor(case), case.format.element.bits
    if x.shape[1] % group:
        raise NotSupported("IntxUnpackedToInt8Tensor takes whole groups")
    t = IntxUnpackedToInt8Tensor.from_hp(x, (1, group), getattr(torch, f"int{bits}"), mapping_type=MappingType.ASYMMETRIC)
    half = 1 << (bits - 1)  # codes and zero-points start at -half, the vectors' at 0
    codes, zero_point = ((a.to(torch.int32) + half).numpy().astype(np.uint8) for a in (t.qdata, t.zero_point))
    parts = {"codes": back(case, codes), "scale": back(case, t.scale.float().numpy(), "scale")}
    parts["zero_point"] = back(case, zero_point, "zero_point")
    return parts | {"decoded": back(case, t.dequantize().float().numpy())}


_NVFP4 = ("nvfp4,order=scales_first", "nvfp4,two_level=False")
_FLOAT8 = tuple(
    f"{of}{block},scale_rule=divide"
    for element in ("", ",fp8_format=E5M2")
    for of, block in ((f"fp8_current{element}", ""), (f"fp8_row{element}", ""), (f"fp8_block{element}", ",block_k=16"))
)
_ZERO_POINTS = (
    "int,bits=3,group_size=20,signed=False,scale_dtype=fp32,symmetric=False,scale_rule=divide",
    "int4,group_size=16,signed=False,scale_dtype=fp32,symmetric=False",
    "int8,group_size=16,signed=False,symmetric=False",
)

ADAPTERS = (
    *(
        Adapter(f"MXTensor, {mode.upper()}", tuple(f + rule for f in MX), partial(_mx, mode), _mx_decoded)
        for mode, rule in (("rceil", ""), ("floor", ",scale_rule=floor"), ("even", ",scale_rule=even"))
    ),
    Adapter("NVFP4Tensor", _NVFP4, _nvfp4, _nvfp4_decoded),
    Adapter("Float8Tensor", _FLOAT8, _float8, _float8_decoded),
    Adapter("IntxUnpackedToInt8Tensor", _ZERO_POINTS, _intx),
)
