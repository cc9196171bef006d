"""Quantize checkpoints slab by slab: verified after writing, and put at the destination only when complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from breccia import OptionError, Policy, ScalingRecipe, UnsupportedError
from breccia.internal import suggestion

from . import gguf_companions
from .announcements import CONFIG, DTYPE_KEYS, TORCH_NAMES, read_object
from .beside import described, left_behind
from .calibrated import Calibrated
from .calibration import Calibration
from .checkpoint import all_opened, checkpoint_files, index_of, safetensors_name, weight_map
from .companions import Companions, check_index, write_config, write_index
from .convert_file import FilePlan, convert_file
from .destination import check_destination, check_space, check_taken, is_folder, location
from .dialect_writer import DialectWriter, Placed
from .exact import exactly
from .gguf_file import GGUFFile
from .huggingface import write_json
from .jobs import CASTABLE, Job, by_policy, check_factors, unchanged, unlike_layers
from .journal import Journal, conversion_key
from .memory import check_memory
from .modules import modules_kept, tied_heads
from .results import Advance, Report, Verify, no_progress
from .safetensors_file import Shards, in_both
from .safetensors_writer import HeaderError
from .source import Source
from .staging import Staging, remove
from .text import byte_count_of

#: In place of a recipe: the values that are quantized in the source keep their codes, or are decoded to a dtype of a file.
KEEP_CODES = "none"
DENSE = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: ScalingRecipe | str | Policy | Mapping[str, Any] | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    histograms: bool = False,
    advance: Advance | None = None,
    source_dialect: str | None = None,
    dialect: str | None = None,
    activations: str | None = None,
    exact: bool = False,
    restart: bool = False,
    max_shard_size: int | str | None = None,
    max_memory: int | str = "1GiB",
    verify: str = "full",
    calibrate: Any = None,
    method: str | None = None,
    device: str | None = None,
) -> Report:
    """Quantize a checkpoint under `recipe`, or change how a quantized one is stored.

    source: a `.safetensors` file, or a folder of them (Hugging Face's layout): plain, quantized by breccia, or in any dialect
        that breccia reads; a `.gguf` file, whose tensors get transformers' names, or a folder with one; or such files of
        torch.save, where there are none of safetensors. Other files of a folder are copied, except weights in other formats,
        hidden folders and links to folders; config.json gets a `quantization_config` that names the recipe and the modules
        that keep their precision.
        Scales of activations are dropped with the dialect that they belong to, except under "none".
        Values that the source has quantized keep their codes where the recipe holds them exactly, and are quantized again
        where it does not; those that the policy leaves are decoded to the model's dtype by config.json, BF16 by default.
    destination: a file or folder, like `source`; that of a `.gguf` file is a folder with config.json and the tokenizer's files,
        which transformers makes, or a `.safetensors` file of the weights alone. The dialect "gguf" has one `.gguf` file, with
        the keys of a source in GGUF, or those that config.json and tokenizer.json of a folder say. It appears under its name
        only when everything is written and verified; see `verify`. A link is replaced, not followed.
    recipe: a recipe or its spec; or a policy: a mapping from patterns to recipes or "keep", or the path of a YAML file with
        one; see `breccia.Policy`. Under one recipe, floating matrices and stacks of experts are quantized, except embeddings,
        norms, routers, output heads and the other kinds of `breccia.backend.KEPT`, as `quantize` does in every framework.
        "none" quantizes nothing: what the source has quantized keeps every code and scale, in breccia's files or, with
        `dialect`, in another library's. "bf16", "fp16" and "fp32" decode it to that dtype; plain tensors keep theirs.
        It may be left out with `dialect`: "none" for a source that is quantized, else the dialect's own default.
    include, exclude: shell-style globs over whole names, beside one recipe; each must match a tensor. `exclude` beats
        `include`, which beats the default.
    force: replace an existing file, or a folder that contains a checkpoint; otherwise FileExistsError, before anything is read.
    dry_run: check everything and report sizes from headers alone; write nothing.
    histograms: count the elements of quantized tensors by value, before and after.
    advance: called with a tensor's name and its source bytes after it was written and after it was verified.
    source_dialect: the name of the dialect of the source, where its config and tensors leave a choice.
    dialect: the name of the dialect to write, such as "compressed_tensors", so that the library's own loader opens the result;
        by default breccia's own files. Layers that engines compute as one (query, key and value; gate and up) get one scale of
        the whole tensor, where the recipe has such a scale.
    activations: what the dialect's config says of the inputs of layers: a recipe's spec, or "none"; by default what the
        library does for codes of that width.
    exact: raise InexactError, before anything is written, if a value would change: one that is not quantized in the source, and
        one whose numbers the recipe, or the dtype that it is decoded to, does not have; see `breccia.exactness`. Values whose
        own scales allow it are converted exactly also where their formats leave a choice; this reads them.
    restart: discard what an interrupted run to this destination has finished. Without it the same call goes on from the last
        finished tensor, with a warning that says so, and gives the same bytes; another call raises OptionError.
    max_shard_size: a folder's tensors become files of at most so many bytes, "5GB" or "512MiB", in the order of the source,
        `model-00001-of-00003.safetensors`, with an index; a value that has more gets a file of its own. By default each file of
        the source becomes one.
    max_memory: the largest peak of memory, beside what the process holds already and the pages of mapped files. Values are read
        and written by slabs; those of another library's dialect, and codes that are kept, whole: OptionError, before a byte is
        written, names a value that takes more, and the limit to give.

    verify: "full" reads each file back, compares its bytes with those written, and measures the errors of its decoded tensors;
        "bytes" leaves measuring out, so that the report has no error metrics; "none" reads nothing back.
    calibrate: choose codes and scales by the inputs that the layers of a model of transformers have on a text: its path, or
        that of an .npy file of token ids, or an array of them, (tokens,) or (texts, length). The model runs block by block,
        in FP32, and each block sees the quantized ones before it. A run that was interrupted goes on after its last finished
        block. Recipes that can search for scales do, by "mse", unless they name another rule. `TensorReport.calibration` has
        what was done for each value.
    method: of calibration. "gptq", by default: error feedback; its fields are damping=0.01 and order=importance or given.
        "importance": only the search for scales, each column weighed by the mean square of its input. "awq": scales of
        columns, folded into the norm or the linear layer before, then as "importance"; its field is grid=20, the powers that
        are tried.
    device: what the model runs on under `calibrate`, in torch's spelling; the CPU by default.

    A file of a folder whose new header would be longer than readers accept becomes several, with an index.
    A tensor that would not shrink is kept as it is. Raises CorruptFileError for a source that breaks its format; DialectError
    for values that do not follow their dialect, and where two dialects are possible; UnsupportedError for a dialect that
    breccia does not read, for a source that is no checkpoint, and for a destination that is, contains or is in the source;
    under `calibrate` ImportError without breccia-torch and transformers, NonFiniteError naming the layer whose inputs have NaN,
    UnknownNameError for a pattern that matches no tensor; OSError where files cannot be read or written.

        >>> source, destination = tmp / "model.safetensors", tmp / "model-mxfp8.safetensors"
        >>> breccia.bridges.save_safetensors({"mlp.weight": np.ones((64, 32), np.float32)}, source)
        >>> report = breccia.bridges.convert(source, destination, "mxfp8")
        >>> report.recipes, report.bits_per_parameter
        (['mxfp8'], 8.25)
        >>> breccia.bridges.load_safetensors(destination)
        {'mlp.weight': breccia.ScaledTensor('mxfp8', shape=(64, 32), numpy cpu, 8.25 bits per value)}
    """
    verified = _verified(verify, histograms)
    calibration = Calibration.of(calibrate, method, device)
    writer = None if dialect is None else DialectWriter.of(dialect, activations)
    _check_given(recipe, writer, activations)
    chosen = None if recipe is None else _chosen(recipe, include, exclude, writer)
    staging = Staging(location(Path(destination)), keeps_journal=True)
    if staging.moved and not dry_run:
        with staging:  # puts it back
            pass
    limit = None if max_shard_size is None else byte_count_of(max_shard_size, "max_shard_size")
    work = _Conversion(Path(source), staging, force, source_dialect, writer, limit)
    dense, policy = chosen or _chosen(work.default_recipe, include, exclude, writer)
    if calibration is not None:
        policy = calibration.searched(_calibrated(policy, dense, exact))
    report = Report(
        str(Path(source)), str(Path(destination)), policy.recipes[0] if policy and policy.recipes else None, is_conversion=True,
        dense=dense or "", dialect=dialect or "", verify=verified, calibration=calibration.method.spec if calibration else "",
    )  # fmt: skip
    work.plan(report, policy, dense, exact)
    check_memory(work.jobs, byte_count_of(max_memory, "max_memory"))
    options = {
        "recipe": (dense or KEEP_CODES) if policy is None else _spelled(policy),
        "dialect": dialect, "activations": activations, "source_dialect": source_dialect, "exact": exact,
        "histograms": histograms, "max_shard_size": limit, "verify": verified.value,
        **({"calibration": calibration.key} if calibration else {}),
    }  # fmt: skip
    journal = Journal(staging, work.key(options))
    if calibration is not None:
        work.calibrate(calibration, journal, max_memory, source_dialect)
    if not restart:
        journal.check()
    if dry_run:
        return work.planned()
    if restart:
        with Staging(staging.destination):  # removes what is there
            pass
    return work.run(histograms, advance or no_progress, journal)


def _verified(verify: str, histograms: bool) -> Verify:
    """What to verify. Raises OptionError for another word, and for histograms of values that are not decoded."""
    if verify not in (known := [one.value for one in Verify]):
        raise OptionError(f"verify takes {', '.join(map(repr, known))}; got {verify!r}{suggestion(str(verify), known)}")
    if histograms and verify != Verify.full:
        raise OptionError(
            f"histograms=True counts decoded values, and verify={str(verify)!r} decodes none. Use verify='full'.", verify=verify
        )
    return Verify(verify)


def _calibrated(policy: Policy | None, dense: str | None, exact: bool) -> Policy:
    """The policy of a conversion that calibrates. Raises OptionError where nothing is cast, or nothing may change."""
    if policy is None:
        what = f"decodes values to {dense}" if dense else "keeps all codes"
        raise OptionError(f"calibrate= (--calibrate) chooses codes, and this conversion {what}: give a recipe (--recipe).")
    if exact:
        raise OptionError("exact=True (--exact) changes no value, and calibrate= (--calibrate) chooses others: use one.")
    return policy


def _check_given(recipe: Any, writer: DialectWriter | None, activations: str | None) -> None:
    """Raise OptionError where neither a recipe nor a dialect is given, and for activations without a dialect."""
    if writer is None and (recipe is None or activations is not None):
        what = (
            "activations= is for the config of another library's dialect" if recipe else "convert needs a recipe or a dialect"
        )
        raise OptionError(f"{what}: give dialect= (--dialect){'' if recipe else ', recipe= (--recipe), or both'}.")


def _chosen(
    recipe: Any, include: Sequence[str], exclude: Sequence[str], writer: DialectWriter | None
) -> tuple[str | None, Policy | None]:
    """What `_unquantized` returns, and the policy where that is None."""
    dense = _unquantized(recipe, include, exclude, writer)
    if dense is not None:
        return dense, None
    policy = Policy.of(recipe, include, exclude)
    _check_axes(policy)
    return None, policy


def _unquantized(recipe: Any, include: Sequence[str], exclude: Sequence[str], writer: DialectWriter | None) -> str | None:
    """The dtype to decode to, "" to keep all codes, or None for a recipe or policy."""
    if not isinstance(recipe, str) or recipe not in (KEEP_CODES, *DENSE):
        return None
    if include or exclude:
        raise OptionError(
            f"recipe {recipe!r} quantizes nothing, so include= and exclude= have nothing to choose; leave them out.",
            recipe=recipe,
        )
    if recipe in DENSE and writer is not None and not writer.file:
        raise OptionError(
            f"recipe {recipe!r} decodes all values, and {writer.dialect.title} stores those that are quantized: leave dialect= "
            f"(--dialect) out, or give a recipe such as {writer.dialect.recipes[0]!r}.",
            recipe=recipe,
            dialect=writer.dialect.name,
        )
    return DENSE.get(recipe, "")


def _spelled(policy: Policy) -> str:
    """All that a policy says: the spec of one recipe alone, or its rules with their specs."""
    rules = [*policy.rules, ("default", policy.default)]
    listed = [f"{pattern!r}: {rule.recipe.spec if rule else 'keep'}" for pattern, rule in rules]
    alone = policy.default if not policy.rules and policy.preset == Policy().preset else None
    return alone.recipe.spec if alone else ", ".join([*listed, f"preset: {policy.preset}"])


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
    """A source that is opened, for a destination that may be written."""

    def __init__(
        self,
        src: Path,
        staging: Staging,
        force: bool,
        source_dialect: str | None,
        writer: DialectWriter | None,
        max_shard_size: int | None,
    ) -> None:
        self.src, self.dst, self.force = src, staging.destination, force
        self.staging, self.max_shard_size = staging, max_shard_size
        files = checkpoint_files(src)
        own = writer.file if writer else None
        self.folder = own is None and is_folder(src, files, self.dst)
        check_destination(src, files, self.dst, force, own.suffix if own else "")
        check_taken(staging.moved or self.dst, force, self.folder)
        if max_shard_size and not self.folder:
            raise OptionError(
                f"max_shard_size= (--max-shard-size) is for a folder, and {self.dst} is one file; leave it out.",
                max_shard_size=max_shard_size,
            )
        staging.check()
        self.companions = Companions(src, files) if src.is_dir() and own is None else None
        self.index = index_of(src) if src.is_dir() else None
        self.source = _checked(src, files, self.index, source_dialect)
        self.is_quantized = any(value.is_scaled for value in self.source.values.values())
        self.writer = writer and replace(writer, dtype=self.source.dtype)
        self.calibration: Callable[[Advance], None] | None = None

    @property
    def default_recipe(self) -> ScalingRecipe | str:
        """Under a dialect: the codes that the source has, or the dialect's first recipe."""
        return KEEP_CODES if self.is_quantized or self.writer is None else self.writer.recipes[0]

    def plan(self, report: Report, policy: Policy | None, dense: str | None, exact: bool) -> None:
        """Decide what becomes of each value, and declare the files. Nothing that is refused is found later than here."""
        self.report = report
        self.dense = dense if self.is_quantized and dense else ""
        jobs = self._decided(policy, dense, exact)
        self._configure(jobs)
        self.plans = self._plans(jobs)
        self.jobs = [job for planned in self.plans for job in planned.jobs.values()]
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
        check_space(self.dst, copied + sum(planned.writer.nbytes for planned in self.written))
        report.links.extend(self.companions.left if self.companions else ())

    def _decided(self, policy: Policy | None, dense: str | None, exact: bool) -> dict[str, Job]:
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
        if exact:
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

    def calibrate(self, calibration: Calibration, journal: Journal, max_memory: int | str, source_dialect: str | None) -> None:
        """Let calibration choose the codes of values that are cast, when the conversion runs."""
        results = Calibrated(self.staging.calibrated, journal)
        for planned in self.written:
            planned.jobs = {name: replace(job, calibrated=results) for name, job in planned.jobs.items()}
        jobs = {name: job for planned in self.written for name, job in planned.jobs.items()}
        stages = calibration.plan(self.src, jobs.values(), max_memory, source_dialect, results)
        self.calibration = lambda advance: calibration.run(stages, results, jobs, advance)

    def planned(self) -> Report:
        """The report of a conversion that is not made."""
        for planned in self.plans:
            self.report.tensors.extend(job.report() for job in planned.jobs.values())
        return self.report

    def run(self, histograms: bool, advance: Advance, journal: Journal) -> Report:
        """Convert, verify, and put the result at the destination."""
        with self.staging as staging, journal:
            if self.folder:
                staging.new.mkdir(exist_ok=True)
            files = {planned.writer.path for planned in self.written}
            for path in (staging.new if self.folder else staging.new.parent).iterdir():
                if path not in files:  # of an interrupted run, and perhaps incomplete
                    remove(path)
            if self.companions:
                self.companions.copy(staging.new)
            if self.calibration is not None:
                self.calibration(advance)
            for planned in self.written:
                self.report.tensors.extend(convert_file(planned, self.report.verify, histograms, advance, journal))
            if self.folder:
                self._describe(staging.new)
            self.source.check_unchanged()
            if self.companions:
                self.companions.check_unchanged()
            check_taken(self.dst, self.force, self.folder)
            staging.commit()
        return self.report

    def _describe(self, stage: Path) -> None:
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
        is_cut = len(self.written) > 1 if self.max_shard_size else bool(self.index)
        if is_cut or len(self.written) > (1 if isinstance(first, GGUFFile) else len(self.plans)):
            write_index(stage, [planned.writer.path for planned in self.written])


def _placed(jobs: Mapping[str, Job]) -> dict[str, Placed]:
    """How a dialect stores the values that it holds."""
    return {name: job.placed for name, job in jobs.items() if job.placed}


def _checked(src: Path, files: list[Path], index: Path | None, source_dialect: str | None) -> Source:
    """The opened checkpoint. Raises where the index and the files contradict each other."""
    containers = all_opened(files)
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
