"""Flax and Equinox: quantized models run as they are, train with quantized products, and load what breccia wrote."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
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
import jax.numpy as jnp  # noqa: E402

import breccia_jax  # noqa: E402
from breccia_jax import equinox as be  # noqa: E402
from breccia_jax import flax as bf  # noqa: E402

#: A scale for a block, for the tensor, and both; `make slow` takes other codes, for which JAX compiles all anew.
RECIPES = (
    "mxfp8",
    "fp8_current",
    "nvfp4",
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("fp8_block", "int4", "nf4")),
)
IDS = jnp.arange(32).reshape(2, 16)


class Linen(linen.Module):
    """Every layer with a kernel, and an embedding."""

    @linen.compact
    def __call__(self, ids: Any) -> Any:
        x = linen.Embed(128, 64, name="embed")(ids)
        x = x + linen.MultiHeadDotProductAttention(num_heads=4, name="attention")(x)
        x = linen.Dense(256, use_bias=False, name="up")(linen.LayerNorm(name="norm")(x))
        x = linen.Conv(64, (3,), name="conv")(linen.gelu(x))
        x = linen.DenseGeneral((4, 16), name="split")(x)
        return linen.DenseGeneral(128, axis=(-2, -1), name="join")(x)


class Nnx(nnx.Module):
    """The same for nnx, and an Einsum."""

    def __init__(self, rngs: Any) -> None:
        self.embed = nnx.Embed(128, 64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, rngs=rngs, decode=False)
        self.conv = nnx.Conv(64, 64, (3,), rngs=rngs)
        self.split = nnx.LinearGeneral(64, (4, 16), rngs=rngs)
        self.einsum = nnx.Einsum("btd,dhk->bthk", (64, 4, 16), rngs=rngs)
        self.join = nnx.LinearGeneral((4, 16), 128, axis=(-2, -1), rngs=rngs)
        self.out = nnx.Linear(128, 128, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        x = self.conv(x + self.attention(x))
        return self.out(self.join(self.split(x) + self.einsum(x)))


@functools.cache
def variables() -> Any:
    return Linen().init(jax.random.key(0), IDS)


#: The contracted axes of the kernels of both models.
AXES = {
    "attention.query.kernel": (0,), "attention.key.kernel": (0,), "attention.value.kernel": (0,),
    "attention.out.kernel": (0, 1), "embed.embedding": (1,), "conv.kernel": (0, 1), "split.kernel": (0,),
    "join.kernel": (0, 1),
}  # fmt: skip


def decoded(array: Any, recipe: Any, axes: tuple[int, ...]) -> np.ndarray:
    """The values of a parameter with blocks along `axes`, by NumPy: contracted axes in front, as one."""
    x = np.asarray(array)
    others = [a for a in range(x.ndim) if a not in axes]
    matrix = x.transpose(*axes, *others).reshape(int(np.prod([x.shape[a] for a in axes])), -1)
    values = breccia.dequantize(breccia.cast(np.ascontiguousarray(matrix.T), recipe)).T
    back = values.reshape(*[x.shape[a] for a in axes], *[x.shape[a] for a in others])
    return back.transpose(np.argsort([*axes, *others]))


def close(y: Any, expected: Any) -> bool:
    """Equal but for the order of FP32 sums: some ten layers of at most 256 terms, each off by 256 * 2^-24 of magnitudes.

    Magnitudes grow by less than 16 through the models of these tests.
    """
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    return bool((np.abs(y - expected) <= 16 * 10 * 256 * 2.0**-24 * np.abs(expected).max()).all())


def leaf(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = tree[part]
    return tree


# -- linen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", RECIPES)
def test_a_quantized_linen_model_runs_as_it_is(spec: str) -> None:
    params = variables()
    quantized, report = bf.quantize(params, {"*": spec})
    axes = {f"params.{name}": axes for name, axes in AXES.items()} | {"params.up.kernel": (0,)}
    assert {name: axes for name, (_, axes) in report.taken.items()} == axes
    for name, along in axes.items():
        weight = leaf(quantized, name)
        assert isinstance(weight, breccia_jax.ScaledWeight) and weight.shape == leaf(params, name).shape
        assert np.array_equal(weight.unbox(), decoded(leaf(params, name), spec, along)), name
    plain = breccia_jax.dequantize(quantized)
    assert jax.tree.structure(plain) == jax.tree.structure(params)
    assert close(jax.jit(Linen().apply)(quantized, IDS), jax.jit(Linen().apply)(plain, IDS))


def test_one_recipe_leaves_the_tables_of_embedding_layers_under_any_name() -> None:
    class Table(nnx.Module):
        def __init__(self) -> None:
            self.tok = nnx.Embed(128, 64, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(64, 128, rngs=nnx.Rngs(0))

    keys = jax.random.split(jax.random.key(0), 2)
    model = {"tok": eqx.nn.Embedding(128, 64, key=keys[0]), "head": eqx.nn.Linear(64, 128, key=keys[1])}
    for quantize, module, table, head in (
        (bf.quantize, Table(), "tok.embedding", "head.kernel"),
        (be.quantize, model, "tok.weight", "head.weight"),
    ):
        _, report = quantize(module, "mxfp8")
        assert report.left[table] == "embedding" and list(report.taken) == [head], "a head is one by its name"
        _, report = quantize(module, "mxfp8", include=[table], exclude=["*head*"])
        assert list(report.taken) == [table] and report.left[head] == "excluded"
        _, report = quantize(module, {"*": "mxfp8"})
        assert table in report.taken


def test_one_recipe_leaves_embeddings_and_heads() -> None:
    params = variables()
    quantized, report = bf.quantize(params, "mxfp8")
    assert "params.embed.embedding" not in report.taken and report.left["params.embed.embedding"] == "embedding"
    assert quantized["params"]["embed"]["embedding"] is params["params"]["embed"]["embedding"]
    _, report = bf.quantize(params, "mxfp8", include=["*.embedding"], exclude=["*attention*"])
    assert "params.embed.embedding" in report.taken and report.left["params.attention.out.kernel"] == "excluded"


def test_the_first_rule_that_matches_applies() -> None:
    _, report = bf.quantize(variables(), {"*.conv.*": None, "*attention*kernel": ("nvfp4", 0), "*.kernel": "int4"})
    names = {name.removeprefix("params."): (recipe.name, axes) for name, (recipe, axes) in report.taken.items()}
    assert names["attention.out.kernel"] == ("nvfp4", (0,)) and names["up.kernel"] == ("int4", (0,))
    assert report.left["params.conv.kernel"] == "excluded" and report.left["params.embed.embedding"] == "no rule"


def test_the_report_says_what_was_taken_and_left_and_why() -> None:
    params = variables()
    quantized, report = bf.quantize(params, {"*.kernel": "mxfp8"})
    text = repr(report)
    sizes = [sum(a.nbytes for a in jax.tree.leaves(tree)) for tree in (quantized, params)]
    assert (report.bytes_after, report.bytes_before) == tuple(sizes)
    assert text.startswith(f"8 parameters quantized; the model has {sizes[0] / 1e3:.2f} kB, before {sizes[1] / 1e3:.2f} kB\n")
    assert "mxfp8, blocks along axes 0, 1: params.attention.out.kernel, params.conv.kernel, params.join.kernel" in text
    assert "left in high precision (no rule): params.attention.key.bias" in text and "params.embed.embedding" in text


def test_axes_that_nothing_tells_need_a_rule() -> None:
    model = linen.DenseGeneral((4, 16), axis=-1, use_bias=False)
    params = model.init(jax.random.key(0), jnp.ones((2, 64)))
    wanted = "no parameter is chosen: its axes may be contracted or features: a rule with axes takes it: params.kernel"
    with pytest.raises(breccia.OptionError, match=wanted):
        bf.quantize(params, "mxfp8")
    quantized, report = bf.quantize(params, ("mxfp8", 0))
    assert report.taken["params.kernel"][1] == (0,)
    assert np.array_equal(quantized["params"]["kernel"].unbox(), decoded(params["params"]["kernel"], "mxfp8", (0,)))


def test_layers_stacked_by_scan_are_quantized_one_by_one() -> None:
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return linen.tanh(linen.Dense(64, use_bias=True)(x)), None

    model = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    x = jnp.ones((2, 64))
    params = model.init(jax.random.key(0), x, None)
    kernel = params["params"]["Dense_0"]["kernel"]
    params["params"]["Dense_0"]["kernel"] = kernel = kernel * jnp.array([1.0, 100.0, 1e-3])[:, None, None]
    quantized, report = bf.quantize(params, "nvfp4")
    assert report.taken["params.Dense_0.kernel"][1] == (1,)
    values = quantized["params"]["Dense_0"]["kernel"].unbox()
    for n in range(3):
        assert np.array_equal(values[n], decoded(kernel[n], "nvfp4", (0,)))
    y = jax.jit(model.apply)(quantized, x, None)[0]
    assert close(y, model.apply(breccia_jax.dequantize(quantized), x, None)[0])


def test_boxes_with_metadata_stay() -> None:
    init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "d"))
    model = linen.Dense(64, kernel_init=init)
    params = model.init(jax.random.key(0), jnp.ones((2, 64)))
    quantized, report = bf.quantize(params, "mxfp8")
    box = quantized["params"]["kernel"]
    assert isinstance(box, linen.Partitioned) and isinstance(box.value, breccia_jax.ScaledWeight)
    assert list(report.taken) == ["params.kernel"]
    x = jnp.asarray(wide((2, 64), seed=1, exponents=1))
    assert close(jax.jit(model.apply)(quantized, x), x @ box.value.unbox() + params["params"]["bias"])


def test_quantization_can_be_traced() -> None:
    shapes = jax.eval_shape(lambda p: bf.quantize(p, "nvfp4")[0], variables())
    quantized, _ = bf.quantize(variables(), "nvfp4")
    assert jax.tree.structure(shapes) == jax.tree.structure(quantized)
    assert [a.shape for a in jax.tree.leaves(shapes)] == [a.shape for a in jax.tree.leaves(quantized)]


def test_half_precision_parameters_decode_to_their_dtype() -> None:
    model = linen.Dense(64, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    params = model.init(jax.random.key(0), jnp.ones((2, 64)))
    quantized, _ = bf.quantize(params, "mxfp8")
    assert quantized["params"]["kernel"].unbox().dtype == jnp.bfloat16
    assert jax.jit(model.apply)(quantized, jnp.ones((2, 64), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"*.kernle": "mxfp8"}, breccia.UnknownNameError, r"matches no parameter of two axes; did you mean '\*.kernel'\?"),
        ({"*.kernel": "mxfp9"}, breccia.UnknownNameError, "mxfp9"),
        ({"*.conv.kernel": ("mxfp8", (0, 2))}, breccia.OptionError, r"params.conv.kernel has 3 axes; its contracted axes are"),
        ({"*.conv.kernel": ("mxfp8", 3)}, breccia.OptionError, r"its contracted axes are consecutive ones of them, got \(3,\)"),
        (
            None,
            breccia.OptionError,
            "a model is quantized under a recipe, or a policy: a mapping from patterns to",
        ),
        ({"*": None}, breccia.OptionError, "no parameter is chosen: excluded: "),
    ],
)
def test_wrong_rules_are_refused(rules: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bf.quantize(variables(), rules)


def test_patterns_beside_rules_are_refused() -> None:
    with pytest.raises(breccia.OptionError, match="the policy has patterns of its own; give it them instead of include="):
        bf.quantize(variables(), {"*": "mxfp8"}, exclude=["*.conv.kernel"])


def test_errors_of_a_cast_name_the_parameter() -> None:
    with pytest.raises(breccia.OptionError, match="quantize: kernel: this recipe is for no array"):
        bf.quantize({"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}, (Refusing(), 0))


class Refusing(breccia.MXFP8BlockScaling):
    """A recipe whose casts fail."""

    @property
    def layout(self) -> Any:
        raise breccia.OptionError("this recipe is for no array")


# -- nnx -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", RECIPES)
def test_a_quantized_nnx_model_runs_as_it_is(spec: str) -> None:
    model = Nnx(nnx.Rngs(0))
    quantized, report = bf.quantize(model, {"*": spec})
    axes = AXES | {"out.kernel": (0,), "einsum.kernel": (0,)}
    assert {name: along for name, (_, along) in report.taken.items()} == axes
    for name, along in axes.items():
        new, old = (functools.reduce(getattr, name.split("."), m) for m in (quantized, model))
        assert type(new) is bf.ScaledParam and isinstance(old, nnx.Param), "the given model does not change"
        assert new.shape == old.shape and np.array_equal(new[...], decoded(old[...], spec, along)), name
        assert breccia.bytes_equal(new.get_raw_value().tensor, new.__scaled_tensor__)
    plain = nnx.clone(model)
    for name in axes:
        owner, attribute = name.rsplit(".", 1)
        getattr(functools.reduce(getattr, owner.split("."), plain), attribute)[...] = functools.reduce(
            getattr, name.split("."), quantized
        )[...]
    assert close(nnx.jit(lambda m, x: m(x))(quantized, IDS), plain(IDS))


def test_optimizers_leave_quantized_variables_of_nnx_alone() -> None:
    optax = pytest.importorskip("optax")
    model, _ = bf.quantize(Nnx(nnx.Rngs(0)), "mxfp8")
    before = model.out.kernel.get_raw_value().tensor.digest()
    optimizer = nnx.Optimizer(model, optax.adamw(0.01, weight_decay=0.5), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(IDS) - 1) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    values = [float(step(model, optimizer)) for _ in range(3)]
    assert values[-1] < values[0] and model.out.kernel.get_raw_value().tensor.digest() == before


def test_a_quantized_nnx_model_is_printed() -> None:
    model, _ = bf.quantize(Nnx(nnx.Rngs(0)), "mxfp8")
    assert "value=breccia_jax.ScaledWeight(breccia.ScaledTensor('mxfp8'" in repr(model)


def test_a_shared_parameter_stays_shared() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.a = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(64, 64, rngs=nnx.Rngs(1))
            self.b.kernel = self.a.kernel

        def __call__(self, x: Any) -> Any:
            return self.b(self.a(x))

    model, report = bf.quantize(Tied(), "mxfp8")
    assert model.a.kernel is model.b.kernel and isinstance(model.a.kernel, bf.ScaledParam) and report.taken
    assert model(jnp.ones((2, 64))).shape == (2, 64)


# -- equinox ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", RECIPES)
def test_quantized_equinox_modules_run_as_they_are(spec: str) -> None:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    model = {
        "mlp": eqx.nn.MLP(64, 64, 128, 2, key=next(keys)),
        "attention": eqx.nn.MultiheadAttention(4, 64, key=next(keys)),
        "conv": eqx.nn.Conv1d(16, 16, 3, key=next(keys)),
        "embed": eqx.nn.Embedding(128, 64, key=next(keys)),
    }

    def run(model: Any, ids: Any) -> Any:
        x = jax.vmap(model["embed"])(ids)
        x = jax.vmap(model["mlp"])(model["attention"](x, x, x))
        return model["conv"](x)

    quantized, report = be.quantize(model, {"*.weight": spec})
    assert report.taken["conv.weight"][1] == (1, 2) and report.taken["mlp.layers.0.weight"][1] == (1,)
    assert len(report.taken) == 9
    assert type(quantized["conv"]) is be.ScaledLayer and quantized["conv"].in_channels == 16
    assert np.array_equal(quantized["conv"].weight.unbox(), decoded(model["conv"].weight, spec, (1, 2)))
    plain = breccia_jax.dequantize(
        jax.tree.map(lambda x: x.layer if isinstance(x, be.ScaledLayer) else x, quantized, is_leaf=is_layer)
    )
    assert close(eqx.filter_jit(run)(quantized, IDS[0]), run(plain, IDS[0]))
    # The integers of a quantized layer have no gradient, its bias has one.
    gradients = eqx.filter_grad(lambda model: (run(model, IDS[0]) ** 2).mean())(quantized)
    assert gradients["conv"].layer.bias.shape == (16, 1) and not jax.tree.leaves(gradients["conv"].layer.weight)


def is_layer(x: Any) -> bool:
    return isinstance(x, be.ScaledLayer)


def test_quantized_equinox_modules_stay_quantized() -> None:
    model, _ = be.quantize(eqx.nn.MLP(64, 64, 128, 2, key=jax.random.key(0)), "mxfp8")
    with pytest.raises(breccia.OptionError, match="quantize: no parameter is chosen"):
        be.quantize(model, "nvfp4")


# -- dot_general -----------------------------------------------------------------------------------------------------


def whole(shape: tuple[int, ...], seed: int) -> Any:
    """Integers of -2 to 2, which every recipe here holds exactly; their sums are exact in FP32 in any order."""
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32))


DIMENSIONS = [
    ((4, 64), (64, 32), (((1,), (0,)), ((), ()))),
    ((2, 3, 64), (64, 4, 16), (((2,), (0,)), ((), ()))),
    ((2, 3, 4, 16), (4, 16, 32), (((2, 3), (0, 1)), ((), ()))),
    ((3, 5, 64), (3, 64, 8), (((2,), (1,)), ((0,), (0,)))),
    ((64, 5, 3), (8, 3, 64), (((0,), (2,)), ((2,), (1,)))),
]


@pytest.mark.parametrize("gradients", [None, "mxfp8", "fp8_current,fp8_format=E5M2"])
@pytest.mark.parametrize(("left", "right", "numbers"), DIMENSIONS)
def test_products_and_gradients_of_exact_numbers_are_those_of_dot_general(
    left: Any, right: Any, numbers: Any, gradients: Any
) -> None:
    a, b = whole(left, 1), whole(right, 2)
    y, back = jax.vjp(functools.partial(bf.DotGeneral("mxfp8", gradients=gradients), dimension_numbers=numbers), a, b)
    expected, wanted = jax.vjp(functools.partial(jax.lax.dot_general, dimension_numbers=numbers), a, b)
    assert np.array_equal(y, expected)
    upstream = whole(y.shape, 3)
    for found, other in zip(back(upstream), wanted(upstream), strict=True):
        assert np.array_equal(found, other)


def test_the_backward_pass_casts_along_the_axes_that_it_contracts() -> None:
    x, w, dy = (jnp.asarray(wide(shape, seed=n, exponents=3)) for n, shape in enumerate([(48, 64), (64, 96), (48, 96)]))
    numbers = (((1,), (0,)), ((), ()))

    def values(a: Any, recipe: str, axis: int) -> np.ndarray:
        return np.asarray(breccia.dequantize(breccia.cast(np.asarray(a), recipe, axis=axis)), np.float64)

    def agrees(found: Any, a: Any, b: Any) -> bool:
        # Sums of K products in FP32 in any order: at most K * 2^-24 of the sum of magnitudes, nearly.
        bound = 2 * a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b)) + 1e-30
        return bool((np.abs(np.asarray(found, np.float64) - a @ b) <= bound).all())

    for how, g in ((bf.DotGeneral("mxfp8", "nvfp4", "fp8_block,block_k=32"), True), (bf.DotGeneral("mxfp8", "nvfp4"), False)):
        y, back = jax.vjp(lambda x, w, how=how: how(x, w, numbers), x, w)
        assert agrees(y, values(x, "mxfp8", -1), values(w, "nvfp4", -2))
        dx, dw = back(dy)
        if g:
            spec = "fp8_block,block_k=32"
            assert agrees(dx, values(dy, spec, -1), values(w.T, "nvfp4", -2))
            assert agrees(dw, values(x.T, "mxfp8", -1), values(dy, spec, -2))
        else:
            plain = np.asarray(dy, np.float64)
            assert agrees(dx, plain, values(w, "nvfp4", -2).T) and agrees(dw, values(x, "mxfp8", -1).T, plain)


@pytest.mark.parametrize("gradients", [None, "mxfp8"])
def test_layers_train_with_quantized_products(gradients: Any) -> None:
    how = bf.DotGeneral("mxfp8", gradients=gradients)
    x, y = whole((16, 64), 4), whole((16, 32), 5)

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.relu(linen.Dense(64, dot_general=how)(x))
            return linen.Dense(32, dot_general_cls=functools.partial(bf.DotGeneral, "mxfp8"))(x)

    params = Model().init(jax.random.key(0), x)

    @jax.jit
    def step(params: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: ((Model().apply(p, x) - y) ** 2).mean())(params)
        return loss, jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients)

    losses = []
    for _ in range(20):
        loss, params = step(params)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 1.5

    model = nnx.Linear(64, 32, dot_general=how, rngs=nnx.Rngs(0))
    gradient = nnx.jit(nnx.grad(lambda m: ((m(x) - y) ** 2).mean()))(model)
    assert gradient["kernel"][...].shape == (64, 32) and bool(jnp.isfinite(gradient["kernel"][...]).all())


def test_dtypes_and_operands_of_dot_general() -> None:
    numbers = (((1,), (0,)), ((), ()))
    a, b = whole((4, 64), 1).astype(jnp.bfloat16), whole((64, 8), 2)
    assert bf.DotGeneral("mxfp8")(a, b, numbers).dtype == jnp.float32
    assert bf.DotGeneral("mxfp8")(a, b.astype(jnp.bfloat16), numbers).dtype == jnp.bfloat16
    assert bf.DotGeneral("mxfp8")(a, b, numbers, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
    gradients = jax.grad(lambda a, b: bf.DotGeneral("mxfp8", "none")(a, b, numbers).sum(), argnums=(0, 1))(a, b)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]
    third = b / 3
    y = bf.DotGeneral("mxfp8", "none")(a, third, numbers)
    exact = np.asarray(a, np.float64) @ np.asarray(third, np.float64)
    assert np.abs(np.asarray(y) - exact).max() <= 64 * 2.0**-24 * 64 * 4 / 3
    assert bf.DotGeneral("mxfp8") == bf.DotGeneral(breccia.MXFP8BlockScaling()) and hash(bf.DotGeneral("mxfp8")) is not None
    with pytest.raises(breccia.OptionError, match=r"DotGeneral contracts axes of equal lengths; got axes \(0,\) of shape"):
        bf.DotGeneral("mxfp8")(a, b, (((0,), (0,)), ((), ())))


# -- files -----------------------------------------------------------------------------------------------------------


def test_load_model_reads_what_convert_wrote_of_a_torch_checkpoint(tmp_path: Path, run: Any) -> None:
    """Weights of torch are (out, in), under other names."""
    safetensors = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    state = {
        "up.weight": rng.standard_normal((128, 64), np.float32),
        "up.bias": rng.standard_normal(128, np.float32),
        "norm.weight": rng.standard_normal(128, np.float32),
        "norm.bias": rng.standard_normal(128, np.float32),
        "down.weight": rng.standard_normal((64, 128), np.float32),
        "down.bias": rng.standard_normal(64, np.float32),
    }
    safetensors.save_file(state, tmp_path / "model.safetensors")
    code, _, err = run("convert", tmp_path / "model.safetensors", tmp_path / "out.safetensors", "--recipe", "mxfp8")
    assert code == 0, err
    x = rng.standard_normal((4, 64), np.float32)
    wanted = {name: breccia.dequantize(breccia.cast(state[name], "mxfp8")) for name in ("up.weight", "down.weight")}

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(64, name="down")(linen.LayerNorm(name="norm")(linen.Dense(128, name="up")(x)))

    class Module(nnx.Module):
        def __init__(self) -> None:
            self.up, self.down = (nnx.Linear(*sides, rngs=nnx.Rngs(0)) for sides in ((64, 128), (128, 64)))
            self.norm = nnx.LayerNorm(128, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.down(self.norm(self.up(x)))

    for model in (Model().init(jax.random.key(0), x), jax.eval_shape(Model().init, jax.random.key(0), x)):
        loaded = bf.load_model(model, tmp_path / "out.safetensors")
        kernel = loaded["params"]["up"]["kernel"]
        assert kernel.tensor.axis == -2 and kernel.tensor.recipe == breccia.MXFP8BlockScaling()
        assert np.array_equal(kernel.unbox(), wanted["up.weight"].T)
        assert np.array_equal(loaded["params"]["norm"]["scale"], state["norm.weight"])
    y = jax.jit(Model().apply)(loaded, x)
    module = bf.load_model(Module(), tmp_path / "out.safetensors")
    assert isinstance(module.up.kernel, bf.ScaledParam) and np.array_equal(module.down.kernel[...], wanted["down.weight"].T)
    assert close(module(x), y)
    again = bf.load_model(nnx.eval_shape(Module), tmp_path / "out.safetensors")
    assert close(again(x), y)
    linear = be.load_model({"up": eqx.nn.Linear(64, 128, key=jax.random.key(0))}, tmp_path / "out.safetensors", strict=False)
    assert type(linear["up"]) is be.ScaledLayer and np.array_equal(linear["up"].weight.unbox(), wanted["up.weight"])
    assert np.array_equal(linear["up"].bias, state["up.bias"])


def torch_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """Attention with biases, and convolutions of one and two axes, as torch's layers name and store them."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch.manual_seed(0)
    layers = torch.nn.ModuleDict(
        {f"attention_{part}": torch.nn.Linear(64, 64) for part in ("query", "key", "value", "out")}
        | {"line": torch.nn.Conv1d(64, 32, 3), "plane": torch.nn.Conv2d(32, 16, (3, 2), groups=2)}
    )
    state = {name.replace("attention_", "attention."): value for name, value in layers.state_dict().items()}
    save_file(state, path)
    return {name: value.numpy() for name, value in state.items()}


