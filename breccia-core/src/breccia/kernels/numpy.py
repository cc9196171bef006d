"""NumPy kernels: the bytes of the generic algorithm, from few passes over pieces that stay in cache.

An array, K last, is cut into chunks of whole blocks, and each chunk runs through the same steps in buffers its thread
keeps: magnitudes, amax per block, scales, one multiplication per element, codes by an FP32 addition that rounds in
hardware, packing. A recipe is served by what it declares. Codecs, rules and offsets that have no fast form here go
through `reference` chunk by chunk.

Blocks are (m, k): k elements along K by m rows. A block larger than a chunk takes two passes, amax first.
"""

# NumPy's annotations of functions over `Any` are unknown to pyright; arrays here are `Any` by design. What the checks of
# an argument are is the generic algorithm's affair, so its own are called.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .. import calls
from ..codecs import F32, F32_INF, MAGNITUDE, NORMAL, Codec, Integer, Lookup, Minifloat, PowerOfTwo, f32_bits
from ..formats import TENSOR, Block, Format
from ..frameworks import dtype_name, output_dtype
from ..grids import packed_length, packing
from ..layouts import Layout, Shape
from ..ops import NUMPY, Array
from ..options import DEFAULT, CastOptions
from ..recipes import ScalingRecipe
from ..rules import Divide, Exponent, Inverse, Linear, Rule
from ..tensor import PARTS, ScaledTensor, contraction_axis
from ..threads import get_num_threads, spread
from . import checks, reference
from .checks import check_matmul
from .plans import LAYOUTS, alone, k_last, scattered

if TYPE_CHECKING:
    from ..dispatch import Call

#: Elements of a chunk. One thread wants its buffers in the second-level cache; several meet at the interpreter's lock between
#: NumPy's calls, so theirs are long.
CHUNK, ALONE = 1 << 18, 1 << 16
#: The same for chunks that the generic algorithm takes, which needs some 100 bytes an element.
GENERIC = 1 << 15
#: Threads beyond which that lock costs more than they bring (16 cores: 4 as fast as 2 or faster, 8 slower than 1).
MOST_THREADS = 4
#: Bytes that the buffers of all threads may take together, and what one element takes of them.
_BUFFERS, _PER_ELEMENT = 12 << 20, 24
#: Bytes of FP32 that `matmul` decodes at a time.
TILE = 8 << 20

_T = TypeVar("_T")
_U1, _U2, _U4, _U8, _I4, _F4 = np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.float32
_F32 = np.dtype(_F4)
_EXPONENT = F32_INF
_MAGNITUDE = _U4(MAGNITUDE)
_ONE, _UNIT = np.ones(1, _F4), _F4(1.0)
#: Scales and amax within these powers of two meet neither an FP32 subnormal nor an overflow on the way to codes.
_SMALL, _LARGE = 2.0**-60, 2.0**100
#: Elements below 2^-126 count as zero. Under scales that are not small they come to less than 2^-26 in units of the scale, and
#: every codec rounds that to zero which has no number nearer to zero than this.
_FINEST = 2.0**-24
#: Largest codes and capacities for which that holds; below, their reciprocals'.
_MODEST = 2.0**20
#: Entries of a store of what was derived once (plans, layouts of each, tables).
_REMEMBERED = 256
#: Bytes of codes that are decoded at once, on one thread.
_SHORT = 1 << 16
#: Scales whose least and largest Python finds faster; numbers whose codes are found in the fewest calls.
_LISTED, _FEW = 32, 64
#: Elements of arrays whose cost is that of NumPy's calls.
_SMALL_ARRAY = 1 << 13
#: Elements from which a table of pairs of bytes, 512 KB, is worth being made.
_PAIRED = 1 << 20


# ------------------------------------------------------------------------------------------------ buffers


