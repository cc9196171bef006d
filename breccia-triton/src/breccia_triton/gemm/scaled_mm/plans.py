"""What torch's own products take: of FP8 tensors (`scaled_mm`), of MXFP8 and of NVFP4 ones (`block_scaled_mm`).

Imports no framework.
"""

from __future__ import annotations

import math
import sys

from breccia import Device
from breccia.backend import E2M1, E4M3, E5M2, E8M0, F32, Block, Call, Operand, Shape

from ..fp8.plans import HOPPER, codec_of, kinds

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


# ------------------------------------------------------------------------------------------------ block-scaled

#: The least compute capability with block-scaled tensor cores.
_LEAST_SCALED = (10, 0)
#: K is a multiple of this: whole blocks of both formats, and rows of 4-bit codes in units of 16 bytes.
_DEPTH = 32
#: Blocks along K by the codecs of codes and scales.
_SCALED: dict[tuple[object, object], tuple[str, Block]] = {
    (E4M3, E8M0): ("mxfp8", (1, 32)),
    (E5M2, E8M0): ("mxfp8", (1, 32)),
    (E2M1, E4M3): ("nvfp4", (1, 16)),
}


def block_scaled_available(device: Device) -> str | None:
    """Why torch cannot multiply block-scaled tensors on a device, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        return "this torch is built without CUDA"
    if torch is not None and not hasattr(torch.nn.functional, "scaled_mm"):
        return "this torch has no torch.nn.functional.scaled_mm; upgrade to 2.10"
    if device.capability and tuple(device.capability) < _LEAST_SCALED:
        capability = ".".join(map(str, device.capability))
        return f"block-scaled tensor cores need compute capability 10.0; {device} has {capability}"
    return None


def accepts_block_scaled(call: Call) -> str | None:
    """Why torch does not multiply these operands, or None."""
    assert call.b is not None
    kinds: list[str] = []
    for name, operand, axis in (("a", call.a, -1), ("b", call.b, -2)):
        kind, why = _block_scaled_kind(operand)
        if why:
            return f"it multiplies two MXFP8 or two NVFP4 tensors; {name} {why}"
        if operand.shape and operand.axis != axis:
            return f"blocks of {name} do not run along K"
        kinds.append(kind)
    if kinds[0] != kinds[1]:
        return f"torch has no product of {kinds[0]} by {kinds[1]}"
    elements = [operand.recipe.format.element for operand in (call.a, call.b) if operand.recipe is not None]
    if elements == [E5M2, E5M2]:
        return NO_E5M2
    if call.a.empty or call.b.empty:
        return "the generic algorithm runs for empty operands"
    why = refused_bias(call.bias, str(call.option("out_dtype", "float32")))
    return why or refused_shape(call.a.shape, call.b.shape, _DEPTH)


def _block_scaled_kind(operand: Operand) -> tuple[str, str]:
    """Format and levels of scales, and ""; or "" and why torch does not multiply the operand."""
    recipe = operand.recipe
    if recipe is None:
        return "", "is an array"
    fmt, global_scale = recipe.format, recipe.format.global_scale
    name, block = _SCALED.get((fmt.element, fmt.scale.codec), ("", None))
    layout = operand.layout or recipe.layout.oriented(operand.axis)
    if not name or layout.plain.block(operand.axis) != block or fmt.offset != "none" or fmt.scale.convention != "multiplier":
        return "", f"is {recipe.name}"
    if global_scale is None:
        return (f"{name} of one level" if name == "nvfp4" else name), ""
    if global_scale.codec != F32 or global_scale.convention != "multiplier":
        return "", f"has a global scale that is stored as {global_scale.convention}"
    return name, ""
