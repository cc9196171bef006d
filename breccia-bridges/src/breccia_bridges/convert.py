"""Quantize checkpoints slab by slab: verified after writing, and put at the destination only when complete."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from breccia import Codec, CorruptFileError, ErrorMetrics, OptionError, Policy, ScalingRecipe, UnsupportedError, requantize
from breccia.backend import BF16, F16, F32, NUMPY, Parameter, choose, components
from breccia.internal import PRESETS, kind_in_file, renames

from .announcements import CONFIG, read_object
from .checkpoint import INDEX, checkpoint_files, is_there, weight_map
from .companions import Companions, check_index, write_config, write_index
from .configs import RESERVED, Config, read_configs
from .destination import check_destination, check_space, check_taken, location
from .measure import FileTensor, Histogram, histogram, measure, slabs
from .results import Advance, Report, TensorReport, no_progress
from .safetensors import Described, described_as, open_writer, plan, view_tensor
from .safetensors_file import Container, Shape, byte_count, in_both, read, shown
from .safetensors_writer import HeaderError, Writer
from .slab_casts import SlabCasts
from .source import Source, Value
from .staging import Staging

#: How the reason for keeping a tensor of a kind that keeps its precision starts; the kind follows.
BY_DEFAULT = "kept by default"

#: Bytes that are read at a time of tensors that are copied or compared.
_PIECE = 1 << 22
_CASTABLE: dict[str, Codec] = {codec.name: codec for codec in (F32, F16, BF16)}
#: In place of a recipe: the values that are quantized in the source keep their codes, or are decoded to a dtype of a file.
KEEP_CODES = "none"
DENSE = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
#: The reason for values that keep their codes under `KEEP_CODES`, and those that are made dense.
CODES_KEPT, DECODED = "codes kept", "decoded"


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: ScalingRecipe | str | Policy | Mapping[str, Any],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    histograms: bool = False,
    advance: Advance | None = None,
    source_dialect: str | None = None,
) -> Report:
    """Quantize a checkpoint under `recipe`, or change how a quantized one is stored.

    source: a `.safetensors` file, or a folder of them (Hugging Face's layout): plain, quantized by breccia, or in any dialect
        that breccia reads. Other files of a folder are copied, except weights in other formats, hidden folders and links to
        folders; config.json gets a `quantization_config` that names the recipe and the modules that keep their precision.
        Values that the source has quantized keep their codes where the recipe holds them exactly, and are quantized again
        where it does not; those that the policy leaves are decoded to the model's dtype by config.json, BF16 by default.
    destination: a file or folder, like `source`. It appears under its name only when everything is written and verified: each
        file is read back, its bytes are compared with those written, and its tensors are decoded. A link is replaced, not
        followed.
    recipe: a recipe or its spec; or a policy: a mapping from patterns to recipes or "keep", or the path of a YAML file with
        one; see `breccia.Policy`. Under one recipe, floating matrices and stacks of experts are quantized, except embeddings,
        norms, routers, output heads and the other kinds of `breccia.backend.KEPT`, as `quantize` does in every framework.
        "none" quantizes nothing: what the source has quantized keeps every code and scale, in breccia's files. "bf16", "fp16"
        and "fp32" decode it to that dtype.
    include, exclude: shell-style globs over whole names, beside one recipe; each must match a tensor. `exclude` beats
        `include`, which beats the default.
    force: replace an existing file, or a folder that contains a checkpoint; otherwise FileExistsError, before anything is read.
    dry_run: check everything and report sizes from headers alone; write nothing.
    histograms: count the elements of quantized tensors by value, before and after.
    advance: called with a tensor's name and its source bytes after it was written and after it was verified.
    source_dialect: the name of the dialect of the source, where its config and tensors leave a choice.

    A file of a folder whose new header would be longer than readers accept becomes several, with an index.
    A tensor that would not shrink is kept as it is. Raises CorruptFileError for a source that breaks its format; DialectError
    for values that do not follow their dialect, and where two dialects are possible; UnsupportedError for a dialect that
    breccia does not read, for a source that is no checkpoint, and for a destination that is, contains or is in the source;
    UnknownNameError for a pattern that matches no tensor; OSError where files cannot be read or written.

        >>> source, destination = tmp / "model.safetensors", tmp / "model-mxfp8.safetensors"
        >>> breccia.bridges.save_safetensors({"mlp.weight": np.ones((64, 32), np.float32)}, source)
        >>> report = breccia.bridges.convert(source, destination, "mxfp8")
        >>> report.recipes, report.bits_per_parameter
        (['mxfp8'], 8.25)
        >>> breccia.bridges.load_safetensors(destination)
        {'mlp.weight': breccia.ScaledTensor('mxfp8', shape=(64, 32), numpy cpu, 8.25 bits per value)}
    """
    dense = _unquantized(recipe, include, exclude)
    policy = None if dense is not None else Policy.of(recipe, include, exclude)
    if policy is not None:
        _check_axes(policy)
    staging = Staging(location(Path(destination)))
    if staging.moved and not dry_run:
        with staging:  # puts it back
            pass
    report = Report(str(Path(source)), str(Path(destination)), policy.recipes[0] if policy and policy.recipes else None)
    work = _Conversion(Path(source), staging, report, policy, dense, force, source_dialect)
    return work.planned() if dry_run else work.run(histograms, advance or no_progress)


def _unquantized(recipe: Any, include: Sequence[str], exclude: Sequence[str]) -> str | None:
    """The dtype to decode to, "" to keep all codes, or None for a recipe or policy."""
    if not isinstance(recipe, str) or recipe not in (KEEP_CODES, *DENSE):
        return None
    if include or exclude:
        raise OptionError(
            f"recipe {recipe!r} quantizes nothing, so include= and exclude= have nothing to choose; leave them out.",
            recipe=recipe,
        )
    return DENSE.get(recipe, "")


def _check_axes(policy: Policy) -> None:
    """Raise OptionError for a rule with contracted axes other than the last: those of a file's tensors are the last ones."""
    rules = [("default", policy.default), *policy.rules]
    for pattern, rule in rules:
        if rule is not None and rule.axes not in (None, (-1,)):
            raise OptionError(
                f"{policy.source}: the rule of {pattern!r} has blocks along axes {rule.axes}; files have them along the last "
                "axis. Give the recipe alone.",
                pattern=pattern,
            )


class _Conversion:
    """A conversion whose checks are done: nothing that it refuses is found later than here."""

    def __init__(
        self,
        src: Path,
        staging: Staging,
        report: Report,
        policy: Policy | None,
        dense: str | None,
        force: bool,
        source_dialect: str | None,
    ) -> None:
        self.src, self.dst, self.force, self.folder = src, staging.destination, force, src.is_dir()
        self.staging, self.report = staging, report
        files = checkpoint_files(src)
        check_destination(src, files, self.dst, force)
        check_taken(staging.moved or self.dst, force, self.folder)
        staging.check()
        self.companions = Companions(src, files) if self.folder else None
        self.index = src / INDEX if self.folder and is_there(src / INDEX) else None
        self.source = _checked(src, files, self.index, source_dialect)
        jobs = _by_policy(self.source, policy) if policy else _unchanged(self.source, dense or "")
        _check_companions(self.source, jobs)
        names = self.source.by_file()
        configs = {f"{name}.config" for name, value in self.source.values.items() if value.config}
        self.plans = [
            _Plan(file, {name: jobs[name] for name in names.get(file.path, ())}, configs) for file in self.source.files
        ]
        # A file of scales alone becomes none.
        wanted = [planned for planned in self.plans if planned.jobs or not planned.container.entries]
        self.written = [piece for planned in wanted for piece in self._declared(planned)]
        self._check_names()
        copied = self.companions.nbytes if self.companions else 0
        check_space(self.dst, copied + sum(planned.writer.nbytes for planned in self.written))
        self.report.links.extend(self.companions.left if self.companions else ())

    def _declared(self, planned: _Plan) -> list[_Plan]:
        """The plan with its writer; several where a folder's file would have a longer header than readers accept."""
        if not self.folder:
            planned.declare(self.staging.new)
            return [planned]
        path = self.staging.new / planned.container.path.name
        try:
            planned.declare(path)
            return [planned]
        except HeaderError:
            pieces = planned.pieces()
        for n, piece in enumerate(pieces, 1):
            piece.declare(path.with_stem(f"{path.stem}-part-{n:03}-of-{len(pieces):03}"))
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

    def planned(self) -> Report:
        """The report of a conversion that is not made."""
        for planned in self.plans:
            self.report.tensors.extend(job.report() for job in planned.jobs.values())
        return self.report

    def run(self, histograms: bool, advance: Advance) -> Report:
        """Convert, verify, and put the result at the destination."""
        with self.staging as staging:
            if self.companions:
                staging.new.mkdir()
                self.companions.copy(staging.new)
            for planned in self.written:
                self.report.tensors.extend(_convert_file(planned, histograms, advance))
            if self.folder:
                self._describe(staging.new)
            self.source.check_unchanged()
            if self.companions:
                self.companions.check_unchanged()
            check_taken(self.dst, self.force, self.folder)
            staging.commit()
        return self.report

    def _describe(self, stage: Path) -> None:
        """Write config.json if the source has one, and the index if it has one or a file became several."""
        config = read_object(stage / CONFIG)
        if config is not None:
            write_config(stage / CONFIG, config, self.report, tuple(_CASTABLE))
        if self.index or len(self.written) > len(self.plans):
            write_index(stage, [planned.writer.path for planned in self.written])


def _checked(src: Path, files: list[Path], index: Path | None, source_dialect: str | None) -> Source:
    """The opened checkpoint. Raises where the index and the files contradict each other."""
    containers = [Container(path) for path in files]
    files_of: dict[str, list[str]] = {}
    for container in containers:
        for name in container.entries:
            files_of.setdefault(name, []).append(container.path.name)
    if index:
        check_index(index, weight_map(index), files_of)
    for name, of in files_of.items():
        if len(of) > 1:
            raise in_both(name, src, *map(Path, of))
    return Source.of(src, containers, source_dialect)


def _not_castable(dtype: str, shape: Shape) -> str:
    """Why a tensor cannot be quantized; empty for a floating tensor of two axes or more."""
    if dtype not in _CASTABLE:
        return f"{dtype} cannot be cast" if dtype.startswith("F") else "not floating"
    if math.prod(shape) == 0:
        return "empty"
    return "fewer than two axes" if len(shape) < 2 else ""


def _parameters(source: Source) -> Iterator[Parameter]:
    """The values of a checkpoint, as a policy chooses among them."""
    for name, value in source.values.items():
        dtype = source.dtype if value.is_scaled else value.stored_as
        shape = value.shape
        why = _not_castable(dtype, shape)
        axes, kind = (None, "linear") if why else ((len(shape) - 1,), kind_in_file(name, shape))
        yield Parameter(name, shape, byte_count(dtype, shape), kind, axes, why)


#: Ends of tensors by which a module multiplies its inputs, beside the weight that was quantized for that.
_OF_INPUTS = ("pre_quant_scale",)


def _check_companions(source: Source, jobs: Mapping[str, _Job]) -> None:
    """Raise UnsupportedError for a value that leaves its dialect without a tensor that belongs to it in the model's code."""
    for name, job in jobs.items():
        for end in _OF_INPUTS:
            other = f"{name.removesuffix('.weight')}.{end}"
            if job.value.stored is not None and job.way != "keep" and other in source.values:
                raise UnsupportedError(
                    f"{source.path}: the inputs of {name} are multiplied by {other}, for which no other format has a place. "
                    "Recipe 'none' keeps both; else convert the checkpoint that it was made from.",
                    name=name,
                )


def _by_policy(source: Source, policy: Policy) -> dict[str, _Job]:
    """What becomes of each value under a policy."""
    parameters = list(_parameters(source))
    chosen, left = choose(parameters, policy, "convert", what="tensor", listed_by="`breccia inspect`")
    jobs: dict[str, _Job] = {}
    for parameter in parameters:
        name, value = parameter.name, source.values[parameter.name]
        reason = parameter.why or _by_default(left.get(name, ""), policy)
        recipe = chosen[name].recipe if name in chosen else None
        if recipe is not None:
            keeps = value.recipe is not None and renames(value.recipe, value.layout.plain, value.axis, recipe)
            jobs[name] = _Job.keeping_codes(value, recipe) if keeps else _Job.casting(value, recipe)
        elif value.is_scaled:
            jobs[name] = _Job.decoding(value, source.dtype, f"{reason} and decoded to {source.dtype}")
        else:
            jobs[name] = _Job.copying(value, reason)
    return jobs


def _unchanged(source: Source, dense: str) -> dict[str, _Job]:
    """What becomes of each value where nothing is quantized. dense: the dtype to decode to; none keeps the codes."""
    jobs: dict[str, _Job] = {}
    for name, value in source.values.items():
        if value.recipe is None:
            jobs[name] = _Job.copying(value, "not quantized in the source")
        elif dense:
            jobs[name] = _Job.decoding(value, dense, f"decoded to {dense}")
        else:
            jobs[name] = _Job.keeping_codes(value, value.recipe)
    return jobs


def _by_default(reason: str, policy: Policy) -> str:
    return f"{BY_DEFAULT} ({reason})" if reason in PRESETS[policy.preset] else reason


# ------------------------------------------------------------------------------------------------ one file


@dataclass(frozen=True)
class _Job:
    """What becomes of a value: "copy" its bytes, "decode" it, "cast" it under a recipe, or "keep" its codes.

    reason: why it is not quantized; empty for one that is. described: its declaration in the new file.
    """

    value: Value
    way: str
    reason: str
    recipe: ScalingRecipe | None
    described: Described

    @classmethod
    def copying(cls, value: Value, reason: str) -> _Job:
        return cls(value, "copy", reason, None, ({value.name: (value.stored_as, value.shape)}, None))

    @classmethod
    def decoding(cls, value: Value, dtype: str, reason: str) -> _Job:
        return cls(value, "decode", reason, None, ({value.name: (dtype, value.shape)}, None))

    @classmethod
    def casting(cls, value: Value, recipe: ScalingRecipe) -> _Job:
        return cls(value, "cast", "", recipe, plan(value.name, value.shape, recipe))

    @classmethod
    def keeping_codes(cls, value: Value, recipe: ScalingRecipe) -> _Job:
        return cls(value, "keep", "", recipe, described_as(value.name, recipe, value.layout.plain, value.axis, value.shape))

    @property
    def name(self) -> str:
        return self.value.name

    def report(self, fidelity: ErrorMetrics | None = None, counts: Histogram | None = None) -> TensorReport:
        """What is known of the value before and after."""
        value = self.value
        stored_as = self.recipe.name if self.recipe else self.described[0][self.name][0]
        size = sum(byte_count(*part) for part in self.described[0].values())
        before = (value.name, value.shape, value.stored_as)
        return TensorReport(
            *before, stored_as, self.reason, value.nbytes, size, fidelity, counts, self.recipe, codes_kept=self.way == "keep"
        )


class _Plan:
    """The values of a file of the source, and how each is written. replaced: keys of the metadata that are not copied."""

    def __init__(self, container: Container, jobs: dict[str, _Job], replaced: set[str]) -> None:
        self.container, self.jobs, self.replaced = container, jobs, replaced

    def declare(self, path: Path) -> None:
        """Make the writer of the new file, which checks names, metadata and the length of the header."""
        extra = {k: v for k, v in self.container.metadata.items() if k not in RESERVED and k not in self.replaced}
        self.writer = open_writer(path, {name: job.described for name, job in self.jobs.items()}, extra, force=True)

    def pieces(self) -> list[_Plan]:
        """Plans of parts of the file, each of which can be declared. Raises HeaderError where a tensor alone cannot."""
        try:
            self.declare(self.container.path)
            return [self]
        except HeaderError:
            if len(self.jobs) < 2:
                raise
        names = list(self.jobs)
        halves = [copy(self), copy(self)]
        for half, of in zip(halves, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True):
            half.jobs = {n: self.jobs[n] for n in of}
        return [piece for half in halves for piece in half.pieces()]


def _convert_file(planned: _Plan, histograms: bool, advance: Advance) -> list[TensorReport]:
    digests: dict[str, str] = {}
    with planned.writer as writer:
        for job in planned.jobs.values():
            _write(writer, digests, job)
            advance(job.name, job.value.nbytes)
    written = _reopened(writer.path, digests)
    configs = read_configs(written)
    reports: list[TensorReport] = []
    for name, job in planned.jobs.items():
        if job.way == "copy":
            reports.append(job.report())
        else:
            x, y = job.value.numbers(), _numbers_of(written, name, configs.get(name))
            counts = histogram(x, y) if histograms and not job.reason else None
            reports.append(job.report(measure(x, y), counts))
        advance(name, job.value.nbytes)
    return reports


def _numbers_of(written: Container, name: str, config: Config | None) -> FileTensor:
    """The values of a tensor of a file that was written."""
    if config is not None:
        return FileTensor(view_tensor(written, name, config))
    return FileTensor(written.view(name).reshape(written.entries[name].shape), written.entries[name].dtype)


def _write(writer: Writer, digests: dict[str, str], job: _Job) -> None:
    if job.way in ("copy", "decode"):
        with _digested(writer, job.name, digests) as put:
            for piece in _copied(job.value) if job.way == "copy" else _decoded(job):
                put(piece)
    elif job.way == "cast":
        assert job.recipe is not None
        _write_scaled(writer, digests, job.name, list(job.described[0]), SlabCasts(job.value.numbers(), job.recipe).cast())
    else:
        _write_scaled(writer, digests, job.name, list(job.described[0]), [_kept_codes(job)])


def _copied(value: Value) -> Iterator[np.ndarray]:
    """The bytes of a plain tensor, in pieces."""
    flat = value.plain().reshape(-1).view(np.uint8)
    yield from (read(flat[i : i + _PIECE]) for i in range(0, flat.size, _PIECE))


def _decoded(job: _Job) -> Iterator[np.ndarray]:
    """The values of a scaled one in the dtype of the new file, in pieces."""
    numbers, codec = job.value.numbers(), _CASTABLE[job.described[0][job.name][0]]
    for slab in slabs(numbers.shape, numbers.unit):
        yield NUMPY.store(codec.encode(NUMPY, numbers.values(slab)), NUMPY.storage(codec))


def _kept_codes(job: _Job) -> dict[str, np.ndarray]:
    """The components of a value whose codes and scales the recipe holds exactly."""
    st = job.value.loaded()
    if job.recipe is not None and st.recipe != job.recipe:
        st = requantize(st, job.recipe, require_exact=True)
    return components(st)


def _write_scaled(
    writer: Writer, digests: dict[str, str], name: str, parts: list[str], pieces_of_parts: Iterable[dict[str, np.ndarray]]
) -> None:
    with ExitStack() as stack:
        puts = {part: stack.enter_context(_digested(writer, part, digests)) for part in parts}
        for pieces in pieces_of_parts:
            for part, piece in pieces.items():
                puts[f"{name}.{part}"](piece)


@contextmanager
def _digested(writer: Writer, part: str, digests: dict[str, str]) -> Generator[Callable[[np.ndarray], None]]:
    """`writer.stream(part)`; stores the SHA-256 of its bytes in `digests`."""
    digest = hashlib.sha256()
    with writer.stream(part) as put:

        def both(piece: np.ndarray) -> None:
            put(piece)
            digest.update(_bytes(piece))

        yield both
    digests[part] = digest.hexdigest()


def _reopened(path: Path, digests: dict[str, str]) -> Container:
    """A written file, opened again. Raises CorruptFileError if its contents differ from what was written."""
    written = Container(path)
    try:
        with safe_open(path, framework="numpy") as stock:  # any reader of the format must open the file
            names = set(stock.keys())
    except SafetensorError as e:
        raise CorruptFileError(f"{shown(path)}: the stock safetensors reader rejects it ({e}); upgrade safetensors.") from e
    if names != set(digests):
        raise CorruptFileError(f"{shown(path)}: the stock safetensors reader finds tensors other than those written.")
    for part, digest in digests.items():
        if _digest(written.view(part)) != digest:
            raise CorruptFileError(f"{shown(path)}: {part!r} reads back bytes other than those written; check the disk.")
    return written


def _digest(view: np.ndarray) -> str:
    """SHA-256 of the bytes of a view of a file."""
    digest, flat = hashlib.sha256(), view.reshape(-1).view(np.uint8)
    for i in range(0, flat.size, _PIECE):
        digest.update(_bytes(read(flat[i : i + _PIECE])))
    return digest.hexdigest()


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
