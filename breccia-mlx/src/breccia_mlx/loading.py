"""Whole models in safetensors files, quantized weights included: `save_model` and `load_model`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

import breccia
from breccia import BrecciaError, ScaledTensor, ScalingRecipe, ShapeError, UnsupportedError, bridges
from breccia.backend import PARTS, as_recipe, checks
from breccia.internal import check_names

from .nn import ScaledEmbedding, ScaledLinear, ScaledWeight, as_activation
from .quantizing import LAYERS, QUANTIZED

Array = Any
Path = str | os.PathLike[str]
#: Layers that are replaced by one that holds a quantized weight, or whose weight is.
_HOLDERS = (*LAYERS, *QUANTIZED, ScaledLinear, ScaledEmbedding)
#: A component of a ScaledWeight, as `save_weights` of a model names it: the weight's name, the recipe, the component.
_COMPONENT = re.compile(rf"(.+)\.([^.]+)\.({'|'.join(PARTS)})")
#: The modes of MLX whose scales are codes, by bits and group size.
_MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}


class _Model(NamedTuple):
    """What a model holds, by name.

    weights: layers that have a quantized form, by the name of their weight. arrays: every other parameter.
    """

    weights: dict[str, nn.Module]
    arrays: dict[str, Array]

    @classmethod
    def of(cls, model: nn.Module) -> _Model:
        weights: dict[str, nn.Module] = {}
        owned: set[str] = set()
        for path, module in model.named_modules():
            if type(module) in _HOLDERS:
                name = f"{path}.weight".lstrip(".")
                weights[name] = module
                owned.add(name)
                if isinstance(module, QUANTIZED):
                    owned |= {f"{path}.{leaf}".lstrip(".") for leaf in ("scales", "biases")}
        scaled = tuple(f"{name}." for name, module in weights.items() if isinstance(module, ScaledLinear | ScaledEmbedding))
        every: Any = tree_flatten(model.parameters())
        return cls(weights, {name: a for name, a in every if name not in owned and not name.startswith(scaled)})


def save_model(model: nn.Module, path: Path, metadata: Mapping[str, str] | None = None, *, force: bool = False) -> None:
    """Write the parameters of `model`, with quantized weights as `breccia.bridges.save_safetensors` writes ScaledTensors.

    The names are those of `breccia convert`, and weights that MLX has quantized are written as ScaledTensors too. `load_model`
    reads the file in MLX, and `breccia_torch.load_model` in torch.

    metadata: further entries of the file's metadata, in addition to `{"format": "mlx"}`.
    force: replace an existing file; otherwise FileExistsError.

    Raises DialectError for a layer of a format of MLX that has no recipe, and what `save_safetensors` raises.

        >>> import mlx.nn as nn, breccia_mlx
        >>> model = nn.Sequential(nn.Linear(64, 32))
        >>> summary = breccia_mlx.quantize(model, "mxfp8")
        >>> breccia_mlx.save_model(model, tmp / "model.safetensors")
        >>> breccia.bridges.load_safetensors(tmp / "model.safetensors", names=["*.weight"])
        {'layers.0.weight': breccia.ScaledTensor('mxfp8', shape=(32, 64), numpy cpu, 8.25 bits per value)}
    """
    _need_module("save_model", model)
    weights, arrays = _Model.of(model)
    tensors: dict[str, Any] = {name: _weight(layer) for name, layer in weights.items()} | arrays
    mx.eval(list(arrays.values()))
    bridges.save_safetensors(tensors, path, {"format": "mlx", **(metadata or {})}, force=force)


def load_model(
    model: nn.Module, path: Path, *, strict: bool = True, activation: ScalingRecipe | str | None = None
) -> tuple[list[str], list[str]]:
    """Read the parameters of `model` from any safetensors file or folder; returns (missing, unexpected) names.

    Quantized weights may be those of `breccia convert` and `save_model`, of `save_weights` of a model that breccia has
    quantized, and of MLX's own format (`weight`, `scales`, `biases`). Their codes and scales are kept: `nn.Linear` becomes
    ScaledLinear and `nn.Embedding` ScaledEmbedding, as do layers that MLX has quantized. Other quantized tensors of the file
    are decoded; a plain weight for a quantized layer is cast under the layer's recipe. The model does not change if names or
    shapes do not fit.

    strict: raise UnknownNameError if the file lacks a parameter of the model or has one that the model lacks.
    activation: a recipe under which layers that become ScaledLinear cast their inputs.

    Raises ShapeError naming the tensor, and what `breccia.bridges.load_safetensors` raises.

        >>> import mlx.nn as nn, breccia_mlx
        >>> w = breccia.cast(np.ones((32, 64), np.float32), "mxfp8")
        >>> breccia.bridges.save_safetensors({"layers.0.weight": w}, tmp / "model.safetensors")
        >>> model = nn.Sequential(nn.Linear(64, 32, bias=False))
        >>> breccia_mlx.load_model(model, tmp / "model.safetensors")
        ([], [])
        >>> type(model.layers[0]).__name__
        'ScaledLinear'
    """
    _need_module("load_model", model)
    activation = as_activation(activation)
    weights, arrays = _Model.of(model)
    listed = bridges.load_safetensors(path, framework="mlx")
    # MLX has no float64: such arrays stay NumPy's.
    tensors = _regrouped({k: mx.array(a) if isinstance(a, np.ndarray) else a for k, a in listed.items()}, weights)
    missing = [name for name in (*weights, *arrays) if name not in tensors]
    unexpected = [name for name in tensors if name not in weights and name not in arrays]
    if strict:
        claim = f"{os.fspath(path)} does not match the parameters of this {type(model).__name__}"
        check_names(claim, missing, unexpected, "Pass strict=False to load the matching ones.")
    new = {name: _decoded(name, array, tensors[name]) for name, array in arrays.items() if name in tensors}
    new_layers: dict[int, nn.Module] = {}
    replaced: dict[str, nn.Module] = {}
    for name, layer in weights.items():
        if name not in tensors:
            continue
        _check_shape(name, _shape(layer), tuple(tensors[name].shape))
        if type(layer) in LAYERS and not isinstance(tensors[name], ScaledTensor):
            plain: Any = layer
            new[name] = tensors[name].astype(plain.weight.dtype)
            continue
        if id(layer) not in new_layers:
            new_layers[id(layer)] = _layer(name, layer, tensors[name], activation)
        replaced[name.rpartition(".")[0]] = new_layers[id(layer)]
    model.update_modules(tree_unflatten(list(replaced.items())))
    model.update(tree_unflatten(list(new.items())))
    return missing, unexpected


def _need_module(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module) or type(model) in _HOLDERS:
        raise UnsupportedError(f"{op} takes a model, an mlx.nn.Module of layers, and a path; got a {type(model).__name__}.")


def _weight(layer: Any) -> ScaledTensor | Array:
    """The weight of a layer."""
    if isinstance(layer, QUANTIZED):
        return bridges.from_mlx_layer(layer)
    return layer.weight.tensor if isinstance(layer.weight, ScaledWeight) else layer.weight


def _shape(layer: Any) -> tuple[int, ...]:
    """The shape of a layer's weight in high precision."""
    *rows, length = layer.weight.shape
    return (*rows, length * 32 // layer.bits if isinstance(layer, QUANTIZED) else length)


def _check_shape(name: str, expected: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if shape != expected:
        raise ShapeError(
            f"{name} has shape {shape} in the file and {expected} in the model.", found=shape, expected=expected, name=name
        )


def _decoded(name: str, parameter: Array, tensor: ScaledTensor | Array) -> Array:
    """A tensor of the file in place of `parameter`."""
    _check_shape(name, tuple(parameter.shape), tuple(tensor.shape))
    return (breccia.dequantize(tensor) if isinstance(tensor, ScaledTensor) else tensor).astype(parameter.dtype)


def _layer(name: str, layer: Any, tensor: ScaledTensor | Array, activation: ScalingRecipe | None) -> nn.Module:
    """The replacement of a layer, with a weight of the file."""
    if not isinstance(tensor, ScaledTensor):
        recipe = _weight(layer).recipe
        try:
            tensor = breccia.cast(tensor, recipe)
        except BrecciaError as e:
            raise type(e)(f"{name}: {e}", **e.found) from e
    if tensor.axis != -1:
        raise ShapeError(
            f"{name} has blocks along axis {tensor.axis} in the file; those of a layer run along the last one.",
            axis=tensor.axis,
        )
    if isinstance(layer, nn.Linear | nn.QuantizedLinear):
        return ScaledLinear.in_place_of(tensor, layer, activation=activation)
    if isinstance(layer, ScaledLinear):
        return ScaledLinear.in_place_of(tensor, layer, activation=layer.activation, prefer=layer.prefer)
    return ScaledEmbedding.in_place_of(tensor, layer, prefer=getattr(layer, "prefer", None))


# ------------------------------------------------------------------------------------------------ names of other writers


def _regrouped(tensors: dict[str, Any], weights: dict[str, nn.Module]) -> dict[str, Any]:
    """The tensors of a file, with those that `save_weights` and MLX write as several arrays as one ScaledTensor each."""
    parts: dict[tuple[str, str], dict[str, Array]] = {}
    for key in list(tensors):
        match = _COMPONENT.fullmatch(key)
        if match is not None and match[1] in weights and not isinstance(tensors[key], ScaledTensor):
            parts.setdefault((match[1], match[2]), {})[match[3]] = tensors.pop(key)
    for (name, spec), components in parts.items():
        tensors[name] = _of_components(name, spec, components, _shape(weights[name]))
    for name, layer in weights.items():
        prefix = name.removesuffix("weight")
        if f"{prefix}scales" in tensors and not isinstance(tensors.get(name), ScaledTensor) and name in tensors:
            w, scales, biases = tensors[name], tensors.pop(f"{prefix}scales"), tensors.pop(f"{prefix}biases", None)
            tensors[name] = _of_mlx(name, w, scales, biases, _shape(layer))
    return tensors


def _of_components(name: str, spec: str, parts: dict[str, Array], shape: tuple[int, ...]) -> ScaledTensor:
    """The tensor of a ScaledWeight's parameters, whose float scales are bit patterns."""
    try:
        recipe = as_recipe(spec)
        fmt = recipe.format
        dtypes = {"scale": fmt.scale.codec.dtype, "global_scale": "float32"}
        dtypes |= {"zero_point": dtypes["scale"]} if fmt.offset == "bias" else {}
        components = {part: _float_of(a, dtypes[part]) if part in dtypes else a for part, a in parts.items()}
        layout = checks.fitted_layout(recipe, shape, -1)
        return ScaledTensor(recipe=recipe, layout=layout, shape=shape, **components)
    except (BrecciaError, TypeError) as e:
        missing = "" if {"data", "scale"} <= parts.keys() else f"the file has only its {', '.join(parts)}; "
        raise ShapeError(f"{name}: {missing}{e}", name=name) from e


def _float_of(words: Array, dtype: str | None) -> Array:
    """A float scale from its bit pattern: of 16 bits in the dtype of the recipe. Scales of 8 bits are codes."""
    if words.dtype == mx.uint8:
        return words
    return words.view(mx.float32 if words.dtype == mx.uint32 else getattr(mx, dtype or "float16"))


def _of_mlx(name: str, w: Array, scales: Array, biases: Array | None, shape: tuple[int, ...]) -> ScaledTensor:
    """The tensor of MLX's arrays. Bits and group size follow from the lengths of rows, which the model knows."""
    length = shape[-1]
    bits, group = w.shape[-1] * 32 // length, length // max(scales.shape[-1], 1)
    if w.shape[-1] * 32 != bits * length or scales.shape[-1] * group != length:
        raise ShapeError(
            f"{name} has rows of {w.shape[-1]} words and {scales.shape[-1]} scales in the file; no width of codes gives the "
            f"{length} columns of the model.",
            found=(tuple(w.shape), tuple(scales.shape)),
            name=name,
        )
    mode = "affine" if biases is not None else _MODES.get((bits, group), f"of {bits} bits in groups of {group}")
    try:
        return bridges.from_mlx(w, scales, biases, group_size=group, bits=bits, mode=mode)
    except BrecciaError as e:
        raise type(e)(f"{name}: {e}", **e.found) from e
