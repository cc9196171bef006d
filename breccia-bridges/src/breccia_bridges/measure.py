"""The tensors of checkpoints, read by slabs for their error metrics, and histograms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from breccia import ErrorMetrics, ScaledTensor
from breccia.internal import measuring

from .configs import FLOATS
from .safetensors_file import read

measure, slabs = measuring.measure, measuring.slabs

#: The metrics of no elements.
NOTHING = ErrorMetrics()

#: File dtypes of plain floating-point numbers.
FLOATING = ("F64", *FLOATS)

#: Bins of a histogram: odd, so that zero has one.
BINS = 101


@dataclass(frozen=True)
class Histogram:
    """Elements by value, in `BINS` equal bins over [-limit, limit], before and after; `outside`: those outside after."""

    limit: float
    before: tuple[int, ...]
    after: tuple[int, ...]
    outside: int

    def to_dict(self) -> dict[str, Any]:
        return {"low": -self.limit, "high": self.limit, "before": self.before, "after": self.after, "outside": self.outside}


class FileTensor(measuring.Source):
    """A floating tensor of a checkpoint, plain or scaled, read slab by slab. dtype: that of the file, or the recipe's name.

    x: a scaled tensor, or the array of a plain one; of views of a file, nothing is read before.
    Reading raises CorruptFileError where the file changed since it was opened.
    """

    def __init__(self, x: ScaledTensor | np.ndarray, dtype: str = "") -> None:
        self.dtype = x.recipe.name if isinstance(x, ScaledTensor) else dtype
        super().__init__(x, self.dtype == "BF16")

    def _read(self, part: np.ndarray) -> np.ndarray:
        return read(part)


def histogram(x: FileTensor, y: FileTensor) -> Histogram:
    """Histogram of the elements of `x` and `y`, of the same shape."""
    pieces = list(slabs(x.shape, x.unit, y.unit))
    limit = max((_largest(x.values(slab)) for slab in pieces), default=0.0) or 1.0
    counts = np.zeros((2, BINS), np.int64)
    for slab in pieces:
        # In FP64, where the difference of two FP32 numbers is finite.
        counts += [np.histogram(t.values(slab).astype(np.float64), BINS, (-limit, limit))[0] for t in (x, y)]
    before, after = (tuple(map(int, row)) for row in counts)
    return Histogram(limit, before, after, math.prod(x.shape) - sum(after))


def _largest(x: np.ndarray) -> float:
    magnitude = np.abs(x)
    return float(magnitude.max(where=np.isfinite(magnitude), initial=0))
