"""Whole models in safetensors files, quantized weights included: `save_model` and `load_model`, like those of safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import breccia
from breccia import BrecciaError, CorruptFileError, ScaledTensor, ScalingRecipe, ShapeError, UnsupportedError, bridges
from breccia.backend import framework_of
from breccia.internal import check_names

from .nn import STATE, ScaledConv1D, ScaledExperts, ScaledLinear, ScaledWeight, metadata
from .quantize import (
    check_replaceable,
    expert_parameters,
    experts_axis,
    is_conv1d,
    is_linear,
    mark,
    replace,
    replace_experts,
    scaled_class,
)
from .storing import AUTO, arrange, arrange_experts
from .tables import ScaledTable, can_look_up, parts_with_rows, put_table
from .values import Values, check_turned, stacks_of

Path = str | os.PathLike[str]


@dataclass(eq=False)
class Entry:
    """A tensor of a model, and the names that share it."""

    model: nn.Module
    value: ScaledWeight | Tensor
    names: list[str] = field(default_factory=list[str])

    @cached_property
    def places(self) -> list[tuple[nn.Module, str]]:
        """The modules that own it, before the model changes, and its names there."""
        return [_owner(self.model, name) for name in self.names]

    @cached_property
    def are_experts(self) -> bool:
        """Whether quantized values become ScaledExperts."""
        return isinstance(self.value, ScaledExperts) or all(leaf in expert_parameters(m) for m, leaf in self.places)

    @cached_property
    def is_table(self) -> bool:
        """Whether quantized values become a ScaledTable: an embedding, and linear layers that multiply by its codes."""
        if isinstance(self.value, ScaledWeight):
            return isinstance(self.value, ScaledTable)
        looked_up = [can_look_up(module) for module, _ in self.places]
        return any(looked_up) and not all(looked_up) and all(map(_holds_codes, self.places))

    @cached_property
    def is_decoded(self) -> bool:
        """Whether quantized values are decoded."""
        becomes = self.are_experts or self.is_table or all(is_linear(m) and leaf == "weight" for m, leaf in self.places)
        return isinstance(self.value, Tensor) and not becomes

    def is_table_of(self, like: ScaledTensor) -> bool:
        """Whether a quantized value of that form becomes a ScaledTable. An embedding cannot look up rows that share a block."""
        if isinstance(self.value, Tensor) and self.is_table and parts_with_rows(like) is None:
            self.is_table, self.is_decoded = False, True
        return self.is_table


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
    model: nn.Module,
    path: Path,
    *,
    strict: bool = True,
    device: Any = None,
    storage: str = AUTO,
    source_dialect: str | None = None,
) -> tuple[list[str], list[str]]:
    """Read the state of `model` from a checkpoint that any library wrote; returns (missing, unexpected) names.

    path: a safetensors file or a folder of them: plain, quantized by breccia, or in any dialect that
        `breccia.bridges.load_checkpoint` reads (GPTQ, AWQ, compressed-tensors, ModelOpt, MLX, ...), under the model's names.

    An `nn.Linear` whose weight is quantized in the file becomes a ScaledLinear, transformers' Conv1D a ScaledConv1D, and a 3-D
    parameter of a module of experts ScaledExperts. An embedding that shares its weight with an `nn.Linear` shares its codes,
    too, and decodes the rows that it looks up. Experts may be one tensor in the file, or one for each expert and projection
    (`experts.7.gate_proj.weight`), which are stacked, and transposed where the module's are. Other quantized tensors of the
    file, such as further embeddings, weights of a subclass or of a layer with further parameters or buffers, are decoded; a
    plain weight for a quantized layer is cast under the layer's recipe.

    Names and shapes are checked by the headers of the files, before any value is read. Values are then read one by one, and
    the model changes after the last one: not at all if one does not fit or cannot be read. A model on "meta" takes the memory
    of its new tensors and of the value that is read; for experts that are stacked, that of one parameter more.

    strict: raise UnknownNameError if the file lacks a tensor of the model or has one that the model lacks. One of several
        names that share a tensor is enough. Scales by which another library casts inputs (`up.input_scale`) may be there: they
        are among the unexpected names, and layers take inputs as they are.
    device: the device for tensors on "meta", in torch's spelling; the CPU by default. Other tensors keep their device, and
        non-persistent buffers on "meta" stay there.
    storage: of the weights that become ScaledLinear or ScaledExperts, as for `quantize_`; others keep their storage.
    source_dialect: the name of the dialect, where the config and the tensors leave a choice.

    Raises ShapeError naming the tensor, UnsupportedError for a layer that has hooks and would be replaced and for weights whose
    inputs the other library multiplies, DialectError for codes without scales where the model has floats, and what
    `breccia.bridges.load_checkpoint` and the reading of its values raise.

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
    checkpoint = bridges.load_checkpoint(path, framework="torch", source_dialect=source_dialect)
    entries, states = _entries(model), _states(model)
    absent = [entry for entry in entries if not any(name in checkpoint for name in entry.names)]
    experts = {entry.names[0]: entry for entry in absent if entry.are_experts}
    stacks = stacks_of(checkpoint, {name: entry.value.shape[0] for name, entry in experts.items()})
    turned = {name for name in stacks if experts_axis(experts[name].places[0][0]) == -2}
    for name in turned:
        check_turned(name, stacks[name])
    values = Values(checkpoint, stacks, _flipped(entries), turned)
    known = {name for entry in entries for name in entry.names} | states.keys()
    for entry in entries:
        if any(values.is_scaled(name) for name in entry.names):
            known |= {f"{name.rpartition('.')[0]}.{STATE}" for name in entry.names}  # the state of a future ScaledLinear
    checkpoint.check_inputs(known.union(*map(values.sources, stacks)))
    missing = [entry.names[0] for entry in entries if not any(name in values for name in entry.names)]
    unexpected = [name for name in values if name not in known]
    if strict:
        claim = f"{os.fspath(path)} does not match the tensors of this {type(model).__name__}"
        activations = set(checkpoint.activations)
        foreign = [name for name in unexpected if name not in activations]
        check_names(claim, missing, foreign, "Pass strict=False to load the matching ones.")
    matches = [(entry, [name for name in entry.names if name in values]) for entry in entries]
    matches = [(entry, names) for entry, names in matches if names]
    checkpoint.check_codes(
        one for entry, names in matches if is_floating(entry.value) for name in names for one in values.sources(name)
    )
    for entry, (first, *_) in matches:
        if entry.is_table and isinstance(like := values.empty(first), ScaledTensor):
            entry.is_table_of(like)
        check_fits(entry, *values.shape_and_axis(first))
    for entry, (first, *others) in matches:
        for name in others:
            if not _same(values[first], values[name], entry.value.dtype):
                raise ShapeError(
                    f"the model ties {first} and {name}, but they differ in the file. Untie them in the model.",
                    names=(first, name),
                )
    layer_states = {name: values[name] for name in values if name in known and name.endswith(STATE)}
    activations = {
        name: _activation(path, name, state)
        for name, state in layer_states.items()
        if name not in states or isinstance(_owner(model, name)[0], ScaledLinear)
    }
    new = [(entry, fitted(entry, values[first], device)) for entry, (first, *_) in matches]
    for entry, value in new:
        put(entry, value)
    quantized = [entry for entry, (first, *_) in matches if values.is_scaled(first)]
    for layer in (_owner(model, name)[0] for entry in quantized for name in entry.names):
        if isinstance(layer, ScaledLinear):
            layer.activation = None  # unless the file has one
    for name, state in layer_states.items():
        layer = _owner(model, name)[0]
        if isinstance(layer, ScaledLinear):
            layer.activation = activations[name]
        elif name in states:
            layer.set_extra_state(state)
    for entry in quantized:
        if isinstance(entry.value, Tensor):
            for layer, leaf in {_owner(model, name) for name in entry.names}:
                if isinstance(layer, ScaledLinear):
                    arrange(layer, storage, entry.value.dtype)
                elif isinstance(weight := getattr(layer, leaf, None), ScaledExperts):
                    arrange_experts(layer, weight, storage)
    if any(isinstance(value, ScaledWeight) for _, value in new):
        mark(model)
    return missing, unexpected


