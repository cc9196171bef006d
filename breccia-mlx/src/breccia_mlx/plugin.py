"""Everything breccia-mlx adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Framework, Kernel, hookimpl
from breccia.backend import Tier

api = 1


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    ops = "breccia_mlx.ops"
    yield Framework(
        "mlx",
        "mlx.core",
        ("array",),
        f"{ops}:MLX",
        devices=f"{ops}:devices",
        kinds=("cpu",),  # all devices share this memory; `opaque` says whether the default device is another
        frontend="breccia_mlx.frontend",
        forks=False,
        opaque=f"{ops}:opaque",
    )


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    plan = "breccia.kernels.plans:plan_on_numpy"
    for op, module in (("cast", "numpy.plan"), ("dequantize", "plans")):
        accepts, knows = (
            f"breccia.kernels.{module}:accepts_{op}",
            ("coded_scales",) if op == "dequantize" else ("scale_search",),
        )
        name, target = f"mlx.cpu.{op}", f"breccia_mlx.cpu:{op}"
        yield Kernel(op, "mlx", target, name, device="cpu", accepts=accepts, plan=plan, knows=knows)
    for op, module in (("cast", "breccia_mlx.compiled"), ("dequantize", "breccia_mlx.decoding")):
        yield Kernel(
            op,
            "mlx",
            f"{module}:{op}",
            f"mlx.compiled.{op}",
            device="cpu",
            accepts=f"{module}:accepts",
            rank=Tier.COMPILED,
            traces=True,
        )
    yield Kernel(
        "matmul",
        "mlx",
        "breccia_mlx.decoding:matmul",
        "mlx.compiled.matmul",
        device="cpu",
        accepts="breccia_mlx.decoding:accepts_product",
        rank=Tier.COMPILED,
        traces=True,
    )
    native = "breccia_mlx.native"
    yield Kernel(
        "matmul",
        "mlx",
        f"{native}:matmul",
        "mlx.cpu.quantized_matmul",
        device="cpu",
        accepts=f"{native}:accepts_rows",
        rank=Tier.PORTABLE,
    )
    yield Kernel(
        "matmul",
        "mlx",
        f"{native}:matmul",
        "mlx.quantized_matmul",
        accepts=f"{native}:accepts",
        traces=True,
        opt_in=True,
    )
