"""Train a small Flax model with FP8 and NVFP4 products, forward and backward, beside BF16.

The three products of each layer multiply what a `breccia.TrainingRecipe` declares. Parameters stay in FP32, and the histories
of delayed scaling are a state that the step carries.

python examples/11_training_jax.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from breccia_jax import flax as bf

FEATURES, HIDDEN, CLASSES, STEPS = 64, 128, 16, 60


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.bfloat16)
        for n in range(2):
            x = nn.relu(nn.Dense(HIDDEN, dtype=jnp.bfloat16, name=f"hidden_{n}")(x))
        return nn.Dense(CLASSES, dtype=jnp.bfloat16, name="out")(x).astype(jnp.float32)


def trained(recipe: str | None) -> float:
    """The mean loss of the last steps. Every recipe gets the same first weights and batches."""
    centres = jax.random.normal(jax.random.key(0), (CLASSES, FEATURES)) / 2
    classes = jax.random.randint(jax.random.key(1), (STEPS, 256), 0, CLASSES)
    x = centres[classes] + jax.random.normal(jax.random.key(2), (STEPS, 256, FEATURES))

    network = Network()
    params, state = network.init(jax.random.key(3), x[0]), {}
    if recipe is not None:
        network, summary = bf.convert_to_training(network, recipe, x[0])
        state = network.histories()  # {} unless the recipe has delayed scaling
        print(summary)
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params: dict, state: dict, memory: optax.OptState, x: jax.Array, classes: jax.Array, key: jax.Array) -> tuple:
        def loss(params: dict, state: dict) -> jax.Array:
            logits: Any = network.apply({**params, **state}, x, rngs={"rounding": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()

        value, (gradients, recorded) = jax.value_and_grad(loss, argnums=(0, 1))(params, state)
        updates, memory = optimizer.update(gradients, memory, params)
        return value, optax.apply_updates(params, updates), bf.advance(state, recorded), memory

    memory, losses = optimizer.init(params), []
    for n in range(STEPS):
        value, params, state, memory = step(params, state, memory, x[n], classes[n], jax.random.fold_in(jax.random.key(4), n))
        losses.append(float(value))
    return sum(losses[-10:]) / 10


def main() -> None:
    reference, *others = [(recipe, trained(recipe)) for recipe in (None, "fp8_delayed", "fp8_block", "nvfp4")]
    for recipe, loss in (reference, *others):
        print(f"{recipe or 'BF16':<11} loss {loss:.4f}")
    # Four bits are noise that a small network on noisy data feels; large models with their last layers in BF16 feel less.
    near = all(abs(loss / reference[1] - 1) < (0.15 if recipe == "nvfp4" else 0.05) for recipe, loss in others)
    print("FP8 is within 5 % of BF16, NVFP4 within 15 %:", near)


if __name__ == "__main__":
    main()
