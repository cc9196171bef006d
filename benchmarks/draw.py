"""Draws the tables and plots of docs/ from benchmarks/results/*.json, so that no figure in them is typed by hand.

A page asks for a block by `<!-- table: NAME -->` and `<!-- end -->`; what stands between is replaced. `--check` exits with 1
where the documents show anything but the results, and needs no matplotlib. Subjects, `bench_*.py`, declare tables and plots.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from harness import BENCHMARKS, HERE, ROOT, Benchmark, Result, Table, load, told
from harness.blocks import filled, pages_in
from harness.blocks import table as markdown
from harness.plots import Plot, write

NOTHING = "*No result yet: run the benchmark.*\n"


def block(results: list[tuple[str, Result]], make: Callable[[Result], Table]) -> str:
    """The table of every machine, its note below."""
    parts: list[str] = []
    for _, result in results:
        table, run = make(result), result["runs"][-1]
        if len(results) > 1:
            parts.append(f"**{run['device']}**\n" if "device" in run else f"**{run['cpu']}, {run['cores']} core(s)**\n")
        parts += [*([markdown(table.headings, table.rows, numbers=True)] if table.rows else []), f"{table.note}\n"]
    return "\n".join(parts) or NOTHING


def subjects() -> dict[str, Benchmark]:
    for path in sorted(HERE.glob("bench_*.py")):
        import_module(path.stem)
    return BENCHMARKS


def drawn(folder: Path) -> tuple[dict[str, str], list[Plot]]:
    """(every block that a page can ask for, every plot) of the results in a folder."""
    results = load(folder, subjects())
    blocks: dict[str, str] = {}
    plots: list[Plot] = []
    for name, benchmark in BENCHMARKS.items():
        blocks |= {shown: block(results[name], make) for shown, make in benchmark.tables.items()}
        lines = [f"- {told(run)}\n" for _, result in results[name] for run in result["runs"]]
        blocks[f"{name}-runs"] = "".join(lines) or NOTHING
        for shown, make in benchmark.plots.items():
            some = [plot for tag, result in results[name] if (plot := make(tag, result, results)).series]
            blocks[shown] = "\n".join(f"![{plot.title}](img/{plot.file})\n" for plot in some) or NOTHING
            plots += some
    return blocks, plots


def main(
    results: Annotated[Path, typer.Option(help="Folder of JSON results.")] = HERE / "results",
    docs: Annotated[Path, typer.Option(help="Folder of the pages, with their plots in img/.")] = ROOT / "docs",
    check: Annotated[bool, typer.Option(help="Write nothing; fail where a page or plot differs from the results.")] = False,
) -> None:
    """Draw the tables and plots of the documents from the results."""
    blocks, plots = drawn(results)
    texts = {page: filled(page, blocks, len(page.relative_to(docs).parts) - 1) for page in pages_in(docs, drawn=True)}
    if check:
        stale = [page.relative_to(docs).as_posix() for page, text in texts.items() if page.read_text(encoding="utf-8") != text]
        stale += [f"img/{plot.file}" for plot in plots if not plot.shown_in(docs / "img")]
        if stale:
            sys.exit(f"draw: {', '.join(stale)} differ(s) from the results; run `python benchmarks/draw.py` and commit both.")
        return
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("draw: plots need matplotlib, which is not installed; `make bench` sets up an environment that has it.")
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")
    for plot in plots:
        write(plot, docs / "img")


if __name__ == "__main__":
    typer.run(main)
