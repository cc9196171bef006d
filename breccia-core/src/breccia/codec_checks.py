"""Checks of codec declarations: each raises RecipeError with the value declared, the problem and the remedy.

They run when a codec is made, so that no declaration silently writes or decodes wrong numbers.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from .errors import RecipeError

if TYPE_CHECKING:
    from .codecs import Codec, Integer, Lookup, Minifloat, PowerOfTwo

#: Exponents of FP32's largest power of two and of its smallest normal and subnormal number.
_TOP, _NORMAL, _SUBNORMAL = 127, -126, -149


def check_minifloat(codec: Minifloat) -> None:
    """Raise RecipeError unless bits add up, values are FP32 numbers, and NaN, Inf and `largest` are the highest codes."""
    _check_whole_numbers(codec, "bits", "exponent_bits", "mantissa_bits", "bias")
    e, m, bits = codec.exponent_bits, codec.mantissa_bits, codec.bits
    if bits not in (*range(1, 9), 16, 32):
        raise _error(codec, f"a minifloat has 1 to 8 bits, or 16 or 32 as F16 and F32 have; got bits={bits}", bits=bits)
    unused = bits - codec.signed - e - m
    if e < 0 or m < 0 or e + m == 0 or unused not in ((0,) if codec.signed else (0, 1)):
        sign = "1 sign bit" if codec.signed else "no sign bit (signed=False)"
        more = "" if codec.signed else ", or one more with the top bit unused"
        raise _error(
            codec,
            f"{sign}, exponent_bits={e} and mantissa_bits={m} do not make bits={bits}; declare bits={codec.signed + e + m}"
            f"{more}, or fields that add up to it" + (", or signed=False for a format without a sign" if unused == -1 else ""),
            bits=bits,
            exponent_bits=e,
            mantissa_bits=m,
        )
    if bits == 32 and (codec.signed, e, m, codec.bias) != (True, 8, 23, 127):
        raise _error(
            codec,
            f"32 bits are FP32's, 1.8.23 with bias 127; got {int(codec.signed)}.{e}.{m} with bias {codec.bias}: declare 1 to 8 "
            "bits",
            exponent_bits=e,
            mantissa_bits=m,
            bias=codec.bias,
        )
    _check_special_codes(codec)
    highest = max(codec.highest >> m, 1) - codec.bias
    step = 1 - codec.bias - m
    if highest > _TOP or step < _SUBNORMAL:
        raise _error(
            codec,
            f"bias={codec.bias} puts numbers between 2^{step} and about 2^{highest}, and FP32, which codes are decoded to, has "
            f"2^{_SUBNORMAL} to 2^{_TOP}; declare a bias from {max(codec.highest >> m, 1) - _TOP} to {1 - m - _SUBNORMAL}",
            bias=codec.bias,
        )
    value = codec.value(codec.highest)
    if codec.largest != value or not value > 0:
        raise _error(
            codec,
            f"largest={codec.largest!r} is not the largest finite number of these fields, code {codec.highest:#x}; declare "
            f"largest={value!r}" + ("" if value > 0 else ", which must be positive: declare more exponent or mantissa bits"),
            largest=codec.largest,
        )
    _check_scale_min(codec)


def _check_special_codes(codec: Minifloat) -> None:
    """NaN and Inf must be the magnitudes above the largest finite one, or NaN the code of -0: no number has these codes."""
    top, nan, inf = codec.magnitude_mask, codec.nan, codec.inf
    if inf is None and nan not in (None, top) and not (codec.signed and nan == top + 1):
        instead = f" or {top + 1:#x} (the code of -0, as in E4M3FNUZ)" if codec.signed else ""
        raise _error(
            codec,
            f"nan={nan:#x} is not the highest magnitude, {top:#x}, so a number would share its code or lie above it; declare "
            f"nan={top:#x}{instead}, nan=None for a format without NaN, or inf= for one where all magnitudes above Inf are NaN",
            nan=nan,
        )
    if inf is not None and (nan is None or not 0 < inf < nan <= top):
        raise _error(
            codec,
            f"inf={inf:#x} needs a NaN above it, at most {top:#x}, and a number below it; got "
            f"nan={'None' if nan is None else f'{nan:#x}'}. Declare 0 < inf < nan <= {top:#x}, or inf=None",
            nan=nan,
            inf=inf,
        )


def _check_scale_min(codec: Minifloat) -> None:
    least = codec.scale_min
    if least == 0:
        return
    one = codec.bias << codec.mantissa_bits
    if not _is_number(codec, least) or not codec.bias > 0 or one > codec.highest:
        raise _error(
            codec,
            f"scale_min={least!r} is the smallest scale of a nonzero block, and zero blocks then have scale 1.0: both "
            f"must be numbers of the codec, which has a step of 2^{1 - codec.bias - codec.mantissa_bits} at zero and ends at "
            f"{codec.largest!r}. Declare scale_min=0.0 to let small blocks underflow to scale 0, or a positive number of it",
            scale_min=least,
        )


def _is_number(codec: Minifloat, value: float) -> bool:
    """Whether `value` is a positive finite number of the codec"""
    if not 0 < value <= codec.largest:
        return False
    binade = max(math.frexp(value)[1] - 1, 1 - codec.bias)
    return math.ldexp(value, codec.mantissa_bits - binade).is_integer()


def check_power_of_two(codec: PowerOfTwo) -> None:
    """Raise RecipeError unless codes are one byte: all powers of two that FP32 and its reciprocals represent, and NaN."""
    fields = (codec.bits, codec.bias, codec.nan)
    if fields != (8, _TOP, 255):
        raise _error(
            codec,
            f"powers of two are scales of one byte, from 2^-{_TOP} to 2^{_TOP}, with NaN as the last code; got "
            f"bits={codec.bits!r}, bias={codec.bias!r}, nan={codec.nan!r}. Declare bits=8, bias={_TOP}, nan=255, or an "
            "unsigned Minifloat for another range",
            bits=codec.bits,
            bias=codec.bias,
            nan=codec.nan,
        )


def check_integer(codec: Integer) -> None:
    """Raise RecipeError unless there is a positive value and all values are FP32 numbers."""
    _check_whole_numbers(codec, "bits", "fraction_bits")
    _check_width(codec, "an integer")
    if codec.signed and codec.bits == 1:
        raise _error(
            codec,
            "one signed bit has values 0 and -1, but scales need a positive value; declare signed=False (0 and 1), "
            "bits=2, or a Lookup of two numbers",
            bits=codec.bits,
        )
    least, most = _NORMAL, _TOP + 1 - (codec.bits - codec.signed)
    if not least <= -codec.fraction_bits <= most:
        raise _error(
            codec,
            f"fraction_bits={codec.fraction_bits} puts its numbers at multiples of 2^{-codec.fraction_bits}, which must be "
            f"FP32 numbers; declare fraction_bits from {-most} to {-least}",
            fraction_bits=codec.fraction_bits,
        )


def check_lookup(codec: Lookup) -> None:
    """Raise RecipeError unless the table has an FP32 number for each code, a positive one and no -0 among them."""
    _check_whole_numbers(codec, "bits")
    _check_width(codec, "a table")
    values: Any = codec.values
    fits = isinstance(values, tuple) and len(codec.values) == 1 << codec.bits
    fits = fits and all(math.isfinite(v) and _is_f32(v) for v in codec.values)
    negative_zero = any(v == 0 and math.copysign(1.0, v) < 0 for v in codec.values)
    if not fits or max(codec.values) <= 0 or negative_zero:
        raise _error(
            codec,
            f"values must be {1 << codec.bits} finite FP32 numbers for {codec.bits} bits, with a positive one, and 0 as 0.0, "
            f"in a tuple; got {len(codec.values)}: {values!r}. Round each to FP32, and repeat a number to pad a shorter "
            "table",
            values=values,
        )


def check_element(codec: Codec) -> None:
    """Raise RecipeError unless codes of `codec` can be packed as elements."""
    if not 1 <= codec.bits <= 8:
        raise RecipeError(
            f"elements have 1 to 8 bits; codec {codec.name!r} has {codec.bits}. Declare a narrower element codec; F16, BF16 "
            "and F32 are for scales.",
            element=codec.name,
            bits=codec.bits,
        )


def check_scale(codec: Codec, floats: tuple[Codec, ...]) -> None:
    """Raise RecipeError unless scales of `codec` can be stored: one byte each, or one of `floats`."""
    if codec.bits != 8 and codec not in floats:
        names = ", ".join(f.name for f in floats)
        raise RecipeError(
            f"a scale is stored in one byte, or as {names}; codec {codec.name!r} has {codec.bits} bits and is none of these. "
            "Declare an 8-bit codec (an unsigned Minifloat of 7 bits with bits=8 has its top bit unused), or use one of them.",
            codec=codec.name,
            bits=codec.bits,
        )


def check_coded_scale(codec: Codec, floats: tuple[Codec, ...]) -> None:
    """Raise RecipeError unless `codec` has 1 to 8 bits, or is one of `floats`, for scales that may be coded under others."""
    if codec.bits > 8:
        check_scale(codec, floats)


def check_qmax(qmax: float, element: Codec, finer: list[Codec]) -> None:
    """Raise RecipeError unless the largest magnitude at scale 1 is an FP32 number, since scales are computed from it."""
    if not 2.0**_NORMAL <= qmax < 2.0 ** (_TOP + 1):
        names = " times ".join(codec.name for codec in (element, *finer))
        raise RecipeError(
            f"the largest magnitude at scale 1, {names}, is {qmax!r}, and scales are computed from it in FP32, from "
            f"2^{_NORMAL} to below 2^{_TOP + 1}. Declare codecs whose largest number is nearer to 1 (another bias or "
            "fraction_bits).",
            qmax=qmax,
        )


def _check_width(codec: Codec, what: str) -> None:
    if not 1 <= codec.bits <= 8:
        raise _error(codec, f"{what} has 1 to 8 bits; got bits={codec.bits}. Declare a narrower codec", bits=codec.bits)


def _check_whole_numbers(codec: Codec, *fields: str) -> None:
    for field in fields:
        value: Any = getattr(codec, field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _error(codec, f"{field} must be an integer; got {value!r}", **{field: value})


def _is_f32(value: float) -> bool:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0] == value
    except OverflowError:
        return False


def _error(codec: Codec, message: str, **values: Any) -> RecipeError:
    return RecipeError(f"codec {codec.name!r}: {message}.", **values)
