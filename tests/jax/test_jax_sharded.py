"""Arrays sharded over eight devices: codes and scales share a sharding, products stay local, and only an amax is exchanged.

JAX fixes its number of devices at start, so the checks run in a separate process with eight devices on one CPU.
"""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from eight_devices import COUNT, failures

import breccia
from breccia.tensors.components import components
from breccia.testing.examples import wide

#: The checks run in a separate process with eight devices.
pytestmark = pytest.mark.long

BLOCK = breccia.Float8BlockScaling(block_k=32)
#: Recipes with block scales only, and recipes with a tensor-level scale.
LOCAL = [BLOCK, breccia.MXFP8BlockScaling(), breccia.INT4Scaling(group_size=32), breccia.MXFP6BlockScaling()]
WHOLE = [breccia.Float8CurrentScaling(), breccia.NVFP4BlockScaling()]
X = wide((16, 512), seed=1, exponents=4)
#: XLA's names of collective operations.
WORDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
EXCHANGE = re.compile(rf"= \w+\[([\d,]*)\]\S* ({WORDS})(?:-start)?\(")


def placed(x: Any, *spec: str | None) -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(COUNT), ("d",))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def exchanged(function: Any, *arguments: Any) -> list[tuple[str, int]]:
    """(operation, number of items) of every collective operation in the compiled function."""
    text = function.lower(*arguments).compile().as_text()
    return [(what, int(np.prod([int(n) for n in shape.split(",") if n]))) for shape, what in EXCHANGE.findall(text)]


def spread(array: Any) -> tuple[Any, ...]:
    """The mesh axes along which the axes of an array are sharded."""
    found = tuple(array.sharding.spec)
    return found + (None,) * (array.ndim - len(found))


def blocks_are_cast_where_they_are() -> None:
    """Sharded along rows and columns, eager and compiled."""
    import jax

    for recipe in LOCAL:
        for spec in (("d", None), (None, "d")):
            x = placed(X, *spec)
            cast = jax.jit(lambda x, r=recipe: breccia.cast(x, r))
            assert exchanged(cast, x) == [], (recipe, spec)
            for st in (cast(x), breccia.cast(x, recipe)):
                assert breccia.bytes_equal(st, breccia.cast(X, recipe)), (recipe, spec)
                assert all(spread(part) == spec for part in components(st).values()), (recipe, spec)
                values = breccia.dequantize(st)
                assert spread(values) == spec and np.array_equal(values, breccia.dequantize(breccia.cast(X, recipe)))


def a_tensors_amax_alone_is_exchanged() -> None:
    import jax

    for recipe in WHOLE:
        for spec in (("d", None), (None, "d")):
            x = placed(X, *spec)
            cast = jax.jit(lambda x, r=recipe: breccia.cast(x, r))
            found = exchanged(cast, x)
            assert found and all(what == "all-reduce" and count == 1 for what, count in found), (recipe, spec, found)
            st = cast(x)
            assert breccia.bytes_equal(st, breccia.cast(X, recipe)) and spread(st.data) == spec


def products_stay_where_their_rows_are() -> None:
    import jax

    w = breccia.cast(jax.numpy.asarray(wide((24, 512), seed=2, exponents=1)), BLOCK)
    alone = breccia.matmul(jax.numpy.asarray(X), w.mT)
    everywhere = jax.tree.map(lambda part: placed(part), w)
    product = jax.jit(lambda x, w: breccia.matmul(breccia.cast(x, BLOCK), w.mT))
    x = placed(X, "d", None)
    assert exchanged(product, x, everywhere) == []
    y = product(x, everywhere)
    assert spread(y) == ("d", None)
    assert breccia.matmul(x, everywhere.mT).sharding.is_equivalent_to(y.sharding, 2)
    # Sums of 512 products in FP32 in any order: at most 512 * 2^-24 of the sum of magnitudes.
    bound = 512 * 2.0**-24 * (np.abs(X) @ np.abs(np.asarray(breccia.dequantize(w)).T))
    assert (np.abs(np.asarray(breccia.matmul(x, everywhere.mT)) - np.asarray(alone)) <= bound).all()


