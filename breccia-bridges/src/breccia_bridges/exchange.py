"""What Python's library lacks: exchanging two paths in one step, and locks on files, by system."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

#: Errors by which a system, or a filesystem, says that it cannot exchange two paths.
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_AT_FDCWD = -100
#: RENAME_EXCHANGE of Linux, and RENAME_SWAP of macOS.
_EXCHANGE = 2


def exchange(a: Path, b: Path) -> bool:
    """Exchange what two paths name, in one step. Returns False where the system or the filesystem cannot."""
    names = os.fsencode(a), os.fsencode(b)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            failed = libc.renamex_np(*names, _EXCHANGE)
        else:
            failed = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE)
    except (AttributeError, OSError, TypeError):  # no such function, or no C library of that form
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))


def lock(descriptor: int) -> bool:
    """Lock an open file until it is closed, or its process ends. Returns False if it is locked already."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        # Network filesystems may have no locks; two processes then replace each other's files, each of them complete.
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
    return True
