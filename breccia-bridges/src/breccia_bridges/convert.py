"""Quantize checkpoints slab by slab: verified after writing, and renamed to the destination only when complete."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from breccia import CorruptFileError, ErrorMetrics, ScalingRecipe, UnsupportedError, cast
from breccia.backend import BF16, F16, F32, KEPT, NUMPY, TENSOR, Selection, as_recipe, components, kept_kind

from .atomic import temporary_path
from .checkpoint import INDEX, checkpoint_files, weight_map
from .foreign import CONFIG, OWN, QUANTIZATION, QUANTIZATION_FILES, BlockFP8, model_configs, read_object, recognized
from .huggingface import REFUSAL, WEIGHTS, write_json
from .measure import Histogram, Stored, histogram, measure, slabs
from .results import Advance, Report, TensorReport, no_progress
from .safetensors import RESERVED, Described, joined, open_writer, plan, read_configs
from .safetensors_file import Container, Shape, Writer, byte_count

#: How the reason for keeping a tensor of `breccia.backend.KEPT` starts; its kind follows.
BY_DEFAULT = "kept by default"

_CASTABLE = {codec.name: codec for codec in (F32, F16, BF16)}
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot", ".tflite")


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: ScalingRecipe | str,
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
    include, exclude: shell-style globs over whole names; each must match a tensor. Floating tensors of two axes or more are
        quantized, except embeddings, norms, routers and output heads (`breccia.backend.KEPT`), less `exclude`, plus `include`;
        `exclude` beats `include`, which beats the default.
    force: replace an existing file, or a folder that contains a checkpoint; otherwise FileExistsError, before anything is read.
    dry_run: check everything and report sizes from headers alone; write nothing.
    histograms: count the elements of quantized tensors by value, before and after.
    advance: called with a tensor's name and its source bytes after it was written and after it was verified.

    A tensor that would not shrink is kept as it is. Raises CorruptFileError for a source that breaks its format;
    UnsupportedError for a source that is quantized in another format or no checkpoint, and for a destination that is, contains
    or is in the source; UnknownNameError for a pattern that matches no tensor; OSError where files cannot be read or written.
    """
    recipe = as_recipe(recipe)
    src, dst, chosen = Path(source), _location(Path(destination)), Selection(tuple(include), tuple(exclude))
    files = checkpoint_files(src)
    _check_destination(src, files, dst, force)
    containers, blocks = _checked(src, files)
    plans = [_Plan(container, blocks, recipe, chosen) for container in containers]
    chosen.check([name for planned in plans for name in planned.reasons])
    report = Report(str(src), str(Path(destination)), recipe)
    if dry_run:
        for planned in plans:
            report.tensors.extend(planned.report(name) for name in planned.reasons)
        return report
    with _staged(dst, force, src.is_dir()) as stage:
        if src.is_dir():
            _copy_companions(src, stage)
        for planned in plans:
            if planned.reasons or not planned.container.entries:  # a file of scales alone becomes none
                written = stage / planned.container.path.name if src.is_dir() else stage
                report.tensors.extend(_convert_file(planned, written, histograms, advance or no_progress))
        if src.is_dir():
            _write_config(stage / CONFIG, report)
            if (src / INDEX).exists():
                _write_index(stage, [path for path in files if (stage / path.name).exists()])
    return report


def _not_castable(dtype: str, shape: Shape) -> str:
    """Why a tensor cannot be quantized; empty for a floating tensor of two axes or more."""
    if dtype not in _CASTABLE:
        return f"{dtype} cannot be cast" if dtype.startswith("F") else "not floating"
    if math.prod(shape) == 0:
        return "empty"
    return "fewer than two axes" if len(shape) < 2 else ""


# ------------------------------------------------------------------------------------------------ one file


