"""Scales of one level, computed from the amax of blocks."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.ops import NUMPY, Array
from ...codecs import Minifloat, PowerOfTwo
from ...fp32 import F32_INF, NORMAL, f32_bits
from ...recipes import ScalingRecipe
from ...rules import Exponent, Linear, Search
from .codes import MODEST, scale_writer
from .workspace import F4, I4, U1, U2, U4, UNIT

if TYPE_CHECKING:
    from .codes import Microkernels


#: Between these powers of two, scales and amax cause neither FP32 subnormals nor overflow in computing codes.
_SMALL, LARGE = 2.0**-60, 2.0**100
#: Storage dtypes of the scale codecs that `rounded` knows.
_ROUNDED = ("float32", "float16", "bfloat16", "uint16")
#: Counts up to which Python's min and max are faster, and up to which codes are computed in the fewest calls.
_LISTED, _FEW = 32, 64


class Scales:
    """Scales of one level of a recipe, from 1-D uint32 `amax`: (stored, inverse), or None where numbers are not normal.

    `inverse` is fl(1 / scale), 0 where the scale is not usable. `fast_path` supports amax that leads to normal numbers all the
    way; `slow_path` supports any, by the methods of codecs and rules.
    """

    def __init__(self, recipe: ScalingRecipe, level: int, microkernels: Microkernels) -> None:
        fmt = recipe.format
        self.element, self.codec, self.rule = fmt.element, fmt.levels[level].codec, recipe.rules[level]
        if isinstance(self.rule, Search):  # `Searching` goes on from plain scales
            self.rule = self.rule.plain(self.codec)
        self.qmax = fmt.qmax(fmt.levels[level])
        self._divisor = F4(self.qmax)
        self.storage = NUMPY.storage(self.codec)
        #: Values of all codes, where the level has 8-bit scales, possibly under a global scale.
        self.values: Array | None = None
        self._form: Any = None
        low, high, codec, rule = _SMALL, LARGE, self.codec, self.rule
        if type(rule) is Linear and rule.margin == 0 and type(codec) is Minifloat:
            if codec.scale_min == 0.0 and (writer := scale_writer(codec)) is not None:
                low, self._form, self.writer = 0.0, self._linear8, writer
                self._compiled = microkernels.scales
                self.values = np.array(codec.table, U4).view(F4)
                self.divisors = np.where(self.values > 0, self.values, F4(np.inf))
                self.inverses = codec.divide(NUMPY, np.ones(256, F4), np.arange(256, dtype=U1))[0]
            elif level == 0 and codec.bits in (16, 32):
                low, high = max(low, codec.scale_min * self.qmax), min(high, codec.scale_max * self.qmax)
                self._form = self._linear
        elif type(rule) is Exponent and level == 0 and self._power_of_two():
            self._carry = self._carried(rule)
            self._reciprocals = ((254 - np.minimum(np.arange(256, dtype=I4), 254)) << 23).view(F4)
            self._form = self._exponent
        if not 1 / MODEST <= self.qmax <= MODEST:
            self._form = None
        self._low, self.high = f32_bits(low), f32_bits(high)

    @property
    def in_bytes(self) -> bool:
        """Whether `fast_path` writes scales of one byte by `writer`."""
        return self._form == self._linear8

    def _power_of_two(self) -> bool:
        c, name = self.codec, self.rule.name
        rule = name in ("rceil", "floor") or (name == "even" and hasattr(self.element, "mantissa_bits"))
        return rule and ((type(c) is PowerOfTwo and c.bias == 127) or (type(c) is Minifloat and c.bits == 32))

    def _carried(self, rule: Exponent) -> Any:
        """The integer added to amax's bits so that their exponent field is the scale's (for normal numbers)."""
        cap = f32_bits(self.qmax)
        return I4(rule.carry(self.element, cap) - (((cap >> 23) - 127) << 23))

    def fast_path(self, amax: Array, global_scale: GlobalScale | None) -> tuple[Array, Array] | None:
        if self._form is None or (global_scale is not None and global_scale.inverses is None):
            return None
        if amax.size <= _LISTED:
            ordered: list[int] = sorted(amax.tolist())
            least, most = ordered[0], ordered[-1]
            if zeros := least == 0:
                least = next(filter(None, ordered), self._low)
        elif not self._low:
            least, most, zeros = 0, int(np.maximum.reduce(amax.view(I4))), False
        else:
            least, most = int(np.minimum.reduce(amax)), int(np.maximum.reduce(amax.view(I4)))
            if zeros := least == 0:
                least = int(np.minimum.reduce(amax - U4(1))) + 1  # of the nonzero ones: 0 - 1 wraps to the largest
        return self._form(amax, zeros, global_scale) if least >= self._low and most <= self.high else None

    def _linear(self, amax: Array, zeros: bool, global_scale: GlobalScale | None) -> tuple[Array, Array]:
        t = np.divide(amax.view(F4), self._divisor)
        if zeros:
            np.copyto(t, UNIT, where=amax == 0)
        stored, scale = self.rounded(t)
        return stored, np.divide(UNIT, scale)

    def rounded(self, t: Array) -> tuple[Array, Array]:
        """(stored, as FP32) of finite numbers in a codec of 16 or 32 bits, in whose range they are."""
        if self.codec.bits == 32:
            return t, t
        if self.storage == "float16":
            stored = t.astype(np.float16)
            return stored, stored.astype(F4)
        u = t.view(U4)
        u = (u + ((u >> 16) & 1) + 0x7FFF) & 0xFFFF0000
        return (u >> 16).astype(U2), u.view(F4)

    def nearest(self, low: Array) -> tuple[Array, Array]:
        """(stored, as FP32) of finite numbers of either sign, such as biases."""
        if self.storage in _ROUNDED and np.abs(low).max() <= self.codec.max:
            return self.rounded(low)
        stored = NUMPY.store(self.codec.encode(NUMPY, low), self.storage)
        return stored, self.codec.read(NUMPY, stored)

    def inverse_table(self, global_scale: GlobalScale | None) -> Array:
        """The inverse of each code of 8 bits that `fast_path` may write, FP32."""
        if self.values is None:
            return self._reciprocals
        return self.inverses if global_scale is None else global_scale.inverses

    def _linear8(self, amax: Array, zeros: bool, global_scale: GlobalScale | None) -> tuple[Array, Array]:
        inverses = self.inverses if global_scale is None else global_scale.inverses
        if self._compiled is not None:
            stored, inverse = np.empty(amax.size, U1), np.empty(amax.size, F4)
            by = 1.0 if global_scale is None else float(global_scale.value)
            self._compiled(self.writer, amax, self.qmax, inverses, stored, inverse, by)
            return stored, inverse
        t = np.divide(amax.view(F4), self._divisor)
        if global_scale is not None:
            np.divide(t, global_scale.value, out=t)
        stored = self.writer.few(t) if t.size <= _FEW else self.writer.small(t)
        return stored, inverses.take(stored)

    def _exponent(self, amax: Array, zeros: bool, global_scale: GlobalScale | None) -> tuple[Array, Array]:
        n = (amax.view(I4) + self._carry) >> 23
        if self.codec.bits == 8:
            if zeros:
                np.copyto(n, 0, where=amax == 0)
            stored = n.astype(U1)
            return stored, self._reciprocals.take(stored)
        if zeros:
            np.copyto(n, 127, where=amax == 0)
        return (n << 23).view(F4), ((254 - n) << 23).view(F4)

    def slow_path(
        self, amax: Array, supplied: Array | None, global_scale: GlobalScale | None, own_codes: bool = False
    ) -> tuple[Array, Array]:
        """Like `fast_path`, for any amax. `supplied`: accepted int32 codes. With `own_codes`, NaN and Inf mark no block."""
        a = amax.view(I4)
        faulty = a >= F32_INF
        codes, statistic = supplied, None
        g = None if global_scale is None else global_scale.value
        if codes is None:
            statistic = np.where((a >= NORMAL) & ~faulty, a, 0).view(F4)
            codes = self.rule.scale(NUMPY, statistic, self.codec, self.element, self.qmax, g)
            codes = np.where(statistic == 0, self.codec.zero_scale, codes)
        if not own_codes:
            codes = np.where(faulty, self.codec.need_nan(), codes)
        stored = NUMPY.store(codes.astype(I4, copy=False), self.storage)
        one = np.ones(stored.shape, F4)
        return stored, self.rule.scaled(NUMPY, one, stored, self.codec, g, statistic, self.qmax)[0]

    def read(self, stored: Array, inverse: Array) -> Array:
        """The scales, 0 where one is not usable."""
        return np.where(inverse == 0, F4(0), self.codec.read(NUMPY, stored.reshape(-1)))

    def subnormal(self, stored: Array) -> Array:
        """Where the inverse is an FP32 subnormal, which must not be a factor"""
        return stored == 254 if type(self.codec) is PowerOfTwo else np.zeros(stored.shape, np.bool_)


class GlobalScale:
    """The FP32 global scale of a two-level format, with values derived from it for all blocks.

    value: the multiplier. stored: the number that stands for it in the tensor.
    """

    def __init__(self, value: Array, scales: Scales | None, stored: Array) -> None:
        self.value, self.stored = value, stored
        #: `inverse` of every code of the fine level; None where some might not be normal.
        self.inverses: Any = None
        if scales is not None and scales.values is not None and _SMALL <= value <= 1 / _SMALL:
            self.inverses = np.divide(UNIT, scales.divisors * value)
