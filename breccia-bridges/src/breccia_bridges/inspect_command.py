"""The command `breccia inspect`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from breccia.backend import Json, print_json, print_table
from breccia.internal import printable

from .commands import From, PathOrURL, Top, print_hidden
from .inspection import inspected, stored_as
from .order import INSPECTED, InspectKey, in_order
from .remote_path import path_of
from .text import either, size, spelled


def inspect(
    path: Annotated[
        PathOrURL, typer.Argument(metavar="PATH", help="A .safetensors or .gguf file, a folder, or a URL.", parser=path_of)
    ],
    scales: Annotated[bool, typer.Option("--scales", help="Also read the scales: show their range, and check them.")] = False,
    sort: Annotated[
        InspectKey, typer.Option(metavar="KEY", help=f"{either(InspectKey)}; the largest first.")
    ] = InspectKey.NAME,
    top: Top = None,
    source_dialect: From = None,
    as_json: Json = False,
) -> None:
    """List the values of a checkpoint, and report suspicious scales. Reads only the headers, unless --scales is given.

    Values that another library quantized are listed under the model's names.

    \b
    breccia inspect model-gptq --scales --sort bytes --top 20
    """
    inspection = inspected(path, scales, source_dialect)
    rows = inspection.rows
    if as_json:
        total = sum(r["bytes"] for r in rows)
        print_json(
            {
                "path": str(path),
                "bytes": total,
                "kinds": inspection.kinds,
                "dialects": inspection.dialects,
                "problem": inspection.problem or None,
                "tensors": rows,
            }
        )
        return
    headings = ["stored as", ">bits/param", ">bytes", *(["scales, min to max"] if scales else []), "shape", "tensor"]
    lines: list[tuple[str, ...]] = []
    for r in in_order(rows, sort, INSPECTED)[:top]:
        figures = r["scales"]
        reach = f"{figures['min']:.3g} to {figures['max']:.3g}" if figures and figures["min"] is not None else ""
        shown = [_stored_as(r), _bits(r), size(r["bytes"]), *([reach] if scales else []), spelled(r["shape"]), r["name"]]
        lines.append(tuple(shown))
    print_table(headings, lines)
    print_hidden(len(rows), len(lines))
    scaled = [r for r in rows if r["recipe"] or r["scaled_by"]]
    total, parameters = sum(r["bytes"] for r in rows), sum(r["parameters"] for r in rows)
    typer.echo(
        f"{len(rows)} tensors, {len(scaled)} of them scaled; {parameters:,} parameters in {size(total)}, "
        f"{8 * total / max(1, parameters):.3f} bits per parameter"
    )
    _print_kinds(inspection.kinds)
    for dialect in inspection.dialects:
        typer.echo(printable(f"{dialect['title']} ({dialect['name']}): {dialect['values']} values, recognized by"))
        for seen in dialect["evidence"]:
            typer.echo(printable(f"  {seen}"))
    if inspection.problem:
        typer.echo(typer.style("not decoded: ", fg="yellow") + printable(inspection.problem))
    for r in rows:
        for doubt in r["suspicious"]:
            typer.echo(typer.style("suspicious: ", fg="yellow") + printable(f"{r['name']}: {doubt}"))


def _print_kinds(kinds: list[dict[str, Any]]) -> None:
    """The sums of a checkpoint with more than one kind of tensors."""
    if len(kinds) > 1:
        rows = [
            (str(k["tensors"]), f"{k['parameters']:,}", size(k["bytes"]), _bits(k), k["dialect"] or "", k["stored_as"])
            for k in kinds
        ]
        print_table((">tensors", ">parameters", ">bytes", ">bits/param", "dialect", "stored as"), rows)


def _bits(row: dict[str, Any]) -> str:
    return f"{8 * row['bytes'] / row['parameters']:.3f}" if row["parameters"] else "–"


def _stored_as(row: dict[str, Any]) -> str:
    if not row["scaled_by"] or row["recipe"]:
        return stored_as(row)
    unit = " bytes" if row["stored_as"] in ("U8", "I8") else ""
    return f"{row['stored_as']}, a scale per {spelled(row['block']) if row['block'] else '?'}{unit}"
