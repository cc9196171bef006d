"""DotGeneral: a quantized `jax.lax.dot_general`, for the layers of models in training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import breccia
from breccia import OptionError, ScalingRecipe
from breccia.backend import as_recipe, dtype_name

Array = Any


@dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` whose operands are cast, with blocks along the axes that it contracts.

    Pass it to layers that take one: `nn.Dense(features, dot_general=DotGeneral("mxfp8"))`, `nnx.Linear(..., dot_general=...)`,
    `nn.MultiHeadDotProductAttention(qkv_dot_general=..., out_dot_general=...)`; where a layer takes a class,
    `dot_general_cls=functools.partial(DotGeneral, "mxfp8")`.

    lhs: the recipe of the first operand (of layers: the activations), and of both unless `rhs` is given.
    rhs: the recipe of the second operand (of layers: the kernel); "none" leaves it in high precision.
    gradients: the recipe of the incoming gradient in both products of the backward pass, where the other operand is cast
        under its own recipe, with blocks along the axes that those products contract. By default gradients are not cast, and
        the backward pass multiplies them by the rounded operands of the forward pass.

    Products accumulate in FP32. Results have the promoted dtype of the operands, or `preferred_element_type`. Gradients pass
    straight through the casts.

    Raises OptionError for contracted axes of the two that differ, and what `breccia.cast` raises.
    """

    lhs: ScalingRecipe | str
    rhs: ScalingRecipe | str | None = None
    gradients: ScalingRecipe | str | None = None

    def __post_init__(self) -> None:
        lhs = as_recipe(self.lhs)
        rhs = lhs if self.rhs is None else None if self.rhs == "none" else as_recipe(self.rhs)
        object.__setattr__(self, "lhs", lhs)
        object.__setattr__(self, "rhs", "none" if rhs is None else rhs)
        object.__setattr__(self, "gradients", None if self.gradients is None else as_recipe(self.gradients))

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> Array:
        """The product of `lhs` and `rhs` for the dimension numbers of `jax.lax.dot_general`. precision: ignored."""
        lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)  # NumPy's arrays have no gradients
        (left, right), (left_batch, right_batch) = dimension_numbers
        left, right, left_batch, right_batch = map(tuple, (left, right, left_batch, right_batch))
        left, right = (tuple(a % x.ndim for a in axes) for x, axes in ((lhs, left), (rhs, right)))
        if not left or [lhs.shape[a] for a in left] != [rhs.shape[a] for a in right]:
            raise OptionError(
                f"DotGeneral contracts axes of equal lengths; got axes {left} of shape {tuple(lhs.shape)} and {right} of "
                f"{tuple(rhs.shape)}.",
                found=(left, right),
            )
        dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
        rows = [a for a in range(lhs.ndim) if a not in (*left, *left_batch)]
        columns = [a for a in range(rhs.ndim) if a not in (*right, *right_batch)]
        batch = [lhs.shape[a] for a in left_batch]
        k = math.prod(lhs.shape[a] for a in left)
        m, n = (math.prod(x.shape[a] for a in axes) for x, axes in ((lhs, rows), (rhs, columns)))
        a = lhs.transpose(*left_batch, *rows, *left).reshape(*batch, m, k)
        b = rhs.transpose(*right_batch, *right, *columns).reshape(*batch, k, n)
        y: Any = _product(a, b, self, dtype_name(jnp.zeros((), dtype)))
        y = y.reshape(*batch, *(lhs.shape[a] for a in rows), *(rhs.shape[a] for a in columns))
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(a: Array, b: Array, how: DotGeneral, dtype: str) -> Array:
    return _forward(a, b, how, dtype)[0]


def _forward(a: Array, b: Array, how: DotGeneral, dtype: str) -> tuple[Array, tuple[Any, ...]]:
    left, right = _cast(a, how.lhs, -1), _cast(b, how.rhs, -2)
    saved = (left, right) if how.gradients is None else (a, b)
    return breccia.matmul(left, right, dtype), (*saved, a[:0], b[:0])  # empty: their dtypes


def _backward(how: DotGeneral, dtype: str, saved: tuple[Any, ...], dy: Array) -> tuple[Array, Array]:
    a, b, *like = saved
    da, db = (dtype_name(x) for x in like)
    if how.gradients is None:
        return breccia.matmul(dy, b.mT, da), breccia.matmul(a.mT, dy, db)
    g = how.gradients
    # The first product contracts the columns of `b`, the second one the rows of `a`.
    return (
        breccia.matmul(_cast(dy, g, -1), _cast(b.mT, how.rhs, -2), da),
        breccia.matmul(_cast(a.mT, how.lhs, -1), _cast(dy, g, -2), db),
    )


def _cast(x: Array, recipe: Any, axis: int) -> Any:
    return x if recipe == "none" else breccia.cast(x, recipe, axis=axis)


_product.defvjp(_forward, _backward)
