"""What torch's products of MXFP8 and NVFP4 tensors take (`block_scaled_mm`). Imports no framework."""

from __future__ import annotations

import sys

from breccia import Device
from breccia.backend import E2M1, E4M3, E5M2, E8M0, F32, Block, Call, Operand

from .scaled_mm_plans import NO_E5M2, refused_bias, refused_shape

#: The least compute capability with block-scaled tensor cores.
_LEAST = (10, 0)
#: K is a multiple of this: whole blocks of both formats, and rows of 4-bit codes in units of 16 bytes.
_DEPTH = 32
#: Blocks along K by the codecs of codes and scales.
_BLOCKS: dict[tuple[object, object], tuple[str, Block]] = {
    (E4M3, E8M0): ("mxfp8", (1, 32)),
    (E5M2, E8M0): ("mxfp8", (1, 32)),
    (E2M1, E4M3): ("nvfp4", (1, 16)),
}


def available(device: Device) -> str | None:
    """Why torch cannot multiply block-scaled tensors on a device, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        return "this torch is built without CUDA"
    if torch is not None and not hasattr(torch.nn.functional, "scaled_mm"):
        return "this torch has no torch.nn.functional.scaled_mm; upgrade to 2.10"
    if device.capability and tuple(device.capability) < _LEAST:
        capability = ".".join(map(str, device.capability))
        return f"block-scaled tensor cores need compute capability 10.0; {device} has {capability}"
    return None


def accepts(call: Call) -> str | None:
    """Why torch does not multiply these operands, or None."""
    assert call.b is not None
    kinds: list[str] = []
    for name, operand, axis in (("a", call.a, -1), ("b", call.b, -2)):
        kind, why = _kind(operand)
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


def _kind(operand: Operand) -> tuple[str, str]:
    """Format and levels of scales, and ""; or "" and why torch does not multiply the operand."""
    recipe = operand.recipe
    if recipe is None:
        return "", "is an array"
    fmt, global_scale = recipe.format, recipe.format.global_scale
    name, block = _BLOCKS.get((fmt.element, fmt.scale.codec), ("", None))
    layout = operand.layout or recipe.layout.oriented(operand.axis)
    if not name or layout.plain.block(operand.axis) != block or fmt.offset != "none" or fmt.scale.convention != "multiplier":
        return "", f"is {recipe.name}"
    if global_scale is None:
        return (f"{name} of one level" if name == "nvfp4" else name), ""
    if global_scale.codec != F32 or global_scale.convention != "multiplier":
        return "", f"has a global scale that is stored as {global_scale.convention}"
    return name, ""
