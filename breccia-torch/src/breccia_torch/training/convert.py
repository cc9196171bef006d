"""`convert_to_training_`: the linear layers and experts of a model as layers in training, in place; and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from math import prod
from typing import Any
from zlib import crc32

from torch import nn

from breccia import OptionError, Policy, TrainingRecipe, UnsupportedError
from breccia.backend import Parameter, TrainingSummary, choose, none_chosen
from breccia.internal import TENSORS

from ..experts import TRAINING, training_layer
from ..nn import ScaledExperts
from ..quantize import can_multiply_grouped, experts_axis, multiply_grouped, parameters_of, replace
from ..storing import IMPLEMENTATION
from . import measuring
from .experts import ParameterExperts
from .layer import TrainingLayer
from .linear import TrainingLinear
from .operands import forget_casts
from .state import StepState

Filter = Callable[[nn.Module, str], bool]
AUTO = "auto"
#: FP8 GEMMs of GPUs need features in multiples of this.
ALIGNED = 16
#: Where DistributedDataParallel finds the names of buffers that it does not broadcast.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def convert_to_training_(
    model: nn.Module,
    recipe: TrainingRecipe | str,
    filter_fn: Filter | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    min_size: int | str = AUTO,
) -> TrainingSummary:
    """Let the linear layers of `model`, and experts of transformers, train in low precision under `recipe`, in place.

    Each `nn.Linear` becomes a `breccia_torch.nn.TrainingLinear` with the same Parameters, hooks and mode, so an optimizer that
    has them already keeps them, and tied and frozen weights stay so. The 3-D Parameters of transformers' modules of experts
    keep their names; a module beside each multiplies it as `TrainingExperts` does. Convert before `torch.compile`, DDP and
    `fully_shard`. By default embeddings, norms, routers and output heads keep their precision (`breccia.backend.KEPT`), as do
    layers whose features are no multiple of 16, which FP8 GEMMs need. The summary has the reason for each.

    recipe: a `TrainingRecipe`, or the name of a preset.
    filter_fn: f(module, name) -> whether to convert; it replaces the defaults and patterns.
    include, exclude: shell-style patterns over names of weights, "*.mlp.*.weight". `include` also converts what the defaults
        leave, `exclude` leaves layers in high precision, as the first and last blocks under NVFP4. `exclude` beats `include`.
    min_size: convert weights of at least this many elements. "auto" (default) converts all, except that on a GPU each shape of
        weights is timed once against BF16, forward and backward on 4096 rows, and is left where low precision takes longer.
        Experts are not timed.

    Returns a summary: `chosen`, `left` with reasons, `recipe`.

    Raises UnsupportedError for what is no model of several layers, OptionError if nothing is converted, for `filter_fn` beside
    patterns and for another `min_size`, UnknownNameError for a pattern that matches nothing, and what `TrainingRecipe` raises.

        >>> import torch, breccia_torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        >>> breccia_torch.convert_to_training_(model, "mxfp8")
        1 layers train under TrainingRecipe('mxfp8'): 0.weight
        left in high precision (10 x 128 has a side that is no multiple of 16): 2.weight
    """
    recipe = TrainingRecipe.of(recipe)
    if not isinstance(model, nn.Module) or isinstance(model, nn.Linear):
        way = ": breccia_torch.nn.TrainingLinear.from_linear(layer, recipe)" if isinstance(model, nn.Linear) else ""
        raise UnsupportedError(f"convert_to_training_ replaces layers of a model; got a {type(model).__name__}{way}.")
    if filter_fn is not None and (include or exclude):
        raise OptionError("convert_to_training_ takes filter_fn or patterns (include=, exclude=), not both.")
    if min_size != AUTO and (not isinstance(min_size, int) or isinstance(min_size, bool) or min_size < 0):
        raise OptionError(f"min_size is {AUTO!r} or a number of elements >= 0; got {min_size!r}.", min_size=min_size)
    listed = [_in_training(p) for p in parameters_of(model)]
    # The recipe of a weight only says that it is chosen.
    stand_in = next(r for t in TENSORS for r in (getattr(recipe, t), getattr(recipe, f"{t}_columns")) if r is not None)
    chosen, left = choose(
        listed,
        Policy.of(stand_in, include, exclude),
        "convert_to_training_",
        select=None if filter_fn is None else partial(_by, filter_fn),
        what="weight of a linear layer",
        listed_by="`model.named_parameters()`",
    )
    layers: dict[str, Any] = {}
    for p in listed:
        if p.name in chosen:
            why = _too_slow(p, recipe, min_size)
            if why:
                left[p.name] = why
            else:
                layers[p.name] = p.layer
    if not layers:
        done = sum(isinstance(layer, TrainingLayer) for layer in model.modules())
        raise none_chosen("convert_to_training_", left, f"; {done} layers train in low precision already")
    made: dict[int, TrainingLinear] = {}  # a layer may stand in several places
    for full, layer in layers.items():
        name = full.removesuffix(".weight")
        seed = crc32(name.encode())
        if not isinstance(layer, nn.Linear):
            leaf = full.rpartition(".")[2]
            setattr(layer, f"{leaf}{TRAINING}", ParameterExperts.of(layer, leaf, recipe, seed=seed, name=name))
            multiply_grouped(layer)
            continue
        if id(layer) not in made:
            made[id(layer)] = TrainingLinear.from_linear(layer, recipe, seed=seed, name=name)
        replace(model, name, made[id(layer)])
    _keep_from_broadcasts(model)
    return TrainingSummary(recipe, tuple(layers), left)


def convert_from_training_(model: nn.Module, filter_fn: Filter | None = None) -> tuple[str, ...]:
    """Let the layers in training of `model` compute in high precision again, in place: the inverse of `convert_to_training_`.

    It is for the last steps of a run (arXiv:2509.25149 ends runs under NVFP4 so), before the model is quantized, and to give
    layers another recipe by `convert_to_training_`. Each `TrainingLinear` becomes an `nn.Linear`, and experts of transformers
    multiply their Parameters as they are. Layers keep their identity, Parameters, hooks and mode, so optimizers, DDP and
    `fully_shard` of blocks around them keep working; compiled functions compile again. A CUDA graph stays what it was when it
    was captured. Histories and counters are dropped: `state_dict` is that of the plain model.

    filter_fn: f(module, name) -> whether to convert; by default all. Experts have the name of their Parameter.

    Returns the names of the weights.

    Raises UnsupportedError for what is no model, for a layer of a class derived from `TrainingLinear` (as parametrizations and
    `fully_shard` of the layer itself make one) and for one with a forward of its own; OptionError if there is nothing to
    convert. `TrainingExperts` that a model was written with have no other form, and stay.

        >>> import torch, breccia_torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        >>> _ = breccia_torch.convert_to_training_(model, "nvfp4")
        >>> breccia_torch.convert_from_training_(model)
        ('0.weight', '2.weight')
        >>> model[0]
        Linear(in_features=64, out_features=64, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"convert_from_training_ takes a model; got a {type(model).__name__}.")
    every = [
        (name, layer)
        for name, layer in model.named_modules(remove_duplicate=False)  # a layer may stand in several places
        if isinstance(layer, TrainingLinear | ParameterExperts)
    ]
    chosen = {id(layer): layer for name, layer in every if filter_fn is None or filter_fn(layer, name.removesuffix(TRAINING))}
    if not chosen:
        why = "" if filter_fn is None else " that filter_fn chooses"
        raise OptionError(f"convert_from_training_: {type(model).__name__} has no layer of convert_to_training_{why}.")
    layers = [(name, layer) for name, layer in every if id(layer) in chosen]
    for name, layer in layers:
        if isinstance(layer, TrainingLinear) and type(layer) is not TrainingLinear:
            raise UnsupportedError(
                f"convert_from_training_: {name or 'the model'} is a {type(layer).__name__}, not a TrainingLinear. Undo what "
                "made it one (a parametrization, fully_shard of the layer itself), or leave it out with filter_fn.",
                name=name,
            )
        if "forward" in vars(layer):
            raise UnsupportedError(
                f"convert_from_training_: {name or 'the model'} has a forward of its own, which may call "
                "TrainingLinear's. Remove it first, or leave the layer out with filter_fn.",
                name=name,
            )
    dropped = {f"{name}.state.{buffer}" for name, layer in layers if layer.state for buffer, _ in layer.state.named_buffers()}
    for layer in chosen.values():
        layer.end()
        if isinstance(layer, ParameterExperts):
            module, leaf = layer.owner
            delattr(module, f"{leaf}{TRAINING}")
        else:
            layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
    forget_casts()
    if not any(isinstance(module, ParameterExperts | ScaledExperts) for module in model.modules()):
        for layer in chosen.values():
            if isinstance(layer, ParameterExperts) and layer.implementation not in (None, IMPLEMENTATION):
                layer.owner[0].config._experts_implementation = layer.implementation  # pyright: ignore
    _keep_from_broadcasts(model, dropped)
    return tuple(name.removesuffix(TRAINING) if name.endswith(TRAINING) else f"{name}.weight".lstrip(".") for name, _ in layers)


