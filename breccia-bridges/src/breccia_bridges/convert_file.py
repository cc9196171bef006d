"""Write one file of a conversion, and verify it: its bytes are read back, and its tensors decoded.

A `Task` has all that decides about a file, and `convert_file` does it: in this process, or in one on another machine. An engine
(`engines`) runs the tasks of a conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from breccia import CorruptFileError, ErrorMetrics
from breccia.internal import measuring

from .ahead import Item, ahead, results
from .configs import RESERVED, Config, read_configs
from .dialect_writer import DialectWriter, Reader
from .digests import Hash
from .jobs import Job
from .measure import FileTensor, Histogram, histogram
from .production import Production
from .results import TensorReport, Verify
from .safetensors import declarations, view_tensor
from .safetensors_file import Container, read, shown
from .safetensors_writer import HeaderError, raw_bytes
from .staged_writer import StagedWriter

#: Bytes that are read at a time of tensors that are copied or compared.
_PIECE = 1 << 22


class TensorWriter(Protocol):
    """What writes the tensors of one file, in any order; see `staged_writer.StagedWriter`."""

    path: Path
    digests: dict[str, str]

    @property
    def entries(self) -> Iterable[str]: ...

    @property
    def nbytes(self) -> int: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def stream(self, name: str) -> AbstractContextManager[Callable[[np.ndarray], None]]: ...

    def keep(self, digests: Mapping[str, str]) -> bool: ...


class FilePlan:
    """The values of a file of the source, and how each is written.

    replaced: keys of the metadata that are not copied. dialect, reader: of another library's dialect, and of what it wrote.
    header: the dialect's metadata of every file.
    not_made: what the new file lacks of the model, and why. suffix: of the new file. A dialect with a file of its own has a
    subclass, for the values of all files of the source.
    """

    suffix: ClassVar[str] = ".safetensors"
    writer: TensorWriter

    def __init__(
        self,
        container: Container,
        jobs: dict[str, Job],
        replaced: set[str],
        dialect: DialectWriter | None,
        reader: Reader | None,
        header: Mapping[str, str],
    ) -> None:
        self.container, self.jobs, self.replaced, self.dialect, self.reader = container, jobs, replaced, dialect, reader
        self.header, self.not_made = header, list[str]()

    def declare(self, path: Path) -> None:
        """Make the writer of the new file, which checks names, metadata and the length of the header."""
        extra = {k: v for k, v in self.container.metadata.items() if k not in RESERVED and k not in self.replaced}
        if self.dialect:
            # transformers opens files that say so.
            extra = {"format": "pt", **extra, **self.header}
        self.writer = StagedWriter(path, *declarations({name: job.described for name, job in self.jobs.items()}, extra))

    def copied(self, job: Job) -> Iterator[np.ndarray]:
        """The bytes of a value that is copied, in pieces."""
        return in_pieces(job.plain())

    def reopened(self) -> tuple[Container, dict[str, Item[None]]]:
        """The written file, and what raises CorruptFileError if a tensor, by its name, differs from what was written."""
        return _reopened(self.writer.path, self.writer.digests)

    @property
    def moved(self) -> Iterable[str]:
        """The tensors whose rows change places, which are collected before they are written."""
        return ()

    def pieces(self, path: Path) -> list[FilePlan]:
        """Plans of parts of the file, each of which can be declared. Raises HeaderError where a tensor alone cannot."""
        try:
            self.declare(path)
            return [self]
        except HeaderError:
            if len(self.jobs) < 2:
                raise
        jobs = list(self.jobs.values())
        halves = jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]
        return [piece for half in halves for piece in self._of(half).pieces(path)]

    def shards(self, limit: int) -> list[FilePlan]:
        """Plans of parts of the file, in its order, of at most so many bytes, or of one value that has more."""
        parts: list[list[Job]] = []
        size = 0
        for job in self.jobs.values():
            if not parts or size + job.nbytes > limit:
                parts.append([])
                size = 0
            parts[-1].append(job)
            size += job.nbytes
        return [self._of(part) for part in parts]

    def _of(self, jobs: Iterable[Job]) -> FilePlan:
        part = copy(self)
        part.jobs = {job.name: job for job in jobs}
        return part


def _is_running() -> None:
    """Of a task in the process that started it."""


@dataclass(frozen=True)
class Task:
    """A file to write. It can be pickled, and needs no other task.

    A value that shares a scale with those of other files has them in its job, and they are read for each of the files.

    slab: elements of a slab under which each value stays below the limit of memory; sums of metrics depend on it.
    written, verified: what the journal has of the file's values.
    uploaded_to: the URL of the destination to which the file is uploaded after the task; empty for one on a disk.
    whole: the names of values that take more memory than that of their slabs.
    check_running: called before anything is written; raises where the run that started the task has ended.
    """

    planned: FilePlan
    verify: Verify
    histograms: bool
    slab: int
    written: Mapping[str, Mapping[str, str]]
    verified: Mapping[str, tuple[ErrorMetrics | None, Histogram | None]]
    uploaded_to: str
    whole: frozenset[str] = frozenset()
    check_running: Callable[[], None] = _is_running

    def __getstate__(self) -> dict[str, Any]:
        """A plan that is declared needs of the source its jobs alone."""
        planned = copy(self.planned)
        del planned.container
        return {**self.__dict__, "planned": planned}


@dataclass(frozen=True)
class Step:
    """A value that is written or, where there is a report, verified. nbytes: its size in the source.

    digests: of the bytes of its tensors, where they are new. is_measured: whether the metrics of the report are new.
    """

    name: str
    nbytes: int
    digests: Mapping[str, str] | None = None
    report: TensorReport | None = None
    is_measured: bool = False


def convert_file(task: Task) -> Generator[Step]:
    """Write a file, and verify it, value by value: two steps for each, in the order of the plan.

    What the journal has is not done again: values whose bytes are there still, and measurements of them.
    """
    verified = dict(task.verified)
    for step in _written(task):
        if step.digests is not None:
            verified.pop(step.name, None)
        yield step
    yield from _verified(task, verified)


def _written(task: Task) -> Generator[Step]:
    """Write the values; those whose bytes are there stay."""
    planned = task.planned

    def production_of(job: Job, writer: TensorWriter) -> Production:
        digests = task.written.get(job.name, {})
        if digests.keys() == job.described[0].keys() and writer.keep(digests):
            return Production.kept(job)
        with measuring.of_elements(task.slab):
            return Production.of(job, planned, job.name in task.whole)

    def works(writer: TensorWriter) -> Iterator[Production]:
        for job in planned.jobs.values():
            yield production_of(job, writer)

    task.check_running()
    with planned.writer as writer, ahead(works(writer)) as productions:
        for production, found in productions:
            job, digests = production.job, None
            if not production.is_kept:
                _write_parts(writer, list(job.described[0]), production.made(found), production.axes, task.check_running)
                job.check_unchanged()
                digests = {part: writer.digests[part] for part in job.described[0]}
            del production, found  # they may hold the value
            yield Step(job.name, job.value.nbytes, digests)


def _verified(task: Task, verified: Mapping[str, tuple[ErrorMetrics | None, Histogram | None]]) -> Generator[Step]:
    """Read the file back, and measure the errors of its values, unless they are known."""
    planned = task.planned
    written, compared = (None, dict[str, Item[None]]()) if task.verify is Verify.none else planned.reopened()
    if planned.reader:  # reads scales before slabs, and would say something else of damaged ones
        for _ in results(list(compared.values())):
            continue
        compared.clear()
    configs = read_configs(written) if written and task.verify is Verify.full else {}

    def measurement_of(name: str, job: Job) -> Measurement:
        is_measured = task.verify is Verify.full and job.way != "copy" and not job.is_changed and name not in verified
        compares = [compared[part] for part in job.described[0] if part in compared]
        if not written or not is_measured:
            return Measurement(job, items=compares)
        read_back = planned.reader(job.placed, written).numbers() if planned.reader and job.placed else None
        pair = job.value.numbers(), read_back or _numbers_of(written, name, configs.get(name))
        with measuring.of_elements(task.slab):
            return Measurement(job, pair, [*compares, *measuring.items(*pair)], name in task.whole)

    with ahead(measurement_of(*named) for named in planned.jobs.items()) as measurements:
        for one, found in measurements:
            job, counts, is_measured = one.job, None, one.pair is not None
            metrics = [each for each in found if each is not None]
            if one.pair:
                fidelity = reduce(add, metrics)
                if task.histograms and not job.reason:
                    with measuring.of_elements(task.slab):
                        counts = histogram(*one.pair)
                report = job.report(fidelity, counts)
                job.check_unchanged()
            else:
                report = job.report(*verified.get(job.name, (None, None)))
            del one, found  # they may hold the value
            yield Step(job.name, job.value.nbytes, report=report, is_measured=is_measured)


@dataclass(frozen=True)
class Measurement:
    """What is done to verify a value: its bytes are compared, and the slabs of a pair of tensors measured, if there is one."""

    job: Job
    pair: tuple[FileTensor, FileTensor] | None = None
    items: Sequence[Item[ErrorMetrics | None]] = ()
    alone: bool = False


def _numbers_of(written: Container, name: str, config: Config | None) -> FileTensor:
    """The values of a tensor of a file that was written."""
    if config is not None:
        return FileTensor(view_tensor(written, name, config))
    return FileTensor(written.view(name).reshape(written.entries[name].shape), written.entries[name].dtype)


def in_pieces(array: np.ndarray, empty: Callable[..., np.ndarray] = np.empty) -> Iterator[np.ndarray]:
    """The bytes of an array, which may be mapped. empty: as `read` takes it."""
    flat = array.reshape(-1).view(np.uint8)
    yield from (read(flat[i : i + _PIECE], empty) for i in range(0, flat.size, _PIECE))


def _write_parts(
    writer: TensorWriter,
    parts: list[str],
    pieces_of_parts: Iterable[Mapping[str, np.ndarray]],
    axes: Mapping[str, int | None],
    check_running: Callable[[], None],
) -> None:
    """Write the tensors of a value in consecutive pieces. axes: along which they follow each other, where it is not 0."""
    with ExitStack() as stack:
        of_columns = {part for part in parts if axes.get(part) == 1 and isinstance(writer, StagedWriter)}
        puts = {part: stack.enter_context(writer.stream(part)) for part in parts if part not in of_columns}
        if isinstance(writer, StagedWriter):
            puts |= {part: stack.enter_context(writer.columns(part)) for part in of_columns}
        for pieces in pieces_of_parts:
            check_running()
            for part, piece in pieces.items():
                puts[part](piece)
        check_running()  # some writers write what they have collected at the end


def _reopened(path: Path, digests: dict[str, str]) -> tuple[Container, dict[str, Item[None]]]:
    """A written file, opened again, and what compares its tensors. Raises CorruptFileError if others are in it."""
    written = Container(path)
    try:
        with safe_open(path, framework="numpy") as stock:  # any reader of the format must open the file
            names = set(stock.keys())
    except SafetensorError as e:
        raise CorruptFileError(f"{shown(path)}: the stock safetensors reader rejects it ({e}); upgrade safetensors.") from e
    if names != set(digests):
        raise CorruptFileError(f"{shown(path)}: the stock safetensors reader finds tensors other than those written.")

    def item(part: str) -> Item[None]:
        view = written.view(part)

        def compare(rooms: measuring.Rooms) -> None:
            if not Hash.agrees(digests[part], map(raw_bytes, in_pieces(view, partial(rooms.array, "read")))):
                raise CorruptFileError(f"{shown(path)}: {part!r} reads back bytes other than those written; check the disk.")

        return compare

    return written, {part: item(part) for part in digests}
