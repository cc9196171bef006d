"""Trees of tensors under the flat names of files: keys joined by dots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from breccia import UnsupportedError
from breccia.backend import scaled

Tree = Mapping[str, Any]


def flat(tree: Tree) -> dict[str, Any]:
    """The tensors of nested mappings and lists by name. Containers of a ScaledTensor count as the tensor.

    Raises UnsupportedError for keys that are neither text nor integers, and for two tensors of one name.
    """
    tensors: dict[str, Any] = {}
    for name, tensor in _walk(tree, ""):
        if name in tensors:
            raise UnsupportedError(
                f"two tensors of the tree have the name {name!r}, since keys are joined by dots. Rename one.", name=name
            )
        tensors[name] = tensor
    return tensors


def _walk(tree: Any, prefix: str) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
        is_integer = isinstance(key, int) and not isinstance(key, bool)
        if prefix or _is_tree(value):
            if not (is_integer or isinstance(key, str)):
                raise UnsupportedError(
                    f"keys of a tree of tensors are text or integers; {prefix or 'the tree'} has {key!r}.", key=repr(key)
                )
            key = f"{prefix}.{key}" if prefix else str(key)
        if value is None and prefix:
            continue
        if _is_tree(value):
            yield from _walk(value, str(key))
        else:
            yield key, scaled(value)


def _is_tree(value: Any) -> bool:
    """Mappings, and lists of trees and arrays; other lists are no tensors, and refused as such."""
    if isinstance(value, list | tuple):
        return all(item is None or hasattr(scaled(item), "shape") or _is_tree(item) for item in value)
    return isinstance(value, Mapping)


def nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, by the dots in names. Raises UnsupportedError where a name is also the beginning of another."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *owners, last = name.split(".")
        inner = tree
        for n, owner in enumerate(owners):
            inner = inner.setdefault(owner, {})
            if not isinstance(inner, dict):
                raise _both(".".join(owners[: n + 1]), name)
        if last in inner:
            raise _both(name, next(other for other in tensors if other.startswith(f"{name}.")))
        inner[last] = tensor
    return tree


def _both(name: str, other: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name!r} is a tensor and the beginning of the name {other!r}, which nested=True cannot show; load the flat names.",
        name=name,
    )
