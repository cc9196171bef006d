"""`export_function`: functions that call breccia, as files of MLX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .ops import exporting


def export_function(file: Any, fun: Callable[..., Any], *args: Any, shapeless: bool = False, **kwargs: Any) -> None:
    """`mlx.core.export_function` of a function that calls breccia, with its arguments.

    MLX cannot write functions with gradient rules of their own, as breccia's products and `cast_ste` have them. They are left
    out here, so that an imported function has no gradient, and cannot be mapped by `mx.vmap`. Layers multiply by MLX's
    `quantized_matmul` where they can. Captured weights are written with the function.

    file: the path, or a callback. Raises what `mlx.core.export_function` raises.
    """
    with exporting():
        mx.export_function(file, fun, *args, shapeless=shapeless, **kwargs)
