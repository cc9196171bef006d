"""JAX on a CPU: pytrees, transforms, gradients, compilation counts, and refused calls."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from fresh import printed

import breccia
import breccia_jax
from breccia import Kernel
from breccia.arrays.frameworks import device_of, framework_of, place_of
from breccia.backend import registry
from breccia.dispatch.table import Table
from breccia.operations import OPERATIONS
from breccia.options import DEFAULT
from breccia.tensors.components import components
from breccia.tensors.grids import packing
from breccia.tensors.tensor import FIELDS
from breccia.testing.examples import special_rows, wide

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import export, lax, tree_util  # noqa: E402

from breccia_jax import trees  # noqa: E402
from breccia_jax.ops import JAX  # noqa: E402

#: `make test` runs every recipe and every framework; `make test-all` runs all combinations.
pytestmark = pytest.mark.covering(1, 2)

X = np.concatenate([wide((29, 77), seed=40, exponents=30), special_rows(77)])
NVFP4 = breccia.NVFP4BlockScaling()
MXFP8 = breccia.MXFP8BlockScaling()
CURRENT = breccia.Float8CurrentScaling()
INT4 = breccia.INT4Scaling(group_size=16)
#: One recipe for each kind of format: per tensor, rows, tiles, power-of-two scales, 6-bit codes, two levels, offsets, a table.
KINDS = [
    CURRENT,
    breccia.Float8RowScaling(),
    breccia.Float8BlockScaling(block_k=32, block_m=4),
    MXFP8,
    breccia.MXFP6BlockScaling(),
    NVFP4,
    breccia.INT4Scaling(group_size=32, signed=False, symmetric=False),
    breccia.INT4Scaling(group_size=32, signed=False, symmetric=False, offset="bias"),
    breccia.NF4Scaling(),
]
#: The kinds in the fast suite; the others are slow tests.
FEW = [CURRENT, NVFP4, KINDS[6]]


def kinds(recipes: list[breccia.ScalingRecipe], fast: list[breccia.ScalingRecipe]) -> pytest.MarkDecorator:
    listed = [pytest.param(kind, marks=() if kind in fast else pytest.mark.slow) for kind in recipes]
    return pytest.mark.parametrize("kind", listed, ids=lambda kind: f"{kind.name}-{kind.format.offset}")


each_kind = kinds(KINDS, FEW)
a_few_kinds = kinds(FEW, FEW)
an_example = kinds(FEW, [NVFP4])


def rows(n: int, k: int = 64, seed: int = 0) -> Any:
    return jnp.asarray(wide((n, k), seed=seed, exponents=3))


def bits(y: Any) -> np.ndarray:
    return np.asarray(y, np.float32).view(np.int32)


def same(a: Any, b: Any) -> bool:
    """Equal dtypes and bits, NaN equal to NaN."""
    a, b = np.asarray(a), np.asarray(b)
    words = [x.astype(np.float32).view(np.int32) for x in (np.where(np.isnan(a), 1, a), np.where(np.isnan(b), 1, b))]
    return a.dtype == b.dtype and np.array_equal(*words) and np.array_equal(np.isnan(a), np.isnan(b))


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect one event name for each program that XLA compiles in the context."""
    found: list[str] = []
    active = True

    def listen(event: str, duration: float, **_: Any) -> None:
        if active and event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    active = False


# -- pytrees ---------------------------------------------------------------------------------------------------------


def test_a_scaled_tensor_is_a_pytree_of_its_components(recipe: breccia.ScalingRecipe) -> None:
    st = jax.tree.map(jnp.asarray, breccia.cast(X, recipe))
    leaves, structure = jax.tree.flatten({"w": st, "b": jnp.ones(2)})
    assert len(leaves) == len(components(st)) + 1
    assert breccia.bytes_equal(jax.tree.unflatten(structure, leaves)["w"], st)
    paths = [tree_util.keystr(path) for path, _ in tree_util.tree_flatten_with_path(st)[0]]
    assert paths == [f".{name}" for name in components(st)]
    read = breccia.ScalingRecipe.from_json(recipe.to_json())
    again = breccia.ScaledTensor.from_parts(**{name: getattr(st, name) for name in FIELDS} | {"recipe": read})
    assert read is not recipe and jax.tree.structure(again) == structure.children()[1]
    assert hash(jax.tree.structure(again)) == hash(structure.children()[1])


@pytest.mark.parametrize("spec", ["nvfp4", "fp8_block"])
def test_a_tensor_is_converted_to_leaves_once(spec: str) -> None:
    """A compiled function flattens its arguments in each call, and outside of it a conversion is a copy."""
    first = breccia.cast(jnp.linspace(-1, 1, 32 * 256, dtype=jnp.float32).reshape(32, 256), spec)
    parts = first.data, first.scale, first.recipe, first.layout, first.zero_point, first.global_scale
    st = breccia.ScaledTensor(*parts)
    jax.jit(lambda: jax.tree.leaves(st))()  # keeps no value of its trace
    leaves = jax.tree.leaves(st)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(st), strict=True))
    assert breccia.bytes_equal(st, first) and st.data.dtype == parts[0].dtype and st.scale.dtype == parts[1].dtype


def test_pytrees_with_different_metadata_differ() -> None:
    st = breccia.cast(rows(4), MXFP8)
    others = [
        breccia.cast(rows(4), r) for r in (breccia.MXFP8BlockScaling("E5M2"), breccia.MXFP8BlockScaling(scale_rule="floor"))
    ]
    others += [breccia.cast(rows(4), MXFP8, axis=-2), st.mT]
    assert all(jax.tree.structure(other) != jax.tree.structure(st) for other in others)


def test_a_tensor_of_placeholders_is_not_checked() -> None:
    st = breccia.cast(rows(4), NVFP4)
    for leaf in (None, object(), 0, "x", jax.ShapeDtypeStruct((1,), jnp.int8)):
        made = jax.tree.map(lambda _, leaf=leaf: leaf, st)
        assert made.data is leaf and made.scale is leaf and made.zero_point is None and made.recipe == NVFP4
        assert repr(made) == f"breccia.ScaledTensor('nvfp4', data={leaf!r}, scale={leaf!r}" + (
            ")" if leaf is None else f", global_scale={leaf!r})"
        )
        assert made._repr_html_().startswith("<code>breccia.ScaledTensor(")
    for leaf_of in (
        lambda a: a.shape,
        lambda a: a.dtype,
        lambda a: jax.sharding.PartitionSpec("d"),
        lambda a: {},
        bool,
        jnp.sum,
    ):
        made = jax.tree.map(lambda a, leaf_of=leaf_of: leaf_of(a) if leaf_of is not bool else True, st)
        assert repr({"w": made}).startswith("{'w': breccia.ScaledTensor('nvfp4', data=")
    shapes = jax.eval_shape(lambda x: breccia.cast(x, NVFP4), jax.ShapeDtypeStruct((4, 70), jnp.bfloat16))
    assert "data=ShapeDtypeStruct(" in repr(shapes)
    assert shapes.nbytes == breccia.cast(jnp.zeros((4, 70)), NVFP4).nbytes
    with pytest.raises(AttributeError, match="'ShapeDtypeStruct' object has no attribute"):  # not of the property
        _ = shapes.mT
    with pytest.raises(AttributeError, match=r"no attribute 'block_until_ready': jax.block_until_ready\(st\)"):
        st.block_until_ready()  # type: ignore[attr-defined]
    assert (shapes.shape, shapes.data.shape, shapes.scale.shape, shapes.global_scale.shape) == ((4, 70), (4, 35), (4, 5), ())


@each_kind
def test_no_leaf_has_a_tangent(kind: breccia.ScalingRecipe) -> None:
    """Nothing that optimizers do to floating-point leaves happens to codes and scales."""
    for st in (breccia.cast(rows(4), kind), jax.tree.map(jnp.asarray, breccia.cast(X, kind))):
        assert all(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in jax.tree.leaves(st))
        back = jax.tree.unflatten(jax.tree.structure(st), jax.tree.leaves(st))
        for name, part in components(st).items():
            assert getattr(back, name).dtype == part.dtype
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        jax.grad(lambda st: breccia.dequantize(st).sum())(st)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@a_few_kinds
def test_operations_refuse_tensors_whose_leaves_a_function_of_a_tree_has_changed(kind: breccia.ScalingRecipe, run: Any) -> None:
    st, x = breccia.cast(rows(16), kind), rows(4)
    operations = [
        (breccia.dequantize, "st"),
        (lambda st: breccia.matmul(x, st.mT), "b"),
        (lambda st: breccia.requantize(st, "mxint8"), "st"),
        (lambda st: breccia.cast_matmul(x, "mxint8", st.mT), "b"),
    ]
    for change in (
        lambda leaf: 0.9 * leaf + 0.1 * leaf,  # an average of parameters
        lambda leaf: leaf.astype(jnp.bfloat16),
        lambda leaf: leaf.astype(jnp.int32),
    ):
        for operation, name in operations:
            message = f"{name} is no longer a tensor of '{kind.name}': data must hold"
            with pytest.raises(breccia.UnsupportedError, match=message):
                run(operation)(jax.tree.map(change, st))
    if st.scale.ndim:
        message = f"st is no longer a tensor of '{kind.name}': (PerBlockK: scale.shape|the leaf of scale has shape)"
        with pytest.raises(breccia.LayoutError, match=message):
            run(breccia.dequantize)(jax.tree.map(lambda leaf: leaf.T, st))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), st)  # changes no number
    assert same(run(breccia.dequantize)(stacked)[1], breccia.dequantize(st))


