"""Models of transformers over several places: `device_map=` with offload, as accelerate dispatches them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import transformers
from accelerate import dispatch_model
from hf_models import logits
from torch import nn
from transformers import AutoModelForCausalLM

import breccia
import breccia_torch
from breccia.bridges import convert
from breccia_torch.hf import BrecciaConfig
from breccia_torch.nn import ScaledExperts, ScaledLinear, ScaledWeight

pytestmark = [
    pytest.mark.together,
    pytest.mark.usefixtures("no_progress_bars"),
    pytest.mark.filterwarnings("ignore"),  # of transformers and accelerate
]

SIZES: dict[str, Any] = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
LLAMA: dict[str, Any] = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**LLAMA, attention_bias=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **LLAMA, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1
    ),
    "gpt2": transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32),
}


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder / "dense")
    return folder / "dense"


def places(name: str, second: str) -> dict[str, str]:
    """The second block, and what shares no weight, elsewhere."""
    if name == "gpt2":
        blocks = {"transformer.h.0": "cpu", "transformer.h.1": second, "transformer.ln_f": second}
        return {"transformer.wte": "cpu", "transformer.wpe": "cpu", **blocks, "lm_head": "cpu"}
    blocks = {"model.layers.0": "cpu", "model.layers.1": second, "model.norm": second, "lm_head": second}
    return {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", **blocks}


def close(a: Any, b: Any) -> None:
    """The same sums of at most 96 FP32 terms of order 1, in another order where a weight lies in memory otherwise."""
    torch.testing.assert_close(logits(a), logits(b), rtol=0, atol=1e-4)


def offloaded(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, ScaledWeight) and m.data.device.type == "meta"]


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("converted", [False, True], ids=["quantized on loading", "converted"])
def test_a_model_over_memory_and_disk_computes_as_in_one_place(name: str, converted: bool, tmp_path: Path) -> None:
    folder, options = saved(name, tmp_path), {"quantization_config": BrecciaConfig("nvfp4")}
    if converted:
        convert(folder, tmp_path / "scaled", "nvfp4")
        folder, options = tmp_path / "scaled", {}
    one = AutoModelForCausalLM.from_pretrained(folder, **options)
    over = {"device_map": places(name, "disk"), "offload_folder": str(tmp_path / "offload")}
    found = AutoModelForCausalLM.from_pretrained(folder, **over, **options)
    names = {n for n, m in one.named_modules() if isinstance(m, ScaledWeight)}
    assert {n for n, m in found.named_modules() if isinstance(m, ScaledWeight)} == names
    assert offloaded(found) and all(".1." in n for n in offloaded(found))
    for _ in range(2):  # weights come and go with each call
        close(found, one)
        assert offloaded(found)
    found.save_pretrained(tmp_path / "again")
    close(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), one)
    with pytest.raises(breccia.UnsupportedError, match="dequantize: .* is offloaded by the device_map"):
        found.dequantize()


def test_quantize_takes_a_model_that_accelerate_dispatched(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.Linear(64, 32))
    x = torch.randn(3, 64)
    expected = torch.nn.Sequential(*[ScaledLinear.from_linear(m, "mxfp8") if isinstance(m, nn.Linear) else m for m in model])(x)
    dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "disk", "3": "disk"}, offload_dir=str(tmp_path))
    breccia_torch.quantize_(model, "mxfp8")
    assert offloaded(model) == ["2.weight", "3.weight"]
    assert torch.equal(model(x), expected) and torch.equal(model(x), expected)
    assert model[2].weight.transposed.data.is_meta, "the transpose does not keep the memory of a layer that is on a disk"


def test_a_weight_for_a_disk_without_a_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(breccia.UnsupportedError, match=r"model.layers.1.*pass offload_folder="):
        AutoModelForCausalLM.from_pretrained(
            saved("llama", tmp_path), device_map=places("llama", "disk"), quantization_config=BrecciaConfig("nvfp4")
        )


def test_a_layer_with_a_forward_function_of_its_own_is_still_refused_in_a_dispatched_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    model[0].forward = lambda x: x  # pyright: ignore
    dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=str(tmp_path))
    with pytest.raises(breccia.UnsupportedError, match="0 has hooks or a custom forward"):
        breccia_torch.quantize_(model, "mxfp8")


def test_experts_on_a_disk_are_loaded_with_their_module(tmp_path: Path) -> None:
    found = AutoModelForCausalLM.from_pretrained(
        saved("qwen3_moe", tmp_path),
        device_map=places("qwen3_moe", "disk"),
        offload_folder=str(tmp_path / "offload"),
        quantization_config=BrecciaConfig("int8"),
    )
    experts = [m for m in found.modules() if isinstance(m, ScaledExperts)]
    assert [m.data.device.type for m in experts] == ["cpu", "cpu", "meta", "meta"] and logits(found).isfinite().all()


def test_a_model_on_the_meta_device_has_quantized_layers_without_numbers(tmp_path: Path) -> None:
    found = AutoModelForCausalLM.from_pretrained(
        saved("llama", tmp_path), device_map={"": "meta"}, quantization_config=BrecciaConfig("nvfp4")
    )
    assert offloaded(found) and isinstance(found.model.layers[0].mlp.up_proj, ScaledLinear)
