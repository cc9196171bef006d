"""Time of `breccia convert` for a checkpoint of BF16, beside a copy of the file, and what a run consists of.

Each run is a process of its own, whose times include its start. Source and destination are on one disk; the source is in memory
after the first run. Runs of all arms take turns. `--profile` prints the functions that take longest, without threads.
"""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer
from harness import Benchmark, Result, Table, known, program, progress, summary, table

import breccia

RECIPES = ("nvfp4", "int4", "fp8_block")
SIDE = 4096
COPY = "cp"


def speeds(result: Result) -> Table:
    size = result["options"]["bytes"]

    def rate(arm: str, what: str) -> Callable[[Any], str]:
        return lambda row: f"{size / row[what][arm]['median_s'] / 1e6:,.0f}"

    columns: dict[str, Any] = {"recipe": "recipe"}
    for arm in ("breccia", COPY):
        columns[f"{arm}, MB/s"] = rate(arm, "time")
    columns["seconds"] = lambda row: f"{row['time']['breccia']['median_s']:.2f}"
    columns["of the processors"] = lambda row: f"{row['cpu']['breccia']['median_s']:.2f}"
    note = f"Medians; MB of the source, {size / 1e6:,.0f} MB of BF16, by second of the clock. Seconds of both cores are added."
    return table("convert", columns, result["rows"], note)


BENCHMARK = Benchmark("convert", {"convert": speeds})


def made(path: Path, matrices: int, side: int) -> None:
    """Write a checkpoint of so many square matrices of normal numbers in BF16."""
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for n in range(matrices):
        numbers = rng.standard_normal((side, side), np.float32) * np.float32(0.02)
        tensors[f"model.layers.{n}.mlp.up_proj.weight"] = numbers.astype(ml_dtypes.bfloat16)
    breccia.bridges.save_safetensors(tensors, path)


def spent(command: list[str]) -> tuple[float, float]:
    """(seconds of the clock, seconds of the processors) of a program."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    taken, after = time.perf_counter() - start, os.times()
    return taken, after.children_user + after.children_system - before.children_user - before.children_system


def profiled(source: Path, destination: Path, recipe: str, lines: int = 16) -> str:
    """The functions of a run that take longest, by their own time."""
    breccia.set_num_threads(1)  # what other threads do is not profiled
    profile = cProfile.Profile()
    profile.runcall(breccia.bridges.convert, source, destination, recipe, force=True)
    said = io.StringIO()
    pstats.Stats(profile, stream=said).strip_dirs().sort_stats("tottime").print_stats(lines)
    return said.getvalue()


def _command(source: Path, destination: Path, recipe: str) -> list[str]:
    words = ["convert", str(source), str(destination), "--recipe", recipe, "--force"]
    return [sys.executable, "-m", "breccia", *words]


@program
def main(
    matrices: Annotated[int, typer.Option(min=1, help="Square matrices of the source.")] = 16,
    side: Annotated[int, typer.Option(min=128, help="Rows and columns of each.")] = SIDE,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 5,
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes; repeat for several.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the files are written; a temporary folder by default.")] = None,
    profile: Annotated[bool, typer.Option(help="Print where time goes, and measure nothing.")] = False,
) -> Result | None:
    """Time of convert, fully verified, beside a copy."""
    chosen = known(recipes, RECIPES, "--recipes")
    with tempfile.TemporaryDirectory(dir=folder) as where:
        source, destination = Path(where, "source.safetensors"), Path(where, "destination.safetensors")
        made(source, matrices, side)
        if profile:
            for recipe in chosen:
                print(f"{recipe}\n{profiled(source, destination, recipe)}")
            return None
        arms = {recipe: _command(source, destination, recipe) for recipe in chosen}
        arms[COPY] = [shutil.which("cp") or COPY, str(source), str(destination)]
        taken: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
        for _ in progress(range(runs), "runs"):
            for arm, command in arms.items():
                taken[arm].append(spent(command))
        size = source.stat().st_size
    found = {arm: [summary(column) for column in zip(*samples, strict=True)] for arm, samples in taken.items()}
    rows = [
        {"recipe": recipe}
        | {what: {"breccia": found[recipe][n], COPY: found[COPY][n]} for n, what in enumerate(("time", "cpu"))}
        for recipe in chosen
    ]
    return BENCHMARK.result(rows, {"bytes": size, "matrices": matrices, "side": side})
