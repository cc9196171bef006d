"""Quantized values of any dialect, read into a model that transformers loads.

transformers reads the tensors of the files and converts them. A value that another library quantized is several of them, and
breccia reads it itself, where transformers comes to the smallest of them; the others are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import WeightConverter, WeightRenaming

import breccia
from breccia import ScaledTensor
from breccia.backend import components

from ..checkpoint import Entry, check_fits, fitted, put
from ..nn import ScaledWeight
from ..values import Values
from .tying import Ties

#: What tensors of the files are renamed to, followed by the number of what they stand for.
_STANDS_FOR = "breccia_reads:"
_LEFT_OUT = f"{_STANDS_FOR}nothing"
#: What transformers is not to report as unexpected.
IGNORED = rf"{_LEFT_OUT}$"


class Reader:
    """Puts empty quantized layers into a model, and reads their weights while transformers loads it."""

    def __init__(self, model: Any, checkpoint: Any, values: Values) -> None:
        self._model, self._checkpoint, self._values = model, checkpoint, values
        self._state: Mapping[str, Tensor] = model.state_dict()
        #: By the name in the model's state that transformers sees: the name of the parameter, and that of the value.
        self._names: dict[str, tuple[str, str]] = {}
        self._keys: list[str] = []
        self._renamed: dict[str, str] = {}

    def add(self, target: str, name: str, ties: Ties, *, keeps: bool) -> bool:
        """Read a value into the parameter `target` of the model; returns whether that holds its codes from now on.

        name: of the value. keeps: whether the codes are to be kept where the model can hold them; else they are decoded.

        Raises ShapeError or UnsupportedError, naming the parameter, if the value does not fit.
        """
        empty = self._values.empty(name)
        is_tied = target in ties
        if not (is_tied and keeps and isinstance(empty, ScaledTensor) and ties.take(target, empty)):
            entry = Entry(self._model, self._state[target], [target])
            check_fits(entry, *self._values.shape_and_axis(name))
            keeps = keeps and not is_tied and not entry.is_decoded
            if keeps:
                put(entry, fitted(entry, empty, "meta"))
        key, held = target, {target}
        if keeps:
            weight = self._model.get_submodule(target)
            assert isinstance(weight, ScaledWeight)
            key, held = f"{target}.data", {f"{target}.{part}" for part in components(weight.tensor)}
        parts = [part for single in self._values.sources(name) for part in self._checkpoint.header(single).parts]
        standing = held.intersection(parts) or {parts[0]}  # transformers reads whatever has a name of the model
        number = f"{_STANDS_FOR}{len(self._keys)}"
        self._renamed |= {part: number if part in standing else _LEFT_OUT for part in parts}
        self._names[key] = target, name
        self._keys.append(key)
        return keeps

    def read(self, key: str) -> dict[str, Tensor]:
        """The tensors of a value by their names in the model's state."""
        target, name = self._names[key]
        tensor = self._values[name]
        assert isinstance(tensor, ScaledTensor)
        if key == target:
            like = self._state[target]
            return {key: breccia.dequantize(tensor, out_dtype=like.dtype).reshape(like.shape)}
        weight = self._model.get_submodule(target)
        assert isinstance(weight, ScaledWeight)
        weight.take(tensor.to("meta"))  # headers do not tell whether there is a global scale for each expert
        return {f"{target}.{part}": component for part, component in components(tensor).items()}

    def renamed(self, part: str) -> str:
        """The name under which transformers sees a tensor of the files."""
        return self._renamed.get(part, part)

    def key_of(self, renamed: str) -> str | None:
        """The name in the model's state of what a tensor stands for."""
        number = re.search(rf"{_STANDS_FOR}(\d+)$", renamed)
        return None if number is None else self._keys[int(number[1])]

    @property
    def conversions(self) -> list[Any]:
        """What transformers does with the tensors, before its own conversions."""
        return [_Renaming(self), _Reading(self)]

    def __deepcopy__(self, memo: Any) -> Reader:
        return self  # transformers copies a conversion for each value


class _Renaming(WeightRenaming):
    """Renames tensors to what they stand for, whatever other renamings then do to names."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(_STANDS_FOR, _STANDS_FOR)
        self.reader = reader

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.reader.renamed(source_key), None


class _Reading(WeightConverter):
    """Reads a value in place of a tensor. Errors keep their types, unlike those of an operation."""

    def __init__(self, reader: Reader) -> None:
        operations: Any = [reader]
        super().__init__(_STANDS_FOR, _STANDS_FOR, operations, force_cpu=True)  # transformers moves what was read

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        key = self._reader.key_of(source_key)
        return (source_key, None) if key is None else (key, _STANDS_FOR)

    def convert(self, layer_name: str, *arguments: Any, **options: Any) -> Any:
        self.collected_tensors.clear()
        with torch.no_grad():
            return self._reader.read(layer_name)

    @property
    def _reader(self) -> Any:
        return self.operations[0]
