"""Rotations of docs/spec/numerics.md, section 5.7, number by number: the signs, the sums in their order, the factor."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from ..rotations import Rotation
from .oracle_numbers import MIN_NORMAL, fl, random_word


def rotate(x: np.ndarray, rotation: Rotation) -> np.ndarray:
    """FP32 `x` rotated along its last axis."""
    return _each_block(x, rotation, lambda block, signs: _butterfly([s * v for s, v in zip(signs, block, strict=True)]))


def unrotate(z: np.ndarray, rotation: Rotation) -> np.ndarray:
    """The inverse."""
    return _each_block(z, rotation, lambda block, signs: [s * v for s, v in zip(signs, _butterfly(block), strict=True)])


def _each_block(x: np.ndarray, rotation: Rotation, function: Callable[[list[float], list[float]], list[float]]) -> np.ndarray:
    """`function` of each whole block and the signs, in its place."""
    signs = [-1.0 if random_word(rotation.seed, i) >= 1 << 31 else 1.0 for i in range(rotation.block)]
    out = x.copy()
    for row in out.reshape(-1, x.shape[-1]) if out.size else ():
        for start in range(0, len(row) - len(row) % rotation.block, rotation.block):
            block = [float(v) for v in row[start : start + rotation.block]]
            row[start : start + rotation.block] = [_flush(v) for v in function(block, signs)]
    return out


def _butterfly(block: list[float]) -> list[float]:
    """The Hadamard matrix, in Sylvester's order, times a block, over the square root of its length."""
    y, n, half = [_flush(v) for v in block], len(block), 1
    while half < n:
        added = [i for i in range(n) if i // half % 2 == 0]
        sums = {i: _sum(y[i], y[i + half]) for i in added} | {i + half: _sum(y[i], -y[i + half]) for i in added}
        y = [_flush(sums[i]) for i in range(n)]
        half *= 2
    root = math.isqrt(n)
    factor = Fraction(1, root) if root * root == n else Fraction(float(np.float32(1 / math.sqrt(n))))
    return [v * float(factor) if not math.isfinite(v) else _flush(float(fl(Fraction(v) * factor))) for v in y]


def _sum(a: float, b: float) -> float:
    """fl(a + b) by the rules of IEEE 754."""
    return float(fl(Fraction(a) + Fraction(b))) if math.isfinite(a) and math.isfinite(b) else a + b


def _flush(v: float) -> float:
    """`v`, or +0 below 2^-126."""
    return 0.0 if abs(v) < MIN_NORMAL else v
