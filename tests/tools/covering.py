"""Selections of cases: which cases of a parametrized test `make test` runs, and which of them `make test-all`.

In the cases of `make test` every pair of parameter values occurs, in those of `make test-all` every three, of a test that is
marked long every value; with `@pytest.mark.covering(n, m)` every n values and every m. `make slow` runs all other cases.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

from breccia import ScalingRecipe
from breccia.testing.laws import Law

#: Cases with these marks are excluded from `make test-all` already.
_LEFT_OUT = {"slow", "gpu"}
#: How many values occur together in the cases of `make test` and of `make test-all`, of a test that is not long and of one.
_TOGETHER, _TOGETHER_LONG = (2, 3), (1, 1)


def excluded_by(expression: str) -> set[str]:
    """The marks that an expression of `-m` excludes, in the forms `not a`, `not (a or b)` and `... and not (a or b)`."""
    found = re.fullmatch(r"(?:(?:not )?(?:\w+|\([\w ]+\)) and )*not (?:(\w+)|\(([\w ]+)\))", expression)
    return set() if found is None else set((found[1] or found[2]).split(" or "))


def mark_cases(metafunc: pytest.Metafunc, excluded: Collection[str] = ()) -> None:
    """Mark the cases of a test `leftover` that `make test` leaves to `make test-all`, and `exhaustive` those for `make slow`.

    A recipe counts as its name and its fields, a law as the parts of its id. excluded: marks whose cases are not created, of
    which there are more than of others; an id stays the same whatever is excluded.
    """
    calls = metafunc._calls  # before pytest makes an item of each, which takes most of the time of a collection
    always = {mark.name for mark in metafunc.definition.iter_markers()}
    if calls and not always & _LEFT_OUT:
        mark = metafunc.definition.get_closest_marker("covering")
        together = mark.args if mark else _TOGETHER_LONG if "long" in always else _TOGETHER
        _mark(calls, together, {"leftover", "exhaustive"} <= {*excluded})
    # A test keeps one case, for `-m` to deselect: without a case pytest would make an item that lacks its arguments.
    calls[:] = [call for call in calls if not (always | {mark.name for mark in call.marks}) & {*excluded}] or calls[:1]


def _mark(calls: Sequence[Any], together: tuple[int, int], fewest: bool) -> None:
    """Mark the cases of one test. fewest: only those of `make test` are run, and all others are `leftover`."""
    fewer, more = together
    chosen = [call for call in calls if not _LEFT_OUT & {mark.name for mark in call.marks}]
    values = [_values(call.params) for call in chosen]
    few = covering([_together(each, fewer) for each in values])
    many = {*range(len(chosen))} if fewest else few | covering([_together(each, more) for each in values], few)
    for n, call in enumerate(chosen):
        if n not in few:
            call.marks.append((pytest.mark.leftover if n in many else pytest.mark.exhaustive).mark)


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


def _values(params: Mapping[str, Any]) -> list[Hashable]:
    """The parameter values of a case; recipes and laws are split into their components."""
    found: list[Hashable] = []
    for name, value in sorted(params.items()):
        match value:
            case ScalingRecipe() as recipe:
                found += [(name, recipe.name), *((name, field, value) for field, value in sorted(recipe.changed.items()))]
            case Law() as law:
                found += [(name, place, part) for place, part in enumerate(law.id.replace(".", "/").split("/"))]
            case _:
                found.append((name, id(value)))  # all cases of a test share the object, hashable or not
    return found
