"""Registers ScaledTensor with JAX: as a pytree node, and with a serialization of its metadata for exported functions.

Leaves are bytes: a float8 component is passed as the unsigned integers that have its bits, and a component of wider items with
its bytes along one more axis. JAX does not differentiate integers. Of all its dtypes, those of one byte alone are represented
exactly in every float dtype, so that an update of zero, which optimizers compute in floats, changes no leaf.

A tensor that JAX has put together holds these bytes, and makes its components when they are read: for free in compiled
functions, with a copy outside of them.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax, tree_util
from jax.core import Tracer

from breccia import AmaxHistory, BrecciaError, InStorage, LayoutError, ScaledTensor, TensorPair
from breccia.backend import PARTS, PLAIN, Metadata, dtype_name, targets
from breccia.internal import check_parts, once, transposed

from .keys import component_key

_BYTE = jnp.dtype("uint8")
_WORDS = {1: _BYTE, 2: jnp.dtype("uint16"), 4: jnp.dtype("uint32")}


@cache
def _word(dtype: str) -> np.dtype[Any]:
    """The dtype of the integers that have the bits of a dtype."""
    return _WORDS[jnp.dtype(dtype).itemsize]


#: The dtypes of components whose leaves are integers in their place; None for the others.
Dtypes = tuple[str | None, ...]


#: The lengths of the last two axes.
Lengths = tuple[int | None, int | None]


@cache
def _wide(dtypes: Dtypes) -> bool:
    """Whether leaves have more axes than components."""
    return any(dtype is not None and _word(dtype) != _BYTE for dtype in dtypes)


class Held:
    """The integers in place of the components of a tensor; see `breccia.tensors.held.Held`.

    sources: one integer for each item of a component, or with `as_bytes` the leaves of the pytree. A component that neither of
    them replaces is itself here.
    before: what the tensor holds that this one is the transpose of, if it is known. Kernels read that: JAX's arrays have no
    strides, so that a transpose is a copy outside of compiled functions, and inside of them where XLA cannot merge it with what
    reads it.
    lengths: see `Static`.
    """

    __slots__ = ("_other", "as_bytes", "before", "dtypes", "lengths", "sources")

    def __init__(
        self,
        sources: tuple[Any, ...],
        dtypes: Dtypes,
        as_bytes: bool = False,
        before: Held | None = None,
        lengths: Lengths = (None, None),
    ) -> None:
        self.sources, self.dtypes, self.before, self.lengths = sources, dtypes, before, lengths
        self.as_bytes = as_bytes and _wide(dtypes)
        #: Words made from bytes, or bytes made from words.
        self._other: tuple[Any, ...] | None = None

    @property
    def leaves(self) -> tuple[Any, ...]:
        """One integer for each item of a component."""
        return self._converted() if self.as_bytes else self.sources

    @property
    def flat(self) -> tuple[Any, ...]:
        """The leaves of the pytree."""
        return self.sources if self.as_bytes or not _wide(self.dtypes) else self._converted()

    def _converted(self) -> tuple[Any, ...]:
        if self._other is not None:
            return self._other
        change = _words_of if self.as_bytes else _bytes_of
        other = tuple(
            change(leaf, dtype) if dtype is not None and self.replaces(n) else leaf
            for n, (leaf, dtype) in enumerate(zip(self.sources, self.dtypes, strict=True))
        )
        if all(map(_outlives, other, self.sources)):
            self._other = other
        return other

    @property
    def is_transposed(self) -> bool:
        return self.before is not None

    def replaces(self, n: int) -> bool:
        leaf, dtype = self.sources[n], self.dtypes[n]  # placeholders are components themselves
        if dtype is None:
            return False
        word = _word(dtype)
        if self.as_bytes and word != _BYTE:
            return getattr(leaf, "dtype", None) == _BYTE and leaf.shape[-1:] == (word.itemsize,)
        return getattr(leaf, "dtype", None) == word

    def component(self, n: int) -> Any:
        leaf, dtype = self.sources[n], self.dtypes[n]
        if dtype is None or not self.replaces(n):
            return leaf
        return _viewed(_words_of(leaf, dtype) if self.as_bytes else leaf, dtype)

    def dtype(self, n: int) -> Any:
        return jnp.dtype(self.dtypes[n]) if self.replaces(n) else self.sources[n].dtype

    def shape(self, n: int) -> tuple[Any, ...]:
        """The shape of component `n`."""
        shape, dtype = tuple(self.sources[n].shape), self.dtypes[n]
        wide = self.as_bytes and dtype is not None and _word(dtype) != _BYTE and self.replaces(n)
        return shape[:-1] if wide else shape

    def moved(self, leaves: tuple[Any, ...]) -> Held:
        return Held(leaves, self.dtypes)

    def transposed(self, leaves: tuple[Any, ...]) -> Held:
        return self.before or Held(leaves, self.dtypes, before=self, lengths=(self.lengths[1], self.lengths[0]))

    def run(self, structural: Any, st: ScaledTensor, argument: Any) -> ScaledTensor:
        """Compiled for slices of concrete arrays; other positions would compile a function each."""
        here = isinstance(self.sources[0], jax.Array) and not isinstance(self.sources[0], Tracer)
        if here and all(isinstance(cut, range) for cut in argument):
            return _structural(st, structural, argument)
        return structural(st, argument)


def _outlives(value: Any, leaf: Any) -> bool:
    """Whether a value made of a leaf lives as long: a traced function must not leave its values in outer tensors."""
    # JAX has no public name for the trace of a value.
    return not isinstance(value, Tracer) or getattr(leaf, "_trace", None) is getattr(value, "_trace", value)


def _viewed(leaf: Any, dtype: Any) -> Any:
    """An array, or its description, with the dtype of the same size."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=jnp.dtype(dtype))
    return leaf.view(dtype) if isinstance(leaf, np.ndarray) else lax.bitcast_convert_type(leaf, dtype)


