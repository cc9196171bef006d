"""Folders of values in the dialect of another library, by what the dialect declares of writing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dialect_folders import Tensor, folder

from breccia import Dialect, ScaledTensor, UnsupportedError, targets
from breccia.backend import StoredForm, TensorGroup, ValueForm, registry
from breccia.bridges import from_dlpack


def written(
    path: Path,
    dialect: str,
    values: Mapping[str, ScaledTensor],
    plain: Mapping[str, Tensor] | None = None,
    activations: str | None = None,
    **config: Any,
) -> Path:
    """A new folder below `path` with values, by their names, and plain tensors. config: other keys of config.json."""
    declared = registry().dialects[dialect]
    forms, tensors = dict[str, StoredForm](), dict(plain or {})
    for name, st in values.items():
        forms[name] = stored = stored_of(declared, st)
        arrays = targets.load(declared.write or "")(from_dlpack(st, "numpy"), stored)
        stem = _group(declared, stored).stem(name)
        assert stem is not None, f"{name} has no place in {dialect}"
        tensors |= {stem + end: (entry.dtype, arrays[end]) for end, entry in stored.entries.items()}
    matrices = [name.removesuffix(".weight") for name, (_, array) in (plain or {}).items() if array.ndim == 2]
    modules = {name.removesuffix(".weight"): stored for name, stored in forms.items()}
    files = targets.load(declared.config or "")(modules, matrices, activations)
    header = targets.load(declared.header)(forms) if declared.header else {}
    others = {name.removesuffix(".json"): keys for name, keys in files.items() if name != "config.json"}
    return folder(path, tensors, {**config, **files.get("config.json", {})}, {"format": "pt", **header}, **others)


def stored_of(dialect: Dialect, st: ScaledTensor) -> StoredForm:
    """How a dialect stores a tensor. Raises UnsupportedError if it does not hold it."""
    return targets.load(dialect.stored or "")(ValueForm(st.recipe, tuple(st.shape), st.layout))


def refusal_of(dialect: Dialect, st: ScaledTensor) -> str:
    """The message with which a dialect refuses a tensor."""
    with pytest.raises(UnsupportedError) as caught:
        stored_of(dialect, st)
    return str(caught.value)


def _group(dialect: Dialect, stored: StoredForm) -> TensorGroup:
    return next(
        group
        for group in dialect.groups
        if group.parts.keys() <= stored.entries.keys() <= {**group.parts, **group.optional}.keys()
    )
