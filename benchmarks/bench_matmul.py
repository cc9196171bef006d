"""FP8 products on a CUDA device: breccia's kernels against torch's (cuBLAS, CUTLASS), other libraries' and BF16.

    python benchmarks/bench_matmul.py [--kinds tiles] [--bursts tiles] [--table FILE]    # or --from RESULT --table FILE

Arms and plan are in fp8_products.py. A sample is one replay of a CUDA graph of 20 calls, or as many as take 1 ms, after a load
of 0.25 s ("hot"), and with `--bursts` also after 0.35 s without work. Weights that fit the device's cache rotate by copies.
Every product is compared with FP64 before. `--table` writes the times that `score` reads; with `--from` it needs no GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import fp8_products as fp8
import torch
import typer
from harness import Benchmark, Device, Result, Seconds, known, program, progress, read, refuse, sizes, summary
from harness.device import GRAPH_CALLS, WARM_UP, Arms, check_device, graphed, host_time, load, message, sampled, where
from harness.plots import GREY, Plot
from harness.tables import ABSENT, Goal, Table, failures, fastest, goals, listed, median, over, sides, table, three, tried, trio
from rivals import TRANSFORMER_ENGINE

import breccia

#: Arms with other operands, to which the row's reference does not apply.
UNCHECKED = (fp8.BF16, fp8.TORCH_ROWS)
#: Arms that have to keep the contract's bound, except for kinds that end in "fast".
KEEPING = (fp8.OURS, fp8.COLUMN_MAJOR, fp8.DECODING)
#: Arms that are also measured after a pause.
IN_BURSTS = (fp8.OURS, fp8.TORCH)
#: Rows with a graph that is shorter than a sample take this many times the samples.
SHORT = 3

#: Headings of the arms' columns, in order.
NAMES = {
    fp8.OURS: "breccia",
    fp8.COLUMN_MAJOR: "column-major scales",
    fp8.DECODING: "through BF16",
    fp8.TORCH: "torch",
    fp8.TORCH_ROWS: "torch, row scales",
    TRANSFORMER_ENGINE: "TransformerEngine",
    fp8.HUMMING: "humming",
    fp8.DEEP_GEMM: "DeepGEMM",
    fp8.BF16: "BF16",
}
#: Arms that the best rival is taken from. TORCH_ROWS is left out: it multiplies tensors with other scales than breccia does.
BEST = (fp8.TORCH, TRANSFORMER_ENGINE, fp8.HUMMING, fp8.DEEP_GEMM)


#: Shapes that have a higher goal for scales of 1 x 128 by 128 x 128.
_AHEAD = ("4096x2112x7168", "4096x24576x1536")
_CUBLAS = (fp8.TORCH, TRANSFORMER_ENGINE)
_BLOCKWISE, _SCALED = "cuBLAS's blockwise", "`torch._scaled_mm`"
_PRECISE = ("tensor", "row")


def named(kind: str, sides: Iterable[Any]) -> str:
    return f"{kind} {'×'.join(map(str, sides))}"


def cases(kinds: Iterable[str], shapes: Iterable[str] = fp8.LARGE) -> tuple[str, ...]:
    return tuple(named(kind, shape.split("x")) for kind in kinds for shape in shapes)


GOALS = (
    Goal("scales per tensor and row", cases(_PRECISE), 1.05, (fp8.TORCH,), _SCALED),
    Goal("the same, fast accumulation", cases(("tensor fast", "row fast")), 1.03, (fp8.TORCH,), f"{_SCALED}, fast"),
    *(
        Goal(f"1×128 by 128×128, {what}", cases(("tiles",), shapes), least, (fp8.TORCH,), _BLOCKWISE, measure=measure)
        for measure, state in (("time", "hot"), ("burst", "burst"))
        for what, shapes, least in ((state, fp8.LARGE, 1.06), (f"N = 2112 and K = 1536, {state}", _AHEAD, 1.12))
    ),
    Goal("1×128 by 1×128", cases(("blocks",)), 1.20, _CUBLAS, _BLOCKWISE),
    Goal("at most 128 rows", cases((*_PRECISE, "tiles", "blocks"), fp8.FEW), 1.30, _CUBLAS, "the best of cuBLAS and torch"),
    Goal("MXFP8", cases(("mx",)), 0.95, (fp8.BF16,), "cuBLAS in BF16", (fp8.OURS, fp8.DECODING)),
    Goal("groups, 1×128 by 128×128", cases(("grouped tiles",)), 1.0, (fp8.TORCH_ROWS,), "`torch._scaled_grouped_mm` by rows"),
)


def rate(row: Any, arm: str, measure: str = "time") -> str:
    """TFLOP/s, min / median / max."""
    found = row.get(measure, {}).get(arm)
    return (
        trio((2e-12 * math.prod(row["shape"]) / found[key] for key in ("max_s", "median_s", "min_s")), 1) if found else ABSENT
    )


def best(row: Any, arms: tuple[str, ...], measure: str = "time") -> float | None:
    found = fastest(row, arms, measure)
    return found and found[1]


def failed(result: Result) -> str:
    said = failures(
        (NAMES.get(arm, arm), error, f"{row['kind']} {sides(row['shape'])}")
        for row in result["rows"]
        for arm, error in row.get("errors", {}).items()
    )
    return said + (f" {result['left']} rows were left out for lack of time." if result["left"] else "")


def rates(result: Result) -> Table:
    rows, options = result["rows"], result["options"]
    arms = [arm for arm in NAMES if any(median(row, arm) for row in rows)]
    columns: dict[str, Any] = {"scales": "kind", "M×N×K": lambda row: sides(row["shape"]), "tile": "tile"}
    columns |= {NAMES[arm]: (lambda row, arm=arm: rate(row, arm)) for arm in arms}
    columns["breccia / best rival"] = lambda row: over(best(row, BEST), median(row, fp8.OURS))
    counts = sorted({t["runs"] for row in rows for arm, t in row.get("time", {}).items()})
    note = (
        f"TFLOP/s, min / median / max of {' or '.join(map(str, counts))} samples of a CUDA graph of {options['graph_calls']} "
        f"calls, interleaved ({options['state']}). Result in BF16. torch: `torch._scaled_mm`, for tiles and blocks "
        "`torch.nn.functional.scaled_mm` with scales in the order that it reads. The last column is for plain scales."
    )
    if versions := {NAMES[name]: version for name, version in result["rivals"].items()}:
        note += f" Rivals: {listed(versions)}."
    return table("products of FP8 tensors", columns, rows, note + failed(result))


def goals_table(result: Result) -> Table:
    rows = {named(row["kind"], row["shape"]): row for row in result["rows"]}
    note = (
        "Speed relative to the rival, by medians of interleaved samples: the smallest and the largest among the products of a "
        "goal. Hot: under load; burst: after 0.35 s without work. Where breccia has several kernels, the fastest one counts."
    )
    return goals("goals of FP8 products", GOALS, rows, note)


def states(result: Result) -> Table:
    rows = [row for row in result["rows"] if all(median(row, arm, m) for arm in IN_BURSTS for m in ("time", "burst"))]
    columns: dict[str, Any] = {"scales": "kind", "M×N×K": lambda row: sides(row["shape"])}
    for state, m in (("hot", "time"), ("burst", "burst")):
        columns |= {f"{state}: {arm}": (lambda row, m=m, arm=arm: rate(row, arm, m)) for arm in IN_BURSTS}
        columns[f"{state}: ratio"] = lambda row, m=m: over(median(row, fp8.TORCH, m), median(row, fp8.OURS, m))
    note = (
        "TFLOP/s, min / median / max. Hot: after 0.25 s of matrix products, samples one after the other. Burst: each sample "
        "after 0.35 s without work, when the clock is higher."
    )
    return table("two states of the clock", columns, rows, note if rows else "*This result has one state of the clock.*")


def errors(result: Result) -> Table:
    """The largest error over the bound of the contract, by kind and arm, over all shapes."""
    found: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        kind = found.setdefault(row["kind"], {})
        for arm, error in row.get("over_bound", {}).items():
            kind[arm] = max(kind.get(arm, 0.0), error)
    rows = [(kind, of) for kind, of in found.items() if of]
    columns: dict[str, Any] = {"scales": lambda row: row[0]}
    for arm in NAMES:
        if any(arm in of for _, of in rows):
            columns[NAMES[arm]] = lambda row, arm=arm: three(row[1][arm]) if arm in row[1] else ABSENT
    note = (
        "The largest error against FP64, as a multiple of the bound of [the contract](spec/numerics.md), section 9: over all "
        "shapes, in up to 64 random rows of each product. The bound assumes that sums of FP8 products are promoted every 128 "
        "along K. Kernels with fast accumulation do not promise that."
    )
    return table("errors of FP8 products", columns, rows, note if rows else "*This result has no errors.*")


#: Colours, each with a marker.
STYLES = (
    ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#A45A8C", "D"), ("#767676", "v"), ("#B07D00", "P"),
)  # fmt: skip
#: Kinds of FP8 products that are plotted, with their labels; and formats of weights that are plotted.
FP8_KINDS = {"tensor": "per tensor", "row": "per row", "tiles": "1×128 by 128×128", "blocks": "1×128 by 1×128"}
WEIGHTS = ("int4", "mxfp4", "nvfp4", "fp8")


@dataclass(frozen=True)
class Limits:
    """What a device's data sheet promises: bytes per second, and dense FP8 and BF16 operations per second."""

    bandwidth: float
    fp8: float
    bf16: float


