"""The commands `breccia convert`, `breccia compare` and `breccia inspect`."""

from __future__ import annotations

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
from breccia.cli import Json, print_json, recipe_names

from .checkpoint import source_bytes
from .compare import compare as compare_checkpoints
from .compare import spelled
from .convert import Selection
from .convert import convert as convert_checkpoint
from .inspection import inspected
from .report import check_report, write_report
from .results import Advance, Report

ReportFile = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a report too.", show_default=False)]


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A .safetensors file, or a folder of them.", show_default=False)
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="Where to write; of the same kind.", show_default=False)
    ],
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            "-r",
            metavar="RECIPE",
            help="block, mxfp8, nvfp4, int4, ...; with fields: block,block_m=128",
            show_default=False,
            autocompletion=recipe_names,
        ),
    ],
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Names to quantize although kept by default.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Names to leave as they are.")] = None,
    report: ReportFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, say what would be written, and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the destination: a file, or a checkpoint folder.")] = False,
    as_json: Json = False,
) -> None:
    """Quantize a checkpoint's floating matrices; embeddings, norms and lm_head are kept unless included."""
    chosen = breccia.recipe(recipe)
    if report is not None:
        if dry_run:
            raise typer.BadParameter("--report shows what was measured, and --dry-run measures nothing; leave one out.")
        check_report(report)
    selection = Selection(tuple(include or ()), tuple(exclude or ()))
    started = perf_counter()
    with _interruptible(destination), _progress("quantize and verify", source, 2) as advance:
        found = convert_checkpoint(
            source,
            destination,
            chosen,
            selection=selection,
            force=force,
            dry_run=dry_run,
            histograms=report is not None,
            advance=advance,
        )
    seconds = perf_counter() - started
    if report is not None:
        write_report(report, runs([found]), title=f"{source.name} under {chosen.name}")
    if as_json:
        print_json({**found.to_dict(), "dry_run": dry_run, "seconds": seconds})
    else:
        _print_conversion(found, seconds, dry_run, report)
    _warn(found)


