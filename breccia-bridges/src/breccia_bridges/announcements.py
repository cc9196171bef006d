"""What the files beside the weights of a checkpoint say about its quantization.

Names are those that transformers 5.24, compressed-tensors 0.20, ModelOpt 0.47, gptqmodel 7.7, AutoAWQ 0.2.9 and MLX 0.32 write.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from breccia import CorruptFileError, Dialect, UnsupportedError
from breccia.backend import BF16, float_codec, registry
from breccia.internal import abbreviated, parsed_json, printable, suggestion

from .checkpoint import is_there

CONFIG = "config.json"
#: The key of config.json under which transformers finds the quantization of a checkpoint.
QUANTIZATION = "quantization_config"
#: The same of earlier releases of compressed-tensors.
COMPRESSION = "compression_config"

#: The model's dtype; the second one before transformers 5.
DTYPE_KEYS = ("dtype", "torch_dtype")
#: torch's names of the dtypes of a file that values are decoded to.
TORCH_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}

#: breccia's own `quant_method`; the tensors of such files have configs in the metadata.
OWN = "breccia"

_DAMAGED = "Download the checkpoint again."


@dataclass(frozen=True)
class Announced:
    """A quantization that a file beside the weights announces. where: the file, and the key in it."""

    where: str
    method: str
    settings: Mapping[str, Any]

    @property
    def dialects(self) -> list[Dialect]:
        """The dialects that it may be about; none where no declared one has such settings."""
        return [dialect for dialect in registry().dialects.values() if dialect.announced_by(self.method, self.settings)]


#: Files that only announce a quantization, of ModelOpt, GPTQ, AWQ, quanto and AutoRound; the method where they name none.
QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quanto_qmap.json": "quanto",
    "quantization_config.json": "auto-round",
}


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file. Raises CorruptFileError for anything else."""
    if not is_there(path):
        return None
    try:
        listed = parsed_json(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise CorruptFileError(f"{path} is not JSON ({e}). {_DAMAGED}", path=str(path)) from e
    if not isinstance(listed, dict):
        raise CorruptFileError(f"{path} is a JSON object; found {short(listed)}. {_DAMAGED}", path=str(path))
    return listed


def model_configs(config: dict[str, Any]) -> Generator[tuple[str, dict[str, Any]]]:
    """config.json itself, and the configs of a composite model's parts (`text_config`) and of theirs, each with what its keys
    start with."""
    waiting = [("", config)]
    while waiting:
        prefix, part = waiting.pop()
        yield prefix, part
        for key, inner in reversed(part.items()):
            if key.endswith("_config") and key not in (QUANTIZATION, COMPRESSION) and isinstance(inner, dict):
                waiting.append((f"{prefix}{key}.", inner))


def folder_of(path: Path) -> Path:
    """The folder whose configs are about a checkpoint: itself, or that of a file."""
    return path if path.is_dir() else path.parent


def announcements(folder: Path) -> list[Announced]:
    """What the configs of a folder announce. Raises CorruptFileError for invalid and UnsupportedError for unknown ones."""
    announced: list[Announced] = []
    for key, config in model_configs(read_object(folder / CONFIG) or {}):
        prefix = printable(key)
        mlx = config.get("quantization")
        mlx = mlx if isinstance(mlx, dict) and "bits" in mlx else None
        if mlx is not None:
            announced.append(Announced(f"{folder / CONFIG}: {prefix}quantization", "mlx", mlx))
        both = [key for key in (QUANTIZATION, COMPRESSION) if config.get(key) is not None]
        if len(both) > 1:
            raise CorruptFileError(
                f"{folder / CONFIG} has both {prefix}{both[0]} and {prefix}{both[1]}; keep the one that describes the tensors.",
                path=str(folder / CONFIG),
            )
        for key in both:
            if config[key] != mlx:  # MLX writes its settings under both keys
                default = "" if key == QUANTIZATION else "compressed-tensors"
                announced.append(_announced(f"{folder / CONFIG}: {prefix}{key}", config[key], default))
    for file, default in QUANTIZATION_FILES.items():
        listed = read_object(folder / file)
        if listed is not None:
            announced.append(_announced(str(folder / file), listed, default))
    _check_agreement(announced)
    return announced


def _announced(where: str, settings: Any, default: str) -> Announced:
    if not isinstance(settings, dict):
        raise CorruptFileError(f"{where} is an object; found {short(settings)}. Fix it, or download it again.", where=where)
    if not default and (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        default = "bitsandbytes"
    method = settings.get("quant_method", default)
    known = sorted({OWN, *(method for dialect in registry().dialects.values() for method in dialect.methods)})
    if not method or not isinstance(method, str):
        wrong = f"has no quant_method; its keys are {abbreviated(settings, 8) or 'none'}. Known: {', '.join(known)}."
    elif method not in known:
        wrong = f"has quant_method {method!r}, which breccia does not know{suggestion(method, known)}"
    else:
        return Announced(where, method, settings)
    raise UnsupportedError(
        f"{where} {wrong} Convert the checkpoint that it was made from; if the weights are not quantized, remove {where}.",
        where=where,
        quant_method=method,
    )


def _check_agreement(announced: Sequence[Announced]) -> None:
    for one in announced[1:]:
        if one.method != announced[0].method and not any(dialect in announced[0].dialects for dialect in one.dialects):
            raise CorruptFileError(
                f"two quantization configs disagree: {announced[0].where} is {announced[0].method!r}, and {one.where} is "
                f"{one.method!r}. Keep the one that describes the tensors.",
                declared=[announced[0].method, one.method],
            )


def dtype_of(path: Path) -> str:
    """The dtype of the model of a folder or file by config.json, BF16 by default."""
    for _, part in model_configs(read_object(folder_of(path) / CONFIG) or {}):
        for key in DTYPE_KEYS:
            if (name := codec_named(part.get(key))) is not None:
                return name
    return BF16.name


def codec_named(dtype: Any) -> str | None:
    """A dtype as files name it; None if it is no name of a float."""
    codec = float_codec(dtype) if isinstance(dtype, str) else None
    return codec and codec.name
