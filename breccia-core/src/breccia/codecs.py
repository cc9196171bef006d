"""Codecs: how one number becomes bits. Elements and scales are written with the same ones.

A codec is a value. Its fields say everything that `breccia.testing.oracle` (by enumeration of exact
rationals) and the generic algorithm (by integer arithmetic on FP32 bits) need; neither asks for its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RecipeError


@dataclass(frozen=True)
class Codec:
    """One number format of `bits` bits.

    `dtype` is the field's name for it ("float8_e4m3fn"), shared by torch, JAX, ml_dtypes and safetensors'
    table; it is None where no framework has a dtype of one code per item.
    """

    name: str
    bits: int
    dtype: str | None
    source: str

    @property
    def max(self) -> float:
        """Largest finite value a cast writes; input beyond it saturates."""
        raise RecipeError(f"codec {self.name!r} does not declare its largest value")


@dataclass(frozen=True)
class Minifloat(Codec):
    """Sign, `exponent_bits`, `mantissa_bits`: value (-1)^s * 2^(e - bias) * 1.m, subnormal where e == 0.

    `nan` is the code written for NaN and `inf` the code of +Inf, each None where the format has none.
    With `inf`, every magnitude above it is a NaN (IEEE style); without, only `nan` itself is ("fn" style).
    `scale_min` is the smallest scale written for a nonzero block; 0.0 where such a block may underflow to scale 0.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    nan: int | None = None
    inf: int | None = None
    scale_min: float = 0.0

    @property
    def max(self) -> float:
        return self.largest

    @property
    def scale_max(self) -> float:
        """Largest scale written: 2^126 at most, so that its FP32 reciprocal is a normal number."""
        return min(self.largest, 2.0**126)


@dataclass(frozen=True)
class PowerOfTwo(Codec):
    """An exponent alone: code c is 2^(c - bias), and `nan` is NaN. No sign, no zero."""

    bias: int
    nan: int

    @property
    def max(self) -> float:
        return 2.0 ** (self.nan - 1 - self.bias)


@dataclass(frozen=True)
class Integer(Codec):
    """Two's complement if `signed`, else unsigned.

    A signed codec holds `-2^(bits-1)` too; `max`, which scales are computed from, is the positive end.
    """

    signed: bool

    @property
    def max(self) -> float:
        return float(self.high)

    @property
    def high(self) -> int:
        return 2 ** (self.bits - self.signed) - 1

    @property
    def low(self) -> int:
        return -(self.high + 1) if self.signed else 0


_OCP8 = "OCP 8-bit Floating Point Specification (OFP8) v1.0"
_MX = "OCP Microscaling Formats (MX) Specification v1.0"
_IEEE = "IEEE 754-2019"

E4M3 = Minifloat("E4M3", 8, "float8_e4m3fn", f"{_OCP8}, section 5", 4, 3, 7, 448.0, nan=0x7F)
E5M2 = Minifloat("E5M2", 8, "float8_e5m2", f"{_OCP8}, section 5", 5, 2, 15, 57344.0, nan=0x7F, inf=0x7C)
E2M1 = Minifloat("E2M1", 4, None, f"{_MX}, section 5.3.3", 2, 1, 1, 6.0)
E8M0 = PowerOfTwo("E8M0", 8, "float8_e8m0fnu", f"{_MX}, section 5.4.1", 127, nan=255)
INT4 = Integer("INT4", 4, None, "two's complement", True)
UINT4 = Integer("UINT4", 4, None, "unsigned binary", False)
F16 = Minifloat(
    "F16", 16, "float16", f"{_IEEE}, binary16", 5, 10, 15, 65504.0, nan=0x7E00, inf=0x7C00, scale_min=2.0**-24
)
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

CODECS: tuple[Codec, ...] = (E4M3, E5M2, E2M1, E8M0, INT4, UINT4, F32, F16, BF16)
