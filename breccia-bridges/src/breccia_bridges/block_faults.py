"""Blocks of a quantized tensor that lost what they had: zeros, blocks with nothing of their values left, saturated ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from breccia import ScalingRecipe
from breccia.backend import TENSOR
from breccia.internal import measuring

from .measure import FileTensor, slabs

#: The share of a block's energy whose loss is no rounding: to the nearest of three numbers or more, under a scale of the
#: block's largest element, less is lost, for every codec.
LOST = 0.9
#: Blocks whose loss is below this share of the mean energy of a block do not count as broken: they matter to no product.
_LEAST = 0.01
#: The width of a block where one scale is for the whole tensor.
_WIDTH = 32


@dataclass(frozen=True)
class BlockFaults:
    """Blocks of rows: of the recipe's width along the last axis, one row high.

    dead: all zeros after quantization, and not before. broken: with an error of 0.9 of their energy or more, or NaN, which is
    not negligible beside the mean block. saturating: with an element beyond the largest value that the block can hold.
    """

    blocks: int = 0
    dead: int = 0
    broken: int = 0
    saturating: int = 0

    def __add__(self, other: BlockFaults) -> BlockFaults:
        return BlockFaults(
            self.blocks + other.blocks,
            self.dead + other.dead,
            self.broken + other.broken,
            self.saturating + other.saturating,
        )


def block_faults(x: FileTensor, y: FileTensor, recipe: ScalingRecipe) -> BlockFaults:
    """The faults of `y`, which is `x` under a recipe."""
    columns = x.shape[-1]
    starts = np.arange(0, columns, _width(recipe, columns))
    rooms = measuring.Rooms()
    energies, losses = list[np.ndarray](), list[np.ndarray]()
    dead = saturating = 0
    for slab in slabs(x.shape, x.unit, y.unit):
        a = x.values(slab, rooms)
        b, ends = y.bounded(slab, rooms)
        b = measuring.numbers_of(b)
        with np.errstate(over="ignore", invalid="ignore"):
            energies.append(np.add.reduceat(np.square(a, dtype=np.float64), starts, axis=-1).reshape(-1))
            losses.append(np.add.reduceat(np.square(a - b, dtype=np.float64), starts, axis=-1).reshape(-1))
        empty = ~np.logical_or.reduceat(b != 0, starts, axis=-1)
        dead += int((empty & np.logical_or.reduceat(a != 0, starts, axis=-1)).sum())
        if ends:
            low, high = zip(*(each.limits(slice(None)) for each in ends), strict=True)
            below, above = np.minimum.reduce(low).reshape(a.shape), np.maximum.reduce(high).reshape(a.shape)
            beyond = ((a < below) | (a > above)) & (below < above)
            saturating += int(np.logical_or.reduceat(beyond, starts, axis=-1).sum())
    energy, loss = np.concatenate(energies), np.concatenate(losses)
    finite = energy[np.isfinite(energy)]
    least = _LEAST * float(finite.mean()) if finite.size else 0.0
    broken = int((~(loss < LOST * energy) & ~(loss <= least)).sum())
    return BlockFaults(energy.size, dead, broken, saturating)


def _width(recipe: ScalingRecipe, columns: int) -> int:
    block = recipe.layout.block()
    return min(columns, _WIDTH if block == TENSOR else block[1] or columns)
