"""The commands `breccia convert` and `breccia compare`, and what those beside them share."""

from __future__ import annotations

import math
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import breccia
from breccia.backend import Json, print_json, print_table, registry
from breccia.internal import COMPLETE, NEW_CODES, abbreviated, policy_names, printable

from .announcements import CONFIG, read_object
from .checkpoint import source_bytes
from .compare import compare as compare_checkpoints
from .convert import convert as convert_checkpoint
from .destination import location
from .jobs import BY_DEFAULT
from .mix import Mix, policy_path
from .order import COMPARED, CompareKey, in_order
from .remote_path import is_remote, lexists, path_of
from .report import check_report, recipe_fields, write_report
from .results import Advance, Report, Verify
from .staging import Staging
from .text import either, percent, size
from .uploads import staged_at

if TYPE_CHECKING:
    PathOrURL = Path
else:
    #: What `path_of` parses. Help calls an argument by the name of its type.
    PathOrURL = type("path", (Path,), {})

Top = Annotated[int | None, typer.Option(metavar="N", min=1, help="Show only the first N; --json has all.", show_default=False)]
ReportFile = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Also write an HTML report.", show_default=False)]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="DIALECT",
        help="Dialect, if several fit: gptq, gptq_v2, awq, mlx, ...",
        show_default=False,
    ),
]


