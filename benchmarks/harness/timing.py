"""Seconds of calls on the host: interleaved, repeated, summarized; whether two passes agree; how good a result is."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Call = Callable[[], object]

#: The largest accepted ratio between the medians of two passes over the same calls. If they differ by more, the machine was
#: disturbed, perhaps for some arms and not for others.
DRIFT = 1.15


def summary(seconds: Sequence[float], every: bool = True) -> dict[str, Any]:
    """Number of samples, their min, median and max, and with `every` all of them."""
    taken = [round(s, 10) for s in seconds]
    found = {"runs": len(taken), "min_s": min(taken), "median_s": statistics.median(taken), "max_s": max(taken)}
    return {**found, "seconds": taken} if every else found


def timed(call: Call, warm_up: bool = True) -> tuple[float, float]:
    """(seconds of the clock, seconds of the processor) of one call, after an uncounted one. The result is freed afterwards."""
    if warm_up:
        call()
    cpu, start = time.process_time(), time.perf_counter()
    result = call()
    taken = time.perf_counter() - start
    cpu = time.process_time() - cpu
    del result
    return taken, cpu


def interleaved(calls: Iterable[Call], runs: int, at_least_s: float = 0.0) -> list[list[tuple[float, float]]]:
    """Samples of `timed` of several calls, taken in turns, so that a machine that slows down for a while slows all of them.

    Turns go on until there are `runs` of them and `at_least_s` seconds have passed.
    """
    every = list(calls)
    taken: list[list[tuple[float, float]]] = [[] for _ in every]
    until = time.perf_counter() + at_least_s
    while len(taken[0]) < runs or time.perf_counter() < until:
        for call, samples in zip(every, taken, strict=True):
            samples.append(timed(call))
    return taken


def rows_of(
    cases: Sequence[tuple[dict[str, Any], Mapping[str, Call]]], runs: int, at_least_s: float = 0.0
) -> list[dict[str, Any]]:
    """A row for each case: its fields, and the times of its arms. All arms of all cases are interleaved."""
    taken = iter(interleaved([call for _, arms in cases for call in arms.values()], runs, at_least_s))
    return [
        {**fields, "time": {arm: summary([s for s, _ in samples]) for arm, samples in zip(arms, taken, strict=False)}}
        for fields, arms in cases
    ]


def often(call: Call, runs: int, at_least_s: float = 0.02) -> dict[str, Any]:
    """Seconds per call of a call too short to be timed singly: `runs` loops of `at_least_s` each."""
    timer, calls = timeit.Timer(call), 1
    while (spent := timer.timeit(calls)) < at_least_s:
        calls = max(2 * calls, int(calls * at_least_s / max(spent, 1e-9)))
    return {**summary([s / calls for s in timer.repeat(runs, calls)]), "calls": calls}


def pooled(row: Mapping[str, Any], arm: str) -> tuple[float, float, float] | None:
    """(min, median, max) over all passes of a row, or None."""
    every = [s for one in row["passes"] if arm in one for s in one[arm]["seconds"]]
    return (min(every), statistics.median(every), max(every)) if every else None


def drift(row: Mapping[str, Any], arm: str) -> float:
    """The median of an arm's last pass over that of its first."""
    medians = [one[arm]["median_s"] for one in row["passes"] if arm in one]
    return medians[-1] / medians[0]


def agree(one: float, other: float, limit: float = DRIFT) -> bool:
    """Whether the larger is at most `limit` times the smaller."""
    return max(one, other) <= limit * min(one, other)


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


class Quality:
    """Cosine, SQNR and largest error of decoded values against what was cast, over one or more arrays, in FP64."""

    def __init__(self, *pairs: tuple[np.ndarray, np.ndarray]) -> None:
        self.sums, self.error, self.amax = np.zeros(4), 0.0, 0.0
        for x, y in pairs:
            a, b = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
            d = a - b
            self._add(np.array([a @ a, b @ b, a @ b, d @ d]), float(np.abs(d).max()), float(np.abs(a).max()))

    def merge(self, other: Quality) -> None:
        """Add the arrays that `other` has seen."""
        self._add(other.sums, other.error, other.amax)

    def _add(self, sums: np.ndarray, error: float, amax: float) -> None:
        self.sums = self.sums + sums
        self.error, self.amax = max(self.error, error), max(self.amax, amax)

    @property
    def sqnr_db(self) -> float:
        signal, _, _, noise = self.sums
        return float(10 * np.log10(signal / noise)) if noise else float("inf")

    @property
    def cosine(self) -> float:
        """0 where nothing but zeros was decoded."""
        signal, decoded, product, _ = self.sums
        return float(product / np.sqrt(signal * decoded)) if decoded else 0.0

    @property
    def max_error(self) -> float:
        """The largest |x - y| as a part of the largest |x|."""
        return self.error / self.amax
