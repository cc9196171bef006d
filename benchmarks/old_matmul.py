"""Time products of breccia 0.1.3 with one scale per tensor, autotuned, in a process that imports that version.

    python benchmarks/old_matmul.py --shapes 4096x4096x4096 [--samples 3]

bench_matmul.py runs it. That version reads scales on the host at each call, so a CUDA graph cannot capture it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Annotated, Any

import bench_gpu
import common
import typer
from fp8_checks import WRONG
from rivals import OLD_VERSION


def measured(m: int, n: int, k: int, samples: int) -> dict[str, Any]:
    """Seconds of a call, under load, by CUDA events. Raises ValueError if the product is wrong."""
    import torch

    import breccia
    from breccia.kernels.triton import scaled_matmul_triton  # pyright: ignore[reportAttributeAccessIssue]

    generator = torch.Generator("cuda").manual_seed(0)
    x, y = (torch.randn(rows, k, device="cuda", generator=generator, dtype=torch.bfloat16) for rows in (m, n))
    recipe = breccia.Float8CurrentScaling()
    a, w = (breccia.cast(z, recipe) for z in (x, y * 0.02))
    b = dataclasses.replace(w, data=w.data.t())

    def call() -> Any:
        return scaled_matmul_triton(a, b, out_dtype=torch.bfloat16, autotune=True)

    exact = (a.data[:64].double() * a.scale.double()) @ (w.data.double() * w.scale.double()).t()
    error = ((call()[:64].double() - exact).norm() / exact.norm()).item()
    if not error < WRONG:
        raise ValueError(f"the relative error is {error:.3g}")
    timer = bench_gpu.Timer(call, calls=bench_gpu.SAMPLE_CALLS)
    bench_gpu.load("cuda")
    for _ in range(samples):
        timer.sample("cuda")
    return {"device": common.summary(timer.seconds)}


def main(
    shapes: Annotated[list[str], typer.Option(help="Products, MxNxK; repeatable.")],
    samples: Annotated[int, typer.Option(min=1, help="Samples of each product.")] = 3,
    seconds: Annotated[float, typer.Option(help="Start no product after this many seconds.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Accepted and ignored: the output is always JSON.")] = True,
) -> None:
    """Print the times by shape as JSON."""
    import breccia

    if breccia.__version__ != OLD_VERSION:
        sys.exit(f"old_matmul: it times breccia {OLD_VERSION}, but `import breccia` gives {breccia.__version__}.")
    found: dict[str, Any] = {}
    started = time.monotonic()
    # If a side is not a multiple of 256, the kernel reads out of bounds, which may end the process: such shapes come last.
    for shape in sorted(shapes, key=lambda text: any(int(side) % 256 for side in text.split("x"))):
        if time.monotonic() - started > seconds:
            break
        m, n, k = map(int, shape.split("x"))
        try:
            found[shape] = measured(m, n, k, samples)
        except Exception as e:  # one shape that fails must not stop the rest
            found[shape] = {"error": bench_gpu.message(e)}
    print(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)
