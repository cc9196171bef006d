"""The Triton kernels around a product of BF16 numbers: decoding to BF16, finishing and mending; see `matmul`.

Arguments in capitals are constants. Names with a_ and b_ are those of the operands' components. flags: zeros at first; one
number that says whether there is a flag, then one for each line along K (the rows of a, a_rows of them, and the columns of b).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ...geometry import Source
from ...numerics import INF, MAGNITUDE, NORMAL, bits_of, global_multiplier, rounded
from ...specs import Scale
from ...tiles import decoded, tile_of_program

#: The FP32 bits of 2^-102: the last significant bit of numbers from there on is a normal number.
NORMAL_LAST_BIT = tl.constexpr((127 - 102) << 23)
#: Columns whose flags a thread writes at once.
RUN = tl.constexpr(16)


@dataclass(frozen=True)
class DecodedOperand:
    """An operand that is decoded to BF16 in memory, as a constant of the kernels around the product.

    source: how its codes are read, None for an array of BF16 numbers. global_scale: which `source` leaves out where values are
    to be exact. least, most: multipliers of that scale that need no FP32. k_last: whether K is last in memory.

    copies: 2 where the product adds up twice along K: values of one operand are two BF16 numbers, and those of the other one
    are there twice. residual: the second copy is what rounding to BF16 leaves of a value, not the value again.
    """

    source: Source | None
    global_scale: Scale | None
    least: float
    most: float
    k_last: bool
    copies: int = 1
    residual: bool = False


@triton.jit
def exact_kernel(
    x, x_scale, x_zero_point, x_global_scale, out, flags, rows, columns, first, x_groups, G: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """The values of an operand without its global scale, in BF16, and flags of their lines, from number `first` on.

    BF16 has the exponents of FP32. Values of at most 8 significant bits are exact but for subnormal numbers, some of which lose
    bits, and which tensor cores may take as zeros. Of other values two copies keep all but 2^-17: what is left of a value by
    rounding it to BF16 is exact in FP32, and is rounded to BF16 in turn. Inf is flagged where it would meet such a remainder.
    """
    matrix, i, j, row, row_exists, column, column_exists = tile_of_program(rows, columns, G)
    ROWS: tl.constexpr = G.down * G.tall
    COLUMNS: tl.constexpr = G.along * G.wide
    exists = row_exists[:, None] & column_exists[None, :]
    if D.source is None:
        at = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
        v = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    else:
        SOURCE: tl.constexpr = D.source
        v = decoded(
            x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns,
            x_groups, ROWS, COLUMNS, SOURCE,
        )  # fmt: skip
    PTX: tl.constexpr = D.source is None or D.source.ptx
    high = rounded(v, tl.bfloat16, PTX)
    u = bits_of(v) & MAGNITUDE
    if D.residual:
        # The last of 24 significant bits is a normal number from 2^-102 on.
        infinite = (bits_of(high.to(tl.float32)) & MAGNITUDE) >= INF
        inexact = ((u != 0) & (u < NORMAL_LAST_BIT)) | (infinite & (u < INF))
        low = rounded(tl.where(infinite, 0.0, v - high.to(tl.float32)), tl.bfloat16, PTX)
    else:
        low = high
        inexact = (u != 0) & (u < NORMAL)
        if D.source is None:
            inexact = u == INF
        elif D.copies == 2:
            inexact = inexact | (u == INF)
    if D.global_scale is not None:
        inexact = inexact | _strays(x_global_scale, D)
    line = matrix.to(tl.int64) * rows + row[:, None]
    if D.copies == 1:
        tl.store(out + line * columns + column[None, :], high, mask=exists)
    else:
        if D.k_last:
            to, step = line * (2 * columns) + column[None, :], columns
        else:
            to, step = (
                (line + matrix.to(tl.int64) * rows) * columns + column[None, :],
                (matrix.to(tl.int64) * 0 + rows) * columns,
            )
        tl.store(out + to, high, mask=exists)
        tl.store(out + to + step, low, mask=exists)
    # A thread has columns next to each other where K is last: they share a store. Elsewhere each element has one, almost all of
    # them masked. A reduction over the tile takes longer than the pass itself.
    inexact = inexact & exists
    if D.k_last:
        SOME: tl.constexpr = min(RUN, COLUMNS)
        inexact = tl.max(tl.reshape(inexact.to(tl.int32), (ROWS, COLUMNS // SOME, SOME)), 2) != 0
        lines = tl.broadcast_to((first + matrix * rows + row)[:, None], (ROWS, COLUMNS // SOME))
    else:
        lines = tl.broadcast_to((first + matrix * columns + column)[None, :], (ROWS, COLUMNS))
    tl.store(flags + 1 + lines, 1, mask=inexact)
    tl.store(flags + lines * 0, 1, mask=inexact)


@triton.jit
def finishing_kernel(
    sums, a_global_scale, b_global_scale, bias, out, flags, rows, columns, a_rows, A: tl.constexpr, B: tl.constexpr,
    G: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """FP32 sums times the global scales, plus `bias`, rounded once to the dtype of `out`.

    Sums that are not finite may be so under the global scales: their rows, of which a has a_rows, are flagged.
    """
    matrix, _i, _j, row, row_exists, column, column_exists = tile_of_program(rows, columns, G)
    exists = row_exists[:, None] & column_exists[None, :]
    at = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    total = tl.load(sums + at, mask=exists, other=0.0)
    if A.global_scale is not None or B.global_scale is not None:
        nonfinite = tl.max(((bits_of(total) & MAGNITUDE) >= INF).to(tl.int32), 1)
        _flag(flags, (matrix * rows + row) % a_rows, row_exists, nonfinite)
        # In FP64 products of two scales, and of sums with them, neither overflow nor vanish.
        total = (total.to(tl.float64) * (_multiplier(a_global_scale, A) * _multiplier(b_global_scale, B))).to(tl.float32)
    tl.store(out + at, _with_bias(total, bias, column, column_exists, out.dtype.element_ty, PTX), mask=exists)


@triton.jit
def mending_kernel(
    a, a_scale, a_zero_point, a_global_scale, b, b_scale, b_zero_point, b_global_scale, flags, bias, out, rows, columns, depth,
    matrices, a_groups, b_groups, a_rows, a_many, b_many,
    A: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Tiles of the result (matrices, rows, columns) with a flag, in FP32 from the codes. Without a flag, programs end at once.

    a_many, b_many: 1, or 0 for an operand whose matrix every one of the other operand meets.
    """
    if tl.load(flags) != 0:
        down, along = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
        tile = tl.program_id(0)
        while tile < matrices * down * along:  # not `range`, whose bounds Triton's interpreter does not convert under NumPy 2.5
            matrix, i, j = tile // along // down, (tile // along) % down, tile % along
            a_matrix, b_matrix = matrix * a_many, matrix * b_many
            row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
            flagged = tl.max(tl.load(flags + 1 + a_matrix * rows + row, mask=row < rows, other=0))
            b_flags = flags + 1 + a_rows + b_matrix * columns
            flagged = flagged | tl.max(tl.load(b_flags + column, mask=column < columns, other=0))
            if flagged != 0:
                total = tl.zeros((TILE, TILE), tl.float32)
                k = tile * 0
                while k * DEPTH < depth:
                    x = _lines(a, a_scale, a_zero_point, a_global_scale, a_matrix, i, k, rows, depth, a_groups, TILE, DEPTH, A)
                    y = _lines(
                        b, b_scale, b_zero_point, b_global_scale, b_matrix, j, k, columns, depth, b_groups, TILE, DEPTH, B
                    )
                    total = tl.dot(x, tl.trans(y), total, input_precision="ieee")
                    k += 1
                at = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
                exists = (row < rows)[:, None] & (column < columns)[None, :]
                total = _with_bias(total, bias, column, column < columns, out.dtype.element_ty, PTX)
                tl.store(out + at, total, mask=exists)
            tile += tl.num_programs(0)


@triton.jit
def grouped_mending_kernel(
    a, b, b_scale, b_zero_point, flags, ends, out, rows, columns, depth, count, b_groups,
    A: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`mending_kernel` for rows in groups, each with its own matrix of b. Rows of no group become zeros.

    ends: int32 numbers of rows where the groups end, `count` of them. b: (count, depth, columns).
    """
    any_flag = tl.load(flags)
    last = tl.load(ends + count - 1)
    down, along = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
    tile = tl.program_id(0)
    while tile < down * along:
        i, j = tile // along, tile % along
        row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        exists = (row < rows)[:, None] & (column < columns)[None, :]
        if (i + 1) * TILE > last:
            zeros = rounded(tl.zeros((TILE, TILE), tl.float32), out.dtype.element_ty, PTX)
            tl.store(out + at, zeros, mask=exists & (row >= last)[:, None])
        if any_flag != 0:
            group, start = tile * 0, tile * 0
            while group < count:
                end = tl.load(ends + group)
                if (end > start) & (start < (i + 1) * TILE) & (end > i * TILE):
                    flagged = tl.max(tl.load(flags + 1 + row, mask=row < rows, other=0))
                    b_flags = flags + 1 + rows + group * columns
                    flagged = flagged | tl.max(tl.load(b_flags + column, mask=column < columns, other=0))
                    if flagged != 0:
                        total = tl.zeros((TILE, TILE), tl.float32)
                        k = tile * 0
                        while k * DEPTH < depth:
                            x = _lines(a, None, None, None, 0 * k, i, k, rows, depth, None, TILE, DEPTH, A)
                            y = _lines(
                                b, b_scale, b_zero_point, None, group, j, k, columns, depth, b_groups, TILE, DEPTH, B
                            )  # fmt: skip
                            total = tl.dot(x, tl.trans(y), total, input_precision="ieee")
                            k += 1
                        inside = (row >= start) & (row < end)
                        tl.store(out + at, rounded(total, out.dtype.element_ty, PTX), mask=exists & inside[:, None])
                start = tl.maximum(start, end)
                group += 1
        tile += tl.num_programs(0)


@triton.jit
def _with_bias(total, bias, column, exists, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """FP32 sums plus the bias of their columns, in the dtype of the result."""
    if bias is not None:
        total = total + tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)[None, :]
    return rounded(total, DTYPE, PTX)


@triton.jit
def _flag(flags, line, exists, flag):
    """Flag lines; the first number says that there is a flag."""
    mask = exists & (flag != 0)
    tl.store(flags + 1 + line, flag, mask=mask)
    tl.store(flags + line * 0, flag, mask=mask)


@triton.jit
def _multiplier(global_scale, D: tl.constexpr):
    """The multiplier of a global scale, in FP64."""
    LEVEL: tl.constexpr = D.global_scale
    if D.global_scale is not None:
        return global_multiplier(tl.load(global_scale), LEVEL).to(tl.float64)
    else:
        return 1.0


@triton.jit
def _strays(global_scale, D: tl.constexpr):
    """Whether the global scale is NaN, or values under it may not be normal FP32 numbers."""
    LEVEL: tl.constexpr = D.global_scale
    magnitude = tl.abs(global_multiplier(tl.load(global_scale), LEVEL))
    return tl.where((magnitude >= D.least) & (magnitude <= D.most), 0, 1) != 0


@triton.jit
def _lines(
    x, x_scale, x_zero_point, x_global_scale, matrix, i, k, lines, depth, groups, LINES: tl.constexpr, DEPTH: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """FP32 values (LINES, DEPTH) of an operand: its lines from i * LINES on, from k * DEPTH on along K."""
    line, place = i * LINES + tl.arange(0, LINES), k * DEPTH + tl.arange(0, DEPTH)
    if D.k_last:
        return _values(
            x, x_scale, x_zero_point, x_global_scale, matrix, i, k, line, line < lines, place, place < depth, lines, depth,
            groups, LINES, DEPTH, D,
        )  # fmt: skip
    else:
        values = _values(
            x, x_scale, x_zero_point, x_global_scale, matrix, k, i, place, place < depth, line, line < lines, depth, lines,
            groups, DEPTH, LINES, D,
        )  # fmt: skip
        return tl.trans(values)


@triton.jit
def _values(
    x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """FP32 values of a tile in the order of memory, zeros where there are none."""
    exists = row_exists[:, None] & column_exists[None, :]
    SOURCE: tl.constexpr = D.source
    if D.source is None:
        at = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
        return tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    else:
        v = decoded(
            x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns,
            groups, ROWS, COLUMNS, SOURCE,
        )  # fmt: skip
        return tl.where(exists, v, 0.0)