class _Plan:
    """Which tensors of a file are quantized, decided from its header.

    blocks: how to decode the weights that are block FP8 in the source. Their scales are not planned: they are written with no
    weight. Such a weight that is kept is written in the dtype of the model's other weights.
    """

    def __init__(self, container: Container, blocks: BlockFP8 | None, recipe: ScalingRecipe, selection: Selection) -> None:
        self.container, self.blocks, self.recipe = container, blocks, recipe
        self.described: dict[str, Described] = {}
        self.reasons: dict[str, str] = {}
        scales = set(blocks.scales.values()) if blocks else set[str]()
        for name, entry in container.entries.items():
            if name in scales:
                continue
            dtype = blocks.dtype if blocks and name in blocks.scales else entry.dtype
            reason = _not_castable(dtype, entry.shape) or selection.reason_to_keep(name)
            if reason in KEPT:
                reason = f"{BY_DEFAULT} ({reason})"
            if not reason:
                self.described[name] = plan(name, entry.shape, recipe)
                if self._size(name) >= byte_count(dtype, entry.shape):
                    reason = "would not shrink"
            if reason:
                self.described[name] = {name: (dtype, entry.shape)}, None
                reason += f" and decoded to {dtype}" if self.decodes(name) else ""
            self.reasons[name] = reason

    def decodes(self, name: str) -> bool:
        """Is the tensor block FP8 in the source?"""
        return self.blocks is not None and name in self.blocks.scales

    def source(self, name: str) -> Stored:
        """The values of a tensor in the source, by slabs."""
        return Stored(self.container, name, self.blocks.tensor(name) if self.blocks and self.decodes(name) else None)

    def bytes_in(self, name: str) -> int:
        if self.blocks and self.decodes(name):
            return self.blocks.nbytes(name)
        return self.container.entries[name].nbytes

    def _size(self, name: str) -> int:
        return sum(byte_count(*part) for part in self.described[name][0].values())

    def report(self, name: str, fidelity: ErrorMetrics | None = None, counts: Histogram | None = None) -> TensorReport:
        entry, reason = self.container.entries[name], self.reasons[name]
        stored_as = self.described[name][0][name][0] if reason else self.recipe.name
        sizes, recipe = (self.bytes_in(name), self._size(name)), None if reason else self.recipe
        return TensorReport(name, entry.shape, entry.dtype, stored_as, reason, *sizes, fidelity, counts, recipe)


def _convert_file(planned: _Plan, destination: Path, histograms: bool, advance: Advance) -> list[TensorReport]:
    container = planned.container
    digests: dict[str, str] = {}
    extra = {k: v for k, v in container.metadata.items() if k not in RESERVED}
    with open_writer(destination, planned.described, extra) as writer:
        for name, reason in planned.reasons.items():
            if reason:
                with _digested(writer, name, digests) as put:
                    for piece in _kept(planned, name):
                        put(piece)
            else:
                source = _Source(planned.source(name), planned.recipe)
                _write_scaled(writer, digests, name, list(planned.described[name][0]), source)
            advance(name, planned.bytes_in(name))
    written = _reopened(destination, digests)
    configs = read_configs(written)
    reports: list[TensorReport] = []
    for name, reason in planned.reasons.items():
        if reason and not planned.decodes(name):
            reports.append(planned.report(name))
        else:
            x, y = planned.source(name), Stored(written, name, configs.get(name))
            counts = histogram(x, y) if histograms and not reason else None
            reports.append(planned.report(name, measure(x, y), counts))
        advance(name, planned.bytes_in(name))
    return reports


def _kept(planned: _Plan, name: str) -> Iterator[np.ndarray]:
    """The pieces of a tensor that is not quantized: its bytes, or where they are FP8 codes, its values."""
    if not planned.decodes(name):
        yield planned.container.array(name)
        return
    source, codec = planned.source(name), _CASTABLE[planned.described[name][0][name][0]]
    for slab in slabs(source.shape, source.unit):
        yield NUMPY.store(codec.encode(NUMPY, source.values(slab)), NUMPY.storage(codec))


def _write_scaled(writer: Writer, digests: dict[str, str], name: str, parts: list[str], source: _Source) -> None:
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
            found = set(stock.keys())
    except SafetensorError as e:
        raise CorruptFileError(f"{path}: the stock safetensors reader rejects it ({e}); upgrade safetensors.") from e
    if found != set(digests):
        raise CorruptFileError(f"{path}: the stock safetensors reader finds tensors other than those written.")
    for part, digest in digests.items():
        if hashlib.sha256(_bytes(written.array(part))).hexdigest() != digest:
            raise CorruptFileError(f"{path}: {part!r} reads back bytes other than those written; check the disk.")
    return written


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# ------------------------------------------------------------------------------------------------ casting