#: NVIDIA H200 Tensor Core GPU datasheet (SXM); its rates with sparsity are twice these.
LIMITS = {"NVIDIA H200": Limits(4.8e12, 1979e12, 989.5e12)}


def sweep_series(result: Result) -> Any:
    """By kind, a list of (M, TFLOP/s of breccia, TFLOP/s of the best rival); None where not measured."""
    series: dict[str, list[list[float | None]]] = {}
    for row in result["rows"]:
        m, n, k = row["shape"]
        if row["kind"] not in FP8_KINDS or (n, k) != fp8.SWEPT:
            continue
        ours, rival = median(row, fp8.OURS), best(row, BEST)
        rates = [None if s is None else round(2e-12 * m * n * k / s, 4) for s in (ours, rival)]
        series.setdefault(row["kind"], []).append([m, *rates])
    return {kind: sorted(series[kind]) for kind in FP8_KINDS if kind in series}


def sweep(series: Any) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    rates, ratios = figure.subplots(1, 2)
    for (kind, points), (colour, marker) in zip(series.items(), STYLES, strict=False):
        style = {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.4}
        ours, theirs = ([(m, found[i]) for m, *found in points if found[i] is not None] for i in (0, 1))
        rates.plot(*zip(*ours, strict=True), label=FP8_KINDS[kind], **style)
        rates.plot(*zip(*theirs, strict=True), **{**style, "linestyle": "--", "markerfacecolor": "none", "linewidth": 0.9})
        both = [(m, one / other) for m, one, other in points if one is not None and other is not None]
        ratios.plot(*zip(*both, strict=True), **style)
    rates.set_ylim(bottom=0)
    rates.set_title("TFLOP/s", fontsize=11)
    ratios.set_title("breccia / best rival", fontsize=11)
    ratios.axhline(1, color=GREY, linewidth=1)
    ratios.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    ticks = sorted({m for points in series.values() for m, *_ in points})
    for axes in (rates, ratios):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks[:: 2 if len(ticks) > 8 else 1])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(f"M, of M × {fp8.SWEPT[0]} × {fp8.SWEPT[1]}")
    handles, labels = rates.get_legend_handles_labels()
    dashed = Line2D([], [], color=GREY, linestyle="--", marker="o", markersize=4.5, markerfacecolor="none", linewidth=0.9)
    figure.legend([*handles, dashed], [*labels, "best rival"], loc="outside lower center", ncols=5, frameon=False)
    return figure


