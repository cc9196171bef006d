"""The Triton kernels of products whose operands are decoded in registers; `plans` has the idea and what they take.

Arguments in capitals are constants: P, a `GemmTiling`; A and B, a `MainloopOperand` each. A "line" is a row of a, or a column
of b.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ...geometry import Source
from ...numerics import INF, MAGNITUDE, bits_of, decode, global_multiplier, read_scale, rounded, value
from ...specs import Scale
from ...tiles import block_count, codes_at, decoded, recorded, scale_place, word_at


@dataclass(frozen=True)
class MainloopOperand:
    """An operand that the mainloop decodes, as a constant of the kernel.

    source: how its codes are read in steps along K, None for an array; plain: likewise in the steps of sums in FP32.
    k_last: whether K is last in memory. folded: scales are multiplied into the codes. valued: likewise, with a bias, in FP32.
    low, high: magnitudes between which the scales have to be, unless they are 0. global_scale: with its magnitudes.
    """

    source: Source | None = None
    plain: Source | None = None
    k_last: bool = True
    folded: bool = False
    valued: bool = False
    low: float = 0.0
    high: float = 0.0
    global_scale: Scale | None = None
    global_low: float = 0.0
    global_high: float = 0.0


@dataclass(frozen=True)
class GemmTiling:
    """How a product is cut.

    rows, lines: rows of a, and columns of b, of a tile. deep: columns of K of a step; plain: of a step in FP32. depth: K.
    steps: along K, of each of `split` parts. dot: the dtype that is multiplied. parts: numbers of that dtype that add up to a
    number of b. emulated: numbers in BF16 are multiplied as FP32 (by Triton's interpreter, which has no BF16).
    a_many, b_many: 1, or 0 for an operand whose matrix every one of the other operand meets. ptx: of an NVIDIA GPU.
    """

    rows: int
    lines: int
    deep: int
    plain: int
    depth: int
    steps: int
    split: int
    dot: str
    parts: int
    emulated: bool
    a_many: int
    b_many: int
    ptx: bool


@triton.jit
def fused_kernel(
    a, a_scale, b, b_scale, b_zero_point, b_global_scale, bias, out, rows, columns,
    P: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A tile of `a @ b + bias`, (rows, columns) in each matrix; for P.split > 1, FP32 sums of one part of K.

    Sums are right where scales are in the range of their side and no sum is NaN or Inf. Tiles that are otherwise are computed
    anew, in FP32 from values that are decoded as docs/spec/numerics.md says.
    """
    down, along = tl.cdiv(rows, P.rows), tl.cdiv(columns, P.lines)
    tile = tl.program_id(0)
    i, j, place = (tile // down) % along, tile % down, tile // down // along
    matrix, first = place // P.split, (place % P.split) * P.steps
    a_matrix, b_matrix = matrix * P.a_many, matrix * P.b_many
    row, column = j * P.rows + tl.arange(0, P.rows), i * P.lines + tl.arange(0, P.lines)
    exists = (column < columns)[:, None] & (row < rows)[None, :]
    if P.dot == "float32":
        total = _in_fp32(
            a, a_scale, b, b_scale, b_zero_point, b_global_scale, a_matrix, b_matrix, i, j, first, rows, columns, P, A, B
        )
    else:
        total, strays = _in_steps(a, a_scale, b, b_scale, b_zero_point, a_matrix, b_matrix, i, j, first, rows, columns, P, A, B)
        strays = tl.maximum(strays, tl.max(tl.max((exists & ((bits_of(total) & MAGNITUDE) >= INF)).to(tl.int32), 1), 0))
        if B.global_scale is not None:
            LEVEL: tl.constexpr = B.global_scale
            multiplier = global_multiplier(tl.load(b_global_scale), LEVEL)
            magnitude = tl.abs(multiplier)
            strays = tl.where((magnitude >= B.global_low) & (magnitude <= B.global_high), strays, 1)
            total = total * multiplier
        if strays != 0:
            total = _in_fp32(
                a, a_scale, b, b_scale, b_zero_point, b_global_scale, a_matrix, b_matrix, i, j, first, rows, columns, P, A, B
            )
    if bias is not None and P.split == 1:
        total = total + tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    at = (place.to(tl.int64) * rows + row[None, :]) * columns + column[:, None]
    tl.store(out + at, rounded(total, out.dtype.element_ty, P.ptx), mask=exists)


@triton.jit
def sum_kernel(parts, bias, out, count, columns, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """The sums of SPLIT parts of K, (matrices, SPLIT, count) numbers, in their order, plus `bias`, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < count
    start = parts + tl.program_id(1).to(tl.int64) * SPLIT * count
    total = tl.load(start + at, mask=exists, other=0.0)
    for _ in tl.static_range(1, SPLIT):
        start = start + count
        total = total + tl.load(start + at, mask=exists, other=0.0)
    if bias is not None:
        total = total + tl.load(bias + at % columns, mask=exists, other=0.0).to(tl.float32)
    to = out + tl.program_id(1).to(tl.int64) * count + at
    tl.store(to, rounded(total, out.dtype.element_ty, PTX), mask=exists)


@triton.jit
def _in_steps(
    a, a_scale, b, b_scale, b_zero_point, a_matrix, b_matrix, i, j, first, rows, columns,
    P: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """(FP32 sums (lines, rows) without the global scale, 1 if some scale is outside its range or else 0).

    A step is a product in tensor cores that begins at zero. It lies in one block along K of each side that is not folded, so
    its scales multiply it, and FP32 additions sum up steps.
    """
    LINES: tl.constexpr = P.lines
    ROWS: tl.constexpr = P.rows
    total = tl.zeros((LINES, ROWS), tl.float32)
    b_strays = tl.zeros((LINES,), tl.int32)
    a_strays = tl.zeros((ROWS,), tl.int32)
    for step in tl.range(0, P.steps):
        k = first + step
        x = _numbers(a, a_scale, None, None, a_matrix, j, k, rows, ROWS, A, P)
        scale = _words(b_scale, b_matrix, i, k, columns, LINES, B, P, False)
        offset = _words(b_zero_point, b_matrix, i, k, columns, LINES, B, P, True)
        w = _numbers(b, b_scale, scale, offset, b_matrix, i, k, columns, LINES, B, P)
        part = _product(w, tl.trans(x), P)
        by = tl.full((LINES, ROWS), 1.0, tl.float32)
        if not B.folded:
            multiplier = _scales(scale, B, False)
            b_strays = b_strays | _strays(multiplier, B)
            if B.valued:
                b_strays = b_strays | _strays(_scales(offset, B, True), B)
            else:
                by = tl.broadcast_to(multiplier[:, None], (LINES, ROWS))
        if A.source is not None:
            multiplier = _scales(_words(a_scale, a_matrix, j, k, rows, ROWS, A, P, False), A, False)
            a_strays = a_strays | _strays(multiplier, A)
            by = by * multiplier[None, :]
        total = tl.fma(part, by, total)
    return total, tl.maximum(tl.max(a_strays, 0), tl.max(b_strays, 0))


@triton.jit
def _in_fp32(
    a, a_scale, b, b_scale, b_zero_point, b_global_scale, a_matrix, b_matrix, i, j, first, rows, columns,
    P: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """FP32 sums (lines, rows) of FP32 products of decoded values."""
    LINES: tl.constexpr = P.lines
    ROWS: tl.constexpr = P.rows
    EACH: tl.constexpr = P.deep // P.plain
    total = tl.zeros((LINES, ROWS), tl.float32)
    for step in tl.range(0, P.steps * EACH, num_stages=1):
        k = first * EACH + step
        x = _values(a, a_scale, None, None, a_matrix, j, k, rows, ROWS, A, P)
        w = _values(b, b_scale, b_zero_point, b_global_scale, b_matrix, i, k, columns, LINES, B, P)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit
def _places(i, k, lines, LINES: tl.constexpr, DEEP: tl.constexpr, DEPTH: tl.constexpr, D: tl.constexpr):
    """A tile in the order of memory: (tile along rows, along columns, rows, which exist, columns, which exist)."""
    line, place = i * LINES + tl.arange(0, LINES), k * DEEP + tl.arange(0, DEEP)
    if D.k_last:
        return i, k, line, line < lines, place, place < DEPTH
    else:
        return k, i, place, place < DEPTH, line, line < lines


@triton.jit
def _numbers(
    x, x_scale, scale, offset, matrix, i, k, lines, LINES: tl.constexpr, D: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Numbers (LINES, P.deep) of a step: of an array, of codes, or of codes under their scales; any beyond K for codes of b."""
    DEEP: tl.constexpr = P.deep
    DEPTH: tl.constexpr = P.depth
    SOURCE: tl.constexpr = D.source
    down, along, row, row_exists, column, column_exists = _places(i, k, lines, LINES, DEEP, DEPTH, D)
    tall, wide = lines, DEPTH
    if not D.k_last:
        tall, wide = DEPTH, lines
    TALL: tl.constexpr = LINES if D.k_last else DEEP
    WIDE: tl.constexpr = DEEP if D.k_last else LINES
    if SOURCE is None:
        at = (matrix.to(tl.int64) * tall + row[:, None]) * wide + column[None, :]
        v = tl.load(x + at, mask=row_exists[:, None] & column_exists[None, :], other=0.0)
        if P.emulated:
            v = v.to(tl.float32)
    else:
        GROUPS: tl.constexpr = (P.depth + D.source.length - 1) // D.source.length
        SPEC: tl.constexpr = D.source.spec
        ELEMENT: tl.constexpr = D.source.spec.element
        NATIVE: tl.constexpr = D.source.native
        if D.folded:
            v = decoded(
                x, x_scale, None, None, matrix, down, along, row, row_exists, column, column_exists, tall, wide, GROUPS,
                TALL, WIDE, SOURCE,
            )  # fmt: skip
        else:
            code = codes_at(
                x, matrix, down, along, row, row_exists, column, column_exists, tall, wide, GROUPS, TALL, WIDE, SOURCE
            )
            if P.dot == "float8":
                if ELEMENT.name == "E4M3":
                    v = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
                else:
                    v = code.to(tl.uint8).to(tl.float8e5, bitcast=True)
            elif D.valued:
                v = value(code, _beside(scale, D), _beside(offset, D), 0, SPEC, NATIVE)
            else:
                v = decode(code, ELEMENT, NATIVE)
                if SPEC.offset == "zero_point":
                    v = v - _beside(offset, D).to(tl.float32)
        if P.parts == 1:
            v = _narrow(v, P)
    if not D.k_last:
        v = tl.trans(v)
    return v


@triton.jit
def _beside(of_lines, D: tl.constexpr):
    """Numbers of lines beside a tile in the order of memory."""
    if D.k_last:
        return of_lines[:, None]
    else:
        return of_lines[None, :]


@triton.jit
def _narrow(v, P: tl.constexpr):
    """Numbers in the dtype that is multiplied, which holds them exactly, or else their first bits."""
    if P.dot == "bfloat16":
        v = v.to(tl.bfloat16)
        if P.emulated:
            v = v.to(tl.float32)
    elif P.dot == "float16":
        v = v.to(tl.float16)
        if P.emulated:
            v = v.to(tl.float32)
    return v


@triton.jit
def _product(w, x, P: tl.constexpr):
    """w @ x in FP32, of numbers w that are one of the dtype that is multiplied, or the sum of three, least first."""
    if P.parts == 1:
        return tl.dot(w, x)
    else:
        high = _narrow(w, P)
        rest = w - high.to(tl.float32)
        middle = _narrow(rest, P)
        low = _narrow(rest - middle.to(tl.float32), P)
        return tl.dot(high, x, tl.dot(middle, x, tl.dot(low, x)))


@triton.jit
def _words(
    pointer, matrix, i, k, lines, LINES: tl.constexpr, D: tl.constexpr, P: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Codes of the scales, or of the offsets, of the lines of a step, as int32; zeros where they are not needed.

    Those of several levels are FP32 bits.
    """
    if D.folded or (OFFSET and D.source.spec.offset == "none"):
        return tl.zeros((LINES,), tl.int32)
    else:
        F: tl.constexpr = D.source
        RECORDS: tl.constexpr = F.spec.offset_records if OFFSET else F.spec.scale_records
        BITS: tl.constexpr = 8 if OFFSET and F.spec.offset == "zero_point" else F.spec.scale.codec.bits
        STORAGE: tl.constexpr = F.storage
        AXIS: tl.constexpr = F.axis
        BYTES: tl.constexpr = BITS // 8
        BLOCK: tl.constexpr = F.block_columns if D.k_last else F.block_rows
        ACROSS: tl.constexpr = F.block_rows if D.k_last else F.block_columns
        line = i * LINES + tl.arange(0, LINES)
        of, along = line * 0, k * 0
        if ACROSS > 0:
            of = line // ACROSS
        if BLOCK > 0:
            along = k * P.deep // BLOCK
        if F.shared:
            matrix = matrix * 0
        DEPTH: tl.constexpr = P.depth
        down, across, tall, wide = of, along, lines, DEPTH
        if not D.k_last:
            down, across, tall, wide = along, of, DEPTH, lines
        # The last part of K may have steps beyond it.
        exists = (line < lines) & (k * P.deep < P.depth)
        if RECORDS is not None:
            return recorded(pointer, matrix, down, across, tall, wide, exists, AXIS, RECORDS)
        else:
            heights, widths = block_count(tall, F.block_rows), block_count(wide, F.block_columns)
            at = scale_place(matrix, down, across, heights, widths, STORAGE, AXIS, BYTES)
            return word_at(pointer, at, exists, BITS)


@triton.jit
def _scales(codes, D: tl.constexpr, OFFSET: tl.constexpr):
    """FP32 numbers of codes of scales, or of float offsets."""
    SCALE: tl.constexpr = D.source.spec.offset_scale if OFFSET else D.source.spec.scale
    return read_scale(codes, SCALE)


@triton.jit
def _strays(multiplier, D: tl.constexpr):
    """1 for scales outside the range of their side."""
    magnitude = tl.abs(multiplier)
    return ((magnitude > D.high) | ((magnitude < D.low) & (magnitude > 0.0))).to(tl.int32)


@triton.jit
def _values(
    x, x_scale, x_zero_point, x_global_scale, matrix, i, k, lines, LINES: tl.constexpr, D: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """FP32 values (LINES, P.plain) of a step, zeros where there are none."""
    DEEP: tl.constexpr = P.plain
    DEPTH: tl.constexpr = P.depth
    SOURCE: tl.constexpr = D.plain
    down, along, row, row_exists, column, column_exists = _places(i, k, lines, LINES, DEEP, DEPTH, D)
    exists = row_exists[:, None] & column_exists[None, :]
    tall, wide = lines, DEPTH
    if not D.k_last:
        tall, wide = DEPTH, lines
    if SOURCE is None:
        at = (matrix.to(tl.int64) * tall + row[:, None]) * wide + column[None, :]
        v = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    else:
        GROUPS: tl.constexpr = (P.depth + D.plain.length - 1) // D.plain.length
        TALL: tl.constexpr = LINES if D.k_last else DEEP
        WIDE: tl.constexpr = DEEP if D.k_last else LINES
        v = decoded(
            x, x_scale, x_zero_point, x_global_scale, matrix, down, along, row, row_exists, column, column_exists, tall, wide,
            GROUPS, TALL, WIDE, SOURCE,
        )  # fmt: skip
        v = tl.where(exists, v, 0.0)
    if not D.k_last:
        v = tl.trans(v)
    return v
