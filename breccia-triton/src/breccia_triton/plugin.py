"""Everything breccia-triton adds to breccia: kernels for framework "torch" on "cuda". Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Kernel, hookimpl

api = 1


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    return []
