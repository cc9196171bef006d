"""compressed-tensors: its qparams, quantize and dequantize, under the schemes it names."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..sets import Case
from . import Adapter
from .shapes import back, matrix, nibbles, padded, plain, tensor


def _arguments(scheme: str, case: Case) -> Any:
    """The scheme's arguments for weights, with blocks of the length that the case has."""
    from compressed_tensors.quantization import preset_name_to_scheme

    args: Any = preset_name_to_scheme(scheme, ["Linear"]).weights
    changed = {"block_structure": list(case.format.block)} if args.strategy == "block" else {}
    return args.model_copy(update=changed)


def _codes(q: Any, case: Case) -> np.ndarray:
    """The codes of rounded numbers, by the packers with which the library compresses."""
    import torch
    from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    if case.format.element.bits == 8:
        return q.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if case.format.element.bits == 4:
        return nibbles(pack_fp4_to_uint8(q).numpy())
    triples = pack_fp6_to_uint8(q).numpy().reshape(len(q), -1, 3).astype(np.uint32)
    words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    return np.stack([words >> shift & 63 for shift in (0, 6, 12, 18)], axis=-1).astype(np.uint8)


def _cast(scheme: str, case: Case) -> dict[str, np.ndarray]:
    import torch
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    plain(case)
    args, fmt, (m, k) = _arguments(scheme, case), case.format, case.format.block
    x = tensor(case, k or 1)
    rows, columns = x.shape
    blocks = x.reshape(rows // (m or rows), m or rows, columns // (k or columns), k or columns).transpose(1, 2)
    of_tensor = generate_gparam(x.amin(), x.amax()) if fmt.has_global_scale else None
    scale, offset = calculate_qparams(blocks.amin((-2, -1)), blocks.amax((-2, -1)), args, global_scale=of_tensor)
    if args.strategy == "tensor":
        scale, offset = scale.reshape(1), offset.reshape(1)
    q = quantize(x, scale, offset, args, global_scale=of_tensor)
    decoded = dequantize(q, scale, offset, args, dtype=torch.float32, global_scale=of_tensor)
    match fmt.block_levels[0].codec.name:
        case "E8M0":
            raw = compress_mx_scale(scale, torch.uint8).numpy()
        case "E4M3":
            raw = scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        case _:
            raw = scale.float().numpy()
    parts = {"codes": back(case, _codes(q.float(), case)), "scale": back(case, raw, "scale")}
    parts |= {} if of_tensor is None else {"global_scale": of_tensor.numpy()}
    return parts | {"decoded": back(case, decoded.float().numpy())}


def _decoded(scheme: str, case: Case) -> np.ndarray:
    import torch
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args, fmt = _arguments(scheme, case), case.format
    q = np.array(fmt.element.values, np.float32)[padded(matrix(case, "codes"), fmt.block[1] or 1)]
    scale = np.array(matrix(case, "scale"))
    if scale.dtype == np.uint8:
        stored = torch.float8_e8m0fnu if fmt.block_levels[0].codec.name == "E8M0" else torch.float8_e4m3fn
        scale = torch.from_numpy(scale).view(stored).float()
    else:
        scale = torch.from_numpy(scale.reshape(1) if args.strategy == "tensor" else scale)
    of_tensor = torch.from_numpy(np.array(case.array("global_scale")).reshape(1)) if fmt.has_global_scale else None
    q = torch.from_numpy(q)
    return back(case, dequantize(q, scale, None, args, dtype=torch.float32, global_scale=of_tensor).numpy())


def _adapter(scheme: str, *formats: str) -> Adapter:
    return Adapter(scheme, formats, partial(_cast, scheme), partial(_decoded, scheme))


ADAPTERS = (
    _adapter("MXFP8A16", "mxfp8"),
    _adapter("MXFP6A16", "mxfp6,scale_rule=even"),
    _adapter("MXFP4A16", "mxfp4,scale_rule=even"),
    _adapter("NVFP4A16", "nvfp4,global_sense=divisor,order=scales_first"),
    _adapter("FP8", "fp8_current,scale_rule=divide"),
    _adapter("FP8_DYNAMIC", "fp8_row,scale_rule=divide"),
    _adapter("FP8_BLOCK", "fp8_block,block_k=16,scale_rule=divide"),
)