def native(st: breccia.ScaledTensor) -> breccia.ScaledTensor:
    """The tensor with its components as arrays of their own."""
    return breccia.ScaledTensor.from_parts(**{name: getattr(st, name) for name in FIELDS})


@pytest.mark.long
@each_kind
def test_tensors_put_together_by_jax_equal_those_of_their_components(kind: breccia.ScalingRecipe) -> None:
    st = breccia.cast(jnp.stack([rows(8), rows(8)]), kind)
    other = native(st)
    assert st.held is not None or not any(jnp.issubdtype(p.dtype, jnp.floating) for p in components(st).values())
    assert other.held is None and jax.tree.structure(st) == jax.tree.structure(other)
    assert (repr(st), st.nbytes, st.shape, st.ndim) == (repr(other), other.nbytes, other.shape, other.ndim)
    assert (st.data_dtype, st.scale_dtype, st.dtype) == (other.data_dtype, other.scale_dtype, other.dtype)
    moves: list[Callable[[breccia.ScaledTensor], Any]] = [
        lambda st: st.mT,
        lambda st: st[1],
        lambda st: st[1:, ...],
        lambda st: st.select(0, [1, 0]),
        lambda st: st.reshape(2, 1, 8, 64),
        lambda st: st.to("cpu"),
        lambda st: st.split(1)[1],
        lambda st: breccia.stack([st, st]),
        lambda st: breccia.concat([st, st]),
    ]
    for move in moves:
        moved, expected = move(st), move(other)
        assert breccia.bytes_equal(moved, expected) and jax.tree.structure(moved) == jax.tree.structure(expected)
    inside = jax.jit(lambda st: [move(st) for move in moves[:7]])(st)
    assert all(breccia.bytes_equal(a, move(other)) for a, move in zip(inside, moves, strict=False))


def test_looking_at_a_tensor_converts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    st = breccia.cast(jnp.stack([rows(8), rows(8)]), NVFP4)

    convert = jax.lax.bitcast_convert_type

    def refused(a: Any, dtype: Any) -> Any:
        assert a.size in (1, 4), "a component was converted, other than the FP32 scale, whose leaf is four bytes"
        return convert(a, dtype)

    monkeypatch.setattr(jax.lax, "bitcast_convert_type", refused)
    assert repr(st).startswith("breccia.ScaledTensor('nvfp4', shape=(2, 8, 64), jax cpu")
    assert st.nbytes and st.size and st.device
    assert (st.scale_dtype, st.data_dtype) == (jnp.float8_e4m3fn, jnp.uint8)
    for moved in (st.mT, st[0], st.reshape(1, 2, 8, 64), st.to("cpu"), *st.split(1)):
        assert jax.tree.leaves(moved)


FIRST = """
import jax, jax.numpy as jnp, numpy as np, breccia
parts = np.zeros((2, 32), np.uint8), np.full((2, 1), 127, np.uint8)
st = breccia.from_buffer(*({make}(p) for p in parts), breccia.MXFP8BlockScaling(), breccia.PerBlockMN(1, 32))
y = jax.jit(lambda st: breccia.dequantize(st))(st)
assert y.shape == (2, 32) and isinstance(y, jax.Array)
"""


@pytest.mark.long
@pytest.mark.parametrize("make", ["jnp.asarray", "np.asarray"])
def test_the_first_use_of_a_tensor_may_be_a_jitted_call(make: str) -> None:
    printed(FIRST.format(make=make))


def test_numpy_tensors_move_to_jax_and_back_as_pytrees(recipe: breccia.ScalingRecipe) -> None:
    """Their codes are uint8, which `digest` and every op read as float8."""
    st = breccia.cast(X, recipe)
    moved = jax.tree.map(jnp.asarray, st)
    assert moved.framework == "jax" and moved.digest() == st.digest()
    assert breccia.bytes_equal(jax.tree.map(np.asarray, moved), st)


@an_example
def test_pickles_and_copies_keep_every_byte(kind: breccia.ScalingRecipe) -> None:
    st = breccia.cast(rows(8), kind)
    for other in (pickle.loads(pickle.dumps(st)), copy.deepcopy(st)):
        assert other.framework == "jax" and breccia.bytes_equal(other, st)


# -- the same bytes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_vmap_writes_numpy_bytes_for_each_example_under_every_recipe(recipe: breccia.ScalingRecipe) -> None:
    check_vmap_against_numpy(recipe)


@pytest.mark.long
@each_kind
def test_vmap_writes_numpy_bytes_for_each_example(kind: breccia.ScalingRecipe) -> None:
    check_vmap_against_numpy(kind)


def check_vmap_against_numpy(recipe: breccia.ScalingRecipe) -> None:
    """Compare under jit, with all special values. Tensor-level scales are computed per example."""
    cube = np.stack([X[:18], X[9:27], X[-18:]])

    @jax.jit
    @jax.vmap
    def both(x: Any) -> Any:
        st = breccia.cast(x, recipe)
        return st, breccia.dequantize(st)

    found, values = both(jnp.asarray(cube))
    assert found.shape == cube.shape
    for n, x in enumerate(cube):
        expected = breccia.cast(x, recipe)
        assert breccia.bytes_equal(jax.tree.map(lambda part, n=n: part[n], found), expected)
        y, z = bits(breccia.dequantize(expected)), bits(values[n])
        nan = np.isnan(y.view(np.float32))
        assert np.array_equal(nan, np.isnan(z.view(np.float32)))
        magnitude = y & 0x7FFFFFFF
        cells = (y != z) & ~nan
        # XLA may change only results below 2^-126, to zeros with the same sign (docs/spec/numerics.md, section 4).
        assert not (cells & ~((magnitude > 0) & (magnitude < 0x00800000))).any()
        assert np.array_equal(z[cells], y[cells] & -0x80000000)


def test_xla_flushes_only_subnormal_values() -> None:
    """E5M2 codes under the scale 2^-126: exactly the elements with a subnormal product become zeros."""
    codes = np.arange(0x7C, dtype=np.uint8).reshape(1, -1)
    for byte in (0, 1, 17):
        scale = np.full((1, 4), byte, np.uint8)
        st = breccia.from_buffer(codes, scale, breccia.MXFP8BlockScaling("E5M2"), breccia.PerBlockMN(1, 32, partial=True))
        exact = np.array([breccia.codecs.E5M2.value(c) for c in range(0x7C)]) * 2.0 ** (byte - 127)
        tiny = (exact > 0) & (exact < 2.0**-126)
        found = np.asarray(breccia.dequantize(jax.tree.map(jnp.asarray, st)))[0]
        assert np.array_equal(np.where(tiny, 0, exact), np.where(tiny, 0, found))
        assert set(np.flatnonzero(found != exact)) <= set(np.flatnonzero(tiny))
        assert tiny.any() == (byte < 17)


@pytest.mark.long
@an_example
def test_nested_vmap_empty_and_1d_arrays_have_numpy_bytes(kind: breccia.ScalingRecipe) -> None:
    deep = wide((2, 3, 5, 70), seed=41, exponents=5)
    found = jax.vmap(jax.vmap(lambda x: breccia.cast(x, kind), in_axes=1, out_axes=0))(jnp.asarray(deep.transpose(0, 2, 1, 3)))
    for i in range(2):
        for j in range(3):
            part = jax.tree.map(lambda p, i=i, j=j: p[i, j], found)
            assert breccia.bytes_equal(part, breccia.cast(deep[i, j], kind))
    for x, axis in ((deep, -2), (deep[:0], -1), (deep[0, :, :0], -2), (deep[0, ..., :0], -1), (deep[0, ..., :1], -1)):
        expected = breccia.cast(x, kind, axis=axis)
        st = breccia.cast(jnp.asarray(x), kind, axis=axis)
        assert breccia.bytes_equal(st, expected) and same(breccia.dequantize(st), breccia.dequantize(expected))
    if kind.name == "fp8_current":
        assert breccia.bytes_equal(breccia.cast(jnp.asarray(X[3]), kind), breccia.cast(X[3], kind))


