"""`mx.quantized_matmul`, which multiplies the codes of some formats without decoding them into memory first.

On a CPU it decodes to the contract's numbers and meets the bound of `matmul` (tests/mlx/test_mlx_native.py), except that an
E8M0 scale of NaN multiplies as Inf: tensors with such a scale are found
once, and decoded; in transformed functions their rows are
made NaN. Integers without a mode of MLX are multiplied as affine codes (`integers.py`). By default it runs for few rows of
arrays in memory, and in layers whose weight is an input of a compiled function. By name it runs everywhere: in all compiled
functions, though `mx.vmap` has no rule for it, and on Metal, where it is unmeasured; sums of affine codes and of biases may
be accumulated separately there, which is inexact if the two cancel.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import mlx.core as mx

from breccia import Codec, Format, Integer, ScaledTensor
from breccia.backend import E2M1, E4M3, E8M0, FLOAT32, Call, ProductOptions, calls, composites, reference

from . import integers
from .ops import MLX, is_exporting

Array = Any

#: MLX's name for the formats of these element and scale codecs, and their block.
MODES: dict[tuple[Codec, Codec], tuple[str, int]] = {
    (E2M1, E8M0): ("mxfp4", 32),
    (E4M3, E8M0): ("mxfp8", 32),
    (E2M1, E4M3): ("nvfp4", 16),
}
#: The name of the kernel in the table.
NAME = "mlx.quantized_matmul"
#: The block sizes and the bits of mode "affine".
_GROUPS, _WIDTHS = (32, 64, 128), (2, 3, 4, 5, 6, 8)
#: Rows up to which the product takes no longer than to decode the weight and to multiply matrices, outside and inside
#: `mx.compile`: of E4M3 codes, of integers without a bias, and of integers with one, which take longest to decode. It takes as
#: long for each row; a product of FP32 matrices too, twice as long as one of FP4 codes, as one of integers, and half as long as
#: one of E4M3 (measured: MLX 0.32.4, from 1024 x 1024 to 4096 x 4096).
_ROWS_OF_E4M3, _ROWS_OF_INTEGERS, _ROWS_OF_BIASED = (4, 0), (16, 8), (16, 24)


def mode(fmt: Format) -> dict[str, Any] | None:
    """MLX's `mode`, `group_size` and `bits` for a format, without its global scale; None if MLX has no such mode."""
    m, k = fmt.scale.block
    if m != 1 or any(level.convention != "multiplier" for level in fmt.levels):
        return None
    if fmt.offset == "bias" and _affine(fmt.element) and k in _GROUPS:
        return {"mode": "affine", "group_size": k, "bits": fmt.element.bits}
    name, block = MODES.get((fmt.element, fmt.scale.codec), ("", 0))
    return {"mode": name, "group_size": k, "bits": fmt.element.bits} if k == block and fmt.offset == "none" else None


def _affine(element: Codec) -> bool:
    return isinstance(element, Integer) and not element.signed and not element.fraction_bits and element.bits in _WIDTHS


def accepts(call: Call) -> str | None:
    """Why `mx.quantized_matmul` cannot compute a product, or None."""
    return "mx.quantized_matmul multiplies by a quantized b" if call.b is None else unsupported(call.b)


def unsupported(w: Any) -> str | None:
    """Why `mx.quantized_matmul` cannot multiply by `w`, the second operand of a call or a ScaledTensor, or None."""
    if w.recipe is None or w.layout is None:
        return "mx.quantized_matmul multiplies by a quantized b"
    if w.axis != -2 or w.ndim != 2:
        return "b must be the .mT of one weight (N, K) with blocks along K"
    options = mode(w.recipe.format)
    if options is None:
        if integers.parts(w) is not None:
            return None
        return (
            f"MLX has no mode for this {w.recipe.name!r} recipe; it has mxfp4, mxfp8, nvfp4, and integers with a bias. "
            "Others of 4 and 8 bits need FP16 scales, or sums of several blocks"
        )
    if w.layout.partial or w.layout.block(-2) != (1, options["group_size"]):
        return f"K must be a multiple of {options['group_size']} with a scale per block; b has {w.layout}"
    return None


def accepts_rows(call: Call) -> str | None:
    """`accepts`, and why decoding the weight is faster."""
    reason = accepts(call)
    if reason is not None or call.b is None or call.b.recipe is None:
        return reason
    most = most_rows(call.b.recipe.format)
    if math.prod(call.a.shape[:-1]) > most:
        return f"for more than {most} rows a product of the decoded weight is faster"
    return None


def most_rows(fmt: Format, compiled: bool = False) -> float:
    """The rows up to which this product is no slower than a product of the decoded weight."""
    if fmt.element == E2M1:
        return math.inf
    return (_ROWS_OF_E4M3 if fmt.element == E4M3 else _ROWS_OF_BIASED if fmt.offset == "bias" else _ROWS_OF_INTEGERS)[compiled]


def matmul(a: Any, b: ScaledTensor, options: ProductOptions = FLOAT32) -> Array:
    """`a @ b` by `mx.quantized_matmul` in FP32, for `b` the `.mT` of a weight that it can multiply by.

    A weight with a NaN among its E8M0 scales is decoded instead, and so is one with zero-points of more than 8 bits.
    """
    out_dtype, bias, out = options
    w = b.mT
    if 0 in (*a.shape, *b.shape):
        return reference.matmul(a, b, options)  # MLX 0.32.4 divides by a length of zero
    as_mlx, how = mode(w.recipe.format), integers.parts(b)
    spoiled = has_nan(b.scale) if w.recipe.format.scale.codec == E8M0 else False
    wide = w.zero_point is not None and w.zero_point.dtype not in (mx.uint8, mx.int8)
    if spoiled or (as_mlx is None and (how is None or wide)):
        return composites.matmul(a, b, options)
    x = calls.dequantize(a) if isinstance(a, ScaledTensor) else MLX.f32(a)
    if how is not None:
        y = integers.product(x, b, how)
    else:
        y = mx.quantized_matmul(x, w.data.view(mx.uint32), w.scale, w.zero_point, transpose=True, **as_mlx or {})
    if spoiled is None:
        y = mx.where(mx.max(w.scale, axis=-1) == E8M0.nan, math.nan, y)
    if w.global_scale is not None:
        y = y * w.global_scale
    if bias is not None:
        y = y + MLX.f32(bias)
    return reference.result(MLX, y, out_dtype, out)


#: By the id of an array of E8M0 scales: a reference that removes the entry with the array, and whether it contains NaN.
_nan_by_id: dict[int, tuple[weakref.ref[Any], bool]] = {}


def has_nan(scale: Array) -> bool | None:
    """Whether E8M0 scales contain NaN; None for placeholders. They are read once per array, so keep `st.mT`."""
    if is_exporting():
        return None
    key = id(scale)
    known = _nan_by_id.get(key)
    if known is not None and known[0]() is scale:
        return known[1]
    try:
        spoiled = _read_nan(scale)
    except ValueError as e:
        if "transformations" not in str(e):
            raise
        return None
    _nan_by_id[key] = (weakref.ref(scale, lambda _: _nan_by_id.pop(key, None)), spoiled)
    return spoiled


def _read_nan(scale: Array) -> bool:
    return bool(mx.any(scale == E8M0.nan).item())
