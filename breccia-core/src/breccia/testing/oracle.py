"""The oracle: docs/spec/numerics.md implemented with exact rationals and enumeration.

It is slow and deliberately independent: it reads declarations (codecs, formats, recipes) but shares no arithmetic with
`breccia.kernels.reference`. Numbers are `fractions.Fraction`; only `fl` rounds to FP32; codes are found by searching the
list of all values of a codec. NumPy arrays only hold inputs and results.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from ..codecs import F32, Codec, Integer, Lookup, Minifloat, PowerOfTwo
from ..formats import Format, Level
from ..recipes import ScalingRecipe
from ..rules import Divide, Exponent, HalfRange, Inverse, Linear, Reciprocal, Rule

MIN_NORMAL = Fraction(2) ** -126
FLT_MAX = (2 - Fraction(2) ** -23) * Fraction(2) ** 127


# ------------------------------------------------------------------------------------------------ FP32 by rationals


def fl(q: Fraction) -> Fraction | float:
    """`q` rounded to FP32, to nearest, ties to even; subnormals kept; ±inf on overflow."""
    if q == 0:
        return Fraction(0)
    exponent = q.numerator.bit_length() - q.denominator.bit_length()
    if abs(q) < Fraction(2) ** exponent:
        exponent -= 1
    ulp = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(q / ulp) * ulp  # Python rounds a Fraction half to even
    return math.copysign(math.inf, q) if abs(rounded) > FLT_MAX else rounded


def fl_finite(q: Fraction) -> Fraction:
    """`fl(q)`, with overflow saturated to the largest finite FP32."""
    r = fl(q)
    return r if isinstance(r, Fraction) else (FLT_MAX if r > 0 else -FLT_MAX)


def flush(q: Fraction) -> Fraction:
    """Zero for magnitudes below 2^-126."""
    return Fraction(0) if abs(q) < MIN_NORMAL else q


def f32_bits(value: float) -> int:
    """Bit pattern of an FP32 number given as an exact Python float."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


# ------------------------------------------------------------------------------------------------ codecs


def decode(codec: Codec, code: int) -> float:
    """The exact value of `code` (a float64 holds every value of every codec), NaN, ±inf or -0.0."""
    if isinstance(codec, Integer):
        integer = code - (1 << codec.bits) if codec.signed and code >> (codec.bits - 1) else code
        return integer / 2**codec.fraction_bits
    if isinstance(codec, Lookup):
        return codec.values[code]
    if isinstance(codec, PowerOfTwo):
        return math.nan if code == codec.nan else 2.0 ** (code - codec.bias)
    if not isinstance(codec, Minifloat):
        return codec.value(code)  # a plug-in's class defines its own values
    above, magnitude = divmod(code, 2 ** (codec.exponent_bits + codec.mantissa_bits))
    if above and not codec.signed:  # an unused bit is set
        return math.nan
    sign = -1.0 if above else 1.0
    if codec.inf is not None and magnitude >= codec.inf:
        return sign * math.inf if magnitude == codec.inf else math.nan
    if codec.inf is None and magnitude == codec.nan:
        return math.nan
    exponent, mantissa = divmod(magnitude, 1 << codec.mantissa_bits)
    significand = Fraction(mantissa, 1 << codec.mantissa_bits) + (exponent > 0)
    return sign * float(significand * Fraction(2) ** (max(exponent, 1) - codec.bias))


@cache
def ladder(codec: Codec) -> tuple[list[Fraction], list[int]]:
    """All finite values of a codec of at most 16 bits, ascending without -0, and the lowest code of each."""
    finite: dict[Fraction, int] = {}
    for code in range(1 << codec.bits):
        value = decode(codec, code)
        if math.isfinite(value) and not (value == 0 and math.copysign(1, value) < 0):
            finite.setdefault(Fraction(value), code)
    values = sorted(finite)
    return values, [finite[v] for v in values]


def neighbours(codec: Codec, q: Fraction) -> tuple[Fraction, Fraction]:
    """The codec's values just below and above `q`, clamped to its range; both are `q` if `q` is a value."""
    values, _ = ladder(codec)
    q = min(max(q, values[0]), values[-1])
    i = bisect_left(values, q)
    return (q, q) if values[i] == q else (values[i - 1], values[i])


