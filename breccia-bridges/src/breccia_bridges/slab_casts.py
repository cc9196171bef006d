"""`cast` of a tensor that does not fit into memory: slab by slab, with the bytes of one cast."""

from __future__ import annotations

import math
from collections.abc import Generator

import numpy as np

from breccia import ScalingRecipe, cast
from breccia.backend import TENSOR, components

from .measure import FileTensor, slabs


class SlabCasts:
    """A tensor to quantize, by slabs of complete blocks in C order.

    A block's bytes depend on that block alone and, where the recipe has a tensor-level scale, on the smallest and the largest
    element of the tensor and on whether it has NaN or Inf. Each slab is cast below rows of these, which are then cut off: so
    every rule sees the statistics of the whole tensor, and nothing else of the algorithm is needed here.
    """

    def __init__(self, stored: FileTensor, recipe: ScalingRecipe) -> None:
        self.stored, self.recipe = stored, recipe
        block = recipe.layout.block()
        self.has_tensor_scale = recipe.format.levels[0].block == TENSOR
        self.rows = 1 if block == TENSOR else block[0] or stored.shape[-2]
        self.slabs = list(slabs(stored.shape, stored.unit, self.rows))

    def cast(self) -> Generator[dict[str, np.ndarray]]:
        """The components of the cast tensor in consecutive pieces; per-tensor components come with the first."""
        above = self._extremes() if self.has_tensor_scale and len(self.slabs) > 1 else np.empty(0, np.float32)
        for slab in self.slabs:
            x = self.stored.values(slab)
            if above.size:
                matrices, _, columns = x.shape
                x = np.concatenate([np.broadcast_to(above[:, None], (matrices, above.size, columns)), x], axis=1)
            st = cast(x, self.recipe)[:, above.size :]
            yield {part: a for part, a in components(st).items() if a.ndim or slab == self.slabs[0]}

    def _extremes(self) -> np.ndarray:
        """The smallest and the largest finite element, and NaN if there are others; repeated to whole blocks of rows."""
        low, high, bad = np.float32(np.inf), np.float32(-np.inf), False
        for slab in self.slabs:
            x = self.stored.values(slab)
            finite = np.isfinite(x)
            low, high = x.min(where=finite, initial=low), x.max(where=finite, initial=high)
            bad = bad or not finite.all()
        extremes = [*((low, high) if low <= high else ()), *([np.float32(np.nan)] if bad else [])]
        return np.resize(np.array(extremes, np.float32), math.ceil(len(extremes) / self.rows) * self.rows)
