"""Draws the tables and plots of docs/ from benchmarks/results/*.json, so that no figure in them is typed by hand.

    python benchmarks/draw.py           # writes them; needs matplotlib
    python benchmarks/draw.py --check   # exits with 1 where the documents show anything but the results; needs no matplotlib

A page asks for a block by `<!-- table: NAME -->` and `<!-- end -->`; what stands between is replaced. Each plot carries the
digest of the numbers it was drawn from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import common
import product_plots
import tables
import typer
from blocks import filled
from blocks import table as markdown_table
from rivals import OLD, STRAIGHTFORWARD, WAYS
from tables import GAUSSIAN, TRAINED, Result, Table

PAGES = ("benchmarks.md", "accuracy.md", "numerics.md", "kernels.md")
NOTHING = "*No result yet: run the benchmark.*\n"

#: Mid-tones that keep a contrast of 3 or more on white and on the dark grounds of code hosts; Okabe and Ito's, which the
#: colour-blind can tell apart. Text and lines are a grey of 4 or more.
GREY, BLUE, ORANGE = "#767676", "#0072B2", "#D55E00"
RIVAL_COLOURS = {STRAIGHTFORWARD: BLUE, OLD: ORANGE}


def load(folder: Path) -> dict[str, list[tuple[str, Result]]]:
    """Results by benchmark, each with its machine's tag, in order of tags. Exits on a file of another schema."""
    found: dict[str, list[tuple[str, Result]]] = {name: [] for name in tables.TABLES}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        name = result.get("benchmark")
        if name not in found or result.get("schema") != common.SCHEMA:
            sys.exit(
                f"draw: {path.name} holds benchmark {name!r} of schema {result.get('schema')!r}; this version draws "
                f"{', '.join(found)} of schema {common.SCHEMA}. Rerun that benchmark, or take the file away."
            )
        if "passes" in result and result["options"].get("drift", math.inf) > tables.DRIFT:
            sys.exit(f"draw: {path.name} was measured with --drift above {tables.DRIFT}; rerun that benchmark without it.")
        found[name].append((path.stem.removeprefix(f"{name}-"), result))
    return found


# ------------------------------------------------------------------------------------------------ tables


def markdown(table: Table) -> str:
    return markdown_table(table.headings, table.rows, numbers=True)


def block(results: list[tuple[str, Result]], make: Callable[[Result], Table]) -> str:
    """The table of every machine, its note below."""
    parts: list[str] = []
    for _, result in results:
        table = make(result)
        if len(results) > 1:
            p = result["provenance"]
            parts.append(f"**{p['device']}**\n" if "device" in p else f"**{p['cpu']}, {p['cores']} core(s)**\n")
        parts += [*([markdown(table)] if table.rows else []), f"{table.note}\n"]
    return "\n".join(parts) or NOTHING


# ------------------------------------------------------------------------------------------------ plots


@dataclass(frozen=True)
class Plot:
    """A file in docs/img: what it is, the numbers, and how they are drawn."""

    file: str
    title: str
    series: Any
    draw: Callable[[Any], Any]

    @property
    def digest(self) -> str:
        """Of the numbers alone; it is written into the file."""
        return hashlib.sha256(json.dumps(self.series, sort_keys=True).encode()).hexdigest()[:32]


def plots_of(results: dict[str, list[tuple[str, Result]]]) -> dict[str, list[Plot]]:
    """The plots by the name of the block that shows them."""
    speed = [
        Plot(f"speed-up-{tag}.svg", "Times faster than each rival", speed_series(r), speed_up) for tag, r in results["cast"]
    ]
    title = "SQNR against bits per parameter"
    quality = [Plot(f"sqnr-{tag}.svg", title, sqnr_series(r), sqnr) for tag, r in results["accuracy"]]
    products, weights = results["matmul-gpu"], dict(results["gpu-weight-only"])
    title = "Rates of FP8 products by rows, beside the best rival"
    sweeps = [Plot(f"products-{tag}.svg", title, product_plots.sweep_series(r), product_plots.sweep) for tag, r in products]
    title = "Share of the limit of memory or tensor cores that products reach"
    roofs = [
        Plot(f"roofline-{tag}.svg", title, product_plots.roofline_series(r, weights.get(tag)), product_plots.roofline)
        for tag, r in products
    ]
    return {
        "speed-up": [plot for plot in speed if plot.series["rivals"]],
        "sqnr": quality,
        "matmul-gpu-sweep": [plot for plot in sweeps if plot.series],
        "matmul-gpu-roofline": [plot for plot in roofs if plot.series],
    }


def speed_series(result: Result) -> Any:
    """By op, recipe and rival: speed-up, and whether the rival's time was extrapolated."""
    rivals = [name for name in tables.rivals_of(result) if name not in WAYS]
    bars: dict[str, Any] = {}
    for op in ("cast", "dequantize"):
        for recipe in tables.recipes_of(result):
            for name in rivals:
                scaled = tables.timing(result, name, recipe, op)["factor"] != 1
                bar = [round(tables.speed_up(result, name, recipe, op), 6), scaled]
                bars.setdefault(op, {}).setdefault(recipe, {})[name] = bar
    return {"rivals": {name: tables.versioned(result, name) for name in rivals}, "bars": bars}


def sqnr_series(result: Result) -> Any:
    """By default recipe: bits per parameter, and SQNR on normal data and on trained weights."""
    series: dict[str, Any] = {}
    for row in result["rows"]:
        if row["default"]:
            data = row["data"]
            trained = round(data[TRAINED]["sqnr_db"], 4) if TRAINED in data else None
            bits = round(data[GAUSSIAN]["bits_per_parameter"], 4)
            series[row["recipe"]] = [bits, round(data[GAUSSIAN]["sqnr_db"], 4), trained]
    return series


