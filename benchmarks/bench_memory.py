"""Bytes per parameter of every recipe, and the memory that cast and dequantize need beyond their input and output.

    python benchmarks/bench_memory.py [--size 4096] [--out benchmarks/results]

Peaks are measured in a process per recipe and verb: resident memory over the first call at full size, then allocations
(tracemalloc) over a second.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import common
import tables
import typer

import breccia

TABLE_SIZE = 1024


def resident_peak() -> int:
    """Most bytes of memory this process has had resident."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would also count what the parent held when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Let `resident_peak` start from what is resident now, where the system can; elsewhere growth is understated."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def beyond(call: Callable[[], Any], output: Callable[[Any], int]) -> dict[str, int]:
    """Peak bytes of `call` beyond what it was given and returns, by both measures."""
    forget_peak()
    before = resident_peak()
    result = call()
    returned = output(result)
    resident = resident_peak() - before - returned
    del result
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    result = call()
    allocated = tracemalloc.get_traced_memory()[1] - before - output(result)
    tracemalloc.stop()
    return {"resident": max(resident, 0), "allocated": max(allocated, 0), "output": returned}


def peak(spec: str, op: str, size: int, folder: Path) -> dict[str, int]:
    """Peaks of one op in this process. `cast` leaves its result in `folder`, so that `dequantize` starts without a cast."""
    recipe = breccia.recipe(spec)
    breccia.dequantize(breccia.cast(common.normal((4, 128), 0), recipe))  # imports and tables are paid once, not per call
    file = folder / f"{recipe.name}.pickle"
    if op == "cast":
        x = common.normal((size, size), 0)
        found = beyond(lambda: breccia.cast(x, recipe), lambda st: st.nbytes)
        file.write_bytes(pickle.dumps(breccia.cast(x, recipe)))
        return found
    with file.open("rb") as opened:
        st = pickle.load(opened)
    return beyond(lambda: breccia.dequantize(st), lambda y: y.nbytes)


def measured(recipe: breccia.ScalingRecipe, size: int, folder: Path) -> dict[str, Any]:
    spec = recipe.spec
    row: dict[str, Any] = {"recipe": spec, "bytes": {}, "peak": {}}
    for op in ("cast", "dequantize"):
        options = ("--recipe", spec, "--op", op, "--size", str(size), "--folder", str(folder))
        row["peak"][op] = common.child("bench_memory.py", *options)
    row["bytes"][str(size)] = row["peak"]["cast"]["output"]
    row["bytes"][str(TABLE_SIZE)] = breccia.cast(common.normal((TABLE_SIZE, TABLE_SIZE), 0), recipe).nbytes
    (folder / f"{recipe.name}.pickle").unlink()
    return row


def main(
    size: Annotated[int, typer.Option(help="Rows and columns of the matrix of the peaks.")] = 4096,
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes by name; repeat for several. Default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    recipe: Annotated[str, typer.Option(help="Measure the peak of this recipe, in this process.", hidden=True)] = "",
    op: Annotated[str, typer.Option(help="cast or dequantize, with --recipe.", hidden=True)] = "cast",
    folder: Annotated[Path | None, typer.Option(help="Where --recipe hands on its cast.", hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> None:
    """Bytes per parameter, and peak memory of cast and dequantize."""
    if size < 1:
        sys.exit(f"bench_memory: --size must be at least 1, got {size}.")
    if recipe:
        if folder is None:
            sys.exit("bench_memory: --recipe is how the benchmark calls itself and needs --folder; leave it out.")
        print(json.dumps(peak(recipe, op, size, folder)))
        return
    where = common.provenance()
    with tempfile.TemporaryDirectory() as own:
        rows = [measured(one, size, Path(own)) for one in common.recipes(recipes or [])]
    options = {"size": size, "table_size": TABLE_SIZE}
    result = {"benchmark": "memory", "schema": common.SCHEMA, "provenance": where, "options": options, "rows": rows}
    tables.tell(result, out, as_json)


if __name__ == "__main__":
    typer.run(main)
