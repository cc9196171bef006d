"""The random words of stochastic rounding, and of the signs of rotations."""

from __future__ import annotations

from typing import Any

from ...arrays.ops import Array, Ops


def random_words(ops: Ops, like: Array, seed: Any) -> Array:
    """int32 words of Threefry-2x32-20 for every element (docs/spec/numerics.md, section 5.5)."""
    low, high = ops.words(seed)
    schedule = (low, high, low ^ high ^ 0x1BD11BDA)
    x, y = ops.counter(like)
    x, y = x + schedule[0], y + schedule[1]
    rotations = (13, 15, 26, 6, 17, 29, 16, 24)
    for i in range(20):
        r = rotations[i % 8]
        x = x + y
        y = ((y << r) | ((y >> (32 - r)) & ((1 << r) - 1))) ^ x
        if i % 4 == 3:
            j = i // 4 + 1
            x = x + schedule[j % 3]
            y = y + schedule[(j + 1) % 3] + j
    return x
