"""What config.json says of a model of transformers, however its layers were quantized, and folders that do not say it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from hf_models import logits
from transformers import AutoModelForCausalLM

import breccia
import breccia_torch
from breccia.bridges import convert
from breccia_torch.nn import ScaledExperts, ScaledLinear

pytestmark = [
    pytest.mark.together,
    pytest.mark.usefixtures("no_progress_bars"),
    pytest.mark.filterwarnings("ignore"),  # of transformers
]

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 32,
}


def model(moe: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    if moe:
        config = transformers.Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1
        )
    return AutoModelForCausalLM.from_config(config).eval()


def by_hand(folder: Path) -> Any:
    """Layers of two recipes, one of which casts its inputs."""
    found = model()
    mlp = found.model.layers[0].mlp
    mlp.up_proj = ScaledLinear.from_linear(mlp.up_proj, "mxfp8")
    mlp.down_proj = ScaledLinear.from_linear(mlp.down_proj, "int8", activation="fp8_row")
    return found


def in_two_steps(folder: Path) -> Any:
    found = model()
    breccia_torch.quantize_(found, "mxfp8", include=["*.up_proj.weight"], exclude=["*.self_attn.*", "*.down_proj.*"])
    breccia_torch.quantize_(found, "nvfp4", activation="mxfp8")
    return found


def experts_by_hand(folder: Path) -> Any:
    found = model(moe=True)
    experts = found.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        weight = ScaledExperts.quantized(getattr(experts, name), "mxfp8")
        delattr(experts, name)
        setattr(experts, name, weight)
    return found


def from_torchao(folder: Path) -> Any:
    torchao = pytest.importorskip("torchao.quantization")
    found = model()
    torchao.quantize_(found.model.layers, torchao.Int8WeightOnlyConfig(version=2))
    breccia_torch.from_torchao_model_(found)
    return found


def from_a_file(folder: Path) -> Any:
    quantized = model()
    breccia_torch.quantize_(quantized, "nvfp4")
    breccia_torch.save_model(quantized, folder / "state.safetensors")
    found = model()
    breccia_torch.load_model(found, folder / "state.safetensors")
    return found


def unpickled(folder: Path) -> Any:
    return pickle.loads(pickle.dumps(by_hand(folder)))


@pytest.mark.parametrize("made", [by_hand, in_two_steps, experts_by_hand, from_torchao, from_a_file, unpickled])
def test_a_saved_model_loads_again_however_its_layers_were_made(made: Callable[[Path], Any], tmp_path: Path) -> None:
    found = made(tmp_path)
    expected = logits(found)
    found.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "breccia" and "breccia_torch.hf" in config["transformers_weights"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    inputs = [[(n, m.activation) for n, m in each.named_modules() if isinstance(m, ScaledLinear)] for each in (found, again)]
    assert inputs[0] == inputs[1]
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-4)  # as in test_hf: sums in another order


def test_a_model_that_another_library_quantized_is_not_saved_under_one_name(tmp_path: Path) -> None:
    class Config:
        quant_method = "acme"

    class Quantizer:
        quantization_config = Config()

    found = by_hand(tmp_path)
    found.hf_quantizer = Quantizer()
    with pytest.raises(breccia.UnsupportedError, match="holds layers of breccia, and is quantized by acme"):
        found.save_pretrained(tmp_path / "saved")


def unmarked(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key in ("quantization_config", "transformers_weights"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("writer", ["convert", "sharded", "state"])
def test_a_folder_of_quantized_weights_without_the_mark_is_refused(writer: str, tmp_path: Path) -> None:
    folder = tmp_path / "scaled"
    if writer == "convert":
        model().save_pretrained(tmp_path / "dense")
        convert(tmp_path / "dense", folder, "mxfp8")
    elif writer == "sharded":
        by_hand(tmp_path).save_pretrained(folder, max_shard_size="20KB")
    else:  # what transformers wrote before it knew breccia: the state of the layers
        from safetensors.torch import save_file

        found = by_hand(tmp_path)
        found.save_pretrained(folder)
        state = {name: part.clone().contiguous() for name, part in found.state_dict().items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    unmarked(folder)
    with pytest.raises(breccia.UnsupportedError, match=r"has weights that breccia quantized .* no quantization_config"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_plain_folders_load_as_ever(tmp_path: Path) -> None:
    plain = model()
    plain.save_pretrained(tmp_path)
    assert not hasattr(plain, "hf_quantizer") and "quantization_config" not in (tmp_path / "config.json").read_text()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(plain))


@pytest.mark.long
def test_a_layer_put_in_by_hand_marks_the_model_where_breccia_was_never_told_of_transformers(tmp_path: Path) -> None:
    script = """
import sys, breccia_torch.nn, transformers
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))
mlp = model.model.layers[0].mlp
mlp.up_proj = breccia_torch.nn.ScaledLinear.from_linear(mlp.up_proj, "mxfp8")
model.save_pretrained(sys.argv[1])
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, tmp_path], check=True, capture_output=True)
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())
