"""What bounds casts on an NVIDIA GPU, counted by Nsight Compute: time, bytes of memory, issue slots, registers.

Needs `ncu`, and the right to read performance counters. Clocks are left as they are; caches are flushed before each kernel.
"""

from __future__ import annotations

import csv
import shutil
from typing import Annotated, Any

import torch
import typer
from bench_gpu_casts import matrices, work
from harness import Benchmark, Result, Table, apart, known, program, progress, refuse, sides, sizes, table, three
from harness.device import check_device, where

#: Calls by name: casts that are bound by instructions or by several passes over memory, according to the tables of casts.
CALLS = (
    *("cast nvfp4,two_level=false", "cast-axis-2 nvfp4", "cast_pair fp8_block", "cast-axis-2 fp8_row"),
    *("cast mxfp6", "cast nf4"),
)
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


def profile(result: Result) -> Table:
    def percent(metric: str) -> Any:
        return lambda row: f"{row[metric]:.0f} %"

    columns = {
        "call": "call",
        "kernel": "kernel",
        "µs": lambda row: three(1e6 * row["seconds"]),
        "bytes of DRAM for each number": lambda row: f"{row['dram_bytes'] / row['elements']:.2f}",
        "DRAM": percent("dram"),
        "issue slots": percent("issue"),
        "integer pipe": percent("alu"),
        "warps": percent("warps"),
        "registers": lambda row: f"{row['registers']:.0f}",
    }
    clocks = [row["clock"] / 1e6 for row in result["rows"]]
    note = (
        f"{sides(result['options']['shape'])} BF16, by Nsight Compute, with caches flushed before each kernel and clocks as "
        f"they are ({min(clocks):.0f} to {max(clocks):.0f} MHz). Percent of the peak, of the time (DRAM) or of active cycles."
    )
    return table("profile of casts", columns, result["rows"], note)


BENCHMARK = Benchmark("gpu-casts-profile", {"gpu-casts-profile": profile})


def called(name: str, shape: list[int]) -> None:
    """Call twice and profile the second call. It runs in the process that ncu watches."""
    op, spec = name.split()
    call = work(op, spec, matrices(tuple(shape), "bfloat16", "cuda")[:1]).call
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
        refuse("ncu printed no kernels: " + " ".join(line for line in lines if line.startswith("=="))[:500])
    rows = list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))

    def number(row: dict[str, str], metric: str) -> float:
        return float(row[metric].replace(",", ""))

    found: list[dict[str, Any]] = []
    for row in rows[1:]:  # the first row has the units
        metrics = {name: number(row, metric) for name, metric in METRICS.items()}
        found.append({"kernel": row["Kernel Name"].partition("(")[0], **metrics, "seconds": metrics["seconds"] * NANOSECONDS})
    return found


@program
def main(
    calls: Annotated[list[str] | None, typer.Option(help=f"{', '.join(CALLS)}; repeat for several. Default: all.")] = None,
    shape: Annotated[str, typer.Option(help="Shape of the matrix, ROWSxCOLUMNS.")] = "16384x8192",
) -> Result:
    """Profile casts by Nsight Compute."""
    chosen, lengths = known(calls, CALLS, "--calls"), sizes(shape)
    if shutil.which("ncu") is None:
        refuse("ncu is not on the path; it comes with NVIDIA Nsight Compute.")
    check_device("cuda")
    ncu = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base"]
    ncu += ["--metrics", ",".join(METRICS.values()), "--target-processes", "all"]
    rows: list[dict[str, Any]] = []
    for name in progress(chosen, "calls"):
        kernels = read(apart("bench_ncu:called", name, lengths, prefix=ncu))
        rows += [{"call": name, "elements": lengths[0] * lengths[1], **kernel} for kernel in kernels]
    return BENCHMARK.result(rows, {"shape": lengths}, where("cuda"))
