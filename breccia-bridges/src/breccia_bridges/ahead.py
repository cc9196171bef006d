"""Work on the slabs of values that threads do ahead of the one who takes it, in order, from one value on to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from breccia.backend import threads
from breccia.internal import measuring

from . import compiled

_T = TypeVar("_T")
#: What is done for one slab, with arrays that a thread has for it.
Item = Callable[[measuring.Rooms], _T]
_W = TypeVar("_W", bound="Work")
#: Items beside one for each thread that are under way: done, they wait to be taken, so that threads go on while the caller
#: waits for the disk.
WAITING = 3


class Work(Protocol):
    """What is done for one value, slab by slab. Each slab takes little memory.

    alone: the value takes more besides, so that nothing else is under way meanwhile.
    """

    @property
    def items(self) -> Sequence[Item[Any]]: ...

    @property
    def alone(self) -> bool: ...


@dataclass(frozen=True)
class Items(Generic[_T]):
    """A work of items that give the same."""

    items: Sequence[Item[_T]]
    alone: bool = False


def results(items: Sequence[Item[_T]]) -> Generator[_T]:
    """What items give, in order; threads do them meanwhile."""
    with ahead([Items(items)]) as works:
        for _, found in works:
            yield from found


@contextmanager
def ahead(works: Iterable[_W]) -> Generator[Iterator[tuple[_W, Iterator[Any]]]]:
    """Each work with what its items give, in order, which is to be taken before the next work.

    Each thread does one item; the caller takes those before it meanwhile. An item runs when all before it have been begun.
    """
    workers = threads.get_num_threads()
    if workers <= 1 or compiled.missing():  # NumPy's short loops would wait for the interpreter, not for each other
        yield _one_by_one(iter(works))
        return
    with ThreadPoolExecutor(workers) as pool:
        under_way = _UnderWay(works, pool, workers)
        try:
            yield under_way.results()
        finally:
            under_way.cancel()


def _one_by_one(works: Iterator[_W]) -> Generator[tuple[_W, Iterator[Any]]]:
    rooms = measuring.Rooms()
    while (work := next(works, None)) is not None:
        yield work, map(_call(rooms), work.items)
        del work  # it may hold a whole value, and the next one is made by `next`


def _call(rooms: measuring.Rooms) -> Callable[[Item[Any]], Any]:
    return lambda item: item(rooms)


class _Begun(Generic[_W]):
    """A work of which items are under way."""

    def __init__(self, work: _W) -> None:
        self.work, self.alone = work, work.alone
        self.left = iter(work.items)
        self.futures: deque[Future[Any]] = deque()
        self.is_begun_whole = False


class _UnderWay(Generic[_W]):
    """The works whose items are under way, the one whose results are taken first."""

    def __init__(self, works: Iterable[_W], pool: ThreadPoolExecutor, workers: int) -> None:
        self._works, self._pool, self._most = iter(works), pool, workers + WAITING
        self._rooms = deque(measuring.Rooms() for _ in range(workers))
        self._begun: deque[_Begun[_W]] = deque()
        self._next: _W | None = None

    def results(self) -> Generator[tuple[_W, Iterator[Any]]]:
        while self._begin():
            first = self._begun[0]
            yield first.work, self._results_of(first)
            self._begun.popleft()
            del first

    def cancel(self) -> None:
        for begun in self._begun:
            for future in begun.futures:
                future.cancel()

    def _results_of(self, begun: _Begun[_W]) -> Generator[Any]:
        while begun.futures:
            found = begun.futures.popleft().result()
            self._begin()
            yield found

    def _begin(self) -> bool:
        """Begin items, as many as may be under way. Is any work?"""
        while sum(len(begun.futures) for begun in self._begun) < self._most:
            begun = self._begun[-1] if self._begun else None
            if begun is None or begun.is_begun_whole:
                if len(self._begun) == self._most or (begun and begun.alone):
                    break
                self._next = self._next or next(self._works, None)
                if self._next is None or (begun and self._next.alone):
                    break
                self._begun.append(_Begun(self._next))
                self._next = None
                continue
            item = next(begun.left, None)
            if item is None:
                begun.is_begun_whole = True
            else:
                begun.futures.append(self._pool.submit(self._done, item))
        return bool(self._begun)

    def _done(self, item: Item[Any]) -> Any:
        rooms = self._rooms.popleft()
        try:
            return threads.at_most(1, item, rooms)
        finally:
            self._rooms.append(rooms)
