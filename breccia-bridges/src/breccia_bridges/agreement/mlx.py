"""MLX: `mx.quantize` and `mx.to_fp8`, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from breccia import INT4Scaling, INT8Scaling, MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, ScalingRecipe
from breccia.backend import E4M3

from . import TIES, Library, Quantizer, Setting, Written, installed


def _quantize(mode: str, global_scale: bool = False, **sizes: int) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import mlx.core as mx

        w = mx.array(x)
        options: dict[str, Any] = {"mode": mode, **sizes}
        if global_scale:
            options["global_scale"] = mx.abs(w).max()  # an amax, not stored: another scale convention
        words, scale, *biases = mx.quantize(w, **options)
        decoded = mx.dequantize(words, scale, *biases, **options, dtype=mx.float32)
        offset = np.array(biases[0]) if biases else None
        return Written(np.array(words).view(np.uint8), np.array(decoded), np.array(scale), zero_point=offset)

    return write


def _to_fp8(x: np.ndarray) -> Written:
    import mlx.core as mx

    codes = mx.to_fp8(mx.array(x))
    return Written(np.array(codes), np.array(mx.from_fp8(codes, mx.float32)))


_SNAPPED = (
    "The scale is signed, and fitted so that the end of the range with the larger magnitude is a multiple of it; breccia's "
    "scale is the range over the largest code, and its bias the smallest element."
)
_NVFP4 = (
    "Ties go towards zero and −0 becomes +0; with G = 2688 / amax of the tensor, block scales are (amax / 6) · G, codes "
    "x · (G / s) and values q · (s · g); breccia's come from g = amax / 2688: (amax / 6) / g, x · (1 / (s · g)), (q · s) · g."
)
_AFFINE: dict[str, Any] = {"signed": False, "symmetric": False, "offset": "bias", "scale_dtype": "fp32"}


def _affine(bits: int, recipe: ScalingRecipe) -> Quantizer:
    return Quantizer(f"quantize, affine, {bits} bits", _quantize("affine", group_size=64, bits=bits), Setting(recipe, _SNAPPED))


LIBRARIES = (
    Library(
        "MLX",
        installed("mlx"),
        (
            Quantizer("quantize, mxfp8", _quantize("mxfp8"), Setting(MXFP8BlockScaling())),
            Quantizer("quantize, mxfp4", _quantize("mxfp4"), Setting(MXFP4BlockScaling(), TIES)),
            Quantizer("quantize, nvfp4", _quantize("nvfp4"), Setting(NVFP4BlockScaling(two_level=False), TIES)),
            Quantizer(
                "quantize, nvfp4, global_scale",
                _quantize("nvfp4", True),
                Setting(
                    NVFP4BlockScaling(),
                    _NVFP4,
                ),
            ),
            _affine(4, INT4Scaling(64, **_AFFINE)),
            _affine(8, INT8Scaling(64, **_AFFINE)),
            Quantizer("to_fp8", _to_fp8, Setting(E4M3)),
        ),
    ),
)
