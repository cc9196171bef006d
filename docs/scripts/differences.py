"""Libraries on the golden vectors, and the reports about what they do differently.

Figures are those of docs/vectors.json, as tests/differences/run.py measured them; reports are tests/differences/*.toml, which
it reproduces.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from harness.blocks import table
from listings import NONE

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "differences"))
import reports  # noqa: E402

PAGES = "differences"


@cache
def libraries() -> dict[str, Any]:
    """What was measured of each library, by its module."""
    found = json.loads((ROOT / "docs" / "vectors.json").read_text(encoding="utf-8"))["libraries"]
    return {library["module"]: library for library in found}


def anchor(title: str) -> str:
    """The anchor of a heading, as the site makes it."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def linked(module: str) -> str:
    """The name of a library, with a link to its reports if there are any."""
    name = libraries()[module]["name"]
    return f"[{name}]({PAGES}/{module}.md)" if any(report.module == module for report in reports.reports()) else name


def results() -> str:
    """A row for each library, quantizer and format: how many cases agree."""
    rows: list[list[str]] = []
    for module, library in libraries().items():
        for row in library["rows"]:
            ran = row["cases"]
            parts = [f"{row[part]}" if ran else NONE for part in ("equal", "scales", "codes", "numbers")]
            decoding = f"{row['decoded']} of {row['decodings']}" if row["decodings"] else NONE
            head = linked(module) if row is library["rows"][0] else ""
            rows.append([head, row["quantizer"], f"`{row['format']}`", str(ran) if ran else NONE, *parts, decoding])
    return table(["library", "quantizer", "format", "cases", "equal", "scales", "codes", "numbers", "decoding"], rows)


def totals() -> str:
    """A row for each library: its cases, and its reports by kind."""
    rows: list[list[str]] = []
    for module, library in libraries().items():
        every = [report for report in reports.reports() if report.module == module]
        cases, equal, numbers, decoded, decodings = (
            sum(row[part] for row in library["rows"]) for part in ("cases", "equal", "numbers", "decoded", "decodings")
        )
        kinds = [str(sum(report.kind == kind for report in every)) for kind in reports.KINDS]
        ran = [f"{equal} of {cases}", f"{numbers} of {cases}", f"{decoded} of {decodings}" if decodings else NONE]
        rows.append([linked(module), library["version"], *ran, *kinds])
    headings = ["library", "version", "casts equal", "numbers equal", "decoding equal"]
    return table([*headings, *(f"reports: {said}" for said in reports.KINDS.values())], rows)


def listed() -> str:
    """All reports, with their pages."""
    rows = [
        [libraries()[r.module]["name"], f"[{r.title}]({PAGES}/{r.module}.md#{anchor(r.title)})", reports.KINDS[r.kind]]
        for module in libraries()
        for r in reports.reports()
        if r.module == module
    ]
    return table(["library", "difference", ""], rows)


def shown(code: str, prints: str) -> str:
    """A program, each `print` followed by what it prints."""
    outputs, lines = iter(prints.splitlines()), list[str]()
    for line in code.splitlines():
        lines.append(f"{line}  # {next(outputs)}" if line.lstrip().startswith("print(") else line)
    if left := list(outputs):
        raise ValueError(f"no print for {left}: write one `print(...)` in a line of its own for each line of output.")
    return "\n".join(lines)


def numbers(report: reports.Report) -> str:
    """The smallest input, in bits and numbers."""
    given = ", ".join(f"`{bits}` ({number})" for bits, number in report.input)
    return f"{given}; {report.rest}" if report.rest else given


def page(module: str) -> str:
    """The reports of a library, as they may be sent to its maintainers."""
    library = libraries()[module]
    parts: list[str] = []
    for report in (report for report in reports.reports() if report.module == module):
        printed = " and ".join(f"`{line}`" for line in report.breccia_prints.splitlines())
        lines = [
            f"## {report.title}",
            f"{library['name']} {library['version']}; {reports.KINDS[report.kind]}. Smallest input: {numbers(report)}.",
            f"<!-- needs: {MODULES.get(module, module)} -->\n```python\n{shown(report.code, report.prints)}\n```",
            f"With breccia:\n\n```text\n{report.breccia.strip()}\n```\n\nprints {printed}.",
            report.says,
            f"**Effect.** {report.effect}",
            f"**Suggestion.** {report.suggestion}",
        ]
        lines += [f"**Known.** {report.known}"] if report.known else []
        cases = ", ".join(report.cases)
        lines += [f"Golden vectors (set:case): {cases}."] if cases else []
        parts.append("\n\n".join(lines))
    return "\n\n".join(parts) + "\n"


#: Modules of breccia_vectors.adapters -> what Python imports, where it is called otherwise.
MODULES = {"quanto": "optimum"}

BLOCKS: dict[str, Callable[[], str]] = {
    "vectors-libraries": totals, "vectors-formats": results, "differences": listed,
} | {f"differences-{path.stem}": partial(page, path.stem) for path in sorted(reports.HERE.glob("*.toml"))}  # fmt: skip
