"""Writes safetensors files tensor by tensor."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from breccia import BrecciaError, ShapeError, UnknownNameError, UnsupportedError
from breccia.internal import suggestion

from .safetensors_file import DTYPES, MAX_HEADER, Entry, Shape, byte_count, need_little_endian
from .staging import Staging, naming

#: Bytes that the system is given at once. For more, Linux takes pages of the largest size, for which a virtual machine may have
#: to ask its host: then writing takes 2 to 3 times as long (measured with ext4 and Linux 6.18).
_AT_ONCE = 1 << 19
#: What `Writer` takes: an array, or anything with the buffer protocol.
Data = np.ndarray | bytes | bytearray | memoryview


class HeaderError(UnsupportedError):
    """The header of a file would be longer than readers accept."""


class Writer:
    """Writes a safetensors file tensor by tensor, in any order, and renames it to its path only when complete.

        with Writer(path, {"w": ("F32", (4, 8))}, {"made": "today"}) as w:
            w.write("w", array)

    tensors: (dtype, shape) by name, dtypes as in `DTYPES`; the header lists them in this order.
    force: replace a file that exists; without it FileExistsError.

    The bytes go to a folder beside the file (`Staging`), and are renamed at the end. A process that has mapped the old file
    keeps the old bytes. An exception leaves the old file unchanged, and nothing beside it.
    Raises UnknownNameError, ShapeError or UnsupportedError for an invalid declaration; entering raises as `Staging` does.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[str, Shape]],
        metadata: Mapping[str, str] | None = None,
        force: bool = False,
    ) -> None:
        need_little_endian()
        self.path = Path(path)
        self.entries = _arranged(tensors)
        self._header = _header(self.entries, dict(metadata or {}))
        self._force = force
        self._refuse_existing()
        self._written: set[str] = set()
        self._streamed: set[str] = set()  # open streams
        self._file: BinaryIO | None = None
        self._staging = Staging(self.path)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self._header) + sum(entry.nbytes for entry in self.entries.values())

    def __enter__(self) -> Self:
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {self.path}: there is no directory {self.path.parent}; create it first.")
        self._staging.__enter__()
        try:
            self._file = open(self._staging.new, "xb")  # closed by __exit__; the mode follows the umask
            with naming(self.path):
                self._file.write(self._header)
                self._file.flush()
        except BaseException as e:
            self.__exit__(type(e), e, e.__traceback__)
            raise
        return self

    def write(self, name: str, data: Data) -> None:
        """Write the bytes of one tensor: an array of any dtype, in C order, or anything with the buffer protocol.

        Raises as `stream` does.
        """
        with self.stream(name) as put:
            put(data)

    @contextmanager
    def stream(self, name: str) -> Generator[Callable[[Data], None]]:
        """Write one tensor in consecutive pieces; several streams may be open at once.

            with w.stream("w") as put:
                put(first_rows)
                put(other_rows)

        Raises UnknownNameError for a name not declared, ShapeError where the byte count is not the declared one,
        BrecciaError for a tensor written before, or outside the `with` block.
        """
        if self._file is None:
            raise BrecciaError(f"{self.path}: tensors are written inside `with Writer(...) as w:`.", name=name)
        if name not in self.entries:
            raise UnknownNameError(f"{self.path}: no tensor {name!r} is declared{suggestion(name, list(self.entries))}")
        if name in self._written or name in self._streamed:
            raise BrecciaError(f"{self.path}: tensor {name!r} is already written; write each tensor once.", name=name)
        entry, done = self.entries[name], 0

        def put(data: Data) -> None:
            nonlocal done
            if self._file is None or name not in self._streamed:
                raise BrecciaError(f"{self.path}: pieces of {name!r} are put inside `with w.stream(...) as put:`.", name=name)
            raw = raw_bytes(data)
            if done + raw.nbytes > entry.nbytes:
                raise self._miscounted(name, done + raw.nbytes)
            with naming(self.path):
                write_at(self._file, raw, len(self._header) + entry.start + done)
            done += raw.nbytes

        self._streamed.add(name)
        try:
            yield put
        finally:
            self._streamed.discard(name)
        if done != entry.nbytes:
            raise self._miscounted(name, done)
        self._written.add(name)

    def _miscounted(self, name: str, count: int) -> ShapeError:
        entry = self.entries[name]
        return ShapeError(
            f"{self.path}: tensor {name!r} is declared {entry.dtype} of shape {entry.shape}, {entry.nbytes} bytes; got "
            f"{count} bytes.",
            name=name,
            expected=entry.nbytes,
            found=count,
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                with naming(self.path), file:
                    if kind is None:
                        self._check_complete()
            if kind is None:
                self._refuse_existing()
                self._staging.commit()
        finally:
            self._staging.__exit__(kind, error, trace)

    def _check_complete(self) -> None:
        missing = [name for name in self.entries if name not in self._written]
        if missing:
            raise BrecciaError(
                f"{self.path} is not written: {len(missing)} of {len(self.entries)} declared tensors were not given: "
                f"{short(missing)}. Write each one, or declare fewer.",
                missing=missing,
            )

    def _refuse_existing(self) -> None:
        if self.path.is_dir():
            raise IsADirectoryError(f"cannot write {self.path}: it is a directory; give the name of a file.")
        if not self._force and os.path.lexists(self.path):
            raise FileExistsError(f"{self.path} exists; choose another name, or replace it: force=True (--force).")


def _arranged(tensors: Mapping[str, tuple[str, Shape]]) -> dict[str, Entry]:
    """Entries in the given order, with offsets by descending element size, so that every tensor is aligned."""
    for name in tensors:
        check_text("a tensor's name", name)
        if name == "__metadata__":
            raise UnsupportedError("'__metadata__' is the format's own key; give the tensor another name.", name=name)
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        try:
            sizes[name] = byte_count(dtype, shape)
        except (UnknownNameError, ShapeError) as e:
            raise type(e)(f"tensor {name!r}: {e}", **{**e.found, "name": name}) from None
    at: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: -DTYPES[tensors[name][0]][0]):
        at[name], end = end, end + sizes[name]
    return {name: Entry(dtype, tuple(shape), at[name], at[name] + sizes[name]) for name, (dtype, shape) in tensors.items()}


