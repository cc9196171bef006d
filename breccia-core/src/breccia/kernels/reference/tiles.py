"""Block geometry of the generic algorithm: arrays split into blocks, and scales that broadcast against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...arrays.ops import Array, Ops
from ...formats import TENSOR, Block
from ...layouts import Shape


@dataclass(frozen=True)
class Tiles:
    """Blocks over a shape; per-tensor blocks span all but the first `lead` axes.

    block: its lengths along the last two axes, which are the (m, k) of a format if K is the last one, else (k, m).
    """

    ops: Ops
    shape: Shape
    block: Block
    lead: int = 0

    @classmethod
    def along(cls, ops: Ops, axis: int, shape: Shape, block: Block, lead: int = 0) -> Tiles:
        """Blocks (m, k) with k along `axis`."""
        m, k = block
        return cls(ops, shape, (k, m) if axis == -2 else block, lead)

    @property
    def sides(self) -> tuple[int, int]:
        """The rows and columns of a block, which is no larger than a matrix."""
        m, k = (_side(*pair) for pair in zip(self.block, self.shape[-2:], strict=True))
        return m, k

    @property
    def counts(self) -> tuple[int, int]:
        (rows, columns), (m, k) = self.shape[-2:], self.block  # None is one block per side, even an empty one
        return -(-rows // m) if m else 1, -(-columns // k) if k else 1

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of a split array within one block."""
        return tuple(range(self.lead, len(self.shape))) if self.block == TENSOR else (-3, -1)

    def split(self, a: Array) -> Array:
        if self.block == TENSOR:
            return a
        (m, k), (rows, columns) = self.sides, self.counts
        widths = (0,) * (len(self.shape) - 2) + (rows * m - self.shape[-2], columns * k - self.shape[-1])
        padded = self.ops.pad(a, widths) if any(widths) else a
        return self.ops.reshape(padded, (*self.shape[:-2], rows, m, columns, k))

    def join(self, a: Array) -> Array:
        if self.block == TENSOR:
            return a
        (m, k), (rows, columns) = self.sides, self.counts
        padded = self.ops.reshape(a, (*self.shape[:-2], rows * m, columns * k))
        return padded[..., : self.shape[-2], : self.shape[-1]]

    def scale(self, a: Array) -> Array:
        """Reshape a reduced split array to the layout's scale shape."""
        return self.ops.reshape(a, self.shape[: self.lead] if self.block == TENSOR else (*self.shape[:-2], *self.counts))

    def broadcast_to_blocks(self, a: Array) -> Array:
        """Reshape stored scales to broadcast against split arrays."""
        if self.block == TENSOR:
            return self.broadcast_global(a)
        rows, columns = self.counts
        return self.ops.reshape(a, (*self.shape[:-2], rows, 1, columns, 1))

    def repeat_per_block(self, a: Array, finer: Tiles) -> Array:
        """Repeat integers of stored scales over the blocks of `finer`, which lie within the blocks here.

        Each has memory of its own: `|` copies, as items of a broadcast view share theirs.
        """
        if finer.block == self.block:
            return a | 0
        lead, (rows, columns), (tall, wide) = self.shape[:-2], finer.counts, self.counts
        if self.block == TENSOR:
            return self.ops.broadcast(self.broadcast_global(a), (*lead, rows, columns)) | 0
        down, along = (-(-outer // inner) for outer, inner in zip(self.sides, finer.sides, strict=True))
        beside = self.ops.broadcast(self.ops.reshape(a, (*lead, tall, 1, wide, 1)), (*lead, tall, down, wide, along)) | 0
        repeated = self.ops.reshape(beside, (*lead, tall * down, wide * along))
        return repeated if repeated.shape[-2:] == (rows, columns) else repeated[..., :rows, :columns] | 0

    def broadcast_global(self, a: Array) -> Array:
        """Reshape a global scale, of shape () or a prefix of the leading axes, to broadcast against split arrays."""
        ndim = len(self.shape) + (0 if self.block == TENSOR else 2)
        return self.ops.reshape(a, (*a.shape, *(1,) * (ndim - len(a.shape))))


def _side(side: int | None, length: int) -> int:
    if side is None or (type(length) is int and length < side):  # a symbolic length has no order
        return max(length, 1)
    return side


def k_last(ops: Ops, a: Any, axis: int) -> Any:
    """`a` with the contraction axis last."""
    return ops.swap(a) if axis == -2 and a is not None and len(a.shape) >= 2 else a
