"""Whole models in safetensors files, quantized weights included: `save_model` and `load_model`, like those of safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import breccia
from breccia import BrecciaError, CorruptFileError, ScaledTensor, ScalingRecipe, ShapeError, UnsupportedError, bridges
from breccia.backend import framework_of
from breccia.internal import check_names

from .nn import STATE, ScaledConv1D, ScaledExperts, ScaledLinear, ScaledWeight, metadata
from .quantize import check_replaceable, expert_parameters, is_conv1d, is_linear, mark, replace, replace_experts, scaled_class
from .storing import AUTO, arrange, arrange_experts

Path = str | os.PathLike[str]


class _Entry(NamedTuple):
    """A tensor of a model, and the names that share it."""

    names: list[str]
    value: ScaledWeight | Tensor


def save_model(model: nn.Module, path: Path, metadata: Mapping[str, str] | None = None, *, force: bool = False) -> None:
    """Write the state of `model`, with quantized weights as `breccia.bridges.save_safetensors` writes ScaledTensors.

    A tensor shared by several names is stored once, under the first. A layer that casts its inputs stores that recipe too.

    metadata: further entries of the file's metadata, in addition to `{"format": "pt"}`.
    force: replace an existing file; otherwise FileExistsError.

    Raises UnsupportedError for state that is not a tensor or has no values, ImportError without breccia-bridges, and what
    `save_safetensors` raises.

        >>> import torch, breccia_torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        >>> summary = breccia_torch.quantize_(model, "mxfp8")
        >>> breccia_torch.save_model(model, tmp / "model.safetensors")
        >>> breccia.bridges.load_safetensors(tmp / "model.safetensors", names=["*.weight"])
        {'0.weight': breccia.ScaledTensor('mxfp8', shape=(32, 64), numpy cpu, 8.25 bits per value)}
    """
    _need_module("save_model", model)
    tensors = {e.names[0]: e.value.tensor if isinstance(e.value, ScaledWeight) else e.value for e in _entries(model)}
    tensors |= {name: state for name, state in _states(model).items() if not _is_empty(model, name)}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor | ScaledTensor):
            raise UnsupportedError(
                f"save_model: {name} is a {type(tensor).__name__}, but safetensors stores only tensors; use torch.save.",
                name=name,
            )
        if tensor.device.type == "meta":
            raise UnsupportedError(f"save_model: {name} is on the meta device and has no values; load them first.", name=name)
    bridges.save_safetensors(tensors, path, {"format": "pt", **(metadata or {})}, force=force)


def load_model(
    model: nn.Module, path: Path, *, strict: bool = True, device: Any = None, storage: str = AUTO
) -> tuple[list[str], list[str]]:
    """Read the state of `model` from any safetensors file or folder; returns (missing, unexpected) names.

    An `nn.Linear` whose weight is quantized in the file becomes a ScaledLinear, transformers' Conv1D a ScaledConv1D, and a 3-D
    parameter of a module of experts ScaledExperts. Experts may be one tensor in the file, or one for each expert and
    projection (`experts.7.gate_proj.weight`), which are stacked. Other quantized tensors of the file, such as embeddings or
    weights of a subclass, are decoded; a plain weight for a quantized layer is cast under the layer's recipe.
    The model does not change if names or shapes do not fit.

    strict: raise UnknownNameError if the file lacks a tensor of the model or has one that the model lacks. One of several
        names that share a tensor is enough.
    device: the device for tensors on "meta", in torch's spelling; the CPU by default. Other tensors keep their device, and
        non-persistent buffers on "meta" stay there.
    storage: of the weights that become ScaledLinear or ScaledExperts, as for `quantize_`; others keep their storage.

    Raises ShapeError naming the tensor, UnsupportedError for a layer that has hooks and would be replaced, and what
    `breccia.bridges.load_safetensors` raises.

        >>> import torch, breccia_torch
        >>> w = breccia.cast(np.ones((32, 64), np.float32), "mxfp8")
        >>> breccia.bridges.save_safetensors({"0.weight": w}, tmp / "model.safetensors")
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
        >>> breccia_torch.load_model(model, tmp / "model.safetensors")
        ([], [])
        >>> model[0]
        ScaledLinear(
          in_features=64, out_features=32, bias=False
          (weight): ScaledWeight((32, 64), MXFP8BlockScaling(fp8_format='E4M3', block_size=32, scale_rule='rceil'))
        )
    """
    _need_module("load_model", model)
    tensors = bridges.load_safetensors(path, framework="torch")
    entries, states = _entries(model), _states(model)
    _stack_experts(tensors, entries)
    known = {name for entry in entries for name in entry.names} | states.keys()
    for entry in entries:
        if any(isinstance(tensors.get(name), ScaledTensor) for name in entry.names):
            known |= {f"{name.rpartition('.')[0]}.{STATE}" for name in entry.names}  # the state of a future ScaledLinear
    missing = [entry.names[0] for entry in entries if not any(name in tensors for name in entry.names)]
    unexpected = [name for name in tensors if name not in known]
    if strict:
        claim = f"{os.fspath(path)} does not match the tensors of this {type(model).__name__}"
        check_names(claim, missing, unexpected, "Pass strict=False to load the matching ones.")
    matches = [(entry, [name for name in entry.names if name in tensors]) for entry in entries]
    matches = [(entry, names) for entry, names in matches if names]
    for _, (first, *others) in matches:
        for name in others:
            if not _same(tensors[first], tensors[name]):
                raise ShapeError(
                    f"the model ties {first} and {name}, but they differ in the file. Untie them in the model.",
                    names=(first, name),
                )
    activations = {
        name: _activation(path, name, tensors[name])
        for name in tensors.keys() & known
        if name.endswith(STATE) and (name not in states or isinstance(_owner(model, name)[0], ScaledLinear))
    }
    new = [(entry, _fitted(model, entry, tensors[names[0]], device)) for entry, names in matches]
    for entry, value in new:
        _put(model, entry, value)
    for entry, (name, *_) in matches:
        for layer in (_owner(model, name)[0] for name in entry.names) if isinstance(tensors[name], ScaledTensor) else ():
            if isinstance(layer, ScaledLinear):
                layer.activation = None  # unless the file has one
    for name in tensors.keys() & known:
        if name.endswith(STATE):
            layer = _owner(model, name)[0]
            if isinstance(layer, ScaledLinear):
                layer.activation = activations[name]
            elif name in states:
                layer.set_extra_state(tensors[name])
    for entry, names in matches:
        if isinstance(entry.value, Tensor) and isinstance(tensors[names[0]], ScaledTensor):
            for layer, leaf in {_owner(model, name) for name in entry.names}:
                if isinstance(layer, ScaledLinear):
                    arrange(layer, storage, entry.value.dtype)
                elif isinstance(weight := getattr(layer, leaf, None), ScaledExperts):
                    arrange_experts(layer, weight, storage)
    if any(isinstance(value, ScaledWeight) for _, value in new):
        mark(model)
    return missing, unexpected


def _activation(path: Path, name: str, state: Any) -> ScalingRecipe | None:
    """The recipe of a layer's inputs, from its state in a file. Raises CorruptFileError."""
    try:
        return metadata(state)["activation"]
    except (BrecciaError, KeyError, AttributeError) as e:
        raise CorruptFileError(f"{os.fspath(path)}: {name} is not the state of a layer ({e}).", name=name) from e


