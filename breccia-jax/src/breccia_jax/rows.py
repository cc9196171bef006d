"""Products whose examples under `jax.vmap` are more rows of one product.

Layers that multiply one vector, as those of Equinox, run inside `vmap`. There, a product by itself would cast each example
alone, and the gradient of its weight would be a sum of products of one row each. As one product of all rows, scales, blocks
along the rows and random numbers are those of a layer that gets the whole batch.

`vmap` outside of `grad` sees this primitive. `grad` inside of `vmap` differentiates it first: gradients of single examples are
those of products of single examples.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .training import Histories, How, product

Array = Any


def product_of_rows(x: Array, w: Array, histories: Histories, seed: Array | None, how: How) -> Array:
    """`training.product`, which `vmap` over `x` alone makes longer."""
    leaves, tree = jax.tree.flatten((x, w, histories, seed))
    return _call.bind(*leaves, tree=tree, how=how)


def _product(*leaves: Array, tree: Any, how: How) -> Array:
    return product(*jax.tree.unflatten(tree, leaves), how)


_call = Primitive("breccia_training_product")
_call.def_impl(_product)


@_call.def_abstract_eval
def _(*leaves: Any, tree: Any, how: How) -> Any:
    return jax.make_jaxpr(lambda *leaves: _product(*leaves, tree=tree, how=how))(*leaves).out_avals[0]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, tree: Any, how: How) -> Any:
    directions = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lambda *leaves: _product(*leaves, tree=tree, how=how), tuple(primals), directions)


def _batched(leaves: Sequence[Any], axes: Sequence[int | None], *, tree: Any, how: How) -> tuple[Array, int | None]:
    x, w, histories, seed = jax.tree.unflatten(tree, leaves)
    x_axis, w_axis, *others = axes
    seed_axis = None if seed is None else others[-1]
    if seed is not None and seed_axis is not None and w_axis is None:  # one product has one seed
        seed, others[-1] = lax.index_in_dim(seed, 0, seed_axis, keepdims=False), None
    if w_axis is not None or any(axis is not None for axis in others):
        return jax.vmap(lambda *leaves: _product(*leaves, tree=tree, how=how), tuple(axes))(*leaves), 0
    if x_axis is None:
        return product_of_rows(x, w, histories, seed, how), None
    x = jnp.moveaxis(x, x_axis, -3)
    examples, m, k = x.shape[-3:]
    y = product_of_rows(x.reshape(*x.shape[:-3], examples * m, k), w, histories, seed, how)
    return y.reshape(*y.shape[:-2], examples, m, y.shape[-1]), y.ndim - 2


ad.primitive_jvps[_call] = _jvp
batching.primitive_batchers[_call] = _batched
mlir.register_lowering(_call, mlir.lower_fun(_product, multiple_results=False))
