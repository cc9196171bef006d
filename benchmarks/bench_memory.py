"""Bytes per parameter of every recipe, and the memory that cast and dequantize need beyond their input and output.

Peaks are measured in a process per recipe and op: resident memory over the first call at full size, then allocations
(tracemalloc) over a second.
"""

from __future__ import annotations

import contextlib
import pickle
import resource
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import HERE, Benchmark, Recipes, Result, Table, apart, bits, normal, program, progress, read, recipes_named, table

import breccia

TABLE_SIZE = 1024
#: Tables that the package page of breccia 0.1.3 prints.
PUBLISHED = read(HERE / "published.json")


def sizes(result: Result) -> Table:
    table_size, size = result["options"]["table_size"], result["options"]["size"]
    published, version = PUBLISHED["memory"]["rows"], PUBLISHED["version"]

    def of_fp32(row: Any) -> float:
        return row["bytes"][str(table_size)] / (4 * table_size**2)

    def old(row: Any) -> str:
        found = published.get(row["recipe"])
        return f"{found['of_fp32']:.2f}× ({found['megabytes']:.2f} MB)" if found else ""

    columns = {
        "recipe": "recipe",
        f"bits/param at {table_size}²": lambda row: bits(32 * of_fp32(row)),
        f"at {size}²": lambda row: bits(8 * row["bytes"][str(size)] / size**2),
        f"bytes at {table_size}²": lambda row: f"{row['bytes'][str(table_size)] / 1e6:.3f} MB",
        "of FP32": lambda row: f"{of_fp32(row):.4f}×",
        "of BF16": lambda row: f"{2 * of_fp32(row):.4f}×",
        f"breccia {version}": old,
    }
    note = f"Codes and scales, all of them. breccia {version}: of FP32 at {table_size}², as its page publishes it."
    return table("memory", columns, result["rows"], note)


def peaks(result: Result) -> Table:
    size = result["options"]["size"]
    columns: dict[str, Any] = {"recipe": "recipe"}
    for op in ("cast", "dequantize"):
        for what in ("resident", "allocated"):
            columns[f"{op}, {what}"] = lambda row, op=op, what=what: f"{row['peak'][op][what] / 2**20:.1f}"
    note = (
        f"MiB beyond input and output at {size}×{size}, of which the FP32 side is {4 * size * size / 2**20:g} MiB. Resident: "
        "growth of the process over its first call of that size. Allocated: the peak of what Python and NumPy asked for in a "
        "second call."
    )
    return table("peak memory", columns, result["rows"], note)


BENCHMARK = Benchmark("memory", {"memory": sizes, "peaks": peaks})


def resident_peak() -> int:
    """Most bytes of memory this process has had resident."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would also count what the parent held when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def beyond(call: Callable[[], Any]) -> dict[str, int]:
    """Peak bytes of `call` beyond what it was given and returns, by both measures."""
    # Let `resident_peak` start from what is resident now, where the system can; elsewhere growth is understated.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    returned = call().nbytes
    resident = resident_peak() - before - returned
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    result = call()
    allocated = tracemalloc.get_traced_memory()[1] - before - result.nbytes
    tracemalloc.stop()
    return {"resident": max(resident, 0), "allocated": max(allocated, 0), "output": returned}


def peak(spec: str, op: str, size: int, file: str) -> dict[str, int]:
    """Peaks of one op in this process. `cast` leaves its result in the file, so that `dequantize` starts without a cast."""
    recipe = breccia.recipe(spec)
    breccia.dequantize(breccia.cast(normal((4, 128), 0), recipe))  # imports and tables are paid once, not per call
    if op == "cast":
        x = normal((size, size), 0)
        found = beyond(lambda: breccia.cast(x, recipe))
        Path(file).write_bytes(pickle.dumps(breccia.cast(x, recipe)))
        return found
    st = pickle.loads(Path(file).read_bytes())
    return beyond(lambda: breccia.dequantize(st))


@program
def main(
    size: Annotated[int, typer.Option(min=1, help="Rows and columns of the matrix of the peaks.")] = 4096,
    recipes: Recipes = None,
) -> Result:
    """Bytes per parameter, and peak memory of cast and dequantize."""
    rows: list[dict[str, Any]] = []
    for recipe in progress(recipes_named(recipes), "recipes"):
        with tempfile.NamedTemporaryFile() as file:
            peak = {op: apart("bench_memory:peak", recipe.spec, op, size, file.name) for op in ("cast", "dequantize")}
        small = breccia.cast(normal((TABLE_SIZE, TABLE_SIZE), 0), recipe).nbytes
        nbytes = {str(size): peak["cast"]["output"], str(TABLE_SIZE): small}
        rows.append({"recipe": recipe.spec, "bytes": nbytes, "peak": peak})
    return BENCHMARK.result(rows, {"size": size, "table_size": TABLE_SIZE})
