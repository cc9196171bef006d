"""The parameters of models of Flax: variables of linen, and nnx modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from flax import nnx
from flax.core.meta import AxisMetadata
from jax import tree_util

from breccia import ScaledTensor
from breccia.backend import CONVOLUTION, NO_MATRIX, Parameter

from .rules import described
from .weights import ScaledWeight

Axes = tuple[int, ...]

# ------------------------------------------------------------------------------------------------ linen


class Place(NamedTuple):
    """A leaf of linen's variables: its name, the leaf, which may be a box with metadata, and the array in it."""

    name: str
    leaf: Any
    array: Any


def is_place(leaf: Any) -> bool:
    """Whether a node of linen's variables is one place, though it has leaves."""
    return isinstance(leaf, AxisMetadata | ScaledTensor)


def flatten(model: Any) -> tuple[list[Place], Any]:
    """(The places of linen's variables, their structure)."""
    listed, structure = tree_util.tree_flatten_with_path(model, is_leaf=is_place)
    return [Place(tree_util.keystr(path, simple=True, separator="."), leaf, inside(leaf)) for path, leaf in listed], structure


def inside(leaf: Any) -> Any:
    """The array or the quantized weight in a box of linen's."""
    if not isinstance(leaf, AxisMetadata) or isinstance(leaf, ScaledWeight):
        return leaf
    leaves = tree_util.tree_leaves(leaf, is_leaf=lambda x: x is not leaf and is_place(x))
    return leaves[0] if len(leaves) == 1 else leaf


def put(place: Place, new: Any) -> Any:
    """The leaf of a place with a new value; None leaves it."""
    if new is None:
        return place.leaf
    if isinstance(place.leaf, AxisMetadata) and not isinstance(place.leaf, ScaledWeight):
        return place.leaf.replace_boxed(new)
    return new


def parameters_of_linen(places: list[Place]) -> Iterator[Parameter]:
    """The parameters of these places."""
    shapes = {place.name: tuple(place.array.shape) for place in places if hasattr(place.array, "shape")}
    for place in places:
        owner, _, leaf = place.name.rpartition(".")
        if place.name in shapes and not is_place(place.array):
            axes, why = _contracted(owner, leaf, shapes[place.name], shapes.get(f"{owner}.bias".lstrip(".")))
            kind = "linear" if leaf == "kernel" else "embedding" if leaf == "embedding" else NO_MATRIX
            if leaf == "kernel" and len(shapes[place.name]) > 2 and "conv" in owner.rpartition(".")[2].lower():
                kind = CONVOLUTION
            yield described(place.name, place.array, axes, why, kind)


def places_of(variables: Any) -> Iterator[tuple[tuple[str, ...], Parameter]]:
    """The path and the parameter of each array of linen's variables."""
    places = flatten(variables)[0]
    paths = {p.name: p for p in parameters_of_linen(places)}
    for path, _ in tree_util.tree_flatten_with_path(variables, is_leaf=is_place)[0]:
        keys = tuple(str(getattr(key, "key", key)) for key in path)
        if (name := tree_util.keystr(path, simple=True, separator=".")) in paths:
            yield keys, paths[name]


def _contracted(owner: str, leaf: str, shape: tuple[int, ...], bias: tuple[int, ...] | None) -> tuple[Axes | None, str]:
    """The contracted axes of a linen parameter, or None and the reason."""
    ndim = len(shape)
    if leaf == "embedding":
        return (ndim - 1,), ""
    if leaf != "kernel":
        return None, f"{leaf!r} is no kernel or embedding: a rule with axes takes it"
    if bias is not None:  # of the shape of a layer's features, behind the axes of stacked layers
        fits = [
            (stacked, len(bias) - stacked)
            for stacked in range(len(bias))
            if bias[:stacked] == shape[:stacked] and bias[stacked:] == shape[ndim - len(bias) + stacked :]
        ]
        candidates = [tuple(range(stacked, ndim - features)) for stacked, features in fits if stacked + features < ndim]
    elif ndim == 2:
        candidates = [(0,)]
    else:
        part = owner.rpartition(".")[2]
        candidates = [(0,)] if part in ("query", "key", "value") else [tuple(range(ndim - 1))] if part == "out" else []
    if len(candidates) == 1:
        return candidates[0], ""
    return None, "its axes may be contracted or features: a rule with axes takes it"


# ------------------------------------------------------------------------------------------------ nnx


def parameters_of(model: Any) -> tuple[dict[str, tuple[Any, str, Any]], list[Parameter]]:
    """(The layer, the attribute and the variable of each parameter of an nnx module, by name; the parameters)."""
    places: dict[str, tuple[Any, str, Any]] = {}
    parameters: list[Parameter] = []
    owners: dict[int, set[Axes | None]] = {}
    for path, module in nnx.iter_modules(model):
        for leaf, variable in vars(module).items():
            if isinstance(variable, nnx.Param) and hasattr(variable.get_raw_value(), "shape"):
                name = ".".join(map(str, (*path, leaf)))
                axes, why = _contracted_by(module, leaf, variable)
                places[name] = module, leaf, variable
                owners.setdefault(id(variable), set()).add(axes)
                parameters.append(described(name, variable.get_raw_value(), axes, why, _kind(module, leaf)))
    listed = [
        replace(p, axes=None, why="shared by layers that contract different axes")
        if len(owners[id(places[p.name][2])]) > 1
        else p
        for p in parameters
    ]
    return places, listed


def _kind(module: Any, leaf: str) -> str:
    """What the layer tells about a parameter's use."""
    if isinstance(module, nnx.Embed):
        return "embedding"
    return CONVOLUTION if isinstance(module, nnx.Conv | nnx.ConvTranspose) else "linear" if leaf == "kernel" else NO_MATRIX


def _contracted_by(module: Any, leaf: str, variable: Any) -> tuple[Axes | None, str]:
    """The contracted axes of a parameter of an nnx module, or None and the reason."""
    ndim = variable.get_raw_value().ndim
    axes, rank = None, ndim
    if leaf == "kernel" and isinstance(module, nnx.Linear):
        axes, rank = (0,), 2
    elif leaf == "kernel" and isinstance(module, nnx.LinearGeneral):
        batch, contracted = len(module.batch_axis), len(module.in_features)
        axes, rank = tuple(range(batch, batch + contracted)), batch + contracted + len(module.out_features)
    elif leaf == "kernel" and isinstance(module, nnx.ConvTranspose):
        rank = len(module.kernel_shape)
        axes = (rank - 1,) if module.transpose_kernel else tuple(range(rank - 1))
    elif leaf == "kernel" and isinstance(module, nnx.Conv):
        rank = len(module.kernel_shape)
        axes = tuple(range(rank - 1))
    elif leaf == "embedding" and isinstance(module, nnx.Embed):
        axes, rank = (1,), 2
    elif leaf == "kernel" and isinstance(module, nnx.Einsum) and module.einsum_str:
        left, right = module.einsum_str.replace(" ", "").split("->")
        labels = left.split(",")[1]
        axes = tuple(n for n, label in enumerate(labels) if label not in right)
        rank = len(labels)
        axes = axes if axes and axes == tuple(range(axes[0], axes[-1] + 1)) and "." not in labels else None
    if axes is None or rank > ndim:
        return None, f"{leaf!r} of {type(module).__name__} has no known contracted axes: a rule with axes takes it"
    return tuple(a + ndim - rank for a in axes), ""  # behind the axes of stacked layers