def convert(
    source: Annotated[
        PathOrURL, typer.Argument(metavar="SOURCE", help="A .safetensors or .gguf file, folder or URL.", parser=path_of)
    ],
    destination: Annotated[
        PathOrURL, typer.Argument(metavar="DESTINATION", help="Where to write, like SOURCE.", parser=path_of)
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            "-r",
            metavar="RECIPE",
            help="One of `breccia recipes`; a preset: "
            f"{', '.join(COMPLETE)}; a YAML policy; none (keep codes); or decode: bf16, fp16, fp32.",
            show_default=False,
            autocompletion=policy_names,
        ),
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option(
            "--target-bits", metavar="BITS", help="Mix recipes (-r A -r B ...) at so many per parameter.", show_default=False
        ),
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option(
            "--dialect",
            metavar="DIALECT",
            help="Write as compressed_tensors, gguf, mlx, ... do.",
            show_default=False,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            "--activations",
            metavar="RECIPE",
            help="Under --dialect, of layers' inputs; or none.",
            show_default=False,
        ),
    ] = None,
    include: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Also quantize these tensors; repeatable.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Tensors to keep unquantized; repeatable.")] = None,
    report: ReportFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, report sizes; write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file, or a checkpoint folder.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what an interrupted run has finished.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Write nothing if a value would change.")] = False,
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Largest file of a folder, such as 5GB.", show_default=False),
    ] = None,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Largest peak of memory.")] = "1GiB",
    verify: Annotated[Verify, typer.Option(metavar="HOW", help="full, bytes (no metrics) or none.")] = Verify.full,
    engine: Annotated[str, typer.Option(metavar="NAME", help="local, or ray: on a cluster.")] = "local",
    source_dialect: From = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="FILE",
            help="Choose codes by layers' inputs on a text, or ids.npy.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", metavar="METHOD", help="Of --calibrate: gptq (default), importance or awq.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="Of --calibrate: cpu (default), cuda, ...", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Quantize a checkpoint, or store one of another library (GPTQ, ...) anew.

    \b
    breccia convert model model-int4 --recipe int4,group_size=64
    breccia convert model-awq model-vllm --dialect compressed_tensors
    """
    if report is not None:
        if dry_run:
            raise typer.BadParameter("--report shows measurements, and --dry-run measures nothing; use only one of them.")
        if verify is not Verify.full:
            raise typer.BadParameter(f"--report shows measurements, and --verify {verify.value} measures nothing; use one.")
        _check_report(report, destination)
    started = perf_counter()
    with interruptible(destination, verify), progress("quantize and verify", source, 2 + (calibrate is not None)) as advance:
        several = len(recipe or ()) > 1 or target_bits is not None
        result = convert_checkpoint(
            source,
            destination,
            recipe if several else recipe[0] if recipe else None,
            target_bits=target_bits,
            include=include or (),
            exclude=exclude or (),
            force=force,
            dry_run=dry_run,
            histograms=report is not None,
            advance=advance,
            source_dialect=source_dialect,
            dialect=dialect,
            activations=activations,
            exact=exact,
            restart=restart,
            max_shard_size=max_shard_size,
            max_memory=max_memory,
            verify=verify,
            engine=engine,
            calibrate=calibrate,
            method=method,
            device=device,
        )
    seconds = perf_counter() - started
    if as_json:
        print_json({**result.to_dict(), "dry_run": dry_run, "seconds": seconds})
    else:
        _print_conversion(result, recipe[0] if recipe else "none", seconds, dry_run)
    _finish([result], report, f"{source.name} under {' and '.join(result.recipes) or 'no recipe'}", as_json)


def compare(
    reference: Annotated[
        PathOrURL, typer.Argument(metavar="REFERENCE", help="The original: a file, a folder or a URL.", parser=path_of)
    ],
    candidates: Annotated[
        list[PathOrURL], typer.Argument(metavar="CANDIDATE", help="One or several to compare with it.", parser=path_of)
    ],
    sort: Annotated[
        CompareKey | None,
        typer.Option(metavar="KEY", help=f"{either(CompareKey)}; the worst first.", show_default="order of the file"),
    ] = None,
    top: Top = None,
    report: ReportFile = None,
    fail_under: Annotated[
        float | None, typer.Option(metavar="DB", help="Exit with 1 if any tensor's SQNR is lower.", show_default=False)
    ] = None,
    source_dialect: From = None,
    reference_dialect: Annotated[
        str | None,
        typer.Option("--reference-from", metavar="DIALECT", help="The same, of REFERENCE alone.", show_default=False),
    ] = None,
    candidate_dialect: Annotated[
        str | None,
        typer.Option("--candidate-from", metavar="DIALECT", help="The same, of each CANDIDATE alone.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare checkpoints, by breccia or another library, with the original: SQNR, cosine, largest error, clip, underflow.

    \b
    breccia compare model model-gptq model-awq --sort sqnr --top 10
    """
    if fail_under is not None and math.isnan(fail_under):
        raise typer.BadParameter("--fail-under takes a number of dB; got NaN.")
    if source_dialect is not None and (reference_dialect is not None or candidate_dialect is not None):
        raise typer.BadParameter("--from is for REFERENCE and CANDIDATE; give it, or --reference-from and --candidate-from.")
    if report is not None:
        _check_report(report, reference, *candidates)
    dialects = (source_dialect or reference_dialect, source_dialect or candidate_dialect)
    results: list[Report] = []
    for candidate in candidates:
        with progress(f"compare {candidate.name}", reference, 1) as advance:
            results.append(
                compare_checkpoints(
                    reference, candidate, histograms=report is not None, advance=advance, source_dialect=dialects
                )
            )
    if as_json:
        print_json({"reference": str(reference), "candidates": [one.to_dict() for one in results]})
    else:
        _print_comparison(results, sort, top)
    _finish(results, report, f"{reference.name} compared", as_json)
    if fail_under is not None:
        _refuse_below(results, fail_under)


def _check_report(report: Path, *others: Path) -> None:
    """Check, before any work, that the report can be written."""
    check_report(report)
    if report.absolute() in [other.absolute() for other in others]:
        raise breccia.UnsupportedError(f"{report} is one of the checkpoints; choose another name for the report.")