def roofline_series(products: Result, weights: Result | None) -> Any:
    """Points (FLOP per byte, share of the limit) by panel and format, and the FLOP per byte at which the limits meet."""
    device = products["runs"][-1]["device"].partition(",")[0]
    limits = LIMITS.get(device)
    if limits is None:
        return {}

    def point(operations: float, moved: float, seconds: float, peak: float) -> list[float]:
        least = max(operations / peak, moved / limits.bandwidth)
        return [round(operations / moved, 4), round(least / seconds, 4)]

    found: dict[str, dict[str, list[list[float]]]] = {"fp8": {kind: [] for kind in FP8_KINDS}, "weights": {}}
    for row in products["rows"]:
        m, n, k = row["shape"]
        ours = median(row, fp8.OURS)
        if row["kind"] in FP8_KINDS and ours is not None:
            moved = m * k + n * k + 2 * m * n
            found["fp8"][row["kind"]].append(point(2.0 * m * n * k, moved, ours, limits.fp8))
    for row in weights["rows"] if weights else ():
        seconds = median(row, fp8.OURS)
        if row["format"] in WEIGHTS and seconds is not None:
            operations = 2.0 * row["m"] * row["n"] * row["k"]
            found["weights"].setdefault(row["format"], []).append(point(operations, row["bytes"], seconds, limits.bf16))
    meet = {"fp8": round(limits.fp8 / limits.bandwidth, 2), "weights": round(limits.bf16 / limits.bandwidth, 2)}
    points = {panel: {name: sorted(of) for name, of in by.items() if of} for panel, by in found.items()}
    return {"device": device, "meet": meet, "points": points}


