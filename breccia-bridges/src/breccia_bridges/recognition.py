"""Which dialect stores each value of a checkpoint.

Configs announce dialects; names and dtypes of tensors show them. A checkpoint may mix dialects: each value is recognized by
itself. Only headers are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from breccia import BrecciaError, CorruptFileError, Dialect, DialectError, Layout, ScaledTensor, UnsupportedError
from breccia.backend import Entry, StoredValue, TensorGroup, ValueForm, registry, targets
from breccia.internal import abbreviated, printable

from .announcements import OWN, Announced, announcements
from .safetensors_file import Container, shown
from .text import spelled

#: FP8 dtypes of a file: such a matrix is codes, which need scales.
FP8 = ("F8_E4M3", "F8_E5M2")
#: The key of a file's metadata by which ComfyUI says how layers are quantized, in files without comfy_quant.
_COMFY = "_quantization_metadata"
_PARTIAL = "Give the folder of all shards, or download the checkpoint again."


@dataclass(frozen=True)
class Stored:
    """A value that a dialect stores.

    parts: its tensors by the ends of their names. files: the file of each tensor of the checkpoint.
    config: what announced the dialect, if anything did.
    """

    dialect: Dialect
    group: TensorGroup
    name: str
    parts: Mapping[str, str]
    files: Mapping[str, Container] = field(repr=False, compare=False)
    config: Announced | None = field(default=None, compare=False)

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
        config = self.config.settings if self.config else {}
        if self.dialect.settings is None:
            return config
        module = self.name.removesuffix(".weight")
        settings = self._asked("settings", config, module)
        if settings is None:
            where = self.config.where if self.config else "the config"
            raise CorruptFileError(
                f"{where} leaves {printable(module)} as it is, but the files have {abbreviated(self.parts.values())}. "
                "Download the checkpoint again.",
                name=self.name,
            )
        return settings

    def _read(self, end: str) -> np.ndarray:
        return self.files[self.parts[end]].read(self.parts[end])

    def _view(self, end: str) -> np.ndarray:
        return self.files[self.parts[end]].view(self.parts[end])

    @cached_property
    def form(self) -> ValueForm:
        """What the value is, by headers. Raises DialectError or UnsupportedError, naming the value and the dialect."""
        form = self._asked("form", self.value)
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
        st = self._asked("read", self.value, self.form)
        form = self.form
        if not isinstance(st, ScaledTensor) or st.recipe != form.recipe or tuple(st.shape) != tuple(form.shape):
            raise self._faulty("read", st)
        return st.mT if form.is_transposed else st

    def _asked(self, function: str, *arguments: Any) -> Any:
        try:
            return targets.load(getattr(self.dialect, function))(*arguments)
        except BrecciaError as e:
            kind = type(e) if isinstance(e, DialectError | UnsupportedError | CorruptFileError) else DialectError
            raise kind(f"{self._label}: {e}", **{**e.found, "name": self.name, "dialect": self.dialect.name}) from e
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:  # what a file says that no dialect expects
            raise DialectError(
                f"{self._label}: {type(e).__name__}: {e}. Download the checkpoint again; if that does not help, report the "
                "file.",
                name=self.name,
                dialect=self.dialect.name,
            ) from e

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


def recognized(
    path: Path, containers: Sequence[Container], source_dialect: str | None = None, ours: Collection[str] = ()
) -> dict[str, Stored]:
    """The values of a checkpoint that other programs quantized, by name. ours: tensors that breccia quantized.

    source_dialect: the name of the dialect, where configs and tensors leave a choice, or to ignore what a config says.

    Raises UnknownNameError for a dialect that no plug-in declares; DialectError where two dialects are possible;
    UnsupportedError for one that breccia recognizes only, or where no tensor is what a config announces; CorruptFileError where
    a value lacks a part, or configs and tensors contradict each other.
    """
    announced = [one for one in announcements(path) if one.method != OWN] if path.is_dir() else []
    files = {name: container for container in containers for name in container.entries if name not in ours}
    for container in containers:
        if _COMFY in container.metadata and not any(name.endswith("comfy_quant") for name in container.entries):
            raise UnsupportedError(
                f"{shown(container.path)} is already quantized (ComfyUI): its metadata has {_COMFY}, which breccia does not "
                "read. Convert the checkpoint that it was made from.",
                path=str(container.path),
            )
    given = None
    if source_dialect is not None:
        given = registry().look_up("breccia_dialects", source_dialect, "dialect")
        dialects, own = [given], [one for one in announced if given in one.dialects]
        announced, config = own, own[0] if own else None
    else:
        for one in announced:
            if not one.dialects:
                raise _unknown_settings(one)
        named = {dialect.name: dialect for one in announced for dialect in one.dialects}
        unannounced = {dialect.name: dialect for dialect in registry().dialects.values() if not dialect.configs}
        dialects = list((named | unannounced if named else registry().dialects).values())
        config = announced[0] if announced else None
    _check_one_config(announced)
    claims = _claims(files, dialects, config, bool(announced) or given is not None)
    if given is not None and not claims:
        wanted = " or ".join(" and ".join(repr(end) for end in group.parts) for group in given.groups)
        raise DialectError(
            f"{shown(path)}: no tensors are a value of {given.title}; they end in {wanted}. Leave source_dialect= out, or give "
            "another.",
            dialect=given.name,
        )
    values = {name: _chosen(path, name, own) for name, own in claims.items()}
    taken = {part for value in values.values() if value.dialect.read for part in value.parts.values()}
    refused = [value for value in values.values() if value.dialect.read is None and not taken.issuperset(value.parts.values())]
    if announced and not any(value.dialect.configs for value in values.values()):
        _check_complete(path, files, {}, [dialect for one in announced for dialect in one.dialects])
        _refuse_unseen(path, files, announced)
    readable = {name: value for name, value in values.items() if value.dialect.read}
    if refused:
        if config and not refused[0].dialect.configs:  # a value of the announced dialect may lack a part
            _check_complete(path, files, readable, [dialect for one in announced for dialect in one.dialects])
        raise _refused(path, refused[0], config)
    values = readable
    if announced or given is not None:
        left = {name: file for name, file in files.items() if name not in taken}
        others = [dialect for dialect in registry().dialects.values() if dialect not in dialects]
        for own in _claims(left, others, None, False).values():
            said = [f"{one.where} is {one.method!r}" for one in announced] or [f"source_dialect is {source_dialect!r}"]
            _refuse_other(path, dialects[0].title, said, own[0])
    seen = {value.dialect.name: value.dialect for value in values.values()}
    _check_complete(path, files, values, dialects if config else list(seen.values()))
    return values


def _claims(
    files: Mapping[str, Container], dialects: Sequence[Dialect], config: Announced | None, named: bool
) -> dict[str, list[Stored]]:
    """Every reading of every value, by name. named: whether a config or the caller names these dialects."""
    claims: dict[str, list[Stored]] = {}
    for dialect in dialects:
        for group in (group for group in dialect.groups if named or not group.needs_config):
            for stem in _stems(files, group):
                parts = _parts(files, group, stem)
                name = group.named(stem)
                if parts is not None and name is not None:
                    stored = Stored(dialect, group, name, parts, files, config)
                    claims.setdefault(stored.name, []).append(stored)
    return claims


def _stems(files: Mapping[str, Container], group: TensorGroup) -> Iterator[str]:
    """The beginnings of names that end as the first part of a group does."""
    first = next(iter(group.parts))
    boundary = "" if first == "" or first[0] in "._" else "."
    for name in files:
        if name.endswith(first):
            stem = name.removesuffix(first)
            if (not stem or not boundary or stem.endswith(boundary)) and group.named(stem) is not None:
                yield stem


def _parts(files: Mapping[str, Container], group: TensorGroup, stem: str) -> dict[str, str] | None:
    """The tensors of a value by the ends of their names; None unless all needed ones are there, of their dtypes."""
    parts: dict[str, str] = {}
    for end, dtypes in {**group.parts, **group.optional}.items():
        name = stem + end
        fits = name in files and (not dtypes or files[name].entries[name].dtype in dtypes)
        if fits:
            parts[end] = name
        elif end in group.parts:
            return None
    return parts


def _chosen(path: Path, name: str, claims: list[Stored]) -> Stored:
    """The reading of a value: the one that explains the most tensors. Raises DialectError where two are left."""
    readable = [claim for claim in claims if claim.dialect.read or claim.dialect.configs]
    claims = readable or claims
    tensors = [set(claim.parts.values()) for claim in claims]
    best = [claim for claim, own in zip(claims, tensors, strict=True) if not any(own < other for other in tensors)]
    keys = [(claim.dialect.read, claim.dialect.form, frozenset(claim.parts.values())) for claim in best]
    readings = list({key: claim for key, claim in zip(reversed(keys), reversed(best), strict=True)}.values())
    if len(readings) > 1:
        refusals = [(claim, _refusal_of(claim)) for claim in reversed(readings)]
        readings = [claim for claim, refusal in refusals if refusal is None]
        if not readings:
            said = dict[str | None, str]((claim.dialect.form, str(refusal)) for claim, refusal in reversed(refusals))
            raise DialectError(f"{shown(path)}: no dialect fits. {' '.join(reversed(said.values()))}", name=name)
    if len(readings) > 1:
        both = " and ".join(f"{claim.dialect.title} ({claim.dialect.name!r})" for claim in readings)
        raise DialectError(
            f"{shown(path)}: {printable(name)} has two readings, as {both}, and no config says which. Give source_dialect= (on "
            "the command line --from) with one of the two names.",
            name=name,
            dialects=[claim.dialect.name for claim in readings],
        )
    return readings[0]


def _refusal_of(claim: Stored) -> DialectError | CorruptFileError | None:
    """Why a reading is impossible; None where it is possible, or known and without a recipe."""
    if claim.dialect.read is not None:
        try:
            _ = claim.form
        except UnsupportedError:
            return None
        except (DialectError, CorruptFileError) as e:
            return e
    return None


def _refused(path: Path, value: Stored, config: Announced | None) -> UnsupportedError:
    seen = [f"{config.where} is {config.method!r}"] if config else []
    seen.append(", ".join(f"{printable(part)} is {value.files[part].entries[part].dtype}" for part in value.parts.values()))
    return UnsupportedError(
        f"{shown(path)} is already quantized ({value.dialect.title}): {'; '.join(seen)}; codes and scales are not values. "
        f"{value.dialect.remedy}",
        path=str(path),
        format=value.dialect.title,
    )


def _unknown_settings(one: Announced) -> UnsupportedError:
    """The error for a config whose `quant_method` is known, and whose other settings are not."""
    dialects = [dialect for dialect in registry().dialects.values() if one.method in dialect.methods]
    keys = dict.fromkeys(key for dialect in dialects for wanted in dialect.configs for key in wanted if key != "quant_method")
    found = ", ".join(f"{key} {one.settings.get(key)!r}" for key in keys)
    known = ", ".join(f"{dialect.title} ({dialect.name!r})" for dialect in dialects)
    return UnsupportedError(
        f"{one.where} is {one.method!r} with {found}, which no dialect has; known: {known}. Give source_dialect= (on the "
        "command line --from) if it is one of them.",
        where=one.where,
        quant_method=one.method,
    )


def _refuse_unseen(path: Path, files: Mapping[str, Container], announced: Sequence[Announced]) -> None:
    """Raise the error for configs that announce what no tensor shows."""
    wheres = " and ".join(one.where for one in announced)
    dialects = [dialect for one in announced for dialect in one.dialects]
    title, method = dialects[0].title, announced[0].method
    coded = [name for name, file in files.items() if is_coded(file.entries[name])]
    refused = [dialect for dialect in dialects if dialect.read is None]
    for own in _claims(files, list(registry().dialects.values()), None, False).values():
        _refuse_other(path, title, [f"{one.where} is {one.method!r}" for one in announced], own[0])
    if coded:
        remedy = refused[0].remedy if refused else f"no tensor has the parts of {title}. {_PARTIAL}"
        raise UnsupportedError(
            f"{shown(path)} is already quantized ({title}): {wheres} is {method!r}; {abbreviated(coded)} "
            f"{'is' if len(coded) == 1 else 'are'} codes; {remedy}",
            path=str(path),
            format=title,
        )
    raise UnsupportedError(
        f"{shown(path)} is already quantized ({title}): {wheres} is {method!r}; but no tensor is quantized. Remove {wheres}, "
        "or download it again.",
        path=str(path),
        format=title,
    )


def _check_one_config(announced: Sequence[Announced]) -> None:
    """Raise UnsupportedError where parts of a composite model have settings of their own: each value would need its part's."""
    inside = [one for one in announced if ": " in one.where]
    for one in inside[1:]:
        if one.settings != inside[0].settings:
            raise UnsupportedError(
                f"{inside[0].where} and {one.where} have other settings; breccia reads a checkpoint whose parts are quantized "
                "in one way. Save the parts as checkpoints of their own.",
                where=one.where,
            )


