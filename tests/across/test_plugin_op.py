"""An op that a plug-in declares in one file (tests/third_party/swiglu-breccia): in every framework, compiler and tool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from marks import long_but
from one_file_plugins import installed

import breccia
from breccia.testing.kit import laws_of

RECIPES = ("mxfp8", "nvfp4", "int4")
X, GATE = (np.random.default_rng(seed).standard_normal((6, 64)).astype(np.float32) for seed in (0, 1))


@pytest.fixture(scope="module")
def swiglu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module of the plug-in, which is installed for these tests."""
    with installed("swiglu", tmp_path_factory.mktemp("swiglu")) as module:
        yield module


def silu(g: np.ndarray) -> np.ndarray:
    """In FP64."""
    return g / (1 + np.exp(-g.astype(np.float64)))


def as_exact_as_a_cast(found: Any, exact: np.ndarray, recipe: str) -> None:
    """The error is that of a cast of the exact product.

    The FP32 product has a relative error below 2^-19 (a dozen roundings), and so have the scales: a code changes only next to
    a tie, where both codes have errors that differ by as much.
    """
    nearest = breccia.dequantize(breccia.cast(exact.astype(np.float32), recipe))
    bound = np.max(np.abs(nearest - exact)) + 2.0**-19 * np.max(np.abs(exact))
    assert np.max(np.abs(np.asarray(found) - exact)) <= bound


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_casts_the_product_on_numpy(swiglu: Any, recipe: str) -> None:
    st = swiglu.swiglu_cast(X, GATE, recipe)
    assert st.recipe == breccia.recipe(recipe) and st.shape == X.shape
    as_exact_as_a_cast(st.dequantize(), X * silu(GATE), recipe)
    assert np.array_equal(swiglu.swiglu_ste(X, GATE, recipe), st.dequantize())


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_writes_the_bytes_of_numpy_and_compiles_it_whole(swiglu: Any, recipe: str) -> None:
    torch = pytest.importorskip("torch")
    expected = swiglu.swiglu_cast(X, GATE, recipe)
    x, gate = torch.from_numpy(X), torch.from_numpy(GATE)
    assert breccia.bytes_equal(swiglu.swiglu_cast(x, gate, recipe), expected)

    def step(x: Any, gate: Any) -> Any:
        return swiglu.swiglu_cast(x, gate, recipe).dequantize(), swiglu.swiglu_ste(x, gate, recipe)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for found, eager in zip(compiled(x, gate), step(x, gate), strict=True):
        assert torch.equal(found, eager)


@pytest.mark.long
def test_torch_differentiates_it_eagerly_and_compiled(swiglu: Any) -> None:
    torch = pytest.importorskip("torch")
    inputs = [torch.from_numpy(a).requires_grad_() for a in (X, GATE)]
    weights = torch.linspace(-1, 1, X.size).reshape(X.shape)

    def loss(x: Any, gate: Any) -> Any:
        return (swiglu.swiglu_ste(x, gate, "mxfp8") * weights).sum()

    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    x, gate = (torch.from_numpy(a).double().requires_grad_() for a in (X, GATE))
    exact = torch.autograd.grad((x * torch.nn.functional.silu(gate) * weights).sum(), (x, gate))
    for found, again, expected in zip(eager, compiled, exact, strict=True):
        assert torch.equal(found, again)
        # A dozen roundings of 2^-24 each, and a polynomial within 2 units in the last place; terms are below 4 in magnitude.
        assert torch.max(torch.abs(found.double() - expected)) <= 4 * 16 * 2.0**-24


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_jax_compiles_and_differentiates_it(swiglu: Any, recipe: str) -> None:
    jax = pytest.importorskip("jax")
    x, gate = jax.numpy.asarray(X), jax.numpy.asarray(GATE)

    @jax.jit
    def values(x: Any, gate: Any) -> Any:
        return breccia.dequantize(swiglu.swiglu_cast(x, gate, recipe))

    for found in (values(x, gate), breccia.dequantize(swiglu.swiglu_cast(x, gate, recipe))):
        as_exact_as_a_cast(found, X * silu(GATE), recipe)

    def loss(x: Any, gate: Any) -> Any:
        return swiglu.swiglu_ste(x, gate, recipe).sum()

    def exact(x: Any, gate: Any) -> Any:
        return (x * jax.nn.silu(gate)).sum()

    for function in (jax.grad, lambda f, n: jax.jit(jax.grad(f, n))):
        for n in (0, 1):
            found, expected = function(loss, n)(x, gate), jax.grad(exact, n)(x, gate)
            assert np.max(np.abs(found - expected)) <= 4 * 32 * 2.0**-24  # both are rounded
    _, tangent = jax.jvp(loss, (x, gate), (x, gate))
    _, expected = jax.jvp(exact, (x, gate), (x, gate))
    assert abs(float(tangent - expected)) <= X.size * 4 * 32 * 2.0**-24


@pytest.mark.parametrize("recipe", long_but(RECIPES[:1], RECIPES))
def test_mlx_compiles_and_differentiates_it(swiglu: Any, recipe: str) -> None:
    mx = pytest.importorskip("mlx.core")
    nn = pytest.importorskip("mlx.nn")
    x, gate = mx.array(X), mx.array(GATE)

    def values(x: Any, gate: Any) -> Any:
        return breccia.dequantize(swiglu.swiglu_cast(x, gate, recipe))

    for found in (values(x, gate), mx.compile(values)(x, gate)):
        as_exact_as_a_cast(found, X * silu(GATE), recipe)

    def loss(x: Any, gate: Any) -> Any:
        return swiglu.swiglu_ste(x, gate, recipe).sum()

    def exact(x: Any, gate: Any) -> Any:
        return (x * nn.silu(gate)).sum()

    for n in (0, 1):
        expected = np.asarray(mx.grad(exact, n)(x, gate))
        for function in (mx.grad(loss, n), mx.compile(mx.grad(loss, n))):
            assert np.max(np.abs(np.asarray(function(x, gate)) - expected)) <= 4 * 32 * 2.0**-24


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
def test_explain_shows_the_ops_reference_and_where_it_is(swiglu: Any, framework: str) -> None:
    found = breccia.explain("swiglu_cast", "array", "array", "nvfp4", on=framework)
    assert found.winner is not None and (found.winner.name, found.winner.plugin) == ("reference.swiglu_cast", "swiglu")
    assert "swiglu_cast of nvfp4 and array" in str(found) and "swiglu_breccia.py:" in str(found)


@pytest.mark.parametrize("law", [*range(12)])
def test_the_kit_tests_it(swiglu: Any, law: int) -> None:
    laws = [found for found in laws_of("swiglu") if found.kind == "operations"]
    sentences = {found.sentence for found in laws}
    assert sentences >= {"its_kernels_write_what_the_reference_does", "it_is_a_cast_of_the_product"}
    for found in laws[law::12]:
        try:
            found.check()
        except pytest.skip.Exception as skipped:
            assert "constants to gradients" in str(skipped)


def test_its_arguments_are_checked(swiglu: Any) -> None:
    st = breccia.cast(X, "mxfp8")
    with pytest.raises(
        breccia.UnsupportedError, match=r"swiglu_cast takes an array as gate, got a ScaledTensor; pass its values"
    ):
        swiglu.swiglu_cast(X, st, "mxfp8")
    with pytest.raises(breccia.ShapeError, match=r"x and gate of one shape; got \(6, 64\) and \(6, 32\)"):
        swiglu.swiglu_cast(X, GATE[:, :32], "mxfp8")
    with pytest.raises(TypeError, match="missing a required argument: 'recipe'"):
        swiglu.swiglu_cast(X, GATE)
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        swiglu.swiglu_cast(X, GATE, "mxfp8", out=None)
    with pytest.raises(breccia.UnsupportedError, match=r"x is a numpy array .* gate is a torch array|gate.*torch"):
        swiglu.swiglu_cast(X, pytest.importorskip("torch").from_numpy(GATE), "mxfp8")