@pytest.mark.long
def test_matrices_reduced_in_halves_have_numpy_bytes() -> None:
    """Rows of 64 and 256 numbers, whose amax is reduced in halves and in chunks, with NaN at any position."""
    for k in (64, 256):
        x = wide((64, k), seed=k, exponents=20)
        x[np.arange(0, 64, 3), np.arange(0, 64, 3) * k // 64] = np.nan
        for kind in (breccia.Float8BlockScaling(block_k=128, block_m=4), breccia.Float8RowScaling(), CURRENT):
            assert breccia.bytes_equal(breccia.cast(jnp.asarray(x), kind), breccia.cast(x, kind))


@pytest.mark.long
@an_example
def test_seeds_may_be_traced_and_have_64_bits(kind: breccia.ScalingRecipe) -> None:
    x = wide((6, 64), seed=6, exponents=2)
    draw = jax.jit(lambda x, seed: breccia.cast(x, kind, rounding="stochastic", seed=seed))
    for seed, given in (
        (7, jnp.uint32(7)),
        (2**32 - 1, jnp.uint32(2**32 - 1)),
        (7, jnp.int32(7)),
        (5 + (9 << 32), jnp.array([5, 9], jnp.uint32)),
        (2**64 - 2, np.array([2**32 - 2, 2**32 - 1], np.uint32)),
    ):
        expected = breccia.cast(x, kind, rounding="stochastic", seed=seed)
        assert breccia.bytes_equal(draw(jnp.asarray(x), given), expected)
        assert breccia.bytes_equal(breccia.cast(jnp.asarray(x), kind, rounding="stochastic", seed=seed), expected)
    words = np.array([5, 9], np.uint32)
    assert breccia.bytes_equal(
        breccia.cast(x, kind, rounding="stochastic", seed=words),
        breccia.cast(x, kind, rounding="stochastic", seed=5 + (9 << 32)),
    )


@pytest.mark.long
def test_seeds_may_be_keys_of_either_style() -> None:
    x = wide((6, 64), seed=6, exponents=2)
    key, old = jax.random.key(2**40 + 3), jax.random.PRNGKey(2**40 + 3)
    low, high = (int(word) for word in np.asarray(old))
    expected = breccia.cast(x, NVFP4, rounding="stochastic", seed=low | high << 32)

    def draw(x: Any, seed: Any) -> Any:
        return breccia.cast(x, NVFP4, rounding="stochastic", seed=seed)

    for seed in (key, old):
        assert breccia.bytes_equal(draw(jnp.asarray(x), seed), expected)
        assert breccia.bytes_equal(jax.jit(draw)(jnp.asarray(x), seed), expected)
        pair = breccia.cast_pair(jnp.asarray(x), NVFP4, rounding="stochastic", seed=seed)
        assert breccia.bytes_equal(pair.rowwise, expected)
        again = breccia.requantize(breccia.cast(jnp.asarray(x), MXFP8), NVFP4, rounding="stochastic", seed=seed)
        there = breccia.requantize(breccia.cast(x, MXFP8), NVFP4, rounding="stochastic", seed=low | high << 32)
        assert breccia.bytes_equal(again, there)
    keys = jax.random.split(key, 2)
    found = jax.vmap(lambda key: breccia.dequantize(draw(jnp.asarray(x), key)))(keys)
    assert same(found[1], breccia.dequantize(draw(jnp.asarray(x), keys[1])))
    for wrong in (keys, jax.random.key(0, impl="rbg")):
        with pytest.raises(breccia.OptionError, match=r"seed must be one key of two words; .* jax.random.bits\(key"):
            draw(jnp.asarray(x), wrong)
    with pytest.raises(breccia.OptionError, match="seed must be an integer"):
        draw(x, key)


@pytest.mark.long
def test_requantize_writes_numpy_bytes() -> None:
    """To the same recipe, with kept scales, and through FP32; under jit, and with `require_exact`."""
    mxfp4, tiles = breccia.MXFP4BlockScaling(), breccia.Float8BlockScaling(block_k=32, block_m=4)
    for old, new in ((mxfp4, mxfp4), (mxfp4, MXFP8), (tiles, breccia.Float8BlockScaling(block_k=16)), (tiles, NVFP4)):
        ours, expected = breccia.cast(jnp.asarray(X), old), breccia.requantize(breccia.cast(X, old), new)
        assert breccia.bytes_equal(breccia.requantize(ours, new), expected)
        assert breccia.bytes_equal(jax.jit(lambda st, new=new: breccia.requantize(st, new))(ours), expected)
        assert (breccia.requantize(ours, new) is ours) == (new is old)
    kept = breccia.requantize(breccia.cast(jnp.asarray(X), breccia.MXFP4BlockScaling()), MXFP8, require_exact=True)
    assert breccia.bytes_equal(
        kept, breccia.requantize(breccia.cast(X, breccia.MXFP4BlockScaling()), MXFP8, require_exact=True)
    )
    with pytest.raises(breccia.InexactError, match="values do not fit MXFP4BlockScaling"):
        breccia.requantize(breccia.cast(rows(4), MXFP8), breccia.MXFP4BlockScaling(), require_exact=True)


def test_supplied_scales_are_numbers_or_arrays() -> None:
    x = wide((6, 64), seed=7, exponents=2)
    expected = breccia.cast(x, CURRENT, scale=0.37)
    for scale in (0.37, np.float32(0.37), np.float64(0.37), jnp.float32(0.37)):
        for on in (jnp.asarray, np.asarray):
            if on is jnp.asarray or not isinstance(scale, jax.Array):
                assert breccia.bytes_equal(breccia.cast(on(x), CURRENT, scale=scale), expected)
    traced = jax.jit(lambda x, scale: breccia.cast(x, CURRENT, scale=scale))
    assert breccia.bytes_equal(traced(jnp.asarray(x), jnp.float32(0.37)), expected)
    with pytest.raises(breccia.UnsupportedError, match="scale= must hold F32 .* got dtype int32"):
        traced(jnp.asarray(x), jnp.int32(1))
    with pytest.raises(breccia.LayoutError, match=r"scale= must have shape \(\)"):
        traced(jnp.asarray(x), jnp.ones(3))
    assert np.isnan(breccia.cast(jnp.asarray(x), CURRENT, scale=1e300).scale), "a scale beyond FP32 is a fault that shows"
    first = breccia.cast(x, MXFP8)
    assert breccia.bytes_equal(
        breccia.cast(jnp.asarray(x), MXFP8, scale=jnp.asarray(first.scale)), breccia.cast(x, MXFP8, scale=first.scale)
    )


@pytest.mark.long
@an_example
def test_nothing_changes_where_64_bits_are_enabled(kind: breccia.ScalingRecipe) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(X)
        assert x.dtype == jnp.float32 and jnp.asarray(1.0).dtype == jnp.float64
        st = breccia.cast(x, kind)
        assert breccia.bytes_equal(st, breccia.cast(X, kind)) and breccia.dequantize(st).dtype == jnp.float32
        drawn = jax.jit(lambda x, s: breccia.cast(x, kind, rounding="stochastic", seed=s))(x, jnp.uint64(2**63 + 5))
        assert breccia.bytes_equal(drawn, breccia.cast(X, kind, rounding="stochastic", seed=2**63 + 5))
        assert breccia.matmul(x, st.mT).dtype == jnp.float32
        assert jax.grad(lambda x: breccia.cast_ste_clipped(x, kind).sum())(x).dtype == jnp.float32
        with pytest.raises(
            breccia.UnsupportedError, match=r"cast takes float32, float16, bfloat16; got float64\. Convert it first"
        ):
            breccia.cast(x.astype(jnp.float64), kind)


# -- transforms ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@an_example
def test_scan_carries_and_iterates_over_scaled_tensors(kind: breccia.ScalingRecipe) -> None:
    cube = jnp.asarray(wide((4, 8, 64), seed=8, exponents=1))
    stacked = jax.vmap(lambda x: breccia.cast(x, kind))(cube)

    def step(st: Any, layer: Any) -> Any:
        total = breccia.dequantize(st) * 0.5 + breccia.dequantize(layer)
        return breccia.cast(total, kind), breccia.matmul(total, layer.mT)

    last, products = jax.jit(partial(lax.scan, step))(breccia.cast(cube[0], kind), stacked)
    st = breccia.cast(cube[0], kind)
    for n in range(4):
        layer = jax.tree.map(lambda part, n=n: part[n], stacked)
        assert breccia.bytes_equal(layer, breccia.cast(cube[n], kind))
        st, product = jax.jit(step)(st, layer)
        assert same(products[n], product)
    assert breccia.bytes_equal(last, st)


@pytest.mark.long
def test_cond_and_while_loop_accept_scaled_tensors() -> None:
    a, b = breccia.cast(rows(4), NVFP4), breccia.cast(rows(4, seed=1), NVFP4)
    chosen = jax.jit(lambda which, a, b: lax.cond(which, lambda: a, lambda: b))
    assert breccia.bytes_equal(chosen(True, a, b), a) and breccia.bytes_equal(chosen(False, a, b), b)
    half = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, breccia.cast(breccia.dequantize(s[1]) / 2, NVFP4)), (0, a))
    assert same(breccia.dequantize(half[1]), breccia.dequantize(a) / 8), "a global scale halves exactly"


