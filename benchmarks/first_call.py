"""Time of the first call of a kernel in a process, with and without kernels that an earlier process compiled.

    python benchmarks/first_call.py [--calls "cast nvfp4"] [--processes 3] [--out RESULTS]

Each call runs in processes of its own, which initialize the device, make the operands by the generic algorithm, and call twice.
The first process of a call starts with an empty cache on disk; the others find the kernels that it compiled. Processes are
forked from one that has imported torch, Triton and breccia, but not breccia-triton, and has not initialized the device.

`--device cpu` tries the script without a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import common
import tables
import typer
from rivals import TILES

Call = Callable[[], object]
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

app = typer.Typer(add_completion=False)


def made(name: str, device: str, side: int) -> tuple[Call, Callable[[], str]]:
    """(the call, a function that names the kernel that runs). Operands are written by the generic algorithm."""
    import torch

    import breccia

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
        import torch

        done = torch.cuda.synchronize if device == "cuda" else lambda: None
        call, kernel = made(name, device, side)
        seconds: list[float] = []
        for _ in range(2):
            done()
            start = time.perf_counter()
            call()
            done()
            seconds.append(time.perf_counter() - start)
        results.put((seconds, kernel()))  # `explain` comes last: it imports modules that the first call imports
    except Exception as e:  # the parent records it, and measures the other calls
        results.put(f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}")


def row_of(name: str, device: str, side: int, processes: int) -> dict[str, Any]:
    """The times of one call in all its processes."""
    fork = multiprocessing.get_context("fork")
    row: dict[str, Any] = {"call": name}
    taken: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + processes):
            results = fork.SimpleQueue()
            process = fork.Process(target=measured, args=(name, device, side, Path(folder), results))
            process.start()
            process.join()
            found = f"the process ended with {process.exitcode}" if results.empty() else results.get()
            if isinstance(found, str):
                return {**row, "error": found}
            seconds, row["kernel"] = found
            taken.append(seconds)
    row["cold"], row["warm"] = common.summary([taken[0][0]]), common.summary([first for first, _ in taken[1:]])
    row["again"] = common.summary([second for _, second in taken[1:]])
    return row


def where(device: str) -> dict[str, Any]:
    """`bench_gpu.where`, in a process of its own, since it initializes the device."""
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()

    def look() -> None:
        import bench_gpu

        results.put(bench_gpu.where(device))

    process = fork.Process(target=look)
    process.start()
    process.join()
    return results.get()


@app.command()
def main(
    calls: Annotated[
        list[str] | None, typer.Option(help='Calls by name, such as "cast nvfp4"; repeat for several. Default: all.')
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes with a filled cache, after one with an empty cache.")] = 3,
    side: Annotated[int, typer.Option(help="Rows and columns of the operands.")] = SIDE,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the script.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> None:
    """Time first calls of kernels, with an empty and with a filled cache."""
    from importlib import import_module

    import bench_gpu

    chosen = bench_gpu.known(calls, tuple(CALLS), "--calls")
    if device not in ("cpu", "cuda"):
        sys.exit(f"first_call: --device takes cuda or cpu; got {device!r}.")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or `is_available` initializes CUDA, after which no fork can use it
    for library in ("torch", "breccia_torch", *(("triton",) if device == "cuda" else ())):
        import_module(library)
    provenance = where(device)
    rows = [row_of(name, device, side, processes) for name in chosen]
    result: dict[str, Any] = {"benchmark": "gpu-first-call", "schema": common.SCHEMA, "provenance": provenance}
    tables.tell({**result, "options": {"device": device, "side": side, "processes": processes}, "rows": rows}, out, as_json)


if __name__ == "__main__":
    app()
