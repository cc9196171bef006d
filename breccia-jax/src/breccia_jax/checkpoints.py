"""`assembled`: the quantized leaves of a tree that a checkpoint restored without a target; see `breccia_jax.keys`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from breccia import BrecciaError, CorruptFileError, ScaledTensor
from breccia.backend import PARTS, Metadata

from .container import Static, unflatten
from .keys import TENSOR, parsed
from .weights import ScaledWeight


def assembled(tree: Any) -> Any:
    """Rebuild the ScaledTensors and ScaledWeights of a tree that a checkpoint restored without a target.

    Orbax and `flax.serialization.msgpack_restore` restore nested dicts, in which a quantized leaf is a dict of its components,
    under names that have its metadata. Other leaves stay.

    Raises CorruptFileError for components that contradict each other.

        >>> import breccia_jax, breccia_jax.flax, jax.numpy as jnp
        >>> from flax.serialization import msgpack_restore, to_bytes
        >>> w = breccia.cast(jnp.ones((64, 32)), "mxfp8")
        >>> tree = breccia_jax.assembled(msgpack_restore(to_bytes({"w": w})))
        >>> breccia.bytes_equal(tree["w"], w)
        True
    """
    if isinstance(tree, list | tuple):
        return type(tree)(map(assembled, tree)) if type(tree) in (list, tuple) else tree
    if not isinstance(tree, Mapping):
        return tree
    named = [parsed(name) for name in tree]
    if tree and all(named):
        return _quantized_leaf({key[0]: (key[1], leaf) for key, leaf in zip(named, tree.values(), strict=True) if key})
    return {name: assembled(leaf) for name, leaf in tree.items()}


def _quantized_leaf(children: dict[str, tuple[dict[str, Any], Any]]) -> Any:
    if TENSOR in children:
        facts, leaf = children[TENSOR]
        return ScaledWeight(assembled(leaf), tuple(facts["ends"]), facts["dtype"])
    shown = {name: leaf for name, (_, leaf) in children.items() if leaf is not None}
    facts = {name: {k: v for k, v in fields.items() if k != "dtype"} for name, (fields, _) in children.items()}
    try:
        if "data" not in shown or "scale" not in shown or any(fields != facts["data"] for fields in facts.values()):
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
