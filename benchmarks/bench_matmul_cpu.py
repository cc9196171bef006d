"""Time of `matmul` by quantized weights on the CPU, interleaved with the products of other libraries, each in its own process.

The arms are in cpu_products.py; a missing library is left out, with the reason. A call is timed after 10 ms of others, as in
the layers of a model, by copies of the weight that are not in the cache. Two arms are limits: `read` sums 64 MiB, and
`multiply-adds`, which needs a C compiler, makes as many in FP32 as the product has, in registers. Compare ratios, not
microseconds. All is measured twice; where medians of both passes differ by more than 15 %, the result says so.
"""

from __future__ import annotations

import math
import os
import time
from typing import Annotated, Any

import typer
from cpu_products import LIBRARIES, READ, prepared, seconds_of
from harness import (
    DRIFT,
    Benchmark,
    Result,
    Worker,
    agree,
    cores,
    known,
    pooled,
    program,
    progress,
    provenance,
    refuse,
    summary,
)
from harness.tables import ABSENT, Table, ratio, table, three, trio

#: The arm that the others are compared with.
BASE = "F.linear FP32"
#: Seconds between the turns of two libraries: threads of OpenBLAS look for work for up to 2^28 cycles after a call (0.1 s), and
#: those of OpenMP for milliseconds, on the processors of whoever comes next.
PAUSE = 0.15
#: Seconds after which an arm with two calls gets no more of a row count and pass.
LONG = 3


def times(result: Result) -> Table:
    options, rows = result["options"], result["rows"]

    def faster(row: Any, arm: str) -> list[float] | None:
        if not all(arm in one for one in row["passes"]):
            return None
        return sorted(one[options["base"]]["median_s"] / one[arm]["median_s"] for one in row["passes"])

    def cell(row: Any, arm: str) -> str:
        both = faster(row, arm)
        if both is None:
            return ABSENT
        spread = ratio(math.sqrt(both[0] * both[1])) if agree(*both) else f"{three(both[0])} to {ratio(both[1])}"
        return f"{trio(pooled(row, arm)[:2], 1e6)}; {spread}"

    ratios = [(row, arm) for row in rows for arm in row["passes"][0]]
    moved = [1 for row, arm in ratios if (both := faster(row, arm)) and not agree(*both)]
    said = (
        "Both passes agree"
        if not moved
        else f"**The passes disagree** in {len(moved)} of {len(ratios)} ratios, shown as a range"
    )
    read = min(one["read"]["min_s"] for row in rows for one in row["passes"])
    rates = [
        2 * row["rows"] * options["size"] ** 2 / one["multiply-adds"]["min_s"]
        for row in rows
        for one in row["passes"]
        if "multiply-adds" in one
    ]
    note = (
        f"Microseconds of activations (M, {options['size']}) by weights of {options['size']} × {options['size']}: min / "
        f"median; the ratio of {options['base']}'s median to it. {options['threads']} thread(s), arms interleaved in two "
        f"passes. {said} (15 %).{''.join(f' {name} did not run: {why}.' for name, why in options['left_out'].items())} read: "
        f"{options['read_bytes'] >> 20} MiB, at best {options['read_bytes'] / read / 1e9:.0f} GB/s."
    )
    note += f" multiply-adds: those of the product, in registers, at best {max(rates) / 1e9:.0f} GFLOP/s." if rates else ""
    columns = {f"M = {row['rows']}": (lambda arm, row=row: cell(row, arm)) for row in rows}
    arms = dict.fromkeys(arm for _, arm in ratios)
    return table("matmul on the CPU", {"arm": lambda arm: arm, **columns}, arms, note)


assert DRIFT == 1.15, "the note says 15 %"
BENCHMARK = Benchmark("matmul-cpu", {"matmul-cpu": times})


def one_pass(workers: list[Worker], size: int, threads: int, m: int, runs: int) -> dict[str, Any]:
    arms = [(worker, arm) for worker in workers for arm in worker.ask(prepared, worker.library, size, threads, m) or ()]
    seconds: dict[str, list[float]] = {arm: [] for _, arm in arms}
    for _ in range(runs if m < 128 else max(runs // 3, 3)):
        last = None
        for worker, arm in arms:
            if worker is not last:
                time.sleep(PAUSE)
                last = worker
            if len(seconds[arm]) > 1 and sum(seconds[arm]) > LONG:
                continue
            if (taken := worker.ask(seconds_of, arm)) is not None:
                seconds[arm].append(taken)
    return {arm: summary(taken) for arm, taken in seconds.items() if taken}


@program
def main(
    size: Annotated[int, typer.Option(min=128, help="N and K.")] = 4096,
    rows: Annotated[str, typer.Option(help="Rows of activations.")] = "1,4,16,64,512",
    runs: Annotated[int, typer.Option(min=1, help="Calls of each arm in a pass; a third of them beyond 128 rows.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every library.")] = cores(),
    libraries: Annotated[str, typer.Option(help="Which run.")] = ",".join(LIBRARIES),
) -> Result:
    """Time products on the CPU."""
    chosen, counts = known(libraries.split(","), LIBRARIES, "--libraries"), [int(m) for m in rows.split(",")]
    if missing := [name for name in ("read", "torch", "breccia") if name not in chosen]:
        refuse(f"the others are compared with {', '.join(missing)}; add it to --libraries.")
    where = provenance()
    os.environ |= {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}  # of the processes below
    workers = [Worker(name) for name in chosen]
    passes = [[one_pass(workers, size, threads, m, runs) for m in progress(counts, f"pass {n}")] for n in (1, 2)]
    left_out = {worker.library: worker.failed for worker in workers if worker.failed}
    options = {"size": size, "threads": threads, "base": BASE, "read_bytes": READ, "left_out": left_out}
    return BENCHMARK.result([{"rows": m, "passes": both} for m, *both in zip(counts, *passes, strict=True)], options, where)
