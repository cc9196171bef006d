"""transformers' `from_pretrained` of folders that other libraries quantized, without those libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import foreign_models
import torch
import transformers
from foreign_torch import EXPERTS, LLAMAS, assert_holds, config_of, experts_folder, llama_folder, on_meta, smollm2_loaded
from golden_dialects import ACROSS, EXPECTED, REFUSED, unpacked
from hf_models import logits
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import Interleave, Transpose, WeightConverter

import breccia
import breccia_torch
from breccia import ScaledTensor
from breccia.backend import components
from breccia.bridges import convert, load_checkpoint
from breccia_torch.hf import BrecciaConfig, places
from breccia_torch.nn import ScaledExperts, ScaledLinear, ScaledWeight
from breccia_torch.tables import ScaledTable

pytestmark = [
    pytest.mark.together,
    pytest.mark.usefixtures("no_progress_bars"),
    pytest.mark.filterwarnings("ignore"),  # of transformers and what it imports
]

#: Their configs have other sizes than their tensors, or another model; the last one multiplies its inputs.
_OTHER = (
    "deepseek_v3_fp32",
    "deepseek_v3_ue8m0",
    "deepseek_v4_fp4",
    "fp8_per_tensor_hf",
    "gpt_oss_mxfp4",
    "modelopt_int4_awq",
    ACROSS,
)
GOLDEN = [name for name, expected in EXPECTED.items() if not expected.startswith(REFUSED) and name not in _OTHER]
#: Those with other names of tensors.
SOME = ["autoround_gptq_int4", "awq_gemm_int4", "bnb_nf4_double", "quanto_qint8", "quark_mxfp4", "torchao_nvfp4"]
DOWN = "model.layers.1.mlp.down_proj.weight"


def loaded(path: Path, config: BrecciaConfig | None = None, **options: Any) -> Any:
    """The model of a folder. Every tensor of the files and of the model has found its place."""
    options |= {"config": config_of(path), "quantization_config": config or BrecciaConfig(), "output_loading_info": True}
    found, report = AutoModelForCausalLM.from_pretrained(path, **options)
    assert not any(report.values()), report
    return found


def decoded(path: Path, into: Path) -> Any:
    """The model of the values that NumPy decodes, which transformers loads as any."""
    into.mkdir()
    values = load_checkpoint(path)
    dense = {n: breccia.dequantize(v) if isinstance(v, ScaledTensor) else v.astype(np.float32) for n, v in values.items()}
    save_file({n: np.ascontiguousarray(v) for n, v in dense.items()}, into / "model.safetensors", {"format": "pt"})
    config_of(path).save_pretrained(into)
    return AutoModelForCausalLM.from_pretrained(into)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind != "fp8_block" else []) for kind in LLAMAS]
)
def test_a_sharded_folder_loads_with_the_values_that_numpy_decodes(kind: str, tmp_path: Path) -> None:
    path = llama_folder(tmp_path, kind, shards=6)
    found = loaded(path)
    assert_holds(found, path)
    by_name = AutoModelForCausalLM.from_config(config_of(path)).eval()
    breccia_torch.load_model(by_name, path)
    assert torch.equal(logits(found), logits(by_name))
    found.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "breccia" and "quantization" not in config
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(found))
    assert load_checkpoint(tmp_path / "again").dialects == ["breccia"]


@pytest.mark.long
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_become_stacks_of_their_codes(name: str, tmp_path: Path) -> None:
    path = experts_folder(tmp_path, name)
    found = loaded(path)
    held = [module.tensor for module in found.modules() if isinstance(module, ScaledExperts)]
    checkpoint = load_checkpoint(path)
    stored = [value for n, value in checkpoint.items() if isinstance(value, ScaledTensor) and ".experts." in n]
    assert len(held) == 4 and sum(st.nbytes for st in held) == sum(st.nbytes for st in stored)
    by_name = AutoModelForCausalLM.from_config(config_of(path)).eval()
    if name == "mixtral":  # load_model takes names as they are
        with pytest.raises(breccia.UnknownNameError, match=r"missing: .*mlp\.experts.*unexpected: .*block_sparse_moe"):
            breccia_torch.load_model(by_name, path)
    else:
        assert breccia_torch.load_model(by_name, path) == ([], [])
        assert torch.equal(logits(found), logits(by_name))
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(found))
    expected = decoded(path, tmp_path / "decoded").state_dict()
    state = found.dequantize().state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["modelopt_fp8", "modelopt_nvfp4"])
def test_a_method_that_transformers_does_not_know_needs_no_other_config(name: str, tmp_path: Path) -> None:
    """Files that ModelOpt wrote. Its scales of inputs are reported as unexpected."""
    path, _ = unpacked(name, tmp_path)
    options: dict[str, Any] = {"quantization_config": BrecciaConfig(), "output_loading_info": True}
    found, report = AutoModelForCausalLM.from_pretrained(path, **options)
    assert len(report["unexpected_keys"]) == 7 and all(key.endswith("input_scale") for key in report["unexpected_keys"])
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert_holds(found, path)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SOME else pytest.mark.long) for n in GOLDEN])
def test_every_dialect_loads_with_the_values_that_numpy_decodes(name: str, tmp_path: Path) -> None:
    """Files that the libraries wrote, which may lack weights of the model."""
    path, _ = unpacked(name, tmp_path)
    options: dict[str, Any] = {"quantization_config": BrecciaConfig(), "output_loading_info": True}
    found, report = AutoModelForCausalLM.from_pretrained(path, config=config_of(path), **options)
    assert not report["mismatched_keys"] and not report["error_msgs"]
    weights = {n: m for n, m in found.named_modules() if isinstance(m, ScaledWeight)}
    checkpoint = load_checkpoint(path)
    scaled = {value for value in checkpoint if checkpoint.header(value).recipe is not None and ".experts." not in value}
    assert set(weights) == scaled and len(scaled) > 1
    for value, weight in weights.items():
        expected = breccia.dequantize(checkpoint[value])
        assert np.array_equal(breccia.dequantize(weight.tensor).numpy(), expected, equal_nan=True), value
    parts = [part for value in scaled for part in checkpoint.header(value).parts]
    assert not report["unexpected_keys"].intersection(parts)


def test_a_config_beside_config_json_is_read(tmp_path: Path) -> None:
    path = llama_folder(tmp_path, "gptq")
    config = json.loads((path / "config.json").read_text())
    (path / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (path / "config.json").write_text(json.dumps(config))
    assert_holds(AutoModelForCausalLM.from_pretrained(path, quantization_config=BrecciaConfig()), path)
    (path / "quantize_config.json").unlink()
    with pytest.raises(breccia.DialectError, match=r"GPTQ \('gptq'\) and GPTQ version 2 \('gptq_v2'\).*Give source_dialect="):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=BrecciaConfig())
    found = AutoModelForCausalLM.from_pretrained(path, quantization_config=BrecciaConfig(source_dialect="gptq"))
    expected = load_checkpoint(path, source_dialect="gptq")[DOWN]
    assert np.array_equal(found.get_submodule(DOWN).decoded(torch.float32).numpy(), breccia.dequantize(expected))


def test_tied_embeddings_keep_codes_excluded_modules_are_decoded_and_layers_cast_inputs(tmp_path: Path) -> None:
    path = llama_folder(tmp_path, "mlx", shards=6, embeddings=True)
    checkpoint = load_checkpoint(path)
    embedding = checkpoint["model.embed_tokens.weight"]
    assert isinstance(embedding, ScaledTensor)
    found = loaded(path, BrecciaConfig(activation="mxfp8", modules_to_not_convert=["o_proj"]))
    for name, st in ((name, st) for name, st in checkpoint.items() if "o_proj" in name):
        expected = torch.from_numpy(np.asarray(breccia.dequantize(st))).to(torch.bfloat16)
        assert torch.equal(found.get_parameter(name), expected), name
    layers = {name: m for name, m in found.named_modules() if isinstance(m, ScaledLinear)}
    assert len(layers) == 13 and not any("o_proj" in name for name in layers)
    assert {m.activation for m in layers.values()} == {breccia.recipe("mxfp8")}
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert breccia.bytes_equal(
        found.lm_head.weight.tensor, load_checkpoint(path, framework="torch")["model.embed_tokens.weight"]
    )


def test_with_a_recipe_values_are_decoded_and_quantized_again(tmp_path: Path) -> None:
    path = llama_folder(tmp_path, "pack_quantized", shards=2)
    found = loaded(path, BrecciaConfig("mxfp8"), dtype=torch.float32)
    values = np.asarray(breccia.dequantize(load_checkpoint(path)[DOWN]))
    assert breccia.bytes_equal(found.get_submodule(DOWN).tensor, breccia.cast(torch.from_numpy(values), "mxfp8"))
    assert sum(isinstance(m, ScaledWeight) for m in found.modules()) == 14
    path = experts_folder(tmp_path / "moe", "qwen3_moe")
    found = loaded(path, BrecciaConfig("int8"))
    assert sum(isinstance(m, ScaledExperts) for m in found.modules()) == 4
    plain = decoded(path, tmp_path / "decoded")
    breccia_torch.quantize_(plain, "int8")
    assert torch.equal(logits(found), logits(plain))


def test_a_model_without_a_layer_that_can_hold_codes_is_a_plain_one(tmp_path: Path) -> None:
    path = llama_folder(tmp_path, "fp8_block")
    found = loaded(path, BrecciaConfig(modules_to_not_convert=["layers"]))
    assert not any(isinstance(m, ScaledWeight) for m in found.modules()) and not hasattr(found.config, "quantization_config")
    expected = torch.from_numpy(np.asarray(breccia.dequantize(load_checkpoint(path)[DOWN]))).to(torch.bfloat16)
    assert torch.equal(found.get_parameter(DOWN), expected)
    found.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), logits(found))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["foreign", "ours"])
def test_values_that_the_model_lacks_are_unexpected(kind: str, tmp_path: Path) -> None:
    """As DeepSeek's layer that predicts the token after the next."""
    path = experts_folder(tmp_path, "qwen3_moe")
    if kind == "ours":
        convert(path, tmp_path / "ours", "none")
        path = tmp_path / "ours"
    config = AutoConfig.from_pretrained(path) if kind == "ours" else config_of(path)
    config.num_hidden_layers = 1
    options: dict[str, Any] = {} if kind == "ours" else {"quantization_config": BrecciaConfig()}
    found, report = AutoModelForCausalLM.from_pretrained(path, config=config, output_loading_info=True, **options)
    assert not report["missing_keys"] and all("layers.1." in key for key in report["unexpected_keys"])
    assert sum(isinstance(m, ScaledExperts) for m in found.modules()) == 2
    checkpoint, name = load_checkpoint(path), "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(found.get_submodule(name).decoded(torch.float32).numpy(), breccia.dequantize(checkpoint[name]))


