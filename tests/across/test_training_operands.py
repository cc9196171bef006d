"""Training: JAX and torch multiply the same codes, those of NumPy, from the same x, w and dy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_operands import FROM_CODES, PRESETS, operands

import breccia
from breccia import TrainingRecipe
from breccia.testing.examples import wide

pytestmark = pytest.mark.long  # JAX compiles every cast

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
import jax.numpy as jnp  # noqa: E402

import breccia_jax  # noqa: E402
from breccia_torch.nn import TrainingLinear  # noqa: E402
from breccia_torch.training.state import next_seed  # noqa: E402

#: Partial blocks along each axis: 32, 16 and 128 divide none of them all.
M, K, N = 80, 144, 208
RECIPES = [
    *map(TrainingRecipe, PRESETS),
    TrainingRecipe("nvfp4", high_precision=("grad_weight",)),
    TrainingRecipe("mxfp8", hadamard=32, gradient_rounding="stochastic"),
    TrainingRecipe(input="nvfp4,rotation=16,rotation_seed=3", weight="nvfp4", gradient="nvfp4", hadamard=16),
    *FROM_CODES,
]


def inputs(step: int = 0) -> tuple[Any, Any, Any]:
    """x (M, K), w (N, K), dy (M, N)"""
    x, w, dy = (wide(shape, seed=n + 3 * step, exponents=3) for n, shape in enumerate([(M, K), (N, K), (M, N)]))
    return x, w, dy


def layer_of(recipe: TrainingRecipe, w: Any) -> Any:
    layer = TrainingLinear(K, N, bias=False, recipe=recipe, seed=11)
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(w))
    return layer


def digests(pairs: dict[str, tuple[Any, Any]], turned: bool = False) -> dict[str, list[str]]:
    """By GEMM. turned: grad_weight is that of a kernel (K, N), whose product is the transpose."""
    if turned:
        a, b = pairs["grad_weight"]
        pairs = pairs | {"grad_weight": (b.mT, a.mT)}
    return {gemm: [_digest(operand) for operand in pair] for gemm, pair in pairs.items()}


def _digest(operand: Any) -> str:
    if isinstance(operand, breccia.ScaledTensor):
        return operand.digest()
    return np.ascontiguousarray(np.asarray(operand)).tobytes().hex()


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_torch_and_jax_multiply_the_same_codes(recipe: TrainingRecipe) -> None:
    x, w, dy = inputs()
    layer, dot = layer_of(recipe, w), breccia_jax.DotGeneral(recipe)
    low, high = (next_seed(layer.context) if recipe.stochastic else torch.zeros(2, dtype=torch.int32)).numpy().view(np.uint32)
    key, seed = jnp.array([low, high], jnp.uint32) if recipe.stochastic else None, int(high) << 32 | int(low)
    found = dot.gemm_operands(x, w.T, dy, state=breccia_jax.histories(recipe), key=key)
    of_jax = digests(found, turned=True)
    of_torch = digests(layer.gemm_operands(torch.as_tensor(x), torch.as_tensor(dy)))
    assert of_jax == of_torch == digests(operands(recipe, x, w, dy, seed))


def test_after_a_step_both_scale_by_the_same_histories() -> None:
    recipe = TrainingRecipe("fp8_delayed")
    (x, w, dy), (x2, _, dy2) = inputs(), inputs(1)
    layer, dot = layer_of(recipe, w), breccia_jax.DotGeneral(recipe)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    layer(torch.as_tensor(x)).backward(torch.as_tensor(dy))
    optimizer.step()
    state = breccia_jax.histories(recipe)
    _, back = jax.vjp(lambda state: dot.product(x, w.T, state=state), state)
    state = breccia_jax.advance(state, back(jnp.asarray(dy))[0])
    x2, dy2 = x2 / 11, dy2 / 11  # smaller than in the step before, whose amaxes stay the largest
    w = layer.weight.detach().numpy()  # the step makes +0 of -0
    of_jax = digests(dot.gemm_operands(x2, w.T, dy2, state=state), turned=True)
    largest = {"input": np.abs(x).max() / 448, "weight": np.abs(w).max() / 448, "gradient": np.abs(dy).max() / 57344}
    scales = {tensor: np.float32(scale) for tensor, scale in largest.items()}
    assert of_jax == digests(layer.gemm_operands(torch.as_tensor(x2), torch.as_tensor(dy2)))
    assert of_jax == digests(operands(recipe, x2, w, dy2, scales=scales))
