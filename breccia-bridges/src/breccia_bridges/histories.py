"""Amax histories of delayed scaling in safetensors files: two plain arrays each, and one entry of the metadata for all.

On disk a history `h` is `h.amaxes` of shape (n,) and `h.scale` of shape (), both F32; the metadata has `{name: recipe}` as JSON
under `breccia_histories`. A reader that does not know them finds plain arrays.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import AmaxHistory, CorruptFileError, DelayedScaling, UnsupportedError
from breccia.backend import Array, dtype_name
from breccia.internal import parsed_json, unique_keys

from .safetensors_file import Container, shown

#: The key of the metadata.
KEY = "breccia_histories"
_PARTS = ("amaxes", "scale")


def as_arrays(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors with each history as its arrays, and the metadata that says so. Raises UnsupportedError for a taken name."""
    arrays: dict[str, Any] = {}
    recipes: dict[str, Any] = {}
    for name, value in tensors.items():
        if not isinstance(value, AmaxHistory):
            arrays[name] = value
            continue
        recipes[name] = value.recipe.to_dict()
        for part in _PARTS:
            if f"{name}.{part}" in tensors:
                taken = f"the history {name!r} is stored as {name}.{part}, which another tensor has. Rename one."
                raise UnsupportedError(taken, name=name)
            arrays[f"{name}.{part}"] = _array(getattr(value, part))
    return arrays, {KEY: json.dumps(recipes, sort_keys=True, separators=(",", ":"))} if recipes else {}


def _array(part: Any) -> Array:
    """A component that may be a number, or () before the first update."""
    return part if hasattr(part, "dtype") else np.asarray(part, np.float32)


class Histories:
    """The histories of opened files. recipes: by name, of those whose arrays the files have.

    owners: the history by the name of each of its arrays.

    Raises CorruptFileError for metadata that cannot be read, or contradicts the files' tensors of these `names`.
    """

    def __init__(self, containers: Iterable[Container], names: Collection[str]) -> None:
        self.recipes: dict[str, DelayedScaling] = {}
        self._paths: dict[str, str] = {}
        for container in containers:
            for name, recipe in _recipes(container).items():
                if all(f"{name}.{part}" in names for part in _PARTS):
                    self.recipes[name], self._paths[name] = recipe, str(container.path)
        self.owners = {f"{name}.{part}": name for name in self.recipes for part in _PARTS}
        for name in self.recipes:
            if name in names:
                raise self._refused(name, "the file has a tensor of this name, too")

    def put_into(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Arrays that were read, with each history whose arrays are all among them in place of these."""
        for name, recipe in self.recipes.items():
            parts = [f"{name}.{part}" for part in _PARTS]
            if not all(part in arrays for part in parts):
                continue
            amaxes, scale = (arrays.pop(part) for part in parts)
            shape, limit = tuple(amaxes.shape), recipe.amax_history_len
            if len(shape) != 1 or shape[0] > limit or tuple(scale.shape):
                shapes = f"{shape} and {tuple(scale.shape)}"
                raise self._refused(name, f"its amaxes have shape (n,), n <= {limit}, and its scale (); found {shapes}")
            dtypes = dtype_name(amaxes), dtype_name(scale)
            if dtypes != ("float32", "float32"):
                raise self._refused(name, f"its amaxes and its scale are float32; found {' and '.join(dtypes)}")
            arrays[name] = AmaxHistory(recipe, amaxes if shape[0] else (), scale)
        return arrays

    def _refused(self, name: str, why: str) -> CorruptFileError:
        return CorruptFileError(f"{shown(self._paths[name])}: history {name!r}: {why}.", path=self._paths[name], name=name)


def _recipes(container: Container) -> dict[str, DelayedScaling]:
    """The recipes of the histories that a file's metadata declares."""
    if KEY not in container.metadata:
        return {}
    try:
        listed = parsed_json(container.metadata[KEY], unique_keys)
        if not isinstance(listed, dict):
            raise ValueError(f"it is an object of recipes by name; found {short(listed)}")
        return {name: DelayedScaling.from_json(json.dumps(recipe)) for name, recipe in listed.items()}
    except Exception as e:  # any kind: the text is of a file
        path = str(container.path)
        raise CorruptFileError(f"{shown(path)}: the metadata {KEY!r} cannot be read: {e}", path=path) from e