def _keep_from_broadcasts(model: nn.Module, dropped: Set[str] = frozenset()) -> None:
    """Let DistributedDataParallel leave every rank its own states, in place of those of rank 0 before each forward pass.

    dropped: the names of buffers that are no more.
    """
    states = (name for name, module in model.named_modules() if isinstance(module, StepState))
    names = [f"{name}.{buffer}" for name in states for buffer, _ in model.get_submodule(name).named_buffers()]
    before: list[str] = getattr(model, _IGNORED, [])
    ignored = [*(name for name in before if name not in dropped), *(name for name in names if name not in before)]
    if ignored or before:
        setattr(model, _IGNORED, ignored)


def _in_training(p: Parameter) -> Parameter:
    """The parameter with the reason why it cannot train in low precision, if there is one."""
    why = p.why
    layer = p.layer
    experts = p.kind == "experts" and can_multiply_grouped(layer)
    if isinstance(layer, TrainingLayer) or training_layer(layer, p.name.rpartition(".")[2]) is not None:
        why = "trains in low precision already"
    elif p.axes is not None and not why:
        sides = " x ".join(map(str, p.shape))
        if type(layer) is not nn.Linear and not experts:
            why = f"{type(layer).__name__} has no form for training"
        elif experts and experts_axis(layer) != -1:
            why = f"{type(layer).__name__} stores its experts transposed"
        elif "forward" in vars(layer):
            why = "its layer has a forward of its own"
        elif any(side % ALIGNED for side in p.shape[-2:]):
            why = f"{sides} has a side that is no multiple of {ALIGNED}"
    return Parameter(p.name, p.shape, p.nbytes, p.kind, None if why else p.axes, why, layer)


def _by(filter_fn: Filter, p: Parameter) -> str:
    """The reason to leave a parameter under `filter_fn`; empty to convert it."""
    if p.axes is None:
        return p.why
    return "" if filter_fn(p.layer, p.name.rpartition(".")[0]) else "left out by filter_fn"


def _too_slow(p: Parameter, recipe: TrainingRecipe, min_size: int | str) -> str:
    """Why a layer that could be converted stays in high precision; empty if it does not."""
    if isinstance(min_size, int):
        return f"smaller than min_size={min_size}" if prod(p.shape) < min_size else ""
    if p.kind == "experts":
        return ""
    speed = measuring.speed(p.layer, recipe)
    return "" if speed is None or speed >= 1 else f"measured {speed:.2f} x the speed of BF16 on this device"
