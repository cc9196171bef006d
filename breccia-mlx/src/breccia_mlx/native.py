"""`mx.quantized_matmul`, which multiplies the codes of some formats without decoding them into memory first.

It runs only if requested by name. On a CPU it meets the bound of `matmul` (tests/test_mlx_native.py), but an E8M0 scale of
NaN multiplies as Inf, `mx.vmap` has no rule for it, and for many rows it can be slower than decoding. It is unmeasured on
Metal, where sums of affine codes and of biases may be accumulated separately, which is inexact if the two cancel.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from breccia.backend import E2M1, E4M3, E8M0, UINT4, UINT8, Call, Codec, Format, ScaledTensor, calls, reference

from .ops import MLX

Array = Any

#: MLX's name for the formats of these element and scale codecs, and their block.
_MODES: dict[tuple[Codec, Codec], tuple[str, int | None]] = {
    (E2M1, E8M0): ("mxfp4", 32),
    (E4M3, E8M0): ("mxfp8", 32),
    (E2M1, E4M3): ("nvfp4", 16),
}
_GROUPS = (32, 64, 128)


def mode(fmt: Format) -> dict[str, Any] | None:
    """MLX's `mode`, `group_size` and `bits` for a format, without its global scale; None if MLX has no such mode."""
    m, k = fmt.scale.block
    if m != 1 or any(level.sense != "multiplier" for level in fmt.levels):
        return None
    if fmt.offset == "bias" and fmt.element in (UINT4, UINT8) and k in _GROUPS:
        return {"mode": "affine", "group_size": k, "bits": fmt.element.bits}
    name, block = _MODES.get((fmt.element, fmt.scale.codec), ("", None))
    return {"mode": name, "group_size": k, "bits": fmt.element.bits} if k == block and fmt.offset == "none" else None


def accepts(call: Call) -> str | None:
    """Why `mx.quantized_matmul` cannot compute a product, or None."""
    w = call.b
    if w is None or w.recipe is None or w.layout is None:
        return "mx.quantized_matmul multiplies by a quantized b"
    options = mode(w.recipe.format)
    if options is None:
        return f"MLX has no mode for this {w.recipe.name!r} recipe; it has mxfp4, mxfp8, nvfp4, and integers with a bias"
    if w.axis != -2 or w.ndim != 2:
        return "b must be the .mT of one weight (N, K) with blocks along K"
    if w.layout.partial or w.layout.block(-2) != (1, options["group_size"]):
        return f"K must be a multiple of {options['group_size']} with a scale per block; b has {w.layout}"
    return None


def matmul(a: Any, b: ScaledTensor, bias: Array | None = None, out_dtype: str = "float32", out: Array | None = None) -> Array:
    """`a @ b` by `mx.quantized_matmul` in FP32, for `b` the `.mT` of a weight that MLX has a mode for."""
    if 0 in (*a.shape, *b.shape):
        return reference.matmul(a, b, bias, out_dtype, out)  # MLX 0.32.4 divides by a length of zero
    x = calls.dequantize(a) if isinstance(a, ScaledTensor) else MLX.f32(a)
    w = b.mT
    options = mode(w.recipe.format)
    y = mx.quantized_matmul(x, w.data.view(mx.uint32), w.scale, w.zero_point, transpose=True, **options or {})
    if w.global_scale is not None:
        y = y * w.global_scale
    if bias is not None:
        y = y + MLX.f32(bias)
    return reference.result(MLX, y, out_dtype, out)
