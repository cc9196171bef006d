"""The command `breccia diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from breccia.backend import Json, print_json, print_table
from breccia.internal import printable

from .commands import From, PathOrURL, Top, print_hidden, progress
from .diff import EQUAL, SAME, Differences
from .diff import diff as diff_checkpoints
from .remote_path import path_of


def diff(
    a: Annotated[
        PathOrURL, typer.Argument(metavar="A", help="A .safetensors or .gguf file, a folder, or a URL.", parser=path_of)
    ],
    b: Annotated[PathOrURL, typer.Argument(metavar="B", help="The other one.", parser=path_of)],
    original: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="What both were quantized from: tests scale rules and rounding.", parser=path_of),
    ] = None,
    top: Top = None,
    source_dialect: From = None,
    a_dialect: Annotated[
        str | None, typer.Option("--a-from", metavar="DIALECT", help="The same, of A alone.", show_default=False)
    ] = None,
    b_dialect: Annotated[
        str | None, typer.Option("--b-from", metavar="DIALECT", help="The same, of B alone.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which tensors of two checkpoints differ, and why. Every cause is tested on all values of the tensor.

    Exits with 0 if all values are equal, whatever their bytes, and with 1 if not.

    \b
    breccia diff model-awq model-gptq --original model
    """
    if source_dialect is not None and (a_dialect is not None or b_dialect is not None):
        raise typer.BadParameter("--from is for A and B; give it, or --a-from and --b-from.")
    dialects = (source_dialect or a_dialect, source_dialect or b_dialect)
    with progress(f"compare {b.name}", a, 1) as advance:
        found = diff_checkpoints(a, b, original=original, advance=advance, source_dialect=dialects)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found, top)
    if not found.equal:
        raise typer.Exit(1)


def _print(found: Differences, top: int | None) -> None:
    for label, path in (("A", found.a), ("B", found.b)):
        typer.secho(printable(f"{label}: {path}"), bold=True)
    if found.different:
        shown = found.different[:top]
        rows = [(t.cause or t.state, *(kind or "–" for kind in t.stored_as), t.name, t.why or "") for t in shown]
        print_table(("cause", "in A", "in B", "tensor", "why"), rows)
        print_hidden(len(found.different), len(shown))
    same = {state: sum(t.state == state for t in found.tensors) for state in (SAME, EQUAL)}
    typer.echo(", ".join(f"{state}: {count} of {len(found.tensors)} tensors" for state, count in same.items()))
    typer.echo(printable(f"verdict: {found.verdict}"))
