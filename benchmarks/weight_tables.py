"""Tables of products of BF16 activations and quantized weights on CUDA devices: times, bandwidth and errors, goals, trials."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import common
from cells import ABSENT, Result, Table, ratio
from goals import HEADINGS, WEIGHT_GOALS, WeightGoal, judged
from weight_arms import BF16, BF16_EACH, BF16_GROUPED, HUMMING, OURS, TORCH, TRITON

#: Arms in words.
NAMES = {BF16: "BF16", HUMMING: "humming"}


def times(result: Result) -> Table:
    """Microseconds of products of quantized weights, or of groups of rows by several, and how many times faster than rivals."""
    by: dict[tuple[Any, ...], Any] = {(row["format"], row["n"], row["k"], row["m"]): row["times"] for row in result["rows"]}
    kinds, counts = dict.fromkeys(key[:3] for key in by), sorted({key[3] for key in by})
    known = (BF16, BF16_GROUPED, BF16_EACH, TORCH, HUMMING, TRITON)
    rivals = [name for name in known if any("median_s" in times.get(name, {}) for times in by.values())]

    def cell(times: dict[str, Any]) -> str:
        if "median_s" not in times.get(OURS, {}):
            return ABSENT
        ours = times[OURS]
        over = [
            ratio(times[name]["median_s"] / ours["median_s"]) if "median_s" in times.get(name, {}) else ABSENT
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
    """Bytes that products move over their time and over the memory's rate, and the largest error over the bound."""
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
        "TB/s of the weight, activations and results, and its share of the memory's rate, which is the larger one of a copy's "
        f"and a sum's in the same run ({' or '.join(f'{rate:.2f}' for rate in rates)} TB/s); the largest error over the bound "
        "of [the contract](spec/numerics.md), section 9, against FP64, of up to 64 random rows. The last rounding, to BF16, is "
        "most of it."
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
        "Weights of 8192 × 8192, BF16 activations and results: microseconds of a product, or how many times as fast as the "
        "rival, by medians of interleaved samples, from the least to the largest of a goal."
    )
    return Table("goals of products of quantized weights", HEADINGS, rows, note)


def trials(result: Result) -> Table:
    """What was tried to reach the goals: expected and measured. From tried.json: those variants are in no result."""
    tried = json.loads((common.HERE / "tried.json").read_text(encoding="utf-8"))["weight-only"]
    columns = ("what", "product", "expected", "measured")
    rows = tuple((*(row[name] or ABSENT for name in columns), "yes" if row["kept"] else "no") for row in tried["rows"])
    note = (
        f"{tried['device']}, each beside the kernel of its time, whose times are not those above. {ABSENT}: no prediction was "
        "written down. Kept: in the source."
    )
    return Table("what was tried for products of quantized weights", (*columns, "kept"), rows, note)


def instructions(result: Result) -> Table:
    """Instructions for 8 codes of a thread, and the least time that they take."""
    columns = ("integer", "packed", "fp32", "shared", "all")
    rows = tuple(
        (row["format"], *(f"{row['instructions'][name]:.1f}" for name in columns), f"{row['seconds'] * 1e6:.1f}")
        for row in result["rows"]
    )
    note = (
        "Between the first and the last product of the unrolled loop of `weight_only_small.cu`, for up to 8 rows, by 8 codes "
        "of a thread; packed: on two numbers of 16 bits. The last column is the least time to issue them for a weight of "
        "8192 × 8192 on an H200 at its highest clock: 128 lanes of a multiprocessor a clock, of which an integer instruction "
        "takes two."
    )
    headings = ("weight", "integer", "packed", "FP32", "shared memory", "all", "µs, M = 1")
    return Table("instructions of a word of codes", headings, rows, note)


TABLES: dict[str, Callable[[Result], Table]] = {
    "gpu-weight-only": times,
    "gpu-weight-only-bandwidth": bandwidth,
    "gpu-weight-only-goals": goals,
    "gpu-weight-only-tried": trials,
}
