"""Embeddings and output layers that transformers ties: they share one quantized weight, a ScaledTable.

transformers ties parameters by their names. While it loads a model, one module of those that share has the quantized weight,
and the others have none; afterwards they get it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import modeling_utils

from breccia import ScaledTensor, ScalingRecipe
from breccia.internal import once

from ..checkpoint import Entry, check_fits, fitted, put
from ..nn import ScaledLinear
from ..quantize import replace
from ..tables import ScaledTable, put_table


class Ties:
    """The weights of a model that transformers ties, by their names, and those that get one quantized weight.

    names: of the weights that the files have a value for.
    device_map: weights share codes only where all of the model is loaded in one place, since accelerate moves the weights of
        each module by itself.
    kept: names of modules that keep their precision, and so do those tied to them.
    """

    def __init__(self, model: Any, names: Iterable[str], device_map: Any, kept: Iterable[str]) -> None:
        groups: dict[str, set[str]] = {}
        for target, source in model.all_tied_weights_keys.items():
            groups.setdefault(source, {source}).add(target)
        self._model, self._names = model, {name for group in groups.values() for name in group}
        given, kept = set(names), list(kept)
        shared = [group for group in groups.values() if len(group & given) == 1] if _is_one_place(device_map) else []
        self._groups = [group for group in shared if not any(is_within(name, kept) for name in group)]
        self._waiting: dict[str, dict[str, nn.Parameter]] = {}

    def __contains__(self, name: object) -> bool:
        """Does transformers tie the weight of that name?"""
        return name in self._names

    def take(self, name: str, like: ScaledTensor) -> bool:
        """Give the module with the weight `name` a quantized one of the form of `like`, and let those that share it wait.

        Returns False, and changes nothing, where these modules cannot hold codes. transformers does not load, tie or initialize
        weights that wait. Raises what `check_fits` raises.
        """
        others = sorted(next((group - {name} for group in self._groups if name in group), ()))
        parameter = self._model.get_parameter(name)
        entry = Entry(self._model, parameter, [name, *others])
        if not others or not entry.is_table_of(like):
            return False
        check_fits(entry, like.shape, like.axis)
        put(Entry(self._model, parameter, [name]), fitted(entry, like, "meta"))
        waiting = self._waiting[name] = {}
        for one in entry.names:
            self._model.all_tied_weights_keys.pop(one, None)
            module: Any = self._model.get_submodule(one.rpartition(".")[0])
            module._is_hf_initialized = True  # transformers reads the mark
            if one != name:
                waiting[one], module.weight = module.weight, None
        return True

    def install(self, activation_of: Callable[[str], ScalingRecipe | None]) -> None:
        """Give the waiting modules their weight. activation_of: the recipe for the inputs of the layer of that name."""
        for name, waiting in self._waiting.items():
            table: Any = self._model.get_submodule(name)
            table._is_hf_initialized = True
            for one, parameter in waiting.items():
                owner = one.rpartition(".")[0]
                module: Any = self._model.get_submodule(owner)
                if isinstance(module, nn.Embedding):
                    put_table(module, table)
                else:
                    module.weight = parameter  # the layer takes its shape and dtype from there
                    replace(self._model, owner, ScaledLinear.in_place_of(module, table, activation_of(owner)))
            for one in (name, *waiting):  # an embedding may have buffers that no file has, such as a scale
                self._model.get_submodule(one.rpartition(".")[0])._is_hf_initialized = False
        if self._waiting:
            self._model.initialize_weights()


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether a weight is in one of these modules, named whole or from a dot on."""
    return any(f".{module}." in f".{name}." for module in modules)


def _is_one_place(device_map: Any) -> bool:
    places = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
    return len(places) == 1 and places.isdisjoint(_SPREAD)


#: What a device_map calls many places, and the place whose weights are not in memory.
_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential", "disk")


def decode_tables(model: Any, dtype: torch.dtype | None = None) -> None:
    """Give embeddings and the output layers that share a table one parameter with its values in `dtype`, or the table's."""
    parameters: dict[ScaledTable, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if not has_table(module):
            continue
        table: Any = module.weight
        if table not in parameters:
            parameters[table] = nn.Parameter(table.decoded(dtype))
        if isinstance(module, ScaledLinear):
            replace(model, name, module := module.to_linear(parameters[table].dtype))
        del module.weight
        module.weight = parameters[table]
    if parameters:
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def has_table(module: nn.Module) -> bool:
    """Whether an embedding or an output layer has a ScaledTable."""
    return isinstance(getattr(module, "weight", None), ScaledTable)


@once
def watch() -> None:
    """Wrap two methods of PreTrainedModel, for all models: the names that it ties, and the change of the vocabulary's size."""
    model: Any = modeling_utils.PreTrainedModel
    expand, resize = model.get_expanded_tied_weights_keys, model.resize_token_embeddings

    @wraps(expand)
    def get_expanded_tied_weights_keys(self: Any, all_submodels: bool = False) -> dict[str, str]:
        found = expand(self, all_submodels=all_submodels)
        tables = {name for name, m in self.named_modules(remove_duplicate=False) if isinstance(m, ScaledTable)}
        return {target: source for target, source in found.items() if not {target, source} <= tables}

    @wraps(resize)
    def resize_token_embeddings(self: Any, new_num_tokens: int | None = None, *arguments: Any, **options: Any) -> Any:
        if new_num_tokens is not None or arguments or options:  # else it only returns the embedding
            decode_tables(self)
        return resize(self, new_num_tokens, *arguments, **options)

    model.get_expanded_tied_weights_keys = get_expanded_tied_weights_keys
    model.resize_token_embeddings = resize_token_embeddings
