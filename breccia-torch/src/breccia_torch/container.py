"""Registers ScaledTensor with torch: as a pytree node, and as safe to load from checkpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from breccia.backend import PARTS, Metadata, ScaledTensor, once, rebuilt, registry, restored


class _Context(NamedTuple):
    """The metadata of a tensor, and the names of its components: those of its format. None would count as a leaf."""

    metadata: Metadata
    names: tuple[str, ...]


def _flatten(st: ScaledTensor) -> tuple[list[Any], _Context]:
    parts = st.recipe.format.parts  # of trees of other leaves than arrays too, such as vmap's axes, where None is a leaf
    names = tuple([name for name in PARTS if name in parts])
    return [getattr(st, name) for name in names], _Context(Metadata.of(st), names)


def _flatten_with_keys(st: ScaledTensor) -> tuple[list[tuple[Any, Any]], _Context]:
    leaves, context = _flatten(st)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context.names, leaves, strict=True)], context


def _unflatten(leaves: Any, context: _Context) -> ScaledTensor:
    """Unchecked: leaves may be placeholders."""
    return context.metadata.assembled(**dict(zip(context.names, leaves, strict=True)))


def _to_json(context: _Context) -> list[Any]:
    """What `torch.export.save` stores."""
    return [context.metadata.to_json(), context.names]


def _from_json(stored: list[Any]) -> _Context:
    text, names = stored
    return _Context(Metadata.from_json(text), tuple(names))


@once
def register() -> None:
    """Make ScaledTensor a pytree node, and let `torch.load(..., weights_only=True)` read it."""
    pytree.register_pytree_node(
        ScaledTensor,
        _flatten,
        _unflatten,
        serialized_type_name="breccia.ScaledTensor",
        to_dumpable_context=_to_json,
        from_dumpable_context=_from_json,
        flatten_with_keys_fn=_flatten_with_keys,
    )
    declared = registry()
    torch.serialization.add_safe_globals([restored, rebuilt, *declared.recipes.values(), *declared.layouts.values()])
