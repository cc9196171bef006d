"""Equinox: quantize the layers of a module, which then runs as it is; train modules in low precision.

Importing this imports Equinox (`pip install 'breccia-jax[equinox]'`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

from jax import tree_util

from . import container, loading
from .delayed import advance
from .equinox_training import TrainingLinear, convert_to_training, histories, with_state
from .equinox_trees import ScaledLayer, flatten, parameters_in, put
from .loading import Names
from .rules import Report, Rules, apply
from .serialised import tree_deserialise_leaves, tree_serialise_leaves
from .weights import ScaledWeight

__all__ = [
    "Report",
    "ScaledLayer",
    "ScaledWeight",
    "TrainingLinear",
    "advance",
    "convert_to_training",
    "histories",
    "load_model",
    "quantize",
    "tree_deserialise_leaves",
    "tree_serialise_leaves",
    "with_state",
]

Module = TypeVar("Module")


def quantize(
    module: Module, rules: Rules, *, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> tuple[Module, Report]:
    """The module with quantized layers, and a report of what was taken, what was left, and why.

    Linear, convolution and embedding layers become ScaledLayers, those inside `eqx.nn.MultiheadAttention` too. Blocks run along
    the axes of a weight behind its first one. rules, include, exclude and what it raises: as `breccia_jax.flax.quantize`, with
    names such as "layers.0.weight". A single rule leaves the weights of `eqx.nn.Embedding` and convolutions, whatever their
    names.

        >>> import equinox as eqx, jax
        >>> from breccia_jax.equinox import quantize
        >>> model = eqx.nn.MLP(64, 8, 64, 1, key=jax.random.key(0))
        >>> quantized, report = quantize(model, "mxfp8", exclude=["layers.1.*"])
        >>> quantized.layers[0].weight.tensor.recipe.spec, type(quantized.layers[1]).__name__
        ('mxfp8', 'Linear')
    """
    container.register()
    places, structure = flatten(module)
    weights, report = apply(parameters_in(places), rules, include, exclude)
    return tree_util.tree_unflatten(structure, [put(place, weights) for place in places]), report


def load_model(
    module: Module,
    path: str | os.PathLike[str],
    *,
    names: Names = None,
    strict: bool = True,
    source_dialect: str | None = None,
) -> Module:
    """The module with the parameters of a checkpoint, quantized ones with the codes and scales of the file.

    Arguments and errors are those of `breccia_jax.flax.load_model`. Weights of Equinox have torch's names and order. A module
    of `jax.ShapeDtypeStruct`s, which `eqx.filter_eval_shape` makes, may be given.

        >>> import equinox as eqx, jax
        >>> from breccia_jax.equinox import load_model
        >>> w = breccia.cast(np.ones((32, 64), np.float32), "mxfp8")
        >>> breccia.bridges.save_safetensors({"weight": w}, tmp / "layer.safetensors")
        >>> layer = eqx.nn.Linear(64, 32, use_bias=False, key=jax.random.key(0))
        >>> load_model(layer, tmp / "layer.safetensors").weight.tensor.recipe.spec
        'mxfp8'
    """
    container.register()
    places, structure = flatten(module)
    loaded = loading.load(
        {name: a for place in places for name, a in place.arrays.items()}, path, names, strict, source_dialect
    )
    return tree_util.tree_unflatten(structure, [put(place, loaded) for place in places])
