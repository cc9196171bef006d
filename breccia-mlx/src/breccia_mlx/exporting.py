"""`export_function`: functions that call breccia, as files of MLX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .ops import exporting


def export_function(file: Any, fun: Callable[..., Any], *args: Any, shapeless: bool = False, **kwargs: Any) -> None:
    """`mlx.core.export_function` of a function that calls breccia, with its arguments.

    MLX cannot write functions with gradient rules of their own, such as breccia's products and `cast_ste`. The file leaves
    those rules out, so an imported function has no gradient, and `mx.vmap` cannot map it. Layers multiply by MLX's
    `quantized_matmul` where they can. Captured weights are written with the function.

    file: the path, or a callback. Raises what `mlx.core.export_function` raises.

        >>> import mlx.core as mx, breccia_mlx
        >>> w, file = breccia.cast(mx.ones((32, 64)), "mxfp8"), str(tmp / "layer.mlxfn")
        >>> breccia_mlx.export_function(file, lambda x: breccia.matmul(x, w.mT), mx.ones((1, 64)))
        >>> mx.import_function(file)(mx.ones((1, 64)))[0].shape
        (1, 32)
    """
    with exporting():
        mx.export_function(file, fun, *args, shapeless=shapeless, **kwargs)