def speed_up(series: Any) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, (op, recipes) in zip(figure.subplots(1, 2, sharey=True), series["bars"].items(), strict=True):
        height = 0.8 / len(series["rivals"])
        longest = 1.0
        for place, rivals in enumerate(recipes.values()):
            for turn, (name, (value, scaled)) in enumerate(rivals.items()):
                y = place - 0.4 + (turn + 0.5) * height
                hatch = "///" if scaled else None
                axes.barh(y, value - 1, height * 0.9, 1, color=RIVAL_COLOURS[name], hatch=hatch, edgecolor=GREY, linewidth=0)
                axes.annotate(
                    tables.ratio(value), (max(value, 1), y), (4, 0), textcoords="offset points", va="center", fontsize=9
                )
                longest = max(longest, value)
        axes.set_xscale("log")
        axes.set_xlim(right=longest * 4)
        axes.set_yticks(range(len(recipes)), list(recipes))
        axes.set_title(op, fontsize=11)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.axvline(1, color=GREY, linewidth=1)
    figure.axes[0].invert_yaxis()
    keys = [Patch(color=RIVAL_COLOURS[name], label=f"over {label}") for name, label in series["rivals"].items()]
    if any(scaled for recipes in series["bars"].values() for rivals in recipes.values() for _, scaled in rivals.values()):
        keys.append(Patch(facecolor="none", edgecolor=GREY, hatch="///", label="rival's time extrapolated"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    return figure


def sqnr(series: Any) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    dots, diamonds = ({"marker": "o", "color": BLUE}, {"marker": "D", "markerfacecolor": "none", "color": ORANGE})
    lows = [db for _, *values in series.values() for db in values if db is not None]
    right = max(bits for bits, *_ in series.values()) + 0.4
    apart = (max(lows) - min(lows)) / 24
    level = float("-inf")
    for name, (bits, drawn, trained) in sorted(series.items(), key=lambda item: (item[1][1], item[0])):
        axes.plot(bits, drawn, linestyle="none", **dots)
        if trained is not None:
            axes.plot([bits, bits], [drawn, trained], color=GREY, linewidth=0.6, zorder=0)
            axes.plot(bits, trained, linestyle="none", **diamonds)
        level = max(drawn, level + apart)  # labels stand in one column, each at its point's height or as near as it fits
        axes.annotate(f"{name}, {tables.bits(bits)}", (right + 0.15, level), va="center", fontsize=9)
        axes.plot([bits, right, right + 0.1], [drawn, level, level], color=GREY, linewidth=0.4, zorder=0)
    axes.plot([], [], linestyle="none", label="standard normal", **dots)
    if any(trained is not None for *_, trained in series.values()):
        axes.plot([], [], linestyle="none", label=f"weights of {TRAINED}", **diamonds)
    axes.set_xlim(right=right + 1.6)
    axes.set_xticks(range(math.floor(min(bits for bits, *_ in series.values())), math.floor(right) + 1))
    axes.spines["bottom"].set_bounds(axes.get_xlim()[0], right)
    axes.set_xlabel("bits per parameter, scales included")
    axes.set_ylabel("SQNR, dB")
    axes.legend(loc="upper left", frameon=False)
    return figure


def write(plot: Plot, folder: Path) -> None:
    """The plot as SVG: text as text, no ground, and the same bytes at every run."""
    import matplotlib

    style = {name: GREY for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    style |= {"svg.hashsalt": plot.file, "svg.fonttype": "none", "font.family": "sans-serif", "hatch.linewidth": 0.7}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlecolor": GREY, "savefig.transparent": True}
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(style):
        metadata = {"Title": plot.title, "Description": f"drawn from numbers of digest {plot.digest}", "Date": None}
        plot.draw(plot.series).savefig(folder / plot.file, metadata={**metadata, "Creator": None})


def shown(plots: list[Plot]) -> str:
    return "\n".join(f"![{plot.title}](img/{plot.file})\n" for plot in plots) or NOTHING


# ------------------------------------------------------------------------------------------------ pages


def blocks_of(results: dict[str, list[tuple[str, Result]]], plots: dict[str, list[Plot]]) -> dict[str, str]:
    """Every block that a page can ask for."""
    made = {name: block(results[b], make) for b, every in tables.TABLES.items() for name, make in every.items()}
    for benchmark, found in results.items():
        made[f"{benchmark}-runs"] = "".join(f"- {line}\n" for _, result in found for line in tables.machines(result)) or NOTHING
    return made | {name: shown(every) for name, every in plots.items()}


def main(
    results: Annotated[Path, typer.Option(help="Folder of JSON results.")] = common.HERE / "results",
    docs: Annotated[Path, typer.Option(help="Folder of the pages, with their plots in img/.")] = common.ROOT / "docs",
    check: Annotated[bool, typer.Option(help="Write nothing; fail where a page or plot differs from the results.")] = False,
) -> None:
    """Draw the tables and plots of the documents from the results."""
    found = load(results)
    plots = plots_of(found)
    blocks = blocks_of(found, plots)
    pages = {docs / name: filled(docs / name, blocks) for name in PAGES}
    every = [plot for some in plots.values() for plot in some]
    if check:
        stale = [page.name for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
        for plot in every:
            path = docs / "img" / plot.file
            if not path.exists() or plot.digest not in path.read_text(encoding="utf-8"):
                stale.append(f"img/{plot.file}")
        if stale:
            sys.exit(f"draw: {', '.join(stale)} differ(s) from the results; run `python benchmarks/draw.py` and commit both.")
        return
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("draw: plots need matplotlib, which is not installed; `make bench` sets up an environment that has it.")
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    for plot in every:
        write(plot, docs / "img")


if __name__ == "__main__":
    typer.run(main)
