"""Trees of parameters: dicts of Flax and Haiku, modules of Equinox, whatever JAX can flatten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import tree_util

import breccia
from breccia.backend import FLOATS, BrecciaError, OptionError, ScaledTensor, ScalingRecipe, check_recipe, dtype_name

from . import container

Filter = Callable[[str, Any], bool]
Tree = TypeVar("Tree")

#: Less than this on a side, a matrix saves nothing worth its error.
_SIDE = 32


def quantize(params: Tree, recipe: ScalingRecipe, filter: Filter | None = None, *, axis: int = -2) -> Tree:
    """The tree with its weights as ScaledTensors under `recipe`, blocks running along the contraction axis.

    filter: called with the path and the array of each leaf, as in filter("params/Dense_0/kernel", leaf); true for those to
        quantize. By default those are FP32, FP16 and BF16 arrays of two axes or more whose last two sides are at least 32 long.
        Embedding tables are among them: leave them out where a model reads rows.
    axis: the contraction axis of the leaves chosen. -2 is that of kernels of shape (in, out), as those of Flax and Haiku are;
        -1 that of weights of shape (out, in), as those of Equinox are.

    Leaves that are ScaledTensors stay as they are. A model takes the tree by way of `breccia_jax.dequantize`, inside `jax.jit`.

    Raises what `breccia.cast` raises, naming the leaf; OptionError where no leaf is chosen.
    """
    container.register()
    check_recipe(recipe)
    leaves, structure = tree_util.tree_flatten_with_path(params, is_leaf=_is_scaled)
    chosen = 0
    found: list[Any] = []
    for path, leaf in leaves:
        name = tree_util.keystr(path, simple=True, separator="/")
        if not _is_scaled(leaf) and (filter(name, leaf) if filter else _is_weight(leaf)):
            chosen += 1
            try:
                leaf = breccia.cast(leaf, recipe, axis=axis)
            except BrecciaError as e:
                raise type(e)(f"quantize: {name}: {e}", **e.found) from e
        found.append(leaf)
    if not chosen:
        raise OptionError(
            f"quantize: no leaf is chosen, of {len(leaves)} in the tree"
            + ("; filter, which is called with the path and the array of each, took none." if filter else "."),
            leaves=len(leaves),
        )
    return tree_util.tree_unflatten(structure, found)


def dequantize(params: Tree, dtype: Any = "float32") -> Tree:
    """The tree with the values of its ScaledTensors in `dtype`, as `breccia.dequantize` gives them; other leaves stay."""
    container.register()

    def values(leaf: Any) -> Any:
        return breccia.dequantize(leaf, out_dtype=dtype) if _is_scaled(leaf) else leaf

    return jax.tree.map(values, params, is_leaf=_is_scaled)


def _is_scaled(leaf: Any) -> bool:
    return isinstance(leaf, ScaledTensor)


def _is_weight(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", ())
    return len(shape) >= 2 and min(shape[-2:]) >= _SIDE and dtype_name(leaf) in FLOATS
