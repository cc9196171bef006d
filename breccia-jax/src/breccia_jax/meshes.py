"""Meshes: what is sharded how on explicit ones, and shards that split a block.

On explicit meshes (`jax.sharding.AxisType.Explicit`) every operation says how its result is sharded. breccia's algorithms
reshape into blocks, and such reshapes have no sharding of their own there. So an op runs in JAX's automatic mode inside, and
its results are sharded as its operands are, along every axis that the shards divide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

import breccia
from breccia import LayoutError, OptionError, ScaledTensor
from breccia.backend import PARTS, PLAIN

from .container import Held, check_components, described
from .ops import names_of, shared_out

#: How the axes of an array are sharded: a name or names of mesh axes, or None, for each axis.
Spec = tuple[Any, ...]
#: From the specs of operands (of a ScaledTensor: of its codes), and the shape of a result, to the result's spec.
Rule = Callable[[list[Spec], tuple[int, ...]], Spec]


def like_first(specs: list[Spec], shape: tuple[int, ...]) -> Spec:
    """As the first operand. Results of other ranks, such as the scale of a tensor, are replicated."""
    return specs[0] if len(specs[0]) == len(shape) else ()


def product(specs: list[Spec], shape: tuple[int, ...]) -> Spec:
    """Rows as those of the first operand, columns as those of the second one, unless a mesh axis would be named twice."""
    first, second = specs[0], specs[1]
    lead, columns = first[:-1][-(len(shape) - 1) :], second[-1]
    lead = (None,) * (len(shape) - 1 - len(lead)) + lead
    taken = {name for axis in lead for name in names_of(axis)}
    return (*lead, None if taken & set(names_of(columns)) else columns)


def automatic(rule: Rule, function: Callable[..., Any], *operands: Any) -> Any:
    """`function(*operands)`; on an explicit mesh in automatic mode, with results sharded by `rule`."""
    specs = [_spec(operand) for operand in operands if operand is not None]
    mesh = next((mesh for mesh, _ in specs if mesh is not None), None)
    if mesh is None:
        return function(*operands)
    shapes = jax.eval_shape(function, *jax.tree.map(_shape, operands))
    placed = [spec for _, spec in specs]

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        return shared_out(mesh, rule(placed, shape) or (None,) * len(shape), shape)

    places = [sharding(shape) for result in jax.tree.leaves(shapes, is_leaf=_is_scaled) for shape in _component_shapes(result)]

    def leaves(*operands: Any) -> list[Any]:  # made in automatic mode too
        return jax.tree.leaves(function(*operands))

    run: Any = jax.sharding.auto_axes(leaves, axes=mesh.explicit_axes, out_sharding=places)
    return jax.tree.unflatten(jax.tree.structure(shapes), run(*operands))


def shardings(tree: Any, sharding: Any) -> Any:
    """The shardings of all leaves of `tree` under one sharding of its tensors and arrays.

    Functions that take a sharding for each leaf need it: `jax.device_put(tree, shardings)`, `jax.jit(..., out_shardings=...)`,
    targets of checkpoints. The codes of a ScaledTensor get `sharding`; its scales follow along every axis that the shards
    divide, as after `st.to(sharding)`.

    tree: a ScaledTensor, or any pytree of them and of arrays, or of the shapes that `jax.eval_shape` returns.
    sharding: a `NamedSharding`; one of another kind is that of each leaf.

    Raises OptionError if the codes of a ScaledTensor do not fit it.

        >>> import jax, breccia_jax
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> w = breccia.cast(jax.numpy.ones((64, 128)), "mxfp8")
        >>> sharding = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec(None, "x"))
        >>> shardings = breccia_jax.shardings({"w": w}, sharding)
        >>> shardings["w"].data.spec, shardings["w"].scale.spec
        (P(None, 'x'), P(None, 'x'))
    """

    def of(x: Any) -> Any:
        if not isinstance(x, ScaledTensor) or not isinstance(sharding, NamedSharding):
            return jax.tree.unflatten(jax.tree.structure(x), [sharding] * len(jax.tree.leaves(x)))
        codes, *others = _component_shapes(x)
        mesh, spec = sharding.mesh, sharding.spec
        if len(spec) > len(codes) or tuple(shared_out(mesh, spec, codes).spec) != tuple(spec):
            raise OptionError(
                f"codes of shape {codes} cannot be sharded by {spec} on a mesh of {dict(mesh.shape)}: name at most "
                f"{len(codes)} axes, each of which the number of its shards divides.",
                shape=codes,
                spec=spec,
            )
        beside = [shared_out(mesh, spec, shape, sharding.memory_kind) for shape in others]
        return jax.tree.unflatten(jax.tree.structure(x), [sharding, *beside])

    return jax.tree.map(of, tree, is_leaf=_is_scaled)


def check_operand(name: str, st: ScaledTensor) -> None:
    """Raise LayoutError or UnsupportedError where the components of operand `name` are not those of one tensor."""
    _check_shard(name, st)
    check_components(name, st)


def _check_shard(name: str, st: ScaledTensor) -> None:
    """Raise LayoutError inside a `shard_map` where the shard of operand `name` has not the scales of its blocks.

    Also raised outside, for shards with a partial last block each that a `shard_map` has joined.
    """
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    _check_lengths(name, st, axes)
    if not axes:
        return
    shape, layout = st.shape, st.layout.plain
    try:
        if st.storage == PLAIN:
            layout.validate(st.data_source, st.scale, shape=shape, axis=st.axis)
        else:
            _check_stored(st)
    except LayoutError as e:
        rows, along = layout.block(st.axis)
        sides, scale_shape = {st.axis: along, -3 - st.axis: rows}, tuple(st.scale.shape)
        same_rank = len(scale_shape) == len(shape)
        split = [a for a, n in sides.items() if n and not (same_rank and scale_shape[a] * n == shape[a])]
        axis = split[0] if split else st.axis
        size = sides[axis] or shape[axis]
        raise LayoutError(
            f"inside shard_map over {', '.join(map(repr, axes))}, the shard of {name} has codes of shape {shape} and scales of "
            f"shape {tuple(st.scale.shape)}, which are not those of its blocks ({layout}, axis {st.axis}): the shards split "
            f"blocks of {size} along axis {axis}. Shard {name} along another axis, or give each shard a multiple of {size} "
            f"there, with one PartitionSpec for codes and scales.",
            name=name,
            axis=axis,
            block=size,
            shape=shape,
        ) from e


def _check_stored(st: ScaledTensor) -> None:
    """Raise LayoutError unless the components have the shapes that a cast into this storage gives an array of that shape."""
    x = jax.ShapeDtypeStruct(st.shape, "float32")
    expected = jax.eval_shape(partial(breccia.cast, recipe=st.recipe, axis=st.axis, storage=st.storage), x)
    for part, wanted, actual in zip(PARTS, described(expected), described(st), strict=True):
        if wanted and actual and wanted[0] != actual[0]:
            raise LayoutError(f"{part} in storage {st.storage!r} must have the shape {wanted[0]}; it has {actual[0]}.")


def _check_lengths(name: str, st: ScaledTensor, axes: tuple[str, ...]) -> None:
    """Raise LayoutError where an axis with a partial last block has been cut or joined."""
    if not isinstance(st.held, Held) or len(st.data_source.shape) < 2:
        return
    for axis, length in zip((-2, -1), st.held.lengths, strict=True):
        if length is None or (count := st.data_source.shape[axis]) == length:
            continue
        size = st.layout.block(st.axis)[axis == st.axis]
        where = f"inside shard_map over {', '.join(map(repr, axes))}, the shard of {name}" if axes else f"{name}"
        how = (
            "so it has been cut inside a block"
            if count < length
            else "so shards with a partial last block each have been joined"
        )
        raise LayoutError(
            f"{where} has {count} codes along axis {axis}, and scales of blocks of {size} for {length}, the last one partial: "
            f"{how}. Shard {name} along another axis, or pad the array along axis {axis} before the cast: each shard needs "
            f"a multiple of {size}.",
            name=name,
            axis=axis,
            block=size,
            shape=st.shape,
        )


def _is_scaled(x: Any) -> bool:
    return isinstance(x, ScaledTensor)


def _component_shapes(x: Any) -> list[tuple[int, ...]]:
    """The shapes of the components of a tensor, or of an array. Leaves have one more axis, of bytes."""
    return [part[0] for part in described(x) if part] if isinstance(x, ScaledTensor) else [tuple(x.shape)]


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _spec(operand: Any) -> tuple[Any, Spec]:
    """(The explicit mesh of an operand, or None; the spec of its first leaf)."""
    leaf = jax.tree.leaves(operand)[0]
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    spec: Spec = () if sharding is None else tuple(sharding.spec)
    spec = (*spec, *(None,) * (leaf.ndim - len(spec)))
    mesh = None if sharding is None or sharding.mesh.empty or not sharding.mesh.explicit_axes else sharding.mesh
    return mesh, spec
