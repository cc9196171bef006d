"""Everything breccia-mlx adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Framework, Kernel, hookimpl

api = 1


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    ops = "breccia_mlx.ops"
    return [Framework("mlx", "mlx.core", ("array",), f"{ops}:MLX", devices=f"{ops}:devices", frontend="breccia_mlx.frontend")]


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    native = "breccia_mlx.native"
    yield Kernel("matmul", "mlx", f"{native}:matmul", "mlx.quantized_matmul", accepts=f"{native}:accepts", opt_in=True)
