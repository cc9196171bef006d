"""LoRA adapters of peft over quantized layers."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
import transformers
from hf_models import IDS
from torch import nn

import breccia
import breccia_torch
from breccia_torch.hf import lora
from breccia_torch.nn import ScaledLinear

pytestmark = [
    pytest.mark.together,
    pytest.mark.filterwarnings("ignore"),  # of peft and transformers
]

SIZES = {"vocab_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32}
CONFIGS: dict[str, Any] = {
    "llama": (transformers.LlamaConfig(**SIZES, hidden_size=64, intermediate_size=96), ["q_proj", "down_proj"]),
    "gpt2": (transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, n_positions=32), ["c_attn", "c_proj"]),
}


def quantized(name: str, recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name][0]).eval()
    breccia_torch.quantize_(model, recipe)
    return model


def config(name: str, **options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=CONFIGS[name][1], **options)


def trained(name: str, recipe: str) -> Any:
    """A quantized model with adapters, after two steps."""
    model = peft.get_peft_model(quantized(name, recipe), config(name)).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    return model.eval()


def layers(model: nn.Module) -> list[Any]:
    found = [m for m in model.modules() if isinstance(m, lora.LoraScaledLinear)]
    assert found
    return found


@pytest.mark.parametrize("recipe", ["nvfp4", "int8", "fp8_row"])
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_are_trained_saved_and_merged(name: str, recipe: str, tmp_path: Path) -> None:
    model = trained(name, recipe)
    with torch.no_grad():
        adapted = model(IDS).logits
        with model.disable_adapter():
            plain = model(IDS).logits
    assert torch.equal(plain, quantized(name, recipe)(IDS).logits), "the quantized weights are as they were"
    assert not torch.equal(adapted, plain)

    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(quantized(name, recipe), tmp_path).eval()
    assert torch.equal(again(IDS).logits, adapted)

    before = [layer.get_base_layer().weight.tensor.digest() for layer in layers(model)]
    expected = []
    for layer in layers(model):
        weight = layer.get_base_layer().weight.tensor
        delta = layer.get_delta_weight("default").detach()
        assert delta.shape == weight.shape and delta.any()
        expected.append(breccia.cast(breccia.dequantize(weight) + delta, recipe, axis=weight.axis).digest())
    model.merge_adapter(safe_merge=True)
    assert [layer.get_base_layer().weight.tensor.digest() for layer in layers(model)] == expected
    model.unmerge_adapter()
    assert [layer.get_base_layer().weight.tensor.digest() for layer in layers(model)] == before
    merged = copy.deepcopy(model).merge_and_unload()
    assert not [m for m in merged.modules() if isinstance(m, lora.LoraScaledLinear)]
    held = {m.weight.tensor.digest() for m in merged.modules() if isinstance(m, ScaledLinear)}
    assert held.issuperset(expected)


def test_several_adapters_are_merged_into_the_weight_of_before() -> None:
    model = trained("llama", "int8")
    model.add_adapter("other", config("llama", init_lora_weights=False))
    layer = layers(model)[0]
    weight = layer.get_base_layer().weight.tensor
    deltas = [layer.get_delta_weight(name).detach() for name in ("default", "other")]
    layer.merge(adapter_names=["default"])
    layer.merge(adapter_names=["other"])
    expected = breccia.cast(breccia.dequantize(weight) + deltas[0] + deltas[1], "int8")
    assert breccia.bytes_equal(layer.get_base_layer().weight.tensor, expected), "rounded once"
    layer.unmerge()
    assert breccia.bytes_equal(layer.get_base_layer().weight.tensor, weight) and not layer.merged
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(torch.nan)
    with pytest.raises(breccia.NonFiniteError, match=r"the weight with adapters \['default'\] has a NaN or Inf"):
        layer.merge(safe_merge=True, adapter_names=["default"])
    assert breccia.bytes_equal(layer.get_base_layer().weight.tensor, weight)


def test_variants_that_read_the_weight_are_refused() -> None:
    with pytest.raises(breccia.UnsupportedError, match="use_dora=True is not supported over a quantized layer"):
        peft.get_peft_model(quantized("llama", "int8"), config("llama", use_dora=True))
    with pytest.raises(breccia.UnsupportedError, match="init_lora_weights='pissa' reads the weight"):
        lora.register(config("llama", init_lora_weights="pissa"))
    model = trained("llama", "int8")
    with pytest.raises(breccia.UnsupportedError, match="init_lora_weights='olora' reads the weight"):
        model.add_adapter("other", config("llama", init_lora_weights="olora"))


def test_all_linear_selects_quantized_layers_and_not_the_head() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"][0])
    breccia_torch.quantize_(model, "int8", include=["*"], exclude=["*.o_proj.weight"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    over = {n for n, m in adapted.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert {name.rpartition(".")[2] for name in over} == {f"{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down")}
    assert len(layers(adapted)) == len(over) - 1, "the layer that is not quantized has peft's own"


@pytest.mark.long
def test_importing_hf_registers_with_peft_and_survives_one_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "peft.py").write_text("raise RuntimeError('a broken library')")
    script = """
import sys, logging, breccia_torch.hf
assert "breccia_torch.hf.lora" in sys.modules
print("registered", "peft" in sys.modules)
"""
    known = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert "registered True" in known.stdout
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    broken = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import breccia_torch.hf; print('imported')"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert "imported" in broken.stdout and "does not know quantized layers: RuntimeError: a broken library" in broken.stderr
