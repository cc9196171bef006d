"""Selections of cases: which cases of a parametrized test `make test` runs, and which of them `make test-all`.

In the cases of `make test` every pair of parameter values occurs, in those of `make test-all` every three; with
`@pytest.mark.covering(n, m)` every n values and every m. `make slow` runs all other cases.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest

from breccia import ScalingRecipe
from breccia.testing.laws import Law

#: Cases with these marks are excluded from `make test-all` already.
_LEFT_OUT = {"slow", "gpu"}


def mark_cases(items: Sequence[pytest.Item], fewest: bool = False) -> None:
    """Mark cases `leftover` that `make test` leaves to `make test-all`, and `exhaustive` those that this leaves to `make slow`.

    A recipe counts as its name and its fields, a law as the parts of its id. fewest: only the cases of `make test` are run; all
    others are marked `leftover`, which takes a fraction of the time.
    """
    tests: dict[Callable[..., Any], list[pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and not _LEFT_OUT & {m.name for m in item.iter_markers()}
        ):
            tests.setdefault(item.function, []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("covering")
        fewer, more = mark.args if mark else (2, 3)
        values = [_values(case) for case in cases]
        few = covering([_together(each, fewer) for each in values])
        many = set(range(len(cases))) if fewest else few | covering([_together(each, more) for each in values], few)
        for n, case in enumerate(cases):
            if n not in few:
                case.add_marker("leftover" if n in many else "exhaustive")


def covering(cases: Sequence[Iterable[Hashable]], taken: Iterable[int] = ()) -> set[int]:
    """Indices of cases that cover the items of all cases, together with the cases `taken`.

    Greedy: the case with the most new items comes first.
    """
    left = [set(case) for case in cases]
    chosen: set[int] = set()
    have: set[Hashable] = set().union(*(left[n] for n in taken))
    queue = [(-len(case), n) for n, case in enumerate(left)]
    heapq.heapify(queue)
    while queue:
        claimed, n = heapq.heappop(queue)
        left[n] -= have
        if -claimed > len(left[n]):  # earlier choices covered some of its items; requeue it
            heapq.heappush(queue, (-len(left[n]), n))
        elif left[n]:
            chosen.add(n)
            have |= left[n]
    return chosen


def _together(values: list[Hashable], strength: int) -> Iterator[Hashable]:
    """Combinations of 1 to `strength` values."""
    for n in range(1, strength + 1):
        yield from combinations(values, n)


def _values(case: pytest.Function) -> list[Hashable]:
    """The parameter values of a case; recipes and laws are split into their components."""
    found: list[Hashable] = []
    for name, value in sorted(case.callspec.params.items()):
        match value:
            case ScalingRecipe() as recipe:
                found += [(name, recipe.name), *((name, field, value) for field, value in sorted(recipe.changed.items()))]
            case Law() as law:
                found += [(name, place, part) for place, part in enumerate(law.id.replace(".", "/").split("/"))]
            case _:
                found.append((name, id(value)))  # all cases of a test share the object, hashable or not
    return found
