"""Everything breccia-triton adds to breccia: kernels for framework "torch" on "cuda". Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Kernel, hookimpl

api = 1


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    plans = "breccia_triton.plans"
    return [
        Kernel(
            "cast",
            "torch",
            "breccia_triton.cast:cast",
            "triton.cast",
            device="cuda",
            available=f"{plans}:available",
            accepts=f"{plans}:accepts_cast",
        )
    ]
