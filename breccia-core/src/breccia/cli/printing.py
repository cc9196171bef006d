"""What commands print: tables, or JSON with the option `--json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from ..errors import printable

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print columns; those whose heading begins with ">" are aligned right. Put long columns last: nothing is truncated."""
    titles = [heading.removeprefix(">") for heading in headings]
    lines = [titles, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [">" if heading.startswith(">") else "<" for heading in headings]
    for n, line in enumerate(lines):
        text = "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, aligned, widths, strict=True)).rstrip()
        typer.secho(text, bold=n == 0)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2))
