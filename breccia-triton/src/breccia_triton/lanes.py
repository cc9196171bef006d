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
    NORMAL,
    bits_of,
    code_of,
    divisor_of,
    four,
    group_of_six,
    largest,
    number,
    outer_codes,
    outer_multiplier,
    scale_codes,
    scaled,
    te_multiplier,
    words_of_four,
    words_of_six,
)


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
def _multiplier(outer, amax, pid, S: tl.constexpr, V: tl.constexpr):
    """The multiplier of the global scale, which the first program stores; 1 where there is none."""
    LEVEL: tl.constexpr = S.outer
    multiplier = 1.0
    if LEVEL is not None:
        code = outer_codes(tl.load(amax), LEVEL, V.ptx)
        if pid == 0:
            tl.store(outer, code)
        multiplier = outer_multiplier(code, LEVEL)
    return multiplier


@triton.jit
def _scales(top, multiplier, S: tl.constexpr, V: tl.constexpr):
    """(codes of scales, what elements are multiplied by, whether the scales are usable) from the bits of the amax of blocks."""
    OUTER: tl.constexpr = S.outer is not None
    SCALE: tl.constexpr = S.scale
    faulty = top >= INF
    statistic = number(tl.where((top >= NORMAL) & ~faulty, top, 0))
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
        x = tl.abs(x)
    return scaled(x, by, None, SCALE, V.subnormals, FLUSHES)


@triton.jit
def lanes_kernel(x, data, scale, outer, amax, blocks, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr):
    """Codes, scales and the global scale of `blocks` blocks, which follow each other in memory."""
    STEPS: tl.constexpr = L.steps
    pid = tl.program_id(0)
    if L.backward:
        pid = tl.num_programs(0) - 1 - pid
    if L.large:
        pid = pid.to(tl.int64)
    multiplier = _multiplier(outer, amax, pid, S, V)
    for step in tl.static_range(STEPS):
        _lanes(x, data, scale, multiplier, blocks, pid * STEPS + step, S, L, V)