@pytest.mark.long
def test_in_axes_may_be_a_scaled_tensor_of_axes() -> None:
    """A tensor-level scale shared by all examples has no mapped axis."""
    st = breccia.cast(jnp.asarray(wide((3, 4, 64), exponents=1)), CURRENT)
    axes = jax.tree.map(lambda part: 0 if part.ndim >= st.ndim else None, st)  # the leaf of the scale is 4 bytes
    each = jax.vmap(breccia.dequantize, in_axes=(axes,))(st)
    assert same(each, breccia.dequantize(st))
    shared = jax.vmap(lambda x, st: breccia.matmul(x, st.mT), in_axes=(0, None))(rows(6).reshape(2, 3, 64), st[0])
    assert shared.shape == (2, 3, 4)
    across = jax.vmap(lambda x: breccia.cast(x, MXFP8), in_axes=1, out_axes=1)(jnp.asarray(wide((4, 2, 3, 64))))
    assert across.data.shape == (4, 2, 3, 64) and across.scale.shape == (4, 2, 3, 2)


@pytest.mark.long
@an_example
def test_structural_operations_can_be_traced(kind: breccia.ScalingRecipe) -> None:
    st = breccia.cast(jnp.asarray(wide((4, 8, 64), exponents=1)), kind)

    def cut(st: Any) -> Any:
        left, right = st.split(2, 0)
        return breccia.stack([st[0], st[1]]), st.reshape(2, 2, 8, 64), left.mT, right.select(0, [1, 0])

    for found, expected in zip(jax.jit(cut)(st), cut(st), strict=True):
        assert breccia.bytes_equal(found, expected) and jax.tree.structure(found) == jax.tree.structure(expected)
    traced = jax.jit(lambda data, scale: breccia.dequantize(breccia.from_buffer(data, scale, MXFP8, breccia.PerBlockMN(1, 32))))
    mx = breccia.cast(rows(4), MXFP8)
    assert same(traced(mx.data, mx.scale), breccia.dequantize(mx))


@pytest.mark.long
@an_example
def test_exported_functions_keep_the_metadata_of_their_tensors(kind: breccia.ScalingRecipe) -> None:
    pytest.importorskip("flatbuffers")  # jax.export needs it
    st = breccia.cast(rows(8), kind)

    def function(x: Any, st: Any) -> Any:
        return breccia.cast(x, kind), breccia.matmul(x, st.mT), st

    shapes = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), (rows(4), st))
    read = export.deserialize(export.export(jax.jit(function))(*shapes).serialize())
    for found, expected in zip(read.call(rows(4), st), jax.jit(function)(rows(4), st), strict=True):
        if isinstance(found, breccia.ScaledTensor):
            assert breccia.bytes_equal(found, expected) and found.recipe == kind
        else:  # exported functions have the generic algorithm, which adds in another order
            assert agrees(found, rows(4), breccia.dequantize(st).T)


@pytest.mark.long
@each_kind
def test_functions_of_any_number_of_rows_are_exported(kind: breccia.ScalingRecipe) -> None:
    pytest.importorskip("flatbuffers")  # jax.export needs it
    st = breccia.cast(rows(8), kind)
    seed = jnp.uint32(3)

    def function(x: Any, st: Any) -> Any:
        drawn = breccia.cast(x, kind, rounding="stochastic", seed=seed)
        written = breccia.cast(x, kind)
        return breccia.matmul(x, st.mT), breccia.dequantize(written), breccia.cast_ste(x, kind), written.data, drawn.data

    (count,) = export.symbolic_shape("4*b")
    x = jax.ShapeDtypeStruct((count, 64), jnp.float32)
    weight = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), st)
    read = export.deserialize(export.export(jax.jit(function))(x, weight).serialize())
    for n in (4, 12):
        product, *others = read.call(rows(n), st)
        expected, *wanted = jax.jit(function)(rows(n), st)
        assert agrees(product, rows(n), breccia.dequantize(st).T) and agrees(expected, rows(n), breccia.dequantize(st).T)
        for found, other in zip(others, wanted, strict=True):
            assert np.array_equal(np.asarray(found).view(np.uint8), np.asarray(other).view(np.uint8))


def test_a_donated_tensor_cannot_be_used_again() -> None:
    st = breccia.cast(rows(8), MXFP8)
    expected = breccia.cast(breccia.dequantize(st) * 2, MXFP8)
    found = jax.jit(lambda st: breccia.cast(breccia.dequantize(st) * 2, MXFP8), donate_argnums=0)(st)
    assert breccia.bytes_equal(found, expected)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        breccia.dequantize(st)


@pytest.mark.long
def test_checkpointed_functions_have_the_same_gradients() -> None:
    x, w = rows(4), breccia.cast(rows(8), NVFP4)

    def loss(x: Any) -> Any:
        return (breccia.matmul(breccia.cast_ste(x, MXFP8), w.mT) ** 2).sum()

    assert same(jax.jit(jax.grad(jax.checkpoint(loss)))(x), jax.jit(jax.grad(loss))(x))


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
@each_kind
def test_cast_ste_is_the_round_trip_and_passes_gradients_unchanged(kind: breccia.ScalingRecipe, dtype: Any) -> None:
    x = jnp.asarray(wide((6, 70), seed=3, exponents=2)).astype(dtype)
    y, back = jax.vjp(lambda x: breccia.cast_ste(x, kind), x)
    assert same(y, breccia.dequantize(breccia.cast(x, kind), out_dtype=dtype))
    upstream = jnp.arange(x.size, dtype=dtype).reshape(x.shape)
    assert same(back(upstream)[0], upstream)
    assert same(jax.jvp(lambda x: breccia.cast_ste(x, kind), (x,), (upstream,))[1], upstream)