def roofline(series: Any) -> Any:
    from matplotlib.figure import Figure

    titles = {"fp8": "FP8 by FP8", "weights": "BF16 by quantized weights"}
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    panels = [panel for panel, formats in series["points"].items() if formats]
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        for (name, points), (colour, marker) in zip(series["points"][panel].items(), STYLES, strict=False):
            style = {"linestyle": "none", "color": colour, "marker": marker, "markersize": 4.5, "markerfacecolor": "none"}
            axes.plot(*zip(*points, strict=True), label=FP8_KINDS.get(name, name), **style)
        meet = series["meet"][panel]
        axes.axhline(1, color=GREY, linewidth=1)
        axes.axvline(meet, color=GREY, linewidth=0.8, linestyle=":")
        for side, text in (("right", "memory "), ("left", " tensor cores")):
            axes.annotate(text, (meet, 0.03), ha=side, va="bottom", fontsize=9)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("FLOP per byte")
        axes.set_title(titles[panel], fontsize=11)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=9)
    figure.axes[0].set_ylim(0, 1.05)
    figure.axes[0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    figure.axes[0].set_ylabel(f"share of the limit of an {series['device'].removeprefix('NVIDIA ')}")
    return figure


def roofline_plot(tag: str, result: Result, results: Mapping[str, list[tuple[str, Result]]]) -> Plot:
    title = "Share of the limit of memory or tensor cores that products reach"
    weights = dict(results["gpu-weight-only"]).get(tag)
    return Plot(f"roofline-{tag}.svg", title, roofline_series(result, weights), roofline)


SWEEP_TITLE = "Rates of FP8 products by rows, beside the best rival"
BENCHMARK = Benchmark(
    "matmul-gpu",
    {
        "matmul-gpu": rates,
        "matmul-gpu-goals": goals_table,
        "matmul-gpu-states": states,
        "matmul-gpu-errors": errors,
        "matmul-gpu-tried": lambda _: tried("fp8", "shape", "what was tried for FP8 products", " Rates are in TFLOP/s."),
    },
    key=("kind", "shape"),
    plots={
        "matmul-gpu-sweep": lambda tag, r, _: Plot(f"products-{tag}.svg", SWEEP_TITLE, sweep_series(r), sweep),
        "matmul-gpu-roofline": roofline_plot,
    },
)


def measured(kind: str, shape: tuple[int, ...], samples: int, device: str, burst: bool, libraries: Collection[str]) -> Any:
    """A row of the result. burst: measure IN_BURSTS again, after pauses."""
    row: dict[str, Any] = {"kind": kind, "shape": shape, "tile": tile_name(kind, *shape)}
    try:
        a, ws = fp8.operands(kind, *shape, device)
        made, exact = fp8.makers(kind, a, ws, libraries), fp8.expected(kind, a, ws[0])
        return {**row, **timed(made, kind, exact.error_over_bound, samples, device, burst)}
    except Exception as e:  # such as too little memory; one row that fails must not stop the rest
        return {**row, "errors": {fp8.OURS: message(e)}}


def timed(
    made: Mapping[str, Any], kind: str, error_of: Callable[[Any], float], samples: int, device: str, burst: bool
) -> dict[str, Any]:
    """Measures by arm, and the clock under load. error_of: a product's error over the bound; raises for a wrong product."""

    def check(arm: str, product: Any) -> float | None:
        error = None if arm in UNCHECKED else error_of(product)
        if error is not None and error > 1 and arm in KEEPING and not kind.endswith("fast"):
            raise ValueError(f"the error is {error:.3g} times the bound of the contract")
        return error

    arms = Arms(device, check)
    arms.add(made, lambda call, device: graphed(call, device, warm_up=WARM_UP))
    for arm in (arm for arm in arms.calls if arm.startswith((fp8.OURS, fp8.TORCH))):
        arms.note("host", arm, summary([host_time(arms.calls[arm], device) for _ in range(3)]))
    timers = list(arms.timers.values())
    clock = load(device)
    sampled(timers, samples * (SHORT if any(timer.calls > 1 for timer in timers) else 1))
    if burst:
        paused = {("burst", arm): replace(timer, seconds=[]) for (_, arm), timer in arms.timers.items() if arm in IN_BURSTS}
        sampled(paused.values(), samples, idle=True)
        arms.timers |= paused
    return {**arms.times(), "clock_mhz": clock}


def tile_name(kind: str, m: int, n: int, k: int) -> str:
    """The tile that breccia's FP8 kernel takes; "-" for kinds that it does not multiply."""
    from breccia_triton.gemm.fp8 import plans as fp8_plans

    if kind in fp8.DECODED:
        return "-"
    if kind.startswith("grouped"):
        return fp8_plans.grouped_tile_of(m, fp8.EXPERTS, k).name
    processors = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 132
    return fp8_plans.tile_of(m, n, k, 1, processors).name


#: The arms whose times `score` reads, with the prefixes of their keys. For torch's products of blocks it reads the times that
#: include breccia's copies of plain scales.
_SCORED = {
    fp8.OURS: "cuda",
    fp8.TORCH: "torch",
}


def slowdowns(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median times relative to estimates, by the keys of `breccia_triton.gemm.fp8.plans.slowdowns`."""
    from breccia_triton.gemm.bf16 import plans as bf16_plans
    from breccia_triton.gemm.fp8 import plans as fp8_plans
    from breccia_triton.tuning import measurements

    found: dict[str, float] = {}
    for row in rows:
        (m, n, k), kind = row["shape"], row["kind"]
        taken = {arm: timed["median_s"] for arm, timed in row.get("time", {}).items()}
        taken[fp8.TORCH] = taken.get(fp8.TORCH_PLAIN, taken.get(fp8.TORCH, 0.0))
        for arm, kernel in _SCORED.items():
            if kind in fp8.PAIRS and taken.get(arm):
                key = measurements.measured_key(fp8_plans.head_of(kernel, fp8.PAIRS[kind]), m, n, k)
                found[key] = taken[arm] / fp8_plans.bound(m, n, k)
        if fp8.DECODING in taken:
            formats = [breccia.recipe(spec).format for spec in fp8.KINDS[kind]]
            key = measurements.measured_key(bf16_plans.head_of(formats), m, n, k)
            found[key] = taken[fp8.DECODING] / bf16_plans.estimate(m, n, k, 1, formats, False)
    return {key: round(value, 4) for key, value in sorted(found.items())}


def write_table(
    table: Path, result: Mapping[str, Any], times: Callable[[list[dict[str, Any]]], dict[str, float]], anew: bool = False
) -> None:
    """Write measured times, which `score` reads. times: made of rows. anew: replace the file instead of adding to it."""
    from breccia_triton.tuning import measurements

    if anew:
        table.unlink(missing_ok=True)
    run = result["runs"][-1]
    measurements.merge(table, run["device"].partition(",")[0], times(result["rows"]), run)


@program
def main(
    kinds: Annotated[list[str] | None, typer.Option(help=f"Of scales: {', '.join(fp8.KINDS)}. Default: a plan.")] = None,
    shapes: Annotated[list[str] | None, typer.Option(help="MxNxK, measured for every kind. Default: a plan.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each call, interleaved.")] = 5,
    seconds: Seconds = math.inf,
    bursts: Annotated[list[str] | None, typer.Option(help="Kinds whose large products are also measured after pauses.")] = None,
    device: Device = "cuda",
    rivals: Annotated[list[str] | None, typer.Option(help=f"{', '.join(fp8.RIVALS)}; repeatable.")] = None,
    table: Annotated[Path | None, typer.Option(help="Write the measured times that `score` reads to this file.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Measure nothing; write --table from this result.")] = None,
) -> Iterator[Result]:
    """Time products of FP8 tensors."""
    if source is not None:
        if table is None:
            refuse("--from takes a result and writes its table; name the file by --table.")
        result = read(source)
        if result.get("benchmark") != BENCHMARK.name:
            refuse(f"--from takes a result of {BENCHMARK.name}; {source.name} is one of {result.get('benchmark')!r}.")
        return write_table(table, result, slowdowns, anew=True)

    check_device(device)
    for given, there_are, option in (
        (kinds, fp8.KINDS, "--kinds"),
        (bursts, fp8.KINDS, "--bursts"),
        (rivals, fp8.RIVALS, "--rivals"),
    ):
        known(given, there_are, option)
    versions, absent = fp8.chosen_rivals(rivals or [])
    plan = [(kind, sizes(shape, 3)) for shape, kind in fp8.planned(kinds, shapes)]
    large = [sizes(shape, 3) for shape in fp8.LARGE]
    options = {"device": device, "state": "hot", "samples": samples, "graph_calls": GRAPH_CALLS, "bursts": bursts or []}
    run, rows, started = where(device), list[dict[str, Any]](), time.monotonic()

    def so_far() -> Result:
        return BENCHMARK.result(rows, options, run, rivals=versions, absent=absent, left=len(plan) - len(rows))

    for kind, shape in progress(plan, "products"):
        if time.monotonic() - started > seconds:
            break
        rows.append(measured(kind, shape, samples, device, kind in (bursts or ()) and shape in large, versions))
        if device == "cuda":
            torch.cuda.empty_cache()
        yield so_far()
    if table is not None and rows:
        write_table(table, so_far(), slowdowns)
    yield so_far()
