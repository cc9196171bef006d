"""Boards: which libraries' bytes breccia writes, between which recipes conversions keep every value, and what was tried."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.blocks import table
from listings import NONE

import breccia
from breccia.cli.rosetta import matrix
from breccia.kernels.exactness import BY_VALUES, NEW_CODES, SAME_CODES

ROOT = Path(__file__).resolve().parents[2]
#: How a cell of the table of conversions says a kind.
MARKS = {SAME_CODES: "same codes", NEW_CODES: "new codes", BY_VALUES: "by values"}
#: The recipes of that table, with their defaults; picture and `breccia rosetta` have all.
SHOWN = ("fp8_current", "fp8_row", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "int4", "int8", "nf4")


def equal(setting: Any) -> bool:
    """Were all scales, codes and decoded values of every matrix equal?"""
    shares = setting["shares"].values() if setting else ()
    return bool(shares) and all(same == of for parts in shares for same, of in parts.values())


def outcome(row: Any) -> str:
    """Under which recipe of breccia the bytes of a library's quantizer are written: its default, another setting, or none."""
    if row["error"] or not row["default"]:
        return "not run"
    if equal(row["default"]):
        return "default"
    return "setting" if equal(row.get("closest")) else "differs"


def agreement() -> str:
    """A line for each library: how many of its quantizers write breccia's bytes, and how."""
    rows: list[list[str]] = []
    for neighbour in json.loads((ROOT / "docs" / "agreement.json").read_text(encoding="utf-8"))["neighbours"]:
        found = [outcome(row) for row in neighbour["rows"]]
        differing = [row["name"] for row, said in zip(neighbour["rows"], found, strict=True) if said in ("differs", "not run")]
        anchor = "".join(c for c in neighbour["name"].lower().replace(" ", "-") if c.isalnum() or c in "-_")
        counts = [str(found.count(kind)) for kind in ("default", "setting")]
        shown = "; ".join(differing[:4]) + (f"; and {len(differing) - 4} more" if len(differing) > 4 else "")
        rows.append(
            [f"[{neighbour['name']}](agreement.md#{anchor})", neighbour["version"], str(len(found)), *counts, shown or NONE]
        )
    headings = ["library", "version", "quantizers", "equal by default", "equal under a setting", "differ somewhere"]
    return table(headings, rows)


def settings() -> str:
    """The quantizers whose bytes a setting of breccia writes, and that setting."""
    rows: list[list[str]] = []
    for neighbour in json.loads((ROOT / "docs" / "agreement.json").read_text(encoding="utf-8"))["neighbours"]:
        for row in neighbour["rows"]:
            kind = outcome(row)
            if kind in ("default", "setting"):
                writes = row["default" if kind == "default" else "closest"]["writes"]
                rows.append([neighbour["name"], row["name"], f"`{writes}`"])
    return table(["library", "its quantizer", "the same bytes in breccia"], rows)


def conversions() -> str:
    """A row is converted to a column: the recipes with their defaults, blocks of any length those of the row."""
    found = matrix({name: breccia.recipe(name) for name in SHOWN})
    lines = [
        [f"`{source}`", *("itself" if source == target else MARKS.get(found[source, target].kind, "") for target in SHOWN)]
        for source in SHOWN
    ]
    return table(["from", *(f"`{name}`" for name in SHOWN)], lines)


def tried() -> str:
    """What was tried in kernels, what was expected and measured, and whether it was kept; failures first."""
    found = json.loads((ROOT / "benchmarks" / "tried.json").read_text(encoding="utf-8"))
    rows = [
        [
            row["what"],
            row.get("shape") or row["product"],
            row["expected"] or NONE,
            row["measured"],
            "yes" if row["kept"] else "no",
        ]
        for subject in found.values()
        for row in sorted(subject["rows"], key=lambda row: row["kept"])
    ]
    return table(["what", "product", "expected", "measured", "kept"], rows)


def runs() -> str:
    """Every run of every result, the newest first."""
    rows: list[list[str]] = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            machine = run.get("device", "").partition(",")[0] or f"{run['cpu']}, {run['cores']} cores"
            rows.append(
                [run["date_utc"], machine, f"[`{path.stem}`](../benchmarks/results/{path.name})", f"`{run['command']}`"]
            )
    return table(["UTC", "machine", "result", "command"], sorted(rows, reverse=True))


BLOCKS: dict[str, Callable[[], str]] = {
    "agreement-board": agreement, "agreement-settings": settings, "conversions": conversions,
    "tried": tried, "runs": runs,
}  # fmt: skip
