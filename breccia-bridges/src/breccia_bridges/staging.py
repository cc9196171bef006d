"""Files and folders that appear complete or not at all: written in one named folder beside them, then put in their place."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from .exchange import exchange, lock

#: The longest file name, in bytes, of the usual filesystems.
_LONGEST = 255
#: What a staging folder has in it.
_NAMES = ("lock", "journal", "new", "old", "calibrated")


def staging_folder(destination: Path) -> Path:
    """The folder in which `destination` is written: a hidden one beside it, of a name that depends on its name alone."""
    name = f".breccia-staging.{destination.name}"
    if len(os.fsencode(name)) > _LONGEST:
        name = f".breccia-staging.{hashlib.sha256(os.fsencode(destination.name)).hexdigest()}"
    return destination.with_name(name)


class Staging:
    """Writes a file or a folder beside its destination, and puts it there when it is complete.

        with Staging(path) as staging:
            staging.new.write_bytes(...)  # or a folder
            staging.commit()

    Without `commit`, or after an exception, the destination stays as it was, and nothing is left beside it. A process that is
    killed leaves only `staging_folder(path)`. The next one to write the same destination removes that folder with a warning,
    after putting back a destination that was in the middle of a replacement.

    A file replaces a file in one step. A folder does where the system can exchange two paths (Linux, macOS). Elsewhere there is
    a moment between two renames in which the destination has no name; its old contents are complete in the staging folder.

    keeps_journal: what an interrupted or failed run has written stays as long as there is a file `journal` beside it, for the
    next run to go on with. target: what messages call the destination.

    Raises BlockingIOError while another process, or another part of this one, writes the same destination; FileExistsError
    where something else has the name of the staging folder.
    """

    def __init__(self, destination: Path, keeps_journal: bool = False, target: Path | None = None) -> None:
        self.destination, self.folder, self.target = destination, staging_folder(destination), target or destination
        self.journal, self._keeps_journal = self.folder / "journal", keeps_journal
        self.new, self._old = self.folder / "new" / destination.name, self.folder / "old" / destination.name
        #: For files that the conversion makes before those that it writes.
        self.calibrated = self.folder / "calibrated"
        self._lock, self._committed = -1, False

    @property
    def kept(self) -> bool:
        """Is there something to go on with?"""
        return self._keeps_journal and self.journal.is_file() and self.journal.stat().st_size > 0

    @property
    def moved(self) -> Path | None:
        """Where an interrupted run has moved the destination, of which there is nothing else; the next run puts it back."""
        return self._old if os.path.lexists(self._old) and not os.path.lexists(self.destination) else None

    def check(self) -> None:
        """Raise what entering would raise, without a trace."""
        if self._is_missing():
            return
        try:
            descriptor = os.open(self.folder / "lock", os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            self._take(descriptor)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        self._lock = self._locked()
        try:
            self._recover()
            self.new.parent.mkdir(exist_ok=True)
        except BaseException:
            self._close()
            raise
        return self

    def commit(self) -> None:
        """Write everything through to the disk, and put it in the place of the destination."""
        sync_tree(self.new)
        if not self.new.is_dir() or self.new.is_symlink() or not os.path.lexists(self.destination):
            os.replace(self.new, self.destination)
        elif not exchange(self.new, self.destination):
            self._old.parent.mkdir()
            self._replace_folder()
        self._committed = True
        remove(self.journal)
        sync(self.destination.parent)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._close() and self._committed:
            raise OSError(f"{self.destination} is written; the old contents could not be removed and are in {self.folder}.")

    # -- the lock -----------------------------------------------------------------------------------------------

    def _is_missing(self) -> bool:
        """Is there no staging folder? Raises FileExistsError where something else has its name."""
        try:
            ours = stat.S_ISDIR(self.folder.lstat().st_mode) and set(os.listdir(self.folder)) <= set(_NAMES)
        except FileNotFoundError:
            return True
        if not ours:
            raise FileExistsError(
                f"cannot write {self.destination}: {self.folder}, where it would be written first, is not a folder that "
                "breccia made; remove it, or choose another destination."
            )
        return False

    def _locked(self) -> int:
        """The descriptor of the locked file in the staging folder, which is made if it is missing."""
        while True:
            if self._is_missing():
                try:
                    self.folder.mkdir(mode=0o700)
                except FileExistsError:  # another process was faster
                    continue
            try:
                descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:  # its owner has just removed it
                continue
            try:
                self._take(descriptor)
                if _same_file(descriptor, self.folder / "lock"):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        if not lock(descriptor):
            raise BlockingIOError(f"another process is writing {self.target} (in {self.folder}); wait until it has ended.")

    def _close(self) -> bool:
        """Remove the folder, unless it holds the only copy of the destination, and give the lock back. Is anything left?"""
        anything_left = True
        if sys.platform == "win32":  # which does not remove a file that is open
            os.close(self._lock)
        try:
            if os.path.lexists(self.destination):
                remove(self._old.parent)
            if not self.kept:
                remove(self.journal)
                remove(self.new.parent)
                remove(self.calibrated)
            anything_left = any(os.path.lexists(path) for path in (self.new, self._old))
            if set(os.listdir(self.folder)) == {"lock"}:
                (self.folder / "lock").unlink()
                self.folder.rmdir()
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST):  # the next process is here already
                raise
        finally:
            if sys.platform != "win32":
                os.close(self._lock)
        return anything_left

    # -- after and during replacements --------------------------------------------------------------------------

    def _recover(self) -> None:
        """Remove what a killed process left, after putting back a destination that it had moved away."""
        kept = {"journal", "new", "calibrated"} if self.kept else set[str]()
        names = sorted(set(os.listdir(self.folder)) - {"lock"} - kept)
        if self.moved:
            self._old.rename(self.destination)
            warnings.warn(
                f"{self.destination} is back: a run that was interrupted while it replaced this folder had moved it to "
                f"{self.folder}.",
                stacklevel=4,
            )
        elif names:
            warnings.warn(f"removed {self.folder}, which an interrupted run left behind.", stacklevel=4)
        for name in names:
            remove(self.folder / name)
        left = set(os.listdir(self.folder)) - {"lock"} - kept
        if left:
            raise OSError(f"{self.folder} is left from an interrupted run and cannot be removed; remove it.")

    def _replace_folder(self) -> None:
        """Replace the destination by two renames; the old folder is removed only after both."""
        try:
            self.destination.rename(self._old)
            self.new.rename(self.destination)
        finally:  # looks at the disk, since a signal may come between any two steps
            if os.path.lexists(self.new) and os.path.lexists(self._old):
                self._put_back()

    def _put_back(self) -> None:
        try:
            self._old.rename(self.destination)
        except OSError as e:
            raise OSError(
                f"{self.destination} could not be replaced or restored ({e}); the old contents are complete in {self._old}."
            ) from e


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 and replace an existing file.

    Lone surrogates, which names of tensors may contain and UTF-8 cannot encode, are written as escapes.
    """
    with Staging(path) as staging:
        with naming(path):
            staging.new.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        staging.commit()


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Let the errors of open files say which file they are about: the system does not."""
    try:
        yield
    except OSError as e:
        if e.filename is None and e.errno is not None:
            e.filename = str(path)
        raise


def remove(path: Path) -> None:
    """Remove a file, link or folder, if it exists; what the system refuses to remove stays."""

    def attempt() -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    try:
        attempt()
    finally:  # again, in case a signal interrupted the first attempt
        attempt()


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    if path.is_dir() and sys.platform == "win32":  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() or sys.platform != "win32" else os.O_RDWR)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """`sync` of a file, or of a folder and everything in it."""
    for folder, _, names in os.walk(path):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
    if not path.is_dir():
        sync(path)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
