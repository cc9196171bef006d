"""Training with straight-through gradients: the first step equals the plain network's at the rounded values; the loss falls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import breccia
from breccia.arrays.frameworks import ops_of
from breccia.dispatch.registry import registry

#: Warnings that torch's own modules raise on import.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

#: Two blocks of 128.
WIDTH = 256
OUTPUTS, BATCH, TEST = 64, 512, 4096
#: Of gradient descent, falling to zero in a straight line. For inputs of variance 1 the curvature is 2 / OUTPUTS.
STEPS, RATE = 80, OUTPUTS / 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices as small as these are slower on several, most of all where others want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rounded(x: Tensor, recipe: breccia.ScalingRecipe) -> Tensor:
    return breccia.dequantize(breccia.cast(x.detach(), recipe))


@pytest.mark.parametrize("name", registry().recipes)
def test_the_first_gradient_equals_that_of_the_plain_network_at_the_rounded_values(name: str) -> None:
    recipe, draw = breccia.recipe(name), torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, WIDTH, generator=draw)
    classes = torch.randint(OUTPUTS, (BATCH,), generator=draw)
    weights = [(torch.randn(n, WIDTH, generator=draw) / WIDTH**0.5).requires_grad_() for n in (WIDTH, OUTPUTS)]

    a, b = weights
    inner = functional.relu(functional.linear(breccia.cast_ste(x, recipe), breccia.cast_ste(a, recipe)))
    outer = functional.linear(breccia.cast_ste(inner, recipe), breccia.cast_ste(b, recipe))
    found = torch.autograd.grad(functional.cross_entropy(outer, classes), weights)

    # A layer at a time, so that the second layer's input is rounded with no cast in the graph. These are the same operations on
    # the same numbers, hence the same bits.
    a, b = (rounded(w, recipe).requires_grad_() for w in weights)
    inner = functional.relu(functional.linear(rounded(x, recipe), a))
    middle = rounded(inner, recipe).requires_grad_()
    at_middle, at_b = torch.autograd.grad(functional.cross_entropy(functional.linear(middle, b), classes), (middle, b))
    (at_a,) = torch.autograd.grad(inner, a, at_middle)
    assert torch.equal(found[0], at_a) and torch.equal(found[1], at_b)
    assert at_a.any() and at_b.any()


def fitted(seed: int, recipe: breccia.ScalingRecipe | None) -> tuple[float, float]:
    """Mean squared error of a linear layer on inputs it has not seen, before and after training. Targets have power 1."""
    draw = torch.Generator().manual_seed(seed)
    teacher, first = (torch.randn(OUTPUTS, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(2))
    weight = first.requires_grad_()

    def loss(count: int) -> Tensor:
        x = torch.randn(count, WIDTH, generator=draw)
        operands = (x, weight) if recipe is None else (breccia.cast_ste(x, recipe), breccia.cast_ste(weight, recipe))
        return functional.mse_loss(functional.linear(*operands), functional.linear(x, teacher))

    before = loss(TEST).item()
    for step in range(STEPS):
        (gradient,) = torch.autograd.grad(loss(BATCH), weight)
        with torch.no_grad():
            weight -= RATE * (1 - step / STEPS) * gradient
    return before, loss(TEST).item()


@pytest.mark.long
@pytest.mark.parametrize(("name", "mantissa_bits"), [("fp8_block", 3), ("mxfp8", 3), ("nvfp4", 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_fit_ends_within_the_formats_own_error_of_fp32s(seed: int, name: str, mantissa_bits: int) -> None:
    # A number x with m mantissa bits stands at most u |x|, u = 2^-(m + 1), from what it was: half a step. Spread evenly over a
    # step, that error has a mean square of at most (u x)^2 / 3. (Below the least normal number steps stop shrinking; what lies
    # there is too small to count.) At the teacher's weights the sum over K of products of two such numbers is off by a part of
    # (1 + u^2 / 3)^2 - 1 of its power, which is 1, since errors of independent inputs do not add up. Training against the
    # rounding may find a better place, and must not end at a worse one.
    u = 2.0 ** -(mantissa_bits + 1)
    bound = (1 + u * u / 3) ** 2 - 1
    _, exact = fitted(seed, None)
    before, found = fitted(seed, breccia.recipe(name))
    assert found <= exact + bound < before / 10


# -- the first step on every framework --------------------------------------------------------------------------------

Arrays = list[np.ndarray]


def layered(cast_ste: Callable[[Any], Any], where: Callable[..., Any], x: Any, a: Any, b: Any, target: Any) -> tuple[Any, Any]:
    """(mean squared error of two linear layers, what the second is given): the same words on every framework.

    `where` stands for the ReLU, whose gradient at 0 is not everybody's.
    """
    inner = cast_ste(x) @ cast_ste(a).T
    inner = where(inner > 0, inner, 0.0)
    apart = cast_ste(inner) @ cast_ste(b).T - target
    return (apart * apart).mean(), inner


def on_torch(recipe: breccia.ScalingRecipe, x: Any, a: Any, b: Any, target: Any) -> tuple[Any, Any]:
    def step(x: Any, a: Any, b: Any, target: Any) -> tuple[Any, Any]:
        loss, inner = layered(lambda x: breccia.cast_ste(x, recipe), torch.where, x, a, b, target)
        return torch.autograd.grad(loss, (a, b)), [breccia.cast(y.detach(), recipe) for y in (x, a, inner, b)]

    return step(torch.from_numpy(x), *(torch.from_numpy(w).requires_grad_() for w in (a, b)), torch.from_numpy(target))


def on_jax(recipe: breccia.ScalingRecipe, x: Any, a: Any, b: Any, target: Any) -> tuple[Any, Any]:
    jax = pytest.importorskip("jax")

    def loss(weights: Any, x: Any, target: Any) -> Any:
        return layered(lambda x: breccia.cast_ste(x, recipe), jax.numpy.where, x, *weights, target)

    @jax.jit
    def step(x: Any, a: Any, b: Any, target: Any) -> tuple[Any, Any]:
        gradients, inner = jax.grad(loss, has_aux=True)((a, b), x, target)
        return gradients, [breccia.cast(y, recipe) for y in (x, a, inner, b)]

    return step(x, a, b, target)


def on_mlx(recipe: breccia.ScalingRecipe, x: Any, a: Any, b: Any, target: Any) -> tuple[Any, Any]:
    mx = pytest.importorskip("mlx.core")

    def loss(weights: Any, x: Any, target: Any) -> Any:
        return layered(lambda x: breccia.cast_ste(x, recipe), mx.where, x, *weights, target)

    @mx.compile
    def step(x: Any, a: Any, b: Any, target: Any) -> tuple[Any, Any]:
        (_, inner), gradients = mx.value_and_grad(loss)([a, b], x, target)
        return gradients, inner

    x, a, b, target = map(mx.array, (x, a, b, target))
    gradients, inner = step(x, a, b, target)
    return gradients, [breccia.cast(y, recipe) for y in (x, a, inner, b)]


FIRST_STEPS = {"torch": on_torch, "jax": on_jax, "mlx": on_mlx}


def exact_sums() -> Arrays:
    """(x, a, b, target), where frameworks multiply x by a without rounding, so that their second layers are given the same.

    x and a are multiples of 7/32 up to 2.625 = 2688 / 1024, which is the amax of every block. So scales are 1 or 3 times a
    power of two, and codes among the larger ones, which have few bits.
    """
    draw = np.random.default_rng(0)
    x, a = (draw.integers(-12, 13, (n, WIDTH)) * np.float32(7 / 32) for n in (BATCH, WIDTH))
    for numbers in (x, a):
        numbers[:, ::16] = np.float32(2.625)
    b, target = draw.standard_normal((OUTPUTS, WIDTH)), draw.standard_normal((BATCH, OUTPUTS))
    return [np.float32(y) for y in (x, a / 16, b / 16, target)]


def unit(y: np.ndarray) -> float:
    """The power of two, 1 at most, that all are multiples of."""
    return next(step for step in (2.0**-n for n in range(150)) if not (y % step).any())


def gamma(n: int) -> float:
    """FP32 sums of n products, in whatever order and fused or not, are off by at most gamma(n) times the sum of magnitudes."""
    u = 2.0**-24
    return n * u / (1 - n * u)


def gradients_in_fp64(middle: Any, x: Any, inner: Any, b: Any, target: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(gradients, by how much FP32 may miss them at most) for both layers, given x, inner and b as they are rounded.

    middle: inner before it was rounded, where the gradient passes the ReLU.

    A product P Q of inner length n, of a P that may be off by dP already and an exact Q, is off by at most dP |Q| + gamma(n)
    (|P| + dP) |Q|. Every Q here is a rounded operand: the test compares its bytes. Between products there are a difference, off
    by u = 2^-24 of itself, and a factor of 2 / (BATCH OUTPUTS), a power of two. Nothing comes near the subnormal numbers, and
    FP64's own error is 2^-29 of these.
    """

    def product(p: Any, dp: Any, q: Any) -> tuple[Any, Any]:
        return p @ q, dp @ abs(q) + gamma(p.shape[-1]) * ((abs(p) + dp) @ abs(q))

    out, error = product(inner, 0 * inner, b.T)
    apart = out - target
    error = error + 2.0**-24 * (abs(apart) + error)
    g, dg = (y * (2 / apart.size) for y in (apart, error))
    at_b, error_b = product(g.T, dg.T, inner)
    at_inner, d_inner = product(g, dg, b)
    passes = middle > 0
    at_a, error_a = product((at_inner * passes).T, (d_inner * passes).T, x)
    return (at_a, at_b), (error_a, error_b)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4"])
