"""The oracle: docs/spec/numerics.md implemented with exact rationals and enumeration.

It is slow and deliberately independent: it reads declarations (codecs, formats, recipes) but shares no arithmetic with
`breccia.kernels.reference`. Numbers are `fractions.Fraction`; only `fl` rounds to FP32; codes are found by searching the
list of all values of a codec. NumPy arrays only hold inputs and results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from ..codecs import F32, FLOAT_CODECS, Codec, Integer, Minifloat, PowerOfTwo
from ..formats import Format, Level
from ..recipes import ScalingRecipe
from ..rules import Divide, Inverse, Rule, Search
from . import oracle_records, oracle_rotation, oracle_search
from .oracle_numbers import MIN_NORMAL, fl_finite, flush
from .oracle_numbers import code_of as code_of
from .oracle_numbers import decode as decode
from .oracle_numbers import encode as encode
from .oracle_numbers import f32_bits as f32_bits
from .oracle_numbers import fl as fl
from .oracle_numbers import ladder as ladder
from .oracle_numbers import nan_code as nan_code
from .oracle_numbers import random_word as random_word
from .oracle_numbers import threefry2x32 as threefry2x32
from .oracle_scales import floor_log2, global_number, multiplied_by, multiplier, supplied_scale, zero_scale
from .oracle_scales import stored_scale as stored_scale
from .oracle_search import candidates as candidates


@dataclass
class Written:
    """The result of a cast, one code per item: `codes` in the logical shape, `scale` in the layout's shape.

    groups: those that the scales are of, where they are no blocks.
    zero_point: as stored. With a float bias or zero-point, their codes in the scale's codec.
    Scales and biases of several levels are the bytes of their records.
    """

    codes: np.ndarray
    scale: np.ndarray
    global_scale: int | None = None
    zero_point: np.ndarray | None = None
    groups: Groups | None = None


@dataclass(frozen=True)
class Groups:
    """Groups of elements along K in any order. index: the group of each element. count: of groups, also of empty ones."""

    index: Sequence[int]
    count: int


def blocks(
    shape: tuple[int, ...], block: tuple[int | None, int | None], groups: Groups | None = None
) -> Iterator[tuple[tuple[int, ...], list[Any]]]:
    """(index of the block in the scale array, indices of its elements) for blocks (m, k) over the last two axes, or groups."""
    if groups is not None:
        for lead in np.ndindex(*shape[:-1]):
            for group in range(groups.count):
                yield (*lead, group), [(*lead, k) for k, of in enumerate(groups.index) if of == group]
        return
    if block == (None, None):
        yield (), list(np.ndindex(*shape))
        return
    (m, k), counts = _tiling(shape, block)
    for lead in np.ndindex(*shape[:-2]):
        for i in range(counts[0]):
            for j in range(counts[1]):
                rows = range(i * m, min((i + 1) * m, shape[-2]))
                columns = range(j * k, min((j + 1) * k, shape[-1]))
                yield (*lead, i, j), [(*lead, r, c) for r in rows for c in columns]


def scale_shape(shape: tuple[int, ...], block: tuple[int | None, int | None]) -> tuple[int, ...]:
    """Shape of the scales of `blocks`."""
    if block == (None, None):
        return ()
    return (*shape[:-2], *_tiling(shape, block)[1])


def _tiling(shape: tuple[int, ...], block: tuple[int | None, int | None]) -> tuple[list[int], list[int]]:
    """(sides of a block, blocks along each axis). A side of None spans its axis with one block, even an empty axis."""
    pairs = list(zip(shape[-2:], block, strict=True))
    return [side or n for n, side in pairs], [-(-n // side) if side else 1 for n, side in pairs]


def cast(
    x: np.ndarray,
    recipe: ScalingRecipe,
    *,
    scale: float | np.ndarray | None = None,
    rounding: str = "nearest",
    seed: int | None = None,
    importance: Sequence[float] | None = None,
    groups: Groups | None = None,
) -> Written:
    """`breccia.cast` of an FP32 array along its last axis, element by element.

    importance: FP32 numbers. groups: in the place of blocks.
    `scale` supplies the first level's scale: an FP32 number if that level is per tensor, otherwise the codes of all scales.
    """
    assert x.dtype == np.float32 and x.ndim >= 1, (x.dtype, x.ndim)
    fmt, rules = recipe.format, recipe.rules
    if fmt.rotation is not None:
        x = oracle_rotation.rotate(x, fmt.rotation)

    def word_of(index: tuple[int, ...]) -> int | None:
        return random_word(seed or 0, _position(index, x.shape)) if rounding == "stochastic" else None

    raw = {i: float(x[i]) for i in np.ndindex(*x.shape)}
    value = {i: flush(Fraction(v)) for i, v in raw.items() if math.isfinite(v)}

    global_scale: Fraction | None = None
    global_bits: int | None = None
    if fmt.global_scale is not None:
        if scale is not None:
            assert isinstance(scale, float)
            global_bits = supplied_scale(fmt.global_scale.codec, f32_bits(scale))
        else:
            amax = max((abs(v) for v in value.values()), default=Fraction(0))
            level = fmt.global_scale
            if level.convention != "multiplier":
                global_bits = f32_bits(float(global_number(level, fmt, amax)))
            else:
                global_bits = stored_scale(rules[0], amax, level, fmt, None) if amax else zero_scale(level.codec)
        global_value = decode(F32, global_bits)
        global_scale = None if math.isnan(global_value) else multiplied_by(fmt.global_scale, fmt, Fraction(global_value))

    level, rule = fmt.scale, rules[-1]
    supplied = scale if fmt.global_scale is None else None
    if fmt.scale_record is not None:
        return _cast_in_levels(raw, value, x.shape, recipe, global_bits, global_scale, word_of)
    codes = np.zeros(x.shape, np.uint32)
    held = scale_shape(x.shape, level.block) if groups is None else (*x.shape[:-1], groups.count)
    scales = np.zeros(held, np.uint32)
    offsets = np.zeros(scales.shape, np.uint32) if fmt.offset != "none" else None
    for where, members in blocks(x.shape, level.block, groups):
        finite = all(i in value for i in members)
        keeps_nan = supplied is not None and nan_code(fmt.element) is not None
        if not finite and not keeps_nan:
            code = nan_code(level.codec)
            assert code is not None, level
            scales[where] = code
            for i in members:
                codes[i] = encode(fmt.element, Fraction(0))
            continue
        present = [value[i] for i in members if i in value]
        low, high = min(present, default=Fraction(0)), max(present, default=Fraction(0))
        if fmt.offset != "bias":
            low, high = min(low, Fraction(0)), max(high, Fraction(0))
        statistic = max(high, -low) if offsets is None else flush(fl_finite(high - low))
        if supplied is not None:
            code = f32_bits(supplied) if isinstance(supplied, float) else int(supplied[where])
            stored = supplied_scale(
                level.codec, code, isinstance(rule, Search) and oracle_search.signed(level.codec, fmt.element)
            )
        elif statistic and fmt.global_scale is not None and global_scale is None:  # under a global scale of NaN
            stored = nan_code(level.codec)
            assert stored is not None, level
        else:
            stored = stored_scale(rule, statistic, level, fmt, global_scale) if statistic else zero_scale(level.codec)
            if isinstance(rule, Search) and statistic:
                block = {i: value[i] for i in members}
                every = candidates(rule, statistic, level, fmt, global_scale)
                values = partial(_values, recipe, block, raw, statistic, global_scale)
                stored = oracle_search.least_error(every, block, statistic, importance, values)
        scales[where] = stored
        above = global_scale
        if fmt.factor != 1.0:
            above = Fraction(fmt.factor) if above is None else fl_finite(above * Fraction(fmt.factor))
        units = _Units(rule, level, fmt, stored, above, statistic if supplied is None else None)
        if not units.usable:
            for i in members:
                codes[i] = encode(fmt.element, Fraction(0))
            continue
        z: int | Fraction = 0
        bias = Fraction(0)
        if fmt.offset == "float_zero_point":
            assert offsets is not None
            offsets[where] = encode(level.codec, flush(units.of(-low)))
            z = Fraction(decode(level.codec, int(offsets[where])))
        elif fmt.offset == "zero_point":
            assert offsets is not None
            z = min(max(round(units.of(-low)), 0), int(fmt.element.max))
            offsets[where] = z
        elif fmt.offset == "bias":
            assert offsets is not None
            offsets[where] = encode(level.codec, low)
            bias = Fraction(decode(level.codec, int(offsets[where])))
        for i in members:
            codes[i] = _element_code(fmt.element, raw[i], value.get(i), units, z, bias, word_of(i))
        if fmt.alternative is not None:
            first = {i: int(codes[i]) for i in members}
            other = {i: _element_code(fmt.alternative, raw[i], value[i], units, z, bias, word_of(i)) for i in members}
            if _largest_error(fmt.alternative, other, value, units) < _largest_error(fmt.element, first, value, units):
                for i in members:
                    codes[i] = other[i]
                scales[where] |= 1 << (level.codec.bits - 1)
    return Written(codes, scales, global_bits, offsets, groups)


def _values(
    recipe: ScalingRecipe,
    block: dict[tuple[int, ...], Fraction],
    raw: dict[tuple[int, ...], float],
    statistic: Fraction,
    global_scale: Fraction | None,
    stored: int,
) -> tuple[dict[tuple[int, ...], Fraction], Fraction] | None:
    """(The numbers of the nearest codes of a block, its scale); None where the scale is not usable."""
    fmt = recipe.format
    units = _Units(recipe.rules[-1], fmt.scale, fmt, stored, global_scale, statistic)
    if not units.usable or units.scale is None:
        return None
    codes = {i: _element_code(fmt.element, raw[i], x, units, 0, Fraction(0), None) for i, x in block.items()}
    return {i: Fraction(decode(fmt.element, code)) for i, code in codes.items()}, units.scale


def _largest_error(
    codec: Codec, codes: dict[tuple[int, ...], int], value: dict[tuple[int, ...], Fraction], units: _Units
) -> Fraction:
    """The largest difference of a block's elements from the values of their codes, in units of the scale."""
    errors = [flush(units.of(value[i])) - Fraction(decode(codec, code)) for i, code in codes.items()]
    return max((flush(fl_finite(abs(error))) for error in errors), default=Fraction(0))


