"""nvidia-modelopt: its MXFP8, MXFP4 and NVFP4 quantized tensors, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import numpy as np

from ..sets import Case
from . import Adapter
from .shapes import back, nibbles, plain, tensor


def _mx(case: Case) -> dict[str, np.ndarray]:
    import torch
    from modelopt.torch.quantization.qtensor import MXFP4QTensor
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    plain(case)
    x, four = tensor(case, 32), case.format.element.bits == 4
    q, scale = MXFP4QTensor.quantize(x, 32) if four else MXFP8QTensor.quantize(x)
    data = q._quantized_data.view(torch.uint8).numpy()
    decoded = q.dequantize(dtype=torch.float32, scale=scale, **({"block_sizes": {-1: 32}} if four else {}))
    codes = nibbles(data) if four else data
    return {"codes": back(case, codes), "scale": back(case, scale.numpy(), "scale"), "decoded": back(case, decoded.numpy())}


def _nvfp4(case: Case) -> dict[str, np.ndarray]:
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    plain(case)
    q, scale, of_tensor = NVFP4QTensor.quantize(tensor(case, 16), 16)
    decoded = q.dequantize(dtype=torch.float32, scale=scale, double_scale=of_tensor, block_sizes={-1: 16})
    parts = {"codes": back(case, nibbles(q._quantized_data.numpy())), "decoded": back(case, decoded.numpy())}
    parts["scale"] = back(case, scale.view(torch.uint8).numpy(), "scale")
    return parts | {"global_scale": of_tensor.float().numpy()}


ADAPTERS = (
    Adapter("MXFP8QTensor, MXFP4QTensor", ("mxfp8", "mxfp4"), _mx),
    Adapter("NVFP4QTensor", ("nvfp4,order=scales_first",), _nvfp4),
)