def code_of(codec: Codec, value: Fraction, negative: bool = False) -> int:
    """The code of an exact value; `negative` chooses -0 where the codec has it."""
    if codec is F32:
        return f32_bits(-0.0 if value == 0 and negative else float(value))
    values, codes = ladder(codec)
    i = bisect_left(values, value)
    assert values[i] == value, f"{value} is not a value of {codec.name}"
    code = codes[i]
    if value == 0 and negative and isinstance(codec, Minifloat) and codec.signed:
        code |= 1 << (codec.bits - 1)
    return code


def encode(codec: Codec, q: Fraction, negative: bool = False, word: int | None = None) -> int:
    """The code nearest to `q`, ties to the even code (E8M0: up), saturating; with `word`, stochastic (spec, "Rounding")."""
    if codec is F32:
        return code_of(codec, fl_finite(q), negative)
    if isinstance(codec, Minifloat) and not codec.signed:
        q = max(q, Fraction(0))
    if isinstance(codec, Minifloat):  # sign and magnitude: rounding acts on the magnitude
        low, high = neighbours(codec, abs(q))
    else:
        low, high = neighbours(codec, q)
    target = min(abs(q), Fraction(codec.max)) if isinstance(codec, Minifloat) else min(max(q, low), high)
    chosen = _choose(codec, low, high, target, word)
    if isinstance(codec, Minifloat) and q < 0:
        return code_of(codec, -chosen, negative=True)
    return code_of(codec, chosen, negative)


def _choose(codec: Codec, low: Fraction, high: Fraction, q: Fraction, word: int | None) -> Fraction:
    if low == high:
        return low
    fraction = (q - low) / (high - low)
    if word is not None:
        if isinstance(codec, Lookup):  # uneven steps: the position is computed in FP32
            fraction = min(fl_finite(fl_finite(q - low) / fl_finite(high - low)), Fraction(1))
        away = math.floor(fraction * 2**30) + (word >> 2) >= 2**30
        return high if away else low
    if fraction != Fraction(1, 2):
        return high if fraction > Fraction(1, 2) else low
    if isinstance(codec, PowerOfTwo):
        return high
    if isinstance(codec, Lookup):
        return high if code_of(codec, high) % 2 == 0 and code_of(codec, low) % 2 == 1 else low
    return low if code_of(codec, low) % 2 == 0 else high


def nan_code(codec: Codec) -> int | None:
    """The code written for NaN, or None."""
    return getattr(codec, "nan", None)


# ------------------------------------------------------------------------------------------------ stochastic bits


