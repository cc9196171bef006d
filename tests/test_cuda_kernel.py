"""The CUDA kernel of the tutorial on a GPU: its bytes, and that layers, gradients and graphs use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import on_cuda, wide

import breccia
from breccia.arrays import frameworks
from breccia.dispatch.registry import Plugin, Registry, _installed

SOURCES = Path(__file__).resolve().parent / "third_party" / "acme-breccia" / "src"
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
    assert breccia.explain("dequantize", tiles).running == "reference.dequantize"


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
    breccia_torch.enable_compile()
    graph = torch.compile(lambda st: breccia.dequantize(st) * 2, fullgraph=True, backend="aot_eager")
    graph(layer.weight.tensor)
    ran.clear()
    assert torch.equal(graph(layer.weight.tensor), values * 2) and len(ran) == 1
    assert np.isfinite(values.cpu().numpy()).all()
