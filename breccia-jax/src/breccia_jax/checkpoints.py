"""Names under which checkpoints store the components of quantized leaves, and `assembled`, which reads them.

Orbax stores a tree under the names of its keys, without the metadata of nodes. So the name of a component has the metadata of
its tensor: a tree restored without a target can be put together again, and a target of another recipe has other names, which
Orbax refuses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import tree_util

from breccia.backend import PARTS, BrecciaError, CorruptFileError, Metadata, ScaledTensor

if TYPE_CHECKING:
    from .container import Static

_WEIGHT = "tensor"


class Key(tree_util.GetAttrKey):
    """The key of a child of a pytree node: `.data` in messages. Its name, for checkpoints, has the node's metadata too."""

    def __init__(self, attribute: str, facts: Any) -> None:
        super().__init__(attribute)
        self.attribute, self.facts = attribute, facts

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{self.attribute} {json.dumps(self.facts(), sort_keys=True, separators=(',', ':'))}"


def component_key(n: int, static: Static) -> Key:
    """The key of component `n` of a ScaledTensor."""
    return Key(PARTS[n], lambda: {**json.loads(static.metadata.to_json()), "dtype": static.dtypes[n]})


def weight_key(ends: tuple[int, ...], dtype: str) -> Key:
    """The key of the tensor in a ScaledWeight."""
    return Key(_WEIGHT, lambda: {"ends": ends, "dtype": dtype})


def assembled(tree: Any) -> Any:
    """The tree with its ScaledTensors and ScaledWeights, from one that a checkpoint restored without a target.

    For what Orbax restores, and `flax.serialization.msgpack_restore`: nested dicts, in which a quantized leaf is a dict of its
    components under names with its metadata. Other leaves stay.

    Raises CorruptFileError for components that contradict each other.
    """
    if isinstance(tree, list | tuple):
        return type(tree)(map(assembled, tree)) if type(tree) in (list, tuple) else tree
    if not isinstance(tree, Mapping):
        return tree
    named = [parsed(name) for name in tree]
    if tree and all(named):
        return _whole({found[0]: (found[1], leaf) for found, leaf in zip(named, tree.values(), strict=True) if found})
    return {name: assembled(leaf) for name, leaf in tree.items()}


def parsed(name: Any) -> tuple[str, dict[str, Any]] | None:
    """(The child's attribute, the metadata) of the name of a `Key`; None for other names."""
    attribute, space, text = name.partition(" ") if isinstance(name, str) else ("", "", "")
    if not space or not text.startswith("{") or attribute not in (*PARTS, _WEIGHT):
        return None
    try:
        return attribute, json.loads(text)
    except ValueError:
        return None


def _whole(children: dict[str, tuple[dict[str, Any], Any]]) -> Any:
    from .container import Static, unflatten
    from .weights import ScaledWeight

    if _WEIGHT in children:
        facts, leaf = children[_WEIGHT]
        return ScaledWeight(assembled(leaf), tuple(facts["ends"]), facts["dtype"])
    shown = {name: leaf for name, (_, leaf) in children.items() if leaf is not None}
    facts = {name: {k: v for k, v in found.items() if k != "dtype"} for name, (found, _) in children.items()}
    try:
        if "data" not in shown or "scale" not in shown or any(found != facts["data"] for found in facts.values()):
            raise CorruptFileError("its components are not those of one tensor.", names=tuple(children))
        metadata = Metadata.from_json(json.dumps(facts["data"]))
        dtypes = tuple(children[name][0]["dtype"] if name in shown else None for name in PARTS)
        st = unflatten(Static(metadata, dtypes), [_array(shown.get(name)) for name in PARTS])
        parts = {name: getattr(st, name) for name in (*PARTS, "recipe", "layout", "axis", "padding")}
        ScaledTensor(**parts)  # checks them
        return st
    except BrecciaError as e:
        raise CorruptFileError(f"a quantized leaf of the tree cannot be put together: {e}", **e.found) from e


def _array(leaf: Any) -> Any:
    """Checkpoints of Flax have NumPy arrays."""
    return jax.numpy.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
