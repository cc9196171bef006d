"""Which products the compiled kernel multiplies, and how formats are told to it. Imports neither NumPy nor the extension."""

from __future__ import annotations

import math
import sys
from typing import Any

from breccia import Codec, Format, Integer, PowerOfTwo
from breccia.backend import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, F16, F32, INT4, TENSOR, UINT4, Call, registry, targets

#: Records of scales, as `products.multiply` is told of them: the bits of a code, whether it is signed, and codes of a record.
Codes = tuple[int, bool, int]
NO_CODES: Codes = (0, False, 0)
#: The shortest K: below it a sum may be rounded more often than the bound of FP32 accumulation allows.
SHORTEST = 32

#: The most rows for which decoding a weight as it is multiplied is faster than XLA's FP32 product of a decoded one (measured).
ROWS_ON_JAX = 512
#: Codes with one scale, unless blocks are no multiple of it.
SPAN = 8
#: How activations are rounded before a product: not, to INT8 in groups, to BF16. The numbers are those of products.c.
FP32, INT8, BF16_MODE = 0, 1, 2

_NAMED: dict[Codec, str] = {
    E4M3: "e4m3",
    E5M2: "e5m2",
    E2M3: "e2m3",
    E3M2: "e3m2",
    E8M0: "e8m0",
    F16: "f16",
    BF16: "bf16",
    F32: "f32",
}


def accepts(call: Call) -> str | None:
    """Why the compiled kernel cannot multiply these operands, or None."""
    a, b = call.a, call.b
    assert b is not None
    if sys.byteorder != "little":
        return "it reads little-endian scales"
    if a.recipe is None and b.recipe is None:
        return "neither operand is a ScaledTensor"
    weight, plain, axis = (a, b, -1) if b.recipe is None else (b, a, -2)
    recipe, layout = weight.recipe, weight.layout
    assert recipe is not None
    if weight.axis != axis:
        return "blocks do not run along K"
    if layout is not None and not layout.in_order:
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
    element, scale = fmt.element, fmt.block_levels[0].codec
    if type(element).decode is not Codec.decode:
        return f"it does not decode {element.name} elements"
    first = element.table if element.bits <= 4 else element.table[:1]
    if fmt.offset != "none" and not isinstance(element, Integer) and element.bits > 4:
        return f"it does not support offsets of {element.name}"
    if any(word & F32_EXPONENT == F32_EXPONENT for word in first):
        return f"padding codes of {element.name} are not finite"
    ordinary = type(scale) is PowerOfTwo or type(scale).multiply is Codec.multiply
    if not ordinary or (scale.bits != 8 and scale not in _NAMED):
        return f"it does not decode {scale.name} scales"
    if "coded_scales" in fmt.features and (reason := _unsupported_records(fmt)) is not None:
        return reason
    if fmt.global_scale is not None and (fmt.scale.block == TENSOR or fmt.global_scale.codec != F32):
        return "it does not support this global scale"
    return None


F32_EXPONENT = 0x7F800000


def _unsupported_records(fmt: Format) -> str | None:
    """Why the compiled kernel cannot read scales that are coded under others, or None."""
    for what, record in (("scale", fmt.scale_record), ("bias", fmt.offset_record)):
        if record is None or len(record.levels) != 2:
            if what == "scale" or fmt.offset != "none":
                return f"it reads records of two levels of scales, and of biases; those of {what}s here have another number"
            continue
        base, coded = record.levels[0].codec, record.levels[1].codec
        if base not in (F16, BF16, F32) or type(coded) is not Integer or coded.fraction_bits:
            return f"it reads records of integers under a float; those of {what}s here are {coded.name} under {base.name}"
    return None


def codes_of(fmt: Format, part: str) -> Codes:
    """How the compiled kernel is told of the records of a component, which it supports."""
    record = fmt.record(part)
    if record is None:
        return NO_CODES
    coded = record.levels[1].codec
    assert isinstance(coded, Integer)
    return coded.bits, coded.signed, record.counts[1]


def accepts_grouped(call: Call) -> str | None:
    """Why the compiled kernel cannot multiply groups of rows by these matrices, or None."""
    assert call.b is not None
    if call.a.recipe is not None or call.b.recipe is None:
        return "it multiplies rows of an array by the matrices of a ScaledTensor"
    return accepts(call)


def accepts_on_jax(call: Call) -> str | None:
    """Why the compiled kernel does not multiply these operands of JAX, or None."""
    assert call.b is not None
    if call.b.recipe is None:
        return "it multiplies rows of an array by a ScaledTensor"
    if (reason := beyond_xla(call)) is not None:
        return reason
    rows = math.prod(call.a.shape[:-1])
    if not isinstance(rows, int):
        return "exported functions of symbolic lengths have the generic algorithm"
    if (reason := accepts(call)) is not None:
        return reason
    return None if rows <= ROWS_ON_JAX else f"XLA decodes the weight and multiplies it in FP32 for more than {ROWS_ON_JAX} rows"


