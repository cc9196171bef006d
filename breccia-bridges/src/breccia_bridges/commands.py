"""The commands `breccia convert` and `breccia inspect`."""

from __future__ import annotations

import math
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import breccia
from breccia.cli import Json, print_json

from .container import Container
from .convert import Report, Selection, checkpoint_files, source_bytes
from .convert import convert as convert_checkpoint
from .safetensors import PARTS, read_configs


def convert(
    source: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder of them.", show_default=False)],
    destination: Annotated[Path, typer.Argument(help="Where to write; of the same kind.", show_default=False)],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="NAME[,field=value...]", show_default=False)],
    include: Annotated[list[str] | None, typer.Option(help="Quantize names like this although kept by default.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave names like this as they are.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a destination that exists.")] = False,
    as_json: Json = False,
) -> None:
    """Quantize a checkpoint's floating matrices; embeddings, norms and lm_head are kept unless included."""
    chosen = breccia.recipe(recipe)
    selection = Selection(tuple(include or ()), tuple(exclude or ()))
    started = perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("quantize and verify", total=2 * source_bytes(source))
        report = convert_checkpoint(
            source,
            destination,
            chosen,
            selection=selection,
            force=force,
            advance=lambda name, size: progress.advance(task, size),
        )
    seconds = perf_counter() - started
    if as_json:
        print_json({**report.to_dict(), "seconds": seconds})
    else:
        _print_report(report, seconds)


def _print_report(report: Report, seconds: float) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "recipe": f"{report.recipe}",
        "quantized": f"{len(report.quantized)} tensors, {report.bits_per_parameter:.2f} bits per parameter",
        "kept": f"{len(report.kept)} tensors, {_size(report.bytes_kept)} in the precision they had",
        "size": f"{_size(report.bytes_in)} -> {_size(report.bytes_out)} ({report.bytes_out / max(1, report.bytes_in):.3f}x)",
    }
    if report.worst is not None:
        rows["SQNR"] = f"{report.sqnr:.2f} dB (cosine {report.cosine:.6f})"
        rows["worst"] = f"{report.worst.name}: {report.worst.sqnr:.2f} dB"
    rows["verified"] = f"{report.destination}, read back and compared; {seconds:.1f} s"
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console(soft_wrap=True)
    console.print(table)
    bad = [t.name for t in report.quantized if not math.isfinite(t.signal)]
    if bad:
        console.print(f"[yellow]warning:[/] NaN or Inf in the source of {', '.join(bad)}; their blocks decode to NaN.")


def inspect(
    path: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder of them.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds, from its headers alone."""
    rows = [row for file in checkpoint_files(path) for row in _inspected(Container(file))]
    if as_json:
        print_json({"path": str(path), "bytes": sum(r["bytes"] for r in rows), "tensors": rows})
        return
    table = Table(box=None, header_style="bold")
    table.add_column("tensor", overflow="fold")
    for heading in ("shape", "stored as", "bits/param", "bytes"):
        table.add_column(heading, no_wrap=True)
    for r in rows:
        bits = f"{8 * r['bytes'] / r['parameters']:.2f}" if r["parameters"] else "-"
        table.add_row(r["name"], "×".join(map(str, r["shape"])) or "scalar", r["stored_as"], bits, _size(r["bytes"]))
    console = Console(soft_wrap=True)
    console.print(table)
    scaled = [r for r in rows if r["recipe"]]
    total, parameters = sum(r["bytes"] for r in rows), sum(r["parameters"] for r in rows)
    console.print(
        f"{len(rows)} tensors, {len(scaled)} of them scaled; {parameters:,} parameters in {_size(total)}, "
        f"{8 * total / max(1, parameters):.2f} bits per parameter"
    )


def _inspected(container: Container) -> list[dict[str, Any]]:
    configs = read_configs(container)
    parts = {f"{name}.{part}": name for name in configs for part in PARTS}
    rows: list[dict[str, Any]] = []
    for name, config in configs.items():
        data = container.entries[f"{name}.data"]
        shape = data.shape if config.shape is None else config.shape
        held = sum(container.entries[p].nbytes for p, owner in parts.items() if owner == name and p in container.entries)
        rows.append(_row(container, name, shape, config.recipe.name, held, config.recipe.to_dict(), config.layout.to_dict()))
    for name, entry in container.entries.items():
        if name not in parts:
            rows.append(_row(container, name, entry.shape, entry.dtype, entry.nbytes))
    return sorted(rows, key=lambda r: r["name"])


def _row(container: Container, name: str, shape: Any, stored: str, size: int, recipe: Any = None, layout: Any = None) -> Any:
    return {
        "name": name,
        "file": container.path.name,
        "shape": list(shape),
        "stored_as": stored,
        "recipe": recipe,
        "layout": layout,
        "parameters": math.prod(shape),
        "bytes": size,
    }


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
