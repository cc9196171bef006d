"""Time of cast and dequantize of an FP32 matrix on NumPy: breccia, the older package breccia 0.1.3, NumPy with ml_dtypes.

    python benchmarks/bench_cast.py [--size 4096] [--runs 7] [--rivals all] [--out benchmarks/results]

One process per rival, breccia first and last so that drift of the machine shows. Ratios are minimum over minimum. Results
are checked in the same run: quality of every rival, and stored scales and values against ours.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import common
import numpy as np
import rivals
import tables
import typer
from rivals import OURS, RECIPES, RIVALS, SAME_SCALE, SLAB_ROWS, SLABS

#: Shape of the call whose time is the price of a call rather than of its elements.
SMALL = (4, 128)
#: How much worse than the best rival ours may decode before a run counts as broken: less than a tenth of a bit.
TOLERANCE_DB = 0.5
#: Decoded values count as the same within this part of them: q * s * g is two FP32 roundings, in either order.
SAME_VALUE = 2.0**-22


def one(name: str, size: int, runs: int, folder: Path) -> dict[str, Any]:
    """Everything about one rival, measured in this process; its scales and values of the check go to `folder`."""
    rival = rivals.rival(name)
    x, check, small = common.normal((size, size), 0), common.normal((min(SLAB_ROWS, size), size), 1), common.normal(SMALL, 2)
    rows: list[dict[str, Any]] = []
    sqnr_db: dict[str, float] = {}
    for recipe in RECIPES:
        cast = rival.cast(recipe)
        st = cast(check)
        y = rival.dequantize(st)
        quality = common.Quality()
        quality.add(check, y)
        sqnr_db[recipe] = quality.sqnr_db
        np.save(folder / f"{recipe}-values.npy", y)
        np.save(folder / f"{recipe}-scale.npy", rival.scale(st))

        slab = x[:SLAB_ROWS] if recipe in SLABS.get(name, ()) else x
        factor = x.size / slab.size
        st = cast(slab)
        whole = st if factor == 1 else rival.taller(st, int(factor))
        tiny = cast(small)
        for op, shape, times, scale in (
            ("cast", slab.shape, common.timed(lambda cast=cast, slab=slab: cast(slab), runs), factor),
            ("dequantize", x.shape, common.timed(lambda st=whole: rival.dequantize(st), runs), 1.0),
            ("cast", SMALL, common.timed_often(lambda cast=cast: cast(small), runs), 1.0),
            ("dequantize", SMALL, common.timed_often(lambda st=tiny: rival.dequantize(st), runs), 1.0),
        ):
            times |= common.summary([s * scale for s in times["seconds"]])
            stands_for = SMALL if shape == SMALL else x.shape
            row = {"recipe": recipe, "op": op, "shape": stands_for, "measured_shape": shape, "factor": scale, **times}
            rows.append({**row, "kernel": rival.kernel(op, recipe, small if shape == SMALL else x)})
    return {"rival": name, "version": rival.version, "rows": rows, "sqnr_db": sqnr_db}


def equal_share(a: np.ndarray, b: np.ndarray, relative: float) -> float:
    """The part of elements that are equal to within `relative`; shapes may differ by axes of length one."""
    if a.size != b.size or a.dtype != b.dtype:
        return 0.0
    a, b = a.reshape(-1).astype(np.float64), b.reshape(-1).astype(np.float64)
    return float(np.mean(np.abs(a - b) <= relative * np.abs(a)))


def checks(passes: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Per recipe: SQNR of everybody, and the part of stored scales and decoded values that equal ours. Exits if ours is off."""
    found: list[dict[str, Any]] = []
    for recipe in RECIPES:
        sqnr_db = {p["rival"]: p["sqnr_db"][recipe] for p in passes}
        best = max(sqnr_db, key=lambda name: sqnr_db[name])
        if sqnr_db[OURS] < sqnr_db[best] - TOLERANCE_DB:
            sys.exit(
                f"bench_cast: {recipe} decodes with {sqnr_db[OURS]:.2f} dB, while {best} has {sqnr_db[best]:.2f} dB on the "
                "same matrix. Times of a wrong result mean nothing: run the tests first."
            )
        row: dict[str, Any] = {"recipe": recipe, "sqnr_db": sqnr_db, "same_scales": {}, "same_values": {}}
        for name in sqnr_db:
            if name == OURS:
                continue
            for part, into, relative in (("scale", "same_scales", 0.0), ("values", "same_values", SAME_VALUE)):
                if recipe in SAME_SCALE[name]:
                    ours, theirs = (np.load(folder / who / f"{recipe}-{part}.npy") for who in (OURS, name))
                    row[into][name] = equal_share(ours, theirs, relative)
        found.append(row)
    return found


def chosen(wanted: list[str]) -> list[str]:
    """The rivals to run. Those not named run where they are at hand, and are announced where they are not."""
    for name in wanted:
        if name not in (*RIVALS, "all", "none"):
            sys.exit(f"bench_cast: --rivals takes {', '.join(RIVALS)}, all or none; got {name!r}.")
    names: list[str] = []
    for name in RIVALS:
        if name in wanted or "all" in wanted:
            names.append(name)
        elif not wanted and (why := rivals.absence(name)):
            print(f"skipped {name}: {why}", file=sys.stderr)
        elif not wanted:
            names.append(name)
    return names


def main(
    size: Annotated[int, typer.Option(help="Rows and columns of the matrix; a multiple of 128.")] = 4096,
    runs: Annotated[int, typer.Option(help="Counted runs of each call, after one that is not.")] = 7,
    rivals_: Annotated[
        list[str] | None,
        typer.Option("--rivals", help="ml_dtypes, breccia-0.1.3 (fetched on first use), all or none; repeat for several."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    rival: Annotated[str, typer.Option(help="Measure this rival only, in this process.", hidden=True)] = "",
    dump: Annotated[Path | None, typer.Option(help="Where --rival leaves arrays to compare.", hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> None:
    """Time cast and dequantize on NumPy against rivals, one process each."""
    if size < 128 or size % 128 or (size > SLAB_ROWS and size % SLAB_ROWS):
        sys.exit(f"bench_cast: --size must be 128 or a multiple of {SLAB_ROWS}, so that every rival takes it; got {size}.")
    if runs < 1:
        sys.exit(f"bench_cast: --runs must be at least 1, got {runs}.")
    if rival:
        if dump is None:
            sys.exit("bench_cast: --rival is how the benchmark calls itself and needs --dump; leave it out.")
        print(json.dumps(one(rival, size, runs, dump)))
        return
    where = common.provenance()
    passes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in [OURS, *chosen(rivals_ or []), OURS]:
            arrays = Path(folder) / name
            arrays.mkdir(exist_ok=True)
            path = rivals.python_path(name)
            options = ["--rival", name, "--size", str(size), "--runs", str(runs), "--dump", str(arrays)]
            print(f"measuring {name}", file=sys.stderr)
            passes.append(common.child("bench_cast.py", *options, python_path=path))
        compared = checks(passes, Path(folder))
    options = {"size": size, "runs": runs, "small": SMALL, "slab_rows": SLAB_ROWS}
    result = {"benchmark": "cast", "schema": common.SCHEMA, "provenance": where, "options": options}
    result |= {"passes": passes, "checks": compared}
    tables.tell(json.loads(json.dumps(result)), out, as_json)


if __name__ == "__main__":
    typer.run(main)
