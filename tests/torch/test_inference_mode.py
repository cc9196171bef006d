"""Layers and tensors made under `torch.inference_mode`, trained afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import breccia
import breccia_torch
from breccia_torch.nn import ScaledLinear


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)).eval()


def quantized(found: nn.Sequential, folder: Path) -> None:
    breccia_torch.quantize_(found, "nvfp4")


def quantized_into_a_storage(found: nn.Sequential, folder: Path) -> None:
    breccia_torch.quantize_(found, "mxfp8", storage="transposed")


def loaded(found: nn.Sequential, folder: Path) -> None:
    other = model()
    breccia_torch.quantize_(other, "mxfp8")
    breccia_torch.save_model(other, folder / f"{torch.is_inference_mode_enabled()}.safetensors")
    breccia_torch.load_model(found, folder / f"{torch.is_inference_mode_enabled()}.safetensors")


def by_hand(found: nn.Sequential, folder: Path) -> None:
    for n in (0, 2):
        found[n] = ScaledLinear.from_linear(found[n], "int8")


def replaced(found: nn.Sequential, folder: Path) -> None:
    by_hand(found, folder)
    found[0].weight.take(breccia.cast(torch.ones(32, 64), "int8"))


@pytest.mark.parametrize("change", [quantized, quantized_into_a_storage, loaded, by_hand, replaced])
def test_layers_made_under_inference_mode_train_afterwards(change: Callable[[Any, Path], None], tmp_path: Path) -> None:
    pytest.importorskip("breccia_bridges")
    found, expected = model(), model()
    with torch.inference_mode():
        change(found, tmp_path)
        found(torch.randn(3, 64))  # keeps what it derives
    change(expected, tmp_path)
    gradients = []
    for each in (found, expected):
        torch.manual_seed(1)
        x = torch.randn(3, 64, requires_grad=True)
        (each.train()(x) ** 2).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_products_with_tensors_made_under_inference_mode_have_gradients() -> None:
    with torch.inference_mode():
        inside = breccia.cast(torch.ones(32, 64), "nvfp4")
    outside = breccia.cast(torch.ones(32, 64), "nvfp4")
    for call in (
        lambda x, st: breccia.matmul(x, st.mT),
        lambda x, st: breccia.cast_matmul(x, "mxfp8", st.mT),
        lambda x, st: breccia.grouped_matmul(x, breccia.stack([st]).mT, torch.tensor([3], dtype=torch.int32)),
    ):
        gradients: list[Any] = []
        for st in (inside, outside):
            x = torch.arange(192.0).reshape(3, 64).requires_grad_()
            call(x, st).sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)