def test_values_of_breccia_load_beside_those_of_another_library(tmp_path: Path) -> None:
    path, own = llama_folder(tmp_path, "gptq"), DOWN.replace("down", "up")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    left = {name: tensor for name, tensor in tensors.items() if not name.startswith(own.removesuffix("weight"))}
    save_file(left, path / "one.safetensors", {"format": "pt"})
    value = breccia.cast(np.random.default_rng(0).standard_normal((192, 128), np.float32), "nvfp4")
    breccia.bridges.save_safetensors({own: value}, path / "two.safetensors")
    files = dict.fromkeys(left, "one.safetensors") | {f"{own}.{part}": "two.safetensors" for part in components(value)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert_holds(loaded(path), path)


def test_a_converted_folder_loads_in_the_same_way(tmp_path: Path) -> None:
    path = llama_folder(tmp_path, "nvfp4")
    convert(path, tmp_path / "ours", "none")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")), logits(loaded(path)))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gptq", "fp8_block"])
def test_a_model_over_memory_and_disk_computes_as_in_one_place(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    path = llama_folder(tmp_path, kind, shards=2)
    blocks = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", **blocks}
    found = loaded(path, device_map=places, offload_folder=str(tmp_path / "offload"))
    assert found.get_submodule(DOWN).data.is_meta
    # The same sums of at most 192 terms of order 1 in FP32, in another order, rounded to BF16 a dozen times.
    torch.testing.assert_close(logits(found).float(), logits(loaded(path)).float(), rtol=0, atol=2**-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "nvfp4", "mlx", "fp8_block"])
