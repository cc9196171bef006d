"""NumPy's kernels on JAX arrays: eager calls that compile nothing, and the same kernels inside compiled functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fresh import printed
from paths import ROOT
from recipes import RECIPES, recipe_id

import breccia
from breccia.testing.examples import wide

jax = pytest.importorskip("jax")
pytest.importorskip("breccia_native.xla_calls", reason="needs breccia-native, built with a C compiler")

import jax.numpy as jnp  # noqa: E402

from breccia_jax.cpu import Cast, Each, read  # noqa: E402

MXFP8 = breccia.MXFP8BlockScaling()
X = wide((6, 128), seed=1, exponents=4)
W = wide((40, 128), seed=2, exponents=4)
#: A few kinds: 8, 6 and 4 bits, two levels, offsets, one scale.
KINDS = [
    MXFP8,
    breccia.Float8CurrentScaling(),
    breccia.NVFP4BlockScaling(),
    breccia.MXFP6BlockScaling(),
    breccia.INT4Scaling(group_size=32),
    breccia.recipe("int8,group_size=64,signed=false,symmetric=false,offset=bias"),
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=recipe_id)
compiled_events = "/jax/core/compile/backend_compile_duration"


@contextmanager
def compilations() -> Iterator[list[str]]:
    found: list[str] = []

    def heard(event: str, *_: Any, **__: Any) -> None:
        if event == compiled_events:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def called(function: Any, *arguments: Any) -> bool:
    """Whether the compiled function calls the kernels of breccia-native."""
    return "breccia_native" in jax.jit(function).lower(*arguments).compile().as_text()


def bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The bound of docs/spec/numerics.md, section 9."""
    u = x.shape[-1] * 2.0**-24
    return u / (1 - u) * (np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64))


@pytest.mark.parametrize("kind", RECIPES, ids=recipe_id)
def test_casts_have_numpy_bytes_eagerly_and_compiled(kind: breccia.ScalingRecipe) -> None:
    expected = breccia.cast(X, kind)
    assert breccia.bytes_equal(breccia.cast(jnp.asarray(X), kind), expected)
    assert breccia.bytes_equal(jax.jit(lambda x: breccia.cast(x, kind))(X), expected)
    values = breccia.dequantize(expected)
    assert np.array_equal(breccia.dequantize(breccia.cast(jnp.asarray(X), kind)), values, equal_nan=True)


@kinds
def test_casts_along_either_axis_with_seeds_and_scales_have_numpy_bytes(kind: breccia.ScalingRecipe) -> None:
    for options in ({"axis": -2}, {"rounding": "stochastic", "seed": 3 + (5 << 40)}):
        expected = breccia.cast(X, kind, **options)
        assert breccia.bytes_equal(breccia.cast(jnp.asarray(X), kind, **options), expected)
        assert breccia.bytes_equal(jax.jit(lambda x, o=options: breccia.cast(x, kind, **o))(X), expected)
    delayed, scale = breccia.DelayedScaling(), jnp.float32(0.25)
    expected = breccia.cast(X, delayed, scale=0.25)
    assert breccia.bytes_equal(breccia.cast(jnp.asarray(X), delayed, scale=scale), expected)
    assert breccia.bytes_equal(jax.jit(lambda x, s: breccia.cast(x, delayed, scale=s))(X, scale), expected)


@pytest.mark.long
@pytest.mark.parametrize("spec", ["fp8_current", "fp8_delayed", "nvfp4"])
def test_a_supplied_scale_for_each_matrix_is_taken_eagerly_and_compiled(spec: str) -> None:
    """As of stacked experts; without it, these recipes compute one for the whole array."""
    x, recipe = wide((2, 3, 8, 64), seed=5, exponents=4), breccia.recipe(spec)
    for scale in (np.arange(1, 7, dtype=np.float32).reshape(2, 3), np.arange(1, 3, dtype=np.float32), np.float32(2)):
        expected = breccia.cast(x, recipe, scale=scale, axis=-2)
        for cast in (breccia.cast, jax.jit(breccia.cast, static_argnums=1, static_argnames="axis")):
            found = cast(jnp.asarray(x), recipe, scale=jnp.asarray(scale), axis=-2)
            assert breccia.bytes_equal(found, expected)
    refused = r"scale= must have shape \(\) or \(2,\) or \(2, 3\) .*; got \(3, 2\)"
    for cast in (breccia.cast, jax.jit(breccia.cast, static_argnums=1)):
        with pytest.raises(breccia.LayoutError, match=refused):
            cast(jnp.asarray(x), recipe, scale=jnp.ones((3, 2)))
    each = jax.vmap(lambda x, s: breccia.dequantize(breccia.cast(x, recipe, scale=s)))
    scales = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(each(x, jnp.asarray(scales)), breccia.dequantize(breccia.cast(x, recipe, scale=scales)))


