"""The Triton kernels of `cast` for codes of 4 and 6 bits in whole blocks of a contiguous tensor.

Such casts are bound by instructions. Here each thread holds consecutive elements, its lane, or rows of a few columns, so that
amax, rounding and packing stay in its registers, and codes leave as words. Constants as in `casting`; L is a `geometry.Lanes`
or `geometry.Strips`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import (
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
    largest,
    magnitude_pair,
    number,
    of_pairs,
    read_scale,
    saturated,
    scale_codes,
    scaled,
    scaled_magnitude,
    te_multiplier,
    word_of_pairs,
    words_of_four,
    words_of_rounded,
    words_of_six,
)
from .tiles import global_scale


@triton.jit
def _chunks(x, at, exists, COUNT: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Lanes of COUNT chunks of SIZE elements. Loaded apart, since one load would deal chunks out to adjacent threads."""
    if COUNT == 1:
        found = tl.load(x + at, mask=exists, other=0.0)
    else:
        HALF: tl.constexpr = COUNT // 2
        first = _chunks(x, at, exists, HALF, SIZE, LANES)
        second = _chunks(x, at + HALF * SIZE, exists, HALF, SIZE, LANES)
        found = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (LANES, COUNT * SIZE))
    return found


@triton.jit
def _extreme_of_rows(u, KIND: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """`extreme` of each row of a matrix, for LANES threads."""
    ROWS: tl.constexpr = u.shape[0]
    if PTX and ROWS >= LANES:  # a thread has whole rows
        if KIND == "amax":
            u = magnitude_pair(u) if PAIRS else u & MAGNITUDE
        found = extreme_of_each(u, KIND, ROWS, u.shape[1], PAIRS, PTX)
    else:
        found = extreme(u, 1, KIND, PAIRS, PTX)
    if PAIRS:
        found = extreme_of_pair(found, KIND)
    return found


@triton.jit
def _extreme_of_columns(u, KIND: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """`extreme` along the first two axes of three."""
    found = extreme(extreme(u, 1, KIND, PAIRS, PTX), 0, KIND, PAIRS, PTX)
    if PAIRS:
        found = tl.reshape(of_pairs(found), (WIDE,))
    return found


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
def _scales(statistic, faulty, multiplier, S: tl.constexpr, V: tl.constexpr):
    """(codes of scales, what elements are multiplied by, whether the scales are usable) of what they are computed from."""
    OUTER: tl.constexpr = S.outer is not None
    SCALE: tl.constexpr = S.scale
    codes = tl.where(faulty, SCALE.nan, scale_codes(statistic, multiplier, SCALE, OUTER, V.ptx, V.ptx))
    by, usable = divisor_of(codes, multiplier, SCALE, OUTER, V.ptx, True)
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
    x, data, scale, zero_point, outer, amax, blocks, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """Codes, scales, offsets and the global scale of `blocks` blocks, which follow each other in memory."""
    STEPS: tl.constexpr = L.steps
    pid = tl.program_id(0)
    if L.backward:
        pid = tl.num_programs(0) - 1 - pid
    if L.large:
        pid = pid.to(tl.int64)
    if V.whole:
        amax = tl.load(amax)
    _, multiplier = global_scale(outer, amax, None, pid == 0, S, V)
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
    ELEMENT: tl.constexpr = S.element
    lane = tile * LANES + tl.arange(0, LANES)
    lane_exists = lane * LANE < tl.cast(blocks, lane.dtype) * BLOCK
    at = lane[:, None] * (LANE // EACH) + tl.arange(0, CHUNK)[None, :]
    if PAIRS:
        u = _chunks(x.to(tl.pointer_type(tl.int32)), at, lane_exists[:, None], LANE // L.chunk, CHUNK, LANES)
    else:
        u = bits_of(_chunks(x, at, lane_exists[:, None], LANE // CHUNK, CHUNK, LANES).to(tl.float32))
    u = tl.reshape(u, (COUNT, BLOCK // EACH))

    block = tile * COUNT + tl.arange(0, COUNT)
    if S.offset == "none":
        statistic, faulty = _statistic(_extreme_of_rows(u, "amax", LANES, PAIRS, V.ptx))
    else:
        least, most = _extreme_of_rows(u, "smallest", LANES, PAIRS, V.ptx), _extreme_of_rows(u, "largest", LANES, PAIRS, V.ptx)
        top = 0 if V.ptx else largest(u, 1, False)
        statistic, low, faulty = _width(least, most, top, S)
    codes, by, usable = _scales(statistic, faulty, multiplier, S, V)
    to = scale + block
    tl.store(to, codes.to(to.dtype.element_ty), mask=block < blocks)

    FITS: tl.constexpr = S.scale.fits and ELEMENT.kind == "float"
    # Words of 8 codes of 4 bits, or groups of 4 codes of 6 bits. Codes of blocks without a scale are those of zero.
    GROUP: tl.constexpr = 8 if ELEMENT.bits == 4 else 4
    GROUPS: tl.constexpr = LANE // GROUP
    words = data.to(tl.pointer_type(tl.int32))
    if S.offset != "none":
        offset, value, limit, by = _offsets(low, by, usable, S)
        to = zero_point + block
        tl.store(to, offset.to(to.dtype.element_ty), mask=block < blocks)
        by, value, limit = by[:, None], value[:, None], limit[:, None]
        if PAIRS:
            n = tl.join(_rounded(u << 16, by, value, limit, S, V), _rounded(u & -65536, by, value, limit, S, V))
        else:
            n = _rounded(u, by, value, limit, S, V)
        found = words_of_rounded(tl.reshape(n, (LANES, GROUPS, GROUP)), LANES, GROUPS)
        if S.offset == "zero_point":  # added to the eight codes of a word at once
            found += _of_groups(offset * 0x11111111, u, LANES, GROUPS)
    else:
        mask = _of_groups(tl.where(usable, -1, 0), u, LANES, GROUPS)
        if PAIRS and S.paired:
            found = codes_of_pairs(u, ((bits_of(by) >> 16) * 0x10001)[:, None], ELEMENT, FITS)
            a, b, c, d = four(tl.reshape(found, (LANES, GROUPS, 4)), LANES, GROUPS)
            found = word_of_pairs(a, b, c, d, False)
        else:
            found = _words(u, by, S, V, PAIRS, FITS, LANES, GROUPS, GROUP)
        found = (found & mask) | (ELEMENT.empty * 0x11111111 & ~mask)
    if ELEMENT.bits == 4:
        to = lane[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        tl.store(words + to, found, mask=lane_exists[:, None])
    elif GROUPS == 4:
        _store_six(words + lane * 3, found, lane_exists, LANES)
    else:
        first, second = tl.split(tl.permute(tl.reshape(found, (LANES, 2, 4)), (0, 2, 1)))
        _store_six(words + lane * 6, first, lane_exists, LANES)
        _store_six(words + lane * 6 + 3, second, lane_exists, LANES)


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
    x, data, scale, zero_point, outer, amax, blocks, columns, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """As `lanes_kernel`, for blocks down the columns, `blocks` below each other. A thread has LANE rows of EACH columns."""
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

    if V.whole:
        amax = tl.load(amax)
    _, multiplier = global_scale(outer, amax, None, pid == 0, S, V)
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
            found = word_of_pairs(a, b, c, d, True)
        else:
            y, u = _squares(y, PARTS, ROWS, WORDS, 4), _squares(pairs, PARTS, ROWS, WORDS, 2 if PAIRS else 4)
        if S.offset == "none" and not (PAIRS and S.paired):
            found = words_of_four(y, u, ELEMENT, FITS, True, WORDS, PARTS * ROWS, V.ptx)
        elif S.offset != "none":
            found = words_of_rounded(y, WORDS, PARTS * ROWS)
            if S.offset == "zero_point":
                found += tl.sum(tl.reshape(offset * 0x11, (WORDS, 4)) << (8 * tl.arange(0, 4))[None, :], 1)[:, None]
        if S.offset == "none":
            # A byte of ones for each column with a usable scale; the others have the codes of zero.
            mask = tl.reshape(tl.where(usable, 0xFF, 0), (WORDS, 4)) << (8 * tl.arange(0, 4))[None, :]
            mask = tl.sum(mask, 1)[:, None]
            found = (found & mask) | (ELEMENT.empty * 0x11111111 & ~mask)
        word = j * WORDS + tl.max_contiguous(tl.arange(0, WORDS), [1])
        stride = columns // 4
        start = data.to(tl.pointer_type(tl.int32)) + i * (L.block // 2) * stride
        part = tl.arange(0, PARTS)[None, :, None]
        at = start + word[:, None, None] + (part * ROWS) * stride + tl.arange(0, ROWS)[None, None, :] * stride
        tl.store(at, tl.reshape(found, (WORDS, PARTS, ROWS)), mask=(word < stride)[:, None, None])
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
def _rows(t, PARTS: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr):
    """Even and odd rows of (PARTS, 2 * PAIRS, WIDE)."""
    even, odd = tl.split(tl.permute(tl.reshape(t, (PARTS, PAIRS, 2, WIDE)), (0, 1, 3, 2)))
    return even, odd


@triton.jit
def _squares(t, PARTS: tl.constexpr, PAIRS: tl.constexpr, WORDS: tl.constexpr, SIDE: tl.constexpr):
    """Pairs of rows of SIDE columns of (PARTS, 2 * PAIRS, SIDE * WORDS), in the order of their codes in a word."""
    t = tl.permute(tl.reshape(t, (PARTS, PAIRS, 2, WORDS, SIDE)), (3, 0, 1, 4, 2))
    return tl.reshape(t, (WORDS, PARTS * PAIRS, 2 * SIDE))
