"""The page of `breccia convert --report` and `breccia compare --report`: one self-contained HTML file."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from breccia import ScalingRecipe, UnsupportedError, __version__
from breccia.internal import install, printable, spelled

from .staging import Staging, write_text
from .text import percent, size

#: The fields of a run that the page's script reads; the template shows the rest.
_DRAWN = ("label", "bytes_out", "sqnr_db", "lossless", "worst", "tensors")


def check_report(path: str | os.PathLike[str]) -> None:
    """Check the arguments of `write_report` before the work that leads to it.

    Raises UnsupportedError for a path without an HTML extension, FileExistsError for a file that is no report of breccia,
    OSError for a missing or read-only folder, and ImportError where the extra `report` is missing or broken.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UnsupportedError(f"a report is an HTML page; name it {target.stem}.html, got {target}.", path=str(target))
    if target.is_dir():
        raise UnsupportedError(f"{target} is a folder; name a file for the report, such as {target / 'report.html'}.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: there is no folder {target.parent}; create it first.")
    if target.is_file() and not _replaceable(target):
        raise FileExistsError(f"{target} exists and is no report of breccia; choose another name, or remove it.")
    try:
        import_module("jinja2")
    except Exception as e:
        wrong = f"cannot use jinja2 ({type(e).__name__}: {e})" if find_spec("jinja2") else "needs jinja2"
        raise ImportError(f"--report {wrong}: {install('breccia-bridges[report]')}") from e
    try:
        with Staging(target):
            pass
    except PermissionError as e:
        raise PermissionError(f"cannot write {target}: {e.strerror}; choose another folder.") from e


def _replaceable(path: Path) -> bool:
    """Is a file an earlier report, or empty?"""
    with path.open("rb") as file:
        begin = file.read(_BEGIN)
    return not begin or _GENERATOR in begin


#: What reports say in their first bytes.
_GENERATOR, _BEGIN = b'<meta name="generator" content="breccia ', 512


def write_report(
    path: str | os.PathLike[str], runs: Sequence[Mapping[str, Any]], *, title: str = "Quantization report"
) -> None:
    """Write the page of one or several runs over one checkpoint; replaces an earlier one, and no other file.

    runs: results of `Report.to_dict`, with a label, the fields of its recipes (`recipe_fields`), and a histogram or None per
        tensor. The same runs give the same bytes under one version of zlib.
    """
    check_report(path)
    if not runs:
        raise UnsupportedError("a report needs at least one run; got none.")
    write_text(Path(path), _rendered(runs, title))


