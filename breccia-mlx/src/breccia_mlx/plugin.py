"""Everything breccia-mlx adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Framework, Kernel, hookimpl

api = 1


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    return [Framework("mlx", "mlx.core", ("array",), "breccia_mlx.ops:MLX", devices="breccia_mlx.ops:devices")]


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    for op in ("cast_ste", "cast_ste_clipped"):
        yield Kernel(op, "mlx", f"breccia_mlx.gradients:{op}", f"mlx.{op}")
    native = "breccia_mlx.native"
    yield Kernel("matmul", "mlx", f"{native}:matmul", "mlx.quantized_matmul", accepts=f"{native}:accepts", opt_in=True)