def _holds_codes(place: tuple[nn.Module, str]) -> bool:
    """Whether a module may share a ScaledTable."""
    module, leaf = place
    return leaf == "weight" and (can_look_up(module) or (is_linear(module) and not is_conv1d(module)))


def _activation(path: Path, name: str, state: Any) -> ScalingRecipe | None:
    """The recipe of a layer's inputs, from its state in a file. Raises CorruptFileError."""
    try:
        return metadata(state)["activation"]
    except (BrecciaError, KeyError, AttributeError) as e:
        raise CorruptFileError(f"{os.fspath(path)}: {name} is not the state of a layer ({e}).", name=name) from e


def _need_module(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"{op} takes an nn.Module and a path; got a {type(model).__name__}.")


def _entries(model: nn.Module) -> list[Entry]:
    """Every tensor of the model's state once, with quantized weights as ScaledWeights."""
    weights = _weights(model)
    shared: dict[int, Entry] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        owner = key.rpartition(".")[0]
        name, value = (owner, weights[owner]) if owner in weights else (key, value)
        if not key.endswith(STATE):
            names = shared.setdefault(id(value), Entry(model, value)).names
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


def _same(a: ScaledTensor | Tensor, b: ScaledTensor | Tensor, dtype: torch.dtype) -> bool:
    """Whether two values are the same one in a model of that dtype, NaNs included."""
    if isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor):
        return isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor) and breccia.bytes_equal(a, b)
    return a.shape == b.shape and torch.equal(*(each.to(dtype).reshape(-1).view(torch.uint8) for each in (a, b)))


