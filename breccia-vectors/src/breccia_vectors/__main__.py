"""`python -m breccia_vectors`: list the formats, show a case, print where the files are, check a file of results."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import SPEC, ResultError, __version__, formats
from .reports import described
from .results import case_of, compare

PATHS = {"data": SPEC / "vectors", "spec": SPEC, "c": Path(__file__).resolve().parent / "vectors.c"}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m breccia_vectors", description="Golden vectors of block-scaled formats.")
    parser.add_argument("--version", action="version", version=f"breccia-vectors {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listed = commands.add_parser("formats", help="list the formats, with their element, scales and rules")
    listed.add_argument("recipe", nargs="?", help="only those of this recipe")
    shown = commands.add_parser("show", help="print a case: its input, and the bytes of the result")
    shown.add_argument("case", help="set:number, as reports have it")
    path = commands.add_parser("path", help="print the folder of the sets or of the pages, or the C program")
    path.add_argument("what", choices=PATHS, help="data: a folder per set; spec: the pages; c: the source of the C checker")
    compared = commands.add_parser("compare", help="compare a file of results, written by any program, with the golden vectors")
    compared.add_argument("file", type=Path, help='a text file, see "Results" in spec/vectors.md')
    compared.add_argument("--flushes-subnormals", action="store_true", help="let signed zeros stand for FP32 subnormals")
    compared.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    return parser


def main() -> int:
    """Run the command line. Returns 1 if results differ, 2 for what cannot be read."""
    given = parser().parse_args()
    try:
        match given.command:
            case "formats":
                return _formats(given.recipe)
            case "show":
                print(described(case_of(given.case)))
            case "path":
                print(PATHS[given.what])
            case _:
                return _compare(given.file, given.flushes_subnormals, given.json)
    except (OSError, ResultError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def _formats(recipe: str | None) -> int:
    found = formats(recipe)
    if not found:
        known = ", ".join(dict.fromkeys(each.recipe for each in formats()))
        print(f"error: no recipe is called {recipe!r}; recipes are {known}.", file=sys.stderr)
        return 2
    rows = [(str(f), f.element.name, " under ".join(map(str, f.levels[::-1])), f.offset, ", ".join(f.rules)) for f in found]
    rows.insert(0, ("format", "element", "scales", "offset", "rules"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _compare(file: Path, flushes_subnormals: bool, target: Path | None) -> int:
    report = compare(file, flushes_subnormals)
    print(report)
    if target is not None:
        written = target.with_name(f".{target.name}.{os.getpid()}")
        written.write_text(report.json(), encoding="utf-8")
        written.replace(target)
    return 0 if report.agrees else 1


if __name__ == "__main__":
    sys.exit(main())
