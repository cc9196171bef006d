"""The values of a checkpoint under the model's names: plain tensors, breccia's own, and those that other programs quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from breccia import CorruptFileError, Layout, ScaledTensor, ScalingRecipe
from breccia.backend import BF16, components
from breccia.internal import abbreviated, with_parts

from .announcements import dtype_of
from .checkpoint import all_opened, checkpoint_files
from .configs import FILE_PARTS, Config, Undeclared
from .measure import FLOATING, FileTensor, RowsOfFile
from .recognition import recognized
from .safetensors import joined, named_tensors, view_tensor
from .safetensors_file import Container, Shape, read, shown
from .stored import Stored


@dataclass(frozen=True)
class Value:
    """One value of a checkpoint.

    files: the file of each of its tensors, by their names there. config: of a tensor that breccia quantized; `undeclared`, if
    no installed plug-in declares its recipe. stored: of one that another program quantized.
    """

    name: str
    files: Mapping[str, Container]
    config: Config | None = None
    undeclared: Undeclared | None = None
    stored: Stored | None = None

    @property
    def container(self) -> Container:
        """The file of its largest tensor."""
        return self.files[self.largest]

    @property
    def largest(self) -> str:
        """The name of its largest tensor."""
        if len(self.files) == 1:
            return next(iter(self.files))
        return max(self.files, key=lambda part: self.files[part].entries[part].nbytes)

    @property
    def file(self) -> str:
        """The name of its file; several where a checkpoint was cut between its tensors."""
        return ", ".join(dict.fromkeys(file.file_of(part).name for part, file in self.files.items()))

    @property
    def nbytes(self) -> int:
        return sum(file.entries[part].nbytes for part, file in self.files.items())

    @property
    def shape(self) -> Shape:
        """The logical shape; the shape of the codes if no installed recipe declares their packing."""
        if self.stored is not None:
            return self.stored.shape
        if self.undeclared is not None:
            entry = self.container.entries.get(f"{self.name}.data")
            return self.undeclared.shape or (entry.shape if entry else ())
        if self.config is None:
            return self.container.entries[self.name].shape
        return self.config.shape or self.container.entries[f"{self.name}.data"].shape

    @property
    def recipe(self) -> ScalingRecipe | None:
        """The recipe of a scaled value; None for a plain tensor and an undeclared recipe."""
        if self.stored is not None:
            return self.stored.form.recipe
        return self.config.recipe if self.config else None

    @property
    def layout(self) -> Layout:
        """The layout of a scaled value."""
        if self.stored is not None:
            return self.stored.layout
        if self.config is None:
            raise ValueError(f"{self.name} is not scaled")
        return self.config.layout

    @property
    def axis(self) -> int:
        """The contraction axis of a scaled value."""
        if self.stored is not None:
            return self.stored.axis
        return self.config.axis if self.config else -1

    @property
    def stored_as(self) -> str:
        """A recipe's name, or a dtype of the file."""
        if self.undeclared is not None:
            return self.undeclared.recipe
        recipe = self.recipe
        return recipe.name if recipe else self.container.entries[self.name].dtype

    @property
    def is_scaled(self) -> bool:
        """Has it codes and scales that can be decoded?"""
        return self.config is not None or self.stored is not None

    @property
    def is_readable(self) -> bool:
        """Can its values be read as floats?"""
        return self.is_scaled or self.stored_as in FLOATING

    def tensor(self) -> ScaledTensor:
        """A scaled value; components are views that `safetensors_file.read` reads, where they are stored as they are."""
        if self.stored is not None:
            return self.stored.tensor()
        if self.config is None:
            raise ValueError(f"{self.name} is not scaled")
        return view_tensor(self.container, self.name, self.config)

    def loaded(self) -> ScaledTensor:
        """A scaled value, read into memory."""
        st = self.tensor()
        return with_parts(st, {name: read(part) for name, part in components(st).items()})

    def numbers(self) -> FileTensor:
        """Its values as floats, by slabs."""
        if self.stored is not None and (rows := self.stored.rows()) is not None:
            return RowsOfFile(self.stored.form.recipe, self.shape, rows)
        if self.is_scaled:
            return FileTensor(self.tensor())
        entry = self.container.entries[self.name]
        return FileTensor(self.container.view(self.name).reshape(entry.shape), entry.dtype)

    def plain(self) -> np.ndarray:
        """The bytes of a plain tensor, mapped."""
        return self.container.view(self.name)


@dataclass(frozen=True)
class Source:
    """A checkpoint: its files, and its values by name. dtype: that of the model's other weights, as a file names it."""

    path: Path
    files: tuple[Container, ...]
    values: Mapping[str, Value]
    dtype: str

    @classmethod
    def open(cls, path: Path, source_dialect: str | None = None, *, undeclared: bool = False) -> Source:
        """Read the headers and configs of a file or folder.

        source_dialect: as in `recognized`. undeclared: also list values whose recipe no installed plug-in declares.
        Raises as `checkpoint_files`, `named_tensors` and `recognized` do.
        """
        return cls.of(path, all_opened(checkpoint_files(path)), source_dialect, undeclared=undeclared)

    @classmethod
    def of(
        cls, path: Path, files: list[Container], source_dialect: str | None = None, *, undeclared: bool = False,
        foreign: bool = True,
    ) -> Source:  # fmt: skip
        """The checkpoint of opened files. foreign: whether to look for what other programs quantized."""
        containers = joined(path, files)
        unknown: dict[str, Undeclared] = {}
        listed = named_tensors(path, containers, unknown if undeclared else None)
        own = {name: _own(name, file, config, unknown.get(name)) for name, (file, config) in listed.items()}
        ours = {part for value in own.values() if value.config or value.undeclared for part in value.files}
        values: dict[str, Value] = {}
        recognizable = recognized(path, containers, source_dialect, ours) if foreign else {}
        owners = {part: stored for stored in recognizable.values() for part in stored.parts.values()}
        for stored in recognizable.values():
            if stored.name in own and stored.name not in stored.parts.values():
                parts = abbreviated(stored.parts.values())
                raise CorruptFileError(
                    f"{shown(path)} has the tensor {stored.name!r}, and a quantized value of this name "
                    f"({stored.dialect.title}: {parts}). Keep one of the two.",
                    name=stored.name,
                )
        for name, value in own.items():
            stored = owners.get(name)
            if stored is None:
                values[name] = value
            elif stored.name not in values:
                values[stored.name] = Value(stored.name, {p: stored.files[p] for p in stored.parts.values()}, stored=stored)
        is_of_config = path.is_dir() or any(value.is_scaled for value in values.values())
        return cls(path, tuple(files), values, dtype_of(path) if is_of_config else BF16.name)

    def check_unchanged(self) -> None:
        """Raise CorruptFileError if a file was replaced or modified since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def by_file(self) -> dict[Path, list[str]]:
        """The names of values by the file of their largest tensor."""
        names: dict[Path, list[str]] = {}
        for name, value in self.values.items():
            names.setdefault(value.container.file_of(value.largest), []).append(name)
        return names


def _own(name: str, file: Container, config: Config | None, undeclared: Undeclared | None) -> Value:
    if config is None and undeclared is None:
        return Value(name, {name: file})
    parts = [part for suffix in FILE_PARTS if (part := f"{name}.{suffix}") in file.entries]
    return Value(name, dict.fromkeys(parts, file), config, undeclared)
