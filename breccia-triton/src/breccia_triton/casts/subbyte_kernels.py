"""The Triton kernels of `cast` for codes of 4 and 6 bits in whole blocks of a contiguous tensor.

Such casts are bound by instructions. Here each thread holds consecutive elements, its lane, or rows of a few columns, so that
amax, rounding and packing stay in its registers, and codes leave as words. Constants as in `kernels`; L is a `geometry.Lanes`
or `geometry.Strips`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import (
    INF,
    MAGNITUDE,
    NORMAL,
    ROUNDER,
    bits_of,
    code_of,
    codes_of_pairs,
    difference,
    divisor_of,
    encode_bias,
    extreme,
    extreme_of_each,
    extreme_of_pair,
    flushed,
    four,
    group_of_six,
    halves,
    integers,
    join_bytes,
    larger_pair,
    largest,
    magnitude_pair,
    magnitudes,
    number,
    of_pairs,
    places,
    read_scale,
    saturated,
    scale_codes,
    scaled,
    scaled_magnitude,
    smaller_pair,
    te_multiplier,
    word_of_eight,
    word_of_pairs,
    word_of_rounded,
    words_of_four,
    words_of_rounded,
    words_of_six,
)
from ..tiles import global_scale_of
from .searching import searched


@triton.jit
def _chunks(x, at, exists, COUNT: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr):
    """Lanes of COUNT chunks of SIZE elements. Loaded apart, since one load would deal chunks out to adjacent threads."""
    if COUNT == 1:
        lanes = tl.load(x + at, mask=exists, other=0.0)
    else:
        HALF: tl.constexpr = COUNT // 2
        first = _chunks(x, at, exists, HALF, SIZE, STRIDE, LANES)
        second = _chunks(x, at + HALF * STRIDE, exists, HALF, SIZE, STRIDE, LANES)
        lanes = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (LANES, COUNT * SIZE))
    return lanes


@triton.jit
def _extreme_of_rows(u, KIND: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """`extreme` of each row of a matrix, for LANES threads."""
    ROWS: tl.constexpr = u.shape[0]
    if PTX and ROWS >= LANES:  # a thread has whole rows
        if KIND == "amax":
            u = magnitude_pair(u) if PAIRS else u & MAGNITUDE
        extremes = extreme_of_each(u, KIND, ROWS, u.shape[1], PAIRS, PTX)
    else:
        extremes = extreme(u, 1, KIND, PAIRS, PTX)
    if PAIRS:
        extremes = extreme_of_pair(extremes, KIND)
    return extremes


@triton.jit
def _extreme_of_columns(u, KIND: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """`extreme` along the first two axes of three."""
    extremes = extreme(extreme(u, 1, KIND, PAIRS, PTX), 0, KIND, PAIRS, PTX)
    if PAIRS:
        extremes = tl.reshape(of_pairs(extremes), (WIDE,))
    return extremes


@triton.jit
def _statistic(top):
    """(what scales are computed from, whether the block is faulty: then it is anything) of the bits of the amax of blocks."""
    faulty = top >= INF
    return number(tl.where(top >= NORMAL, top, 0)), faulty


@triton.jit
def _width(least, most, top, S: tl.constexpr):
    """(what scales are computed from, the smallest number, whether the block is faulty) of the bits of extremes of blocks."""
    faulty = tl.maximum(tl.maximum(least & MAGNITUDE, most & MAGNITUDE), top) >= INF
    low, high = flushed(number(tl.where(faulty, 0, least))), flushed(number(tl.where(faulty, 0, most)))
    if S.offset == "zero_point":
        low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
    return flushed(saturated(high - low)), low, faulty


@triton.jit
def _scales(statistic, faulty, multiplier, S: tl.constexpr, V: tl.constexpr, u=None, G: tl.constexpr = None):
    """(codes of scales, what elements are multiplied by, whether the scales are usable) of what they are computed from.

    u, G: the FP32 bits of a tile with a row for each block, for searches.
    """
    TWO_LEVEL: tl.constexpr = S.global_scale is not None
    SCALE: tl.constexpr = S.scale
    codes = scale_codes(statistic, multiplier, SCALE, TWO_LEVEL, V.ptx, V.ptx)
    if S.scale.window is not None:
        best = searched(u, codes[:, None], statistic[:, None], multiplier, None, S, G, V, V.ptx)
        codes = tl.where(statistic == 0, codes, tl.reshape(best, codes.shape))
    codes = tl.where(faulty, SCALE.nan, codes)
    by, usable = divisor_of(codes, multiplier, SCALE, TWO_LEVEL, V.ptx, True)
    usable = usable & ~faulty
    if SCALE.rule == "te":
        by = tl.where(statistic == 0, 1.0, te_multiplier(statistic, SCALE))
    return codes, by, usable


@triton.jit
def _scaled(u, by, S: tl.constexpr, V: tl.constexpr):
    """Elements in units of their scale, anything where it is not usable; for minifloats with `lines`, their magnitudes."""
    SCALE: tl.constexpr = S.scale
    FLUSHES: tl.constexpr = V.ptx and not SCALE.extreme
    x = number(u)
    if S.element.kind == "float" and S.element.lines > 0:
        if FLUSHES and SCALE.rule != "divide":
            return scaled_magnitude(x, by)
        x = tl.abs(x)
    return scaled(x, by, None, SCALE, V.subnormals, FLUSHES)


@triton.jit
def _offsets(low, by, usable, S: tl.constexpr):
    """(offsets to store, what they decode to, the largest number below a zero-point, `by`) of blocks with this smallest number.

    The last two are 0 in blocks without a scale.
    """
    ELEMENT: tl.constexpr = S.element
    SCALE: tl.constexpr = S.scale
    if S.offset == "zero_point":
        shift = tl.where(usable, scaled(-low, by, None, SCALE, False, False), 0.0)
        shift = tl.minimum(tl.maximum(shift, ELEMENT.low), ELEMENT.high) + ROUNDER
        offset, value = bits_of(shift) & ((1 << ELEMENT.bits) - 1), shift - ROUNDER
        limit = ELEMENT.high - value
    else:
        codes = encode_bias(low, SCALE)
        offset, value = tl.where(usable, codes, 0), read_scale(codes, SCALE)
        # Differences that overflow count as the largest number.
        limit = tl.minimum(scaled(tl.zeros_like(low) + 3.4028234663852886e38, by, None, SCALE, False, False), ELEMENT.high)
    return offset, value, tl.where(usable, limit, 0.0), tl.where(usable, by, 0.0)


@triton.jit
def _rounded(u, by, offset, limit, S: tl.constexpr, V: tl.constexpr):
    """Elements under their scale and offset, without the zero-point, rounded as ROUNDER is added; at most `limit`.

    by is 0 in blocks without a scale: their elements become zeros, or NaN, of which the limit makes a zero.
    """
    ELEMENT: tl.constexpr = S.element
    SCALE: tl.constexpr = S.scale
    FITS: tl.constexpr = SCALE.fits
    used = None
    if SCALE.rule == "divide" or not V.ptx:
        used = by != 0
        by = tl.where(used, by, 1.0)
    if S.offset == "zero_point":
        y = scaled(number(u), by, used, SCALE, V.subnormals, V.ptx and not SCALE.extreme)
    else:
        y = difference(u, offset, V.ptx)
        y = scaled(y, by, used, SCALE, False, False)
    y = tl.minimum(y, limit)
    if not FITS:
        y = tl.maximum(y, limit - (ELEMENT.high - ELEMENT.low))
    return y + ROUNDER


@triton.jit
def lanes_kernel(
    x, data, scale, zero_point, global_scale, amax, blocks, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """Codes, scales, offsets and the global scale of `blocks` blocks, which follow each other in memory."""
    STEPS: tl.constexpr = L.steps
    pid = tl.program_id(0)
    if L.backward:
        pid = tl.num_programs(0) - 1 - pid
    if L.large:
        pid = pid.to(tl.int64)
    if V.tensor_amax:
        amax = tl.load(amax)
    _, multiplier = global_scale_of(global_scale, amax, None, pid == 0, S, V)
    for step in tl.static_range(STEPS):
        _lanes(x, data, scale, zero_point, multiplier, blocks, pid * STEPS + step, S, L, V)


@triton.jit
def _lanes(x, data, scale, zero_point, multiplier, blocks, tile, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr):
    LANES: tl.constexpr = L.lanes
    LANE: tl.constexpr = L.lane
    #: Two BF16 numbers are loaded as a word: instructions find extremes of both at once.
    PAIRS: tl.constexpr = V.ptx and x.dtype.element_ty == tl.bfloat16
    EACH: tl.constexpr = 2 if PAIRS else 1
    CHUNK: tl.constexpr = L.chunk // EACH
    BLOCK: tl.constexpr = L.block
    COUNT: tl.constexpr = LANES * LANE // BLOCK
    lane = tile * LANES + tl.arange(0, LANES)
    lane_exists = lane * LANE < tl.cast(blocks, lane.dtype) * BLOCK
    CHUNKS: tl.constexpr = LANE // L.chunk
    PER_BLOCK: tl.constexpr = LANES // COUNT if L.apart else 1
    STRIDE: tl.constexpr = BLOCK // EACH // CHUNKS if L.apart else CHUNK
    at = (lane // PER_BLOCK * (PER_BLOCK * LANE // EACH) + lane % PER_BLOCK * CHUNK)[:, None] + tl.arange(0, CHUNK)[None, :]
    if PAIRS:
        u = _chunks(x.to(tl.pointer_type(tl.int32)), at, lane_exists[:, None], CHUNKS, CHUNK, STRIDE, LANES)
    else:
        u = bits_of(_chunks(x, at, lane_exists[:, None], CHUNKS, CHUNK, STRIDE, LANES).to(tl.float32))
    if L.apart:
        u = tl.permute(tl.reshape(u, (COUNT, PER_BLOCK, CHUNKS, CHUNK)), (0, 2, 1, 3))
    u = tl.reshape(u, (COUNT, BLOCK // EACH))
    TILE: tl.constexpr = L.tile
    codes, offset, packed = _cast(u, multiplier, LANES, LANE, S, V, PAIRS, TILE)
    block = tile * COUNT + tl.arange(0, COUNT)
    to = scale + block
    tl.store(to, codes.to(to.dtype.element_ty), mask=block < blocks)
    if S.offset != "none":
        to = zero_point + block
        tl.store(to, offset.to(to.dtype.element_ty), mask=block < blocks)
    GROUPS: tl.constexpr = packed.shape[1]
    words = data.to(tl.pointer_type(tl.int32))
    if S.element.bits == 4:
        to = lane[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        tl.store(words + to, packed, mask=lane_exists[:, None])
    else:
        _store_sixes(words + lane * (GROUPS * 3 // 4), packed, lane_exists, LANES)


@triton.jit
def _cast(
    u, multiplier, LANES: tl.constexpr, LANE: tl.constexpr, S: tl.constexpr, V: tl.constexpr, PAIRS: tl.constexpr,
    G: tl.constexpr = None,
):  # fmt: skip
    """(codes of scales, offsets or the same codes, words of eight 4-bit codes or groups of four 6-bit codes for each lane).

    u: blocks in rows, as FP32 bits or for PAIRS as words of two BF16 numbers. G: their `Tile`, for searches.
    """
    ELEMENT: tl.constexpr = S.element
    if S.offset == "none":
        statistic, faulty = _statistic(_extreme_of_rows(u, "amax", LANES, PAIRS, V.ptx))
    else:
        least, most = _extreme_of_rows(u, "smallest", LANES, PAIRS, V.ptx), _extreme_of_rows(u, "largest", LANES, PAIRS, V.ptx)
        top = 0 if V.ptx else largest(u, 1, False)
        statistic, low, faulty = _width(least, most, top, S)
    if S.scale.window is None:
        codes, by, usable = _scales(statistic, faulty, multiplier, S, V)
    else:
        numbers = tl.reshape(of_pairs(u), (G.rows, G.columns)) if PAIRS else u
        codes, by, usable = _scales(statistic, faulty, multiplier, S, V, numbers, G)
    offset = codes

    FITS: tl.constexpr = S.scale.fits and ELEMENT.kind == "float"
    # Words of 8 codes of 4 bits, or groups of 4 codes of 6 bits. Codes of blocks without a scale are those of zero.
    GROUP: tl.constexpr = 8 if ELEMENT.bits == 4 else 4
    GROUPS: tl.constexpr = LANE // GROUP
    if S.offset != "none":
        offset, value, limit, by = _offsets(low, by, usable, S)
        by, value, limit = by[:, None], value[:, None], limit[:, None]
        if PAIRS:
            n = tl.join(_rounded(u << 16, by, value, limit, S, V), _rounded(u & -65536, by, value, limit, S, V))
        else:
            n = _rounded(u, by, value, limit, S, V)
        packed = words_of_rounded(tl.reshape(n, (LANES, GROUPS, GROUP)), LANES, GROUPS)
        if S.offset == "zero_point":  # added to the eight codes of a word at once
            packed += _of_groups(offset * 0x11111111, u, LANES, GROUPS)
    else:
        mask = _of_groups(tl.where(usable, -1, 0), u, LANES, GROUPS)
        if PAIRS and S.paired:
            y = codes_of_pairs(u, ((bits_of(by) >> 16) * 0x10001)[:, None], ELEMENT, FITS)
            a, b, c, d = four(tl.reshape(y, (LANES, GROUPS, 4)), LANES, GROUPS)
            packed = word_of_pairs(a, b, c, d, False)
        else:
            packed = _words(u, by, S, V, PAIRS, FITS, LANES, GROUPS, GROUP)
        packed = (packed & mask) | (ELEMENT.empty * 0x11111111 & ~mask)
    return codes, offset, packed


@triton.jit
def _store_sixes(to, groups, exists, LANES: tl.constexpr):
    """Store groups of 24 bits, four or eight for each lane."""
    if groups.shape[1] == 4:
        _store_six(to, groups, exists, LANES)
    else:
        first, second = tl.split(tl.permute(tl.reshape(groups, (LANES, 2, 4)), (0, 2, 1)))
        _store_six(to, first, exists, LANES)
        _store_six(to + 3, second, exists, LANES)


@triton.jit
def _words(
    u, by, S: tl.constexpr, V: tl.constexpr, PAIRS: tl.constexpr, FITS: tl.constexpr, LANES: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Words of 4-bit codes, or groups of 6-bit codes, of elements without an offset; anything where there is no scale."""
    ELEMENT: tl.constexpr = S.element
    by = by[:, None]
    if PAIRS:
        y = tl.join(_scaled(u << 16, by, S, V), _scaled(u & -65536, by, S, V))
        if ELEMENT.bits == 6:
            u = of_pairs(u)
    else:
        y = _scaled(u, by, S, V)
    y, u = tl.reshape(y, (LANES, GROUPS, GROUP)), tl.reshape(u, (LANES, GROUPS, u.numel // (LANES * GROUPS)))
    if ELEMENT.bits == 4:
        return words_of_four(y, u, ELEMENT, FITS, False, LANES, GROUPS, V.ptx)
    else:
        return words_of_six(y, u, ELEMENT, FITS, LANES, GROUPS, V.ptx)


@triton.jit
def _of_groups(n, u, LANES: tl.constexpr, GROUPS: tl.constexpr):
    """Numbers `n` of blocks for each group of elements (LANES, GROUPS), of which `u` has rows of blocks."""
    # As one of the numbers of the elements of a group, so that it lies where they do.
    SIZE: tl.constexpr = u.numel // (LANES * GROUPS)
    both = tl.join(tl.broadcast_to(n[:, None], u.shape), u)
    n, _ = tl.split(tl.reshape(both, (LANES, GROUPS, SIZE, 2)))
    if SIZE == 8:
        n, _ = halves(n, LANES, GROUPS, 4)
    if SIZE >= 4:
        n, _ = halves(n, LANES, GROUPS, 2)
    n, _ = tl.split(n)
    return n


@triton.jit
def _store_six(to, groups, exists, LANES: tl.constexpr):
    """Store four groups of 24 bits as three words."""
    a, b, c, d = four(tl.reshape(groups, (LANES, 1, 4)), LANES, 1)
    a, b, c, d = tl.reshape(a, (LANES,)), tl.reshape(b, (LANES,)), tl.reshape(c, (LANES,)), tl.reshape(d, (LANES,))
    tl.store(to, (a & 0xFFFFFF) | (b << 24), mask=exists)
    tl.store(to + 1, ((b >> 8) & 0xFFFF) | (c << 16), mask=exists)
    tl.store(to + 2, ((c >> 16) & 0xFF) | (d << 8), mask=exists)


@triton.jit
def strips_kernel(
    x, data, scale, zero_point, global_scale, amax, columns, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """As `lanes_kernel`, for blocks down the columns. A thread has LANE rows of EACH columns."""
    WIDE: tl.constexpr = L.wide
    LANE: tl.constexpr = L.lane
    EACH: tl.constexpr = L.each
    PARTS: tl.constexpr = L.block // L.lane
    ELEMENT: tl.constexpr = S.element
    PAIRS: tl.constexpr = V.ptx and x.dtype.element_ty == tl.bfloat16
    pid = tl.program_id(0)
    if L.backward:
        pid = tl.num_programs(0) - 1 - pid
    if L.large:
        pid = pid.to(tl.int64)
    along = tl.cdiv(columns, WIDE)
    i, j = pid // along, pid % along
    # No wider than the columns of a thread, so that loads and stores of all widths are dealt out alike.
    column = j * WIDE + tl.max_contiguous(tl.arange(0, WIDE), [EACH])
    exists = column < columns
    # Warps go along the first axis, and a thread along the second; its steps from row to row are the same for all threads.
    part = tl.arange(0, PARTS)[:, None, None]
    if PAIRS:
        pair = j * (WIDE // 2) + tl.max_contiguous(tl.arange(0, WIDE // 2), [EACH // 2])
        stride = columns // 2
        start = x.to(tl.pointer_type(tl.int32)) + i * L.block * stride
        at = start + pair[None, None, :] + (part * LANE) * stride + tl.arange(0, LANE)[None, :, None] * stride
        pairs = tl.load(at, mask=(pair < stride)[None, None, :], other=0)
        u = tl.reshape(of_pairs(pairs), (PARTS, LANE, WIDE))
    else:
        start = x + i * L.block * columns
        at = start + column[None, None, :] + (part * LANE) * columns + tl.arange(0, LANE)[None, :, None] * columns
        u = bits_of(tl.load(at, mask=exists[None, None, :], other=0.0).to(tl.float32))
        pairs = u

    if V.tensor_amax:
        amax = tl.load(amax)
    _, multiplier = global_scale_of(global_scale, amax, None, pid == 0, S, V)
    if S.offset == "none":
        statistic, faulty = _statistic(_extreme_of_columns(pairs, "amax", WIDE, PAIRS, V.ptx))
    else:
        least = _extreme_of_columns(pairs, "smallest", WIDE, PAIRS, V.ptx)
        most = _extreme_of_columns(pairs, "largest", WIDE, PAIRS, V.ptx)
        top = 0 if V.ptx else largest(largest(u, 1, False), 0, False)
        statistic, low, faulty = _width(least, most, top, S)
    codes, by, usable = _scales(statistic, faulty, multiplier, S, V)
    to = i * columns + column
    tl.store(scale + to, codes.to(scale.dtype.element_ty), mask=exists)

    FITS: tl.constexpr = S.scale.fits and ELEMENT.kind == "float"
    if S.offset != "none":
        offset, value, limit, by = _offsets(low, by, usable, S)
        tl.store(zero_point + to, offset.to(zero_point.dtype.element_ty), mask=exists)
        y = _rounded(u, by[None, None, :], value[None, None, :], limit[None, None, :], S, V)
    elif PAIRS and S.paired:
        first, second = tl.split(tl.reshape(bits_of(by), (WIDE // 2, 2)))
        y = codes_of_pairs(pairs, (((first >> 16) & 0xFFFF) | second)[None, None, :], ELEMENT, FITS)
    else:
        y = _scaled(u, by[None, None, :], S, V)
    if ELEMENT.bits == 4:
        ROWS: tl.constexpr = LANE // 2
        WORDS: tl.constexpr = WIDE // 4
        if PAIRS and S.paired:
            a, b, c, d = four(_squares(y, PARTS, ROWS, WORDS, 2), WORDS, PARTS * ROWS)
            packed = word_of_pairs(a, b, c, d, True)
        else:
            y, u = _squares(y, PARTS, ROWS, WORDS, 4), _squares(pairs, PARTS, ROWS, WORDS, 2 if PAIRS else 4)
        if S.offset == "none" and not (PAIRS and S.paired):
            packed = words_of_four(y, u, ELEMENT, FITS, True, WORDS, PARTS * ROWS, V.ptx)
        elif S.offset != "none":
            packed = words_of_rounded(y, WORDS, PARTS * ROWS)
            if S.offset == "zero_point":
                packed += tl.sum(tl.reshape(offset * 0x11, (WORDS, 4)) << (8 * tl.arange(0, 4))[None, :], 1)[:, None]
        if S.offset == "none":
            # A byte of ones for each column with a usable scale; the others have the codes of zero.
            mask = tl.reshape(tl.where(usable, 0xFF, 0), (WORDS, 4)) << (8 * tl.arange(0, 4))[None, :]
            mask = tl.sum(mask, 1)[:, None]
            packed = (packed & mask) | (ELEMENT.empty * 0x11111111 & ~mask)
        word = j * WORDS + tl.max_contiguous(tl.arange(0, WORDS), [1])
        stride = columns // 4
        start = data.to(tl.pointer_type(tl.int32)) + i * (L.block // 2) * stride
        part = tl.arange(0, PARTS)[None, :, None]
        at = start + word[:, None, None] + (part * ROWS) * stride + tl.arange(0, ROWS)[None, None, :] * stride
        tl.store(at, tl.reshape(packed, (WORDS, PARTS, ROWS)), mask=(word < stride)[:, None, None])
    else:
        QUADS: tl.constexpr = LANE // 4
        even, odd = _rows(code_of(y, u, ELEMENT, FITS, V.ptx), PARTS, LANE // 2, WIDE)
        a, c = _rows(even, PARTS, QUADS, WIDE)
        b, d = _rows(odd, PARTS, QUADS, WIDE)
        bits = tl.where(usable[None, None, :], group_of_six(a, b, c, d), 0)
        start = data + i * (L.block // 4 * 3) * columns
        at = start + column[None, None, :] + (part * (QUADS * 3)) * columns + tl.arange(0, QUADS)[None, :, None] * (3 * columns)
        mask = exists[None, None, :]
        tl.store(at, bits.to(tl.uint8), mask=mask)
        tl.store(at + columns, (bits >> 8).to(tl.uint8), mask=mask)
        tl.store(at + 2 * columns, (bits >> 16).to(tl.uint8), mask=mask)


@triton.jit
def panels_kernel(
    x, data, scale, zero_point, global_scale, other_data, other_scale, other_zero_point, other_global_scale, amax, rows,
    columns, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Blocks down the columns, whose codes are written column by column; with L.both, first blocks along the rows.

    A thread has eight rows of adjacent columns, in which words of codes of both orientations are whole. With L.both, what is
    without `other_` is of the blocks along the rows.
    """
    TALL: tl.constexpr = L.tall
    WIDE: tl.constexpr = L.wide
    BLOCK: tl.constexpr = L.block
    PARTS: tl.constexpr = TALL // 8
    PAIRS: tl.constexpr = V.ptx and x.dtype.element_ty == tl.bfloat16
    EACH: tl.constexpr = 2 if PAIRS else 1
    matrix, i, j = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    if L.backward:
        matrix, i, j = tl.num_programs(2) - 1 - matrix, tl.num_programs(1) - 1 - i, tl.num_programs(0) - 1 - j
    if V.tensor_amax:
        amax = tl.load(amax)
    first = (matrix == 0) & (i == 0) & (j == 0)
    global_code, multiplier = global_scale_of(global_scale, amax, None, first, S, V)
    width = columns // EACH
    if PAIRS:
        x = x.to(tl.pointer_type(tl.int32))
    part = i * PARTS + tl.arange(0, PARTS)
    word = j * (WIDE // EACH) + tl.max_contiguous(tl.arange(0, WIDE // EACH), [L.vector // EACH])
    at = x + (matrix.to(tl.int64) * rows + part[:, None] * 8) * width + word[None, :]
    exists = (part[:, None] * 8 < rows) & (word < width)[None, :]
    # Loaded apart: one load would deal adjacent rows out to threads.
    a, b = _bits(at, exists), _bits(at + width, exists)
    c, d = _bits(at + 2 * width, exists), _bits(at + 3 * width, exists)
    e, f = _bits(at + 4 * width, exists), _bits(at + 5 * width, exists)
    g, h = _bits(at + 6 * width, exists), _bits(at + 7 * width, exists)
    numbers = (a, b, c, d, e, f, g, h)

    if L.both:
        if S.global_scale is not None:
            if first:
                tl.store(other_global_scale, global_code)
        block = j * (WIDE // BLOCK) + tl.arange(0, WIDE // BLOCK)
        group = j * (WIDE // 8) + tl.arange(0, WIDE // 8)
        row = i * TALL + tl.arange(0, TALL)
        u = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
        u = tl.reshape(tl.permute(u, (0, 2, 3, 4, 1)), (TALL * WIDE // BLOCK, BLOCK // EACH))
        codes, offset, words = _cast(u, multiplier, TALL * WIDE // 8, 8, S, V, PAIRS)
        to = (matrix.to(tl.int64) * rows + row[:, None]) * (columns // BLOCK) + block[None, :]
        there = (row < rows)[:, None] & (block < columns // BLOCK)[None, :]
        _store_blocks(scale, zero_point, to, codes, offset, there, S)
        to = (matrix.to(tl.int64) * rows + row[:, None]) * (columns // 8) + group[None, :]
        there = (row < rows)[:, None] & (group < columns // 8)[None, :]
        tl.store(data.to(tl.pointer_type(tl.int32)) + to, tl.reshape(words, (TALL, WIDE // 8)), mask=there)
        data, scale, zero_point = other_data, other_scale, other_zero_point

    if PAIRS:  # two columns of a row become two rows of a column
        a, b, c, d = join_bytes(a, b, 0x5410), join_bytes(c, d, 0x5410), join_bytes(e, f, 0x5410), join_bytes(g, h, 0x5410)
        left = _cast_down((a, b, c, d), multiplier, BLOCK // 8, S, V, PAIRS)
        a, b, c, d, e, f, g, h = numbers
        a, b, c, d = join_bytes(a, b, 0x7632), join_bytes(c, d, 0x7632), join_bytes(e, f, 0x7632), join_bytes(g, h, 0x7632)
        right = _cast_down((a, b, c, d), multiplier, BLOCK // 8, S, V, PAIRS)
        codes, offset = _side_by_side(left[0], right[0]), _side_by_side(left[1], right[1])
        low, high = _side_by_side(left[2], right[2]), _side_by_side(left[3], right[3])
    else:
        codes, offset, low, high = _cast_down(numbers, multiplier, BLOCK // 8, S, V, PAIRS)
    column = j * WIDE + tl.arange(0, WIDE)
    block = i * (TALL // BLOCK) + tl.arange(0, TALL // BLOCK)
    to = (matrix.to(tl.int64) * (rows // BLOCK) + block[:, None]) * columns + column[None, :]
    there = (block < rows // BLOCK)[:, None] & (column < columns)[None, :]
    _store_blocks(scale, zero_point, to, codes, offset, there, S)
    to = (matrix.to(tl.int64) * columns + column[None, :]) * (rows // 8) + part[:, None]
    there = (part * 8 < rows)[:, None] & (column < columns)[None, :]
    if S.element.bits == 4:
        tl.store(data.to(tl.pointer_type(tl.int32)) + to, low, mask=there)
    else:  # two groups of 24 bits, and two of the next eight rows: three words
        groups = tl.permute(tl.join(low, high), (1, 0, 2))
        LANES: tl.constexpr = WIDE * PARTS // 2
        lane = tl.arange(0, LANES)
        column, part = j * WIDE + lane // (PARTS // 2), i * (PARTS // 2) + lane % (PARTS // 2)
        to = data.to(tl.pointer_type(tl.int32)) + ((matrix.to(tl.int64) * columns + column) * (rows // 16) + part) * 3
        _store_six(to, tl.reshape(groups, (LANES, 4)), (column < columns) & (part * 16 < rows), LANES)


@triton.jit
def _bits(at, exists):
    """Words, or the FP32 bits of numbers."""
    values = tl.load(at, mask=exists, other=0)
    if values.dtype == tl.int32:
        return values
    else:
        return bits_of(values.to(tl.float32))


@triton.jit
def _side_by_side(left, right):
    """The columns of two matrices in turn."""
    return tl.reshape(tl.join(left, right), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def _extreme_down(rows, KIND: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """`extreme` of blocks down the columns: of adjacent rows in so many arrays, PARTS times below each other, as FP32 bits."""
    extremes = rows[0]
    if PAIRS:
        extremes = magnitude_pair(extremes) if KIND == "amax" else extremes
        for k in tl.static_range(1, len(rows)):
            row = magnitude_pair(rows[k]) if KIND == "amax" else rows[k]
            extremes = smaller_pair(extremes, row) if KIND == "smallest" else larger_pair(extremes, row)
    else:
        numbers = tl.join(tl.join(rows[0], rows[4]), tl.join(rows[2], rows[6]))
        other = tl.join(tl.join(rows[1], rows[5]), tl.join(rows[3], rows[7]))
        numbers = tl.reshape(tl.join(numbers, other), (rows[0].shape[0], rows[0].shape[1], 8))
        extremes = extreme(numbers, 2, KIND, False, PTX)
    if extremes.shape[0] == PARTS:
        extremes = extreme(extremes, 0, KIND, PAIRS, PTX)[None, :]
    else:
        extremes = extreme(tl.reshape(extremes, (extremes.shape[0] // PARTS, PARTS, extremes.shape[1])), 1, KIND, PAIRS, PTX)
    if PAIRS:
        extremes = extreme_of_pair(extremes, KIND)
    return extremes


@triton.jit
def _down(of_blocks, PARTS: tl.constexpr):
    """Numbers of blocks down the columns, for each PARTS rows of them."""
    BLOCKS: tl.constexpr = of_blocks.shape[0]
    WIDE: tl.constexpr = of_blocks.shape[1]
    if BLOCKS == 1:
        return tl.broadcast_to(of_blocks, (PARTS, WIDE))
    else:
        return tl.reshape(tl.broadcast_to(of_blocks[:, None, :], (BLOCKS, PARTS, WIDE)), (BLOCKS * PARTS, WIDE))


@triton.jit
def _cast_down(rows, multiplier, PARTS: tl.constexpr, S: tl.constexpr, V: tl.constexpr, PAIRS: tl.constexpr):
    """(codes of scales, offsets or the same codes, words of codes, and of 6 bits the second group) of blocks down the columns.

    rows: eight adjacent rows in as many arrays of FP32 bits; for PAIRS two in each word of four arrays. Blocks have PARTS of
    such rows.
    """
    ELEMENT: tl.constexpr = S.element
    FITS: tl.constexpr = S.scale.fits and ELEMENT.kind == "float"
    if S.offset == "none":
        statistic, faulty = _statistic(_extreme_down(rows, "amax", PARTS, PAIRS, V.ptx))
    else:
        least = _extreme_down(rows, "smallest", PARTS, PAIRS, V.ptx)
        most = _extreme_down(rows, "largest", PARTS, PAIRS, V.ptx)
        top = 0 if V.ptx else _extreme_down(rows, "amax", PARTS, PAIRS, V.ptx)
        statistic, low, faulty = _width(least, most, top, S)
    codes, by, usable = _scales(statistic, faulty, multiplier, S, V)
    offset, high = codes, 0
    if S.offset != "none":
        offset, value, limit, by = _offsets(low, by, usable, S)
        value, limit = _down(value, PARTS), _down(limit, PARTS)
    by, mask = _down(by, PARTS), _down(tl.where(usable, -1, 0), PARTS)
    if PAIRS and S.paired:
        word = ((bits_of(by) >> 16) & 0xFFFF) * 0x10001
        a, b = codes_of_pairs(rows[0], word, ELEMENT, FITS), codes_of_pairs(rows[1], word, ELEMENT, FITS)
        c, d = codes_of_pairs(rows[2], word, ELEMENT, FITS), codes_of_pairs(rows[3], word, ELEMENT, FITS)
        words = word_of_pairs(a, b, c, d, False)
    else:
        if PAIRS:
            a, b, c, d = rows[0] << 16, rows[0] & -65536, rows[1] << 16, rows[1] & -65536
            e, f, g, h = rows[2] << 16, rows[2] & -65536, rows[3] << 16, rows[3] & -65536
        else:
            a, b, c, d, e, f, g, h = rows
        if S.offset != "none":
            words = word_of_rounded((
                bits_of(_rounded(a, by, value, limit, S, V)), bits_of(_rounded(b, by, value, limit, S, V)),
                bits_of(_rounded(c, by, value, limit, S, V)), bits_of(_rounded(d, by, value, limit, S, V)),
                bits_of(_rounded(e, by, value, limit, S, V)), bits_of(_rounded(f, by, value, limit, S, V)),
                bits_of(_rounded(g, by, value, limit, S, V)), bits_of(_rounded(h, by, value, limit, S, V)),
            ))  # fmt: skip
            if S.offset == "zero_point":  # added to the eight codes of a word at once
                words += _down(offset * 0x11111111, PARTS)
        elif ELEMENT.bits == 4:
            eight = (
                _code(a, by, S, V), _code(b, by, S, V), _code(c, by, S, V), _code(d, by, S, V),
                _code(e, by, S, V), _code(f, by, S, V), _code(g, by, S, V), _code(h, by, S, V),
            )  # fmt: skip
            words = word_of_eight(eight, rows, ELEMENT, False, V.ptx)
        else:
            words = group_of_six(_code(a, by, S, V), _code(b, by, S, V), _code(c, by, S, V), _code(d, by, S, V)) & mask
            high = group_of_six(_code(e, by, S, V), _code(f, by, S, V), _code(g, by, S, V), _code(h, by, S, V)) & mask
    if S.offset == "none":
        words = (words & mask) | (ELEMENT.empty * 0x11111111 & ~mask)
    return codes, offset, words, words if ELEMENT.bits == 4 else high


@triton.jit
def _code(u, by, S: tl.constexpr, V: tl.constexpr):
    """Codes of FP32 bits, of 4 bits as `word_of_eight` takes them, of 6 with what `group_of_six` leaves above them."""
    ELEMENT: tl.constexpr = S.element
    FITS: tl.constexpr = S.scale.fits and ELEMENT.kind == "float"
    y = _scaled(u, by, S, V)
    if ELEMENT.bits == 6:
        return code_of(y, u, ELEMENT, FITS, V.ptx)
    elif ELEMENT.kind == "float":
        return magnitudes(y, ELEMENT, FITS, V.ptx)
    elif ELEMENT.kind == "integer":
        return integers(y, ELEMENT, FITS)
    else:
        return places(y, ELEMENT, V.ptx)


@triton.jit
def _store_blocks(scale, zero_point, to, codes, offset, exists, S: tl.constexpr):
    """Store the scales of blocks, and their offsets."""
    codes = tl.reshape(codes, to.shape)
    tl.store(scale + to, codes.to(scale.dtype.element_ty), mask=exists)
    if S.offset != "none":
        tl.store(zero_point + to, tl.reshape(offset, to.shape).to(zero_point.dtype.element_ty), mask=exists)


@triton.jit
def _rows(t, PARTS: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr):
    """Even and odd rows of (PARTS, 2 * PAIRS, WIDE)."""
    even, odd = tl.split(tl.permute(tl.reshape(t, (PARTS, PAIRS, 2, WIDE)), (0, 1, 3, 2)))
    return even, odd


@triton.jit
def _squares(t, PARTS: tl.constexpr, PAIRS: tl.constexpr, WORDS: tl.constexpr, SIDE: tl.constexpr):
    """Pairs of rows of SIDE columns of (PARTS, 2 * PAIRS, SIDE * WORDS), in the order of their codes in a word."""
    t = tl.permute(tl.reshape(t, (PARTS, PAIRS, 2, WORDS, SIDE)), (3, 0, 1, 4, 2))
    return tl.reshape(t, (WORDS, PARTS * PAIRS, 2 * SIDE))