def is_floating(value: Any) -> bool:
    """Does a model compute with the values of this tensor? One of FP8 has codes, which the model scales itself."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and dtype.is_floating_point and dtype.itemsize > 1


def _flipped(entries: list[Entry]) -> set[str]:
    """The weights of transformers' Conv1D, which are (in_features, out_features)."""
    places = ((name, module) for entry in entries for name, (module, _) in zip(entry.names, entry.places, strict=True))
    return {name for name, module in places if is_conv1d(module) or isinstance(module, ScaledConv1D)}


def check_fits(entry: Entry, shape: tuple[int, ...], axis: int | None) -> None:
    """Raise ShapeError or UnsupportedError if a value cannot take the place of an entry.

    shape: of the value. axis: its contraction axis; None if it is plain.
    """
    old, name = entry.value, entry.names[0]
    if isinstance(old, Tensor):
        framework_of(old, f"load_model: {name}")
    if axis is not None and len(shape) == 4 and entry.are_experts:  # projections that ScaledExperts keeps apart
        shape = (shape[0], shape[1] * shape[2], shape[3])
    if shape != tuple(old.shape):
        raise ShapeError(
            f"{name} has shape {shape} in the file and {tuple(old.shape)} in the model.",
            found=shape,
            expected=tuple(old.shape),
        )
    if axis is None or entry.are_experts or entry.is_decoded:
        return
    if axis != -1 and not all(is_conv1d(module) or isinstance(module, ScaledConv1D) for module, _ in entry.places):
        raise ShapeError(
            f"{name} has blocks along axis {axis} in the file; those of a linear layer run along the last one.",
            axis=axis,
        )
    for full, (module, _) in zip(entry.names, entry.places, strict=True):
        if isinstance(module, nn.Linear) or is_conv1d(module):
            check_replaceable(full.rpartition(".")[0], module)


def fitted(entry: Entry, tensor: ScaledTensor | Tensor, device: Any) -> ScaledWeight | Tensor:
    """The replacement of an entry, on its device: of a tensor that `check_fits`."""
    old = entry.value
    place: Any = (device or "cpu") if old.device.type == "meta" else old.device
    if isinstance(tensor, ScaledTensor) and entry.are_experts:
        dtype = old.dtype if isinstance(old, ScaledExperts | Tensor) else torch.float32
        return ScaledExperts(_stored_as(old, tensor), dtype).to(place)
    tensor = tensor.to(place)
    if isinstance(tensor, ScaledTensor):
        if entry.is_decoded:
            return breccia.dequantize(tensor, out_dtype=old.dtype).reshape(old.shape)
        return (ScaledTable if entry.is_table else ScaledWeight)(_stored_as(old, tensor))
    if isinstance(old, ScaledExperts):
        new = ScaledExperts.quantized(tensor.to(old.dtype), old.recipe, old.axis)
        new.take(_stored_as(old, new.tensor))
        return new
    if isinstance(old, ScaledWeight):
        return type(old)(_stored_as(old, breccia.cast(tensor, old.recipe, axis=old.axis)))
    return tensor.to(old.dtype)


def _stored_as(old: ScaledWeight | Tensor, tensor: ScaledTensor) -> ScaledTensor:
    """`tensor` in the storage of the model's weight."""
    return tensor.to_storage(old.layout.storage) if isinstance(old, ScaledWeight) else tensor


def put(entry: Entry, new: ScaledWeight | Tensor) -> None:
    """Set the new tensor under all names of an entry."""
    model, old = entry.model, entry.value
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
        elif isinstance(new, ScaledTable) and isinstance(old, Tensor):
            put_table(module, new)
        else:
            setattr(module, leaf, new)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that owns the tensor of that name, and its name there."""
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf
