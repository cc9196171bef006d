"""Run products of codes that are decoded to memory (breccia_triton/gemm/weight_only/decoded.py) on a GPU.

First whether they are right, then how long they take.

    python tests/gpu/decoded.py [--seconds 340] [--skip-fp8] [--only 256x128]

Every tile runs in a process of its own, so that a kernel that hangs or faults stops only its lines; so does each weight that is
timed. FP8 products share the source, and run too (tests/gpu/fp8_matmul.py). The table of times comes last: microseconds of
cuBLAS in BF16, of the kernel that is chosen by default, and of the fastest tile, with its speed relative to both.
tests/triton/gemm/weight_only/test_decoded_cuda.py tests the same products.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: N, K, rows of x: around tiles; one row; a part of a step; K long enough for every stage of the ring.
CASES = ((256, 512, 256), (328, 648, 300), (70, 200, 17), (192, 3072, 64), (1000, 1152, 1000), (128, 4096, 1), (72, 136, 130))
#: A format of each form of scales.
FORMS = ("int8-row", "int4-128", "int4-64", "uint4", "int4-16")
#: Weights, rows of x and recipes that are timed.
WEIGHTS = ((8192, 8192), (28672, 8192), (8192, 28672))
ROWS = (256, 512, 1024, 2048, 4096)
RECIPES = ("int4,group_size=128", "int4,group_size=32", "fp8_block,block_m=128", "nvfp4")
#: Tiles that are timed.
TILES = ("256x128", "128x192", "192x128", "128x128")
SIDES = 8  # programs at a time while results are checked
DEFAULT, ALL = "chosen", "formats"


def tile_named(name: str) -> Any:
    """The tile, or None for `ALL`."""
    from breccia_triton.gemm.fp8 import plans as fp8_plans

    return next((tile for tile in fp8_plans.TABLE if tile.name == name), None)


# -- whether products are right ---------------------------------------------------------------------------------------


def names() -> list[str]:
    from breccia_triton.gemm.fp8 import plans as fp8_plans

    return [ALL, *(tile.name for tile in fp8_plans.TABLE)]


def error_of(found: Any, x: Any, values: Any, bias: Any) -> float:
    """The largest error over the bound of the contract; NaN for NaN and for a wrong scale."""
    k = x.shape[-1]
    exact, size = x.double() @ values.mT + bias.double(), x.double().abs() @ values.mT.abs() + bias.double().abs()
    bound = (k + 1) * 2.0**-24 / (1 - (k + 1) * 2.0**-24) * size
    if found.element_size() == 2:
        bound = bound + 2.0**-8 * (exact.abs() + bound)
    if found.isnan().any() or (found.double() - exact).norm() > 0.01 * exact.norm():
        return float("nan")
    return ((found.double() - exact).abs() / bound.clamp(min=1e-300)).max().item()


def relative_error(found: Any, exact: Any) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def one_tile(name: str) -> None:
    """Print a line for each product. name: of a tile; or `ALL`: every format, by the tile that is chosen."""
    import numpy as np
    import torch
    from weights import FORMATS, in_torch, tensor

    from breccia.backend import reference
    from breccia_triton.gemm.weight_only.decoded import decoded_codes
    from breccia_triton.gemm.weight_only.problem import Problem

    tile = tile_named(name)
    torch.manual_seed(0)
    waiting: list[Any] = []
    for format_ in FORMATS if name == ALL else FORMS:
        for n, k, m in CASES[1:3] if name == ALL else CASES:
            st = tensor(format_, n, k)
            values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
            w = in_torch(st, "cuda").to_storage("mma_16x128").mT
            x = (torch.randn(m, k, device="cuda") * torch.exp2(torch.randint(-3, 3, (m, k), device="cuda"))).bfloat16()
            bias = torch.randn(n, device="cuda") * 10
            for dtype, added in (("bfloat16", None), ("float32", bias)):
                problem = Problem.of(x, w, added, dtype)
                waiting.append((f"{format_} {m}x{n}x{k} {dtype}", problem, x, w, added, values))
    compile_all((problem, decoded_codes(problem, tile)) for _, problem, *_ in waiting)
    for what, problem, x, w, added, values in waiting:
        try:
            found = decoded_codes(problem, tile)(x, w, added, None)
            torch.cuda.synchronize()
            error = error_of(found, x, values, torch.zeros(len(values), device="cuda") if added is None else added)
            print(f"{'ok ' if error <= 1 else 'BAD'} {name}: {what}: {error:.3g}", flush=True)
        except Exception as e:
            print(f"BAD {name}: {what}: {type(e).__name__}: {str(e)[:300]}".replace("\n", " "), flush=True)
            if "CUDA" in str(e):
                raise SystemExit(1) from e
    print("done", flush=True)


def compile_all(products: Iterable[tuple[Any, Any]]) -> None:
    """Compile the kernels of (problem, executable) side by side, into the cache on disk."""
    import torch

    from breccia_triton.gemm.fp8 import matmul as fp8_matmul
    from breccia_triton.launch import compiler

    nvrtc = compiler.nvrtc(int((torch.version.cuda or "13").partition(".")[0]))

    def one(variant: Any) -> None:
        source = fp8_matmul.source_of(variant.tile.columns, variant.codecs)
        compiler.cubin(source, "sm_90a", variant.macros, nvrtc)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, {variant_of(*each) for each in products}))


def variant_of(problem: Any, executable: Any) -> Any:
    """The variant of a product that allocates its result."""
    from breccia_triton.gemm.weight_only import plans as weight_plans

    staged = executable.dtype.itemsize == 2 and problem.n % 8 == 0
    return weight_plans.variant_of(*executable.plan, problem.out, problem.bias, staged)


# -- how long they take -----------------------------------------------------------------------------------------------


def times_of(spec: str, n: int, k: int) -> None:
    """Print a line of the table for each number of rows."""
    sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
    import torch
    from bench_weight_only import Products, weight_of

    import breccia
    from breccia_triton.gemm.weight_only.decoded import decoded_codes
    from breccia_triton.gemm.weight_only.problem import Problem

    weight = weight_of(spec, n, k, "cuda", rivals=False)
    weights = [st.mT for st in weight.copies]
    tiles = [tile_named(name) for name in TILES]
    for m in ROWS:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        products: dict[str, Any] = {}
        problem = Problem.of(x, weights[0], None, "bfloat16")
        for tile in tiles:
            products[tile.name] = decoded_codes(problem, tile)
        compile_all((problem, call) for call in products.values())
        row = Products(x, weight.values, [m])
        row.add("bf16", lambda w, row=row: torch.mm(row.x, w.t(), out=row.y), weight.bf16)
        row.add("now", lambda w, row=row: breccia.matmul(row.x, w, torch.bfloat16, out=row.y), weights)
        for label, call in products.items():
            row.add(label, lambda w, row=row, call=call: call(row.x, w, None, row.y), weights)
        measures = row.measures(5)
        found = {label: 1e6 * times["median_s"] for label, times in measures["time"].items()}
        wrong = [f"{label}: {why}" for label, why in measures.get("errors", {}).items()]
        line = f"{spec:22} {n:5}x{k:5} M={m:4}  bf16 {found['bf16']:7.1f}  now {found.get('now', float('nan')):7.1f}"
        best = min((label for label in found if label in products), key=found.__getitem__, default=None)
        if best is not None:
            ratios = f"{found['bf16'] / found[best]:.2f}, {found.get('now', 0) / found[best]:.2f}"
            line += f"  {found[best]:7.1f} [{best}] ({ratios})"
        print(f"ROW {line}", flush=True)
        others = sorted((t, label) for label, t in found.items() if label in products)
        print("  ".join(f"{label} {t:.1f}" for t, label in others), *wrong, flush=True)
    print("done", flush=True)


# -- processes --------------------------------------------------------------------------------------------------------


def run(arguments: list[str], seconds: float) -> tuple[list[str], str]:
    """(What a process of this file printed, how it ended where that was not the end)."""
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path[1:], str(HERE), str(HERE.parent / "tools")])}
        process = subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            process.wait(timeout=max(1.0, seconds))
            ended = ""
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"STOPPED after {seconds:.0f} s"
        log.seek(0)
        lines = log.read().splitlines()
    return lines, ended or ("" if process.returncode == 0 else f"ENDED with status {process.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=340.0, help="time limit of the whole run")
    parser.add_argument("--skip-fp8", action="store_true", help="leave out FP8 products, which use the same source")
    parser.add_argument("--only", default="", help="check only tiles whose name starts with this")
    parser.add_argument("--tile", help=argparse.SUPPRESS)
    parser.add_argument("--times", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tile:
        one_tile(given.tile)
        return 0
    if given.times:
        times_of(given.times[0], int(given.times[1]), int(given.times[2]))
        return 0
    until, wrong, right = time.monotonic() + given.seconds, 0, 0
    with ThreadPoolExecutor(SIDES) as pool:
        started = {name: pool.submit(run, [__file__, "--tile", name], 90.0) for name in names() if name.startswith(given.only)}
        for name, future in started.items():
            lines, ended = future.result()
            bad = [line for line in lines if line.startswith("BAD")]
            good = sum(line.startswith("ok ") for line in lines)
            right, wrong = right + good, wrong + len(bad) + bool(ended)
            print(
                "\n".join([f"{name:16} {good:4} ok {len(bad):4} bad {ended}", *bad[:6], *(lines[-6:] if ended else [])]),
                flush=True,
            )
    print(f"products: {right} right, {wrong} wrong; {until - time.monotonic():.0f} s left", flush=True)
    if not given.skip_fp8:
        lines, ended = run([str(HERE / "fp8_matmul.py"), "60"], min(110.0, until - time.monotonic()))
        print("\n".join(["FP8 products, of the same source:", *lines[-14:], ended]), flush=True)
        wrong += bool(ended)
    table: list[str] = []
    for n, k in WEIGHTS:
        for spec in RECIPES:
            left = until - time.monotonic()
            if left < 10:
                print(f"left out: {spec} {n}x{k}", flush=True)
                continue
            lines, ended = run([__file__, "--times", spec, str(n), str(k)], min(60.0, left))
            table += [line.removeprefix("ROW ") for line in lines if line.startswith("ROW ")]
            print("\n".join([f"{spec} {n}x{k} {ended}", *(line for line in lines if not line.startswith("ROW "))]), flush=True)
    head = "microseconds of a product in a CUDA graph, medians of 5, interleaved; in brackets times faster than bf16, than now"
    print("\n".join(["", head, *table]))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
