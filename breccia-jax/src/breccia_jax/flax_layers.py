"""Layers of Flax that multiply by the codes of their quantized kernel, with Flax's own code around the product.

A layer of linen gets its product when it reads the kernel, a layer of nnx when its module is quantized. Layers to which the
user gave a `dot_general` or `promote_dtype` keep them and multiply decoded values, as subclasses do, which may compute with
the kernel.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen, nnx
from flax.linen.dtypes import promote_dtype as promote_in_linen
from flax.nnx.nn.dtypes import promote_dtype as promote_in_nnx
from jax import lax

from .contraction import CodesDotGeneral, contracted
from .weights import READINGS, ScaledWeight

Array = Any


def attended(query: Array, weight: ScaledWeight) -> Array | None:
    """The products of `query` and each row of an embedding; None where decoded values are multiplied."""
    return contracted(query, weight, (query.ndim - 1,), (1,), query.dtype)


def plain(layer: Any) -> bool:
    """Whether the products of a layer, and what it does with its kernel before them, are Flax's."""
    if getattr(layer, "dot_general_cls", None) is not None or layer.promote_dtype not in (promote_in_linen, promote_in_nnx):
        return False
    return vars(layer).get("dot_general") in (None, lax.dot_general)


# ------------------------------------------------------------------------------------------------ linen


def _reading(weight: ScaledWeight) -> None:
    """Give the layer of linen that reads its kernel a product by codes. It is a copy that Flax makes for each `apply`."""
    layer = linen.module._context.module_stack[-1]  # pyright: ignore[reportPrivateUsage]
    if type(layer) in (linen.Dense, linen.DenseGeneral) and plain(layer):
        object.__setattr__(layer, "dot_general", CodesDotGeneral(weight))
    elif type(layer) is linen.Embed and plain(layer):

        def attend(query: Array) -> Array:
            (promoted,) = layer.promote_dtype(query, dtype=layer.dtype or jnp.result_type(query, weight.dtype))
            y = attended(promoted, weight)
            return type(layer).attend(layer, query) if y is None else y

        object.__setattr__(layer, "attend", attend)


READINGS.append(_reading)


# ------------------------------------------------------------------------------------------------ nnx


def _multiplied(self: Any, inputs: Array, out_sharding: Any = None) -> Array:
    """`__call__` of the base class, whose product is that of the quantized kernel."""
    base: Any = type(self).__base__
    layer = object.__new__(base)
    vars(layer).update(vars(self))
    weight = self.kernel.get_raw_value()
    if isinstance(weight, ScaledWeight) and plain(self):
        vars(layer)["dot_general"] = CodesDotGeneral(weight)
    return layer(inputs, out_sharding)


class ScaledLinear(nnx.Linear):
    """`nnx.Linear` with a quantized kernel."""

    __call__ = _multiplied


class ScaledLinearGeneral(nnx.LinearGeneral):
    """`nnx.LinearGeneral` with a quantized kernel."""

    __call__ = _multiplied


class ScaledEmbed(nnx.Embed):
    """`nnx.Embed` with a quantized embedding, whose codes `attend` multiplies. Rows that are looked up are decoded."""

    def attend(self, query: Array, out_sharding: Any = None) -> Array:
        weight = self.embedding.get_raw_value()
        if isinstance(weight, ScaledWeight) and out_sharding is None and plain(self):
            (promoted,) = self.promote_dtype((query,), dtype=self.dtype or jnp.result_type(query, weight.dtype))
            y = attended(promoted, weight)
            if y is not None:
                return y
        return super().attend(query, out_sharding)


_SCALED: dict[type, type] = {nnx.Linear: ScaledLinear, nnx.LinearGeneral: ScaledLinearGeneral, nnx.Embed: ScaledEmbed}


def with_products(module: Any) -> Any:
    """The module, whose layers with quantized parameters multiply by codes from now on."""
    for _, layer in nnx.iter_modules(module):
        scaled = _SCALED.get(type(layer))
        if scaled is not None and any(_is_scaled(variable) for variable in vars(layer).values()):
            object.__setattr__(layer, "__class__", scaled)
    return module


def _is_scaled(variable: Any) -> bool:
    return isinstance(variable, nnx.Variable) and isinstance(variable.get_raw_value(), ScaledWeight)
