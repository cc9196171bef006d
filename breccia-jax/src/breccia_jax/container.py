"""Registers ScaledTensor with JAX: as a pytree node, and with a serialization of its metadata for exported functions."""

from __future__ import annotations

from typing import Any

from jax import export, tree_util

from breccia.backend import PARTS, Metadata, ScaledTensor, once

_KEYS = tuple(map(tree_util.GetAttrKey, PARTS))


def _flatten(st: ScaledTensor) -> tuple[tuple[Any, ...], Metadata]:
    return (st.data, st.scale, st.zero_point, st.global_scale), Metadata.of(st)


def _flatten_with_keys(st: ScaledTensor) -> tuple[tuple[tuple[Any, Any], ...], Metadata]:
    parts, metadata = _flatten(st)
    return tuple(zip(_KEYS, parts, strict=True)), metadata


def _unflatten(metadata: Metadata, parts: Any) -> ScaledTensor:
    """Unchecked: JAX passes placeholders."""
    return metadata.assembled(*parts)


def _written(metadata: Metadata) -> bytes:
    return metadata.to_json().encode()


@once
def register() -> None:
    """Make ScaledTensor a pytree node, and let `jax.export` serialize functions of it.

    breccia does this at the first array of a type if JAX is already imported. Call it if JAX is imported later, and before
    `jax.export.deserialize` in a process without a ScaledTensor.
    """
    tree_util.register_pytree_with_keys(ScaledTensor, _flatten_with_keys, _unflatten, _flatten)
    export.register_pytree_node_serialization(
        ScaledTensor, serialized_name="breccia.ScaledTensor", serialize_auxdata=_written, deserialize_auxdata=Metadata.from_json
    )
