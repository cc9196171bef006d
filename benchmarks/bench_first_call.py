"""Time of the first call of a kernel in a process, with and without kernels that an earlier process compiled.

Processes are forked from one that has imported torch, Triton and breccia, but not breccia-triton, and has not initialized the
device. The first process of a call starts with an empty cache on disk; the others find the kernels that it compiled.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import ABSENT, Benchmark, Device, Result, Table, failures, known, program, progress, spread, summary, table
from harness.device import Call, message, synchronize, where
from plain import TILES

import breccia

#: Rows and columns of the operands, and rows of activations.
SIDE, FEW = 4096, 16
#: The calls, by name: the op and recipes. "to" is what is requantized to, or the recipe of the second factor.
CALLS: dict[str, tuple[str, str, str]] = {
    "cast fp8_block": ("cast", "fp8_block", ""),
    "cast fp8_current": ("cast", "fp8_current", ""),
    "cast nvfp4": ("cast", "nvfp4", ""),
    "cast_ste fp8_block": ("cast_ste", "fp8_block", ""),
    "cast_pair fp8_block": ("cast_pair", "fp8_block", ""),
    "cast_pair nvfp4": ("cast_pair", "nvfp4", ""),
    "dequantize nvfp4": ("dequantize", "nvfp4", ""),
    "requantize fp8_block to mxfp8": ("requantize", "fp8_block", "mxfp8"),
    "requantize 128x128 tiles to fp8_block": ("requantize", TILES, "fp8_block"),
    "matmul fp8_block by 128x128 tiles": ("matmul", "fp8_block", TILES),
    "matmul fp8_row by fp8_row": ("matmul", "fp8_row", "fp8_row"),
    "matmul bf16 by int4": ("matmul", "", "int4"),
    "matmul bf16 by nvfp4": ("matmul", "", "nvfp4"),
}
#: The goal: seconds of a first call with a filled cache on disk.
FIRST_CALL_S = 0.3


def first_calls(result: Result) -> Table:
    rows = result["rows"]
    columns: dict[str, Any] = {"call": "call", "kernel": lambda row: row.get("kernel", ABSENT)}
    for heading, arm in (("empty cache", "cold"), ("filled cache", "warm"), ("second call", "again")):
        columns[f"{heading}, ms"] = lambda row, arm=arm: spread(row["time"].get(arm), 1e3)
    met = sum("warm" in row["time"] and row["time"]["warm"]["median_s"] <= FIRST_CALL_S for row in rows)
    note = (
        "Milliseconds, min / median / max, each in a process of its own, after the device and the libraries have been "
        "initialized: the first call of a kernel, and the second. Empty: without a cache of compiled kernels, one process. "
        f"Filled: {result['options']['processes']} processes that find what another compiled. Within {1e3 * FIRST_CALL_S:g} ms "
        f"with a filled cache: {met} of {len(rows)}."
    )
    note += failures((row["call"], row["error"], "in its own process") for row in rows if "error" in row)
    return table("first calls", columns, rows, note)


BENCHMARK = Benchmark("gpu-first-call", {"gpu-first-call": first_calls}, key=("call",))


def made(name: str, device: str, side: int) -> tuple[Call, Callable[[], str]]:
    """(the call, a function that names the kernel that runs). Operands are written by the generic algorithm."""
    op, spec, to = CALLS[name]
    x = torch.randn(side, side, device=device).to(torch.bfloat16)
    recipe, other = (breccia.recipe(text) if text else None for text in (spec, to))

    def written(chosen: Any) -> Any:
        return breccia.cast(x, chosen, prefer="reference.cast")

    function = getattr(breccia, op)
    operands: list[Any] = [x, recipe]
    options: dict[str, Any] = {}
    if op == "dequantize":
        operands, options = [written(recipe)], {"out_dtype": "bfloat16"}
    elif op == "requantize":
        operands = [written(recipe), other]
    elif op == "matmul":
        weight = written(other)
        if not spec and device == "cuda":
            weight = weight.to_storage("mma_16x128")  # as layers in evaluation mode hold it
        operands, options = [written(recipe) if spec else x[:FEW], weight.mT], {"out_dtype": "bfloat16"}
    return lambda: function(*operands, **options), lambda: breccia.explain(op, *operands, **options).running


def measured(name: str, device: str, side: int, caches: Path, results: Any) -> None:
    """Put (seconds of both calls, the kernel) or an error message into `results`. It runs in a process of its own."""
    os.environ |= {"TRITON_CACHE_DIR": f"{caches}/triton", "XDG_CACHE_HOME": f"{caches}"}
    try:
        call, kernel = made(name, device, side)
        seconds: list[float] = []
        for _ in range(2):
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        results.put((seconds, kernel()))  # `explain` comes last: it imports modules that the first call imports
    except Exception as e:  # the parent records it, and measures the other calls
        results.put(message(e))


def forked(function: Callable[..., None], *arguments: Any) -> Any:
    """What a function puts into the queue that is its last argument, in a forked process; None if that ends without."""
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    process = fork.Process(target=function, args=(*arguments, results))
    process.start()
    process.join()
    return None if results.empty() else results.get()


def row_of(name: str, device: str, side: int, processes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"call": name, "time": {}}
    taken: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + processes):
            found = forked(measured, name, device, side, Path(folder))
            if found is None or isinstance(found, str):
                return {**row, "error": found or "the process ended"}
            seconds, row["kernel"] = found
            taken.append(seconds)
    cold, warm = taken[0], taken[1:]
    times = {"cold": [cold[0]], "warm": [first for first, _ in warm], "again": [second for _, second in warm]}
    return {**row, "time": {arm: summary(seconds) for arm, seconds in times.items()}}


@program
def main(
    calls: Annotated[list[str] | None, typer.Option(help='By name, such as "cast nvfp4"; repeatable. Default: all.')] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes with a filled cache, after one with an empty cache.")] = 3,
    side: Annotated[int, typer.Option(help="Rows and columns of the operands.")] = SIDE,
    device: Device = "cuda",
) -> Result:
    """Time first calls of kernels, with an empty and with a filled cache."""
    chosen = known(calls, CALLS, "--calls")
    known([device], ("cuda", "cpu"), "--device")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or `is_available` initializes CUDA, after which no fork can use it
    for library in ("torch", "breccia_torch", *(("triton",) if device == "cuda" else ())):
        import_module(library)
    provenance = forked(lambda results: results.put(where(device)))  # it initializes the device
    rows = [row_of(name, device, side, processes) for name in progress(chosen, "calls")]
    return BENCHMARK.result(rows, {"device": device, "side": side, "processes": processes}, provenance)
