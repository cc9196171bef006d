"""The command `breccia why`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from breccia import UnsupportedError
from breccia.backend import Json, print_json, print_table
from breccia.internal import printable

from .commands import From, PathOrURL, ReportFile, Top, print_hidden, progress, runs
from .layer_costs import UNITS, Layer, Remedy, Why
from .remote_path import path_of
from .report import check_report, write_report
from .text import percent, size
from .why import why as find_why


def why(
    model: Annotated[
        PathOrURL, typer.Argument(metavar="MODEL", help="The original: a file, a folder or a URL.", parser=path_of)
    ],
    quantized: Annotated[PathOrURL, typer.Argument(metavar="QUANTIZED", help="The same, quantized.", parser=path_of)],
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate", metavar="FILE", help="Run the model on a text, or ids.npy; else weights alone.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="Of --calibrate: cpu (default), cuda, ...", show_default=False),
    ] = None,
    remedies: Annotated[int, typer.Option(metavar="N", min=0, help="Try remedies for so many layers.")] = 3,
    top: Top = 10,
    report: ReportFile = None,
    source_dialect: From = None,
    as_json: Json = False,
) -> None:
    """Say which layers of a quantized model cost most, what is wrong with them, and what helps.

    \b
    breccia why model model-nvfp4 --calibrate text.txt
    """
    if report is not None:
        check_report(report)
        if report.absolute() in [other.absolute() for other in (model, quantized)]:
            raise UnsupportedError(f"{report} is one of the checkpoints; choose another name for the report.")
    with progress("compare weights", model, 1) as advance:
        found = find_why(
            model,
            quantized,
            calibrate=calibrate,
            device=device,
            remedies=remedies,
            histograms=report is not None,
            advance=advance,
            source_dialect=source_dialect,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found, top)
    if report is not None:
        page = [{**run, "why": found.to_dict()} for run in runs([found.comparison])]
        write_report(report, page, title=f"What quantization costs {Path(model).name}")
        if not as_json:
            typer.echo(f"report: {printable(str(report))}")


def _print(found: Why, top: int | None) -> None:
    shown = found.layers[:top]
    if found.total is None:
        typer.echo(
            "weights alone: layers are ranked by the share of their energy that is lost; --calibrate FILE runs the model"
        )
    else:
        typer.echo(f"{found.total:.4g} {UNITS[found.measure]} are lost on {found.tokens} tokens; of each layer:")
    if shown:
        headings = (*((">alone", ">without") if found.total is not None else ()), ">lost", ">broken", ">dead", ">saturating",
                    ">flushed", ">inputs", "stored as", "tensor")  # fmt: skip
        print_table(headings, [_row(layer, found.total is not None) for layer in shown])
    print_hidden(len(found.layers), len(shown))
    for layer in shown:
        if layer.remedies:
            typer.echo(printable(f"remedies for {layer.name}:"))
            print_table(
                ("", ">left", ">bytes", "what"), [_remedy(one, layer, found.total is not None) for one in layer.remedies]
            )
    typer.echo(printable(f"verdict: {found.verdict}"))


def _row(layer: Layer, ran: bool) -> tuple[str, ...]:
    faults = layer.faults
    counts = [str(count) if count is not None else "–" for count in (faults and faults.broken, faults and faults.dead)]
    share = percent(faults.saturating / faults.blocks) if faults and faults.blocks else "–"
    costs = [_cost(layer.alone), _cost(layer.without)] if ran else []
    inputs = "–" if layer.outliers is None else str(layer.outliers)
    flushed = percent(layer.fidelity.underflow_rate)
    return (*costs, percent(layer.lost), *counts, share, flushed, inputs, layer.recipe, layer.name)


def _cost(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _remedy(one: Remedy, layer: Layer, ran: bool) -> tuple[str, ...]:
    left = _cost(one.left) if ran else percent(one.left)
    sign = "+" if one.nbytes >= 0 else "-"
    return ("cheapest" if one is layer.cheapest else "", left, f"{sign}{size(abs(one.nbytes))}", one.what)