def threefry2x32(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32, 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    mask = 0xFFFFFFFF
    schedule = (key[0], key[1], 0x1BD11BDA ^ key[0] ^ key[1])
    x, y = (counter[0] + schedule[0]) & mask, (counter[1] + schedule[1]) & mask
    rotations = (13, 15, 26, 6, 17, 29, 16, 24)
    for i in range(20):
        r = rotations[i % 8]
        x = (x + y) & mask
        y = ((y << r) | (y >> (32 - r))) & mask
        y ^= x
        if i % 4 == 3:
            j = i // 4 + 1
            x = (x + schedule[j % 3]) & mask
            y = (y + schedule[(j + 1) % 3] + j) & mask
    return x, y


def random_word(seed: int, index: int) -> int:
    """The 32 random bits of element `index` under `seed`."""
    mask = 0xFFFFFFFF
    return threefry2x32((seed & mask, seed >> 32 & mask), (index & mask, index >> 32 & mask))[0]


# ------------------------------------------------------------------------------------------------ scales


def linear(rule: Linear, statistic: Fraction, level: Level, fmt: Format, global_scale: Fraction | None) -> int:
    """Rule `linear` and the rules derived from it: the stored scale of a nonzero block."""
    codec, element, cap = level.codec, fmt.element, Fraction(fmt.qmax(level))
    assert isinstance(codec, Minifloat), codec
    if isinstance(rule, Inverse):
        return encode(codec, fl_finite(1 / multiplier(rule, statistic, cap)))
    if isinstance(rule, Reciprocal):
        t = fl_finite(statistic * fl_finite(1 / cap))
    elif isinstance(rule, HalfRange):
        assert isinstance(element, Integer) and element.signed, element
        t = fl_finite(statistic / Fraction(element.high - element.low, 2 ** (1 + element.fraction_bits)))
    else:
        t = fl_finite(statistic / cap)
    t = flush(t)
    if global_scale is not None:
        t = fl_finite(t / global_scale)
    t = fl_finite(t * Fraction(2) ** rule.margin)
    t = min(max(t, Fraction(codec.scale_min)), Fraction(codec.scale_max))
    return encode(codec, t)


def multiplier(rule: Inverse, statistic: Fraction, cap: Fraction) -> Fraction:
    """Rule `te`: the multiplier of a block's elements."""
    m = min(fl_finite(cap / statistic), 1 / MIN_NORMAL) / Fraction(2) ** rule.margin
    m = min(max(fl_finite(m), MIN_NORMAL), 1 / MIN_NORMAL)
    return Fraction(2) ** floor_log2(m) if rule.power_of_two else m


def floor_log2(q: Fraction) -> int:
    """Largest n with 2^n <= q."""
    n = 0
    while Fraction(2) ** n <= q:
        n += 1
    while Fraction(2) ** n > q:
        n -= 1
    return n


def exponent(rule: Exponent, amax: Fraction, element: Codec) -> int:
    """Rules `rceil`, `floor`, `even`: n of the scale 2^n of a nonzero block, before clipping to the codec."""
    cap = max(ladder(element)[0])
    if rule.name == "rceil":
        n = floor_log2(amax / cap)
        return n if amax <= cap * Fraction(2) ** n else n + 1
    if rule.name == "even":
        assert isinstance(element, Minifloat | Integer), element
        # For an integer codec, the bits after the leading bit of its largest value act as mantissa bits.
        bits = element.mantissa_bits if isinstance(element, Minifloat) else floor_log2(Fraction(element.high))
        step = Fraction(2) ** (floor_log2(amax) - bits)
        amax = math.floor(amax / step + Fraction(1, 2)) * step
    return floor_log2(amax) - floor_log2(cap)


def global_number(level: Level, fmt: Format, amax: Fraction) -> Fraction:
    """The value that a cast stores for a global scale of convention "amax" or "divisor"; a tensor of zeros gets scale 1."""
    qmax = Fraction(fmt.qmax(level))
    number = max(amax, qmax * MIN_NORMAL) if amax else qmax
    return number if level.convention == "amax" else min(fl_finite(qmax / number), 1 / MIN_NORMAL)


def multiplied_by(level: Level, fmt: Format, stored: Fraction) -> Fraction:
    """The multiplier that a stored global scale stands for."""
    if level.convention == "amax":
        return fl_finite(stored / Fraction(fmt.qmax(level)))
    return stored if level.convention == "multiplier" else fl_finite(1 / stored)


def stored_scale(rule: Rule, statistic: Fraction, level: Level, fmt: Format, global_scale: Fraction | None) -> int:
    """The stored code of the scale of a nonzero finite block."""
    codec = level.codec
    if isinstance(rule, Linear):
        return linear(rule, statistic, level, fmt, global_scale)
    assert isinstance(rule, Exponent), rule
    n = exponent(rule, statistic, fmt.element)
    if isinstance(codec, PowerOfTwo):
        return min(max(n + codec.bias, 0), codec.nan - 1)
    return code_of(codec, Fraction(2) ** min(max(n, -126), 126))


def supplied_scale(codec: Codec, code: int) -> int:
    """The stored code of a supplied scale: NaN unless it is a positive number within the codec's scale range."""
    value = decode(codec, code)
    low, high = 0.0, math.inf
    if isinstance(codec, Minifloat) and codec.bits > 8:
        low, high = codec.scale_min, codec.scale_max
    if value > 0 and low <= value <= high:
        return code
    nan = nan_code(codec)
    assert nan is not None, codec
    return nan


def zero_scale(codec: Codec) -> int:
    """The scale code of an all-zero block: 1.0 if scales cannot underflow, otherwise the smallest code."""
    return encode(codec, Fraction(1)) if isinstance(codec, Minifloat) and codec.scale_min > 0 else 0


# ------------------------------------------------------------------------------------------------ tensors


@dataclass
class Written:
    """The result of a cast, one code per item: `codes` in the logical shape, `scale` in the layout's shape.

    zero_point: as stored. With a float bias, the codes of the biases in the scale's codec.
    """

    codes: np.ndarray
    scale: np.ndarray
    global_scale: int | None = None
    zero_point: np.ndarray | None = None


def blocks(shape: tuple[int, ...], block: tuple[int | None, int | None]) -> Iterator[tuple[tuple[int, ...], list[Any]]]:
    """(index of the block in the scale array, indices of its elements) for blocks (m, k) over the last two axes."""
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
) -> Written:
    """`breccia.cast` of an FP32 array along its last axis, element by element.

    `scale` supplies the first level's scale: an FP32 number if that level is per tensor, otherwise the codes of all scales.
    """
    assert x.dtype == np.float32 and x.ndim >= 1, (x.dtype, x.ndim)
    fmt, rules = recipe.format, recipe.rules
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
    codes = np.zeros(x.shape, np.uint32)
    scales = np.zeros(scale_shape(x.shape, level.block), np.uint32)
    offsets = np.zeros(scales.shape, np.uint32) if fmt.offset != "none" else None
    for where, members in blocks(x.shape, level.block):
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
            stored = supplied_scale(level.codec, code)
        elif statistic and fmt.global_scale is not None and global_scale is None:  # under a global scale of NaN
            stored = nan_code(level.codec)
            assert stored is not None, level
        else:
            stored = stored_scale(rule, statistic, level, fmt, global_scale) if statistic else zero_scale(level.codec)
        scales[where] = stored
        units = _Units(rule, level, fmt, stored, global_scale, statistic if supplied is None else None)
        if not units.usable:
            for i in members:
                codes[i] = encode(fmt.element, Fraction(0))
            continue
        z, bias = 0, Fraction(0)
        if fmt.offset == "zero_point":
            assert offsets is not None
            z = min(max(round(units.of(-low)), 0), int(fmt.element.max))
            offsets[where] = z
        elif fmt.offset == "bias":
            assert offsets is not None
            offsets[where] = encode(level.codec, low)
            bias = Fraction(decode(level.codec, int(offsets[where])))
        for i in members:
            word = random_word(seed or 0, _position(i, x.shape)) if rounding == "stochastic" else None
            codes[i] = _element_code(fmt.element, raw[i], value.get(i), units, z, bias, word)
    return Written(codes, scales, global_bits, offsets)


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
        return scale is not None and (self.exact or MIN_NORMAL <= scale <= 1 / MIN_NORMAL)

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
    codec: Codec, raw: float, value: Fraction | None, units: _Units, zero_point: int, bias: Fraction, word: int | None
) -> int:
    if value is None:  # NaN or Inf under a supplied scale
        assert isinstance(codec, Minifloat) and codec.nan is not None, codec
        if math.isnan(raw) or codec.inf is None or (raw < 0 and not codec.signed):
            return codec.nan
        return codec.inf | (1 << (codec.bits - 1) if raw < 0 else 0)
    y = units.of(flush(fl_finite(value - bias)))
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
    for where, members in blocks(written.codes.shape, fmt.scale.block):
        scale = decode(fmt.scale.codec, int(written.scale[where]))
        offset = 0 if written.zero_point is None else int(written.zero_point[where])
        for i in members:
            v = decode(fmt.element, int(written.codes[i]))
            v = _apply(v - offset if offset and fmt.offset == "zero_point" else v, scale, fmt.scale, fmt)
            if fmt.global_scale is not None:
                assert written.global_scale is not None
                v = _apply(v, decode(F32, written.global_scale), fmt.global_scale, fmt)
            if fmt.offset == "bias":
                v = _sum(v, decode(fmt.scale.codec, offset))
            out[i] = v
    return out


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
