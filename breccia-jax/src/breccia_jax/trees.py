"""Pytrees of parameters: dicts of Flax and Haiku, modules of Equinox, or any other pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import tree_util
from jax.core import Tracer

import breccia
from breccia import BrecciaError, OptionError, Policy, ScaledTensor, ScalingRecipe, UnsupportedError
from breccia.backend import FLOATS, Parameter, choose, dtype_name, none_chosen
from breccia.internal import storing

from . import container
from .rules import nbytes
from .weights import ScaledWeight

Filter = Callable[[str, Any], bool]
Tree = TypeVar("Tree")

#: `storage=` of `to_storage`: what the kernel of products reads.
AUTO = "auto"

#: Matrices with a shorter side save too little memory to justify their error.
_SIDE = 32


def quantize(
    params: Tree,
    recipe: ScalingRecipe | str | Policy | Mapping[str, Any],
    filter: Filter | None = None,
    *,
    axis: int = -2,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> Tree:
    """Replace the weights of a tree by ScaledTensors under `recipe`, with blocks along the contraction axis.

    recipe: a recipe or its spec, or a policy: a mapping from patterns to recipes or "keep", or the path of a YAML file with
        one; see `breccia.Policy`. Names are paths joined by dots, "params.Dense_0.kernel".
    filter: called with the path and the array of each leaf, as in filter("params/Dense_0/kernel", leaf); true for those to
        quantize. By default FP32, FP16 and BF16 arrays of two axes or more whose last two sides are at least 32, except
        embeddings, norms, routers, output heads and the other kinds of `breccia.backend.KEPT`, by their names.
    include, exclude: shell-style globs over names, in place of filter and of a policy: `exclude` beats `include`, which beats
        the default.
    axis: the contraction axis of the chosen leaves: -2 for kernels of shape (in, out), as in Flax and Haiku; -1 for weights
        of shape (out, in), as in Equinox.

    ScaledTensor leaves stay unchanged. Apply `breccia_jax.dequantize` inside `jax.jit` before passing the tree to a model.

    Raises what `breccia.cast` raises, naming the leaf; UnknownNameError for a pattern that matches no leaf; OptionError for
    patterns beside filter or a policy, and if no leaf is chosen.

        >>> import jax.numpy as jnp, breccia_jax
        >>> params = {"kernel": jnp.ones((64, 32)), "bias": jnp.zeros(32)}
        >>> scaled = breccia_jax.quantize(params, "mxfp8")
        >>> scaled["kernel"].recipe.spec, scaled["kernel"].axis, scaled["bias"].shape
        ('mxfp8', -2, (32,))
    """
    container.register()
    if filter is not None and (tuple(include) or tuple(exclude)):
        raise OptionError("quantize takes filter or patterns (include=, exclude=), not both.")
    policy = Policy.of(recipe, include, exclude)
    leaves, structure = tree_util.tree_flatten_with_path(params, is_leaf=_is_scaled)
    parameters: dict[int, Parameter] = {}
    for n, (path, leaf) in enumerate(leaves):
        if not _is_scaled(leaf) and (filter or (len(getattr(leaf, "shape", ())) >= 2 and dtype_name(leaf) in FLOATS)):
            parameters[n] = _described(tree_util.keystr(path, simple=True, separator="/"), leaf, axis)

    def select(p: Parameter) -> str:
        assert filter is not None
        return "" if filter(*p.layer) else "filter returned false"

    chosen, left = choose(parameters.values(), policy, "quantize", select=None if filter is None else select)
    if not chosen:
        raise none_chosen("quantize", left)
    new_leaves = [leaf for _, leaf in leaves]
    for n, p in parameters.items():
        if p.name in chosen:
            path, leaf = p.layer
            try:
                new_leaves[n] = breccia.cast(leaf, chosen[p.name].recipe, axis=axis)
            except BrecciaError as e:
                raise type(e)(f"quantize: {path}: {e}", **e.found) from e
    return tree_util.tree_unflatten(structure, new_leaves)


def dequantize(params: Tree, dtype: Any = None) -> Tree:
    """Replace the ScaledTensors of a tree by `breccia.dequantize(leaf, dtype)`; other leaves stay.

    dtype: by default FP32, and for a ScaledWeight the dtype of its parameter.

        >>> import jax.numpy as jnp, breccia_jax
        >>> scaled = breccia_jax.quantize({"kernel": jnp.ones((64, 32)), "bias": jnp.zeros(32)}, "mxfp8")
        >>> params = breccia_jax.dequantize(scaled, "bfloat16")
        >>> params["kernel"].dtype, params["bias"].dtype
        (dtype(bfloat16), dtype('float32'))
    """
    container.register()

    def values(leaf: Any) -> Any:
        if isinstance(leaf, ScaledWeight):
            return leaf.unbox(dtype)
        return breccia.dequantize(leaf, out_dtype=dtype or "float32") if _is_scaled(leaf) else leaf

    return jax.tree.map(values, params, is_leaf=_is_weight)


def to_storage(params: Tree, storage: str = AUTO, filter: Filter | None = None, *, dtype: Any = "bfloat16") -> Tree:
    """Put the ScaledTensors and ScaledWeights of a tree into a storage; other leaves stay.

    storage: the name of one, as in `ScaledTensor.to_storage`. "auto" is the one that the kernel of products of a weight reads,
        with inputs of `dtype` on the device of the weight: "mma_16x128" on Hopper GPUs for formats that are decoded in
        registers (INT4, NVFP4, MXFP4, INT8, FP8), otherwise "plain". It leaves vectors, and tensors of other frameworks.
    filter: called with the path and each such leaf, as in filter("params/Dense_0/kernel", leaf); true for those to rearrange.
        By default all.

    It is for products in inference. What reads the values of a stored weight rearranges it each time: a lookup in an
    embedding, a convolution, a layer that computes in FP32, the gradient of a layer's input.

    Raises UnknownNameError for an unknown storage, and UnsupportedError, naming the leaf, where it cannot hold a weight.

        >>> import jax.numpy as jnp, breccia_jax
        >>> params = breccia_jax.quantize({"kernel": jnp.ones((128, 64)), "bias": jnp.zeros(64)}, "int4")
        >>> breccia_jax.to_storage(params, "mma_16x128")["kernel"].storage
        'mma_16x128'
    """
    container.register()

    def stored(path: Any, leaf: Any) -> Any:
        name = tree_util.keystr(path, simple=True, separator="/")
        if not _is_weight(leaf) or (filter is not None and not filter(name, leaf)):
            return leaf
        st = leaf.tensor if isinstance(leaf, ScaledWeight) else leaf
        try:
            st = st.to_storage(_for_products(st, dtype) if storage == AUTO else storage)
        except UnsupportedError as e:
            raise UnsupportedError(f"to_storage: {name}: {e}", **e.found) from e
        return replace(leaf, tensor=st) if isinstance(leaf, ScaledWeight) else st

    return tree_util.tree_map_with_path(stored, params, is_leaf=_is_weight)


def _for_products(st: ScaledTensor, dtype: Any) -> str:
    """The storage that the kernel of products by a weight reads, or by each of its matrices."""
    if st.ndim < 2 or 0 in st.shape or st.framework != "jax":
        return st.storage
    matrix = st.to_plain()[(0,) * (st.ndim - 2)] if st.ndim > 2 else st.to_plain()
    place = None if isinstance(matrix.data, Tracer) else next(iter(matrix.data.devices()))
    x = jnp.zeros((1, matrix.shape[matrix.axis]), dtype, device=place)
    return storing.for_products(matrix, x).storage


def partition(params: Tree) -> tuple[Tree, Tree]:
    """(the tree without its ScaledTensors, the tree of its ScaledTensors alone); None takes the place of what is left out.

    Differentiate with respect to the first and give it to the optimizer; `combine` puts both together again:

        dense, scaled = breccia_jax.partition(params)
        gradients = jax.grad(lambda dense: loss(breccia_jax.combine(dense, scaled), batch))(dense)
        updates, state = optimizer.update(gradients, state, dense)
        dense = optax.apply_updates(dense, updates)

        >>> import jax.numpy as jnp, breccia_jax
        >>> params = breccia_jax.quantize({"kernel": jnp.ones((64, 32)), "bias": jnp.zeros(2)}, "mxfp8")
        >>> dense, scaled = breccia_jax.partition(params)
        >>> dense
        {'bias': Array([0., 0.], dtype=float32), 'kernel': None}
        >>> scaled["bias"] is None, scaled["kernel"].shape
        (True, (64, 32))
    """
    container.register()
    leaves, structure = tree_util.tree_flatten(params, is_leaf=_is_scaled)
    dense = tree_util.tree_unflatten(structure, [None if _is_scaled(leaf) else leaf for leaf in leaves])
    return dense, tree_util.tree_unflatten(structure, [leaf if _is_scaled(leaf) else None for leaf in leaves])


def combine(dense: Tree, scaled: Tree) -> Tree:
    """Inverse of `partition`. Raises OptionError unless the trees have one structure, and a leaf in either of them only.

    >>> import jax.numpy as jnp, breccia_jax
    >>> params = breccia_jax.quantize({"kernel": jnp.ones((64, 32)), "bias": jnp.zeros(2)}, "mxfp8")
    >>> dense, scaled = breccia_jax.partition(params)
    >>> params = breccia_jax.combine({**dense, "bias": dense["bias"] + 1}, scaled)
    >>> params["bias"], params["kernel"].shape
    (Array([1., 1.], dtype=float32), (64, 32))
    """
    container.register()

    def is_leaf(leaf: Any) -> bool:
        return leaf is None or _is_scaled(leaf)

    left, structure = tree_util.tree_flatten_with_path(dense, is_leaf=is_leaf)
    right, other = tree_util.tree_flatten(scaled, is_leaf=is_leaf)
    if structure != other:
        raise OptionError(f"combine: the trees differ: {structure} and {other}; pass what `partition` returned.")
    for (path, a), b in zip(left, right, strict=True):
        if a is not None and b is not None:
            name = tree_util.keystr(path, simple=True, separator="/")
            raise OptionError(f"combine: both trees have a leaf at {name}; pass what `partition` returned.", path=name)
    leaves = [b if a is None else a for (_, a), b in zip(left, right, strict=True)]
    return tree_util.tree_unflatten(structure, leaves)


def _is_scaled(leaf: Any) -> bool:
    return isinstance(leaf, ScaledTensor)


def _is_weight(leaf: Any) -> bool:
    return isinstance(leaf, ScaledTensor | ScaledWeight)


def _described(path: str, leaf: Any, axis: int) -> Parameter:
    """A leaf as a parameter, whose `layer` is the path and the leaf."""
    shape = tuple(getattr(leaf, "shape", ()))
    why = f"a side shorter than {_SIDE}" if len(shape) >= 2 and min(shape[-2:]) < _SIDE else ""
    axes = (axis % len(shape),) if shape else (0,)
    return Parameter(path.replace("/", "."), shape, nbytes(leaf) if shape else 0, axes=axes, why=why, layer=(path, leaf))
