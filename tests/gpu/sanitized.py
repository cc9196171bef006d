"""Run kernels of breccia-triton once on small tensors, for `gpu_sanitizer.sh`, and compare products with FP64.

    python tests/gpu/sanitized.py [--group GROUP]...    print the jobs of these groups, by default of all
    python tests/gpu/sanitized.py JOB                   run one

A job runs all casts under a recipe, or one kind of product. `--device cpu` runs its calls on other kernels, without a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

RECIPES = (
    "fp8_block",
    "fp8_block,block_m=32,block_k=32",
    "fp8_row",
    "fp8_current",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
    "int4,group_size=32",
    "int4,symmetric=false,signed=false,group_size=32",
    "int8",
    "nf4",
    "fp8_delayed",
)
#: Recipes of a and b of FP8 products.
PAIRS = {
    "tensor": ("fp8_current", "fp8_current"),
    "row": ("fp8_row", "fp8_row"),
    "tiles": ("fp8_block", "fp8_block,block_m=128"),
    "blocks": ("fp8_block", "fp8_block"),
    "mx": ("mxfp8", "mxfp8,fp8_format=E5M2"),
}
#: Weights, one of each way of decoding.
WEIGHTS = (
    "int4,group_size=128",
    "int4,symmetric=false,signed=false,group_size=32",
    "int8",
    "fp8_block,block_m=128",
    "mxfp8",
    "mxfp4",
    "nvfp4",
)
#: Ends of uneven groups of rows, one of them empty; ends of groups of few rows; and the number of rows after the last group.
ENDS, FEW, REST = (5, 5, 205, 208), (5, 5, 15, 18), 7
#: Limit of the error relative to the norm of a product. Rounding to BF16 and FP8 sums stay far below it; faults do not.
WRONG = 0.02


class Runner:
    """Calls on a device, each compared with FP64."""

    def __init__(self, device: str) -> None:
        self.device, self.on_gpu = device, device == "cuda"

    def numbers(self, *shape: int, seed: int = 0) -> Any:
        """Normal numbers in BF16."""
        import torch

        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device).bfloat16()

    def cast(self, spec: str, *shape: int, **options: Any) -> Any:
        import breccia

        return breccia.cast(self.numbers(*shape, seed=shape[-2]), spec, **options)

    def product(self, a: Any, b: Any, kernel: str, dtype: str = "bfloat16", **options: Any) -> None:
        """`breccia.matmul` by a kernel."""
        import breccia

        found = breccia.matmul(a, b, dtype, prefer=kernel if self.on_gpu else None, **options)
        self.check(found, a, b, options.get("bias"))

    def grouped(self, a: Any, w: Any, kernel: str, ends: tuple[int, ...] = ENDS, storage: str = "plain") -> None:
        """`breccia.grouped_matmul` of a by the transposes of w in a storage, by a kernel."""
        import torch

        import breccia

        b = (w.to_storage(storage) if self.on_gpu else w).mT
        on_device = torch.tensor(ends, dtype=torch.int32, device=self.device)
        found = breccia.grouped_matmul(a, b, on_device, "bfloat16", prefer=kernel if self.on_gpu else None)
        for n, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            if end > start:
                self.check(found[start:end], a[start:end], w[n].mT)
        if found[ends[-1] :].any():
            raise SystemExit("rows of no group are not zero")

    def check(self, found: Any, a: Any, b: Any, bias: Any = None) -> None:
        import breccia

        x, y = (breccia.dequantize(x).double() if isinstance(x, breccia.ScaledTensor) else x.double() for x in (a, b))
        exact = x @ y if bias is None else x @ y + bias.double()
        error = float((found.double() - exact).norm() / exact.norm())
        if not error < WRONG:
            raise SystemExit(f"a product of {tuple(a.shape)} by {tuple(b.shape)} is off by {error:.3g} of its norm")


def casts(run: Runner, spec: str) -> None:
    """Every op that casts or decodes under a recipe."""
    import breccia

    for shape in ((33, 200), (64, 512)):  # partial blocks, whole blocks
        x = run.numbers(*shape)
        if spec == "fp8_delayed":
            history = breccia.AmaxHistory(spec)  # type: ignore[arg-type]
            for _ in range(3):
                _, history = history.cast(x)
                history = history.update(x)
            continue
        for axis in (-1, -2):
            st = breccia.cast(x, spec, axis=axis)
            breccia.dequantize(st, out_dtype="bf16")
            breccia.requantize(st, "mxfp8,fp8_format=E5M2,scale_rule=floor")
            breccia.cast_ste(x, spec, axis=axis)
        breccia.cast_pair(x, spec)
        breccia.cast(x, spec, rounding="stochastic", seed=1)
        if spec == "mxfp8":
            for storage in ("swizzle_128x4", "column_major"):
                breccia.dequantize(breccia.cast(x, spec, storage=storage))


@contextmanager
def forced(tile: Any, copiers: bool) -> Iterator[None]:
    """Make FP8 products use a tile. copiers: warps copy plain scales of blocks, instead of TMA."""
    from breccia_triton.gemm.fp8 import matmul as fp8_matmul
    from breccia_triton.gemm.fp8 import plans as fp8_plans

    module: Any = fp8_matmul
    kept = module.tile_of, module.grouped_tile_of, fp8_plans.copiers
    module.tile_of = module.grouped_tile_of = lambda *lengths: tile
    fp8_plans.copiers = lambda *of: copiers
    module.forget()
    try:
        yield
    finally:
        module.tile_of, module.grouped_tile_of, fp8_plans.copiers = kept
        module.forget()


def _tiles(run: Runner, grouped: bool) -> list[Any]:
    if not run.on_gpu:
        return []
    from breccia_triton.gemm.fp8 import plans as fp8_plans

    return list(fp8_plans.GROUPED) if grouped else [*fp8_plans.TABLE, fp8_plans.short(fp8_plans.TABLE[0], 5)]


def fp8(run: Runner, pair: str) -> None:
    """`cuda.fp8_matmul` of one pair of scales: each tile, partial in every direction; and other options."""
    import torch

    (first, second), kernel = PAIRS[pair], "cuda.fp8_matmul"
    a, w = run.cast(first, 300, 640), run.cast(second, 264, 640)
    for tile in _tiles(run, False):
        # breccia lets warps copy scales only where blocks share no operand. racecheck reports hazards elsewhere, where other
        # blocks take part in a barrier.
        may_copy = pair in ("tiles", "blocks", "mx") and tile.share == (1, 1)
        for copiers in (False, True) if may_copy else (False,):
            with forced(tile, copiers):
                run.product(a, w.mT, kernel)
    bias = torch.linspace(-1, 1, 77, device=run.device)
    run.product(run.cast(first, 5, 256), run.cast(second, 77, 256).mT, kernel, "float32", bias=bias)
    run.product(run.cast(first, 2, 40, 272), run.cast(second, 2, 72, 272).mT, kernel)
    if pair in ("tiles", "blocks"):
        run.product(run.cast(first, 300, 640, storage="column_major"), w.mT, kernel)


def fp8_grouped(run: Runner, pair: str) -> None:
    """`cuda.fp8_grouped_matmul` of one pair of scales, each tile."""
    (first, second), kernel = PAIRS[pair], "cuda.fp8_grouped_matmul"
    for n, k in ((264, 512), (77, 640)):
        a, w = run.cast(first, ENDS[-1] + REST, k), run.cast(second, len(ENDS), n, k)
        run.grouped(a, w, kernel)
        for tile in _tiles(run, True):
            with forced(tile, False):
                run.grouped(a, w, kernel)


def weights(run: Runner, rows: tuple[int, ...]) -> None:
    """`cuda.weight_only` of each format; up to 16 rows in the small kernel, more in the wide one."""
    import torch

    for spec in WEIGHTS:
        for n, k in ((128, 512), (70, 200)):
            if k == 200 and spec == "int4,group_size=128":
                continue
            w = run.cast(spec, n, k)
            w = w.to_storage("mma_16x128") if run.on_gpu else w
            for m in rows:
                run.product(run.numbers(m, k, seed=m), w.mT, "cuda.weight_only", "float32")
            run.product(run.numbers(rows[0], k), w.mT, "cuda.weight_only", bias=torch.linspace(-1, 1, n, device=run.device))


def weights_decoded(run: Runner, codes: bool) -> None:
    """Weights that are decoded to memory before a product: their codes, for the FP8 kernel, or their values, for cuBLAS.

    BF16 cannot hold the values of a row with a scale of 2^-127, so that row is computed again in FP32.
    """
    import torch

    shapes = (256, 512) if codes else (72, 640)
    for spec in ("int4,group_size=128", "int8", "nvfp4") if codes else ("mxfp4", "mxfp8"):
        w, x = run.cast(spec, *shapes), run.numbers(300, shapes[1])
        if not codes:
            w.scale.view(torch.uint8)[3] = 0
        if run.on_gpu:
            from breccia_triton.gemm.weight_only import matmul as weight_only
            from breccia_triton.gemm.weight_only import plans as weight_plans

            stored = w.to_storage("mma_16x128").mT
            config = weight_plans.DecodedCodes() if codes else weight_plans.Decoded()
            call = weight_only.executable(x, stored, None, "bfloat16", config)
            run.check(call(x, stored, None, None), x, w.mT)
        else:
            run.product(x, w.mT, "")


def weights_grouped(run: Runner, ends: tuple[int, ...]) -> None:
    """`cuda.weight_only_grouped` of each format: the small kernel for groups of few rows, the wide one for many."""
    for spec in WEIGHTS:
        w = run.cast(spec, len(ends), 72, 256)
        run.grouped(run.numbers(ends[-1] + REST, 256), w, "cuda.weight_only_grouped", ends, "mma_16x128")


def through_bf16(run: Runner, pair: str) -> None:
    """`triton.matmul_bf16` of two tensors, and of arrays by one; a row with subnormal values is computed again in FP32."""
    import torch

    kernel = "triton.matmul_bf16"
    for m, n, k in ((70, 72, 288), (1, 40, 160)):
        a, w = run.cast(pair, m, k), run.cast(pair, n, k)
        run.product(a, w.mT, kernel)
        run.product(a, w.mT, kernel, "float16", bias=torch.linspace(-1, 1, n, device=run.device))
        run.product(run.numbers(m, k), w.mT, kernel, "float32")
        if pair.startswith("mx"):
            w.scale.view(torch.uint8)[3] = 0
            run.product(a, w.mT, kernel)


def in_registers(run: Runner, what: str) -> None:
    """`triton.weight_only` and `triton.fp8_matmul`, which decode in registers."""
    pairs = [("", spec) for spec in (*WEIGHTS, "nf4")] if what == "weights" else list(PAIRS.values())
    for m, n, k in ((5, 40, 160), (70, 72, 288)):
        for first, second in pairs:
            if k % 128 and "group_size=128" in second:
                continue
            w = run.cast(second, n, k)
            a = run.cast(first, m, k) if first else run.numbers(m, k)
            run.product(a, w.mT, "triton.fp8_matmul" if first else "triton.weight_only")


#: A function and its argument.
Job = tuple[Callable[[Runner, Any], None], Any]
#: Jobs by group and name.
GROUPS: dict[str, dict[str, Job]] = {
    "casts": {spec: (casts, spec) for spec in RECIPES},
    "fp8": {pair: (fp8, pair) for pair in PAIRS},
    "grouped": {pair: (fp8_grouped, pair) for pair in PAIRS},
    "weights": {
        "small": (weights, (1, 13)),
        "wide": (weights, (29, 140)),
        "decoded": (weights_decoded, False),
        "decoded codes": (weights_decoded, True),
        "grouped small": (weights_grouped, FEW),
        "grouped wide": (weights_grouped, ENDS),
    },
    "bf16": {pair: (through_bf16, pair) for pair in ("mxfp8", "mxfp4", "nvfp4")},
    "registers": {what: (in_registers, what) for what in ("weights", "pairs")},
}
JOBS = {f"{group} {name}": job for group, jobs in GROUPS.items() for name, job in jobs.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("job", nargs="?", choices=JOBS, metavar="JOB")
    arguments.add_argument("--group", action="append", choices=GROUPS)
    arguments.add_argument("--device", default="cuda")
    given = arguments.parse_args()
    if given.job is None:
        print(*(name for name in JOBS if given.group is None or name.partition(" ")[0] in given.group), sep="\n")
        return
    function, argument = JOBS[given.job]
    function(Runner(given.device), argument)
    if given.device == "cuda":
        import torch

        torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
