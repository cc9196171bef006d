"""Triton's key of its own package, remembered across processes.

Triton's compiler hashes its package, hundreds of megabytes, in each process before it looks for a compiled kernel on disk. Here
the key is kept in the user cache directory, with the size, the inode and the times of every file of the package. The operating
system alone sets the time when an inode was changed (ctime). So where a package was changed, replaced or moved, Triton computes
its key anew, and a kernel of another compiler never runs.
"""

# pyright: basic, reportMissingImports=false, reportMissingTypeStubs=false

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import platformdirs

from ..tuning.measurements import replace_file


def remembered(compute: Callable[[], str], package: Path, version: str) -> Callable[[], str]:
    """A function that returns what `compute` returns for a package, and computes it once for all processes."""

    @lru_cache(maxsize=1)
    def key() -> str:
        path = platformdirs.user_cache_path("breccia") / "triton" / "package_key.json"
        try:
            stamp = _stamp(package, version)  # before the key is computed: what changes meanwhile has another stamp
        except OSError:  # a file was removed meanwhile
            return compute()
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["stamp"] == stamp and isinstance(stored["key"], str):
                return stored["key"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        value = compute()
        with contextlib.suppress(OSError):  # a folder that cannot be written costs time only
            replace_file(path, json.dumps({"stamp": stamp, "key": value}))
        return value

    return key


def _stamp(package: Path, version: str) -> str:
    """A hash of the facts of each file of a package that the key depends on. Raises OSError."""
    facts: list[tuple[object, ...]] = [(version, str(package), os.uname().nodename)]
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            if name.endswith((".py", ".so")):
                stat = os.stat(os.path.join(folder, name))
                facts.append((folder, name, stat.st_size, stat.st_ino, stat.st_dev, stat.st_mtime_ns, stat.st_ctime_ns))
    return hashlib.sha256(repr(facts).encode()).hexdigest()