def shards_are_tensors_of_their_own() -> None:
    """shard_map: each device casts, decodes and multiplies what it has."""
    import jax
    from jax.sharding import PartitionSpec as P

    x = placed(X, "d", None)
    mesh = x.sharding.mesh

    def local(x: Any) -> Any:
        st = breccia.cast(x, BLOCK)
        return st, breccia.matmul(x, st[:2].mT)

    st, y = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(x)
    assert st.shape == X.shape and breccia.bytes_equal(st, breccia.cast(X, BLOCK)) and y.shape == (16, 2)
    back = jax.jit(jax.shard_map(breccia.dequantize, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(st)
    assert np.array_equal(back, breccia.dequantize(breccia.cast(X, BLOCK)))


def gradients_keep_the_sharding() -> None:
    import jax

    x = placed(X, "d", None)
    w = jax.tree.map(lambda part: placed(part), breccia.cast(jax.numpy.asarray(X), BLOCK))
    clipped = jax.jit(jax.grad(lambda x: breccia.cast_ste_clipped(x, BLOCK, clip="scale").sum()))
    assert exchanged(clipped, x) == [] and spread(clipped(x)) == ("d", None)
    assert np.array_equal(clipped(x), clipped(jax.numpy.asarray(X)))
    through = jax.jit(jax.grad(lambda x, w: (breccia.matmul(x, w.mT) ** 2).sum()))
    assert exchanged(through, x, w) == [] and spread(through(x, w)) == ("d", None)


def tensors_move_between_shardings() -> None:
    import jax

    st = breccia.cast(placed(X, "d", None), BLOCK)
    assert st.device.spec == jax.sharding.PartitionSpec("d", None)
    one = jax.devices()[3]
    assert breccia.bytes_equal(st.to(one), st) and st.to(one).device == one
    assert breccia.bytes_equal(st.to(placed(X, None, "d").sharding), st)
    assert spread(st.to(placed(X, None, "d").sharding).scale) == (None, "d")
    copied = jax.tree.map(lambda part: placed(part, None, None), st)
    assert breccia.bytes_equal(copied, st)


def exported_functions_keep_their_shardings() -> None:
    import jax
    from jax import export

    x = placed(X, "d", None)
    cast = jax.jit(lambda x: breccia.cast(x, BLOCK))
    read = export.deserialize(export.export(cast)(x).serialize())
    st = jax.jit(read.call)(x)
    assert breccia.bytes_equal(st, breccia.cast(X, BLOCK)) and spread(st.data)[0] == "d"


#: Recipes with two levels, tiles, and zero-points.
KINDS = [breccia.recipe(spec) for spec in ("nvfp4", "fp8_block,block_m=4,block_k=32", "int4,symmetric=false,signed=false")]
W = wide((24, 512), seed=2, exponents=2)


def on_explicit_mesh(set_mesh: bool, check: Any) -> None:
    """check(x, w, recipe, spec) for every recipe, with x sharded along rows and columns; w along its rows."""
    from contextlib import nullcontext

    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh) if set_mesh else nullcontext():
        spec = ("a", "b")
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec(*spec)))
        w = jax.device_put(W, NamedSharding(mesh, PartitionSpec("b", None)))
        for recipe in KINDS if set_mesh else KINDS[:1]:
            check(x, w, recipe, spec)


def casts_keep_the_sharding(x: Any, w: Any, recipe: Any, spec: Any) -> None:
    import jax

    for axis in (-1, -2):
        expected = breccia.cast(X, recipe, axis=axis)
        for st in (breccia.cast(x, recipe, axis=axis), jax.jit(lambda x, axis=axis: breccia.cast(x, recipe, axis=axis))(x)):
            assert breccia.bytes_equal(st, expected), (recipe, spec)
            assert spread(st.data) == spec, (recipe, spec)
            if st.scale.ndim == 2:
                whole = [n % {"a": 2, "b": 4, None: 1}[name] == 0 for n, name in zip(st.scale.shape, spec, strict=True)]
                assert spread(st.scale) == tuple(name if fits else None for name, fits in zip(spec, whole, strict=True))
    values = breccia.dequantize(breccia.cast(x, recipe))
    assert spread(values) == spec and np.array_equal(values, breccia.dequantize(breccia.cast(X, recipe)))
    rows, columns = breccia.cast_pair(x, recipe)
    assert breccia.bytes_equal(rows, breccia.cast(X, recipe)) and breccia.bytes_equal(columns, breccia.cast(X, recipe, axis=-2))
    again = breccia.requantize(rows, "mxfp8")
    assert breccia.bytes_equal(again, breccia.requantize(breccia.cast(X, recipe), "mxfp8")) and spread(again.data) == spec
    straight = breccia.cast_ste(x, recipe)
    assert spread(straight) == spec and np.array_equal(straight, breccia.cast_ste(X, recipe))


def explicit_meshes_shard_what_is_cast() -> None:
    on_explicit_mesh(True, casts_keep_the_sharding)


