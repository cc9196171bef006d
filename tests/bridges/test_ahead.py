"""Work that threads do ahead: in order, across values, and no more of it than there are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import breccia
from breccia_bridges import compiled
from breccia_bridges.ahead import WAITING, Items, ahead, results


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(compiled, "missing", lambda: "")
    before = breccia.get_num_threads()
    breccia.set_num_threads(request.param)
    yield request.param
    breccia.set_num_threads(before)


def item(number: int, log: list[int] | None = None, seconds: float = 0.0) -> Callable[[Any], int]:
    def done(_: Any) -> int:
        time.sleep(seconds)
        if log is not None:
            log.append(number)
        return number

    return done


def test_results_come_in_order_whatever_takes_longest(threads: int) -> None:
    works = [Items([item(10 * n + i, seconds=0.002 * (i == 0)) for i in range(count)]) for n, count in enumerate([3, 0, 5, 1])]
    with ahead(works) as given:
        found = [(work, list(numbers)) for work, numbers in given]
    assert found == [(work, [10 * n + i for i in range(len(work.items))]) for n, work in enumerate(works)]


def test_a_few_more_items_than_threads_are_under_way_and_those_of_the_next_value_are(threads: int) -> None:
    done: list[int] = []
    with ahead(Items([item(n, done)]) for n in range(50)) as given:
        for n, (_, numbers) in enumerate(given):
            assert next(numbers) == n
            if threads > 1 and n == 0:
                until(lambda: len(done) > 2)
            time.sleep(0.001)
            assert len(done) <= n + 1 + (threads + WAITING if threads > 1 else 0)
            assert not list(numbers)
    assert sorted(done) == list(range(50))


def test_nothing_is_under_way_beside_a_value_that_takes_memory_of_its_own(threads: int) -> None:
    done: list[int] = []
    works = [Items([item(0, done)]), Items([item(1, done), item(2, done)], alone=True), Items([item(3, done)])]
    with ahead(works) as given:
        for (_, numbers), last in zip(given, (0, 2, 3), strict=True):
            list(numbers)
            time.sleep(0.005)
            assert sorted(done) == list(range(last + 1))


def test_the_error_of_an_item_is_raised_where_its_result_is_taken_and_no_other_begins(threads: int) -> None:
    done: list[int] = []

    def fails(_: Any) -> int:
        raise ValueError("the third")

    found: list[int] = []
    with pytest.raises(ValueError, match="^the third$"):
        for number in results([item(0, done), item(1, done), fails, *(item(n, done, 0.001) for n in range(3, 100))]):
            found.append(number)
    assert found == [0, 1] and len(done) < 10


def test_items_run_beside_each_other_each_with_arrays_of_its_own(threads: int) -> None:
    meet = threading.Barrier(threads)

    def waits(rooms: Any) -> int:
        meet.wait(timeout=30)
        return id(rooms)

    assert len(set(results([waits] * threads))) == threads


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
