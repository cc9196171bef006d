"""Locks that signal handlers, finalizers and forked children can take.

A signal handler and a finalizer run in a thread that may have the lock already, between any two of its instructions, so the
locks are reentrant: what they guard must be consistent after each of its instructions. Use them by `with`, which enters and
leaves a lock of the interpreter in C, so that an interrupt cannot leave it locked.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """The one of Python 3.12 and newer. That of 3.11 has a lock, which a forked child may find locked."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            super().__init__(function)
            self.lock = nullcontext()


_locks: WeakSet[Any] = WeakSet()


def at_fork(function: Callable[[], None]) -> None:
    """Have every forked child call `function` first. Does nothing on systems without fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def reentrant() -> threading.RLock:
    """A reentrant lock that is free in a forked child, where the thread that had it does not exist."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # what the standard library does with its own locks


at_fork(_free)
