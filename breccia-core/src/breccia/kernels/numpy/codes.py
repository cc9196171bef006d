"""Codes from FP32 numbers: a writer for each family of codecs, packing, and the microkernels that may be compiled."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...arrays.ops import NUMPY, Array
from ...codecs import Codec
from ...forms import FloatForm, IntegerForm, TableForm, form_of, magnitudes_of
from ...fp32 import F32_INF, MAGNITUDE
from ...locks import cached_property
from .workspace import EXPONENT, F4, I4, U1, U2, U4, U8

if TYPE_CHECKING:
    from ...formats import Record
    from .workspace import Buffers


#: Bound of the largest code, of qmax, and of their reciprocals. Elements below 2^-126 divided by scales that are not small are
#: then less than 2^-26, which every form rounds to zero.
MODEST = 2.0**20
#: Of stochastic rounding: (seed, number of the first element, width, stride). Sources are rows of `width` elements, which begin
#: `stride` elements of the whole tensor after each other, in C order with K last. Rounding is to nearest where width is 0.
Dither = tuple[int, int, int, int]
#: To nearest.
NEAREST: Dither = (0, 0, 0, 0)


class ScaledCodes(Protocol):
    """A writer of codes of numbers (no NaN) times the number of their block of `k`, clamped, one a byte.

    +0 where that number is 0. All arrays are contiguous and 1-D. across: unless 0, numbers are rows of as many, and blocks `k`
    rows of a column; `dither` is then `NEAREST`.
    """

    def __call__(
        self, source: Array, inverse: Array, k: int, codes: Array, dither: Dither = NEAREST, *, across: int = 0
    ) -> None: ...


class Amax(Protocol):
    """FP32 bits of the largest magnitude of each `k` numbers into uint32; contiguous and 1-D. across: as for `ScaledCodes`."""

    def __call__(self, source: Array, k: int, amax: Array, across: int = 0) -> None: ...


class FloatCodes(FloatForm):
    """Writes codes of a minifloat, by addition."""

    #: Code of +0.
    zero = 0

    def write(self, work: Buffers, n: int, codes: Array, clamp: bool) -> None:
        """uint8 `codes` of the first `n` numbers in `work.scaled`; |y| above `limit` needs `clamp`."""
        u, a, e = work.scaled[:n], work.a[:n], work.b[:n]
        self._magnitudes(u, a, e, work.level(self.floor, n), codes, clamp)
        sign = work.sign[:n]
        np.less(u.view(I4), 0, out=sign.view(np.bool_))
        words = work.sign[: -(-n // 8) * 8].view(U8)
        np.left_shift(words, self.sign, out=words)
        np.bitwise_or(codes, sign, out=codes)
        self.drop_negative_zeros(codes)

    def drop_negative_zeros(self, codes: Array) -> None:
        """Replace the code of -0 by 0, where the codec has NaN there."""
        if self.codec.fnuz:
            np.copyto(codes, 0, where=codes == 1 << self.sign)

    @cached_property
    def by_half(self) -> Array:
        """A table of codes by the upper 16 bits of an FP32 number, with the last bit set if the lower half is not zero.

        That bit represents all numbers strictly between its neighbours. Midpoints of codes need one bit more than a mantissa,
        so no midpoint is among them.
        """
        halves = np.arange(1 << 16, dtype=U4) << 16
        halves[[F32_INF >> 16, (F32_INF >> 16) + (1 << 15)]] -= 1 << 16  # overflow saturates
        return self.codec.encode(NUMPY, halves.view(F4)).astype(U1)

    def few(self, y: Array) -> Array:
        """Codes of a small array, with few NumPy calls; Inf from overflow saturates."""
        halves = y.view(U2)
        return self.by_half.take(halves[..., 1::2] | (halves[..., ::2] != 0))

    def small(self, y: Array) -> Array:
        """Codes of some non-negative numbers, clamped."""
        u, codes = y.view(U4), np.empty(y.shape, U1)
        self._magnitudes(u, np.empty_like(u), np.empty_like(u), self.floor, codes, True)
        return codes

    def _magnitudes(self, u: Array, a: Array, e: Array, floor: Any, codes: Array, clamp: bool) -> None:
        np.bitwise_and(u, MAGNITUDE, out=a)
        if clamp:
            np.minimum(a, self.largest, out=a)
        np.bitwise_and(a, EXPONENT, out=e)
        np.maximum(e, floor, out=e)
        np.add(e, self.lift, out=e)
        y = a.view(F4)
        np.add(y, e.view(F4), out=y)
        np.right_shift(e, self.shift, out=e)
        np.add(a, e, out=a)
        np.copyto(codes, a, casting="unsafe")


class IntegerCodes(IntegerForm):
    """Writes codes of an integer codec."""

    #: Code of +0.
    zero = 0

    @cached_property
    def _added(self) -> Any:
        """`magic` as an FP32 scalar, which NumPy adds to short arrays faster than Python's numbers."""
        return F4(self.magic)

    def write(self, work: Buffers, n: int, codes: Array, clamp: bool) -> None:
        """As `FloatCodes.write`."""
        y = work.scaled[:n].view(F4)
        if clamp:
            np.minimum(y, self.high, out=y)
        if clamp or not self.codec.signed:
            np.maximum(y, self.low, out=y)
        np.add(y, self._added, out=y)
        np.copyto(codes, work.scaled[:n], casting="unsafe")
        if self.mask != 0xFF:
            np.bitwise_and(codes, self.mask, out=codes)

    def few(self, y: Array) -> Array:
        """As `FloatCodes.few`."""
        codes = (np.maximum(np.minimum(y, self.high), self.low) + self._added).view(U4).astype(U1)
        return codes if self.mask == 0xFF else codes & self.mask


