"""The three GEMMs of a layer in training, whose operands are cast as a `breccia.TrainingRecipe` declares, and their gradient.

    forward    y  = x @ w          contracts K
    backward   dx = dy @ w.T       contracts N
               dw = x.T @ dy       contracts M

for x (..., M, K), w (..., K, N) and dy (..., M, N). A kernel of JAX is the transpose of torch's weight (N, K), of which recipes
tell: the axis -1 of a weight there is -2 here. Codes are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import breccia
from breccia import AmaxHistory, DelayedScaling, ScaledTensor, TrainingRecipe
from breccia.backend import TENSOR, calls, dtype_name
from breccia.internal import GemmOperand, rotating

from .delayed import scale_of_step

Array = Any
#: An operand of a GEMM: quantized, or an array for high precision.
Operand = Any
#: The histories of the tensors with delayed scaling, by their names in the recipe: "input", "weight", "gradient".
Histories = Mapping[str, AmaxHistory]


class How(NamedTuple):
    """What a product is compiled for.

    axis_name: the mesh axes over which scales of whole tensors are shared. precision: of GEMMs of arrays.
    rounded: the backward pass multiplies dy by the operands of the forward pass, whatever the recipe says.
    """

    recipe: TrainingRecipe
    axis_name: tuple[str, ...] = ()
    dtype: str = "float32"
    precision: Any = None
    rounded: bool = False


def declared(recipe: TrainingRecipe, tensor: str) -> tuple[GemmOperand, GemmOperand]:
    """The two operands that a tensor becomes, in the order of `GEMMS`, with axes of JAX's orientation."""
    first, second = recipe.uses(tensor)
    if tensor == "weight":
        return first._replace(axis=-2), second._replace(axis=-1)
    return first, second


# ------------------------------------------------------------------------------------------------ casts


def cast_operands(
    how: How, tensor: str, x: Array, histories: Histories, seed: Any, *, first: bool = True, second: bool = True
) -> tuple[Operand, Operand, Array | None]:
    """(The two operands that a tensor becomes, None for one that is not asked for; its amax, if it has a history).

    Of equal recipes both come from one `cast_pair`.
    """
    one, two = declared(how.recipe, tensor)
    options: dict[str, Any] = {}
    if "stochastic" in (one.rounding, two.rounding):
        options = {"rounding": "stochastic", "seed": seed}
    amax = None
    if tensor in histories:
        amax = _amax(x, how.axis_name)
        options["scale"] = scale_of_step(histories[tensor], amax)
    if first and second and one.recipe is not None and one == two._replace(axis=one.axis):
        rows, columns = breccia.cast_pair(x, one.recipe, **{**_shared(how, one.recipe, x), **options})
        return (rows, columns, amax) if one.axis == -1 else (columns, rows, amax)
    cast: Any = _cast(how, x, one, options) if first or two.from_codes else None
    source = breccia.dequantize(cast) if two.from_codes and second else x
    return (cast if first else None), (_cast(how, source, two, options) if second else None), amax


def _cast(how: How, x: Array, of: GemmOperand, options: dict[str, Any]) -> Operand:
    if of.recipe is None:
        return x
    if of.rotation is not None:
        x = rotating.rotated(x, of.rotation, of.axis)
    return breccia.cast(x, of.recipe, axis=of.axis, **{**_shared(how, of.recipe, x), **options})


def _amax(x: Array, axis_name: tuple[str, ...]) -> Array:
    """The largest magnitude of `x` over all of `axis_name`, FP32 of shape (); NaN if there is one."""
    newest = calls.record_amax(x, DelayedScaling(), (), 1.0)[0].reshape(())
    if not axis_name:
        return newest
    # As integers: their maximum keeps NaN, whose bits are the largest.
    return lax.bitcast_convert_type(lax.pmax(lax.bitcast_convert_type(newest, jnp.int32), axis_name), jnp.float32)


def _shared(how: How, recipe: Any, x: Array) -> dict[str, Any]:
    """The scale of a whole tensor whose shards lie along `axis_name`, as an option of a cast; nothing without such a scale."""
    if not how.axis_name or not of_tensor(recipe) or isinstance(recipe, DelayedScaling) or not x.size:
        return {}
    if recipe.format.global_scale is not None:  # of the finite elements (numerics contract, section 6)
        x = jnp.where(jnp.isfinite(x), x, 0)
    one = breccia.cast(_amax(x, how.axis_name).reshape(1, 1), recipe)  # the scale of an amax is that of a tensor of one element
    return {"scale": one.scale if one.global_scale is None else one.global_scale}


def of_tensor(recipe: Any) -> bool:
    """Whether a recipe has a scale that spans the tensor."""
    return recipe is not None and recipe.format.levels[0].block == TENSOR


def multiply(a: Operand, b: Operand, dtype: str, precision: Any = None) -> Array:
    """`a @ b`, accumulated in FP32 and rounded once; of two arrays by JAX, with `precision`."""
    if isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor):
        return breccia.matmul(a, b, dtype)
    return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32).astype(dtype)


# ------------------------------------------------------------------------------------------------ the product


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def product(x: Array, w: Array, histories: Histories, seed: Any, how: How) -> Array:
    """x @ w (..., M, N) of `how.dtype`. The gradient of a history has the amax of the step in place of `scale`.

    seed: two 32-bit words for stochastic rounding, or None.
    """
    rows, _, _ = cast_operands(how, "input", x, histories, seed, second=False)
    columns, _, _ = cast_operands(how, "weight", w, histories, seed, second=False)
    return multiply(rows, columns, how.dtype, how.precision)


def _forward(x: Array, w: Array, histories: Histories, seed: Any, how: How) -> tuple[Array, tuple[Any, ...]]:
    if how.rounded:
        x_rows, _, _ = kept_x = cast_operands(how, "input", x, histories, seed, second=False)
        w_columns, _, _ = kept_w = cast_operands(how, "weight", w, histories, seed, second=False)
        saved = x_rows, w_columns
    else:
        x_rows, x_columns, _ = kept_x = cast_operands(how, "input", x, histories, seed)
        w_columns, w_rows, _ = kept_w = cast_operands(how, "weight", w, histories, seed)
        saved = x_columns, w_rows
    amaxes = {"input": kept_x[2], "weight": kept_w[2]}
    y = multiply(x_rows, w_columns, how.dtype, how.precision)
    return y, (*saved, amaxes, histories, seed, x[:0], w[:0])  # empty: their dtypes


def _backward(how: How, saved: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    x, w, amaxes, histories, seed, *like = saved
    dx_dtype, dw_dtype = map(dtype_name, like)
    if how.rounded:
        return multiply(dy, w.mT, dx_dtype), multiply(x.mT, dy, dw_dtype), {}, None
    rows, columns, amaxes["gradient"] = cast_operands(how, "gradient", dy, histories, seed)
    dx = multiply(rows, w.mT, dx_dtype, how.precision)
    dw = multiply(x.mT, columns, dw_dtype, how.precision)
    return dx, dw, recorded(histories, amaxes), None


def recorded(histories: Histories, amaxes: Mapping[str, Array | None]) -> dict[str, AmaxHistory]:
    """The cotangents of histories, which say the amaxes of a step."""
    return {
        name: AmaxHistory(history.recipe, jnp.zeros_like(history.amaxes), amaxes[name]) for name, history in histories.items()
    }


product.defvjp(_forward, _backward)
