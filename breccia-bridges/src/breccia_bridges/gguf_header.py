"""The header of a GGUF file: what it says of the model, and of its tensors.

    "GGUF", version (U32), number of tensors (U64), number of keys (U64)
    keys and values, each with a type; arrays have the type and the number of their items
    for each tensor its name, axes from the last one on, type, and the offset of its data
    padding to `general.alignment`, and the data of the tensors

breccia has its own parser: the library `gguf` maps the whole file, and takes counts, lengths and offsets as the file gives
them, so that a damaged file costs any memory, or ends the process. Names and numbers here are checked before they are used.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO, NoReturn

from breccia import CorruptFileError, UnsupportedError

from .gguf_types import TYPES, Type
from .safetensors_file import FETCH, MAX_HEADER, Shape, shown

MAGIC = b"GGUF"
#: The axes of a tensor of ggml.
MAX_AXES = 4
#: Arrays of more numbers are skipped: scores and types of a vocabulary.
MAX_ITEMS = 4096
#: The alignment of tensors where a file does not say another one.
ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_REWRITE = "The program that wrote it has a bug: write it again with llama.cpp."


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: its name there, its shape as NumPy has it, its type, and the bytes `start:stop` of its data."""

    name: str
    shape: Shape
    type: Type
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a file says. keys: values by key; of a long array, and of one of strings, its length."""

    version: int
    keys: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def number(self, key: str, default: int = 0) -> int:
        """The whole number under a key, or `default` if there is none."""
        value = self.keys.get(key, default)
        return value if type(value) is int else default


def is_gguf(path: Path) -> bool:
    """Does a file start as GGUF files do?"""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path, file: BinaryIO, size: int) -> Header:
    """The header of an opened file of `size` bytes.

    Raises CorruptFileError where it breaks the format, and UnsupportedError for big-endian files, other versions than 2 and 3,
    and types of tensors that breccia does not know.
    """
    return _Parser(path, file, size).header()


class _Parser:
    """Reads a header from the start of a file, no further than it has to."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._text, self._at = b"", 0

    def header(self) -> Header:
        self._need(24, "its header")
        magic, version, tensors, keys = struct.unpack_from("<4sIQQ", self._text)
        if magic != MAGIC:
            self._refuse(f"it starts with {magic!r}, not {MAGIC!r}: it is no GGUF file.", FETCH)
        if version & 0xFFFF == 0 and version:
            raise UnsupportedError(
                f"{shown(self._path)} is a big-endian GGUF file, which breccia does not read. Download or write the "
                "little-endian one.",
                path=str(self._path),
            )
        if version not in (2, 3):
            raise UnsupportedError(
                f"{shown(self._path)} has version {version} of GGUF; breccia reads 2 and 3. Write it again with a current "
                "llama.cpp.",
                path=str(self._path),
                version=version,
            )
        self._at = 24
        # A key takes at least 13 bytes, and a tensor 24.
        self._check_count(keys, 13, "keys")
        values = self._keys(keys)
        self._check_count(tensors, 24, "tensors")
        infos = [self._tensor() for _ in range(tensors)]
        return Header(version, values, self._placed(infos, self._alignment(values)))

    # -- reading ------------------------------------------------------------------------------------------------

    def _need(self, count: int, what: str) -> None:
        """Read on, until `count` more bytes are in memory."""
        stop = self._at + count
        if stop <= len(self._text):
            return
        if stop > self._size:
            self._refuse(
                f"{what} ends at byte {stop} of a file of {self._size} bytes: the file is truncated, or damaged.", FETCH
            )
        if stop > MAX_HEADER:
            self._refuse(f"{what} ends at byte {stop}; a header has at most {MAX_HEADER} bytes.", FETCH)
        more = max(stop - len(self._text), 1 << 20, len(self._text))
        text = self._text + self._file.read(min(more, self._size - len(self._text)))
        if stop > len(text):
            self._refuse(f"{what} ends at byte {stop}, but only {len(text)} bytes could be read.", FETCH)
        self._text = text

    def _numbers(self, layout: str, what: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{layout}")
        self._need(size, what)
        numbers = struct.unpack_from(f"<{layout}", self._text, self._at)
        self._at += size
        return numbers

    def _string(self, what: str) -> str:
        (length,) = self._numbers("Q", what)
        self._need(length, what)
        text = self._text[self._at : self._at + length]
        self._at += length
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as e:
            self._refuse(f"{what} is not UTF-8 (byte {text[e.start]:#04x} at position {e.start}): {short(text)}.", FETCH)

    def _check_count(self, count: int, least: int, what: str) -> None:
        """Refuse more items, of at least so many bytes each, than the rest of the file can hold."""
        left = self._size - self._at
        if count > left // least:
            self._refuse(f"it should have {count} {what}, for which the {left} bytes that follow are too few.", FETCH)

    def _keys(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for n in range(count):
            key = self._string(f"the name of key {n}")
            if key in values:
                self._refuse(f"the key {short(key)} is there twice.", _REWRITE, key=key)
            what = f"the value of {short(key)}"
            (kind,) = self._numbers("I", what)
            values[key] = self._value(kind, what)
        return values

    def _value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], what)[0]
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            self._refuse(f"{what} has type {kind}; GGUF has 0 to {max(_SCALARS)}.", FETCH, type=kind)
        item, count = self._numbers("IQ", what)
        if item == _ARRAY:
            self._refuse(f"{what} is an array of arrays, which llama.cpp neither writes nor reads.", _REWRITE)
        if item == _STRING:
            self._check_count(count, 8, f"strings in {what}")
            self._skip_strings(count, what)
            return count
        if item not in _SCALARS:
            self._refuse(f"{what} is an array of type {item}; GGUF has 0 to {max(_SCALARS)}.", FETCH, type=item)
        code = _SCALARS[item]
        self._check_count(count, struct.calcsize(code), f"numbers in {what}")
        if count <= MAX_ITEMS:
            return self._numbers(f"{count}{code}", what)
        self._need(count * struct.calcsize(code), what)
        self._at += count * struct.calcsize(code)
        return count

    def _skip_strings(self, count: int, what: str) -> None:
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            self._need(8, what)
            (length,) = length_at(self._text, self._at)
            self._at += 8
            self._need(length, what)
            self._at += length

    # -- tensors ------------------------------------------------------------------------------------------------

    def _tensor(self) -> TensorInfo:
        """A tensor, with its offset in the data as `start`, and that of its end as `stop`."""
        name = self._string("the name of a tensor")
        what = f"tensor {short(name)}"
        (axes,) = self._numbers("I", what)
        if axes > MAX_AXES:
            self._refuse(f"{what} has {axes} axes; GGUF has at most {MAX_AXES}.", FETCH, name=name)
        shape = self._numbers(f"{axes}Q", what)[::-1]
        number, start = self._numbers("IQ", what)
        kind = TYPES.get(number)
        if kind is None:
            known = ", ".join(f"{one.name} ({n})" for n, one in TYPES.items())
            raise UnsupportedError(
                f"{shown(self._path)}: {what} has type {number}, which breccia does not know; it knows {known}. Upgrade "
                "breccia, or quantize the model again to one of these.",
                path=str(self._path),
                name=name,
                type=number,
            )
        # NumPy refuses shapes whose nonzero axes alone overflow, so empty tensors have the same limit.
        if math.prod(n for n in shape if n) * kind.size > sys.maxsize:
            self._refuse(f"{what} of shape {list(shape)} needs more than {sys.maxsize} bytes.", FETCH, name=name)
        last = shape[-1] if shape else 1
        if last % kind.length:
            self._refuse(
                f"{what} is {kind.name}, blocks of {kind.length} elements, which do not divide its rows of {last}.",
                _REWRITE,
                name=name,
            )
        return TensorInfo(name, shape, kind, start, start + math.prod(shape) // kind.length * kind.size)

    def _alignment(self, values: Mapping[str, Any]) -> int:
        alignment = values.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"general.alignment is a power of two; found {short(alignment)}.", _REWRITE, alignment=alignment)
        return alignment

    def _placed(self, infos: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """The tensors by name, with the places of their data in the file."""
        base = -(-self._at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for info in infos:
            what = f"tensor {short(info.name)}"
            if info.name in placed:
                self._refuse(f"{what} is there twice.", _REWRITE, name=info.name)
            if info.start % alignment:
                self._refuse(f"{what} starts at {info.start}, which {alignment} does not divide.", _REWRITE, name=info.name)
            start, stop = base + info.start, base + info.stop
            if stop > self._size:
                self._refuse(
                    f"{what} ends at byte {stop} of a file of {self._size} bytes: the file is truncated.", FETCH, name=info.name
                )
            placed[info.name] = TensorInfo(info.name, info.shape, info.type, start, stop)
        self._check_gaps(placed, base, alignment)
        return placed

    def _check_gaps(self, placed: Mapping[str, TensorInfo], base: int, alignment: int) -> None:
        """Refuse overlaps and holes, as llama.cpp does."""
        end, before = base, ""
        for info in sorted(placed.values(), key=lambda info: (info.start, info.stop)):
            if info.start < end:
                self._refuse(
                    f"tensors {short(before)} and {short(info.name)} overlap (byte {info.start} is before {end}).",
                    _REWRITE,
                    name=info.name,
                )
            if info.start - end >= alignment:
                self._refuse(f"bytes {end} to {info.start} belong to no tensor.", _REWRITE, start=end)
            end, before = info.stop, info.name

    def _refuse(self, what: str, remedy: str, **values: Any) -> NoReturn:
        raise CorruptFileError(f"{shown(self._path)}: {what} {remedy}", path=str(self._path), **values)
