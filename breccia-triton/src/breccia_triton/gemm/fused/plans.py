"""Products whose operands are decoded in registers: which calls they take, what is multiplied, how long it takes.

One kernel in plain Triton, for every device that Triton compiles for. A program computes a tile of the result in steps along K:
it loads numbers of `a` and codes of `b`, decodes the codes by the formulas of the casts to a dtype that holds them exactly,
multiplies in tensor cores beginning at zero, and adds the product, times the scales of the step, to its sums in FP32. What
a scale multiplies, and in which dtype, is data (`MultiplyStrategy`), from the bits and exponents of the codecs.

Imports no framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from breccia import Codec, Format, Integer, Lookup, Minifloat, PowerOfTwo
from breccia.backend import F32, TENSOR, Block, Call

from ...casts import plans
from ...facts import LARGE, block_of
from ...specs import CONVERTED
from ...tuning import roofline
from ..bf16.plans import BEYOND, LARGEST, LEAST, NORMAL, significant
from ..fp8 import plans as fp8_plans

#: Dtypes of arrays, each with its significant bits and the exponents of its least number and beyond its largest one.
DTYPES = {"bfloat16": (8, -133, 128), "float16": (11, -24, 16), "float32": (24, -149, 128)}
#: Dtypes of results.
RESULTS = tuple(DTYPES)
#: The least K of sums in tensor cores; docs/kernels/triton-products.md has the bound.
SHORTEST = 32
#: The least number of columns of K of a step.
STEP = 16
#: Columns of K after which sums of FP8 tensor cores are added up in FP32 (docs/spec/numerics.md, section 9).
PROMOTED = 128
#: Exponents between which scales, and biases of blocks, have to be where values are multiplied as three numbers in BF16:
#: their last bits, 2^-46 of the scale, are normal numbers then.
_VALUED = -80, 100
#: Likewise of scales and float zero-points. A code less a zero-point is a multiple of 2^-47 then, and a value one of 2^-94.
_SHIFTED = -24, 60


@dataclass(frozen=True)
class MultiplyStrategy:
    """How the codes of an operand are multiplied, besides arrays of one dtype; see `MainloopOperand` and `GemmTiling`.

    low, high: of scales, as numbers. global_low, global_high: of the global scale.
    """

    dot: str
    parts: int = 1
    folded: bool = False
    valued: bool = False
    low: float = 0.0
    high: float = 2.0**LARGEST
    global_low: float = 0.0
    global_high: float = 0.0


# ------------------------------------------------------------------------------------------------ what is multiplied


@lru_cache(maxsize=256)
def way_of(fmt: Format, group: int, dtype: str) -> MultiplyStrategy | str:
    """How arrays of a dtype are multiplied by codes of a format with blocks of `group` columns along K (0: all of K).

    Returns the reason instead where there is no way.
    """
    if dtype == "float32":
        return MultiplyStrategy("float32")
    level, global_scale = fmt.scale, fmt.global_scale
    if level.convention != "multiplier":
        return f"its scales are stored as {level.convention}, and the kernel multiplies"
    if global_scale is not None and (global_scale.codec != F32 or fmt.offset != "none" or fmt.scale_record is not None):
        return "global scales with an offset, of coded scales, or of another codec than F32, have no kernel here"
    codec = _scale_codec(fmt)
    (least, most), (least_scale, most_scale) = _exponents(fmt), _range(codec)
    global_low = global_high = 0.0
    if global_scale is not None:
        # Values under both scales have to be normal FP32 numbers; so has the product of these, where it comes first.
        below, above = (min(least, 0), max(most, 0)) if fmt.order == "scales_first" else (least, most)
        global_low = math.ldexp(1.0, min(NORMAL - below - least_scale, BEYOND - 1))
        global_high = math.ldexp(1.0, max(min(BEYOND - 1 - above - most_scale, LARGEST), NORMAL))
    exact = _exact(fmt, dtype)
    if not exact and dtype == "float16":
        return MultiplyStrategy("float32")  # FP16 has too few exponents for a sum of three numbers
    if fmt.offset in ("bias", "float_zero_point"):
        low, high = (math.ldexp(1.0, n) for n in (_VALUED if fmt.offset == "bias" else _SHIFTED))
        return MultiplyStrategy(dtype, 3, valued=True, low=low, high=high)
    if group and group < PROMOTED and _folds(fmt, dtype):
        return MultiplyStrategy(dtype, folded=True, global_low=global_low, global_high=global_high)
    # A scale below this one may make FP32 round a value that is subnormal.
    representable = isinstance(codec, PowerOfTwo) and least + least_scale >= LEAST
    low = 0.0 if representable or least + least_scale >= NORMAL else math.ldexp(1.0, NORMAL - least)
    return MultiplyStrategy(dtype, 1 if exact else 3, low=low, global_low=global_low, global_high=global_high)


def _scale_codec(fmt: Format) -> Codec:
    """The codec of the scale of a block: FP32 where several levels multiply to it."""
    return fmt.scale.codec if fmt.scale_record is None else F32


def _magnitudes(fmt: Format) -> Iterable[float]:
    """The magnitudes of codes, less their zero-points, but 0."""
    codec = fmt.element
    if isinstance(codec, Integer) and fmt.offset == "zero_point":
        return 1.0, float(max(codec.high, 255 - codec.low))
    return (abs(v) for v in map(codec.value, range(1 << codec.bits)) if v and math.isfinite(v))


@lru_cache(maxsize=256)
def _exponents(fmt: Format) -> tuple[int, int]:
    """(binary exponent of the least magnitude of codes but 0, one that none exceeds)."""
    magnitudes = list(_magnitudes(fmt))
    return math.frexp(min(magnitudes))[1] - 1, math.frexp(max(magnitudes))[1]


def _range(codec: Codec) -> tuple[int, int]:
    """(binary exponent of the least scale but 0, one that none exceeds)."""
    if codec.bits > 8:
        _, least, most = DTYPES[str(codec.dtype)]
        return least, most
    finite = [v for v in map(codec.value, range(1 << codec.bits)) if v > 0 and math.isfinite(v)]
    return math.frexp(min(finite))[1] - 1, math.frexp(max(finite))[1]


def _exact(fmt: Format, dtype: str) -> bool:
    """Whether a dtype holds every code, less its zero-point"""
    if isinstance(fmt.element, Lookup) or fmt.offset in ("bias", "float_zero_point"):
        return False
    bits, least, most = DTYPES[dtype]
    if isinstance(fmt.element, Integer):
        # Multiples of the last bit; a power of two has one significant bit.
        largest = max(_magnitudes(fmt)) * 2**fmt.element.fraction_bits if fmt.offset == "none" else max(_magnitudes(fmt))
        needed = (int(largest) - 1).bit_length()
    else:
        needed = significant(fmt.element) or 0
    exponents = _exponents(fmt)
    return needed <= bits and exponents[0] >= least and exponents[1] <= most


def _folds(fmt: Format, dtype: str) -> bool:
    """Whether a dtype holds every code times its scale"""
    if dtype != "bfloat16" or fmt.offset != "none":
        return False
    codecs = fmt.element, _scale_codec(fmt)
    bits = [significant(codec) for codec in codecs]
    if None in bits or sum(b or 0 for b in bits) > DTYPES[dtype][0] or not isinstance(codecs[0], Minifloat | Integer):
        return False
    # Every value is a multiple of the least one, and every multiple of 2^-133 a number of BF16, if it may be subnormal.
    return _exponents(fmt)[0] + _range(codecs[1])[0] >= DTYPES[dtype][1]


def way_of_fp8(a: Format, b: Format, native: bool) -> MultiplyStrategy | str:
    """How codes of FP8 are multiplied by each other. native: the device has tensor cores for them."""
    for fmt in (a, b):
        if fmt.element.name not in CONVERTED or not isinstance(fmt.element, Minifloat):
            return f"{fmt.element.name} codes are not FP8"
        if fmt.offset != "none" or fmt.global_scale is not None or fmt.scale.convention != "multiplier":
            return "offsets, global scales and scales that are not multipliers have no kernel here"
        if fmt.scale_record is not None:
            return "coded scales of FP8 have no kernel here"
    most = max(_exponents(a)[1], _exponents(b)[1])
    return MultiplyStrategy("float8" if native else "bfloat16", high=2.0 ** (BEYOND - 1 - most))


def group_of(block: Block) -> int:
    """Columns of K that share a scale, 0 for all."""
    return 0 if block == TENSOR else block[1] or 0


def deepest(group: int) -> int:
    """The most columns of K of a step within blocks of `group`: the largest power of two that divides it."""
    return group & -group if group else 1 << 30


# ------------------------------------------------------------------------------------------------ which calls


def accepts_weight_only(call: Call) -> str | None:
    """Why an array and a quantized operand are not multiplied, or None."""
    a, b = call.a, call.b
    assert b is not None
    if a.recipe is not None:
        return "a: it multiplies plain arrays, and this is a ScaledTensor"
    if b.recipe is None:
        return "b: it decodes a quantized operand, and this is an array"
    if a.dtype not in DTYPES:
        return f"a: it multiplies {', '.join(DTYPES)}, and the array is {a.dtype}"
    if b.layout is None:  # `explain` of recipes alone
        return None
    group = group_of(block_of(b.recipe.format, b.layout, b.axis))
    way = way_of(b.recipe.format, group, a.dtype)
    return (f"b: {way}" if isinstance(way, str) else None) or _refused(call, a.dtype == "float32")


def accepts_fp8(call: Call) -> str | None:
    """Why two FP8 tensors are not multiplied, or None."""
    a, b = call.a, call.b
    assert b is not None
    if a.recipe is None or b.recipe is None:
        return "it multiplies two FP8 tensors"
    way = way_of_fp8(a.recipe.format, b.recipe.format, False)
    if isinstance(way, str) or a.layout is None or b.layout is None:
        return way if isinstance(way, str) else None
    return _refused(call, False)


def accepts_product(call: Call) -> str | None:
    """Why an array, or an FP8 tensor, and a quantized operand are not multiplied, or None."""
    return accepts_weight_only(call) if call.a.recipe is None else accepts_fp8(call)


def _refused(call: Call, fp32: bool) -> str | None:
    """Why operands of these shapes and layouts are not multiplied, or None. fp32: as FP32 numbers."""
    a, b = call.a, call.b
    assert b is not None
    if str(call.option("out_dtype", "float32")) not in RESULTS:
        return f"it does not write {call.option('out_dtype')}"
    for name, operand, axis in (("a", a, -1), ("b", b, -2)):
        if operand.recipe is None or operand.layout is None:
            continue
        readable = plans.readable(operand.recipe, operand.layout)
        if isinstance(readable, str):
            return f"{name}: {readable}"
        if operand.axis != axis:
            return f"{name}: its blocks go across K"
        group = group_of(block_of(operand.recipe.format, operand.layout, operand.axis))
        if deepest(group) < STEP:
            return f"{name}: blocks of {group} columns; steps of a product take multiples of {STEP}"
    if a.empty or b.empty:
        return "the generic algorithm runs for empty operands"
    if len(a.shape) < 2 or len(b.shape) < 2:
        return None
    if not fp32 and (k := a.shape[-1]) < SHORTEST:
        return f"K = {k} has too few terms for the bound of sums in tensor cores; it takes {SHORTEST} and more"
    if not fp8_plans.batches(a.shape[:-2], b.shape[:-2]):
        return f"leading axes {a.shape[:-2]} and {b.shape[:-2]} broadcast in both directions"
    if call.framework == "jax" and any(math.prod(x.shape) >= LARGE for x in (a, b)):
        return plans.TOO_LARGE
    if max(math.prod(a.shape[:-2]), math.prod(b.shape[:-2])) * a.shape[-2] * b.shape[-1] >= 2**47:
        return "the result has too many tiles for one grid"
    return None


# ------------------------------------------------------------------------------------------------ time

#: How many times longer the kernel takes than the roofline says, FP8 operations besides, and seconds of its start: more than
#: those of kernels in CUDA C++, so that they come first.
_OVER, _FP8, _START = 2.0, 1.25, 4e-6
#: How many times longer pairs of FP8 take in blocks shorter than `PROMOTED`.
_SHORT_BLOCKS = 2.5


#: How many times longer integer codes take than FP8 ones where the tensor cores bound a product: measured on an H200 for
#: 4096 x 4096 x 4096 in BF16, 564 (INT8) and 606 (INT4) against 405 us.
_INTEGERS = 1.4
#: How many times longer products take in JAX on an H200, with 512 and 4096 rows and 8192 x 8192 weights: 1.8 to 3.8 times the
#: estimate for BF16 by INT8, INT4 and NVFP4 weights with K first, 2.1 for pairs in FP8 blocks, and 7 for pairs of MXFP8.
_IN_JAX = 2.0


def _work(call: Call) -> float:
    """How many times longer the products of these codes take than those of FP8 codes."""
    b = call.b
    if call.a.recipe is not None:
        return _FP8
    if b is None or b.recipe is None or b.layout is None:
        return 1.0
    fmt = b.recipe.format
    way = way_of(fmt, group_of(block_of(fmt, b.layout, b.axis)), str(call.a.dtype))
    parts = way.parts if isinstance(way, MultiplyStrategy) else 1
    return parts * (_INTEGERS if isinstance(fmt.element, Integer) else 1.0)


def score(call: Call) -> float:
    """The estimated time."""
    a, b = call.a, call.b
    assert b is not None
    if len(a.shape) < 2 or len(b.shape) < 2:  # `explain` of recipes alone
        return 2 * _START
    rows, n, k = math.prod(a.shape[:-1]), b.shape[-1], a.shape[-1]
    moved = 4.0 * rows * n
    for operand, elements in ((a, rows * k), (b, math.prod(b.shape))):
        moved += elements * (2.0 if operand.recipe is None else operand.recipe.format.element.bits / 8)
    dtype = "float8" if a.recipe is not None else str(a.dtype)
    time = _OVER * roofline.seconds(2.0 * rows * n * k * _work(call), dtype, moved, 0) + _START
    groups = [group_of(x.layout.plain.block(x.axis)) for x in (a, b) if x.recipe is not None and x.layout is not None]
    return time * (_SHORT_BLOCKS if len(groups) == 2 and any(0 < group < PROMOTED for group in groups) else 1.0)


def score_in_jax(call: Call) -> float:
    """Likewise of arrays of JAX."""
    return _IN_JAX * score(call)
