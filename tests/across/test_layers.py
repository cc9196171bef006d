"""Every op, layer, converter and compiled graph uses a kernel that a plug-in registers, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin
from products import assert_same_product

import breccia
from breccia.arrays import frameworks
from breccia.arrays.ops import NUMPY
from breccia.dispatch.registry import Plugin, Registry, _installed
from breccia.testing.examples import wide

MX, NVFP4 = breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling()
X, W = wide((5, 64), seed=1, exponents=2), wide((8, 64), seed=2, exponents=2)
#: JAX recompiles every op.
FRAMEWORKS = ("numpy", "torch", pytest.param("jax", marks=pytest.mark.long), "mlx")


def registry_with_standin(**environ: str) -> Registry:
    plugin = Plugin("standin", "standin", "1.0", "standin")
    return Registry([*_installed(), (plugin, lambda: standin.manifest)], {**os.environ, **environ})


@pytest.fixture(params=[True, False], ids=["registered", "blocked"])
def registered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the plug-in is registered. If it is blocked, everything still works and none of its kernels runs."""
    environ = {} if request.param else {"BRECCIA_BLOCK": "standin"}
    monkeypatch.setattr(frameworks, "current", registry_with_standin(**environ))
    standin.calls.clear()
    yield request.param
    if not request.param:
        assert not standin.calls


@pytest.fixture
def reached(registered: bool) -> Callable[..., Any]:
    """Call a function and assert that exactly these kernels of the plug-in ran. JAX may trace a function more than once."""

    def check(function: Callable[[], Any], **expected: int) -> Any:
        standin.calls.clear()
        found = function()
        if registered:
            names = {name.replace(" ", "_") for name in standin.calls}
            assert names == set(expected), dict(standin.calls)
            for name, least in expected.items():
                assert standin.calls[name.replace("_", " ")] >= least, dict(standin.calls)
        return found

    return check


def array(x: np.ndarray, framework: str) -> Any:
    if framework == "numpy":
        return x.copy()
    if framework == "torch":
        return pytest.importorskip("torch").from_numpy(x.copy())
    if framework == "jax":
        return pytest.importorskip("jax.numpy").asarray(x)
    return pytest.importorskip("mlx.core").array(x)


def host(x: Any) -> np.ndarray:
    return np.asarray(frameworks.ops_of(x).to_numpy(x))


def same(a: Any, b: Any) -> bool:
    return host(a).tobytes() == np.asarray(b).tobytes()


# -- every op, on every framework ------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_op_reaches_the_kernels_of_its_primitives(framework: str, reached: Any) -> None:
    generic = breccia.kernels.reference
    x, w = array(X, framework), array(W, framework)
    st = reached(lambda: breccia.cast(x, MX), cast=1)
    expected = generic.cast(X, MX)
    assert st.digest() == expected.digest()
    weight = reached(lambda: breccia.cast(w, MX), cast=1)
    values = generic.dequantize(expected)
    assert same(reached(lambda: breccia.dequantize(st), dequantize=1), values)
    assert same(reached(lambda: breccia.cast_ste(x, MX), cast=1, dequantize=1), values)
    assert same(reached(lambda: breccia.cast_ste_clipped(x, MX, clip="scale"), cast=1, dequantize=1), values)
    assert reached(lambda: breccia.requantize(st, NVFP4), dequantize=1).digest() == generic.requantize(expected, NVFP4).digest()
    back = breccia.cast(x[:4], NVFP4)  # of another shape: JAX has compiled the cast of `x`, and calls no kernel for it again
    reached(lambda: breccia.requantize(back, MX), cast=1)
    for one, axis in zip(reached(lambda: breccia.cast_pair(x, MX), cast=2), (-1, -2), strict=True):
        assert one.digest() == breccia.cast(X, MX, axis=axis).digest()
    wide_weight = generic.dequantize(generic.cast(W, MX)).T
    plain = reached(lambda: breccia.matmul(x, weight.mT), matmul_of_few=1)
    assert_same_product(host(plain), X @ wide_weight, X, wide_weight)
    both = reached(lambda: breccia.matmul(st, weight.mT), matmul_of_few=1)
    assert_same_product(host(both), values @ wide_weight, values, wide_weight)
    fused = reached(lambda: breccia.cast_matmul(x, MX, weight.mT), cast=1, matmul_of_few=1)
    assert_same_product(host(fused), values @ wide_weight, values, wide_weight)
    other = breccia.cast(w, NVFP4)
    reached(lambda: breccia.matmul(st, other.mT), dequantize=1)
    experts = breccia.cast(array(np.stack([W, W * 2]), framework), MX)
    offsets = array(np.array([2, 5], np.int32), framework)
    composed = {"prefer": "composite.grouped_matmul"}  # on CPUs a compiled kernel multiplies groups without `dequantize`
    grouped = reached(lambda: breccia.grouped_matmul(x, experts.mT, offsets, **composed), dequantize=1)
    matrices = [wide_weight, generic.dequantize(generic.cast(W * 2, MX)).T]
    for rows, matrix in zip((slice(0, 2), slice(2, 5)), matrices, strict=True):
        assert_same_product(host(grouped)[rows], X[rows] @ matrix, X[rows], matrix)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_kernel_with_a_better_score_for_few_rows_wins_only_for_few_rows(framework: str, reached: Any) -> None:
    weight = breccia.cast(array(W, framework), MX)
    for rows in (1, 2, 15, 16):
        reached(lambda rows=rows: breccia.matmul(array(wide((rows, 64)), framework), weight.mT), matmul_of_few=1)
    for rows in (17, 20, 64, 1000):
        reached(lambda rows=rows: breccia.matmul(array(wide((rows, 64)), framework), weight.mT), matmul=1)


