"""Embeddings and output layers that transformers ties, where the files have codes for them: `breccia_torch.hf.tying`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")  # transformers reads with it

import torch
from gguf_models import llama
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Gemma3TextConfig

import breccia
from breccia.bridges import save_safetensors
from breccia_torch.hf import BrecciaConfig
from breccia_torch.nn import ScaledLinear
from breccia_torch.tables import ScaledTable

pytestmark = [
    pytest.mark.together,
    pytest.mark.usefixtures("no_progress_bars"),
    pytest.mark.filterwarnings("ignore"),  # of transformers and what it imports
]
IDS = torch.tensor([[1, 5, 9, 30, 7]])
TIES = {"lm_head.weight": "model.embed_tokens.weight"}


def loaded(folder: Path, config: Any = None, **options: Any) -> Any:
    """The model of a GGUF file with tied embeddings."""
    file = llama(folder)
    options |= {"quantization_config": config or BrecciaConfig()}
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def shares(model: Any) -> bool:
    """Whether the head is a quantized layer with the table of the embedding."""
    table = model.get_input_embeddings().weight
    return isinstance(model.lm_head, ScaledLinear) and isinstance(table, ScaledTable) and model.lm_head.weight is table


def test_the_embedding_looks_up_the_values_that_the_head_multiplies_by(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    assert shares(model)
    values = breccia.dequantize(model.lm_head.weight.tensor)
    assert torch.equal(model.get_input_embeddings()(IDS), values[IDS])


def test_copies_pickles_and_ties_made_again_keep_sharing(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    expected = logits(model)
    again = copy.deepcopy(model)
    again.tie_weights()
    for found in (again, pickle.loads(pickle.dumps(model)), model.to("cpu")):
        assert shares(found) and torch.equal(logits(found), expected)


def test_a_saved_folder_has_the_codes_once(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    model.save_pretrained(tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "embed" in name or "lm_head" in name]  # noqa: SIM118
    assert sorted(names) == ["model.embed_tokens.weight.data", "model.embed_tokens.weight.scale"]
    for options in ({}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}):
        found, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True, **options)
        assert not any(report.values()), report
        assert shares(found) and torch.equal(logits(found.eval()), logits(model))


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": "auto"},
        {"config": BrecciaConfig(modules_to_not_convert=["lm_head"])},
        {"config": BrecciaConfig(modules_to_not_convert=["embed_tokens"])},
    ],
)
def test_weights_that_move_alone_or_keep_their_precision_are_decoded(options: Any, tmp_path: Path) -> None:
    model = loaded(tmp_path, **options)
    assert model.lm_head.weight is model.get_input_embeddings().weight and isinstance(model.lm_head.weight, torch.nn.Parameter)


def test_a_vocabulary_of_another_size_takes_decoded_values(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    assert shares(model) and model.resize_token_embeddings() is model.get_input_embeddings() and shares(model)
    values, count = breccia.dequantize(model.lm_head.weight.tensor), model.config.vocab_size
    embedding = model.resize_token_embeddings(count + 3)
    assert model.lm_head.weight is embedding.weight and embedding.weight.shape == (count + 3, values.shape[1])
    assert torch.equal(embedding.weight[:count], values) and logits(model).shape[-1] == count + 3


def test_decoded_models_are_tied_again(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    values = breccia.dequantize(model.lm_head.weight.tensor)
    assert model.all_tied_weights_keys == {}
    model.dequantize()
    assert model.all_tied_weights_keys == TIES and model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight, values)


@pytest.mark.long
def test_a_compiled_model_has_one_graph(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(IDS, use_cache=False).logits, logits(model))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_an_embedding_keeps_the_scale_that_no_file_has(name: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    plain = AutoModelForCausalLM.from_config(Gemma3TextConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
    state = {key: value for key, value in plain.state_dict().items() if key not in ("lm_head.weight", *TIES.values())}
    plain.config.save_pretrained(tmp_path)
    save_safetensors(
        {name: breccia.cast(plain.lm_head.weight.detach(), "int8,group_size=32"), **state},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=BrecciaConfig()).eval()
    assert shares(model) and model.model.embed_tokens.embed_scale == 8, "the root of 64"
    assert torch.equal(model.get_input_embeddings()(IDS), breccia.dequantize(model.lm_head.weight.tensor)[IDS] * 8)