def test_the_clipped_gradient_is_zero_only_outside_the_bounds() -> None:
    x = jnp.array([[-500.0, -448.0, -1.0, 0.0, 1.0, 448.0, 449.0, jnp.nan]])
    _, back = jax.vjp(lambda x: breccia.cast_ste_clipped(x, CURRENT), x)
    assert back(jnp.full_like(x, 3.0))[0].tolist() == [[0.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0]]
    assert back(jnp.full_like(x, jnp.inf))[0].tolist() == [[0.0, *(jnp.inf,) * 5, 0.0, 0.0]], (
        "also for an infinite upstream gradient"
    )
    _, back = jax.vjp(lambda x: breccia.cast_ste_clipped(x, CURRENT, -1.0, 0.5), x)
    assert back(jnp.ones_like(x))[0].tolist() == [[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]


def test_a_stale_scale_zeroes_the_gradients_of_clipped_elements() -> None:
    x = jnp.array([[-500.0, -448.0, -1.0, 449.0, 896.0, 897.0]])
    clipped = jax.jit(jax.grad(lambda x, scale: breccia.cast_ste_clipped(x, CURRENT, clip="scale", scale=scale).sum()))
    assert clipped(x, jnp.float32(1.0)).tolist() == [[0, 1, 1, 0, 0, 0]]
    assert clipped(x, jnp.float32(2.0)).tolist() == [[1, 1, 1, 1, 1, 0]]


@pytest.mark.long
@each_kind
def test_clip_scale_bounds_are_where_the_cast_saturates(kind: breccia.ScalingRecipe) -> None:
    """NumPy decodes the bounds from tensors of a single code; elements below 2^-126 count as zero, as in the cast."""
    recipe = kind
    st = breccia.cast(X, recipe)
    element = recipe.format.element
    values = {code: v for code in range(1 << element.bits) if np.isfinite(v := element.value(code))}
    group, size = packing(element)

    def all_of(code: int) -> Any:
        pattern = sum(code << (i * element.bits) for i in range(group)).to_bytes(size, "little")
        data = np.resize(np.frombuffer(pattern, np.uint8), st.data.shape)
        fields = {name: getattr(st, name) for name in FIELDS}
        return breccia.dequantize(breccia.ScaledTensor.from_parts(**fields | {"data": data}))

    low, high = (all_of(end(values, key=lambda code: values[code])) for end in (min, max))
    x = np.where(np.abs(X) < 2.0**-126, np.copysign(np.float32(0), X), X)
    found = jax.grad(lambda x: (breccia.cast_ste_clipped(x, recipe, clip="scale") * 2).sum())(jnp.asarray(X))
    tiny = (np.abs(low) < 2.0**-126) | (np.abs(high) < 2.0**-126)  # bounds that XLA flushes
    assert np.array_equal(np.where(tiny, 0, found), np.where(tiny, 0, np.where((x >= low) & (x <= high), 2.0, 0.0)))


@pytest.mark.long
@an_example
def test_gradients_equal_those_of_torch_bit_by_bit(kind: breccia.ScalingRecipe) -> None:
    """The gradient is a masked select without rounding. All numbers are normal, since XLA compares subnormals as zeros."""
    torch = pytest.importorskip("torch")
    normal = np.where(np.abs(X) < 2.0**-126, np.copysign(np.float32(0), X), X)
    upstream = wide(X.shape, seed=9, exponents=20)
    for dtype in ("float32", "bfloat16"):
        for options in ({}, {"clip_min": -0.1, "clip_max": 0.3}, {"clip": "scale"}):
            ours = jax.vjp(lambda x, o=options: breccia.cast_ste_clipped(x, kind, **o), jnp.asarray(normal).astype(dtype))
            t = torch.from_numpy(normal).to(getattr(torch, dtype)).requires_grad_()
            y = breccia.cast_ste_clipped(t, kind, **options)
            (theirs,) = torch.autograd.grad(y, t, torch.from_numpy(upstream).to(y.dtype))
            found = ours[1](jnp.asarray(upstream).astype(dtype))[0]
            assert same(found.astype(jnp.float32), theirs.float().numpy()), (dtype, options)


@pytest.mark.long
def test_the_gradient_of_matmul_is_the_derivative_and_equals_that_of_torch() -> None:
    """Sums of integers below 2^24 are exact in FP32 in any order."""
    torch = pytest.importorskip("torch")
    whole = np.arange(-30.0, 34.0, dtype=np.float32).reshape(2, 32)
    recipe = breccia.INT4Scaling(group_size=32, scale_dtype="fp32")
    values = np.sign(whole) * (np.abs(whole) % 8)
    w = breccia.cast(jnp.asarray(values), recipe)
    assert np.array_equal(np.asarray(breccia.dequantize(w)), values)
    a = np.arange(-32.0, 32.0, dtype=np.float32).reshape(2, 32)
    upstream = np.array([[1, -2], [3, 5]], np.float32)
    for name, function in {
        "left": lambda x, w: breccia.matmul(x, w.mT),
        "right": lambda x, w: breccia.matmul(w, x.mT),
        "half": lambda x, w: breccia.matmul(x, w.mT, "float16"),
    }.items():
        y, back = jax.vjp(lambda x, f=function: f(x, w), jnp.asarray(a))
        t = torch.from_numpy(a).requires_grad_()
        z = function(t, breccia.cast(torch.from_numpy(values), recipe))
        (theirs,) = torch.autograd.grad(z, t, torch.from_numpy(upstream).to(z.dtype))
        assert same(y, z.detach().numpy()) and same(back(jnp.asarray(upstream).astype(y.dtype))[0], theirs.numpy()), name
    forward, backward = (j(lambda x: breccia.matmul(x, w.mT))(jnp.asarray(a)) for j in (jax.jacfwd, jax.jacrev))
    expected = np.einsum("nk,mi->mnik", values, np.eye(2, dtype=np.float32))
    assert same(forward, expected) and same(backward, expected)
    steps = jnp.eye(64).reshape(64, 2, 32)
    differences = jax.vmap(lambda step: breccia.matmul(jnp.asarray(a) + step, w.mT) - breccia.matmul(jnp.asarray(a), w.mT))(
        steps
    )
    assert same(differences.reshape(2, 32, 2, 2).transpose(2, 3, 0, 1), expected), "steps of one are exact"
    assert jax.grad(lambda x: breccia.matmul(x.reshape(2, 1, 32), w.mT).sum())(jnp.asarray(a)).shape == a.shape


def test_the_backward_pass_stores_codes_and_not_the_decoded_weight() -> None:
    x, w = rows(4), breccia.cast(rows(128), NVFP4)
    _, back = jax.vjp(lambda x: breccia.matmul(x, w.mT), x)
    kept = [leaf for leaf in jax.tree.leaves(back) if isinstance(leaf, jax.Array)]
    assert sum(leaf.nbytes for leaf in kept) <= w.nbytes + x.nbytes < 128 * 64 * 4


@pytest.mark.long
def test_no_gradient_passes_through_a_scaled_tensor() -> None:
    x, st = rows(4), breccia.cast(rows(8), CURRENT)

    def loss(scale: Any) -> Any:
        moved = breccia.ScaledTensor.from_parts(st.data, scale, st.recipe, st.layout)
        return breccia.matmul(x, moved.mT).sum() + breccia.dequantize(moved).sum()

    assert float(jax.grad(loss)(st.scale)) == 0.0
    assert not jax.grad(lambda x: breccia.dequantize(breccia.cast(x, CURRENT)).sum())(x).any()


@pytest.mark.long
def test_vmap_gradients_use_the_scale_of_each_example() -> None:
    x = jnp.asarray(wide((4, 6, 64), seed=5, exponents=3))
    each = jnp.stack([breccia.cast_ste(t, CURRENT) for t in x])
    assert same(jax.vmap(lambda t: breccia.cast_ste(t, CURRENT))(x), each)
    clipped = jax.grad(lambda t: breccia.cast_ste_clipped(t, CURRENT, clip="scale").sum())
    assert same(jax.vmap(clipped)(x), jnp.stack([clipped(t) for t in x]))
    hessian = jax.hessian(lambda t: (breccia.cast_ste(t, MXFP8) ** 2).sum())(rows(1, 32))
    assert same(hessian.reshape(32, 32), 2 * np.eye(32, dtype=np.float32)), "the straight-through derivative of 2 cast_ste(x)"


@pytest.mark.long
@an_example
def test_gradients_of_a_network_are_those_of_the_plain_one_at_the_rounded_values(kind: breccia.ScalingRecipe) -> None:
    recipe = kind
    x, w = rows(8), rows(16, seed=1) / 8
    found = jax.jit(jax.grad(lambda w: (jnp.tanh(breccia.cast_ste(x, recipe) @ breccia.cast_ste(w, recipe).T) ** 2).sum()))(w)
    a, b = (breccia.dequantize(breccia.cast(t, recipe)) for t in (x, w))
    expected = jax.jit(jax.grad(lambda w: (jnp.tanh(a @ w.T) ** 2).sum()))(b)
    assert same(found, expected)


# -- compilation and transfers ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_equal_calls_compile_once() -> None:
    """Eager calls too, for any values of scales and seeds, and their gradients by a new function each."""
    x = [rows(6, 80, seed=n) for n in range(4)]
    scales = [jax.device_put(np.float32(s)) for s in (0.5, 0.25, 2.0)]

    def every(x: Any, n: int) -> Any:
        recipe = breccia.Float8BlockScaling(block_k=16)
        st = breccia.cast(x, recipe)
        breccia.requantize(st, MXFP8)
        breccia.cast(x, CURRENT, scale=scales[n])
        breccia.cast(x, CURRENT, scale=0.5 + n)
        breccia.cast(x, recipe, rounding="stochastic", seed=n + (n << 40))
        breccia.cast_ste(x, recipe)
        jax.grad(lambda x: breccia.matmul(breccia.cast_ste_clipped(x, recipe), st.mT).sum())(x)
        return breccia.dequantize(st, out_dtype="bfloat16"), breccia.matmul(x, st.mT)

    every(x[0], 0)
    with compilations() as found:
        jax.block_until_ready([every(x[1], 1), every(x[2], 2)])
    assert not found
    with compilations() as found:
        every(rows(7, 80), 0)
    # Kernels for arrays in memory compile nothing; `requantize` does.
    assert len(found) >= 2, "the listener hears what it should"


def test_a_jitted_function_is_traced_once_for_equal_tensors() -> None:
    product = jax.jit(lambda x, st: breccia.matmul(x, st.mT))
    for n in range(3):
        product(rows(4, seed=n), breccia.cast(rows(8, seed=n), breccia.NVFP4BlockScaling()))
    assert product._cache_size() == 1
    product(rows(4), breccia.cast(rows(8), MXFP8))
    assert product._cache_size() == 2


@pytest.mark.long
@an_example
def test_calls_transfer_nothing_between_host_and_device(kind: breccia.ScalingRecipe) -> None:
    x, w = rows(6), breccia.cast(rows(8), kind)

    def every(x: Any, w: Any) -> Any:
        st = breccia.cast(x, kind)
        drawn = breccia.cast(x, kind, rounding="stochastic", seed=3)
        clipped = [jax.grad(lambda x, o=o: breccia.cast_ste_clipped(x, kind, **o).sum())(x) for o in ({}, {"clip": "scale"})]
        return st, drawn, breccia.dequantize(w), breccia.requantize(st, MXFP8), breccia.matmul(x, w.mT), clipped

    every(x, w)  # the first call puts constants on the device
    traced = jax.jit(every)
    traced(x, w)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready([traced(x, w), breccia.cast(x, kind), breccia.dequantize(w), breccia.matmul(x, w.mT)])
        breccia.cast(x, kind, rounding="stochastic", seed=4)
        breccia.cast_ste(x, kind)
    text = traced.lower(x, w).as_text()
    assert "callback" not in text and "infeed" not in text and "outfeed" not in text


def test_compiled_steps_and_scans_carry_an_amax_history() -> None:
    recipe = breccia.DelayedScaling(amax_history_len=3)
    steps = wide((5, 4, 32), seed=9, exponents=2)
    history, expected = breccia.AmaxHistory(recipe), list[breccia.ScaledTensor]()
    for x in steps:
        st, history = history.cast(x)
        expected.append(st)
    breccia_jax.register()
    start = breccia.AmaxHistory(recipe, jnp.zeros(3), jnp.float32(1))
    step = jax.jit(lambda x, history: history.cast(x))
    kept = start
    for x, there in zip(steps, expected, strict=True):
        st, kept = step(jnp.asarray(x), kept)
        assert breccia.bytes_equal(st, there)
    assert step._cache_size() == 1 and same(kept.amaxes, history.amaxes) and same(kept.scale, history.scale)
    last, casts = jax.lax.scan(lambda history, x: history.cast(x)[::-1], start, jnp.asarray(steps))
    assert all(breccia.bytes_equal(casts[n], there) for n, there in enumerate(expected)) and same(last.scale, history.scale)
    leaves = tree_util.tree_leaves_with_path(start)
    assert [tree_util.keystr(path) for path, _ in leaves] == [".amaxes", ".scale"]
    other = breccia.AmaxHistory(breccia.DelayedScaling(amax_history_len=4), jnp.zeros(3), jnp.float32(1))
    assert jax.tree.structure(other) != jax.tree.structure(start)
    assert jax.tree.map(lambda _: None, start).amaxes is None  # JAX passes placeholders


# -- devices, dtypes -------------------------------------------------------------------------------------------------


def test_tensors_report_their_device_and_move() -> None:
    st = breccia.cast(rows(4), NVFP4)
    cpu = jax.devices("cpu")[0]
    assert st.device == cpu and device_of(st.data) == "cpu"
    for place in ("cpu", cpu, jax.sharding.SingleDeviceSharding(cpu), None):
        assert breccia.bytes_equal(st.to(place), st)
    for wrong in ("tpu", "cuda:17", 5, object()):
        with pytest.raises(breccia.OptionError, match="JAX cannot use device"):
            st.to(wrong)
    with pytest.raises(breccia.OptionError, match=r"to\(\) moves a tensor to a device; .* is a dtype"):
        st.to(jnp.dtype("bfloat16"))


def test_traced_arrays_have_no_device() -> None:
    """Kernels are chosen for JAX's default device, and no device mismatch is reported."""
    seen: list[Any] = []

    def function(x: Any) -> Any:
        st = breccia.cast(x, MXFP8)
        seen.extend([st.device, device_of(x), str(breccia.explain("cast", x, MXFP8)).splitlines()[0]])
        return breccia.matmul(st, closed.mT)

    closed = breccia.cast(rows(8), MXFP8)
    jax.jit(function)(rows(4))
    assert seen == [None, jax.default_backend().replace("gpu", "cuda"), "cast of mxfp8 on jax"]


def test_the_first_array_of_a_traced_type_is_on_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer asks for the kernel of its product, and so for its device, before any op has met the type of its array."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    seen: list[str] = []

    def placed(x: Any) -> Any:
        for place in (device_of, lambda x: place_of(x).kind):
            registry().types.pop(type(x), None)
            seen.append(place(x))
        return x

    jax.vmap(placed)(jnp.ones((2, 4)))
    assert seen == ["cuda", "cuda"] and place_of(object()).kind == "cpu"


def test_codes_have_the_float8_dtypes_of_jax(recipe: breccia.ScalingRecipe) -> None:
    st = jax.eval_shape(lambda x: breccia.cast(x, recipe), jax.ShapeDtypeStruct((8, 64), jnp.float32))
    fmt = recipe.format
    names = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2", "E4M3FNUZ": "float8_e4m3fnuz", "E5M2FNUZ": "float8_e5m2fnuz"}
    assert st.data.dtype.name == (names | {"INT8": "int8", "MXINT8": "int8"}).get(fmt.element.name, "uint8")
    scales = {"E8M0": "float8_e8m0fnu", "E4M3": "float8_e4m3fn", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    assert st.scale.dtype.name == scales.get(fmt.scale.codec.name, "uint8")
    assert set(components(st)) == set(fmt.parts)


def test_half_precision_inputs_and_outputs_work() -> None:
    x = wide((6, 64), seed=31, exponents=4)
    for dtype in (jnp.float16, jnp.bfloat16):
        narrow = jnp.asarray(x).astype(dtype)
        st = breccia.cast(narrow, MXFP8)
        assert breccia.bytes_equal(st, breccia.cast(np.asarray(narrow.astype(jnp.float32)), MXFP8))
        assert breccia.dequantize(st, out_dtype=dtype).dtype == dtype


# -- refused calls ---------------------------------------------------------------------------------------------------

ONES = np.ones((4, 32), np.float32)
FLOATS = "cast takes float32, float16, bfloat16; got "


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("int32", FLOATS + r"int32\. Only floating-point numbers are quantized"),
        ("bool", FLOATS + r"bool\. Only floating-point numbers are quantized"),
        ("complex64", FLOATS + r"complex64\. Only floating-point numbers are quantized"),
        ("float8_e4m3fn", FLOATS + r"float8_e4m3fn\. Convert it first"),
    ],
)
def test_dtypes_that_cannot_be_cast_are_refused_with_a_remedy(dtype: str, message: str) -> None:
    x = jnp.asarray(ONES).astype(dtype)
    for verb in (breccia.cast, breccia.cast_ste, breccia.cast_ste_clipped):
        with pytest.raises(breccia.UnsupportedError, match=message):
            verb(x, MXFP8)
        with pytest.raises(breccia.UnsupportedError, match=message):
            jax.jit(lambda x, verb=verb: verb(x, MXFP8))(x)
    if not dtype.startswith("float8"):
        with pytest.raises(breccia.UnsupportedError, match=f"b is {dtype}. Convert it first"):
            breccia.matmul(breccia.cast(jnp.asarray(ONES), MXFP8), x.T)


