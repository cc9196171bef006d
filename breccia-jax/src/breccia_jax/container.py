"""Registers ScaledTensor with JAX: as a pytree node, and with a serialization of its metadata for exported functions.

Leaves are integers: floating-point codes and scales are passed as unsigned integers of their size. Integers have no tangent, so
that no gradient, weight decay or optimizer changes them. A tensor that JAX has put together holds these integers, and makes
its components when they are read: for free in compiled functions, with a copy outside of them.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax, tree_util
from jax.core import Tracer

from breccia import AmaxHistory
from breccia.backend import (
    FLOATS,
    PARTS,
    PLAIN,
    BrecciaError,
    Metadata,
    ScaledTensor,
    check_parts,
    dtype_name,
    once,
    transposed,
)

from .keys import component_key

_WORDS = {1: jnp.dtype("uint8"), 2: jnp.dtype("uint16"), 4: jnp.dtype("uint32")}


@cache
def _word(dtype: str) -> np.dtype[Any]:
    """The dtype of the leaves of components of a dtype."""
    return _WORDS[jnp.dtype(dtype).itemsize]


#: The dtypes of components whose leaves are integers in their place; None for the others.
Dtypes = tuple[str | None, ...]


#: Of the last two axes.
Lengths = tuple[int | None, int | None]


class Held(NamedTuple):
    """The leaves of a tensor; see `breccia.tensors.tensor.Held`.

    before: the leaves that these are the transposes of, if any. Kernels read those: JAX's arrays have no strides, so that a
    transpose is a copy outside of compiled functions, and inside of them where XLA cannot merge it with what reads it.
    lengths: see `Static`.
    """

    leaves: tuple[Any, ...]
    dtypes: Dtypes
    before: tuple[Any, ...] | None = None
    lengths: Lengths = (None, None)

    @property
    def turned(self) -> bool:
        return self.before is not None

    def replaces(self, n: int) -> bool:
        dtype = self.dtypes[n]  # placeholders are components themselves
        return dtype is not None and getattr(self.leaves[n], "dtype", None) == _word(dtype)

    def component(self, n: int) -> Any:
        leaf, dtype = self.leaves[n], self.dtype(n)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(dtype=dtype)
        return leaf.view(dtype) if isinstance(leaf, np.ndarray) else lax.bitcast_convert_type(leaf, dtype)

    def dtype(self, n: int) -> Any:
        return jnp.dtype(self.dtypes[n]) if self.replaces(n) else self.leaves[n].dtype

    def moved(self, leaves: tuple[Any, ...]) -> Held:
        return Held(leaves, self.dtypes)

    def transposed(self, leaves: tuple[Any, ...]) -> Held:
        lengths = self.lengths[1], self.lengths[0]
        if self.before is None:
            return Held(leaves, self.dtypes, self.leaves, lengths)
        return Held(self.before, self.dtypes, None, lengths)

    def run(self, structural: Any, st: ScaledTensor, argument: Any) -> ScaledTensor:
        """Compiled for slices of concrete arrays; other positions would compile a function each."""
        here = isinstance(self.leaves[0], jax.Array) and not isinstance(self.leaves[0], Tracer)
        if here and all(isinstance(cut, range) for cut in argument):
            return _structural(st, structural, argument)
        return structural(st, argument)


@partial(jax.jit, static_argnums=(1, 2))
def _structural(st: ScaledTensor, structural: Any, argument: Any) -> ScaledTensor:
    return structural(st, argument)


class Static(NamedTuple):
    """What a ScaledTensor is besides its leaves.

    lengths: of the codes along those of the last two axes whose last block is partial. A shard that was cut along such an axis,
    and shards that were joined along it, have another length, and their blocks are not those of their scales.
    """

    metadata: Metadata
    dtypes: Dtypes
    lengths: Lengths = (None, None)

    def to_bytes(self) -> bytes:
        return json.dumps({"metadata": self.metadata.to_json(), "dtypes": self.dtypes, "lengths": self.lengths}).encode()

    @classmethod
    def from_bytes(cls, written: bytes | bytearray) -> Static:
        listed = json.loads(written)
        lengths = listed.get("lengths", (None, None))
        return cls(Metadata.from_json(listed["metadata"]), tuple(listed["dtypes"]), (lengths[0], lengths[1]))


def leaf_of(part: Any) -> tuple[Any, str | None]:
    """(the leaf of a component, the component's dtype if its leaf has another). Other frameworks' arrays stay as they are."""
    if not isinstance(part, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return part, None
    name = dtype_name(part)
    if name not in FLOATS and not name.startswith("float8"):
        return part, None
    word = _WORDS[part.dtype.itemsize]
    if isinstance(part, jax.ShapeDtypeStruct):
        return part.update(dtype=word), name
    return (part.view(word) if isinstance(part, np.ndarray) else lax.bitcast_convert_type(part, word)), name


def untransposed(x: Any) -> tuple[Any, bool]:
    """(The tensor that `x` is the transpose of, True), if it is known; else (x, False). x: any operand.

    On explicit meshes it is not looked for: shardings there are those of the operands.
    """
    held = x.held if isinstance(x, ScaledTensor) else None
    if not isinstance(held, Held) or held.before is None or jax.typeof(held.before[0]).sharding.mesh.explicit_axes:
        return x, False
    recipe, layout, axis, padding = Metadata.of(x)
    return ScaledTensor.from_held(held.transposed(()), recipe, transposed(layout), -3 - axis, padding), True


def _flatten(st: ScaledTensor) -> tuple[tuple[Any, ...], Static]:
    if isinstance(st.held, Held):
        lengths = st.held.lengths if any(st.held.lengths) else _lengths(st)
        return st.held.leaves, Static(Metadata.of(st), st.held.dtypes, lengths)
    leaves, dtypes = zip(*map(leaf_of, (st.data, st.scale, st.zero_point, st.global_scale)), strict=True)
    return leaves, Static(Metadata.of(st), dtypes, _lengths(st))


def _lengths(st: ScaledTensor) -> Lengths:
    data = st.held_data
    shape = getattr(data, "shape", ())
    if not getattr(st.layout, "partial", False) or len(shape) < 2 or not all(isinstance(n, int) for n in shape):
        return None, None  # placeholders of JAX have no shape
    sides = dict(zip((-3 - st.axis, st.axis), st.layout.block(st.axis), strict=True))
    rows, columns = (shape[axis] if (side := sides[axis]) and st.shape[axis] % side else None for axis in (-2, -1))
    return rows, columns


def check_components(name: str, st: ScaledTensor) -> None:
    """Raise LayoutError or UnsupportedError where a function over the leaves of a tree has changed those of operand `name`.

    `unflatten` cannot check: optimizers keep their state in trees of the same structure, and JAX passes placeholders.
    """
    held = st.held
    leaves = tuple(getattr(st, part) for part in PARTS) if held is None else held.leaves
    dtypes = (None,) * len(PARTS) if not isinstance(held, Held) else held.dtypes
    found = tuple(
        None if leaf is None else (tuple(leaf.shape), leaf.dtype, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)
    )
    if st.storage == PLAIN and all(isinstance(n, int) for part in found if part for n in part[0]):
        try:
            _check(Metadata.of(st), found)
        except BrecciaError as e:
            raise type(e)(
                f"{name} is no longer a tensor of {st.recipe.name!r}: {e} A function over the leaves of a tree changes codes "
                "and scales as if they were numbers (arithmetic, averages, astype); breccia_jax.partition takes them out.",
                **e.found,
            ) from e


@lru_cache(maxsize=1024)
def _check(metadata: Metadata, found: tuple[tuple[tuple[int, ...], Any, str | None] | None, ...]) -> None:
    """Check descriptions of components: (shape and dtype of the leaf, dtype of the component if its leaf has another)."""
    parts: dict[str, Any] = {}
    for part, of in zip(PARTS, found, strict=True):
        if of is not None:
            shape, dtype, component = of
            held = component is not None and dtype == _word(component)
            parts[part] = jax.ShapeDtypeStruct(shape, jnp.dtype(component) if held else dtype)
    check_parts(metadata.assembled(**parts), metadata.recipe.format)


def flatten_with_keys(st: ScaledTensor) -> tuple[tuple[tuple[Any, Any], ...], Static]:
    """(The leaves with their keys, the other fields)."""
    leaves, static = _flatten(st)
    return tuple((component_key(n, static.metadata, static.dtypes[n]), leaf) for n, leaf in enumerate(leaves)), static


def unflatten(static: Static, leaves: Any) -> ScaledTensor:
    """Unchecked: JAX passes placeholders."""
    if any(static.dtypes):
        return ScaledTensor.from_held(Held(tuple(leaves), static.dtypes, None, static.lengths), *static.metadata)
    return static.metadata.assembled(*leaves)


def _flatten_history(history: AmaxHistory) -> tuple[tuple[tuple[Any, Any], ...], Any]:
    keys = map(tree_util.GetAttrKey, ("amaxes", "scale"))
    return tuple(zip(keys, (history.amaxes, history.scale), strict=True)), history.recipe


def _unflatten_history(recipe: Any, leaves: Any) -> AmaxHistory:
    """Unchecked: JAX passes placeholders."""
    history = object.__new__(AmaxHistory)
    history.__dict__.update(zip(("recipe", "amaxes", "scale"), (recipe, *leaves), strict=True))
    return history


@once
def register() -> None:
    """Make ScaledTensor and AmaxHistory pytree nodes, and let `jax.export` serialize functions of ScaledTensors.

    breccia does this at the first array of a type if JAX is already imported. Call it if JAX is imported later, and before
    `jax.export.deserialize` in a process without a ScaledTensor.
    """
    tree_util.register_pytree_with_keys(ScaledTensor, flatten_with_keys, unflatten, _flatten)
    tree_util.register_pytree_with_keys(AmaxHistory, _flatten_history, _unflatten_history)
    export.register_pytree_node_serialization(
        ScaledTensor,
        serialized_name="breccia.ScaledTensor",
        serialize_auxdata=Static.to_bytes,
        deserialize_auxdata=Static.from_bytes,
    )
