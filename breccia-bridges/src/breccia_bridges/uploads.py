"""Writes a conversion to a URL: files are made on this machine, uploaded one by one, and put in their place at the end.

A folder's files go to a hidden folder in it. An object store has no step that renames a folder, so the last step is one of
many copies within the store, in an order in which no reader takes a part for the whole: the index first, which names all files
of weights, and config.json last. Old files are removed before it, first those that make them a model. One file is uploaded in
its place: object stores show it when it is complete, and elsewhere a part of it is no file of its format.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from breccia.internal import install

from .announcements import CONFIG
from .checkpoint import INDEX
from .convert_file import FilePlan
from .journal import Journal
from .remote_path import RemotePath, asking, is_remote, walk
from .results import Advance, TensorReport
from .safetensors_file import identity
from .staging import Staging, remove

#: The folder in the destination that has what is not yet complete.
HIDDEN = ".breccia-staging"
#: Bytes that are read back at a time.
_PIECE = 1 << 23


def staged_at(destination: Path) -> Path:
    """Where a destination is staged: itself, or for a URL a path in the user's cache folder (XDG_CACHE_HOME on Linux)."""
    if not is_remote(destination):
        return destination
    try:
        import platformdirs
    except ImportError as e:
        raise ImportError(f"{destination} needs platformdirs to be written: {install('breccia-bridges[remote]')}") from e
    folder = platformdirs.user_cache_path("breccia") / "uploads"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(str(destination).encode()).hexdigest()[:16]}-{destination.name}"


class Uploads:
    """The files of one destination that are uploaded, and its end.

        with staging, Uploads(url, staging, journal, True, True) as uploads, journal:
            if not uploads.has("model.safetensors"):
                ...  # write it to staging.new / "model.safetensors"
                uploads.finish("model.safetensors")
            uploads.commit()

    is_folder: whether the destination is one. reads_back: whether each file is read back, and compared with what was uploaded.

    What was uploaded stays as long as the journal does. Entering tries whether the store takes files and copies them.
    """

    def __init__(self, target: RemotePath, staging: Staging, journal: Journal, is_folder: bool, reads_back: bool) -> None:
        self.target, self._staging, self._journal = target, staging, journal
        self._is_folder, self._reads_back = is_folder, reads_back
        self._hidden, self._names = target / HIDDEN, set[str]()

    def __enter__(self) -> Self:
        if self._is_folder:
            if not self._staging.kept and self._discard():
                warnings.warn(f"removed {self._hidden}, which an interrupted run left behind.", stacklevel=4)
            fs, one, other = self.target.fs, self._hidden / "trial", self._hidden / "trial-copy"
            with asking(self._hidden):
                fs.pipe_file(one.key, b"breccia tries to write here")
                fs.cp_file(one.key, other.key)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_folder and not self._staging.kept:
            with suppress(OSError):  # the next run to this destination removes it
                self._discard()

    def at(self, name: str) -> RemotePath:
        """Where a file of a folder is before its place."""
        return self._hidden / "new" / name

    def has(self, name: str) -> bool:
        """Is a file of a folder uploaded, as an interrupted run has left it?"""
        noted = self._journal.uploaded.get(name)
        if noted is None or _state(self.at(name)) != noted:
            return False
        self._names.add(name)
        return True

    def reports(self, planned: FilePlan, advance: Advance) -> list[TensorReport]:
        """What is known of the values of a file that is uploaded."""
        for job in planned.jobs.values():
            advance(job.name, 2 * job.value.nbytes)
        verified = self._journal.verified
        return [job.report(*verified.get(name, (None, None))) for name, job in planned.jobs.items()]

    def finish(self, name: str) -> None:
        """Upload a complete file of a folder, and remove it here: when its task has ended, as nothing looks for it then."""
        if self._is_folder:
            self._upload(name)
            (self._staging.new / name).unlink()

    def commit(self) -> None:
        """Upload what is left, and put all files in their place."""
        new, is_folder = self._staging.new, self._is_folder
        if is_folder:
            for folder, _, names in walk(new):
                for name in names:
                    self._upload((folder / name).relative_to(new).as_posix())
        self._journal.note_placing()
        if is_folder:
            self._place()
            self._discard()
        else:
            self._put(new, self.target)
        remove(self._staging.journal)

    def _place(self) -> None:
        journal = self._journal
        placed = {name for name, state in journal.placed.items() if _state(self.target / name) == state}
        old = {path.relative_to(self.target).as_posix() for path in _files(self.target)}
        for name in sorted(old - placed, key=_rank, reverse=True):
            with asking(self.target / name):
                self.target.fs.rm_file((self.target / name).key)
        for name in sorted(self._names, key=_rank):
            if name not in placed:
                with asking(self.target / name):
                    self.target.fs.cp_file(self.at(name).key, (self.target / name).key)
                _check_size(self.target / name, self.at(name).stat().st_size)
                journal.note_placed(name, _state(self.target / name) or [])

    def _upload(self, name: str) -> None:
        self._put(self._staging.new / name, self.at(name))
        self._names.add(name)
        self._journal.note_uploaded(name, _state(self.at(name)) or [])

    def _put(self, path: Path, to: RemotePath) -> None:
        fs = to.fs
        with asking(to):
            fs.put_file(str(path), to.key)
        _check_size(to, path.stat().st_size)
        if self._reads_back:
            with path.open("rb") as here, to.open() as there:
                if _digest(here) != _digest(there):
                    raise ConnectionError(f"{to} reads back other bytes than were uploaded. Run the same command again.")

    def _discard(self) -> bool:
        """Remove what is not in its place. Was there any?"""
        fs = self.target.fs
        self.target.refresh()
        if not self._hidden.exists():
            return False
        with asking(self._hidden):
            fs.rm(self._hidden.key, recursive=True)
        return True


def _rank(name: str) -> tuple[int, str]:
    """The order in which files are put in their place: the index, others, config.json."""
    return (0 if name == INDEX else 2 if name == CONFIG else 1), name


def _files(folder: RemotePath) -> Iterator[RemotePath]:
    """The files of a folder but those with hidden names, and in hidden folders, which a store or a service may have."""
    folder.refresh()
    if not folder.is_dir():
        return
    for at, folders, names in walk(folder):
        if at == folder:
            folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (RemotePath(at / name) for name in names if at != folder or not name.startswith("."))


def _state(path: Path) -> list[int] | None:
    """The size and version of a file; None if there is none."""
    try:
        return list(identity(path.stat())[2:])
    except FileNotFoundError:
        return None


def _check_size(path: Path, wanted: int) -> None:
    found = path.stat().st_size
    if found != wanted:
        raise ConnectionError(f"{path} has {found} bytes, and {wanted} were written. Run the same command again.")


def _digest(file: BinaryIO) -> bytes:
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.digest()
