"""The search for scales: of the candidates of a rule, the one with the least squared error over each block.

docs/spec/numerics.md, section 5.6, has the order of operations. Everything is in units of powers of two, so that nothing
overflows or becomes an FP32 subnormal, which some compilers flush. Selections stand between products and sums, so that no
compiler makes one operation of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...arrays.ops import Array, Ops
from ...formats import TENSOR
from ...fp32 import F32_INF, MAGNITUDE, NORMAL
from ...rules import flushed, saturated
from .tiles import Tiles

if TYPE_CHECKING:
    from ...formats import Format
    from ...rules import Search

#: Numbers of a block in units of its amax, and weights in units of the largest of the block, below which they count as zero.
SMALLEST, LIGHTEST = 2.0**-20, 2.0**-40


def searched(
    ops: Ops,
    rule: Search,
    fmt: Format,
    clean: Array,
    statistic: Array,
    factor: Array | None,
    tiles: Tiles,
    axis: int,
    weights: Array | None,
    in_units_of: Callable[[Array], tuple[Array, Array]],
) -> Array:
    """int32 codes of the scales of blocks, for finite blocks that are not zero.

    clean: elements, split into blocks. statistic: their amax. factor: the multiplier of the global scale, or None. weights: of
    `weights_of`, or None. in_units_of: f(stored scales) -> (elements divided by them, whether these are usable).
    """
    level, element = fmt.scale, fmt.element
    power = power_below(ops, ops.bitcast_to_int(statistic))
    y = without_small(ops, clean * power)
    every = rule.candidates(ops, statistic, level.codec, element, fmt.qmax(level), factor)
    every = every[: every.shape[0] - rule.needless(level.codec, element)]

    def compared(best: Array, least: Array, codes: Array) -> tuple[Array, Array]:
        """(the best scales so far, their errors), with one more candidate"""
        stored = ops.store(codes, ops.storage(level.codec))
        scaled, usable = in_units_of(stored)
        codec = level.codec
        unit = codec.multiply(ops, power, stored) if factor is None else codec.read(ops, stored) * factor * power
        unit = ops.where(usable, saturated(ops, unit), 0.0)  # where it is large, codes are 0
        values = element.decode(ops, element.encode(ops, scaled)) * unit
        d = y - without_small(ops, values)
        term = flushed(ops, d * d)
        if weights is not None:
            term = flushed(ops, term * weights)
        error = total(ops, term, tiles, axis)
        better = error < least
        return ops.where(better, codes, best), ops.where(better, error, least)

    nothing = ops.broadcast(ops.constant(math.inf, statistic), statistic.shape)
    return ops.fold(compared, (every[0], nothing), every)[0]


def power_below(ops: Ops, bits: Array) -> Array:
    """2^-n where 2^n is the largest power of two, up to 2^126, that is at most the FP32 number with these bits."""
    return ops.bitcast_to_float((254 - ops.minimum(bits >> 23, 253)) << 23)


def without_small(ops: Ops, a: Array, smallest: float = SMALLEST) -> Array:
    """`a` with magnitudes below `smallest` replaced by zero."""
    return ops.where(ops.maximum(a, -a) < smallest, 0.0, a)


def weights_of(ops: Ops, importance: Array, tiles: Tiles, axis: int) -> Array:
    """The weights of the elements, split into blocks: `importance`, in units of a power of two near the largest of each block.

    What is not a positive number counts as zero.
    """
    length = importance.shape[0]
    ndim = len(tiles.shape)
    along = (*(1,) * (ndim - 1), length) if axis == -1 else (*(1,) * (ndim - 2), length, 1)
    bits = ops.bitcast_to_int(ops.reshape(ops.f32(importance), along))
    bits = ops.where((bits >= NORMAL) & (bits < F32_INF), bits, 0)
    of_row = Tiles(ops, along, tiles.block)
    bits = of_row.split(bits)
    power = power_below(ops, ops.amax(bits, of_row.axes))
    return without_small(ops, ops.bitcast_to_float(bits & MAGNITUDE) * power, LIGHTEST)


def total(ops: Ops, a: Array, tiles: Tiles, axis: int) -> Array:
    """Sums of blocks, by pairwise trees: along the contraction axis, then along the others, the last first."""
    ndim = len(a.shape)
    if tiles.block == TENSOR:
        axes = [ndim + axis, *(n for n in reversed(range(tiles.lead, ndim)) if n != ndim + axis)]
    else:
        axes = [ndim - 1, ndim - 3] if axis == -1 else [ndim - 3, ndim - 1]
    for each in axes:
        a = _tree(ops, a, each)
    return a


def _tree(ops: Ops, a: Array, axis: int) -> Array:
    """The sum along an axis, which stays with length 1: of 2^n numbers, zeros included, the first half and the second added."""
    length = a.shape[axis]
    size = 1 << (length - 1).bit_length() if length else 1
    if size != length:
        a = ops.pad(a, tuple((size - length) * (n == axis) for n in range(len(a.shape))))
    after = (slice(None),) * (len(a.shape) - axis - 1)
    while size > 1:
        size //= 2
        a = a[(..., slice(None, size), *after)] + a[(..., slice(size, None), *after)]
    return a
