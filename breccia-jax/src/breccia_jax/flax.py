"""Flax: quantize the parameters of linen models, and nnx models, which then run as they are; train models in low precision.

Importing this imports Flax (`pip install 'breccia-jax[flax]'`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.meta import AxisMetadata
from jax import Array, tree_util

from breccia import ScaledTensor
from breccia.backend import CONVOLUTION, NO_MATRIX, Parameter

from . import container, flax_state, loading
from .delayed import advance
from .dot_general import DotGeneral
from .flax_layers import with_products
from .flax_training import AmaxHistories, TrainingModel, advance_, convert_to_training
from .loading import Names
from .rules import Report, Rules, apply, described
from .weights import ScaledWeight

__all__ = [
    "AmaxHistories",
    "DotGeneral",
    "Report",
    "ScaledParam",
    "ScaledWeight",
    "TrainingModel",
    "advance",
    "advance_",
    "convert_to_training",
    "load_model",
    "quantize",
]

Model = TypeVar("Model")
Axes = tuple[int, ...]

#: linen reads a quantized parameter as it reads boxes with metadata: by `unbox`.
AxisMetadata.register(ScaledWeight)


flax_state.register()


class ScaledParam(nnx.Variable[Any]):
    """An nnx variable with a quantized parameter; not an `nnx.Param`, so optimizers leave it alone.

    `variable[...]` and `variable.get_value()` are the decoded values, `variable.get_raw_value()` is the ScaledWeight.
    """

    def get_value(self, **options: Any) -> Any:
        value = super().get_value(**options)
        # Flax puts descriptions of arrays in their places to print a module.
        has_arrays = isinstance(value, ScaledWeight) and isinstance(value.tensor.data_source, Array | np.ndarray)
        return value.unbox() if has_arrays else value

    @property
    def __scaled_tensor__(self) -> ScaledTensor:
        return self.get_raw_value().tensor


def quantize(model: Model, rules: Rules, *, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> tuple[Model, Report]:
    """The quantized model, and a report of what was taken, what was left, and why.

    model: variables or parameters of a linen model, as `init` returns them, or an nnx module, which is not changed.
        `module.apply(variables, ...)` and the nnx module run as before. `Dense`, `DenseGeneral`, `Linear`, `LinearGeneral` and
        `Embed.attend` multiply by codes where a kernel does, as on CPUs; other layers, and other products, read decoded values,
        inside `jax.jit` one at a time.
    rules: a recipe; a pair of a recipe and the contracted axes; or a policy: a mapping from shell-style patterns of names to
        recipes, pairs, or "keep" or None to leave what matches, or the path of a YAML file with one; see `breccia.Policy`. The
        first pattern that matches applies, and parameters that none matches are left unless it has a "default". A single rule,
        and the default, leave embeddings, norms, routers, output heads, convolutions and the other kinds of
        `breccia.backend.KEPT`, by their names (a head is "lm_head") or the type of their layer.
    include, exclude: patterns of names, beside a single rule: `exclude` beats `include`, which beats that default.

    Names are paths joined by dots, "params.Dense_0.kernel". Blocks run along the axes that a layer contracts. In an nnx module
    these are those of its layers. In a tree of linen's they follow from the shape of the bias beside a kernel, and from Flax's
    names of the parts of attention; kernels of two axes are (in, out), embeddings (entries, features) with blocks along
    features. Where this does not tell, the parameter is left, and a rule with the axes takes it.

    Raises what `breccia.cast` raises, naming the parameter; UnknownNameError for a pattern that matches no parameter;
    OptionError for wrong rules, and if no parameter is chosen.

        >>> import jax.numpy as jnp
        >>> from breccia_jax.flax import quantize
        >>> params = {"params": {"Dense_0": {"kernel": jnp.ones((64, 32)), "bias": jnp.zeros(32)}}}
        >>> scaled, report = quantize(params, "mxfp8")
        >>> tensor = scaled["params"]["Dense_0"]["kernel"].tensor
        >>> tensor.recipe.spec, tensor.shape, tensor.axis
        ('mxfp8', (64, 32), -2)
    """
    container.register()
    if isinstance(model, nnx.Module):
        return _quantize_nnx(model, rules, include, exclude)
    places, structure = _flatten(model)
    weights, report = apply(list(_parameters(places)), rules, include, exclude)
    leaves = [_put(place, weights.get(place.name)) for place in places]
    return tree_util.tree_unflatten(structure, leaves), report


def load_model(
    model: Model,
    path: str | os.PathLike[str],
    *,
    names: Names = None,
    strict: bool = True,
    source_dialect: str | None = None,
) -> Model:
    """The model with the parameters of a checkpoint, quantized ones with the codes and scales of the file.

    model: variables or parameters of a linen model, or an nnx module, which is not changed. Arrays may be
        `jax.ShapeDtypeStruct`s, as `jax.eval_shape(module.init, ...)` and `nnx.eval_shape` return them.
    path: a safetensors file or a folder of them: what `breccia convert` or `breccia.bridges.save_safetensors` wrote, plain
        weights, and every dialect that `breccia.bridges.load_checkpoint` reads (GPTQ, AWQ, compressed-tensors, MLX, ...).
    names: the name in the file for names of parameters, as a mapping or a function. By default a parameter
        "params.layers_0.mlp.kernel" is found under its name, under its name without "params.", and where torch has another
        name and order, as "layers_0.mlp.weight" of shape (out, in), a convolution of shape (out, in, height, width). Names that
        are given are looked up in both orders: the shape tells which, or the blocks of a square quantized matrix. Biases of
        attention, along one axis in torch, get the heads of the model.
    strict: raise UnknownNameError if the file lacks a parameter, or has a tensor that the model lacks. Scales by which another
        library casts inputs (`up.input_scale`) may be there.
    source_dialect: the name of the dialect, where the config and the tensors leave a choice.

    Names and shapes are checked by the headers; then values are read one by one.

    Raises ShapeError naming the parameter, DialectError for codes without scales in place of floats, UnsupportedError for a
    transposed convolution of torch in an nnx module, and what `breccia.bridges.load_checkpoint` raises.

        >>> import jax.numpy as jnp
        >>> from breccia_jax.flax import load_model
        >>> w = breccia.cast(np.ones((32, 64), np.float32), "mxfp8")  # (out, in), as in torch
        >>> breccia.bridges.save_safetensors({"Dense_0.weight": w}, tmp / "model.safetensors")
        >>> params = {"params": {"Dense_0": {"kernel": jnp.zeros((64, 32))}}}
        >>> loaded = load_model(params, tmp / "model.safetensors")
        >>> loaded["params"]["Dense_0"]["kernel"].tensor.recipe.spec
        'mxfp8'

    A layer as GPTQ stores it; without a config, a file leaves its versions 1 and 2 as a choice:

        >>> from safetensors.numpy import save_file
        >>> words = {"qweight": np.full((8, 32), 0x99999999, np.uint32), "qzeros": np.full((1, 4), 0x77777777, np.uint32)}
        >>> layer = {f"Dense_0.{end}": array.view(np.int32) for end, array in words.items()}
        >>> save_file(layer | {"Dense_0.scales": np.ones((1, 32), np.float16)}, tmp / "gptq.safetensors")
        >>> loaded = load_model(params, tmp / "gptq.safetensors", source_dialect="gptq")
        >>> print(loaded["params"]["Dense_0"]["kernel"].unbox()[0, :3])
        [1. 1. 1.]
    """
    container.register()
    if isinstance(model, nnx.Module):
        graph, state = nnx.split(model)
        variables = nnx.to_flat_state(state)
        params = {".".join(map(str, way)): v for way, v in variables if isinstance(v, nnx.Param | ScaledParam)}
        flipped = {
            ".".join(map(str, (*way, "kernel"))) for way, m in nnx.iter_modules(model) if isinstance(m, nnx.ConvTranspose)
        }
        loaded = loading.load(
            {name: v.get_raw_value() for name, v in params.items()},
            path,
            names,
            strict,
            source_dialect,
            flipped & params.keys(),
        )
        new = [(way, _variable(v, loaded.get(".".join(map(str, way))))) for way, v in variables]
        return with_products(nnx.merge(graph, nnx.from_flat_state(new)))
    places, structure = _flatten(model)
    loaded = loading.load({place.name: place.array for place in places}, path, names, strict, source_dialect)
    return tree_util.tree_unflatten(structure, [_put(place, loaded.get(place.name)) for place in places])


# ------------------------------------------------------------------------------------------------ linen


class _Place(NamedTuple):
    """A leaf of linen's variables: its name, the leaf, which may be a box with metadata, and the array in it."""

    name: str
    leaf: Any
    array: Any


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, AxisMetadata | ScaledTensor)