def explicit_meshes_need_no_context() -> None:
    on_explicit_mesh(False, casts_keep_the_sharding)


def products_keep_the_sharding(x: Any, w: Any, recipe: Any, spec: Any) -> None:
    import jax

    st, weight = breccia.cast(x, recipe), breccia.cast(w, recipe)
    left, right = (np.asarray(breccia.dequantize(breccia.cast(a, recipe)), np.float64) for a in (X, W))
    # The rows of the product are sharded as those of x, its columns as the rows of w: both by "b" is one too many.
    expected = (spec[0], "b")
    cases = [(breccia.matmul(st, weight.mT), left), (breccia.matmul(x, weight.mT), X.astype(np.float64))]
    cases.append((breccia.cast_matmul(x, recipe, weight.mT), left))
    for y, a in cases:
        # Sums of K products in FP32 in any order: at most K * 2^-24 of the sum of magnitudes, nearly.
        bound = 2 * X.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(right).T) + 1e-30
        assert spread(y) == expected and (np.abs(np.asarray(y) - a @ right.T) <= bound).all(), (recipe, spec)
    gradient = jax.grad(lambda x: breccia.cast_matmul(x, recipe, weight.mT).sum())(x)
    assert spread(gradient) == spec
    bound = 2 * W.shape[0] * 2.0**-24 * np.abs(right).sum(0) + 1e-30
    assert (np.abs(np.asarray(gradient) - right.sum(0)) <= bound).all(), (recipe, spec)
    gradient = jax.grad(lambda x: breccia.cast_ste(x, recipe).sum())(x)
    assert spread(gradient) == spec and (np.asarray(gradient) == 1).all()


def explicit_meshes_shard_products_and_gradients() -> None:
    on_explicit_mesh(True, products_keep_the_sharding)


def every_op_runs_on_every_kind_of_axis() -> None:
    """Auto, Explicit and Manual axes, and a mesh of two kinds; with and without `jax.set_mesh`."""
    from contextlib import nullcontext

    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    auto, explicit = AxisType.Auto, AxisType.Explicit
    for kinds, manual in [
        ((auto, auto), ()), ((explicit, explicit), ()), ((auto, explicit), ()), ((auto, auto), ("a", "b")),
        ((explicit, explicit), ("a", "b")), ((auto, auto), ("a",)), ((explicit, explicit), ("a",)),
        ((auto, explicit), ("a",)),
    ]:  # fmt: skip
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=kinds)
        for set_mesh in (True, False):
            with jax.set_mesh(mesh) if set_mesh else nullcontext():
                x = jax.device_put(X, NamedSharding(mesh, P("a", None)))
                w = breccia.cast(jax.device_put(W, NamedSharding(mesh, P())), BLOCK)

                def ops(x: Any, w: Any) -> Any:
                    st = breccia.cast(x, BLOCK)
                    return st, breccia.dequantize(st), breccia.matmul(st, w.mT), breccia.cast_ste(x, BLOCK)

                run = ops
                if manual:
                    run = jax.shard_map(ops, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), axis_names=set(manual))
                for function in (jax.jit(run),) if manual else (ops, jax.jit(ops)):
                    st, values, y, straight = function(x, w)
                    case = kinds, manual, set_mesh
                    expected = breccia.cast(X, BLOCK)
                    assert breccia.bytes_equal(st, expected), case
                    assert np.array_equal(values, breccia.dequantize(expected)), case
                    assert np.array_equal(straight, values), case
                    assert spread(st.data)[0] in ("a", ("a",)) and spread(y)[0] in ("a", ("a",)), case
                    left, right = (np.asarray(breccia.dequantize(breccia.cast(a, BLOCK)), np.float64) for a in (X, W))
                    # Sums of K products in FP32 in any order: at most K * 2^-24 of the sum of magnitudes, nearly.
                    bound = 2 * X.shape[1] * 2.0**-24 * (np.abs(left) @ np.abs(right).T) + 1e-30
                    assert (np.abs(np.asarray(y) - left @ right.T) <= bound).all(), case


