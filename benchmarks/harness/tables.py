"""Tables of results: numbers as the text of cells, and rows as lines. The same cells go to a terminal and to the documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.results import HERE, Row, read

#: The cell of what was not measured.
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


def table(title: str, columns: Mapping[str, str | Callable[[Any], Any]], rows: Iterable[Any], note: str = "") -> Table:
    """A line for each row. columns: by heading, the field of the row, or a function of it."""
    made = (column if callable(column) else (lambda row, field=column: row[field]) for column in columns.values())
    of_row = list(made)
    return Table(title, tuple(columns), tuple(tuple(str(cell(row)) for cell in of_row) for row in rows), note)


def pivoted(
    title: str,
    index: Mapping[str, Callable[[Row], str]],
    across: Callable[[Row], Any],
    heading: Callable[[Any], str],
    cell: Callable[[Row], str],
    rows: Iterable[Row],
    note: str = "",
) -> Table:
    """A line for each value of `index`, the first cells by heading, and a column for each value of `across`, in order."""
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        lines.setdefault(tuple(of(row) for of in index.values()), {})[across(row)] = cell(row)
    columns = sorted({column for line in lines.values() for column in line})
    body = tuple((*key, *(line.get(column, ABSENT) for column in columns)) for key, line in lines.items())
    return Table(title, (*index, *map(heading, columns)), body, note)


def three(value: float) -> str:
    """Three significant digits, without exponents."""
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else ABSENT
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def trio(times: Iterable[float], unit: float) -> str:
    """Values in the unit, such as min / median / max."""
    return " / ".join(three(t * unit) for t in times)


def spread(times: Mapping[str, float] | None, unit: float, keys: Iterable[str] = ("min_s", "median_s", "max_s")) -> str:
    """min / median / max of a summary in the unit; ABSENT for None."""
    return ABSENT if times is None else trio((times[key] for key in keys), unit)


def extent(values: Iterable[float], text: Callable[[float], str]) -> str:
    """The smallest and the largest value, or one of them where they read the same."""
    low, *_, high = sorted([*values] * 2)
    return text(low) if text(low) == text(high) else f"{text(low)} to {text(high)}"


def ratio(value: float) -> str:
    return f"{three(value)}×"


def bits(value: float) -> str:
    """Bits per parameter: to four decimals, as block scales make round fractions of it."""
    return f"{value:.4f}".rstrip("0").rstrip(".")


def sides(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape))


def listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def median(row: Row, arm: str, measure: str = "time") -> float | None:
    """The median seconds of an arm, if it was measured."""
    return row.get(measure, {}).get(arm, {}).get("median_s")


def fastest(row: Row, arms: Iterable[str], measure: str = "time") -> tuple[str, float] | None:
    """(name, median seconds) of the fastest of these arms, or None."""
    found = {arm: s for arm in arms if (s := median(row, arm, measure)) is not None}
    return min(found.items(), key=lambda item: item[1]) if found else None


def over(other: float | None, ours: float | None) -> str:
    """How many times faster than `other`; ABSENT where one was not measured."""
    return ratio(other / ours) if other and ours else ABSENT


def failures(found: Iterable[tuple[str, str, str]]) -> str:
    """A sentence for each error of an arm, with the cases that it concerns. found: the arm, its error and the case."""
    cases: dict[tuple[str, str], dict[str, None]] = {}
    for name, error, case in found:
        text = error.strip().replace("`", "")
        text = text if len(text) <= LONG else f"{text[:LONG].rstrip()} ..."
        cases.setdefault((name, text), {})[case] = None
    return "".join(f" {name} raised `{text}` ({', '.join(every)})." for (name, text), every in cases.items())


#: Headings of tables of goals.
GOAL = ("work", "goal", "measured", "worst at", "met")


def judged(
    work: str, asked: str, every: Mapping[str, float | None], bound: float, at_most: bool = False
) -> tuple[str, str, str, str, str]:
    """The line of a goal. every: measured values by name, None where not measured. at_most: values may not exceed `bound`."""
    found = {name: value for name, value in every.items() if value is not None}
    if not found:
        return work, asked, "not measured", ABSENT, ABSENT
    worst = (max if at_most else min)(found, key=lambda name: found[name])
    met = sum(value <= bound if at_most else value >= bound for value in found.values())
    reached = "yes" if met == len(every) else "no" if len(every) == 1 else f"{met} of {len(found)}"
    if missing := len(every) - len(found):
        reached += f"; {missing} not measured"
    return work, asked, extent(found.values(), lambda value: f"{value:.2f}"), worst, reached


@dataclass(frozen=True)
class Goal:
    """In every case, the fastest of `arms` must be `bound` times as fast as the fastest of `rivals`, or without rivals take at
    most `bound` microseconds.

    against: the rivals in words. measure: "time" under load, "burst" after pauses.
    """

    work: str
    cases: tuple[str, ...]
    bound: float
    rivals: tuple[str, ...] = ()
    against: str = ""
    arms: tuple[str, ...] = ("breccia",)
    measure: str = "time"

    def value(self, row: Row) -> float | None:
        """How many times as fast as the rivals, or microseconds; None where an arm has no time."""
        ours, theirs = (fastest(row, arms, self.measure) for arms in (self.arms, self.rivals))
        if not self.rivals:
            return ours and 1e6 * ours[1]
        return theirs[1] / ours[1] if ours and theirs else None


def goals(title: str, every: Iterable[Goal], rows: Mapping[str, Row], note: str) -> Table:
    """What every goal asks for, and what was measured. rows: by the name of their case."""
    lines: list[tuple[str, ...]] = []
    for goal in every:
        asked = f"≥ {goal.bound:.2f} × {goal.against}" if goal.rivals else f"≤ {goal.bound:g} µs"
        found = {case: goal.value(rows.get(case, {})) for case in goal.cases}
        lines.append(judged(goal.work, asked, found, goal.bound, at_most=not goal.rivals))
    return Table(title, GOAL, tuple(lines), note)


def tried(name: str, case: str, title: str, unit: str = "") -> Table:
    """Variants of kernels with their expected and measured effect, of tried.json. case: the field that says what ran."""
    found = read(HERE / "tried.json")[name]
    columns = {name: (lambda row, name=name: row[name] or ABSENT) for name in ("what", case, "expected", "measured")}
    note = (
        f"{found['device']}. Each variant was compared with the kernel of that time, so numbers differ from those above.{unit} "
        f"{ABSENT}: no prediction was written down. Kept: in the source."
    )
    return table(title, {**columns, "kept": lambda row: "yes" if row["kept"] else "no"}, found["rows"], note)
