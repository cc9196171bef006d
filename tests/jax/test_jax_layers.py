"""Layers of Flax and Equinox with quantized parameters multiply by codes, within the bound of breccia.matmul."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import breccia
from breccia.testing.examples import wide

pytestmark = pytest.mark.long

jax = pytest.importorskip("jax")
linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")
pytest.importorskip("breccia_native.xla_calls", reason="needs breccia-native, built with a C compiler")
import jax.numpy as jnp  # noqa: E402

from breccia_jax import ScaledWeight, cpu, to_storage  # noqa: E402
from breccia_jax import equinox as be  # noqa: E402
from breccia_jax import flax as bf  # noqa: E402

X = jnp.asarray(wide((3, 64), seed=1, exponents=2))
RECIPES = ("mxfp8", "nvfp4", "int4,group_size=32", "fp8_current")
CALL = 'custom_call_target="breccia_native"'


def text(function: Callable[..., Any], *arguments: Any) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def within(y: Any, x: Any, w: Any, bias: Any = 0.0) -> bool:
    """The bound of docs/spec/numerics.md, section 9, for the product, and one rounding of the sum with a bias."""
    x, w = (np.asarray(a, np.float64) for a in (x, w))
    u = x.shape[-1] * 2.0**-24
    exact = x @ w + np.asarray(bias, np.float64)
    return bool(
        (np.abs(np.asarray(y, np.float64) - exact) <= u / (1 - u) * (np.abs(x) @ np.abs(w)) + 2.0**-23 * np.abs(exact)).all()
    )


def dense(spec: str, model: Any, x: Any = X) -> tuple[Any, np.ndarray, np.ndarray]:
    """(Quantized variables of a layer, the values of its kernel as a matrix, its bias in a row)."""
    variables = model.init(jax.random.key(0), x)
    variables["params"]["bias"] = jnp.asarray(wide(variables["params"]["bias"].shape, seed=2, exponents=1))
    quantized, _ = bf.quantize(variables, {"*.kernel": spec})
    kernel = quantized["params"]["kernel"]
    return quantized, np.asarray(breccia.dequantize(kernel.tensor)), np.asarray(quantized["params"]["bias"]).ravel()


@pytest.mark.parametrize("spec", RECIPES)
def test_a_dense_layer_of_linen_multiplies_codes(spec: str) -> None:
    model = linen.Dense(96)
    quantized, w, bias = dense(spec, model)
    hlo = text(model.apply, quantized, X)
    assert hlo.count(CALL) == 1 and " dot(" not in hlo and "transpose" not in hlo
    for y in (jax.jit(model.apply)(quantized, X), model.apply(quantized, X), model.bind(quantized)(X)):
        assert y.shape == (3, 96) and within(y, X, w, bias)


def test_leading_axes_one_row_and_other_axes_of_a_kernel() -> None:
    quantized, w, bias = dense("mxfp8", linen.Dense(96))
    for x in (X[0], X[None], jnp.stack([X, 2 * X])):
        y = jax.jit(linen.Dense(96).apply)(quantized, x)
        assert y.shape == (*x.shape[:-1], 96) and within(y, x, w, bias)
    split = linen.DenseGeneral((4, 24))
    quantized, w, bias = dense("mxfp8", split)
    assert CALL in text(split.apply, quantized, X)
    assert within(jax.jit(split.apply)(quantized, X).reshape(3, 96), X, w, bias)
    for axes, x in (((-2, -1), X.reshape(3, 4, 16)), ((0, 2), X.reshape(3, 4, 16).transpose(1, 0, 2))):
        join = linen.DenseGeneral(96, axis=axes)
        quantized, w, bias = dense("mxfp8", join, x)
        assert CALL in text(join.apply, quantized, x)
        assert within(jax.jit(join.apply)(quantized, x), X, w, bias)


def test_attention_and_a_tied_embedding_multiply_codes() -> None:
    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids: Any) -> Any:
            embed = linen.Embed(128, 64, name="embed")
            x = linen.MultiHeadDotProductAttention(num_heads=4, name="attention")(embed(ids))
            return embed.attend(x)

    ids = jnp.arange(6).reshape(1, 6)
    variables = Model().init(jax.random.key(0), ids)
    quantized, _ = bf.quantize(variables, {"*": "mxfp8"})
    assert text(Model().apply, quantized, ids).count(CALL) == 5  # query, key, value, out, attend
    hidden = jax.jit(lambda v: Model().apply(v, ids, capture_intermediates=True)[1]["intermediates"]["attention"])(quantized)
    table = quantized["params"]["embed"]["embedding"].unbox()
    assert within(jax.jit(Model().apply)(quantized, ids)[0], hidden["__call__"][0][0], table.T)


def test_half_precision_layers_round_the_sum_once() -> None:
    model = linen.Dense(96, dtype=jnp.bfloat16, use_bias=False)
    variables = model.init(jax.random.key(0), X)
    quantized, _ = bf.quantize(variables, {"*": "mxfp8"})
    x, w = X.astype(jnp.bfloat16), np.asarray(quantized["params"]["kernel"].unbox())
    y = jax.jit(model.apply)(quantized, x)
    exact = np.asarray(x, np.float64) @ w
    # The bound of the FP32 sum, and its rounding to BF16 (8 significant bits).
    bound = 64 * 2.0**-23 * (np.abs(np.asarray(x, np.float64)) @ np.abs(w))
    assert y.dtype == jnp.bfloat16 and (np.abs(np.asarray(y, np.float64) - exact) <= bound + 2.0**-8 * np.abs(exact)).all()


def test_gradients_pass_through_layers_to_their_inputs_and_biases() -> None:
    model = linen.Dense(96)
    quantized, w, bias = dense("mxfp8", model)

    def loss(x: Any, bias: Any, weights: Any) -> Any:
        y = model.apply({"params": {"kernel": quantized["params"]["kernel"], "bias": bias}}, x)
        return (y * weights).sum()

    weights = jnp.asarray(wide((3, 96), seed=4, exponents=1))
    dx, db = jax.jit(jax.grad(loss, argnums=(0, 1)))(X, jnp.asarray(bias), weights)
    assert within(dx, weights, w.T)
    assert np.allclose(db, weights.sum(0), rtol=0, atol=3 * 2.0**-23 * float(np.abs(weights).sum(0).max()))  # 3 terms


def test_products_and_promotions_of_the_users_and_subclasses_are_kept() -> None:
    class Scaled(linen.Dense):
        """Computes with its kernel."""

    def halved(*arguments: Any, **options: Any) -> Any:
        return jax.lax.dot_general(*arguments, **options) / 2

    plain, w, bias = dense("mxfp8", linen.Dense(96))
    for model in (
        linen.Dense(96, dot_general=halved),
        linen.Dense(96, dot_general_cls=lambda: halved),
        linen.Dense(96, promote_dtype=lambda *a, dtype: linen.dtypes.promote_dtype(a[0], a[1] / 2, a[2], dtype=dtype)),
    ):
        assert CALL not in text(model.apply, plain, X)
        assert within(model.apply(plain, X), X, w / 2, bias)
    assert CALL not in text(Scaled(96).apply, plain, X) and within(Scaled(96).apply(plain, X), X, w, bias)


def test_many_rows_and_exported_functions_have_decoded_values() -> None:
    model = linen.Dense(96)
    quantized, w, bias = dense("mxfp8", model)
    many = jnp.tile(X, (200, 1))
    assert CALL not in text(model.apply, quantized, many) and within(model.apply(quantized, many), many, w, bias)
    pytest.importorskip("flatbuffers")  # jax.export needs it
    exported = jax.export.export(jax.jit(model.apply))(quantized, X)
    assert "breccia_native" not in exported.mlir_module() and within(exported.call(quantized, X), X, w, bias)


def test_layers_of_nnx_multiply_codes() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(128, 64, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 64, rngs=rngs, decode=False)
            self.up = nnx.Linear(64, 96, rngs=rngs)
            self.own = nnx.Linear(96, 64, dot_general=lambda *a, **o: jax.lax.dot_general(*a, **o), rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            return self.embed.attend(self.own(self.up(self.attention(self.embed(ids)))))

    ids = jnp.arange(6).reshape(1, 6)
    model = Model(nnx.Rngs(0))
    quantized, _ = bf.quantize(model, {"*": "mxfp8"})
    assert type(model.up) is nnx.Linear and isinstance(quantized.up, nnx.Linear)
    graph, state = nnx.split(quantized)
    assert text(lambda state, ids: nnx.merge(graph, state)(ids), state, ids).count(CALL) == 6  # all but `own`
    w, bias = np.asarray(quantized.up.kernel.get_value()), np.asarray(quantized.up.bias[...])
    for y in (quantized.up(X), nnx.jit(lambda layer, x: layer(x))(quantized.up, X)):
        assert within(y, X, w, bias)
    assert within(quantized.embed.attend(X), X, np.asarray(quantized.embed.embedding.get_value()).T)
    assert within(quantized.own(jnp.pad(X, ((0, 0), (0, 32)))), X, np.asarray(quantized.own.kernel.get_value())[:64])
    again = nnx.clone(quantized)
    assert type(again.up) is type(quantized.up) and np.array_equal(again.up(X), quantized.up(X))


@pytest.mark.parametrize("spec", RECIPES)
def test_a_linear_layer_of_equinox_multiplies_codes(spec: str) -> None:
    layer, _ = be.quantize(eqx.nn.Linear(64, 96, key=jax.random.key(0)), spec)
    w, bias = np.asarray(layer.weight.unbox()), np.asarray(layer.bias)
    for function, x in ((lambda x: layer(x), X[0]), (lambda x: jax.vmap(layer)(x), X)):
        hlo = text(function, x)
        assert hlo.count(CALL) == 1 and " dot(" not in hlo
        for y in (function(x), jax.jit(function)(x)):
            assert within(y, x, w.T, bias)
    dx = jax.jit(jax.grad(lambda x: layer(x).sum()))(X[0])
    assert within(dx, np.ones((1, 96)), w)


def test_layers_with_stored_weights_have_the_same_values() -> None:
    """Of linen, nnx and Equinox, inside functions and outside."""
    x = jnp.asarray(wide((3, 128), seed=1, exponents=2))
    spec, name = "int4,group_size=32", "mma_16x128"
    dense = linen.Dense(96)
    plain, _ = bf.quantize(dense.init(jax.random.key(0), x), {"*.kernel": spec})
    stored = to_storage(plain, name)
    assert stored["params"]["kernel"].tensor.storage == name and stored["params"]["kernel"].shape == (128, 96)
    w = np.asarray(breccia.dequantize(plain["params"]["kernel"].tensor))
    for y in (dense.apply(stored, x), jax.jit(dense.apply)(stored, x)):
        assert within(y, x, w)
    model, _ = bf.quantize(nnx.Linear(128, 96, rngs=nnx.Rngs(0)), {"kernel": spec})
    changed = to_storage(model, name)
    assert type(changed) is type(model) and changed.kernel.get_raw_value().tensor.storage == name
    w = np.asarray(breccia.dequantize(model.kernel))
    assert within(changed(x), x, w) and within(nnx.jit(lambda m, x: m(x))(changed, x), x, w)
    layer, _ = be.quantize(eqx.nn.Linear(128, 96, key=jax.random.key(0)), spec)
    changed = to_storage(layer, name)
    assert changed.weight.tensor.storage == name
    w, bias = np.asarray(breccia.dequantize(layer.weight.tensor)).T, np.asarray(layer.layer.bias)
    assert within(jax.vmap(changed)(x), x, w, bias)


def test_a_kernel_for_the_storage_of_a_weight_multiplies_by_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = breccia.cast(jnp.ones((128, 64)), "int4", axis=-2)
    kernel = SimpleNamespace(eager=False, reads=("mma_16x128",))
    monkeypatch.setattr(cpu, "_chosen", lambda *operands: SimpleNamespace(kernel=kernel))
    assert cpu.multiplies(X, weight.to_storage("mma_16x128")) and not cpu.multiplies(X, weight)
    kernel.reads = ("*",)
    assert not cpu.multiplies(X, weight.to_storage("mma_16x128")), "it would decode the weight"


def test_a_weight_is_an_operand_of_the_matrix_product() -> None:
    layer, _ = be.quantize(eqx.nn.Linear(64, 96, key=jax.random.key(0)), "mxfp8")
    rows = layer.weight
    columns = bf.quantize(linen.Dense(96).init(jax.random.key(0), X), "mxfp8")[0]["params"]["kernel"]
    w = np.asarray(rows.unbox())
    assert within((rows @ X.T).T, X, w.T) and (rows @ X[0]).shape == (96,)
    assert within(X @ columns, X, columns.unbox()) and (X[0] @ columns).shape == (96,)
    other = jnp.ones((2, 96))  # the axis along which blocks do not run
    assert within(other @ rows, other, w)
    stacked = ScaledWeight(breccia.stack([columns.tensor, columns.tensor]), columns.ends, "float32")
    assert (X @ stacked).shape == (2, 3, 96)


def test_the_projections_of_attention_in_equinox_multiply_codes() -> None:
    model, _ = be.quantize(eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0)), "mxfp8")
    assert text(functools.partial(model, X, X), X).count(CALL) == 4
