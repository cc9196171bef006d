"""Quantize checkpoints: one tensor in memory at a time, verified after writing, shown under their name when whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from breccia import CorruptFileError, ScaledTensor, ScalingRecipe, UnsupportedError, cast, dequantize
from breccia.codecs import BF16
from breccia.ops import NUMPY

from .container import Container, Entry, Shape
from .safetensors import Described, load_safetensors, open_writer, plan, read_configs

INDEX = "model.safetensors.index.json"

#: Left as they are unless `include` names them: they are small, or their precision shows in every token.
KEPT = ("*embed*", "*norm*", "*Norm*", "lm_head*", "*.lm_head*")

_FLOATING = ("F32", "F16", "BF16")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")


@dataclass(frozen=True)
class Selection:
    """Which tensors are quantized: floating ones of two axes or more, less `KEPT` and `exclude`, plus `include`.

    Patterns are shell-style globs over whole names. `exclude` beats `include`, which beats `KEPT`.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __call__(self, name: str, entry: Entry) -> bool:
        if entry.dtype not in _FLOATING or len(entry.shape) < 2 or math.prod(entry.shape) == 0:
            return False
        if _matches(name, self.exclude):
            return False
        return _matches(name, self.include) or not _matches(name, KEPT)


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a conversion. Sums are in FP64; `signal` and `noise` are energies, `dot` and `energy` give the cosine."""

    name: str
    shape: Shape
    dtype: str
    quantized: bool
    bytes_in: int
    bytes_out: int
    signal: float = 0.0
    noise: float = 0.0
    dot: float = 0.0
    energy: float = 0.0
    max_error: float = 0.0

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
    """A conversion: what was read, what was written, and how close it is."""

    source: str
    destination: str
    recipe: ScalingRecipe
    tensors: list[TensorReport] = field(default_factory=list[TensorReport])

    @property
    def quantized(self) -> list[TensorReport]:
        return [t for t in self.tensors if t.quantized]

    @property
    def kept(self) -> list[TensorReport]:
        return [t for t in self.tensors if not t.quantized]

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
            "tensors": [
                {
                    "name": t.name,
                    "shape": t.shape,
                    "dtype": t.dtype,
                    "quantized": t.quantized,
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
    advance: Callable[[str, int], None] = lambda name, bytes_read: None,
) -> Report:
    """Quantize a checkpoint under `recipe`.

    source: a `.safetensors` file, or a folder of one or several (Hugging Face's layout); other files of a folder are copied.
    destination: of the same kind as `source`. It appears under its name only when everything is written and verified: each
        file is read back through the public loader, its bytes compared with those that were written, and its tensors decoded.
    force: replace a destination that exists; otherwise FileExistsError, before anything is read.
    advance: called with a tensor's name and its source bytes after it was written and after it was verified.

    Raises CorruptFileError for a source that breaks its format, UnsupportedError for one that is quantized already or not a
    checkpoint, OSError where files cannot be read or written.
    """
    src, dst, chosen = Path(source), Path(destination), selection or Selection()
    files = checkpoint_files(src)
    _check_destination(src, dst, force)
    report = Report(str(src), str(dst), recipe)
    with _staged(dst, force, src.is_dir()) as stage:
        if src.is_dir():
            for path in files:
                report.tensors.extend(_convert_file(path, stage / path.name, recipe, chosen, advance))
            _copy_companions(src, stage, files)
            _write_index(src, stage, files)
        else:
            report.tensors.extend(_convert_file(src, stage, recipe, chosen, advance))
    return report


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the file itself, or those of a folder (its index's, where it has one)."""
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint {path}; give a .safetensors file or a folder that holds some.")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UnsupportedError(f"{path} is not a .safetensors file; convert it to safetensors first.", path=str(path))
        return [path]
    index = path / INDEX
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise CorruptFileError(
                f"{index} names {', '.join(missing)}, which the folder lacks; fetch it again.", missing=missing
            )
        return [path / name for name in names]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise UnsupportedError(f"folder {path} holds no .safetensors file.", path=str(path))
    return found


def source_bytes(source: str | os.PathLike[str]) -> int:
    """Bytes of all tensors of a checkpoint, from its headers."""
    return sum(e.nbytes for path in checkpoint_files(Path(source)) for e in Container(path).entries.values())


# ------------------------------------------------------------------------------------------------ one file


def _convert_file(
    source: Path, destination: Path, recipe: ScalingRecipe, selection: Selection, advance: Callable[[str, int], None]
) -> Iterable[TensorReport]:
    container = Container(source)
    if read_configs(container):
        raise UnsupportedError(
            f"{source} holds tensors that breccia quantized already; convert the original.", path=str(source)
        )
    quantized = {name for name, entry in container.entries.items() if selection(name, entry)}
    described: dict[str, Described] = {
        name: plan(name, e.shape, recipe) if name in quantized else ({name: (e.dtype, e.shape)}, None)
        for name, e in container.entries.items()
    }
    digests: dict[str, str] = {}
    extra = {k: v for k, v in container.metadata.items() if k not in ("schema", "breccia_version")}
    with open_writer(destination, described, extra) as writer:
        for name, entry in container.entries.items():
            arrays = {name: container.array(name)}
            if name in quantized:
                st = cast(_fp32(container, name), recipe)
                parts = {p: getattr(st, p) for p in ("data", "scale", "zero_point", "global_scale")}
                arrays = {f"{name}.{p}": array for p, array in parts.items() if array is not None}
            for part, array in arrays.items():
                writer.write(part, array)
                digests[part] = _digest(array)
            advance(name, entry.nbytes)
    return _verified(container, destination, quantized, described, digests, advance)


def _verified(
    source: Container,
    destination: Path,
    quantized: set[str],
    described: dict[str, Described],
    digests: dict[str, str],
    advance: Callable[[str, int], None],
) -> list[TensorReport]:
    """Reports of the tensors of a written file. Raises CorruptFileError where it does not hold what was written."""
    written = Container(destination)
    with safe_open(destination, framework="numpy") as stock:  # any reader of the format must open the file
        if set(stock.keys()) != set(digests):
            raise CorruptFileError(f"{destination}: the stock safetensors reader finds other tensors than were written.")
    for part, digest in digests.items():
        if _digest(written.array(part)) != digest:
            raise CorruptFileError(f"{destination}: {part!r} reads back other bytes than were written; check the disk.")
    loaded = load_safetensors(destination) if quantized else {}
    reports: list[TensorReport] = []
    for name, entry in source.entries.items():
        out = sum(written.entries[part].nbytes for part in described[name][0])
        measured: dict[str, float] = {}
        if name in quantized:
            st = loaded[name]
            assert isinstance(st, ScaledTensor)
            measured = compare(_fp32(source, name), dequantize(st))
        reports.append(TensorReport(name, entry.shape, entry.dtype, name in quantized, entry.nbytes, out, **measured))
        advance(name, entry.nbytes)
    return reports


def compare(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Sums that SQNR and cosine are made of, and the largest error, in FP64, a megaelement at a time."""
    signal = noise = dot = energy = largest = 0.0
    a, b = x.reshape(-1), y.reshape(-1)
    for i in range(0, a.size, 1 << 20):
        p, q = a[i : i + (1 << 20)].astype(np.float64), b[i : i + (1 << 20)].astype(np.float64)
        e = p - q
        signal, noise = signal + float(p @ p), noise + float(e @ e)
        dot, energy = dot + float(p @ q), energy + float(q @ q)
        largest = max(largest, float(np.abs(e).max(initial=0.0)))
    return {"signal": signal, "noise": noise, "dot": dot, "energy": energy, "max_error": largest}


def _fp32(container: Container, name: str) -> np.ndarray:
    array = container.array(name)
    return BF16.read(NUMPY, array) if container.entries[name].dtype == "BF16" else NUMPY.f32(array)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


# ------------------------------------------------------------------------------------------------ folders


def _check_destination(src: Path, dst: Path, force: bool) -> None:
    if dst.exists() and not force:
        raise FileExistsError(f"{dst} exists; choose another name, or replace it with --force.")
    if dst.exists() and src.is_dir() != dst.is_dir():
        kinds = ("folder", "file") if src.is_dir() else ("file", "folder")
        raise FileExistsError(f"the source is a {kinds[0]} and {dst} a {kinds[1]}; choose another name.")
    if dst.exists() and (dst.samefile(src) or (src.is_dir() and src.resolve() in dst.resolve().parents)):
        raise UnsupportedError(f"{dst} is the source, or lies in it; choose another destination.", path=str(dst))
    if not dst.resolve().parent.is_dir():
        raise FileNotFoundError(f"cannot write {dst}: there is no folder {dst.resolve().parent}; create it first.")


@contextmanager
def _staged(destination: Path, force: bool, folders: bool) -> Generator[Path]:
    """A path to write a file (or fill a folder) at, renamed to `destination` on success; on failure nothing of it stays."""
    folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", suffix=".tmp", dir=destination.resolve().parent))
    stage, replaced = folder / destination.name, folder / "replaced"
    try:
        if folders:
            stage.mkdir()
        yield stage
        if destination.exists() and not force:
            raise FileExistsError(f"{destination} appeared meanwhile; it is left as it is.")
        if destination.is_dir():
            destination.rename(replaced)
        try:
            stage.replace(destination)
        except BaseException:
            if replaced.exists():
                replaced.rename(destination)
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_companions(src: Path, stage: Path, files: list[Path]) -> None:
    """Copy config.json, the tokenizer and whatever else lies beside the weights, but no weights in other formats."""
    for path in sorted(src.iterdir()):
        if path in files or path.name == INDEX or path.suffix in _WEIGHTS:
            continue
        if path.is_dir():
            shutil.copytree(path, stage / path.name)
        else:
            shutil.copy2(path, stage / path.name)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))
        found = listed["weight_map"]
        plain = all(isinstance(n, str) and isinstance(f, str) and Path(f).name == f for n, f in found.items())
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CorruptFileError(f"{index} has no readable weight_map ({type(e).__name__}: {e}); fetch it again.") from e
    if not plain:
        raise CorruptFileError(f"{index}: weight_map maps tensor names to files of the same folder; it holds something else.")
    return found


def _write_index(src: Path, stage: Path, files: list[Path]) -> None:
    """The index of a sharded folder, for the entries that were written."""
    if not (src / INDEX).exists():
        return
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
    return 10 * math.log10(signal / noise) if signal > 0 else (math.nan if math.isnan(signal) else -math.inf)


def _cosine(signal: float, dot: float, energy: float) -> float:
    if signal == 0 and energy == 0:
        return 1.0
    product = signal * energy
    return dot / math.sqrt(product) if product != 0 else 0.0


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
