"""Straight-through gradients train: the first step is the plain network's at the rounded numbers, and the loss comes down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import breccia
from breccia.registry import registry

#: What torch's own modules do when they are imported.
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
def test_the_first_gradient_is_that_of_the_plain_network_at_the_rounded_numbers(name: str) -> None:
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


@pytest.mark.parametrize(("name", "mantissa_bits"), [("block", 3), ("mxfp8", 3), ("nvfp4", 1)])
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