def test_a_model_of_smollm2s_size_loads_in_the_memory_that_it_then_takes(kind: str, tmp_path: Path) -> None:
    path, took = smollm2_loaded("transformers", kind, tmp_path)
    assert took["peak"] <= took["held"] + took["largest"], took
    assert_holds(loaded(path), path)


@pytest.fixture
def fused(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of Qwen3-VL whose experts are FP8, of (experts, in_features, out_features), and its state in the model."""
    text: dict[str, Any] = {
        **{key: 64 for key in ("vocab_size", "hidden_size", "intermediate_size")},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
        **{"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]},
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]})
    torch.manual_seed(0)
    dense = transformers.Qwen3VLMoeForConditionalGeneration(config)
    tensors, state = dict(dense.state_dict()), dict(dense.state_dict())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        codes = (tensors[name] * 64).to(torch.float8_e4m3fn)
        state[name] = codes.float() / 2
        tensors[name], tensors[f"{name}_scale_inv"] = codes.mT.contiguous(), torch.full((4, 1, 1), 0.5)
    (tmp_path / "fused").mkdir()
    save_torch({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "fused" / "model.safetensors", {"format": "pt"})
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "fused" / "config.json").write_text(json.dumps({**config.to_dict(), "quantization_config": said}))
    return tmp_path / "fused", state


def test_experts_that_transformers_transposes_keep_their_codes(
    fused: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    path, state = fused
    load, ids = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained, torch.arange(12)[None]
    found, report = load(path, config=config_of(path), quantization_config=BrecciaConfig(), output_loading_info=True)
    assert not any(report.values()), report
    convert(path, tmp_path / "none", "none")
    found.save_pretrained(tmp_path / "again")
    expected = found(ids).logits
    for model in (found, load(tmp_path / "none"), load(tmp_path / "again")):
        experts = {name: module for name, module in model.named_modules() if isinstance(module, ScaledExperts)}
        assert len(experts) == 2
        assert all(torch.equal(module.decoded(torch.float32), state[name]) for name, module in experts.items())
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("kind", ["foreign", "ours"])
def test_a_tied_head_that_is_quantized_in_the_files_shares_its_codes_with_the_embedding(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the files have other values of both, transformers does not tie them, and they are decoded."""
    monkeypatch.setattr(foreign_models, "is_quantized", lambda name: name.endswith(("_proj.weight", "lm_head.weight")))
    weights, head = foreign_models.llama(foreign_models.SMALL), "lm_head.weight"
    embeddings = weights.pop("model.embed_tokens.weight")
    for name, folder in (("one", {head: embeddings}), ("two", {head: embeddings, "model.embed_tokens.weight": embeddings})):
        foreign_models.write(tmp_path / name, weights | folder, foreign_models.SMALL, "gptq")
        value = torch.from_numpy(np.asarray(breccia.dequantize(load_checkpoint(tmp_path / name)[head])))
        path = tmp_path / name
        if kind == "ours":
            path = tmp_path / f"{name}-ours"
            convert(tmp_path / name, path, "none")
            found = AutoModelForCausalLM.from_pretrained(path)
        else:
            found = loaded(path)
        assert (found.lm_head.weight is found.model.embed_tokens.weight) == (name == "one")
        assert sum(isinstance(m, ScaledLinear) for m in found.modules()) == (15 if name == "one" else 14)
        held = found.lm_head.weight
        decoded = held.decoded() if isinstance(held, ScaledTable) else held
        assert torch.equal(decoded, value.to(torch.bfloat16))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_quantized_needs_a_recipe(tmp_path: Path) -> None:
    on_meta(llama_folder(tmp_path, "gptq")).to_empty(device="cpu").save_pretrained(tmp_path / "dense")
    with pytest.raises(
        breccia.UnsupportedError, match="dense has no quantized tensor: give BrecciaConfig the recipe to quantize"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=BrecciaConfig())


def test_an_unknown_dialect_is_named(tmp_path: Path) -> None:
    with pytest.raises(breccia.UnknownNameError, match="gptk.*did you mean 'gptq'"):
        loaded(llama_folder(tmp_path, "gptq"), BrecciaConfig(source_dialect="gptk"))


def test_a_value_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = llama_folder(tmp_path, "gptq")
    tensors = load_file(path / "model.safetensors")
    name = DOWN.replace("weight", "scales")
    save_file(tensors | {name: np.full_like(tensors[name], np.inf)}, path / "model.safetensors")
    with pytest.raises(
        breccia.DialectError, match=r"layers\.1\.mlp\.down_proj\.weight \(GPTQ\): 'scales' has 384 scales that are "
    ):
        loaded(path)


def test_a_shape_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    path = llama_folder(tmp_path, "gptq")
    config = config_of(path)
    config.intermediate_size = 256
    message = r"model\.layers\.0\.mlp\.\w+_proj\.weight has shape \(\d+, \d+\) in the file and \(\d+, \d+\) in the model"
    with pytest.raises(breccia.ShapeError, match=message):
        AutoModelForCausalLM.from_pretrained(path, config=config, quantization_config=BrecciaConfig())


def test_weights_whose_layer_multiplies_its_inputs_are_refused(tmp_path: Path) -> None:
    path, _ = unpacked("modelopt_int4_awq", tmp_path)
    with pytest.raises(breccia.UnsupportedError, match=r"the inputs of \S+ are multiplied by \S+\.pre_quant_scale"):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=BrecciaConfig())


