"""Join results of one benchmark and device, where one run did not have the time for all rows.

    python benchmarks/join.py RESULT... --out RESULTS [--table FILE]
    python benchmarks/join.py TUNED... --out breccia-triton/src/breccia_triton/configurations

A row of a later file replaces the same row of an earlier one. The pages name every run that rows are from. Ratios stay within
a row, whose calls were interleaved; no row is mixed from two runs. `--table` writes the measured times of products, by which
kernels are chosen, from all rows.

TUNED are configurations that `bench_weight_only.py --tune` wrote. They are merged into the file of their device in the folder;
an entry replaces that of the same product, and the provenance of the file becomes that of the last run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import common
import tables
import typer

Result = dict[str, Any]

#: Fields that identify a row, by benchmark.
NAMES = {
    "gpu-casts": ("recipe", "op", "shape", "part"),
    "gpu-first-call": ("call",),
    "gpu-decoder": ("how", "model", "recipe", "batch"),
    "gpu-decoder-generate": ("how", "model", "recipe", "batch"),
    "gpu-weight-only": ("format", "n", "k", "m"),
    "matmul-gpu": ("kind", "shape"),
}
#: Options in which runs may differ. The joined result has the smallest number of samples.
EXTENT = ("shapes", "samples")


def joined(results: list[Result]) -> Result:
    """Join results, in order. Exits if they differ in benchmark, device or options."""
    first, last = results[0], results[-1]
    for result in results:
        for what, found, expected in (
            ("benchmark", result["benchmark"], first["benchmark"]),
            ("schema", result["schema"], common.SCHEMA),
            ("device", result["provenance"].get("device"), first["provenance"].get("device")),
            ("options", _options(result), _options(first)),
        ):
            if found != expected:
                sys.exit(f"join: the files must agree in their {what}: found {found!r} beside {expected!r}.")
    if first["benchmark"] not in NAMES:
        sys.exit(f"join: takes results of {', '.join(NAMES)}; got {first['benchmark']!r}.")
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for result in results:
        runs = result.get("joined") or [result["provenance"]]
        for row in result["rows"]:
            name = json.dumps([row.get(part) for part in NAMES[first["benchmark"]]])
            rows[name] = row, runs[row.get("run", 0)]
    used: list[dict[str, Any]] = []
    for _, run in rows.values():
        if run not in used:
            used.append(run)
    made = {**first, **last, "joined": used, "rows": [{**row, "run": used.index(run)} for row, run in rows.values()]}
    if "rivals" in last:
        made["rivals"] = {name: version for result in results for name, version in result.get("rivals", {}).items()}
        made["absent"] = {name: why for name, why in last["absent"].items() if name not in made["rivals"]}
    if "left" in first:  # rows that the first run left out, and no later one measured
        made["left"] = max(0, first["left"] - (len(rows) - len(first["rows"])))
    if "options" in last:
        made["options"] = dict(first["options"])
        shapes = [shape for result in results for shape in result["options"].get("shapes", ())]
        if shapes:
            made["options"]["shapes"] = [s for i, s in enumerate(shapes) if s not in shapes[:i]]
        if "samples" in made["options"]:
            made["options"]["samples"] = min(result["options"]["samples"] for result in results)
    return made


def _options(result: Result) -> dict[str, Any]:
    return {name: value for name, value in result.get("options", {}).items() if name not in EXTENT}


def merge_tuned(files: list[Path], into: Path) -> None:
    """Merge files of configurations into the files of the same names in a folder. Exits if schemas or devices differ."""
    from breccia_triton import choices, weight_plans

    for path in files:
        found, target = json.loads(path.read_text(encoding="utf-8")), into / path.name
        before = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else {**found, "configs": {}}
        for what in ("schema", "device"):
            if found[what] != before[what]:
                sys.exit(f"join: the files must agree in their {what}: found {found[what]!r} beside {before[what]!r}.")
        known, entries = before["configs"], found["configs"]
        for entry in entries.values():
            weight_plans.config_from(entry)  # raises for one without a kernel
        choices.write_measured(target, found["device"], "configs", entries, found["provenance"])
        new = sum(key not in known for key in entries)
        changed = sum(known.get(key, entry) != entry for key, entry in entries.items())
        print(f"{target}: {new} new, {changed} changed, {len(entries) - new - changed} equal")


def main(
    files: Annotated[list[Path], typer.Argument(help="Results, or tuned configurations, the newest last.")],
    out: Annotated[Path, typer.Option(help="Folder for the joined result, or folder of the configurations.")],
    table: Annotated[
        Path | None, typer.Option(help="Write the measured times by which kernels are chosen to this file.")
    ] = None,
) -> None:
    """Join results of one benchmark and device, or merge tuned configurations."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    if all("configs" in result for result in results):
        return merge_tuned(files, out)
    made = joined(results)
    print(f"{len(made['rows'])} rows of {len(made['joined'])} run(s): {tables.save(made, out)}")
    if table is None:
        return
    import bench_matmul
    import bench_weight_only

    from breccia_triton import choices

    slowdowns = {"gpu-weight-only": bench_weight_only.slowdowns, "matmul-gpu": bench_matmul.slowdowns}.get(made["benchmark"])
    if slowdowns is None:
        sys.exit(f"join: --table is for results of products; got {made['benchmark']!r}.")
    device = made["provenance"]["device"].split(",")[0]
    choices.write_measured(table, device, "slowdowns", slowdowns(made["rows"]), made["provenance"])


if __name__ == "__main__":
    typer.run(main)
