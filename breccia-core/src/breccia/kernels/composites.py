"""Ops composed of other ops that the table selects: a fast `cast` speeds up every composite that casts.

Each has a plan, which lists its calls for `explain`. A fused kernel declared for the op itself takes precedence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays.frameworks import dtype_name, ops_of
from ..dispatch import calls
from ..options import DEFAULT, FLOAT32, CastOptions, ProductOptions, product_options
from ..recipes import ScalingRecipe
from ..tensors.tensor import ScaledTensor
from . import reference
from .reference.requantizing import Primitives

Array = Any

#: The primitives selected by the table.
SELECTED = Primitives(calls.cast, calls.dequantize)


def requantize(st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`reference.requantize` on the kernels of `dequantize` and `cast`."""
    return reference.requantize(st, recipe, options, SELECTED)


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`reference.matmul` on the kernel of `dequantize`."""
    return reference.product(a, b, options, SELECTED)


def grouped_matmul(a: Any, b: Any, offsets: Array, options: ProductOptions = FLOAT32) -> Array:
    """`reference.grouped_matmul` on the kernel of `dequantize`."""
    return reference.grouped_matmul(a, b, offsets, options, SELECTED)


def k_grouped_matmul(a: Any, b: Any, offsets: Array, options: ProductOptions = FLOAT32) -> Array:
    """`reference.k_grouped_matmul` on the kernel of `dequantize`."""
    return reference.k_grouped_matmul(a, b, offsets, options, SELECTED)


def cast_pair(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> tuple[ScaledTensor, ScaledTensor]:
    """Two casts."""
    return reference.cast_pair(x, recipe, options, SELECTED)


def cast_and_record(
    x: Array, recipe: ScalingRecipe, amaxes: Any, scale: Any, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, Array, Array]:
    """The kernels of `cast` and `record_amax`, one after the other."""
    return calls.cast(x, recipe, options.replace(scale=scale)), *calls.record_amax(x, recipe, amaxes, scale)


def cast_pair_and_record(
    x: Array, recipe: ScalingRecipe, amaxes: Any, scale: Any, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, ScaledTensor, Array, Array]:
    """The kernels of `cast_pair` and `record_amax`, one after the other."""
    return *calls.cast_pair(x, recipe, options.replace(scale=scale)), *calls.record_amax(x, recipe, amaxes, scale)


def cast_matmul(x: Array, recipe: ScalingRecipe, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """The kernel of `matmul` applied to the result of the kernel of `cast`."""
    return calls.matmul(calls.cast(x, recipe), b, options)


def cast_ste(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> Array:
    """`dequantize` of `cast`, by their kernels."""
    return calls.dequantize(calls.cast(x, recipe, options), product_options(dtype_name(x)))


def passed_through(by: Any, direction: Array, n: int, x: Array, recipe: ScalingRecipe, options: CastOptions) -> Array:
    """The derivative of `cast_ste`: the direction, and zero where `x` lies outside of the range of `options.clip`.

    Straight-through gradients: Bengio, Leonard and Courville 2013 (arXiv 1308.3432), section 4; with a clip as in Hubara et
    al. 2016.
    """
    if options.clip is None:
        return direction
    ops = ops_of(x)
    low, high = within_scales(x, recipe, options, by) if isinstance(options.clip, str) else options.clip
    # A select, not a product with the mask: an infinite gradient outside the range becomes zero too.
    return ops.where((x >= low) & (x <= high), direction, 0.0)


def within_scales(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, by: Any = calls) -> tuple[Array, Array]:
    """The lowest and highest value representable in each block of a cast under its scale."""
    low, high = map(by.dequantize, reference.extremes(by.cast(x, recipe, options)))
    ops = ops_of(low)
    return ops.minimum(low, high), ops.maximum(low, high)  # a negative scale swaps the two


def of_row(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """An op on a 1-D tensor of blocks, as a matrix of one row. A supplied `scale` has the shape of the matrix's."""
    st, *rest, options = arguments
    changed = options._replace(out=None) if isinstance(options, ProductOptions) else options.replace(out=None)
    row = function(st.reshape(1, *st.shape), *rest, changed)[0]
    if isinstance(row, ScaledTensor):
        return reference.assigned(options.out, row)
    return reference.result(ops_of(row), row, "float32", options.out)