def test_half_precision_is_read_and_written_as_numpy_does() -> None:
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.asarray(X, dtype)
        expected = breccia.cast(np.asarray(x), MXFP8)
        for st in (breccia.cast(x, MXFP8), jax.jit(lambda x: breccia.cast(x, MXFP8))(x)):
            assert breccia.bytes_equal(st, expected)
        assert np.array_equal(breccia.dequantize(st, out_dtype=dtype), breccia.dequantize(expected, out_dtype=dtype))


def test_eager_calls_of_new_shapes_compile_nothing() -> None:
    x, w = jnp.asarray(X), jnp.asarray(W)
    rows, turned = [jnp.asarray(X[:n]) for n in (3, 5)], jnp.asarray(W.T.copy())
    with compilations() as found:
        for kind in KINDS:
            st = breccia.cast(w, kind)
            breccia.dequantize(st)
            breccia.dequantize(st, out_dtype="bfloat16")
            for each in (*rows, x):
                breccia.cast(each, kind)
                breccia.cast_ste(each, kind)
                breccia.cast_ste_clipped(each, kind)
                breccia.cast_pair(each, kind)
                breccia.requantize(st, breccia.INT8Scaling())
                jax.vjp(lambda x, kind=kind: breccia.cast_ste(x, kind), each)
                weight = breccia.cast(turned, kind, axis=-2)
                breccia.matmul(each, weight)
                breccia.matmul(breccia.cast(each, kind), weight)
                breccia.cast_matmul(each, kind, weight)
    assert not found
    with compilations() as found:
        jax.jit(lambda x: x * 3)(x)
    assert found, "the listener hears what it should"


@kinds
@pytest.mark.parametrize("m", [1, 5])
def test_products_are_within_the_bound_in_both_orders_of_the_weight(kind: breccia.ScalingRecipe, m: int) -> None:
    x, rows = X[:m], breccia.cast(jnp.asarray(W), kind)
    columns = breccia.cast(jnp.asarray(W.T), kind, axis=-2)
    for product, st in ((lambda x, st: breccia.matmul(x, st.mT), rows), (breccia.matmul, columns)):
        w = np.asarray(breccia.dequantize(st)) if st is columns else np.asarray(breccia.dequantize(st)).T
        exact = x.astype(np.float64) @ w.astype(np.float64)
        assert called(product, jnp.asarray(x), st)
        for y in (product(jnp.asarray(x), st), jax.jit(product)(x, st)):
            assert (np.abs(np.asarray(y) - exact) <= bound(x, w)).all()


def test_a_compiled_product_reads_the_weight_in_its_own_order() -> None:
    """`st.mT` inside a compiled function transposes nothing."""
    st = breccia.cast(jnp.asarray(W), MXFP8)
    text = jax.jit(lambda x, st: breccia.matmul(x, st.mT)).lower(X, st).compile().as_text()
    assert "breccia_native" in text and "transpose" not in text
    cast = jax.jit(lambda x, st: breccia.cast_matmul(x, MXFP8, st.mT))
    text = cast.lower(X, st).compile().as_text()
    assert text.count('custom_call_target="breccia_native"') == 2 and "transpose" not in text  # a cast and a product
    dx = jax.jit(jax.grad(lambda x, st: breccia.cast_matmul(x, MXFP8, st.mT).sum()))(X, st)
    exact = np.broadcast_to(np.asarray(breccia.dequantize(st), np.float64).sum(0), X.shape)
    assert (np.abs(np.asarray(dx) - exact) <= bound(np.ones((1, 40), np.float32), np.asarray(breccia.dequantize(st)))).all()
    assert breccia.bytes_equal(st.mT.mT, st) and breccia.bytes_equal(jax.jit(lambda st: st.mT)(st), st.mT)


def test_the_generic_product_reads_a_transposed_weight_in_its_own_order() -> None:
    st = breccia.cast(jnp.asarray(W), MXFP8)
    product = jax.jit(lambda x, st: breccia.matmul(x, st.mT, prefer="reference.matmul"))
    turned = [line for line in product.lower(X, st).as_text().splitlines() if "stablehlo.transpose" in line]
    assert len(turned) == 1 and "xf32>" in turned[0]  # of the values, which XLA merges with the product
    w = np.asarray(breccia.dequantize(st)).T
    assert (np.abs(np.asarray(product(X, st)) - X.astype(np.float64) @ w) <= bound(X, w)).all()


