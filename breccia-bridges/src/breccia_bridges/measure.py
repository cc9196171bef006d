"""The tensors of checkpoints, read by slabs for their error metrics, and histograms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from breccia import ErrorMetrics, ScaledTensor
from breccia.internal import measuring

from .configs import FLOATS
from .safetensors_file import Shape, read

measure, slabs, Slab = measuring.measure, measuring.slabs, measuring.Slab

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

    def _read(self, part: np.ndarray, rooms: measuring.Rooms | None, name: str) -> np.ndarray:
        return read(part) if rooms is None else read(part, partial(rooms.array, name))


class Numbers(Protocol):
    """Floats that are read by slabs: those of a `FileTensor`, or what is computed from them."""

    @property
    def shape(self) -> Shape: ...

    @property
    def unit(self) -> int | None: ...

    def values(self, slab: measuring.Slab) -> np.ndarray: ...


def same_values(x: Numbers, y: Numbers) -> bool:
    """Whether two tensors have the same shape and the same numbers; NaN equals NaN. Reads up to the first slab that differs."""
    return x.shape == y.shape and all(
        bool(((a == b) | (np.isnan(a) & np.isnan(b))).all())
        for a, b in ((x.values(slab), y.values(slab)) for slab in slabs(x.shape, x.unit, y.unit))
    )


def first_row(x: Numbers) -> np.ndarray:
    """The first row in FP32, with one zero and one NaN; no more of the tensor is read than shares bytes or scales with it."""
    matrices, rows, _ = measuring.stacked(x.shape)
    slab = (matrices, rows) if x.unit is None else (min(matrices, 1), min(rows, x.unit))
    values = x.values((slice(0, slab[0]), slice(0, slab[1])))[:1, :1].astype(np.float32).reshape(-1)
    return np.where(np.isnan(values), np.float32(np.nan), values + np.float32(0))


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
