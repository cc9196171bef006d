"""Time of casts that search for scales on the CPU, compared with the plain cast of the same recipe.

Arms: the plain cast, the one that searches, and with `importance=`, into `out=`, of a matrix in FP32, BF16 and FP16, on one
thread and on two. The arms of a case are interleaved in one process, in two passes; a ratio is median over median, and a range
where the ratios of the two passes differ by more than 15 %. The command fails if a search takes more than `--limit` times the
plain cast.
"""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import numpy as np
import typer
from harness import Benchmark, Result, Row, Table, interleaved, normal, program, progress, summary
from harness.tables import extent, pivoted
from harness.timing import DRIFT, agree

import breccia

#: Recipes whose scales a compiled kernel searches for, each with its rules.
RECIPES = (
    "nvfp4,scale_rule=mse", "nvfp4,scale_rule=four_six", "nvfp4,two_level=false,scale_rule=mse",
    "nvfp4,block_m=16,scale_rule=mse", "mxfp4,scale_rule=mse", "mxfp6,scale_rule=mse", "mxfp8,scale_rule=mse",
    "mxint8,scale_rule=mse", "int4,scale_rule=mse", "int4,scale_dtype=fp32,scale_rule=mse", "int4,group_size=32,scale_rule=mse",
    "int4,group_size=1024,scale_rule=mse", "int,bits=2,scale_rule=mse", "int,bits=3,scale_rule=mse", "int8,scale_rule=mse",
    "int8,group_size=128,scale_rule=mse", "nf4,scale_rule=mse",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
#: The most times that a search may take as long as the plain cast.
LIMIT = 5.0


def ratios(result: Result) -> Table:
    options = result["options"]
    within = sum(row["over_plain"] <= options["limit"] for row in result["rows"])
    return pivoted(
        "casts that search for scales on the CPU",
        {"recipe": lambda row: f"`{row['recipe']}`"},
        lambda row: (row["threads"], DTYPES.index(row["dtype"])),
        lambda column: f"{DTYPES[column[1]]}, {column[0]} thread{'s' * (column[0] > 1)}",
        lambda row: f"{over_plain(row)}, {row['importance_over_plain']:.1f}",
        result["rows"],
        "How many times as long as the plain cast one with a search takes, without and with `importance=`: medians over "
        f"{2 * options['runs']} interleaved calls, of a matrix of {options['size']} × {options['size']}; ranges where two "
        f"passes differ by more than {DRIFT - 1:.0%}. Without it, {within} of {len(result['rows'])} medians are "
        f"{options['limit']:g} or less, which is the goal; all are "
        f"{extent([row['over_plain'] for row in result['rows']], '{:.1f}'.format)}.",
    )


def over_plain(row: Row) -> str:
    """The ratio of a search to the plain cast, or those of both passes."""
    first, second = row["passes"]
    return f"{row['over_plain']:.1f}" if agree(first, second, DRIFT) else extent(row["passes"], "{:.1f}".format)


BENCHMARK = Benchmark("search-speed", {"search-speed": ratios}, ("recipe", "dtype", "threads"))


def arms(spec: str, x: Any, importance: Any) -> dict[str, Any]:
    """The calls of a case by name."""
    recipe = breccia.recipe(spec)
    rule = "rceil" if spec.startswith("mx") else "linear"
    plain = breccia.recipe(spec.replace(spec.rpartition("=")[2], rule))
    into = [breccia.cast(x, each) for each in (plain, recipe)]
    return {
        "plain": lambda: breccia.cast(x, plain, out=into[0]),
        "search": lambda: breccia.cast(x, recipe, out=into[1]),
        "importance": lambda: breccia.cast(x, recipe, importance=importance, out=into[1]),
    }


def measured(spec: str, dtype: str, threads: int, x: Any, importance: Any, runs: int) -> Row:
    calls, passes = arms(spec, x, importance), []
    for _ in range(2):
        taken = interleaved(calls.values(), runs)
        passes.append([[s for s, _ in samples] for samples in taken])
    medians = [[statistics.median(samples) for samples in one] for one in passes]
    every = {name: passes[0][i] + passes[1][i] for i, name in enumerate(calls)}
    plain, search, weighed = (statistics.median(samples) for samples in every.values())
    return {
        "recipe": spec,
        "dtype": dtype,
        "threads": threads,
        "time": {name: summary(samples) for name, samples in every.items()},
        "over_plain": round(search / plain, 3),
        "importance_over_plain": round(weighed / plain, 3),
        "passes": [round(search / plain, 3) for plain, search, _ in medians],
    }


def name_of(row: Row) -> str:
    return f"{row['recipe']} in {row['dtype']} on {row['threads']}"


@program
def main(
    size: Annotated[int, typer.Option(min=128, help="Rows and columns of the matrix.")] = 4096,
    runs: Annotated[int, typer.Option(min=1, help="Calls of each arm in a pass.")] = 5,
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes that search, by spec. Default: all.")] = None,
    dtypes: Annotated[list[str] | None, typer.Option(help="Of the matrix. Default: all.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Numbers of threads. Default: 1 and 2.")] = None,
    limit: Annotated[float, typer.Option(help="The most times the plain cast that a search may take.")] = LIMIT,
) -> Result:
    """Time casts with and without a search for scales."""
    import ml_dtypes

    kinds = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    matrix, importance = normal((size, size), 0), np.square(normal((size,), 1))
    cases = [(spec, dtype, n) for n in threads or (1, 2) for dtype in dtypes or DTYPES for spec in recipes or RECIPES]
    rows: list[Row] = []
    before = breccia.get_num_threads()
    try:
        for spec, dtype, n in progress(cases, "cases"):
            breccia.set_num_threads(n)
            rows.append(measured(spec, dtype, n, matrix.astype(kinds[dtype]), importance, runs))
    finally:
        breccia.set_num_threads(before)
    slow = [f"{name_of(row)}: {row['over_plain']:.1f}" for row in rows if row["over_plain"] > limit]
    more = {"failed": f"A search takes more than {limit:g} times the plain cast: {'; '.join(slow)}."} if slow else {}
    return BENCHMARK.result(rows, {"size": size, "runs": runs, "limit": limit}, **more)
