"""Checkpoints that are quantized and not read: each is refused by name, with what can be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from breccia import UnsupportedError
from breccia.backend import registry
from breccia.internal import abbreviated

from .announcements import Announced
from .completeness import PARTIAL
from .dialects.declared import CODES
from .safetensors_file import Container, Entry, shown
from .stored import Stored


def refuse_described(containers: Sequence[Container]) -> None:
    """Raise UnsupportedError for a file whose metadata alone says that its tensors are of a dialect."""
    for dialect in (dialect for dialect in registry().dialects.values() if dialect.metadata and not dialect.configs):
        ends = tuple(next(iter(group.parts)) for group in dialect.groups)
        for container in containers:
            key = next((key for key in dialect.metadata if key in container.metadata), None)
            if key is not None and not any(name.endswith(ends) for name in container.entries):
                raise UnsupportedError(
                    f"{shown(container.path)} is already quantized ({dialect.title}): its metadata has {key}, which breccia "
                    "does not read. Convert the checkpoint that it was made from.",
                    path=str(container.path),
                )


def check_one_config(announced: Sequence[Announced]) -> None:
    """Raise UnsupportedError where parts of a composite model have settings of their own: each value would need its part's."""
    inside = [one for one in announced if ": " in one.where]
    for one in inside[1:]:
        if one.settings != inside[0].settings:
            raise UnsupportedError(
                f"{inside[0].where} and {one.where} have other settings; breccia reads a checkpoint whose parts are quantized "
                "in one way. Save the parts as checkpoints of their own.",
                where=one.where,
            )


def unknown_settings(one: Announced) -> UnsupportedError:
    """The error for a config whose `quant_method` is known, and whose other settings are not."""
    dialects = [dialect for dialect in registry().dialects.values() if one.method in dialect.methods]
    keys = dict.fromkeys(key for dialect in dialects for wanted in dialect.configs for key in wanted if key != "quant_method")
    values = ", ".join(f"{key} {one.settings.get(key)!r}" for key in keys)
    known = ", ".join(f"{dialect.title} ({dialect.name!r})" for dialect in dialects)
    return UnsupportedError(
        f"{one.where} is {one.method!r} with {values}, which no dialect has; known: {known}. Give source_dialect= (on the "
        "command line --from) if it is one of them.",
        where=one.where,
        quant_method=one.method,
    )


def recognized_only(path: Path, value: Stored, config: Announced | None) -> UnsupportedError:
    """The error for a value of a dialect that breccia does not read."""
    seen = [f"{config.where} is {config.method!r}"] if config else []
    seen.append(value.spelled)
    return UnsupportedError(
        f"{shown(path)} is already quantized ({value.dialect.title}): {'; '.join(seen)}; codes and scales are not values. "
        f"{value.dialect.remedy}",
        path=str(path),
        format=value.dialect.title,
    )


def of_another_dialect(path: Path, title: str, said: Sequence[str], claim: Stored) -> UnsupportedError:
    """The error for tensors of another dialect than the announced one. said: by what it is announced."""
    return UnsupportedError(
        f"{shown(path)} is already quantized ({title}, and its tensors look like {claim.dialect.title}): {'; '.join(said)}; "
        f"{claim.spelled}; codes and scales are not values. Give source_dialect= (on the command line --from) if the config is "
        "wrong, or download the checkpoint again.",
        path=str(path),
        format=title,
    )


def nothing_seen(path: Path, files: Mapping[str, Container], announced: Sequence[Announced]) -> UnsupportedError:
    """The error for configs that announce what no tensor shows."""
    wheres = " and ".join(one.where for one in announced)
    dialects = [dialect for one in announced for dialect in one.dialects]
    title, method = dialects[0].title, announced[0].method
    coded = [name for name, file in files.items() if is_coded(file.entries[name])]
    refused = [dialect for dialect in dialects if dialect.read is None]
    said = f"but no tensor is quantized. Remove {wheres}, or download it again."
    if coded:
        remedy = refused[0].remedy if refused else f"no tensor has the parts of {title}. {PARTIAL}"
        said = f"{abbreviated(coded)} {'is' if len(coded) == 1 else 'are'} codes; {remedy}"
    return UnsupportedError(
        f"{shown(path)} is already quantized ({title}): {wheres} is {method!r}; {said}", path=str(path), format=title
    )


def is_coded(entry: Entry) -> bool:
    """Does its dtype, and that it has two axes or more, mark a tensor as codes?"""
    return len(entry.shape) > 1 and entry.dtype in (*CODES, "I16", "I32", "U32")
