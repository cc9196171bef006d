"""MLX: `mx.quantize` and `mx.dequantize`, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..sets import Case
from . import Adapter
from .shapes import back, bytes_of, matrix, nibbles, padded, plain


def _input(case: Case) -> Any:
    import mlx.core as mx

    x = padded(matrix(case, "input"), 32)
    of = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
    return mx.array(x) if case.dtype == "float32" else mx.array(x).view(of[case.dtype])


def _cast(mode: str, case: Case) -> dict[str, np.ndarray]:
    import mlx.core as mx

    plain(case)
    w, options = _input(case), {"mode": mode}
    if case.format.has_global_scale:
        options["global_scale"] = mx.abs(w).max().astype(mx.float32)
    words, scale, *_ = mx.quantize(w, **options)
    decoded = mx.dequantize(words, scale, **options, dtype=mx.float32)
    data = np.array(words).view(np.uint8)
    codes = nibbles(data) if case.format.element.bits == 4 else data
    parts = {"codes": back(case, codes), "scale": back(case, np.array(scale), "scale")}
    parts |= {"global_scale": np.array(options["global_scale"])} if case.format.has_global_scale else {}
    return parts | {"decoded": back(case, np.array(decoded))}


def _decoded(mode: str, case: Case) -> np.ndarray:
    import mlx.core as mx

    block, options = case.format.block[1] or 32, {"mode": mode}
    if case.format.has_global_scale:
        options["global_scale"] = mx.array(np.array(case.array("global_scale")))
    codes, scale = padded(matrix(case, "codes"), 32), matrix(case, "scale")
    data = bytes_of(codes) if case.format.element.bits == 4 else codes
    scale = padded(scale, 32 // block)
    words = mx.array(np.ascontiguousarray(data).view(np.uint32))
    return back(case, np.array(mx.dequantize(words, mx.array(scale), **options, dtype=mx.float32)))


def _adapter(mode: str, *formats: str) -> Adapter:
    return Adapter(f"quantize, {mode}", formats, partial(_cast, mode), partial(_decoded, mode))


ADAPTERS = (
    _adapter("mxfp8", "mxfp8"),
    _adapter("mxfp4", "mxfp4"),
    _adapter("nvfp4", "nvfp4,two_level=False", "nvfp4,global_sense=amax,order=scales_first"),
)
