"""Whole models that torchao quantized, as models of breccia's layers, and back. breccia-bridges converts their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import breccia
from breccia import BrecciaError, OptionError, ScalingRecipe, UnsupportedError

from .nn import ScaledConv1D, ScaledExperts, ScaledLinear, ScaledWeight
from .quantize import check_replaceable, mark, replace

_LIBRARY = "torchao"


def from_torchao_model_(model: nn.Module, *, activation: ScalingRecipe | str | None = "same") -> tuple[str, ...]:
    """Replace each linear layer whose weight is a torchao tensor by a ScaledLinear of the same codes and scales, in place.

    model: after `torchao.quantize_(model, config)`. Layers that share a weight keep sharing it.
    activation: "same" (default) casts inputs under the recipe that torchao's layer quantizes them by, if it does; None leaves
        inputs unchanged; a recipe is used for all. Weights are the same bits; the cast of inputs is breccia's, which may round
        differently than torchao's by an ulp of the scale.

    Returns the names of the converted weights. Nothing is replaced unless all can be.

    Raises OptionError if no linear layer has a torchao weight, UnsupportedError for a model that is itself the layer, and
    for one with hooks, and DialectError, naming the layer, for a weight or inputs that breccia has no recipe for. Quantized
    embeddings are left.

        >>> import torch, breccia_torch
        >>> from torchao.quantization import Int8WeightOnlyConfig, quantize_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        >>> quantize_(model, Int8WeightOnlyConfig())
        >>> breccia_torch.from_torchao_model_(model)
        ('0.weight',)
        >>> type(model[0]).__name__
        'ScaledLinear'
    """
    _need_module("from_torchao_model_", model)
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and _is_torchao(module.weight)
    }
    if not layers:
        raise OptionError(
            "from_torchao_model_: no nn.Linear of this model has a torchao tensor as its weight; quantize it first: "
            "torchao.quantize_(model, config)."
        )
    for name, layer in layers.items():
        check_replaceable(name, layer)
    weights: dict[int, ScaledWeight] = {}
    replacements: dict[nn.Module, ScaledLinear] = {}
    for name, layer in layers.items():
        if layer in replacements:
            continue
        weight = layer.weight
        if id(weight) not in weights:
            weights[id(weight)] = ScaledWeight(_named(name, breccia.from_foreign, weight.detach()))
        inputs = _named(name, breccia.bridges.torchao_activation, weight) if activation == "same" else activation
        replacements[layer] = ScaledLinear.in_place_of(layer, weights[id(weight)], inputs)
    for name, layer in layers.items():
        replace(model, name, replacements[layer])
    mark(model, instead_of=_LIBRARY)
    return tuple(f"{name}.weight" for name in layers)


def to_torchao_model_(model: nn.Module, *, dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    """Replace each ScaledLinear by an nn.Linear whose weight is a torchao tensor of the same codes and scales, in place.

    dtype: the model's dtype: what torchao decodes to, and what inputs have.
    A layer that casts its inputs gets a weight that makes torchao quantize them by the same recipe. Its FP8 products then
    accumulate in FP32 (`use_fast_accum=False`), as breccia's do, also where torchao's model had used fast accumulation.

    Returns the names of the converted weights. Nothing is replaced unless all can be.

    Raises OptionError if there is no such layer, ImportError without torchao or breccia-bridges, and DialectError, naming the
    layer, for a format that torchao has no class for. ScaledExperts are left.

        >>> import torch, breccia_torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        >>> summary = breccia_torch.quantize_(model, "fp8_row")
        >>> breccia_torch.to_torchao_model_(model)
        ('0.weight',)
        >>> type(model[0]).__name__, type(model[0].weight.data).__name__
        ('Linear', 'Float8Tensor')
    """
    _need_module("to_torchao_model_", model)
    layers = {n: m for n, m in model.named_modules(remove_duplicate=False) if type(m) is ScaledLinear and n}
    if not layers:
        others = [type(m).__name__ for m in model.modules() if isinstance(m, ScaledExperts | ScaledConv1D)]
        also = f" It has {', '.join(sorted(set(others)))}, which torchao has no counterpart of." if others else ""
        raise OptionError(
            f"to_torchao_model_: the model has no ScaledLinear; quantize it first: quantize_(model, recipe).{also}"
        )
    weights: dict[Any, nn.Parameter] = {}
    replacements: dict[ScaledLinear, nn.Linear] = {}
    for name, layer in layers.items():
        if layer in replacements:
            continue
        key = (id(layer.weight), layer.activation)
        if key not in weights:
            options = {"dtype": dtype, "activation": layer.activation}
            tensor = _named(name, breccia.to_foreign, layer.weight.tensor, _LIBRARY, **options)
            weights[key] = nn.Parameter(tensor, requires_grad=False)
        linear = nn.Linear(layer.in_features, layer.out_features, False, "meta", dtype)
        linear.weight = weights[key]
        linear.register_parameter("bias", layer.bias)
        replacements[layer] = linear.train(layer.training)
    for name, layer in layers.items():
        replace(model, name, replacements[layer])
    return tuple(f"{name}.weight" for name in layers)


def _is_torchao(weight: Any) -> bool:
    return type(weight).__module__.partition(".")[0] == _LIBRARY


def _named(name: str, convert: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of a conversion, or its error with the layer's name."""
    try:
        result = convert(*arguments, **options)
    except BrecciaError as e:
        raise type(e)(f"{name}.weight: {e}", **e.found) from e
    if isinstance(result, breccia.TensorPair):
        raise UnsupportedError(f"{name}.weight: a layer has one orientation of its weight.")
    return result


def _need_module(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"{op} takes an nn.Module; got a {type(model).__name__}.", found=type(model).__name__)
    if isinstance(model, nn.Linear | ScaledLinear):
        raise UnsupportedError(f"{op} replaces layers of a model, and this model is itself one: put it into nn.Sequential.")