def compare(
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", help="The checkpoint to compare with.", show_default=False)],
    candidates: Annotated[
        list[Path], typer.Argument(metavar="CANDIDATE", help="One or several to compare.", show_default=False)
    ],
    report: ReportFile = None,
    fail_under: Annotated[
        float | None, typer.Option(metavar="DB", help="Exit with 1 if a tensor's SQNR is lower.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare checkpoints tensor by tensor: SQNR, cosine, largest error, clip and underflow rate."""
    if report is not None:
        check_report(report)
    found: list[Report] = []
    for candidate in candidates:
        with _progress(f"compare {candidate.name}", reference, 1) as advance:
            found.append(compare_checkpoints(reference, candidate, histograms=report is not None, advance=advance))
    if report is not None:
        write_report(report, runs(found), title=f"{reference.name} compared")
    if as_json:
        print_json({"reference": str(reference), "candidates": [one.to_dict() for one in found]})
    else:
        _print_comparison(found)
        if report is not None:
            Console(soft_wrap=True).print(f"report: {report}", markup=False)
    for one in found:
        _warn(one)
    if fail_under is not None:
        _refuse_below(found, fail_under)


def _refuse_below(found: list[Report], limit: float) -> None:
    """Exit with 1, naming them, where tensors are further off than allowed; NaN is."""
    low = [(one, t) for one in found for t in one.quantized if not t.measured.sqnr >= limit]
    for one, t in low:
        typer.echo(f"below {limit:g} dB: {t.name} of {one.destination}, {t.measured.sqnr:.2f} dB", err=True)
    if low:
        raise typer.Exit(1)


def runs(reports: list[Report]) -> list[dict[str, Any]]:
    """What the page shows of each: everything, a label of its own, and the histograms."""
    names = ["+".join(one.recipes) or "unchanged" for one in reports]
    labels = names if len(set(names)) == len(names) else [Path(one.destination).stem for one in reports]
    found: list[dict[str, Any]] = []
    for one, label in zip(reports, labels, strict=True):
        listed = one.to_dict()
        for row, t in zip(listed["tensors"], one.tensors, strict=True):
            row["histogram"] = t.histogram and t.histogram.to_dict()
        found.append({**listed, "label": label})
    return found


@contextmanager
def _progress(what: str, source: Path, passes: int) -> Generator[Advance]:
    """A bar on a terminal, for `passes` passes over the bytes of a checkpoint."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True, soft_wrap=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=passes * source_bytes(source))
        yield lambda name, size: progress.advance(task, size)


def _warn(report: Report) -> None:
    console = Console(stderr=True, soft_wrap=True)
    for warning in report.warnings:
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


def _print_conversion(found: Report, seconds: float, dry_run: bool, report: Path | None) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.reasons.items())
    rows = {
        "recipe": f"{found.recipe}",
        "quantized": f"{len(found.quantized)} tensors, {found.bits_per_parameter:.2f} bits per parameter",
        "kept": f"{len(found.kept)} tensors, {_size(found.bytes_kept)} in the precision they had: {reasons or 'none'}",
        "size": f"{_size(found.bytes_in)} -> {_size(found.bytes_out)} ({found.bytes_out / max(1, found.bytes_in):.3f}x)",
    }
    if found.worst is not None:
        all_of_them = found.fidelity
        rows["SQNR"] = f"{all_of_them.sqnr:.2f} dB (cosine {found.cosine:.6f})"
        rows["clipped"] = (
            f"{_percent(all_of_them.clip_rate)} of elements; {_percent(all_of_them.underflow_rate)} underflow to 0"
        )
        rows["worst"] = f"{found.worst.name}: {found.worst.measured.sqnr:.2f} dB"
    if dry_run:
        rows["dry run"] = f"nothing was written to {found.destination}"
    else:
        rows["verified"] = f"{found.destination}, read back and compared; {seconds:.1f} s"
    if report is not None:
        rows["report"] = f"{report}"
    if (Path(found.destination) / "config.json").exists() and not dry_run:
        rows["note"] = (
            "config.json was copied unchanged and does not describe the quantized layout yet, so transformers will not load "
            "this folder as it is; load it with breccia.bridges.load_safetensors"
        )
    for name, value in rows.items():
        table.add_row(name, Text(value))
    Console(soft_wrap=True).print(table)


def _print_comparison(found: list[Report]) -> None:
    console = Console(soft_wrap=True)
    for one in found:
        table = Table(box=None, header_style="bold")
        table.add_column("tensor", overflow="fold")
        for heading in ("stored as", "bits/param", "SQNR dB", "cosine", "max error", "clipped", "underflow"):
            table.add_column(heading, no_wrap=True, justify="left" if heading == "stored as" else "right")
        for t in one.quantized:
            m = t.measured
            figures = (f"{m.sqnr:.2f}", f"{m.cosine:.6f}", f"{m.max_error:.3g}", _percent(m.clip_rate))
            table.add_row(t.name, t.stored_as, f"{8 * t.bytes_out / t.parameters:.2f}", *figures, _percent(m.underflow_rate))
        console.print(f"{one.source} -> {one.destination}", style="bold", markup=False, highlight=False)
        if one.quantized:
            console.print(table)
        kept = ", ".join(f"{count} {reason}" for reason, count in one.reasons.items())
        whole = f"{one.fidelity.sqnr:.2f} dB, cosine {one.cosine:.6f}" if one.worst else "nothing differs"
        console.print(
            f"{len(one.quantized)} tensors compared: {whole}; {_size(one.bytes_in)} -> {_size(one.bytes_out)}"
            + (f"; {len(one.kept)} others ({_size(one.bytes_kept)}): {kept}" if kept else ""),
            markup=False,
            highlight=False,
        )
    if len(found) > 1:
        console.print(_summary(found))


def _summary(found: list[Report]) -> Table:
    """A line for each of several candidates."""
    table = Table(box=None, header_style="bold")
    table.add_column("candidate", overflow="fold")
    for heading in ("bits/param", "size", "SQNR dB", "cosine", "clipped", "underflow", "worst tensor"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "worst tensor" else "right")
    for one in found:
        m, worst = one.fidelity, one.worst
        figures = (
            (f"{m.sqnr:.2f}", f"{one.cosine:.6f}", _percent(m.clip_rate), _percent(m.underflow_rate)) if worst else ("-",) * 4
        )
        named = f"{worst.measured.sqnr:.2f} dB, {worst.name}" if worst else "-"
        table.add_row(one.destination, f"{one.bits_per_parameter:.2f}", _size(one.bytes_out), *figures, named)
    return table


def _percent(rate: float | None) -> str:
    """Three digits, and no zero for what is not."""
    return "-" if rate is None else f"{100 * rate:.3g} %"


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .safetensors file, or a folder of them.", show_default=False)],
    scales: Annotated[bool, typer.Option("--scales", help="Read the scales too: their range, and what is odd.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds, and what is suspicious about its scales, from its headers alone."""
    rows = inspected(path, scales)
    if as_json:
        print_json({"path": str(path), "bytes": sum(r["bytes"] for r in rows), "tensors": rows})
        return
    table = Table(box=None, header_style="bold")
    table.add_column("tensor", overflow="fold")
    for heading in ("shape", "stored as", "bits/param", "bytes", *(("scales, least to largest",) if scales else ())):
        table.add_column(heading, no_wrap=True)
    for r in rows:
        bits = f"{8 * r['bytes'] / r['parameters']:.2f}" if r["parameters"] else "-"
        cells = [r["name"], spelled(r["shape"]), _stored_as(r), bits, _size(r["bytes"])]
        if scales:
            found = r["scales"]
            cells.append(f"{found['min']:.3g} to {found['max']:.3g}" if found and found["min"] is not None else "")
        table.add_row(*map(Text, cells))
    console = Console(soft_wrap=True)
    console.print(table)
    scaled = [r for r in rows if r["recipe"] or r["scaled_by"]]
    total, parameters = sum(r["bytes"] for r in rows), sum(r["parameters"] for r in rows)
    console.print(
        f"{len(rows)} tensors, {len(scaled)} of them scaled; {parameters:,} parameters in {_size(total)}, "
        f"{8 * total / max(1, parameters):.2f} bits per parameter"
    )
    for r in rows:
        for doubt in r["suspicious"]:
            console.print(Text.assemble(("suspicious: ", "yellow"), f"{r['name']}: {doubt}"))


def _stored_as(row: dict[str, Any]) -> str:
    if not row["scaled_by"]:
        return row["stored_as"]
    return f"{row['stored_as']}, a scale per {spelled(row['block']) if row['block'] else '?'}"


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
