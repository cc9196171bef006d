"""Everything breccia-mlx adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Framework, hookimpl

api = 1


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    return [Framework("mlx", "mlx.core", ("array",), "breccia_mlx.ops:MLX", devices="breccia_mlx.ops:devices")]
