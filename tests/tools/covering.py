"""Pairwise selection: in the cases of `make test` every pair of parameter values occurs. The others are marked `leftover`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest

from breccia import ScalingRecipe
from breccia.testing.laws import Law

#: Cases with these marks are excluded from `make test` already, and are not counted.
_LEFT_OUT = {"long", "slow", "gpu"}


def mark_leftovers(items: Sequence[pytest.Item]) -> None:
    """Mark the cases `leftover` that the selection for their test leaves out.

    A test covers every pair of its parameters' values, or with `@pytest.mark.covering(1)` every value, or with `covering(n)`
    every n of them. A recipe counts as its name and its fields, a law as the parts of its id.
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
        strength = mark.args[0] if mark else 2
        chosen = covering([_together(_values(case), strength) for case in cases])
        for n, case in enumerate(cases):
            if n not in chosen:
                case.add_marker("leftover")


def covering(cases: Sequence[Iterable[Hashable]]) -> set[int]:
    """Indices of cases that together cover the items of all cases. Greedy: the case with the most new items comes first."""
    left = [set(case) for case in cases]
    chosen: set[int] = set()
    have: set[Hashable] = set()
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
