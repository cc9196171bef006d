"""A value of a checkpoint as a dialect stores it: its tensors, what they are, and the ScaledTensor that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import BrecciaError, CorruptFileError, Dialect, DialectError, Layout, ScaledTensor, UnsupportedError
from breccia.backend import Entry, SettingsOf, StoredValue, TensorGroup, ValueForm, targets
from breccia.internal import abbreviated, printable

from .announcements import Announced
from .safetensors_file import Container, shown


@dataclass(frozen=True)
class Stored:
    """A value that a dialect stores.

    parts: its tensors by the ends of their names. files: the file of each tensor of the checkpoint.
    config: what announced the dialect, if anything did. settings_of: its settings of each module.
    """

    dialect: Dialect
    group: TensorGroup
    name: str
    parts: Mapping[str, str]
    files: Mapping[str, Container] = field(repr=False, compare=False)
    config: Announced | None = field(compare=False)
    settings_of: SettingsOf = field(repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what is computed of the fields, which may be functions of a dialect."""
        return Stored, tuple(getattr(self, one.name) for one in fields(self))

    @property
    def spelled(self) -> str:
        """Its tensors with their dtypes, for messages."""
        return ", ".join(f"{printable(part)} is {self.files[part].entries[part].dtype}" for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        return sum(self.files[part].entries[part].nbytes for part in self.parts.values())

    @cached_property
    def value(self) -> StoredValue:
        entries = {end: self._entry(part) for end, part in self.parts.items()}
        return StoredValue(self.name, entries, self._settings, self._read, self._view, self._first_file.metadata)

    def _entry(self, part: str) -> Entry:
        entry = self.files[part].entries[part]
        return Entry(entry.dtype, entry.shape)

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        module = self.name.removesuffix(".weight")
        settings = self._asked(lambda: self.settings_of(module))
        if settings is None:
            where = self.config.where if self.config else "the config"
            raise CorruptFileError(
                f"{where} leaves {printable(module)} as it is, but the files have {abbreviated(self.parts.values())}. "
                "Download the checkpoint again.",
                name=self.name,
            )
        if not isinstance(settings, Mapping):
            raise self.refusal(f"its settings are {short(settings)}, not an object. Download the checkpoint again.")
        return settings

    def _read(self, end: str) -> np.ndarray:
        return self.files[self.parts[end]].read(self.parts[end])

    def _view(self, end: str) -> np.ndarray:
        return self.files[self.parts[end]].view(self.parts[end])

    @cached_property
    def form(self) -> ValueForm:
        """What the value is, by headers. Raises DialectError or UnsupportedError, naming the value and the dialect."""
        value = self.value
        form = self._asked(lambda: targets.load(self.dialect.form or "")(value))
        if not isinstance(form, ValueForm):
            raise self._faulty("form", form)
        return form

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the model."""
        *lead, m, k = self.form.shape if len(self.form.shape) > 1 else (1, *self.form.shape)
        return (*lead, k, m) if self.form.is_transposed else self.form.shape

    @property
    def reading(self) -> tuple[Any, ...]:
        """What gives the same bytes the same values: the dialect, the form, and the settings."""
        return self.dialect.name, self.form, dict(self.value.settings), self.value.metadata.get(self.name)

    @property
    def layout(self) -> Layout:
        """The layout in the model."""
        layout = self.form.fitted_layout
        return layout.mT if self.form.is_transposed else layout

    @property
    def axis(self) -> int:
        """The contraction axis in the model."""
        return -2 if self.form.is_transposed else -1

    def tensor(self) -> ScaledTensor:
        """The value. Its components are new arrays, or views that `safetensors_file.read` reads."""
        value, form = self.value, self.form
        st = self._asked(lambda: targets.load(self.dialect.read or "")(value, form))
        if not isinstance(st, ScaledTensor) or st.recipe != form.recipe or tuple(st.shape) != tuple(form.shape):
            raise self._faulty("read", st)
        return st.mT if form.is_transposed else st

    def rows(self) -> Callable[[slice], ScaledTensor] | None:
        """What reads some rows of the value, counted through all its matrices, as a matrix; None where it is read whole."""
        if self.dialect.rows is None or self.form.is_transposed:
            return None
        if self.form.recipe.format.element.bits * self.form.shape[-1] % 8:  # a tensor of padded rows says more than its shape
            return None
        value, form = self.value, self.form
        read = self._asked(lambda: targets.load(self.dialect.rows or "")(value, form))
        return None if read is None else lambda rows: self._asked(lambda: read(rows))

    def _asked(self, function: Callable[[], Any]) -> Any:
        """What a function of the dialect returns; its errors name the value."""
        try:
            return function()
        except BrecciaError as e:
            kind = type(e) if isinstance(e, DialectError | UnsupportedError | CorruptFileError) else DialectError
            raise kind(f"{self._label}: {e}", **{**e.found, "name": self.name, "dialect": self.dialect.name}) from e
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:  # what a file says that no dialect expects
            raise self.refusal(
                f"{type(e).__name__}: {e}. Download the checkpoint again; if that does not help, report the file."
            ) from e

    def refusal(self, wrong: str) -> DialectError:
        """The error that says what is wrong about the value."""
        return DialectError(f"{self._label}: {wrong}", name=self.name, dialect=self.dialect.name)

    @property
    def _first_file(self) -> Container:
        """The file of its first part."""
        return self.files[next(iter(self.parts.values()))]

    @property
    def _label(self) -> str:
        """The file, the value and the dialect, for messages."""
        return f"{shown(self._first_file.path)}: {printable(self.name)} ({self.dialect.title})"

    def _faulty(self, function: str, value: Any) -> BrecciaError:
        return DialectError(
            f"{printable(self.name)}: {function} of the dialect {self.dialect.name!r}, of plug-in {self.dialect.plugin!r}, "
            f"returned {value!r}, which is not what it declares. Report it to the plug-in's author.",
            name=self.name,
            dialect=self.dialect.name,
        )


@dataclass(frozen=True)
class ModuleSettings:
    """The settings of modules by a config, which is read once, when the first ones are asked for."""

    dialect: Dialect
    config: Announced | None

    def __call__(self, module: str) -> Mapping[str, Any] | None:
        known = self._read
        if isinstance(known, Exception):
            raise known.with_traceback(None)
        return known(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleSettings, (self.dialect, self.config)

    @cached_property
    def _read(self) -> SettingsOf | Exception:
        settings: Mapping[str, Any] = self.config.settings if self.config else {}
        try:
            return targets.load(self.dialect.settings)(settings) if self.dialect.settings else lambda module: settings
        except Exception as e:  # the error of every value
            return e
