"""The files beside the weights of a checkpoint folder: config.json, index, tokenizer and others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from breccia import CorruptFileError, UnsupportedError

from .announcements import (
    COMPRESSION,
    CONFIG,
    DTYPE_KEYS,
    OWN,
    QUANTIZATION,
    QUANTIZATION_FILES,
    TORCH_NAMES,
    codec_named,
    model_configs,
)
from .checkpoint import INDEX, TORCH_INDEX
from .destination import within
from .huggingface import REFUSAL, WEIGHTS, write_json
from .modules import modules_kept
from .remote_path import copy_file, is_remote, walk
from .results import Report
from .safetensors_file import Container, byte_count, changed, identity
from .staging import write_text

_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot", ".tflite")
#: Files that decide how the weights are read.
_DECIDING = (INDEX, TORCH_INDEX, CONFIG, *QUANTIZATION_FILES)


class Companions:
    """The files of a folder that `convert` copies, as they are when this is made.

    Left out: files that declare how the source was quantized, weights in other formats and their indexes, safetensors files at
    the top level (those of the index are converted, others duplicate them), hidden folders, links to folders, broken links,
    and special files. Links that leave the source are not followed: `left` has their names. A download cache's links to its
    own blobs stay within it.

    Raises UnsupportedError where one of `shards`, or a file that decides how they are read, is a link that leaves the source,
    and PermissionError where a file cannot be read.
    """

    def __init__(self, src: Path, shards: list[Path]) -> None:
        self.src, self.left, self._files = src, list[str](), dict[Path, tuple[int, ...]]()
        roots = _roots(src)
        for path in (*shards, *(src / name for name in _DECIDING)):
            if path.is_file() and _leaves(path, roots):
                raise UnsupportedError(
                    f"{path} is a link to {os.path.realpath(path)}, outside of the source; breccia does not follow such links. "
                    "Copy the file into the folder, or give the folder that it is in.",
                    path=str(path),
                )
        self._read = {path: _state(path) for name in _DECIDING if (path := src / name).is_file()}
        for folder, folders, names in walk(src):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            inside = folder.relative_to(src)
            for name in sorted(names):
                path = folder / name
                if not path.is_file() or _is_left_out(inside, name):
                    continue
                if _leaves(path, roots):
                    self.left.append(str(inside / name))
                elif not is_remote(path) and not os.access(path, os.R_OK):
                    raise PermissionError(f"cannot read {path}, which would be copied; change its permissions.")
                else:
                    self._files[path] = _state(path)

    @property
    def deciding(self) -> list[Path]:
        """The files that decide how the weights are read."""
        return list(self._read)

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def copy(self, stage: Path) -> None:
        """Copy the files into another folder."""
        for path in self._files:
            to = stage / path.relative_to(self.src)
            to.parent.mkdir(parents=True, exist_ok=True)
            copy_file(path, to)

    def check_unchanged(self) -> None:
        """Raise CorruptFileError if one of the files was replaced or modified since this was made."""
        for path, state in {**self._files, **self._read}.items():
            if not path.is_file() or _state(path) != state:
                raise changed(path)


def _is_left_out(inside: Path, name: str) -> bool:
    if inside == Path() and name in QUANTIZATION_FILES:
        return True
    weights = (*_OTHER_FORMATS, ".safetensors") if inside == Path() else _OTHER_FORMATS
    return name.lower().removesuffix(".index.json").endswith(weights)


def _state(path: Path) -> tuple[int, ...]:
    return identity(path.stat())


def _roots(src: Path) -> list[Path]:
    """The folders that are the source: itself, and the blobs of a Hugging Face cache that it is a snapshot in."""
    if is_remote(src):
        return [src]
    real = Path(os.path.realpath(src))
    blobs = real.parent.parent / "blobs"
    return [real, blobs] if real.parent.name == "snapshots" and blobs.is_dir() else [real]


def _leaves(path: Path, roots: list[Path]) -> bool:
    return not is_remote(path) and not any(within(path, root) for root in roots)


# ------------------------------------------------------------------------------------------------ the index


def check_index(index: Path, listed: dict[str, str], files_of: dict[str, list[str]]) -> None:
    """Raise CorruptFileError where an index and the files that it lists contradict each other."""
    for name in dict.fromkeys((*listed, *files_of)):
        files = files_of.get(name, [])
        if len(files) > 1:
            wrong = f"is in both {' and '.join(files)}"
        elif name not in listed:
            wrong = f"of {files[0]} is missing from the index"
        elif files != [listed[name]]:
            wrong = f"is in {listed[name]} by the index, but {'in ' + files[0] if files else 'in no file'} in fact"
        else:
            continue
        raise CorruptFileError(
            f"{index}: tensor {name!r} {wrong}; download the checkpoint again, or fix its index.", path=str(index), name=name
        )


def write_index(stage: Path, files: list[Path]) -> None:
    """Write the index of a sharded folder, for the new entries of `files`."""
    entries = {name: (path.name, e.nbytes) for path in files for name, e in Container(path).entries.items()}
    index = {
        "metadata": {"total_size": sum(size for _, size in entries.values())},
        "weight_map": {name: file for name, (file, _) in sorted(entries.items())},
    }
    write_text(stage / INDEX, json.dumps(index, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------ config.json


def write_config(
    path: Path,
    config: dict[str, Any],
    report: Report,
    floating: tuple[str, ...],
    dtype: str,
    dense: str,
    settings: dict[str, Any] | None = None,
) -> None:
    """Replace what a config.json says about the quantization; its other keys keep their values and order.

    floating: dtypes of a file that can be quantized. dtype: the model's in the source. dense: the one that values were decoded
    to, which becomes the model's unless that would make loaders round plain tensors; "" where none were.
    settings: what another library's dialect says of the quantization; None for breccia's own files.
    """
    parts = list(model_configs(config))
    if dense:
        named = [(part, key) for _, part in parts for key in DTYPE_KEYS if part.get(key) is not None]
        plain = {t.stored_as for t in report.kept} & TORCH_NAMES.keys()
        # Loaders of the source already round what is wider than its dtype, or keep it as it is.
        unrounded = [one for one in plain if not named or _width(one) <= _width(dtype)]
        model = TORCH_NAMES[max([dense, *unrounded], key=_width)]
        for part, key in named or [(config, DTYPE_KEYS[0])]:
            if part.get(key) is None or codec_named(part[key]) == dtype:  # parts of other dtypes keep them
                part[key] = model
    for prefix, part in parts:
        part.pop(COMPRESSION, None)
        if isinstance(mlx := part.get("quantization"), dict) and "bits" in mlx:
            del part["quantization"]
        if prefix:
            part.pop(QUANTIZATION, None)
    own = {
        QUANTIZATION: {
            "quant_method": OWN,
            "recipe": next((recipe.to_dict() for recipe in report.used), None),
            "modules_to_not_convert": modules_kept(report.tensors, floating),
        },
        WEIGHTS: REFUSAL,
    }
    stated = (own if report.quantized else {}) if settings is None else settings
    for key in (QUANTIZATION, WEIGHTS):
        if key not in stated:
            config.pop(key, None)
    write_json(path, config | stated)


def _width(dtype: str) -> int:
    return byte_count(dtype, ())
