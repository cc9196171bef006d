"""How kernels round FP32 numbers to codes: the constants that follow from a codec, without arrays.

FP32 addition rounds to nearest, ties to even. Where the last bit of a sum weighs as much as the spacing of codes, the addition
rounds to a code, which is in the low bits of the sum. Kernels of every framework compute this in their own operations, from the
constants here. They first replace NaN, and clamp what `limit` says; Inf is clamped like any other number.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from .codecs import F32, Codec, Integer, Lookup, Minifloat
from .fp32 import NORMAL, f32_bits
from .locks import cached_property

#: A non-negative number below 2^23 is rounded to an integer by adding this, and is then in the low bits of the sum.
WHOLE = 2.0**23
#: A number of either sign, of a magnitude below 2^22, is rounded to an integer by adding this. The integer is then in the low
#: bits of the sum, in two's complement, since this is 2^22 more than `WHOLE`.
ROUNDER = 1.5 * 2.0**23
#: The finest spacing of codes at zero. Products below 2^-126, which hardware may flush to zero, then round to zero anyway.
_FINEST = 2.0**-24


@dataclass(frozen=True)
class FloatForm:
    """A minifloat with p = `mantissa_bits`. Below, a is the bits of |y|, at most `largest`.

    By addition, if p >= 1. In the binade [b, 2b) codes are 2^-p b apart, and so are FP32 numbers from 2^(23-p) b on: adding
    that to |y| rounds it to a multiple of the spacing. Codes below the smallest normal number have the spacing of its binade,
    so b is at least that number. The bits of b are those of a without the mantissa. With e = max(these, `floor`) + `lift`, the
    code without its sign is the low byte of bits(|y| + float(e)) + (e >> `shift`): the sum counts the spacings in |y|, of which
    b has 2^p, and e >> `shift` has the exponent field in its place in a code. The low byte of `lift` subtracts what is too much
    in that field. It is even, so that ties still go to even codes.

    By integers. From the smallest normal number on, the code is a - `rebase`, divided by 2^`shift` and rounded. Below it,
    |y| + WHOLE * `step` counts the steps.
    """

    codec: Minifloat

    @cached_property
    def shift(self) -> int:
        """Bits of FP32's mantissa that the codec does not have."""
        return 23 - self.codec.mantissa_bits

    @cached_property
    def step(self) -> float:
        """The smallest positive value: the spacing of codes up to twice the smallest normal number."""
        return math.ldexp(1.0, 1 - self.codec.bias - self.codec.mantissa_bits)

    @cached_property
    def floor(self) -> int:
        """FP32 bits of the smallest normal number."""
        return (128 - self.codec.bias) << 23

    @cached_property
    def lift(self) -> int:
        """What turns the bits of b into those of 2^(23-p) b, and completes the code (see above)."""
        shift = self.shift
        return (shift << 23) + (-(((self.floor >> 23) + shift) << self.codec.mantissa_bits) & 0xFF)

    @cached_property
    def rebase(self) -> int:
        """FP32 bits of the smallest normal number, less one in the exponent field: its code has a field of 1."""
        return self.floor - NORMAL

    @cached_property
    def largest(self) -> int:
        """FP32 bits of the largest number."""
        return f32_bits(self.codec.max)

    @cached_property
    def limit(self) -> float:
        """Smaller |y| are rounded to at most the largest number; others have to be clamped."""
        return self.codec.max + math.ldexp(1.0, math.frexp(self.codec.max)[1] - 2 - self.codec.mantissa_bits)

    @cached_property
    def sign(self) -> int:
        """The place of the sign in a code."""
        return self.codec.bits - 1


@dataclass(frozen=True)
class IntegerForm:
    """An integer codec: of y, from `low` to `high`, the code is the low bits of y + `magic`, under `mask`.

    The last bit of the sum weighs one `unit`.
    """

    codec: Integer

    @cached_property
    def unit(self) -> float:
        """The value of the code 1."""
        return math.ldexp(1.0, -self.codec.fraction_bits)

    @cached_property
    def magic(self) -> float:
        """What is added to numbers."""
        return ROUNDER * self.unit

    @cached_property
    def low(self) -> float:
        """The smallest value."""
        return self.codec.low * self.unit

    @cached_property
    def high(self) -> float:
        """The largest value."""
        return self.codec.high * self.unit

    @cached_property
    def limit(self) -> float:
        """Smaller |y| are rounded to at most `high`, and to at least `low` in signed codecs; others have to be clamped."""
        return self.high + self.unit / 2

    @cached_property
    def mask(self) -> int:
        """The bits of a code."""
        return (1 << self.codec.bits) - 1


@dataclass(frozen=True)
class TableForm:
    """A table: the position of y, in ascending order, is the number of `starts` that are at most y.

    The codec's `order` has the code of each position. All numbers are rounded to one of them: none has to be clamped.
    """

    codec: Lookup
    limit = math.inf

    @cached_property
    def starts(self) -> tuple[float, ...]:
        """The smallest FP32 number of each position but the first (`Lookup.thresholds`)."""
        return tuple(struct.unpack("<f", struct.pack("<I", bits))[0] for bits in self.codec.thresholds[1:])

    @cached_property
    def zero(self) -> int:
        """The code of 0."""
        return self.codec.order[sum(start <= 0 for start in self.starts)]


def magnitudes_of(codec: Codec) -> FloatForm | None:
    """The form of a minifloat's codes without their sign, or None.

    In "fnuz" style (`Minifloat.fnuz`) the code 0 gets no sign; `form_of` is for kernels that do not know this.
    """
    if type(codec) is not Minifloat or codec.bits > 8 or not 1 <= codec.mantissa_bits <= 5:
        return None
    form = FloatForm(codec)
    return form if form.step >= _FINEST and codec.max * 2.0**form.shift <= F32.max else None


def form_of(codec: Codec) -> FloatForm | IntegerForm | TableForm | None:
    """The form that rounds to the codes of an element codec as `Codec.encode` does, of all FP32 numbers; or None.

    Minifloats have at most 8 bits, 1 to 5 mantissa bits, and are not in "fnuz" style. Midpoints of these are BF16 numbers with
    a last bit of 0, so that numbers may also be cut to BF16 first, with a last bit of 1 in place of what is cut off.
    """
    if type(codec) is Minifloat:
        return None if codec.fnuz else magnitudes_of(codec)
    if type(codec) is Integer:
        form = IntegerForm(codec)
        return form if form.unit >= _FINEST and form.magic <= F32.max else None
    if type(codec) is Lookup and 0.0 in codec.values and min(abs(value) for value in codec.values if value) >= _FINEST:
        return TableForm(codec)
    return None
