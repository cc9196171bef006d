"""How the tensors of one value of the new file are made: what threads do for its slabs, and the pieces that are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from breccia import ScaledTensor
from breccia.backend import NUMPY, components
from breccia.internal import measuring

from .ahead import Item
from .announcements import TORCH_NAMES
from .dialect_writer import DialectWriter, Placed
from .jobs import CASTABLE, Job
from .measure import Slab, slabs
from .row_slabs import ROWS, RowSlabs
from .safetensors import file_parts
from .slab_casts import assembled, in_pieces

if TYPE_CHECKING:
    from .convert_file import FilePlan

#: The exponent of Inf and NaN.
_EXPONENTS = {"F32": np.uint32(0x7F800000), "F16": np.uint16(0x7C00), "BF16": np.uint16(0x7F80)}
#: Arrays by the names of tensors.
Piece = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Production:
    """items: what is done for the slabs of a value. made: the consecutive pieces of its tensors, from what the items give.

    axes: along which the pieces of a tensor follow each other, where it is not 0. alone: as in `ahead.Work`.
    """

    job: Job
    made: Callable[[Iterator[Any]], Iterable[Piece]]
    items: Sequence[Item[Any]] = ()
    axes: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    alone: bool = False
    is_kept: bool = False

    @classmethod
    def kept(cls, job: Job) -> Production:
        """Of a value whose bytes are there."""
        return cls(job, lambda _: (), is_kept=True)

    @classmethod
    def of(cls, job: Job, planned: FilePlan, alone: bool) -> Production:
        dialect, name = planned.dialect, job.name
        if job.way == "copy":
            return cls(job, lambda _: ({name: piece} for piece in planned.copied(job)))
        if job.way == "decode":
            return cls(job, lambda found: ({name: piece} for piece in found), _decoded(job), alone=alone)
        if dialect is not None and job.placed is not None:
            return cls._of_dialect(job, job.placed, dialect, alone)
        if job.way == "cast":
            return cls._cast(job, lambda pieces: (_named(name, piece) for piece in pieces), alone)
        return cls(job, lambda _: iter([_named(name, file_parts(job.tensor()))]), alone=alone)

    @classmethod
    def _cast(cls, job: Job, named: Callable[[Iterable[Piece]], Iterable[Piece]], alone: bool) -> Production:
        """The components of a value that is cast; those that calibration has chosen."""
        if isinstance(chosen := job.chosen, ScaledTensor):
            return cls(job, lambda _: named([components(chosen)]), alone=alone)
        return cls(job, lambda found: named(in_pieces(found)), job.casts().items, alone=alone)

    @classmethod
    def _of_dialect(cls, job: Job, placed: Placed, dialect: DialectWriter, alone: bool) -> Production:
        """The tensors of a value as a dialect stores it: slab by slab where that gives the same bytes, else whole."""
        if job.way != "cast":
            return cls(job, lambda _: iter([dialect.arrays(placed, job.tensor())]), alone=alone)
        casts = job.casts(ROWS)
        if (by_rows := RowSlabs.of(job, casts.slabs, dialect)) is not None:
            items = [*casts.before, *by_rows.items(job, casts.each, dialect)]
            return cls(job, lambda found: (piece for piece in found if piece is not None), items, by_rows.axes, alone)
        recipe, shape = casts.recipe, job.value.shape
        return cls._cast(job, lambda pieces: iter([dialect.arrays(placed, assembled(pieces, recipe, shape))]), alone)


def _named(name: str, parts: Piece) -> Piece:
    return {f"{name}.{end}": array for end, array in parts.items()}


def _decoded(job: Job) -> list[Item[np.ndarray]]:
    """The values of a scaled one in the dtype of the new file, slab by slab."""
    numbers, codec = job.value.numbers(), CASTABLE[job.described[0][job.name][0]]
    dtype, exponent = TORCH_NAMES[codec.name], _EXPONENTS[codec.name]

    def decoded(slab: Slab) -> np.ndarray:
        values = numbers.rounded(slab, dtype)
        if (values.view(exponent.dtype) & exponent).max(initial=0) < exponent:
            return values
        return NUMPY.store(codec.encode(NUMPY, numbers.values(slab)), NUMPY.storage(codec))  # saturates; has one NaN

    def item(slab: Slab) -> Item[np.ndarray]:
        def done(_: measuring.Rooms) -> np.ndarray:
            return decoded(slab)

        return done

    return [item(slab) for slab in slabs(numbers.shape, numbers.unit)]
