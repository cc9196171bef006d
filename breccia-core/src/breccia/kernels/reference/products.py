"""Products of decoded operands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...arrays.frameworks import ops_of, same_framework
from ...arrays.ops import Array, Ops
from ...options import FLOAT32, ProductOptions
from ...recipes import ScalingRecipe
from ...tensors.tensor import ScaledTensor
from ..checks import check_grouped, check_matmul
from .casting import cast
from .decoding import result
from .requantizing import GENERIC

if TYPE_CHECKING:
    from .requantizing import Primitives


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32, by: Primitives = GENERIC) -> Array:
    """`a @ b + bias` with FP32 accumulation; operands are dequantized first."""
    same_framework({name: _array(x) for name, x in (("a", a), ("b", b), ("bias", options.bias)) if x is not None})
    check_matmul(a, b, options.bias)
    return product(a, b, options, by)


def product(a: Any, b: Any, options: ProductOptions, by: Primitives) -> Array:
    """`matmul` of checked operands."""
    ops, (dtype, bias, out) = ops_of(_array(a), "a"), options
    with ops.errstate():
        product = ops.matmul(values(ops, a, by), values(ops, b, by))
        if bias is not None:
            product = product + ops.f32(bias)
        return product if out is None and dtype == "float32" else result(ops, product, dtype, out)


def grouped_matmul(a: Any, b: Any, offsets: Array, options: ProductOptions = FLOAT32, by: Primitives = GENERIC) -> Array:
    """Each group of rows of `a` times its own matrix of `b`, as `breccia.grouped_matmul` documents."""
    same_framework({"a": _array(a), "b": _array(b), "offsets": offsets})
    check_grouped(a, b, offsets)
    ops = ops_of(_array(a), "a")
    with ops.errstate():
        product = ops.grouped_matmul(values(ops, a, by), values(ops, b, by), offsets)
        return result(ops, product, options.out_dtype, options.out)


def k_grouped_matmul(a: Any, b: Any, offsets: Array, options: ProductOptions = FLOAT32, by: Primitives = GENERIC) -> Array:
    """(E, N, K): for each group the product of its columns of `a` (N, M) and its rows of `b` (M, K), zeros for an empty one.

    offsets: (E,), where the groups end along M, as those of `grouped_matmul`. It is the gradient of that product's matrices.
    """
    ops = ops_of(_array(a), "a")
    with ops.errstate():
        product = ops.k_grouped_matmul(values(ops, a, by), values(ops, b, by), offsets)
        return result(ops, product, options.out_dtype, options.out)


def values(ops: Ops, x: Any, by: Primitives = GENERIC) -> Array:
    """An operand in FP32."""
    return by.dequantize(x) if isinstance(x, ScaledTensor) else ops.f32(x)


def _array(x: Any) -> Array:
    return x.data if isinstance(x, ScaledTensor) else x


def cast_matmul(x: Array, recipe: ScalingRecipe, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`matmul(cast(x), b)`."""
    return matmul(cast(x, recipe), b, options)
