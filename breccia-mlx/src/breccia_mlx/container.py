"""ScaledTensors in the trees of lists, tuples and dicts that MLX's transformations know."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mlx.utils import tree_map

from breccia.backend import Metadata, ScaledTensor, components

#: What the one key of a ScaledTensor's dict begins with; JSON follows.
_MARK = "ScaledTensor "


def to_tree(value: Any) -> Any:
    """A tree of lists, tuples and dicts with every ScaledTensor in it as a dict of arrays; the rest is as it was.

    The dict is `{meaning: {"data": ..., "scale": ..., ...}}`, and its parts are the very arrays. What they mean is a key, since
    keys are what `mx.compile`, `mx.vmap`, `mx.grad` and the others leave as they are: functions they transform take such trees
    and give them, and are compiled anew for another meaning.
    """

    def flat(leaf: Any) -> Any:
        return {_written(Metadata.of(leaf)): components(leaf)} if isinstance(leaf, ScaledTensor) else leaf

    return tree_map(flat, value)


def from_tree(tree: Any) -> Any:
    """Inverse of `to_tree`. Nothing is checked, as arrays may be placeholders: the shape follows from those there are."""

    def whole(leaf: Any) -> Any:
        return _from_parts(leaf) if _is_tensor(leaf) else leaf

    return tree_map(whole, tree, is_leaf=_is_tensor)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and str(next(iter(value))).startswith(_MARK)


def _from_parts(tree: dict[str, dict[str, Any]]) -> ScaledTensor:
    ((key, parts),) = tree.items()
    return _read(key).assembled(**parts)


@lru_cache
def _written(meaning: Metadata) -> str:
    return _MARK + meaning.to_json()


@lru_cache
def _read(key: str) -> Metadata:
    return Metadata.from_json(key.removeprefix(_MARK))
