"""`dequantize` for NumPy arrays: table look-ups and one multiplication per element."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.frameworks import dtype_name
from ...arrays.ops import NUMPY, Array
from ...codecs import Codec, Integer, PowerOfTwo
from ...formats import TENSOR, Format
from ...layouts import Shape
from ...options import FLOAT32, ProductOptions
from ...rules import flushed
from ...tensors.grids import packed_length, packing
from ...tensors.tensor import ScaledTensor
from .. import reference
from ..plans import scattered, unread_records
from .codes import PLAIN, Blocks
from .pieces import (
    FEW,
    aligned_array,
    all_jobs,
    block_sides,
    byte_range,
    cut_pieces,
    rounded_up,
    run_each,
    unit_of,
    within_blocks,
)
from .workspace import F4, F32_DTYPE, MOST_THREADS, U1, U2, U4, U8, chunk_size, remembered

if TYPE_CHECKING:
    from .codes import Microkernels
    from .pieces import Piece
    from .workspace import Buffers


#: Bytes of codes decoded at once by one thread.
_SHORT = 1 << 16
#: Bytes of a result from which writing it past the caches pays off.
_STREAMED = 1 << 24
#: Columns of a row that is decoded with its padding, as part of a longer run.
_SHORT_ROW = 32
#: Elements of a chunk for a compiled microkernel, which needs no buffers: long ones take less of Python.
_LONG = 1 << 20
#: Number of elements from which a table of byte pairs (512 KB) pays off.
_PAIRED = 1 << 20
#: The smallest normal number of FP32.
_SMALLEST = 2.0**-126


class _Values:
    """Derived from a format once: tables from stored bytes to values, in the unit of one look-up."""

    def __init__(self, fmt: Format) -> None:
        element, codec = fmt.element, fmt.scale.codec
        self.count, self.bits = packing(element)[0], element.bits
        ordinary = type(codec) is PowerOfTwo or type(codec).multiply is Codec.multiply
        by_table = type(element).decode is Codec.decode and ordinary and sys.byteorder == "little"
        #: Whether chunks are decoded here, not by the generic algorithm
        self.known = by_table and "coded_scales" not in fmt.features
        #: Codes of one look-up: of a byte if they fill it, else two.
        self.each = 8 // self.bits if 8 % self.bits == 0 else 2
        if fmt.offset == "bias":  # then only products under subnormal scales can be subnormal, see `_blocks`
            integral = type(element) is Integer and not element.fraction_bits
            self.known &= integral and len(fmt.levels) == 1 and fmt.scale.convention == "multiplier" and codec.bits > 8
        #: Whether compiled microkernels decode it, of which biases are no obstacle
        self.compiled = by_table and fmt.scale.convention != "divisor" and (self.known or unread_records(fmt) is None)
        self.element, self.codec = element, codec
        #: Whether a value is code * scale, times the global scale if any
        multiplies = all(level.convention == "multiplier" for level in fmt.levels)
        self.plain = self.known and fmt.offset == "none" and multiplies
        self.one = np.array(element.table, U4).view(F4) if self.known else np.empty(0, F4)
        self.table = self.expand(self.one)
        #: The dtype of 8-bit codes that are numbers, which are converted in less time than looked up
        self.integer: type[np.integer[Any]] | None = None
        if self.known and type(element) is Integer and element.bits == 8 and not element.fraction_bits:
            self.integer = np.int8 if element.signed else U1
        # 2^-127 is an FP32 subnormal: use 2^-126 instead, and halve the other factor first.
        halved = type(codec) is PowerOfTwo and fmt.scale.convention == "multiplier"
        self.scales = np.array(codec.table, U4).view(F4) if codec.bits == 8 and fmt.scale_record is None else None
        self.halves: Array | None = None
        if halved and self.scales is not None:
            self.halves = np.ones(256, F4)
            self.halves[0], self.scales[0] = 0.5, self.scales[1]

    def supported(self, microkernels: Microkernels) -> bool:
        """Whether chunks are decoded here, or by a microkernel."""
        return self.known or (self.compiled and microkernels.decode is not None)

    def expand(self, one: Array, many: bool = False) -> Array:
        """The look-up table made from single values: of pairs of codes for 8 bits where `many` look-ups pay for it."""
        each = 2 if self.bits == 8 and many else self.each
        return one if not one.size or each == 1 else _grouped(one, each)

    @property
    def wide(self) -> Array:
        """`table` for many look-ups, shared by all recipes of the codec."""
        return _wide(self.element, max(self.each, 2))

    def short(self, st: ScaledTensor, microkernels: Microkernels) -> Array | None:
        """`dequantize` of few, contiguous codes in whole blocks of a row; None for other `st`."""
        data, scale, global_scale, swapped = st.data, st.scale, st.global_scale, st.axis == -2
        if not self.plain or st.padding or data.ndim < 2 or not 0 < data.size <= _SHORT or not st.layout.in_order:
            return None
        block = st.layout.block(st.axis)
        if scale.ndim != (0 if block == TENSOR else data.ndim):
            return None
        if swapped:
            data, scale = data.swapaxes(-1, -2), scale if block == TENSOR else scale.swapaxes(-1, -2)
        columns = data.shape[-1] * self.count // (self.bits * self.count // 8)
        whole = columns if block[0] else columns * (data.size // data.shape[-1])
        k = min(block[1] or whole, whole)
        if block[0] is not None and (block[0] != 1 or columns % k or k % self.count):
            return None
        if not data.flags.c_contiguous or not scale.flags.c_contiguous or (global_scale is not None and global_scale.ndim):
            return None
        scale = np.asarray(scale).reshape(-1)
        if not scale.flags.aligned:
            return None
        if self.scales is not None:
            stored = scale.view(U1)
            if self.halves is not None and not stored.all():
                return None
            scale = self.scales.take(stored)
        elif scale.dtype is not F32_DTYPE:
            scale = self.codec.read(NUMPY, scale)
        values = np.empty((*data.shape[:-1], columns), F4)
        codes = np.asarray(data).view(U1)
        if microkernels.values is not None and self.bits in (4, 8):
            microkernels.values(codes.reshape(-1), self.one, scale, k, self.bits, values.reshape(-1))
        else:
            self.decode(self.table, codes.reshape(-1, codes.shape[-1]), values.reshape(-1))
            with np.errstate(all="ignore"):
                grid = values.reshape(-1, k)
                np.multiply(grid, scale[:, None], out=grid)
        if global_scale is not None:
            with np.errstate(all="ignore"):
                np.multiply(values, global_scale, out=values)
        return values.swapaxes(-1, -2) if swapped else values

    def decode(self, table: Array, data: Array, values: Array) -> None:
        """FP32 `values`, 1-D and in whole groups, from bytes `data` (rows, columns)."""
        if self.integer is not None and table is self.table:
            return np.copyto(values.reshape(data.shape), data.view(self.integer))
        if self.bits == 8 and table.dtype == U8:
            if data.size % 2 == 0:
                pairs = np.ascontiguousarray(data).reshape(-1).view(U2)
                np.take(table, pairs, out=values.view(U8), mode="clip")
                return
            table = table[:256].view(F4)[::2]  # the pairs whose second code is 0
        if 8 % self.bits:
            data = _pairs(data, self.bits)
        np.take(table, data, out=values.view(table.dtype).reshape(data.shape), mode="clip")


_values: dict[object, _Values] = {}


def _grouped(one: Array, each: int) -> Array:
    """FP32 values of `each` codes at a time, the first in the low bits of the index, as one item."""
    values = np.empty((*(one.size,) * each, each), F4)
    for i in range(each):
        values[..., i] = one.reshape(-1, *(1,) * i)
    return values.view(U8 if each == 2 else f"V{4 * each}").reshape(-1)


def _pairs(data: Array, bits: int) -> Array:
    """Pairs of codes from groups of bytes that codes do not fill singly: pairs of 3 bits one a byte, others as uint16."""
    count, size = math.lcm(bits, 8) // bits, math.lcm(bits, 8) // 8
    pair = U1 if bits == 3 else U2
    width = count // 2 * pair().itemsize
    bytes_, groups = np.zeros((data.size // size, width), U1), data.reshape(-1, size)
    for i in range(size):  # each along all groups: NumPy's loops over the bytes of a group are short
        bytes_[:, i] = groups[:, i]
    words, field, filled = bytes_.view(f"u{width}").reshape(-1), 8 * width, 8 * size
    while filled > 2 * bits:  # halve the fields
        field, filled = field // 2, filled // 2
        low = sum(((1 << filled) - 1) << at for at in range(0, 8 * width, 2 * field))
        words = (words & low) | ((words & (low << filled)) << (field - filled))
    return words.view(pair)


@lru_cache(maxsize=16)
def _wide(codec: Codec, each: int) -> Array:
    return _grouped(np.array(codec.table, U4).view(F4), each)


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32, microkernels: Microkernels = PLAIN) -> Array:
    """A faster `reference.dequantize`. microkernels: compiled replacements of NumPy's loops."""
    name, _, out = options
    if options is FLOAT32:
        values = remembered(_values, st.recipe.interned_key, _Values, st.recipe.format).short(st, microkernels)
        if values is not None:
            return values
    shape: Shape = st.shape if st.axis == -1 else (*st.shape[:-2], st.shape[-1], st.shape[-2])
    block, two_level = st.layout.block(st.axis), st.global_scale is not None
    declined = not st.layout.in_order or math.prod(shape) == 0 or (two_level and block == TENSOR)
    lead: Shape = st.global_scale.shape if two_level else st.scale.shape if block == TENSOR else ()
    tables = remembered(_values, st.recipe.interned_key, _Values, st.recipe.format)
    # Matrices are padded to whole blocks of rows, so that no block has rows of two.
    rows_block = (1, None) if block != TENSOR and tables.supported(microkernels) else block
    unread = "coded_scales" in st.recipe.format.features and not tables.supported(microkernels)
    if declined or unread or scattered(shape, rows_block, lead, True):
        return reference.dequantize(st, options)
    dtype = NUMPY.to_float(np.empty(0, F4), name).dtype
    if type(out) is np.ndarray and (out.shape, out.dtype) == (st.shape, dtype) and not _overlaps(out, st):
        result = out.swapaxes(-1, -2) if st.axis == -2 else out
        call = _Dequantize(st, result, microkernels)
        if result.flags.carray or (call.compiled and result.flags.behaved and not scattered(shape, block, lead, False)):
            call.run()
            return out
    result = np.empty(shape, dtype)
    _Dequantize(st, result, microkernels).run()
    result = result.swapaxes(-1, -2) if st.axis == -2 else result
    return result if out is None else reference.result(NUMPY, result, name, out)