def test_explain_names_the_kernel_that_runs(registered: bool) -> None:
    found = breccia.explain("cast_matmul", X, MX, breccia.cast(W, MX).mT)
    if registered:
        assert found.running == "composite.cast_matmul (standin.numpy.cast, standin.numpy.matmul.pair.few)"
        many = breccia.explain("matmul", np.ones((64, 64), np.float32), breccia.cast(W, MX).mT)
        assert many.running == "standin.numpy.matmul.array"
        assert "standin.numpy.matmul.array comes first (estimated 2 s against 4 s)" in str(many)
    else:
        assert "standin" not in found.running


# -- torch: gradients, layers, graphs --------------------------------------------------------------------------------


def test_torch_layers_use_the_kernels_with_and_without_gradients(reached: Any) -> None:
    torch = pytest.importorskip("torch")
    nn = pytest.importorskip("breccia_torch").nn
    plain = torch.nn.Linear(64, 8)
    x = array(X, "torch")
    layer = reached(lambda: nn.ScaledLinear.from_linear(plain, MX), cast=1)
    quantized = reached(lambda: nn.ScaledLinear.from_linear(plain, MX, activation=MX), cast=1)
    weight = breccia.dequantize(quantized.weight.tensor)
    for training in (True, False):
        layer.train(training)
        quantized.train(training)
        reached(lambda: layer(x), matmul_of_few=1)
        y = reached(lambda: quantized(x), cast=1, matmul_of_few=1)
        rows = breccia.dequantize(breccia.cast(x, MX))
        assert_same_product(y, rows @ weight.mT + plain.bias, rows, weight.mT, rest=plain.bias)
        for module in (layer, quantized):
            leaf = x.clone().requires_grad_()
            found = module(leaf)
            ones = torch.ones_like(found)
            # The gradient of x @ w.mT is a product by w, whose blocks run along the other axis there: it is its kernel's too.
            reached(lambda found=found: found.sum().backward(), matmul_of_few=1)
            assert_same_product(leaf.grad, ones @ weight, ones, weight)
    with torch.no_grad():
        reached(lambda: quantized(x), cast=1, matmul_of_few=1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch 2.11's own
@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.long
def test_compiled_torch_graphs_use_the_kernels_forward_and_backward(reached: Any, backend: str) -> None:
    torch = pytest.importorskip("torch")
    breccia_torch = pytest.importorskip("breccia_torch")
    torch._dynamo.reset()
    plain = torch.nn.Linear(64, 8)
    layer = breccia_torch.nn.ScaledLinear.from_linear(plain, MX, activation=MX)
    fast = torch.compile(layer, fullgraph=True, backend=backend)
    x = array(X, "torch")
    for training in (True, False):
        layer.train(training)
        fast(x)  # compiled here
        y = reached(lambda: fast(x), cast=1, matmul_of_few=1)
        assert_same_product(y, layer(x), breccia.cast_ste(x, MX), breccia.dequantize(layer.weight.tensor).mT, rest=plain.bias)
    leaf = x.clone().requires_grad_()
    found = reached(lambda: fast(leaf), cast=1, matmul_of_few=1)
    reached(lambda: found.sum().backward(), matmul_of_few=1)
    ones, weight = torch.ones(5, 8), breccia.dequantize(layer.weight.tensor)
    assert_same_product(leaf.grad, ones @ weight, ones, weight)

    def all_ops(x: Any, w: Any) -> Any:
        st, other = breccia.cast_pair(x, MX)
        new = breccia.requantize(st, NVFP4)
        return breccia.dequantize(new) + breccia.cast_ste(x, MX) + breccia.dequantize(other) + breccia.matmul(x, w.mT).sum()

    graph = torch.compile(all_ops, fullgraph=True, backend=backend)
    w = breccia.cast(array(W, "torch"), MX)
    graph(x, w)
    found = reached(lambda: graph(x, w), cast=3, dequantize=3, matmul_of_few=1)
    assert torch.allclose(found, all_ops(x, w), rtol=1e-5), "a sum of products in two orders: 64 terms, FP32"
    torch._dynamo.reset()


def test_quantizing_saving_and_loading_models_uses_the_kernels(reached: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    breccia_torch = pytest.importorskip("breccia_torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    reached(lambda: breccia_torch.quantize_(model, MX, activation=MX), cast=2)
    reached(lambda: model(array(X, "torch")), cast=2, matmul_of_few=2)
    pytest.importorskip("breccia_bridges")
    breccia_torch.save_model(model, tmp_path / "m.safetensors")
    again = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    breccia_torch.load_model(again, tmp_path / "m.safetensors")
    reached(lambda: again(array(X, "torch")), cast=2, matmul_of_few=2)


# -- JAX and MLX -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_jax_uses_the_kernels_inside_jit_and_in_gradients(reached: Any) -> None:
    jax = pytest.importorskip("jax")
    x, weight = array(X, "jax"), breccia.cast(array(W, "jax"), MX)
    wide_weight = host(breccia.dequantize(weight))

    def loss(x: Any) -> Any:
        return breccia.cast_matmul(x, MX, weight.mT).sum()

    reached(lambda: jax.jit(loss)(x), cast=1, matmul_of_few=1)
    gradient = reached(lambda: jax.jit(jax.grad(loss))(x), cast=1, matmul_of_few=1, dequantize=1)
    ones = np.ones((5, 8), np.float32)
    assert_same_product(host(gradient), ones @ wide_weight, ones, wide_weight)
    plain = reached(lambda: jax.grad(lambda x: breccia.matmul(x, weight.mT).sum())(x), matmul_of_few=1, dequantize=1)
    assert_same_product(host(plain), ones @ wide_weight, ones, wide_weight)
    reached(lambda: jax.grad(lambda x: breccia.cast_ste(x, MX).sum())(x), cast=1, dequantize=1)
    breccia_jax = pytest.importorskip("breccia_jax")
    tree = reached(lambda: breccia_jax.quantize({"kernel": array(wide((64, 32)), "jax")}, MX), cast=1)
    reached(lambda: breccia_jax.dequantize(tree), dequantize=1)


def test_mlx_layers_and_gradients_use_the_kernels(reached: Any) -> None:
    mx = pytest.importorskip("mlx.core")
    nn = pytest.importorskip("mlx.nn")
    breccia_mlx = pytest.importorskip("breccia_mlx")
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    reached(lambda: breccia_mlx.quantize(model, MX, activation=MX), cast=2)
    x = array(X, "mlx")
    reached(lambda: model(x), cast=2, matmul_of_few=2)
    weight = model.layers[1].weight.tensor
    gradient = reached(lambda: mx.grad(lambda t: breccia.matmul(t, weight.mT).sum())(x[:, :32]), matmul_of_few=2)
    wide_weight, ones = host(breccia.dequantize(weight)), np.ones((5, 8), np.float32)
    assert_same_product(host(gradient), ones @ wide_weight, ones, wide_weight)


# -- bridges ---------------------------------------------------------------------------------------------------------


def test_the_converter_uses_the_cast_kernel(reached: Any, tmp_path: Path) -> None:
    bridges = pytest.importorskip("breccia_bridges") and breccia.bridges
    source = tmp_path / "in.safetensors"
    bridges.save_safetensors({"w": W}, source)
    reached(lambda: bridges.convert(source, tmp_path / "out.safetensors", MX), cast=1, dequantize=1)
    found = bridges.load_safetensors(tmp_path / "out.safetensors")
    assert found["w"].digest() == breccia.kernels.reference.casting.cast(W, MX).digest()
    assert NUMPY is not None
