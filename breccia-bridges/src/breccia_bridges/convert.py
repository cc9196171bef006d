"""Quantize checkpoints: some megaelements in memory at a time, verified after writing, under their name only when whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from breccia import CorruptFileError, ScaledTensor, ScalingRecipe, UnsupportedError, cast, dequantize
from breccia.codecs import BF16
from breccia.formats import TENSOR
from breccia.ops import NUMPY

from .checkpoint import INDEX, checkpoint_files, weight_map
from .container import Container, Entry, Shape, Writer, byte_count
from .safetensors import PARTS, Described, open_writer, plan, read_configs, read_tensor

#: Left as they are unless `include` names them: they are small, or their precision shows in every token.
KEPT = ("*embed*", "*norm*", "*Norm*", "lm_head*", "*.lm_head*")

#: Elements cast, or decoded and compared, at a time. It bounds memory and changes no byte.
SLAB = 1 << 20

_FLOATING = ("F32", "F16", "BF16")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot", ".tflite")

Advance = Callable[[str, int], None]


@dataclass(frozen=True)
class Selection:
    """Which tensors are quantized: floating ones of two axes or more, less `KEPT` and `exclude`, plus `include`.

    Patterns are shell-style globs over whole names. `exclude` beats `include`, which beats `KEPT`.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def reason_to_keep(self, name: str, entry: Entry) -> str:
        """Why a tensor stays as it is; empty where it is to be quantized."""
        if entry.dtype not in _FLOATING:
            return f"{entry.dtype} cannot be cast" if entry.dtype.startswith("F") else "not floating"
        if math.prod(entry.shape) == 0:
            return "empty"
        if len(entry.shape) < 2:
            return "fewer than two axes"
        if _matches(name, self.exclude):
            return "excluded"
        kept = _matches(name, KEPT) and not _matches(name, self.include)
        return "kept by default (use --include)" if kept else ""

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that match none of `names`."""
        held = list(names)
        patterns = dict.fromkeys((*self.include, *self.exclude))
        return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in held)]


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a conversion. Sums are in FP64; `signal` and `noise` are energies, `dot` and `energy` give the cosine.

    reason: why the tensor was kept as it is; empty where it was quantized.
    """

    name: str
    shape: Shape
    dtype: str
    reason: str
    bytes_in: int
    bytes_out: int
    signal: float = 0.0
    noise: float = 0.0
    dot: float = 0.0
    energy: float = 0.0
    max_error: float = 0.0

    @property
    def quantized(self) -> bool:
        return not self.reason

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def sqnr(self) -> float:
        """Signal-to-quantization-noise ratio in dB; inf where nothing was lost, NaN where the tensor is not finite."""
        return _decibel(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        return _cosine(self.signal, self.dot, self.energy)


@dataclass(frozen=True)
class Report:
    """A conversion: what was read, what was written, and how close it is.

    unmatched: patterns of the selection that match no tensor.
    """

    source: str
    destination: str
    recipe: ScalingRecipe
    tensors: list[TensorReport] = field(default_factory=list[TensorReport])
    unmatched: list[str] = field(default_factory=list[str])

    @property
    def quantized(self) -> list[TensorReport]:
        return [t for t in self.tensors if t.quantized]

    @property
    def kept(self) -> list[TensorReport]:
        return [t for t in self.tensors if not t.quantized]

    @property
    def reasons(self) -> dict[str, int]:
        """How many tensors were kept for which reason, the commonest first."""
        return dict(Counter(t.reason for t in self.kept).most_common())

    @property
    def bytes_in(self) -> int:
        return sum(t.bytes_in for t in self.tensors)

    @property
    def bytes_out(self) -> int:
        return sum(t.bytes_out for t in self.tensors)

    @property
    def bytes_kept(self) -> int:
        """Bytes left in the precision they had."""
        return sum(t.bytes_out for t in self.kept)

    @property
    def bits_per_parameter(self) -> float:
        """Bits that a quantized parameter takes, its share of the scales included."""
        return 8 * sum(t.bytes_out for t in self.quantized) / max(1, sum(t.parameters for t in self.quantized))

    @property
    def sqnr(self) -> float:
        return _decibel(sum(t.signal for t in self.quantized), sum(t.noise for t in self.quantized))

    @property
    def cosine(self) -> float:
        """Mean cosine of the quantized tensors, each weighed by its parameters."""
        weights = sum(t.parameters for t in self.quantized)
        return sum(t.cosine * t.parameters for t in self.quantized) / weights if weights else 1.0

    @property
    def worst(self) -> TensorReport | None:
        """The quantized tensor of lowest SQNR; one that is not finite comes first."""
        return min(self.quantized, key=lambda t: -math.inf if math.isnan(t.sqnr) else t.sqnr, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`: figures that are not finite become None."""
        worst = self.worst
        return {
            "source": self.source,
            "destination": self.destination,
            "recipe": self.recipe.to_dict(),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "bytes_kept": self.bytes_kept,
            "bits_per_parameter": self.bits_per_parameter,
            "sqnr_db": _number(self.sqnr),
            "cosine": _number(self.cosine),
            "worst": worst.name if worst else None,
            "kept": self.reasons,
            "unmatched": self.unmatched,
            "tensors": [
                {
                    "name": t.name,
                    "shape": t.shape,
                    "dtype": t.dtype,
                    "quantized": t.quantized,
                    "reason": t.reason or None,
                    "bytes_in": t.bytes_in,
                    "bytes_out": t.bytes_out,
                    "sqnr_db": _number(t.sqnr) if t.quantized else None,
                    "cosine": _number(t.cosine) if t.quantized else None,
                    "max_error": _number(t.max_error) if t.quantized else None,
                }
                for t in self.tensors
            ],
        }


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: ScalingRecipe,
    *,
    selection: Selection | None = None,
    force: bool = False,
    advance: Advance = lambda name, bytes_read: None,
) -> Report:
    """Quantize a checkpoint under `recipe`.

    source: a `.safetensors` file, or a folder of one or several (Hugging Face's layout). What else a folder holds is copied,
        but for weights in other formats, hidden folders and links to folders.
    destination: of the same kind as `source`. It appears under its name only when everything is written and verified: each
        file is read back, its bytes compared with those that were written, and its tensors decoded. A link is replaced, not
        followed.
    force: replace a file, or a folder that holds a checkpoint; otherwise FileExistsError, before anything is read.
    advance: called with a tensor's name and its source bytes after it was written and after it was verified.

    A tensor that would not shrink is kept as it is. Raises CorruptFileError for a source that breaks its format,
    UnsupportedError for one that is quantized already or no checkpoint, and for a destination that is the source, lies in it
    or holds it; OSError where files cannot be read or written.
    """
    src, dst, chosen = Path(source), _location(Path(destination)), selection or Selection()
    files = checkpoint_files(src)
    _check_destination(src, files, dst, force)
    names = _checked_names(src, files)
    report = Report(str(src), str(Path(destination)), recipe, unmatched=chosen.unmatched(names))
    with _staged(dst, force, src.is_dir()) as stage:
        if src.is_dir():
            _copy_companions(src, stage)
        for path in files:
            written = stage / path.name if src.is_dir() else stage
            report.tensors.extend(_convert_file(path, written, recipe, chosen, advance))
        if src.is_dir() and (src / INDEX).exists():
            _write_index(stage, files)
    return report


# ------------------------------------------------------------------------------------------------ one file


def _convert_file(
    source: Path, destination: Path, recipe: ScalingRecipe, selection: Selection, advance: Advance
) -> list[TensorReport]:
    container = Container(source)
    described: dict[str, Described] = {}
    reasons: dict[str, str] = {}
    for name, entry in container.entries.items():
        reason = selection.reason_to_keep(name, entry)
        if not reason:
            described[name] = plan(name, entry.shape, recipe)
            if sum(byte_count(*part) for part in described[name][0].values()) >= entry.nbytes:
                reason = "would not shrink"
        if reason:
            described[name] = {name: (entry.dtype, entry.shape)}, None
        reasons[name] = reason
    digests: dict[str, str] = {}
    extra = {k: v for k, v in container.metadata.items() if k not in ("schema", "breccia_version")}
    with open_writer(destination, described, extra) as writer:
        for name, entry in container.entries.items():
            if reasons[name]:
                with _digested(writer, name, digests) as put:
                    put(container.array(name))
            else:
                _write_scaled(writer, digests, name, list(described[name][0]), _Source(container, name, recipe))
            advance(name, entry.nbytes)
    written = _reopened(destination, digests)
    configs = read_configs(written)
    reports: list[TensorReport] = []
    for name, entry in container.entries.items():
        size = sum(written.entries[part].nbytes for part in described[name][0])
        measured: dict[str, float] = {}
        if not reasons[name]:
            measured = _measured(_Source(container, name, recipe), read_tensor(written, name, configs[name]))
        reports.append(TensorReport(name, entry.shape, entry.dtype, reasons[name], entry.nbytes, size, **measured))
        advance(name, entry.nbytes)
    return reports


def _write_scaled(writer: Writer, digests: dict[str, str], name: str, parts: list[str], source: _Source) -> None:
    with ExitStack() as stack:
        puts = {part: stack.enter_context(_digested(writer, part, digests)) for part in parts}
        for pieces in source.cast():
            for part, piece in pieces.items():
                puts[f"{name}.{part}"](piece)


@contextmanager
def _digested(writer: Writer, part: str, digests: dict[str, str]) -> Generator[Callable[[np.ndarray], None]]:
    """`writer.stream(part)`, whose digest is noted in the end."""
    digest = hashlib.sha256()
    with writer.stream(part) as put:

        def both(piece: np.ndarray) -> None:
            put(piece)
            digest.update(_bytes(piece))

        yield both
    digests[part] = digest.hexdigest()


def _reopened(path: Path, digests: dict[str, str]) -> Container:
    """A written file, opened again. Raises CorruptFileError where it does not hold what was written."""
    written = Container(path)
    try:
        with safe_open(path, framework="numpy") as stock:  # any reader of the format must open the file
            found = set(stock.keys())
    except SafetensorError as e:
        raise CorruptFileError(f"{path}: the stock safetensors reader refuses it ({e}); upgrade safetensors.") from e
    if found != set(digests):
        raise CorruptFileError(f"{path}: the stock safetensors reader finds other tensors than were written.")
    for part, digest in digests.items():
        if hashlib.sha256(_bytes(written.array(part))).hexdigest() != digest:
            raise CorruptFileError(f"{path}: {part!r} reads back other bytes than were written; check the disk.")
    return written


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# ------------------------------------------------------------------------------------------------ slabs


#: Some of a tensor's matrices, and some of their rows of blocks.
Slab = tuple[slice, slice]


class _Source:
    """A tensor to quantize, read by slabs of whole blocks in C order, each of `SLAB` elements or one row of blocks.

    Casting slab after slab gives the bytes of one cast, since a block's bytes depend on that block alone and on a scale of
    the whole tensor, where the recipe has one; that is found first, and supplied.
    """

    def __init__(self, container: Container, name: str, recipe: ScalingRecipe) -> None:
        self.array, self.dtype, self.recipe = container.array(name), container.entries[name].dtype, recipe
        fmt, block = recipe.format, recipe.layout.block()
        *lead, rows, self.columns = self.array.shape
        self.matrices, self.rows = math.prod(lead), rows
        #: Rows of one block.
        self.side = 1 if block == TENSOR else block[0] or rows
        if self.side == 1:  # nothing spans rows: all matrices are one
            self.matrices, self.rows = 1, self.matrices * rows
        self.coarse = len(fmt.levels) == 2
        self.shares = fmt.levels[0].block == TENSOR
        # Not by slabs: zero-points of the whole tensor, and 8-bit scales of it, whose zero cannot be supplied.
        self.whole = block == TENSOR and (self.coarse or fmt.offset != "none" or fmt.scale.codec.bits <= 8)

    def slabs(self) -> Iterator[Slab]:
        rows = -(-self.rows // self.side)
        across, down = self.matrices, rows
        if not self.whole:
            across = max(1, SLAB // (self.rows * self.columns))
            down = max(1, SLAB // (self.side * self.columns))
        for i in range(0, self.matrices, across):
            for j in range(0, rows, down):
                yield slice(i, i + across), slice(j, j + down)

    def piece(self, part: np.ndarray, slab: Slab, side: int = 1) -> np.ndarray:
        """What lies in `slab` of a part that has `side` rows for each row of blocks."""
        matrices, blocks = slab
        stacked = part.reshape(self.matrices, -1, part.shape[-1])
        return stacked[matrices, blocks.start * side : blocks.stop * side]

    def values(self, slab: Slab) -> np.ndarray:
        """FP32."""
        piece = self.piece(self.array, slab, self.side)
        return BF16.read(NUMPY, piece) if self.dtype == "BF16" else NUMPY.f32(piece)

    def cast(self) -> Generator[dict[str, np.ndarray]]:
        """The parts of the cast tensor in consecutive pieces; those that slabs share come with the first."""
        slabs = list(self.slabs())
        scale = self._shared_scale(slabs) if self.shares and len(slabs) > 1 else None
        for slab in slabs:
            st = cast(self.values(slab), self.recipe, scale=scale)
            parts = {part: getattr(st, part) for part in PARTS}
            yield {part: a for part, a in parts.items() if a is not None and (a.ndim or slab == slabs[0])}

    def _shared_scale(self, slabs: list[Slab]) -> np.ndarray:
        """The scale of the whole tensor. It depends on the largest magnitude alone, so a cast of the slabs' largest gives it.

        A coarse level takes the largest finite one; an only level takes NaN and Inf as well, which mark the tensor.
        """
        largest: list[Any] = []
        for slab in slabs:
            magnitude = np.abs(self.values(slab))
            largest.append(magnitude.max(where=np.isfinite(magnitude) if self.coarse else True, initial=0))
        st = cast(np.array([largest], np.float32), self.recipe)
        return st.global_scale if self.coarse else st.scale

    def part_of(self, st: ScaledTensor, slab: Slab) -> ScaledTensor:
        """What lies in `slab` of the tensor cast."""
        data = self.piece(st.data, slab, self.side)
        scale, zero_point = (p if p is None or p.ndim == 0 else self.piece(p, slab) for p in (st.scale, st.zero_point))
        shape = (*data.shape[:-1], self.columns)
        return ScaledTensor(data, scale, st.recipe, st.layout.fitted(shape), zero_point, st.global_scale, shape=shape)


def _measured(source: _Source, st: ScaledTensor) -> dict[str, float]:
    """`compare` of a tensor and what it became, by slabs."""
    found = [compare(source.values(slab), dequantize(source.part_of(st, slab))) for slab in source.slabs()]
    sums = {key: sum(f[key] for f in found) for key in ("signal", "noise", "dot", "energy")}
    return {**sums, "max_error": float(np.max([f["max_error"] for f in found]))}


def compare(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Sums that SQNR and cosine are made of, and the largest error, in FP64, a megaelement at a time."""
    signal = noise = dot = energy = largest = 0.0
    a, b = x.reshape(-1), y.reshape(-1)
    with np.errstate(invalid="ignore"):  # of 0 times Inf
        for i in range(0, a.size, 1 << 20):
            p, q = a[i : i + (1 << 20)].astype(np.float64), b[i : i + (1 << 20)].astype(np.float64)
            e = p - q
            signal, noise = signal + float(p @ p), noise + float(e @ e)
            dot, energy = dot + float(p @ q), energy + float(q @ q)
            largest = float(np.maximum(largest, np.abs(e).max(initial=0.0)))  # NaN stays
    return {"signal": signal, "noise": noise, "dot": dot, "energy": energy, "max_error": largest}


# ------------------------------------------------------------------------------------------------ the source, checked


def _checked_names(src: Path, files: list[Path]) -> set[str]:
    """Names of all tensors. Raises where a file is quantized already, or the index and the files contradict each other."""
    held: dict[str, list[str]] = {}
    for path in files:
        container = Container(path)
        if read_configs(container):
            raise UnsupportedError(
                f"{path} holds tensors that breccia quantized already; convert the original.", path=str(path)
            )
        for name in container.entries:
            held.setdefault(name, []).append(path.name)
    if src.is_dir() and (src / INDEX).exists():
        _check_index(src / INDEX, held)
    return set(held)


def _check_index(index: Path, held: dict[str, list[str]]) -> None:
    listed = weight_map(index)
    for name in dict.fromkeys((*listed, *held)):
        found = held.get(name, [])
        if len(found) > 1:
            wrong = f"lies in {' and '.join(found)}"
        elif name not in listed:
            wrong = f"of {found[0]} is missing from the index"
        elif found != [listed[name]]:
            wrong = (
                f"is said to lie in {listed[name]}, and {'lies in ' + found[0] if found else 'no file of the index holds it'}"
            )
        else:
            continue
        raise CorruptFileError(
            f"{index}: tensor {name!r} {wrong}; fetch the checkpoint again, or mend its index.", path=str(index), name=name
        )


# ------------------------------------------------------------------------------------------------ the destination


def _location(path: Path) -> Path:
    """What `path` names, made absolute: folders on the way resolved, the last name as it is, be it a link's."""
    absolute = path.absolute()
    if absolute.name in ("", ".."):
        return Path(os.path.realpath(absolute))
    return Path(os.path.realpath(absolute.parent), absolute.name)


def _check_destination(src: Path, files: list[Path], dst: Path, force: bool) -> None:
    """Refuse a destination that cannot be written, or whose writing would cost the user data, before anything is read."""
    if _within(Path.cwd(), dst):
        wrong = "is the current folder, or holds it; name a folder or file in it"
    elif dst.exists() and dst.samefile(src):
        wrong = "is the source; choose another destination"
    elif _within(dst, src) or _within(dst.parent, src):
        wrong = f"lies inside the source {src}; choose a destination outside it"
    elif any(_within(path, dst) for path in (src, *files)):
        wrong = f"holds the source {src}; choose a destination that does not"
    elif src.is_file() and dst.is_dir():
        wrong = "is a folder and the source a file; give a name that ends in .safetensors"
    elif src.is_file() and dst.suffix != ".safetensors":
        wrong = "is no name for a .safetensors file; end it in .safetensors"
    else:
        wrong = ""
    if wrong:
        raise UnsupportedError(f"{dst} {wrong}.", path=str(dst))
    if not dst.parent.is_dir():
        raise FileNotFoundError(f"cannot write {dst}: there is no folder {dst.parent}; create it first.")
    _check_taken(dst, force, src.is_dir())


def _check_taken(dst: Path, force: bool, folder: bool) -> None:
    """Refuse to replace what lies at the destination, unless `force` allows it and it is a file, a link or a checkpoint."""
    if not os.path.lexists(dst):
        return
    if folder and dst.exists() and not dst.is_dir():
        raise FileExistsError(f"{dst} is a file and the source a folder; choose another name.")
    if not force:
        raise FileExistsError(f"{dst} exists; choose another name, or replace it with --force.")
    if dst.is_symlink():
        return
    if not dst.is_dir() and not dst.is_file():
        raise FileExistsError(f"{dst} is neither a file nor a folder; choose another name.")
    if dst.is_dir() and os.path.ismount(dst):
        raise FileExistsError(f"{dst} is a mount point, which cannot be replaced; choose a folder in it.")
    if dst.is_dir() and not (dst / INDEX).exists() and not any(dst.glob("*.safetensors")):
        raise FileExistsError(
            f"{dst} does not look like a checkpoint (it holds no .safetensors file), so --force does not replace it; remove it "
            "yourself, or choose another name."
        )


def _within(path: Path, folder: Path) -> bool:
    """Is `path`, links resolved, `folder` or something in it?"""
    real = Path(os.path.realpath(path))
    return folder.exists() and any(p.exists() and p.samefile(folder) for p in (real, *real.parents))


@contextmanager
def _staged(destination: Path, force: bool, folder: bool) -> Generator[Path]:
    """A path to write a file (or fill a folder) at, renamed to `destination` on success; on failure nothing of it stays."""
    beside = destination.parent / f".breccia-{secrets.token_hex(8)}.tmp"
    stage = beside / destination.name
    try:
        beside.mkdir(mode=0o700)
        if folder:
            stage.mkdir()
        yield stage
        _check_taken(destination, force, folder)
        if folder and os.path.lexists(destination):
            _swap(stage, destination, beside.with_suffix(".old"))
        else:
            stage.replace(destination)
    finally:
        _remove(beside)


def _swap(stage: Path, destination: Path, aside: Path) -> None:
    """Put folder `stage` in the place of `destination`, and remove what was there only when that is done."""
    try:
        destination.rename(aside)
        stage.rename(destination)
    finally:  # goes by what lies where, since a signal may come between any two steps
        if not os.path.lexists(stage):
            _remove(aside)
        elif os.path.lexists(aside):
            _put_back(aside, destination)
    if os.path.lexists(aside):
        raise OSError(f"{destination} is written; what it replaced could not be removed and lies in {aside}.")


def _put_back(aside: Path, destination: Path) -> None:
    try:
        aside.rename(destination)
    except OSError as e:
        raise OSError(f"{destination} could not be replaced, nor put back ({e}); what was there lies whole in {aside}.") from e


def _remove(path: Path) -> None:
    def remove() -> None:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)

    try:
        remove()
    finally:  # again, should a signal cut the first time short
        remove()


def _copy_companions(src: Path, stage: Path) -> None:
    """Copy config.json, the tokenizer and whatever else lies beside the weights.

    Left out are weights in other formats and their indexes, safetensors files of the folder itself (the index's are
    converted, others duplicate them), hidden folders, links to folders or to nothing, and special files.
    """
    for folder, folders, names in os.walk(src):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(folder).relative_to(src)
        weights = (*_OTHER_FORMATS, ".safetensors") if inside == Path() else _OTHER_FORMATS
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not name.lower().removesuffix(".index.json").endswith(weights):
                (stage / inside).mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, stage / inside / name)


def _write_index(stage: Path, files: list[Path]) -> None:
    """The index of a sharded folder, for the entries that were written."""
    entries = {name: (path.name, e.nbytes) for path in files for name, e in Container(stage / path.name).entries.items()}
    index = {
        "metadata": {"total_size": sum(size for _, size in entries.values())},
        "weight_map": {name: file for name, (file, _) in sorted(entries.items())},
    }
    (stage / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------ figures


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return -math.inf if ratio == 0 else 10 * math.log10(ratio)


def _cosine(signal: float, dot: float, energy: float) -> float:
    if signal == 0 and energy == 0:
        return 1.0
    product = signal * energy
    return dot / math.sqrt(product) if product != 0 else 0.0


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