@triton.jit
def _lanes(x, data, scale, multiplier, blocks, tile, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr):
    LANES: tl.constexpr = L.lanes
    LANE: tl.constexpr = L.lane
    CHUNK: tl.constexpr = L.chunk
    BLOCK: tl.constexpr = L.block
    COUNT: tl.constexpr = LANES * LANE // BLOCK
    ELEMENT: tl.constexpr = S.element
    lane = tile * LANES + tl.arange(0, LANES)
    lane_exists = lane * LANE < blocks.to(lane.dtype) * BLOCK
    at = lane[:, None] * LANE + tl.arange(0, CHUNK)[None, :]
    elements = _chunks(x, at, lane_exists[:, None], LANE // CHUNK, CHUNK, LANES).to(tl.float32)
    u = bits_of(tl.reshape(elements, (COUNT, BLOCK)))

    codes, by, usable = _scales(largest(u, 1, V.ptx), multiplier, S, V)
    block = tile * COUNT + tl.arange(0, COUNT)
    to = scale + block
    tl.store(to, codes.to(to.dtype.element_ty), mask=block < blocks)

    y = _scaled(u, by[:, None], S, V)
    FITS: tl.constexpr = S.scale.fits and ELEMENT.kind == "float"
    # Words of 8 codes of 4 bits, or groups of 4 codes of 6 bits. Codes of blocks without a scale are those of zero.
    GROUP: tl.constexpr = 8 if ELEMENT.bits == 4 else 4
    GROUPS: tl.constexpr = LANE // GROUP
    used = tl.reshape(tl.broadcast_to(usable[:, None], (COUNT, BLOCK // GROUP)), (LANES, GROUPS))
    y = tl.reshape(y, (LANES, GROUPS, GROUP))
    u = tl.reshape(u, (LANES, GROUPS, GROUP))
    words = data.to(tl.pointer_type(tl.int32))
    if ELEMENT.bits == 4:
        found = tl.where(used, words_of_four(y, u, ELEMENT, FITS, False, LANES, GROUPS, V.ptx), ELEMENT.empty * 0x11111111)
        to = lane[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        tl.store(words + to, found, mask=lane_exists[:, None])
    else:
        found = tl.where(used, words_of_six(y, u, ELEMENT, FITS, LANES, GROUPS, V.ptx), 0)
        if GROUPS == 4:
            _store_six(words + lane * 3, found, lane_exists, LANES)
        else:
            first, second = tl.split(tl.permute(tl.reshape(found, (LANES, 2, 4)), (0, 2, 1)))
            _store_six(words + lane * 6, first, lane_exists, LANES)
            _store_six(words + lane * 6 + 3, second, lane_exists, LANES)


@triton.jit
def _store_six(to, groups, exists, LANES: tl.constexpr):
    """Store four groups of 24 bits as three words."""
    a, b, c, d = four(tl.reshape(groups, (LANES, 1, 4)), LANES, 1)
    a, b, c, d = tl.reshape(a, (LANES,)), tl.reshape(b, (LANES,)), tl.reshape(c, (LANES,)), tl.reshape(d, (LANES,))
    tl.store(to, (a & 0xFFFFFF) | (b << 24), mask=exists)
    tl.store(to + 1, ((b >> 8) & 0xFFFF) | (c << 16), mask=exists)
    tl.store(to + 2, ((c >> 16) & 0xFF) | (d << 8), mask=exists)


@triton.jit
def strips_kernel(x, data, scale, outer, amax, blocks, columns, S: tl.constexpr, L: tl.constexpr, V: tl.constexpr):
    """As `lanes_kernel`, for blocks down the columns, `blocks` below each other. A thread has LANE rows of EACH columns."""
    WIDE: tl.constexpr = L.wide
    LANE: tl.constexpr = L.lane
    EACH: tl.constexpr = L.each
    PARTS: tl.constexpr = L.block // L.lane
    ELEMENT: tl.constexpr = S.element
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
    start = x + i * L.block * columns
    # Warps go along the first axis, and a thread along the second; its steps from row to row are the same for all threads.
    part = tl.arange(0, PARTS)[:, None, None]
    at = start + column[None, None, :] + (part * LANE) * columns + tl.arange(0, LANE)[None, :, None] * columns
    u = bits_of(tl.load(at, mask=exists[None, None, :], other=0.0).to(tl.float32))

    multiplier = _multiplier(outer, amax, pid, S, V)
    codes, by, usable = _scales(largest(largest(u, 1, V.ptx), 0, V.ptx), multiplier, S, V)
    to = scale + i * columns + column
    tl.store(to, codes.to(to.dtype.element_ty), mask=exists)

    y = _scaled(u, by[None, None, :], S, V)
    FITS: tl.constexpr = S.scale.fits and ELEMENT.kind == "float"
    if ELEMENT.bits == 4:
        PAIRS: tl.constexpr = LANE // 2
        WORDS: tl.constexpr = WIDE // 4
        y, u = _squares(y, PARTS, PAIRS, WORDS), _squares(u, PARTS, PAIRS, WORDS)
        found = words_of_four(y, u, ELEMENT, FITS, True, WORDS, PARTS * PAIRS, V.ptx)
        # A byte of ones for each column with a usable scale; the others have the codes of zero.
        mask = tl.reshape(tl.where(usable, 0xFF, 0), (WORDS, 4)) << (8 * tl.arange(0, 4))[None, :]
        mask = tl.sum(mask, 1)[:, None]
        found = (found & mask) | (ELEMENT.empty * 0x11111111 & ~mask)
        word = j * WORDS + tl.max_contiguous(tl.arange(0, WORDS), [1])
        stride = columns // 4
        start = data.to(tl.pointer_type(tl.int32)) + i * (L.block // 2) * stride
        part = tl.arange(0, PARTS)[None, :, None]
        at = start + word[:, None, None] + (part * PAIRS) * stride + tl.arange(0, PAIRS)[None, None, :] * stride
        tl.store(at, tl.reshape(found, (WORDS, PARTS, PAIRS)), mask=(word < stride)[:, None, None])
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
def _squares(t, PARTS: tl.constexpr, PAIRS: tl.constexpr, WORDS: tl.constexpr):
    """Pairs of rows of four columns of (PARTS, 2 * PAIRS, 4 * WORDS), in the order of their codes in a word."""
    t = tl.permute(tl.reshape(t, (PARTS, PAIRS, 2, WORDS, 4)), (3, 0, 1, 4, 2))
    return tl.reshape(t, (WORDS, PARTS * PAIRS, 8))
