"""The thread count of the NumPy kernels, and their shared pool.

How work is split does not depend on the thread, so the thread count does not change any byte of a result.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from ..options import whole_number

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_lock = threading.Lock()
_threads: int | None = None
_pool: ThreadPoolExecutor | None = None
#: The limit of `at_most`, in each thread
_limit = threading.local()


def set_num_threads(n: int) -> None:
    """Let NumPy kernels use up to `n` threads including the caller's; they use fewer where more do not help.

    Raises OptionError unless `n` is an integer >= 1.
    """
    global _threads, _pool
    number = whole_number("n", n)
    if number < 1:
        raise OptionError(
            f"set_num_threads(n) takes n >= 1, including the caller's thread; got {n}. Pass 1 for a single thread.", n=n
        )
    with _lock:
        # Running work keeps the old pool alive; its threads end with the last reference to it.
        _threads, _pool = number, None


def get_num_threads() -> int:
    """Threads that NumPy kernels may use: the value given to `set_num_threads`, else the CPUs available to this process."""
    limit: int | None = getattr(_limit, "threads", None)
    return _setting() if limit is None else min(_setting(), limit)


def _setting() -> int:
    global _threads
    if _threads is None:
        affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
        _threads = (len(affinity(0)) if affinity else os.cpu_count()) or 1
    return _threads


class at_most:  # read as a function in `with`; a generator would take twice as long
    """In this thread, let `get_num_threads` return `n` at most: another library's setting, for its arrays."""

    __slots__ = ("before", "n")

    def __init__(self, n: int) -> None:
        self.n = n

    def __enter__(self) -> None:
        self.before: int | None = getattr(_limit, "threads", None)
        _limit.threads = self.n

    def __exit__(self, *error: object) -> None:
        _limit.threads = self.before


def devices() -> list[str]:
    """The devices of NumPy, for `breccia doctor`."""
    return [f"cpu, up to {get_num_threads()} threads"]


def spread(work: Callable[[int, int], None], count: int, threads: int) -> None:
    """Call `work(first, end)` for consecutive ranges of range(count), on up to `threads` threads; raises the first exception.

    `work` must not call `spread` itself: threads of one pool that wait for each other deadlock.
    """
    threads = min(threads, count)
    if threads <= 1:
        work(0, count)
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    parts = list(pairwise(bounds[1:]))
    futures: list[Future[None]] = []
    with suppress(RuntimeError):  # an interpreter that is shutting down starts no threads
        futures.extend(_shared_pool().submit(work, *part) for part in parts)
    try:
        work(0, bounds[1])
        for part in parts[len(futures) :]:
            work(*part)
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    from concurrent.futures import ThreadPoolExecutor

    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(_setting() - 1, 1), thread_name_prefix="breccia")
        return _pool


def _forget() -> None:
    """In a forked child: the pool's threads do not exist, and the lock may be locked."""
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


_at_fork: Any = getattr(os, "register_at_fork", None)
if _at_fork is not None:
    _at_fork(after_in_child=_forget)
