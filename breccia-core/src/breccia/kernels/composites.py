"""Ops composed of other ops that the table selects: a fast `cast` speeds up every composite that casts.

Each has a plan, which lists its calls for `explain`. A fused kernel declared for the op itself takes precedence.
"""

from __future__ import annotations

from typing import Any

from ..arrays.frameworks import dtype_name, ops_of
from ..dispatch import calls
from ..dispatch.kernel import Prefer
from ..options import DEFAULT, PLAIN, CastOptions
from ..recipes import ScalingRecipe
from ..tensors.tensor import ScaledTensor
from . import reference
from .reference.requantizing import Primitives

Array = Any

#: The primitives selected by the table.
FOUND = Primitives(calls.cast, calls.dequantize)


def requantize(
    st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT, require_exact: bool = False
) -> ScaledTensor:
    """`reference.requantize` on the kernels of `dequantize` and `cast`."""
    return reference.requantize(st, recipe, options, require_exact, FOUND)


def dequantize_row(st: ScaledTensor, out_dtype: str, out: Array | None, prefer: Prefer) -> Array:
    """`dequantize` of a 1-D tensor of blocks, as a matrix of one row: kernels receive matrices."""
    row = calls.dequantize(st.reshape(1, *st.shape), out_dtype, None, prefer)[0]
    return reference.result(ops_of(row), row, "float32", out)


def requantize_row(
    st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions, require_exact: bool, prefer: Prefer
) -> ScaledTensor:
    """`requantize` of a 1-D tensor of blocks, likewise. A supplied `scale` has the shape of the matrix's."""
    row = calls.requantize(st.reshape(1, *st.shape), recipe, options.replace(out=None), require_exact, prefer)[0]
    return reference.assigned(options.out, row)


def matmul(a: Any, b: Any, bias: Array | None = None, out_dtype: str = "float32", out: Array | None = None) -> Array:
    """`reference.matmul` on the kernel of `dequantize`."""
    return reference.product(a, b, bias, out_dtype, out, FOUND)


def grouped_matmul(a: Any, b: Any, offsets: Array, out_dtype: str = "float32", out: Array | None = None) -> Array:
    """`reference.grouped_matmul` on the kernel of `dequantize`."""
    return reference.grouped_matmul(a, b, offsets, out_dtype, out, FOUND)


def cast_pair(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> tuple[ScaledTensor, ScaledTensor]:
    """Two casts."""
    return reference.cast_pair(x, recipe, options, FOUND)


def cast_and_record(
    x: Array, recipe: ScalingRecipe, amaxes: Any, scale: Any, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, Array, Array]:
    """The kernels of `cast` and `record_amax`, one after the other."""
    return calls.cast(x, recipe, options.replace(scale=scale)), *calls.record_amax(x, recipe, amaxes, scale)


def cast_matmul(x: Array, recipe: ScalingRecipe, b: Any, bias: Array | None = None, out_dtype: str = "float32") -> Array:
    """The kernel of `matmul` applied to the result of the kernel of `cast`."""
    return calls.matmul(calls.cast(x, recipe), b, bias, out_dtype)


def cast_ste(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> Array:
    """`dequantize` of `cast`, by their kernels."""
    return calls.dequantize(calls.cast(x, recipe, options), dtype_name(x))


def cast_ste_clipped(x: Array, recipe: ScalingRecipe, clip: Any, options: CastOptions = DEFAULT) -> Array:
    """The value of `cast_ste`: a clip affects only the gradient."""
    return calls.cast_ste(x, recipe, options)


def within_scales(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> tuple[Array, Array]:
    """The lowest and highest value representable in each block of a cast under its scale, for gradients of clips."""
    low, high = reference.extremes(calls.cast(x, recipe, options))
    return calls.dequantize(low), calls.dequantize(high)


# -- storages --------------------------------------------------------------------------------------------------------


def cast_into_storage(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """A cast in plain storage, then converted: for storages that no kernel writes directly."""
    written = calls.cast(x, recipe, options.replace(storage=PLAIN, out=None)).to_storage(options.storage)
    return reference.assigned(options.out, written)


def cast_pair_into_storage(
    x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, ScaledTensor]:
    """Likewise for `cast_pair`."""
    first, second = calls.cast_pair(x, recipe, options.replace(storage=PLAIN))
    return first.to_storage(options.storage), second.to_storage(options.storage)


def requantize_into_storage(
    st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT, require_exact: bool = False
) -> ScaledTensor:
    """Likewise for `requantize`; also from storages that no kernel reads."""
    plain = calls.requantize(st.to_plain(), recipe, options.replace(storage=PLAIN, out=None), require_exact)
    return reference.assigned(options.out, plain.to_storage(options.storage))


def dequantize_plain(st: ScaledTensor, out_dtype: str = "float32", out: Array | None = None) -> Array:
    """`dequantize` of the plain tensor: for storages that no kernel reads."""
    return calls.dequantize(st.to_plain(), out_dtype, out)


def matmul_plain(a: Any, b: Any, bias: Array | None = None, out_dtype: str = "float32", out: Array | None = None) -> Array:
    """`matmul` of plain operands, likewise."""
    return calls.matmul(_plain(a), _plain(b), bias, out_dtype, out)


def grouped_matmul_plain(a: Any, b: Any, offsets: Array, out_dtype: str = "float32", out: Array | None = None) -> Array:
    """`grouped_matmul` of plain operands, likewise."""
    return calls.grouped_matmul(_plain(a), _plain(b), offsets, out_dtype, out)


def _plain(x: Any) -> Any:
    return x.to_plain() if isinstance(x, ScaledTensor) else x
