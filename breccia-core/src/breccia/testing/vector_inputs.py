"""What golden vectors test: the recipes of each set, and the input of each edge class, drawn from integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from ..codecs import FLOAT_CODECS, Codec, Minifloat, PowerOfTwo
from ..formats import CONVENTIONS
from ..recipe_fields import choices_of
from ..recipes import (
    DelayedScaling,
    FlatScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    GGUFScaling,
    INT4Scaling,
    INT8Scaling,
    INTScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    MXINT8BlockScaling,
    NF4Scaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from . import oracle
from .steps import StepsScaling
from .two_codecs import TwoCodecs

#: More than 32 bits, but below 2^53, so that every JSON reader keeps it exactly.
SEED = 0xDEADBEEFCAFE
QUIET_NAN = 0x7FC00000
_FLT_MAX, _MIN_NORMAL = 0x7F7FFFFF, 0x00800000

_RULES = ("linear", "recip", "divide", "te")
_E8M0_RULES = ("rceil", "floor", "even")


def recipes(version: int | None = None) -> list[ScalingRecipe]:
    """The recipes of a set, or of all: all codecs, scale rules and dtypes, offsets of the built-in ones, and more."""
    sets = (_first, _second, _third, _fourth, _fifth, _sixth, _seventh)
    return [recipe for made in (sets if version is None else sets[version - 1 : version]) for recipe in made()]


def indexed_recipes(version: int) -> list[ScalingRecipe]:
    """The recipes of a set whose groups are given by an index."""
    if version != 7:
        return []
    recipes: list[ScalingRecipe] = [INT4Scaling(12), INT4Scaling(12, False, "fp32", False), NF4Scaling(12, "bf16")]
    recipes += [INTScaling(3, 12, False, "bf16", False, offset="bias")]
    return [*recipes, INT8Scaling(12, False, "fp16", False, offset="float_zero_point")]


def _seventh() -> list[ScalingRecipe]:
    """Factors, and steps that are rounded to 16 bits. Recipes with an index are beside these."""
    return [StepsScaling(kind) for kind in choices_of(StepsScaling, "type")[0]]


def _sixth() -> list[ScalingRecipe]:
    """Rotations of whole blocks of scales, of parts of them, and of several; with a search, a zero-point and a bias."""
    recipes: list[ScalingRecipe] = [NVFP4BlockScaling(rotation=16), MXFP4BlockScaling(rotation=16, rotation_seed=1)]
    recipes += [NVFP4BlockScaling(scale_rule="mse", rotation=32, rotation_seed=SEED)]
    recipes += [MXFP4BlockScaling(rotation=32), INT4Scaling(20, rotation=32, rotation_seed=(1 << 64) - 1)]
    zero_point = INT4Scaling(16, False, "fp32", False, rotation=16, rotation_seed=2)
    return [*recipes, zero_point, INT4Scaling(16, False, "bf16", False, offset="bias", rotation=16)]


def _fifth() -> list[ScalingRecipe]:
    """Searches for scales of every codec that has a window, of every recipe that has such a rule."""
    recipes: list[ScalingRecipe] = [NVFP4BlockScaling(scale_rule=rule) for rule in ("mse", "four_six")]
    recipes += [NVFP4BlockScaling(scale_format="UE5M3", two_level=False, scale_rule="mse")]
    recipes += [
        kind(scale_rule="mse") for kind in (MXFP8BlockScaling, MXFP6BlockScaling, MXFP4BlockScaling, MXINT8BlockScaling)
    ]
    recipes += [INT4Scaling(16, scale_rule="mse"), INT4Scaling(12, signed=False, scale_dtype="fp32", scale_rule="mse")]
    recipes += [INT8Scaling(16, scale_rule="mse"), INTScaling(3, 20, scale_dtype="bf16", scale_rule="mse")]
    return [*recipes, NF4Scaling(16, scale_rule="mse")]


def _fourth() -> list[ScalingRecipe]:
    """Blocks of one of two element codecs, by the sign of their scale."""
    return [TwoCodecs("if4"), TwoCodecs("tiles")]


def _third() -> list[ScalingRecipe]:
    """Scales of several levels, tables that are only decoded, scales multiplied first, float zero-points, FNUZ, UE5M3."""
    recipes: list[ScalingRecipe] = [GGUFScaling(kind) for kind in choices_of(GGUFScaling, "type")[0]]
    recipes += [NVFP4BlockScaling(scale_format="UE5M3", two_level=two_level) for two_level in (True, False)]
    for element in ("E4M3FNUZ", "E5M2FNUZ"):
        recipes += [Float8CurrentScaling(element), Float8RowScaling(element, scale_rule="te")]
        recipes += [DelayedScaling(element, margin=1), Float8BlockScaling(element, block_k=16, scale_rule="divide")]
    recipes += [FlatScaling(block_size=16), FlatScaling("E2M1", 16), FlatScaling("IQ4"), FlatScaling("INT6", 16, "bias")]
    recipes += [NVFP4BlockScaling(order="scales_first", global_sense=convention) for convention in CONVENTIONS]
    for n, (bits, dtype) in enumerate(zip((4, 8, 3), FLOAT_CODECS, strict=True)):
        recipes += [INTScaling(bits, 16, False, dtype, False, ("linear", "recip", "divide")[n], "float_zero_point")]
    return recipes


def _second() -> list[ScalingRecipe]:
    """Integers of all widths, in blocks that end within a group of bytes too."""
    rules, dtypes = ("linear", "recip", "divide", "half_range"), tuple(FLOAT_CODECS)
    recipes: list[ScalingRecipe] = [INTScaling()]
    for n, bits in enumerate((1, 2, 3, 5, 6, 7)):
        group, dtype = (16, 12, 20)[n % 3], dtypes[n % 3]
        if bits > 1:
            recipes += [INTScaling(bits, group, True, dtype, scale_rule=rules[n % 4])]
        recipes += [INTScaling(bits, None if bits == 3 else group, False, dtype, scale_rule=rules[n % 3])]
        for m, offset in enumerate(("zero_point", "bias")):
            recipes += [INTScaling(bits, group, False, dtypes[(n + m) % 3], False, rules[(n + m) % 3], offset)]
    return recipes


def _first() -> list[ScalingRecipe]:
    small: dict[str, Any] = {"block_k": 16}
    recipes: list[ScalingRecipe] = [DelayedScaling(scale_rule=rule) for rule in _RULES]
    recipes += [DelayedScaling("E5M2", margin=3), DelayedScaling(margin=-2, scale_rule="te")]
    for element in ("E4M3", "E5M2"):
        recipes += [Float8CurrentScaling(element, rule) for rule in _RULES]
        recipes += [Float8RowScaling(element, scale_rule=rule) for rule in _RULES]
        recipes += [Float8BlockScaling(element, scale_rule=rule, **small) for rule in _RULES]
    for rule in ("linear", "te"):
        recipes += [Float8RowScaling(power_of_two_scale=True, scale_rule=rule)]
        recipes += [Float8BlockScaling(power_of_two_scale=True, scale_rule=rule, **small)]
    recipes += [Float8BlockScaling(block_m=4, **small), Float8BlockScaling(block_m=4, scale_rule="te", **small)]
    for rule in _E8M0_RULES:
        recipes += [MXFP8BlockScaling("E4M3", scale_rule=rule), MXFP8BlockScaling("E5M2", scale_rule=rule)]
        recipes += [MXFP6BlockScaling("E2M3", scale_rule=rule), MXFP6BlockScaling("E3M2", scale_rule=rule)]
        recipes += [MXFP4BlockScaling(scale_rule=rule), MXINT8BlockScaling(scale_rule=rule)]
    recipes += [NVFP4BlockScaling(), NVFP4BlockScaling(two_level=False)]
    for kind in (INT4Scaling, INT8Scaling):
        recipes += [kind(16, scale_dtype="fp16", scale_rule=rule) for rule in ("linear", "recip", "divide", "half_range")]
        recipes += [kind(16, scale_dtype=dtype) for dtype in ("bf16", "fp32")]
        recipes += [kind(16, signed=False, scale_dtype="fp32")]
        for offset in ("zero_point", "bias"):
            recipes += [kind(16, False, dtype, False, offset=offset) for dtype in FLOAT_CODECS]
            recipes += [kind(16, False, "fp16", False, rule, offset) for rule in ("recip", "divide")]
    recipes += [INT8Scaling()]
    return recipes + [NF4Scaling(16, dtype) for dtype in FLOAT_CODECS]


@cache
def random_words(stream: int, count: int) -> tuple[int, ...]:
    """`count` words of 32 random bits, the same for a stream each time."""
    return tuple(oracle.random_word(stream, i) for i in range(count))


def _drawn(stream: int, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """FP32 bit patterns of both signs with exponents low..high, any mantissa."""
    words = np.array(random_words(stream, math.prod(shape)), np.uint64).reshape(shape)
    exponent = (words >> np.uint64(23) & np.uint64(0xFF)) % np.uint64(high - low + 1) + np.uint64(low + 127)
    return (words & np.uint64(0x807FFFFF) | exponent << np.uint64(23)).astype(np.uint32)


def _bits(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def importance(length: int) -> np.ndarray:
    """FP32 bit patterns of numbers that are not negative, of any magnitude, and of zeros."""
    numbers = _drawn(15, (length,), -45, 5) & np.uint32(0x7FFFFFFF)
    numbers[::5] = 0
    return numbers


def group_index(length: int, size: int) -> np.ndarray:
    """The group of each element, in no order: of four groups one has `size` elements, the most that it may, and one none."""
    groups = np.zeros(length, np.uint32)
    for rank, place in enumerate(sorted(range(length), key=random_words(16, length).__getitem__)):
        groups[place] = 0 if rank < size else (1, 3)[rank % 2]
    return groups


#: How many groups an index has.
GROUPS = 4


def columns(recipe: ScalingRecipe) -> int:
    """The columns of two blocks; 24 if a block is a whole row or tensor. Of coded scales, a block of each level."""
    _, k = recipe.format.scale.block
    if recipe.format.scale_record is not None:
        return sum(level.block[1] or 0 for level in recipe.format.block_levels)
    return 2 * k if k else 24


def _rows(recipe: ScalingRecipe) -> int:
    return 2 if recipe.format.scale.block[0] in (1, None) else 5


def _ordinary(recipe: ScalingRecipe) -> np.ndarray:
    return _drawn(1, (_rows(recipe), columns(recipe)), -3, 2)


def _wide(recipe: ScalingRecipe) -> np.ndarray:
    n = columns(recipe)
    return np.concatenate([_drawn(2, (1, n), -126, 127), _drawn(3, (1, n), -20, 20), _drawn(4, (1, n), -125, -100)])


def _zeros(recipe: ScalingRecipe) -> np.ndarray:
    """+0 and -0, in a block of zeros and beside other numbers."""
    x = np.zeros((2, columns(recipe)), np.uint32)
    x[:, 1::2] = 0x80000000
    x[1, -3] = _bits(-1.5)
    return x


def _ties(recipe: ScalingRecipe) -> np.ndarray:
    """Midpoints between codes under a scale of one, and the FP32 numbers next to them."""
    element, n = recipe.format.element, columns(recipe)
    values, _ = oracle.ladder(element)
    middles = [float(oracle.fl((a + b) / 2)) for a, b in pairwise(values)]
    chosen = _bits([middles[i * len(middles) // n] for i in range(n)])
    x = np.stack([chosen, chosen + 1, chosen - 1])
    x[:, :: n // 2] = _bits(element.max)
    return x


def _subnormals(recipe: ScalingRecipe) -> np.ndarray:
    """Numbers below 2^-126, beside larger ones and by themselves; and the smallest normal numbers."""
    x = np.concatenate(
        [_ordinary(recipe)[:1], _drawn(5, (1, columns(recipe)), -127, -127), _drawn(6, (1, columns(recipe)), -126, -124)]
    )
    x[0, 1::4] &= 0x807FFFFF
    x[1] &= 0x807FFFFF
    return x


def _nan(recipe: ScalingRecipe) -> np.ndarray:
    """A quiet, a signalling and a negative NaN in the first block."""
    x = _ordinary(recipe).copy()
    x[0, [1, 3, 6]] = (QUIET_NAN, 0x7F800001, 0xFFFFFFFF)
    return x


def _inf(recipe: ScalingRecipe) -> np.ndarray:
    x = _ordinary(recipe).copy()
    x[0, 2], x[-1, -2] = 0x7F800000, 0xFF800000
    return x


def _amax(*ends: int) -> Callable[[ScalingRecipe], np.ndarray]:
    """Blocks whose amaxes are the FP32 numbers with these bit patterns."""

    def draw(recipe: ScalingRecipe) -> np.ndarray:
        n = columns(recipe)
        x = np.zeros((1, n), np.uint32)
        for block, end in enumerate(np.resize(ends, 2)):
            part = _drawn(7 + block, (n // 2,), -3, -1).view(np.float32)  # magnitudes below 1
            x[0, block * (n // 2) :][: n // 2] = (part * np.uint32(end).view(np.float32)).view(np.uint32)
            x[0, block * (n // 2) + 5] = end
        return x

    return draw


def _around_qmax(recipe: ScalingRecipe) -> np.ndarray:
    """Blocks whose amax is the element codec's largest value, or one of the FP32 numbers next to it."""
    at = int(_bits(recipe.format.element.max))
    return np.concatenate([_amax(at, at + 1)(recipe), _amax(at - 1, at + (1 << 19))(recipe)])


