"""Results as a text file, so that a program in any language can be checked: spec/vectors.md, "Results", has the layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .checking import record
from .comparing import RESULTS, ResultError, items_of
from .reports import Failure, Report, Skipped
from .sets import Case, read, sets

#: The first words of the file; the rest of the line names the library.
HEADING = "breccia-results 1"


def compare(path: Path, flushes_subnormals: bool = False) -> Report:
    """Report which of the results in a file are those of the golden vectors. flushes_subnormals: as in `check`.

    Raises ResultError that names the line, for a file that has another layout.
    """
    with path.open(encoding="utf-8-sig") as file:
        try:
            heading = file.readline().rstrip("\n")
        except UnicodeDecodeError:
            raise ResultError(f"{path}: the file is not text in UTF-8; write the results as UTF-8.") from None
        if heading.split()[:2] != HEADING.split():
            raise ResultError(f"{path}:1: the file opens with {heading[:40]!r}; results open with {HEADING!r} and a name.")
        report = Report(heading[len(HEADING) :].strip() or path.name)
        parts: dict[tuple[str, Case], dict[str, bytes]] = {}
        for operation, case, part, said in _lines(path, file):
            match part:
                case "skipped":
                    report.skipped.append(Skipped(case, operation, said))
                case "failed":
                    report.failures.append(Failure(case, operation, said))
                case _:
                    parts.setdefault((operation, case), {})[part] = bytes.fromhex(said)
    for (operation, case), of in parts.items():
        record(report, operation, case, items_of(case, of), flushes_subnormals, None)
    return report


def case_of(name: str) -> Case:
    """The case `set:number`. Raises ResultError if there is none."""
    number, _, place = name.partition(":")
    if not (number.isdecimal() and place.isdecimal() and int(number) in sets() and int(place) < len(read(int(number)))):
        last = "; ".join(f"{of}:0 to {of}:{len(read(of)) - 1}" for of in sets())
        raise ResultError(f"{name!r} is no case; cases are {last}.")
    return read(int(number))[int(place)]


def _lines(path: Path, file: Iterator[str]) -> Iterator[tuple[str, Case, str, str]]:
    """(operation, case, part, the rest of the line) of each line."""
    for count, line in enumerate(file, 2):
        name, _, rest = line.strip().partition(" ")
        part, _, said = rest.partition(" ")
        if not name or name.startswith("#"):
            continue
        operation, part = ("dequantize", "decoded") if part == "dequantized" else ("quantize", part)
        try:
            case = case_of(name)
            if part not in (*RESULTS, "skipped", "failed"):
                known = ", ".join((*RESULTS, "dequantized", "skipped", "failed"))
                raise ResultError(f"{part!r} is no part of a result; parts are {known}.")
            if part in RESULTS:
                bytes.fromhex(said)
        except ValueError as e:
            raise ResultError(f"{path}:{count}: {e}") from e
        yield operation, case, part, said
