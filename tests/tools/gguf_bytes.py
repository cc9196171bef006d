"""GGUF files as bytes, valid ones and damaged ones: every count, length and offset may be another than it should be."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from breccia_bridges.gguf_types import TYPES

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, U32, F32, U64 = 8, 9, 4, 6, 10
#: The numbers of types by their names.
NUMBERS = {one.name: number for number, one in TYPES.items()}


@dataclass
class Tensor:
    """A tensor of a file. dims: as in the file, the last axis first. offset: in the data, by default the next free place."""

    name: str | bytes
    dims: Sequence[int]
    type: int
    data: bytes = b""
    offset: int | None = None


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A string with its length, or another one."""
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded


def value(kind: int, content: Any) -> bytes:
    """A value of a key. content: of an array the type and the values of its items."""
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        item, items = content
        return struct.pack("<IQ", item, len(items)) + b"".join(value(item, one) for one in items)
    return struct.pack(f"<{_SCALARS[kind]}", content)


def key(name: str | bytes, kind: int, content: Any) -> bytes:
    return string(name) + struct.pack("<I", kind) + value(kind, content)


def gguf(
    keys: Iterable[bytes] = (),
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    counts: tuple[int | None, int | None] = (None, None),
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    """A file. counts: of tensors and keys, if they are to be wrong."""
    keys = [key("general.alignment", U32, alignment)] * (alignment != 32) + list(keys)
    numbers = [len(of) if count is None else count for of, count in zip((tensors, keys), counts, strict=True)]
    header, data = magic + struct.pack("<IQQ", version, *numbers) + b"".join(keys), b""
    for one in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if one.offset is None else one.offset
        header += string(one.name) + struct.pack("<I", len(one.dims)) + struct.pack(f"<{len(one.dims)}Q", *one.dims)
        header += struct.pack("<IQ", one.type, offset)
        data += one.data
    return header + bytes(-len(header) % alignment) + data