def _cast_in_levels(
    raw: dict[tuple[int, ...], float],
    value: dict[tuple[int, ...], Fraction],
    shape: tuple[int, ...],
    recipe: ScalingRecipe,
    global_bits: int | None,
    global_scale: Fraction | None,
    word_of: Callable[[tuple[int, ...]], int | None],
) -> Written:
    """A cast to a format of several levels of blocks: row by row, from the coarsest level down."""
    fmt = recipe.format
    levels, rules = fmt.block_levels, recipe.rules[len(fmt.levels) - len(fmt.block_levels) :]
    size, span = fmt.scale.block[1], fmt.block[1]
    assert size is not None and span is not None
    top = Fraction(1) if global_bits is None else global_scale
    codes = np.zeros(shape, np.uint32)
    scales, biases = (
        [np.zeros(scale_shape(shape, level.block), np.uint32) for level in of] for of in (levels, fmt.offset_levels)
    )
    for row in np.ndindex(*shape[:-1]):
        members = [[(*row, k) for k in range(start, min(start + size, shape[-1]))] for start in range(0, shape[-1], size)]
        present = [[value[i] for i in block if i in value] for block in members]
        lows = [min([*numbers, Fraction(0)]) for numbers in present]
        highs = [max([*numbers, Fraction(0)]) for numbers in present]
        statistics = [
            max(high, -low) if fmt.offset == "none" else flush(fl_finite(high - low))
            for low, high in zip(lows, highs, strict=True)
        ]
        faulty = [len(numbers) < len(block) for numbers, block in zip(present, members, strict=True)]

        def scale_code(
            place: int, blocks: slice, above: Fraction | None, statistics: Any = statistics, faulty: Any = faulty
        ) -> int:
            level = levels[place]
            if place == 0 and any(faulty[blocks]):
                nan = nan_code(level.codec)
                assert nan is not None, level
                return nan
            if not above:  # NaN, or a scale that underflowed
                return 0 if place else nan_code(level.codec) or 0
            most = max(statistics[blocks])
            if not most:
                return zero_scale(level.codec)
            return stored_scale(rules[place], most, level, fmt, above if place or global_bits is not None else None)

        def bias_code(place: int, blocks: slice, above: Fraction | None, lows: Any = lows) -> int:
            most = -min(lows[blocks])
            if not most or not above:
                return 0
            codec, cap = fmt.offset_levels[place].codec, Fraction(1)
            for finer in fmt.offset_levels[place + 1 :]:
                cap *= Fraction(finer.codec.max)
            assert isinstance(codec, Minifloat | Integer), codec
            t = fl_finite(flush(fl_finite(most / cap)) / above)
            return encode(codec, min(max(t, Fraction(codec.scale_min)), Fraction(codec.scale_max)))

        of_row, products = _levels_of_row(levels, len(members), top, scale_code)
        bias_codes, bias_products = _levels_of_row(fmt.offset_levels, len(members), Fraction(1), bias_code)
        for arrays, of_levels in ((scales, of_row), (biases, bias_codes)):
            for array, of_level in zip(arrays, of_levels, strict=True):
                array[row] = of_level
        for n, block in enumerate(members):
            above = _above(levels, products, n)
            if above is not None and fmt.factor != 1.0:
                above = fl_finite(above * Fraction(fmt.factor))
            if above is None:
                continue
            units = _Units(rules[-1], levels[-1], fmt, of_row[-1][n], above, statistics[n])
            if not units.usable:
                continue
            bias = -(bias_products[-1][n] or Fraction(0)) if bias_products else Fraction(0)
            for i in block:
                codes[i] = _element_code(fmt.element, raw[i], value.get(i), units, 0, bias, word_of(i))
    if biases:  # they are subtracted: the coarsest level has their sign
        sign = 1 << (fmt.offset_levels[0].codec.bits - 1)
        biases[0] = np.where(biases[0] == 0, 0, biases[0] | sign).astype(np.uint32)
    records = oracle_records.to_bytes(fmt.offset_levels, biases) if biases else None
    return Written(codes, oracle_records.to_bytes(levels, scales), global_bits, records)


