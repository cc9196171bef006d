"""The Triton kernels of `cast`: one for every recipe, and a pass before it for the amax of blocks that no tile holds.

A program takes a tile of whole blocks, or a part of a block whose amax is known: it is read once, and written once for each
orientation. Codes and scales are computed in registers. Arguments in capitals are constants: S, a `specs.Spec`; G, a
`geometry.Tile`; V, a `geometry.Variant`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import (
    INF,
    MAGNITUDE,
    NORMAL,
    accept_scale,
    bits_of,
    clean,
    decode,
    divisor_of,
    encode,
    encode_bias,
    flushed,
    largest,
    number,
    outer_codes,
    outer_multiplier,
    own_codes,
    packed,
    random_word,
    read_scale,
    saturated,
    scale_codes,
    scaled,
    te_multiplier,
)

# ------------------------------------------------------------------------------------------------ positions


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
def positions(tile, extent, N: tl.constexpr, B: tl.constexpr, L: tl.constexpr):
    """(positions of a tile's N * L slots along a side, which of them exist)."""
    slot = tl.arange(0, N * L)
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
def program(rows, columns, G: tl.constexpr):
    """(matrix, tile along the rows, tile along the columns) of this program."""
    if G.folded:
        pid = tl.program_id(0)
        if G.large:
            pid = pid.to(tl.int64)
        down = tiles(rows, G.down, G.block_rows, G.tall)
        along = tiles(columns, G.along, G.block_columns, G.wide)
        matrix, i, j = pid // along // down, (pid // along) % down, pid % along
    else:
        matrix, i, j = tl.program_id(2), tl.program_id(1), tl.program_id(0)
        if G.large:
            matrix, i, j = matrix.to(tl.int64), i.to(tl.int64), j.to(tl.int64)
    return matrix, i, j


@triton.jit
def loaded(x, matrix, row, column, exists, rows, columns, stride_matrix, stride_row, stride_column, V: tl.constexpr):
    """A tile of FP32 numbers, zeros where there are none. The strides are read where the tensor is not contiguous."""
    if V.strided:
        at = matrix.to(tl.int64) * stride_matrix + row[:, None] * stride_row + column[None, :] * stride_column
    else:
        at = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    return tl.load(x + at, mask=exists, other=0.0).to(tl.float32)


# ------------------------------------------------------------------------------------------------ amax


@triton.jit
def amax_kernel(x, amax, rows, columns, matrices, stride_matrix, stride_row, stride_column, G: tl.constexpr, V: tl.constexpr):
    """FP32 bits of the largest magnitude of the tensor, or of each row or column, into zeros."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if G.large:
        pid, programs = pid.to(tl.int64), programs.to(tl.int64)
    TALL: tl.constexpr = G.tall
    WIDE: tl.constexpr = G.wide
    found = tl.zeros((TALL, WIDE), tl.int32)
    for step in range(V.steps):
        tile = pid + step * programs
        if V.strided or V.source != "tensor":
            down = tiles(rows, 1, 0, G.tall)
            along = tiles(columns, 1, 0, G.wide)
            matrix, i, j = tile // along // down, (tile // along) % down, tile % along
        else:  # one row
            matrix, i, j = pid * 0, pid * 0, tile
        row, row_exists = positions(i, rows, 1, 0, G.tall)
        column, column_exists = positions(j, columns, 1, 0, G.wide)
        row_exists = row_exists & (matrix < matrices)
        exists = row_exists[:, None] & column_exists[None, :]
        u = (
            bits_of(loaded(x, matrix, row, column, exists, rows, columns, stride_matrix, stride_row, stride_column, V))
            & MAGNITUDE
        )
        if V.finite:
            u = tl.where(u < INF, u, 0)
        if V.source == "rows":
            tl.atomic_max(amax + matrix * rows + row, tl.max(u, 1), mask=row_exists)
        elif V.source == "columns":
            tl.atomic_max(amax + matrix * columns + column, tl.max(u, 0), mask=column_exists)
        else:
            found = tl.maximum(found, u)
    if V.source == "tensor":
        tl.atomic_max(amax, tl.max(tl.max(found, 1), 0))


# ------------------------------------------------------------------------------------------------ cast


@triton.jit
def cast_kernel(
    x,
    data,
    scale,
    zero_point,
    outer,
    amax,
    supplied,
    seed_low,
    seed_high,
    rows,
    columns,
    groups,
    stride_matrix,
    stride_row,
    stride_column,
    S: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
):
    """Codes, scales, zero-points and the global scale. amax: of the tensor, of rows or of columns. supplied: scales to use.

    groups: how many groups of packed codes the contraction axis has.
    """
    matrix, i, j = program(rows, columns, G)
    row, row_exists = positions(i, rows, G.down, G.block_rows, G.tall)
    column, column_exists = positions(j, columns, G.along, G.block_columns, G.wide)
    exists = row_exists[:, None] & column_exists[None, :]
    u = bits_of(loaded(x, matrix, row, column, exists, rows, columns, stride_matrix, stride_row, stride_column, V))
    multiplier = 1.0
    LEVEL: tl.constexpr = S.outer
    if LEVEL is not None:
        if V.source == "supplied":
            outer_code = accept_scale(tl.load(supplied), LEVEL)
        else:
            outer_code = outer_codes(tl.load(amax), LEVEL, V.ptx)
        if (matrix == 0) & (i == 0) & (j == 0):
            tl.store(outer, outer_code)
        multiplier = outer_multiplier(outer_code, LEVEL)
    write(
        u, data, scale, zero_point, amax, supplied, multiplier, seed_low, seed_high, matrix, i, j, row, row_exists, column,
        column_exists, rows, columns, groups, S, G, V,
    )  # fmt: skip


@triton.jit
def write(
    u,
    data,
    scale,
    zero_point,
    amax,
    supplied,
    multiplier,
    seed_low,
    seed_high,
    matrix,
    i,
    j,
    row,
    row_exists,
    column,
    column_exists,
    rows,
    columns,
    groups,
    S: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
):
    """Cast the FP32 bits `u` of a tile, with blocks along axis G.axis."""
    ROWS: tl.constexpr = G.down * G.tall
    COLUMNS: tl.constexpr = G.along * G.wide
    OUTER: tl.constexpr = S.outer is not None
    ELEMENT: tl.constexpr = S.element
    SCALE: tl.constexpr = S.scale
    CODEC: tl.constexpr = S.scale.codec
    row_block, column_block = blocks(i, G.down, G.block_rows), blocks(j, G.along, G.block_columns)
    block_rows = 1 if G.block_rows == 0 else tl.cdiv(rows, G.block_rows)
    block_columns = 1 if G.block_columns == 0 else tl.cdiv(columns, G.block_columns)
    block_exists = (row_block < block_rows)[:, None] & (column_block < block_columns)[None, :]
    at = (matrix.to(tl.int64) * block_rows + row_block[:, None]) * block_columns + column_block[None, :]
    if V.tensor:
        at = at * 0

    # The amax of blocks, as FP32 bits: NaN and Inf are the largest.
    if V.source == "tensor":
        top = tl.zeros((1, 1), tl.int32) + tl.load(amax)
    elif V.source == "rows":
        top = tl.load(amax + matrix * rows + row, mask=row_exists, other=0)[:, None]
    elif V.source == "columns":
        top = tl.load(amax + matrix * columns + column, mask=column_exists, other=0)[None, :]
    else:
        top = largest(largest(tl.reshape(u, (G.down, G.tall, G.along, G.wide)), 3, V.ptx), 1, V.ptx)
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

    OWN: tl.constexpr = V.source == "supplied" and not OUTER and ELEMENT.nan >= 0
    if V.source == "supplied" and not OUTER:
        stored = tl.load(supplied + at, mask=block_exists, other=0).to(tl.int32)
        if SCALE.codec.bits == 16:
            stored = stored & 0xFFFF
        codes = accept_scale(stored, SCALE)
    else:
        codes = scale_codes(statistic, multiplier, SCALE, OUTER, V.ptx and V.source != "supplied", V.ptx)
    if not OWN:
        codes = tl.where(faulty, SCALE.nan, codes)
    by, usable = divisor_of(codes, multiplier, SCALE, OUTER, V.ptx)
    if SCALE.rule == "te" and V.source != "supplied":
        by = tl.where(statistic == 0, 1.0, te_multiplier(statistic, SCALE))
    owner = block_exists
    if G.block_rows == 0:
        owner = owner & (i == 0)
    if G.block_columns == 0:
        owner = owner & (j == 0)
    if V.tensor:
        owner = owner & (matrix == 0)
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
    if S.offset == "zero_point":
        shift = saturated(scaled(-low, by, usable, SCALE, False, False))
        z = encode(shift, 0, 0, ELEMENT, False, V.native, False, False)
        z = tl.where(usable, z, 0)
        y = saturated(scaled(clean(u), by_element, usable_element, SCALE, False, False))
        code = encode(y, word, spread(decode(z, ELEMENT), G), ELEMENT, False, V.native, V.stochastic, True)
        tl.store(zero_point + at, z.to(tl.uint8), mask=owner)
    elif S.offset == "bias":
        bias = encode_bias(low, SCALE)
        y = flushed(saturated(clean(u) - spread(read_scale(bias, SCALE), G)))
        y = saturated(scaled(y, by_element, usable_element, SCALE, False, False))
        code = encode(y, word, 0, ELEMENT, False, V.native, V.stochastic, False)
        store_scale(zero_point + at, tl.where(usable, bias, 0), owner, CODEC)
    else:
        # Not where a factor may be subnormal: the instruction that flushes subnormal elements would flush it too.
        FLUSHES: tl.constexpr = V.ptx and not (SCALE.extreme or (V.source == "supplied" and CODEC.kind == "power"))
        y = scaled(number(u), by_element, usable_element, SCALE, V.subnormals, FLUSHES)
        FITS: tl.constexpr = SCALE.fits and V.source != "supplied"
        code = encode(y, word, 0, ELEMENT, FITS, V.native, V.stochastic, False)
        if OWN:
            code = tl.where(usable_element, own_codes(code, u, ELEMENT), code)

    # Codes in the order of the tensor, packed along the contraction axis.
    if ELEMENT.bits == 8:
        to = (matrix.to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
        tl.store(data + to, code.to(tl.uint8), mask=row_exists[:, None] & column_exists[None, :])
    else:
        COUNT: tl.constexpr = 2 if ELEMENT.bits == 4 else 4
        SIZE: tl.constexpr = 1 if ELEMENT.bits == 4 else 3
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
            to = (matrix.to(tl.int64) * (groups * SIZE) + group[:, None] * SIZE) * columns + column[None, :]
            mask = group_exists[:, None] & column_exists[None, :]
            step = columns
        if SIZE == 1:
            tl.store(data + to, packed(code, ELEMENT, ROWS, COLUMNS, G.axis).to(tl.uint8), mask=mask)
        else:
            bits = packed(code, ELEMENT, ROWS, COLUMNS, G.axis)
            if G.axis == 1 and V.words:
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
    wide = tl.broadcast_to(of_blocks[:, None, :, None], (G.down, G.tall, G.along, G.wide))
    return tl.reshape(wide, (G.down * G.tall, G.along * G.wide))


@triton.jit
def store_scale(to, codes, mask, C: tl.constexpr):
    """Store int32 codes of scales in their width."""
    if C.bits == 8:
        tl.store(to, codes.to(tl.uint8), mask=mask)
    elif C.bits == 16:
        tl.store(to, codes.to(tl.int16), mask=mask)
    else:
        tl.store(to, codes, mask=mask)
