"""GGUF files as containers of tensors, under the names and in the order of rows that transformers has.

Tensors are memory-mapped and read on access, as those of safetensors files. A tensor of blocks is its bytes, a row of blocks
for a row of elements, and its dtype is the name of its type in GGUF ("Q4_K"). Types that have no codes of elements are decoded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from breccia import CorruptFileError, UnsupportedError
from breccia.internal import abbreviated

from .gguf_header import Header, TensorInfo, read_header
from .gguf_names import FROM_CONFIG, Placed, alternated, placed, whole, why_unmapped
from .gguf_types import DECODED, TRANSPOSED
from .remote_path import path_of
from .safetensors_file import DTYPES, FETCH, Container, Entry, identity, need_little_endian, read, regular, shown

#: The names of the parts of a model that llama.cpp has split.
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class GGUFFile(Container):
    """A GGUF file, opened and checked. One part of a split model has the tensors of that part.

    header: what the file says. placed: where each of `entries` is. metadata: which values are transposed. joins: as `placed`
        takes it.

    Raises what `read_header` raises; CorruptFileError where the part of a split model is another one than its name says, or its
    first part is missing; OSError where the file cannot be opened.
    """

    header: Header
    placed: Mapping[str, Placed]
    joins: ClassVar[bool] = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        need_little_endian()
        self.path = path_of(path)
        with regular(self.path) as (file, status):
            self._identity = identity(status)
            self.header = read_header(self.path, file, status.st_size)
        self._data_start, self._map = 0, None
        keys = self._model_header().keys
        #: The parts that have the second ones of two tensors, by the names of these.
        self._others: dict[str, GGUFFile] = {}
        self.placed = placed(self.path, self.header, keys, self._elsewhere, joins=self.joins)
        self.metadata = {name: TRANSPOSED for name, one in self.placed.items() if one.is_transposed and one.is_coded}
        self.entries = {name: _entry(one) for name, one in self.placed.items()}
        self.unmapped = why_unmapped(keys)
        self.has_model_shapes = not self.unmapped
        self.left_out = [] if self.unmapped else [name for name in self.header.tensors if name in FROM_CONFIG]
        self.decoded = {name: one.info.type.name for name, one in self.placed.items() if one.info.type.name in DECODED}

    def view(self, name: str) -> np.ndarray:
        """The tensor, mapped; in memory where its rows have another order, or its values are computed.

        One of blocks that is transposed in transformers has the rows of the file.

        Raises UnsupportedError for a type that is decoded, without the library that has its tables.
        """
        self.entry(name)
        one = self.placed[name]
        kind, array = one.info.type, self.stored(one)
        if one.second is not None:
            other = self._others.get(one.second.name, self)
            array = alternated(read(array), read(other.stored(whole(one.second))))
        if one.change is not None:
            array = one.change(read(array))
        if kind.name in DECODED:
            from .gguf_codebooks import decoded

            array = decoded(self.path, name, kind.name, read(array))
        if one.is_transposed and not one.is_coded:
            array = np.ascontiguousarray(read(array).swapaxes(-1, -2))
        return array

    def stored(self, one: Placed) -> np.ndarray:
        """The array of a tensor as it is in the file, mapped."""
        kind = one.info.type
        dtype = DTYPES[kind.dtype][1] if kind.dtype else "uint8"
        return np.ndarray(one.stored_bytes, dtype, buffer=self._mapped(), offset=one.start)

    def as_stored(self) -> GGUFTensors:
        """The file with its tensors as they are, neither transposed nor joined."""
        return GGUFTensors(self.path)

    def _elsewhere(self, name: str) -> TensorInfo | None:
        """A tensor of another part of the model."""
        for path in parts_of(self.path):
            if path != self.path and name in (other := GGUFTensors(path)).header.tensors:
                self._others[name] = other
                return other.header.tensors[name]
        return None

    def _model_header(self) -> Header:
        """The header that describes the model: that of the first part, of which `self.header` is one."""
        part = PART.fullmatch(self.path.name)
        count, number = self.header.number("split.count", 1), self.header.number("split.no")
        said = (int(part[2]), int(part[3])) if part else (1, 1)
        if (number + 1, count) != said and (count > 1 or part):
            raise CorruptFileError(
                f"{shown(self.path)} is part {number + 1} of {count} of a model by its header, and {said[0]} of {said[1]} by "
                "its name. Give the parts the names under which they were written.",
                path=str(self.path),
            )
        if number == 0:
            return self.header
        first = parts_of(self.path)[0]
        with regular(first) as (file, status):
            return read_header(first, file, status.st_size)


class GGUFTensors(GGUFFile):
    """A GGUF file with its tensors as they are: those that transformers has transposed, or joins, keep their names."""

    joins: ClassVar[bool] = False


def parts_of(path: Path) -> list[Path]:
    """The files of the model that a GGUF file is a part of: itself alone, unless its name says that the model was split.

    Raises CorruptFileError, naming them, where parts are missing.
    """
    part = PART.fullmatch(path.name)
    if part is None:
        return [path]
    count = int(part[3])
    if not 0 < int(part[2]) <= count:
        raise CorruptFileError(f"{shown(path)} is no part of a model: there is no part {part[2]} of {part[3]}. {FETCH}")
    names = {other.name for other in path.parent.iterdir() if other.name.startswith(part[1])}
    parts = [f"{part[1]}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
    missing = [name for name in parts if name not in names or not (path.parent / name).is_file()]
    if missing:
        raise CorruptFileError(
            f"{shown(path)} is a part of a model in {count} files, of which {abbreviated(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing. Download them into the same folder.",
            path=str(path),
            missing=missing,
        )
    return [path.parent / name for name in parts]


def gguf_files(folder: Path) -> list[Path]:
    """The files of the one model in GGUF that a folder has; [] if it has none. Raises UnsupportedError for several."""
    files = sorted(path for path in folder.iterdir() if path.suffix == ".gguf" and not path.name.startswith("."))
    models: dict[str, Path] = {}
    for file in files:
        part = PART.fullmatch(file.name)
        models.setdefault(f"{part[1]} in {part[3]}" if part else file.name, file)
    if len(models) > 1:
        raise UnsupportedError(
            f"folder {shown(folder)} contains {len(models)} GGUF models: "
            f"{abbreviated(file.name for file in models.values())}; give the path of one.",
            path=str(folder),
            files=[file.name for file in models.values()],
        )
    return parts_of(next(iter(models.values()))) if models else []


def check_parts(files: list[GGUFFile]) -> None:
    """Raise CorruptFileError where the parts of a split model have more or fewer tensors than it should have."""
    found = sum(len(file.header.tensors) for file in files)
    total = files[0].header.number("split.tensors.count", found) if len(files) > 1 else found
    if total != found:
        raise CorruptFileError(
            f"{shown(files[0].path)} says that the model has {total} tensors; its parts have {found}. {FETCH}",
            path=str(files[0].path),
        )


def _entry(one: Placed) -> Entry:
    kind = one.info.type
    dtype = kind.dtype or ("F32" if kind.name in DECODED else kind.name)
    shape = one.shape
    if one.is_transposed and one.is_coded:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return Entry(dtype, shape, one.start, one.start + one.nbytes)
