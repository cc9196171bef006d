"""Whether each tensor that belongs to a quantized value is a part of one: what is missing, and what is too much."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from breccia import CorruptFileError, Dialect
from breccia.backend import TensorGroup, registry
from breccia.internal import abbreviated

from .dialects.declared import CODES
from .safetensors_file import Container, shown
from .stored import Stored
from .text import spelled

#: Floats of a file that are codes, which need scales.
FLOAT_CODES = tuple(dtype for dtype in CODES if dtype.startswith("F"))
PARTIAL = "Give the folder of all shards, or download the checkpoint again."
#: Ends of names that plain tensors have too.
_COMMON = ("", "weight", "scale")


def stems_of(files: Mapping[str, Container], group: TensorGroup) -> Iterator[str]:
    """The beginnings of names that end as the first part of a group does."""
    first = next(iter(group.parts))
    boundary = "" if first == "" or first[0] in "._" else "."
    for name in files:
        if name.endswith(first):
            stem = name.removesuffix(first)
            if (not stem or not boundary or stem.endswith(boundary)) and group.named(stem) is not None:
                yield stem


def check_complete(
    path: Path, files: Mapping[str, Container], values: Mapping[str, Stored], dialects: Sequence[Dialect]
) -> None:
    """Raise CorruptFileError for a part whose value lacks others, and float codes without a scale."""
    taken = {part for value in values.values() for part in value.parts.values()}
    readable = [dialect for dialect in dialects if dialect.read is not None]
    for dialect in readable:
        for group in dialect.groups:
            for stem in stems_of(files, group):
                first, dtypes = stem + next(iter(group.parts)), next(iter(group.parts.values()))
                if first not in taken and (not dtypes or files[first].entries[first].dtype in dtypes):
                    raise CorruptFileError(f"{shown(path)}: {_wrong(files, dialect, group, stem)}", path=str(path), name=first)
            if dialect.configs:
                _check_other_parts(path, files, taken, dialect, group)
    if not dialects:
        return
    for name, file in files.items():
        entry = file.entries[name]
        if (
            name not in taken
            and entry.dtype in FLOAT_CODES
            and len(entry.shape) > 1
            and (wrong := _scale_of(files, name, readable))
        ):
            raise CorruptFileError(
                f"{shown(path)}: {name!r} is {entry.dtype} without a scale: {wrong}. {PARTIAL}",
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
                    f"{PARTIAL}",
                    path=str(path),
                    name=name,
                )


def check_variants(files: Mapping[str, Container], values: Mapping[str, Stored]) -> None:
    """Raise DialectError for a tensor that is a part of another variant of a value, of its dialect or of one like it."""
    owners = {part: stored for stored in values.values() for part in stored.parts.values()}
    groups: dict[str, list[tuple[Dialect, TensorGroup]]] = {}
    for dialect in (dialect for dialect in registry().dialects.values() if dialect.read):
        for group in dialect.groups:
            for end in (end for end in (*group.parts, *group.optional) if end not in _COMMON):
                groups.setdefault(end, []).append((dialect, group))
    ends = tuple(groups)
    for name in (name for name in files if name.endswith(ends) and name not in owners):
        for end in (end for end in ends if name.endswith(end)):
            stem = name.removesuffix(end)
            for dialect, group in groups[end]:
                shared = [owners.get(stem + other) for other in group.parts if other != end]
                owner = next((stored for stored in shared if stored is not None), None)
                if owner is not None and owner.name == group.named(stem) and (owner.dialect == dialect or None not in shared):
                    raise owner.refusal(
                        f"{name!r} is a part of {dialect.title} that a value of {abbreviated(owner.parts.values())} has not. "
                        "Download the checkpoint again."
                    )


def _wrong(files: Mapping[str, Container], dialect: Dialect, group: TensorGroup, stem: str) -> str:
    """What a value lacks of whose parts only the first one is there."""
    first = stem + next(iter(group.parts))
    for end, dtypes in group.parts.items():
        name = stem + end
        if name not in files:
            return f"{first!r} is a part of {dialect.title} without the others: no file has {name!r}. {PARTIAL}"
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
