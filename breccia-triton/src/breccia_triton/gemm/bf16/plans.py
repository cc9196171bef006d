"""Products through BF16: which operands they take, in which range of scales BF16 holds their values, how long they take.

Imports no framework. `matmul` has the idea.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from breccia import Codec, Device, Format, Integer, Minifloat, PowerOfTwo
from breccia.backend import F32, Call, Operand

from ... import availability
from ...casts import plans
from ...tuning import roofline
from ...tuning.choices import codecs_of
from ...tuning.measurements import device_name, nearest
from ..fp8 import plans as fp8_plans
from ..fp8.plans import batches, slowdowns
from ..weight_only import plans as weight_plans

#: Significant bits of BF16.
BITS = 8
#: The binary exponents of FP32's least normal number (BF16 has the same), of its least number, and beyond its largest one.
NORMAL, LEAST, BEYOND = -126, -149, 128
#: The largest multiplier of a global scale, as an exponent: what sums lose below 2^-149 stays below 2^-126 under it.
LARGEST = 22
#: The least K. One step of a tensor core adds 16 products and loses at most 17 / 4 + 2 units 2^-24 (docs/kernels/weights.md);
#: rounding of both global scales, of values under them and of the result takes 5 more, within the 16 that the contract allows.
SHORTEST = 16
#: The least K where values of one operand are two BF16 numbers each, which leave 2^-17, 128 units. 2K / 16 steps of a Hopper
#: GPU lose 25/32 K units of sums that are up to 1 + 2^-7 as large; 5 units as above: 133 + 0.79 K is at most K from here on.
SHORTEST_OF_TWO = 640
#: The compute capability whose tensor cores lose no more than that in a step: older ones keep fewer bits of a sum.
TWO_NUMBERS = (9, 0)
#: The storage of weights that `gemm.weight_only.dgrad` reads, on devices and for formats of `gemm.weight_only.plans`.
STORED = weight_plans.STORAGE


# ------------------------------------------------------------------------------------------------ what BF16 holds


@dataclass(frozen=True)
class Range:
    """Exponents: values of codes under their scales, without a global scale, are 0 or in 2^least ... 2^most.

    least_multiplier, most_multiplier: of a global scale, exponents between which such values times it are normal FP32 numbers.
    """

    least: int
    most: int

    @property
    def least_multiplier(self) -> int:
        return NORMAL - self.least

    @property
    def most_multiplier(self) -> int:
        return min(BEYOND - 1 - self.most, LARGEST)


@lru_cache(maxsize=256)
def range_of(fmt: Format) -> Range | str:
    """The range of a format's values, if each has at most the 8 significant bits of BF16; or why they may have more."""
    level, global_scale = fmt.scale, fmt.global_scale
    if level.convention != "multiplier" or fmt.offset != "none":
        said = f"scales are stored as {level.convention}" if level.convention != "multiplier" else f"codes have a {fmt.offset}"
        return f"{said.replace('_', '-')}, so values may need more than the 8 significant bits of BF16"
    if fmt.scale_record is not None:
        return "scales are products of several levels, so values may need more than the 8 significant bits of BF16"
    if global_scale is not None and fmt.order == "scales_first":
        return (
            "the global scale is multiplied into the scales first, so values may need more than the 8 significant bits of BF16"
        )
    bits = significant(fmt.element), significant(level.codec)
    if None in bits or sum(b or 0 for b in bits) > BITS:
        return f"{fmt.element.name} codes under {level.codec.name} scales may need more than the 8 significant bits of BF16"
    if global_scale is not None and global_scale.codec != F32:
        return f"the global scale is {global_scale.codec.name}; it multiplies FP32 ones after the product"
    (least, most), (least_scale, most_scale) = _exponents(fmt.element), _exponents(level.codec)
    if least + least_scale < LEAST:
        return f"{fmt.element.name} codes under {level.codec.name} scales may be below FP32's least number"
    return Range(least + least_scale, most + most_scale)


def numbers_of(fmt: Format) -> int:
    """The BF16 numbers of a value: 1 where BF16 holds it without the global scale, else 2."""
    return 1 if isinstance(range_of(fmt), Range) else 2


def significant(codec: Codec) -> int | None:
    """The significant bits that a codec adds to a product: none for powers of two. None where values may be any numbers."""
    if isinstance(codec, PowerOfTwo):
        return 0
    if isinstance(codec, Minifloat):
        return codec.mantissa_bits + 1
    if isinstance(codec, Integer):
        return codec.high.bit_length()
    return None