def test_a_bias_an_output_dtype_and_leading_axes_are_those_of_numpy() -> None:
    x, bias = X.reshape(2, 3, 128), np.arange(40, dtype=np.float32)
    st = breccia.cast(W, MXFP8)
    expected = breccia.matmul(x, st.mT, bias=bias, out_dtype="float16")
    there = breccia.cast(jnp.asarray(W), MXFP8)
    for product in (breccia.matmul, jax.jit(breccia.matmul, static_argnames="out_dtype")):
        y = product(jnp.asarray(x), there.mT, bias=jnp.asarray(bias), out_dtype="float16")
        assert y.dtype == jnp.float16 and y.shape == (2, 3, 40)
        # Both are within the bound of the exact sum and rounded once to FP16.
        slack = 2 * bound(X, np.asarray(breccia.dequantize(st)).T).reshape(2, 3, 40) + 2.0**-10 * np.abs(expected)
        assert (np.abs(y.astype(jnp.float32) - expected.astype(np.float32)) <= slack).all()


def test_vmap_of_rows_is_one_product_and_of_casts_one_for_each_example() -> None:
    st, x = breccia.cast(jnp.asarray(W), MXFP8), jnp.asarray(np.stack([X, X[::-1]]))
    product = jax.vmap(lambda x: breccia.matmul(x, st.mT))
    assert called(product, x)
    each = jnp.stack([breccia.matmul(one, st.mT) for one in x])
    w = np.asarray(breccia.dequantize(st)).T
    slack = np.stack([2 * bound(np.asarray(one), w) for one in x])  # two sums, each within the bound
    assert (np.abs(product(x) - each) <= slack).all()
    current = breccia.Float8CurrentScaling()
    batch = jax.vmap(lambda x: breccia.dequantize(breccia.cast(x, current)))(x * jnp.array([1, 8.0])[:, None, None])
    assert np.array_equal(batch[1], breccia.dequantize(breccia.cast(8 * X[::-1], current)))


@pytest.mark.long
@pytest.mark.parametrize("axis", [-1, -2])
def test_vmap_of_large_examples_runs_the_kernel_for_each(axis: int) -> None:
    """Each has its own tensor-level scale and random words."""
    x = np.stack([wide((2, 64, 256), seed=n, exponents=2) * 10.0**n for n in range(3)]).swapaxes(0, 1).copy()
    for kind in (MXFP8, breccia.NVFP4BlockScaling(), breccia.INT4Scaling(group_size=32)):
        for options in ({}, {"rounding": "stochastic", "seed": 5}):

            def cast(x: Any, kind: Any = kind, options: Any = options) -> Any:
                return breccia.cast(x, kind, axis=axis, **options)

            mapped = jax.vmap(jax.vmap(cast), in_axes=1, out_axes=1)
            assert called(mapped, jnp.asarray(x))
            found = jax.jit(mapped)(jnp.asarray(x))
            for i, j in np.ndindex(2, 3):
                assert breccia.bytes_equal(jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], found), cast(x[i, j]))
    scales = jnp.array([0.25, 2.0])
    mapped = jax.vmap(lambda x, scale: breccia.cast(x, breccia.DelayedScaling(), scale=scale, axis=axis))
    found = jax.jit(mapped)(jnp.asarray(x[:, 0]), scales)
    for i in range(2):
        expected = breccia.cast(x[i, 0], breccia.DelayedScaling(), scale=float(scales[i]), axis=axis)
        assert breccia.bytes_equal(jax.tree.map(lambda leaf, i=i: leaf[i], found), expected)


def test_vmap_of_products_by_a_weight_each_runs_the_kernel_for_each() -> None:
    x, w = wide((3, 2, 256), seed=1, exponents=2), wide((3, 64, 256), seed=2, exponents=2)
    weights = jax.vmap(lambda w: breccia.cast(w, MXFP8))(jnp.asarray(w))
    product = jax.vmap(lambda x, st: breccia.matmul(x, st.mT))
    assert called(product, jnp.asarray(x), weights)
    for n, y in enumerate(jax.jit(product)(jnp.asarray(x), weights)):
        values = breccia.dequantize(breccia.cast(w[n], MXFP8)).T
        assert (np.abs(np.asarray(y) - x[n].astype(np.float64) @ values) <= bound(x[n], values)).all()
    program = Each(Cast(MXFP8.to_json(), -2, False, False, "propagate", (((64, 256), "float32"),)), 3, (True,))
    assert read(program.text()) == program and program.results[0] == ((3, 64, 256), "uint8")


def test_gradients_pass_through_products_and_round_trips() -> None:
    st = breccia.cast(jnp.asarray(W), MXFP8)
    w = np.asarray(breccia.dequantize(st))
    dx = jax.jit(jax.grad(lambda x: breccia.matmul(x, st.mT).sum()))(X)
    exact = np.broadcast_to(w.astype(np.float64).sum(0), X.shape)
    slack = bound(np.ones((1, 40), np.float32), w)
    assert (np.abs(np.asarray(dx) - exact) <= slack).all()
    assert np.array_equal(jax.grad(lambda x: (3 * breccia.cast_ste(x, MXFP8)).sum())(jnp.asarray(X)), np.full_like(X, 3))


def test_an_exported_program_has_no_call_that_other_processes_lack() -> None:
    st = breccia.cast(jnp.asarray(W), MXFP8)
    function = jax.jit(lambda x, st: breccia.matmul(breccia.dequantize(breccia.cast(x, MXFP8)), st.mT))
    exported = jax.export.export(function)(X, st)
    assert "breccia_native" not in exported.mlir_module()
    y = jax.export.deserialize(exported.serialize()).call(X, st)
    assert y.shape == (6, 40) and called(function, X, st)


def test_explain_shows_the_numpy_kernel_and_why_it_does_not_run() -> None:
    x, st = jnp.asarray(X), breccia.cast(jnp.asarray(W), MXFP8)
    text = str(breccia.explain("matmul", x, st.mT))
    assert "-> jax.cpu.matmul" in text and "calls matmul of array and mxfp8 on numpy: native.matmul" in text
    many = str(breccia.explain("matmul", jnp.zeros((600, 128)), st.mT))
    assert "XLA decodes the weight and multiplies it in FP32 for more than 512 rows" in many and "-> composite.matmul" in many
    assert "it multiplies rows of an array by a ScaledTensor" in str(breccia.explain("matmul", st, x.T))


def test_a_program_is_read_from_its_text() -> None:
    """XLA's executables may be cached on disk, with the text of each call."""
    seen: list[str] = []
    text = jax.jit(lambda x, st: breccia.matmul(x, st.mT)).lower(X, breccia.cast(jnp.asarray(W), MXFP8)).as_text()
    start = text.index('call = "') + len('call = "')
    written = text[start : text.index('"}', start)] if '"}' in text[start:] else text[start : text.index('",', start)]
    seen.append(written.replace("\\22", '"').replace('\\"', '"').replace("\\5C", "\\").replace("\\\\", "\\"))
    program = read(seen[0])
    assert program.text() == seen[0] and program.results == (((6, 40), "float32"),)


def test_errors_of_kernels_end_the_program_and_are_told() -> None:
    from breccia_jax import native

    program = read(
        '["Cast",{"recipe":"{\\"name\\":1}","axis":-1,"supplied":false,"stochastic":false,'
        '"nonfinite":"propagate","operands":[[[4,4],"float32"]]}]'
    )
    assert program.operands == (((4, 4), "float32"),)
    with pytest.raises(Exception, match="recipe"):
        native._answer(program.text(), (memoryview(bytearray(64)),), ())


def test_results_are_where_the_operands_are() -> None:
    device = jax.devices()[0]
    committed = breccia.dequantize(breccia.cast(jax.device_put(X, device), MXFP8))
    free = breccia.dequantize(breccia.cast(jnp.asarray(X), MXFP8))
    assert committed.committed and not free.committed and committed.device == free.device == device


SHARDED = """
import jax, numpy as np, breccia
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
X = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((40, 128)).astype(np.float32)
x = jax.device_put(X, NamedSharding(mesh, P("d")))
w = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P())), breccia.cast(jax.numpy.asarray(W), "mxfp8"))
cast = jax.jit(lambda x: breccia.cast(x, "mxfp8"))
assert "breccia_native" not in cast.lower(x).compile().as_text()
assert breccia.bytes_equal(cast(x), breccia.cast(X, "mxfp8"))
assert breccia.bytes_equal(breccia.cast(x, "mxfp8"), breccia.cast(X, "mxfp8"))
assert "operands are sharded over 4 devices: XLA partitions the generic algorithm" in str(breccia.explain("cast", x, "mxfp8"))
local = jax.jit(jax.shard_map(lambda x, w: (breccia.cast(x, "mxfp8"), breccia.matmul(x, w.mT)), mesh=mesh,
                              in_specs=(P("d"), P()), out_specs=P("d")))
assert "breccia_native" in local.lower(x, w).compile().as_text()
st, y = local(x, w)
assert breccia.bytes_equal(st, breccia.cast(X, "mxfp8"))
exact = X.astype(float) @ np.asarray(breccia.dequantize(breccia.cast(W, "mxfp8"))).astype(float).T
assert np.allclose(y, exact, rtol=0, atol=1e-3)
second = jax.device_put(X, jax.devices()[2])
assert breccia.cast(second, "mxfp8").data.device == jax.devices()[2]
print("fine")
"""


@pytest.mark.long
def test_sharded_operands_take_the_generic_algorithm_and_shards_the_kernel() -> None:
    assert printed(SHARDED, cwd=ROOT, JAX_PLATFORMS="cpu") == "fine\n"
