"""JAX: the GEMMs of a layer in training multiply what its recipe declares, and give gradients within the bound of products."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from training_operands import FROM_CODES, PRESETS, agrees, operands, values

import breccia
from breccia import TrainingRecipe
from breccia.testing.examples import wide

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import breccia_jax  # noqa: E402
from breccia_jax import training  # noqa: E402

long = pytest.mark.long  # JAX compiles every case

#: Partial blocks along each axis.
M, K, N = 80, 144, 208
DOT = (((1,), (0,)), ((), ()))
X, W, DY = (wide(shape, seed=n, exponents=3) for n, shape in enumerate([(M, K), (N, K), (M, N)]))  # W as torch has it
KEY = jnp.array([5, 7], jnp.uint32)  # training_operands.SEED
RECIPES = [*map(TrainingRecipe, PRESETS), TrainingRecipe("nvfp4", high_precision=("grad_weight",)), *FROM_CODES]


def options(recipe: TrainingRecipe, key: Any = KEY) -> dict[str, Any]:
    """What a call needs beside its operands."""
    return {"state": breccia_jax.histories(recipe), "key": key if recipe.stochastic else None}


def gemms(recipe: TrainingRecipe, x: Any = X, w: Any = W, dy: Any = DY, state: Any = None) -> dict[str, Any]:
    """What the layer computes, by GEMM, and its gradient with respect to the state."""
    dot, given = breccia_jax.DotGeneral(recipe), options(recipe)
    state = given["state"] if state is None else state
    y, back = jax.vjp(lambda x, w, state: dot(x, w, DOT, state=state, key=given["key"]), x, w.T, state)
    dx, dw, recorded = back(jnp.asarray(dy))
    return {"output": y, "grad_input": dx, "grad_weight": dw.T, "state": recorded}


def wrong(recipe: TrainingRecipe, scales: Any = None, **arguments: Any) -> list[str]:
    """The GEMMs that are not within the bound of FP64 products of the operands that the recipe declares."""
    found = gemms(recipe, **arguments)
    x, dy = arguments.get("x", X), arguments.get("dy", DY)
    return [gemm for gemm, pair in operands(recipe, x, W, dy, scales=scales).items() if not agrees(found[gemm], *pair)]


@pytest.mark.parametrize("recipe", [pytest.param(r, marks=() if n == 3 else long) for n, r in enumerate(RECIPES)], ids=repr)
def test_each_gemm_is_the_product_of_its_declared_operands(recipe: TrainingRecipe) -> None:
    assert wrong(recipe) == []


# ------------------------------------------------------------------------------------------------ planted faults


def declared_with(tensor: str, change: Any) -> Any:
    """`training.declared` with a fault in the operands of one tensor."""
    real = training.declared
    return lambda recipe, of: change(*real(recipe, of)) if of == tensor else real(recipe, of)


def blocks_of_rows(how: Any, tensor: str, *arguments: Any, real: Any = training.cast_operands, **options: Any) -> Any:
    """`training.cast_operands`, whose gradients have blocks along N for grad_weight too."""
    first, second, amax = real(how, tensor, *arguments, **options)
    return first, first if tensor == "gradient" else second, amax


#: By name: the recipe, what is replaced in `training`, and the GEMMs that must be found wrong.
FAULTS: dict[str, tuple[str, str, Any, set[str]]] = {
    "wrong axis of wgrad": ("fp8_block", "cast_operands", blocks_of_rows, {"grad_weight"}),
    "gradient not quantized": (
        "mxfp8",
        "declared",
        declared_with("gradient", lambda one, two: (one._replace(recipe=None), two._replace(recipe=None))),
        {"grad_input", "grad_weight"},
    ),
    "no rotation of x": (
        "nvfp4",
        "declared",
        declared_with("input", lambda one, two: (one, two._replace(rotation=None))),
        {"grad_weight"},
    ),
    "gradient rounded to nearest": (
        "nvfp4",
        "declared",
        declared_with("gradient", lambda one, two: (one._replace(rounding="nearest"), two._replace(rounding="nearest"))),
        {"grad_input", "grad_weight"},
    ),
    "halved scale": (
        "fp8_delayed",
        "scale_of_step",
        lambda history, amax, real=training.scale_of_step: real(history, amax) / 2,
        {"output", "grad_input", "grad_weight"},
    ),
}


@long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preset, name, replacement, expected = FAULTS[fault]
    monkeypatch.setattr(training, name, replacement)
    assert expected <= set(wrong(TrainingRecipe(preset)))


@long
def test_a_lost_state_is_found() -> None:
    recipe = TrainingRecipe("fp8_delayed")
    state = breccia_jax.histories(recipe)
    after = breccia_jax.advance(state, gemms(recipe)["state"])
    scales = {"input": np.abs(X).max() / 448, "weight": np.abs(W).max() / 448, "gradient": np.abs(DY).max() / 57344}
    scales = {tensor: np.float32(scale) for tensor, scale in scales.items()}
    second = partial(wrong, recipe, scales, x=X / 11, dy=DY / 11)  # smaller than in the first step
    assert second(state=after) == [] and second(state=state) == ["output", "grad_input", "grad_weight"]


# ------------------------------------------------------------------------------------------------ the state


def moved(history: Any, amax: float) -> Any:
    return replace(history, amaxes=jnp.zeros_like(history.amaxes), scale=jnp.float32(amax))


def test_a_history_moves_by_finite_amaxes_of_taken_steps() -> None:
    state = {"a": breccia_jax.histories("fp8_delayed"), "b": breccia_jax.histories("fp8_delayed")}

    def step(state: Any, amax: float, **options: Any) -> Any:
        return breccia_jax.advance(state, {n: {t: moved(h, amax) for t, h in of.items()} for n, of in state.items()}, **options)

    def read(state: Any) -> Any:
        return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state)]

    one = step(state, 448.0)
    assert one["a"]["input"].scale == 1 and one["b"]["gradient"].scale == np.float32(448 / 57344)
    assert np.asarray(one["a"]["weight"].amaxes).tolist() == [0.0] * 15 + [448.0]
    for left in (step(one, np.nan), step(one, np.inf), step(one, 0.0), step(one, 1.0, taken=False)):
        assert read(left) == read(one)
    # NaN in one layer is a loss of NaN: no history moves.
    recorded = {n: {t: moved(h, 1.0) for t, h in of.items()} for n, of in state.items()}
    recorded["b"]["gradient"] = moved(state["b"]["gradient"], np.nan)
    assert read(breccia_jax.advance(one, recorded)) == read(one)
    with pytest.raises(breccia.OptionError, match="advance: `recorded` is the gradient with respect to the state"):
        breccia_jax.advance(one, {"a": recorded["a"]})


@long
def test_a_loss_of_nan_moves_no_history() -> None:
    recipe = TrainingRecipe("fp8_delayed")
    state = breccia_jax.advance(breccia_jax.histories(recipe), gemms(recipe)["state"])
    recorded = gemms(recipe, dy=np.full_like(DY, np.nan), state=state)["state"]
    for left, right in zip(jax.tree.leaves(breccia_jax.advance(state, recorded)), jax.tree.leaves(state), strict=True):
        assert np.array_equal(left, right)


@long
def test_stacked_histories_advance_one_by_one() -> None:
    stacked = breccia_jax.histories("fp8_delayed", (2,))
    recorded = {t: replace(h, amaxes=jnp.zeros((2, 16)), scale=jnp.array([448.0, 896.0])) for t, h in stacked.items()}
    assert np.asarray(breccia_jax.advance(stacked, recorded)["input"].scale).tolist() == [1.0, 2.0]


# ------------------------------------------------------------------------------------------------ calls


@long
@pytest.mark.parametrize("preset", ["fp8_current", "nvfp4"])
def test_examples_of_vmap_are_rows_of_one_product(preset: str) -> None:
    recipe = TrainingRecipe(preset)
    dot, given = breccia_jax.DotGeneral(recipe), options(recipe)

    def loss(w: Any, vmapped: bool) -> Any:
        product = partial(dot.product, w=w, **given)
        y = jax.vmap(lambda x: product(x[None])[0])(jnp.asarray(X)) if vmapped else product(X)
        return (y * DY).sum()

    whole, rows = (jax.grad(loss)(jnp.asarray(W.T), vmapped) for vmapped in (False, True))
    assert np.array_equal(whole, rows)
    # Nested, and with a key for each example: one product has one key.
    keys = jnp.broadcast_to(KEY, (M, 2))
    product = lambda x, key: dot.product(x[None], jnp.asarray(W.T), key=key if recipe.stochastic else None)[0]  # noqa: E731
    twice = jax.vmap(jax.vmap(product))(jnp.reshape(X, (4, 20, K)), jnp.reshape(keys, (4, 20, 2)))
    assert np.array_equal(twice.reshape(M, N), dot.product(X, W.T, **given))
    # Gradients of single examples are those of products of one row.
    each = jax.vmap(jax.grad(lambda w, x, dy: (dot.product(x[None], w, **given) * dy).sum()), (None, 0, 0))(W.T, X[:2], DY[:2])
    alone = jax.grad(lambda w: (dot.product(X[1:2], w, **given) * DY[1]).sum())(jnp.asarray(W.T))
    assert np.array_equal(each[1], alone)


@long
def test_products_of_weights_under_vmap_and_in_checkpoints() -> None:
    dot = breccia_jax.DotGeneral(TrainingRecipe("mxfp8"))
    x, w = jnp.asarray(X), jnp.stack([W.T, 2 * W.T])
    y = jax.vmap(lambda w: dot.product(x, w))(w)
    assert np.array_equal(y[1], 2 * y[0]) and np.array_equal(y[0], dot.product(x, w[0]))
    loss = lambda w: (dot.product(x, w) * DY).sum()  # noqa: E731
    assert np.array_equal(jax.grad(jax.checkpoint(loss))(w[0]), jax.jit(jax.grad(loss))(w[0]))


@long
@pytest.mark.parametrize("preset", ["mxfp8", "nvfp4"])
def test_dtypes_of_results_and_gradients(preset: str) -> None:
    recipe = TrainingRecipe(preset)
    dot, given = breccia_jax.DotGeneral(recipe), options(recipe)
    x, w = jnp.asarray(X, jnp.bfloat16), jnp.asarray(W.T)
    y, back = jax.vjp(lambda x, w: dot(x, w, DOT, preferred_element_type=jnp.bfloat16, **given), x, w)
    dx, dw = back(y)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    expected = operands(recipe, np.asarray(X.astype(jnp.bfloat16)), W, np.asarray(y))["grad_weight"]
    assert agrees(dw.T, *expected)


@long
def test_arrays_of_numpy_are_differentiated() -> None:
    dot = breccia_jax.DotGeneral(TrainingRecipe("fp8_tile"))
    loss = jax.value_and_grad(lambda x, w: dot(x, w, DOT).sum(), (0, 1))
    (value, found), (expected, wanted) = loss(X, W.T.copy()), loss(jnp.asarray(X), jnp.asarray(W.T))
    assert value == expected and all(map(np.array_equal, found, wanted))


@long
def test_an_old_spelling_is_the_recipe_of_its_parts() -> None:
    old = breccia_jax.DotGeneral("mxfp8", "nvfp4", "fp8_block")
    assert old.recipe == TrainingRecipe(input="mxfp8", weight="nvfp4", gradient="fp8_block")
    new = breccia_jax.DotGeneral(old.recipe)
    for left, right in zip(*(jax.vjp(partial(d.product), X, W.T)[1](jnp.asarray(DY)) for d in (old, new)), strict=True):
        assert np.array_equal(left, right)


def test_no_rows_have_no_gradient() -> None:
    dot = breccia_jax.DotGeneral(TrainingRecipe("fp8_block"))
    y, back = jax.vjp(dot.product, jnp.zeros((0, 128)), jnp.ones((128, 32)))
    dx, dw = back(y)
    assert y.shape == (0, 32) and dx.shape == (0, 128) and np.array_equal(dw, np.zeros((128, 32)))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: breccia_jax.DotGeneral(TrainingRecipe("mxfp8"), "mxfp8"), "a TrainingRecipe has the recipes of all operands"),
        (
            lambda: breccia_jax.DotGeneral(TrainingRecipe("fp8_delayed")).product(X, W.T),
            r"the histories of: input, weight, gradient; got state with: none. Pass state=breccia_jax.histories\(recipe\)",
        ),
        (
            lambda: breccia_jax.DotGeneral(TrainingRecipe("mxfp8")).product(X, W.T, state=breccia_jax.histories("fp8_delayed")),
            "needs the histories of: none; got state with: input, weight, gradient",
        ),
        (
            lambda: breccia_jax.DotGeneral(TrainingRecipe("nvfp4")).product(X, W.T),
            "rounds stochastically and needs a key: pass key=jax.random.fold_in",
        ),
        (
            lambda: breccia_jax.DotGeneral(TrainingRecipe("mxfp8")).ragged_dot(X, W.T, np.array([1])),
            r"ragged_dot multiplies \(M, K\) by \(E, K, N\) for group sizes \(E,\); got shapes \(80, 144\), \(144, 208\)",
        ),
        (
            lambda: breccia_jax.DotGeneral("mxfp8").ragged_dot(X, W.T[None], np.array([1])),
            r"ragged_dot needs DotGeneral\(TrainingRecipe\(...\)\)",
        ),
    ],
)
def test_wrong_calls_are_refused(call: Any, says: str) -> None:
    with pytest.raises(breccia.BrecciaError, match=says):
        call()


# ------------------------------------------------------------------------------------------------ experts

#: Rows of each expert; the last ten rows are of none.
SIZES = np.array([21, 0, 37, 12], np.int32)


@long
@pytest.mark.parametrize("preset", PRESETS)
def test_experts_are_cast_as_if_each_were_alone(preset: str) -> None:
    recipe = TrainingRecipe(preset, gradient_rounding="nearest")  # random numbers follow places in the whole tensor
    dot, state = breccia_jax.DotGeneral(recipe), breccia_jax.histories(recipe)
    w = np.stack([wide((N, K), seed=9 + e, exponents=3) for e in range(len(SIZES))])
    x, dy = X.copy(), DY.copy()
    x[SIZES.sum() :] = dy[SIZES.sum() :] = np.nan

    @jax.jit
    def step(x: Any, w: Any, dy: Any) -> Any:
        y, back = jax.vjp(lambda x, w, state: dot.ragged_dot(x, w, SIZES, state=state), x, w, state)
        return y, *back(dy)

    y, dx, dw, recorded = step(x, w.swapaxes(1, 2), dy)
    ends = SIZES.cumsum()
    own = slice(ends[-1])
    # Scales of the whole tensor, and of columns, span all experts: those of the other recipes do not.
    shared = {t: of for t, of in (("input", x[own]), ("weight", w), ("gradient", dy[own]))}
    scales = {}
    if preset in ("fp8_current", "fp8_delayed", "nvfp4"):
        cast = {t: breccia.cast(np.float32([[np.abs(of).max()]]), getattr(recipe, t)) for t, of in shared.items()}
        scales = {t: st.scale if st.global_scale is None else st.global_scale for t, st in cast.items()}
    for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        # The rotation of NVFP4 changes the amax of columns; other recipes check those.
        plain = TrainingRecipe(preset, gradient_rounding="nearest", hadamard=0)
        expected = operands(plain, x[start:end], w[e], dy[start:end], scales=scales)
        assert agrees(y[start:end], *expected["output"]), e
        assert agrees(dx[start:end], *expected["grad_input"]), e
        if preset in ("fp8_row", "nvfp4"):
            exact = values(dy[start:end]).T @ values(x[start:end])
            assert np.linalg.norm(dw[e].T - exact) <= 0.2 * np.linalg.norm(exact), e
        else:
            assert agrees(dw[e].T, *expected["grad_weight"]), e
    assert not dw[1].any() and not y[ends[-1] :].any() and not dx[ends[-1] :].any()
    assert {t: float(h.scale) for t, h in recorded.items()} == {t: np.abs(shared[t]).max() for t in recorded}


@long
def test_no_rotation_mixes_the_rows_of_two_experts() -> None:
    dot = breccia_jax.DotGeneral(TrainingRecipe("mxfp8", hadamard=128))  # scales alone would let an expert begin at row 64
    sizes = np.array([37, M - 37], np.int32)
    x, dy = X.copy(), DY.copy()
    x[37:] = dy[:37] = 0
    dw = jax.grad(lambda w: (dot.ragged_dot(x, w, sizes) * dy).sum())(jnp.ones((2, K, N)))
    assert not dw.any()


@long
def test_experts_without_any_rows_have_gradients_of_zero() -> None:
    recipe = TrainingRecipe("nvfp4")
    dot = breccia_jax.DotGeneral(recipe)
    sizes = np.zeros(3, np.int32)
    y, back = jax.vjp(lambda x, w: dot.ragged_dot(x, w, sizes, key=KEY), jnp.asarray(X), jnp.ones((3, K, N)))
    dx, dw = back(jnp.asarray(DY))
    assert not y.any() and not dx.any() and not dw.any() and dw.shape == (3, K, N)
