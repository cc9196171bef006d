"""Inconsistent codec declarations are refused at declaration, with a message that says what to declare."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from breccia.codecs import (
    BF16,
    CODECS,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    F16,
    F32,
    INT8,
    UE4M3,
    UE5M3,
    Codec,
    Integer,
    Lookup,
    Minifloat,
    PowerOfTwo,
)
from breccia.errors import RecipeError
from breccia.formats import TENSOR, Format, Level


def minifloat(**fields: Any) -> Any:
    """E4M3 with other fields."""
    return lambda: dataclasses.replace(E4M3, name="odd", **fields)


def unsigned(**fields: Any) -> Any:
    """UE4M3 with other fields."""
    return lambda: dataclasses.replace(UE4M3, name="odd", **fields)


def integer(bits: Any, signed: bool = True, fraction_bits: Any = 0) -> Any:
    return lambda: Integer("odd", bits, None, "this test", signed, fraction_bits)


def power(bits: int, bias: Any, nan: int) -> Any:
    return lambda: PowerOfTwo("odd", bits, None, "this test", bias, nan)


def table(bits: int, values: Any) -> Any:
    return lambda: Lookup("odd", bits, None, "this test", values)


#: Fault -> (the declaration, the fault in the message, the remedy in the message).
REFUSED: dict[str, tuple[Any, str, str]] = {
    # -- minifloats: bits
    "bits do not add up": (minifloat(exponent_bits=5), "1 sign bit, exponent_bits=5 and mantissa_bits=3 do not make bits=8",
        "declare bits=9, or fields that add up to it, or signed=False for a format without a sign"),
    "a bit too many": (minifloat(mantissa_bits=2), "mantissa_bits=2 do not make bits=8",
        "declare bits=7, or fields that add up to it"),
    "a negative width": (minifloat(exponent_bits=9, mantissa_bits=-2), "mantissa_bits=-2 do not make bits=8", "declare bits=8"),
    "a sign alone": (lambda: Minifloat("odd", 1, None, "this test", 0, 0, 1, 1.0),
        "1 sign bit, exponent_bits=0 and mantissa_bits=0 do not make bits=1", "or fields that add up to it"),
    "two unused bits": (
        unsigned(exponent_bits=3),
        "no sign bit (signed=False), exponent_bits=3 and mantissa_bits=3 do not make bits=8",
        "declare bits=6, or one more with the top bit unused",
    ),
    "unsigned, a bit short": (unsigned(exponent_bits=6), "exponent_bits=6 and mantissa_bits=3 do not make bits=8",
        "declare bits=9"),
    "nine bits": (minifloat(bits=9, exponent_bits=5), "1 to 8 bits, or 16 or 32 as F16 and F32 have; got bits=9",
        "1 to 8 bits"),
    "no bits": (minifloat(bits=0), "got bits=0", "a minifloat has 1 to 8 bits"),
    "24 bits": (minifloat(bits=24, exponent_bits=8, mantissa_bits=15), "got bits=24", "1 to 8 bits, or 16 or 32"),
    "another FP32": (lambda: dataclasses.replace(F32, name="odd", exponent_bits=9, mantissa_bits=22),
        "32 bits are FP32's, 1.8.23 with bias 127; got 1.9.22 with bias 127", "declare 1 to 8 bits"),
    "bits that are no number": (minifloat(bits="8"), "bits must be an integer; got '8'", "integer"),
    "bits that are a float": (minifloat(exponent_bits=4.0), "exponent_bits must be an integer; got 4.0", "integer"),
    # -- minifloats: NaN and Inf
    "NaN beyond the width": (minifloat(nan=0x100), "nan=0x100 is not the highest magnitude, 0x7f",
        "declare nan=0x7f or 0x80 (the code of -0, as in E4M3FNUZ), nan=None"),
    "NaN at zero": (minifloat(nan=0), "nan=0x0 is not the highest magnitude, 0x7f", "declare nan=0x7f or 0x80"),
    "NaN at a negative number": (minifloat(nan=0x81), "a number would share its code", "declare nan=0x7f or 0x80"),
    "largest under a NaN in place of -0": (minifloat(nan=0x80), "largest=448.0 is not the largest finite number", "code 0x7f; "
        "declare largest=480.0"),
    "NaN among numbers": (minifloat(nan=0x40), "a number would share its code", "declare nan=0x7f"),
    "NaN of an unsigned one in an unused bit": (unsigned(nan=0xFF), "nan=0xff is not the highest magnitude, 0x7f",
        "declare nan=0x7f, nan=None"),
    "NaN of an unsigned one in place of -0": (unsigned(nan=0x80), "nan=0x80 is not the highest magnitude, 0x7f",
        "declare nan=0x7f, nan=None"),
    "Inf without NaN": (minifloat(nan=None, inf=0x7F), "inf=0x7f needs a NaN above it, at most 0x7f", "or inf=None"),
    "Inf above NaN": (minifloat(nan=0x7C, inf=0x7E), "inf=0x7e needs a NaN above it",
        "got nan=0x7c. Declare 0 < inf < nan <= 0x7f"),
    "Inf beyond the width": (minifloat(inf=0x100), "inf=0x100 needs a NaN above it, at most 0x7f",
        "Declare 0 < inf < nan <= 0x7f"),
    "NaN beyond the width, with Inf": (lambda: dataclasses.replace(E5M2, name="odd", nan=0xFF),
        "inf=0x7c needs a NaN above it, at most 0x7f", "got nan=0xff. Declare 0 < inf < nan <= 0x7f"),
    "Inf at zero": (minifloat(inf=0), "inf=0x0 needs a NaN above it, at most 0x7f, and a number below it", "Declare 0 < inf"),
    # -- minifloats: numbers
    "largest above the grid": (minifloat(largest=480.0), "largest=480.0 is not the largest finite number",
        "declare largest=448.0"),
    "largest between numbers": (minifloat(largest=447.0), "largest=447.0 is not the largest finite number",
        "code 0x7e; declare largest=448.0"),
    "largest below the grid's": (minifloat(largest=240.0), "largest=240.0 is not the largest", "declare largest=448.0"),
    "largest is the NaN's": (minifloat(nan=None), "largest=448.0 is not the largest finite number of these fields, code 0x7f",
        "largest=480.0"),
    "largest is infinite": (minifloat(largest=float("inf")), "largest=inf is not the largest", "declare largest=448.0"),
    "largest is NaN": (minifloat(largest=float("nan")), "largest=nan is not the largest", "declare largest=448.0"),
    "zero alone": (lambda: Minifloat("odd", 1, None, "this test", 1, 0, 0, 0.0, nan=1, signed=False),
        "largest=0.0 is not the largest finite number", "which must be positive: declare more exponent or mantissa bits"),
    "numbers beyond FP32": (minifloat(bias=-113), "bias=-113 puts numbers between 2^111 and about 2^128",
        "declare a bias from -112 to 147"),
    "numbers below FP32": (minifloat(bias=148), "bias=148 puts numbers between 2^-150", "declare a bias from -112 to 147"),
    "a bias that no float holds": (minifloat(bias=10**6), "bias=1000000 puts numbers", "declare a bias from -112 to 147"),
    "a bias that is no whole number": (minifloat(bias=7.5), "bias must be an integer; got 7.5", "integer"),
    "no scale so small": (minifloat(scale_min=2.0**-12), "scale_min=0.000244140625 is the smallest scale",
        "Declare scale_min=0.0"),
    "no scale so large": (minifloat(scale_min=512.0), "ends at 448.0", "or a positive number of it"),
    "a negative scale": (minifloat(scale_min=-1.0), "scale_min=-1.0", "Declare scale_min=0.0"),
    "no scale of one": (lambda: Minifloat("odd", 8, None, "this test", 4, 3, 16, 0.875, nan=0x7F, scale_min=0.5),
        "zero blocks then have scale 1.0: both must be numbers of the codec", "Declare scale_min=0.0"),
    # -- integers
    "one signed bit": (integer(1), "one signed bit has values 0 and -1", "declare signed=False (0 and 1), bits=2, or a Lookup"),
    "an integer of nine bits": (integer(9), "an integer has 1 to 8 bits; got bits=9", "Declare a narrower codec"),
    "an integer of no bits": (integer(0, signed=False), "got bits=0", "1 to 8 bits"),
    "an integer's bits are no number": (integer(None), "bits must be an integer; got None", "integer"),
    "steps below FP32's": (integer(8, fraction_bits=127), "multiples of 2^-127", "declare fraction_bits from -121 to 126"),
    "integers beyond FP32": (integer(8, fraction_bits=-122), "multiples of 2^122", "declare fraction_bits from -121 to 126"),
    "half a fraction bit": (integer(8, fraction_bits=0.5), "fraction_bits must be an integer; got 0.5", "integer"),
    # -- powers of two
    "NaN is not the last code": (power(8, 127, 0), "got bits=8, bias=127, nan=0", "Declare bits=8, bias=127, nan=255"),
    "NaN is beyond the codes": (power(8, 127, 256), "got bits=8, bias=127, nan=256", "Declare bits=8, bias=127, nan=255"),
    "an exponent of nine bits": (power(9, 127, 511), "got bits=9, bias=127, nan=511", "Declare bits=8"),
    "powers above FP32's": (power(8, 126, 255), "from 2^-127 to 2^127", "or an unsigned Minifloat for another range"),
    "a power's bias is no number": (power(8, None, 255), "got bits=8, bias=None, nan=255", "bias=127"),
    # -- tables
    "a table of no bits": (table(0, (0.0,)), "a table has 1 to 8 bits; got bits=0", "Declare a narrower codec"),
    "a table too short": (table(2, (0.0, 1.0)), "values must be 4 finite FP32 numbers for 2 bits", "pad a shorter table"),
    "a table of -0": (table(1, (-0.0, 1.0)), "and 0 as 0.0", "got 2: (-0.0, 1.0)"),
    "a table beyond FP32": (table(1, (0.0, 1e39)), "got 2: (0.0, 1e+39)", "Round each to FP32"),
    "a table between FP32 numbers": (table(1, (0.0, 0.1)), "got 2: (0.0, 0.1)", "Round each to FP32"),
    "a table with NaN": (table(1, (0.0, float("nan"))), "got 2: (0.0, nan)", "finite FP32 numbers for 1 bits"),
    "a list": (table(1, [0.0, 1.0]), "in a tuple; got 2: [0.0, 1.0]", "in a tuple"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_an_impossible_codec_is_refused_with_a_remedy(what: str) -> None:
    declare, found, remedy = REFUSED[what]
    with pytest.raises(RecipeError) as error:
        declare()
    message = str(error.value)
    assert message.startswith("codec 'odd': ") and found in message and remedy in message, message
    assert error.value.found, "the values are there for programs"


#: Valid codecs that cannot be used for scales, or for elements.
WIDE = Minifloat("WIDE", 16, None, "this test", 8, 7, 128, BF16.largest)
NARROW = Minifloat("NARROW", 7, None, "this test", 4, 3, 7, 448.0, nan=0x7F, signed=False)


@dataclasses.dataclass(frozen=True)
class Nine(Codec):
    """A codec class of a plug-in, with nine bits."""


@pytest.mark.parametrize("codec", [WIDE, NARROW, E2M1, Nine("NINE", 9, None, "this test")], ids=lambda c: c.name)
def test_a_scale_codec_has_eight_bits_or_is_f16_bf16_or_f32(codec: Codec) -> None:
    said = (
        f"a scale is stored in one byte, or as F16, BF16, F32; codec {codec.name!r} has {codec.bits} bits and is none of these"
    )
    with pytest.raises(RecipeError, match=re.escape(said) + ". Declare an 8-bit codec .* or use one of them"):
        Format(E2M1, (Level(codec, (1, 16)),))


@pytest.mark.parametrize("codec", [F16, F32, WIDE, Nine("NINE", 9, None, "this test")], ids=lambda c: c.name)
def test_an_element_codec_has_at_most_eight_bits(codec: Codec) -> None:
    said = f"elements have 1 to 8 bits; codec {codec.name!r} has {codec.bits}. Declare a narrower element codec"
    with pytest.raises(RecipeError, match=said):
        Format(codec, (Level(F32, TENSOR),))


LARGE = Minifloat("LARGE", 6, None, "this test", 3, 2, -113, 1.75 * 2.0**120)
SMALL = Minifloat("SMALL", 6, None, "this test", 3, 2, 140, 1.75 * 2.0**-133)


@pytest.mark.parametrize(
    ("element", "levels", "said"),
    [
        (LARGE, (Level(F32, TENSOR), Level(UE5M3, (1, 16))), "LARGE times UE5M3, is 2.66"),
        (SMALL, (Level(F32, TENSOR),), "SMALL, is 1.6"),
        (Lookup("LOW", 1, None, "this test", (0.0, 2.0**-130)), (Level(E8M0, (1, 32)),), "LOW, is 7.34"),
    ],
)
def test_the_largest_number_must_allow_scales_to_be_computed(element: Codec, levels: tuple[Level, ...], said: str) -> None:
    """Otherwise all scales would silently be 0 or NaN."""
    remedy = "Declare codecs whose largest number is nearer to 1 \\(another bias or fraction_bits\\)"
    with pytest.raises(
        RecipeError, match=f"the largest magnitude at scale 1, {said}.*from 2\\^-126 to below 2\\^128. {remedy}"
    ):
        Format(element, levels)


def test_an_element_codec_must_have_a_zero() -> None:
    with pytest.raises(
        RecipeError, match="elements include zero, but codec 'E8M0' has powers of two only, for scales. Declare a Minifloat, an"
    ):
        Format(E8M0, (Level(F32, TENSOR),))


def test_every_declared_codec_can_be_declared_again() -> None:
    for codec in CODECS:
        assert dataclasses.replace(codec, name="again").name == "again"
    for codec in (F16, BF16, F32, E4M3, UE4M3, E8M0, INT8):
        assert Level(dataclasses.replace(codec), (1, 16)).codec == codec


@pytest.mark.parametrize(
    "declare",
    [
        minifloat(bias=-112, largest=448.0 * 2.0**119),
        minifloat(bias=147, largest=448.0 * 2.0**-140),
        integer(8, fraction_bits=126),
        integer(8, fraction_bits=-121),
        integer(1, signed=False),
        power(8, 127, 255),
        lambda: Minifloat("odd", 4, None, "this test", 0, 3, 1, 0.875),
        minifloat(nan=0x80, largest=480.0),
        lambda: Minifloat("odd", 2, None, "this test", 1, 0, 0, 2.0, nan=2),
        lambda: Minifloat("odd", 2, None, "this test", 1, 0, 0, 2.0),
        lambda: Minifloat("odd", 1, None, "this test", 0, 1, 0, 1.0, signed=False),
    ],
)
def test_the_limits_named_in_the_messages_are_accepted(declare: Any) -> None:
    assert declare().max > 0
