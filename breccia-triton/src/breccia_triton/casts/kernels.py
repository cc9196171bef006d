"""The Triton kernels: casts for every recipe, one way or both; decoding; and amaxes, which histories record.

A program takes a tile of whole blocks, or a part of a block whose amax is known: it is read once, and written once for each
orientation. Codes and scales are computed in registers. Arguments in capitals are constants: S, a `specs.Spec`; G, a
`geometry.Tile`; V, a `geometry.Variant`; F, a `geometry.Source` where the input is a ScaledTensor, whose components have names
with x_.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import (
    INF,
    MAGNITUDE,
    NORMAL,
    accept_scale,
    bits_of,
    clean,
    cleared,
    converted,
    decode,
    divisor_of,
    encode,
    encode_bias,
    flushed,
    larger_half,
    larger_of_pairs,
    number,
    of_pairs,
    own_codes,
    packed,
    random_word,
    read_scale,
    rounded,
    saturated,
    scale_codes,
    scaled,
    te_multiplier,
    value,
)
from ..tiles import (
    block_count,
    blocks,
    decoded,
    global_scale_of,
    largest_of_blocks,
    positions,
    read,
    repeated,
    rows_by_four,
    scale_place,
    tile_at,
    tile_of_program,
    tiles,
    word_at,
    words_of,
)  # fmt: skip
from .searching import searched, weights_of

# ------------------------------------------------------------------------------------------------ amax


@triton.jit
def amax_kernel(
    x, x_scale, x_zero_point, x_global_scale, amax, work, rows, columns, matrices, x_groups, stride_matrix, stride_row,
    stride_column, G: tl.constexpr, V: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """FP32 bits of the largest magnitude of the tensor; or of each row or column, into zeros. work: as of `gathered`."""
    if V.pairs:
        maxima, programs = amax_of_pairs(x, columns, G, V)
    else:
        maxima, programs = amax_of_tiles(
            x, x_scale, x_zero_point, x_global_scale, amax, rows, columns, matrices, x_groups, stride_matrix, stride_row,
            stride_column, G, V, F,
        )  # fmt: skip
    if V.source == "tensor":
        top, last = gathered(maxima, work, programs)
        if last:
            tl.store(amax, top)


@triton.jit
def record_kernel(
    x, work, amaxes, recorded, before, after, rows, columns, matrices, first, old_count, stride_matrix, stride_row,
    stride_column, S: tl.constexpr, G: tl.constexpr, V: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Record the amax of the tensor (see `record`). before: the scale of the history."""
    if V.pairs:
        maxima, programs = amax_of_pairs(x, columns, G, V)
    else:
        maxima, programs = amax_of_tiles(
            x, None, None, None, None, rows, columns, matrices, None, stride_matrix, stride_row, stride_column, G, V, None
        )
    top, last = gathered(maxima, work, programs)
    if last:
        record(top, amaxes, recorded, before, after, first, old_count, S, V, LENGTH)


