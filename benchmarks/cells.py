"""A table, and numbers as the text of its cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]

#: The cell of a recipe that a rival does not have.
ABSENT = "-"
#: Longer error messages are cut to this many characters.
LONG = 120


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is the row's name. `note` says what a reader of the cells must know."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def three(value: float) -> str:
    """Three significant digits, without exponents."""
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else "-"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def trio(times: Iterable[float], unit: float) -> str:
    """min / median / max in the unit."""
    return " / ".join(three(t * unit) for t in times)


def extent(values: Iterable[float], text: Callable[[float], str]) -> str:
    """The smallest and the largest value, or one of them where they read the same."""
    low, *_, high = sorted([*values] * 2)
    return text(low) if text(low) == text(high) else f"{text(low)} to {text(high)}"


def ratio(value: float) -> str:
    return f"{three(value)}×"


def share(value: float) -> str:
    """A part of 1 in percent, which reads 100 only where it is all."""
    return "100 %" if value == 1 else f"{math.floor(1e5 * value) / 1e3:.3f} %"


def percent(value: float) -> str:
    """A part of 1 in percent, to two decimals."""
    return f"{100 * value:.2f}"


def bits(value: float) -> str:
    """Bits per parameter: to four decimals, as block scales make round fractions of it."""
    return f"{value:.4f}".rstrip("0").rstrip(".")


def spread(times: Result, unit: float) -> str:
    """min / median / max of a summary in the unit."""
    return trio((times["min_s"], times["median_s"], times["max_s"]), unit)


def shortened(error: str) -> str:
    """An error's beginning, without the marks of code."""
    text = error.strip().replace("`", "")
    return text if len(text) <= LONG else f"{text[:LONG].rstrip()} ..."


def failures(found: Iterable[tuple[str, str, str]]) -> str:
    """A sentence for each error of an arm, with the cases that it concerns. found: the arm, its error and the case."""
    cases: dict[tuple[str, str], dict[str, None]] = {}
    for name, error, case in found:
        cases.setdefault((name, error), {})[case] = None
    return "".join(f" {name} raised `{shortened(error)}` ({', '.join(every)})." for (name, error), every in cases.items())