class _Source:
    """A tensor to quantize, by slabs of complete blocks in C order.

    Casting slab by slab gives the bytes of one cast, since a block's bytes depend only on that block and, where the recipe has
    one, on a tensor-level scale; that scale is computed first and supplied to each cast.
    """

    def __init__(self, stored: Stored, recipe: ScalingRecipe) -> None:
        self.stored, self.recipe = stored, recipe
        fmt, block = recipe.format, recipe.layout.block()
        self.two_level = len(fmt.levels) == 2
        self.has_tensor_scale = fmt.levels[0].block == TENSOR
        # One slab for per-tensor zero-points, and for per-tensor 8-bit scales, whose zero cannot be supplied.
        one_slab = block == TENSOR and (self.two_level or fmt.offset != "none" or fmt.scale.codec.bits <= 8)
        rows = 1 if block == TENSOR else block[0] or stored.shape[-2]
        self.slabs = list(slabs(stored.shape, stored.unit, None if one_slab else rows))

    def cast(self) -> Generator[dict[str, np.ndarray]]:
        """The components of the cast tensor in consecutive pieces; per-tensor components come with the first."""
        scale = self._shared_scale() if self.has_tensor_scale and len(self.slabs) > 1 else None
        for slab in self.slabs:
            st = cast(self.stored.values(slab), self.recipe, scale=scale)
            yield {part: a for part, a in components(st).items() if a.ndim or slab == self.slabs[0]}

    def _shared_scale(self) -> np.ndarray:
        """The tensor-level scale. It depends on the largest magnitude alone, so casting the largest of each slab gives it.

        With two levels it ignores NaN and Inf; with one level these mark the whole tensor.
        """
        largest: list[Any] = []
        for slab in self.slabs:
            magnitude = np.abs(self.stored.values(slab))
            largest.append(magnitude.max(where=np.isfinite(magnitude) if self.two_level else True, initial=0))
        st = cast(np.array([largest], np.float32), self.recipe)
        return st.global_scale if self.two_level else st.scale


# ------------------------------------------------------------------------------------------------ the source, checked


def _checked(src: Path, files: list[Path]) -> tuple[list[Container], BlockFP8 | None]:
    """The opened files, and how to decode weights in block FP8.

    Raises where the source is quantized in another way, or the index and the files contradict each other.
    """
    containers = [Container(path) for path in files]
    for container in joined(src, containers):
        if read_configs(container):
            raise UnsupportedError(
                f"{container.path} contains tensors that breccia already quantized; convert the original.",
                path=str(container.path),
            )
    if src.is_dir() and (src / INDEX).exists():
        files_of: dict[str, list[str]] = {}
        for container in containers:
            for name in container.entries:
                files_of.setdefault(name, []).append(container.path.name)
        _check_index(src / INDEX, files_of)
    return containers, recognized(src, containers)


def _check_index(index: Path, files_of: dict[str, list[str]]) -> None:
    listed = weight_map(index)
    for name in dict.fromkeys((*listed, *files_of)):
        found = files_of.get(name, [])
        if len(found) > 1:
            wrong = f"is in both {' and '.join(found)}"
        elif name not in listed:
            wrong = f"of {found[0]} is missing from the index"
        elif found != [listed[name]]:
            wrong = f"is in {listed[name]} by the index, but {'in ' + found[0] if found else 'in no file'} in fact"
        else:
            continue
        raise CorruptFileError(
            f"{index}: tensor {name!r} {wrong}; download the checkpoint again, or fix its index.", path=str(index), name=name
        )


# ------------------------------------------------------------------------------------------------ the destination


def _location(path: Path) -> Path:
    """The absolute path, with parent folders resolved; a link as the last component is kept."""
    absolute = path.absolute()
    if absolute.name in ("", ".."):
        return Path(os.path.realpath(absolute))
    return Path(os.path.realpath(absolute.parent), absolute.name)


def _check_destination(src: Path, files: list[Path], dst: Path, force: bool) -> None:
    """Check, before anything is read, that the destination can be written without destroying other data."""
    if _within(Path.cwd(), dst):
        wrong = "is or contains the current folder; choose a folder or file inside it"
    elif dst.exists() and dst.samefile(src):
        wrong = "is the source; choose another destination"
    elif _within(dst, src) or _within(dst.parent, src):
        wrong = f"lies inside the source {src}; choose a destination outside it"
    elif any(_within(path, dst) for path in (src, *files)):
        wrong = f"contains the source {src}; choose another destination"
    elif src.is_file() and dst.is_dir():
        wrong = "is a folder but the source is a file; give a name that ends in .safetensors"
    elif src.is_dir() and dst.suffix == ".safetensors":
        wrong = "names a file but the source is a folder; give the name of a folder"
    elif src.is_file() and dst.suffix != ".safetensors":
        wrong = "does not end in .safetensors; add the suffix"
    else:
        wrong = ""
    if wrong:
        raise UnsupportedError(f"{dst} {wrong}.", path=str(dst))
    if not dst.parent.is_dir():
        raise FileNotFoundError(f"cannot write {dst}: there is no folder {dst.parent}; create it first.")
    _check_taken(dst, force, src.is_dir())


