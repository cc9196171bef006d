"""One conversion: what becomes of each value of a source, the files that are written, and their way to the destination."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from breccia import OptionError, Policy, ScalingRecipe, UnsupportedError
from breccia.internal import measuring

from . import gguf_companions
from .announcements import CONFIG, DTYPE_KEYS, TORCH_NAMES, read_object
from .beside import described, left_behind
from .calibrated import Calibrated
from .calibration import Calibration
from .checkpoint import all_opened, checkpoint_files, index_of, safetensors_name, weight_map
from .companions import Companions, check_index, write_config, write_index
from .compiled import warn_without_kernels
from .convert_file import FilePlan, Task
from .destination import check_destination, check_space, check_taken, is_folder
from .dialect_writer import DialectWriter, Placed
from .engines import Engine
from .exact import exactly
from .gguf_file import GGUFFile
from .huggingface import write_json
from .jobs import CASTABLE, Job, by_policy, check_factors, unchanged, unlike_layers
from .journal import Journal, conversion_key, is_placing
from .memory import Estimates, remembered
from .modules import modules_kept, tied_heads
from .remote_path import RemotePath, is_remote
from .results import Advance, Report, TensorReport, Verify
from .safetensors_writer import HeaderError
from .shards import Shards, in_both
from .source import Source
from .staging import Staging, remove
from .uploads import Uploads

#: The recipe under which values that are quantized in the source keep their codes.
KEEP_CODES = "none"


class Conversion:
    """A source that is opened, for a destination that may be written."""

    def __init__(
        self,
        src: Path,
        staging: Staging,
        force: bool,
        source_dialect: str | None,
        writer: DialectWriter | None,
        max_shard_size: int | None,
        engine: Engine,
    ) -> None:
        self.src, self.dst, self.force = src, staging.target, force
        self.staging, self.max_shard_size, self.engine = staging, max_shard_size, engine
        files = checkpoint_files(src)
        own = writer.file if writer else None
        self.folder = own is None and is_folder(src, files, self.dst)
        check_destination(src, files, self.dst, force, own.suffix if own else "")
        # An interrupted run has begun to change the destination, which this one ends.
        self.is_placing = is_placing(staging)
        if not self.is_placing:
            check_taken(staging.moved or self.dst, force, self.folder)
        if max_shard_size and not self.folder:
            raise OptionError(
                f"max_shard_size= (--max-shard-size) is for a folder, and {self.dst} is one file; leave it out.",
                max_shard_size=max_shard_size,
            )
        staging.check()
        self.companions = Companions(src, files) if src.is_dir() and own is None else None
        self.index = index_of(src) if src.is_dir() else None
        self.source = _checked(src, files, self.index, source_dialect, as_stored=own is not None)
        self.is_quantized = any(value.is_scaled for value in self.source.values.values())
        self.writer = writer and replace(writer, dtype=self.source.dtype)
        self.estimates = Estimates(self.writer)
        #: What chooses values before files are written, and what reads the finished result before it is at its destination.
        self.calibration: Callable[[Advance], None] | None = None
        self.before_commit: Callable[[Path], None] | None = None

    @property
    def default_recipe(self) -> ScalingRecipe | str:
        """Under a dialect: the codes that the source has, or the dialect's first recipe."""
        return KEEP_CODES if self.is_quantized or self.writer is None else self.writer.recipes[0]

    def plan(self, report: Report, policy: Policy | None, dense: str | None, exact: int | None) -> None:
        """Decide what becomes of each value, and declare the files. Nothing that is refused is found later than here.

        exact: the limit of memory while it is found out whether values convert exactly; None not to.
        """
        self.report = report
        self.dense = dense if self.is_quantized and dense else ""
        jobs = self._decided(policy, dense, exact)
        self._configure(jobs)
        self.plans = self._plans(jobs)
        self.jobs = [job for planned in self.plans for job in planned.jobs.values()]
        self.estimates.moved = frozenset(part for planned in self.plans for part in planned.moved)
        self.estimates.learn(self.source.values)
        report.not_made.extend(said for planned in self.plans for said in planned.not_made)
        # A file of scales alone becomes none.
        wanted = [planned for planned in self.plans if planned.jobs or not planned.container.entries]
        self.written = (
            self._cut(wanted[0], self.max_shard_size)
            if self.max_shard_size
            else [piece for planned in wanted for piece in self._declared(planned)]
        )
        self._check_names()
        copied = self.companions.nbytes if self.companions else 0
        sizes = sorted((planned.writer.nbytes for planned in self.written), reverse=True)
        at_once = self.engine.at_once if is_remote(self.dst) else len(sizes)  # a file that is uploaded is removed here
        check_space(self.staging.destination, copied + sum(sizes[:at_once]))
        report.links.extend(self.companions.left if self.companions else ())

    def _decided(self, policy: Policy | None, dense: str | None, exact: int | None) -> dict[str, Job]:
        """What becomes of each value; the report gets the names of those that are left out."""
        writer = self.writer
        # Codes that are kept keep what was beside them.
        stays = writer is None or (writer.file and all(writer.holds(one) for one in self.source.values.values() if one.stored))
        dropped = dict.fromkeys([] if dense == "" and stays else left_behind(self.source))
        self.report.dropped.extend(dropped)
        if policy:
            jobs = by_policy(self.source, policy, dropped, writer)
        else:
            jobs = unchanged(self.source, dense or "", dropped, writer)
        if exact is not None:
            self.estimates.check(list(jobs.values()), exact, self.estimates.tried)
            jobs = exactly(jobs, writer)
        check_factors(self.source, jobs)
        return jobs

    def _configure(self, jobs: Mapping[str, Job]) -> None:
        """Find what the dialect's config says. Raises UnsupportedError for a file alone, which has none beside it."""
        self.configs: dict[str, dict[str, Any]] = {}
        if self.writer is None:
            return
        kept = modules_kept((job.report() for job in jobs.values()), tuple(CASTABLE))
        self.configs = self.writer.configs(_placed(jobs), [*kept, *tied_heads(jobs)])
        self._note(jobs, self.writer)
        if self.configs and not self.folder:
            raise UnsupportedError(
                f"{self.dst} is one file, and {self.writer.dialect.title} has its settings in {' and '.join(self.configs)} "
                f"beside it. Give the folder of {self.src} as the source.",
                path=str(self.dst),
            )

    def _plans(self, jobs: dict[str, Job]) -> list[FilePlan]:
        """A plan for each file of the source; one for all where the dialect has a file of its own, or the files are cut."""
        writer, files = self.writer, self.source.files
        reader = writer.reader(self.configs) if writer else None
        if writer and not writer.file and self.report.verify is Verify.full:
            self.estimates.reader = reader
        header = writer.header(_placed(jobs)) if writer else {}
        if writer and (own := writer.file):
            return [own(self.source, jobs, writer, reader, header)]
        replaced = {f"{name}.config" for name, value in self.source.values.items() if value.config} | described(self.source)
        names = self.source.by_file()
        jobs_of = {file.path: {n: jobs[n] for n in names.get(file.path, ()) if n in jobs} for file in files}
        if self.max_shard_size:
            of_all = {name: job for path in jobs_of for name, job in jobs_of[path].items()}
            container = files[0] if len(files) == 1 else Shards(self.src, files)
            return [FilePlan(container, of_all, replaced, writer, reader, header)]
        return [FilePlan(file, jobs_of[file.path], replaced, writer, reader, header) for file in files]

    def _note(self, jobs: Mapping[str, Job], writer: DialectWriter) -> None:
        """Note in the report what the files of another library lack, or change beside the weights."""
        if not writer.file and self.report.recipe is None and not any(job.placed for job in jobs.values()):
            self.report.not_made.append(
                f"no value of {self.src} is quantized, so none is stored as {writer.dialect.title} does; a recipe such as "
                f"{writer.dialect.recipes[0]!r} (--recipe) quantizes them."
            )
        self.report.unlike_layers.extend(unlike_layers(jobs) if self.configs else ())
        old, new = TORCH_NAMES.get(self.source.dtype, ""), self.configs.get(CONFIG, {}).get(DTYPE_KEYS[0])
        if new is not None and new != old:
            self.report.new_dtype.extend((old, new))

    def _declared(self, planned: FilePlan) -> list[FilePlan]:
        """The plan with its writer; several where a folder's file would have a longer header than readers accept."""
        if not self.folder:
            planned.declare(self.staging.new)
            return [planned]
        path = self.staging.new / safetensors_name(planned.container.path.name)
        try:
            planned.declare(path)
            return [planned]
        except HeaderError:
            pieces = planned.pieces(path)
        for n, piece in enumerate(pieces, 1):
            piece.declare(path.with_stem(f"{path.stem}-part-{n:03}-of-{len(pieces):03}"))
        return pieces

    def _cut(self, planned: FilePlan, limit: int) -> list[FilePlan]:
        """The files of at most so many bytes that the plan of a folder becomes, each with its writer."""
        path = self.staging.new / "model.safetensors"
        pieces = [piece for shard in planned.shards(limit) for piece in shard.pieces(path)]
        for n, piece in enumerate(pieces, 1):
            piece.declare(path if len(pieces) == 1 else path.with_stem(f"{path.stem}-{n:05}-of-{len(pieces):05}"))
        return pieces

    def _check_names(self) -> None:
        """Refuse files of one name, and entries of two files: with a suffix, a tensor may get the name of another."""
        files: dict[str, Path] = {}
        paths: set[Path] = set()
        for planned in self.written:
            if (path := planned.writer.path) in paths:
                raise UnsupportedError(f"two files would be named {path.name}; rename that of {self.src}.")
            paths.add(path)
            for name in planned.writer.entries:
                if name in files:
                    raise in_both(name, self.src, files[name], planned.container.path)
                files[name] = planned.container.path

    def key(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What decides about the bytes that are written."""
        files = [*(file.path for file in self.source.files), *(self.companions.deciding if self.companions else ())]
        return conversion_key(self.src, files, options)

    def calibrate(self, calibration: Calibration, journal: Journal, limit: int, source_dialect: str | None) -> None:
        """Let calibration choose the codes of values that are cast, when the conversion runs. limit: bytes of memory."""
        results = Calibrated(self.staging.calibrated, journal)
        self.chosen_by(results)
        jobs = {name: job for planned in self.written for name, job in planned.jobs.items()}
        stages = calibration.plan(self.src, jobs.values(), limit, source_dialect, results)
        self.calibration = lambda advance: calibration.run(stages, results, jobs, advance)

    def chosen_by(self, results: Calibrated) -> None:
        """Take the values that `results` has in place of those of the source."""
        for planned in self.written:
            planned.jobs = {name: replace(job, calibrated=results) for name, job in planned.jobs.items()}

    def planned(self) -> Report:
        """The report of a conversion that is not made."""
        for planned in self.plans:
            self.report.tensors.extend(job.report() for job in planned.jobs.values())
        return self.report

    def run(self, slab: int, histograms: bool, advance: Advance, journal: Journal) -> Report:
        """Convert, verify, and put the result at the destination."""
        if any(job.way != "copy" for job in self.jobs):
            warn_without_kernels()
        with self.staging as staging, self._uploads(journal) as uploads, journal:
            if self.folder:
                staging.new.mkdir(exist_ok=True)
            files = {planned.writer.path for planned in self.written}
            for path in (staging.new if self.folder else staging.new.parent).iterdir():
                if path not in files:  # of an interrupted run, and perhaps incomplete
                    remove(path)
            if self.companions:
                self.companions.copy(staging.new)
            if self.calibration is not None:
                with measuring.of_elements(slab):
                    self.calibration(advance)
            self._write(slab, histograms, advance, journal, uploads)
            if self.folder:
                self._describe(staging.new, uploads)
            self.source.check_unchanged()
            if self.companions:
                self.companions.check_unchanged()
            if self.before_commit is not None:
                self.before_commit(staging.new)
            if not self.is_placing:
                check_taken(self.dst, self.force, self.folder)
            if uploads is not None:
                uploads.commit()
            else:
                staging.commit()
        return self.report

    def _uploads(self, journal: Journal) -> AbstractContextManager[Uploads | None]:
        """What uploads the files; None for a destination on this machine."""
        if not isinstance(self.dst, RemotePath):
            return nullcontext()
        return Uploads(self.dst, self.staging, journal, self.folder, self.report.verify is not Verify.none)

    def _write(self, slab: int, histograms: bool, advance: Advance, journal: Journal, uploads: Uploads | None) -> None:
        """Write, verify and upload all files, and report them in their order."""
        reports: dict[str, TensorReport] = {}
        left: list[FilePlan] = []
        for planned in self.written:
            if uploads is not None and uploads.has(planned.writer.path.name):
                reports.update((report.name, report) for report in uploads.reports(planned, advance))
            else:
                left.append(planned)

        takes_whole = remembered(self.estimates.besides, self.estimates.moved)

        def task(n: int) -> Task:
            planned, url = left[n], str(self.dst) if uploads is not None else ""
            with measuring.of_elements(slab):
                whole = frozenset(name for name, job in planned.jobs.items() if takes_whole(job))
            return Task(planned, self.report.verify, histograms, slab, *journal.finished(planned.jobs), url, whole)

        done: set[tuple[str, bool]] = set()  # an engine that repeats a part of a task repeats its steps
        with closing(self.engine.run(len(left), task, self.staging.new.parent)) as steps:
            for n, step in steps:
                if step is None:
                    if uploads is not None:
                        uploads.finish(left[n].writer.path.name)
                    continue
                if step.digests is not None:
                    journal.write(step.name, step.digests)
                if step.report is not None:
                    reports[step.name] = step.report
                    if step.is_measured:
                        journal.verify(step.report)
                if (what := (step.name, step.report is None)) not in done:
                    done.add(what)
                    advance(step.name, step.nbytes)
        self.report.tensors.extend(reports[name] for planned in self.written for name in planned.jobs)

    def _describe(self, stage: Path, uploads: Uploads | None) -> None:
        """Write config.json if the source has one or is a GGUF model, and the index of several files."""
        first = self.source.files[0]
        if isinstance(first, GGUFFile):
            self.report.not_made.extend(gguf_companions.make(first, self.source.values, stage))
        settings = dict(self.configs)
        config = read_object(stage / CONFIG)
        if config is not None or CONFIG in settings:
            own = settings.pop(CONFIG, {}) if self.writer else None
            write_config(stage / CONFIG, config or {}, self.report, tuple(CASTABLE), self.source.dtype, self.dense, own)
        for file, listed in settings.items():
            write_json(stage / file, listed)
        self._write_index(stage, uploads)

    def _write_index(self, stage: Path, uploads: Uploads | None) -> None:
        """Write the index of several files."""
        first = self.source.files[0]
        is_cut = len(self.written) > 1 if self.max_shard_size else bool(self.index)
        # Without an index, a part of uploaded files would look like all of them.
        without = 1 if uploads is not None or isinstance(first, GGUFFile) else len(self.plans)
        if is_cut or len(self.written) > without:
            paths = [planned.writer.path for planned in self.written]
            write_index(stage, [uploads.at(path.name) for path in paths] if uploads is not None else paths)


def _placed(jobs: Mapping[str, Job]) -> dict[str, Placed]:
    """How a dialect stores the values that it holds."""
    return {name: job.placed for name, job in jobs.items() if job.placed}


def _checked(src: Path, files: list[Path], index: Path | None, source_dialect: str | None, as_stored: bool) -> Source:
    """The opened checkpoint. Raises where the index and the files contradict each other.

    as_stored: whether tensors of GGUF files stay as they are there, neither transposed nor joined.
    """
    containers = [one.as_stored() if as_stored and isinstance(one, GGUFFile) else one for one in all_opened(files)]
    files_of: dict[str, list[str]] = {}
    for container in containers:
        for name in container.names:
            files_of.setdefault(name, []).append(container.path.name)
    if index:
        check_index(index, weight_map(index), files_of)
    for name, of in files_of.items():
        if len(of) > 1:
            raise in_both(name, src, *map(Path, of))
    return Source.of(src, containers, source_dialect)
