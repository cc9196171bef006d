"""The Hadamard transform of the operands of grad_weight, before they are cast; see `TrainingRecipe.hadamard`.

Source: Pretraining Large Language Models with NVFP4 (arXiv:2509.25149), section 4.2.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

#: Bit i is set where row i of a group is negated before the transform: the two words of Threefry-2x32-20 of key 0 and counter
#: 0, so that no structure of data matches them. Fixed, so that every framework and every resumed run has the same.
SIGNS = 0x99BA4EFE6B200159


def hadamard(ops: Any, x: Any, size: int) -> Any:
    """`x` (..., M, K) transformed along M, in groups of `size` rows: FP32 (..., M rounded up to a multiple of `size`, K).

    Each group v becomes H D v: D negates the rows whose bit of `SIGNS` is set, H is Sylvester's matrix times 1 / sqrt(size).
    H D is orthogonal, so `hadamard(dy).T @ hadamard(x)` is `dy.T @ x`. Butterflies fix the order of additions: log2(size)
    stages of FP32 additions and subtractions, each rounded once, of rows at distance 1, 2, 4, ..., then one exact
    multiplication, so results are the same on every backend. Missing rows of the last group are zeros.

    ops: the backend primitives of the framework of `x`.
    """
    *lead, m, k = x.shape
    x, missing = ops.f32(x), -m % size
    if missing:
        x = ops.pad(x, (*(0 for _ in lead), missing, 0))
    groups = (m + missing) // size
    rows = ops.items(ops.reshape(x, (*lead, groups, size, k)), -2)
    rows = [-row if SIGNS >> i & 1 else row for i, row in enumerate(rows)]
    distance = 1
    while distance < size:
        for i in range(size):
            if not i & distance:
                rows[i], rows[i + distance] = rows[i] + rows[i + distance], rows[i] - rows[i + distance]
        distance *= 2
    scaled = [ops.reshape(row * (1.0 / isqrt(size)), (*lead, groups, 1, k)) for row in rows]
    return ops.reshape(ops.concat(scaled, -2), (*lead, groups * size, k))
