"""Where a program's elements and scales are in memory, in Triton.

Arguments in capitals are constants: G, a `geometry.Tile`; V, a `geometry.Variant`; F, a `geometry.Source`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import (
    accept_scale,
    bits_of,
    extreme_of_pair,
    global_codes,
    global_multiplier,
    largest,
    of_pairs,
    read_scale,
    value,
)


@triton.jit
def tiles(extent, N: tl.constexpr, B: tl.constexpr, L: tl.constexpr):
    """How many tiles cover a side.

    N: blocks of a tile. B: their length, 0 for a block as long as the side. L: slots of each, a power of two.
    """
    if B == 0:
        return tl.cdiv(extent, L)
    else:
        return tl.cdiv(tl.cdiv(extent, B), N)


@triton.jit
def positions(tile, extent, N: tl.constexpr, B: tl.constexpr, L: tl.constexpr, VECTOR: tl.constexpr = 0):
    """(positions of a tile's N * L slots along a side, which of them exist). VECTOR: the most that one thread loads at once."""
    slot = tl.arange(0, N * L)
    if VECTOR > 0:
        slot = tl.max_contiguous(slot, [VECTOR])
    if B == 0 or B == L:
        at = tile * (N * L) + slot
        exists = at < extent
    else:
        at = (tile * N + slot // L) * B + slot % L
        exists = (slot % L < B) & (at < extent)
    return at, exists


@triton.jit
def blocks(tile, N: tl.constexpr, B: tl.constexpr):
    """Indices of a tile's blocks along a side."""
    if B == 0:
        return tl.arange(0, N) * 0
    else:
        return tile * N + tl.arange(0, N)


@triton.jit
def block_count(extent, B: tl.constexpr):
    """How many blocks cover a side."""
    if B == 0:
        return 1
    else:
        return tl.cdiv(extent, B)


@triton.jit
def program(rows, columns, G: tl.constexpr):
    """(matrix, tile along the rows, tile along the columns) of this program."""
    if G.folded:
        pid = tl.program_id(0)
        if G.backward:
            pid = tl.num_programs(0) - 1 - pid
        if G.large:
            pid = pid.to(tl.int64)
        down = tiles(rows, G.down, G.block_rows, G.tall)
        along = tiles(columns, G.along, G.block_columns, G.wide)
        matrix, i, j = pid // along // down, (pid // along) % down, pid % along
    else:
        matrix, i, j = tl.program_id(2), tl.program_id(1), tl.program_id(0)
        if G.backward:
            matrix, i, j = tl.num_programs(2) - 1 - matrix, tl.num_programs(1) - 1 - i, tl.num_programs(0) - 1 - j
        if G.large:
            matrix, i, j = matrix.to(tl.int64), i.to(tl.int64), j.to(tl.int64)
    return matrix, i, j


@triton.jit
def tile_of_program(rows, columns, G: tl.constexpr):
    """(matrix, tile along the rows, tile along the columns, rows, which exist, columns, which exist) of this program."""
    matrix, i, j = program(rows, columns, G)
    row, row_exists, column, column_exists = tile_at(i, j, rows, columns, G)
    return matrix, i, j, row, row_exists, column, column_exists


@triton.jit
def tile_at(i, j, rows, columns, G: tl.constexpr):
    """(rows, which exist, columns, which exist) of the i-th tile along the rows and the j-th along the columns."""
    row, row_exists = positions(i, rows, G.down, G.block_rows, G.tall)
    column, column_exists = positions(j, columns, G.along, G.block_columns, G.wide, G.vector)
    return row, row_exists, column, column_exists


@triton.jit
def global_scale_of(global_scale, amax, supplied, first, S: tl.constexpr, V: tl.constexpr):
    """(code of the global scale, its multiplier), or (0, 1). The first program stores the code. amax: of the tensor."""
    global_code, multiplier = 0, 1.0
    LEVEL: tl.constexpr = S.global_scale
    if LEVEL is not None:
        if V.source == "supplied":
            global_code = accept_scale(tl.load(supplied), LEVEL)
        else:
            global_code = global_codes(amax, LEVEL, V.ptx)
        if not V.values:
            if first:
                tl.store(global_scale, global_code)
        multiplier = global_multiplier(global_code, LEVEL)
    return global_code, multiplier


@triton.jit
def repeated(of_blocks, DOWN: tl.constexpr, TALL: tl.constexpr, ALONG: tl.constexpr, WIDE: tl.constexpr):
    """Numbers of DOWN x ALONG blocks, one for each of the TALL x WIDE elements of a block."""
    # In as few axes as possible: the compiler then keeps the numbers in the registers of their elements.
    if (TALL == 1 and ALONG == 1) or (DOWN == 1 and (WIDE == 1 or ALONG == 1)):
        return tl.broadcast_to(of_blocks, (DOWN * TALL, ALONG * WIDE))
    elif TALL == 1:
        return tl.reshape(tl.broadcast_to(of_blocks[:, :, None], (DOWN, ALONG, WIDE)), (DOWN, ALONG * WIDE))
    elif WIDE == 1:
        return tl.reshape(tl.broadcast_to(of_blocks[:, None, :], (DOWN, TALL, ALONG)), (DOWN * TALL, ALONG))
    else:
        wide = tl.broadcast_to(of_blocks[:, None, :, None], (DOWN, TALL, ALONG, WIDE))
        return tl.reshape(wide, (DOWN * TALL, ALONG * WIDE))


@triton.jit
def largest_of_blocks(
    u, DOWN: tl.constexpr, TALL: tl.constexpr, ALONG: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """The largest magnitudes in DOWN x ALONG blocks of TALL x WIDE elements, as FP32 bits.

    u: FP32 bits; for PAIRS, words of two adjacent BF16 numbers.
    """
    if PAIRS and WIDE == 1:
        maxima = _largest(u, DOWN, TALL, ALONG // 2, 1, PTX, True)
        return tl.reshape(of_pairs(maxima & 0x7FFF7FFF), (DOWN, ALONG))
    elif PAIRS:
        return extreme_of_pair(_largest(u, DOWN, TALL, ALONG, WIDE // 2, PTX, True) & 0x7FFF7FFF, "amax")
    else:
        return _largest(u, DOWN, TALL, ALONG, WIDE, PTX, False)


@triton.jit
def _largest(
    u, DOWN: tl.constexpr, TALL: tl.constexpr, ALONG: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    if TALL == 1 and ALONG == 1:
        return largest(u, 1, PTX, PAIRS)[:, None]
    elif DOWN == 1 and WIDE == 1:
        return largest(u, 0, PTX, PAIRS)[None, :]
    elif DOWN == 1 and ALONG == 1:
        return largest(largest(u, 1, PTX, PAIRS), 0, PTX, PAIRS) + tl.zeros((1, 1), tl.int32)
    elif TALL == 1:
        return largest(tl.reshape(u, (DOWN, ALONG, WIDE)), 2, PTX, PAIRS)
    elif WIDE == 1:
        return largest(tl.reshape(u, (DOWN, TALL, ALONG)), 1, PTX, PAIRS)
    else:
        return largest(largest(tl.reshape(u, (DOWN, TALL, ALONG, WIDE)), 3, PTX, PAIRS), 1, PTX, PAIRS)


@triton.jit
def scale_place(matrix, i, j, rows, columns, STORAGE: tl.constexpr, AXIS: tl.constexpr, BYTES: tl.constexpr):
    """Positions of the scales of blocks (i, j), of rows x columns blocks in each matrix.

    STORAGE "turned" is plain, column by column. The others hold a matrix whose blocks go down its columns (AXIS 0) as its
    transpose.
    """
    if STORAGE == "plain":
        return (matrix.to(tl.int64) * rows + i) * columns + j
    elif STORAGE == "turned":
        return (matrix.to(tl.int64) * columns + j) * rows + i
    else:
        if AXIS == 0:
            i, j, rows, columns = j, i, columns, rows
        if STORAGE == "swizzle_128x4":
            tile = (matrix.to(tl.int64) * tl.cdiv(rows, 128) + i // 128) * tl.cdiv(columns, 4) + j // 4
            return tile * 512 + (i % 32) * 16 + (i // 32) % 4 * 4 + j % 4
        elif STORAGE == "padded_1x4" or STORAGE == "padded_128x4":
            TALL: tl.constexpr = 128 if STORAGE == "padded_128x4" else 1
            return (matrix.to(tl.int64) * (tl.cdiv(rows, TALL) * TALL) + i) * (tl.cdiv(columns, 4) * 4) + j
        else:
            UNIT: tl.constexpr = 16 // BYTES if STORAGE == "column_major" else 1
            return (matrix.to(tl.int64) * columns + j) * (tl.cdiv(rows, UNIT) * UNIT) + i


# ------------------------------------------------------------------------------------------------ what is read


@triton.jit
def loaded(x, matrix, row, column, exists, rows, columns, stride_matrix, stride_row, stride_column, V: tl.constexpr):
    """A tile of FP32 numbers, zeros where there are none. The strides are read where the tensor is not contiguous."""
    if V.strided:
        at = matrix.to(tl.int64) * stride_matrix + row[:, None] * stride_row + column[None, :] * stride_column
    else:
        at = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    return tl.load(x + at, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def words_of(x, matrix, j, row, row_exists, rows, columns, G: tl.constexpr):
    """A tile of words of two adjacent BF16 numbers, zeros where there are none. columns: an even number."""
    if G.block_columns == 1:  # columns of a tile follow each other
        pair, pair_exists = positions(j, columns // 2, 1, 0, G.along // 2, G.vector // 2)
    else:
        pair, pair_exists = positions(j, columns // 2, G.along, G.block_columns // 2, G.wide // 2, G.vector // 2)
    at = (matrix.to(tl.int64) * rows + row[:, None]) * (columns // 2) + pair[None, :]
    return tl.load(x.to(tl.pointer_type(tl.int32)) + at, mask=row_exists[:, None] & pair_exists[None, :], other=0)


@triton.jit
def rows_by_four(x, matrix, i, j, column, column_exists, rows, columns, G: tl.constexpr, V: tl.constexpr):
    """`words_of` for V.pairs, or else a tile of numbers of a contiguous tensor of 4n rows: a thread loads four adjacent rows.

    They are loaded apart, since one load would deal them out to adjacent threads.
    """
    QUADS: tl.constexpr = G.down * G.tall // 4
    row = (i * QUADS + tl.arange(0, QUADS)) * 4
    if V.pairs:
        if G.block_columns == 1:
            column, column_exists = positions(j, columns // 2, 1, 0, G.along // 2, G.vector // 2)
        else:
            column, column_exists = positions(j, columns // 2, G.along, G.block_columns // 2, G.wide // 2, G.vector // 2)
        columns = columns // 2
        x = x.to(tl.pointer_type(tl.int32))
    at = x + (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    exists = (row < rows)[:, None] & column_exists[None, :]
    a, b = tl.load(at, mask=exists, other=0), tl.load(at + columns, mask=exists, other=0)
    c, d = tl.load(at + 2 * columns, mask=exists, other=0), tl.load(at + 3 * columns, mask=exists, other=0)
    numbers = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    return tl.reshape(numbers, (4 * QUADS, a.shape[1]))


@triton.jit
def read(
    x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns, x_groups,
    stride_matrix, stride_row, stride_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, V: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """FP32 bits of a tile of numbers, or of what the codes `x` decode to; zeros where there are none."""
    exists = row_exists[:, None] & column_exists[None, :]
    if F is None:
        v = loaded(x, matrix, row, column, exists, rows, columns, stride_matrix, stride_row, stride_column, V)
    else:
        v = decoded(
            x, x_scale, x_zero_point, x_global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns,
            x_groups, ROWS, COLUMNS, F,
        )  # fmt: skip
        v = tl.where(exists, v, 0.0)
    return bits_of(v)


@triton.jit
def decoded(
    data, scale, zero_point, global_scale, matrix, i, j, row, row_exists, column, column_exists, rows, columns, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """FP32 values of a tile of codes: tile (i, j) of ROWS x COLUMNS elements, or any `row` and `column` where runs are 1."""
    S: tl.constexpr = F.spec
    SCALE: tl.constexpr = F.spec.scale
    STORAGE: tl.constexpr = F.storage
    code = codes_at(data, matrix, i, j, row, row_exists, column, column_exists, rows, columns, groups, ROWS, COLUMNS, F)

    # One number is loaded for each run of elements in one block.
    DOWN: tl.constexpr = ROWS // F.run_rows
    ALONG: tl.constexpr = COLUMNS // F.run_columns
    first_row, first_column = row, column
    if F.run_rows > 1:
        first_row = i * ROWS + tl.arange(0, DOWN) * F.run_rows
    if F.run_columns > 1:
        first_column = j * COLUMNS + tl.arange(0, ALONG) * F.run_columns
    row_block, column_block = first_row * 0, first_column * 0
    if F.block_rows > 0:
        row_block = first_row // F.block_rows
    if F.block_columns > 0:
        column_block = first_column // F.block_columns
    block_rows, block_columns = block_count(rows, F.block_rows), block_count(columns, F.block_columns)
    mask = (first_row < rows)[:, None] & (first_column < columns)[None, :]
    if F.run_rows == 1:
        mask = mask & row_exists[:, None]
    if F.run_columns == 1:
        mask = mask & column_exists[None, :]
    of = matrix
    if F.shared:
        of = matrix * 0
    at = scale_place(
        of, row_block[:, None], column_block[None, :], block_rows, block_columns, STORAGE, F.axis, SCALE.codec.bits // 8
    )
    SCALES: tl.constexpr = S.scale_records
    OFFSETS: tl.constexpr = S.offset_records
    if SCALES is not None:
        scale_code = recorded(scale, of, row_block[:, None], column_block[None, :], rows, columns, mask, F.axis, SCALES)
    else:
        scale_code = word_at(scale, at, mask, SCALE.codec.bits)
    offset = scale_code
    if OFFSETS is not None:
        offset = recorded(zero_point, of, row_block[:, None], column_block[None, :], rows, columns, mask, F.axis, OFFSETS)
    elif S.offset == "zero_point":
        there = scale_place(of, row_block[:, None], column_block[None, :], block_rows, block_columns, STORAGE, F.axis, 1)
        offset = word_at(zero_point, there, mask, 8)
    elif S.offset != "none":
        offset = word_at(zero_point, at, mask, SCALE.codec.bits)
    scale_code = repeated(scale_code, DOWN, F.run_rows, ALONG, F.run_columns)
    if S.offset != "none":
        offset = repeated(offset, DOWN, F.run_rows, ALONG, F.run_columns)
    else:
        offset = scale_code
    global_code = 0
    if S.global_scale is not None:
        global_code = tl.load(global_scale)
    return value(code, scale_code, offset, global_code, S, F.native)


@triton.jit
def word_at(pointer, at, mask, BITS: tl.constexpr):
    """Stored codes of 8, 16 or 32 bits as int32."""
    word = tl.load(pointer + at, mask=mask, other=0).to(tl.int32)
    if BITS == 16:
        word = word & 0xFFFF
    return word


@triton.jit
def recorded(part, matrix, i, j, rows, columns, mask, AXIS: tl.constexpr, R: tl.constexpr):
    """FP32 bits of what the levels of records multiply to, for the finest blocks (i, j) of matrices of rows x columns elements.

    R: a `specs.Records`. A byte of a record is `step` bytes from the next one.
    """
    matrix = matrix.to(tl.int64)
    if AXIS == 1:
        place, step = j % R.blocks, 1
        at = ((matrix * rows + i) * tl.cdiv(columns, R.length) + j // R.blocks) * R.nbytes
    else:
        place, step = i % R.blocks, columns
        at = (matrix * tl.cdiv(rows, R.length) + i // R.blocks) * R.nbytes * columns + j
    number = _level(part, at, step, place, mask, R, 0)
    for n in tl.static_range(1, len(R.levels)):
        number = number * _level(part, at, step, place, mask, R, n)
    return bits_of(number)


@triton.jit
def _level(part, at, step, place, mask, R: tl.constexpr, N: tl.constexpr):
    """FP32 numbers of level N in the records at `at`, for blocks at `place` in them."""
    LEVEL: tl.constexpr = R.levels[N]
    BITS: tl.constexpr = LEVEL.codec.bits
    bit = place // LEVEL.blocks * BITS
    to = at + (LEVEL.start + bit // 8) * step
    code = tl.load(part + to, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, BITS // 8):  # floats are little-endian
        code = code | (tl.load(part + to + byte * step, mask=mask, other=0).to(tl.int32) << (8 * byte))
    if BITS < 8:
        shift = (bit % 8).to(tl.int32)
        if 8 % BITS != 0:  # some codes lie in two bytes
            code = code | (tl.load(part + to + step, mask=mask & (shift > 8 - BITS), other=0).to(tl.int32) << 8)
        code = (code >> shift) & ((1 << BITS) - 1)
    return read_scale(code, LEVEL)


@triton.jit
def codes_at(
    data, matrix, i, j, row, row_exists, column, column_exists, rows, columns, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """int32 codes of a tile. groups: how many groups of packed codes the contraction axis has."""
    BITS: tl.constexpr = F.spec.element.bits
    matrix = matrix.to(tl.int64)
    if BITS == 8:
        to = (matrix * rows + row[:, None]) * columns + column[None, :]
        return tl.load(data + to, mask=row_exists[:, None] & column_exists[None, :], other=0).to(tl.int32)
    elif F.grouped:
        LENGTH: tl.constexpr = F.length
        BYTES: tl.constexpr = LENGTH * BITS // 8
        high = 0
        if F.words:
            bits = _words_of_six(data, matrix, j, row, row_exists, rows, groups, ROWS, COLUMNS)
        else:
            if F.axis == 1:
                group = j * (COLUMNS // LENGTH) + tl.arange(0, COLUMNS // LENGTH)
                at = (matrix * rows + row[:, None]) * (groups * BYTES) + group[None, :] * BYTES
                exists, step = row_exists[:, None] & (group < groups)[None, :], 1
            else:
                group = i * (ROWS // LENGTH) + tl.arange(0, ROWS // LENGTH)
                at = (matrix * (groups * BYTES) + group[:, None] * BYTES) * columns + column[None, :]
                exists, step = (group < groups)[:, None] & column_exists[None, :], columns
            bits = _bytes_at(data + at, step, exists, 0, 4 if BYTES > 4 else BYTES)
            if BYTES > 4:
                high = _bytes_at(data + at, step, exists, 4, BYTES)
        if BITS == 4:
            code = tl.join(bits & 15, bits >> 4)
        else:
            if LENGTH == 4:
                code = tl.join(_pair(bits, high, 0, 2, BITS), _pair(bits, high, 1, 3, BITS))
            else:
                even = tl.join(_pair(bits, high, 0, 4, BITS), _pair(bits, high, 2, 6, BITS))
                odd = tl.join(_pair(bits, high, 1, 5, BITS), _pair(bits, high, 3, 7, BITS))
                code = tl.join(even, odd)
            code = tl.reshape(code, (bits.shape[0], bits.shape[1], LENGTH))
        if F.axis == 0:
            code = tl.permute(code, (0, 2, 1))
        return tl.reshape(code, (ROWS, COLUMNS))
    else:
        COUNT: tl.constexpr = F.length
        SIZE: tl.constexpr = COUNT * BITS // 8
        exists = row_exists[:, None] & column_exists[None, :]
        if F.axis == 1:
            bit = column % COUNT * BITS
            at = (matrix * rows + row[:, None]) * (groups * SIZE) + (column // COUNT * SIZE + bit // 8)[None, :]
            shift, step = (bit % 8).to(tl.int32)[None, :], 1
        else:
            bit = row % COUNT * BITS
            at = (matrix * (groups * SIZE) + (row // COUNT * SIZE + bit // 8)[:, None]) * columns + column[None, :]
            shift, step = (bit % 8).to(tl.int32)[:, None], columns
        word = tl.load(data + at, mask=exists, other=0).to(tl.int32)
        if 8 % BITS != 0:  # some codes lie in two bytes
            word = word | (tl.load(data + at + step, mask=exists & (shift > 8 - BITS), other=0).to(tl.int32) << 8)
        return (word >> shift) & ((1 << BITS) - 1)


@triton.jit
def _bytes_at(at, step, exists, FIRST: tl.constexpr, END: tl.constexpr):
    """Bytes FIRST to END of groups, at most four, as int32. step: from one to the next."""
    bits = tl.load(at + FIRST * step, mask=exists, other=0).to(tl.int32)
    for byte in tl.static_range(FIRST + 1, END):
        bits = bits | (tl.load(at + byte * step, mask=exists, other=0).to(tl.int32) << (8 * (byte - FIRST)))
    return bits


@triton.jit
def _pair(low, high, A: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr):
    """Codes A and B of groups, beside each other. low, high: the first 32 bits of a group, and those after them."""
    return tl.join(_code(low, high, A * BITS, BITS), _code(low, high, B * BITS, BITS))


@triton.jit
def _code(low, high, AT: tl.constexpr, BITS: tl.constexpr):
    """The code of groups whose first bit is AT."""
    MASK: tl.constexpr = (1 << BITS) - 1
    if AT >= 32:
        return (high >> (AT - 32)) & MASK
    elif AT + BITS <= 32:
        return (low >> AT) & MASK
    else:
        FIRST: tl.constexpr = (1 << (32 - AT)) - 1  # a shift of int32 repeats the sign
        return ((low >> AT) & FIRST) | ((high << (32 - AT)) & MASK)


@triton.jit
def _words_of_six(data, matrix, j, row, row_exists, rows, groups, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Groups of 24 bits, four 6-bit codes each, of a tile: every four groups are three words."""
    four = j * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)
    at = ((matrix * rows + row[:, None]) * (groups // 4) + four[None, :]) * 3
    exists = row_exists[:, None] & (four < groups // 4)[None, :]
    words = data.to(tl.pointer_type(tl.int32)) + at
    a = tl.load(words, mask=exists, other=0)
    b = tl.load(words + 1, mask=exists, other=0)
    c = tl.load(words + 2, mask=exists, other=0)
    first, second = a & 0xFFFFFF, ((a >> 24) & 0xFF) | ((b & 0xFFFF) << 8)
    third, fourth = ((b >> 16) & 0xFFFF) | ((c & 0xFF) << 16), (c >> 8) & 0xFFFFFF
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (ROWS, COLUMNS // 4))
