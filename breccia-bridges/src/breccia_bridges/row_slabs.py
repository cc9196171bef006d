"""Which part of another library's tensors some rows of a value become, so that a value is written slab by slab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from breccia import ScaledTensor
from breccia.internal import measuring

from .ahead import Item
from .dialect_writer import DialectWriter, Placed
from .jobs import Job
from .measure import Slab

#: Codes of any width fill whole words of 32 bits in so many rows.
ROWS = 32


@dataclass(frozen=True)
class RowSlabs:
    """How a dialect stores the slabs of a matrix.

    axes: of each tensor in the new file, by its name, the axis along which rows of the value follow each other; None for one
        that is the same whatever the rows. alone: each slab as it is stored alone.
    """

    axes: Mapping[str, int | None]
    alone: tuple[Placed, ...]

    @classmethod
    def of(cls, job: Job, slabs: Sequence[Slab], dialect: DialectWriter) -> RowSlabs | None:
        """None for a value that is not cast, or whose dialect does not store rows apart: it is taken whole.

        So is one whose codes calibration has chosen, which takes more memory than that.
        """
        placed = job.placed
        if placed is None or job.way != "cast" or not dialect.dialect.by_rows or len(job.value.shape) != 2:
            return None
        if job.chosen is not None:
            return None
        counts = [rows.stop - rows.start for _, rows in slabs]
        by_count = {rows: dialect.of_rows(placed, rows) for rows in dict.fromkeys(counts)}
        alone = tuple(one for count in counts if (one := by_count[count]) is not None)
        if len(alone) < len(counts):
            return None
        axes: dict[str, int | None] = {}
        for end, entry in placed.stored.entries.items():
            shapes = [one.stored.entries[end].shape for one in alone]
            differing = [n for n, length in enumerate(entry.shape) if length != shapes[0][n]]
            if len(differing) > 1 or differing > [1]:
                return None
            if differing and sum(shape[differing[0]] for shape in shapes) != entry.shape[differing[0]]:
                return None
            axes[placed.parts[end]] = differing[0] if differing else None
        return cls(axes, alone)

    def items(self, job: Job, casts: Sequence[Item[ScaledTensor]], dialect: DialectWriter) -> list[Item[dict[str, np.ndarray]]]:
        """What gives the arrays of each slab, by the names of tensors; those that are the same for all with the first."""
        assert job.placed is not None
        known = {job.placed.parts[end]: array for end, array in job.placed.stored.known.items()}

        def item(n: int, cast: Item[ScaledTensor]) -> Item[dict[str, np.ndarray]]:
            def stored(rooms: measuring.Rooms) -> dict[str, np.ndarray]:
                arrays = {**dialect.arrays(self.alone[n], cast(rooms)[0]), **known}
                return {name: array for name, array in arrays.items() if self.axes[name] is not None or n == 0}

            return stored

        return [item(n, cast) for n, cast in enumerate(casts)]
