"""The files of a checkpoint: one file, or a folder in Hugging Face's layout; of safetensors, GGUF or torch.save."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from breccia import CorruptFileError, UnsupportedError
from breccia.internal import abbreviated, parsed_json, unique_keys

from .gguf_file import GGUFFile, check_parts, gguf_files, parts_of
from .gguf_header import is_gguf
from .gguf_raw_parts import refuse_raw_parts
from .remote_path import is_remote, lexists, path_of
from .safetensors_file import Container

#: The index that maps each tensor of a sharded folder to its file.
INDEX = "model.safetensors.index.json"
#: The index of files that torch.save wrote, and the name of one that has all weights.
TORCH_INDEX, TORCH_FILE = "pytorch_model.bin.index.json", "pytorch_model.bin"
#: Ends of names of files that torch.save writes.
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
GGUF = ".gguf"


def checkpoint_files(path: Path) -> list[Path]:
    """The files with the weights of a checkpoint: the file itself, or those of a folder.

    Of a folder, the safetensors files; if there are none, those of a GGUF model, or those of torch.save. If it has an index of
    them, those it lists. Of a GGUF model that was split, a file stands for all parts.
    """
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint {path}; give a .safetensors or .gguf file, or a folder of them.")
    if path.is_file():
        refuse_raw_parts([path])
        if path.suffix not in (".safetensors", *PICKLED) and not has_gguf(path):
            raise UnsupportedError(
                f"{path} is neither a .safetensors nor a .gguf file; convert it to safetensors first.", path=str(path)
            )
        return of_one(path)
    if not path.is_dir():
        raise UnsupportedError(
            f"{path} is neither a file nor a folder; give a .safetensors or .gguf file, or a folder of them.", path=str(path)
        )
    index = index_of(path)
    listed = _safetensors(path) if index is None else sorted(set(weight_map(index).values()))
    if not listed and (parts := gguf_files(path)):
        return parts
    if not listed:
        refuse_raw_parts(sorted(file for file in path.iterdir() if not file.name.startswith(".")))
    names = listed or _pickled(path)
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        said = f"{index} names" if index is not None else f"{path} has broken links or special files:"
        raise CorruptFileError(f"{said} {abbreviated(missing)}, which the folder lacks; download it again.", missing=missing)
    return [path / name for name in names]


def _safetensors(path: Path) -> list[str]:
    return sorted(p.name for p in path.glob("*.safetensors") if not p.is_dir() and not p.name.startswith("."))


def _pickled(path: Path) -> list[str]:
    """The file of torch.save with the weights of a folder that has no index."""
    names = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED)
    if TORCH_FILE in names:
        return [TORCH_FILE]
    if not names:
        raise UnsupportedError(f"folder {path} contains no .safetensors file.", path=str(path))
    if len(names) > 1:
        raise UnsupportedError(
            f"folder {path} contains no .safetensors file and no {TORCH_FILE}, but {abbreviated(names)}; give the path of the "
            "one with the weights.",
            path=str(path),
            files=names,
        )
    return names


def index_of(path: Path) -> Path | None:
    """The index of a folder; that of torch.save's files only where there are no safetensors files."""
    if is_there(path / INDEX):
        return path / INDEX
    if is_there(path / TORCH_INDEX) and not _safetensors(path):
        return path / TORCH_INDEX
    return None


def of_one(file: Path) -> list[Path]:
    """The files that one file stands for: itself, and the other parts of a GGUF model. Raises as `refuse_raw_parts` does."""
    if file.suffix == GGUF:
        return parts_of(file)
    refuse_raw_parts([file])
    return [file]


def all_opened(files: Iterable[Path]) -> list[Container]:
    """The files of a checkpoint, opened. Raises as `opened` does, and as `check_parts`."""
    containers = [opened(file) for file in files]
    check_parts([file for file in containers if isinstance(file, GGUFFile)])
    return containers


def opened(file: Path) -> Container:
    """A file with weights, opened. Raises as `Container`, `GGUFFile` and `PickledFile` do."""
    if has_gguf(file):
        return GGUFFile(file)
    if file.suffix not in PICKLED:
        return Container(file)
    if is_remote(file):
        raise UnsupportedError(
            f"{file} is a file of torch.save, which torch reads from a disk. Download it, and give its path on this machine.",
            path=str(file),
        )
    from .pickled_file import PickledFile

    return PickledFile(file)


def has_gguf(file: Path) -> bool:
    """Is it named as a GGUF file, or named in no known way, and one by its first bytes?"""
    return file.suffix == GGUF or (file.suffix not in (".safetensors", *PICKLED) and file.is_file() and is_gguf(file))


def safetensors_name(file: str) -> str:
    """The name of the safetensors file with the weights of a file: "model-00001-of-00002.safetensors"."""
    name = Path(file)
    if name.suffix == GGUF:
        part = re.search(r"-\d{5}-of-\d{5}$", name.stem)
        return f"model{part[0] if part else ''}.safetensors"
    if name.suffix not in PICKLED:
        return file
    stem = name.stem.removeprefix("pytorch_") if name.stem.startswith("pytorch_model") else name.stem
    return f"{stem}.safetensors"


def is_there(path: Path) -> bool:
    """Is there a file of this name, which decides how others are read? Raises CorruptFileError for anything but a file."""
    if not lexists(path):
        return False
    if not path.is_file():
        state = "a broken link" if not path.exists() else "no file"
        raise CorruptFileError(f"{path} is {state}; download it again, or remove it.", path=str(path))
    return True


def source_bytes(source: str | os.PathLike[str]) -> int:
    """Bytes of all tensors of a checkpoint, from its headers."""
    return sum(e.nbytes for file in all_opened(checkpoint_files(path_of(source))) for e in file.entries.values())


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