class Attending(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.MultiHeadDotProductAttention(num_heads=4, name="attention")(x)
        x = linen.Conv(32, (3,), name="line")(x)
        return linen.Conv(16, (3, 2), feature_group_count=2, name="plane")(x[:, :, None])


class AttendingModule(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.line = nnx.Conv(64, 32, (3,), rngs=rngs)
        self.plane = nnx.Conv(32, 16, (3, 2), feature_group_count=2, rngs=rngs)


@pytest.mark.parametrize("spec", [None, "mxfp8", "nvfp4", "fp8_block"])
def test_attention_and_convolutions_of_torch_have_their_values_in_flax(tmp_path: Path, run: Any, spec: str | None) -> None:
    path = tmp_path / "model.safetensors"
    state = torch_checkpoint(path)
    if spec is not None:
        options = ("--recipe", spec, "--exclude", "line.*", "--exclude", "plane.*")
        code, _, err = run("convert", path, path := tmp_path / "out.safetensors", *options)
        assert code == 0, err
        for part in ("query", "key", "value", "out"):
            name = f"attention.{part}.weight"
            state[name] = np.asarray(breccia.dequantize(breccia.cast(state[name], spec)))
    shapes = jax.eval_shape(Attending().init, jax.random.key(0), jnp.ones((1, 5, 64)))
    params = bf.load_model(shapes, path)["params"]
    module = bf.load_model(nnx.eval_shape(AttendingModule), path)
    for part in ("query", "key", "value", "out"):
        weight, bias = state[f"attention.{part}.weight"].T, state[f"attention.{part}.bias"]
        split = (64, 4, 16) if part != "out" else (4, 16, 64)
        kernel, found = params["attention"][part]["kernel"], getattr(module.attention, part)
        assert (type(kernel) is bf.ScaledWeight) == (spec is not None)
        assert np.array_equal(jnp.asarray(kernel), weight.reshape(split))
        assert np.array_equal(found.kernel[...], jnp.asarray(kernel))
        assert np.array_equal(params["attention"][part]["bias"], bias.reshape(split[1:] if part != "out" else 64))
        assert np.array_equal(found.bias[...], params["attention"][part]["bias"])
    for name, order in (("line", (2, 1, 0)), ("plane", (2, 3, 1, 0))):
        assert np.array_equal(params[name]["kernel"], state[f"{name}.weight"].transpose(order))
        assert np.array_equal(getattr(module, name).kernel[...], params[name]["kernel"])
        assert np.array_equal(params[name]["bias"], state[f"{name}.bias"])


def test_convolutions_and_attention_of_torch_have_their_values_in_equinox(tmp_path: Path) -> None:
    state = torch_checkpoint(tmp_path / "model.safetensors")
    keys = iter(jax.random.split(jax.random.key(0), 3))
    biased = dict.fromkeys(("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True)
    model = {
        "line": eqx.nn.Conv1d(64, 32, 3, key=next(keys)),
        "plane": eqx.nn.Conv2d(32, 16, (3, 2), groups=2, key=next(keys)),
        "attention": eqx.nn.MultiheadAttention(4, 64, **biased, key=next(keys)),
    }

    def named(name: str) -> str:
        return name.replace("_proj", "").replace("output", "out")

    loaded = be.load_model(model, tmp_path / "model.safetensors", names=named)
    for name in ("line", "plane"):
        assert np.array_equal(loaded[name].weight, state[f"{name}.weight"])
        assert np.array_equal(loaded[name].bias.ravel(), state[f"{name}.bias"])
        assert loaded[name].bias.shape == model[name].bias.shape
    assert np.array_equal(loaded["attention"].query_proj.weight, state["attention.query.weight"])
    assert np.array_equal(loaded["attention"].output_proj.bias, state["attention.out.bias"])


def test_kernels_of_torch_whose_order_cannot_be_told_are_refused(tmp_path: Path, run: Any) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    path = tmp_path / "m.safetensors"
    rng = np.random.default_rng(0)
    save_file({"weight": rng.standard_normal((3, 3, 3), np.float32)}, path)
    with pytest.raises(breccia.ShapeError, match="torch's order of a convolution, or matrices .out, in., which fit the shape"):
        bf.load_model({"kernel": jax.ShapeDtypeStruct((3, 3, 3), jnp.float32)}, path)
    save_file({"weight": rng.standard_normal((64, 48, 32), np.float32)}, path)
    with pytest.raises(breccia.ShapeError, match=r"and \(32, 48, 63\) in the model, which no order of torch explains"):
        bf.load_model({"kernel": jax.ShapeDtypeStruct((32, 48, 63), jnp.float32)}, path)
    code, _, err = run("convert", path, tmp_path / "out.safetensors", "--recipe", "mxfp8", "--include", "*")
    assert code == 0, err
    with pytest.raises(breccia.ShapeError, match=r"kernel is a quantized convolution in the file, .* Leave it out"):
        bf.load_model({"kernel": jax.ShapeDtypeStruct((32, 48, 64), jnp.float32)}, tmp_path / "out.safetensors")

    class Transposed(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.ConvTranspose(8, 8, (3,), use_bias=False, rngs=nnx.Rngs(0))

    save_file({"up.weight": rng.standard_normal((8, 8, 3), np.float32)}, path)
    with pytest.raises(breccia.UnsupportedError, match="up.kernel is the kernel of a transposed convolution, and up"):
        bf.load_model(Transposed(), path)
    save_file({"up.kernel": rng.standard_normal((3, 8, 8), np.float32)}, path)
    assert bf.load_model(Transposed(), path).up.kernel.shape == (3, 8, 8)


def test_names_in_files_can_be_given(tmp_path: Path) -> None:
    kernel = jnp.asarray(wide((64, 32), seed=1, exponents=1))
    st = breccia.cast(kernel.T, "nvfp4")
    breccia.bridges.save_safetensors({"h.0.c_fc.w": st, "h.0.c_fc.b": jnp.ones(32)}, tmp_path / "m.safetensors")
    model = linen.Dense(32).init(jax.random.key(0), jnp.ones((1, 64)))
    given = {"params.kernel": "h.0.c_fc.w", "params.bias": "h.0.c_fc.b"}
    for names in (given, given.get):
        loaded = bf.load_model(model, tmp_path / "m.safetensors", names=names)
        assert np.array_equal(loaded["params"]["kernel"].unbox(), breccia.dequantize(st).T)
        assert np.array_equal(loaded["params"]["bias"], jnp.ones(32))


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    breccia.bridges.save_safetensors({"params.kernel": jnp.ones((64, 32)), "more": jnp.ones(3)}, path)
    model = linen.Dense(32).init(jax.random.key(0), jnp.ones((1, 64)))
    wanted = r"does not match the parameters of the model: missing: params.bias; unexpected: more\. Pass names="
    with pytest.raises(breccia.UnknownNameError, match=wanted):
        bf.load_model(model, path)
    loaded = bf.load_model(model, path, strict=False)
    assert loaded["params"]["kernel"].sum() == 64 * 32 and loaded["params"]["bias"] is model["params"]["bias"]
    other = linen.Dense(48).init(jax.random.key(0), jnp.ones((1, 64)))
    with pytest.raises(
        breccia.ShapeError, match=re.escape("params.kernel has shape (64, 32) in the file, and (64, 48) in the model")
    ):
        bf.load_model(other, path, strict=False)


def test_a_quantized_model_comes_back_from_its_file(tmp_path: Path) -> None:
    quantized, _ = bf.quantize(variables(), {"*": "nvfp4"})
    breccia.bridges.save_safetensors(quantized, tmp_path / "m.safetensors")
    loaded = bf.load_model(variables(), tmp_path / "m.safetensors")
    assert jax.tree.structure(loaded) == jax.tree.structure(quantized)
    assert all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(quantized)))


def test_functions_of_quantized_models_are_exported() -> None:
    pytest.importorskip("flatbuffers")  # jax.export needs it
    quantized, _ = bf.quantize(variables(), {"*": "mxfp8"})
    function = jax.jit(Linen().apply)
    read = jax.export.deserialize(jax.export.export(function)(quantized, IDS).serialize())
    assert close(read.call(quantized, IDS), function(quantized, IDS))


ALL: list[Callable[..., Any]] = [bf.quantize, bf.load_model, be.quantize, be.load_model]


def test_the_modules_are_attributes_of_the_package() -> None:
    assert breccia_jax.flax is bf and breccia_jax.equinox is be
    assert all(function.__doc__ for function in ALL)