def _check_taken(dst: Path, force: bool, folder: bool) -> None:
    """Refuse to replace an existing destination, unless `force` is set and it is a file, a link or a checkpoint."""
    if not os.path.lexists(dst):
        return
    if folder and dst.exists() and not dst.is_dir():
        raise FileExistsError(f"{dst} is a file but the source is a folder; choose another name.")
    if not force:
        raise FileExistsError(f"{dst} exists; choose another name, or replace it: force=True (--force).")
    if dst.is_symlink():
        return
    if not dst.is_dir() and not dst.is_file():
        raise FileExistsError(f"{dst} is neither a file nor a folder; choose another name.")
    if dst.is_dir() and os.path.ismount(dst):
        raise FileExistsError(f"{dst} is a mount point, which cannot be replaced; choose a folder in it.")
    if dst.is_dir() and not (dst / INDEX).exists() and not any(dst.glob("*.safetensors")):
        raise FileExistsError(
            f"{dst} does not look like a checkpoint (it contains no .safetensors file), so --force does not replace it; remove "
            "it yourself, or choose another name."
        )


def _within(path: Path, folder: Path) -> bool:
    """Is `path`, links resolved, `folder` or something in it?"""
    real = Path(os.path.realpath(path))
    return folder.exists() and any(p.exists() and p.samefile(folder) for p in (real, *real.parents))


@contextmanager
def _staged(destination: Path, force: bool, folder: bool) -> Generator[Path]:
    """A temporary path for a file or folder: renamed to `destination` on success, removed on failure."""
    temporary = temporary_path(destination)
    stage = temporary / destination.name
    try:
        temporary.mkdir(mode=0o700)
        if folder:
            stage.mkdir()
        yield stage
        _check_taken(destination, force, folder)
        if folder and os.path.lexists(destination):
            _swap(stage, destination, temporary.with_suffix(".old"))
        else:
            stage.replace(destination)
    finally:
        _remove(temporary)


def _swap(stage: Path, destination: Path, aside: Path) -> None:
    """Replace folder `destination` by `stage`; the old folder is removed only after that."""
    try:
        destination.rename(aside)
        stage.rename(destination)
    finally:  # looks at the disk, since a signal may come between any two steps
        if not os.path.lexists(stage):
            _remove(aside)
        elif os.path.lexists(aside):
            _put_back(aside, destination)
    if os.path.lexists(aside):
        raise OSError(f"{destination} is written; the old contents could not be removed and are in {aside}.")


def _put_back(aside: Path, destination: Path) -> None:
    try:
        aside.rename(destination)
    except OSError as e:
        raise OSError(
            f"{destination} could not be replaced or restored ({e}); the old contents are complete in {aside}."
        ) from e


def _remove(path: Path) -> None:
    def remove() -> None:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)

    try:
        remove()
    finally:  # again, in case a signal interrupted the first attempt
        remove()


def _copy_companions(src: Path, stage: Path) -> None:
    """Copy config.json, the tokenizer and the other files of the folder.

    Skipped: files that declare how the source was quantized, weights in other formats and their indexes, safetensors files at
    the top level (those of the index are converted, others duplicate them), hidden folders, links to folders, broken links,
    and special files.
    """
    for folder, folders, names in os.walk(src):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(folder).relative_to(src)
        weights = (*_OTHER_FORMATS, ".safetensors") if inside == Path() else _OTHER_FORMATS
        for name in sorted(names):
            path = Path(folder, name)
            if inside == Path() and name in QUANTIZATION_FILES:
                continue
            if path.is_file() and not name.lower().removesuffix(".index.json").endswith(weights):
                (stage / inside).mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, stage / inside / name)


def _write_index(stage: Path, files: list[Path]) -> None:
    """Write the index of a sharded folder, for the new entries."""
    entries = {name: (path.name, e.nbytes) for path in files for name, e in Container(stage / path.name).entries.items()}
    index = {
        "metadata": {"total_size": sum(size for _, size in entries.values())},
        "weight_map": {name: file for name, (file, _) in sorted(entries.items())},
    }
    (stage / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(path: Path, report: Report) -> None:
    """Replace what a copied config.json says about the quantization; its other keys keep their values and order."""
    config = read_object(path)
    if config is None:
        return
    for prefix, part in list(model_configs(config)):
        part.pop("compression_config", None)
        if prefix:
            part.pop(QUANTIZATION, None)
    config[QUANTIZATION] = {
        "quant_method": OWN,
        "recipe": report.recipe and report.recipe.to_dict(),
        "modules_to_not_convert": _modules_kept(report),
    }
    config[WEIGHTS] = REFUSAL
    if not report.quantized:
        del config[QUANTIZATION], config[WEIGHTS]
    write_json(path, config)


def _modules_kept(report: Report) -> list[str]:
    """The names of modules with a matrix that keeps its precision, except embeddings and norms."""
    kept = [t.name for t in report.kept if len(t.shape) > 1 and t.parameters and t.stored_as in _CASTABLE]
    return sorted(name.removesuffix(".weight") for name in kept if kept_kind(name) not in ("embedding", "norm"))