TRACED = "reads values, which a traced JAX function does not have; call it outside jit and vmap, or leave out the option"


@pytest.mark.parametrize(
    "call",
    [
        lambda x: breccia.cast(x, MXFP8, nonfinite="raise").data,
        lambda x: breccia.cast_ste(x, MXFP8, nonfinite="raise"),
        lambda x: breccia.requantize(breccia.cast(x, MXFP8), NVFP4, nonfinite="raise").data,
        lambda x: breccia.requantize(breccia.cast(x, MXFP8), NVFP4, require_exact=True).data,
        lambda x: len(breccia.cast(x, MXFP8).digest()),
        lambda x: breccia.bytes_equal(breccia.cast(x, MXFP8), breccia.cast(x, MXFP8)),
    ],
    ids=["nonfinite", "ste", "requantize", "require_exact", "digest", "bytes_equal"],
)
def test_traced_values_cannot_be_read(call: Callable[[Any], Any]) -> None:
    for transform in (jax.jit, jax.vmap):
        with pytest.raises(breccia.UnsupportedError, match=TRACED):
            transform(call)(jnp.asarray(ONES)[None] if transform is jax.vmap else jnp.asarray(ONES))


def test_the_same_calls_work_outside_of_traces() -> None:
    bad = jnp.asarray(ONES).at[1, 2].set(jnp.inf)
    for call in (breccia.cast, breccia.cast_ste):
        with pytest.raises(breccia.NonFiniteError, match=r"cast\(nonfinite='raise'\): x holds NaN or Inf"):
            call(bad, MXFP8, nonfinite="raise")
        call(jnp.asarray(ONES), MXFP8, nonfinite="raise")


def test_traced_options_that_must_be_concrete_are_refused() -> None:
    x = jnp.asarray(ONES)
    for name in ("clip_min", "clip_max"):
        with pytest.raises(breccia.OptionError, match=f"{name} must be a number known at trace time; got"):
            jax.jit(lambda x, c, name=name: breccia.cast_ste_clipped(x, CURRENT, **{name: c}))(x, 1.0)
    with pytest.raises(breccia.OptionError, match="seed must be an integer, got"):
        jax.jit(lambda x, seed: breccia.cast(x, MXFP8, rounding="stochastic", seed=seed))(x, 1.0)
    with pytest.raises(breccia.OptionError, match=r"seed must lie in 0 \.\. 2\*\*64 - 1; got -1"):
        breccia.cast(x, MXFP8, rounding="stochastic", seed=jnp.int32(-1))
    with pytest.raises(breccia.OptionError, match="clip_min must be less than clip_max; got 2.0 and 1.0"):
        breccia.cast_ste_clipped(x, CURRENT, 2.0, 1.0)


def test_invalid_scales_are_refused_as_on_other_frameworks() -> None:
    x = jnp.asarray(ONES)
    with pytest.raises(breccia.UnsupportedError, match="x is a jax array and scale a numpy array; move both to one framework"):
        breccia.cast(x, CURRENT, scale=np.array(1.0, np.float32))
    with pytest.raises(breccia.UnsupportedError, match="scale= must be a number or an array, got str"):
        breccia.cast(x, CURRENT, scale="1")
    with pytest.raises(breccia.UnsupportedError, match="scale= must be a number or an array, got bool"):
        breccia.cast_ste(x, CURRENT, scale=True)
    with pytest.raises(breccia.LayoutError, match=r"scale= must have shape \(\)"):
        breccia.cast(x, CURRENT, scale=jnp.ones(3))


