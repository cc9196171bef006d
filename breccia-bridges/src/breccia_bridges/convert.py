"""Quantize checkpoints slab by slab: verified after writing, and put at the destination only when complete."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from breccia import CorruptFileError, ErrorMetrics, OptionError, Policy, ScalingRecipe, UnsupportedError
from breccia.backend import BF16, F16, F32, NUMPY, Parameter, choose
from breccia.internal import PRESETS, kind_in_file

from .checkpoint import INDEX, checkpoint_files, is_there, weight_map
from .companions import Companions, check_index, write_config, write_index
from .configs import RESERVED, read_configs
from .destination import check_destination, check_space, check_taken, location
from .foreign import CONFIG, BlockFP8, read_object, recognized
from .measure import FileTensor, Histogram, histogram, measure, slabs
from .results import Advance, Report, TensorReport, no_progress
from .safetensors import Described, joined, open_writer, plan
from .safetensors_file import Container, Shape, byte_count, in_both, read, shown
from .safetensors_writer import HeaderError, Writer
from .slab_casts import SlabCasts
from .staging import Staging

#: How the reason for keeping a tensor of a kind that keeps its precision starts; the kind follows.
BY_DEFAULT = "kept by default"

#: Bytes that are read at a time of tensors that are copied or compared.
_PIECE = 1 << 22
_CASTABLE = {codec.name: codec for codec in (F32, F16, BF16)}


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
) -> Report:
    """Quantize a checkpoint under `recipe`.

    source: a `.safetensors` file, or a folder of them (Hugging Face's layout). Other files of a folder are copied, except
        weights in other formats, hidden folders and links to folders; config.json gets a `quantization_config` that names the
        recipe and the modules that keep their precision. Weights in block FP8 with `weight_scale_inv` (DeepSeek-V3) are decoded
        and quantized again; those that are kept are decoded to the model's dtype by config.json, BF16 by default, which rounds
        unless their scales are powers of two.
    destination: a file or folder, like `source`. It appears under its name only when everything is written and verified: each
        file is read back, its bytes are compared with those written, and its tensors are decoded. A link is replaced, not
        followed.
    recipe: a recipe or its spec; or a policy: a mapping from patterns to recipes or "keep", or the path of a YAML file with
        one; see `breccia.Policy`. Under one recipe, floating matrices and stacks of experts are quantized, except embeddings,
        norms, routers, output heads and the other kinds of `breccia.backend.KEPT`, as `quantize` does in every framework.
    include, exclude: shell-style globs over whole names, beside one recipe; each must match a tensor. `exclude` beats
        `include`, which beats the default.
    force: replace an existing file, or a folder that contains a checkpoint; otherwise FileExistsError, before anything is read.
    dry_run: check everything and report sizes from headers alone; write nothing.
    histograms: count the elements of quantized tensors by value, before and after.
    advance: called with a tensor's name and its source bytes after it was written and after it was verified.

    A file of a folder whose new header would be longer than readers accept becomes several, with an index.
    A tensor that would not shrink is kept as it is. Raises CorruptFileError for a source that breaks its format;
    UnsupportedError for a source that is quantized in another format or no checkpoint, and for a destination that is, contains
    or is in the source; UnknownNameError for a pattern that matches no tensor; OSError where files cannot be read or written.

        >>> source, destination = tmp / "model.safetensors", tmp / "model-mxfp8.safetensors"
        >>> breccia.bridges.save_safetensors({"mlp.weight": np.ones((64, 32), np.float32)}, source)
        >>> report = breccia.bridges.convert(source, destination, "mxfp8")
        >>> report.recipes, report.bits_per_parameter
        (['mxfp8'], 8.25)
        >>> breccia.bridges.load_safetensors(destination)
        {'mlp.weight': breccia.ScaledTensor('mxfp8', shape=(64, 32), numpy cpu, 8.25 bits per value)}
    """
    policy = Policy.of(recipe, include, exclude)
    _check_axes(policy)
    staging = Staging(location(Path(destination)))
    if staging.moved and not dry_run:
        with staging:  # puts it back
            pass
    report = Report(str(Path(source)), str(Path(destination)), policy.recipes[0] if policy.recipes else None)
    work = _Conversion(Path(source), staging, report, policy, force)
    return work.planned() if dry_run else work.run(histograms, advance or no_progress)


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

    def __init__(self, src: Path, staging: Staging, report: Report, policy: Policy, force: bool) -> None:
        self.src, self.dst, self.force, self.folder = src, staging.destination, force, src.is_dir()
        self.staging, self.report = staging, report
        files = checkpoint_files(src)
        check_destination(src, files, self.dst, force)
        check_taken(staging.moved or self.dst, force, self.folder)
        staging.check()
        self.companions = Companions(src, files) if self.folder else None
        self.index = src / INDEX if self.folder and is_there(src / INDEX) else None
        self.containers, blocks = _checked(src, files, self.index)
        listed = {container.path: list(_parameters(container, blocks)) for container in self.containers}
        every = [p for each in listed.values() for p in each]
        chosen, left = choose(every, policy, "convert", what="tensor", listed_by="`breccia inspect`")
        recipes = {name: how.recipe for name, how in chosen.items()}
        reasons = {p.name: p.why or _by_default(left.get(p.name, ""), policy) for p in every}
        self.plans = [
            _Plan(container, blocks, recipes, {p.name: reasons[p.name] for p in listed[container.path]})
            for container in self.containers
        ]
        # A file of scales alone becomes none.
        wanted = [planned for planned in self.plans if planned.reasons or not planned.container.entries]
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
            self.report.tensors.extend(planned.report(name) for name in planned.reasons)
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
            for container in self.containers:
                container.check_unchanged()
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


def _checked(src: Path, files: list[Path], index: Path | None) -> tuple[list[Container], BlockFP8 | None]:
    """The opened files, and how to decode weights in block FP8.

    Raises where the source is quantized in another way, or the index and the files contradict each other.
    """
    containers = [Container(path) for path in files]
    for container in joined(src, containers):
        if read_configs(container):
            raise UnsupportedError(
                f"{shown(container.path)} contains tensors that breccia already quantized; convert the original.",
                path=str(container.path),
            )
    files_of: dict[str, list[str]] = {}
    for container in containers:
        for name in container.entries:
            files_of.setdefault(name, []).append(container.path.name)
    if index:
        check_index(index, weight_map(index), files_of)
    for name, of in files_of.items():
        if len(of) > 1:
            raise in_both(name, src, *map(Path, of))
    return containers, recognized(src, containers)


def _not_castable(dtype: str, shape: Shape) -> str:
    """Why a tensor cannot be quantized; empty for a floating tensor of two axes or more."""
    if dtype not in _CASTABLE:
        return f"{dtype} cannot be cast" if dtype.startswith("F") else "not floating"
    if math.prod(shape) == 0:
        return "empty"
    return "fewer than two axes" if len(shape) < 2 else ""


def _parameters(container: Container, blocks: BlockFP8 | None) -> Iterator[Parameter]:
    """The tensors of a file, but for scales of block FP8, which are written with no weight."""
    scales = set(blocks.scales.values()) if blocks else set[str]()
    for name, entry in container.entries.items():
        if name not in scales:
            dtype = blocks.dtype if blocks and name in blocks.scales else entry.dtype
            why, ndim = _not_castable(dtype, entry.shape), len(entry.shape)
            axes, kind = (None, "linear") if why else ((ndim - 1,), kind_in_file(name, entry.shape))
            yield Parameter(name, entry.shape, byte_count(dtype, entry.shape), kind, axes, why)


def _by_default(reason: str, policy: Policy) -> str:
    return f"{BY_DEFAULT} ({reason})" if reason in PRESETS[policy.preset] else reason


# ------------------------------------------------------------------------------------------------ one file


class _Plan:
    """How the tensors of a file are written.

    blocks: how to decode the weights that are block FP8 in the source. recipes: of the tensors to quantize, by name. reasons:
        for keeping each other one; empty for those to quantize. A block FP8 weight that is kept is written in the dtype of the
        model's other weights.
    """

    def __init__(
        self, container: Container, blocks: BlockFP8 | None, recipes: Mapping[str, ScalingRecipe], reasons: dict[str, str]
    ) -> None:
        self.container, self.blocks, self.recipes, self.reasons = container, blocks, recipes, reasons
        self.described: dict[str, Described] = {}
        for name, reason in reasons.items():
            entry = container.entries[name]
            if not reason:
                self.described[name] = plan(name, entry.shape, recipes[name])
                continue
            dtype = blocks.dtype if blocks and name in blocks.scales else entry.dtype
            self.described[name] = {name: (dtype, entry.shape)}, None
            if self.decodes(name):
                reasons[name] = f"{reason} and decoded to {dtype}"

    def decodes(self, name: str) -> bool:
        """Is the tensor block FP8 in the source?"""
        return self.blocks is not None and name in self.blocks.scales

    def source(self, name: str) -> FileTensor:
        """The values of a tensor in the source, by slabs."""
        return FileTensor(self.container, name, self.blocks.tensor(name) if self.blocks and self.decodes(name) else None)

    def bytes_in(self, name: str) -> int:
        if self.blocks and self.decodes(name):
            return self.blocks.nbytes(name)
        return self.container.entries[name].nbytes

    def declare(self, path: Path) -> None:
        """Make the writer of the new file, which checks names, metadata and the length of the header."""
        extra = {k: v for k, v in self.container.metadata.items() if k not in RESERVED}
        self.writer = open_writer(path, self.described, extra, force=True)

    def pieces(self) -> list[_Plan]:
        """Plans of parts of the file, each of which can be declared. Raises HeaderError where a tensor alone cannot."""
        try:
            self.declare(self.container.path)
            return [self]
        except HeaderError:
            if len(self.reasons) < 2:
                raise
        names = list(self.reasons)
        halves = [copy(self), copy(self)]
        for half, of in zip(halves, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True):
            half.described, half.reasons = {n: self.described[n] for n in of}, {n: self.reasons[n] for n in of}
        return [piece for half in halves for piece in half.pieces()]

    def _size(self, name: str) -> int:
        return sum(byte_count(*part) for part in self.described[name][0].values())

    def report(self, name: str, fidelity: ErrorMetrics | None = None, counts: Histogram | None = None) -> TensorReport:
        entry, reason = self.container.entries[name], self.reasons[name]
        stored_as = self.described[name][0][name][0] if reason else self.recipes[name].name
        sizes, recipe = (self.bytes_in(name), self._size(name)), None if reason else self.recipes[name]
        return TensorReport(name, entry.shape, entry.dtype, stored_as, reason, *sizes, fidelity, counts, recipe)


def _convert_file(planned: _Plan, histograms: bool, advance: Advance) -> list[TensorReport]:
    digests: dict[str, str] = {}
    with planned.writer as writer:
        for name, reason in planned.reasons.items():
            if reason:
                with _digested(writer, name, digests) as put:
                    for piece in _unquantized_pieces(planned, name):
                        put(piece)
            else:
                source = SlabCasts(planned.source(name), planned.recipes[name])
                _write_scaled(writer, digests, name, list(planned.described[name][0]), source)
            advance(name, planned.bytes_in(name))
    written = _reopened(writer.path, digests)
    configs = read_configs(written)
    reports: list[TensorReport] = []
    for name, reason in planned.reasons.items():
        if reason and not planned.decodes(name):
            reports.append(planned.report(name))
        else:
            x, y = planned.source(name), FileTensor(written, name, configs.get(name))
            counts = histogram(x, y) if histograms and not reason else None
            reports.append(planned.report(name, measure(x, y), counts))
        advance(name, planned.bytes_in(name))
    return reports


def _unquantized_pieces(planned: _Plan, name: str) -> Iterator[np.ndarray]:
    """The pieces of a tensor that is not quantized: its bytes, or where they are FP8 codes, its values."""
    if not planned.decodes(name):
        flat = planned.container.view(name).reshape(-1).view(np.uint8)
        yield from (read(flat[i : i + _PIECE]) for i in range(0, flat.size, _PIECE))
        return
    source, codec = planned.source(name), _CASTABLE[planned.described[name][0][name][0]]
    for slab in slabs(source.shape, source.unit):
        yield NUMPY.store(codec.encode(NUMPY, source.values(slab)), NUMPY.storage(codec))


def _write_scaled(writer: Writer, digests: dict[str, str], name: str, parts: list[str], source: SlabCasts) -> None:
    with ExitStack() as stack:
        puts = {part: stack.enter_context(_digested(writer, part, digests)) for part in parts}
        for pieces in source.cast():
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