def matrices(st: ScaledTensor, microkernels: Microkernels) -> list[Any] | None:
    """Each matrix of `st`, as `Microkernels.matrix` makes it, K last; None where it cannot make one."""
    tables = remembered(_values, st.recipe.interned_key, _Values, st.recipe.format)
    if (
        not tables.compiled
        or not st.layout.in_order
        or st.axis != -1
        or st.padding
        or (st.global_scale is not None and st.ndim < 2)
    ):
        return None
    if st.layout.block() == TENSOR and st.global_scale is not None:
        return None
    return _Dequantize(st, np.broadcast_to(F4(0), st.shape), microkernels).matrices()


def _overlaps(out: Array, st: ScaledTensor) -> bool:
    return any(
        np.may_share_memory(out, part) for part in (st.data, st.scale, st.zero_point, st.global_scale) if part is not None
    )


class _Dequantize:
    """One call of `dequantize` into `result`, K last and contiguous."""

    def __init__(self, st: ScaledTensor, result: Array, microkernels: Microkernels) -> None:
        self.st = st = st.mT if st.axis == -2 else st
        self.microkernels, self.dtype = microkernels, dtype_name(result)
        self.fmt = st.recipe.format
        self.result = result if result.ndim > 1 else result.reshape(1, -1)
        self.block = st.layout.block()
        self.per_tensor = self.block == TENSOR
        self.tables = tables = remembered(_values, st.recipe.interned_key, _Values, self.fmt)
        self._merge_rows(st)
        columns = self.result.shape[-1]
        self.m, k = block_sides(self.block, self.result.shape)
        self.unit = tables.count if self.per_tensor else unit_of(k, columns, tables.count)
        self.k = k if k < columns else self.unit
        #: Where the values are wanted, which are decoded to `result`
        self.wanted = self.result
        if tables.supported(microkernels) and not self.per_tensor:
            self._pad()

        self.large = self.per_tensor or self.m * self.unit > chunk_size()
        # Rows shorter than a packing group, which are padding for the most part, are decoded faster all at once.
        self.compiled = microkernels.decode is not None and tables.compiled and not (tables.known and columns < tables.count)
        self.stream = self.result is self.wanted and result.nbytes >= _STREAMED
        #: Whether there are enough look-ups for a table of byte pairs: in total, and in each block with its own table
        self.many = self.result.size >= _PAIRED
        each = math.prod(self.result.shape[-2:]) if st.scale.ndim else self.result.size
        self.many_each = (each if self.per_tensor else self.m * self.k) >= _PAIRED
        self.scaled_tables: dict[int, Array] = {}

    def _pad(self) -> None:
        """Let the result have the padding of short rows, and whole blocks of rows in each of many small matrices."""
        *lead, rows, columns = self.result.shape
        if self.tables.count <= columns < _SHORT_ROW and self.k >= columns:
            columns = self.unit
        if scattered(self.result.shape, self.block, (), True, FEW):
            rows = rounded_up(rows, self.m)
        if (rows, columns) != self.result.shape[-2:]:
            self.result = np.empty((*lead, rows, columns), self.result.dtype)

    def _merge_rows(self, st: ScaledTensor) -> None:
        """Let all rows of a matrix be one, where a block has several whole ones: then its codes are adjacent."""
        *lead, rows, columns = self.result.shape
        m, k = block_sides(self.block, self.result.shape)
        mergeable = self.tables.known and not self.per_tensor and m > 1 and k >= columns and columns % self.tables.count == 0
        if mergeable and st.data.flags.c_contiguous and self.result.flags.c_contiguous:
            self.result, self.block = self.result.reshape(*lead, 1, rows * columns), (1, m * columns)

    def run(self) -> None:
        self._run_pieces(*self._pieces())
        if self.result is not self.wanted:
            rows, columns = self.wanted.shape[-2:]
            self.wanted[...] = self.result[..., :rows, :columns]

    def matrices(self) -> list[Any] | None:
        """The codes of each matrix, for a microkernel that decodes part after part; None where a block is too large."""
        matrix = self.microkernels.matrix
        if not self.compiled or matrix is None or self.result is not self.wanted or (self.large and not self.per_tensor):
            return None
        element, found = self.tables.element, list[Any]()
        for piece in self._pieces()[0]:
            rows, columns = piece.shape
            found.append(matrix(element, *self._codes(piece, 0, rows, 0, columns, piece.lead), columns))
        return found

    def _pieces(self) -> tuple[list[Piece], bool]:
        """As `cut_pieces`."""
        st, shape = self.st, self.result.shape
        data, scale = np.asarray(st.data), aligned_array(st.scale)
        zero_point: Any = None if st.zero_point is None else aligned_array(st.zero_point)
        global_scale: Any = None if st.global_scale is None else np.asarray(st.global_scale)
        if (record := self.fmt.scale_record) is not None:  # one item for each block
            scale = np.ascontiguousarray(scale).view(f"V{record.nbytes}")
        if (record := self.fmt.offset_record) is not None:
            zero_point = np.ascontiguousarray(zero_point).view(f"V{record.nbytes}")
        scale = scale.view(U1) if scale.itemsize == 1 else scale
        if self.block == (1, None) and scale.ndim == 1:
            along = (*shape[:-1], 1)
            scale = np.broadcast_to(scale[:, None], along)
            zero_point = None if zero_point is None else np.broadcast_to(zero_point[:, None], along)
        self.scale = scale.reshape(-1)
        self.zero_point = None if zero_point is None else zero_point.reshape(-1)
        self.global_scale = None if global_scale is None else global_scale.reshape(-1)
        lead: Shape = global_scale.shape if global_scale is not None else scale.shape if self.per_tensor else ()
        of_blocks = (None, None, None)
        if not self.per_tensor:
            grid = *shape[:-2], -(-shape[-2] // self.m), -(-shape[-1] // self.k)
            of_blocks = scale.reshape(grid), None if zero_point is None else zero_point.reshape(grid), None
        rows = self.wanted.shape[-2]
        data = data.view(U1).reshape(*self.wanted.shape[:-1], -1)
        if rows < shape[-2]:
            padded = np.zeros((*shape[:-1], data.shape[-1]), U1)
            padded[..., :rows, :] = data
            data = padded
        elif scattered(shape, self.block, (), data.flags.c_contiguous, FEW):
            data = np.ascontiguousarray(data)
        return cut_pieces(self.result, self.block, self.unit, lead, data, *of_blocks)

    def _run_pieces(self, pieces: list[Piece], flat: bool) -> None:
        tables = self.tables
        shares = self.compiled and self.microkernels.shares
        if self.compiled:
            for piece in pieces:
                piece.limit = max(piece.values.size, 1) if shares else _LONG
        if self.per_tensor:
            jobs = all_jobs(pieces, 1, tables.count)
        elif self.large:
            jobs = within_blocks(pieces, self.m, self.k, tables.count)
        else:
            m = self.m = 1 if flat else self.m
            step = self._compiled if self.compiled else self._blocks if tables.known else self._hand_over
            run_each(step, all_jobs(pieces, m, self.unit), m, self.unit, not self.compiled, shares)
            return
        step = self._compiled if self.compiled else self._one_scale if tables.known else self._hand_over
        run_each(step, jobs, 1, tables.count, not self.compiled, shares)

    def _compiled(self, _: Buffers, __: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, number: int) -> None:
        """A chunk of whole blocks, or within one block."""
        fmt, decode = self.fmt, self.microkernels.decode
        assert decode is not None
        data, blocks = self._codes(piece, r0, r1, c0, c1, number)
        target, columns = piece.values[r0:r1, c0:c1], self.result.shape[-1]
        if (
            blocks.scale_record is not None and self.k >= columns
        ):  # each row has a record, which a flat piece would join to others
            data, target = data.reshape(-1, packed_length(fmt.element, columns)), target.reshape(-1, columns)
        decode(self.tables.element, data, blocks, self.dtype, target if target.dtype == F4 else target.view(U2), self.stream)

    def _codes(self, piece: Piece, r0: int, r1: int, c0: int, c1: int, number: int) -> tuple[Array, Blocks]:
        """The codes of a chunk of whole blocks, or within one block, and what is done to their numbers."""
        fmt, tables = self.fmt, self.tables
        if self.large:
            m, k = r1 - r0, c1 - c0
            scale, offset = (None if a is None else a[number : number + 1] for a in (self.scale, self.zero_point))
        else:
            m, k = self.m, self.k
            places = slice(r0 // m, -(-r1 // m)), slice(c0 // k, -(-c1 // k))
            scale, offset = (None if a is None else a[places] for a in (piece.scale, piece.zero_point))
        assert scale is not None
        of_bytes, coded = None, fmt.scale_record
        if coded is not None:
            k = fmt.scale.block[1] or 1
        elif fmt.scale.convention == "amax":
            scale = NUMPY.div(fmt.scale.codec.read(NUMPY, scale), fmt.qmax(fmt.scale))
        elif tables.scales is not None:
            of_bytes = tables.scales
        elif scale.dtype is not F32_DTYPE:
            scale = fmt.scale.codec.read(NUMPY, scale)
        if offset is not None:
            offset = np.ascontiguousarray(offset if coded is not None else reference.offsets_of(NUMPY, offset))
        global_scale, level = None, fmt.global_scale
        if self.global_scale is not None and level is not None:
            g = self.global_scale[piece.lead]
            global_scale = float(NUMPY.div(g, fmt.qmax(level)) if level.convention == "amax" else g)
        blocks = Blocks(
            m,
            k,
            np.ascontiguousarray(scale),
            of_bytes,
            tables.halves is not None,
            offset if fmt.offset == "zero_point" else None,
            offset if fmt.offset == "bias" else None,
            global_scale,
            level is not None and level.convention == "divisor",
            coded,
            fmt.offset_record,
        )
        data = piece.data[r0:r1, byte_range(self.fmt.element, c0, c1)]
        return data if data.strides[1] == 1 else np.ascontiguousarray(data), blocks

    def _decoded(self, work: Buffers, table: Array, piece: Piece, r0: int, r1: int, c0: int, c1: int) -> tuple[Array, Array]:
        """(values of a chunk, rows by columns; their destination, possibly the same memory)."""
        count = self.tables.count
        rows, columns = r1 - r0, rounded_up(c1 - c0, count)
        target = piece.values[r0:r1, c0:c1]
        direct = target.dtype == F4 and columns == c1 - c0 and target.flags.c_contiguous
        values = target.reshape(-1) if direct else work.scaled[: rows * columns].view(F4)
        self.tables.decode(table, piece.data[r0:r1, byte_range(self.fmt.element, c0, c1)], values)
        return (target if direct else values.reshape(rows, columns)[:, : c1 - c0]), target

    def _one_scale(self, work: Buffers, _: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, number: int) -> None:
        """A chunk within one block: the scale is applied to the table instead of every code."""
        table = self.scaled_tables.get(number)
        if table is None:
            table = self.tables.expand(self._scaled(number, piece.lead), self.many_each)
            if self.per_tensor:  # the chunks of a matrix share it, and few matrices are processed at a time
                if len(self.scaled_tables) > MOST_THREADS:
                    self.scaled_tables.clear()
                self.scaled_tables[number] = table
        values, target = self._decoded(work, table, piece, r0, r1, c0, c1)
        self._store(values, target)

    def _store(self, values: Array, target: Array) -> None:
        """Round values to the dtype of the result."""
        if values is target:
            return
        store = self.microkernels.store
        if store is not None and target.dtype != F4 and target.flags.c_contiguous and values.flags.c_contiguous:
            store(values, self.dtype, target.view(U2))
        else:
            np.copyto(target, values, casting="unsafe")

    def _scaled(self, number: int, lead: int) -> Array:
        """Values of all codes under the scales of block `number`."""
        fmt, one = self.fmt, self.tables.one
        biased = fmt.offset == "bias"
        if self.zero_point is not None and not biased:
            one = one - reference.offsets_of(NUMPY, self.zero_point[number : number + 1])
        one = reference.apply_scale(NUMPY, one, self.scale[number : number + 1], fmt, fmt.scale)
        if self.global_scale is not None and fmt.global_scale is not None:
            one = reference.apply_scale(NUMPY, one, self.global_scale[lead : lead + 1], fmt, fmt.global_scale)
        if biased and self.zero_point is not None:
            bias = reference.offsets_of(NUMPY, self.zero_point[number : number + 1])
            one = flushed(NUMPY, one) + flushed(NUMPY, bias)
        return one

    def _blocks(self, work: Buffers, _: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, __: int) -> None:
        """A chunk of whole blocks."""
        fmt, tables, m, k = self.fmt, self.tables, self.m, self.k
        table = tables.wide if self.many and tables.integer is None else tables.table
        values, target = self._decoded(work, table, piece, r0, r1, c0, c1)
        places = slice(r0 // m, -(-r1 // m)), slice(c0 // k, -(-c1 // k))

        def with_each(op: Any, a: Array) -> None:
            """`values` op `a`, with one number per block, in place."""
            if m == 1 and k >= 32 and values.shape[1] % k == 0:  # see `times_scale`
                grid = values.reshape(len(values), -1, k)
                op(grid, a[:, :, None], out=grid)
            else:
                rows = a if m == 1 else a.repeat(m, axis=0)[: r1 - r0]
                op(values, rows if k == 1 else rows.repeat(k, axis=1)[:, : c1 - c0], out=values)

        biased = fmt.offset == "bias"
        if piece.zero_point is not None and not biased:
            with_each(np.subtract, reference.offsets_of(NUMPY, piece.zero_point[places]))
        assert piece.scale is not None
        stored = piece.scale[places]
        if tables.halves is not None and not stored.all():
            with_each(np.multiply, tables.halves.take(stored))
        scale = fmt.scale.codec.read(NUMPY, stored) if tables.scales is None else tables.scales.take(stored)
        if fmt.scale.convention == "divisor":
            with_each(np.divide, scale)
        else:
            if fmt.scale.convention == "amax":
                scale = NUMPY.div(scale, fmt.qmax(fmt.scale))
            with_each(np.multiply, scale)
        level = fmt.global_scale
        if self.global_scale is not None and level is not None:
            g = self.global_scale[piece.lead]
            if level.convention == "multiplier":
                np.multiply(values, g, out=values)
            else:
                values[...] = reference.apply_scale(NUMPY, values, g, fmt, level)
        if biased and piece.zero_point is not None:
            if _has_subnormals(scale):
                values[...] = flushed(NUMPY, np.ascontiguousarray(values))
            with_each(np.add, flushed(NUMPY, reference.offsets_of(NUMPY, piece.zero_point[places])))
        self._store(values, target)

    def _hand_over(self, _: Buffers, i: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, number: int) -> None:
        """A chunk, by the generic algorithm."""
        st, count = self.st, self.tables.count
        data = piece.data[r0:r1, byte_range(self.fmt.element, c0, c1)]
        if self.large:
            one = () if self.per_tensor else (1, 1)
            scale, zero_point = (a if a is None else a[number].reshape(one) for a in (self.scale, self.zero_point))
        else:
            places = slice(r0 // self.m, -(-r1 // self.m)), slice(c0 // self.k, -(-c1 // self.k))
            scale, zero_point = (a if a is None else a[places] for a in (piece.scale, piece.zero_point))
            if self.k >= self.result.shape[-1]:  # a block is a row, which would be longer in a flat piece
                data = data.reshape(-1, packed_length(self.fmt.element, self.result.shape[-1]))
                scale, zero_point = (a if a is None else a.reshape(-1, 1) for a in (scale, zero_point))
        global_scale = None if self.global_scale is None else self.global_scale[piece.lead]
        padding = -(c1 - c0) % count
        part = ScaledTensor.from_parts(data, scale, st.recipe, st.layout, zero_point, global_scale, -1, padding)
        target = piece.values[r0:r1, c0:c1]
        np.copyto(target, reference.dequantize(part).reshape(target.shape), casting="unsafe")


def _has_subnormals(a: Array) -> bool:
    magnitude = np.abs(a)
    return bool(((magnitude < _SMALLEST) & (magnitude > 0)).any())