class TableCodes(TableForm):
    """Writes codes of a table."""

    @cached_property
    def thresholds(self) -> Array:
        """The smallest number of each position; the first is not used."""
        return np.array(self.codec.thresholds, U4).view(F4)

    @cached_property
    def _reached(self) -> Array:
        return self.thresholds[1:]

    @cached_property
    def order(self) -> Array:
        """Codes by position."""
        return np.array(self.codec.order, U1)

    @cached_property
    def values(self) -> Array:
        """Numbers by position."""
        return np.array([self.codec.values[code] for code in self.codec.order], F4)

    def write(self, work: Buffers, n: int, codes: Array, clamp: bool) -> None:
        """As `FloatCodes.write`."""
        y, reached = work.scaled[:n].view(F4), work.sign[:n]
        codes.fill(0)
        for start in self._reached:
            np.greater_equal(y, start, out=reached.view(np.bool_))
            np.add(codes, reached, out=codes)
        np.copyto(codes, self.order.take(codes))

    def few(self, y: Array) -> Array:
        """As `FloatCodes.few`."""
        return self.order.take(self._reached.searchsorted(y, side="right"))


_Codes = FloatCodes | IntegerCodes | TableCodes


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is done to the numbers of codes in blocks of `m` rows by `k`, in this order; arrays have one item a block, C order.

    `subtracted` from them; times `scale`, FP32 or bytes that `of_bytes` has FP32 numbers for (where `halved`, byte 0 stands for
    half of its number, an FP32 subnormal); times `global_scale`, or divided by it; plus `added`, both terms flushed
    below 2^-126. With `scale_record` and `added_record`, blocks are those of the finest scales, and `scale` and `added` have
    records of them, which end with every `plans.STRIP` columns.
    """

    m: int
    k: int
    scale: Array
    of_bytes: Array | None = None
    halved: bool = False
    subtracted: Array | None = None
    added: Array | None = None
    global_scale: float | None = None
    divides: bool = False
    scale_record: Record | None = None
    added_record: Record | None = None


@dataclass(frozen=True, eq=False)
class Microkernels:
    """Compiled replacements of NumPy's loops, with the same bytes; NumPy is used where one is None.

    Where there is a `load`, sources are FP32, FP16, or BF16 as uint16; else FP32.

    amax: of blocks.
    words(seed, first, out): the random words of elements from number `first` on (numerics contract, section 5.5), as uint32.
    scales(codes, amax, divisor, inverses, stored, inverse, global_scale): codes of FP32 amax / divisor / global_scale, one a
    byte, and the FP32 numbers that the table `inverses` has for these codes.
    blocks(codes, writer, source, k, divisor, inverses, stored, out, global_scale): `amax`, `scales` and `scaled` in one pass,
    codes of 4 bits two a byte; returns the bits of the largest magnitude. Above 2^100 nothing that it wrote is to be used.
    sixes(codes, data): four 6-bit codes, one a byte, into each three bytes, the first in the low bits; contiguous.
    eights(codes, bits, data): eight codes of 1, 2, 3, 5 or 7 bits, one a byte, into as many bytes; contiguous.
    down(codes, bits, data): rows of codes of 1 to 7 bits, one a byte, whose columns are packed into `data`; contiguous.
    pairs(codes, data): two 4-bit codes, one a byte, into each byte, the first in its low half; contiguous.
    scaled: the writer of codes from unscaled numbers, like those here; None if there is none.
    divided: the writer of codes from unscaled numbers that divides them by scales; None if there is none.
    packs: whether these two write 4-bit codes two a byte, the first in its low half, into room for half as many.
    values(data, table, scale, k, bits, values): FP32 numbers of codes of 4 or 8 bits times the FP32 scale of each `k`.
    load(values, dtype, columns, out): a matrix of "float32", "float16" or "bfloat16" in any order as FP32 into contiguous
    rows of `columns`, with zeros after its columns and rows; 16-bit numbers are passed as uint16.
    extremes(source, k, low, high): the smallest and the largest of each `k` numbers, in FP32; below 2^-126 they count as +0.
    shifted(codes, source, inverse, before, after, k, out, dither): codes of an integer codec, one a byte. From each `k`
    numbers `before` is subtracted; times `inverse` they are clamped and rounded, and `after` (integers in FP32) is added.
    Zeros where the inverse is 0.
    store(values, dtype, out): FP32 numbers rounded to "float16" or "bfloat16", as uint16; contiguous.
    decode(codec, data, blocks, dtype, out, stream): a matrix of codes, in rows of bytes, under `Blocks`, into `out`, a
    matrix in any order of "float32", or of 16-bit numbers as uint16. stream: it is not read soon.
    matrix(codec, data, blocks, columns): a matrix of codes under `Blocks`, which `blocks` takes in place of FP32 numbers and
    decodes part after part, for k a power of two from 16 to 256 that divides columns.
    search(codes, source, m, k, amax, found, ...): scales with the least error, of numbers in blocks of m x k; see `Searching`.
    columns: whether `amax`, `extremes`, `scaled`, `divided` and `shifted` take `across`, and there is `down`.
    shares: whether `decode` itself uses as many threads as it may, so that one call takes a whole matrix.
    """

    amax: Amax | None = None
    pairs: Callable[[Array, Array], None] | None = None
    scaled: Callable[[_Codes], ScaledCodes | None] | None = None
    values: Callable[[Array, Array, Array, int, int, Array], None] | None = None
    load: Callable[[Array, str, int, Array], None] | None = None
    store: Callable[[Array, str, Array], None] | None = None
    divided: Callable[[_Codes], ScaledCodes | None] | None = None
    extremes: Callable[..., None] | None = None
    shifted: Callable[..., None] | None = None
    words: Callable[[int, int, Array], None] | None = None
    sixes: Callable[[Array, Array], None] | None = None
    eights: Callable[[Array, int, Array], None] | None = None
    down: Callable[[Array, int, Array], None] | None = None
    scales: Callable[[FloatCodes, Array, float, Array, Array, Array, float], None] | None = None
    blocks: Callable[..., int] | None = None
    decode: Callable[[Codec, Array, Blocks, str, Array, bool], None] | None = None
    matrix: Callable[[Codec, Array, Blocks, int], Any] | None = None
    search: Callable[..., None] | None = None
    columns: bool = False
    shares: bool = False
    packs: bool = False

    def pack(self, codes: Array, bits: int, data: Array) -> bool:
        """Pack codes, one a byte, into `data`; False where no microkernel does. Both are contiguous, and `data` has room."""
        packed = {4: self.pairs, 6: self.sixes}.get(bits)
        if 8 * data.size != bits * codes.size:
            return False
        if packed is not None:
            packed(codes, data)
        elif self.eights is not None and bits in (1, 2, 3, 5, 7) and codes.size % 8 == 0:
            self.eights(codes, bits, data)
        else:
            return False
        return True


#: NumPy alone.
PLAIN = Microkernels()


@lru_cache(maxsize=64)
def scale_writer(codec: Codec) -> FloatCodes | None:
    """The fast writer of scales of one byte, or None."""
    form = magnitudes_of(codec)
    return None if form is None or codec.bits != 8 or codec.max > MODEST else FloatCodes(form.codec)


@lru_cache(maxsize=64)
def code_writer(codec: Codec) -> _Codes | None:
    """The fast writer of an element codec, or None."""
    match magnitudes_of(codec) or form_of(codec):
        case FloatForm(floats) if floats.signed and floats.bits in (4, 6, 8) and floats.max <= MODEST:
            return FloatCodes(floats)
        case IntegerForm(integers):
            return IntegerCodes(integers)
        case TableForm(table) if table.bits == 4:
            return TableCodes(table)
        case _:
            return None


def pack_codes(codes: Array, bits: int, target: Array, scratch: Array) -> None:
    """uint8 codes (rows, columns), columns in whole groups, packed into `target`, which may have fewer of each."""
    rows, columns = target.shape
    if bits == 8:
        np.copyto(target, codes[:rows, :columns])
        return
    flat = codes.reshape(-1)
    if bits not in (4, 6):
        return _pack_groups(flat, bits, target, len(codes))
    words = scratch[: flat.size].view(U2)
    np.right_shift(flat.view(U2), 8 - bits, out=words)
    if bits == 4:
        np.bitwise_or(words, flat.view(U2), out=words)
        np.copyto(target, words.reshape(len(codes), -1)[:rows, :columns], casting="unsafe")
        return
    pairs = (words & 0xFC0) | (flat.view(U2) & 0x3F)
    quads = pairs.view(U4)
    quads = (quads & 0xFFF) | ((quads >> 4) & 0xFFF000)
    groups = quads.view(U1).reshape(len(codes), -1, 4)
    np.copyto(target.reshape(rows, -1, 3), groups[:rows, : columns // 3, :3])


def _pack_groups(flat: Array, bits: int, target: Array, rows: int) -> None:
    """`pack_codes` for any width: neighbouring fields are joined until one holds a group."""
    count = math.lcm(bits, 8) // bits
    words, field, filled = flat.view(f"u{count}"), 8, bits
    while field < 8 * count:
        lower = sum(((1 << filled) - 1) << at for at in range(0, 8 * count, 2 * field))
        words = (words & lower) | ((words >> (field - filled)) & (lower << filled))
        field, filled = 2 * field, 2 * filled
    size = filled // 8
    groups = words.view(U1).reshape(rows, -1, count)
    shown, columns = target.shape
    np.copyto(target.reshape(shown, -1, size), groups[:shown, : columns // size, :size])
