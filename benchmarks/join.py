"""Join results of one benchmark and device, where one run did not have the time for all rows.

A row of a later file replaces the same row of an earlier one; no row is mixed from two runs, and pages name every run.
`--table` writes the measured times by which kernels are chosen. `--configs` merges the configurations that
`bench_weight_only.py --tune` found into the file of their device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import bench_board  # noqa: F401  # declares its benchmark
import bench_decoder  # noqa: F401
import bench_encoder  # noqa: F401
import bench_first_call  # noqa: F401
import bench_generation  # noqa: F401
import bench_gpu_casts  # noqa: F401
import bench_gpu_gpt  # noqa: F401
import bench_gpu_host  # noqa: F401
import bench_matmul
import bench_scale_search  # noqa: F401
import bench_target_bits  # noqa: F401
import bench_weight_only
import typer
from harness import BENCHMARKS, joined, read, save

SLOWDOWNS = {"gpu-weight-only": bench_weight_only.slowdowns, "matmul-gpu": bench_matmul.slowdowns}


def merge_configs(result: dict[str, Any], folder: Path) -> None:
    """Merge the configurations of a result into the file of its device."""
    from breccia_triton.gemm.weight_only import plans as weight_plans
    from breccia_triton.tuning import measurements

    run = result["runs"][-1]
    device = run["device"].partition(",")[0]
    target = folder / measurements.shipped("weight_only", device).name
    entries = result.get("configs", {})
    for entry in entries.values():
        weight_plans.config_from(entry)  # raises for one without a kernel
    measurements.merge(target, device, entries, run)
    print(f"{target}: {len(entries)} configurations merged")


def main(
    files: Annotated[list[Path], typer.Argument(help="Results, the newest last.")],
    out: Annotated[Path, typer.Option(help="Folder for the joined result.")],
    table: Annotated[Path | None, typer.Option(help="Write the times by which kernels are chosen to this file.")] = None,
    configs: Annotated[Path | None, typer.Option(help="Folder of configurations to merge those of the results into.")] = None,
) -> None:
    """Join results of one benchmark and device."""
    results = [read(path) for path in files]
    name = results[0]["benchmark"]
    keys = {name: benchmark.key for name, benchmark in BENCHMARKS.items() if benchmark.key}
    if name not in keys or (table and name not in SLOWDOWNS):
        sys.exit(f"join: takes results of {', '.join(SLOWDOWNS if table else keys)}; got {name!r}.")
    made = joined(results, keys[name])
    print(f"{len(made['rows'])} rows of {len(made['runs'])} run(s): {save(made, out)}")
    if configs is not None:
        for result in results:
            merge_configs(result, configs)
    if table is not None:
        bench_matmul.write_table(table, made, SLOWDOWNS[name])


if __name__ == "__main__":
    typer.run(main)
