"""Everything breccia-jax adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Framework, Kernel, hookimpl

api = 1


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    ops = "breccia_jax.ops"
    return [
        Framework(
            "jax",
            "jax",
            ("Array",),
            f"{ops}:JAX",
            devices=f"{ops}:devices",
            device=f"{ops}:device",
            container="breccia_jax.container:register",
        )
    ]


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    for op in ("cast", "dequantize", "requantize", "matmul"):
        yield Kernel(op, "jax", f"breccia_jax.verbs:{op}", f"jax.{op}")
    for op in ("cast_ste", "cast_ste_clipped"):
        yield Kernel(op, "jax", f"breccia_jax.gradients:{op}", f"jax.{op}")
