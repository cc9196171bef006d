"""Files of Equinox's leaves, with the metadata of quantized tensors, which Equinox does not store."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np

from breccia import BrecciaError, CorruptFileError, OptionError, ScaledTensor

from .container import Static

Tree = TypeVar("Tree")


def tree_serialise_leaves(path_or_file: Any, tree: Any) -> None:
    """`equinox.tree_serialise_leaves`, which also stores the recipe, layout and axis of each ScaledTensor.

    >>> import jax.numpy as jnp
    >>> from breccia_jax.equinox import tree_deserialise_leaves, tree_serialise_leaves
    >>> params = {"w": breccia.cast(jnp.ones((64, 32)), "mxfp8")}
    >>> tree_serialise_leaves(tmp / "params.eqx", params)
    >>> tree_deserialise_leaves(tmp / "params.eqx", like=params)["w"].shape
    (64, 32)
    """
    eqx.tree_serialise_leaves(path_or_file, tree, filter_spec=_save, is_leaf=_is_scaled)


def tree_deserialise_leaves(path_or_file: Any, like: Tree) -> Tree:
    """The tree that this module's `tree_serialise_leaves` stored, in the structure of `like`.

    Raises OptionError where a tensor of `like` has another recipe, layout, axis or shape than the stored one, and
    CorruptFileError for a file without the metadata of tensors, such as one that Equinox's own function wrote.

        >>> import jax.numpy as jnp
        >>> from breccia_jax.equinox import tree_deserialise_leaves, tree_serialise_leaves
        >>> params = {"w": breccia.cast(jnp.ones((64, 32)), "mxfp8")}
        >>> tree_serialise_leaves(tmp / "params.eqx", params)
        >>> restored = tree_deserialise_leaves(tmp / "params.eqx", like=params)
        >>> breccia.bytes_equal(restored["w"], params["w"])
        True
    """
    try:
        return eqx.tree_deserialise_leaves(path_or_file, like, filter_spec=_load, is_leaf=_is_scaled)
    except RuntimeError as e:  # Equinox chains its own errors, which have the path, to that of a leaf
        cause = e.__cause__
        while cause is not None and not isinstance(cause, BrecciaError):
            cause = cause.__cause__
        if cause is None:
            raise
        where = jax.tree_util.keystr(getattr(e, "path", ()))
        raise type(cause)(f"tree_deserialise_leaves: {where}: {cause}", **cause.found) from e


def _is_scaled(x: Any) -> bool:
    return isinstance(x, ScaledTensor)


def _save(file: Any, x: Any) -> None:
    if not isinstance(x, ScaledTensor):
        eqx.default_serialise_filter_spec(file, x)
        return
    leaves, structure = jax.tree.flatten(x)
    np.save(file, np.frombuffer(_static(structure).to_bytes(), np.uint8))
    for leaf in leaves:
        eqx.default_serialise_filter_spec(file, leaf)


def _load(file: Any, like: Any) -> Any:
    if not isinstance(like, ScaledTensor):
        return eqx.default_deserialise_filter_spec(file, like)
    leaves, structure = jax.tree.flatten(like)
    expected, stored = _static(structure), _read(np.load(file))
    if stored != expected:
        raise OptionError(
            f"the file has a tensor of {_told(stored)}, and `like` one of {_told(expected)}. Give a tree that is quantized as "
            "the stored one was.",
            found=stored.metadata,
            expected=expected.metadata,
        )
    new_leaves = [eqx.default_deserialise_filter_spec(file, leaf) for leaf in leaves]
    shapes, wanted = ([tuple(leaf.shape) for leaf in listed] for listed in (new_leaves, leaves))
    if shapes != wanted:
        raise OptionError(
            f"the file has a tensor of {_told(stored)} with leaves of shapes {shapes}, and that of `like` has {wanted}.",
            found=shapes,
            expected=wanted,
        )
    return jax.tree.unflatten(structure, new_leaves)


def _static(structure: Any) -> Static:
    """The metadata in the structure of a tensor."""
    return structure.node_data()[1]


def _read(array: Any) -> Static:
    try:
        return Static.from_bytes(array.tobytes())
    except (BrecciaError, ValueError, KeyError, TypeError, json.JSONDecodeError) as e:
        raise CorruptFileError(
            "the file has an array where the metadata of a quantized tensor should be. Files of "
            "equinox.tree_serialise_leaves have none: write them with breccia_jax.equinox.tree_serialise_leaves."
        ) from e


def _told(static: Static) -> str:
    recipe, layout, axis, _ = static.metadata
    return f"{recipe.spec} in {layout} along axis {axis}"
