"""Quantize a tree of parameters in JAX, serve it under `jit`, and train with gradients that pass through the rounding.

python examples/06_jax.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import breccia
import breccia_jax


def model(params: dict, x: jax.Array) -> jax.Array:
    x = jax.nn.gelu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return x @ params["out"]["kernel"] + params["out"]["bias"]


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden": {"kernel": jax.random.normal(keys[0], (128, 256)) / 12, "bias": jnp.zeros(256)},
        "out": {"kernel": jax.random.normal(keys[1], (256, 32)) / 16, "bias": jnp.zeros(32)},
    }
    x = jax.random.normal(keys[2], (8, 128))

    # Kernels become ScaledTensors with blocks along the contraction axis; biases stay. A ScaledTensor is a pytree.
    quantized = breccia_jax.quantize(params, "mxfp8")
    print(quantized["out"]["kernel"])
    print("leaves:", [leaf.shape for leaf in jax.tree.leaves(quantized)])

    # Decode inside `jit`: the decoded values of a layer live only while the layer needs them.
    serve = jax.jit(lambda params, x: model(breccia_jax.dequantize(params), x))
    print(breccia.metrics(model(params, x), serve(quantized, x)))

    # In training the parameters stay in FP32, and cast_ste rounds the kernels where the model reads them.
    def loss(params: dict, x: jax.Array) -> jax.Array:
        rounded = jax.tree.map(lambda p: breccia.cast_ste(p, "mxfp8", axis=-2) if p.ndim == 2 else p, params)
        return ((model(rounded, x) - 1) ** 2).mean()

    @jax.jit
    def step(params: dict, x: jax.Array) -> tuple[jax.Array, dict]:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    first, params = step(params, x)
    for _ in range(20):
        last, params = step(params, x)
    print(f"loss {first:.3f} -> {last:.3f}")
    print("the loss fell to less than half:", bool(last < first / 2))


if __name__ == "__main__":
    main()