class _Buffers:
    """Work space of one thread for chunks of up to `size` elements, aligned for the widest vectors."""

    def __init__(self, size: int) -> None:
        def aligned(count: int, dtype: Any) -> Array:
            raw = np.empty(count * np.dtype(dtype).itemsize + 64, _U1)
            start = -raw.ctypes.data % 64
            return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)

        size = -(-size // 16) * 16
        self.size = size
        self.source, self.scaled, self.a, self.b, self._level = (aligned(size, _U4) for _ in range(5))
        self.codes, self.sign = aligned(size, _U1), aligned(size, _U1)
        self._value = -1

    def level(self, value: int, n: int) -> Array:
        """`n` times the uint32 `value`: NumPy's maximum is three times faster of two arrays than of one and a constant."""
        if value != self._value:
            self._level.fill(value)
            self._value = value
        return self._level[:n]


_kept = threading.local()


def _buffers(size: int) -> _Buffers:
    """This thread's buffers, kept from call to call."""
    found: _Buffers | None = getattr(_kept, "buffers", None)
    if found is None or found.size < size:
        found = _kept.buffers = _Buffers(size)
    return found


def _threads() -> int:
    return min(get_num_threads(), MOST_THREADS)


def _chunk() -> int:
    """Elements of a chunk."""
    threads = _threads()
    return min(CHUNK, ALONE) if threads == 1 else min(CHUNK, _BUFFERS // (_PER_ELEMENT * threads))


# ------------------------------------------------------------------------------------------------ codes

#: write(source, inverse, k, codes): codes of FP32 numbers, NaN aside, times the number of their block of `k`, clamped, into as
#: many bytes; zeros where that number is 0. All are contiguous and 1-D.
ScaledCodes = Callable[[Array, Array, int, Array], None]


class FloatCodes:
    """Codes of a minifloat with p = `mantissa_bits` >= 1, by adding 2^(23-p) times the binade of |y|.

    The sum's last bit is worth the spacing of codes in that binade, so that the hardware rounds to nearest, ties to even.
    The binade moved down to bit p is the code's exponent field; `lift` holds what makes both sum up to the code.
    """

    #: Code of +0.
    zero = 0

    def __init__(self, codec: Minifloat) -> None:
        p, first = codec.mantissa_bits, 128 - codec.bias
        self.codec = codec
        self.shift = 23 - p
        self.floor = first << 23
        self.lift = (self.shift << 23) + (-((first + self.shift) << p) & 0xFF)
        self.largest = f32_bits(codec.max)
        self.sign = codec.bits - 1
        #: |y| below this rounds to no more than the largest code.
        self.limit = codec.max + math.ldexp(1.0, math.floor(math.log2(codec.max)) - p - 1)

    def write(self, work: _Buffers, n: int, codes: Array, clamp: bool) -> None:
        """uint8 `codes` of the first `n` numbers in `work.scaled`; |y| above `limit` needs `clamp`."""
        u, a, e = work.scaled[:n], work.a[:n], work.b[:n]
        self._magnitudes(u, a, e, work.level(self.floor, n), codes, clamp)
        sign = work.sign[:n]
        np.less(u.view(_I4), 0, out=sign.view(np.bool_))
        words = work.sign[: -(-n // 8) * 8].view(_U8)
        np.left_shift(words, self.sign, out=words)
        np.bitwise_or(codes, sign, out=codes)

    @cached_property
    def by_half(self) -> Array:
        """Codes by the upper 16 bits of an FP32 number, the last of them set where the lower half is not zero.

        That bit stands for all numbers strictly between its neighbours. Midpoints of codes need one bit more than a mantissa,
        so none lies there.
        """
        halves = np.arange(1 << 16, dtype=_U4) << 16
        halves[[F32_INF >> 16, (F32_INF >> 16) + (1 << 15)]] -= 1 << 16  # overflow saturates
        return self.codec.encode(NUMPY, halves.view(_F4)).astype(_U1)

    def few(self, y: Array) -> Array:
        """Codes of a few numbers, in few calls; what overflowed to Inf saturates."""
        halves = y.view(_U2)
        return self.by_half.take(halves[..., 1::2] | (halves[..., ::2] != 0))

    def small(self, y: Array) -> Array:
        """Codes of some non-negative numbers, clamped."""
        u, codes = y.view(_U4), np.empty(y.shape, _U1)
        self._magnitudes(u, np.empty_like(u), np.empty_like(u), self.floor, codes, True)
        return codes

    def _magnitudes(self, u: Array, a: Array, e: Array, floor: Any, codes: Array, clamp: bool) -> None:
        np.bitwise_and(u, MAGNITUDE, out=a)
        if clamp:
            np.minimum(a, self.largest, out=a)
        np.bitwise_and(a, _EXPONENT, out=e)
        np.maximum(e, floor, out=e)
        np.add(e, self.lift, out=e)
        y = a.view(_F4)
        np.add(y, e.view(_F4), out=y)
        np.right_shift(e, self.shift, out=e)
        np.add(a, e, out=a)
        np.copyto(codes, a, casting="unsafe")


class IntegerCodes:
    """Codes of an integer codec: the last bits of y + 1.5 * 2^23 (of units), which the addition rounds."""

    #: Code of +0.
    zero = 0

    def __init__(self, codec: Integer) -> None:
        unit = math.ldexp(1.0, -codec.fraction_bits)
        self.magic = _F4(1.5 * 2.0**23 * unit)
        self.low, self.high = codec.low * unit, codec.high * unit
        self.signed, self.mask = codec.signed, (1 << codec.bits) - 1
        self.limit = self.high + unit / 2

    def write(self, work: _Buffers, n: int, codes: Array, clamp: bool) -> None:
        """As `FloatCodes.write`."""
        y = work.scaled[:n].view(_F4)
        if clamp:
            np.minimum(y, self.high, out=y)
        if clamp or not self.signed:
            np.maximum(y, self.low, out=y)
        np.add(y, self.magic, out=y)
        np.copyto(codes, work.scaled[:n], casting="unsafe")
        if self.mask != 0xFF:
            np.bitwise_and(codes, self.mask, out=codes)

    def few(self, y: Array) -> Array:
        """As `FloatCodes.few`."""
        codes = (np.maximum(np.minimum(y, self.high), self.low) + self.magic).view(_U4).astype(_U1)
        return codes if self.mask == 0xFF else codes & self.mask


class TableCodes:
    """Codes of a table of 16 numbers: the place of a number is how many thresholds it reaches."""

    limit = math.inf

    def __init__(self, codec: Lookup) -> None:
        self.starts: Array = np.array(codec.thresholds[1:], _U4).view(_F4)
        self.order: Array = np.array(codec.order, _U1)
        self.zero = int(codec.encode(NUMPY, np.zeros(1, _F4))[0])

    def write(self, work: _Buffers, n: int, codes: Array, clamp: bool) -> None:
        """As `FloatCodes.write`."""
        y, reached = work.scaled[:n].view(_F4), work.sign[:n]
        codes.fill(0)
        for start in self.starts:
            np.greater_equal(y, start, out=reached.view(np.bool_))
            np.add(codes, reached, out=codes)
        np.copyto(codes, self.order.take(codes))

    def few(self, y: Array) -> Array:
        """As `FloatCodes.few`."""
        return self.order.take(self.starts.searchsorted(y, side="right"))


_Codes = FloatCodes | IntegerCodes | TableCodes


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps of `cast` that somebody else does faster than NumPy, with the same bytes; what is None is done here.

    amax(source, k, amax): bits of the largest magnitude of each `k` FP32 numbers into uint32; contiguous and 1-D.
    pairs(codes, data): two 4-bit codes, one a byte, into each byte, the first in its low half; contiguous.
    scaled: what writes codes as these do here, from numbers still to be scaled; None where there is no such.
    values(data, table, scale, k, bits, values): FP32 numbers of codes of 4 or 8 bits times the FP32 scale of each `k`.
    """

    amax: Callable[[Array, int, Array], None] | None = None
    pairs: Callable[[Array, Array], None] | None = None
    scaled: Callable[[_Codes], ScaledCodes | None] | None = None
    values: Callable[[Array, Array, Array, int, int, Array], None] | None = None


#: NumPy alone.
PLAIN = Steps()


@lru_cache(maxsize=64)
def _code_writer(codec: Codec) -> _Codes | None:
    """The fast form of an element codec, or None."""
    if codec.bits not in (4, 6, 8) or (type(codec) is Minifloat and not codec.signed):
        return None
    if type(codec) is Lookup and codec.bits == 4 and min(abs(v) for v in codec.values if v) >= _FINEST:
        return TableCodes(codec)
    if type(codec) is Integer and math.ldexp(1.0, -codec.fraction_bits) >= _FINEST:
        return IntegerCodes(codec)
    if type(codec) is Minifloat and 1 <= codec.mantissa_bits <= 5 and abs(codec.bias) <= 16 and codec.max <= _MODEST:
        return FloatCodes(codec)
    return None


def _pack(codes: Array, bits: int, target: Array, scratch: Array) -> None:
    """uint8 codes (rows, columns), columns in whole groups, to the bytes of `target`, which may want fewer of each."""
    rows, columns = target.shape
    if bits == 8:
        np.copyto(target, codes[:rows, :columns])
        return
    flat = codes.reshape(-1)
    words = scratch[: flat.size].view(_U2)
    np.right_shift(flat.view(_U2), 8 - bits, out=words)
    if bits == 4:
        np.bitwise_or(words, flat.view(_U2), out=words)
        np.copyto(target, words.reshape(len(codes), -1)[:rows, :columns], casting="unsafe")
        return
    pairs = (words & 0xFC0) | (flat.view(_U2) & 0x3F)
    quads = pairs.view(_U4)
    quads = (quads & 0xFFF) | ((quads >> 4) & 0xFFF000)
    groups = quads.view(_U1).reshape(len(codes), -1, 4)
    np.copyto(target.reshape(rows, -1, 3), groups[:rows, : columns // 3, :3])


def _times(values: Array, per_block: Array, k: int, out: Array) -> None:
    """`values` times the number of their block of `k`, all 1-D, into `out`."""
    if k >= 32:
        np.multiply(values.reshape(-1, k), per_block[:, None], out=out.reshape(-1, k))
    else:  # NumPy's loop over a short block costs more than writing the numbers out
        np.multiply(values, per_block.repeat(k), out=out)


def _block_amax(work: _Buffers, n: int, k: int) -> Array:
    """Largest of each `k` of the first `n` uint32 in `work.a`, which is used up with `work.b`."""
    a, b = work.a, work.b
    if n == k:
        return a[:n].max(keepdims=True)
    if k > 16 or k & (k - 1):
        return np.maximum.reduceat(a[:n], _starts(n, k))
    step = k // 2
    while step:
        np.maximum(a[: n - step], a[step:n], out=b[: n - step])
        a, b, step = b, a, step // 2
    return a[:n:k].copy()


@lru_cache(maxsize=64)
def _starts(n: int, k: int) -> Array:
    return np.arange(0, n, k)


# ------------------------------------------------------------------------------------------------ scales


class _Scales:
    """Scales of one level of a recipe, from uint32 `amax`, 1-D: (stored, inverse), or None where that is not ordinary.

    `inverse` is fl(1 / scale), 0 where the scale is not usable. `quick` serves amax that leads to normal numbers all the
    way; `careful` serves anything, in the words of codecs and rules.
    """

    def __init__(self, recipe: ScalingRecipe, level: int, steps: Steps) -> None:
        fmt = recipe.format
        self.element, self.codec, self.rule = fmt.element, fmt.levels[level].codec, recipe.rules[level]
        self.capacity = fmt.capacity(fmt.levels[level])
        self._divisor = _F4(self.capacity)
        self.storage = NUMPY.storage(self.codec)
        #: Values of all codes, where the level has 8-bit scales that may lie under a coarser one.
        self.values: Array | None = None
        self._form: Any = None
        low, high, codec, rule = _SMALL, _LARGE, self.codec, self.rule
        if type(rule) is Linear and rule.margin == 0 and type(codec) is Minifloat:
            if codec.bits == 8 and codec.scale_min == 0.0 and isinstance(writer := _code_writer(codec), FloatCodes):
                low, self._form, self._writer = 0.0, self._linear8, writer
                self._written = None if steps.scaled is None else steps.scaled(writer)
                self.values = np.array(codec.table, _U4).view(_F4)
                self.divisors = np.where(self.values > 0, self.values, _F4(np.inf))
                self._inverses = codec.divide(NUMPY, np.ones(256, _F4), np.arange(256, dtype=_U1))[0]
            elif level == 0 and codec.bits in (16, 32):
                low, high = max(low, codec.scale_min * self.capacity), min(high, codec.scale_max * self.capacity)
                self._form = self._linear
        elif type(rule) is Exponent and level == 0 and self._power_of_two():
            self._carry = self._carried(rule)
            self._reciprocals = ((254 - np.minimum(np.arange(256, dtype=_I4), 254)) << 23).view(_F4)
            self._form = self._exponent
        if not 1 / _MODEST <= self.capacity <= _MODEST:
            self._form = None
        self._low, self._high = f32_bits(low), f32_bits(high)

    def _power_of_two(self) -> bool:
        c, name = self.codec, self.rule.name
        rule = name in ("rceil", "floor") or (name == "even" and hasattr(self.element, "mantissa_bits"))
        return rule and ((type(c) is PowerOfTwo and c.bias == 127) or (type(c) is Minifloat and c.bits == 32))

    def _carried(self, rule: Exponent) -> Any:
        """What added to amax's bits makes the scale's exponent field of theirs (of normal numbers)."""
        cap = f32_bits(self.capacity)
        return _I4(rule.carry(self.element, cap) - (((cap >> 23) - 127) << 23))

    def quick(self, amax: Array, coarse: _Coarse | None) -> tuple[Array, Array] | None:
        if self._form is None or (coarse is not None and coarse.inverses is None):
            return None
        if amax.size <= _LISTED:
            ordered: list[int] = sorted(amax.tolist())
            least, most = ordered[0], ordered[-1]
            if zeros := least == 0:
                least = next(filter(None, ordered), self._low)
        else:
            least, most = int(np.minimum.reduce(amax)), int(np.maximum.reduce(amax))
            if zeros := least == 0:
                least = int(np.minimum.reduce(amax - _U4(1))) + 1  # of the others: 0 - 1 wraps round to the largest
        return self._form(amax, zeros, coarse) if least >= self._low and most <= self._high else None

    def _linear(self, amax: Array, zeros: bool, coarse: _Coarse | None) -> tuple[Array, Array]:
        t = np.divide(amax.view(_F4), self._divisor)
        if zeros:
            np.copyto(t, _UNIT, where=amax == 0)
        if self.codec.bits == 32:
            return t, np.divide(_UNIT, t)
        if self.storage == "float16":
            stored = t.astype(np.float16)
            return stored, np.divide(_UNIT, stored.astype(_F4))
        u = t.view(_U4)
        u = (u + ((u >> 16) & 1) + 0x7FFF) & 0xFFFF0000
        return (u >> 16).astype(_U2), np.divide(_UNIT, u.view(_F4))

    def _linear8(self, amax: Array, zeros: bool, coarse: _Coarse | None) -> tuple[Array, Array]:
        t = np.divide(amax.view(_F4), self._divisor)
        inverses = self._inverses
        if coarse is not None:
            np.divide(t, coarse.value, out=t)
            inverses = coarse.inverses
        if self._written is not None:
            stored = np.empty(t.size, _U1)
            self._written(t, _ONE, t.size, stored)
        else:
            stored = self._writer.few(t) if t.size <= _FEW else self._writer.small(t)
        return stored, inverses.take(stored)

    def _exponent(self, amax: Array, zeros: bool, coarse: _Coarse | None) -> tuple[Array, Array]:
        n = (amax.view(_I4) + self._carry) >> 23
        if self.codec.bits == 8:
            if zeros:
                np.copyto(n, 0, where=amax == 0)
            stored = n.astype(_U1)
            return stored, self._reciprocals.take(stored)
        if zeros:
            np.copyto(n, 127, where=amax == 0)
        return (n << 23).view(_F4), ((254 - n) << 23).view(_F4)

    def careful(
        self, amax: Array, supplied: Array | None, coarse: _Coarse | None, own_codes: bool = False
    ) -> tuple[Array, Array]:
        """As `quick`, for any amax. `supplied`: int32 codes as accepted. Under `own_codes` NaN and Inf mark no block."""
        a = amax.view(_I4)
        faulty = a >= F32_INF
        codes, statistic = supplied, None
        g = None if coarse is None else coarse.value
        if codes is None:
            statistic = np.where((a >= NORMAL) & ~faulty, a, 0).view(_F4)
            codes = self.rule.scale(NUMPY, statistic, self.codec, self.element, self.capacity, g)
            codes = np.where(statistic == 0, self.codec.zero_scale, codes)
        if not own_codes:
            codes = np.where(faulty, self.codec.need_nan(), codes)
        stored = NUMPY.store(codes.astype(_I4, copy=False), self.storage)
        one = np.ones(stored.shape, _F4)
        return stored, self.rule.scaled(NUMPY, one, stored, self.codec, g, statistic, self.capacity)[0]

    def subnormal(self, stored: Array) -> Array:
        """Where is the inverse an FP32 subnormal, by which nothing is multiplied?"""
        return stored == 254 if type(self.codec) is PowerOfTwo else np.zeros(stored.shape, np.bool_)


class _Coarse:
    """The FP32 scale of a two-level format's coarse level, with what follows from it for all blocks."""

    def __init__(self, value: Array, scales: _Scales | None) -> None:
        self.value = value
        #: `inverse` of every code of the fine level; None where some might not be ordinary.
        self.inverses: Any = None
        if scales is not None and scales.values is not None and _SMALL <= value <= 1 / _SMALL:
            self.inverses = np.divide(_UNIT, scales.divisors * value)


# ------------------------------------------------------------------------------------------------ plans


class _Plan:
    """What follows from a recipe once: how its codes and scales are written fast, or that the generic algorithm does."""

    def __init__(self, recipe: ScalingRecipe, steps: Steps) -> None:
        self.recipe, self.fmt, self.steps = recipe, recipe.format, steps
        fmt, fine = self.fmt, recipe.rules[-1]
        self.count, self.bits, self.block = packing(fmt.element)[0], fmt.element.bits, fmt.scale.block
        self.storage = NUMPY.storage(fmt.element)
        coarse = fmt.global_scale
        #: Does the generic algorithm take whole tensors of it, not chunks?
        self.alien = sys.byteorder != "little"
        if coarse is not None:
            self.alien |= type(recipe.rules[0]) is not Linear or coarse.codec != F32 or fmt.scale.block == TENSOR
            self.alien |= coarse.sense != "multiplier"
        multiplies = type(fine).scaled in (Rule.scaled, Inverse.scaled)
        #: Are codes computed by division? The scales are found here, the codes by the generic algorithm.
        self.divides = type(fine).scaled is Divide.scaled
        known = fmt.offset == "none" and (multiplies or self.divides) and type(fmt.scale.codec) in (Minifloat, PowerOfTwo)
        self.codes = _code_writer(fmt.element) if known else None
        #: Codes of what is still to be scaled.
        self.scaled = None if steps.scaled is None or self.codes is None else steps.scaled(self.codes)
        self.scales = None if self.codes is None else _Scales(recipe, len(fmt.levels) - 1, steps)
        self.coarse_scales = None if coarse is None or self.alien else _Scales(recipe, 0, steps)
        self._layouts: dict[Any, Layout] = {}
        #: Has every matrix whole blocks one after the other, so that short arrays take the fewest calls?
        self.plain = known and not self.divides and not self.alien and (fmt.scale.block == TENSOR or fmt.scale.block[0] == 1)

    def short(self, x: Array) -> ScaledTensor | None:
        """`cast` of contiguous FP32 `x` of few elements, whole blocks and ordinary numbers; None where it is not that."""
        scales, writer, shape = self.scales, self.codes, x.shape
        if not self.plain or scales is None or writer is None:
            return None
        block, size, columns, steps = self.block, x.size, shape[-1], self.steps
        k = block[1] or (size if block == TENSOR else columns)
        if (block != TENSOR and columns % k) or columns % self.count or k % self.count:
            return None
        flat = x.reshape(-1)
        if steps.amax is None:
            amax = np.maximum.reduce(x.reshape(-1, k).view(_U4) & _MAGNITUDE, axis=1)
        else:
            amax = np.empty(size // k, _U4)
            steps.amax(flat, k, amax)
        global_scale = coarse = None
        if self.coarse_scales is not None:
            found = self.coarse_scales.quick(np.maximum.reduce(amax, keepdims=True), None)
            if found is None:
                return None
            global_scale = found[0].reshape(())
            coarse = _Coarse(found[0][0], scales)
        found = scales.quick(amax, coarse)
        if found is None:
            return None
        stored, inverse = found
        if self.scaled is not None:
            codes = np.empty(size, _U1)
            self.scaled(flat, inverse, k, codes)
        else:
            codes = writer.few(x.reshape(-1, k) * inverse[:, None])
            if scales.values is not None and not inverse.all():
                codes[inverse == 0] = writer.zero
        if self.bits == 8:
            data = codes.reshape(shape).view(self.storage)
        elif self.bits == 4 and steps.pairs is not None:
            data = np.empty((*shape[:-1], columns // 2), _U1)
            steps.pairs(codes, data)
        elif self.bits == 4:
            pairs = codes.reshape(*shape[:-1], -1).view(_U2)
            data = (pairs | (pairs >> 4)).astype(_U1)
        else:
            data = np.empty((size // k, k * self.bits // 8), _U1)
            _pack(codes.reshape(-1, k), self.bits, data, np.empty(size, _U1))
            data = data.reshape(*shape[:-1], -1)
        stored = stored.reshape(() if block == TENSOR else (*shape[:-1], -1))
        return ScaledTensor.assemble(data, stored, self.recipe, self.layout(shape, -1), None, global_scale)

    def layout(self, shape: Shape, axis: int) -> Layout:
        """`checks.fitted_layout`, remembered by what it depends on."""
        return _recalled(self._layouts, (axis, len(shape), shape[-2:]), checks.fitted_layout, self.recipe, shape, axis)


_plans: dict[object, _Plan] = {}


def _plan(recipe: ScalingRecipe, steps: Steps = PLAIN) -> _Plan:
    key = recipe.identity if steps is PLAIN else (recipe.identity, steps)
    return _recalled(_plans, key, _Plan, recipe, steps)


def _recalled(store: dict[Any, _T], key: Any, make: Callable[..., _T], *arguments: Any) -> _T:
    """What `store` has at `key`, made of the arguments on first use."""
    found = store.get(key)
    if found is None:
        if len(store) >= _REMEMBERED:
            store.clear()
        found = store[key] = make(*arguments)
    return found


# ------------------------------------------------------------------------------------------------ pieces


def _sides(block: Block, shape: Shape) -> tuple[int, int]:
    """(m, k) of `block` over a K-last shape of at least two axes; m is no more than there are rows."""
    return min(block[0] or shape[-2], shape[-2]), block[1] or shape[-1]


def _whole(length: int, group: int) -> int:
    """`length` rounded up to whole groups."""
    return -(-length // group) * group


def _unit(k: int, length: int, count: int) -> int:
    """Elements along K that are whole blocks and whole packing groups; one padded block where K is no longer than it."""
    return math.lcm(k, count) if k < length else _whole(length, count)


@dataclass(slots=True)
class _Piece:
    """One matrix of the tensor, rows by K, with its views of the parts; a flat one has all its blocks in one row.

    values are high-precision numbers, data packed codes, and the others blocks by blocks, None where there are none.
    lead: number of the matrix among those that have per-tensor scales of their own. limit: elements of a chunk.
    """

    values: Array
    data: Array
    scale: Array | None
    zero_point: Array | None
    supplied: Array | None
    lead: int
    limit: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape


def _pieces(
    values: Array, block: Block, unit: int, lead: Shape, data: Array, *of_blocks: Array | None
) -> tuple[list[_Piece], bool]:
    """(matrices of K-last parts, are they flat?). `lead`: the shape of per-tensor scales. `of_blocks`: three parts."""
    shape = values.shape
    m, limit = _sides(block, shape)[0], _chunk()
    merged = alone(shape, block) and values.flags.c_contiguous and data.flags.c_contiguous
    flat = merged and shape[-1] % unit == 0 and (block == TENSOR or m == 1)
    prefix = shape[: len(lead) if merged else len(shape) - 2]

    def matrix(part: Array | None, index: tuple[int, ...]) -> Any:
        return None if part is None else part[index].reshape(1 if flat else -1, -1 if flat else part.shape[-1])

    pieces: list[_Piece] = []
    for index in np.ndindex(*prefix) if prefix else ((),):
        number = int(np.ravel_multi_index(index[: len(lead)], lead)) if lead else 0
        parts = [matrix(part, index) for part in (values, data, *of_blocks)]
        pieces.append(_Piece(parts[0], parts[1], parts[2], parts[3], parts[4], number, limit))
    return pieces, flat


#: One chunk: its piece, first row, end, first column, end; and the number of its block, where that is larger.
_Job = tuple[_Piece, int, int, int, int, int]


def _cut(piece: _Piece, corner: tuple[int, int], end: tuple[int, int], m: int, unit: int, number: int) -> Iterator[_Job]:
    """Chunks of a part of `piece`, of whole `m` rows by whole `unit` columns, but for the last ones."""
    limit = piece.limit
    step = min(_whole(end[1] - corner[1], unit), max(limit // m // unit, 1) * unit)
    rise = max(limit // step // m, 1) * m
    for r in range(corner[0], end[0], rise):
        for c in range(corner[1], end[1], step):
            yield piece, r, min(r + rise, end[0]), c, min(c + step, end[1]), number


def _bytes(element: Codec, c0: int, c1: int) -> slice:
    """Where the codes of columns lie, the first of which begins a packing group."""
    start = c0 * element.bits // 8
    return slice(start, start + packed_length(element, c1 - c0))


def _jobs(pieces: list[_Piece], m: int, unit: int) -> list[_Job]:
    """Chunks of all pieces, with the number of their piece's own per-tensor scale."""
    return [job for p in pieces for job in _cut(p, (0, 0), p.shape, m, unit, p.lead)]


def _within_blocks(pieces: list[_Piece], m: int, k: int, unit: int) -> list[_Job]:
    """Chunks that do not reach across blocks, with the number of their block in the order of `scale`."""
    jobs: list[_Job] = []
    number = 0
    for piece in pieces:
        rows, columns = piece.shape
        for r in range(0, rows, m):
            for c in range(0, columns, k):
                jobs += _cut(piece, (r, c), (min(r + m, rows), min(c + k, columns)), 1, unit, number)
                number += 1
    return jobs


def _each(step: Any, jobs: list[_Job], m: int, unit: int) -> None:
    """`step(buffers, i, *jobs[i])` for all, over the threads."""
    size = max(_whole(r1 - r0, m) * _whole(c1 - c0, unit) for _, r0, r1, c0, c1, _ in jobs)

    def work(first: int, end: int) -> None:
        buffers = _buffers(size)
        with np.errstate(all="ignore"):  # overflow and NaN are results here, as the contract says
            for i in range(first, end):
                step(buffers, i, *jobs[i])

    spread(work, len(jobs), _threads())


def _load(values: Array, rows: int, columns: int, buffer: Array) -> Array:
    """`values` (r, c) as aligned FP32 in one row, padded with zeros to (rows, columns): a view where it can be one."""
    r, c = values.shape
    if (r, c) == (rows, columns) and values.dtype == _F4 and values.flags.c_contiguous and values.flags.aligned:
        return values.reshape(-1)
    flat = buffer[: rows * columns]
    words = flat.reshape(rows, columns)
    words[r:], words[:r, c:] = 0, 0
    if dtype_name(values) == "bfloat16":
        np.copyto(words[:r, :c], values.view(_U2))
        np.left_shift(flat, 16, out=flat)
    else:
        np.copyto(words.view(_F4)[:r, :c], values)
    return flat.view(_F4)


# ------------------------------------------------------------------------------------------------ cast


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, steps: Steps = PLAIN) -> ScaledTensor:
    """`reference.cast`, faster, in memory of its result and at most 16 MB.

    Up to 6 MB of that are work space, which each thread keeps for its next call.

    steps: those that somebody else does faster.
    """
    if (
        options is DEFAULT
        and type(x) is np.ndarray
        and x.dtype is _F32
        and 0 < x.size <= _SMALL_ARRAY
        and x.ndim > 1
        and x.flags.c_contiguous
        and isinstance(recipe, ScalingRecipe)
    ):
        with np.errstate(all="ignore"):
            written = _plan(recipe, steps).short(x)
        if written is not None:
            return written
    scale, out = options.scale, options.out
    if type(x) is not np.ndarray or x.dtype is not _F32 or not x.ndim or not isinstance(recipe, ScalingRecipe):
        checks.check_cast(x, recipe)
    plan = _plan(recipe, steps)
    axis = contraction_axis(options.axis, x.ndim)
    layout = plan.layout(x.shape, axis)
    call = _Cast(plan, np.asarray(x), layout.block(axis), axis)
    known = options.rounding == "nearest" and x.size > 0 and call.possible
    if known and scale is not None:
        call.supply(reference._check_supplied(NUMPY, scale, x, recipe.format, layout, axis))
    if not known or scattered(call.y.shape, call.block, call.lead, call.y.flags.c_contiguous):
        return reference.cast(x, recipe, options)
    own = call.fitting(out, layout)
    data, stored, zero_point, global_scale = parts = own or call.fresh()
    call.run(parts, options.nonfinite == "raise")
    if own and out is not None:
        return out
    if axis == -2:
        data = data.swapaxes(-1, -2)
        if layout.block(axis) != TENSOR:
            stored, zero_point = stored.swapaxes(-1, -2), zero_point if zero_point is None else zero_point.swapaxes(-1, -2)
    tail = -x.shape[axis] % plan.count
    written = ScaledTensor.assemble(data, stored, recipe, layout, zero_point, global_scale, axis, tail)
    return written if out is None else reference._assign(NUMPY, out, written)


_Parts = tuple[Any, Any, Any, Any]


class _Cast:
    """One call of `cast`, of `x` that is not empty. All parts here have K last."""

    def __init__(self, plan: _Plan, x: Array, block: Block, axis: int) -> None:
        self.plan, self.block, self.axis, self.logical = plan, block, axis, x.shape
        y = x.swapaxes(-1, -2) if axis == -2 else x
        self.shape: Shape = y.shape
        self.y = y if y.ndim > 1 else y.reshape(1, -1)
        if scattered(self.y.shape, block, (), self.y.flags.c_contiguous):
            self.y = np.ascontiguousarray(self.y)
        self.per_tensor = block == TENSOR
        columns = self.y.shape[-1]
        self.m, k = _sides(block, self.y.shape)
        self.unit = plan.count if self.per_tensor else _unit(k, columns, plan.count)
        self.k = k if k < columns else self.unit
        self.large = self.per_tensor or self.m * self.unit > _chunk()
        self.two_level = plan.fmt.global_scale is not None
        #: Supplied scales of the only level; of the coarse one; and the shape of a supplied per-tensor one.
        self.given: Array | None = None
        self.coarse_given: Array | None = None
        self.lead: Shape = ()
        self.own_codes = False
        self.pieces: list[_Piece] = []
        self.coarse: list[_Coarse] = []

    @property
    def possible(self) -> bool:
        """Can it be done here? Else the generic algorithm takes the whole array."""
        codes = self.plan.codes
        return not self.plan.alien and not (self.large and (codes is None or codes.zero != 0 or self.two_level))

    def supply(self, scale: Array) -> None:
        if self.two_level:
            self.coarse_given = scale
        else:
            self.given, self.own_codes = scale, self.plan.fmt.element.nan_code is not None
        if self.two_level or self.per_tensor:
            self.lead = scale.shape

    # -- parts ---------------------------------------------------------------------------------------------------

    def _specs(self) -> list[tuple[Shape, str] | None]:
        """(shape, dtype) of data, scale, zero_point and global_scale."""
        fmt, y = self.plan.fmt, self.y
        scale: Shape = (*y.shape[:-2], -(-y.shape[-2] // self.m), -(-y.shape[-1] // self.k))
        if self.per_tensor:
            scale = self.lead
        data = (*self.shape[:-1], packed_length(fmt.element, self.shape[-1]))
        shapes = {"data": data, "scale": scale, "zero_point": scale, "global_scale": self.lead}
        dtypes = NUMPY.dtypes(fmt)
        return [(shapes[name], dtypes[name]) if name in dtypes else None for name in PARTS]

    def fresh(self) -> _Parts:
        """Parts not written yet."""
        data, scale, zero_point, coarse = (None if spec is None else np.empty(*spec) for spec in self._specs())
        return data, scale, zero_point, coarse

    def fitting(self, out: Any, layout: Layout) -> _Parts | None:
        """The parts of `out`, if they can be written in place."""
        wanted = (self.plan.recipe, layout, self.axis, self.logical)
        if not isinstance(out, ScaledTensor) or (out.recipe, out.layout, out.axis, out.shape) != wanted:
            return None
        parts: list[Any] = []
        for name, spec in zip(PARTS, self._specs(), strict=True):
            part = getattr(out, name)
            if self.axis == -2 and part is not None and (name == "data" or (name != "global_scale" and not self.per_tensor)):
                part = part.swapaxes(-1, -2)
            if (part is None) != (spec is None):
                return None
            if spec is not None and not (
                type(part) is np.ndarray
                and (part.shape, part.dtype) == spec
                and part.flags.carray
                and not any(a is not None and np.may_share_memory(part, a) for a in (self.y, self.given, self.coarse_given))
            ):
                return None
            parts.append(part)
        data, scale, zero_point, coarse = parts
        return data, scale, zero_point, coarse

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, parts: _Parts, refuse: bool) -> None:
        """Write all parts; before the first byte of them raise NonFiniteError for NaN and Inf, under `refuse`."""
        data, scale, zero_point, global_scale = parts
        of_blocks = (None, None, None) if self.per_tensor else (scale, zero_point, self.given)
        data = data.view(_U1).reshape(*self.y.shape[:-1], -1)
        self.pieces, flat = _pieces(self.y, self.block, self.unit, self.lead, data, *of_blocks)
        fast = self.plan.codes is not None and not self.plan.divides
        if not fast:
            for piece in self.pieces:
                piece.limit = min(piece.limit, GENERIC)
        whole = _jobs(self.pieces, 1, self.plan.count) if refuse or self.per_tensor or self.two_level else []
        if refuse and self._largest(whole, False).max() >= F32_INF:
            reference._refuse_nonfinite(NUMPY, np.full(1, np.nan, _F4))
        if global_scale is not None:
            self._write_coarse(global_scale, whole)
        if self.per_tensor:
            self._write_large(scale, whole)
        elif self.large:
            self._write_large(scale, _within_blocks(self.pieces, self.m, self.k, self.plan.count))
        else:
            m = 1 if flat else self.m
            _each(self._write if fast else self._hand_over, _jobs(self.pieces, m, self.unit), m, self.unit)

    def _largest(self, jobs: list[_Job], finite: bool) -> Array:
        """Bits of the largest magnitude of each job; of the finite ones alone."""
        found = np.zeros(len(jobs), _U4)

        def step(work: _Buffers, i: int, piece: _Piece, r0: int, r1: int, c0: int, c1: int, _: int) -> None:
            source = _load(piece.values[r0:r1, c0:c1], r1 - r0, c1 - c0, work.source)
            found[i : i + 1] = self._amax(work, source, source.size)
            if finite and found[i] >= F32_INF:
                a = np.bitwise_and(source.view(_U4), MAGNITUDE, out=work.a[: source.size])
                found[i] = a.max(where=a < F32_INF, initial=0)

        _each(step, jobs, 1, self.plan.count)
        return found

    def _amax(self, work: _Buffers, source: Array, k: int) -> Array:
        """Bits of the largest magnitude of each `k` FP32 numbers."""
        n = source.size
        if self.plan.steps.amax is None:
            np.bitwise_and(source.view(_U4), MAGNITUDE, out=work.a[:n])
            return _block_amax(work, n, k)
        found = np.empty(n // k, _U4)
        self.plan.steps.amax(source, k, found)
        return found

    def _write_coarse(self, target: Array, whole: list[_Job]) -> None:
        scales = self.plan.coarse_scales
        assert scales is not None
        with np.errstate(all="ignore"):
            if self.coarse_given is not None:
                target[...] = scales.codec.accept(NUMPY, self.coarse_given).view(_F4)
            else:
                amax = self._largest(whole, True).max(keepdims=True)
                target[...] = (scales.quick(amax, None) or scales.careful(amax, None, None))[0][0]
            self.coarse = [_Coarse(value, self.plan.scales) for value in target.reshape(-1)]

    def _write(self, work: _Buffers, i: int, piece: _Piece, r0: int, r1: int, c0: int, c1: int, _: int) -> None:
        """One chunk of whole blocks."""
        scales, writer, k = self.plan.scales, self.plan.codes, self.k
        assert scales is not None and writer is not None and piece.scale is not None
        m = self.m if self.m > 1 else 1
        rows, columns = _whole(r1 - r0, m), _whole(c1 - c0, self.unit)
        source = _load(piece.values[r0:r1, c0:c1], rows, columns, work.source)
        amax = self._amax(work, source, k)
        if m > 1:
            amax = amax.reshape(rows // m, m, -1).max(axis=1).reshape(-1)
        coarse = self.coarse[piece.lead] if self.coarse else None
        found = scales.quick(amax, coarse) if piece.supplied is None else None
        if found is None:
            if self.own_codes and amax.max() >= F32_INF:
                return self._hand_over(work, i, piece, r0, r1, c0, c1, 0)
            accepted = None if piece.supplied is None else self._accepted(piece, r0, c0, rows // m, columns // k)
            found = scales.careful(amax, accepted, coarse, self.own_codes)
            if scales.subnormal(found[0]).any():
                return self._hand_over(work, i, piece, r0, r1, c0, c1, 0)
            if found[1].max() > _LARGE:
                source = _flushed(work, source)
        stored, inverse = found
        target = piece.scale[r0 // m : -(-r1 // m), c0 // k : -(-c1 // k)]
        target[...] = stored.reshape(rows // m, -1)[:, : target.shape[1]]
        clamp = not np.maximum.reduce(amax.view(_F4) * inverse) < writer.limit
        if m > 1:
            inverse = inverse.reshape(rows // m, -1).repeat(m, axis=0).reshape(-1)
        target = piece.data[r0:r1, _bytes(self.plan.fmt.element, c0, c1)]
        self._write_codes(work, source, inverse, k, target, (rows, columns), c1 - c0, clamp)

    def _accepted(self, piece: _Piece, r0: int, c0: int, rows: int, columns: int) -> Array:
        """int32 codes of the supplied scales of a chunk, `rows` by `columns` with the blocks of padding."""
        assert piece.supplied is not None and self.plan.scales is not None
        r, c = r0 // self.m, c0 // self.k
        given = piece.supplied[r : r + rows, c : c + columns]
        codes = np.zeros((rows, columns), _I4)
        codes[: given.shape[0], : given.shape[1]] = self.plan.scales.codec.accept(NUMPY, given)
        return codes.reshape(-1)

    def _write_codes(
        self,
        work: _Buffers,
        source: Array,
        inverse: Array,
        k: int,
        target: Array,
        padded: tuple[int, int],
        columns: int,
        clamp: bool,
    ) -> None:
        """Codes of `source`, of shape `padded` with `columns` real ones, times `inverse` of each `k`, to `target`.

        Blocks whose inverse is 0 have codes of +0.
        """
        plan, writer, n = self.plan, self.plan.codes, source.size
        assert writer is not None
        in_place = plan.bits == 8 and target.size == n and target.flags.c_contiguous
        codes = target.reshape(-1) if in_place else work.codes[:n]
        if plan.scaled is not None:
            plan.scaled(source, inverse, k, codes)
        else:
            _times(source, inverse, k, work.scaled[:n].view(_F4))
            writer.write(work, n, codes, clamp)
            if not np.logical_and.reduce(inverse):
                codes.reshape(-1, k)[inverse == 0] = writer.zero
            if writer.zero and columns < padded[1]:
                codes.reshape(padded)[:, columns:] = 0
        if plan.bits == 4 and plan.steps.pairs is not None and 2 * target.size == n and target.flags.c_contiguous:
            plan.steps.pairs(codes, target)
        elif not in_place:
            _pack(codes.reshape(padded), plan.bits, target, work.sign)

    # -- blocks larger than a chunk ------------------------------------------------------------------------------

    def _write_large(self, scale: Array, jobs: list[_Job]) -> None:
        """The amax of every block first, then the codes."""
        scales, writer = self.plan.scales, self.plan.codes
        assert scales is not None and writer is not None
        amax = np.zeros(scale.size, _U4)
        if not self.own_codes:
            np.maximum.at(amax, [job[-1] for job in jobs], self._largest(jobs, False))
        with np.errstate(all="ignore"):
            found = scales.quick(amax, None) if self.given is None else None
            if found is None:
                accepted = None if self.given is None else scales.codec.accept(NUMPY, self.given).reshape(-1)
                found = scales.careful(amax, accepted, None, self.own_codes)
            stored, inverse = found
            scale[...] = stored.reshape(scale.shape)
            fits = amax.view(_F4) * inverse < writer.limit
            subnormal = scales.subnormal(stored)

        def step(work: _Buffers, i: int, piece: _Piece, r0: int, r1: int, c0: int, c1: int, number: int) -> None:
            target = piece.data[r0:r1, _bytes(self.plan.fmt.element, c0, c1)]
            if not inverse[number] and not subnormal[number]:
                target[...] = 0
                return
            padded = r1 - r0, _whole(c1 - c0, self.plan.count)
            source = _load(piece.values[r0:r1, c0:c1], *padded, work.source)
            n, fit, special = source.size, fits[number], subnormal[number]
            if self.own_codes:
                largest = np.bitwise_and(source.view(_U4), MAGNITUDE, out=work.a[:n]).max()
                special |= largest >= F32_INF
                fit = largest.view(_F4) * inverse[number] < writer.limit
            if special or self.plan.divides:
                given = stored[number].reshape(() if self.per_tensor else (1, 1))
                chunk = piece.values[r0:r1, c0:c1]
                target[...] = reference.cast(chunk, self.plan.recipe, CastOptions(scale=given)).data.view(_U1)
                return
            if inverse[number] > _LARGE:
                source = _flushed(work, source)
            self._write_codes(work, source, inverse[number : number + 1], n, target, padded, c1 - c0, not fit)

        _each(step, jobs, 1, self.plan.count)

    # -- what has no fast form -----------------------------------------------------------------------------------

    def _hand_over(self, _: _Buffers, i: int, piece: _Piece, r0: int, r1: int, c0: int, c1: int, __: int) -> None:
        """One chunk of whole blocks, by the generic algorithm."""
        assert piece.scale is not None
        values, given = piece.values[r0:r1, c0:c1], None
        places = slice(r0 // self.m, -(-r1 // self.m)), slice(c0 // self.k, -(-c1 // self.k))
        if self.coarse:
            given = self.coarse[piece.lead].value
        elif piece.supplied is not None:
            given = piece.supplied[places]
        if self.k >= self.y.shape[-1]:  # a block is a row, and would be longer in a flat piece
            values = values.reshape(-1, self.y.shape[-1])
            given = given if given is None or self.coarse else given.reshape(-1, 1)
        written = reference.cast(values, self.plan.recipe, CastOptions(scale=given))
        for part, target in (
            (written.data.view(_U1), piece.data[r0:r1, _bytes(self.plan.fmt.element, c0, c1)]),
            (written.scale, piece.scale[places]),
            (written.zero_point, None if piece.zero_point is None else piece.zero_point[places]),
        ):
            if target is not None:
                target[...] = part.reshape(target.shape)


def _flushed(work: _Buffers, source: Array) -> Array:
    """`source` with numbers below 2^-126 as zeros of their sign, in `work.source`; uses up `work.a`."""
    u = source.view(_U4)
    n = u.size
    tiny = np.bitwise_and(u, MAGNITUDE, out=work.a[:n]) < NORMAL
    signs = np.bitwise_and(u, ~_U4(MAGNITUDE), out=work.a[:n])
    clean = work.source[:n]
    np.copyto(clean, u)
    np.copyto(clean, signs, where=tiny)
    return clean.view(_F4)


# ------------------------------------------------------------------------------------------------ dequantize


class _Values:
    """What follows from a format once: tables from stored bytes to values, in the units that one look-up gives."""

    def __init__(self, fmt: Format) -> None:
        element, codec = fmt.element, fmt.scale.codec
        self.count, self.bits = packing(element)[0], element.bits
        #: May chunks be decoded here, and not by the generic algorithm?
        self.known = self.bits in (4, 6, 8) and type(element).decode is Codec.decode and fmt.offset != "bias"
        self.known &= type(codec) is PowerOfTwo or type(codec).multiply is Codec.multiply
        self.known &= sys.byteorder == "little"
        self.element, self.codec = element, codec
        #: Is a value its code's number times its scale, and times that of the tensor?
        multiplies = all(level.sense == "multiplier" for level in fmt.levels)
        self.plain = self.known and self.bits != 6 and fmt.offset == "none" and multiplies
        self.one = np.array(element.table, _U4).view(_F4) if self.known else np.empty(0, _F4)
        self.table = self.expand(self.one)
        # 2^-127 is an FP32 subnormal: 2^-126 stands for it, and what it multiplies is halved first.
        halved = type(codec) is PowerOfTwo and fmt.scale.sense == "multiplier"
        self.scales = np.array(codec.table, _U4).view(_F4) if codec.bits == 8 else None
        self.halves: Array | None = None
        if halved and self.scales is not None:
            self.halves = np.ones(256, _F4)
            self.halves[0], self.scales[0] = 0.5, self.scales[1]

    def expand(self, one: Array, many: bool = False) -> Array:
        """The table for look-ups, of values one by one: of pairs of codes, for 8 bits only where `many` look-ups pay for it."""
        return one if not one.size or (self.bits == 8 and not many) else _pairs(one)

    @property
    def wide(self) -> Array:
        """`table` for many look-ups, one for all recipes of the codec."""
        return _wide(self.element)

    def short(self, st: ScaledTensor, steps: Steps) -> Array | None:
        """`dequantize` of contiguous codes of few elements in whole blocks of a row; None where `st` is not that."""
        data, scale, coarse, swapped = st.data, st.scale, st.global_scale, st.axis == -2
        if not self.plain or st.tail or data.ndim < 2 or not 0 < data.size <= _SHORT or type(st.layout) not in LAYOUTS:
            return None
        block = st.layout.block(st.axis)
        if scale.ndim != (0 if block == TENSOR else data.ndim):
            return None
        if swapped:
            data, scale = data.swapaxes(-1, -2), scale if block == TENSOR else scale.swapaxes(-1, -2)
        columns = data.shape[-1] * self.count // (self.bits * self.count // 8)
        k = block[1] or (columns if block[0] else columns * (data.size // data.shape[-1]))
        if block[0] is not None and (block[0] != 1 or columns % k or k % self.count):
            return None
        if not data.flags.c_contiguous or not scale.flags.c_contiguous or (coarse is not None and coarse.ndim):
            return None
        scale = np.asarray(scale).reshape(-1)
        if self.scales is not None:
            stored = scale.view(_U1)
            if self.halves is not None and not stored.all():
                return None
            scale = self.scales.take(stored)
        elif scale.dtype is not _F32:
            scale = self.codec.read(NUMPY, scale)
        values = np.empty((*data.shape[:-1], columns), _F4)
        codes = np.asarray(data).view(_U1)
        if steps.values is not None:
            steps.values(codes.reshape(-1), self.one, scale, k, self.bits, values.reshape(-1))
        else:
            self.decode(self.table, codes.reshape(-1, codes.shape[-1]), values.reshape(-1))
            with np.errstate(all="ignore"):
                grid = values.reshape(-1, k)
                np.multiply(grid, scale[:, None], out=grid)
        if coarse is not None:
            with np.errstate(all="ignore"):
                np.multiply(values, coarse, out=values)
        return values.swapaxes(-1, -2) if swapped else values

    def decode(self, table: Array, data: Array, values: Array) -> None:
        """FP32 `values`, 1-D and of whole groups, of bytes `data` (rows, columns)."""
        if self.bits == 8 and table.dtype == _U8:
            if data.size % 2 == 0:
                pairs = np.ascontiguousarray(data).reshape(-1).view(_U2)
                np.take(table, pairs, out=values.view(_U8), mode="clip")
                return
            table = table[:256].view(_F4)[::2]  # the pairs whose second code is 0
        if self.bits == 6:
            quads = np.zeros((data.size // 3, 4), _U1)
            quads[:, :3] = data.reshape(-1, 3)
            words = quads.view(_U4).reshape(-1)
            data = ((words & 0xFFF) | ((words << 4) & 0xFFF0000)).view(_U2)
        np.take(table, data, out=values.view(table.dtype).reshape(data.shape), mode="clip")


_values: dict[object, _Values] = {}


def _pairs(one: Array) -> Array:
    """FP32 values of two codes at a time, the first in the low bits of the place, as uint64."""
    pairs = np.empty((one.size, one.size, 2), _F4)
    pairs[..., 0], pairs[..., 1] = one, one[:, None]
    return pairs.view(_U8).reshape(-1)


@lru_cache(maxsize=16)
def _wide(codec: Codec) -> Array:
    return _pairs(np.array(codec.table, _U4).view(_F4))


def dequantize(st: ScaledTensor, out_dtype: Any = "float32", out: Array | None = None, steps: Steps = PLAIN) -> Array:
    """`reference.dequantize`, faster. steps: those that somebody else does faster."""
    if out is None and out_dtype == "float32":
        found = _recalled(_values, st.recipe.identity, _Values, st.recipe.format).short(st, steps)
        if found is not None:
            return found
    name = output_dtype(out_dtype)
    shape: Shape = st.shape if st.axis == -1 else (*st.shape[:-2], st.shape[-1], st.shape[-2])
    block, two_level = st.layout.block(st.axis), st.global_scale is not None
    declined = type(st.layout) not in LAYOUTS or math.prod(shape) == 0 or (two_level and block == TENSOR)
    lead: Shape = st.global_scale.shape if two_level else st.scale.shape if block == TENSOR else ()
    if declined or scattered(shape, block, lead, True):
        return reference.dequantize(st, name, out)
    dtype = NUMPY.to_float(np.empty(0, _F4), name).dtype
    if type(out) is np.ndarray and (out.shape, out.dtype) == (st.shape, dtype) and not _overlaps(out, st):
        result = out.swapaxes(-1, -2) if st.axis == -2 else out
        if result.flags.carray:
            _Dequantize(st, result).run()
            return out
    result = np.empty(shape, dtype)
    _Dequantize(st, result).run()
    result = result.swapaxes(-1, -2) if st.axis == -2 else result
    return result if out is None else reference.result(NUMPY, result, name, out)


def _overlaps(out: Array, st: ScaledTensor) -> bool:
    return any(
        np.may_share_memory(out, part) for part in (st.data, st.scale, st.zero_point, st.global_scale) if part is not None
    )


class _Dequantize:
    """One call of `dequantize` into `result`, K last and contiguous."""

    def __init__(self, st: ScaledTensor, result: Array) -> None:
        self.st = st = st.mT if st.axis == -2 else st
        self.fmt = st.recipe.format
        self.result = result if result.ndim > 1 else result.reshape(1, -1)
        self.block = st.layout.block()
        self.per_tensor = self.block == TENSOR
        self.tables = tables = _recalled(_values, st.recipe.identity, _Values, self.fmt)
        columns = self.result.shape[-1]
        self.m, k = _sides(self.block, self.result.shape)
        self.unit = tables.count if self.per_tensor else _unit(k, columns, tables.count)
        self.k = k if k < columns else self.unit

        self.large = self.per_tensor or self.m * self.unit > _chunk()
        #: Are there look-ups enough for a table of pairs of bytes: in all, and in each block that has its own?
        self.many = self.result.size >= _PAIRED
        each = math.prod(self.result.shape[-2:]) if st.scale.ndim else self.result.size
        self.many_each = (each if self.per_tensor else self.m * self.k) >= _PAIRED
        self.made: dict[int, Array] = {}

    def run(self) -> None:
        st, tables, shape = self.st, self.tables, self.result.shape
        data, scale = np.asarray(st.data), np.asarray(st.scale)
        zero_point: Any = None if st.zero_point is None else np.asarray(st.zero_point)
        coarse: Any = None if st.global_scale is None else np.asarray(st.global_scale)
        scale = scale.view(_U1) if scale.itemsize == 1 else scale
        if self.block == (1, None) and scale.ndim == 1:
            along = (*shape[:-1], 1)
            scale = np.broadcast_to(scale[:, None], along)
            zero_point = None if zero_point is None else np.broadcast_to(zero_point[:, None], along)
        self.scale = scale.reshape(-1)
        self.zero_point = None if zero_point is None else zero_point.reshape(-1)
        self.coarse = None if coarse is None else coarse.reshape(-1)
        lead: Shape = coarse.shape if coarse is not None else scale.shape if self.per_tensor else ()
        of_blocks = (None, None, None) if self.per_tensor else (scale, zero_point, None)
        data = data.view(_U1).reshape(*shape[:-1], -1)
        if scattered(shape, self.block, (), data.flags.c_contiguous):
            data = np.ascontiguousarray(data)
        pieces, flat = _pieces(self.result, self.block, self.unit, lead, data, *of_blocks)
        if self.per_tensor:
            jobs = _jobs(pieces, 1, tables.count)
        elif self.large:
            jobs = _within_blocks(pieces, self.m, self.k, tables.count)
        else:
            m = 1 if flat else self.m
            _each(self._blocks if tables.known else self._hand_over, _jobs(pieces, m, self.unit), m, self.unit)
            return
        _each(self._one_scale if tables.known else self._hand_over, jobs, 1, tables.count)

    def _decoded(self, work: _Buffers, table: Array, piece: _Piece, r0: int, r1: int, c0: int, c1: int) -> tuple[Array, Array]:
        """(values of a chunk, rows by columns; where they belong, maybe the same memory)."""
        count = self.tables.count
        rows, columns = r1 - r0, _whole(c1 - c0, count)
        target = piece.values[r0:r1, c0:c1]
        direct = target.dtype == _F4 and columns == c1 - c0 and target.flags.c_contiguous
        values = target.reshape(-1) if direct else work.scaled[: rows * columns].view(_F4)
        self.tables.decode(table, piece.data[r0:r1, _bytes(self.fmt.element, c0, c1)], values)
        return (target if direct else values.reshape(rows, columns)[:, : c1 - c0]), target

    def _one_scale(self, work: _Buffers, _: int, piece: _Piece, r0: int, r1: int, c0: int, c1: int, number: int) -> None:
        """A chunk within one block: what is done to every code is done to the table."""
        table = self.made.get(number)
        if table is None:
            table = self.tables.expand(self._scaled(number, piece.lead), self.many_each)
            if self.per_tensor:  # the chunks of a matrix share it, and few matrices are in work at a time
                if len(self.made) > MOST_THREADS:
                    self.made.clear()
                self.made[number] = table
        values, target = self._decoded(work, table, piece, r0, r1, c0, c1)
        if values is not target:
            np.copyto(target, values, casting="unsafe")

    def _scaled(self, number: int, lead: int) -> Array:
        """Values of all codes under the scales of block `number`."""
        fmt, one = self.fmt, self.tables.one
        if self.zero_point is not None:
            one = one - reference._offsets(NUMPY, self.zero_point[number : number + 1])
        one = reference._apply(NUMPY, one, self.scale[number : number + 1], fmt, fmt.scale)
        if self.coarse is not None and fmt.global_scale is not None:
            one = reference._apply(NUMPY, one, self.coarse[lead : lead + 1], fmt, fmt.global_scale)
        return one

    def _blocks(self, work: _Buffers, _: int, piece: _Piece, r0: int, r1: int, c0: int, c1: int, __: int) -> None:
        """A chunk of whole blocks."""
        fmt, tables, m, k = self.fmt, self.tables, self.m, self.k
        table = tables.wide if self.many else tables.table
        values, target = self._decoded(work, table, piece, r0, r1, c0, c1)
        places = slice(r0 // m, -(-r1 // m)), slice(c0 // k, -(-c1 // k))

        def with_each(op: Any, a: Array) -> None:
            """`values` op `a`, which has one number per block, in place."""
            if m == 1 and k >= 32 and values.shape[1] % k == 0:  # see `_times`
                grid = values.reshape(len(values), -1, k)
                op(grid, a[:, :, None], out=grid)
            else:
                rows = a if m == 1 else a.repeat(m, axis=0)[: r1 - r0]
                op(values, rows.repeat(k, axis=1)[:, : c1 - c0], out=values)

        if piece.zero_point is not None:
            with_each(np.subtract, reference._offsets(NUMPY, piece.zero_point[places]))
        assert piece.scale is not None
        stored = piece.scale[places]
        if tables.halves is not None and not stored.all():
            with_each(np.multiply, tables.halves.take(stored))
        scale = fmt.scale.codec.read(NUMPY, stored) if tables.scales is None else tables.scales.take(stored)
        if fmt.scale.sense == "divisor":
            with_each(np.divide, scale)
        else:
            if fmt.scale.sense == "amax":
                scale = NUMPY.div(scale, fmt.capacity(fmt.scale))
            with_each(np.multiply, scale)
        coarse = fmt.global_scale
        if self.coarse is not None and coarse is not None:
            g = self.coarse[piece.lead]
            if coarse.sense == "multiplier":
                np.multiply(values, g, out=values)
            else:
                values[...] = reference._apply(NUMPY, values, g, fmt, coarse)
        if values is not target:
            np.copyto(target, values, casting="unsafe")

    def _hand_over(self, _: _Buffers, i: int, piece: _Piece, r0: int, r1: int, c0: int, c1: int, number: int) -> None:
        """A chunk by the generic algorithm."""
        st, count = self.st, self.tables.count
        data = piece.data[r0:r1, _bytes(self.fmt.element, c0, c1)]
        if self.large:
            one = () if self.per_tensor else (1, 1)
            scale, zero_point = (a if a is None else a[number].reshape(one) for a in (self.scale, self.zero_point))
        else:
            places = slice(r0 // self.m, -(-r1 // self.m)), slice(c0 // self.k, -(-c1 // self.k))
            scale, zero_point = (a if a is None else a[places] for a in (piece.scale, piece.zero_point))
            if self.k >= self.result.shape[-1]:  # a block is a row, and would be longer in a flat piece
                data = data.reshape(-1, packed_length(self.fmt.element, self.result.shape[-1]))
                scale, zero_point = (a if a is None else a.reshape(-1, 1) for a in (scale, zero_point))
        coarse = None if self.coarse is None else self.coarse[piece.lead]
        tail = -(c1 - c0) % count
        part = ScaledTensor.assemble(data, scale, st.recipe, st.layout, zero_point, coarse, -1, tail)
        target = piece.values[r0:r1, c0:c1]
        np.copyto(target, reference.dequantize(part).reshape(target.shape), casting="unsafe")


# ------------------------------------------------------------------------------------------------ matmul


def matmul(a: Any, b: Any, bias: Array | None = None, out_dtype: Any = "float32", out: Array | None = None) -> Array:
    """`reference.matmul`, which decodes an operand that is larger than `TILE` piece by piece."""
    check_matmul(a, b, bias)
    left, right, name = tuple(a.shape), tuple(b.shape), output_dtype(out_dtype)
    product = np.empty((*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1]), _F4)
    with np.errstate(all="ignore"):
        _product(a, b, product)
        if bias is not None:
            np.add(product, NUMPY.f32(bias), out=product)
        return product if out is None and name == "float32" else reference.result(NUMPY, product, name, out)


def _product(a: Any, b: Any, product: Array) -> None:
    """a @ b into `product`; each number of it comes from one call of BLAS over all of K."""
    small = [4 * math.prod(x.shape) <= TILE for x in (a, b)]
    if all(small):
        np.matmul(_dense(a), _dense(b), out=product)
        return
    if product.ndim > 2 and not (small[0] and len(b.shape) == 2):
        for i in range(len(product)):
            left, right = (x if len(x.shape) < product.ndim else x[i if x.shape[0] > 1 else 0] for x in (a, b))
            _product(left, right, product[i])
        return
    rows, columns = (range(0, x.shape[axis], _step(x, axis)) for x, axis in ((a, -2), (b, -1)))
    for r in rows:
        left = _dense(a if len(rows) == 1 else a[..., r : r + rows.step, :])
        for c in columns:
            right = _dense(b if len(columns) == 1 else b[..., c : c + columns.step])
            np.matmul(left, right, out=product[..., r : r + rows.step, c : c + columns.step])


def _step(x: Any, axis: int) -> int:
    """How many positions along `axis` to decode at a time: whole blocks and packing groups of some `TILE` bytes."""
    length = max(x.shape[axis], 1)
    grain = 1
    if isinstance(x, ScaledTensor):
        m, k = x.layout.block(x.axis)
        per_tensor = x.layout.block(x.axis) == TENSOR
        side = (k if axis == x.axis else m) or (1 if per_tensor else length)
        grain = math.lcm(side, packing(x.recipe.format.element)[0] if axis == x.axis else 1)
    each = 4 * math.prod(x.shape) // length
    return max(TILE // max(each, 1) // grain, 1) * grain


def _dense(x: Any) -> Array:
    """FP32 values of an operand."""
    return calls.dequantize(x) if isinstance(x, ScaledTensor) else NUMPY.f32(x)


# ------------------------------------------------------------------------------------------------ what is declined


def accepts_cast(call: Call) -> str | None:
    """Why `cast` would give the whole array to the generic algorithm, or None."""
    if call.option("rounding") == "stochastic":
        return "stochastic rounding is the generic algorithm's"
    assert call.a.recipe is not None
    plan = _plan(call.a.recipe)
    if plan.alien or (plan.codes is None and plan.fmt.scale.block == TENSOR):
        return f"{call.a.recipe.name!r} as declared has no fast form here"
    if call.a.empty:
        return "an empty array is the generic algorithm's"
    block = plan.fmt.scale.block
    axis: int = call.option("axis", -1)
    by_chunks = plan.codes is None or plan.codes.zero or plan.fmt.global_scale is not None
    m, k = block
    small = m is not None and k is not None and m * k * plan.count <= _chunk()  # then the shape need not be asked
    if by_chunks and block != TENSOR and not small and call.a.ndim > 1:
        shape = k_last(call.a.shape, axis)
        m, k = _sides(block, shape)
        unit = _unit(k, shape[-1], plan.count)
        if m * unit > _chunk():
            return (
                f"blocks of {m} x {unit} are larger than a chunk, and {call.a.recipe.name!r} as declared has no form for them"
            )
    if call.a.ndim > 2 and scattered(k_last(call.a.shape, axis), block, (), True):
        return "many small matrices are faster all at once"
    return None
