"""Rotations along the contraction axis, in backend primitives (docs/spec/numerics.md, section 5.7).

Every sum is flushed, which also stands between products and sums, so that no compiler makes one operation of both.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...arrays.ops import NUMPY, Array, Ops
from ...fp32 import f32_bits
from ...rotations import Rotation
from ...rules import flushed
from .random_words import random_words


def rotated(ops: Ops, x: Array, rotation: Rotation, axis: int) -> Array:
    """FP32 `x` with every whole block along `axis` (-1 or -2) rotated."""
    return _blockwise(ops, x, rotation, axis, signs_first=True)


def unrotated(ops: Ops, z: Array, rotation: Rotation, axis: int) -> Array:
    """The inverse: the same sums, then the signs."""
    return _blockwise(ops, z, rotation, axis, signs_first=False)


def _blockwise(ops: Ops, x: Array, rotation: Rotation, axis: int, signs_first: bool) -> Array:
    shape = tuple(x.shape)
    axis, n = axis % len(shape), rotation.block
    before, after = shape[:axis], shape[axis + 1 :]
    length, whole = shape[axis], rotation.whole(shape[axis])
    if not whole:
        return x
    places = (slice(None),) * len(after)
    y = ops.reshape(x[(..., slice(None, whole), *places)] if whole != length else x, (*before, whole // n, n, *after))
    place = ops.counter(ops.broadcast(ops.constant(0.0, x), (n,)))[0]
    signs = ops.reshape(ops.bitcast_to_float(ops.take(_sign_bits(rotation), place)), (n, *(1 for _ in after)))

    def signed(a: Array) -> Array:
        return flushed(ops, a * signs)

    y = signed(y) if signs_first else flushed(ops, y)
    half = 1
    while half < n:
        pairs = ops.reshape(y, (*before, whole // (2 * half), 2, half, *after))
        low, high = (pairs[(..., slice(i, i + 1), slice(None), *places)] for i in (0, 1))
        y = flushed(ops, ops.concat([low + high, low - high], axis=len(before) + 1))
        half *= 2
    y = ops.reshape(y, (*before, whole // n, n, *after)) * rotation.factor
    y = ops.reshape(flushed(ops, y) if signs_first else signed(y), (*before, whole, *after))
    return y if whole == length else ops.concat([y, x[(..., slice(whole, None), *places)]], axis=axis)


@lru_cache(maxsize=64)
def _sign_bits(rotation: Rotation) -> tuple[int, ...]:
    """The bits of `signs_of` in FP32. Computed once: on a GPU each of its steps is a launch."""
    return tuple(map(f32_bits, signs_of(rotation)))


def signs_of(rotation: Rotation) -> tuple[float, ...]:
    """1 or -1 for each element of a block."""
    with NUMPY.errstate():
        words = random_words(NUMPY, np.zeros(rotation.block, np.float32), rotation.seed)
    return tuple(-1.0 if word < 0 else 1.0 for word in words)