def test_first_steps_have_the_same_bytes_and_gradients_on_every_framework(name: str) -> None:
    recipe, (x, a, b, target) = breccia.recipe(name), exact_sums()
    found = {framework: step(recipe, x, a, b, target) for framework, step in FIRST_STEPS.items()}
    gradients = {framework: [ops_of(g).to_numpy(g) for g in of] for framework, (of, _) in found.items()}

    p, q = (breccia.dequantize(breccia.cast(y, recipe)).astype(np.float64) for y in (x, a))
    assert (abs(p) @ abs(q).T).max() < 2**24 * unit(p) * unit(q), "FP32 holds every partial sum, in every order"
    middle = np.maximum(p @ q.T, 0)
    given = [breccia.cast(y, recipe) for y in (x, a, middle.astype(np.float32), b)]
    for framework, (_, operand) in found.items():
        assert [breccia.bytes_equal(st, ours) for st, ours in zip(operand, given, strict=True)] == [True] * 4, framework

    p, _, inner, r = (breccia.dequantize(st).astype(np.float64) for st in given)
    exact, bounds = gradients_in_fp64(middle, p, inner, r, target.astype(np.float64))
    for n, bound in enumerate(bounds):
        for framework, of in gradients.items():
            assert (abs(of[n] - exact[n]) <= bound).all(), (framework, n)
            assert (abs(of[n] - gradients["torch"][n]) <= 2 * bound).all(), (framework, n)

    # The bounds say something: a gradient that goes through the weights as they were, and none at all, as through a rounding
    # that is not straight-through, are further off in many places.
    (wrong, _), _ = gradients_in_fp64(middle, p, inner, b.astype(np.float64), target.astype(np.float64))
    for planted in (wrong, np.zeros_like(wrong)):
        assert (abs(planted - exact[0]) > 2 * bounds[0]).mean() > 0.1
