"""FP32 numbers and their bits, and the rounding of a significand in integer arithmetic."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arrays.ops import Array, Ops

#: Bit masks of FP32: all bits except the sign, the mantissa field, the smallest normal number (also the implicit bit), and Inf.
MAGNITUDE = 0x7FFFFFFF
MANTISSA = 0x007FFFFF
NORMAL = 0x00800000
F32_INF = 0x7F800000
_F32_NAN = 0x7FC00000


def f32(value: float) -> float:
    """The FP32 number nearest to `value`."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def next_f32(value: float) -> float:
    """The FP32 number just above the finite FP32 number `value`."""
    u = struct.unpack("<i", struct.pack("<f", value))[0]
    if value == 0:
        u = 1
    else:
        u += 1 if value > 0 else -1
    return struct.unpack("<f", struct.pack("<i", u))[0]


def f32_bits(value: float) -> int:
    """Bit pattern of the FP32 number nearest to `value`; the quiet NaN for any NaN."""
    return _F32_NAN if math.isnan(value) else struct.unpack("<I", struct.pack("<f", value))[0]


def significand(ops: Ops, magnitude: Array) -> Array:
    """24-bit significand of FP32 magnitude bits; 0 for FP32 subnormals, which are treated as zero."""
    return ops.where(magnitude < NORMAL, 0, (magnitude & MANTISSA) | NORMAL)


def round_shift(ops: Ops, m: Array, shift: Array, word: Array | None) -> Array:
    """m / 2^shift rounded to an integer, for shift >= 1 and 0 <= m <= 2^31 - 2^min(shift, 30).

    Nearest, ties to even; or stochastic: rounds up where the fraction's first 30 bits plus the top 30 of `word` carry.
    """
    cut = ops.minimum(shift, 30)
    m = m >> ops.minimum(shift - cut, 31)
    one = cut * 0 + 1
    if word is None:
        return (m + (one << (cut - 1)) - 1 + ((m >> cut) & 1)) >> cut
    return (m + ((word >> (32 - cut)) & ((one << cut) - 1))) >> cut
