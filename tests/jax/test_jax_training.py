"""JAX: optimizers and modules leave quantized leaves as they are, and train the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import breccia
import breccia_jax

pytestmark = [pytest.mark.long, pytest.mark.covering(1, 1)]  # JAX compiles every case

optax = pytest.importorskip("optax")

#: Leaves of two, three and four arrays; `make slow` takes other codes in as many arrays, for which JAX compiles all anew.
RECIPES = (
    *("mxfp8", "nvfp4", "int4,symmetric=false,signed=false"),
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("fp8_block", "int4", "nf4")),
)
X = jax.random.normal(jax.random.key(1), (4, 64))

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(1e-4),
    "momentum": lambda: optax.sgd(1e-4, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.5),
    "lion": lambda: optax.lion(0.1, weight_decay=0.5),
    "adafactor": lambda: optax.adafactor(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "lamb": lambda: optax.lamb(0.1, weight_decay=0.5),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "accumulating": lambda: optax.MultiSteps(optax.adamw(0.1), 2),
    "scheduled": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
    "frozen in part": lambda: optax.multi_transform(
        {"train": optax.adam(0.1), "freeze": optax.set_to_zero()}, {"quantized": "freeze", "dense": "train", "bias": "train"}
    ),
    "masked": lambda: optax.masked(optax.adamw(0.1, weight_decay=0.5), {"quantized": False, "dense": True, "bias": True}),
}


def tree(spec: str) -> dict[str, Any]:
    weight = jax.random.normal(jax.random.key(0), (64, 128))
    return {"quantized": breccia.cast(weight, spec, axis=-2), "dense": jnp.ones((128, 8)), "bias": jnp.zeros(8)}


def loss(params: dict[str, Any], x: Any) -> Any:
    return jnp.mean((breccia.matmul(x, params["quantized"]) @ params["dense"] + params["bias"] - 1) ** 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("spec", RECIPES)
def test_an_optimizer_changes_no_byte_of_a_quantized_leaf(spec: str, name: str) -> None:
    params, optimizer = tree(spec), OPTIMIZERS[name]()
    before = params["quantized"].digest()
    dense, scaled = breccia_jax.partition(params)
    state = optimizer.init(dense)

    @jax.jit
    def step(dense: Any, state: Any) -> Any:
        gradients = jax.grad(lambda dense: loss(breccia_jax.combine(dense, scaled), X))(dense)
        updates, state = optimizer.update(gradients, state, dense)
        return optax.apply_updates(dense, updates), state

    for _ in range(4):
        dense, state = step(dense, state)
    after = breccia_jax.combine(dense, scaled)
    assert after["quantized"].digest() == before
    assert bool((after["dense"] != params["dense"]).any()) and bool(jnp.isfinite(after["dense"]).all())
    if name != "lamb":  # its steps are as long as the weights, however small the loss
        assert loss(after, X) < loss(params, X)


@pytest.mark.parametrize("spec", RECIPES)
def test_equinox_trains_around_a_quantized_layer(spec: str) -> None:
    eqx = pytest.importorskip("equinox")
    params = tree(spec)
    before = params["quantized"].digest()
    optimizer = optax.adamw(0.01, weight_decay=0.5)
    state = optimizer.init(eqx.filter(params, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(params: Any, state: Any) -> Any:
        gradients = eqx.filter_grad(loss)(params, X)
        updates, state = optimizer.update(gradients, state, eqx.filter(params, eqx.is_inexact_array))
        return eqx.apply_updates(params, updates), state

    after = params
    for _ in range(3):
        after, state = step(after, state)
    assert after["quantized"].digest() == before and loss(after, X) < loss(params, X)


@pytest.mark.parametrize("spec", RECIPES)
def test_nnx_trains_around_a_quantized_layer(spec: str) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Frozen(nnx.Variable):
        """Not among the parameters."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            made = tree(spec)
            self.quantized = Frozen(made["quantized"])
            self.dense, self.bias = nnx.Param(made["dense"]), nnx.Param(made["bias"])

        def __call__(self, x: Any) -> Any:
            return breccia.matmul(x, self.quantized.get_value()) @ self.dense[...] + self.bias[...]

    model = Model()
    before = model.quantized.get_value().digest()
    optimizer = nnx.Optimizer(model, optax.adamw(0.01, weight_decay=0.5), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(X) - 1) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    values = [float(step(model, optimizer)) for _ in range(3)]
    assert values[-1] < values[0]
    assert model.quantized.get_value().digest() == before


@pytest.mark.parametrize("spec", RECIPES)
def test_decaying_every_floating_leaf_leaves_quantized_ones(spec: str) -> None:
    params = tree(spec)

    def decayed(leaf: Any) -> Any:
        return leaf * 0.5 if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    after = jax.tree.map(decayed, params)
    assert after["quantized"].digest() == params["quantized"].digest() and bool((after["dense"] == 0.5).all())


