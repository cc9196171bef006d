"""The multiple-choice knapsack problem, solved exactly: an option for each group, the least damage in so many bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

#: Damages are whole multiples of their largest sum divided by this, so that sums are exact in 64 bits, and in FP64.
_STEPS = 1 << 50
#: What a bound in FP64 may be wrong by: a sum of at most 2^20 terms below 2^50, each rounded to 53 bits, is within 2^17.
_SLACK = 1 << 18
#: States that are kept while a good choice is looked for, whose damage lets the exact run drop most of them.
_WIDTHS = (64, 2048)


class Option(NamedTuple):
    """A choice for a group: the bytes that it takes, and the damage that it does, 0 or more."""

    nbytes: int
    damage: float


class _States(NamedTuple):
    """Choices for the first groups: none of them takes more bytes and does more damage than another.

    before, option: the state of the groups before that each comes from, and the option of the last group.
    """

    nbytes: np.ndarray
    damage: np.ndarray
    before: np.ndarray
    option: np.ndarray


def solve(groups: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """The option of each group whose total damage is the least, within `limit` bytes; None if no choice is.

    Dynamic programming over the bytes: the states of the first groups that no other dominates, each extended by every option
    of the next group (Nemhauser and Ullmann, Management Science 15, 1969). A state is dropped where it ends above a choice that
    is known, from a run that keeps few states, by the linear relaxation of the groups that are left, which the slopes of their
    convex hulls solve (Sinha and Zoltners, Operations Research 27, 1979). Both keep every optimum, so the result is exact, for
    damages that are rounded to multiples of 2^-50 of their largest sum. Of equal damages the fewest bytes win. The result
    depends on the arguments alone.
    """
    if not groups:
        return []
    damages = _whole(groups)
    nbytes = [np.array([option.nbytes for option in group], np.int64) for group in groups]
    if sum(int(each.min()) for each in nbytes) > limit:
        return None
    # Groups with much to lose come first: the bounds of what is left are closer.
    order = sorted(range(len(groups)), key=lambda g: (-int(np.ptp(damages[g])), g))
    hulls = [_hull(nbytes[g], damages[g]) for g in order]
    bounds = [_Bound(hulls[n:]) for n in range(len(order) + 1)]
    parts = [(nbytes[g], damages[g]) for g in order]
    known, path = math.inf, list[_States]()
    for width in (*_WIDTHS, None):
        path = list(_path(parts, limit, bounds, known, width))
        known = float(path[-1].damage.min())
    chosen = [0] * len(groups)
    best = np.lexsort((path[-1].nbytes, path[-1].damage))[0]
    for g, states in zip(reversed(order), reversed(path), strict=True):
        chosen[g] = int(states.option[best])
        best = states.before[best]
    return chosen


def _path(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], limit: int, bounds: Sequence[_Bound], known: float, width: int | None
) -> Iterator[_States]:
    """The states after each group. known: a damage that can be reached. width: of states that are kept; None for all."""
    states = _States(*(np.zeros(1, np.int64) for _ in range(4)))
    for (nbytes, damage), rest in zip(parts, bounds[1:], strict=True):
        states = _extended(states, nbytes, damage, limit, rest, known)
        if width is not None and len(states.nbytes) > width:
            ends = states.damage + rest.of(limit - states.nbytes)
            kept = np.sort(np.argsort(ends, kind="stable")[:width])
            states = _States(*(each[kept] for each in states))
        yield states


def _whole(groups: Sequence[Sequence[Option]]) -> list[np.ndarray]:
    """Damages as integers."""
    finite = [[option.damage for option in group if math.isfinite(option.damage)] for group in groups]
    worst = sum(max(each, default=0.0) for each in finite)
    step = worst / _STEPS if worst > 0 else 1.0
    none = 2 * _STEPS  # beyond every sum of finite ones
    return [
        np.array([round(option.damage / step) if math.isfinite(option.damage) else none for option in group], np.int64)
        for group in groups
    ]


def _hull(nbytes: np.ndarray, damage: np.ndarray) -> list[tuple[int, int]]:
    """The corners of the lower convex hull, from the fewest bytes to the least damage."""
    corners: list[tuple[int, int]] = []
    for size, cost in sorted(zip(nbytes.tolist(), damage.tolist(), strict=True)):
        if corners and cost >= corners[-1][1]:
            continue
        while len(corners) > 1:
            (a, x), (b, y) = corners[-2:]
            if (y - x) * (size - b) < (cost - y) * (b - a):
                break
            corners.pop()
        corners.append((size, cost))
    return corners


class _Bound:
    """The least damage of some groups in so many bytes, were fractions of options allowed."""

    def __init__(self, hulls: Sequence[Sequence[tuple[int, int]]]) -> None:
        pieces = sorted(self._pieces(hulls), key=lambda piece: piece[1] / piece[0])
        self.least = sum(hull[0][0] for hull in hulls)
        self._bytes = np.cumsum([0.0, *(size for size, _ in pieces)])
        self._damage = np.cumsum([float(sum(hull[0][1] for hull in hulls)), *(gain for _, gain in pieces)])

    @staticmethod
    def _pieces(hulls: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
        for hull in hulls:
            for (a, x), (b, y) in pairwise(hull):
                yield b - a, y - x

    def of(self, left: np.ndarray) -> np.ndarray:
        """For each number of bytes, which is `least` or more. A little below the bound, never above it."""
        return np.interp((left - self.least).astype(np.float64), self._bytes, self._damage) - _SLACK


def _extended(states: _States, nbytes: np.ndarray, damage: np.ndarray, limit: int, rest: _Bound, known: float) -> _States:
    """The states with each option of one more group, less those that cannot lead to an optimum."""
    sizes = (states.nbytes[:, None] + nbytes).reshape(-1)
    costs = (states.damage[:, None] + damage).reshape(-1)
    keep = np.flatnonzero(sizes + rest.least <= limit)
    keep = keep[costs[keep] + rest.of(limit - sizes[keep]) <= known]
    keep = keep[np.lexsort((costs[keep], sizes[keep]))]
    cheaper = np.minimum.accumulate(costs[keep])
    keep = keep[np.concatenate(([True], costs[keep][1:] < cheaper[:-1]))]
    return _States(sizes[keep], costs[keep], keep // len(nbytes), keep % len(nbytes))
