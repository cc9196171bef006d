"""The reports about differences: data in *.toml, one file for each library, in the order of its page.

A report has
    title, slug     slug: the anchor on the page
    kind            `bug`: contradicts a specification, or the library's own words; `fault`: no specification decides it, and
                    numbers are lost; `choice`: no specification decides it
    input, rest     the smallest input: (bits, number), and the rest in words
    code, prints    a program that uses the library alone, and what it prints
    breccia         what breccia does, in the names of `names()`, and `breccia_prints`
    says            what the specification or the library's documentation says
    effect, suggestion
    cases           golden vectors that show it, "set:number"
    known           where it is reported already
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
KINDS = {
    "bug": "contradicts a specification or its own documentation",
    "fault": "not specified, and loses numbers",
    "choice": "a choice",
}


@dataclass(frozen=True)
class Report:
    """One difference. module: the library's, of `breccia_vectors.adapters`."""

    module: str
    title: str
    slug: str
    kind: str
    input: list[list[str]]
    rest: str
    code: str
    prints: str
    breccia: str
    breccia_prints: str
    says: str
    effect: str
    suggestion: str
    cases: tuple[str, ...] = ()
    known: str = ""

    def __str__(self) -> str:
        return f"{self.module}: {self.slug}"


def reports() -> list[Report]:
    """All reports."""
    found: list[Report] = []
    for path in sorted(HERE.glob("*.toml")):
        for said in tomllib.loads(path.read_text(encoding="utf-8"))["report"]:
            text = {name: value.strip() if isinstance(value, str) else value for name, value in said.items()}
            found.append(Report(path.stem, **text | {"cases": tuple(said.get("cases", ()))}))
    return found


def reproduced(report: Report, python: str = sys.executable) -> str:
    """What the program of a report prints, in a process of its own. Raises RuntimeError if it fails."""
    # A library's notices on stderr are not part of it.
    done = subprocess.run([python, "-W", "ignore", "-c", report.code], capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"{report}: exit status {done.returncode}\n{done.stderr}")
    return done.stdout.strip()


def names() -> dict[str, Any]:
    """What the `breccia` lines of reports use. `block` is one row of 32 numbers: those given, then zeros."""
    import breccia
    from breccia.backend import E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E8M0, INT4, NUMPY

    def block(*numbers: float) -> np.ndarray:
        return np.float32([[*numbers] + [0.0] * (32 - len(numbers))])

    codecs = {codec.name: codec for codec in (E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E8M0, INT4)}
    return (
        {"breccia": breccia, "np": np, "NUMPY": NUMPY, "block": block}
        | codecs
        | {
            "cast": breccia.cast,
            "dequantize": breccia.dequantize,
        }
    )


def ours(report: Report) -> str:
    """What the `breccia` lines of a report print."""
    with redirect_stdout(io.StringIO()) as printed, np.errstate(all="ignore"):
        exec(report.breccia, names())
    return printed.getvalue().strip()