def test_codes_that_were_kept_for_multiplied_inputs_are_refused_too(tmp_path: Path) -> None:
    path, _ = unpacked("modelopt_int4_awq", tmp_path)
    convert(path, tmp_path / "ours", "none")
    with pytest.raises(breccia.UnsupportedError, match=r"the inputs of \S+ are multiplied by \S+\.pre_quant_scale"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


def test_transformers_refuses_another_config_than_that_of_the_folder(tmp_path: Path) -> None:
    """Which is why the config is loaded without it."""
    path = llama_folder(tmp_path, "gptq")
    with pytest.raises(ValueError, match="quantized with GPTQConfig but you are passing a BrecciaConfig"):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=BrecciaConfig())
    assert AutoConfig.from_pretrained(path, quantization_config=None).quantization_config is None
    assert isinstance(config_of(path), transformers.LlamaConfig)


def test_a_conversion_of_transformers_that_breccia_does_not_do_is_named(
    fused: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, name = fused[0], "mlp.experts.gate_up_proj"
    alternate = WeightConverter(name, name, [Interleave(dim=1), Transpose(1, 2)])
    monkeypatch.setattr(places, "get_model_conversion_mapping", lambda _: [alternate])
    message = r"makes (\S+\.experts\.gate_up_proj) of \1 by Interleave\(1\), Transpose\(1, 2\), which breccia does not do"
    options: dict[str, Any] = {"config": config_of(path), "quantization_config": BrecciaConfig()}
    with pytest.raises(breccia.UnsupportedError, match=message):
        transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(path, **options)


def test_codes_without_scales_do_not_become_floats(tmp_path: Path) -> None:
    path = llama_folder(tmp_path, "gptq")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.embed_tokens.weight": np.ones((96, 128), np.int8)}, path / "model.safetensors")
    with pytest.raises(breccia.DialectError, match=r"model\.embed_tokens\.weight is I8 of shape 96x128, without scales"):
        loaded(path)
