"""Tables of products of FP8 tensors on CUDA devices: rates, goals, errors, and the two states of the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cells import ABSENT, Result, Table, failures, ratio, three, trio
from fp8_plan import BF16, COLUMN_MAJOR, DECODING, DEEP_GEMM, HUMMING, OURS, TORCH, TORCH_ROWS
from goals import GOALS, HEADINGS, Goal, judged, tried
from rivals import OLD, TRANSFORMER_ENGINE

#: Headings of the arms' columns, in order.
NAMES = {
    OURS: "breccia",
    COLUMN_MAJOR: "column-major scales",
    DECODING: "through BF16",
    TORCH: "torch",
    TORCH_ROWS: "torch, row scales",
    TRANSFORMER_ENGINE: "TransformerEngine",
    HUMMING: "humming",
    DEEP_GEMM: "DeepGEMM",
    OLD: "breccia 0.1.3",
    BF16: "BF16",
}
#: Arms that the best rival is taken from. TORCH_ROWS is left out: it multiplies tensors with other scales than breccia does.
RIVALS = (TORCH, TRANSFORMER_ENGINE, HUMMING, DEEP_GEMM)


def sides(shape: list[int]) -> str:
    return "×".join(map(str, shape))


def times_of(row: Result, state: str = "graph") -> dict[str, Any]:
    """Summaries by arm. Those of breccia 0.1.3 are of plain calls, since a CUDA graph cannot capture it."""
    found = {name: timed[state] for name, timed in row["times"].items() if state in timed}
    old = row["times"].get(OLD, {}).get("device")
    return found | ({OLD: old} if old and state == "graph" else {})


def rate(taken: Result, shape: list[int]) -> str:
    """TFLOP/s, min / median / max."""
    m, n, k = shape
    return trio((2e-12 * m * n * k / taken[key] for key in ("max_s", "median_s", "min_s")), 1)


def best(taken: dict[str, Any], arms: tuple[str, ...]) -> float | None:
    """The least median of these arms."""
    return min((taken[name]["median_s"] for name in arms if name in taken), default=None)


# ------------------------------------------------------------------------------------------------ rates


def rates(result: Result) -> Table:
    """Rates of products of FP8 tensors, and how many times as fast as the best rival breccia is with plain scales."""
    arms = [arm for arm in NAMES if any(arm in times_of(row) for row in result["rows"])]
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        taken = times_of(row)
        cells = (rate(taken[arm], row["shape"]) if arm in taken else ABSENT for arm in arms)
        ours, rival = best(taken, (OURS,)), best(taken, RIVALS)
        over = ratio(rival / ours) if ours and rival else ABSENT
        rows.append((row["kind"], sides(row["shape"]), row["tile"], *cells, over))
    headings = ("scales", "M×N×K", "tile", *(NAMES[arm] for arm in arms), "breccia / best rival")
    note = (
        f"TFLOP/s, min / median / max of {samples(result)} of a CUDA graph of {result['options']['graph_calls']} calls, "
        f"interleaved ({result['options']['state']}). Result in BF16. torch: `torch._scaled_mm`, for tiles and blocks "
        "`torch.nn.functional.scaled_mm` with scales in the order that it reads. The last column is for plain scales."
    )
    if any(OLD in times_of(row) for row in result["rows"]):
        note += " breccia 0.1.3: calls in a process of its own, autotuned."
    return Table("products of FP8 tensors", headings, tuple(rows), note + versions(result) + failed(result))


def samples(result: Result) -> str:
    """How many samples there are of a product."""
    counts = sorted({timed["graph"]["runs"] for row in result["rows"] for timed in row["times"].values() if "graph" in timed})
    return f"{' or '.join(map(str, counts))} samples"


def versions(result: Result) -> str:
    """A sentence that names rivals with their versions, where the result has them."""
    found = ", ".join(f"{NAMES[name]} {version}" for name, version in result.get("rivals", {}).items() if name != OLD)
    return f" Rivals: {found}." if found else ""


def failed(result: Result) -> str:
    """A sentence for each error of an arm, and for the rows that were left out."""
    said = failures(
        (NAMES.get(name, name), timed["error"], f"{row['kind']} {sides(row['shape'])}")
        for row in result["rows"]
        for name, timed in [(OURS, row), *row["times"].items()]
        if "error" in timed
    )
    if left := result.get("left"):
        said += f" {left} rows were left out for lack of time."
    return said


# ------------------------------------------------------------------------------------------------ goals


def ratios(result: Result, goal: Goal) -> Iterator[tuple[str, float | None]]:
    """(Kind and shape, how many times as fast as the rivals) of every row of a goal; None where an arm has no time."""
    rows = {(row["kind"], "x".join(map(str, row["shape"]))): row for row in result["rows"]}
    for kind in goal.kinds:
        for shape in goal.shapes:
            taken = times_of(rows[kind, shape], goal.state) if (kind, shape) in rows else {}
            ours, rival = best(taken, goal.arms), best(taken, goal.rivals)
            yield f"{kind} {shape.replace('x', '×')}", rival / ours if ours and rival else None


def goals(result: Result) -> Table:
    """What every goal asks for, and what was measured."""
    rows = tuple(
        judged(goal.work, f"≥ {goal.least:.2f} × {goal.against}", dict(ratios(result, goal)), goal.least) for goal in GOALS
    )
    note = (
        "Speed relative to the rival, by medians of interleaved samples: the smallest and the largest among the products of a "
        "goal. Hot: under load; burst: after 0.35 s without work. Where breccia has several kernels, the fastest one counts."
    )
    return Table("goals of FP8 products", HEADINGS, rows, note)


# ------------------------------------------------------------------------------------------------ states of the clock


def states(result: Result) -> Table:
    """breccia's rates beside torch's under load and after pauses."""
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        cells: list[str] = []
        for state in ("graph", "burst"):
            taken = times_of(row, state)
            if not {OURS, TORCH} <= taken.keys():
                break
            cells += [rate(taken[name], row["shape"]) for name in (OURS, TORCH)]
            cells.append(ratio(taken[TORCH]["median_s"] / taken[OURS]["median_s"]))
        else:
            rows.append((row["kind"], sides(row["shape"]), *cells))
    parts = (OURS, "torch", "ratio")
    headings = ("scales", "M×N×K", *(f"{state}: {part}" for state in ("hot", "burst") for part in parts))
    note = (
        "TFLOP/s, min / median / max. Hot: after 0.25 s of matrix products, samples one after the other. Burst: each sample "
        "after 0.35 s without work, when the clock is higher."
        if rows
        else "*This result has one state of the clock.*"
    )
    return Table("two states of the clock", headings, tuple(rows), note)


# ------------------------------------------------------------------------------------------------ errors


def errors(result: Result) -> Table:
    """The largest error over the bound of the contract, by kind and arm, over all shapes."""
    found: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        for name, timed in row["times"].items():
            if name in NAMES and "error_over_bound" in timed:
                kind = found.setdefault(row["kind"], {})
                kind[name] = max(kind.get(name, 0.0), timed["error_over_bound"])
    arms = [arm for arm in NAMES if any(arm in kind for kind in found.values())]
    rows = tuple((kind, *(three(of[arm]) if arm in of else ABSENT for arm in arms)) for kind, of in found.items())
    note = (
        "The largest error against FP64, as a multiple of the bound of [the contract](spec/numerics.md), section 9: over all "
        "shapes, in up to 64 random rows of each product. The bound assumes that sums of FP8 products are promoted every 128 "
        "along K. Kernels with fast accumulation do not promise that."
        if rows
        else "*This result has no errors.*"
    )
    return Table("errors of FP8 products", ("scales", *(NAMES[arm] for arm in arms)), rows, note)


# ------------------------------------------------------------------------------------------------ what was tried


def trials(result: Result) -> Table:
    """What was tried to reach the goals."""
    return tried("fp8", "shape", "what was tried for FP8 products", " Rates are in TFLOP/s.")


TABLES: dict[str, Callable[[Result], Table]] = {
    "matmul-gpu": rates,
    "matmul-gpu-goals": goals,
    "matmul-gpu-states": states,
    "matmul-gpu-errors": errors,
    "matmul-gpu-tried": trials,
}
