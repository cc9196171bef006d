"""What JAX must know of ScaledTensor: that it is a tree of arrays, and how exported functions write down its meaning."""

from __future__ import annotations

from typing import Any

from jax import export, tree_util

from breccia.backend import PARTS, Metadata, ScaledTensor, once

_KEYS = tuple(map(tree_util.GetAttrKey, PARTS))


def _flatten(st: ScaledTensor) -> tuple[tuple[Any, ...], Metadata]:
    return (st.data, st.scale, st.zero_point, st.global_scale), Metadata.of(st)


def _flatten_with_keys(st: ScaledTensor) -> tuple[tuple[tuple[Any, Any], ...], Metadata]:
    parts, meaning = _flatten(st)
    return tuple(zip(_KEYS, parts, strict=True)), meaning


def _unflatten(meaning: Metadata, parts: Any) -> ScaledTensor:
    """Unchecked: JAX passes placeholders."""
    return meaning.assembled(*parts)


def _written(meaning: Metadata) -> bytes:
    return meaning.to_json().encode()


@once
def register() -> None:
    """Make ScaledTensor a pytree node, and let `jax.export` serialize functions of it.

    It happens by itself when breccia meets the first array of a type, if JAX is imported by then. Call it where JAX comes
    later, and before `jax.export.deserialize` in a process that has no ScaledTensor yet.
    """
    tree_util.register_pytree_with_keys(ScaledTensor, _flatten_with_keys, _unflatten, _flatten)
    export.register_pytree_node_serialization(
        ScaledTensor, serialized_name="breccia.ScaledTensor", serialize_auxdata=_written, deserialize_auxdata=Metadata.from_json
    )
