"""Converts ScaledTensors to the trees of lists, tuples and dicts that MLX's transformations support."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mlx.utils import tree_map

from breccia import ScaledTensor
from breccia.backend import Metadata, components

#: Prefix of the only key of a ScaledTensor's dict; JSON follows.
_MARK = "ScaledTensor "


def to_tree(value: Any) -> Any:
    """Replace every ScaledTensor in a tree of lists, tuples and dicts by a dict of arrays.

    The dict is `{metadata: {"data": ..., "scale": ..., ...}}`, zero-copy. The metadata is a key, since `mx.compile`, `mx.vmap`,
    `mx.grad` and the others keep keys unchanged: transformed functions take and return such trees, and are recompiled for
    other metadata.

        >>> import mlx.core as mx, breccia_mlx
        >>> (parts,) = breccia_mlx.to_tree(breccia.cast(mx.ones((4, 64)), "mxfp8")).values()
        >>> {name: array.shape for name, array in parts.items()}
        {'data': (4, 64), 'scale': (4, 2)}
    """

    def flat(leaf: Any) -> Any:
        return {_written(Metadata.of(leaf)): components(leaf)} if isinstance(leaf, ScaledTensor) else leaf

    return tree_map(flat, value)


def from_tree(tree: Any) -> Any:
    """Inverse of `to_tree`, without checks, as arrays may be placeholders: the shape is that of the arrays.

    >>> import mlx.core as mx, breccia_mlx
    >>> tree = breccia_mlx.to_tree({"w": breccia.cast(mx.array([[0.5, 1.0, 3.0]]), "mxfp8")})
    >>> breccia.dequantize(breccia_mlx.from_tree(tree)["w"])
    array([[0.5, 1, 3]], dtype=float32)
    """

    def tensor(leaf: Any) -> Any:
        return _from_parts(leaf) if _is_tensor(leaf) else leaf

    return tree_map(tensor, tree, is_leaf=_is_tensor)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and str(next(iter(value))).startswith(_MARK)


def _from_parts(tree: dict[str, dict[str, Any]]) -> ScaledTensor:
    ((key, parts),) = tree.items()
    return _read(key).assembled(**parts)


@lru_cache
def _written(metadata: Metadata) -> str:
    return _MARK + metadata.to_json()


@lru_cache
def _read(key: str) -> Metadata:
    return Metadata.from_json(key.removeprefix(_MARK))
