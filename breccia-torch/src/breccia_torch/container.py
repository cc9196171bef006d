"""Registers ScaledTensor with torch: as a pytree node, and as safe to load from checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from breccia import AmaxHistory, ScaledTensor
from breccia.backend import Metadata, registry
from breccia.internal import once, rebuilt, restored


def _flatten(st: ScaledTensor) -> tuple[list[Any], Metadata]:
    """The components of its format, also where a tree has None in their place, as vmap's axes may. None would be a leaf."""
    return [getattr(st, name) for name in st.recipe.format.parts], Metadata.of(st)


def _flatten_with_keys(st: ScaledTensor) -> tuple[list[tuple[Any, Any]], Metadata]:
    leaves, metadata = _flatten(st)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(st.recipe.format.parts, leaves, strict=True)], metadata


def _unflatten(leaves: Any, metadata: Metadata) -> ScaledTensor:
    """Unchecked: leaves may be placeholders."""
    return metadata.assembled(**dict(zip(metadata.recipe.format.parts, leaves, strict=True)))


@once
def register() -> None:
    """Make ScaledTensor a pytree node, and let `torch.load(..., weights_only=True)` read it."""
    pytree.register_pytree_node(
        ScaledTensor,
        _flatten,
        _unflatten,
        serialized_type_name="breccia.ScaledTensor",
        to_dumpable_context=Metadata.to_json,
        from_dumpable_context=Metadata.from_json,
        flatten_with_keys_fn=_flatten_with_keys,
    )
    declared = registry()
    torch.serialization.add_safe_globals(
        [restored, rebuilt, AmaxHistory, *declared.recipes.values(), *declared.layouts.values()]
    )