def _refuse_other(path: Path, title: str, said: Sequence[str], claim: Stored) -> None:
    """Raise the error for tensors of another dialect than the announced one. said: by what it is announced."""
    parts = ", ".join(f"{printable(part)} is {claim.files[part].entries[part].dtype}" for part in claim.parts.values())
    raise UnsupportedError(
        f"{shown(path)} is already quantized ({title}, and its tensors look like {claim.dialect.title}): {'; '.join(said)}; "
        f"{parts}; codes and scales are not values. Give source_dialect= (on the command line --from) if the config is wrong, "
        "or download the checkpoint again.",
        path=str(path),
        format=title,
    )


def is_coded(entry: Any) -> bool:
    """Does its dtype, and that it has two axes or more, mark a tensor as codes?"""
    return len(entry.shape) > 1 and entry.dtype in (*FP8, "I8", "U8", "I16", "I32", "U32", "F4", "F6_E2M3", "F6_E3M2")


def _check_complete(
    path: Path, files: Mapping[str, Container], values: Mapping[str, Stored], dialects: Sequence[Dialect]
) -> None:
    """Raise CorruptFileError for a part whose value lacks others, and FP8 codes without a scale."""
    taken = {part for value in values.values() for part in value.parts.values()}
    readable = [dialect for dialect in dialects if dialect.read is not None]
    for dialect in readable:
        for group in dialect.groups:
            for stem in _stems(files, group):
                first, dtypes = stem + next(iter(group.parts)), next(iter(group.parts.values()))
                if first not in taken and (not dtypes or files[first].entries[first].dtype in dtypes):
                    raise CorruptFileError(f"{shown(path)}: {_wrong(files, dialect, group, stem)}", path=str(path), name=first)
            if dialect.configs:
                _check_other_parts(path, files, taken, dialect, group)
    if not dialects:
        return
    for name, file in files.items():
        entry = file.entries[name]
        if name not in taken and entry.dtype in FP8 and len(entry.shape) > 1 and (wrong := _scale_of(files, name, readable)):
            raise CorruptFileError(
                f"{shown(path)}: {name!r} is {entry.dtype} without a scale: {wrong}. {_PARTIAL}",
                path=str(path),
                name=name,
            )