def a_shard_map_that_splits_a_block_is_refused_by_name() -> None:
    import jax
    from jax.sharding import PartitionSpec as P

    mesh = placed(X).sharding.mesh
    cases: list[tuple[str, int, Any, tuple[Any, Any], str]] = [
        ("fp8_block,block_k=128", -1, lambda st: breccia.dequantize(st), (P(None, "d"), P()), r"blocks of 128 along axis -1"),
        (
            "fp8_block,block_k=128",
            -1,
            lambda w: breccia.matmul(jax.numpy.asarray(X[:, :64]), w.mT),
            (P(None, "d"), P()),
            "blocks of 128 along axis -2",
        ),
        (
            "fp8_block,block_k=128",
            -1,
            lambda st: breccia.requantize(st, "int4"),
            (P(None, "d"), P()),
            "blocks of 128 along axis -1",
        ),
        ("int4,group_size=128", -2, lambda st: breccia.dequantize(st), (P("d", None), P()), "blocks of 128 along axis -2"),
        ("fp8_block,block_m=4,block_k=32", -1, lambda st: breccia.dequantize(st), (P("d"), P()), "blocks of 4 along axis -2"),
        ("mxfp8", -1, lambda st: breccia.dequantize(st), (P(None, "d"), P()), "blocks of 32 along axis -1"),
    ]
    for spec, axis, op, parts, message in cases:
        st = breccia.cast(jax.numpy.asarray(X if axis == -1 else X.T.copy()), spec, axis=axis)
        specs = jax.tree.unflatten(jax.tree.structure(st), parts)
        try:
            jax.jit(jax.shard_map(op, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False))(st)
        except breccia.LayoutError as e:
            text = str(e)
            name = "b" if "axis -2" in message and "fp8_block,block_k" in spec else "st"
            assert f"inside shard_map over 'd', the shard of {name} has codes of shape" in text and message in text, text
            assert f"Shard {name} along another axis, or give each shard a multiple of" in text, text
        else:
            raise AssertionError((spec, "was not refused"))


def partial_last_blocks_are_neither_cut_nor_joined() -> None:
    """200 = 7 * 28 + 4 codes in shards of 25: as many scales as shards, but of other blocks."""
    import jax
    from jax.sharding import PartitionSpec as P

    mesh = placed(X).sharding.mesh
    for side, axis, shape in (("block_k=28", -1, (16, 200)), ("block_m=28,block_k=32", -2, (200, 64))):
        recipe, x = breccia.recipe(f"fp8_block,{side}"), wide(shape, seed=3, exponents=4)
        st, expected = breccia.cast(jax.numpy.asarray(x), recipe), breccia.dequantize(breccia.cast(x, recipe))
        along, across = (P(None, "d"), P("d")) if axis == -1 else (P("d"), P(None, None))
        decode = partial(jax.shard_map, breccia.dequantize, mesh=mesh)
        assert np.array_equal(jax.jit(decode(in_specs=(across,), out_specs=across))(st), expected)
        cast = jax.jit(jax.shard_map(lambda x, r=recipe: breccia.cast(x, r), mesh=mesh, in_specs=along, out_specs=along))
        joined = cast(x)
        alone = jax.tree.map(lambda part: jax.device_put(part, jax.devices()[0]), joined)
        for op, message in (
            (partial(jax.jit(decode(in_specs=(along,), out_specs=along)), st), "the shard of st has 25 codes"),
            (partial(breccia.dequantize, joined), "st has 200 codes"),
            (partial(breccia.dequantize, alone), "st has 200 codes"),
        ):
            try:
                op()
            except breccia.LayoutError as e:
                text = str(e)
                assert f"{message} along axis {axis}, and scales of blocks of 28" in text, text
                assert ("it has been cut inside a block" if "shard of" in message else "have been joined") in text, text
                assert "or pad the array" in text and "a multiple of 28" in text, text
            else:
                raise AssertionError((side, message, "was not refused"))


def shards_of_tensors_in_a_storage_are_whole() -> None:
    """One fault: shards of 123 numbers, with as many padded scales each, were decoded under scales of other blocks."""
    import jax
    from jax.sharding import PartitionSpec as P

    mesh = placed(X).sharding.mesh
    for recipe, storage, columns, spec, message in (
        ("mxfp8", "padded_128x4", 984, P("d", None), ""),
        ("mxfp8", "swizzle_128x4", 984, P("d", None), ""),
        ("mxfp8", "padded_128x4", 984, P(None, "d"), "has 123 codes along axis -1, and scales of blocks of 32 for 984"),
        ("fp8_block", "column_major", 984, P(None, "d"), "has 123 codes along axis -1, and scales of blocks of 128 for 984"),
        ("mxfp8", "padded_128x4", 1280, P(None, "d"), "scales of shape (1024, 5), which are not those of its blocks"),
    ):
        x = wide((1024, columns), seed=4, exponents=4)
        st = breccia.cast(jax.numpy.asarray(x), recipe, storage=storage)
        decode = jax.jit(jax.shard_map(breccia.dequantize, mesh=mesh, in_specs=(spec,), out_specs=spec))
        try:
            assert np.array_equal(decode(st), breccia.dequantize(st)) and not message
        except breccia.LayoutError as e:
            assert message and message in str(e), str(e)


