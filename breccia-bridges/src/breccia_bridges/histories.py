"""Amax histories of delayed scaling in safetensors files: two plain arrays each, and one entry of the metadata for all.

On disk a history `h` is `h.amaxes` of shape (n,) and `h.scale` of shape (), both F32; the metadata has `{name: recipe}` as JSON
under `breccia_histories`. A reader that does not know them finds plain arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from breccia import AmaxHistory, DelayedScaling
from breccia.backend import Array, CorruptFileError, UnsupportedError

#: The key of the metadata.
KEY = "breccia_histories"
_PARTS = ("amaxes", "scale")


def as_arrays(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors with each history as its arrays, and the metadata that says so. Raises UnsupportedError for a taken name."""
    found: dict[str, Any] = {}
    recipes: dict[str, Any] = {}
    for name, value in tensors.items():
        if not isinstance(value, AmaxHistory):
            found[name] = value
            continue
        recipes[name] = value.recipe.to_dict()
        for part in _PARTS:
            if f"{name}.{part}" in tensors:
                taken = f"the history {name!r} is stored as {name}.{part}, which another tensor has. Rename one."
                raise UnsupportedError(taken, name=name)
            found[f"{name}.{part}"] = _array(getattr(value, part))
    return found, {KEY: json.dumps(recipes, sort_keys=True, separators=(",", ":"))} if recipes else {}


def _array(part: Any) -> Array:
    """A component that may be a number, or () before the first update."""
    return part if hasattr(part, "dtype") else np.asarray(part, np.float32)


def with_histories(found: dict[str, Any], metadata: Iterable[Mapping[str, str]], path: Any) -> dict[str, Any]:
    """Arrays that were read, with the histories that the files' metadata declares in place of theirs.

    Raises CorruptFileError for metadata that cannot be read.
    """
    for text in [entries[KEY] for entries in metadata if KEY in entries]:
        try:
            recipes = {name: DelayedScaling.from_json(json.dumps(recipe)) for name, recipe in json.loads(text).items()}
            for name, recipe in recipes.items():
                if all(f"{name}.{part}" in found for part in _PARTS):
                    amaxes, scale = (found.pop(f"{name}.{part}") for part in _PARTS)
                    found[name] = AmaxHistory(recipe, amaxes if amaxes.shape[0] else (), scale)
        except Exception as e:  # any kind: the text is of a file
            raise CorruptFileError(f"{path}: the metadata {KEY!r} cannot be read: {e}", path=str(path)) from e
    return found