def _check_other_parts(
    path: Path, files: Mapping[str, Container], taken: Collection[str], dialect: Dialect, group: TensorGroup
) -> None:
    """Raise CorruptFileError for another part of a value whose first part is missing, by ends that no plain tensor has."""
    first, *others = group.parts
    for end in (end for end in others if end not in _COMMON):
        for name, file in files.items():
            stem = name.removesuffix(end)
            if name in taken or not name.endswith(end) or stem + first in files or group.named(stem) is None:
                continue
            dtypes = group.parts[end]
            at_boundary = not stem or stem[-1] in "._" or end[0] in "._"
            if at_boundary and (not dtypes or file.entries[name].dtype in dtypes):
                raise CorruptFileError(
                    f"{shown(path)}: {name!r} is a part of {dialect.title} without the others: no file has {stem + first!r}. "
                    f"{_PARTIAL}",
                    path=str(path),
                    name=name,
                )


#: Ends of names that plain tensors have too.
_COMMON = ("", "weight", "scale")


def _wrong(files: Mapping[str, Container], dialect: Dialect, group: TensorGroup, stem: str) -> str:
    """What a value lacks of whose parts only the first one is there."""
    first = stem + next(iter(group.parts))
    for end, dtypes in group.parts.items():
        name = stem + end
        if name not in files:
            return f"{first!r} is a part of {dialect.title} without the others: no file has {name!r}. {_PARTIAL}"
        dtype = files[name].entries[name].dtype
        if dtypes and dtype not in dtypes:
            return f"{name!r} is {dtype}; {dialect.title} has {' or '.join(dtypes)} there. Download the checkpoint again."
    shape = files[first].entries[first].shape
    return f"{first!r} of shape {spelled(shape)} belongs to no value."


def _scale_of(files: Mapping[str, Container], name: str, dialects: Sequence[Dialect]) -> str:
    """What is wrong about the scale of FP8 codes: no file has it, or it has another dtype. Empty if no dialect has them."""
    names: list[str] = []
    for group in (group for dialect in dialects for group in dialect.groups):
        first, dtypes = next(iter(group.parts.items()))
        for end, allowed in list(group.parts.items())[1:]:
            scale = name.removesuffix(end) + first
            if name.endswith(end) and (not allowed or files[name].entries[name].dtype in allowed):
                if scale in files:
                    return f"{scale!r} is {files[scale].entries[scale].dtype}, not {' or '.join(dtypes)}"
                names.append(scale)
    return f"no file has {' or '.join(map(repr, dict.fromkeys(names)))}" if names else ""