def beyond_xla(call: Call) -> str | None:
    """Why a kernel that XLA calls, with recipes and layouts as text, and that it cannot partition, does not run, or None."""
    operands = [operand for operand in (call.a, call.b) if operand is not None]
    if (devices := max(operand.devices for operand in operands)) > 1:
        return f"operands are sharded over {devices} devices: XLA partitions the generic algorithm"
    layouts = [operand.layout.plain for operand in operands if operand.layout is not None]
    for each in (*(operand.recipe for operand in operands), call.recipe, *layouts):
        if each is not None and registry().declared[f"breccia_{each.kind}s"].get(each.name) is not type(each):
            return f"{each.kind} {each.name!r} is declared by no plug-in, and XLA passes its name"
    return None


def accepts_stochastic_cast(call: Call) -> str | None:
    """Why the compiled kernel for NumPy does not cast this array of another framework stochastically, or None."""
    if call.option("rounding") != "stochastic":
        return "it only rounds stochastically; other casts have a kernel that needs no microkernels"
    return targets.load("breccia.kernels.numpy.plan:accepts_compiled_cast")(call)


def accepts_cast_on_jax(call: Call) -> str | None:
    """Why NumPy's kernel does not cast an array of JAX, or None."""
    return beyond_xla(call) or targets.load("breccia.kernels.numpy.plan:accepts_compiled_cast")(call)


def accepts_dequantize_on_jax(call: Call) -> str | None:
    """Why NumPy's kernel does not decode a tensor of JAX, or None."""
    return beyond_xla(call) or targets.load("breccia.kernels.plans:accepts_dequantize")(call)


def accepts_int8(call: Call) -> str | None:
    """Why the kernel that rounds activations to INT8 cannot multiply these operands, or None."""
    return _paired(call) or accepts(call) or _unsupported_by(INT8, call)


def accepts_bf16(call: Call) -> str | None:
    """Why the kernel that rounds activations to BF16 cannot multiply these operands, or None."""
    return _paired(call) or accepts(call) or _unsupported_by(BF16_MODE, call)


def _paired(call: Call) -> str | None:
    assert call.b is not None
    return None if call.a.recipe is None or call.b.recipe is None else "it rounds an array, and both operands are ScaledTensors"


def _unsupported_by(mode: int, call: Call) -> str | None:
    assert call.b is not None
    weight = call.a if call.b.recipe is None else call.b
    assert weight.recipe is not None
    if (reason := inexact(mode, weight.recipe.format)) is not None:
        return reason
    k = weight.shape[weight.axis]
    block = weight.recipe.layout.block()[1] if weight.layout is None else weight.layout.block(weight.axis)[1]
    return f"blocks of {block} are not a multiple of {SPAN}" if block is not None and block % SPAN and block < k else None


def inexact(mode: int, fmt: Format) -> str | None:
    """Why codes of a format cannot be multiplied as they are stored in a mode, or None."""
    element = fmt.element
    if mode == INT8:
        few = isinstance(element, Integer) and fmt.offset != "zero_point"  # of few rows (see `matmul.matmul_int8`)
        if few or element in (INT4, UINT4, E2M1) or (isinstance(element, Integer) and element.bits == 8 and element.signed):
            return None
        return f"{element.name} codes are not small integers times a power of two"
    if fmt.offset == "bias":
        return "it does not support biases"
    first = element.table if element.bits <= 4 else ()
    if kind_of(element) == "table8" or any(word & 0xFFFF for word in first):
        return f"{element.name} codes are not BF16 numbers"
    return None


def kind_of(codec: Codec) -> str:
    """The name of the encoding in `products.kinds()`, whose codes may have more bits."""
    if codec.bits <= 4:
        return "table4"
    if isinstance(codec, Integer):
        return "i8" if codec.signed else "u8"
    return _NAMED.get(codec, "table8")


def factor_of(fmt: Format, global_scale: Any) -> float:
    """What stored scales, or the reciprocals of divisors, are multiplied by. global_scale: a float, or None."""
    factor, element = 1.0, fmt.element
    if isinstance(element, Integer) and kind_of(element) in ("i8", "u8"):  # tables have the numbers themselves
        factor = math.ldexp(1.0, -element.fraction_bits)
    for level, value in ((fmt.scale, None), (fmt.global_scale, global_scale)):
        if level is None:
            continue
        if value is not None:
            if level.convention == "divisor":
                value = math.copysign(math.inf, value) if value == 0 else 1 / value
            factor *= value
        if level.convention == "amax":
            factor /= fmt.qmax(level)
    return factor