def _need_module(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"{op} takes an nn.Module and a path; got a {type(model).__name__}.")


def _entries(model: nn.Module) -> list[_Entry]:
    """Every tensor of the model's state once, with quantized weights as ScaledWeights."""
    weights = _weights(model)
    shared: dict[int, _Entry] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        owner = key.rpartition(".")[0]
        name, value = (owner, weights[owner]) if owner in weights else (key, value)
        if not key.endswith(STATE):
            names = shared.setdefault(id(value), _Entry([], value)).names
            names += [name] if name not in names else []
    return list(shared.values())


def _states(model: nn.Module) -> dict[str, Any]:
    """The extra state of modules: for layers, how they cast their inputs."""
    weights = _weights(model)
    return {k: v for k, v in model.state_dict().items() if k.endswith(STATE) and k.rpartition(".")[0] not in weights}


def _is_empty(model: nn.Module, name: str) -> bool:
    """Is it the state of a layer that does not cast its inputs?"""
    layer = _owner(model, name)[0]
    return isinstance(layer, ScaledLinear) and layer.activation is None


def _weights(model: nn.Module) -> dict[str, ScaledWeight]:
    return {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, ScaledWeight)}


#: The projections that transformers fuses into one parameter of a module of experts, as files of one tensor per expert name
#: them. The rows of several are joined.
_PROJECTIONS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}


def _stack_experts(tensors: dict[str, Any], entries: list[_Entry]) -> None:
    """Replace those of the tensors that belong to single experts by one for each parameter of the model that fuses them."""
    for entry in entries:
        if len(entry.value.shape) != 3 or any(name in tensors for name in entry.names):
            continue
        name = entry.names[0]
        module, _, fused = name.rpartition(".")
        for projections in _PROJECTIONS.get(fused, ()):
            experts = range(entry.value.shape[0])
            names = [[f"{module}.{expert}.{projection}.weight" for expert in experts] for projection in projections]
            if all(one in tensors for column in names for one in column):
                tensors[name] = stacked([[tensors.pop(one) for one in column] for column in names], name)
                break


def stacked(columns: list[list[Any]], name: str) -> Any:
    """Projections of all experts as one tensor: of shape (experts, rows, columns), with the rows of several joined.

    columns: for each projection, the tensors of the experts. Several quantized projections become
        (experts, projections, rows, columns), since each keeps its tensor-level scale.
    Raises UnsupportedError if only some are quantized, and what `breccia.stack` raises.
    """
    scaled = [isinstance(one, ScaledTensor) for column in columns for one in column]
    if any(scaled):
        check_all_quantized(name, sum(scaled), len(scaled))
        each = [breccia.stack(column) for column in columns]
        return each[0] if len(each) == 1 else breccia.stack(each, axis=1)
    return torch.cat([torch.stack(column) for column in columns], dim=1)


