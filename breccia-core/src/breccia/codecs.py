"""Codecs: how a number is encoded as bits, for elements and scales. Their kinds, and those of the built-in recipes.

A codec is a value; `breccia.testing.oracle` reads its fields and enumerates exact rationals. The methods are part of the
generic algorithm; see `codec_base`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .codec_base import Codec as Codec
from .codec_checks import check_integer, check_lookup, check_minifloat, check_power_of_two
from .fp32 import F32_INF, MAGNITUDE, NORMAL, f32, f32_bits, next_f32, round_shift, significand
from .fp32 import MANTISSA as MANTISSA
from .locks import cached_property

if TYPE_CHECKING:
    from .arrays.ops import Array, Ops


@dataclass(frozen=True)
class Minifloat(Codec):
    """Sign, `exponent_bits`, `mantissa_bits`: value (-1)^s * 2^(e - bias) * 1.m, subnormal where e == 0.

    `largest` is the largest finite number. `nan` is the code written for NaN and `inf` the code of +Inf, None where the
    format has none. With `inf`, all greater magnitudes are NaN (IEEE style). Without it, only `nan` is: the highest magnitude
    ("fn" style), or the sign bit alone ("fnuz" style), in place of -0. What rounds to zero is then written as +0.
    `scale_min` is the smallest scale written for a nonzero block; 0.0 if the scale may underflow to 0.
    `signed=False`: no sign bit; negative numbers are written as 0, -Inf as NaN. The top bit may be unused
    (UE4M3): codes with it set decode to NaN.

    Raises RecipeError where fields contradict each other or values are not representable in FP32.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    nan: int | None = None
    inf: int | None = None
    scale_min: float = 0.0  # type: ignore[override]
    signed: bool = True

    def __post_init__(self) -> None:
        check_minifloat(self)

    @property
    def max(self) -> float:
        return self.largest

    @property
    def magnitude_mask(self) -> int:
        """Mask of the exponent and mantissa bits of a code."""
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def fnuz(self) -> bool:
        """Whether the code of -0 is NaN, as in E4M3FNUZ."""
        return self.signed and self.nan == self.magnitude_mask + 1

    @property
    def highest(self) -> int:
        """The code of the largest finite number."""
        if self.fnuz:
            return self.magnitude_mask
        above = self.nan if self.inf is None else self.inf
        return self.magnitude_mask if above is None else above - 1

    @property
    def zero_scale(self) -> int:
        return self.bias << self.mantissa_bits if self.scale_min > 0 else 0

    @property
    def nan_code(self) -> int | None:
        return self.nan

    def accept(self, ops: Ops, stored: Array) -> Array:
        if self.bits == 8:
            return super().accept(ops, stored)
        value = self.read(ops, stored)
        good = (value >= self.scale_min) & (value <= self.scale_max)
        return ops.where(good, self.encode(ops, ops.where(good, value, 1.0)), self.need_nan())

    def value(self, code: int) -> float:
        magnitude = code & self.magnitude_mask
        sign = -1.0 if code != magnitude else 1.0
        if sign < 0 and not self.signed:
            return math.nan
        if code == self.nan:
            return math.nan
        if magnitude == self.inf:
            return sign * math.inf
        if magnitude == self.nan if self.inf is None else magnitude > self.inf:
            return math.nan
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        implicit = 1 << self.mantissa_bits if exponent else 0
        return sign * math.ldexp(mantissa + implicit, max(exponent, 1) - self.bias - self.mantissa_bits)

    def read(self, ops: Ops, stored: Array) -> Array:
        if self.bits <= 8:
            return self.decode(ops, ops.load(stored))
        if ops.is_bit_pattern(stored):  # of BF16, also in place of a scale that the recipe stores wider
            return ops.bitcast_to_float(ops.load(stored) << 16)
        return ops.f32(stored)

    def encode(self, ops: Ops, y: Array, word: Array | None = None) -> Array:
        u = ops.bitcast_to_int(y)
        magnitude = u & MAGNITUDE
        if self.bits == 32:
            return ops.where(magnitude > F32_INF, self.need_nan(), u)  # one canonical NaN pattern
        sign = ((u >> 31) & 1) << (self.bits - 1) if self.signed else 0
        code = ops.native_cast(y, self) if word is None else None
        if code is None:
            finite = magnitude if self.signed else ops.where(u < 0, 0, magnitude)
            rounded = self._rounded(ops, finite, word)
            code = rounded | sign
            if self.fnuz:
                code = ops.where(rounded == 0, 0, code)
        if self.nan is None:
            return code
        infinite = self.nan if self.inf is None else sign | self.inf
        if not self.signed:
            infinite = ops.where(u < 0, self.nan, infinite)
        return ops.where(magnitude < F32_INF, code, ops.where(magnitude > F32_INF, self.nan, infinite))

    def _rounded(self, ops: Ops, magnitude: Array, word: Array | None) -> Array:
        """Codes of finite magnitudes, saturating."""
        finite = ops.minimum(magnitude, f32_bits(self.largest))
        exponent = finite >> 23
        first = 128 - self.bias  # FP32's exponent field of this codec's smallest normal number
        shift = 23 - self.mantissa_bits + ops.maximum(first - exponent, 0)
        # The exponent is rounded with the significand, so that ties go to even codes without mantissa bits too. Exponents have
        # at most 8 bits, since all values are FP32 numbers: the largest code times 2^shift is below 2^31.
        wide = significand(ops, finite) + (ops.maximum(exponent - first, 0) << 23)
        code = round_shift(ops, wide, shift, word)
        # The codec's exponent range goes below FP32's normal numbers; zero (exponent field 0) must still encode as 0.
        return code if first > 0 else ops.where(finite < NORMAL, 0, code)

    def encode_exponent(self, ops: Ops, n: Array) -> Array:
        if self.bits != 32:
            return super().encode_exponent(ops, n)
        return (ops.minimum(ops.maximum(n, -126), 126) + 127) << 23


@dataclass(frozen=True)
class PowerOfTwo(Codec):
    """Exponent only: code c is 2^(c - bias), and `nan` is NaN. No sign, no zero.

    Raises RecipeError unless the codes are 2^-127 .. 2^127 in one byte with NaN last.
    """

    bias: int
    nan: int

    def __post_init__(self) -> None:
        check_power_of_two(self)

    @property
    def max(self) -> float:
        return 2.0 ** (self.nan - 1 - self.bias)

    @property
    def nan_code(self) -> int | None:
        return self.nan

    def value(self, code: int) -> float:
        return math.nan if code == self.nan else math.ldexp(1.0, code - self.bias)

    def encode(self, ops: Ops, y: Array, word: Array | None = None) -> Array:
        u = ops.bitcast_to_int(y)
        magnitude = u & MAGNITUDE
        nearest = (magnitude + NORMAL // 2) >> 23  # the mantissa rounds into the exponent, 1.5 upwards
        nearest = ops.where((u < 0) | (magnitude < NORMAL), 0, nearest)
        code = self.encode_exponent(ops, nearest - 127)
        return ops.where(magnitude >= F32_INF, self.nan, code)

    def encode_exponent(self, ops: Ops, n: Array) -> Array:
        return ops.minimum(ops.maximum(n + self.bias, 0), self.nan - 1)

    def accept(self, ops: Ops, stored: Array) -> Array:
        return ops.load(stored)  # all are positive or NaN; XLA would compare 2^-127 (code 0) as zero

    def multiply(self, ops: Ops, v: Array, stored: Array) -> Array:
        # 2^-127 (code 0) is an FP32 subnormal, which XLA reads as zero: halve v, which is exact, and use 2^-126.
        code = ops.load(stored)
        return ops.where(code == 0, v * 0.5, v) * self.decode(ops, ops.maximum(code, 1))

    def divide(self, ops: Ops, x: Array, stored: Array, global_scale: Array | None = None) -> tuple[Array, Array]:
        if global_scale is not None:
            return super().divide(ops, x, stored, global_scale)
        # Exact where it does not underflow. The reciprocal of 2^127 (code 254) is subnormal, hence two steps.
        code = ops.load(stored)
        usable = code != self.nan
        inverse = ops.bitcast_to_float((254 - ops.minimum(code, 253)) << 23)
        return ops.where(usable, ops.where(code == 254, x * 0.5, x) * inverse, 0.0), usable


@dataclass(frozen=True)
class Integer(Codec):
    """Two's complement if `signed`, else unsigned; value code * 2^-`fraction_bits`.

    A signed codec includes `-2^(bits-1)`; `max`, from which scales are computed, is the largest positive value.
    Raises RecipeError for widths outside 1 to 8 bits, for one signed bit, and for values that FP32 cannot represent.
    """

    signed: bool
    fraction_bits: int = 0

    def __post_init__(self) -> None:
        check_integer(self)

    @property
    def max(self) -> float:
        return math.ldexp(self.high, -self.fraction_bits)

    @property
    def high(self) -> int:
        """Largest code as an integer."""
        return 2 ** (self.bits - self.signed) - 1

    @property
    def low(self) -> int:
        """Smallest code as an integer."""
        return -(self.high + 1) if self.signed else 0

    @property
    def mantissa_bits(self) -> int:
        """Bits after the leading one of the largest value."""
        return self.high.bit_length() - 1

    def value(self, code: int) -> float:
        integer = code - (1 << self.bits) if self.signed and code >> (self.bits - 1) else code
        return math.ldexp(integer, -self.fraction_bits)

    def encode(self, ops: Ops, y: Array, word: Array | None = None, zero_point: Any = 0) -> Array:
        """As `Codec.encode`; `zero_point` (integers in FP32) is added to the rounded number."""
        least, most = (math.ldexp(end, -self.fraction_bits) for end in (self.low, self.high))
        y = ops.minimum(ops.maximum(y, least - zero_point), most - zero_point)
        y = y * 2.0**self.fraction_bits if self.fraction_bits else y
        if word is None and (rounded := ops.native_round(y, self.bits)) is not None:
            return (rounded + ops.to_int32(zero_point)) & ((1 << self.bits) - 1)
        u = ops.bitcast_to_int(y)
        magnitude = u & MAGNITUDE
        rounded_magnitude = round_shift(ops, significand(ops, magnitude), 150 - (magnitude >> 23), word)
        signed = ops.where(u < 0, -rounded_magnitude, rounded_magnitude) + ops.to_int32(zero_point)
        return signed & ((1 << self.bits) - 1)


@dataclass(frozen=True)
class Lookup(Codec):
    """Code c stands for `values[c]`: 2^bits FP32 numbers in any order; at most 8 bits.

    A positive number is among them, and zero, unless the table is only decoded. Several codes may stand for one number: all
    decode to it, casts write the lowest.
    Scales are computed from the largest value, as for signed integers.
    Raises RecipeError for any other table.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        check_lookup(self)

    @property
    def max(self) -> float:
        return max(self.values)

    def value(self, code: int) -> float:
        return self.values[code]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Codes by ascending value; a value that several codes stand for has the lowest of them, as many times."""
        return tuple(map(self.values.index, sorted(self.values)))

    @cached_property
    def thresholds(self) -> tuple[int, ...]:
        """FP32 bits, by position in `order`: the smallest number that rounds to the value there (position 0 is unused).

        Between two positions of one code it is the value itself, so that thresholds ascend; both sides have this code.
        """
        thresholds = [0]
        for low, high in pairwise(self.order):
            middle = (Fraction(self.values[low]) + Fraction(self.values[high])) / 2
            t = f32(float(middle))
            tie_goes_down = low != high and (high % 2 == 1 or low % 2 == 0)
            while Fraction(t) < middle or (Fraction(t) == middle and tie_goes_down):
                t = next_f32(t)
            thresholds.append(f32_bits(t))
        return tuple(thresholds)

    def encode(self, ops: Ops, y: Array, word: Array | None = None) -> Array:
        """As `Codec.encode`. A tie between two even or two odd codes goes to the smaller value.

        Stochastic: f of the numerics contract, section 5.5, is fl(fl(y - low) / fl(high - low)), from the smaller value up.
        """
        if word is None:
            return self._codes(ops, self._place(ops, y, self.thresholds))
        ascending = [self.values[code] for code in self.order]
        values = tuple(map(f32_bits, ascending))
        y = ops.minimum(ops.maximum(y, ascending[0]), ascending[-1])
        place = self._place(ops, y, values)
        low, high = (ops.bitcast_to_float(ops.take(values, ops.minimum(p, len(values) - 1))) for p in (place, place + 1))
        f = ops.div(y - low, ops.where(low < high, high - low, 1.0))
        up = ops.to_int32(ops.minimum(f, 1.0) * 2.0**30) + ((word >> 2) & 0x3FFFFFFF) >= 1 << 30
        return self._codes(ops, ops.where(up, place + 1, place))

    def encode_exponent(self, ops: Ops, n: Array) -> Array:
        """As `Codec.encode_exponent`, in a table of consecutive powers of two."""
        first = math.frexp(self.values[0])[1] - 1
        if self.values != tuple(math.ldexp(1.0, first + code) for code in range(len(self.values))):
            return super().encode_exponent(ops, n)
        return ops.minimum(ops.maximum(n - first, 0), len(self.values) - 1)

    def _place(self, ops: Ops, y: Array, starts: tuple[int, ...]) -> Array:
        """Largest position whose start is <= y, by bisection; 0 if there is none."""
        place = ops.bitcast_to_int(y) * 0
        for bit in reversed(range(self.bits)):
            there = place + (1 << bit)
            place = ops.where(y >= ops.bitcast_to_float(ops.take(starts, there)), there, place)
        return place

    def _codes(self, ops: Ops, place: Array) -> Array:
        return place if self.order == tuple(range(len(self.order))) else ops.take(self.order, place)


_OCP8 = "OCP 8-bit Floating Point Specification (OFP8) v1.0"
_MX = "OCP Microscaling Formats (MX) Specification v1.0"
_FNUZ = "AMD Instinct MI300 ISA (CDNA 3), FP8 and BF8; 8-bit Numerical Formats for Deep Neural Networks (arXiv:2206.02915)"
_IEEE = "IEEE 754-2019"

E4M3 = Minifloat("E4M3", 8, "float8_e4m3fn", f"{_OCP8}, section 5", 4, 3, 7, 448.0, nan=0x7F)
E5M2 = Minifloat("E5M2", 8, "float8_e5m2", f"{_OCP8}, section 5", 5, 2, 15, 57344.0, nan=0x7F, inf=0x7C)
E4M3FNUZ = Minifloat("E4M3FNUZ", 8, "float8_e4m3fnuz", _FNUZ, 4, 3, 8, 240.0, nan=0x80)
E5M2FNUZ = Minifloat("E5M2FNUZ", 8, "float8_e5m2fnuz", _FNUZ, 5, 2, 16, 57344.0, nan=0x80)
UE4M3 = Minifloat(
    "UE4M3", 8, None, "NVIDIA PTX ISA, alternate floating point data formats: .ue4m3", 4, 3, 7, 448.0, nan=0x7F, signed=False
)
UE5M3 = Minifloat("UE5M3", 8, None, "NVIDIA CUDA Math API 13.4: __nv_fp8_ue5m3", 5, 3, 15, 114688.0, nan=0xFF, signed=False)
E2M1 = Minifloat("E2M1", 4, None, f"{_MX}, section 5.3.3", 2, 1, 1, 6.0)
E2M3 = Minifloat("E2M3", 6, None, f"{_MX}, section 5.3.2", 2, 3, 1, 7.5)
E3M2 = Minifloat("E3M2", 6, None, f"{_MX}, section 5.3.2", 3, 2, 3, 28.0)
E8M0 = PowerOfTwo("E8M0", 8, "float8_e8m0fnu", f"{_MX}, section 5.4.1", 127, nan=255)
#: Integers by width and whether they are signed. One signed bit has no positive value, from which scales are computed.
INTEGERS: dict[tuple[int, bool], Integer] = {
    (codec.bits, codec.signed): codec
    for codec in (
        *(Integer(f"INT{n}", n, "int8" if n == 8 else None, "two's complement", True) for n in range(2, 9)),
        *(Integer(f"UINT{n}", n, None, "unsigned binary", False) for n in range(1, 9)),
    )
}
INT4, UINT4, INT8, UINT8 = INTEGERS[4, True], INTEGERS[4, False], INTEGERS[8, True], INTEGERS[8, False]
MXINT8 = Integer("MXINT8", 8, "int8", f"{_MX}, section 5.3.4", True, fraction_bits=6)
NF4 = Lookup(
    "NF4",
    4,
    None,
    "QLoRA (arXiv:2305.14314), appendix E",
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)
TERNARY = Lookup("TERNARY", 2, None, "llama.cpp, ggml-quants.c: TQ1_0, TQ2_0", (-1.0, 0.0, 1.0, 2.0))
IQ4 = Lookup(
    "IQ4",
    4,
    None,
    "llama.cpp, ggml-common.h: kvalues_iq4nl",
    (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)
F16 = Minifloat("F16", 16, "float16", f"{_IEEE}, binary16", 5, 10, 15, 65504.0, nan=0x7E00, inf=0x7C00, scale_min=2.0**-24)
BF16 = Minifloat(
    "BF16",
    16,
    "bfloat16",
    "bfloat16: the upper half of binary32",
    8,
    7,
    127,
    (2 - 2.0**-7) * 2.0**127,
    nan=0x7FC0,
    inf=0x7F80,
    scale_min=2.0**-126,
)
F32 = Minifloat(
    "F32",
    32,
    "float32",
    f"{_IEEE}, binary32",
    8,
    23,
    127,
    (2 - 2.0**-23) * 2.0**127,
    nan=0x7FC00000,
    inf=0x7F800000,
    scale_min=2.0**-126,
)

CODECS: tuple[Codec, ...] = (
    *(E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E2M1, E2M3, E3M2, E8M0, UE4M3, UE5M3),
    *dict.fromkeys((INT4, UINT4, INT8, UINT8, *INTEGERS.values())),
    *(MXINT8, NF4, F32, F16, BF16, TERNARY, IQ4),
)
#: The codecs of the floating dtypes that arrays may have, by the names in recipes.
FLOAT_CODECS = {"fp16": F16, "bf16": BF16, "fp32": F32}
#: The names in recipes by those of frameworks.
FLOAT_NAMES = {str(codec.dtype): name for name, codec in FLOAT_CODECS.items()} | {"half": "fp16", "single": "fp32"}


def float_codec(name: str) -> Minifloat | None:
    """The codec of a floating dtype by any of its names ("fp16", "float16", "half"); None for other dtypes."""
    return FLOAT_CODECS.get(FLOAT_NAMES.get(name, name))
