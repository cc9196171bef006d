"""The kernels of the tutorials: CUDA C++ on a GPU, and Triton there or in its interpreter; layers and gradients use them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from marks import on_cuda
from paths import TESTS

import breccia
from breccia.arrays import frameworks
from breccia.dispatch.registry import Plugin, Registry, _installed
from breccia.testing.examples import wide

THIRD_PARTY = TESTS / "third_party"
SOURCES = THIRD_PARTY / "acme-breccia" / "src"
BLOCK = breccia.Float8BlockScaling()


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Register the plug-in; returns the name of its kernel."""
    monkeypatch.syspath_prepend(SOURCES)
    from importlib import import_module

    manifest = import_module("acme_breccia.plugin")
    others = [found for found in _installed() if found[0].name != "acme"]
    plugin = (Plugin("acme", "acme-breccia", "0.1", "acme_breccia.plugin"), lambda: manifest)
    monkeypatch.setattr(frameworks, "current", Registry([*others, plugin], dict(os.environ)))
    yield "acme.dequantize"


@on_cuda
@pytest.mark.parametrize("fp8_format", ["E4M3", "E5M2"])
@pytest.mark.parametrize("shape", [(1, 128), (33, 256), (3, 5, 384)], ids=str)
def test_the_kernel_of_the_tutorial_writes_the_bytes_of_the_generic_algorithm(acme: str, fp8_format: str, shape: Any) -> None:
    import torch

    recipe = breccia.Float8BlockScaling(fp8_format)
    x = torch.from_numpy(wide(shape, seed=1, exponents=20)).cuda()
    x.view(-1)[5] = float("nan")
    st = breccia.cast(x, recipe)
    assert breccia.explain("dequantize", st).running == acme
    found, expected = breccia.dequantize(st), breccia.dequantize(st, prefer="reference.dequantize")
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))
    assert torch.equal(breccia.dequantize(st.mT).nan_to_num(), found.mT.nan_to_num())
    tiles = breccia.cast(x, breccia.Float8BlockScaling(block_m=4))
    assert breccia.explain("dequantize", tiles).running != acme


@on_cuda
def test_layers_gradients_and_graphs_use_the_kernel_of_the_tutorial(acme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from acme_breccia import cuda

    import breccia_torch

    ran: list[Any] = []
    compiled = cuda.compiled
    monkeypatch.setattr(cuda, "compiled", lambda device: ran.append(device) or compiled(device))
    layer = breccia_torch.nn.ScaledLinear(256, 64, device="cuda", recipe=BLOCK)
    x = torch.randn(5, 256, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    ran.clear()
    values = breccia.dequantize(layer.weight.tensor)
    assert len(ran) == 1 and values.shape == (64, 256)
    graph = torch.compile(lambda st: breccia.dequantize(st) * 2, fullgraph=True, backend="aot_eager")
    graph(layer.weight.tensor)
    ran.clear()
    assert torch.equal(graph(layer.weight.tensor), values * 2) and len(ran) == 1
    assert np.isfinite(values.cpu().numpy()).all()


# ------------------------------------------------------------------------------------------------ Triton


@pytest.fixture
def volt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """Register the plug-in with a Triton kernel, which Triton's interpreter runs where there is no GPU."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(THIRD_PARTY / "volt-breccia" / "src")
    from importlib import import_module

    manifest = import_module("volt_breccia.plugin")
    plugin = (Plugin("volt", "volt-breccia", "0.1", "volt_breccia.plugin"), lambda: manifest)
    registry = Registry([*_installed(), plugin], dict(os.environ))
    monkeypatch.setattr(frameworks, "current", registry)
    yield registry


def operands(m: int, n: int, k: int) -> tuple[Any, Any]:
    """(Activations in FP16, a weight), where the kernel runs."""
    import torch
    from volt_breccia.plugin import DEVICE

    rng = np.random.default_rng(m + n + k)
    x, w = (torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(DEVICE) for shape in ((m, k), (n, k)))
    return x.half(), breccia.cast(w * 0.1, "int8")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 64, 64), (5, 70, 200), (33, 130, 257)], ids=str)
def test_the_triton_kernel_of_the_tutorial_keeps_the_bound_of_products(volt: Registry, shape: tuple[int, int, int]) -> None:
    import torch

    from breccia.kernels import bounds

    m, n, k = shape
    x, w = operands(m, n, k)
    assert breccia.explain("matmul", x, w.mT).running == "volt.matmul"
    bias = torch.linspace(-2, 2, n, device=x.device)
    values = breccia.dequantize(w).double()
    size = x.double().abs() @ values.abs().mT + bias.double().abs()
    bound = bounds.accumulated(size, k + 1, k)
    found = breccia.matmul(x[None], w.mT, bias=bias)
    assert found.shape == (1, m, n) and found.dtype == torch.float32
    assert ((found[0] - (x.double() @ values.mT + bias)).abs() <= bound).all()
    out = torch.empty(m, n, dtype=torch.float16, device=x.device)
    assert breccia.matmul(x, w.mT, "float16", bias=bias, out=out) is out
    assert ((out - found[0]).abs() <= 2.0**-11 * found[0].abs() + 2.0**-25).all()


@pytest.mark.gpu
def test_explain_says_why_the_triton_kernel_of_the_tutorial_does_not_run(volt: Registry) -> None:
    x, w = operands(5, 64, 64)
    assert "skipped: activations are float32; it multiplies float16" in str(breccia.explain("matmul", x.float(), w.mT))
    tall = breccia.cast(breccia.dequantize(w), "int8,group_size=32")
    said = str(breccia.explain("matmul", x, tall.mT))
    assert "skipped: the weight has to be w.mT of a matrix with one scale for each row" in said
    assert "volt.matmul" in str(breccia.explain("matmul", "array", "int8", on="torch:cuda"))


@pytest.mark.gpu
def test_layers_and_gradients_use_the_triton_kernel_of_the_tutorial(volt: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from volt_breccia import kernels
    from volt_breccia.plugin import DEVICE

    from breccia_torch.nn import ScaledLinear

    ran: list[Any] = []
    product = kernels.product

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            ran.append(grid)
            return product[grid]

    monkeypatch.setattr(kernels, "product", Counted())
    x, w = operands(5, 64, 64)
    x.requires_grad_()
    breccia.matmul(x, w.mT, "float16").sum().backward()
    assert len(ran) == 1 and x.grad is not None and x.grad.isfinite().all()
    layer = ScaledLinear.from_linear(torch.nn.Linear(64, 32, dtype=torch.float16, device=DEVICE), "int8")
    assert layer(x.detach()).shape == (5, 32) and len(ran) == 2