def _finish(results: list[Report], report: Path | None, title: str, as_json: bool) -> None:
    """Write the warnings and the report after all other output."""
    console = Console(stderr=True, soft_wrap=True)
    for warning in (warning for one in results for warning in one.warnings):
        console.print(Text.assemble(("warning: ", "yellow"), printable(warning)), highlight=False)
    if report is not None:
        write_report(report, runs(results), title=title)
        if not as_json:
            typer.echo(f"{'report':<{_NAMES + 2}}{printable(str(report))}")


def _refuse_below(results: list[Report], limit: float) -> None:
    """Raise BrecciaError if tensors are below the limit or have no SQNR (NaN, missing, or a different shape)."""
    refused: dict[str, list[str]] = {}
    for one in results:
        below = [f"{t.name} ({t.measured.sqnr:.2f} dB)" for t in one.quantized if not t.measured.sqnr >= limit]
        below += [f"{t.name} ({t.reason})" for t in one.unlike] + [f"{name} (missing)" for name in one.missing]
        if below:
            refused[one.destination] = below
    if refused:
        said = [f"tensors of {path} are below {limit:g} dB: {abbreviated(below, 8)}." for path, below in refused.items()]
        raise breccia.BrecciaError(" ".join(said), limit=limit, below=refused)


def runs(reports: list[Report]) -> list[dict[str, Any]]:
    """The page's data for each report: all its fields, a unique label, the fields of its recipes, and histograms."""
    data: list[dict[str, Any]] = []
    for one, label in zip(reports, _labels(reports), strict=True):
        listed = one.to_dict()
        for row, t in zip(listed["tensors"], one.tensors, strict=True):
            row["histogram"] = t.histogram and t.histogram.to_dict()
        data.append({**listed, "label": label, "recipe_fields": [recipe_fields(recipe) for recipe in one.used]})
    return data


def _labels(reports: list[Report]) -> list[str]:
    """The shortest distinct names: recipes, with fields, files, or files with their folders; else numbered files."""
    paths = [Path(one.destination) for one in reports]
    files = [path.name.removesuffix(".safetensors") for path in paths]
    recipes = ["+".join(one.recipes) or "unchanged" for one in reports]
    specs = ["+".join(recipe.spec for recipe in one.used) or "unchanged" for one in reports]
    folders = [f"{path.absolute().parent.name}/{file}" for path, file in zip(paths, files, strict=True)]
    distinct = next((names for names in (recipes, specs, files, folders) if len(set(names)) == len(names)), None)
    return distinct or [f"{n}: {file}" for n, file in enumerate(files, 1)]


