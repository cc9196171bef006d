"""The oracle's numbers: FP32 arithmetic and the codes of codecs by exact rationals, and the bits of stochastic rounding.

It shares no arithmetic with `breccia.codecs`: codes are found by searching the list of all values of a codec.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from fractions import Fraction
from functools import cache

from ..codecs import F32, Codec, Integer, Lookup, Minifloat, PowerOfTwo

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
    if code == codec.nan:
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
    minus_zero = 1 << (codec.bits - 1)
    if value == 0 and negative and isinstance(codec, Minifloat) and codec.signed and nan_code(codec) != minus_zero:
        code |= minus_zero
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
