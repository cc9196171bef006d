"""Which dialect stores each value of a checkpoint.

Configs announce dialects; names and dtypes of tensors show them. Each value is recognized by itself, so that a checkpoint may
mix dialects that no config contradicts. Only headers are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from breccia import BrecciaError, CorruptFileError, Dialect, DialectError, UnsupportedError
from breccia.backend import TensorGroup, registry
from breccia.internal import printable

from .announcements import OWN, Announced, announcements, folder_of
from .completeness import check_complete, check_variants, stems_of
from .refusals import check_one_config, nothing_seen, of_another_dialect, recognized_only, refuse_described, unknown_settings
from .safetensors_file import Container, shown
from .stored import ModuleSettings, Stored


def recognized(
    path: Path, containers: Sequence[Container], source_dialect: str | None = None, ours: Collection[str] = ()
) -> dict[str, Stored]:
    """The values of a checkpoint that other programs quantized, by name. ours: tensors that breccia quantized.

    source_dialect: the name of the dialect, where configs and tensors leave a choice, or to ignore what a config says.

    Raises UnknownNameError for a dialect that no plug-in declares; DialectError where two dialects are possible;
    UnsupportedError for one that breccia recognizes only, or where no tensor is what a config announces; CorruptFileError where
    a value lacks a part, or configs and tensors contradict each other.
    """
    refuse_described(containers)
    files = {name: container for container in containers for name in container.entries if name not in ours}
    expected = _expected(path, files, source_dialect)
    claims = _claims(files, expected.dialects, expected.config, expected.is_named)
    if expected.asked is not None and not claims:
        raise _nothing_of(path, expected.asked)
    chosen = {name: _chosen(path, name, own) for name, own in claims.items()}
    values = {name: value for name, value in chosen.items() if value.dialect.read}
    taken = {part for value in values.values() for part in value.parts.values()}
    if expected.is_named:
        left = {name: file for name, file in files.items() if name not in taken}
        others = [dialect for dialect in registry().dialects.values() if dialect not in expected.dialects]
        for own in _claims(left, others).values():
            raise of_another_dialect(path, expected.dialects[0].title, expected.said, own[0])
    seen = {value.dialect.name: value.dialect for value in values.values()}
    check_complete(path, files, values, expected.dialects if expected.config else list(seen.values()))
    if expected.announced and not any(value.dialect.configs for value in chosen.values()):
        for own in _claims(files, registry().dialects.values()).values():
            raise of_another_dialect(path, expected.dialects[0].title, expected.said, own[0])
        raise nothing_seen(path, files, expected.announced)
    for value in chosen.values():
        if value.dialect.read is None and not taken.issuperset(value.parts.values()):
            raise recognized_only(path, value, expected.config)
    check_variants(files, values)
    return values


@dataclass(frozen=True)
class _Expected:
    """The dialects that a checkpoint may have: those that its configs announce, or the one that the caller names; else all."""

    dialects: Sequence[Dialect]
    announced: Sequence[Announced]
    asked: Dialect | None = None

    @property
    def config(self) -> Announced | None:
        return self.announced[0] if self.announced else None

    @property
    def is_named(self) -> bool:
        return bool(self.announced) or self.asked is not None

    @property
    def said(self) -> list[str]:
        """What names the dialects, for messages."""
        asked = [f"source_dialect is {self.asked.name!r}"] if self.asked else []
        return [f"{one.where} is {one.method!r}" for one in self.announced] or asked


def _expected(path: Path, files: Mapping[str, Container], source_dialect: str | None) -> _Expected:
    """Raises UnsupportedError for configs with settings that no dialect has, and for parts with settings of their own."""
    announced = _announced(path, files)
    if source_dialect is not None:
        asked = registry().look_up("breccia_dialects", source_dialect, "dialect")
        expected = _Expected([asked], [one for one in announced if asked in one.dialects], asked)
    else:
        for one in announced:
            if not one.dialects:
                raise unknown_settings(one)
        every = registry().dialects
        named = {dialect.name: dialect for one in announced for dialect in one.dialects}
        unannounced = {dialect.name: dialect for dialect in every.values() if not dialect.configs}
        expected = _Expected(list((named | unannounced if named else every).values()), announced)
    check_one_config(expected.announced)
    return expected


def _announced(path: Path, files: Mapping[str, Container]) -> list[Announced]:
    """What configs announce of other programs; those beside a file are about it only if it has tensors that these quantized."""

    def are_about_it() -> bool:
        return path.is_dir() or bool(_claims(files, registry().dialects.values(), is_named=True))

    try:
        announced = [one for one in announcements(folder_of(path)) if one.method != OWN]
    except (BrecciaError, OSError):
        if are_about_it():
            raise
        return []
    return announced if announced and are_about_it() else []


def _nothing_of(path: Path, dialect: Dialect) -> DialectError:
    wanted = " or ".join(" and ".join(repr(end) for end in group.parts) for group in dialect.groups)
    return DialectError(
        f"{shown(path)}: no tensors are a value of {dialect.title}; they end in {wanted}. Leave source_dialect= out, or give "
        "another.",
        dialect=dialect.name,
    )


def _claims(
    files: Mapping[str, Container], dialects: Iterable[Dialect], config: Announced | None = None, is_named: bool = False
) -> dict[str, list[Stored]]:
    """Every reading of every value, by name. is_named: whether a config or the caller names these dialects."""
    claims: dict[str, list[Stored]] = {}
    for dialect in dialects:
        of = ModuleSettings(dialect, config)
        for group in (group for group in dialect.groups if is_named or not group.needs_config):
            for stem in stems_of(files, group):
                parts = _parts(files, group, stem)
                name = group.named(stem)
                if parts is not None and name is not None:
                    stored = Stored(dialect, group, name, parts, files, config, of)
                    claims.setdefault(stored.name, []).append(stored)
    return claims


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