def _partial_block(recipe: ScalingRecipe) -> np.ndarray:
    return _drawn(9, (2, _rows(recipe), columns(recipe) - 5), -4, 4)


def _along_rows(recipe: ScalingRecipe) -> np.ndarray:
    return _drawn(10, (columns(recipe) - 5, 3), -4, 4)


def _overflowing(recipe: ScalingRecipe) -> np.ndarray:
    """Numbers with NaN, Inf and finite values that overflow; for supplied scales."""
    x = _drawn(11, (_rows(recipe), columns(recipe)), -6, 12).copy()
    x[0, :4] = (QUIET_NAN, 0x7F800000, 0xFF800000, _FLT_MAX)
    return x


def _half_precision(dtype: str) -> Callable[[ScalingRecipe], np.ndarray]:
    """16-bit patterns: finite numbers with medium exponents, zeros, subnormals, and the smallest normal number."""
    mantissa, bias = (10, 15) if dtype == "float16" else (7, 127)

    def draw(recipe: ScalingRecipe) -> np.ndarray:
        x = _drawn(12, (2, columns(recipe)), -6, 6)
        low = (x >> 16 & 0x8000) | ((x >> 23 & 0xFF) - 127 + bias) << mantissa | (x & ((1 << mantissa) - 1))
        low[0, :6] = (0, 0x8000, 1, 0x8003, (1 << mantissa) - 1, 1 << mantissa)
        return low.astype(np.uint16)

    return draw


