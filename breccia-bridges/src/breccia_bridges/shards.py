"""The files of a folder as one container."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import CorruptFileError

from .safetensors_file import Container, shown


class Shards(Container):
    """The files of a folder as one container: components of a scaled tensor may be in different files.

    Raises CorruptFileError where two files hold a tensor of the same name, or other configs of one.
    """

    def __init__(self, path: Path, files: Sequence[Container]) -> None:
        self.path, self.metadata, self.entries = path, {}, {}
        self._files: dict[str, Container] = {}
        told: dict[str, Path] = {}
        for file in files:
            for key, text in file.metadata.items():
                if key.endswith(".config") and self.metadata.get(key, text) != text:
                    both = f"{shown(told[key].name)} and {shown(file.path.name)}"
                    raise CorruptFileError(
                        f"{shown(path)}: {both} have different metadata {short(key)}, so that they are of different "
                        "checkpoints. Download the folder again.",
                        path=str(path),
                        key=key,
                    )
                self.metadata[key], told[key] = text, file.path
            for name, entry in file.entries.items():
                if name in self.entries:
                    raise in_both(name, path, self._files[name].path, file.path)
                self.entries[name], self._files[name] = entry, file

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self.path, list({id(file): file for file in self._files.values()}.values()))

    def file_of(self, name: str) -> Path:
        return self._files[name].path

    def view(self, name: str) -> np.ndarray:
        self.entry(name)
        return self._files[name].view(name)

    def check_unchanged(self) -> None:
        for file in {id(file): file for file in self._files.values()}.values():
            file.check_unchanged()


def in_both(name: str, path: Path, *files: Path) -> CorruptFileError:
    """The error for a tensor that two files of the folder `path` hold."""
    both = " and ".join(shown(file.name) for file in files)
    return CorruptFileError(
        f"tensor {name!r} is in both {both} of {shown(path)}; pass one file or download the folder again.",
        name=name,
    )