def scales_follow_a_sharding_of_the_codes() -> None:
    """Per tensor, per row, of tiles that the shards do not divide, and of two levels."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
        for recipe, scales in (
            ("fp8_current", ()),
            ("fp8_row", ("a", None)),
            ("fp8_block,block_m=128,block_k=256", (None, None)),
            ("nvfp4", ("a", "b")),
        ):
            st = breccia.cast(jax.numpy.asarray(W), recipe)
            moved = st.to(NamedSharding(mesh, PartitionSpec("a", "b")))
            assert breccia.bytes_equal(moved, st), recipe
            assert (spread(moved.data), spread(moved.scale)) == (("a", "b"), scales), recipe
            assert np.array_equal(breccia.dequantize(moved), breccia.dequantize(breccia.cast(W, recipe))), recipe
        experts = breccia.stack([breccia.cast(jax.numpy.asarray(W), "nvfp4")] * 4)
        moved = experts.to(NamedSharding(mesh, PartitionSpec("b", None, "a")))
        assert spread(moved.global_scale) == ("b",) and breccia.bytes_equal(moved, experts)
        try:
            st.to(NamedSharding(mesh, PartitionSpec("a", None, "b")))
        except breccia.OptionError as e:
            assert "JAX cannot use device" in str(e), str(e)
        else:
            raise AssertionError("a sharding of another rank was not refused")


def a_tree_of_shardings_places_every_leaf() -> None:
    """`device_put` and `out_shardings` take one sharding for each leaf."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import breccia_jax

    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
        for spec in ("nvfp4", "fp8_block", "fp8_current", "mxfp8"):
            x = jax.numpy.asarray(X)
            st = breccia.cast(x, spec)
            for names in (("a",), ("a", "b"), (None, ("a", "b")), ()):
                sharding = NamedSharding(mesh, PartitionSpec(*names))
                for like in (st, jax.eval_shape(partial(breccia.cast, recipe=spec), x)):
                    places = breccia_jax.shardings(like, sharding)
                    moved = jax.device_put(st, places)
                    cast = jax.jit(partial(breccia.cast, recipe=spec), out_shardings=places)(x)
                    for found in (moved, cast):
                        assert breccia.bytes_equal(found, st), (spec, names)
                        assert spread(found.data) == (*names, None, None)[:2], (spec, names)
                        assert spread(found.scale) == spread(st.to(sharding).scale), (spec, names)
        tree = {"w": st, "b": x}
        assert breccia.bytes_equal(jax.device_put(tree, breccia_jax.shardings(tree, sharding))["w"], st)
        alone = jax.sharding.SingleDeviceSharding(jax.devices()[3])
        assert jax.device_put(st, breccia_jax.shardings(st, alone)).device == jax.devices()[3]
        for names in (("a", None, "b"), (None, None, "a")):
            try:
                breccia_jax.shardings(st, NamedSharding(mesh, PartitionSpec(*names)))
            except breccia.OptionError as e:
                assert "codes of shape (16, 512) cannot be sharded by" in str(e) and "at most 2 axes" in str(e), str(e)
            else:
                raise AssertionError(names)


CHECKS = [
    a_tree_of_shardings_places_every_leaf, scales_follow_a_sharding_of_the_codes,
    partial_last_blocks_are_neither_cut_nor_joined, shards_of_tensors_in_a_storage_are_whole,
    every_op_runs_on_every_kind_of_axis,
    a_shard_map_that_splits_a_block_is_refused_by_name, explicit_meshes_shard_what_is_cast,
    explicit_meshes_need_no_context, explicit_meshes_shard_products_and_gradients, blocks_are_cast_where_they_are,
    a_tensors_amax_alone_is_exchanged, products_stay_where_their_rows_are, shards_are_tensors_of_their_own,
    gradients_keep_the_sharding, tensors_move_between_shardings, exported_functions_keep_their_shardings,
]  # fmt: skip


def test_over_eight_devices() -> None:
    """All checks at once: as tests of their own, each of pytest's processes would run all of them."""
    pytest.importorskip("jax")
    failed = failures(__file__)
    if find_spec("flatbuffers") is None:  # jax.export needs it
        failed.pop(exported_functions_keep_their_shardings.__name__, None)
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
