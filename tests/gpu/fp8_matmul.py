"""Run every tile of the FP8 products on a GPU, each in a process of its own: a kernel that hangs or faults stops only its row.

    python tests/gpu/fp8_matmul.py [SECONDS for each tile]

tests/triton/gemm/fp8/test_matmul_cuda.py tests the products through the public interface; this is for new kernels and
new devices.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: M, N, K: around tiles, one row, partial steps, K long enough for every stage of the ring.
SHAPES = (
    (256, 256, 1024),
    (300, 264, 640),
    (64, 224, 4096),
    (1000, 1000, 1152),
    (5, 77, 272),
    (128, 2112, 2048),
    (1, 128, 256),
)
#: Products in a row of one shape: blocks of a cluster end in any order, and a wrong order shows once in thousands.
REPEATS = 300
GROUPS = ((5, 0, 40, 3), (300, 200, 1, 500), (100, 60, 90, 130), (0, 0, 0, 0))
SIDES = 6  # programs at a time


def names() -> list[str]:
    from breccia_triton.gemm.fp8 import plans as fp8_plans

    return [*(tile.name for tile in fp8_plans.TABLE), "256x128 short", "fast", "grouped", "torch"]


def error_of(found: Any, a: Any, b: Any) -> float:
    """The largest error over the bound of the contract; at least 1 for NaN and for a wrong scale."""
    import breccia
    from breccia.kernels import bounds

    x, y = (breccia.dequantize(st).double() for st in (a, b))
    product, size = x @ y, x.abs() @ y.abs()
    bound = bounds.accumulated(size, a.shape[-1], a.shape[-1], True)
    bound = bound + (2.0**-8 * (product.abs() + bound) if found.element_size() == 2 else 0.0)
    if found.isnan().any() or ((found.double() - product).norm() / product.norm()) > 0.01:
        return float("nan")
    return ((found.double() - product).abs() / bound.clamp(min=1e-300)).max().item()


def one_tile(name: str) -> None:
    """Print a line for each product."""
    import torch

    import breccia
    from breccia.backend import product_options
    from breccia_triton.gemm.fp8 import matmul as fp8_matmul
    from breccia_triton.gemm.fp8 import plans as fp8_plans

    block, row, tensor = (breccia.recipe(spec) for spec in ("fp8_block", "fp8_row", "fp8_current"))
    pairs = {"tensor": (tensor, tensor), "row": (row, row), "tiles": (block, breccia.recipe("fp8_block,block_m=128"))}
    pairs["blocks"] = (block, block)
    pairs["mx"] = (breccia.recipe("mxfp8"), breccia.recipe("mxfp8"))
    tiles = [*fp8_plans.TABLE, fp8_plans.short(fp8_plans.TABLE[0], 8)]
    tile = next((tile for tile in tiles if tile.name == name), None)
    if tile is not None:
        fp8_matmul.tile_of = lambda *shape: tile  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(0)

    def numbers(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda") * torch.exp2(torch.randint(-4, 4, (*shape[:-1], 1), device="cuda"))

    def repeated(a: Any, b: Any, options: Any) -> Any:
        for _ in range(REPEATS - 1):
            fp8_matmul.matmul(a, b, options)
        return fp8_matmul.matmul(a, b, options)

    def tell(what: str, compute: Any, a: Any, b: Any) -> None:
        try:
            found = compute()
            torch.cuda.synchronize()
            error = error_of(found, a, b)
            print(f"{'ok ' if error <= 1 else 'BAD'} {name}: {what}: {error:.3g}", flush=True)
        except Exception as e:
            print(f"BAD {name}: {what}: {type(e).__name__}: {str(e)[:300]}".replace("\n", " "), flush=True)
            if "CUDA" in str(e):
                raise SystemExit(1) from e

    for kind, (first, second) in pairs.items():
        if name == "grouped":
            for rows in GROUPS:
                ends = torch.tensor(rows).cumsum(0).to(torch.int32)
                a, w = breccia.cast(numbers(int(ends[-1]) + 7, 640), first), breccia.cast(numbers(4, 264, 640), second)
                found = fp8_matmul.grouped_matmul(a, w.mT, ends.cuda(), product_options("bfloat16"))
                start = 0
                for group, end in enumerate(ends.tolist()):
                    if end > start:
                        tell(f"{kind} {rows} group {group}", lambda f=found[start:end]: f, a[start:end], w[group].mT)
                    start = end
                if found[start:].any():
                    print(f"BAD {name}: {kind} {rows}: rows of no group are not zeros", flush=True)
            continue
        for m, n, k in SHAPES:
            if tile is not None and tile.split > -(-k // 128):
                continue
            a, w = breccia.cast(numbers(m, k), first), breccia.cast(numbers(n, k), second)
            for dtype in ("bfloat16", "float32"):
                what = f"{kind} {m}x{n}x{k} {dtype}"
                if name in ("torch", "fast"):
                    kernel = {"torch": "torch.scaled_mm", "fast": "cuda.fp8_matmul_fast"}[name]
                    if breccia.explain("matmul", a, w.mT, out_dtype=dtype, prefer=kernel).running != kernel:
                        continue
                    tell(what, lambda a=a, w=w, d=dtype, p=kernel: breccia.matmul(a, w.mT, d, prefer=p), a, w.mT)
                else:
                    tell(what, lambda a=a, w=w, d=dtype: repeated(a, w.mT, product_options(d)), a, w.mT)
    print("done", flush=True)


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 75.0
    waiting, running, table, wrong = names(), list[Any](), list[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < SIDES:
                name = waiting.pop(0)
                log = open(Path(folder) / name, "w+")  # noqa: SIM115
                process = subprocess.Popen([sys.executable, __file__, "--tile", name], stdout=log, stderr=subprocess.STDOUT)
                running.append((name, process, log, time.monotonic() + seconds))
            name, process, log, until = running.pop(0)
            try:
                process.wait(timeout=max(1.0, until - time.monotonic()))
                ended = ""
            except subprocess.TimeoutExpired:
                process.kill()
                ended = f" HANGS after {seconds:g} s"
            log.seek(0)
            lines = log.read().splitlines()
            good, bad = ([line for line in lines if line.startswith(word)] for word in ("ok ", "BAD"))
            finished = bool(lines) and lines[-1] == "done"
            wrong += len(bad) + (not finished)
            print("\n".join(bad[:8] + ([] if finished else lines[-6:])), flush=True)
            table.append(f"{name:16} {len(good):4} ok {len(bad):4} bad{'' if finished else ' NOT FINISHED'}{ended}")
    print("\n".join(table))
    return int(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tile"]:
        one_tile(sys.argv[2])
    else:
        sys.exit(main())