def _flatten(model: Any) -> tuple[list[_Place], Any]:
    listed, structure = tree_util.tree_flatten_with_path(model, is_leaf=_is_place)
    return [_Place(tree_util.keystr(path, simple=True, separator="."), leaf, _inside(leaf)) for path, leaf in listed], structure


def _inside(leaf: Any) -> Any:
    """The array or the quantized weight in a box of linen's."""
    if not isinstance(leaf, AxisMetadata) or isinstance(leaf, ScaledWeight):
        return leaf
    leaves = tree_util.tree_leaves(leaf, is_leaf=lambda x: x is not leaf and _is_place(x))
    return leaves[0] if len(leaves) == 1 else leaf


def _put(place: _Place, new: Any) -> Any:
    if new is None:
        return place.leaf
    if isinstance(place.leaf, AxisMetadata) and not isinstance(place.leaf, ScaledWeight):
        return place.leaf.replace_boxed(new)
    return new


def _parameters(places: list[_Place]) -> Iterator[Parameter]:
    shapes = {place.name: tuple(place.array.shape) for place in places if hasattr(place.array, "shape")}
    for place in places:
        owner, _, leaf = place.name.rpartition(".")
        if place.name in shapes and not _is_place(place.array):
            axes, why = _contracted(owner, leaf, shapes[place.name], shapes.get(f"{owner}.bias".lstrip(".")))
            kind = "linear" if leaf == "kernel" else "embedding" if leaf == "embedding" else NO_MATRIX
            if leaf == "kernel" and len(shapes[place.name]) > 2 and "conv" in owner.rpartition(".")[2].lower():
                kind = CONVOLUTION
            yield described(place.name, place.array, axes, why, kind)


def places_of(variables: Any) -> Iterator[tuple[tuple[str, ...], Parameter]]:
    """The path and the parameter of each array of linen's variables."""
    places = _flatten(variables)[0]
    paths = {p.name: p for p in _parameters(places)}
    for path, _ in tree_util.tree_flatten_with_path(variables, is_leaf=_is_place)[0]:
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


def _quantize_nnx(model: Any, rules: Rules, include: Iterable[str], exclude: Iterable[str]) -> tuple[Any, Report]:
    model = nnx.clone(model)
    places, listed = parameters_of(model)
    weights, report = apply(listed, rules, include, exclude)
    shared: dict[int, ScaledParam] = {}
    for name, weight in weights.items():
        variable = places[name][2]
        new = shared.setdefault(id(variable), ScaledParam(weight))
        for owner, attribute, other in places.values():
            if other is variable:
                setattr(owner, attribute, new)
    return with_products(model), report


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


def _variable(old: Any, new: Any) -> Any:
    if new is None:
        return old
    if isinstance(new, ScaledWeight):
        return ScaledParam(new)
    return nnx.Param(jnp.asarray(new)) if isinstance(old, ScaledParam) else old.replace(new)
