"""Time of `matmul` by quantized weights on the CPU, in turns with the products of other libraries, each in its own process.

    python benchmarks/bench_matmul_cpu.py [--size 4096] [--rows 1,4,16,64,512] [--out benchmarks/results]

Rivals: torch (FP32, BF16, int4, dynamic int8), NumPy's BLAS, ONNX Runtime's MatMulNBits (`pip install onnxruntime onnx`), MLX,
and ggml (`python benchmarks/ggml_build.py FOLDER`, then BRECCIA_GGML=FOLDER). What is missing is left out, with the reason.

Arms of a library run one after the other, after a pause in which the threads of the one before go to sleep. A call is timed
after 10 ms of others, as in the layers of a model, by copies of the weight that are not in the cache.

Machines have faster and slower minutes: compare ratios, not microseconds. Two arms are limits: `read` sums 64 MiB, of another
copy each turn, and a product of one row reads its weight once; `multiply-adds`, which needs a C compiler, makes as many in FP32
as the product has, in registers. All is measured twice; where medians of the two passes differ by more than 15 %, the result
says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import common
import tables
import typer
from matmul_arms import LIBRARIES, READ

#: The arm that the others are compared with.
BASE = "F.linear FP32"
#: Seconds between the turns of two libraries: threads of OpenBLAS look for work for up to 2^28 cycles after a call (0.1 s), and
#: those of OpenMP for milliseconds, on the processors of whoever comes next.
PAUSE = 0.15
#: Seconds after which an arm with two calls gets no more of a row count and pass.
LONG = 3


class Worker:
    """The process of one library."""

    def __init__(self, library: str, size: int, threads: int) -> None:
        self.library = library
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        command = [sys.executable, str(common.HERE / "matmul_arms.py"), library, "--size", str(size), "--threads", str(threads)]
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True, env=environment
        )
        self.failed: str | None = None
        self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and line[0] not in '"[0123456789':  # what a library prints
            line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.said.seek(0)
            self.failed = (self.said.read().strip().splitlines() or ["it ended"])[-1][:200]
            return None
        return json.loads(line)

    def ask(self, question: str) -> Any:
        if self.failed is not None:
            return None
        assert self.process.stdin is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.said.close()


def one_pass(workers: list[Worker], rows: list[int], runs: int) -> list[dict[str, Any]]:
    """Every arm at every number of rows, in turns."""
    found: list[dict[str, Any]] = []
    for m in rows:
        arms = [(worker, arm) for worker in workers for arm in worker.ask(f"rows {m}") or ()]
        seconds: dict[str, list[float]] = {arm: [] for _, arm in arms}
        for _ in range(runs if m < 128 else max(runs // 3, 3)):
            last = None
            for worker, arm in arms:
                if worker is not last:
                    time.sleep(PAUSE)
                    last = worker
                if len(seconds[arm]) > 1 and sum(seconds[arm]) > LONG:
                    continue
                taken = worker.ask(f"run {arm}")
                if taken is not None:
                    seconds[arm].append(taken)
        found += [{"rows": m, "arm": arm, **common.summary(taken)} for arm, taken in seconds.items() if taken]
        print(f"{m} row(s): done", file=sys.stderr, flush=True)
    return found


def main(
    size: Annotated[int, typer.Option(min=128, help="N and K.")] = 4096,
    rows: Annotated[str, typer.Option(help="Rows of activations.")] = "1,4,16,64,512",
    runs: Annotated[int, typer.Option(min=1, help="Calls of each arm in a pass; a third of them beyond 128 rows.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every library.")] = common.cores(),
    libraries: Annotated[str, typer.Option(help="Which run.")] = ",".join(LIBRARIES),
    out: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time products on the CPU."""
    chosen = libraries.split(",")
    if unknown := [name for name in chosen if name not in LIBRARIES]:
        sys.exit(f"bench_matmul_cpu: no library {', '.join(unknown)}; there are {', '.join(LIBRARIES)}.")
    if missing := [name for name in ("read", "torch", "breccia") if name not in chosen]:
        sys.exit(f"bench_matmul_cpu: the others are compared with {', '.join(missing)}; add it to --libraries.")
    workers = [Worker(name, size, threads) for name in chosen]
    passes = [one_pass(workers, [int(m) for m in rows.split(",")], runs) for _ in range(2)]
    left_out = {worker.library: worker.failed for worker in workers if worker.failed is not None}
    for worker in workers:
        worker.close()
    result: dict[str, Any] = {"benchmark": "matmul-cpu", "schema": common.SCHEMA, "provenance": common.provenance()}
    options = {"size": size, "threads": threads, "base": BASE, "read_bytes": READ, "left_out": left_out}
    tables.tell({**result, "options": options, "runs": passes}, out, as_json)


if __name__ == "__main__":
    typer.run(main)