def test_out_is_refused() -> None:
    x = jnp.asarray(ONES)
    st = breccia.cast(x, MXFP8)
    for call in (
        lambda: breccia.cast(x, MXFP8, out=st),
        lambda: breccia.dequantize(st, out=x),
        lambda: breccia.matmul(x, st.mT, out=jnp.ones((4, 4))),
    ):
        with pytest.raises(breccia.UnsupportedError, match="arrays are immutable; call without out="):
            call()


ALONE = """
import sys
import torch, breccia
try:
    breccia.cast(torch.ones(4, 32), breccia.MXFP8BlockScaling())
except breccia.UnsupportedError as e:
    print(e)
"""


@pytest.mark.long
def test_a_torch_tensor_without_breccia_torch_is_refused_with_the_install_command() -> None:
    pytest.importorskip("torch")
    from breccia.siblings import install

    said = printed(ALONE, BRECCIA_BLOCK="torch,triton")
    assert "got torch.Tensor. Install its plug-in: " + install("breccia-torch") in said


def test_a_scaled_tensor_cannot_be_converted_to_an_array() -> None:
    st = breccia.cast(jnp.asarray(ONES), MXFP8)
    for call in (np.asarray, jnp.asarray, lambda st: jnp.ones((4, 32)) @ st):
        with pytest.raises(TypeError):
            call(st)
    for x in (jnp.ones((2, 32)), np.ones((2, 32), np.float32)):
        with pytest.raises(
            breccia.UnsupportedError, match=r"^x @ st is breccia\.matmul\(x, st\), where out_dtype= is the dtype"
        ):
            x @ st.mT
        with pytest.raises(breccia.UnsupportedError, match=r"^x @ st is breccia\.matmul\(x, st\)"):
            jax.jit(lambda st, x=x: x @ st.mT)(st)
    with pytest.raises(breccia.UnsupportedError, match=r"^st @ x is breccia\.matmul\(st, x\)"):
        st @ jnp.ones((32, 2))
    assert JAX.to_numpy(st.data).dtype == np.uint8


# -- trees of parameters ---------------------------------------------------------------------------------------------


def params() -> dict[str, Any]:
    return {
        "dense": {"kernel": rows(64, 128, seed=1), "bias": jnp.zeros(128)},
        "out": {"kernel": rows(128, 48, seed=2).astype(jnp.bfloat16), "bias": jnp.zeros(48)},
        "small": rows(4, 64),
        "steps": jnp.zeros((64, 64), jnp.int32),
    }


def test_quantize_casts_weights_and_keeps_other_leaves() -> None:
    before = params()
    after = breccia_jax.quantize(before, MXFP8)
    for name in ("dense", "out"):
        st = after[name]["kernel"]
        assert breccia.bytes_equal(st, breccia.cast(before[name]["kernel"], MXFP8, axis=-2)) and st.axis == -2
        assert after[name]["bias"] is before[name]["bias"]
    assert after["small"] is before["small"] and after["steps"] is before["steps"]
    assert type(breccia_jax.quantize(before, MXFP8, axis=-1)["dense"]["kernel"]) is breccia.ScaledTensor
    again = breccia_jax.quantize(after, NVFP4, lambda path, leaf: path == "small")
    assert again["dense"]["kernel"] is after["dense"]["kernel"] and again["small"].recipe == NVFP4


@pytest.mark.long
def test_filters_get_paths_and_arrays() -> None:
    seen: dict[str, Any] = {}

    def only_out(path: str, leaf: Any) -> bool:
        seen[path] = leaf.shape
        return path == "out/kernel"

    found = breccia_jax.quantize(params(), NVFP4, only_out)
    assert seen["dense/bias"] == (128,) and len(seen) == 6
    assert [type(found[name]["kernel"]) is breccia.ScaledTensor for name in ("dense", "out")] == [False, True]


def test_dequantize_restores_the_tree_and_can_be_traced() -> None:
    before = params()
    after = breccia_jax.quantize(before, NVFP4)
    back = jax.jit(partial(breccia_jax.dequantize, dtype="bfloat16"))(after)
    assert jax.tree.structure(back) == jax.tree.structure(before)
    assert same(back["dense"]["kernel"], breccia.dequantize(after["dense"]["kernel"], out_dtype="bfloat16"))
    assert back["steps"].dtype == jnp.int32 and back["dense"]["bias"].dtype == jnp.float32
    shapes = jax.eval_shape(lambda p: breccia_jax.quantize(p, NVFP4), before)
    assert jax.tree.structure(shapes) == jax.tree.structure(after)


def test_invalid_arguments_of_quantize_are_refused() -> None:
    with pytest.raises(breccia.OptionError, match=r"quantize: no parameter is chosen: the model has no floating p"):
        breccia_jax.quantize({"bias": jnp.ones(4)}, MXFP8)
    with pytest.raises(breccia.OptionError, match="no parameter is chosen: filter returned false: dense.bias, "):
        breccia_jax.quantize(params(), MXFP8, lambda path, leaf: False)
    with pytest.raises(breccia.ShapeError, match=r"quantize: dense/bias: MXFP8BlockScaling requires x.ndim >= 2"):
        breccia_jax.quantize(params(), MXFP8, lambda path, leaf: "bias" in path, axis=-1)
    with pytest.raises(breccia.UnsupportedError, match=r"quantize: steps: cast takes float32"):
        breccia_jax.quantize(params(), MXFP8, lambda path, leaf: path == "steps")
    with pytest.raises(TypeError, match="recipe"):
        breccia_jax.quantize(params(), 8)  # type: ignore[arg-type]


def agrees(y: Any, x: Any, kernel: Any) -> bool:
    """Is y = x @ kernel up to the error of an FP32 sum of K terms in any order, K * 2^-24 of |x| @ |kernel|?"""
    exact, size = (np.asarray(a, np.float64) @ np.asarray(b, np.float64) for a, b in ((x, kernel), (abs(x), abs(kernel))))
    return bool((np.abs(np.asarray(y) - exact) <= kernel.shape[0] * 2.0**-24 * size).all())


def test_flax_parameters_work() -> None:
    nn = pytest.importorskip("flax.linen")
    model, x = nn.Dense(48, use_bias=False, precision="highest"), rows(8)
    after = breccia_jax.quantize(model.init(jax.random.key(0), x), NVFP4)
    kernel = after["params"]["kernel"]
    assert type(kernel) is breccia.ScaledTensor and kernel.axis == -2
    y = jax.jit(lambda p, x: model.apply(breccia_jax.dequantize(p), x))(after, x)
    assert agrees(y, x, breccia.dequantize(kernel))


def test_equinox_modules_work() -> None:
    eqx = pytest.importorskip("equinox")
    after = breccia_jax.quantize(eqx.nn.Linear(64, 48, use_bias=False, key=jax.random.key(0)), MXFP8, axis=-1)
    assert type(after.weight) is breccia.ScaledTensor and (after.weight.axis, after.weight.shape) == (-1, (48, 64))
    x = rows(8)
    y = eqx.filter_jit(lambda m, x: jax.vmap(breccia_jax.dequantize(m))(x))(after, x)
    assert agrees(y, x, breccia.dequantize(after.weight).T)


def test_weights_of_a_tree_are_put_into_a_storage_and_back() -> None:
    tree = {"a": {"kernel": jnp.asarray(wide((128, 64), seed=1))}, "b": jnp.asarray(wide((2, 256, 64), seed=2))}
    scaled = breccia_jax.quantize(tree | {"bias": jnp.ones(64)}, "int4")
    stored = breccia_jax.to_storage(scaled, "mma_16x128")
    for leaf, plain in ((stored["a"]["kernel"], scaled["a"]["kernel"]), (stored["b"], scaled["b"])):
        assert leaf.storage == "mma_16x128" and leaf.shape == plain.shape and breccia.bytes_equal(leaf.to_plain(), plain)
        assert (breccia.dequantize(leaf) == breccia.dequantize(plain)).all()
    assert stored["bias"] is scaled["bias"]
    again = breccia_jax.to_storage(stored, "plain")
    assert breccia.bytes_equal(again["b"], scaled["b"]) and jax.tree.structure(again) == jax.tree.structure(scaled)
    assert breccia_jax.to_storage(scaled)["b"].storage == "plain", "no kernel of CPUs reads another one"
    vector, array = breccia.cast(jnp.ones(128), "fp8_current"), breccia.cast(np.ones((64, 128), np.float32), "int4")
    none = breccia.cast(jnp.ones((0, 64, 128)), "int4")
    left = breccia_jax.to_storage({"vector": vector, "of NumPy": array, "none": none})
    assert {leaf.storage for leaf in left.values()} == {"plain"}
    some = breccia_jax.to_storage(scaled, "mma_16x128", lambda path, leaf: path == "a/kernel" and leaf.ndim == 2)
    assert some["a"]["kernel"].storage == "mma_16x128" and some["b"].storage == "plain"


