"""Flax and Equinox: converted models train, keep their parameters, and say which layers they left and why."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from marks import slow_but

import breccia
from breccia import TrainingRecipe

pytestmark = pytest.mark.long  # JAX compiles every case

jax = pytest.importorskip("jax")
linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
from flax import serialization  # noqa: E402

import breccia_jax  # noqa: E402
from breccia_jax import equinox as be  # noqa: E402
from breccia_jax import flax as bf  # noqa: E402

X, Y = (jax.random.normal(jax.random.key(n), (16, 32)) for n in (0, 1))
RECIPES = ("fp8_delayed", "nvfp4")
TRAINED = nnx.DiffState(0, nnx.Any(nnx.Param, bf.AmaxHistories))


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.relu(linen.Dense(64, name="up")(x))
        return x + linen.DenseGeneral(32, name="down")(y), None


class Net(linen.Module):
    """Attention, stacked layers, a layer with a product of its own, and a head."""

    lift: bool = True

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x + linen.MultiHeadDotProductAttention(num_heads=2, name="attention")(x[None])[0]
        axes = {"params": 0, "amax_history": 0} if self.lift else {"params": 0}
        x, _ = linen.scan(Block, variable_axes=axes, split_rngs={"params": True, "rounding": True}, length=2)(name="layers")(x)
        x = linen.Dense(32, name="own", dot_general=breccia_jax.DotGeneral("mxfp8"))(x)
        return linen.Dense(32, name="lm_head")(linen.LayerNorm(name="norm")(x))


class Mlp(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.split = nnx.LinearGeneral(64, (2, 16), rngs=rngs)
        self.join = nnx.LinearGeneral((2, 16), 64, axis=(-2, -1), rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)
        self.odd = nnx.Linear(32, 24, rngs=rngs)
        self.lm_head = nnx.Linear(24, 32, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.down(nnx.relu(self.join(self.split(nnx.relu(self.up(x))))))
        return self.lm_head(self.odd(x))


def steps_of_linen(model: Any, params: Any, state: Any, numbers: Any) -> tuple[list[float], Any, Any]:
    """The losses of steps of descent, and the last parameters and state."""

    @jax.jit
    def step(params: Any, state: Any, key: Any) -> Any:
        def loss(params: Any, state: Any) -> Any:
            return ((model.apply({**params, **state}, X, rngs={"rounding": key}) - Y) ** 2).mean()

        value, (gradients, recorded) = jax.value_and_grad(loss, (0, 1))(params, state)
        return value, jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients), bf.advance(state, recorded)

    losses = []
    for number in numbers:
        value, params, state = step(params, state, jax.random.key(number))
        losses.append(float(value))
    return losses, params, state


def same(one: Any, other: Any) -> bool:
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


@pytest.mark.parametrize("recipe", slow_but({"nvfp4"}, RECIPES))
def test_a_linen_model_trains_and_resumes_bit_for_bit(recipe: str) -> None:
    model, summary = bf.convert_to_training(Net(), recipe, X)
    assert set(summary.chosen) == {
        *(f"params.attention.{part}.kernel" for part in ("query", "key", "value", "out")),
        *(f"params.layers.{part}.kernel" for part in ("up", "down")),
    }
    assert summary.left["params.own.kernel"] == "its layer has a dot_general or promote_dtype of its own"
    assert summary.left["params.lm_head.kernel"] == "output head"
    variables = model.init(jax.random.key(0), X)
    params, state = {"params": variables["params"]}, model.histories()
    assert same(params, Net().init(jax.random.key(0), X)) and same(variables, {**params, **state})
    whole, params_4, state_4 = steps_of_linen(model, params, state, range(4))
    assert whole[-1] < whole[0]
    _, params_2, state_2 = steps_of_linen(model, params, state, range(2))
    stored = serialization.to_bytes((params_2, state_2))
    resumed = serialization.from_bytes((params, state), stored)
    losses, params_r, state_r = steps_of_linen(model, *resumed, range(2, 4))
    assert losses == whole[2:] and same(params_r, params_4) and same(state_r, state_4)
    if state:
        stacked = state_4["amax_history"]["layers"]["up"]["gradient"]
        assert np.count_nonzero(np.asarray(stacked.amaxes), axis=-1).tolist() == [4, 4]


def test_a_linen_layer_is_the_product_of_its_recipe() -> None:
    """The layer inside of the model, against the product alone."""
    layer = linen.Dense(48, use_bias=False)
    model, summary = bf.convert_to_training(layer, "fp8_tile", X)
    assert summary.chosen == ("params.kernel",)
    params = model.init(jax.random.key(0), X)
    expected = breccia_jax.DotGeneral(TrainingRecipe("fp8_tile")).product(X, params["params"]["kernel"])
    assert np.array_equal(model.apply(params, X), expected) and not np.array_equal(layer.apply(params, X), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_nnx_model_trains(recipe: str) -> None:
    plain = Mlp(nnx.Rngs(0))
    model, summary = bf.convert_to_training(plain, recipe, rngs=nnx.Rngs(rounding=1))
    assert str(summary) == (
        f"4 layers train under TrainingRecipe('{recipe}'): down.kernel, join.kernel, split.kernel, up.kernel\n"
        "left in high precision (output head): lm_head.kernel\n"
        "left in high precision (32 x 24 has a side that is no multiple of 16): odd.kernel\n"
        "left in high precision (bias): split.bias"
    )
    assert type(plain.up) is nnx.Linear and same(nnx.state(plain, nnx.Param), nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        value, gradients = nnx.value_and_grad(lambda model: ((model(X) - Y) ** 2).mean(), argnums=TRAINED)(model)
        optimizer.update(model, gradients)
        bf.advance_(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(4)]
    assert losses[-1] < losses[0]
    if recipe == "fp8_delayed":
        history = model.join.amax_histories.get_raw_value()["weight"]
        assert np.count_nonzero(history.amaxes) == 4 and history.scale == np.max(history.amaxes) / np.float32(448)
    else:
        assert int(model.up.rounding.count[...]) == 4
    again, summary = bf.convert_to_training(plain, "mxfp8", exclude=["*p.kernel"])
    assert summary.left["up.kernel"] == "excluded" and type(again.up) is nnx.Linear


def test_frozen_and_tied_weights_train_as_in_plain_layers() -> None:
    class Tied(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
            self.second = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
            self.second.kernel = self.first.kernel

        def __call__(self, x: Any) -> Any:
            return self.second(nnx.relu(self.first(x)))

    model, summary = bf.convert_to_training(Tied(nnx.Rngs(0)), "fp8_row")
    assert len(summary.chosen) == 2 and model.first.kernel is model.second.kernel
    gradient = nnx.grad(lambda model: (model(X) * Y).sum())(model)
    dot = breccia_jax.DotGeneral(TrainingRecipe("fp8_row"))
    kernel = model.first.kernel[...]
    two = jax.grad(lambda a, b: (dot.product(jax.nn.relu(dot.product(X, a)), b) * Y).sum(), (0, 1))(kernel, kernel)
    assert np.array_equal(jax.tree.leaves(gradient)[0], two[0] + two[1])
    # The first weight is frozen: the gradient of the second is the same.
    frozen = jax.grad(lambda b: (dot.product(jax.nn.relu(dot.product(X, kernel)), b) * Y).sum())(kernel)
    assert np.array_equal(frozen, two[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_equinox_model_trains(recipe: str) -> None:
    plain = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0))
    model, summary = be.convert_to_training(plain, recipe, exclude=["layers.2.*"])
    assert summary.chosen == ("layers.0.weight", "layers.1.weight") and summary.left["layers.2.weight"] == "excluded"
    assert same(jax.tree.leaves(model), jax.tree.leaves(plain)) and type(model.layers[2]) is eqx.nn.Linear
    assert model.layers[0].out_features == 64
    state, optimizer = be.histories(model), optax.adam(1e-2)
    memory = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any, memory: Any, key: Any) -> Any:
        def loss(both: Any) -> Any:
            model, state = both
            return ((jax.vmap(be.with_state(model, state, key=key))(X) - Y) ** 2).mean()

        value, (gradients, recorded) = eqx.filter_value_and_grad(loss)((model, state))
        updates, memory = optimizer.update(gradients, memory, eqx.filter(model, eqx.is_inexact_array))
        return value, eqx.apply_updates(model, updates), be.advance(state, recorded), memory

    losses = []
    for number in range(4):
        value, model, state, memory = step(model, state, memory, jax.random.key(number))
        losses.append(float(value))
    assert losses[-1] < losses[0]
    assert set(state) == (set() if recipe == "nvfp4" else {"layers.0", "layers.1"})
    if state:
        assert np.count_nonzero(state["layers.1"]["gradient"].amaxes) == 4
    with pytest.raises(breccia.OptionError, match="no parameter is chosen: .*trains in low precision already: layers.0"):
        be.convert_to_training(model, recipe, exclude=["layers.2.*"])


def test_an_equinox_layer_is_the_product_of_its_recipe() -> None:
    layer = eqx.nn.Linear(32, 48, key=jax.random.key(0))
    model, _ = be.convert_to_training({"layer": layer}, "mxfp8")
    y = jax.vmap(model["layer"])(X)
    product = breccia_jax.DotGeneral(TrainingRecipe("mxfp8")).product(X, layer.weight.T)
    assert np.array_equal(y, product + layer.bias)
    gradient = eqx.filter_grad(lambda model: jax.vmap(model["layer"])(X).sum())(model)["layer"].layer.weight
    expected = jax.grad(lambda w: breccia_jax.DotGeneral(TrainingRecipe("mxfp8")).product(X, w.T).sum())(layer.weight)
    assert np.array_equal(gradient, expected)


def apply(recipe: Any, lift: bool = True, **options: Any) -> Any:
    model, _ = bf.convert_to_training(Net(lift), recipe, X)
    return model.apply(Net().init(jax.random.key(0), X) | options.pop("state", {}), X, **options)


MLP = partial(eqx.nn.MLP, 32, 32, 64, 1, key=jax.random.key(0))
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no state": (
        lambda: apply("fp8_delayed"),
        breccia.OptionError,
        "attention.query: apply needs the collection 'amax_history' of model.histories",
    ),
    "scan without the collection": (
        lambda: apply("fp8_delayed", False, state=bf.convert_to_training(Net(), "fp8_delayed", X)[0].histories()),
        breccia.OptionError,
        "layers.up: apply needs the collection .* nn.scan and nn.vmap need it in variable_axes",
    ),
    "no key": (lambda: apply("nvfp4"), breccia.OptionError, r'attention.query: .*apply\(..., rngs=\{"rounding": key\}\)'),
    "no inputs": (lambda: bf.convert_to_training(Net(), "mxfp8"), breccia.OptionError, "a linen module needs the inputs"),
    "inputs of nnx": (
        lambda: bf.convert_to_training(Mlp(nnx.Rngs(0)), "mxfp8", X),
        breccia.OptionError,
        "inputs are for linen modules",
    ),
    "no rngs": (
        lambda: bf.convert_to_training(Mlp(nnx.Rngs(0)), "nvfp4"),
        breccia.OptionError,
        r"pass rngs=nnx.Rngs\(rounding=0\)",
    ),
    "variables": (
        lambda: bf.convert_to_training({"params": {}}, "mxfp8"),
        breccia.UnsupportedError,
        "converts an nnx or a linen module; got a dict",
    ),
    "a recipe of weights": (
        lambda: bf.convert_to_training(Mlp(nnx.Rngs(0)), "int4"),
        breccia.UnknownNameError,
        "no training recipe 'int4'",
    ),
    "a pattern without a match": (
        lambda: bf.convert_to_training(Mlp(nnx.Rngs(0)), "mxfp8", exclude=["layers.*"]),
        breccia.UnknownNameError,
        "layers",
    ),
    "no layer": (
        lambda: be.convert_to_training(eqx.nn.MLP(30, 30, 30, 1, key=jax.random.key(0)), "mxfp8"),
        breccia.OptionError,
        "no parameter is chosen: .*30 x 30 has a side that is no multiple of 16",
    ),
    "equinox without a state": (
        lambda: be.convert_to_training(MLP(), "fp8_delayed")[0](X[0]),
        breccia.OptionError,
        "layers.0: DotGeneral: .* needs the histories of: input, weight, gradient",
    ),
    "equinox without a key": (
        lambda: be.with_state(be.convert_to_training(MLP(), "nvfp4")[0])(X[0]),
        breccia.OptionError,
        "layers.0: DotGeneral: .* rounds stochastically and needs a key",
    ),
    "a state of other layers": (
        lambda: be.with_state(be.convert_to_training(MLP(), "nvfp4")[0], {"layers.7": breccia_jax.histories("fp8_delayed")}),
        breccia.OptionError,
        "with_state: the state has the layers of a module that convert_to_training made: none; got layers.7",
    ),
    "a module that was not converted": (
        lambda: be.with_state(MLP()),
        breccia.OptionError,
        "with_state: the state has the layers",
    ),
    "wrong features": (
        lambda: bf.convert_to_training(Mlp(nnx.Rngs(0)), "mxfp8")[0](jnp.ones((4, 30))),
        breccia.OptionError,
        r"up: DotGeneral contracts axes of equal lengths; got axes \(1,\) of shape \(4, 30\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_uses_are_refused_by_the_name_of_the_layer(case: str) -> None:
    call, error, says = WRONG[case]
    with pytest.raises(error, match=says):
        call()
