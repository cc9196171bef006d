"""The safetensors container: a JSON header, then the bytes of every tensor, little-endian and without gaps.

breccia has its own reader, since stock NumPy loaders copy and cannot read float8 tensors, and its own writer
(`safetensors_writer`), since no other takes one tensor at a time. The format:
https://huggingface.co/docs/safetensors#format.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
import sys
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn

import numpy as np

from breccia import BrecciaError, CorruptFileError, ShapeError, UnknownNameError, UnsupportedError
from breccia.internal import parsed_json, printable, suggestion

from .remote_path import RemotePath, need_reserving, path_of, read_ranges
from .staging import naming

Shape = tuple[int, ...]

#: Largest header, in bytes, that stock readers accept (safetensors 0.8: "header too large" beyond it).
MAX_HEADER = 100_000_000
#: The maximal number of axes of a NumPy 2 array.
MAX_AXES = 64

#: Every dtype of the format (safetensors 0.8): bits of one element, and the NumPy dtype `Container.array` shows it as.
#: Dtypes that NumPy lacks are shown as bit patterns; elements of less than a byte as packed bytes.
DTYPES: dict[str, tuple[int, str]] = {
    "BOOL": (8, "bool"),
    "F4": (4, "uint8"),
    "F6_E2M3": (6, "uint8"),
    "F6_E3M2": (6, "uint8"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "uint8"),
    "F8_E4M3": (8, "uint8"),
    "F8_E8M0": (8, "uint8"),
    "F8_E4M3FNUZ": (8, "uint8"),
    "F8_E5M2FNUZ": (8, "uint8"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "uint16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}

#: MAP_NORESERVE, which Python names from 3.13 on.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
#: PROT_NONE.
_NONE = 0

#: What to do about a damaged file.
FETCH = "Copy or download the file again."
_REWRITE = "The program that wrote it has a bug: write it again with breccia.bridges.save_safetensors or safetensors."


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype's name in the format, its shape, and its bytes `start:stop` in the data section."""

    dtype: str
    shape: Shape
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def byte_count(dtype: str, shape: Shape) -> int:
    """Size in bytes of a tensor of that dtype and shape.

    Raises UnknownNameError for a dtype the format lacks, ShapeError for an impossible shape.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnknownNameError(f"no safetensors dtype {short(dtype)}{suggestion(str(dtype)[:16], list(DTYPES))}", dtype=dtype)
    if not isinstance(shape, (list, tuple)) or any(type(n) is not int or n < 0 for n in shape):
        raise ShapeError(f"a shape is a list of integers >= 0; got {short(shape)}.", shape=shape)
    if len(shape) > MAX_AXES:
        raise ShapeError(f"a tensor has at most {MAX_AXES} axes; got {len(shape)}.", shape=shape)
    bits = DTYPES[dtype][0]
    # NumPy refuses shapes whose nonzero extents alone overflow, so empty tensors have the same limit.
    if math.prod(n for n in shape if n) * bits // 8 > sys.maxsize:
        raise ShapeError(f"shape {short(shape)} of {dtype} needs more than {sys.maxsize} bytes.", shape=shape)
    size, rest = divmod(math.prod(shape) * bits, 8)
    if rest:
        raise ShapeError(f"shape {short(shape)} of {dtype} ({bits} bits each) is not a multiple of 8 bits.", shape=shape)
    return size


class Container:
    """A safetensors file, opened and checked; its tensors are memory-mapped, and read from disk on access.

    metadata: the file's `__metadata__`, str to str.
    entries: an `Entry` per tensor name, in the order the header lists them.
    decoded: the tensors whose arrays are decoded values, each with what it is in the file.
    left_out: tensors of the file that are no entries, as models compute them from their configs.
    unmapped: why the names of entries are not those of transformers; "" where they may be.
    has_model_shapes: whether values have the shapes of transformers' parameters, also where its layer is no linear one.

    Raises CorruptFileError where the file violates the format in any way, OSError (FileNotFoundError, ...) where it cannot
    be opened, UnsupportedError on a big-endian host.
    """

    path: Path
    metadata: dict[str, str]
    entries: dict[str, Entry]
    decoded: Mapping[str, str] = MappingProxyType({})
    left_out: Sequence[str] = ()
    unmapped: str = ""
    has_model_shapes: bool = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        need_little_endian()
        self.path = path_of(path)
        with regular(self.path) as (file, status):
            self._identity, size = identity(status), status.st_size
            header = self._header_bytes(file, size)
            self._data_start = 8 + len(header)
            self.metadata, self.entries = self._parsed(header, size - self._data_start)
        #: The map shared by live arrays. It owns a file descriptor, so it is closed with the last of them.
        self._map: weakref.ref[mmap.mmap] | None = None

    @property
    def names(self) -> list[str]:
        """The names of tensors as an index of a folder lists them."""
        return list(self.entries)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.path

    def entry(self, name: str) -> Entry:
        """The entry of a tensor. Raises UnknownNameError for a name that the container does not have."""
        if name not in self.entries:
            raise UnknownNameError(
                f"{shown(self.path)} has no tensor {name!r}{suggestion(name, list(self.entries))}", name=name
            )
        return self.entries[name]

    def array(self, name: str) -> np.ndarray:
        """The tensor as a mapped, copy-on-write array: writing to it changes this process's pages, never the file.

        BF16 is returned as uint16 bit patterns, 8-bit floats as uint8, smaller floats as flat uint8 bytes. A tensor that starts
        at a byte where its dtype is not aligned is read into memory.
        A file MUST NOT be truncated while a mapped array is in use: the system ends a process that reads pages which a file has
        lost. `read` has no such condition. Of a URL, the tensor is read into memory.
        Raises UnknownNameError where the file has no tensor of that name, CorruptFileError if it changed since it was opened.
        """
        view = self.view(name)
        return view if view.flags.aligned and not isinstance(self.path, RemotePath) else read(view)

    def read(self, name: str) -> np.ndarray:
        """The tensor, read into memory. Raises as `array` does, and CorruptFileError for a file that changed meanwhile."""
        array = read(self.view(name))
        self.check_unchanged()
        return array

    def view(self, name: str) -> np.ndarray:
        """As `array`, but mapped even if it is not aligned. `read` takes a part of it into memory.

        Of a URL nothing is mapped: addresses stand for the bytes, and only `read` may touch them.
        """
        entry = self.entry(name)
        bits, dtype = DTYPES[entry.dtype]
        shape = entry.shape if bits >= 8 else (entry.nbytes,)
        return np.ndarray(shape, dtype, buffer=self._mapped(), offset=self._data_start + entry.start)

    def check_unchanged(self) -> None:
        """Raise CorruptFileError if the file was replaced or modified since it was opened."""
        if identity(self.path.stat()) != self._identity:
            raise changed(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        """By its path: another process opens it again. Raises CorruptFileError there if the file is another one by then."""
        return _opened_again, (type(self), self.path, self._identity[2:])

    def _mapped(self) -> mmap.mmap:
        mapped = self._map and self._map()
        if mapped is None:
            mapped = _map(self.path, self._identity)
            self._map = weakref.ref(mapped)
        return mapped

    # -- the header ---------------------------------------------------------------------------------------------

    def _refuse(self, what: str, remedy: str, **values: Any) -> NoReturn:
        raise CorruptFileError(f"{shown(self.path)}: {what} {remedy}", path=str(self.path), **values)

    def _header_bytes(self, file: BinaryIO, size: int) -> bytes:
        if size < 8:
            self._refuse(f"{size} bytes long; a safetensors file starts with 8 bytes that give its header's length.", FETCH)
        start = file.read(8)
        (length,) = struct.unpack("<Q", start)
        if start.startswith(b"GGUF"):
            raise UnsupportedError(
                f"{shown(self.path)} is a GGUF file, not one of safetensors. Name it .gguf, and read it with "
                "breccia.bridges.load_checkpoint, or convert it with breccia.bridges.convert.",
                path=str(self.path),
            )
        if length > MAX_HEADER:
            self._refuse(
                f"its first 8 bytes say that the header is {length} bytes long; the limit is {MAX_HEADER}.",
                "It is not a safetensors file, or is damaged: check its name, or download it again.",
                length=length,
            )
        if length > size - 8:
            self._refuse(
                f"the header should be {length} bytes long, but {size - 8} bytes follow: the file is truncated.",
                FETCH,
                length=length,
            )
        return file.read(length)

    def _parsed(self, header: bytes, size: int) -> tuple[dict[str, str], dict[str, Entry]]:
        try:
            text = header.decode("utf-8")
        except UnicodeDecodeError as e:
            self._refuse(f"the header is not UTF-8 (byte {header[e.start]:#04x} at position {e.start}).", FETCH)
        if not text.startswith("{"):
            self._refuse(f"the header is a JSON object and starts with '{{'; found {short(text)}.", FETCH)
        try:
            listed = parsed_json(text, self._object)
        except ValueError as e:
            if isinstance(e, CorruptFileError):
                raise
            self._refuse(f"the header is not JSON ({e}).", FETCH)
        metadata = self._metadata(listed.pop("__metadata__", {}))
        entries = {name: self._entry(name, value, size) for name, value in listed.items()}
        self._check_cover(entries, size)
        return metadata, entries

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            self._refuse(f"the header has the key {short(twice)} twice in one object.", _REWRITE, key=twice)
        return out

    def _metadata(self, value: Any) -> dict[str, str]:
        if value is None:  # MLX 0.32 writes null for a file without metadata
            return {}
        if not isinstance(value, dict):
            self._refuse(f"__metadata__ is an object of strings; found {short(value)}.", _REWRITE)
        for key, item in value.items():
            if not isinstance(item, str):
                self._refuse(f"__metadata__ holds strings; {short(key)} is {short(item)}.", _REWRITE, key=key)
        return value

    def _entry(self, name: str, value: Any, size: int) -> Entry:
        where = f"tensor {short(name)}"
        if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
            self._refuse(f"{where} is an object with dtype, shape and data_offsets; found {short(value)}.", _REWRITE, name=name)
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        try:
            expected = byte_count(dtype, shape)
        except BrecciaError as e:
            raise CorruptFileError(f"{shown(self.path)}: {where}: {e} {_REWRITE}", path=str(self.path), name=name) from e
        if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int or n < 0 for n in offsets):
            self._refuse(f"{where}: data_offsets are two integers >= 0; found {short(offsets)}.", _REWRITE, name=name)
        start, stop = offsets
        if start > stop:
            self._refuse(f"{where}: data_offsets end before they start; found {offsets}.", _REWRITE, name=name)
        if stop > size:
            self._refuse(
                f"{where} ends at byte {stop} of the data, which has {size} bytes: the file is truncated.", FETCH, name=name
            )
        if stop - start != expected:
            self._refuse(
                f"{where}: {dtype} of shape {short(shape)} is {expected} bytes; data_offsets {offsets} hold {stop - start}.",
                _REWRITE,
                name=name,
            )
        return Entry(dtype, tuple(shape), start, stop)

    def _check_cover(self, entries: dict[str, Entry], size: int) -> None:
        """Refuse overlaps, holes and trailing bytes, as all readers of the format do: hidden bytes are a security risk."""
        end, before = 0, ""
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start < end:
                self._refuse(
                    f"tensors {short(before)} and {short(name)} overlap (byte {entry.start} of the data is before {end}).",
                    _REWRITE,
                    name=name,
                )
            if entry.start > end:
                self._refuse(f"bytes {end} to {entry.start} of the data belong to no tensor.", _REWRITE, start=end)
            end, before = entry.stop, name
        if end != size:
            self._refuse(f"{size - end} bytes after the last tensor belong to none (it ends at {end} of {size}).", FETCH)


def _opened_again(kind: type[Container], path: Path, version: tuple[int, ...]) -> Container:
    """The container of a file whose size and time are these; other machines give it other numbers of devices."""
    if identity(path.stat())[2:] != version:
        raise changed(path)
    return kind(path)


@dataclass(frozen=True)
class _Origin:
    """What is mapped: a file, its identity, and where in memory its first byte is."""

    path: Path
    identity: tuple[int, ...]
    address: int


_origins: weakref.WeakKeyDictionary[mmap.mmap, _Origin] = weakref.WeakKeyDictionary()


def _map(path: Path, expected: tuple[int, ...]) -> mmap.mmap:
    """Map the file copy-on-write, without reserving memory, so that files larger than memory can be mapped."""
    if isinstance(path, RemotePath):
        need_reserving(path)
        # Addresses that nobody may touch, not even to read zeros.
        mapped = mmap.mmap(-1, max(1, expected[2]), flags=mmap.MAP_PRIVATE | _NORESERVE, prot=_NONE)
        _origins[mapped] = _Origin(path, expected, np.frombuffer(mapped, np.uint8, 1).ctypes.data)
        return mapped
    with _opened(path, expected) as file:
        if sys.platform == "win32":
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        else:
            flags = mmap.MAP_PRIVATE | _NORESERVE
            mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _origins[mapped] = _Origin(path, expected, np.frombuffer(mapped, np.uint8, 1).ctypes.data)
    return mapped


def read(view: np.ndarray, empty: Callable[[Shape, np.dtype[Any]], np.ndarray] = np.empty) -> np.ndarray:
    """A part of what `Container.view` returned, aligned and in memory; other arrays are returned as they are.

    It asks the system for the bytes, and does not touch mapped pages. empty: what makes the array that they are read into.
    Raises CorruptFileError where the file was replaced or modified since it was opened.
    """
    origin = _origin_of(view)
    if origin is None:
        return view
    axes = sorted(range(view.ndim), key=lambda axis: -view.strides[axis])
    if not view.flags.c_contiguous and axes != list(range(view.ndim)):  # a transpose: read as it is stored
        return read(view.transpose(axes), empty).transpose(np.argsort(axes))
    out = empty(view.shape, view.dtype)
    if isinstance(origin.path, RemotePath):
        read_ranges(origin.path, _runs(out, view, origin.address))
    elif out.size:
        with _opened(origin.path, origin.identity) as file, naming(origin.path):
            _read_into(out, view, file, origin)
    return out


def _runs(out: np.ndarray, view: np.ndarray, address: int) -> Generator[tuple[int, memoryview]]:
    """The consecutive bytes of a view: where in the file they are, and where in `out` they go."""
    if view.flags.c_contiguous:
        yield view.ctypes.data - address, out.reshape(-1).view(np.uint8).data
    else:
        for part, of in zip(out, view, strict=True):
            yield from _runs(part, of, address)


def is_mapped(view: np.ndarray) -> bool:
    """Is an array a part of what `Container.view` returned, of which nothing is read yet?"""
    return _origin_of(view) is not None


def is_far(view: np.ndarray) -> bool:
    """Is an array a part of a file on another machine, of which many short pieces take long to read?"""
    origin = _origin_of(view)
    return origin is not None and isinstance(origin.path, RemotePath)


def _origin_of(view: np.ndarray) -> _Origin | None:
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    return _origins.get(base) if isinstance(base, mmap.mmap) else None


def _read_into(out: np.ndarray, view: np.ndarray, file: BinaryIO, origin: _Origin) -> None:
    if not view.flags.c_contiguous:
        for part, of in zip(out, view, strict=True):
            _read_into(part, of, file, origin)
        return
    file.seek(view.ctypes.data - origin.address)
    left = out.reshape(-1).view(np.uint8).data
    while left:
        count = file.readinto(left)  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise changed(origin.path)
        left = left[count:]


def _opened(path: Path, expected: tuple[int, ...]) -> BinaryIO:
    """The file, opened again. Raises CorruptFileError if it is another one by now."""
    file: Any = open(path, "rb", buffering=0, opener=_at_once)  # noqa: SIM115
    if identity(os.fstat(file.fileno())) != expected:
        file.close()
        raise changed(path)
    return file


@contextmanager
def regular(path: Path) -> Generator[tuple[BinaryIO, os.stat_result]]:
    """A file, opened, and its status. Raises CorruptFileError for a pipe or a device."""
    if isinstance(path, RemotePath):
        status = path.stat()
        with path.open() as file:
            yield file, status
        return
    with open(path, "rb", opener=_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CorruptFileError(
                f"{shown(path)}: it is a pipe or a device. Give a file; a pipe has to be written to one first.", path=str(path)
            )
        yield file, status


def _at_once(path: str, flags: int) -> int:
    """Opens a file; also a pipe into which nobody writes, for which `os.open` would wait."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def shown(path: str | os.PathLike[str]) -> str:
    """A path on one line of a message: the names of files in a folder are no more trusted than those of tensors."""
    return printable(os.fspath(path))


class ChangedFileError(CorruptFileError):
    """A file is not the one whose header was read."""


def changed(path: Path) -> ChangedFileError:
    """The error for a file that is not the one whose header was read."""
    return ChangedFileError(
        f"{shown(path)}: it was replaced or modified since its header was read. Open it again.", path=str(path)
    )


def identity(status: os.stat_result) -> tuple[int, ...]:
    """Identifies the file and its version: it changes if the file is replaced or modified."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def need_little_endian() -> None:
    """Raise UnsupportedError on a big-endian host."""
    if sys.byteorder != "little":
        raise UnsupportedError(
            f"safetensors files are little-endian and this host is {sys.byteorder}-endian, and breccia does not swap "
            "bytes; read and write them on a little-endian host (x86-64, arm64)."
        )