def _valid_scales(codec: Codec) -> list[int]:
    return [oracle.encode(codec, Fraction(n, 64)) for n in (64, 3, 37, 500)]


def _invalid_scales(codec: Codec) -> list[int]:
    """Codes of NaN, 0, and other values that a scale must not have."""
    nan = oracle.nan_code(codec)
    assert nan is not None, codec
    if isinstance(codec, PowerOfTwo):
        return [nan, 0, nan - 1]
    sign = 1 << (codec.bits - 1)
    if isinstance(codec, Minifloat) and not codec.signed:
        return [nan, 0]
    return [nan, 0, oracle.encode(codec, Fraction(1)) | sign, 1, sign]


def supplied_scales(recipe: ScalingRecipe, shape: tuple[int, ...], codes: Callable[[Codec], list[int]]) -> np.ndarray:
    """Codes of supplied scales for an input of this shape: those of `codes`, in turn."""
    level = recipe.format.levels[0]
    return np.resize(np.array(codes(level.codec), np.uint32), oracle.scale_shape(shape, level.block))


#: Edge class -> the input, in the logical shape, and the options of its cast.
EDGES: dict[str, tuple[Callable[[ScalingRecipe], np.ndarray], dict[str, Any]]] = {
    "ordinary": (_ordinary, {}),
    "wide": (_wide, {}),
    "zeros": (_zeros, {}),
    "ties": (_ties, {}),
    "subnormals": (_subnormals, {}),
    "nan": (_nan, {}),
    "inf": (_inf, {}),
    "largest": (_amax(_FLT_MAX, _FLT_MAX | 0x80000000), {}),
    "smallest": (_amax(_MIN_NORMAL, _MIN_NORMAL + 1), {}),
    "capacity": (_around_qmax, {}),
    "ragged": (_partial_block, {}),
    "axis=-2": (_along_rows, {"axis": -2}),
    "stochastic": (_ordinary, {"rounding": "stochastic", "seed": SEED}),
    "supplied": (_overflowing, {"supplied": _valid_scales}),
    "faulty": (_ordinary, {"supplied": _invalid_scales}),
    "float16": (_half_precision("float16"), {"dtype": "float16"}),
    "bfloat16": (_half_precision("bfloat16"), {"dtype": "bfloat16"}),
}
