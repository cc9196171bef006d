"""The memory that each value takes while it is converted, from headers alone, and the limit of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from breccia import BrecciaError, OptionError, ScalingRecipe
from breccia.backend import TENSOR, threads
from breccia.internal import measuring, printable

from .ahead import WAITING
from .dialect_writer import DialectWriter, Placed, Reader
from .jobs import Job
from .measure import Slab, slabs
from .row_slabs import ROWS, RowSlabs
from .safetensors_file import DTYPES, Entry, is_mapped
from .source import Value
from .stored import Stored
from .text import size

#: What the program takes before it converts anything, with the libraries that it imports, and for each value of a checkpoint.
_PROGRAM, _OF_VALUE = 128 << 20, 8 << 10
#: Bytes per element of a slab while it is cast or measured: FP32 and FP64 copies of it, its decoded values, and their limits.
_OF_SLAB = 64
#: The same of a slab that each further thread has: FP32 copies of it and of its decoded values, and what it is read from.
_OF_THREAD = 12
#: The same of a slab whose result waits to be written: its numbers in FP32, at most.
_OF_WAITING = 4
#: Copies of a value's tensors that are there at once where it is taken whole: the pieces of the cast, what they are joined to,
#: and what the dialect makes of that; or what is read, and what is made of it.
_COPIES = 3
#: Copies of a tensor of GGUF whose rows change places: its pieces, what they are joined to, and the changed rows.
_MOVED = 3
#: Bytes per element of codes that a dialect takes apart, where they are less than a byte, to pack them into words of 32 bits.
_OF_CODE = 4
#: Bytes per element while codes get another format, which is done on whole tensors, and while it is found out whether a recipe
#: keeps all values: FP32 and FP64 copies, and masks of them.
_OF_NEW_CODE, _OF_EXACT = 20, 80
#: How many times as long as elsewhere slabs may be, so that less is done under the GIL, for which threads wait, and yet numbers
#: stay in the processor's cache; and the least elements of one: with fewer, calls take longer than what they do.
_LONGER, _LEAST = 4, 1 << 16
_MIB = 1 << 20


class Estimates:
    """What values take at most, while they are converted, verified, or tried for exactness.

    dialect: to write; None for breccia's own files. reader: of what it wrote, where that is decoded to verify it.
    moved: the names of tensors whose rows change places.
    """

    def __init__(self, dialect: DialectWriter | None = None, reader: Reader | None = None, moved: Iterable[str] = ()) -> None:
        self.dialect, self.reader, self.moved = dialect, reader, frozenset(moved)
        self._mapped: dict[tuple[str, ScalingRecipe, bool], bool] = {}
        self._read_by_slabs: dict[ScalingRecipe, bool] = {}

    def needed(self, job: Job) -> int:
        """The bytes that a value takes while it is converted and verified."""
        return self.besides(job) + (_of_slabs(job) if job.way != "copy" else 0)

    def besides(self, job: Job) -> int:
        """Those of them that do not belong to a slab."""
        value, recipe = job.value, job.recipe
        moved = _MOVED * job.nbytes if self.moved & job.described[0].keys() else 0
        if job.way == "copy":
            return moved
        elements = math.prod(value.shape)
        whole = _COPIES * value.nbytes if job.way == "keep" or not self._is_mapped(value) else 0
        if recipe is not None and (job.way == "keep" or self._is_placed_whole(job) or not self._is_read_by_slabs(job)):
            whole += _COPIES * job.nbytes
            if job.way == "keep" and value.recipe != recipe:
                whole += _OF_NEW_CODE * elements
            elif job.placed is not None and recipe.format.element.bits < 8:
                whole += _OF_CODE * elements
        return moved + whole

    def tried(self, job: Job) -> int:
        """The bytes that a value takes while it is found out whether its recipe keeps all of it."""
        whole = job.way == "cast" and job.value.recipe is not None and not job.among
        return _COPIES * job.value.nbytes + _OF_EXACT * math.prod(job.value.shape) if whole else 0

    def check(self, jobs: Sequence[Job], limit: int, of: Callable[[Job], int] | None = None) -> None:
        """Raise OptionError where a value, with the program and what it knows of all values, takes more than `limit` bytes.

        of: what a value takes; by default `needed`.
        """
        of = of or remembered(self.needed, self.moved)
        largest = max(jobs, key=of, default=None)
        if largest is None or (takes := _PROGRAM + _OF_VALUE * len(jobs) + of(largest)) <= limit:
            return
        give = f"{math.ceil(takes / _MIB / 64) * 64}MiB"
        raise OptionError(
            f"the conversion takes about {size(takes)} of memory while it converts {printable(largest.name)}, and the limit is "
            f"{size(limit)}. Give max_memory={give!r} (--max-memory {give}), or exclude it.",
            name=largest.name,
            max_memory=limit,
            needed=takes,
        )

    def slab(self, jobs: Sequence[Job], limit: int) -> int:
        """The elements of a slab under which every value stays below the limit.

        Raises as `check` does where none does.
        """
        elements = _LONGER * measuring.SLAB
        while True:
            try:
                with measuring.of_elements(elements):
                    self.check(jobs, limit)
                return elements
            except OptionError:
                if elements <= _LEAST:
                    raise
                elements //= 2

    def _is_placed_whole(self, job: Job) -> bool:
        if job.placed is None or self.dialect is None:
            return job.placed is not None
        return RowSlabs.of(job, slabs_of(job, ROWS), self.dialect) is None

    def _is_read_by_slabs(self, job: Job) -> bool:
        """Is what the dialect wrote read by slabs? By some rows of zeros, which it reads."""
        if self.reader is None or self.dialect is None or job.placed is None or job.recipe is None:
            return True
        if job.recipe not in self._read_by_slabs:
            alone = self.dialect.of_rows(job.placed, ROWS)
            self._read_by_slabs[job.recipe] = alone is not None and _is_apart(self.reader, alone)
        return self._read_by_slabs[job.recipe]

    def _is_mapped(self, value: Value) -> bool:
        """Are the codes of a value read by slabs? By the smallest value of the same dialect and recipe, which is read."""
        if value.stored is None or self._has_rows(value.stored):
            return True
        kind = value.stored.dialect.name, value.stored.form.recipe, value.stored.form.is_transposed
        if kind not in self._mapped:
            try:
                self._mapped[kind] = is_mapped(value.tensor().data)
            except BrecciaError:  # raised with all that is wrong where the value is converted
                self._mapped[kind] = False
        return self._mapped[kind]

    def _has_rows(self, stored: Stored) -> bool:
        """Does its dialect read some rows of this value? That may depend on its order of groups, and on its shape."""
        try:
            return stored.rows() is not None
        except BrecciaError:
            return False

    def learn(self, values: Mapping[str, Value]) -> None:
        """Read the smallest value of each dialect and recipe, by which others are judged."""
        for value in sorted(values.values(), key=lambda one: one.nbytes):
            self._is_mapped(value)


class _Zeros:
    """A file whose tensors are zeros, in memory."""

    path = Path()
    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(self, placed: Placed) -> None:
        known = {placed.parts[end]: array for end, array in placed.stored.known.items()}
        self.entries = {name: Entry(dtype, shape, 0, 0) for name, (dtype, shape) in placed.entries.items()}
        self.arrays = {
            name: known.get(name, np.zeros(shape, DTYPES[dtype][1])) for name, (dtype, shape) in placed.entries.items()
        }

    def view(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name].copy()


def _is_apart(reader: Reader, placed: Placed) -> bool:
    """Can some rows be read of a value? Where its dialect reads them, or its codes are a view of the file."""
    file: Any = _Zeros(placed)
    try:
        value = reader(placed, file)
        if value.stored is not None and value.stored.rows() is not None:
            return True
        data = value.tensor().data
    except BrecciaError:  # zeros are no value of the dialect
        return False
    return any(np.may_share_memory(data, array) for array in file.arrays.values())


def remembered(of: Callable[[Job], int], moved: frozenset[str]) -> Callable[[Job], int]:
    """What a value takes, found once for values that are alike. moved: as `Estimates` has it."""
    known: dict[Any, int] = {}

    def found(job: Job) -> int:
        value, moves = job.value, bool(moved and moved & job.described[0].keys())
        in_order = value.stored is None or value.stored.form.layout is None
        what = job.way, value.shape, value.nbytes, value.recipe, job.recipe, job.nbytes, job.placed is None, value.axis
        key = *what, moves, in_order
        if key not in known:
            known[key] = of(job)
        return known[key]

    return found


def slabs_of(job: Job, *more: int) -> list[Slab]:
    """The slabs of a value."""
    shape = job.value.shape
    units = [_rows(recipe, shape[-2] if len(shape) > 1 else 1) for recipe in (job.value.recipe, job.recipe) if recipe]
    return list(slabs(shape, 1, *units, *more)) if shape else []


def _of_slabs(job: Job) -> int:
    """The bytes of the slabs that are cast or measured at a time."""
    every, shape = slabs_of(job), job.value.shape
    if not every:
        return _OF_SLAB
    matrices, rows = every[0]
    largest = (matrices.stop - matrices.start) * (rows.stop - rows.start) * shape[-1]
    of_others = _OF_THREAD * (threads.get_num_threads() - 1) + _OF_WAITING * WAITING  # they may have slabs of the next values
    return (_OF_SLAB + of_others) * largest


def _rows(recipe: ScalingRecipe, rows: int) -> int:
    block = recipe.layout.block()
    return 1 if block == TENSOR else max(1, block[0] or rows)
