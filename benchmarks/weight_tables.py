"""Tables of products of BF16 activations and quantized weights on CUDA devices: times, bandwidth and errors, goals, trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cells import ABSENT, Result, Table, ratio
from goals import HEADINGS, WEIGHT_GOALS, WeightGoal, judged, tried
from weight_arms import BF16, BF16_EACH, BF16_GROUPED, HUMMING, OURS, TORCH, TRITON

#: Arms in words.
NAMES = {BF16: "BF16", HUMMING: "humming"}


def times(result: Result) -> Table:
    """Microseconds of products of quantized weights, or of grouped products, and how many times faster they are than rivals."""
    by: dict[tuple[Any, ...], Any] = {(row["format"], row["n"], row["k"], row["m"]): row["times"] for row in result["rows"]}
    kinds, counts = dict.fromkeys(key[:3] for key in by), sorted({key[3] for key in by})
    known = (BF16, BF16_GROUPED, BF16_EACH, TORCH, HUMMING, TRITON)
    rivals = [name for name in known if any("median_s" in taken.get(name, {}) for taken in by.values())]

    def cell(taken: dict[str, Any]) -> str:
        if "median_s" not in taken.get(OURS, {}):
            return ABSENT
        ours = taken[OURS]
        over = [
            ratio(taken[name]["median_s"] / ours["median_s"]) if "median_s" in taken.get(name, {}) else ABSENT
            for name in rivals
        ]
        return f"{ours['median_s'] * 1e6:.1f} ± {(ours['max_s'] - ours['min_s']) * 5e5:.1f}; {' / '.join(over)}"

    groups = {row["groups"] for row in result["rows"] if "groups" in row}
    return Table(
        f"products of groups of rows and {groups.pop()} weights"
        if groups
        else "products of BF16 activations and quantized weights",
        ("weight", "N×K", *(f"M = {m}" for m in counts)),
        tuple((kind, f"{n}×{k}", *(cell(by.get((kind, n, k, m), {})) for m in counts)) for kind, n, k in kinds),
        f"Microseconds of a product in a CUDA graph, median ± half of the range; times faster than {' / '.join(rivals)}, "
        "interleaved. Weights rotate, so that they are not in the L2 cache.",
    )


def bandwidth(result: Result) -> Table:
    """The bandwidth of products, its share of the memory's rate, and the largest error as a multiple of the bound."""
    rows = [row for row in result["rows"] if "memory" in row and OURS in row["times"]]
    by = {(row["format"], row["n"], row["k"], row["m"]): row for row in rows}
    kinds, counts = dict.fromkeys(key[:3] for key in by), sorted({key[3] for key in by})

    def cell(row: Result | None) -> str:
        if row is None:
            return ABSENT
        ours = row["times"][OURS]
        reached = row["bytes"] / ours["median_s"]
        part = 100 * reached / max(row["memory"].values())
        return f"{reached / 1e12:.2f}, {part:.0f} %; {ours['error_over_bound']:.2f}"

    rates = sorted({round(max(row["memory"].values()) / 1e12, 2) for row in rows})
    note = (
        "TB/s of the weight, activations and results; the share of the memory's rate, which is the higher rate of a copy and a "
        f"sum in the same run ({' or '.join(f'{rate:.2f}' for rate in rates)} TB/s); the largest error against FP64 in up to "
        "64 random rows, as a multiple of the bound of [the contract](spec/numerics.md), section 9. Most of that error is the "
        "rounding of the result to BF16."
        if rows
        else "*This result has no bandwidth.*"
    )
    return Table(
        "bandwidth and errors of products of quantized weights",
        ("weight", "N×K", *(f"M = {m}" for m in counts)),
        tuple((kind, f"{n}×{k}", *(cell(by.get((kind, n, k, m))) for m in counts)) for kind, n, k in kinds),
        note,
    )


def reached(result: Result, goal: WeightGoal) -> Iterator[tuple[str, float | None]]:
    """(Format, rows and shape, microseconds or how many times as fast as the rival) of every product of a goal."""
    rows = {(row["format"], row["m"], f"{row['n']}x{row['k']}"): row["times"] for row in result["rows"]}
    for kind in goal.formats:
        for m in goal.rows:
            for shape in goal.shapes:
                taken = rows.get((kind, m, shape), {})
                ours, rival = (taken.get(arm, {}).get("median_s") for arm in (OURS, goal.rival))
                name = f"{kind} {m}×{shape.replace('x', '×')}"
                if goal.rival:
                    yield name, rival / ours if ours and rival else None
                else:
                    yield name, 1e6 * ours if ours else None


def goals(result: Result) -> Table:
    """What every goal asks for, and what was measured."""
    rows = tuple(
        judged(
            goal.work,
            f"≥ {goal.bound:.2f} × {NAMES[goal.rival]}" if goal.rival else f"≤ {goal.bound:g} µs",
            dict(reached(result, goal)),
            goal.bound,
            at_most=not goal.rival,
        )
        for goal in WEIGHT_GOALS
    )
    note = (
        "Weights of 8192 × 8192, BF16 activations and results. Microseconds of a product, or speed relative to the rival, by "
        "medians of interleaved samples: the smallest and the largest value among the products of a goal."
    )
    return Table("goals of products of quantized weights", HEADINGS, rows, note)


def trials(result: Result) -> Table:
    """What was tried to reach the goals."""
    return tried("weight-only", "product", "what was tried for products of quantized weights")


def instructions(result: Result) -> Table:
    """Instructions for each 8 codes of a thread, and the least time to issue them."""
    columns = ("integer", "packed", "fp32", "shared", "all")
    rows = tuple(
        (row["format"], *(f"{row['instructions'][name]:.1f}" for name in columns), f"{row['seconds'] * 1e6:.1f}")
        for row in result["rows"]
    )
    note = (
        "Instructions between the first and the last product in the unrolled loop of `weight_only_small.cu` (up to 8 rows), "
        "per 8 codes of a thread. Packed: arithmetic on two 16-bit numbers. The last column is the least time to issue them "
        "for a weight of 8192 × 8192 on an H200 at its highest clock. A multiprocessor has 128 slots per clock, and an integer "
        "instruction takes two."
    )
    headings = ("weight", "integer", "packed", "FP32", "shared memory", "all", "µs, M = 1")
    return Table("instructions of a word of codes", headings, rows, note)


TABLES: dict[str, Callable[[Result], Table]] = {
    "gpu-weight-only": times,
    "gpu-weight-only-bandwidth": bandwidth,
    "gpu-weight-only-goals": goals,
    "gpu-weight-only-tried": trials,
}