@triton.jit
def amax_of_tiles(
    x, x_scale, x_zero_point, x_global_scale, amax, rows, columns, matrices, x_groups, stride_matrix, stride_row, stride_column,
    G: tl.constexpr, V: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """(largest magnitudes in the tiles of this program, as FP32 bits; number of programs). Those of rows or columns go out."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if G.large:
        pid, programs = pid.to(tl.int64), programs.to(tl.int64)
    TALL: tl.constexpr = G.tall
    WIDE: tl.constexpr = G.wide
    maxima = tl.zeros((TALL, WIDE), tl.int32)
    down, along = tiles(rows, 1, 0, G.tall), tiles(columns, 1, 0, G.wide)
    # A program goes along rows or down columns, as far as it goes.
    if V.source == "rows":
        chunks = tl.cdiv(along, V.steps)
        of, i_0, j_0 = pid // chunks // down, (pid // chunks) % down, pid % chunks * V.steps
    else:
        chunks = tl.cdiv(down, V.steps)
        of, i_0, j_0 = pid // along // chunks, (pid // along) % chunks * V.steps, pid % along
    for step in range(V.steps):
        if V.source == "rows":
            matrix, i, j = of, i_0, j_0 + step
        elif V.source == "columns":
            matrix, i, j = of, i_0 + step, j_0
        elif V.strided or F is not None:
            tile = pid + step * programs
            matrix, i, j = tile // along // down, (tile // along) % down, tile % along
        else:  # one row
            matrix, i, j = pid * 0, pid * 0, pid + step * programs
        row, row_exists = positions(i, rows, 1, 0, G.tall)
        column, column_exists = positions(j, columns, 1, 0, G.wide)
        u = MAGNITUDE & read(
            x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists & (matrix < matrices), column,
            column_exists, rows, columns, x_groups, stride_matrix, stride_row, stride_column, TALL, WIDE, V, F,
        )  # fmt: skip
        if V.finite:
            u = tl.where(u < INF, u, 0)
        maxima = tl.maximum(maxima, u)
    if V.source == "rows":
        row, row_exists = positions(i_0, rows, 1, 0, G.tall)
        tl.atomic_max(amax + of * rows + row, tl.max(maxima, 1), mask=row_exists & (of < matrices))
    elif V.source == "columns":
        column, column_exists = positions(j_0, columns, 1, 0, G.wide)
        tl.atomic_max(amax + of * columns + column, tl.max(maxima, 0), mask=column_exists & (of < matrices))
    return maxima, programs


@triton.jit
def amax_of_pairs(x, columns, G: tl.constexpr, V: tl.constexpr):
    """As `amax_of_tiles`, for one row of an even number of FP16 or BF16 numbers: two at a time."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if G.large:
        pid, programs = pid.to(tl.int64), programs.to(tl.int64)
    WORDS: tl.constexpr = G.wide // 2
    word = tl.arange(0, WORDS)[None, :]
    words = x.to(tl.pointer_type(tl.int32))
    HALF: tl.constexpr = x.dtype.element_ty
    maxima = tl.zeros((1, WORDS), tl.int32)
    for step in range(V.steps):
        at = (pid + step * programs) * WORDS + word
        maxima = larger_of_pairs(maxima, tl.load(words + at, mask=at < columns // 2, other=0), HALF, not V.finite)
    half = larger_half(maxima)
    if V.finite:
        INF_OF_HALF: tl.constexpr = 0x7F80 if HALF == tl.bfloat16 else 0x7C00
        if tl.max(half) >= INF_OF_HALF:  # Inf is among the numbers: look for the finite ones alone
            half = tl.zeros((1, WORDS), tl.int32)
            for step in range(V.steps):
                at = (pid + step * programs) * WORDS + word
                w = tl.load(words + at, mask=at < columns // 2, other=0)
                low, high = w & 0x7FFF, (w >> 16) & 0x7FFF
                half = tl.maximum(half, tl.where(low < INF_OF_HALF, low, 0))
                half = tl.maximum(half, tl.where(high < INF_OF_HALF, high, 0))
    return bits_of(half.to(tl.int16).to(HALF, bitcast=True).to(tl.float32)), programs


@triton.jit
def gathered(maxima, work, programs):
    """(the largest number of all programs, whether this is the last of them, which returns it).

    work: two zeros, the largest so far and how many programs are done. They are zeros again afterwards.
    """
    tl.atomic_max(work, tl.max(tl.max(maxima, 1), 0), sem="relaxed")
    last = tl.atomic_add(work + 1, 1, sem="acq_rel") == programs - 1  # ordered after the line above
    top = 0
    if last:
        top = tl.atomic_xchg(work, 0, sem="relaxed")
        tl.atomic_xchg(work + 1, 0, sem="relaxed")
    return top, last


@triton.jit
def record(
    newest, amaxes, recorded, before, after, first, old_count, S: tl.constexpr, V: tl.constexpr, LENGTH: tl.constexpr
):  # fmt: skip
    """Write `old_count` of the `amaxes` from `first` on and the newest into `recorded`, and the scale of the largest into
    `after`.

    Numbers are FP32 bits. Where the largest is zero or faulty, the scale stays as it was before.
    """
    SCALE: tl.constexpr = S.scale
    at = tl.arange(0, LENGTH)
    old = tl.load(amaxes + first + at, mask=at < old_count, other=0)
    tl.store(recorded + at, old, mask=at < old_count)
    tl.store(recorded + old_count, newest)
    largest = tl.maximum(tl.max(old, 0), newest)
    usable = (largest >= NORMAL) & (largest < INF)
    statistic = number(tl.where(usable, tl.zeros((1, 1), tl.int32) + largest, 0))
    codes = scale_codes(statistic, 1.0, SCALE, False, False, V.ptx)
    codes = tl.where(usable, codes, tl.load(before))
    tl.store(after + tl.zeros((1, 1), tl.int32), codes)


# ------------------------------------------------------------------------------------------------ dequantize


@triton.jit
def dequantize_kernel(
    x, x_scale, x_zero_point, x_global_scale, out, rows, columns, x_groups, G: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """The values of a ScaledTensor, rounded once to the dtype of `out`."""
    matrix, i, j, row, row_exists, column, column_exists = tile_of_program(rows, columns, G)
    ROWS: tl.constexpr = G.down * G.tall
    COLUMNS: tl.constexpr = G.along * G.wide
    v = decoded(
        x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns, x_groups,
        ROWS, COLUMNS, F,
    )  # fmt: skip
    to = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    v = rounded(v, out.dtype.element_ty, F.ptx)
    tl.store(out + to, v, mask=row_exists[:, None] & column_exists[None, :])


# ------------------------------------------------------------------------------------------------ cast


@triton.jit
def cast_kernel(
    x, x_scale, x_zero_point, x_global_scale, data, scale, zero_point, global_scale, amax, supplied, importance, seed_low,
    seed_high, rows, columns, groups, x_groups, stride_matrix, stride_row, stride_column,
    S: tl.constexpr, G: tl.constexpr, V: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Codes, scales, zero-points and the global scale; or, where V.values, the values they decode to, into `data`.

    amax: of the tensor, of rows or of columns. supplied: scales to use. importance: weights for a search for scales, as bits.
    groups: how many groups of packed codes the contraction axis has.
    """
    matrix, i, j, row, row_exists, column, column_exists = tile_of_program(rows, columns, G)
    u, words = read_tile(
        x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns, x_groups,
        stride_matrix, stride_row, stride_column, G, V, F,
    )  # fmt: skip
    if V.tensor_amax:
        amax = tl.load(amax)
    global_code, multiplier = global_scale_of(global_scale, amax, supplied, (matrix == 0) & (i == 0) & (j == 0), S, V)
    write(
        u, words, data, scale, zero_point, amax, supplied, importance, global_code, multiplier, seed_low, seed_high, matrix, i,
        j, row, row_exists, column, column_exists, rows, columns, groups, S, G, V,
    )  # fmt: skip


@triton.jit
def waiting_cast_kernel(
    x, x_scale, x_zero_point, x_global_scale, data, scale, zero_point, global_scale, work, seed_low, seed_high, rows, columns,
    groups, matrices, x_groups, stride_matrix, stride_row, stride_column,
    S: tl.constexpr, G: tl.constexpr, V: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """`amax_kernel` and `cast_kernel` in one launch: all programs run at the same time, and wait for each other in between.

    A program reads its tiles twice; small ones are still in its cache then. work: as of `gathered`.
    """
    down = tiles(rows, G.down, G.block_rows, G.tall)
    along = tiles(columns, G.along, G.block_columns, G.wide)
    first, programs, count = tl.program_id(0), tl.num_programs(0), matrices * down * along
    maxima = tl.zeros((G.down * G.tall, G.along * G.wide), tl.int32)
    tile = first
    while tile < count:
        matrix, i, j = tile // along // down, (tile // along) % down, tile % along
        row, row_exists, column, column_exists = tile_at(i, j, rows, columns, G)
        u, _ = read_tile(
            x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns,
            x_groups, stride_matrix, stride_row, stride_column, G, V, F,
        )  # fmt: skip
        u = u & MAGNITUDE
        if V.finite:
            u = tl.where(u < INF, u, 0)
        maxima = tl.maximum(maxima, u)
        tile += programs
    amax = largest_of_programs(maxima, work, programs)
    global_code, multiplier = global_scale_of(global_scale, amax, None, first == 0, S, V)
    tile = first
    while tile < count:
        matrix, i, j = tile // along // down, (tile // along) % down, tile % along
        row, row_exists, column, column_exists = tile_at(i, j, rows, columns, G)
        u, words = read_tile(
            x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns,
            x_groups, stride_matrix, stride_row, stride_column, G, V, F,
        )  # fmt: skip
        write(
            u, words, data, scale, zero_point, amax, None, None, global_code, multiplier, seed_low, seed_high, matrix, i, j,
            row, row_exists, column, column_exists, rows, columns, groups, S, G, V,
        )  # fmt: skip
        tile += programs


@triton.jit
def largest_of_programs(maxima, work, programs):
    """The largest number of all programs, which run at the same time. work: two zeros, and zeros again afterwards."""
    tl.atomic_max(work, tl.max(tl.max(maxima, 1), 0), sem="relaxed")
    done = tl.atomic_add(work + 1, 1, sem="acq_rel") + 1  # ordered after the line above
    while done < programs:
        done = tl.atomic_add(work + 1, 0, sem="acquire")
    largest = tl.atomic_max(work, 0, sem="relaxed")
    if tl.atomic_add(work + 1, 1, sem="acq_rel") == 2 * programs - 1:  # the last to have read it
        tl.atomic_xchg(work, 0, sem="relaxed")
        tl.atomic_xchg(work + 1, 0, sem="relaxed")
    return largest


@triton.jit
def read_tile(
    x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns, x_groups,
    stride_matrix, stride_row, stride_column, G: tl.constexpr, V: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """(FP32 bits of a tile; with V.pairs the words of two BF16 numbers that they are from, otherwise the same bits)."""
    ROWS: tl.constexpr = G.down * G.tall
    COLUMNS: tl.constexpr = G.along * G.wide
    if V.pairs:
        if G.quads:
            words = rows_by_four(x, matrix, i, j, column, column_exists, rows, columns, G, V)
        else:
            words = words_of(x, matrix, j, row, row_exists, rows, columns, G)
        return tl.reshape(of_pairs(words), (ROWS, COLUMNS)), words
    elif G.quads:
        u = bits_of(rows_by_four(x, matrix, i, j, column, column_exists, rows, columns, G, V).to(tl.float32))
        return u, u
    else:
        u = read(
            x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns,
            x_groups, stride_matrix, stride_row, stride_column, ROWS, COLUMNS, V, F,
        )  # fmt: skip
        return u, u


@triton.jit
def cast_record_kernel(
    x, data, scale, supplied, work, amaxes, recorded, after, seed_low, seed_high, rows, columns, groups, matrices, first,
    old_count, stride_matrix, stride_row, stride_column,
    S: tl.constexpr, G: tl.constexpr, V: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """A cast under one supplied scale for the tensor, and `record_kernel`: each program casts V.steps tiles."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if G.large:
        pid, programs = pid.to(tl.int64), programs.to(tl.int64)
    ROWS: tl.constexpr = G.down * G.tall
    COLUMNS: tl.constexpr = G.along * G.wide
    down, along = tiles(rows, 1, 0, G.tall), tiles(columns, 1, 0, G.wide)
    maxima = tl.zeros((ROWS, COLUMNS), tl.int32)
    for step in range(V.steps):
        tile = pid + step * programs
        matrix, i, j = tile // along // down, (tile // along) % down, tile % along
        there = tl.where(matrix < matrices, rows, 0)  # no rows past the last matrix
        row, row_exists, column, column_exists = tile_at(i, j, there, columns, G)
        u, _ = read_tile(
            x, None, None, None, matrix, i, j, row, row_exists, column, column_exists, there, columns, None,
            stride_matrix, stride_row, stride_column, G, V, None,
        )  # fmt: skip
        maxima = tl.maximum(maxima, u & MAGNITUDE)
        write(
            u, u, data, scale, None, None, supplied, None, 0, 1.0, seed_low, seed_high, matrix, i, j, row, row_exists, column,
            column_exists, there, columns, groups, S, G, V,
        )  # fmt: skip
    top, last = gathered(maxima, work, programs)
    if last:
        record(top, amaxes, recorded, supplied, after, first, old_count, S, V, LENGTH)


@triton.jit
def pair_kernel(
    x, data, scale, zero_point, global_scale, other_data, other_scale, other_zero_point, other_global_scale, amax, other_amax,
    supplied, seed_low, seed_high, rows, columns, groups, other_groups, stride_matrix, stride_row, stride_column,
    S: tl.constexpr, G: tl.constexpr, V: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Two casts of tiles that are read once: blocks along the rows by G and V, and down the columns by H and W."""
    matrix, i, j, row, row_exists, column, column_exists = tile_of_program(rows, columns, G)
    u, words = read_tile(
        x, None, None, None, matrix, i, j, row, row_exists, column, column_exists, rows, columns, None,
        stride_matrix, stride_row, stride_column, G, V, None,
    )  # fmt: skip
    write_pair(
        u, words, data, scale, zero_point, global_scale, other_data, other_scale, other_zero_point, other_global_scale, amax,
        other_amax, supplied, seed_low, seed_high, matrix, i, j, row, row_exists, column, column_exists, rows, columns, groups,
        other_groups, S, G, V, H, W,
    )  # fmt: skip


@triton.jit
def pair_record_kernel(
    x, data, scale, other_data, other_scale, supplied, work, amaxes, recorded, after, seed_low, seed_high, rows, columns,
    groups, other_groups, matrices, first, old_count, stride_matrix, stride_row, stride_column,
    S: tl.constexpr, G: tl.constexpr, V: tl.constexpr, H: tl.constexpr, W: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """`pair_kernel` under one supplied scale for the tensor, and `record_kernel`: each program casts V.steps tiles."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if G.large:
        pid, programs = pid.to(tl.int64), programs.to(tl.int64)
    down = tiles(rows, G.down, G.block_rows, G.tall)
    along = tiles(columns, G.along, G.block_columns, G.wide)
    FOUR: tl.constexpr = 4 if G.quads else 1  # the adjacent rows that a thread has
    maxima = tl.zeros((G.down * G.tall // FOUR, G.along * G.wide), tl.int32)
    for step in range(V.steps):
        tile = pid + step * programs
        matrix, i, j = tile // along // down, (tile // along) % down, tile % along
        there = tl.where(matrix < matrices, rows, 0)  # no rows past the last matrix
        row, row_exists, column, column_exists = tile_at(i, j, there, columns, G)
        u, words = read_tile(
            x, None, None, None, matrix, i, j, row, row_exists, column, column_exists, there, columns, None,
            stride_matrix, stride_row, stride_column, G, V, None,
        )  # fmt: skip
        of_rows = tl.reshape(u & MAGNITUDE, (G.down * G.tall // FOUR, FOUR, G.along * G.wide))
        maxima = tl.maximum(maxima, tl.max(of_rows, 1))
        write_pair(
            u, words, data, scale, None, None, other_data, other_scale, None, None, None, None, supplied, seed_low, seed_high,
            matrix, i, j, row, row_exists, column, column_exists, there, columns, groups, other_groups, S, G, V, H, W,
        )  # fmt: skip
    top, last = gathered(maxima, work, programs)
    if last:
        record(top, amaxes, recorded, supplied, after, first, old_count, S, V, LENGTH)


@triton.jit
def write_pair(
    u, words, data, scale, zero_point, global_scale, other_data, other_scale, other_zero_point, other_global_scale, amax,
    other_amax, supplied, seed_low, seed_high, matrix, i, j, row, row_exists, column, column_exists, rows, columns, groups,
    other_groups, S: tl.constexpr, G: tl.constexpr, V: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write both casts of a tile (see `read_tile`)."""
    if V.tensor_amax:
        amax, other_amax = tl.load(amax), tl.load(other_amax)
    global_code, multiplier = global_scale_of(global_scale, amax, supplied, (matrix == 0) & (i == 0) & (j == 0), S, V)
    code, codes, owner = write(
        u, words, data, scale, zero_point, amax, supplied, None, global_code, multiplier, seed_low, seed_high, matrix, i, j,
        row, row_exists, column, column_exists, rows, columns, groups, S, G, V,
    )  # fmt: skip
    if S.global_scale is not None:
        if (matrix == 0) & (i == 0) & (j == 0):
            tl.store(other_global_scale, global_code)
    #: Blocks that are the same both ways have the same codes, which are computed once.
    SQUARE: tl.constexpr = G.block_rows == H.block_rows and G.block_columns == H.block_columns and G.block_rows != 1
    ELEMENT: tl.constexpr = S.element
    CODEC: tl.constexpr = S.scale.codec
    if W.turned and SQUARE and S.element.bits == 8 and S.offset == "none" and not V.stochastic:
        at = scale_places(matrix, i, j, rows, columns, S, H, W)
        store_scale(other_scale + at, codes, owner, CODEC)
        store_codes(
            other_data, code, matrix, i, j, row, row_exists, column, column_exists, rows, columns, other_groups, ELEMENT, H, W
        )
    else:
        write(
            u, words, other_data, other_scale, other_zero_point, other_amax, supplied, None, global_code, multiplier, seed_low,
            seed_high, matrix, i, j, row, row_exists, column, column_exists, rows, columns, other_groups, S, H, W,
        )  # fmt: skip


@triton.jit
def scale_places(matrix, i, j, rows, columns, S: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """Positions of the scales of a tile's blocks."""
    STORAGE: tl.constexpr = "turned" if V.turned and V.storage == "plain" and G.block_columns > 1 else V.storage
    row_block, column_block = blocks(i, G.down, G.block_rows), blocks(j, G.along, G.block_columns)
    block_rows, block_columns = block_count(rows, G.block_rows), block_count(columns, G.block_columns)
    of = matrix
    if V.tensor:
        of = matrix * 0
    BYTES: tl.constexpr = S.scale.codec.bits // 8
    return scale_place(of, row_block[:, None], column_block[None, :], block_rows, block_columns, STORAGE, G.axis, BYTES)


@triton.jit
def write(
    u, words, data, scale, zero_point, amax, supplied, importance, global_code, multiplier, seed_low, seed_high, matrix, i, j,
    row, row_exists, column, column_exists, rows, columns, groups, S: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Cast the FP32 bits `u` of a tile, with blocks along axis G.axis. words: as `read_tile` returns them.

    amax: of the tensor, where V.tensor_amax; or the place of those of rows or columns. Returns (codes, those of scales, which
    scales it stored).
    """
    TWO_LEVEL: tl.constexpr = S.global_scale is not None
    ELEMENT: tl.constexpr = S.element
    SCALE: tl.constexpr = S.scale
    CODEC: tl.constexpr = S.scale.codec
    STORAGE: tl.constexpr = "turned" if V.turned and V.storage == "plain" and G.block_columns > 1 else V.storage
    row_block, column_block = blocks(i, G.down, G.block_rows), blocks(j, G.along, G.block_columns)
    block_rows, block_columns = block_count(rows, G.block_rows), block_count(columns, G.block_columns)
    block_exists = (row_block < block_rows)[:, None] & (column_block < block_columns)[None, :]
    of = matrix
    if V.tensor:
        of = matrix * 0
    at = scale_places(matrix, i, j, rows, columns, S, G, V)

    # The amax of blocks, as FP32 bits: NaN and Inf are the largest.
    if V.source == "tensor":
        top = tl.zeros((1, 1), tl.int32) + amax
    elif V.source == "rows":
        top = tl.load(amax + matrix * rows + row, mask=row_exists, other=0)[:, None]
    elif V.source == "columns":
        top = tl.load(amax + matrix * columns + column, mask=column_exists, other=0)[None, :]
    else:
        top = largest_of_blocks(words, G.down, G.tall, G.along, G.wide, V.ptx, V.pairs)
    faulty = top >= INF

    # What the scale is computed from.
    low = 0.0
    if S.offset == "none":
        statistic = number(tl.where((top >= NORMAL) & ~faulty, top, 0))
    else:
        exists = row_exists[:, None] & column_exists[None, :]
        y = clean(u)
        y = tl.where(y == 0, 0.0, y)
        least = tl.where(exists, y, float("inf"))
        most = tl.where(exists, y, float("-inf"))
        low = tl.min(tl.min(tl.reshape(least, (G.down, G.tall, G.along, G.wide)), 3), 1)
        high = tl.max(tl.max(tl.reshape(most, (G.down, G.tall, G.along, G.wide)), 3), 1)
        low, high = tl.where(block_exists, low, 0.0), tl.where(block_exists, high, 0.0)
        if S.offset == "zero_point":
            low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
        statistic = flushed(saturated(high - low))

    OWN: tl.constexpr = V.source == "supplied" and not TWO_LEVEL and ELEMENT.nan >= 0
    if V.source == "supplied" and not TWO_LEVEL:
        # Supplied scales are plain.
        plain = scale_place(of, row_block[:, None], column_block[None, :], block_rows, block_columns, "plain", G.axis, 1)
        codes = accept_scale(word_at(supplied, plain, block_exists, CODEC.bits), SCALE)
    else:
        GLOBAL_FITS: tl.constexpr = V.ptx and V.source != "supplied"
        codes = scale_codes(statistic, multiplier, SCALE, TWO_LEVEL, GLOBAL_FITS, V.ptx)
        if SCALE.window is not None:
            weights = None
            if V.weighted:
                weights = weights_of(importance, row, row_exists, column, column_exists, G)
            found = searched(u, codes, statistic, multiplier, weights, S, G, V, GLOBAL_FITS)
            codes = tl.where(statistic == 0, codes, found)
    if not OWN:
        codes = tl.where(faulty, SCALE.nan, codes)
    if V.source == "supplied" and TWO_LEVEL:  # under NaN for a global scale that is refused, no scale is computed
        of_blocks = number(tl.zeros_like(top)) + multiplier
        codes = tl.where(of_blocks == of_blocks, codes, tl.where(top < NORMAL, SCALE.zero, SCALE.nan))
    by, usable = divisor_of(codes, multiplier, SCALE, TWO_LEVEL, V.ptx)
    if SCALE.rule == "te" and V.source != "supplied":
        by = tl.where(statistic == 0, 1.0, te_multiplier(statistic, SCALE))
    owner = block_exists
    if G.block_rows == 0:
        owner = owner & (i == 0)
    if G.block_columns == 0:
        owner = owner & (j == 0)
    if V.tensor:
        owner = owner & (matrix == 0)
    if not V.values:
        store_scale(scale + at, codes, owner, CODEC)

    # Elements in units of their scale, and their codes.
    if V.source == "tensor" or V.source == "rows" or V.source == "columns":
        by_element, usable_element = by, usable
    else:
        by_element, usable_element = spread(by, G), spread(usable, G)
    word = u.to(tl.uint32, bitcast=True)
    if V.stochastic:
        if G.axis == 1:
            index = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
        else:
            index = (matrix.to(tl.int64) * columns + column[None, :]) * rows + row[:, None]
        word = random_word(index, seed_low, seed_high)
    offset = codes
    if S.offset == "zero_point":
        shift = saturated(scaled(-low, by, usable, SCALE, False, False))
        offset = tl.where(usable, encode(shift, 0, 0, ELEMENT, False, V.native, False, False), 0)
        y = saturated(scaled(clean(u), by_element, usable_element, SCALE, False, False))
        shift_element = spread(decode(offset, ELEMENT, False), G)
        code = encode(y, word, shift_element, ELEMENT, False, V.native, V.stochastic, True)
        if not V.values:
            there = scale_place(of, row_block[:, None], column_block[None, :], block_rows, block_columns, STORAGE, G.axis, 1)
            tl.store(zero_point + there, offset.to(tl.uint8), mask=owner)
    elif S.offset == "bias":
        offset = encode_bias(low, SCALE)
        y = flushed(saturated(clean(u) - spread(read_scale(offset, SCALE), G)))
        y = saturated(scaled(y, by_element, usable_element, SCALE, False, False))
        code = encode(y, word, 0, ELEMENT, False, V.native, V.stochastic, False)
        offset = tl.where(usable, offset, 0)
        if not V.values:
            store_scale(zero_point + at, offset, owner, CODEC)
    else:
        # Not where a factor may be subnormal: the instruction that flushes subnormal elements would flush it too.
        FLUSHES: tl.constexpr = V.ptx and not (SCALE.extreme or (V.source == "supplied" and CODEC.kind == "power"))
        FITS: tl.constexpr = SCALE.fits and V.source != "supplied"
        FOURS: tl.constexpr = V.ptx and ELEMENT.bits == 8 and not V.values and G.each >= 4
        CONVERTED: tl.constexpr = FOURS and OWN and V.native and not V.stochastic
        if FOURS and (CONVERTED or not OWN):  # four codes of blocks without a scale are cleared at once
            y = scaled(number(u), by_element, None, SCALE, V.subnormals, FLUSHES)
            if CONVERTED:
                code = converted(y, tl.broadcast_to(number(u), y.shape), ELEMENT)
            else:
                code = encode(y, word, 0, ELEMENT, FITS, V.native, V.stochastic, False)
            code = cleared(code, tl.broadcast_to(usable_element, code.shape))
        else:
            y = scaled(number(u), by_element, usable_element, SCALE, V.subnormals, FLUSHES)
            code = encode(y, word, 0, ELEMENT, FITS, V.native, V.stochastic, False)
            if OWN:
                code = tl.where(usable_element, own_codes(code, u, ELEMENT), code)

    if V.values:
        if V.source == "tile" or V.source == "supplied":
            codes, offset = spread(codes, G), spread(offset, G)
        v = value(code & ((1 << ELEMENT.bits) - 1), codes, offset, global_code, S, V.native)
        to = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
        v = rounded(v, data.dtype.element_ty, V.ptx)
        tl.store(data + to, v, mask=row_exists[:, None] & column_exists[None, :])
    else:
        store_codes(data, code, matrix, i, j, row, row_exists, column, column_exists, rows, columns, groups, ELEMENT, G, V)
    return code, codes, owner


@triton.jit
def store_codes(
    data, code, matrix, i, j, row, row_exists, column, column_exists, rows, columns, groups,
    C: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Codes in the order of the tensor, or with V.turned column by column, packed along the contraction axis."""
    if C.bits == 8 and G.quads:
        QUADS: tl.constexpr = G.down * G.tall // 4
        code = tl.reshape(code.to(tl.uint8).to(tl.int32), (QUADS, 2, 2, G.along * G.wide))
        even, odd = tl.split(tl.permute(code, (0, 3, 1, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        quad = i * QUADS + tl.arange(0, QUADS)
        mask = (quad < rows // 4)[:, None] & column_exists[None, :]
        if V.turned:
            to = (matrix.to(tl.int64) * columns + column[None, :]) * (rows // 4) + quad[:, None]
            tl.store(data.to(tl.pointer_type(tl.int32)) + to, a | (b << 8) | (c << 16) | (d << 24), mask=mask)
        else:
            to = data + (matrix.to(tl.int64) * rows + quad[:, None] * 4) * columns + column[None, :]
            tl.store(to, a.to(tl.uint8), mask=mask)
            tl.store(to + columns, b.to(tl.uint8), mask=mask)
            tl.store(to + 2 * columns, c.to(tl.uint8), mask=mask)
            tl.store(to + 3 * columns, d.to(tl.uint8), mask=mask)
    elif V.turned and C.bits == 8:
        to = (matrix.to(tl.int64) * columns + column[None, :]) * rows + row[:, None]
        tl.store(data + to, code.to(tl.uint8), mask=row_exists[:, None] & column_exists[None, :])
    elif C.bits == 8:
        to = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
        tl.store(data + to, code.to(tl.uint8), mask=row_exists[:, None] & column_exists[None, :])
    else:
        ROWS: tl.constexpr = G.down * G.tall
        COLUMNS: tl.constexpr = G.along * G.wide
        COUNT: tl.constexpr = 2 if C.bits == 4 else 4
        SIZE: tl.constexpr = 1 if C.bits == 4 else 3
        if V.ragged:  # the last group is padded with zeros
            code = tl.where(row_exists[:, None] & column_exists[None, :], code, 0)
        if G.axis == 1:
            LENGTH: tl.constexpr = G.block_columns // COUNT
            group, group_exists = positions(j, groups, G.along, LENGTH, G.wide // COUNT)
            to = (matrix.to(tl.int64) * rows + row[:, None]) * (groups * SIZE) + group[None, :] * SIZE
            mask = row_exists[:, None] & group_exists[None, :]
            step = 1
        else:
            LENGTH: tl.constexpr = G.block_rows // COUNT
            group, group_exists = positions(i, groups, G.down, LENGTH, G.tall // COUNT)
            if V.turned:
                to = (matrix.to(tl.int64) * columns + column[None, :]) * (groups * SIZE) + group[:, None] * SIZE
                step = 1
            else:
                to = (matrix.to(tl.int64) * (groups * SIZE) + group[:, None] * SIZE) * columns + column[None, :]
                step = columns
            mask = group_exists[:, None] & column_exists[None, :]
        bits = packed(code, C, ROWS, COLUMNS, G.axis)
        if SIZE == 1:
            tl.store(data + to, bits.to(tl.uint8), mask=mask)
        elif G.axis == 1 and V.words:
            # Four groups of 24 bits are three words.
            even, odd = tl.split(tl.reshape(bits, (ROWS, COLUMNS // 16, 2, 2)))
            a, c = tl.split(even)
            b, d = tl.split(odd)
            LENGTH_4: tl.constexpr = G.block_columns // 16
            four, four_exists = positions(j, groups // 4, G.along, LENGTH_4, G.wide // 16)
            to = (matrix.to(tl.int64) * rows + row[:, None]) * (groups // 4 * 3) + four[None, :] * 3
            mask = row_exists[:, None] & four_exists[None, :]
            words = data.to(tl.pointer_type(tl.int32)) + to
            tl.store(words, a | (b << 24), mask=mask)
            tl.store(words + 1, (b >> 8) | (c << 16), mask=mask)
            tl.store(words + 2, (c >> 16) | (d << 8), mask=mask)
        else:
            tl.store(data + to, bits.to(tl.uint8), mask=mask)
            tl.store(data + to + step, (bits >> 8).to(tl.uint8), mask=mask)
            tl.store(data + to + 2 * step, (bits >> 16).to(tl.uint8), mask=mask)


@triton.jit
def spread(of_blocks, G: tl.constexpr):
    """Numbers of blocks, repeated for the elements of each."""
    return repeated(of_blocks, G.down, G.tall, G.along, G.wide)


@triton.jit
def store_scale(to, codes, mask, C: tl.constexpr):
    """Store int32 codes of scales in their width."""
    if C.bits == 8:
        tl.store(to, codes.to(tl.uint8), mask=mask)
    elif C.bits == 16:
        tl.store(to, codes.to(tl.int16), mask=mask)
    else:
        tl.store(to, codes, mask=mask)
