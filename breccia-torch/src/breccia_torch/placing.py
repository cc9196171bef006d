"""Models that accelerate has dispatched over several places (`device_map=`): their weights, and their hooks after a change.

accelerate replaces the forward function of each module, to move inputs to its device, and weights from the CPU or from a disk.
Its hooks know the parameters of a module, so that a model whose layers were replaced is dispatched again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from breccia import UnsupportedError
from breccia.backend import PARTS

from .nn import ScaledWeight

#: What accelerate adds to a module.
_HOOK, _FORWARD = "_hf_hook", "_old_forward"
#: The attribute with the places by name of module.
_MAP = "hf_device_map"


class Placement(NamedTuple):
    """Where accelerate has put a model: places by name of module, the offloaded tensors by name, and the folder they are in."""

    places: dict[str, Any]
    offloaded: dict[str, Any]
    folder: str | None


def placement(model: nn.Module) -> Placement | None:
    """Where accelerate has put the model; None if it has not dispatched it over several places."""
    if not hasattr(model, _MAP) or not any(hasattr(module, _HOOK) for module in model.modules()):
        return None
    loader = next(_loaders(model), None)
    return Placement(getattr(model, _MAP), dict(getattr(loader, "index", {})), getattr(loader, "save_folder", None))


def moved_by_accelerate(module: nn.Module) -> bool:
    """Whether the module's own forward function is that of its class, within a hook of accelerate."""
    inner = vars(module).get(_FORWARD)
    return inner is not None and getattr(inner, "__func__", None) is type(module).forward


def tensor_of(module: nn.Module, name: str) -> Any:
    """The parameter or buffer of a module, from wherever accelerate has offloaded it to; None if it is None."""
    value = getattr(module, name)
    weights = getattr(getattr(module, _HOOK, None), "weights_map", None)
    if value is None or value.device.type != "meta" or weights is None or name not in weights:
        return value
    tensor: Tensor = weights[name]
    return nn.Parameter(tensor, value.requires_grad) if isinstance(value, nn.Parameter) else tensor


def components_of(model: nn.Module, name: str, weight: ScaledWeight) -> dict[str, Tensor]:
    """The components of a quantized weight of the model by name, from wherever they were offloaded to."""
    owner, _, leaf = name.rpartition(".")
    weights = getattr(getattr(model.get_submodule(owner), _HOOK, None), "weights_map", None)
    parts = {part: component for part in PARTS if (component := getattr(weight, part)) is not None}
    if weights is None:
        return parts
    return {
        part: weights[f"{leaf}.{part}"] if component.device.type == "meta" and f"{leaf}.{part}" in weights else component
        for part, component in parts.items()
    }


def dispatch_again(model: nn.Module, placed: Placement) -> None:
    """Give a model hooks for the layers that it has now. Quantized weights go where their place in the map says.

    placed: where accelerate had put the model before its layers changed. Weights for a disk are written to its folder;
        UnsupportedError if it has none.
    """
    from accelerate import dispatch_model  # pyright: ignore
    from accelerate.hooks import remove_hook_from_submodules  # pyright: ignore

    weights = {name: m for name, m in model.named_modules() if isinstance(m, ScaledWeight)}
    parts = {f"{name}.{part}": value for name, m in weights.items() for part, value in components_of(model, name, m).items()}
    owners = {name.rpartition(".")[0] for name in weights}
    remove_hook_from_submodules(model)
    on_disk = {key: value for key, value in parts.items() if _place(placed.places, key) == "disk"}
    index = placed.offloaded | _written(on_disk, placed.folder)
    for name, weight in weights.items():
        for part in PARTS:
            if (value := parts.get(f"{name}.{part}")) is not None:
                setattr(weight, part, value)
    dispatch_model(
        model,
        placed.places,
        offload_dir=placed.folder,
        offload_index=index or None,
        offload_buffers=True,
        preload_module_classes=sorted({type(model.get_submodule(owner)).__name__ for owner in owners}),
        skip_keys=getattr(model, "_skip_keys_device_placement", None),
    )
    for owner in owners:
        module = model.get_submodule(owner)
        for weight in module.children():
            if isinstance(weight, ScaledWeight):
                weight.keeps_transpose = not getattr(getattr(module, _HOOK, None), "offload", False)


def _loaders(model: nn.Module) -> Iterator[Any]:
    """What reads offloaded weights."""
    for module in model.modules():
        weights = getattr(getattr(module, _HOOK, None), "weights_map", None)
        if weights is not None:
            yield getattr(weights, "dataset", weights)


def _place(places: dict[str, Any], name: str) -> Any:
    """The place of a tensor: that of the longest prefix of its name in the map."""
    prefixes = [prefix for prefix in places if not prefix or name == prefix or name.startswith(f"{prefix}.")]
    return places[max(prefixes, key=len)] if prefixes else None


def _written(tensors: dict[str, Tensor], folder: str | None) -> dict[str, Any]:
    """Write tensors that belong on a disk, and return accelerate's index of them."""
    if not tensors:
        return {}
    if folder is None:
        raise UnsupportedError(
            f"{next(iter(tensors))} belongs on a disk by the device_map, where its quantized weight is written anew: pass "
            "offload_folder=, the folder to write it to."
        )
    from safetensors.torch import save_file

    offloaded: dict[str, Any] = {}
    for name, tensor in tensors.items():
        file = os.path.join(folder, f"{name}.safetensors")
        save_file({name: tensor.detach().contiguous().cpu()}, file)
        offloaded[name] = {"safetensors_file": file, "weight_name": name, "dtype": str(tensor.dtype).removeprefix("torch.")}
    return offloaded


def need_values(op: str, model: nn.Module) -> None:
    """Raise UnsupportedError, naming the weight, if a quantized weight of the model is offloaded."""
    for name, module in model.named_modules():
        if isinstance(module, ScaledWeight) and module.data.device.type == "meta" and placement(model):
            raise UnsupportedError(
                f"{op}: {name} is offloaded by the device_map. Load the model without offload, in one place.", name=name
            )