def test_the_storage_of_weights_is_what_the_kernel_of_their_products_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each matrix of a stack, with one row of inputs."""
    asked: list[Any] = []

    def for_products(weight: breccia.ScaledTensor, x: Any) -> breccia.ScaledTensor:
        asked.append((weight.shape, weight.storage, x.shape, str(x.dtype)))
        return weight.to_storage("mma_16x128")

    monkeypatch.setattr(trees.storing, "for_products", for_products)
    scaled = breccia_jax.quantize({"w": jnp.asarray(wide((2, 256, 64), seed=2))}, "int4")
    assert breccia_jax.to_storage(scaled)["w"].storage == "mma_16x128"
    assert breccia_jax.to_storage(breccia_jax.to_storage(scaled), dtype="float16")["w"].storage == "mma_16x128"
    facts = (256, 64), "plain", (1, 256)
    assert asked == [(*facts, "bfloat16"), (*facts, "bfloat16"), (*facts, "float16")]


def test_a_weight_that_a_storage_cannot_hold_is_named() -> None:
    scaled = breccia_jax.quantize({"a": {"kernel": jnp.ones((128, 64))}}, "nf4")
    with pytest.raises(
        breccia.UnsupportedError, match=r"^to_storage: a/kernel: storage 'mma_16x128' cannot hold this tensor: "
    ):
        breccia_jax.to_storage(scaled, "mma_16x128")
    with pytest.raises(breccia.UnknownNameError, match=r"no storage 'mma'"):
        breccia_jax.to_storage(scaled, "mma")


def test_a_tree_is_parted_from_its_scaled_tensors_and_put_together_again() -> None:
    tree = breccia_jax.quantize(params(), MXFP8) | {"none": None}
    dense, scaled = breccia_jax.partition(tree)
    assert not any(isinstance(leaf, breccia.ScaledTensor) for leaf in jax.tree.leaves(dense, is_leaf=is_scaled))
    found = jax.tree.leaves(scaled, is_leaf=is_scaled)
    assert found and all(isinstance(leaf, breccia.ScaledTensor) for leaf in found)
    again = breccia_jax.combine(dense, scaled)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True))


def is_scaled(leaf: Any) -> bool:
    return isinstance(leaf, breccia.ScaledTensor)


def test_trees_that_were_not_parted_are_not_put_together() -> None:
    with pytest.raises(
        breccia.OptionError, match=r"^combine: both trees have a leaf at w/b; pass what `partition` returned\.$"
    ):
        breccia_jax.combine({"w": {"b": 1}}, {"w": {"b": 2}})
    with pytest.raises(breccia.OptionError, match=r"^combine: the trees differ: PyTreeDef"):
        breccia_jax.combine({"w": 1}, {"v": None})


def test_the_package_has_the_names_of_its_stub() -> None:
    assert dir(breccia_jax) == sorted(breccia_jax.__all__)
    for name in breccia_jax.__all__:
        assert callable(getattr(breccia_jax, name))
    with pytest.raises(
        AttributeError,
        match="module 'breccia_jax' has no attribute 'quantise'; it has DotGeneral, ScaledWeight, advance, assembled, ",
    ):
        breccia_jax.quantise  # noqa: B018


# -- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8", "nvfp4", "int4"])
def test_a_compiled_cast_takes_at_most_three_times_as_long_as_the_numpy_kernel(name: str) -> None:
    """Interleaved, so that noise affects both alike; compares the minima."""
    kind = breccia.recipe(name)
    x = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)
    given, fast = jnp.asarray(x), jax.jit(lambda x: breccia.cast(x, kind))
    calls = [lambda: jax.block_until_ready(fast(given)), lambda: breccia.cast(x, kind, prefer="numpy.cast")]
    seconds: list[list[float]] = [[], []]
    for turn in range(9):
        for which in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            calls[which]()
            if turn:
                seconds[which].append(time.perf_counter() - start)
    ours, numpys = map(min, seconds)
    assert ours <= 3 * numpys, f"{ours / numpys:.2f} times"


def test_kernels_of_a_device_are_found_for_traced_and_concrete_arrays() -> None:
    """Traced arrays have no attribute `device`; concrete ones and tensors of either kind share a cache of the table."""
    x = jnp.asarray(X)
    st = breccia.cast(x, MXFP8)
    framework = framework_of(x)
    elsewhere = [Kernel(op, "jax", "json:dumps", f"{op}.tpu", device="tpu") for op in ("cast", "dequantize")]
    generic = [Kernel(op, "jax", "json:loads", f"{op}.any") for op in ("cast", "dequantize")]
    table = Table([*elsewhere, *generic], frameworks={"jax": framework})
    found: list[str] = []

    def choose(x: Any, st: Any) -> Any:
        found.append(table.choose(OPERATIONS["cast"], "jax", x, None, MXFP8, DEFAULT).kernel.name)
        found.append(table.choose(OPERATIONS["dequantize"], "jax", st).kernel.name)
        return x

    for call in (choose, jax.jit(choose), choose, jax.jit(lambda x, st: choose(x + 1, st))):
        call(x, st)
    assert found == ["cast.any", "dequantize.any"] * 4


@pytest.mark.long
@pytest.mark.parametrize("spec", ["nvfp4", "nf4", "mxfp6", "int4,symmetric=false,signed=false"])
def test_codes_packed_along_a_symbolic_axis_need_a_known_multiple(spec: str) -> None:
    pytest.importorskip("flatbuffers")  # jax.export needs it
    x = jnp.asarray(wide((64, 32), seed=1, exponents=2))
    group = {"mxfp6": 4}.get(spec, 2)
    calls: list[Callable[[Any], Any]] = [
        lambda x: breccia.cast(x, spec, axis=-2),
        lambda x: breccia.cast_pair(x, spec),
        lambda x: breccia.cast_ste(x, spec, axis=-2),
        lambda x: breccia.requantize(breccia.cast(x, "fp8_current", axis=-2), spec),
        lambda x: breccia.cast_matmul(x.mT, spec, jnp.ones((x.shape[0], 1))),
    ]
    (rows,) = jax.export.symbolic_shape("b")
    for call in calls:
        message = rf"axis -[12] has the symbolic length b, and .* packs {group} codes along it: .*symbolic_shape\(.{group}\*n"
        with pytest.raises(breccia.UnsupportedError, match=message):
            jax.export.export(jax.jit(call))(jax.ShapeDtypeStruct((rows, 32), jnp.float32))
    (rows,) = jax.export.symbolic_shape("64*n")
    for call in calls[:3]:
        written = jax.export.export(jax.jit(call))(jax.ShapeDtypeStruct((rows, 32), jnp.float32)).serialize()
        found, expected = jax.export.deserialize(written).call(x), call(x)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, expected))


@pytest.mark.long
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", ["fp8_block", "int4,symmetric=false,signed=false", "nf4"])
def test_functions_of_tensors_with_partial_blocks_are_exported_for_any_number_of_matrices(spec: str, axis: int) -> None:
    """The metadata of leading axes' lengths is that of tensors with numbers."""
    pytest.importorskip("flatbuffers")  # jax.export needs it
    (count,) = jax.export.symbolic_shape("b")
    st = breccia.cast(jnp.asarray(wide((3, 32, 48), seed=1, exponents=2)), spec, axis=axis)
    like = jax.eval_shape(lambda x: breccia.cast(x, spec, axis=axis), jax.ShapeDtypeStruct((count, 32, 48), jnp.float32))
    read = jax.export.deserialize(jax.export.export(jax.jit(breccia.dequantize))(like).serialize())
    assert same(read.call(st), breccia.dequantize(st))


@pytest.mark.long
@pytest.mark.parametrize("count", [3, 4])
def test_scan_takes_matrices_of_one_global_scale_as_a_stack(count: int) -> None:
    """A cast of all matrices has one global scale, of four bytes, and a stack has one for each."""
    st = breccia.cast(jnp.asarray(wide((count, 16, 64), seed=1, exponents=2)), "nvfp4")

    def decoded(st: breccia.ScaledTensor) -> Any:
        return jax.lax.scan(lambda carry, each: (carry, breccia.dequantize(each)), 0, st)[1]

    error, message = (
        (ValueError, "different leading axis sizes|leading axis") if count == 3 else (breccia.LayoutError, "list.st")
    )
    with pytest.raises(error, match=message):
        decoded(st)
    assert same(decoded(breccia.stack(list(st))), breccia.dequantize(st))
    alone = jax.vmap(lambda x: breccia.cast(x, "nvfp4"))(jnp.asarray(wide((count, 16, 64), seed=1, exponents=2)))
    assert same(decoded(alone), breccia.dequantize(alone))
