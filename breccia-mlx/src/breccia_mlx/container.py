"""ScaledTensors in the trees of lists, tuples and dicts that MLX's transformations know."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from mlx.utils import tree_map

from breccia.layouts import Layout
from breccia.recipes import ScalingRecipe
from breccia.tensor import ScaledTensor, held

#: What the one key of a ScaledTensor's dict begins with; JSON follows.
_MARK = "ScaledTensor "


def to_tree(value: Any) -> Any:
    """A tree of lists, tuples and dicts with every ScaledTensor in it as a dict of arrays; the rest is as it was.

    The dict is `{meaning: {"data": ..., "scale": ..., ...}}`, and its parts are the very arrays. What they mean is a key, since
    keys are what `mx.compile`, `mx.vmap`, `mx.grad` and the others leave as they are: functions they transform take such trees
    and give them, and are compiled anew for another meaning.
    """

    def flat(leaf: Any) -> Any:
        return {_written(*_meaning(leaf)): held(leaf)} if isinstance(leaf, ScaledTensor) else leaf

    return tree_map(flat, value)


def from_tree(tree: Any) -> Any:
    """Inverse of `to_tree`. Nothing is checked, as arrays may be placeholders: the shape follows from those there are."""

    def whole(leaf: Any) -> Any:
        return _assembled(leaf) if _is_tensor(leaf) else leaf

    return tree_map(whole, tree, is_leaf=_is_tensor)


def _meaning(st: ScaledTensor) -> tuple[ScalingRecipe, Layout, int, int]:
    return st.recipe, st.layout, st.axis, st.tail


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and str(next(iter(value))).startswith(_MARK)


def _assembled(tree: dict[str, dict[str, Any]]) -> ScaledTensor:
    ((key, parts),) = tree.items()
    recipe, layout, axis, tail = _read(key)
    return ScaledTensor.assemble(recipe=recipe, layout=layout, axis=axis, tail=tail, **parts)


@lru_cache
def _written(recipe: ScalingRecipe, layout: Layout, axis: int, tail: int) -> str:
    listed = {"recipe": recipe.to_dict(), "layout": layout.to_dict(), "axis": axis, "tail": tail}
    return _MARK + json.dumps(listed, sort_keys=True, separators=(",", ":"))


@lru_cache
def _read(key: str) -> tuple[ScalingRecipe, Layout, int, int]:
    listed = json.loads(key.removeprefix(_MARK))
    recipe, layout = (json.dumps(listed[of.kind]) for of in (ScalingRecipe, Layout))
    return ScalingRecipe.from_json(recipe), Layout.from_json(layout), listed["axis"], listed["tail"]
