"""Libraries on the golden vectors, and the programs of all reports about them.

    python tests/differences/run.py docs [--library NAME...]      # `make vectors` does it

Runs the adapters of breccia_vectors for the libraries that are installed, or those named, and replaces their rows in
docs/vectors.json; other libraries keep theirs, as not all fit into one environment. Then runs the reports' programs, and exits
with 1 where one prints something else than the report says. Pages are drawn by docs/scripts/generate.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from reports import reports, reproduced

from breccia_vectors import Case, cases, check
from breccia_vectors.adapters import LIBRARIES, Adapter, Library

RESULT = "vectors.json"
#: Parts of a result that count as its scales.
SCALES = {"global_scale", "scale", "zero_point"}


def same_numbers(found: Any, case: Case, flushes: bool) -> bool:
    """Whether all decoded numbers are equal; −0 is +0, and any NaN any NaN."""
    a, b = (np.frombuffer(memoryview(part).tobytes(), np.float32) for part in (found, case.decoded))
    b = np.where((a == 0) & (np.abs(b) < np.float32(2.0**-126)), np.float32(0), b) if flushes else b
    return bool(np.array_equal(a, b, equal_nan=True))


def row(library: Library, adapter: Adapter, name: str) -> dict[str, Any]:
    """What an adapter does with the cases of a format: how many it casts and decodes, and how many of them agree."""
    kept: dict[str, Any] = {}

    def quantize(case: Case) -> Any:
        assert adapter.quantize is not None
        kept[case.name] = adapter.quantize(case)
        return kept[case.name]

    chosen = [case for case in cases(name) if case.format.name == name]
    recorded = replace(adapter, quantize=quantize if adapter.quantize else None)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        flushes = library.flushes_subnormals
        report = check(
            recorded.quantize, recorded.dequantize, library=library.name, cases=chosen, flushes_subnormals=flushes, reduce=False
        )
    wrong = {case.name: set[str]() for operation, case, _ in report.agreed if operation == "quantize"}
    wrong |= {d.case.name: set(d.wrong) for d in report.differences if d.operation == "quantize"}
    failed = [failure for failure in report.failures if failure.operation == "quantize"]
    by_name = {case.name: case for case in chosen}
    casts, decodings = Counter[str](), report.counts().get(("dequantize", name), Counter[str]())
    for case, parts in wrong.items():
        casts["equal"] += not parts
        casts["scales"] += not parts & SCALES
        casts["codes"] += "codes" not in parts
        casts["numbers"] += same_numbers(kept[case]["decoded"], by_name[case], flushes)
    return {
        "quantizer": adapter.name,
        "format": name,
        "cases": len(wrong) + len(failed),
        **{part: casts[part] for part in ("equal", "scales", "codes", "numbers")},
        "decodings": decodings.total() - decodings["skipped"],
        "decoded": decodings["agree"],
        "differ": {case.partition(" ")[0]: sorted(parts) for case, parts in wrong.items() if parts},
        "failed": {failure.case.name.partition(" ")[0]: failure.error for failure in failed},
        "skipped": dict(Counter(each.reason for each in report.skipped if each.operation == "quantize")),
    }


def measured(library: Library) -> dict[str, Any]:
    """The rows of a library."""
    rows = [row(library, adapter, name) for adapter in library.adapters() for name in adapter.formats]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"module": library.module, "name": library.name, "version": library.version, "date_utc": date, "rows": rows}


def differing(modules: set[str]) -> list[str]:
    """The reports whose programs print something else."""
    found: list[str] = []
    for report in (report for report in reports() if report.module in modules):
        print(report, flush=True)
        printed = reproduced(report)
        if printed != report.prints:
            found.append(f"{report} prints {printed!r}, and the report says {report.prints!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help=f"folder of {RESULT}")
    parser.add_argument("--library", action="append", choices=[library.module for library in LIBRARIES], help="by its module")
    said = parser.parse_args()
    chosen = [library for library in LIBRARIES if library.module in (said.library or [library.module])]
    absent = [library.distribution for library in chosen if library.version is None]
    if said.library and absent:
        sys.exit(f"not installed: {', '.join(absent)}")
    path: Path = said.folder / RESULT
    known = {of["module"]: of for of in json.loads(path.read_text(encoding="utf-8"))["libraries"]} if path.exists() else {}
    for library in chosen:
        if library.version is not None:
            print(library.name, library.version, flush=True)
            known[library.module] = measured(library)
    kept = [known[library.module] for library in LIBRARIES if library.module in known]
    path.with_suffix(".partial").write_text(json.dumps({"schema": 1, "libraries": kept}, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".partial").replace(path)
    if wrong := differing({library.module for library in chosen if library.version is not None}):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