def check_all_quantized(name: str, quantized: int, count: int) -> None:
    """Raise UnsupportedError unless all `count` tensors of a module's experts are quantized."""
    if quantized < count:
        raise UnsupportedError(
            f"{name}: {quantized} of {count} tensors of its experts are quantized; a module of experts has all of them "
            "quantized, or none. Convert the checkpoint again, with --include or --exclude for all experts.",
            name=name,
        )


def _same(a: ScaledTensor | Tensor, b: ScaledTensor | Tensor) -> bool:
    if isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor):
        return isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor) and breccia.bytes_equal(a, b)
    return a.dtype == b.dtype and torch.equal(a, b)


def _fitted(model: nn.Module, entry: _Entry, tensor: ScaledTensor | Tensor, device: Any) -> ScaledWeight | Tensor:
    """The replacement of an entry, on its device. Raises ShapeError or UnsupportedError if it does not fit."""
    old, name = entry.value, entry.names[0]
    if isinstance(old, Tensor):
        framework_of(old, f"load_model: {name}")
    places = [(*_owner(model, name), name) for name in entry.names]
    experts = all(leaf in expert_parameters(module) or isinstance(old, ScaledExperts) for module, leaf, _ in places)
    if experts and isinstance(tensor, ScaledTensor):
        return _fitted_experts(old, tensor, name, device)
    if tuple(tensor.shape) != tuple(old.shape):
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)} in the file and {tuple(old.shape)} in the model.",
            found=tuple(tensor.shape),
            expected=tuple(old.shape),
        )
    place: Any = (device or "cpu") if old.device.type == "meta" else old.device
    if isinstance(tensor, ScaledTensor):
        tensor = tensor.to(place)
        becomes = all(is_linear(module) and leaf == "weight" for module, leaf, _ in places)
        if not becomes and isinstance(old, Tensor):
            return breccia.dequantize(tensor, out_dtype=old.dtype)
        if tensor.axis != -1 and not all(is_conv1d(module) or isinstance(module, ScaledConv1D) for module, *_ in places):
            raise ShapeError(
                f"{name} has blocks along axis {tensor.axis} in the file; those of a linear layer run along the last one.",
                axis=tensor.axis,
            )
        for module, _, full in places:
            if isinstance(module, nn.Linear) or is_conv1d(module):
                check_replaceable(full.rpartition(".")[0], module)
        return ScaledWeight(_stored_as(old, tensor))
    tensor = tensor.to(place)
    if isinstance(old, ScaledExperts):
        new = ScaledExperts.quantized(tensor.to(old.dtype), old.recipe, old.axis)
        new.take(_stored_as(old, new.tensor))
        return new
    if isinstance(old, ScaledWeight):
        return ScaledWeight(_stored_as(old, breccia.cast(tensor, old.recipe, axis=old.axis)))
    return tensor.to(old.dtype)


def _fitted_experts(old: ScaledWeight | Tensor, tensor: ScaledTensor, name: str, device: Any) -> ScaledExperts:
    new = ScaledExperts(_stored_as(old, tensor), old.dtype if isinstance(old, ScaledExperts | Tensor) else torch.float32)
    if new.shape != tuple(old.shape):
        raise ShapeError(
            f"{name} has shape {new.shape} in the file and {tuple(old.shape)} in the model.",
            found=new.shape,
            expected=tuple(old.shape),
        )
    return new.to(device or "cpu" if old.device.type == "meta" else old.device)


def _stored_as(old: ScaledWeight | Tensor, tensor: ScaledTensor) -> ScaledTensor:
    """`tensor` in the storage of the model's weight."""
    return tensor.to_storage(old.layout.storage) if isinstance(old, ScaledWeight) else tensor


def _put(model: nn.Module, entry: _Entry, new: ScaledWeight | Tensor) -> None:
    """Set the new tensor under all names of an entry."""
    old = entry.value
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if old.device.type != "meta":
            with torch.no_grad():
                old.copy_(new)
            return
        new = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    layers: dict[nn.Module, ScaledLinear] = {}
    for name in entry.names:
        module, leaf = _owner(model, name)
        if isinstance(new, ScaledExperts) and isinstance(old, Tensor):
            replace_experts(module, leaf, new)
        elif isinstance(new, ScaledWeight) and (isinstance(module, nn.Linear) or is_conv1d(module)):
            if module not in layers:
                layers[module] = scaled_class(module).in_place_of(module, new)  # pyright: ignore[reportArgumentType]
            replace(model, name.rpartition(".")[0], layers[module])
        else:
            setattr(module, leaf, new)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that owns the tensor of that name, and its name there."""
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf
