"""Combined ops on every framework: cast_pair, matmul with a bias, cast_matmul, grouped_matmul.

Whole numbers are used where results are compared with `==`: sums of them below 2^24 are exact in FP32, in any order. Others are
held to the bound of FP32 accumulation (see `within`).
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from marks import here, jax_is_long
from recipes import recipe_id

import breccia
from breccia import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    INT4Scaling,
    Kernel,
    LayoutError,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NF4Scaling,
    NVFP4BlockScaling,
    RecipeError,
    ScaledTensor,
    ScalingRecipe,
    ShapeError,
    UnsupportedError,
    bytes_equal,
    hookimpl,
)
from breccia.arrays import frameworks
from breccia.dispatch.registry import Plugin, Registry, _installed
from breccia.kernels.reference import recording
from breccia.tensors.components import components
from breccia.testing import oracle
from breccia.testing.compare import expect_numbers, expect_written
from breccia.testing.examples import special_rows, wide
from breccia.testing.places import Place

#: Warnings that torch's own modules raise on import.
pytestmark = [pytest.mark.filterwarnings("ignore:`torch.jit"), pytest.mark.covering(1, 2)]

FRAMEWORKS = ("numpy", "torch", "jax", "mlx")
#: Frameworks with gradients.
DIFFERENTIABLE = FRAMEWORKS[1:]
#: Frameworks that compile nothing by themselves, for tests without a compiler.
EAGER = ("numpy", "torch", "mlx")
MXFP8, NVFP4 = MXFP8BlockScaling(), NVFP4BlockScaling()
#: INT4 under a scale of 1.0 wherever the largest magnitude of a group is 7: codes are the nearest integers.
WHOLE = INT4Scaling(group_size=16, scale_dtype="fp32")
#: Shapes of inputs, weights and biases. Few, because JAX compiles for each.
X, W, B = (4, 32), (6, 32), (6,)


@pytest.fixture(params=jax_is_long(FRAMEWORKS))
def place(request: pytest.FixtureRequest) -> Place:
    return here(request.param)


@pytest.fixture(params=jax_is_long(DIFFERENTIABLE))
def tape(request: pytest.FixtureRequest) -> Place:
    """A framework with gradients."""
    return here(request.param)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Reset the compiler, so that tests do not share graphs."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()


def everywhere(*cases: Any, fast_on_jax: int = 1, among: tuple[str, ...] = FRAMEWORKS) -> list[Any]:
    """All (framework, case) pairs. JAX takes seconds per case: `make test-all` runs the first few, the others are slow."""

    def param(framework: str, n: int) -> Any:
        marks = [pytest.mark.slow if n >= fast_on_jax else pytest.mark.long] if framework == "jax" else []
        name = recipe_id(cases[n]) if isinstance(cases[n], ScalingRecipe) else "-".join(map(str, np.atleast_1d(cases[n])))
        return pytest.param(framework, cases[n], marks=marks, id=f"{framework}-{name}")

    return [param(framework, n) for framework in among for n in range(len(cases))]


def host(x: Any) -> np.ndarray:
    """An FP32 or integer array of any framework, in FP64."""
    return np.asarray(frameworks.ops_of(x).to_numpy(x), np.float64)


def numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Integers from -7 to 7."""
    return np.random.default_rng(seed).integers(-7, 8, shape).astype(np.float32)


def steps(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Numbers between -7 and 7, one 7 in each group of 16: a cast under WHOLE writes the nearest integers."""
    x = np.random.default_rng(seed).uniform(-7, 7, shape).astype(np.float32)
    x[..., ::16] = 7
    return x


def bound(a: np.ndarray, b: np.ndarray, rest: Any = 0.0) -> np.ndarray:
    """g (|a| @ |b| + |rest|), g = (K + 1) u / (1 - (K + 1) u), u = 2^-24: any order of K products and one more term.

    Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1.
    """
    n = (a.shape[-1] + 1) * 2.0**-24
    return n / (1 - n) * (np.abs(a) @ np.abs(b) + np.abs(rest))


def within(found: Any, a: np.ndarray, b: np.ndarray, rest: Any = 0.0) -> bool:
    """Whether `found` is within the bound of `a @ b + rest`, in FP64."""
    a, b, rest = (np.asarray(x, np.float64) for x in (a, b, rest))
    expected = a @ b + rest
    ours = found if isinstance(found, np.ndarray) else host(found)
    return ours.shape == expected.shape and bool((np.abs(ours - expected) <= bound(a, b, rest)).all())


def values(x: np.ndarray, recipe: ScalingRecipe) -> np.ndarray:
    """The decoded values of a cast of `x`, by the oracle."""
    return oracle.dequantize(oracle.cast(x, recipe), recipe)


def numpys(dtype: str) -> Any:
    """NumPy's dtype of that name. Skips the test if there is none."""
    return pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of `x` rounded to a floating dtype."""
    found = x.astype(numpys(dtype))
    return found.view(f"u{found.itemsize}")


def narrow(place: Place, x: np.ndarray, dtype: str) -> Any:
    """An array at a place, in a floating dtype that represents the numbers exactly."""
    words = rounded(x, dtype)
    if place.framework == "numpy":
        return words.view(numpys(dtype))
    return place.array(words, dtype) if dtype == "bfloat16" else place.array(words.view(dtype))


def pulled(place: Place, function: Callable[..., Any], arrays: list[Any], upstream: np.ndarray) -> tuple[Any, list[Any]]:
    """The value of a function, and the gradients of its arrays for the upstream gradient `upstream`."""
    if place.framework == "torch":
        import torch

        leaves = [x.clone().requires_grad_() for x in arrays]
        y = function(*leaves)
        return y.detach(), list(torch.autograd.grad(y, leaves, place.array(upstream).to(y.dtype)))
    if place.framework == "jax":
        import jax

        y, back = jax.vjp(function, *arrays)
        return y, list(back(place.array(upstream).astype(y.dtype)))
    import mlx.core as mx

    given = place.array(upstream)
    (y,), gradients = mx.vjp(lambda *xs: [function(*xs)], arrays, [given.astype(function(*arrays).dtype)])
    return y, list(gradients)


# -- cast_pair -------------------------------------------------------------------------------------------------------

#: Two levels, tiles, zero-points, groups of three bytes, one scale for all.
PAIRED = [
    NVFP4,
    Float8BlockScaling(block_m=8, block_k=8),
    INT4Scaling(group_size=8, signed=False, symmetric=False),
    MXFP6BlockScaling(),
    Float8CurrentScaling("E5M2"),
]
#: Partial blocks and padding codes along both axes.
UNEVEN = (11, 21)


@cache
def judged(shape: tuple[int, ...], recipe: ScalingRecipe, rounding: str, seed: int | None) -> list[oracle.Written]:
    """The oracle's casts of `wide(shape)` and of its transpose, along the last axis."""
    x = wide(shape, seed=1, exponents=3)
    turned = np.ascontiguousarray(x.swapaxes(-1, -2))
    return [oracle.cast(each, recipe, rounding=rounding, seed=seed) for each in (x, turned)]


def assert_pair(framework: str, recipe: ScalingRecipe, shape: tuple[int, ...], **options: Any) -> None:
    """A pair equals the oracle's casts along both axes, and `cast` along each, byte for byte."""
    place, x = here(framework), wide(shape, seed=1, exponents=3)
    along, across = breccia.cast_pair(place.array(x), recipe, **options)
    assert (along.axis, across.axis, along.shape, across.shape) == (-1, -2, shape, shape)
    first, second = judged(shape, recipe, options.get("rounding", "nearest"), options.get("seed"))
    expect_written(place, along, first)
    expect_written(place, across.mT, second)
    for st, axis in ((along, -1), (across, -2)):
        assert st.framework == framework and bytes_equal(st, breccia.cast(x, recipe, axis=axis, **options))


@pytest.mark.parametrize(("framework", "recipe"), everywhere(*PAIRED))
def test_cast_pair_matches_the_oracle_along_both_axes(framework: str, recipe: ScalingRecipe) -> None:
    assert_pair(framework, recipe, UNEVEN)


@pytest.mark.parametrize(("framework", "recipe"), everywhere(*PAIRED[:3], fast_on_jax=0))
def test_a_stochastic_cast_pair_counts_elements_in_the_order_of_each_result(framework: str, recipe: ScalingRecipe) -> None:
    assert_pair(framework, recipe, UNEVEN, rounding="stochastic", seed=2**63 + 5)


@pytest.mark.parametrize(
    ("framework", "recipe"), everywhere(DelayedScaling(), NVFP4, Float8BlockScaling(block_m=8, block_k=8), fast_on_jax=0)
)
def test_one_scale_for_both_of_a_pair_is_used_as_the_oracle_uses_it(framework: str, recipe: ScalingRecipe) -> None:
    """A scale for the tensor, a global scale, and scales of tiles: those of another tensor, one of them no scale."""
    place, x = here(framework), wide(UNEVEN, seed=1, exponents=3)
    scale: Any = 0.037
    if recipe.layout.block(-1) == (8, 8):
        scale = np.array(breccia.cast(3 * x, recipe).scale)
        scale[1, 2] = -1.0
    pair = breccia.cast_pair(place.array(x), recipe, scale=scale if isinstance(scale, float) else place.array(scale))
    for st, given, turned in zip(pair, (x, x.T), (scale, scale if isinstance(scale, float) else scale.T), strict=True):
        codes = float(np.float32(turned)) if isinstance(turned, float) else np.ascontiguousarray(turned).view(np.uint32)
        expect_written(place, st if st.axis == -1 else st.mT, oracle.cast(np.ascontiguousarray(given), recipe, scale=codes))


@pytest.mark.parametrize("framework", [*EAGER, pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", PAIRED, ids=recipe_id)
def test_cast_pair_of_three_axes_swaps_the_last_two(framework: str, recipe: ScalingRecipe) -> None:
    assert_pair(framework, recipe, (2, 5, 12))


@pytest.mark.parametrize("framework", EAGER)
def test_cast_pair_of_any_dtype_or_an_empty_array_equals_both_casts(framework: str) -> None:
    place, x = here(framework), wide((6, 40), seed=2, exponents=2)
    for array in (narrow(place, x.astype(np.float16), "float16"), place.array(x[:0]), place.array(x[:, :0]), place.array(x).T):
        for st, axis in zip(breccia.cast_pair(array, MXFP8), (-1, -2), strict=True):
            assert bytes_equal(st, breccia.cast(array, MXFP8, axis=axis))


def test_cast_pair_refuses_what_cast_refuses(place: Place) -> None:
    bad = wide((4, 32), seed=3)
    bad[1, 5] = np.nan
    with pytest.raises(breccia.NonFiniteError, match=r"^cast\(nonfinite='raise'\): x holds NaN or Inf\. "):
        breccia.cast_pair(place.array(bad), MXFP8, nonfinite="raise")
    with pytest.raises(
        LayoutError, match=r"^the contraction axis is one of the last two \(-1 or -2\); got axis=-2 for 1 axes\. "
    ):
        breccia.cast_pair(place.array(bad[0]), Float8CurrentScaling())
    with pytest.raises(breccia.OptionError, match=r"^rounding='stochastic' needs a seed; got seed=None\.$"):
        breccia.cast_pair(place.array(bad), MXFP8, rounding="stochastic")
    with pytest.raises(UnsupportedError, match=r"^x is a ScaledTensor already: breccia\.requantize\(x, recipe\) converts it"):
        breccia.cast_pair(breccia.cast(place.array(bad), MXFP8), MXFP8)


@pytest.mark.parametrize("framework", EAGER)
def test_cast_pair_of_a_transpose_is_the_swapped_pair(framework: str) -> None:
    """With square blocks, so that both results have the same blocks."""
    place = here(framework)
    x = wide((16, 16), seed=4, exponents=2)
    along, across = breccia.cast_pair(place.array(x), Float8BlockScaling(block_m=8, block_k=8))
    turned = breccia.cast_pair(place.array(x.T), Float8BlockScaling(block_m=8, block_k=8))
    assert bytes_equal(turned[0].mT, across) and bytes_equal(turned[1].mT, along)


# -- matmul with a bias ----------------------------------------------------------------------------------------------


def test_a_bias_is_one_more_term_of_the_fp32_sum(place: Place) -> None:
    """Scaled and plain operands with fractional values, against FP64 products of the values that the oracle decodes."""
    x, w, bias = wide(X, seed=5, exponents=2), wide(W, seed=6, exponents=2), wide(B, seed=7, exponents=4)
    st, weight = breccia.cast(place.array(x), MXFP8), breccia.cast(place.array(w), NVFP4)
    p, q = values(x, MXFP8), values(w, NVFP4).T
    added = place.array(bias)
    assert within(breccia.matmul(st, weight.mT, bias=added), p, q, bias)
    assert within(breccia.matmul(place.array(x), weight.mT, bias=added), x, q, bias)
    assert within(breccia.matmul(st, place.array(w.T), bias=added), p, w.T, bias)
    assert within(breccia.matmul(place.array(x), place.array(w.T), bias=added), x, w.T, bias)
    with_it, without = (host(breccia.matmul(st, weight.mT, bias=b)) for b in (added, None))
    assert not within(with_it, p, q) and not within(without, p, q, bias), "a bias that is left out, or comes unasked, is seen"


#: (of the result, of the bias)
DTYPES = (
    ("float16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float32", "float16"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
)


@pytest.mark.parametrize(("framework", "dtypes"), everywhere(*DTYPES, fast_on_jax=2))
def test_the_sum_with_a_bias_is_rounded_once(framework: str, dtypes: tuple[str, str]) -> None:
    """Products below 2^16, and eighths of the bias: the FP32 sum is exact, so only the rounding to the dtype is left."""
    place, (out_dtype, bias_dtype), _ = here(framework), dtypes, [*map(numpys, dtypes)]
    x, w = steps(X, seed=8), steps(W, seed=9)
    bias = np.array([0.125, -0.875, 1.5, 0.0, -13.0, 0.625], np.float32)  # all are FP16 and BF16 numbers
    st, weight = breccia.cast(place.array(x), WHOLE), breccia.cast(place.array(w), WHOLE)
    for a, rows in ((st, np.rint(x)), (place.array(25 * np.rint(x)), 25 * np.rint(x))):
        product = rows @ np.rint(w).T
        y = breccia.matmul(a, weight.mT, out_dtype, bias=narrow(place, bias, bias_dtype))
        assert frameworks.dtype_name(y) == out_dtype
        assert np.array_equal(place.words(y), rounded(product + bias, out_dtype))
    twice = rounded(product.astype(numpys(out_dtype)).astype(np.float32) + bias, out_dtype)
    seen = (twice != rounded(product + bias, out_dtype)).any()
    assert seen == (out_dtype != "float32"), "two roundings would be seen"


def test_a_bias_is_added_to_every_matrix_of_a_batch(place: Place) -> None:
    x, w, bias = numbers((2, 3, 4, 32), seed=10), numbers((3, 32, 6), seed=11), numbers(B, seed=12)
    y = breccia.matmul(place.array(x), place.array(w), bias=place.array(bias))
    assert np.array_equal(host(y), x @ w + bias)
    stack = steps((3, 6, 32), seed=13)
    y = breccia.matmul(place.array(x), breccia.cast(place.array(stack), WHOLE).mT, bias=place.array(bias))
    assert np.array_equal(host(y), x @ np.rint(stack).swapaxes(-1, -2) + bias)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("out_dtype", ["float32", "float16"])
def test_a_product_with_a_bias_is_written_into_out(framework: str, out_dtype: str) -> None:
    place, x, w, bias = here(framework), numbers(X), steps(W, seed=1), numbers(B, seed=2)
    weight = breccia.cast(place.array(w), WHOLE)
    out = narrow(place, np.zeros((4, 6)), out_dtype)
    assert breccia.matmul(place.array(x), weight.mT, out_dtype, bias=place.array(bias), out=out) is out
    assert np.array_equal(place.words(out), rounded(x @ np.rint(w).T + bias, out_dtype))


def test_kernel_selection_considers_the_bias_and_prefer_names_a_kernel(place: Place) -> None:
    x, w, bias = numbers(X), steps(W, seed=1), numbers(B, seed=2)
    weight = breccia.cast(place.array(w), WHOLE)
    for prefer in ("reference.matmul", "composite.matmul"):
        y = breccia.matmul(place.array(x), weight.mT, bias=place.array(bias), prefer=prefer)
        assert np.array_equal(host(y), x @ np.rint(w).T + bias)
        found = breccia.explain("matmul", place.array(x), weight.mT, bias=place.array(bias), prefer=prefer)
        assert found.winner is not None and found.winner.name == prefer


def test_a_bias_that_does_not_fit_is_refused_by_name(place: Place) -> None:
    x, w, array = numbers(X), breccia.cast(place.array(steps(W)), WHOLE), place.array
    recipe = WHOLE
    for verb in (
        lambda bias: breccia.matmul(array(x), w.mT, bias=bias),
        lambda bias: breccia.cast_matmul(array(steps(X)), recipe, w.mT, bias=bias),
    ):
        for shape in ((4,), (1, 6), ()):
            with pytest.raises(ShapeError) as e:
                verb(array(np.zeros(shape, np.float32)))
            said = f"matmul: bias has one number for each column of the product, shape (6,); got {shape}."
            assert str(e.value) == said and e.value.found == {"expected": (6,), "found": shape}
        with pytest.raises(UnsupportedError) as refused:
            verb(array(np.zeros(B, np.int32)))
        assert str(refused.value) == (
            "matmul takes ScaledTensors and float32, float16, bfloat16 arrays; bias is int32. Convert it first: "
            "x.astype('float32') (torch: x.float())."
        )
        with pytest.raises(UnsupportedError, match=r"^bias must be an array of an installed framework .*; got list\. "):
            verb([0.0] * 6)
        other = "torch" if place.framework == "numpy" else "numpy"
        with pytest.raises(UnsupportedError, match=rf"a {place.framework} array and bias a {other} array; move both to one"):
            verb(here(other).array(np.zeros(B, np.float32)))


def test_a_bias_that_is_a_scaled_tensor_is_refused(place: Place) -> None:
    x, w = place.array(numbers(X)), breccia.cast(place.array(steps(W)), WHOLE)
    bias = breccia.cast(place.array(np.ones(B, np.float32)), Float8CurrentScaling())
    for verb in (lambda: breccia.matmul(x, w.mT, bias=bias), lambda: breccia.cast_matmul(x, WHOLE, w.mT, bias=bias)):
        with pytest.raises(UnsupportedError, match="bias"):
            verb()


def test_a_bias_on_another_device_is_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    x, w = torch.ones(X), breccia.cast(torch.from_numpy(steps(W)), WHOLE)
    with pytest.raises(UnsupportedError, match=r"^a is on cpu and bias on meta; move both to one device\. Nothing is copied"):
        breccia.matmul(x, w.mT, bias=torch.ones(B, device="meta"))
    with pytest.raises(UnsupportedError, match=r"^x is on cpu and bias on meta; move both to one device\. Nothing is copied"):
        breccia.cast_matmul(x, WHOLE, w.mT, bias=torch.ones(B, device="meta"))


# -- cast_matmul -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("framework", "dtype"), everywhere("float16", "float32", "bfloat16"))
def test_cast_matmul_equals_matmul_of_the_cast(framework: str, dtype: str) -> None:
    """Bit for bit, with and without a bias, in every dtype. Decoded values are integers, so sums are exact."""
    place, _ = here(framework), numpys(dtype)
    x, w, bias = steps(X, seed=14), steps(W, seed=15), numbers(B, seed=16)
    weight, array = breccia.cast(place.array(w), WHOLE).mT, place.array
    assert (np.rint(x) != x).any(), "the cast rounds"
    for added in (None, bias):
        given = None if added is None else array(added)
        y = breccia.cast_matmul(array(x), WHOLE, weight, dtype, bias=given)
        same = breccia.matmul(breccia.cast(array(x), WHOLE), weight, dtype, bias=given)
        assert np.array_equal(place.words(y), place.words(same))
        assert np.array_equal(place.words(y), rounded(np.rint(x) @ np.rint(w).T + (0 if added is None else added), dtype))
    plain = array(np.ascontiguousarray(numbers(W, seed=17).T))
    assert np.array_equal(host(breccia.cast_matmul(array(x), WHOLE, plain)), np.rint(x) @ host(plain))


@pytest.mark.parametrize(
    ("framework", "recipe"), everywhere(NVFP4, MXFP8, Float8BlockScaling(block_k=16), NF4Scaling(), fast_on_jax=0)
)
def test_cast_matmul_stays_within_the_error_bound(framework: str, recipe: ScalingRecipe) -> None:
    place = here(framework)
    x, w, bias = wide(X, seed=18, exponents=2), wide(W, seed=19, exponents=2), wide(B, seed=20, exponents=4)
    weight = breccia.cast(place.array(w), MXFP8).mT
    y = breccia.cast_matmul(place.array(x), recipe, weight, bias=place.array(bias))
    assert within(y, values(x, recipe), values(w, MXFP8).T, bias)
    assert not within(y, x, values(w, MXFP8).T, bias), "x itself is not what is multiplied"


def test_the_gradients_of_cast_matmul_are_straight_through(tape: Place) -> None:
    """x: upstream @ decoded weight, straight through the cast. bias: the sum. A plain b: decoded x.T @ upstream."""
    x, w, bias, upstream = steps(X, seed=21), steps(W, seed=22), numbers(B, seed=23), numbers((4, 6), seed=24)
    array = tape.array
    weight = breccia.cast(array(w), WHOLE)
    y, (dx, dbias) = pulled(
        tape, lambda x, bias: breccia.cast_matmul(x, WHOLE, weight.mT, bias=bias), [array(x), array(bias)], upstream
    )
    assert np.array_equal(host(y), np.rint(x) @ np.rint(w).T + bias)
    assert np.array_equal(host(dx), upstream @ np.rint(w)) and np.array_equal(host(dbias), upstream.sum(0))
    b = numbers((32, 6), seed=25)
    y, (dx, db) = pulled(tape, lambda x, b: breccia.cast_matmul(x, WHOLE, b), [array(x), array(b)], upstream)
    assert np.array_equal(host(y), np.rint(x) @ b)
    assert np.array_equal(host(dx), upstream @ b.T) and np.array_equal(host(db), np.rint(x).T @ upstream)


def test_the_gradient_of_x_stays_within_the_error_bound_for_any_values(tape: Place) -> None:
    x, w, upstream = wide(X, seed=26, exponents=2), wide(W, seed=27, exponents=2), numbers((4, 6), seed=28)
    weight = breccia.cast(tape.array(w), NVFP4)
    _, (dx,) = pulled(tape, lambda x: breccia.cast_matmul(x, MXFP8, weight.mT), [tape.array(x)], upstream)
    assert within(dx, upstream, values(w, NVFP4))


@pytest.mark.parametrize(("framework", "dtype"), everywhere("bfloat16", "float16", among=DIFFERENTIABLE))
def test_gradients_have_the_dtypes_of_their_operands(framework: str, dtype: str) -> None:
    tape = here(framework)
    x, w, bias, upstream = steps(X, seed=29), steps(W, seed=30), numbers(B, seed=31), numbers((4, 6), seed=32)
    x = np.rint(x)
    weight = breccia.cast(tape.array(w), WHOLE)
    arrays = [narrow(tape, x, dtype), narrow(tape, bias, dtype)]
    for verb in (
        lambda x, bias: breccia.matmul(x, weight.mT, dtype, bias=bias),
        lambda x, bias: breccia.cast_matmul(x, WHOLE, weight.mT, dtype, bias=bias),
    ):
        y, (dx, dbias) = pulled(tape, verb, arrays, upstream)
        assert np.array_equal(tape.words(y), rounded(x @ np.rint(w).T + bias, dtype))
        assert np.array_equal(tape.words(dx), rounded(upstream @ np.rint(w), dtype))
        assert np.array_equal(tape.words(dbias), rounded(upstream.sum(0), dtype))


def test_the_gradients_of_a_matmul_with_a_bias_sum_over_what_is_broadcast(tape: Place) -> None:
    x, b, bias, upstream = numbers((2, 3, 4, 32)), numbers((3, 32, 6), 1), numbers(B, 2), numbers((2, 3, 4, 6), 3)
    arrays = [tape.array(a) for a in (x, b, bias)]
    y, (dx, db, dbias) = pulled(tape, lambda x, b, bias: breccia.matmul(x, b, bias=bias), arrays, upstream)
    assert np.array_equal(host(y), x @ b + bias)
    assert np.array_equal(host(dx), upstream @ b.swapaxes(-1, -2))
    assert np.array_equal(host(db), (x.swapaxes(-1, -2) @ upstream).sum(0))
    assert np.array_equal(host(dbias), upstream.sum((0, 1, 2)))


@pytest.mark.long
@pytest.mark.parametrize("verb", ["matmul", "cast_matmul"])
def test_tangents_of_products_with_a_bias(tape: Place, verb: str) -> None:
    """Forward mode: d(a @ b + bias) = da @ b + a @ db + dbias, straight through the cast."""
    x, b, bias = steps(X, seed=33), numbers((32, 6), 34), numbers(B, 35)
    moved = [numbers(a.shape, 36 + n) for n, a in enumerate((x, b, bias))]

    def product(x: Any, b: Any, bias: Any) -> Any:
        return breccia.matmul(x, b, bias=bias) if verb == "matmul" else breccia.cast_matmul(x, WHOLE, b, bias=bias)

    x = np.rint(x) if verb == "matmul" else x
    primals, tangents = ([tape.array(a) for a in each] for each in ((x, b, bias), moved))
    if tape.framework == "torch":
        from torch.func import jvp

        y, tangent = jvp(product, tuple(primals), tuple(tangents))
    elif tape.framework == "jax":
        import jax

        y, tangent = jax.jvp(product, tuple(primals), tuple(tangents))
    else:
        import mlx.core as mx

        (y,), (tangent,) = mx.jvp(lambda *xs: [product(*xs)], primals, tangents)
    assert np.array_equal(host(y), np.rint(x) @ b + bias)
    assert np.array_equal(host(tangent), moved[0] @ b + np.rint(x) @ moved[1] + moved[2])


@pytest.mark.long
def test_compiled_products_with_a_bias_have_the_gradients_of_eager_ones() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("breccia_torch")
    x, w, bias, upstream = (torch.from_numpy(a) for a in (steps(X), steps(W, 1), numbers(B, 2), numbers((4, 6), 3)))
    b = torch.from_numpy(numbers((32, 6), 4))
    weight = breccia.cast(w, WHOLE)

    def scaled(x: Any, bias: Any) -> Any:
        return breccia.matmul(x, weight.mT, bias=bias) + breccia.cast_matmul(x, WHOLE, weight.mT, bias=bias)

    def plain(x: Any, b: Any, bias: Any) -> Any:
        return breccia.matmul(x, b, bias=bias) + breccia.cast_matmul(x, WHOLE, b, bias=bias)

    for function, arrays in ((scaled, (x.round(), bias)), (plain, (x.round(), b, bias))):
        found = []
        for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            leaves = [a.clone().requires_grad_() for a in arrays]
            y = call(*leaves)
            found.append([y.detach(), *torch.autograd.grad(y, leaves, upstream)])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
        right = w.round().mT if function is scaled else b
        assert torch.equal(found[1][0], 2 * (x.round() @ right + bias))
        assert torch.equal(found[1][1], 2 * upstream @ right.mT) and torch.equal(found[1][-1], 2 * upstream.sum(0))


# -- grouped_matmul --------------------------------------------------------------------------------------------------

#: Where the rows of four experts end, of nine: usual; with empty ones; all of one; of none; and rows that belong to none.
ENDS = {
    "every expert has rows": (2, 5, 6, 9),
    "some have none": (0, 4, 4, 9),
    "one has all": (0, 9, 9, 9),
    "the last has all": (0, 0, 0, 9),
    "nobody has any": (0, 0, 0, 0),
    "rows are left over": (1, 1, 5, 6),
}
#: Rows, experts, K and N.
M, E, K, N = 9, 4, 32, 6


def experts(a: np.ndarray, b: np.ndarray, ends: Any) -> np.ndarray:
    """Each group times its own matrix, in FP64; zeros beyond the last."""
    found, start = np.zeros((a.shape[0], b.shape[-1])), 0
    for matrix, end in zip(np.asarray(b, np.float64), ends, strict=True):
        found[start:end] = np.asarray(a, np.float64)[start:end] @ matrix
        start = end
    return found


def ends_of(place: Place, ends: Any, dtype: Any = np.int32) -> Any:
    return place.array(np.array(ends, dtype))


@pytest.mark.parametrize("which", ENDS)
def test_grouped_matmul_multiplies_each_group_by_its_matrix(place: Place, which: str) -> None:
    """Scaled and plain operands, each group against the FP64 product of the values that the oracle decodes."""
    ends = ENDS[which]
    a, w = wide((M, K), seed=40, exponents=2), wide((E, N, K), seed=41, exponents=2)
    st, weight = breccia.cast(place.array(a), MXFP8), breccia.cast(place.array(w), MXFP8)
    p, q = values(a, MXFP8), values(w, MXFP8).swapaxes(-1, -2)
    plain = np.ascontiguousarray(w.swapaxes(-1, -2))
    offsets = ends_of(place, ends)
    for left, right, x, y in (
        (place.array(a), weight.mT, a, q),
        (st, weight.mT, p, q),
        (st, place.array(plain), p, plain),
        (place.array(a), place.array(plain), a, plain),
    ):
        found = host(breccia.grouped_matmul(left, right, offsets))
        allowed = experts(np.abs(x), np.abs(y), ends) * (K * 2.0**-24 / (1 - K * 2.0**-24))
        assert found.shape == (M, N) and (np.abs(found - experts(x, y, ends)) <= allowed).all(), "zero beyond the last group"


@pytest.mark.parametrize(("framework", "out_dtype"), everywhere("float16", "bfloat16", "float32"))
def test_grouped_matmul_is_rounded_once_to_any_dtype(framework: str, out_dtype: str) -> None:
    place, _ = here(framework), numpys(out_dtype)
    a, w = steps((M, K), seed=42), steps((E, N, K), seed=43)
    st, weight = breccia.cast(place.array(a), WHOLE), breccia.cast(place.array(w), WHOLE)
    expected = experts(np.rint(a), np.rint(w).swapaxes(-1, -2), (2, 2, 7, 8))
    found = breccia.grouped_matmul(st, weight.mT, ends_of(place, (2, 2, 7, 8)), out_dtype)
    assert frameworks.dtype_name(found) == out_dtype
    assert np.array_equal(place.words(found), rounded(expected.astype(np.float32), out_dtype))


@pytest.mark.parametrize(
    ("shape", "ends"),
    [((5, 16, 1, 3), (5,)), ((5, 16, 1, 3), (2,)), ((0, 16, 2, 3), (0, 0)), ((4, 16, 0, 3), ()), ((4, 16, 2, 0), (1, 4))],
    ids=["one expert", "one expert of some rows", "no rows", "no experts", "no columns"],
)
def test_grouped_matmul_works_with_few_experts_and_no_rows(place: Place, shape: tuple[int, ...], ends: tuple[int, ...]) -> None:
    m, k, e, n = shape
    a, b = numbers((m, k)), numbers((e, k, n), seed=1)
    found = breccia.grouped_matmul(place.array(a), place.array(b), ends_of(place, ends))
    assert np.array_equal(host(found), experts(a, b, ends)) and host(found).shape == (m, n)


def test_a_nonfinite_expert_affects_only_its_own_rows(place: Place) -> None:
    """Nonfinite rows affect only themselves; rows of no group become zeros whatever their values."""
    a, b = numbers((M, K), seed=44), numbers((E, K, N), seed=45)
    ends = (2, 4, 6, 8)
    expected = experts(a, b, ends)
    b[1], a[5], a[8] = np.nan, np.inf, np.nan
    found = host(breccia.grouped_matmul(place.array(a), place.array(b), ends_of(place, ends)))
    lost = [2, 3, 5]
    kept = [row for row in range(M) if row not in lost]
    assert not np.isfinite(found[lost]).any() and np.array_equal(found[kept], expected[kept])
    assert not found[8].any()


def test_64_bit_offsets_are_accepted() -> None:
    a, b = numbers((M, K), seed=46), numbers((E, K, N), seed=47)
    for place in (place for place in map(Place, EAGER) if not place.absence):
        found = breccia.grouped_matmul(place.array(a), place.array(b), ends_of(place, (2, 2, 7, 8), np.int64))
        assert np.array_equal(host(found), experts(a, b, (2, 2, 7, 8)))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_grouped_matmul_is_written_into_out(framework: str) -> None:
    place, a, b = here(framework), numbers((M, K), seed=48), numbers((E, K, N), seed=49)
    out = narrow(place, np.ones((M, N)), "float16")
    assert breccia.grouped_matmul(place.array(a), place.array(b), ends_of(place, (1, 1, 5, 6)), "float16", out=out) is out
    assert np.array_equal(place.words(out), rounded(experts(a, b, (1, 1, 5, 6)).astype(np.float32), "float16"))


def test_operands_that_do_not_fit_grouped_matmul_are_refused_by_name(place: Place) -> None:
    a, b = place.array(numbers((M, K))), place.array(numbers((E, K, N)))
    ends = ends_of(place, (2, 2, 7, 8))

    def refused(kind: type[Exception], *operands: Any) -> str:
        with pytest.raises(kind) as e:
            breccia.grouped_matmul(*operands)
        return str(e.value)

    for left, right, offsets, shapes in (
        (a[None], b, ends, f"(1, {M}, {K}), ({E}, {K}, {N}) and ({E},)"),
        (a, b[0], ends, f"({M}, {K}), ({K}, {N}) and ({E},)"),
        (a, b, ends[:3], f"({M}, {K}), ({E}, {K}, {N}) and (3,)"),
        (a, b, ends[None], f"({M}, {K}), ({E}, {K}, {N}) and (1, {E})"),
        (a[:, :16], b, ends, f"({M}, 16), ({E}, {K}, {N}) and ({E},)"),
    ):
        assert refused(ShapeError, left, right, offsets) == (
            "grouped_matmul takes a of shape (M, K), b of shape (E, K, N) and offsets of shape (E,); got shapes "
            f"{shapes}. Weights stored (E, N, K) are passed as w.mT."
        )
    for dtype in (np.float32, np.int16, np.uint8):
        assert refused(UnsupportedError, a, b, ends_of(place, (2, 2, 7, 8), dtype)) == (
            f"grouped_matmul: offsets are int32, where the rows of each group end; got {np.dtype(dtype).name}."
        )
    assert refused(UnsupportedError, a, b, [2, 2, 7, 8]).startswith("offsets must be an array of an installed framework (")
    whole_numbers = place.array(numbers((M, K)).astype(np.int32))
    assert "float32, float16, bfloat16 arrays; a is int32. Convert it first" in refused(
        UnsupportedError, whole_numbers, b, ends
    )
    other = "torch" if place.framework == "numpy" else "numpy"
    said = refused(UnsupportedError, a, b, ends_of(here(other), (2, 2, 7, 8)))
    assert said.startswith(f"a is a {place.framework} array and offsets a {other} array; move both to one framework")


@pytest.mark.parametrize("framework", EAGER)
def test_blocks_taller_than_a_row_cannot_be_cut_into_groups(framework: str) -> None:
    place = here(framework)
    tall = breccia.cast(place.array(numbers((M, K))), Float8BlockScaling(block_m=3, block_k=16))
    b, ends = place.array(numbers((E, K, N))), ends_of(place, (2, 2, 7, 8))
    with pytest.raises(LayoutError) as e:
        breccia.grouped_matmul(tall, b, ends)
    assert str(e.value) == (
        f"grouped_matmul: groups may begin at any row of a, so its blocks are one row high; {tall.layout} has blocks of 3. "
        "Cast a under a recipe of 1 x k blocks."
    )
    one_scale = breccia.cast(place.array(numbers((M, K))), Float8CurrentScaling())
    assert breccia.grouped_matmul(one_scale, b, ends).shape == (M, N), "one scale for all rows is every group's"


@pytest.mark.long
@pytest.mark.parametrize("ends", [(2, 2, 7, 9), (1, 1, 5, 6)], ids=str)
def test_the_gradients_of_grouped_matmul_are_per_group(tape: Place, ends: tuple[int, ...]) -> None:
    """a: each row uses its group's matrix. b: each matrix uses the rows of its group. Rows of no group have zero gradients."""
    a, w, upstream = numbers((M, K), seed=50), steps((E, N, K), seed=51), numbers((M, N), seed=52)
    q = np.rint(w).swapaxes(-1, -2)
    offsets, weight = ends_of(tape, ends), breccia.cast(tape.array(w), WHOLE)
    y, (da,) = pulled(tape, lambda a: breccia.grouped_matmul(a, weight.mT, offsets), [tape.array(a)], upstream)
    assert np.array_equal(host(y), experts(a, q, ends))
    assert np.array_equal(host(da), experts(upstream, q.swapaxes(-1, -2), ends))
    arrays = [tape.array(a), tape.array(np.ascontiguousarray(q))]
    y, (da, db) = pulled(tape, lambda a, b: breccia.grouped_matmul(a, b, offsets), arrays, upstream)
    bounds = list(zip((0, *ends[:-1]), ends, strict=True))
    each = np.stack([a[start:end].T @ upstream[start:end] for start, end in bounds])
    assert np.array_equal(host(y), experts(a, q, ends))
    assert np.array_equal(host(da), experts(upstream, q.swapaxes(-1, -2), ends)) and np.array_equal(host(db), each)
    st = breccia.cast(tape.array(steps((M, K), seed=53)), WHOLE)
    _, (db,) = pulled(tape, lambda b: breccia.grouped_matmul(st, b, offsets), arrays[1:], upstream)
    rows = np.rint(steps((M, K), seed=53))
    assert np.array_equal(host(db), np.stack([rows[start:end].T @ upstream[start:end] for start, end in bounds]))


def test_an_infinite_gradient_stays_within_its_group(tape: Place) -> None:
    a, b, upstream = numbers((M, K), seed=54), numbers((E, K, N), seed=55), numbers((M, N), seed=56)
    ends = (2, 4, 6, 8)
    offsets = ends_of(tape, ends)
    expected = np.stack([a[s:e].T @ upstream[s:e] for s, e in zip((0, *ends[:-1]), ends, strict=True)])
    upstream[2], upstream[8] = np.inf, np.nan
    arrays = [tape.array(a), tape.array(b)]
    _, (da, db) = pulled(tape, lambda a, b: breccia.grouped_matmul(a, b, offsets), arrays, upstream)
    assert not np.isfinite(host(da)[2]).all() and np.isfinite(np.delete(host(da), 2, axis=0)).all()
    assert np.array_equal(host(db)[[0, 2, 3]], expected[[0, 2, 3]])


@pytest.mark.long
def test_jax_traces_offsets_and_compiles_once() -> None:
    place = here("jax")
    import jax

    a, w = numbers((M, K), seed=57), steps((E, N, K), seed=58)
    q, weight = np.rint(w).swapaxes(-1, -2), breccia.cast(place.array(w), WHOLE)
    traced = []

    def product(a: Any, weight: Any, offsets: Any) -> Any:
        traced.append(offsets)
        return breccia.grouped_matmul(a, weight.mT, offsets)

    fast = jax.jit(product)
    gradient = jax.jit(jax.grad(lambda a, offsets: product(a, weight, offsets).sum()))
    for ends in ENDS.values():
        assert np.array_equal(host(fast(place.array(a), weight, ends_of(place, ends))), experts(a, q, ends))
        found = gradient(place.array(a), ends_of(place, ends))
        assert np.array_equal(host(found), experts(np.ones((M, N)), q.swapaxes(-1, -2), ends))
    assert len(traced) == 2, "once each"


def test_mlx_compiles_products_by_group_for_offsets_of_any_value() -> None:
    place = here("mlx")
    import mlx.core as mx

    a, w = numbers((M, K), seed=59), steps((E, N, K), seed=60)
    q, weight = np.rint(w).swapaxes(-1, -2), breccia.cast(place.array(w), WHOLE)
    traced = []

    def product(a: Any, offsets: Any) -> Any:
        traced.append(offsets)
        return breccia.grouped_matmul(a, weight.mT, offsets)

    fast = mx.compile(product)
    gradient = mx.compile(mx.grad(lambda a, offsets: breccia.grouped_matmul(a, weight.mT, offsets).sum()))
    for ends in ENDS.values():
        assert np.array_equal(host(fast(place.array(a), ends_of(place, ends))), experts(a, q, ends))
        found = gradient(place.array(a), ends_of(place, ends))
        assert np.array_equal(host(found), experts(np.ones((M, N)), q.swapaxes(-1, -2), ends))
    assert len(traced) == 1


@pytest.mark.long
def test_torch_compiles_products_by_group_and_their_gradients() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("breccia_torch")
    a, w, upstream = (torch.from_numpy(x) for x in (numbers((M, K), 61), steps((E, N, K), 62), numbers((M, N), 63)))
    q = w.round().mT
    weight, rows = breccia.cast(w, WHOLE), breccia.cast(torch.from_numpy(steps((M, K), 64)), WHOLE)

    def product(a: Any, b: Any, offsets: Any) -> Any:
        return breccia.grouped_matmul(a, weight.mT, offsets) + breccia.grouped_matmul(rows, b, offsets)

    torch._dynamo.utils.counters.clear()
    fast = torch.compile(product, fullgraph=True, backend="aot_eager")
    for ends in ENDS.values():
        offsets = torch.tensor(ends, dtype=torch.int32)
        x, b = a.clone().requires_grad_(), q.clone().requires_grad_()
        y = fast(x, b, offsets)
        left = np.rint(steps((M, K), 64))
        assert np.array_equal(host(y), experts(a.numpy(), q.numpy(), ends) + experts(left, q.numpy(), ends))
        dx, db = torch.autograd.grad(y, (x, b), upstream)
        assert np.array_equal(host(dx), experts(upstream.numpy(), q.mT.numpy(), ends))
        parts = zip((0, *ends[:-1]), ends, strict=True)
        assert np.array_equal(host(db), np.stack([left[s:e].T @ upstream.numpy()[s:e] for s, e in parts]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "values of offsets are not compiled in"


# -- the bound is not vacuous ----------------------------------------------------------------------------------------


def test_accumulation_in_fp16_breaks_the_bound_that_fp32_keeps(place: Place) -> None:
    """One term of 2^12 and 4095 terms of 1, which an accumulator with 11 significant bits loses."""
    length = 4096
    a, b, bias = np.ones((4, length), np.float32), np.ones((length, 3), np.float32), np.full(3, 0.5, np.float32)
    a[:, 0] = 4096.0
    total = np.zeros((4, 3), np.float16)
    for k in range(length):
        total = (total + (a[:, k : k + 1] * b[k]).astype(np.float16)).astype(np.float16)
    assert within(breccia.matmul(place.array(a), place.array(b), bias=place.array(bias)), a, b, bias)
    assert not within((total + bias.astype(np.float16)).astype(np.float64), a, b, bias)
    grouped = breccia.grouped_matmul(place.array(a), place.array(np.stack([b, 2 * b])), ends_of(place, (1, 4)))
    assert within(host(grouped)[:1], a[:1], b) and within(host(grouped)[1:], a[1:], 2 * b)
    assert not within(total[:1].astype(np.float64), a[:1], b)


# -- torch: transforms, tensors saved for the backward pass, and torch's own checks ----------------------------------


def test_functorch_maps_and_differentiates_products_with_a_bias() -> None:
    torch = pytest.importorskip("torch")
    from torch.func import grad, jvp, vmap

    cube, w, bias, many = numbers((3, 4, 32), 70), steps(W, 71), numbers(B, 72), numbers((3, 6), 73)
    weight, q = breccia.cast(torch.from_numpy(w), WHOLE), np.rint(w)
    x, added, each = (torch.from_numpy(a) for a in (cube, bias, many))

    def product(x: Any, bias: Any) -> Any:
        return breccia.matmul(x, weight.mT, bias=bias)

    assert np.array_equal(host(vmap(product, (0, None))(x, added)), cube @ q.T + bias)
    assert np.array_equal(host(vmap(product)(x, each)), cube @ q.T + many[:, None])
    assert np.array_equal(host(vmap(product, (None, 0))(x[0], each)), cube[0] @ q.T + many[:, None])
    ones = np.ones((4, 6))
    dx, dbias = grad(lambda x, b: product(x, b).sum(), argnums=(0, 1))(x[0], added)
    assert np.array_equal(host(dx), ones @ q) and np.array_equal(host(dbias), ones.sum(0))
    per_example = vmap(grad(lambda x, b: (product(x, b) ** 2).sum() / 2, argnums=1), (0, 0))(x, each)
    assert np.array_equal(host(per_example), (cube @ q.T + many[:, None]).sum(1))
    moved = [torch.from_numpy(numbers(s, 74 + n)) for n, s in enumerate((X, B))]
    y, tangent = jvp(product, (x[0], added), tuple(moved))
    assert np.array_equal(host(y), cube[0] @ q.T + bias)
    assert np.array_equal(host(tangent), moved[0].numpy() @ q.T + moved[1].numpy())
    frozen = grad(lambda b: product(x[0], b).sum())(added)
    assert np.array_equal(host(frozen), ones.sum(0)), "the bias alone"


def backward_cases() -> dict[str, Callable[..., tuple[Any, Any, ScaledTensor]]]:
    """Op -> function that returns (differentiated input, result, scaled weight)."""
    import torch

    def made(name: str) -> tuple[Any, Any, ScaledTensor]:
        x = torch.from_numpy(steps(X, 80)).round().requires_grad_()
        bias = torch.from_numpy(numbers(B, 81)).requires_grad_()
        st = breccia.cast(torch.from_numpy(steps((2, *W) if name == "grouped_matmul" else W, 82)), WHOLE)
        if name == "matmul":
            return x, breccia.matmul(x, st.mT, bias=bias), st
        if name == "cast_matmul":
            return x, breccia.cast_matmul(x, WHOLE, st.mT, bias=bias), st
        return x, breccia.grouped_matmul(x, st.mT, torch.tensor([1, 4], dtype=torch.int32)), st

    return {name: lambda name=name: made(name) for name in ("matmul", "cast_matmul", "grouped_matmul")}


def weight_gradient(name: str, upstream: np.ndarray) -> np.ndarray:
    """The gradient of x in `backward_cases`."""
    if name != "grouped_matmul":
        return upstream @ np.rint(steps(W, 82))
    return experts(upstream, np.rint(steps((2, *W), 82)), (1, 4))


SAVING = ("matmul", "cast_matmul", "grouped_matmul")


@pytest.mark.parametrize("name", SAVING)
def test_no_decoded_weight_is_saved_for_the_backward_pass(name: str) -> None:
    """Hooks see every saved tensor: the operands, and no decoded weight in 32 or 16 bits."""
    torch = pytest.importorskip("torch")
    kept: list[Any] = []

    def pack(t: Any) -> Any:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        x, y, st = backward_cases()[name]()
    pointers = {t.data_ptr() for t in kept}
    assert {part.data_ptr() for part in components(st).values()} <= pointers, "codes and scales"
    elements = np.prod(st.shape)
    assert [t for t in kept if t.numel() >= elements and t.is_floating_point()] == [], "no decoded weight"
    assert sum(t.nbytes for t in kept) <= st.nbytes + x.nbytes + 4 * 6 + 4 * 2, "the weight, x, the bias, the offsets"
    assert y.grad_fn is not None


@pytest.mark.long
@pytest.mark.parametrize("name", SAVING)
def test_the_weight_is_freed_between_the_passes_if_a_hook_saves_a_copy(name: str) -> None:
    """Nothing else refers to the weight after the forward pass; gradients use the copy."""
    torch = pytest.importorskip("torch")
    from torch.multiprocessing.reductions import StorageWeakRef

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        x, y, st = backward_cases()[name]()
    seen = [StorageWeakRef(part.untyped_storage()) for part in components(st).values()]
    del st
    gc.collect()
    assert [ref for ref in seen if not ref.expired()] == []
    upstream = numbers((4, 6), 83)
    (found,) = torch.autograd.grad(y, x, torch.from_numpy(upstream))
    assert np.array_equal(host(found), weight_gradient(name, upstream))


@pytest.mark.parametrize("name", SAVING)
def test_codes_changed_before_the_backward_pass_raise(name: str) -> None:
    torch = pytest.importorskip("torch")
    for part in ("data", "scale"):
        _, y, st = backward_cases()[name]()
        getattr(st, part).zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    x, y, _ = backward_cases()[name]()
    (found,) = torch.autograd.grad(y, x, torch.ones(4, 6))
    assert np.array_equal(host(found), weight_gradient(name, np.ones((4, 6))))


def test_the_bias_of_a_frozen_layer_trains_without_saved_tensors() -> None:
    """If only the bias needs a gradient, neither input nor weight is saved. The sum is rounded once."""
    torch = pytest.importorskip("torch")
    place, x, w = here("torch"), np.abs(steps(X, 84)), np.abs(steps(W, 85))
    bias = np.array([0.125, -0.875, 1.5, 2.25, -13.0, 0.625], np.float32)
    weight, added = breccia.cast(place.array(w), WHOLE), place.array(bias).requires_grad_()
    product = np.rint(x) @ np.rint(w).T
    twice = rounded(product.astype(numpys("bfloat16")).astype(np.float32) + bias, "bfloat16")
    assert (twice != rounded(product + bias, "bfloat16")).any(), "two roundings would be seen"
    for dtype in ("float32", "bfloat16"):
        for verb in (
            lambda dtype=dtype: breccia.matmul(place.array(np.rint(x)), weight.mT, dtype, bias=added),
            lambda dtype=dtype: breccia.cast_matmul(place.array(x), WHOLE, weight.mT, dtype, bias=added),
        ):
            kept: list[Any] = []

            def pack(t: Any, kept: list[Any] = kept) -> Any:
                kept.append(t)
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = verb()
            assert np.array_equal(place.words(y.detach()), rounded(product + bias, dtype))
            assert [t for t in kept if t.numel() > len(bias)] == []
            (found,) = torch.autograd.grad(y.float(), added, torch.from_numpy(numbers((4, 6), 87)))
            assert np.array_equal(host(found), numbers((4, 6), 87).sum(0))


@pytest.mark.long
def test_the_torch_operators_of_products_pass_opcheck() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("breccia_torch")
    recipe = NF4Scaling(block_size=16)  # no float8, on which torch's own checks cannot compute
    text, x, b = recipe.to_json(), torch.from_numpy(wide(X, seed=88, exponents=1)), torch.from_numpy(numbers((32, 6), 89))
    bias, ops = torch.from_numpy(numbers(B, 90)).requires_grad_(), torch.ops.breccia
    torch.library.opcheck(ops.cast_pair.default, (x, text, "stochastic", 7, "propagate"))

    def flat(st: ScaledTensor) -> tuple[Any, ...]:
        return list(components(st).values()), text, st.layout.to_json(), st.axis, st.padding

    weight = flat(breccia.cast(torch.from_numpy(wide((6, 32), seed=91, exponents=1)), recipe).mT)
    stacked = flat(breccia.cast(torch.from_numpy(wide((2, 6, 32), seed=92, exponents=1)), recipe).mT)
    x.requires_grad_()
    b.requires_grad_()
    matrices = torch.from_numpy(numbers((2, 32, 6), 93)).requires_grad_()
    offsets = torch.tensor([1, 3], dtype=torch.int32)
    plain, right, each = (([a], "", "", -1, 0) for a in (x, b, matrices))
    for second, several, dtype, added in ((weight, stacked, "float16", None), (right, each, "float32", bias)):
        torch.library.opcheck(ops.biased_matmul.default, (*plain, *second, dtype, bias))
        torch.library.opcheck(ops.cast_matmul.default, (x, text, *second, dtype, added))
        torch.library.opcheck(ops.grouped_matmul.default, (*plain, *several, offsets, dtype))


# -- the scale convention of NVFP4's global scale --------------------------------------------------------------------

SENSES = ("multiplier", "amax", "divisor")
LARGEST = np.finfo(np.float32).max
#: One shape, so that JAX compiles once per scale convention.
WIDTH = 33


def tensors_of_every_size() -> dict[str, np.ndarray]:
    special = special_rows(WIDTH)
    ordinary = wide(special.shape, seed=94, exponents=3)
    infinite = ordinary.copy()
    infinite[3, 4], infinite[5, 17], infinite[9] = np.inf, np.nan, -np.inf
    return {
        "every clause": special,
        "zeros": np.zeros_like(ordinary),
        "ordinary": ordinary,
        "NaN and Inf": infinite,
        "nothing finite": np.full_like(ordinary, np.nan),
        "huge": np.clip(ordinary * np.float32(2.0**120), -LARGEST, LARGEST),
        "tiny": ordinary * np.float32(2.0**-124),
        "below what counts": np.full_like(ordinary, 2.0**-127),
    }


@cache
def judged_sense(name: str, sense: str) -> tuple[oracle.Written, np.ndarray]:
    recipe = NVFP4BlockScaling(global_sense=sense)
    written = oracle.cast(tensors_of_every_size()[name], recipe)
    return written, oracle.dequantize(written, recipe)


@pytest.mark.parametrize("sense", ["amax", "divisor"])
@pytest.mark.parametrize("which", tensors_of_every_size())
def test_a_global_scale_of_another_convention_matches_the_oracle(place: Place, sense: str, which: str) -> None:
    recipe = NVFP4BlockScaling(global_sense=sense)
    written, decoded = judged_sense(which, sense)
    st = breccia.cast(place.array(tensors_of_every_size()[which]), recipe)
    expect_written(place, st, written)
    expect_numbers("decoded", place, breccia.dequantize(st), decoded)


def test_the_three_scale_conventions_store_the_same_scale() -> None:
    """A block of 6 times a power of two, under amax 6 * 2^4: the scale is 96 / 2688, and numbers are kept in all three."""
    x = (6 * 2.0 ** np.arange(-2, 5, dtype=np.float32)).repeat(16).reshape(7, 16)
    stored = {s: float(breccia.cast(x, NVFP4BlockScaling(global_sense=s)).global_scale) for s in SENSES}
    assert stored == {"multiplier": float(np.float32(96) / np.float32(2688)), "amax": 96.0, "divisor": 28.0}
    zeros = {s: float(breccia.cast(0 * x, NVFP4BlockScaling(global_sense=s)).global_scale) for s in SENSES}
    assert zeros == {"multiplier": 1.0, "amax": 2688.0, "divisor": 1.0}, "what means 1"


@pytest.mark.parametrize("sense", SENSES)
def test_a_scale_convention_round_trips_through_json(sense: str) -> None:
    recipe = NVFP4BlockScaling(global_sense=sense)
    again = ScalingRecipe.from_json(recipe.to_json())
    assert again == recipe and again.global_sense == sense and pickle.loads(pickle.dumps(recipe)) == recipe
    assert breccia.recipe(recipe.spec) == recipe and recipe.format.levels[0].convention == sense
    assert ('"global_sense"' in recipe.to_json()) == (sense != "multiplier")
    assert (recipe.fingerprint() == NVFP4.fingerprint()) == (sense == "multiplier")


def test_the_default_scale_convention_changes_no_byte_of_files_and_digests() -> None:
    """The JSON and fingerprints are those from before the field was added."""
    assert NVFP4.to_json() == (
        '{"fields":{"block_size":16,"fp4_format":"E2M1","scale_format":"E4M3","two_level":true},"name":"nvfp4"}'
    )
    x = np.linspace(-3, 3, 80, dtype=np.float32).reshape(4, 20)
    assert breccia.cast(x, NVFP4).digest() == "2bc36693bb5623051a79ffb3999efbaf5621542402549f3c241b087d0f9e3dba"
    assert NVFP4.fingerprint() == "6fd202c574ff5f3e42191a1ab6518cfd5913a1bfd6d13fc8d3dc187266f775b0"
    assert NVFP4.format.fingerprint() == "250418f63e626686749aaf082b7acff9bb7362f01beffcea85c643d0785a789e"


def test_invalid_scale_conventions_are_refused_by_name() -> None:
    for sense in ("amax", "divisor"):
        with pytest.raises(RecipeError) as e:
            NVFP4BlockScaling(two_level=False, global_sense=sense)
        assert str(e.value) == (
            f"global_sense={sense!r} is that of the tensor's FP32 scale, absent with two_level=False; omit one of the two."
        )
    for sense in ("amx", 3, None):
        with pytest.raises(RecipeError) as e:
            NVFP4BlockScaling(global_sense=sense)  # type: ignore[arg-type]
        near = "; did you mean 'amax'?" if sense == "amx" else ""
        assert str(e.value) == f"global_sense must be one of 'multiplier', 'divisor', 'amax', got {sense!r}{near}"


def test_a_kernel_for_nvfp4_is_asked_about_every_scale_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    npu = ModuleType("sense_npu")
    vars(npu).update(
        cast=lambda x, recipe, options: breccia.kernels.reference.casting.cast(x, recipe, options),
        accepts=lambda call: asked.append(call.recipe.global_sense),
    )
    monkeypatch.setitem(sys.modules, "sense_npu", npu)
    manifest = ModuleType("sense_manifest")
    kernel = Kernel("cast", "numpy", "sense_npu:cast", "sense.cast", recipe=NVFP4BlockScaling, accepts="sense_npu:accepts")
    vars(manifest).update(api=1, breccia_kernels=hookimpl(lambda: [kernel], specname="breccia_kernels"))
    plugin = Plugin("sense", "sense", "1.0", "sense_manifest")
    monkeypatch.setattr(frameworks, "current", Registry([*_installed(), (plugin, lambda: manifest)], dict(os.environ)))
    x = wide((4, 32), seed=95)
    for sense in SENSES:
        recipe = NVFP4BlockScaling(global_sense=sense)
        found = breccia.explain("cast", x, recipe)
        assert found.winner is not None and found.winner.name == "sense.cast"
        expect_written(Place("numpy"), breccia.cast(x, recipe), oracle.cast(x, recipe))
    assert set(asked) == set(SENSES)


# -- the history of delayed scaling ----------------------------------------------------------------------------------


class Counted:
    """Backend primitives that count their calls."""

    def __init__(self, ops: Any) -> None:
        self._ops, self.words = ops, 0

    def __getattr__(self, name: str) -> Any:
        word = getattr(self._ops, name)
        if not callable(word):
            return word

        def said(*arguments: Any, **options: Any) -> Any:
            self.words += 1
            return word(*arguments, **options)

        return said


def history_of(place: Place, count: int, length: int) -> Any:
    """A history that already has `count` values."""
    amaxes, scale = place.array(np.arange(1, count + 1, dtype=np.float32)), place.array(np.float32(count / 448))
    return breccia.AmaxHistory(DelayedScaling(amax_history_len=length), amaxes, scale)


@pytest.mark.parametrize("length", [40, 64], ids=["full", "filling"])
@pytest.mark.parametrize("framework", EAGER)
def test_updating_a_long_history_calls_as_many_primitives_as_a_short_one(
    framework: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = here(framework)
    x = place.array(np.full((2, 3), 5, np.float32))
    short, long = history_of(place, 2, length), history_of(place, 40, length)
    words: list[int] = []
    for each in (short, long):
        counted = Counted(place.ops)
        monkeypatch.setattr(recording, "ops_of", lambda x, counted=counted: counted)
        each.update(x)
        words.append(counted.words)
    assert words[0] == words[1] > 0


def test_torch_runs_as_many_operators_for_a_long_history_as_for_a_short_one() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    place, found = here("torch"), []
    for entries in (2, 40):
        each = history_of(place, entries, 64)
        with Counting() as mode:
            each.update(torch.full((2, 3), 5.0))
        found.append(mode.count)
    assert found[0] == found[1] > 0


def test_a_history_casts_and_records_at_once(place: Place) -> None:
    x = np.random.default_rng(3).standard_normal((33, 48), dtype=np.float32)
    both = apart = breccia.AmaxHistory("fp8_delayed,amax_history_len=3,margin=1")  # type: ignore[arg-type]
    for step in range(5):
        given = place.array(x * np.float32(2.0**step))
        before, expected = apart.scale, breccia.cast(given, apart.recipe, scale=apart.scale, axis=-2)
        apart = apart.update(given)
        pair, after = both.cast_pair(given)
        st, both = both.cast(given, axis=-2)
        assert breccia.bytes_equal(st, expected) and breccia.bytes_equal(pair.columnwise, expected)
        assert breccia.bytes_equal(pair.rowwise, breccia.cast(given, apart.recipe, scale=before))
        assert host(after.amaxes).tolist() == host(both.amaxes).tolist() and float(host(after.scale)) == float(host(both.scale))
        assert host(both.amaxes).tolist() == host(apart.amaxes).tolist() and float(host(both.scale)) == float(host(apart.scale))
    assert "composite.cast_and_record" in str(breccia.explain("cast_and_record", "fp8_delayed", on=place.framework))
    assert "No kernel runs for this call" in str(breccia.explain("record_amax", "mxfp8", on=place.framework))


@pytest.mark.long
def test_torch_compiles_a_history_without_breaking_the_graph() -> None:
    torch = pytest.importorskip("torch")

    def steps(x: Any) -> tuple[Any, ...]:
        st, kept = breccia.AmaxHistory(DelayedScaling(amax_history_len=2)).cast(x)
        again, kept = kept.cast(x * 2, rounding="stochastic", seed=3)
        kept = kept.update(x * 4)
        pair, kept = kept.cast_pair(x)
        return st.data.float(), again.data.float(), *(each.data.float() for each in pair), kept.amaxes, kept.scale

    x = torch.randn(33, 48, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(torch.compile(steps, fullgraph=True)(x), steps(x), strict=True):
        assert torch.equal(found, expected)
    for scale, amaxes in ((None, None), (torch.tensor(0.5), torch.ones(2))):
        text = DelayedScaling(amax_history_len=2).to_json()
        torch.library.opcheck(torch.ops.breccia.record_amax, (x, text, amaxes, scale, 1.0))
        torch.library.opcheck(
            torch.ops.breccia.cast_and_record, (x, text, amaxes, scale, 1.0, -1, "nearest", None, "propagate")
        )
        torch.library.opcheck(
            torch.ops.breccia.cast_pair_and_record, (x, text, amaxes, scale, 1.0, "nearest", None, "propagate")
        )


def test_a_history_is_an_array_ordered_oldest_first_with_bounded_length(place: Place) -> None:
    found = breccia.AmaxHistory(DelayedScaling(amax_history_len=3))
    seen: list[float] = []
    for largest in (3.0, 448.0, 0.0, 7.0, 896.0, 1.0):
        found = found.update(place.array(np.array([[largest, -largest / 2]], np.float32)))
        seen = [*seen, largest][-3:]
        assert type(found.amaxes) is type(place.array(np.zeros(1, np.float32))), "an array of the framework"
        assert tuple(found.amaxes.shape) == (len(seen),) and host(found.amaxes).tolist() == seen
        assert tuple(found.scale.shape) == () and float(host(found.scale)) == np.float32(max(seen)) / np.float32(448)


# -- tensors of float8 in pickles and checkpoints --------------------------------------------------------------------

FLOAT8 = [
    MXFP8,
    MXFP8BlockScaling("E5M2"),
    Float8CurrentScaling(),
    Float8CurrentScaling("E5M2"),
    Float8BlockScaling(block_m=4, block_k=16),
    NVFP4,
]


@pytest.mark.parametrize("recipe", FLOAT8, ids=recipe_id)
def test_torch_tensors_of_float8_are_pickled_copied_and_loaded(recipe: ScalingRecipe, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(np.concatenate([wide((6, WIDTH), seed=96), special_rows(WIDTH)]))
    for st in (breccia.cast(x, recipe), breccia.cast(x, recipe, axis=-2), breccia.cast(x, recipe).mT):
        dtypes = {name: part.dtype for name, part in components(st).items()}
        torch.save({"w": st}, tmp_path / "st.pt")
        copies = [pickle.loads(pickle.dumps(st, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
        copies += [copy.deepcopy(st), torch.load(tmp_path / "st.pt", weights_only=True)["w"]]
        for found in copies:
            assert bytes_equal(found, st) and {name: part.dtype for name, part in components(found).items()} == dtypes
            assert (found.recipe, found.layout, found.axis, found.shape) == (st.recipe, st.layout, st.axis, st.shape)
            assert all(
                found_part.data_ptr() != part.data_ptr() for found_part, part in zip(*map(parts_of, (found, st)), strict=True)
            )


def parts_of(st: ScaledTensor) -> list[Any]:
    return list(components(st).values())
