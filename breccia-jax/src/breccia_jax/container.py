"""What JAX must know of ScaledTensor: that it is a tree of arrays, and how exported functions write down its meaning."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jax import export, tree_util

from breccia.layouts import Layout
from breccia.recipes import ScalingRecipe
from breccia.tensor import PARTS, ScaledTensor

#: Recipe, layout, axis and tail: static and hashable, so equal ones make equal trees, and nothing is compiled anew.
Meaning = tuple[ScalingRecipe, Layout, int, int]

_KEYS = tuple(map(tree_util.GetAttrKey, PARTS))


def _flatten(st: ScaledTensor) -> tuple[tuple[Any, ...], Meaning]:
    return (st.data, st.scale, st.zero_point, st.global_scale), (st.recipe, st.layout, st.axis, st.tail)


def _flatten_with_keys(st: ScaledTensor) -> tuple[tuple[tuple[Any, Any], ...], Meaning]:
    parts, meaning = _flatten(st)
    return tuple(zip(_KEYS, parts, strict=True)), meaning


def _unflatten(meaning: Meaning, parts: Any) -> ScaledTensor:
    """Unchecked: JAX passes placeholders."""
    data, scale, zero_point, global_scale = parts
    recipe, layout, axis, tail = meaning
    return ScaledTensor.assemble(data, scale, recipe, layout, zero_point, global_scale, axis, tail)


def _written(meaning: Meaning) -> bytes:
    recipe, layout, axis, tail = meaning
    listed = {"recipe": recipe.to_dict(), "layout": layout.to_dict(), "axis": axis, "tail": tail}
    return json.dumps(listed, sort_keys=True, separators=(",", ":")).encode()


def _read(text: bytes) -> Meaning:
    """Raises what the declarations raise: an exported function may come from anybody."""
    listed = json.loads(text)
    recipe = ScalingRecipe.from_json(json.dumps(listed["recipe"]))
    layout = Layout.from_json(json.dumps(listed["layout"]))
    return recipe, layout, int(listed["axis"]), int(listed["tail"])


@cache
def register() -> None:
    """Make ScaledTensor a pytree node, and let `jax.export` serialize functions of it.

    It happens by itself when breccia meets the first array of a type, if JAX is imported by then. Call it where JAX comes
    later, and before `jax.export.deserialize` in a process that has no ScaledTensor yet.
    """
    tree_util.register_pytree_with_keys(ScaledTensor, _flatten_with_keys, _unflatten, _flatten)
    export.register_pytree_node_serialization(
        ScaledTensor, serialized_name="breccia.ScaledTensor", serialize_auxdata=_written, deserialize_auxdata=_read
    )
