"""Equinox: quantize the layers of a module, which then runs as it is; train modules in low precision.

Importing this imports Equinox (`pip install 'breccia-jax[equinox]'`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
from jax import tree_util

from breccia import ScaledTensor
from breccia.backend import CONVOLUTION, NO_MATRIX, Parameter

from . import container, loading
from .delayed import advance
from .equinox_training import TrainingLinear, convert_to_training, histories, with_state
from .loading import Names
from .rules import Report, Rules, apply, described
from .serialised import tree_deserialise_leaves, tree_serialise_leaves
from .trees import dequantize
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

#: Layers with one weight (out, ...), whose other axes are contracted.
_LAYERS = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.ConvTranspose, eqx.nn.Embedding)


class ScaledLayer(eqx.Module):
    """A layer of Equinox with a quantized weight. A linear layer multiplies by its codes where a kernel does; other layers, and
    other products, decode the weight when the layer is called.

    layer: the layer, with a ScaledWeight as its `weight`. Its other attributes are attributes of this one.
    """

    layer: Any

    def __call__(self, *args: Any, **options: Any) -> Any:
        multiplies = type(self.layer) is eqx.nn.Linear  # reads its weight in `weight @ x` only
        return (self.layer if multiplies else dequantize(self.layer))(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "layer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.layer, name)


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
    places, structure = _flatten(module)
    weights, report = apply(_parameters(places), rules, include, exclude)
    return tree_util.tree_unflatten(structure, [_put(place, weights) for place in places]), report


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
    places, structure = _flatten(module)
    loaded = loading.load(
        {name: a for place in places for name, a in place.arrays.items()}, path, names, strict, source_dialect
    )
    return tree_util.tree_unflatten(structure, [_put(place, loaded) for place in places])


class _Place(NamedTuple):
    """A layer, or an array outside of one: its path, and its arrays by name."""

    name: str
    leaf: Any
    arrays: dict[str, Any]


def _is_place(x: Any) -> bool:
    return isinstance(x, (*_LAYERS, ScaledLayer, ScaledWeight, ScaledTensor))


def _is_weight(x: Any) -> bool:
    return isinstance(x, ScaledWeight | ScaledTensor)


def parameters_of(module: Any, others: tuple[type, ...] = ()) -> list[tuple[Parameter, Any]]:
    """The parameters of a module, each with its layer or itself. others: further types of layers."""
    places = _flatten(module, others)[0]
    return [(p, place.leaf) for place in places for p in _parameters([place])]


def _flatten(module: Any, others: tuple[type, ...] = ()) -> tuple[list[_Place], Any]:
    def is_leaf(x: Any) -> bool:
        return _is_place(x) or isinstance(x, others)

    listed, structure = tree_util.tree_flatten_with_path(module, is_leaf=is_leaf)
    places: list[_Place] = []
    for path, leaf in listed:
        name = _named(path)
        inner = tree_util.tree_flatten_with_path(_layer(leaf), is_leaf=_is_weight)[0]
        arrays = {_named(name, within): a for within, a in inner if hasattr(a, "shape") and hasattr(a, "dtype")}
        places.append(_Place(name, leaf, arrays))
    return places, structure


def _parameters(places: list[_Place]) -> list[Parameter]:
    parameters: list[Parameter] = []
    for place in places:
        for name, array in place.arrays.items():
            if _is_weight(array):
                continue
            if isinstance(place.leaf, _LAYERS) and name.rpartition(".")[2] == "weight":
                spatial: int = getattr(place.leaf, "num_spatial_dims", 0)  # of convolutions
                stacked = array.ndim - 2 - spatial
                kind = CONVOLUTION if spatial else "embedding" if isinstance(place.leaf, eqx.nn.Embedding) else "linear"
                parameters.append(described(name, array, tuple(range(stacked + 1, array.ndim)), kind=kind))
            else:
                why = "no weight of a Linear, convolution or Embedding layer"
                parameters.append(described(name, array, None, why, NO_MATRIX))
    return parameters


def _put(place: _Place, new: dict[str, Any]) -> Any:
    """The layer or array, with the arrays of `new` in place of its own."""
    if not isinstance(place.leaf, (*_LAYERS, ScaledLayer)):
        return new.get(place.name, place.leaf)
    listed, structure = tree_util.tree_flatten_with_path(_layer(place.leaf), is_leaf=_is_weight)
    leaves = [new.get(_named(place.name, within), leaf) for within, leaf in listed]
    layer = tree_util.tree_unflatten(structure, leaves)
    return ScaledLayer(layer) if any(map(_is_weight, leaves)) else layer


def _layer(leaf: Any) -> Any:
    return leaf.layer if isinstance(leaf, ScaledLayer) else leaf


def _named(*paths: Any) -> str:
    """Paths joined by dots; a name is one of them."""
    texts = [path if isinstance(path, str) else tree_util.keystr(path, simple=True, separator=".") for path in paths]
    return ".".join(filter(None, texts))