def _bytes_of(words: Any, dtype: str) -> Any:
    """Words with their bytes along a last axis; single bytes stay."""
    size = _word(dtype).itemsize
    if size == 1:
        return words
    if isinstance(words, jax.ShapeDtypeStruct):
        return words.update(shape=(*words.shape, size), dtype=_BYTE)
    if isinstance(words, np.ndarray):
        return np.ascontiguousarray(words).reshape(*words.shape, 1).view(_BYTE)
    if _static(words):
        return lax.bitcast_convert_type(words, _BYTE)
    return jnp.stack([(words >> 8 * n).astype(_BYTE) for n in range(size)], -1)


def _words_of(leaf: Any, dtype: str) -> Any:
    """Inverse of `_bytes_of`."""
    word = _word(dtype)
    if word.itemsize == 1:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(shape=leaf.shape[:-1], dtype=word)
    if isinstance(leaf, np.ndarray):
        return np.ascontiguousarray(leaf).view(word)[..., 0]
    if _static(leaf):
        return lax.bitcast_convert_type(leaf, word)
    return sum(leaf[..., n].astype(word) << 8 * n for n in range(word.itemsize))


def _static(a: Any) -> bool:
    """Are its lengths numbers? For exported functions with symbols, XLA finds no bitcast to items of another size."""
    return all(isinstance(n, int) for n in a.shape)


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
    """(the integers in place of a component, the component's dtype if it is another). Other frameworks' arrays stay."""
    if not isinstance(part, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return part, None
    name = dtype_name(part)
    if part.dtype.itemsize == 1 and not name.startswith("float8"):
        return part, None
    return _viewed(part, _WORDS[part.dtype.itemsize]), name


def untransposed(x: Any) -> tuple[Any, bool]:
    """(The tensor that `x` is the transpose of, True), if it is known; else (x, False). x: any operand.

    On explicit meshes it is not looked for: shardings there are those of the operands.
    """
    source = x.held if isinstance(x, ScaledTensor) else None
    if (
        not isinstance(source, Held)
        or source.before is None
        or jax.typeof(source.before.sources[0]).sharding.mesh.explicit_axes
    ):
        return x, False
    recipe, layout, axis, padding = Metadata.of(x)
    return ScaledTensor.from_sources(source.transposed(()), recipe, transposed(layout), -3 - axis, padding), True


def _flatten(st: ScaledTensor) -> tuple[tuple[Any, ...], Static]:
    if isinstance(st.held, Held):
        lengths = st.held.lengths if any(st.held.lengths) else _lengths(st)
        return st.held.flat, Static(Metadata.of(st), st.held.dtypes, lengths)
    parts, lengths = (st.data, st.scale, st.zero_point, st.global_scale), _lengths(st)
    words, dtypes = zip(*map(leaf_of, parts), strict=True)
    held = Held(words, dtypes)
    arrays = all(part is None or isinstance(part, jax.Array) for part in parts)
    if any(dtypes) and arrays and all(map(_outlives, words, parts)):
        with suppress(AttributeError):  # another thread has done so
            st.hold(held)  # outside of compiled functions words are copies, which the next call would make again
    return held.flat, Static(Metadata.of(st), dtypes, lengths)


def _lengths(st: ScaledTensor) -> Lengths:
    data, layout = st.data_source, st.layout
    shape = getattr(data, "shape", ())
    moved = isinstance(layout, InStorage) and layout.data_axes
    if not layout.partial or moved or len(shape) < 2 or not all(isinstance(n, int) for n in shape[-2:]):
        return None, None  # placeholders of JAX have no shape
    sides = dict(zip((-3 - st.axis, st.axis), st.layout.block(st.axis), strict=True))
    rows, columns = (shape[axis] if (side := sides[axis]) and st.shape[axis] % side else None for axis in (-2, -1))
    return rows, columns


#: The shape and dtype of each component.
Descriptions = tuple[tuple[tuple[int, ...], Any] | None, ...]


def described(st: ScaledTensor) -> Descriptions:
    """The shape and dtype of each component, of which none is made; None for those that the tensor lacks."""
    source = st.held
    if isinstance(source, Held):
        return tuple(None if leaf is None else (source.shape(n), source.dtype(n)) for n, leaf in enumerate(source.sources))
    parts = (getattr(st, part) for part in PARTS)
    return tuple(None if part is None else (tuple(part.shape), part.dtype) for part in parts)


def check_components(name: str, st: ScaledTensor) -> None:
    """Raise LayoutError or UnsupportedError where a function over the leaves of a tree has changed those of operand `name`.

    `unflatten` cannot check: optimizers keep their state in trees of the same structure, and JAX passes placeholders.
    """
    descriptions = described(st)
    if st.storage == PLAIN and all(isinstance(n, int) for part in descriptions if part for n in part[0]):
        try:
            _check_bytes(st.held)
            _check(Metadata.of(st), descriptions)
        except BrecciaError as e:
            raise type(e)(
                f"{name} is no longer a tensor of {st.recipe.name!r}: {e} A function over the leaves of a tree changes codes "
                "and scales as if they were numbers (arithmetic, averages, astype); breccia_jax.partition takes them out.",
                **e.found,
            ) from e


def _check_bytes(source: Any) -> None:
    """Raise LayoutError for a leaf that should have the bytes of items along its last axis, and has not."""
    if not isinstance(source, Held) or not source.as_bytes:
        return
    for n, (leaf, dtype) in enumerate(zip(source.sources, source.dtypes, strict=True)):
        size = 1 if dtype is None else _word(dtype).itemsize
        if size > 1 and leaf.dtype == _BYTE and leaf.shape[-1:] != (size,):
            scope = " A global scale covers all matrices, so jax.vmap and jax.lax.scan cannot part them: give them "
            remedy = f"{scope}breccia.stack(list(st)), or a cast by jax.vmap." if PARTS[n] == "global_scale" else ""
            raise LayoutError(
                f"the leaf of {PARTS[n]} has shape {tuple(leaf.shape)}, whose last axis should be the {size} bytes of "
                f"{dtype}.{remedy}",
                found=tuple(leaf.shape),
            )


@lru_cache(maxsize=1024)
def _check(metadata: Metadata, descriptions: Descriptions) -> None:
    parts = {part: jax.ShapeDtypeStruct(*of) for part, of in zip(PARTS, descriptions, strict=True) if of is not None}
    check_parts(metadata.assembled(**parts), metadata.recipe.format)


def flatten_with_keys(st: ScaledTensor) -> tuple[tuple[tuple[Any, Any], ...], Static]:
    """(The leaves with their keys, the other fields)."""
    leaves, static = _flatten(st)
    return tuple((component_key(n, static.metadata, static.dtypes[n]), leaf) for n, leaf in enumerate(leaves)), static


def unflatten(static: Static, leaves: Any) -> ScaledTensor:
    """Inverse of the flattening. Unchecked: JAX passes placeholders."""
    return of_leaves(static, leaves, as_bytes=True)


def of_leaves(static: Static, leaves: Any, as_bytes: bool = False) -> ScaledTensor:
    """The tensor of these integers in place of its components, or of the leaves of the pytree with `as_bytes`. Unchecked."""
    if any(static.dtypes):
        source = Held(tuple(leaves), static.dtypes, as_bytes, lengths=static.lengths)
        return ScaledTensor.from_sources(source, *static.metadata)
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

        >>> import jax, breccia_jax
        >>> breccia_jax.register()
        >>> w = breccia.cast(jax.numpy.ones((4, 64)), "mxfp8")
        >>> [leaf.shape for leaf in jax.tree.leaves(w)]  # codes, scales
        [(4, 64), (4, 2)]
    """
    tree_util.register_pytree_with_keys(ScaledTensor, flatten_with_keys, unflatten, _flatten)
    tree_util.register_pytree_with_keys(AmaxHistory, _flatten_history, _unflatten_history)
    export.register_pytree_node_serialization(
        ScaledTensor,
        serialized_name="breccia.ScaledTensor",
        serialize_auxdata=Static.to_bytes,
        deserialize_auxdata=Static.from_bytes,
    )
    export.register_namedtuple_serialization(TensorPair, serialized_name="breccia.TensorPair")
    if "flax.serialization" in sys.modules:
        targets.load("breccia_jax.flax_state:register")()
