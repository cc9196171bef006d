"""What torch's own products of FP8 tensors take (`torch._scaled_mm`, `torch.nn.functional.scaled_mm`). Imports no framework."""

from __future__ import annotations

import math
import sys

from breccia import Device
from breccia.backend import Call, Shape

from .fp8_plans import HOPPER, codec_of, kinds

#: The least compute capability with FP8 tensor cores.
_LEAST = (8, 9)
#: cuBLAS takes K and N in multiples of this.
_UNIT = 16
NO_E5M2 = "cuBLAS does not multiply E5M2 by E5M2"


def available(device: Device) -> str | None:
    """Why torch cannot multiply FP8 tensors on a device, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        return "this torch is built without CUDA"
    if device.capability and tuple(device.capability) < _LEAST:
        return f"FP8 tensor cores need compute capability 8.9; {device} has {'.'.join(map(str, device.capability))}"
    return None


def accepts(call: Call) -> str | None:
    """Why torch's product without fast accumulation does not apply, or None."""
    assert call.b is not None
    pair = kinds(call.a, call.b)
    if isinstance(pair, str):
        return pair
    a, b, dtype = call.a, call.b, str(call.option("out_dtype", "float32"))
    codecs = codec_of(a), codec_of(b)
    if a.empty or b.empty:
        return "the generic algorithm runs for empty operands"
    if codecs == ("e5m2", "e5m2"):
        return NO_E5M2
    if call.bias is not None and pair != ("tensor", "tensor"):
        return f"torch adds no bias to a product of scales {pair[0]} times {pair[1]}"
    if why := refused_bias(call.bias, dtype):
        return why
    if pair != ("tensor", "tensor"):
        if "1x32" in pair:
            return "torch multiplies blocks of 32 along K in torch.block_scaled_mm"
        if "tensor" in pair:
            return f"torch has no form for scales {pair[0]} times {pair[1]}"
        if dtype != "bfloat16" or codecs != ("e4m3", "e4m3"):
            return f"for scales {pair[0]} times {pair[1]} torch multiplies E4M3 to bfloat16 only"
    if why := refused_shape(a.shape, b.shape):
        return why
    return _refused_blocks(call) if pair[0] == "1x128" else None


def refused_bias(bias: str | None, dtype: str) -> str | None:
    """Why torch does not add a bias to a result of a dtype, or None."""
    if bias is None or bias == dtype != "float32":
        return None
    if dtype == "float32":
        return "torch adds no bias to a float32 result"
    return f"the bias is {bias}, and torch would round it to {dtype} before it is added; the contract adds it in FP32"


def refused_shape(a: Shape, b: Shape, depth: int = _UNIT) -> str | None:
    """Why torch does not multiply operands of these shapes, or None. K has to be a multiple of `depth`."""
    if len(a) < 2 or len(b) < 2:  # `explain` of recipes alone
        return None
    if math.prod(b[:-2]) > 1:
        return "torch multiplies one matrix of b"
    if a[-1] % depth or b[-1] % _UNIT:
        return f"cuBLAS is called for K in multiples of {depth} and N of {_UNIT}; got K = {a[-1]}, N = {b[-1]}"
    return None


def _refused_blocks(call: Call) -> str | None:
    """Why torch does not multiply blocks, or None."""
    functional = sys.modules.get("torch.nn.functional")
    if functional is not None and not hasattr(functional, "scaled_mm"):
        return "this torch has no torch.nn.functional.scaled_mm; upgrade to 2.10"
    if call.device.capability and tuple(call.device.capability) != HOPPER:
        return "cuBLAS has 128-element blocks on compute capability 9.0 only"
    k = call.a.shape[-1] if call.a.shape else 0
    return f"K = {k} is not a multiple of 128" if k % 128 else None


def accepts_fast(call: Call) -> str | None:
    """Why torch's product with fast accumulation does not apply, or None."""
    why = accepts(call)
    if why is None and call.b is not None and kinds(call.a, call.b) not in (("tensor", "tensor"), ("row", "row")):
        return "torch has fast accumulation for scales of tensors and rows"
    return why
