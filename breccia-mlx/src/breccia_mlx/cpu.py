"""Kernels for MLX arrays on the CPU: the NumPy kernels, which read MLX's memory zero-copy.

They run outside transformations, and evaluate their operands. MLX copies NumPy's memory when it takes an array over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from breccia import ScaledTensor, ScalingRecipe
from breccia.backend import DEFAULT, FLOAT32, CastOptions, Metadata, ProductOptions, calls, components, reference

from .ops import MLX, opaque

Array = Any


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`cast` by the kernel for NumPy arrays."""
    scale, importance = options.scale, options.importance
    if options.out is not None or any(hasattr(a, "shape") and not isinstance(a, mx.array) for a in (scale, importance)):
        return reference.cast(x, recipe, options)  # which refuses them: MLX's arrays are immutable
    if opaque(*(option for option in (scale, options.seed, importance) if isinstance(option, mx.array))) is not None:
        return reference.cast(x, recipe, options)
    if importance is not None:
        options = options.replace(importance=_floats(importance))
    if isinstance(scale, mx.array):
        options = options.replace(scale=_floats(scale))  # BF16 as numbers: bit patterns would be a scale of another dtype
    return _over(calls.cast(_floats(x), recipe, options), _taken)


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Array:
    """`dequantize` by the kernel for NumPy arrays."""
    out_dtype, _, out = options
    if out is not None:
        return reference.dequantize(st, options)
    narrow = out_dtype == "bfloat16"
    # Not of mx.zeros: a function traced by MLX would evaluate that again, without what is written here.
    values = mx.array(np.empty(st.shape, np.uint16 if narrow else out_dtype))
    memory = np.asarray(values)  # nothing else refers to it yet
    calls.dequantize(_over(st, _array), ProductOptions(out_dtype, out=memory.view(_bfloat16()) if narrow else memory))
    return values.view(mx.bfloat16) if narrow else values


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`matmul` by the kernel for NumPy arrays."""
    out_dtype, bias, out = options
    left, right = [_over(x, _array) if isinstance(x, ScaledTensor) else _floats(x) for x in (a, b)]
    product = mx.array(calls.matmul(left, right, FLOAT32 if bias is None else ProductOptions(bias=_floats(bias))))
    return reference.result(MLX, product, out_dtype, out)


# ------------------------------------------------------------------------------------------------ the same memory


def _over(st: ScaledTensor, function: Callable[[Array], Array]) -> ScaledTensor:
    """The tensor with `function` applied to its components."""
    return Metadata.of(st).assembled(**{name: function(part) for name, part in components(st).items()})


def _taken(part: Array) -> Array:
    """A component that a NumPy kernel wrote, as an MLX array; NumPy's BF16 components are bit patterns."""
    array = mx.array(np.asarray(part))
    return array.view(mx.bfloat16) if array.dtype == mx.uint16 else array


def _array(part: Array) -> np.ndarray:
    """The memory of an array, which is evaluated; BF16 as bit patterns."""
    return np.asarray(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part)


def _floats(x: Array) -> np.ndarray:
    """Numbers as an array. NumPy has BF16 from ml_dtypes."""
    return _array(x).view(_bfloat16()) if x.dtype == mx.bfloat16 else np.asarray(x)


@cache
def _bfloat16() -> Any:
    """The dtype of NumPy for BF16. Imported where it is needed."""
    import ml_dtypes

    return ml_dtypes.bfloat16
