"""What bounds casts on an NVIDIA GPU, counted by Nsight Compute: time, bytes of memory, issue slots, registers.

    python benchmarks/ncu_casts.py [--calls "cast nf4"] [--shape 16384x8192] [--out RESULTS]

Needs `ncu`, and the right to read performance counters. Clocks are left as they are (`--clock-control none`); caches are
flushed before each kernel, and the second call is profiled. The kernels of a call are listed in launch order.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import common
import gpu_work
import tables
import typer

#: Calls by name: casts that are bound by instructions or by several passes over memory, according to the tables of casts.
CALLS = {
    f"{op} {recipe}": (op, recipe)
    for op, recipe in (
        ("cast", "nvfp4,two_level=false"),
        ("cast-axis-2", "nvfp4"),
        ("cast_pair", "fp8_block"),
        ("cast-axis-2", "fp8_row"),
        ("cast", "mxfp6"),
        ("cast", "nf4"),
    )
}
#: Metrics of Nsight Compute by their names in results.
METRICS = {
    "seconds": "gpu__time_duration.sum",
    "dram_bytes": "dram__bytes.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "clock": "sm__cycles_elapsed.avg.per_second",
}
NANOSECONDS = 1e-9

app = typer.Typer(add_completion=False)


def called(names: list[str], shape: tuple[int, int]) -> None:
    """Call each twice and profile the second call. It runs in the process that ncu watches."""
    import torch

    for name in names:
        op, spec = CALLS[name]
        call = gpu_work.work(op, spec, gpu_work.matrices(shape, "bfloat16", "cuda")[:1], "bfloat16").call
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def read(text: str) -> list[dict[str, Any]]:
    """Names and metrics of kernels, from ncu's CSV (`--page raw --print-units base`). Exits if it lists no kernel."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        sys.exit("ncu_casts: ncu printed no kernels: " + " ".join(line for line in lines if line.startswith("=="))[:500])
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))

    def number(row: dict[str, str], metric: str) -> float:
        return float(row[metric].replace(",", ""))

    found: list[dict[str, Any]] = []
    for row in rows[1:]:  # the first row has the units
        metrics = {name: number(row, metric) for name, metric in METRICS.items()}
        found.append({"kernel": row["Kernel Name"].partition("(")[0], **metrics, "seconds": metrics["seconds"] * NANOSECONDS})
    return found


def profiled(name: str, shape: str) -> list[dict[str, Any]]:
    """The kernels of one call."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--metrics", ",".join(METRICS.values()), "--target-processes", "all"]
    child = [sys.executable, str(Path(__file__)), "--inside", "--calls", name, "--shape", shape]
    done = subprocess.run([*command, *child], capture_output=True, text=True, env=os.environ)
    if done.returncode:
        sys.exit(f"ncu_casts: ncu failed for {name}: {(done.stdout + done.stderr).strip()[-500:]}")
    return read(done.stdout)


@app.command()
def main(
    calls: Annotated[list[str] | None, typer.Option(help=f"{', '.join(CALLS)}; repeat for several. Default: all.")] = None,
    shape: Annotated[str, typer.Option(help="Shape of the matrix, ROWSxCOLUMNS.")] = "16384x8192",
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    inside: Annotated[bool, typer.Option("--inside", help="Call, as ncu watches.", hidden=True)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> None:
    """Profile casts by Nsight Compute."""
    import bench_gpu

    chosen, sides = bench_gpu.known(calls, tuple(CALLS), "--calls"), bench_gpu.sizes(shape)
    if inside:
        called(chosen, sides)
        return
    if shutil.which("ncu") is None:
        sys.exit("ncu_casts: ncu is not on the path; it comes with NVIDIA Nsight Compute.")
    bench_gpu.check_device("cuda")
    rows = [{"call": name, "elements": sides[0] * sides[1], **kernel} for name in chosen for kernel in profiled(name, shape)]
    result: dict[str, Any] = {"benchmark": "gpu-casts-profile", "schema": common.SCHEMA, "provenance": bench_gpu.where("cuda")}
    tables.tell(json.loads(json.dumps({**result, "options": {"shape": sides}, "rows": rows})), out, as_json)


if __name__ == "__main__":
    app()
