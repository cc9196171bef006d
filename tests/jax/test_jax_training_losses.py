"""JAX in training: after 200 steps under every preset, losses are those of BF16, within the bounds of the project."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_operands import PRESETS

from breccia import TrainingRecipe

pytestmark = pytest.mark.slow

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

import breccia_jax  # noqa: E402

STEPS, BATCH, WIDTH, HIDDEN, CLASSES, LAYERS = 200, 256, 64, 128, 16, 5
#: Bounds of the difference in percent of BF16's loss.
BOUNDS = {name: 1.5 if name == "nvfp4" else 1.0 for name in PRESETS}


def task(seed: int) -> tuple[Any, Any, list[Any]]:
    """Inputs (STEPS, BATCH, WIDTH), classes drawn from a random network's probabilities, and first weights.

    Classes are drawn, so no model reaches a loss near zero, where a relative difference would say nothing.
    """
    draw = np.random.default_rng(seed)
    teacher = [draw.standard_normal(shape) / shape[0] ** 0.5 for shape in ((WIDTH, HIDDEN), (HIDDEN, CLASSES))]
    x = draw.standard_normal((STEPS, BATCH, WIDTH)).astype(np.float32)
    logits = 4 * np.maximum(x @ teacher[0], 0) @ teacher[1]
    classes = (logits + draw.gumbel(size=logits.shape)).argmax(-1)
    shapes = [(WIDTH, HIDDEN), *[(HIDDEN, HIDDEN)] * (LAYERS - 2), (HIDDEN, CLASSES)]
    weights = [(draw.standard_normal(shape) * (2 / shape[0]) ** 0.5).astype(np.float32) for shape in shapes]
    return x, classes, weights


def final_loss(preset: str | None, seed: int) -> float:
    """The mean loss of the last 50 steps; None: BF16. The first and the last layer are BF16, as embeddings and heads are."""
    x, classes, first = task(seed)
    recipe = None if preset is None else TrainingRecipe(preset)
    dot = None if recipe is None else breccia_jax.DotGeneral(recipe)
    state = [{} if recipe is None else breccia_jax.histories(recipe) for _ in first]
    optimizer = optax.adam(2e-3)

    def loss(weights: Any, state: Any, x: Any, classes: Any, key: Any) -> Any:
        x = x.astype(jnp.bfloat16)
        for n, (w, histories, own) in enumerate(zip(weights, state, jax.random.split(key, LAYERS), strict=True)):
            w = w.astype(jnp.bfloat16)
            inner = 0 < n < LAYERS - 1
            if dot is None or not inner:
                y = jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
            else:
                y = dot.product(x, w, state=histories, key=own if recipe.stochastic else None)
            x = x + jax.nn.relu(y) if inner else y
        return optax.softmax_cross_entropy_with_integer_labels(x.astype(jnp.float32), classes).mean()

    def step(carried: Any, batch: Any) -> Any:
        weights, state, memory = carried
        value, (gradients, recorded) = jax.value_and_grad(loss, (0, 1))(weights, state, *batch)
        updates, memory = optimizer.update(gradients, memory, weights)
        return (optax.apply_updates(weights, updates), breccia_jax.advance(state, recorded), memory), value

    weights = [jnp.asarray(w) for w in first]
    keys = jax.random.split(jax.random.key(seed), STEPS)
    run = jax.jit(lambda carried: lax.scan(step, carried, (x, classes, keys)))
    _, losses = run((weights, state, optimizer.init(weights)))
    assert losses[-50:].mean() < losses[:10].mean() / 1.2  # it has learned
    return float(losses[-50:].mean())


@pytest.mark.parametrize("seed", [0, 1])
def test_losses_are_those_of_bf16(seed: int) -> None:
    reference = final_loss(None, seed)
    found = {preset: 100 * (final_loss(preset, seed) / reference - 1) for preset in PRESETS}
    print(seed, f"BF16 {reference:.4f}", {preset: f"{percent:+.2f} %" for preset, percent in found.items()})
    assert all(abs(percent) <= BOUNDS[preset] for preset, percent in found.items()), found
