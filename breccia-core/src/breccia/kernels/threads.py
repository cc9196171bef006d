"""The thread count of the NumPy kernels, and their shared pool.

How work is split does not depend on the thread, so the thread count does not change any byte of a result.
"""

from __future__ import annotations

import os
import sys
import threading
from _thread import start_new_thread  # without the Python locks of threading.Thread, which an interrupt can leave locked
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from ..errors import OptionError
from ..locks import at_fork, reentrant
from ..options import whole_number

_P = ParamSpec("_P")
_T = TypeVar("_T")
_threads: int | None = None
#: The limit of `at_most`, in each thread
_limit = threading.local()


def set_num_threads(n: int) -> None:
    """Let NumPy kernels use up to `n` threads including the caller's; they use fewer where more do not help.

    Raises OptionError unless `n` is an integer >= 1.

        >>> breccia.set_num_threads(1)  # the caller's thread alone
        >>> breccia.get_num_threads()
        1
    """
    global _threads
    number = whole_number("n", n)
    if number < 1:
        raise OptionError(
            f"set_num_threads(n) takes n >= 1, including the caller's thread; got {n}. Pass 1 for a single thread.", n=n
        )
    _threads = number


def get_num_threads() -> int:
    """Threads that NumPy kernels may use: the value given to `set_num_threads`, else the CPUs available to this process.

    >>> breccia.set_num_threads(4)
    >>> breccia.get_num_threads()
    4
    """
    limit: int | None = getattr(_limit, "threads", None)
    return _setting() if limit is None else min(_setting(), limit)


def _setting() -> int:
    global _threads
    if _threads is None:
        affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
        _threads = (len(affinity(0)) if affinity else os.cpu_count()) or 1
    return _threads


def at_most(n: int, function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """`function(*arguments, **options)`; in this thread, `get_num_threads` returns `n` at most meanwhile."""
    before: int | None = getattr(_limit, "threads", None)
    _limit.threads = n
    try:
        return function(*arguments, **options)
    finally:
        _limit.threads = before


def devices() -> list[str]:
    """The devices of NumPy, for `breccia doctor`."""
    return [f"cpu, up to {get_num_threads()} threads"]


def spread(work: Callable[[int, int], None], count: int, threads: int) -> None:
    """Call `work(first, end)` for consecutive ranges of range(count), on up to `threads` threads.

    Raises the exception of the first range that failed. A signal handler, a finalizer and `work` itself may call it: it waits
    only for ranges that another thread has begun, and does the others itself.
    """
    threads = min(threads, count)
    if threads <= 1 or sys.is_finalizing():  # threads stop in an interpreter that is finalizing
        work(0, count)
        return
    job = _Job(work, pairwise(count * i // threads for i in range(threads + 1)))
    # A worker holds one of these locks while it takes and does ranges. `with` enters and leaves them in C: an interrupt
    # cannot leave them locked.
    begun = [threading.Lock() for _ in range(threads - 1)]
    _offer(job, begun)
    try:
        job.work_on(Exception)  # KeyboardInterrupt ends the call at once
    finally:
        job.ranges.clear()
        for lock in begun:
            with lock:
                pass
    if job.errors:
        raise job.errors[min(job.errors)]


class _Job:
    """Ranges that several threads take from, each once, and the exceptions by the range that raised them."""

    def __init__(self, work: Callable[[int, int], None], ranges: Iterable[tuple[int, int]]) -> None:
        self.work = work
        self.ranges = deque(ranges)
        self.errors: dict[tuple[int, int], BaseException] = {}

    def work_on(self, stored: type[BaseException]) -> None:
        """Take ranges until none is left. An exception of the type `stored` is kept for the caller of `spread`."""
        while True:
            try:
                part = self.ranges.popleft()
            except IndexError:
                return
            try:
                self.work(*part)
            except stored as e:
                self.errors[part] = e


#: What the threads of the pool take.
_offers: SimpleQueue[tuple[_Job, threading.Lock]] = SimpleQueue()
#: How many threads the pool has.
_workers = 0
_starting = reentrant()


def _offer(job: _Job, begun: list[threading.Lock]) -> None:
    """Offer a job to as many threads of the pool as there are locks."""
    global _workers
    with _starting, suppress(RuntimeError):  # no more threads can be started: the caller does what they would do
        while _workers < len(begun):
            start_new_thread(_serve, (_offers,))
            _workers += 1
    for lock in begun:
        _offers.put((job, lock))


def _serve(offers: SimpleQueue[tuple[_Job, threading.Lock]]) -> None:
    while True:
        job, lock = offers.get()
        with lock:
            job.work_on(BaseException)
        del job, lock  # they keep arrays alive


def _forget() -> None:
    """In a forked child, the threads of the pool do not exist."""
    global _offers, _workers
    _offers = SimpleQueue()
    _workers = 0


at_fork(_forget)
