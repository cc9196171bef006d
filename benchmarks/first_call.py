"""Milliseconds of the first calls of a process, with kernels that an earlier process compiled, and without.

    python benchmarks/first_call.py [--recipe nvfp4] [--processes 5]

Needs a CUDA device. The first process compiles into an empty cache; the others find its kernels on disk. The times are those of
imports, of the first cast, of the first cast under another recipe, and of the second one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Annotated

import typer

SCRIPT = """
import json, sys, time
times, start = {}, time.perf_counter()

def lap(name):
    global start
    torch.cuda.synchronize()
    now = time.perf_counter()
    times[name], start = round((now - start) * 1e3, 1), now

import torch
x = torch.ones((4096, 4096), device="cuda", dtype=torch.bfloat16)
lap("torch and CUDA")
import breccia, breccia_torch
recipe, other = breccia.recipe(sys.argv[1]), breccia.recipe("mxfp8")
lap("breccia")
import triton
lap("triton")
breccia.cast(x, recipe)
lap("first call")
breccia.cast(x, other)
lap("first call of another kernel")
breccia.cast(x, recipe)
lap("second call")
print(json.dumps(times))
"""

app = typer.Typer(add_completion=False)


@app.command()
def main(
    recipe: Annotated[str, typer.Option(help="Recipe by name or spec.")] = "fp8_block",
    processes: Annotated[int, typer.Option(min=2, help="The first has an empty cache.")] = 5,
) -> None:
    """Measure the first calls of processes."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": folder}
        for n in range(processes):
            done = subprocess.run([sys.executable, "-c", SCRIPT, recipe], capture_output=True, text=True, env=environment)
            if done.returncode:
                sys.exit(f"first_call: a process failed: {done.stderr.strip().splitlines()[-1]}")
            times = json.loads(done.stdout)
            cells = "  ".join(f"{name} {ms} ms" for name, ms in times.items())
            print(f"{'warm' if n else 'cold'}: {cells}")


if __name__ == "__main__":
    app()