#: Transformations whose update of a leaf with gradients of zero is zero.
STEADY: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True, accumulator_dtype=jnp.bfloat16),
    "adam": lambda: optax.adam(0.1),
    "adam with BF16 moments": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "adamw without decay": lambda: optax.adamw(0.1, weight_decay=0.0),
    "lion without decay": lambda: optax.lion(0.1, weight_decay=0.0),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "adagrad with momentum": lambda: optax.chain(optax.scale_by_rss(), optax.trace(0.9), optax.scale(-0.1)),
    "frozen at the end": lambda: optax.chain(
        optax.adamw(0.1, weight_decay=0.5),
        optax.masked(optax.set_to_zero(), {"quantized": True, "dense": False, "bias": False}),
    ),
    "masked": lambda: optax.masked(optax.adamw(0.1, weight_decay=0.5), {"quantized": False, "dense": True, "bias": True}),
    "in parts": lambda: optax.multi_transform(
        {"train": optax.lion(0.1, weight_decay=0.5), "freeze": optax.set_to_zero()},
        {"quantized": "freeze", "dense": "train", "bias": "train"},
    ),
}


def gradients_of(params: dict[str, Any]) -> dict[str, Any]:
    """Gradients of the dense leaves and zeros for the quantized ones, in the structure of `params`."""
    dense, scaled = breccia_jax.partition(params)
    found = jax.grad(lambda dense: loss(breccia_jax.combine(dense, scaled), X))(dense)
    return found | {"quantized": jax.tree.map(jnp.zeros_like, params["quantized"])}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("spec", ["mxfp8", "fp8_block", "nvfp4", "int4,symmetric=false,signed=false"])
def test_an_optimizer_of_a_whole_tree_changes_no_leaf_that_it_updates_by_zero(spec: str, name: str, compiled: bool) -> None:
    params, optimizer = tree(spec), STEADY[name]()

    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(gradients_of(params), state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(step) if compiled else step
    after, state = params, optimizer.init(params)
    for _ in range(2):
        after, state = run(after, state)
    assert breccia.bytes_equal(after["quantized"], params["quantized"])
    assert bool((after["dense"] != params["dense"]).any()) and bool(jnp.isfinite(after["dense"]).all())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("spec", RECIPES)
def test_adding_zeros_of_any_float_dtype_changes_no_leaf(spec: str, dtype: Any) -> None:
    st = tree(spec)["quantized"]
    after = jax.tree.map(lambda leaf: (leaf + jnp.zeros(leaf.shape, dtype)).astype(leaf.dtype), st)
    assert breccia.bytes_equal(after, st)


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_updates_of_codes_that_are_not_zero_change_them_and_partition_prevents_it(spec: str, name: str) -> None:
    """docs/jax.md warns of this. Adafactor divides by a zero of its own in integers."""
    params, optimizer = tree(spec), OPTIMIZERS[name]()
    updates, _ = optimizer.update(gradients_of(params), optimizer.init(params), params)
    assert not breccia.bytes_equal(optax.apply_updates(params, updates)["quantized"], params["quantized"])
    dense, scaled = breccia_jax.partition(params)
    updates, _ = optimizer.update(breccia_jax.partition(gradients_of(params))[0], optimizer.init(dense), dense)
    after = breccia_jax.combine(optax.apply_updates(dense, updates), scaled)
    assert breccia.bytes_equal(after["quantized"], params["quantized"])


@pytest.mark.parametrize("spec", RECIPES)
def test_an_optimizer_of_a_whole_nnx_state_changes_no_leaf_that_it_updates_by_zero(spec: str) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self) -> None:
            made = tree(spec)
            self.quantized = nnx.Param(made["quantized"])
            self.dense, self.bias = nnx.Param(made["dense"]), nnx.Param(made["bias"])

    model = Model()
    before = model.quantized.get_value()
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    gradients = jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf) if leaf.dtype == jnp.uint8 else jnp.ones_like(leaf), nnx.state(model)
    )
    optimizer.update(model, gradients)
    assert breccia.bytes_equal(model.quantized.get_value(), before) and bool((model.bias[...] != 0).all())


def test_clipping_and_equinox_refuse_whole_trees() -> None:
    """JAX raises these errors."""
    eqx = pytest.importorskip("equinox")
    params = tree("mxfp8")
    clip = optax.clip_by_global_norm(1.0)
    with pytest.raises(TypeError, match="requires arguments to have the same dtypes, got float32, uint8"):
        clip.update(gradients_of(params), clip.init(params), params)
    optimizer, arrays = optax.adamw(0.1), eqx.filter(params, eqx.is_array)
    with pytest.raises(ValueError, match="pytree structure error"):
        optimizer.update(eqx.filter_grad(loss)(params, X), optimizer.init(arrays), arrays)
