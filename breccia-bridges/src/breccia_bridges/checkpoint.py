"""The files of a checkpoint: one safetensors file, or a folder of them in Hugging Face's layout."""

from __future__ import annotations

import os
from pathlib import Path

from breccia import CorruptFileError, UnsupportedError
from breccia.internal import abbreviated, parsed_json, unique_keys

from .safetensors_file import Container

#: The index that maps each tensor of a sharded folder to its file.
INDEX = "model.safetensors.index.json"
#: Ends of names of files that torch.save writes.
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the file itself, or those of a folder (those its index lists, if it has one)."""
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint {path}; give a .safetensors file or a folder of them.")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UnsupportedError(f"{path} is not a .safetensors file; convert it to safetensors first.", path=str(path))
        return [path]
    if not path.is_dir():
        raise UnsupportedError(
            f"{path} is neither a file nor a folder; give a .safetensors file or a folder of them.", path=str(path)
        )
    index = path / INDEX
    indexed = is_there(index)
    if indexed:
        names = sorted(set(weight_map(index).values()))
    else:
        names = sorted(p.name for p in path.glob("*.safetensors") if not p.is_dir() and not p.name.startswith("."))
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        said = f"{index} names" if indexed else f"{path} has broken links or special files:"
        raise CorruptFileError(f"{said} {abbreviated(missing)}, which the folder lacks; download it again.", missing=missing)
    if not names:
        raise _without_safetensors(path)
    return [path / name for name in names]


def _without_safetensors(path: Path) -> UnsupportedError:
    """The error for a folder without a safetensors file, which names those that torch.save wrote."""
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED)
    if not pickled:
        return UnsupportedError(f"folder {path} contains no .safetensors file.", path=str(path))
    quantized = f" (its config.json says {method!r})" if (method := _quant_method(path / "config.json")) else ""
    return UnsupportedError(
        f"folder {path} contains no .safetensors file, only {abbreviated(pickled)} of torch.save{quantized}: loading a pickle "
        "can run any program in it, so breccia reads none. Load the model with transformers, and torchao if that quantized it, "
        "and write it with model.save_pretrained(folder), which makes safetensors.",
        path=str(path),
        files=pickled,
    )


def _quant_method(config: Path) -> str:
    """The quant_method of a config.json; empty where there is none."""
    try:
        listed = parsed_json(config.read_text(encoding="utf-8"))
        return str(listed["quantization_config"]["quant_method"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def is_there(path: Path) -> bool:
    """Is there a file of this name, which decides how others are read? Raises CorruptFileError for anything but a file."""
    if not os.path.lexists(path):
        return False
    if not path.is_file():
        state = "a broken link" if not path.exists() else "no file"
        raise CorruptFileError(f"{path} is {state}; download it again, or remove it.", path=str(path))
    return True


def source_bytes(source: str | os.PathLike[str]) -> int:
    """Bytes of all tensors of a checkpoint, from its headers."""
    return sum(e.nbytes for path in checkpoint_files(Path(source)) for e in Container(path).entries.values())


def weight_map(index: Path) -> dict[str, str]:
    """File by tensor name, from an index. Raises CorruptFileError for an unreadable index."""
    try:
        listed = parsed_json(index.read_text(encoding="utf-8"), unique_keys)
        files = listed["weight_map"]
        plain = all(isinstance(f, str) and _is_name(f) for f in files.values())
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CorruptFileError(f"{index} has no readable weight_map ({type(e).__name__}: {e}); download it again.") from e
    if not plain:
        raise CorruptFileError(f"{index}: weight_map must map tensor names to files of the same folder.")
    return files


def _is_name(text: str) -> bool:
    """Is it the name of a file in the same folder?"""
    return Path(text).name == text and "\0" not in text and len(os.fsencode(text)) < 256
