"""The commands `breccia convert` and `breccia inspect`."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import breccia
from breccia.cli import Json, print_json

from .checkpoint import checkpoint_files, source_bytes
from .container import Container, Shape
from .convert import Report, Selection
from .convert import convert as convert_checkpoint
from .safetensors import PARTS, Config, read_configs


def convert(
    source: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder of them.", show_default=False)],
    destination: Annotated[Path, typer.Argument(help="Where to write; of the same kind.", show_default=False)],
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe", "-r", help="block, mxfp8, nvfp4, int4, ...; with fields: block,block_m=128", show_default=False
        ),
    ],
    include: Annotated[list[str] | None, typer.Option(help="Glob of names to quantize although kept by default.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Glob of names to leave as they are.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a destination that exists: a file, or a whole checkpoint folder.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Quantize a checkpoint's floating matrices; embeddings, norms and lm_head are kept unless included."""
    chosen = breccia.recipe(recipe)
    selection = Selection(tuple(include or ()), tuple(exclude or ()))
    started = perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True, soft_wrap=True)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with _interruptible(destination), progress:
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
    for warning in _warnings(report):
        console.print(Text.assemble(("warning: ", "yellow"), warning), highlight=False)


class _Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _interruptible(destination: Path) -> Generator[None]:
    """Let SIGTERM and SIGHUP clean up as SIGINT does, and turn all three into one line and exit code 128 + signal."""

    def stop(number: int, frame: object) -> None:
        raise _Stopped(number)

    before, replaced = _identity(destination), {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        # One that is ignored, as nohup does, stays ignored; None is a handler that Python did not set.
        numbers = [n for n in numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        replaced = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except KeyboardInterrupt as e:
        wrote = "nothing" if _identity(destination) == before else f"{destination}, whole and verified,"
        typer.echo(f"interrupted; {wrote} was written", err=True)
        raise typer.Exit(128 + (e.number if isinstance(e, _Stopped) else signal.SIGINT)) from None
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _identity(path: Path) -> tuple[int, int] | None:
    if not os.path.lexists(path):
        return None
    status = path.lstat()
    return status.st_dev, status.st_ino


def _print_report(report: Report, seconds: float) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.reasons.items())
    rows = {
        "recipe": f"{report.recipe}",
        "quantized": f"{len(report.quantized)} tensors, {report.bits_per_parameter:.2f} bits per parameter",
        "kept": f"{len(report.kept)} tensors, {_size(report.bytes_kept)} in the precision they had: {reasons or 'none'}",
        "size": f"{_size(report.bytes_in)} -> {_size(report.bytes_out)} ({report.bytes_out / max(1, report.bytes_in):.3f}x)",
    }
    if report.worst is not None:
        rows["SQNR"] = f"{report.sqnr:.2f} dB (cosine {report.cosine:.6f})"
        rows["worst"] = f"{report.worst.name}: {report.worst.sqnr:.2f} dB"
    rows["verified"] = f"{report.destination}, read back and compared; {seconds:.1f} s"
    if (Path(report.destination) / "config.json").exists():
        rows["note"] = (
            "config.json was copied unchanged and does not describe the quantized layout yet, so transformers will not load "
            "this folder as it is; load it with breccia.bridges.load_safetensors"
        )
    for name, value in rows.items():
        table.add_row(name, Text(value))
    Console(soft_wrap=True).print(table)


def _warnings(report: Report) -> list[str]:
    found = [f"the pattern {pattern!r} matches no tensor." for pattern in report.unmatched]
    if not report.quantized:
        found.append("no tensor was quantized; `--json` says why each was kept.")
    bad = [t.name for t in report.quantized if not math.isfinite(t.signal)]
    if bad:
        found.append(f"NaN or Inf in the source of {', '.join(bad)}; their blocks decode to NaN.")
    return found


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
        table.add_row(r["name"], "x".join(map(str, r["shape"])) or "scalar", r["stored_as"], bits, _size(r["bytes"]))
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
    parts = {name: [p for p in (f"{name}.{part}" for part in PARTS) if p in container.entries] for name in configs}
    owned = {part for held in parts.values() for part in held}

    def row(name: str, shape: Shape, held: list[str], stored_as: str, config: Config | None) -> dict[str, Any]:
        return {
            "name": name,
            "file": container.path.name,
            "shape": list(shape),
            "stored_as": stored_as,
            "recipe": config and config.recipe.to_dict(),
            "layout": config and config.layout.to_dict(),
            "parameters": math.prod(shape),
            "bytes": sum(container.entries[part].nbytes for part in held),
        }

    rows = [row(name, e.shape, [name], e.dtype, None) for name, e in container.entries.items() if name not in owned]
    for name, config in configs.items():
        shape = container.entries[f"{name}.data"].shape if config.shape is None else config.shape
        rows.append(row(name, shape, parts[name], config.recipe.name, config))
    return sorted(rows, key=lambda r: r["name"])


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
