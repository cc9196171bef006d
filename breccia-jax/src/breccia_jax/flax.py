"""Flax: quantize the parameters of linen models, and nnx models, which then run as they are; train models in low precision.

Importing this imports Flax (`pip install 'breccia-jax[flax]'`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.meta import AxisMetadata
from jax import Array, tree_util

from breccia import ScaledTensor

from . import container, flax_state, loading
from .delayed import advance
from .dot_general import DotGeneral
from .flax_layers import with_products
from .flax_training import AmaxHistories, TrainingModel, advance_, convert_to_training
from .flax_trees import flatten, parameters_of, parameters_of_linen, put
from .loading import Names
from .rules import Report, Rules, apply
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
    places, structure = flatten(model)
    weights, report = apply(list(parameters_of_linen(places)), rules, include, exclude)
    leaves = [put(place, weights.get(place.name)) for place in places]
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
    places, structure = flatten(model)
    loaded = loading.load({place.name: place.array for place in places}, path, names, strict, source_dialect)
    return tree_util.tree_unflatten(structure, [put(place, loaded.get(place.name)) for place in places])


# ------------------------------------------------------------------------------------------------ nnx


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


def _variable(old: Any, new: Any) -> Any:
    if new is None:
        return old
    if isinstance(new, ScaledWeight):
        return ScaledParam(new)
    return nnx.Param(jnp.asarray(new)) if isinstance(old, ScaledParam) else old.replace(new)