def _levels_of_row(
    levels: tuple[Level, ...], blocks: int, top: Fraction | None, code: Callable[[int, slice, Fraction | None], int]
) -> tuple[list[list[int]], list[list[Fraction | None]]]:
    """By level, the codes of a row and their products with all coarser levels, None for NaN. blocks: how many finest ones.

    code: of (place of the level, which of the finest blocks it spans, the product of the coarser levels).
    """
    codes: list[list[int]] = []
    products: list[list[Fraction | None]] = []
    for place, level in enumerate(levels):
        span = _ratio(level, levels[-1])
        of_level: list[int] = []
        of_products: list[Fraction | None] = []
        for start in range(0, blocks, span):
            above = products[-1][len(of_level) // _ratio(levels[place - 1], level)] if place else top
            of_level.append(code(place, slice(start, start + span), above))
            number = decode(level.codec, of_level[-1])
            of_products.append(None if math.isnan(number) or above is None else fl_finite(Fraction(number) * above))
        codes.append(of_level)
        products.append(of_products)
    return codes, products


def _above(levels: tuple[Level, ...], products: list[list[Fraction | None]], n: int) -> Fraction | None:
    """The product of all levels but the finest for the finest block `n`."""
    return products[-2][n // _ratio(levels[-2], levels[-1])]


def _ratio(coarse: Level, fine: Level) -> int:
    """How many blocks of `fine` a block of `coarse` has."""
    outer, inner = coarse.block[1], fine.block[1]
    assert outer is not None and inner is not None
    return outer // inner


def _position(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """C-order position of an index."""
    position = 0
    for i, n in zip(index, shape, strict=True):
        position = position * n + i
    return position


@dataclass(frozen=True)
class _Units:
    """Divides the elements of one block by its scale, as its rule does. statistic: None under a supplied scale."""

    rule: Rule
    level: Level
    fmt: Format
    stored: int
    global_scale: Fraction | None
    statistic: Fraction | None

    @property
    def scale(self) -> Fraction | None:
        """The scale of all levels together, or None if it is NaN."""
        value = decode(self.level.codec, self.stored)
        if math.isnan(value):
            return None
        return Fraction(value) if self.global_scale is None else fl_finite(Fraction(value) * self.global_scale)

    @property
    def exact(self) -> bool:
        """Whether the scale is a single power of two, which needs no FP32 reciprocal."""
        return isinstance(self.level.codec, PowerOfTwo) and self.global_scale is None

    @property
    def usable(self) -> bool:
        scale = self.scale
        return scale is not None and (self.exact or MIN_NORMAL <= abs(scale) <= 1 / MIN_NORMAL)

    def of(self, x: Fraction) -> Fraction:
        """`x` divided by the scale, rounded to FP32."""
        scale = self.scale
        assert scale is not None
        if isinstance(self.rule, Divide):
            return fl_finite(x / scale)
        if isinstance(self.rule, Inverse) and self.statistic is not None:
            by = multiplier(self.rule, self.statistic, Fraction(self.fmt.qmax(self.level))) if self.statistic else 1
            return fl_finite(x * by)
        return fl_finite(x * (1 / scale if self.exact else fl_finite(1 / scale)))


def _element_code(
    codec: Codec,
    raw: float,
    value: Fraction | None,
    units: _Units,
    zero_point: int | Fraction,
    bias: Fraction,
    word: int | None,
) -> int:
    if value is None:  # NaN or Inf under a supplied scale
        assert isinstance(codec, Minifloat) and codec.nan is not None, codec
        if math.isnan(raw) or codec.inf is None or (raw < 0 and not codec.signed):
            return codec.nan
        return codec.inf | (1 << (codec.bits - 1) if raw < 0 else 0)
    y = units.of(flush(fl_finite(value - bias)))
    if isinstance(zero_point, Fraction):
        y, zero_point = fl_finite(y + zero_point), 0
    if isinstance(codec, Integer):
        y *= 2**codec.fraction_bits
        low, high = Fraction(codec.low - zero_point), Fraction(codec.high - zero_point)
        y = min(max(y, low), high)
        integer_part = math.trunc(y)
        fraction = abs(y - integer_part)
        if word is None:
            rounded = round(y)
        else:
            away = math.floor(fraction * 2**30) + (word >> 2) >= 2**30
            rounded = integer_part + ((1 if y > 0 else -1) if away else 0)
        return (rounded + zero_point) % (1 << codec.bits)
    return encode(codec, y, negative=not bias and math.copysign(1.0, raw) < 0, word=word)


def dequantize(written: Written, recipe: ScalingRecipe) -> np.ndarray:
    """FP32 values of `written`, or of any codes and scales of the recipe's format. Subnormals are exact."""
    fmt = recipe.format
    out = np.zeros(written.codes.shape, np.float32)
    scales = _numbers(written.scale, fmt.block_levels)
    offsets = None
    if written.zero_point is not None:
        integers = fmt.offset == "zero_point"
        levels = fmt.offset_levels or (fmt.scale,)
        offsets = written.zero_point if integers else _numbers(written.zero_point, levels)
    global_scale = None if written.global_scale is None else decode(F32, written.global_scale)
    for where, members in blocks(written.codes.shape, fmt.scale.block, written.groups):
        element, scale = fmt.element, float(scales[where])
        if fmt.alternative is not None and int(written.scale[where]) >> (fmt.scale.codec.bits - 1):
            element, scale = fmt.alternative, abs(scale)
        offset = 0.0 if offsets is None else float(offsets[where])
        for i in members:
            v = decode(element, int(written.codes[i]))
            if offset and fmt.offset.endswith("zero_point"):
                v = _rounded(_difference(v, offset), fmt)
            if fmt.order == "scales_first":
                assert global_scale is not None and fmt.global_scale is not None
                v = _rounded(_ieee(v, _ieee(scale, _as_multiplier(global_scale, fmt.global_scale, fmt), False), False), fmt)
            else:
                v = _rounded(_apply(v, scale, fmt.scale, fmt), fmt)
                if fmt.global_scale is not None:
                    assert global_scale is not None
                    v = _rounded(_apply(v, global_scale, fmt.global_scale, fmt), fmt)
            if fmt.factor != 1.0:
                v = _rounded(_ieee(v, fmt.factor, divide=False), fmt)
            if fmt.offset == "bias":
                v = _rounded(_sum(v, offset), fmt)
            out[i] = v
    return out if fmt.rotation is None else oracle_rotation.unrotate(out, fmt.rotation)


def _numbers(stored: np.ndarray, levels: tuple[Level, ...]) -> np.ndarray:
    """The numbers, in float64, that stored scales stand for; of records, the product of all levels for each finest block."""
    if len(levels) == 1:
        return np.array([decode(levels[0].codec, int(code)) for code in stored.reshape(-1)], float).reshape(stored.shape)
    of_levels = oracle_records.from_bytes(levels, stored)
    product = np.ones((*stored.shape[:-1], of_levels[0].shape[-1]))
    for place, (level, codes) in enumerate(zip(levels, of_levels, strict=True)):
        numbers = np.array([decode(level.codec, int(code)) for code in codes.reshape(-1)], float).reshape(codes.shape)
        above = np.repeat(product, _ratio(levels[place - 1], level) if place else 1, axis=-1)
        pairs = zip(above.reshape(-1), numbers.reshape(-1), strict=True)
        product = np.array([_ieee(float(a), float(n), divide=False) for a, n in pairs]).reshape(codes.shape)
    return product


def _as_multiplier(stored: float, level: Level, fmt: Format) -> float:
    """The number that a stored global scale multiplies by."""
    if level.convention == "amax":
        return _ieee(stored, fmt.qmax(level), divide=True)
    return _ieee(1.0, stored, divide=True) if level.convention == "divisor" else stored


def _rounded(v: float, fmt: Format) -> float:
    """The result of a step in the format's precision; subnormals of FP16 are kept, and overflow is Inf."""
    codec = FLOAT_CODECS[fmt.precision]
    if codec is F32 or not math.isfinite(v) or v == 0:
        return v
    q = Fraction(v)
    exponent = max(floor_log2(abs(q)), 1 - codec.bias)
    step = Fraction(2) ** (exponent - codec.mantissa_bits)
    nearest = round(q / step) * step
    return math.copysign(math.inf if abs(nearest) > Fraction(codec.largest) else float(abs(nearest)), v)


def _difference(a: float, b: float) -> float:
    """fl(a - b); a is a finite integer."""
    return a - b if not math.isfinite(b) else float(fl(Fraction(a) - Fraction(b)))


def _apply(v: float, stored: float, level: Level, fmt: Format) -> float:
    """`v` scaled by one level's stored scale, rounded once to FP32 (IEEE rules for NaN, Inf and signed zero)."""
    if level.convention == "amax":
        stored = _ieee(stored, fmt.qmax(level), divide=True)
    return _ieee(v, stored, divide=level.convention == "divisor")


def _sum(a: float, b: float) -> float:
    """fl(flush(a) + flush(b)), IEEE rules for NaN, Inf and zeros."""
    a, b = (0.0 if abs(v) < MIN_NORMAL else v for v in (a, b))
    if not (math.isfinite(a) and math.isfinite(b)) or a == b == 0:
        return a + b
    return float(fl(Fraction(a) + Fraction(b)))


def _ieee(a: float, b: float, divide: bool) -> float:
    if divide and b == 0 and not math.isnan(a):
        return math.nan if a == 0 else math.copysign(math.inf, a) * math.copysign(1.0, b)
    if not (math.isfinite(a) and math.isfinite(b)):
        return a / b if divide else a * b
    exact = Fraction(a) / Fraction(b) if divide else Fraction(a) * Fraction(b)
    result = float(fl(exact))
    sign = math.copysign(1.0, a) * math.copysign(1.0, b)
    return math.copysign(result, sign) if result == 0 else result
