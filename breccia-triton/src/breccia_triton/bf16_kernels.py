"""The Triton kernels around a product of BF16 numbers: decoding to BF16, and finishing; see `bf16_matmul`.

Arguments in capitals are constants. Names with a_ and b_ are those of the operands' components; flags has a number for each line
of K of an operand (a row of a, a column of b), not zero where the line holds a value that BF16 does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .geometry import Source
from .numerics import INF, MAGNITUDE, NORMAL, bits_of, outer_multiplier, rounded
from .specs import Scale
from .tiles import decoded, tile_of_program


@dataclass(frozen=True)
class Side:
    """An operand of a product.

    source: how its codes are read, None for an array of BF16 numbers. outer: its global scale, which `source` leaves out where
    values are to be exact. least, most: multipliers of that scale that need no FP32. k_last: whether K is the last axis in memory.
    """

    source: Source | None
    outer: Scale | None
    least: float
    most: float
    k_last: bool


@triton.jit
def exact_kernel(
    x, x_scale, x_zero_point, x_outer, out, flags, rows, columns, x_groups, G: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """The values of a ScaledTensor without its global scale, in BF16, and the flags of their lines, which are zeros before.

    BF16 has the exponents of FP32, and the values have at most 8 significant bits. So they are exact but for subnormal numbers,
    some of which lose bits, and which tensor cores may take as zeros.
    """
    matrix, i, j, row, row_exists, column, column_exists = tile_of_program(rows, columns, G)
    ROWS: tl.constexpr = G.down * G.tall
    COLUMNS: tl.constexpr = G.along * G.wide
    SOURCE: tl.constexpr = D.source
    v = decoded(
        x, x_scale, x_zero_point, x_outer, matrix, i, j, row, row_exists, column, column_exists, rows, columns, x_groups,
        ROWS, COLUMNS, SOURCE,
    )  # fmt: skip
    exists = row_exists[:, None] & column_exists[None, :]
    to = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    tl.store(out + to, rounded(v, tl.bfloat16, SOURCE.ptx), mask=exists)
    u = bits_of(v) & MAGNITUDE
    inexact = (u != 0) & (u < NORMAL)
    if D.outer is not None:
        inexact = inexact | ((u != 0) & _strays(x_outer, D))
    inexact = (inexact & exists).to(tl.int32)
    if D.k_last:
        found, line, line_exists, lines = tl.max(inexact, 1), row, row_exists, rows
    else:
        found, line, line_exists, lines = tl.max(inexact, 0), column, column_exists, columns
    tl.store(flags + matrix * lines + line, found, mask=line_exists & (found != 0))


@triton.jit
def finishing_kernel(
    a, a_scale, a_outer, b, b_scale, b_outer, a_flags, b_flags, product, bias, out, rows, columns, depth, a_groups, b_groups,
    a_many, b_many,
    A: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Tiles of the result (matrices, rows, columns) that a flag concerns, in FP32 from the codes.

    With `product`, also the other tiles: that product of BF16 numbers times the global scales, plus `bias`. Where the sums of such
    a product are not finite, they may be so under the global scales, and the tile is computed in FP32 too. a_many, b_many: 1, or 0
    for an operand whose matrix every other one meets.
    """
    pid = tl.program_id(0)
    down, along = tl.cdiv(rows, TILE), tl.cdiv(columns, TILE)
    matrix, i, j = pid // along // down, (pid // along) % down, pid % along
    row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    a_matrix, b_matrix = matrix * a_many, matrix * b_many
    flagged = 0
    if A.source is not None:
        flagged = flagged | tl.max(tl.load(a_flags + a_matrix * rows + row, mask=row < rows, other=0))
    if B.source is not None:
        flagged = flagged | tl.max(tl.load(b_flags + b_matrix * columns + column, mask=column < columns, other=0))
    exists = (row < rows)[:, None] & (column < columns)[None, :]
    at = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    total = tl.zeros((TILE, TILE), tl.float32)
    factor = 1.0
    if product is not None:
        total = tl.load(product + at, mask=exists, other=0.0)
        if A.outer is not None or B.outer is not None:
            factor = _multiplier(a_outer, A) * _multiplier(b_outer, B)
            flagged = flagged | tl.max(((bits_of(total) & MAGNITUDE) >= INF).to(tl.int32))
    if flagged != 0:
        total = tl.zeros((TILE, TILE), tl.float32)
        for k in range(0, tl.cdiv(depth, DEPTH)):
            x = _lines(a, a_scale, a_outer, a_matrix, i, k, rows, depth, a_groups, TILE, DEPTH, A)
            y = _lines(b, b_scale, b_outer, b_matrix, j, k, columns, depth, b_groups, TILE, DEPTH, B)
            total = tl.dot(x, tl.trans(y), total, input_precision="ieee")
        _store(out + at, total.to(tl.float64), bias, column, columns, exists, PTX)
    elif product is not None:
        _store(out + at, total.to(tl.float64) * factor, bias, column, columns, exists, PTX)


@triton.jit
def _store(to, total, bias, column, columns, exists, PTX: tl.constexpr):
    """Store FP64 sums, plus the bias of columns."""
    if bias is not None:
        added = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32).to(tl.float64)
        total = total + added[None, :]
    tl.store(to, rounded(total.to(tl.float32), to.dtype.element_ty, PTX), mask=exists)


@triton.jit
def _multiplier(outer, D: tl.constexpr):
    """The multiplier of a global scale, in FP64: products of two, and of sums with them, neither overflow nor vanish."""
    OUTER: tl.constexpr = D.outer
    if D.outer is not None:
        return outer_multiplier(tl.load(outer), OUTER).to(tl.float64)
    else:
        return 1.0


@triton.jit
def _strays(outer, D: tl.constexpr):
    """Whether the global scale is NaN, or values under it may not be normal FP32 numbers."""
    OUTER: tl.constexpr = D.outer
    magnitude = tl.abs(outer_multiplier(tl.load(outer), OUTER))
    return tl.where((magnitude >= D.least) & (magnitude <= D.most), 0, 1) != 0


@triton.jit
def _lines(
    x, x_scale, x_outer, matrix, i, k, lines, depth, groups, LINES: tl.constexpr, DEPTH: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """FP32 values (LINES, DEPTH) of an operand: its lines from i * LINES on, from k * DEPTH on along K."""
    line, place = i * LINES + tl.arange(0, LINES), k * DEPTH + tl.arange(0, DEPTH)
    if D.k_last:
        return _values(
            x, x_scale, x_outer, matrix, i, k, line, line < lines, place, place < depth, lines, depth, groups, LINES, DEPTH, D
        )
    else:
        found = _values(
            x, x_scale, x_outer, matrix, k, i, place, place < depth, line, line < lines, depth, lines, groups, DEPTH, LINES, D
        )
        return tl.trans(found)


@triton.jit
def _values(
    x, x_scale, x_outer, matrix, i, j, row, row_exists, column, column_exists, rows, columns, groups,
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
            x, x_scale, None, x_outer, matrix, i, j, row, row_exists, column, column_exists, rows, columns, groups,
            ROWS, COLUMNS, SOURCE,
        )  # fmt: skip
        return tl.where(exists, v, 0.0)