def _header(entries: dict[str, Entry], metadata: dict[str, str]) -> bytes:
    """The header after its length, padded with spaces so that the data starts at a multiple of 8."""
    for key, value in metadata.items():
        check_text("a metadata key", key)
        check_text(f"metadata {key!r}", value)
    listed: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for name, e in entries.items():
        listed[name] = {"dtype": e.dtype, "shape": e.shape, "data_offsets": (e.start, e.stop)}
    text = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise HeaderError(
            f"the header would be {len(text)} bytes long; readers accept {MAX_HEADER}. Write fewer tensors or less metadata "
            "per file.",
            length=len(text),
        )
    return struct.pack("<Q", len(text)) + text


def check_text(what: str, value: Any) -> None:
    """Raise UnsupportedError unless `value` is a str that UTF-8 can encode."""
    if not isinstance(value, str):
        raise UnsupportedError(f"{what} must be a str, got {short(value)} ({type(value).__name__}); use str(...).", found=value)
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise UnsupportedError(f"{what} must be valid Unicode text; {short(value)} has a lone surrogate.", found=value) from e


def write_at(file: BinaryIO, raw: memoryview, at: int) -> None:
    """Write bytes at a place: past the file's own buffer, which has to be empty, where the system can."""
    if hasattr(os, "pwrite"):
        while raw:
            count = os.pwrite(file.fileno(), raw[:_AT_ONCE], at)
            raw, at = raw[count:], at + count
    else:
        file.seek(at)
        file.write(raw)


def raw_bytes(data: Any) -> memoryview:
    """The bytes of an array or buffer, little-endian in C order; zero-copy if already so."""
    if not isinstance(data, np.ndarray):
        return memoryview(data).cast("B")
    little = data.astype(data.dtype.newbyteorder("<")) if data.dtype.byteorder == ">" else data
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data
