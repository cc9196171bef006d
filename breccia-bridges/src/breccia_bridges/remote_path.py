"""Paths of object stores and servers: `s3://`, `gs://`, `hf://`, `http://` and what else fsspec has a filesystem for.

fsspec (https://filesystem-spec.readthedocs.io) and the package of a protocol do all of it: connections, credentials, retries.
Credentials and options are those of its own configuration: environment variables, and files in `~/.config/fsspec`.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import stat
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from breccia import BrecciaError, UnsupportedError
from breccia.internal import install

#: A URL. One letter before the colon is a drive of Windows.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
#: Protocols whose paths are those of this machine.
_LOCAL = ("file", "local")
#: Protocols whose servers may have no ranges, and whose folders are pages with links.
_WEB = ("http", "https")
#: Bytes that are read ahead in a header, and of one request for tensors; the most requests at a time.
_AHEAD, _PIECE, _AT_ONCE = 1 << 18, 1 << 22, 4
#: Which of these a filesystem has says the version of a file; the first one counts.
_VERSION = (
    "ETag", "etag", "generation", "blob_id", "md5Hash", "VersionId", "mtime", "LastModified", "last_modified", "Last-Modified",
    "created",
)  # fmt: skip


def path_of(path: str | os.PathLike[str]) -> Path:
    """The path of a file or folder on this machine, or a `RemotePath` for a URL.

    Raises ImportError without fsspec, or without the package of the protocol; UnsupportedError for a protocol that fsspec does
    not know, and for chained URLs ("simplecache::s3://...").
    """
    text = os.fspath(path)
    url = _URL.fullmatch(text)
    if url is None:
        if "::" in text and "://" in text:
            raise UnsupportedError(
                f"{text} chains filesystems, which breccia does not read through; give the URL of the file or folder itself.",
                path=text,
            )
        return Path(path)
    protocol = url[1].lower()
    if protocol in _LOCAL:
        from urllib.parse import urlparse
        from urllib.request import url2pathname

        place = urlparse(text)
        return Path(url2pathname(place.netloc + place.path))
    filesystem(protocol)
    return RemotePath(f"{protocol}://{url[2]}")


@lru_cache
def filesystem(protocol: str) -> Any:
    """The class of a protocol's filesystems. Raises ImportError and UnsupportedError, as `path_of`."""
    try:
        import fsspec
    except ImportError as e:
        raise ImportError(f"{protocol}:// paths need fsspec: {install('breccia-bridges[remote]')}") from e
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as e:
        said = str(e).rstrip(".")
        raise ImportError(f"{protocol}:// paths need a package beside fsspec, which says: {said}.") from e
    except ValueError as e:
        raise UnsupportedError(
            f"fsspec has no filesystem for {protocol}://. Give a path of this machine, or a URL such as s3://, gs://, hf:// or "
            "https://, or install the package that declares the protocol.",
            protocol=protocol,
        ) from e


