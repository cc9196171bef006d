"""The parameters of modules of Equinox, with the layers that have them."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
from jax import tree_util

from breccia import ScaledTensor
from breccia.backend import CONVOLUTION, NO_MATRIX, Parameter

from .rules import described
from .trees import dequantize
from .weights import ScaledWeight

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


class Place(NamedTuple):
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
    places = flatten(module, others)[0]
    return [(p, place.leaf) for place in places for p in parameters_in([place])]


def flatten(module: Any, others: tuple[type, ...] = ()) -> tuple[list[Place], Any]:
    """(The places of a module, its structure). others: further types of layers."""

    def is_leaf(x: Any) -> bool:
        return _is_place(x) or isinstance(x, others)

    listed, structure = tree_util.tree_flatten_with_path(module, is_leaf=is_leaf)
    places: list[Place] = []
    for path, leaf in listed:
        name = _named(path)
        inner = tree_util.tree_flatten_with_path(_layer(leaf), is_leaf=_is_weight)[0]
        arrays = {_named(name, within): a for within, a in inner if hasattr(a, "shape") and hasattr(a, "dtype")}
        places.append(Place(name, leaf, arrays))
    return places, structure


def parameters_in(places: list[Place]) -> list[Parameter]:
    """The parameters of these places."""
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


def put(place: Place, new: dict[str, Any]) -> Any:
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
