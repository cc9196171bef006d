"""The tensors of checkpoints, read by slabs for their error metrics, and histograms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from breccia import ErrorMetrics, ScaledTensor, ScalingRecipe
from breccia.backend import NUMPY, components, part_shapes
from breccia.internal import measuring, with_parts

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


class RowsOfFile(FileTensor):
    """A scaled tensor whose rows are read by a function, slab by slab.

    rows: reads some, counted through all matrices, as a matrix. They have blocks of one row.
    """

    def __init__(self, recipe: ScalingRecipe, shape: Shape, rows: Callable[[slice], ScaledTensor]) -> None:
        layout, dtypes = recipe.layout.fitted(shape), NUMPY.dtypes(recipe.format)
        shapes = part_shapes(recipe.format, layout, shape, -1)
        # Of shapes alone: nothing reads their items.
        parts: dict[str, Any] = {name: np.broadcast_to(np.zeros((), dtype), shapes[name]) for name, dtype in dtypes.items()}
        super().__init__(ScaledTensor.from_parts(recipe=recipe, layout=layout, **parts))
        self._read_rows = rows

    def _piece(self, st: ScaledTensor, slab: Slab, rooms: measuring.Rooms | None = None) -> ScaledTensor:
        matrices, rows = slab
        each = measuring.stacked(self.shape)[1]  # a slab of several matrices has all their rows
        found = self._read_rows(slice(matrices.start * each + rows.start, (matrices.stop - 1) * each + rows.stop))
        if len(self.shape) == 2:
            return found
        leads = matrices.stop - matrices.start, rows.stop - rows.start
        parts = {name: part.reshape(*leads, -1) if part.ndim else part for name, part in components(found).items()}
        return with_parts(found, parts, layout=found.layout.fitted((*leads, self.shape[-1])))


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
