"""Whole models in safetensors files, quantized weights included: `save_model` and `load_model`, as safetensors has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import breccia
from breccia import bridges
from breccia.errors import ShapeError, UnknownNameError, UnsupportedError
from breccia.tensor import ScaledTensor

from .nn import ScaledLinear, ScaledWeight, replace

Path = str | os.PathLike[str]
_STATE = "_extra_state"


class _Entry(NamedTuple):
    """A tensor of a model, and the names that share it."""

    names: list[str]
    held: ScaledWeight | Tensor


def save_model(model: nn.Module, path: Path, extra_metadata: Mapping[str, str] | None = None) -> None:
    """Write the state of `model`, quantized weights as `breccia.bridges.save_safetensors` writes ScaledTensors.

    What several names share is stored once, under the first of them. A layer that casts its inputs stores that recipe too.

    Raises UnsupportedError for state that is no tensor, ImportError without breccia-bridges, and what that function raises.
    """
    tensors = {e.names[0]: e.held.tensor if isinstance(e.held, ScaledWeight) else e.held.detach() for e in _entries(model)}
    states = _states(model)
    for name, state in states.items():
        if not isinstance(state, Tensor):
            raise UnsupportedError(
                f"save_model: {name} is a {type(state).__name__}, and safetensors holds tensors; torch.save takes this model.",
                name=name,
            )
    states = {name: state for name, state in states.items() if state.numel()}
    bridges.save_safetensors(tensors | states, path, extra_metadata)


def load_model(model: nn.Module, path: Path, *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Read the state of `model` from a safetensors file or folder of them, whoever wrote it; gives (missing, unexpected) names.

    The file says which weights are quantized, and how: an `nn.Linear` of such a weight becomes a ScaledLinear. What else is
    quantized in the file, such as an embedding, is decoded; what is not, in a layer that is, is cast under its recipe.
    Tensors go to the model's devices, those of "meta" to the CPU. Nothing changes where names or shapes do not fit.

    strict: raise UnknownNameError where the file lacks a tensor of the model or has one that the model lacks. One name of those
        that share a tensor is enough.

    Raises ShapeError, and what `breccia.bridges.load_safetensors` raises.
    """
    found = bridges.load_safetensors(path, framework="torch")
    entries, states = _entries(model), _states(model)
    known = {name for entry in entries for name in entry.names} | states.keys()
    for entry in entries:
        if any(isinstance(found.get(name), ScaledTensor) for name in entry.names):
            known |= {f"{name.rpartition('.')[0]}.{_STATE}" for name in entry.names}  # the state of a layer to be
    missing = [entry.names[0] for entry in entries if not any(name in found for name in entry.names)]
    unexpected = [name for name in found if name not in known]
    if strict and (missing or unexpected):
        said = [f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names]
        raise UnknownNameError(
            f"{os.fspath(path)} does not hold the tensors of this {type(model).__name__}: {'; '.join(said)}. Pass strict=False "
            "to load those that it has.",
            missing=missing,
            unexpected=unexpected,
        )
    given = [(entry, found[name]) for entry in entries if (name := next((n for n in entry.names if n in found), ""))]
    new = [(entry, _fitted(model, entry, tensor)) for entry, tensor in given]
    for entry, held in new:
        _put(model, entry, held)
    for name in found.keys() & known:
        if name.endswith(_STATE):
            _owner(model, name)[0].set_extra_state(found[name])
    return missing, unexpected


def _entries(model: nn.Module) -> list[_Entry]:
    """Every tensor of the model's state once, and quantized weights as what they are."""
    weights = _weights(model)
    shared: dict[int, _Entry] = {}
    for key, held in model.state_dict(keep_vars=True).items():
        owner = key.rpartition(".")[0]
        name, held = (owner, weights[owner]) if owner in weights else (key, held)
        if not key.endswith(_STATE):
            names = shared.setdefault(id(held), _Entry([], held)).names
            names += [name] if name not in names else []
    return list(shared.values())


def _states(model: nn.Module) -> dict[str, Any]:
    """What modules state beside their tensors: layers, how they cast their inputs."""
    weights = _weights(model)
    return {k: v for k, v in model.state_dict().items() if k.endswith(_STATE) and k.rpartition(".")[0] not in weights}


def _weights(model: nn.Module) -> dict[str, ScaledWeight]:
    return {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, ScaledWeight)}


def _fitted(model: nn.Module, entry: _Entry, tensor: ScaledTensor | Tensor) -> ScaledWeight | Tensor:
    """What takes the place of an entry, on its device. Raises ShapeError where it cannot."""
    held, name = entry.held, entry.names[0]
    if tuple(tensor.shape) != tuple(held.shape):
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)} in the file and {tuple(held.shape)} in the model.",
            found=tuple(tensor.shape),
            expected=tuple(held.shape),
        )
    tensor = tensor.to(None if held.device.type == "meta" else held.device)  # type: ignore[arg-type]
    layers = (_owner(model, name) for name in entry.names)
    if isinstance(held, ScaledWeight):
        return ScaledWeight(tensor if isinstance(tensor, ScaledTensor) else breccia.cast(tensor, held.recipe))
    if isinstance(tensor, ScaledTensor):
        if all(isinstance(module, nn.Linear) and leaf == "weight" for module, leaf in layers):
            return ScaledWeight(tensor)
        return breccia.dequantize(tensor, out_dtype=held.dtype)
    return tensor


def _put(model: nn.Module, entry: _Entry, new: ScaledWeight | Tensor) -> None:
    """Give all names of an entry its new tensor."""
    held = entry.held
    if isinstance(held, Tensor) and isinstance(new, Tensor):
        if held.device.type != "meta":
            with torch.no_grad():
                held.copy_(new)
            return
        new = nn.Parameter(new, held.requires_grad) if isinstance(held, nn.Parameter) else new
    made: dict[int, ScaledLinear] = {}
    for name in entry.names:
        module, leaf = _owner(model, name)
        if isinstance(new, ScaledWeight) and isinstance(module, nn.Linear):
            if id(module) not in made:
                made[id(module)] = ScaledLinear.in_place_of(module, new)
            replace(model, name.rpartition(".")[0], made[id(module)])
        else:
            setattr(module, leaf, new)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the tensor of that name, and what it calls it."""
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf
