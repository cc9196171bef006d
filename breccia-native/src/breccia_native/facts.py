"""Which products the compiled kernel multiplies, and how formats are told to it. Imports neither NumPy nor the extension."""

from __future__ import annotations

import math
import sys
from typing import Any

from breccia import PerBlockK, PerBlockMN, PerChannel, PerTensor
from breccia.backend import BF16, E2M3, E3M2, E4M3, E5M2, E8M0, F16, F32, TENSOR, Call, Codec, Format, Integer, PowerOfTwo

#: The layouts whose scales the kernel finds.
LAYOUTS = (PerTensor, PerBlockK, PerChannel, PerBlockMN)
#: The shortest K: below it a sum may be rounded more often than the bound of FP32 accumulation allows.
SHORTEST = 32

_NAMED: dict[Codec, str] = {E4M3: "e4m3", E5M2: "e5m2", E2M3: "e2m3", E3M2: "e3m2", E8M0: "e8m0", F16: "f16", BF16: "bf16", F32: "f32"}


def accepts(call: Call) -> str | None:
    """Why the compiled kernel cannot multiply these operands, or None."""
    a, b = call.a, call.b
    assert b is not None
    if sys.byteorder != "little":
        return "it reads little-endian scales"
    if (a.recipe is None) == (b.recipe is None):
        return "it multiplies one ScaledTensor and one array"
    weight, plain, axis = (a, b, -1) if b.recipe is None else (b, a, -2)
    recipe, layout = weight.recipe, weight.layout
    assert recipe is not None
    if weight.axis != axis:
        return "blocks do not run along K"
    if layout is not None and type(layout) not in LAYOUTS:
        return f"it does not support layout {type(layout).__name__}"
    if (reason := unsupported(recipe.format)) is not None:
        return reason
    if weight.empty or plain.empty:
        return "an operand is empty"
    if weight.ndim < 2:
        return "the ScaledTensor has one axis"
    k = plain.shape[-1] if plain is a else plain.shape[-2]
    if k < SHORTEST:
        return f"K is {k}, less than {SHORTEST}"
    return None


def unsupported(fmt: Format) -> str | None:
    """Why the compiled kernel cannot decode the format, or None."""
    element, scale = fmt.element, fmt.scale.codec
    if (element.bits not in (4, 8) and element not in (E2M3, E3M2)) or type(element).decode is not Codec.decode:
        return f"it does not decode {element.name} elements"
    first = element.table if element.bits == 4 else element.table[:1]
    if fmt.offset != "none" and not isinstance(element, Integer) and element.bits != 4:
        return f"it does not support offsets of {element.name}"
    if any(word & F32_EXPONENT == F32_EXPONENT for word in first):
        return f"padding codes of {element.name} are not finite"
    ordinary = type(scale) is PowerOfTwo or type(scale).multiply is Codec.multiply
    if not ordinary or (scale.bits != 8 and scale not in _NAMED):
        return f"it does not decode {scale.name} scales"
    if fmt.global_scale is not None and (fmt.scale.block == TENSOR or fmt.global_scale.codec != F32):
        return "it does not support this global scale"
    return None


F32_EXPONENT = 0x7F800000


def kind_of(codec: Codec) -> str:
    """The name of the encoding in `products.kinds()`."""
    if codec.bits == 4:
        return "table4"
    if isinstance(codec, Integer) and codec.bits == 8:
        return "i8" if codec.signed else "u8"
    return _NAMED.get(codec, "table8")


def factor_of(fmt: Format, global_scale: Any) -> float:
    """What stored scales, or the reciprocals of divisors, are multiplied by. global_scale: a float, or None."""
    factor = math.ldexp(1.0, -fmt.element.fraction_bits) if isinstance(fmt.element, Integer) else 1.0
    for level, value in ((fmt.scale, None), (fmt.global_scale, global_scale)):
        if level is None:
            continue
        if value is not None:
            if level.sense == "divisor":
                value = math.copysign(math.inf, value) if value == 0 else 1 / value
            factor *= value
        if level.sense == "amax":
            factor /= fmt.qmax(level)
    return factor