def _exponents(codec: Codec) -> tuple[int, int]:
    """(binary exponent of the least magnitude but zero, one that no magnitude exceeds) of a codec that `significant` knows."""
    finite = [abs(v) for v in map(codec.value, range(1 << codec.bits)) if v and math.isfinite(v)]
    return math.frexp(min(finite))[1] - 1, math.frexp(max(finite))[1]


# ------------------------------------------------------------------------------------------------ which calls


def available(device: Device) -> str | None:
    """Why the kernel cannot run on a device, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        return "this torch is built without CUDA"
    return availability.available(device)


def available_to_jax(device: Device) -> str | None:
    """Why XLA cannot call the kernel, or None."""
    return availability.missing_for_xla() or available(device)


def accepts(call: Call) -> str | None:
    """Why operands are not multiplied through BF16, or None."""
    return _refused_product(call, rounded=False)


def accepts_in_jax(call: Call) -> str | None:
    """Likewise where XLA calls the product."""
    return availability.refused_by_xla(call) or accepts(call)


def accepts_rounded(call: Call) -> str | None:
    """Why operands are not rounded to BF16 and multiplied, or None."""
    return _refused_product(call, rounded=True)


def accepts_grouped(call: Call) -> str | None:
    """Why groups of rows are not multiplied through BF16, or None."""
    a, b = call.a, call.b
    assert b is not None
    if a.recipe is not None or b.recipe is None:
        return "it multiplies BF16 arrays by quantized matrices"
    if str(call.option("out_dtype", "float32")) != "bfloat16":
        return "torch's product of groups writes BF16"
    if call.device.capability and tuple(call.device.capability) != TWO_NUMBERS:
        return "torch's product of groups of BF16 numbers was measured on compute capability 9.0 alone"
    if b.recipe.format.global_scale is not None:
        return "the global scale of each matrix would multiply FP32 sums, and torch's product of groups writes BF16"
    if a.shape and b.shape and (a.shape[-1] % 8 or b.shape[-1] % 8):
        return f"rows of {a.shape[-1]} and {b.shape[-1]} numbers do not begin at multiples of 16 bytes"
    return _refused_product(call, rounded=False)


def _refused_product(call: Call, rounded: bool) -> str | None:
    a, b = call.a, call.b
    assert b is not None
    for name, operand in (("a", a), ("b", b)):
        if (why := _refused(operand)) is not None:
            return f"{name}: {why}"
    if (why := _refused_stored(call)) is not None:
        return why
    if a.recipe is None and b.recipe is None:
        return "it decodes quantized operands, and both are arrays"
    if a.empty or b.empty:
        return "the generic algorithm runs for empty operands"
    inexact = {} if rounded else _inexact(call)
    if len(inexact) == 2:
        return f"a: {inexact['a']}, and so may those of b"
    if len(a.shape) < 2 or len(b.shape) < 2:  # `explain` of recipes alone
        return None
    for name, why in inexact.items():
        if call.device.capability and tuple(call.device.capability) < TWO_NUMBERS:
            return f"{name}: {why}; two BF16 numbers for each value take compute capability 9.0 and more"
        if a.shape[-1] < SHORTEST_OF_TWO:
            return f"{name}: {why}; two BF16 numbers for each value take K = {SHORTEST_OF_TWO} and more, and K is {a.shape[-1]}"
    if (k := a.shape[-1]) < SHORTEST:
        return f"K = {k} has too few terms for the bound of sums in tensor cores; it takes {SHORTEST} and more"
    if call.op == "matmul" and not batches(a.shape[:-2], b.shape[:-2]):
        return f"leading axes {a.shape[:-2]} and {b.shape[:-2]} broadcast in both directions"
    return None


def _refused(operand: Operand) -> str | None:
    """Why an operand has no exact BF16 numbers, or None."""
    recipe, layout = operand.recipe, operand.layout
    if recipe is None:
        dtype = operand.dtype
        return None if dtype == "bfloat16" else f"tensor cores multiply BF16, and the array is {dtype}"
    if layout is None:
        return None
    readable = plans.readable(recipe, layout)
    return readable if isinstance(readable, str) else None


def _refused_stored(call: Call) -> str | None:
    """Why operands in the storage of weights are not multiplied, or None."""
    a, b = call.a, call.b
    assert b is not None
    if STORED not in (a.storage, b.storage):
        return None
    if a.recipe is not None or b.axis != -1 or len(b.shape) != 2:
        return f"of weights in {STORED!r} storage it multiplies matrices with blocks across K, by arrays from the left: dy @ w"
    if call.option("bias") is not None or str(call.option("out_dtype", "float32")) not in ("float32", "bfloat16"):
        return f"it adds no bias to products of weights in {STORED!r} storage, and writes BF16 and FP32"
    if b.shape[-1] % 8:
        return f"rows of {b.shape[-1]} numbers do not begin at multiples of 16 bytes"
    assert b.recipe is not None and b.layout is not None
    operand = weight_plans.weight_format_of(b.recipe.format, b.layout.plain.block(-1))
    return f"b: {operand}" if isinstance(operand, str) else weight_plans.available(call.device)


def _inexact(call: Call) -> dict[str, str]:
    """The operands, by name, with values that one BF16 number may not hold, each with the reason."""
    found: dict[str, str] = {}
    for name, operand in (("a", call.a), ("b", call.b)):
        if operand is None or operand.recipe is None:
            continue
        why = range_of(operand.recipe.format)
        if operand.storage == STORED and operand.layout is not None:
            stored = weight_plans.weight_format_of(operand.recipe.format, operand.layout.plain.block(-1))
            if isinstance(stored, weight_plans.WeightFormat) and not stored.exact and not isinstance(why, str):
                why = "values under a global scale may need more than the 8 significant bits of BF16"
        if isinstance(why, str):
            found[name] = why
    return found


# ------------------------------------------------------------------------------------------------ time

#: How many times longer cuBLAS takes than the roofline says, and the launches of passes and product.
_OVER, _LAUNCHES = 1.05, 4
#: The least seconds of a product that XLA calls, which its work on the host decides: where other kernels are estimated to take
#: less, they were faster on an H200 (jax 0.11, from 16 to 4096 rows of MXFP8, and of BF16 by INT8, INT4 and NVFP4).
_LEAST_OF_XLA = 300e-6
#: The least seconds of the host for a product: three launches, a fill and cuBLAS. Medians on H200s are 126 µs and more
#: (benchmarks/results/matmul-gpu-nvidia-h200.json). Products of `fp8_matmul.cu` take 18 to 52 µs there, and more only with
#: scales of 1 x 32, which torch still decoded in that run.
_HOST = 125e-6


def estimate(rows: int, columns: int, depth: int, matrices: int, formats: Sequence[Format | None], finishes: bool) -> float:
    """The seconds of passes that decode, of cuBLAS, and of the pass over the result where there is one (`finishes`).

    rows, columns, depth: M, N and K. matrices: of b. formats: of a and b, None for BF16 arrays.
    """
    sizes = rows * depth, matrices * columns * depth
    numbers = max(1 if fmt is None else numbers_of(fmt) for fmt in formats)
    moved = 0.0
    for fmt, size in zip(formats, sizes, strict=True):
        if fmt is not None or numbers > 1:
            moved += size * ((2 if fmt is None else fmt.element.bits / 8) + 2 * numbers)
    depth, sizes = depth * numbers, (sizes[0] * numbers, sizes[1] * numbers)
    if finishes or any(fmt is not None and fmt.global_scale is not None for fmt in formats):
        moved += 6.0 * rows * columns
    product = roofline.seconds(2.0 * rows * columns * depth, "bfloat16", 2.0 * (sum(sizes) + rows * columns), 0)
    return _OVER * product + roofline.seconds(0.0, "bfloat16", moved, _LAUNCHES)


def head_of(formats: Sequence[Format | None]) -> str:
    """What keys of measured times begin with, which stand beside those of `gemm.fp8.plans.slowdowns`: times over `estimate`."""
    return " ".join(("bf16", *("BF16" if fmt is None else codecs_of(fmt) for fmt in formats)))


def score(call: Call) -> float:
    """The estimated time; not less than the host's where `fp8_matmul.cu` multiplies these operands too."""
    shorter = fp8_plans.accepts_matmul(call) is None and fp8_plans.available(call.device) is None
    return max(seconds(call), _HOST if shorter else 0.0)


def score_in_jax(call: Call) -> float:
    """The estimated time where XLA calls the product."""
    return max(seconds(call), _LEAST_OF_XLA)


def seconds(call: Call) -> float:
    """The estimated time, by the measured ones of the device where operands of these formats were measured."""
    a, b = call.a, call.b
    assert b is not None
    if len(a.shape) < 2 or len(b.shape) < 2:  # `explain` of recipes alone
        return _LAUNCHES * roofline.LAUNCH
    m, n, k = math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
    formats = [None if operand.recipe is None else operand.recipe.format for operand in (a, b)]
    finishes = call.option("bias") is not None or call.option("out_dtype", "float32") == "float16"
    over = nearest(slowdowns(device_name(call.device)), head_of(formats), m, n, k)
    return (over or 1.0) * estimate(m, n, k, math.prod(b.shape[:-2]), formats, finishes)