class RemotePath(type(Path())):
    """A URL as a path: what `pathlib` says of names holds, and what it asks the system is asked of fsspec.

    Answers may come from fsspec's listings, except those of `stat`. Raises OSError: FileNotFoundError, PermissionError, and
    ConnectionError for whatever else a filesystem says.
    """

    def __str__(self) -> str:
        text = super().__str__().replace("\\", "/") if os.name == "nt" else super().__str__()
        protocol, colon, rest = text.partition(":/")
        return f"{protocol}://{rest}" if colon else text.removesuffix(":") + "://"

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    @property
    def protocol(self) -> str:
        return self.parts[0].removesuffix(":")

    @property
    def fs(self) -> Any:
        """The filesystem, of which fsspec keeps one for each set of options."""
        of = filesystem(self.protocol)
        with asking(self):
            return of(**of._get_kwargs_from_urls(str(self)))

    @property
    def key(self) -> str:
        """What the filesystem calls it."""
        return filesystem(self.protocol)._strip_protocol(str(self))

    # -- what pathlib asks the system --------------------------------------------------------------------------

    def info(self) -> dict[str, Any] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the filesystem knows of it; None if there is nothing."""
        try:
            with asking(self):
                return self.fs.info(self.key)
        except FileNotFoundError:
            return None

    def refresh(self) -> None:
        """Let answers about it, and about what is in it, come from no older listing."""
        fs = self.fs
        with asking(self):
            fs.invalidate_cache(self.key)

    def exists(self, **_: Any) -> bool:
        return self.info() is not None

    def is_file(self, **_: Any) -> bool:
        info = self.info()
        return info is not None and not _is_folder(info, self.protocol)

    def is_dir(self, **_: Any) -> bool:
        info = self.info()
        return info is not None and _is_folder(info, self.protocol)

    def is_symlink(self) -> bool:
        return False

    def is_mount(self) -> bool:
        return False

    def stat(self, **_: Any) -> os.stat_result:
        """The size and, in place of a time of modification and an inode, the version. Asks the filesystem, not a listing."""
        self.refresh()
        fs = self.fs
        with asking(self):
            info = fs.info(self.key)
        if _is_folder(info, self.protocol):
            return os.stat_result((stat.S_IFDIR, *[0] * 9))
        if info.get("size") is None:
            raise _without_ranges(self)
        of = next((f"{name}={info[name]!r}" for name in _VERSION if info.get(name) is not None), "")
        version = int.from_bytes(hashlib.sha256(of.encode()).digest()[:7])
        return os.stat_result(
            (stat.S_IFREG, version, 0, 1, 0, 0, info["size"], 0, 0, 0),
            {"st_mtime_ns": version},  # pyright: ignore
        )

    def lstat(self) -> os.stat_result:
        return self.stat()

    def samefile(self, other_path: Any) -> bool:
        return str(self) == str(other_path)

    def absolute(self) -> RemotePath:
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        return self

    def relative_to(self, *other: Any, **_: Any) -> Path:  # pyright: ignore[reportIncompatibleMethodOverride]
        base = type(self)(*other).parts
        if self.parts[: len(base)] != base:
            raise ValueError(f"{self} is not in {type(self)(*other)}")
        return Path(*self.parts[len(base) :])

    def iterdir(self) -> Generator[RemotePath]:
        fs = self.fs
        with asking(self):
            names = [str(name).rstrip("/").rpartition("/")[2] for name in fs.ls(self.key, detail=False)]
        yield from (self / name for name in dict.fromkeys(names) if name)

    def glob(self, pattern: str, **_: Any) -> Generator[RemotePath]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of names in this folder alone."""
        yield from (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def open(self, mode: str = "rb", *_: Any, **__: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Opened for reading bytes, which are asked for by ranges. Raises UnsupportedError for a server without ranges."""
        size = self.stat().st_size
        if self.protocol in _WEB and size:
            with asking(self), self.fs.open(self.key, block_size=1, cache_type="none") as file:
                try:
                    file.seek(size - 1)
                    file.read(1)
                except ValueError as e:  # by which fsspec says that the answer was the whole file
                    raise _without_ranges(self) from e
        return io.BufferedReader(_Ranges(self, size), _AHEAD)

    def read_bytes(self) -> bytes:
        fs = self.fs
        with asking(self):
            return fs.cat_file(self.key)

    def read_text(self, encoding: str | None = None, errors: str | None = None, **_: Any) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")


class _Ranges(io.RawIOBase):
    """The bytes of a file at a URL, as the system would give them."""

    def __init__(self, path: RemotePath, size: int) -> None:
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        read_ranges(self._path, [(self._at, into)])
        self._at += into.nbytes
        return into.nbytes


def is_remote(path: Path) -> bool:
    """Is it a URL?"""
    return isinstance(path, RemotePath)


def lexists(path: Path) -> bool:
    """Is there anything of that name, be it a broken link?"""
    return path.exists() if is_remote(path) else os.path.lexists(path)


def walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """As `os.walk`, with the folder as a path."""
    if not isinstance(folder, RemotePath):
        yield from ((Path(at), folders, names) for at, folders, names in os.walk(folder))
        return
    waiting: list[Path] = [folder]
    while waiting:
        here = waiting.pop()
        inside = {path.name: path.is_dir() for path in here.iterdir()}
        folders = [name for name, is_folder in inside.items() if is_folder]
        yield here, folders, [name for name, is_folder in inside.items() if not is_folder]
        waiting.extend(here / name for name in reversed(folders))


def copy_file(path: Path, to: Path) -> None:
    """Copy a file to one of this machine."""
    if isinstance(path, RemotePath):
        fs = path.fs
        with asking(path):
            fs.get_file(path.key, str(to))
    else:
        shutil.copy2(path, to)


def read_ranges(path: RemotePath, ranges: Iterable[tuple[int, memoryview]]) -> None:
    """Read bytes from given positions of a file, a few pieces of at most 4 MiB at a time.

    Raises ConnectionError where the filesystem gives other than what was asked for.
    """
    fs, key = path.fs, path.key
    pieces = [(at + i, into[i : i + _PIECE]) for at, into in ranges for i in range(0, into.nbytes, _PIECE)]
    for n in range(0, len(pieces), _AT_ONCE):
        some = pieces[n : n + _AT_ONCE]
        starts, ends = [at for at, _ in some], [at + into.nbytes for at, into in some]
        with asking(path):
            parts = fs.cat_ranges([key] * len(some), starts, ends, on_error="return")
            for part in parts:
                if isinstance(part, Exception):
                    raise part
        for part, at, (_, into) in zip(parts, starts, some, strict=True):
            if len(part) != into.nbytes:
                raise ConnectionError(f"{path}: asked for {into.nbytes} bytes from byte {at} on, and got {len(part)}.")
            into[:] = part


@contextmanager
def asking(path: Path) -> Generator[None]:
    """Let the errors of filesystems, which have types of their own, be those of the system, and say what they are about."""
    try:
        yield
    except (BrecciaError, ImportError, MemoryError):
        raise
    except FileNotFoundError as e:
        if _is_missing(e.__cause__):
            raise FileNotFoundError(f"there is nothing at {path}") from e
        raise ConnectionError(f"{path}: {_said(e.__cause__)}") from e
    except PermissionError as e:
        raise PermissionError(f"{path}: {e}") from e
    except Exception as e:
        raise ConnectionError(f"{path}: {_said(e)}") from e


def _is_missing(cause: BaseException | None) -> bool:
    """Is that why a file is not found? fsspec says of any failure of a server that the file is not found."""
    return cause is None or isinstance(cause, FileNotFoundError | KeyError) or getattr(cause, "status", 0) in (404, 410)


def _said(e: BaseException | None) -> str:
    return f"its filesystem says {type(e).__name__}: {str(e).rstrip('.') or 'no more'}."


def _is_folder(info: dict[str, Any], protocol: str) -> bool:
    return info["type"] == "directory" or (protocol in _WEB and info.get("mimetype") == "text/html")


def _without_ranges(path: Path) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: its server gives whole files only, no ranges of their bytes, by which breccia reads. Download the file, and "
        "give its path on this machine.",
        path=str(path),
    )


def need_reserving(path: Path) -> None:
    """Raise UnsupportedError where addresses cannot be reserved without memory, which reading tensors of a URL needs."""
    if sys.platform == "win32":
        raise UnsupportedError(
            f"{path}: breccia reads tensors from URLs on Linux and macOS. Download the file, and give its path.", path=str(path)
        )
