"""Layers whose owner reads their weight as a tensor: they stay as they are, with the reason, and the model runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

import breccia
import breccia_torch
from breccia_torch.nn import ScaledLinear


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 64, bias=False) for _ in range(5)]
        self.called, self.multiplied, self.functional, self.summed, self.asked = layers
        nn.init.zeros_(self.called.weight)

    def forward(self, x: Any) -> Any:
        x = self.called(x) + functional.linear(x, self.functional.weight) + self.helped(x)
        if isinstance(self.asked.weight, torch.Tensor) and self.asked.weight.dtype != x.dtype:
            x = x.to(self.asked.weight.dtype)
        return self.asked(x) * torch.einsum("ij->i", self.summed.weight)

    def helped(self, x: Any) -> Any:
        return (self.multiplied.weight @ x.mT).mT


class Inherits(Block):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


@pytest.mark.parametrize("kind", [Block, Inherits])
def test_layers_whose_weight_the_owner_reads_are_left_with_the_reason(kind: type[Block], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind()), torch.randn(3, 64)
    expected = model(x)
    summary = breccia_torch.quantize_(model, "int8")
    assert set(summary.quantized) == {"0.called.weight", "0.asked.weight"}
    read = {"0.multiplied.weight", "0.functional.weight", "0.summed.weight"}
    assert {name: summary.left[name] for name in read} == dict.fromkeys(read, f"{kind.__name__} reads its weight")
    assert functional.cosine_similarity(model(x).flatten(), expected.flatten(), 0) > 0.98


def test_a_file_with_such_a_weight_quantized_is_decoded_into_the_layer(tmp_path: Path) -> None:
    pytest.importorskip("breccia_bridges")
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    state = {name: breccia.cast(value, "int8") for name, value in model.state_dict().items()}
    breccia.bridges.save_safetensors(state, tmp_path / "model.safetensors")
    breccia_torch.load_model(model, tmp_path / "model.safetensors")
    assert type(model[0].multiplied) is nn.Linear and type(model[0].called) is ScaledLinear
    assert torch.equal(model[0].multiplied.weight, breccia.dequantize(state["0.multiplied.weight"]))
    assert model(torch.randn(3, 64)).isfinite().all()


def test_a_filter_of_the_user_decides_instead() -> None:
    model = nn.Sequential(Block())
    summary = breccia_torch.quantize_(model, "int8", lambda module, name: name.endswith("summed"))
    assert summary.quantized == ("0.summed.weight",)


@pytest.mark.together
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("name", ["Mamba", "FalconMamba", "Jamba"])
def test_state_space_models_of_transformers_run(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("breccia_bridges")
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1}
    heads = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 2}
    layers = {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    more = {"Jamba": heads | layers}.get(name, {"state_size": 16})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**sizes | more)).eval()
    model.save_pretrained(tmp_path / "dense")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits.flatten()
        summary = breccia_torch.quantize_(model, "mxfp8")
        assert any(reason.endswith("Mixer reads its weight") for reason in summary.left.values())
        assert any("in_proj" in n for n in summary.quantized)
        assert functional.cosine_similarity(model(ids).logits.flatten(), expected, 0) > 0.98
        breccia.bridges.convert(tmp_path / "dense", tmp_path / "scaled", "mxfp8")
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "scaled")
        assert functional.cosine_similarity(found(ids).logits.flatten(), expected, 0) > 0.98
