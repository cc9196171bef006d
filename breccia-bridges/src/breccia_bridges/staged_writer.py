"""Writes a safetensors file of a folder that is staged already, over what an interrupted run has left of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

import numpy as np

from .digests import Hash
from .safetensors_file import Shape
from .safetensors_writer import Data, Writer, raw_bytes, write_at
from .staging import naming

_T = TypeVar("_T")
#: Bytes that are read at a time.
_PIECE = 1 << 22
#: Bytes whose digest is computed in less time than a thread takes to start.
_SHORT = 1 << 18
#: Bytes after which a file is written through to the disk, while more are made: else all of it would be waited for at the end.
_SYNCED = 1 << 26


class StagedWriter(Writer):
    """A `Writer` that writes at its path, which nobody else reads until the staging folder around it is put in its place.

    A file that has the same header stays, and `keep` finds its finished tensors; another one is replaced.
    digests: of the bytes of each tensor in the file that was written or kept; see `digests`.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]) -> None:
        super().__init__(path, tensors, metadata, force=True)
        self.digests: dict[str, str] = {}
        self._hashing, self._syncing = Thread(), Thread()
        self._unsynced = 0
        self._sync: Future[None] | None = None

    def __enter__(self) -> Self:
        with naming(self.path):
            self._file = opened_again(self.path, self._header, self.nbytes)
        return self

    @contextmanager
    def stream(self, name: str) -> Generator[Callable[[Data], None]]:
        digest = Digest(self._hashing)
        with super().stream(name) as put:

            def both(data: Data) -> None:
                raw = raw_bytes(data)
                digest.update(raw)
                put(raw)
                self._note(raw.nbytes)

            yield both
        assert self._file is not None
        with naming(self.path):
            self._file.flush()  # a process that is killed loses what it has not given to the system
        self.digests[name] = digest.text

    @contextmanager
    def columns(self, name: str) -> Generator[Callable[[np.ndarray], None]]:
        """Write one matrix in consecutive ranges of its columns."""
        entry, file = self.entries[name], self._file
        assert file is not None
        start = len(self._header) + entry.start
        width, at = entry.nbytes // max(1, entry.shape[0]), 0

        def put(array: np.ndarray) -> None:
            nonlocal at
            rows = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
            with naming(self.path):
                for n, row in enumerate(rows):
                    write_at(file, row.data, start + n * width + at)
            at += rows.shape[1]

        yield put
        if at != width:
            raise self._miscounted(name, at * entry.shape[0])
        with naming(self.path):
            self.digests[name] = Hash.best().of(pieces_of(file, start, entry.nbytes))
        self._written.add(name)

    def keep(self, digests: Mapping[str, str]) -> bool:
        """Are these tensors in the file, with these digests? Then they need not be written."""
        assert self._file is not None
        for name, wanted in digests.items():
            entry = self.entries[name]
            with naming(self.path):
                if not has_digest(self._file, len(self._header) + entry.start, entry.nbytes, wanted):
                    return False
        self.digests |= digests
        self._written |= digests.keys()
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        file, self._file = self._file, None
        assert file is not None
        self._hashing.close()
        self._syncing.close()
        with naming(self.path), file:
            if kind is None:
                self._check_synced()
                self._check_complete()

    def _note(self, nbytes: int) -> None:
        """So many bytes are written. Raises what the disk said of those before."""
        self._unsynced += nbytes
        if self._unsynced >= _SYNCED and (self._sync is None or self._sync.done()):
            with naming(self.path):
                self._check_synced()
            assert self._file is not None
            self._unsynced, self._sync = 0, self._syncing.submit(os.fsync, self._file.fileno())

    def _check_synced(self) -> None:
        if self._sync is not None:
            self._sync.result()


class Thread:
    """A thread beside that which writes a file, one for all its tensors; it starts with the first call."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, call: Callable[[_T], None], argument: _T) -> Future[None]:
        self._pool = self._pool or ThreadPoolExecutor(1)
        return self._pool.submit(call, argument)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


class Digest:
    """Of pieces; another thread may compute it while the next piece is made, so pieces are not changed afterwards."""

    def __init__(self, hashing: Thread) -> None:
        self._hash, self._hashing = Hash.best(), hashing
        self._last: Future[None] | None = None

    def update(self, raw: memoryview) -> None:
        self._wait()  # for the piece before, so that few are in memory
        if self._hash.is_quick or raw.nbytes < _SHORT:
            self._hash.update(raw)
            return
        self._last = self._hashing.submit(self._hash.update, raw)

    @property
    def text(self) -> str:
        """Of all pieces so far."""
        self._wait()
        return self._hash.text

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None


def opened_again(path: Path, header: bytes, nbytes: int) -> BinaryIO:
    """A file to write into, of this header and size: the one that is there, if it is so; else a new one."""
    if path.is_file() and path.stat().st_size == nbytes:
        file = path.open("r+b")
        if file.read(len(header)) == header:
            return file
        file.close()
    path.unlink(missing_ok=True)
    file = path.open("w+b")  # the mode follows the umask
    try:
        file.truncate(nbytes)
        file.write(header)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def pieces_of(file: BinaryIO, start: int, nbytes: int) -> Iterator[bytes]:
    """A range of a file's bytes, up to its end."""
    file.flush()  # and forget what was read ahead, over which may be written by now
    file.seek(start)
    while nbytes and (piece := file.read(min(_PIECE, nbytes))):
        yield piece
        nbytes -= len(piece)


def has_digest(file: BinaryIO, start: int, nbytes: int, digest: str) -> bool:
    """Has a range of a file's bytes this digest? Not where the library of its function is not installed."""
    return Hash.agrees(digest, pieces_of(file, start, nbytes))
