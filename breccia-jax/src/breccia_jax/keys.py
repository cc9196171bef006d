"""Names under which checkpoints store the components of quantized leaves.

Orbax stores a tree under the names of its keys, without the metadata of nodes. So the name of a component has the metadata of
its tensor: a tree restored without a target can be put together again (`breccia_jax.assembled`), and a target of another recipe
has other names, which Orbax refuses.
"""

from __future__ import annotations

import json
from typing import Any

from jax import tree_util

from breccia.backend import PARTS, Metadata

#: The child of a ScaledWeight.
TENSOR = "tensor"


class Key(tree_util.GetAttrKey):
    """The key of a child of a pytree node: `.data` in messages. Its name, for checkpoints, has the node's metadata too."""

    def __init__(self, attribute: str, facts: Any) -> None:
        super().__init__(attribute)
        self.attribute, self.facts = attribute, facts

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{self.attribute} {json.dumps(self.facts(), sort_keys=True, separators=(',', ':'))}"


def component_key(n: int, metadata: Metadata, dtype: str | None) -> Key:
    """The key of component `n` of a ScaledTensor; dtype: of the component, if its leaf has another."""
    return Key(PARTS[n], lambda: {**json.loads(metadata.to_json()), "dtype": dtype})


def weight_key(ends: tuple[int, ...], dtype: str) -> Key:
    """The key of the tensor in a ScaledWeight."""
    return Key(TENSOR, lambda: {"ends": ends, "dtype": dtype})


def parsed(name: Any) -> tuple[str, dict[str, Any]] | None:
    """(The child's attribute, the metadata) of the name of a `Key`; None for other names."""
    attribute, space, text = name.partition(" ") if isinstance(name, str) else ("", "", "")
    if not space or not text.startswith("{") or attribute not in (*PARTS, TENSOR):
        return None
    try:
        return attribute, json.loads(text)
    except ValueError:
        return None