@contextmanager
def progress(what: str, source: Path, passes: int) -> Generator[Advance]:
    """A progress bar (on a terminal) for `passes` passes over the bytes of a checkpoint."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True, soft_wrap=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(printable(what), total=passes * source_bytes(source))
        yield lambda name, size: progress.advance(task, size)


class _Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def interruptible(destination: Path, verify: Verify = Verify.full) -> Generator[None]:
    """Let SIGTERM and SIGHUP clean up as SIGINT does. All three print one line and exit with 128 + signal."""

    def stop(number: int, frame: object) -> None:
        raise _Stopped(number)

    before, replaced = _identity(destination), {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        # Ignored signals stay ignored (nohup); None means a handler that Python did not install.
        numbers = [n for n in numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)]
        replaced = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except KeyboardInterrupt as e:
        if Staging(staged_at(location(destination)), keeps_journal=True).kept:
            said = f"nothing is written to {destination} yet; the same command goes on from what is finished"
        elif _identity(destination) == before:
            said = "nothing was written"
        else:
            said = f"{destination}, complete{' and verified' * (verify is not Verify.none)}, was written"
        typer.echo(printable(f"interrupted; {said}"), err=True)
        raise typer.Exit(128 + (e.number if isinstance(e, _Stopped) else signal.SIGINT)) from None
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _identity(path: Path) -> tuple[int, int] | None:
    if not lexists(path):
        return None
    status = path.lstat()
    return status.st_dev, status.st_ino


def _print_conversion(result: Report, recipe: str, seconds: float, dry_run: bool) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(min_width=_NAMES)
    reasons = _counted(t.reason for t in result.kept)
    kept_bytes = sum(t.bytes_out for t in result.kept)
    rows = {
        "recipe": _chosen(result) if result.mix else f"{result.recipe or f'{recipe}: nothing is quantized'}",
        **({"dialect": result.dialect} if result.dialect else {}),
        **({"target": _target(result.mix)} if result.mix else {}),
        **({"calibrated": _calibration(result)} if result.calibration else {}),
        "quantized": f"{len(result.quantized)} tensors, {result.bits_per_parameter:.3f} bits per parameter",
        "kept": f"{len(result.kept)} tensors, {size(kept_bytes)} in their original precision: {reasons or 'none'}",
        "size": f"{size(result.bytes_in)} -> {size(result.bytes_out)} ({result.bytes_out / max(1, result.bytes_in):.3f}x)",
    }
    renewed = sum(t.exactness is not None and t.exactness.kind == NEW_CODES for t in result.codes_kept)
    if same := len(result.codes_kept) - renewed:
        rows["codes kept"] = f"of {same} tensors that were quantized before: no value changed"
    if renewed:
        rows["new codes"] = f"of {renewed} tensors that were quantized before: no value changed"
    if result.requantized:
        rows["again"] = f"{len(result.requantized)} tensors that were quantized before, from their decoded values"
        reasons = _counted(
            f"{t.dtype} to {t.stored_as}: {t.exactness.kind}, {t.exactness.why}" for t in result.requantized if t.exactness
        )
        rows["exactness"] = f"{reasons}; --exact refuses what changes"
    if result.decoded:
        sizes = size(sum(t.bytes_out for t in result.decoded))
        rows["decoded"] = (
            f"{len(result.decoded)} tensors that were quantized before, {sizes}: {_counted(t.reason for t in result.decoded)}"
        )
    if result.dropped:
        rows["dropped"] = f"{len(result.dropped)} tensors of quantized activations: {abbreviated(result.dropped)}"
    default = [t.name for t in result.tensors if t.reason.startswith(BY_DEFAULT)]
    if default:
        rows["by default"] = f"kept, unless --include names them: {abbreviated(default)}"
    if result.worst is not None:
        m, worst = result.fidelity, result.worst
        rows["SQNR"] = f"{m.sqnr:.2f} dB (cosine {result.cosine:.6f})"
        rows["lost"] = f"{percent(m.clip_rate)} of elements clipped, {percent(m.underflow_rate)} underflow to zero"
        rows["worst"] = f"{worst.name}: {worst.measured.sqnr:.2f} dB"
    if result.mix and not dry_run and not is_remote(path := policy_path(Path(result.destination))):
        rows["policy"] = f"{path}; as --recipe it chooses the same"
    if dry_run:
        rows["dry run"] = f"nothing was written to {result.destination}"
    else:
        name, how = _VERIFIED[result.verify]
        rows[name] = f"{result.destination}{how}; {seconds:.1f} s"
    config = None if dry_run or not result.quantized else read_object(Path(result.destination) / CONFIG)
    if config is not None:
        theirs = registry().dialects.get(result.dialect)
        rows["load"] = (
            "breccia.bridges.load_checkpoint(folder)" + (f", or by {theirs.title}" if "model_type" in config else "")
            if theirs
            else "breccia.bridges.load_safetensors(folder); or import breccia_torch.hf (pip install 'breccia-torch[hf]'), then "
            "transformers' from_pretrained(folder)"
        )
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    Console(soft_wrap=True).print(table)


def _chosen(result: Report) -> str:
    """The recipes of a conversion to a number of bits, those of the most tensors first."""
    assert result.mix is not None
    return ", ".join(f"{count} {spec}" for spec, count in Counter(result.mix.counts).most_common())


def _target(mix: Mix) -> str:
    """What a conversion to a number of bits has reached, and what one recipe would."""
    said = f"{mix.bits:.3f} bits per parameter; {mix.measure}, predicted: {mix.damage:.4g}"
    return f"{said}, {mix.single[1]:.4g} under {mix.single[0]} alone" if mix.single else said


def _calibration(result: Report) -> str:
    """What calibration did: the method, the tokens that most layers got, and how many layers it left."""
    chosen = result.calibrated
    tokens = max((t.calibration["tokens"] for t in chosen if t.calibration), default=0)
    left = len(result.quantized) - len(chosen)
    return f"{len(chosen)} tensors by {result.calibration}, on {tokens} tokens" + (
        f"; {left} are cast without it" if left else ""
    )


def _counted(reasons: Iterable[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).most_common())


#: What is said of a file that was written, by what was verified.
_VERIFIED = {
    Verify.full: ("verified", ", read back and compared"),
    Verify.bytes: ("verified", ", bytes read back and compared; values were not measured"),
    Verify.none: ("written", ", not read back"),
}
#: The width of the names beside a conversion's figures, of which none is longer.
_NAMES = len("calibrated")

#: Columns of a comparison; the tensor or file comes last, as it may be long.
_FIGURES = (">SQNR dB", ">cosine", ">max error", ">clipped", ">underflow", ">bits/param")


def _print_comparison(results: list[Report], sort: CompareKey | None, top: int | None) -> None:
    for one in results:
        typer.secho(printable(f"{one.source} -> {one.destination}"), bold=True)
        if one.quantized:
            shown = in_order(one.quantized, sort, COMPARED)[:top]
            rows = [(*_figures(t.measured, t.bits_per_parameter), t.stored_as, t.name) for t in shown]
            print_table((*_FIGURES, "stored as", "tensor"), rows)
            print_hidden(len(one.quantized), len(shown))
        typer.echo(printable(_outcome(one)))
        if one.worst and not one.worst.measured.lossless:
            typer.echo(printable(f"worst: {one.worst.name}, {one.worst.measured.sqnr:.2f} dB"))
    if len(results) > 1:
        typer.echo()
        unmeasured = ("–",) * len(_FIGURES)
        figures = [_figures(one.fidelity, one.bits_per_parameter) if one.quantized else unmeasured for one in results]
        rows = [(*line, size(one.bytes_out), one.destination) for line, one in zip(figures, results, strict=True)]
        print_table((*_FIGURES, ">size", "all of"), rows)
    for one in results:
        typer.echo(printable(f"verdict: {f'{one.destination}: ' if len(results) > 1 else ''}{one.verdict}"))


def print_hidden(count: int, shown: int) -> None:
    """Say how many rows `--top` left out."""
    if shown < count:
        typer.echo(f"{count - shown} of {count} tensors not shown; --top {count} shows all")


def _figures(m: breccia.ErrorMetrics, bits: float | None) -> tuple[str, ...]:
    cells = (f"{m.sqnr:.2f}", f"{m.cosine:.6f}", f"{m.max_error:.3g}", percent(m.clip_rate), percent(m.underflow_rate))
    return (*cells, "–" if bits is None else f"{bits:.3f}")


def _outcome(one: Report) -> str:
    """One line about a checkpoint: its error metrics, and what was not measured."""
    said = f"{len(one.quantized)} tensors compared"
    if one.quantized:
        said += f": {one.fidelity.sqnr:.2f} dB, cosine {one.fidelity.cosine:.6f}"
    elif not (one.unlike or one.missing or one.added):
        said = "nothing differs"
    reasons = ", ".join(f"{count} {reason}" for reason, count in one.reasons.items())
    others = f"; not measured: {size(one.bytes_kept)}, {reasons}" if reasons else ""
    return f"{said}; {size(one.bytes_in)} -> {size(one.bytes_out)}{others}"
