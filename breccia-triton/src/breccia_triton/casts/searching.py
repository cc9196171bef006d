"""The search for the scales of blocks in Triton, bit for bit as in docs/spec/numerics.md, section 5.6.

A tile is read once; its program tries the scales of the window one after another, so that the numbers stay in registers.
Arguments in capitals are constants, as in `kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from breccia.backend import reference

from ..numerics import (
    EXPONENT,
    INF,
    NORMAL,
    ROUNDER,
    bits_of,
    clean,
    decode,
    divisor_of,
    encode,
    encode_scale,
    flushed,
    number,
    places,
    read_scale,
    saturated,
    unrounded_scales,
)
from ..tiles import largest_of_blocks, repeated

SMALLEST = tl.constexpr(reference.SMALLEST)
LIGHTEST = tl.constexpr(reference.LIGHTEST)


@triton.jit
def searched(
    u, plain, statistic, multiplier, weights, S: tl.constexpr, G: tl.constexpr, V: tl.constexpr, GLOBAL_FITS: tl.constexpr
):
    """int32 codes of the scales with the least error, for the FP32 bits `u` of a tile of finite blocks.

    plain: codes of the plain scales. statistic, multiplier, GLOBAL_FITS: as of `scale_codes`. weights: of `weights_of`.
    """
    ELEMENT: tl.constexpr = S.element
    SCALE: tl.constexpr = S.scale
    TWO_LEVEL: tl.constexpr = S.global_scale is not None
    power = power_below(bits_of(statistic))
    x = clean(u)
    if ELEMENT.kind == "float":  # codes and scales have a sign of their own: magnitudes have the same errors
        x = tl.abs(x)
    y = without_small(x * repeated(power, G.down, G.tall, G.along, G.wide), SMALLEST)
    t = plain
    if len(SCALE.window.multiples) > 0:
        t = flushed(unrounded_scales(statistic, multiplier, SCALE, TWO_LEVEL, GLOBAL_FITS, V.ptx))
    # The least plain unit under which no number of a code but 0 is small, under any scale; and whether plain units are larger.
    # Rounding moves a unit by much less than a half.
    LEAST: tl.constexpr = 2.0 * SMALLEST / (ELEMENT.smallest * SCALE.window.least)
    if LEAST * 2.0 * SCALE.qmax < 1.0:
        _, unit = units(plain, multiplier, power, S, V)
        if tl.min(tl.where(unit > 0.0, unit, LEAST)) >= LEAST:
            best = compared(x, y, plain, t, statistic, multiplier, power, weights, S, G, V, False)
        else:
            best = compared(x, y, plain, t, statistic, multiplier, power, weights, S, G, V, True)
    else:
        best = compared(x, y, plain, t, statistic, multiplier, power, weights, S, G, V, True)
    return best


@triton.jit
def compared(
    x, y, plain, t, statistic, multiplier, power, weights, S: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    SMALL: tl.constexpr,
):  # fmt: skip
    """The codes of the scales with the least error.

    x: elements; y: the same in units of `power`. SMALL: numbers of codes may be small. Other arguments as of `searched`.
    """
    ELEMENT: tl.constexpr = S.element
    SCALE: tl.constexpr = S.scale
    WINDOW: tl.constexpr = S.scale.window
    ASCENDING: tl.constexpr = 1 + len(S.scale.window.multiples) + S.scale.window.up
    best = plain
    least = tl.full(plain.shape, float("inf"), tl.float32)
    for n in range(ASCENDING):
        codes = candidate(n, plain, t, SCALE)
        by, unit = units(codes, multiplier, power, S, V)
        error = error_of(x, y, by, unit, weights, S, G, V, SMALL)
        better = error < least
        best = tl.where(better, codes, best)
        least = tl.where(better, error, least)
    # Smaller scales are tried last. The plain scale wins ties, and among the others the lowest code does.
    # The error of a block is no less than that of its largest element, since a sum of squares is rounded to no less than one of
    # them. Under scales that saturate the largest element, its error grows as the scale gets smaller. So the search ends when
    # this error alone reaches the least so far in all blocks of the program. Integers and tables may reach further on one side,
    # where a smaller scale fits the largest element better.
    ENDS: tl.constexpr = ELEMENT.kind == "float" and not V.weighted
    largest = without_small(statistic * power, SMALLEST)
    possible = tl.full((), True, tl.int1)
    for down in range(1, WINDOW.down + 1):
        if possible:
            codes = tl.maximum(plain - down, WINDOW.lowest)
            by, unit = units(codes, multiplier, power, S, V)
            if ENDS:
                alone = square(statistic, largest, by, unit, ELEMENT, V, SMALL)
                vain = (alone > least) | ((alone == least) & (best == plain))
                vain = (vain & (bits_of(statistic * by) >= ELEMENT.largest)) | (statistic == 0.0)
                possible = tl.min(vain.to(tl.int32)) == 0
            if possible:
                error = error_of(x, y, by, unit, weights, S, G, V, SMALL)
                better = (error < least) | ((error == least) & (best != plain))
                best = tl.where(better, codes, best)
                least = tl.where(better, error, least)
    return best


@triton.jit
def error_of(x, y, by, unit, weights, S: tl.constexpr, G: tl.constexpr, V: tl.constexpr, SMALL: tl.constexpr):
    """The errors of blocks under scales; arguments as of `compared` and `square`."""
    ELEMENT: tl.constexpr = S.element
    by, unit = repeated(by, G.down, G.tall, G.along, G.wide), repeated(unit, G.down, G.tall, G.along, G.wide)
    terms = square(x, y, by, unit, ELEMENT, V, SMALL)
    if V.weighted:
        terms = terms * weights
    return total(terms, G)


@triton.jit
def square(x, y, by, unit, ELEMENT: tl.constexpr, V: tl.constexpr, SMALL: tl.constexpr):
    """The squared errors of elements: `x` in units of FP32, `y` in those of `unit`, which is what codes count."""
    value = nearest(x * by, ELEMENT, V.ptx) * unit
    if SMALL:
        value = without_small(value, SMALLEST)
    d = y - value
    return d * d


@triton.jit
def units(codes, multiplier, power, S: tl.constexpr, V: tl.constexpr):
    """(what elements are multiplied by, what their codes count in units of `power`; 0 without a scale) of scale codes."""
    SCALE: tl.constexpr = S.scale
    TWO_LEVEL: tl.constexpr = S.global_scale is not None
    by, usable = divisor_of(codes, multiplier, SCALE, TWO_LEVEL, V.ptx)
    unit = read_scale(codes, SCALE)
    if TWO_LEVEL:
        unit = unit * multiplier
    return by, tl.where(usable, saturated(unit * power), 0.0)


@triton.jit
def candidate(n, plain, t, S: tl.constexpr):
    """int32 codes of the n-th scales to try, 0 the plain ones, without those below. t: numbers that these were rounded from."""
    WINDOW: tl.constexpr = S.window
    MULTIPLES: tl.constexpr = len(S.window.multiples)
    if MULTIPLES > 0:
        factor = 1.0
        for i in tl.static_range(MULTIPLES):
            factor = tl.where(n == i + 1, WINDOW.multiples[i], factor)
        scale = flushed(saturated(t * tl.abs(factor)))
        found = encode_scale(tl.minimum(tl.maximum(scale, S.least), S.most), S)
        if S.signs:
            found = tl.where(factor < 0, found | -(1 << (S.codec.bits - 1)), found)
        return tl.where(n > 0, found, plain)
    else:
        return tl.where(n > 0, tl.minimum(plain + n, WINDOW.highest), plain)


@triton.jit
def nearest(y, C: tl.constexpr, PTX: tl.constexpr):
    """The numbers of the codes of FP32 `y`, saturating; of minifloats `y` is not negative."""
    if C.kind == "float":
        a = tl.minimum(bits_of(y), C.largest)
        power = number(tl.maximum(a & EXPONENT, C.floor))
        SPACING: tl.constexpr = 2.0 ** (23 - C.mantissa)  # times the power of two, codes are the integers of its last bit
        return tl.fma(power, -SPACING, tl.fma(power, SPACING, number(a)))
    elif C.kind == "integer":
        y = tl.minimum(tl.maximum(y, C.low), C.high)
        return (y + ROUNDER * C.unit) - ROUNDER * C.unit
    elif len(C.cells) > 0:
        return decode(places(y, C, PTX), C, False)
    else:
        return decode(encode(y, 0, 0, C, False, False, False, False), C, False)


@triton.jit
def total(terms, G: tl.constexpr):
    """Sums of each block of a tile by pairwise trees: along the contraction axis, then along the other one."""
    ROWS: tl.constexpr = G.down * G.tall
    if G.axis == 1:
        sums = tree(tree(terms, ROWS * G.along, G.wide, 1), G.down, G.tall, G.along)
    else:
        sums = tree(tree(terms, G.down, G.tall, G.along * G.wide), G.down * G.along, G.wide, 1)
    return tl.reshape(sums, (G.down, G.along))


@triton.jit
def tree(terms, OUTER: tl.constexpr, N: tl.constexpr, INNER: tl.constexpr):
    """Sums along the second axis of (OUTER, N, INNER), N a power of two: the first half and the second are added, and so on."""
    if N == 1:
        return terms
    else:
        return tree(tl.sum(tl.reshape(terms, (OUTER, 2, N // 2 * INNER)), 1), OUTER, N // 2, INNER)


@triton.jit
def weights_of(importance, row, row_exists, column, column_exists, G: tl.constexpr):
    """The weights of a tile's elements: numbers of `importance`, whose bits these are, at their places along K.

    In units of a power of two near the largest of each block. What is not a positive number counts as zero.
    """
    # Each element loads its own: weights are then in the registers of the elements.
    at = column[None, :] + (row * 0)[:, None] if G.axis == 1 else row[:, None] + (column * 0)[None, :]
    bits = tl.load(importance + at, mask=row_exists[:, None] & column_exists[None, :], other=0)
    bits = tl.where((bits >= NORMAL) & (bits < INF), bits, 0)
    top = largest_of_blocks(bits, G.down, G.tall, G.along, G.wide, False, False)
    return without_small(number(bits) * repeated(power_below(top), G.down, G.tall, G.along, G.wide), LIGHTEST)


@triton.jit
def power_below(bits):
    """2^-n where 2^n is the largest power of two, up to 2^126, that is at most the FP32 number with these bits."""
    return number((254 - tl.minimum(bits >> 23, 253)) << 23)


@triton.jit
def without_small(a, SMALL: tl.constexpr):
    """`a` with magnitudes below `SMALL` as zeros."""
    return tl.where(tl.abs(a) < SMALL, 0.0, a)