def _rendered(runs: Sequence[Mapping[str, Any]], title: str) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(
        loader=PackageLoader("breccia_bridges"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(
        size=partial(size, space=NO_BREAK), percent=partial(percent, space=NO_BREAK), decibel=_decibel, breakable=_breakable
    )
    shown: list[dict[str, Any]] = [_finite(run) for run in runs]
    return env.get_template("report.html").render(
        title=printable(title),
        version=__version__,
        runs=shown,
        sources=list(dict.fromkeys(Path(run["source"]).name or str(run["source"]) for run in shown)),
        # One column is enough where all runs kept the same tensors.
        columns=shown[:1] if all(run["kept"] == shown[0]["kept"] for run in shown) else shown,
        reasons=list(dict.fromkeys(reason for run in shown for reason in run["kept"])),
        recipes=_recipes(shown),
        warnings=_warnings(shown),
        verdict=[*(run["why"]["verdict"] for run in shown if "why" in run), *_verdict(shown)],
        first=_widest(shown),
        quantized=[{t["name"]: t for t in run["tensors"] if t["quantized"]} for run in shown],
        drawn=_packed(json.dumps(_drawn(shown), allow_nan=False, separators=(",", ":"))),
    )


def _drawn(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page's script draws: runs, and each list of counts of histograms once; histograms hold indices of lists."""
    counts: dict[tuple[int, ...], int] = {}

    def tensor(found: dict[str, Any]) -> dict[str, Any]:
        said = {key: _short(value) for key, value in found.items()}
        if found["histogram"]:
            shared = {side: counts.setdefault(tuple(found["histogram"][side]), len(counts)) for side in ("before", "after")}
            said["histogram"] = found["histogram"] | shared
        return said

    drawn = [{key: run[key] for key in _DRAWN} | {"tensors": [tensor(t) for t in run["tensors"]]} for run in runs]
    return {"runs": drawn, "counts": list(counts)}


def _short(value: Any) -> Any:
    """A float to nine significant digits, more than the page shows."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _verdict(runs: list[dict[str, Any]]) -> list[str]:
    """What the runs come to: the most accurate one, the smallest one, and what another one is better than in both."""
    measured = [run for run in runs if any(t["quantized"] for t in run["tensors"])]
    if not measured:
        return ["No tensor was quantized."]
    best, smallest = max(measured, key=_accuracy), min(measured, key=lambda run: run["bytes_out"])
    if len(runs) == 1:
        return [f"{_result(best)}.", *_worst(best)]
    said = [f"Most accurate: {_result(best)}."]
    if smallest is not best:
        said.append(f"Smallest: {_result(smallest)}.")
    for run in measured:
        better = [
            other["label"] for other in measured if _accuracy(other) > _accuracy(run) and other["bytes_out"] <= run["bytes_out"]
        ]
        if better:
            said.append(f"{run['label']} is no smaller than {better[0]}, and less accurate.")
    return [*said, *_worst(smallest)]


def _result(run: dict[str, Any]) -> str:
    """A run in one clause: its size as a part of the source's, and its SQNR."""
    ratio = f"{run['bytes_out'] / run['bytes_in']:.3f}× the size, " if run["bytes_in"] else ""
    return f"{run['label']}, {ratio}{_decibel(run)}"


def _worst(run: dict[str, Any]) -> list[str]:
    """A sentence about the tensor that lost most, if its run lost anything."""
    found = next((t for t in run["tensors"] if t["name"] == run["worst"] and t["quantized"]), None)
    return [] if found is None or run["lossless"] else [f"Worst tensor of {run['label']}: {found['name']}, {_decibel(found)}."]


def _accuracy(record: Mapping[str, Any]) -> float:
    """SQNR for comparisons: no error is the best, errors that are not finite the worst."""
    if record["lossless"]:
        return math.inf
    return -math.inf if record["sqnr_db"] is None else record["sqnr_db"]


def _widest(runs: list[dict[str, Any]]) -> int:
    """The number of the run whose tensors differ most in SQNR; the page shows its tensors first."""

    def spread(run: dict[str, Any]) -> float:
        found = [t["sqnr_db"] for t in run["tensors"] if t["quantized"] and not t["lossless"] and t["sqnr_db"] is not None]
        return max(found) - min(found) if found else -1.0

    return max(range(len(runs)), key=lambda place: spread(runs[place]))


def _packed(text: str) -> str:
    """`text` compressed, as base64: no character of it means anything in HTML.

    The page's script unpacks it with the browser's DecompressionStream, which reads zlib's format as "deflate".
    """
    return base64.b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii")


def _recipes(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each recipe once, with its fields and the labels of the runs that use it."""
    recipes: dict[str, dict[str, Any]] = {}
    for run in runs:
        for recipe in run["recipe_fields"]:
            recipes.setdefault(recipe["spec"], {**recipe, "runs": []})["runs"].append(run["label"])
    return list(recipes.values())


def recipe_fields(recipe: ScalingRecipe) -> dict[str, Any]:
    """A recipe as the page shows it: its spec, its class, and each field with its default, spelled as on the command line."""
    fields = dataclasses.fields(recipe)  # type: ignore[arg-type]
    listed = [
        {
            "name": f.name,
            "value": spelled(getattr(recipe, f.name)),
            "default": None if f.default is dataclasses.MISSING else spelled(f.default),
        }
        for f in fields
    ]
    return {"spec": recipe.spec, "class": type(recipe).__name__, "fields": listed}


def _warnings(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Each warning once, with the labels of the runs that gave it; no labels where all runs did."""
    warnings: dict[str, list[str]] = {}
    for run in runs:
        for text in run["warnings"]:
            warnings.setdefault(text, []).append(run["label"])
    return {text: "" if len(labels) == len(runs) else ", ".join(labels) for text, labels in warnings.items()}


def _finite(value: Any) -> Any:
    """`value` with None in place of NaN and Inf, which JSON cannot represent, and printable text: names come from files."""
    if isinstance(value, Mapping):
        return {_finite(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, str):
        return printable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------ numbers and names as text

#: Keeps a number and its unit on one line.
NO_BREAK = "\xa0"


def _decibel(record: Mapping[str, Any]) -> str:
    """The SQNR of a run or tensor."""
    if record["lossless"]:
        return "∞"
    return "not\xa0finite" if record["sqnr_db"] is None else f"{record['sqnr_db']:.2f}\xa0dB"


def _breakable(name: str) -> Any:
    """The name of a tensor or a run as markup that lets a line end after a dot or a plus sign."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[.+])(?=.)", name))
