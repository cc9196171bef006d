"""Plots of products on CUDA devices: rates by rows, and what share of the device's limit they reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cells import Result
from fp8_plan import OURS, SWEPT
from fp8_tables import RIVALS, best, times_of

#: Colours as in draw.py, each with a marker.
STYLES = (
    ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#A45A8C", "D"), ("#767676", "v"), ("#B07D00", "P"),
)  # fmt: skip
GREY = "#767676"
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


# ------------------------------------------------------------------------------------------------ rates by rows


def sweep_series(result: Result) -> Any:
    """By kind, a list of (M, TFLOP/s of breccia, TFLOP/s of the best rival); None where not measured."""
    series: dict[str, list[list[float | None]]] = {}
    for row in result["rows"]:
        m, n, k = row["shape"]
        if row["kind"] not in FP8_KINDS or (n, k) != SWEPT:
            continue
        taken = times_of(row)
        ours, rival = best(taken, (OURS,)), best(taken, RIVALS)
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
        axes.set_xlabel(f"M, of M × {SWEPT[0]} × {SWEPT[1]}")
    handles, labels = rates.get_legend_handles_labels()
    dashed = Line2D([], [], color=GREY, linestyle="--", marker="o", markersize=4.5, markerfacecolor="none", linewidth=0.9)
    figure.legend([*handles, dashed], [*labels, "best rival"], loc="outside lower center", ncols=5, frameon=False)
    return figure


# ------------------------------------------------------------------------------------------------ the roofline


def roofline_series(products: Result, weights: Result | None) -> Any:
    """Points (FLOP per byte, share of the limit) by panel and format, and the FLOP per byte at which the limits meet."""
    device = products["provenance"]["device"].partition(",")[0]
    limits = LIMITS.get(device)
    if limits is None:
        return {}

    def point(operations: float, moved: float, seconds: float, peak: float) -> list[float]:
        least = max(operations / peak, moved / limits.bandwidth)
        return [round(operations / moved, 4), round(least / seconds, 4)]

    found: dict[str, dict[str, list[list[float]]]] = {"fp8": {kind: [] for kind in FP8_KINDS}, "weights": {}}
    for row in products["rows"]:
        m, n, k = row["shape"]
        ours = best(times_of(row), (OURS,))
        if row["kind"] in FP8_KINDS and ours is not None:
            moved = m * k + n * k + 2 * m * n
            found["fp8"][row["kind"]].append(point(2.0 * m * n * k, moved, ours, limits.fp8))
    for row in weights["rows"] if weights else ():
        timed = row["times"].get(OURS, {})
        if row["format"] in WEIGHTS and "median_s" in timed:
            operations = 2.0 * row["m"] * row["n"] * row["k"]
            made = point(operations, row["bytes"], timed["median_s"], limits.bf16)
            found["weights"].setdefault(row["format"], []).append(made)
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
