"""Small models of the architectures that transformers reads from GGUF: their own values, and those of transformers' own loader.

Each file is written as llama.cpp's conversion writes it: tensors under the names of the map of the library `gguf`, with what
`converted` does to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf as library
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.integrations import GGUF_CONFIG_MAPPING

import breccia
import breccia_torch
from breccia import UnsupportedError
from breccia.bridges import convert
from breccia_torch.hf import BrecciaConfig
from breccia_torch.nn import ScaledExperts, ScaledLinear, ScaledWeight

pytestmark = [
    pytest.mark.together,
    pytest.mark.usefixtures("no_progress_bars"),
    pytest.mark.filterwarnings("ignore"),  # of transformers and what it imports
]
VOCABULARY = 64
Q8_0, MXFP4 = library.GGMLQuantizationType.Q8_0, library.GGMLQuantizationType.MXFP4
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu"}
#: By model types of transformers, what is not the default of their configs.
MODELS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 1},
    "falcon 40b": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "gemma4_text": SIZES
    | {
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
    },
    "gemma4_text experts": SIZES
    | {
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "num_experts": 3,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_oss": SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "lfm2": SIZES | {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 4},
    "minimax_m2": SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "t5": T5,
    "umt5": T5,
}
ARCHITECTURES = {
    "falcon 40b": "falcon",
    "gemma4_text": "gemma4",
    "gemma4_text experts": "gemma4",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "umt5": "t5",
}
#: What transformers' own loader gets wrong: rows of Falcon 40B, the experts of Gemma 4 and gpt-oss, and the scalars of
#: Gemma 4's layers, which it does not find.
NOT_THEIRS = ("falcon 40b", "gemma4_text", "gemma4_text experts", "gpt_oss")
#: Matrices that GGUF has transposed.
TRANSPOSED = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight|.*\.mlp\.experts\.(gate_up_proj|down_proj)")


def made(kind: str) -> Any:
    """A random model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind.split()[0], **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1}, **MODELS[kind]
    )
    config.eos_token_id, config.dtype = 2, "float32"
    model = (AutoModelForSeq2SeqLM if "t5" in kind else AutoModelForCausalLM).from_config(config)
    for tensor in (*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith(("bias", "scalar")))):
        torch.nn.init.normal_(tensor, std=0.1)
    return model.eval()


def converted(kind: str, config: Any, name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """A tensor as llama.cpp's conversion changes it."""
    if kind == "falcon 40b" and "query_key_value" in name:
        groups = array.reshape(2, 4, -1, *array.shape[1:])  # each of two heads of q, one of k and one of v
        yield name, np.concatenate([part.reshape(-1, *array.shape[1:]) for part in (groups[:, :2], groups[:, 2], groups[:, 3])])
    elif kind == "bloom" and "query_key_value" in name:
        parts = array.reshape(config.n_head, 3, -1, *array.shape[1:])
        yield name, np.concatenate([parts[:, n].reshape(-1, *array.shape[1:]) for n in range(3)])
    elif name.endswith(("conv.conv.weight", "conv1d.weight")):
        yield name, array[:, 0]
    elif name.endswith("A_log"):
        yield name, -np.exp(array)
    elif kind == "gpt2" and is_transposed(kind, name):
        yield name, array.T
    elif kind == "gpt_oss" and "gate_up_proj" in name:
        rows, end = (array, "bias") if name.endswith("_bias") else (array.swapaxes(1, 2), "weight")
        stem = name.partition("gate_up_proj")[0]
        yield f"{stem}gate_proj.{end}", rows[:, ::2]
        yield f"{stem}up_proj.{end}", rows[:, 1::2]
    elif kind == "gpt_oss" and name.endswith("down_proj"):
        yield f"{name}.weight", array.swapaxes(1, 2)
    elif name.endswith("down_proj_bias"):
        yield name.replace("_bias", ".bias"), array
    elif name.endswith((".sinks", ".layer_scalar")) or (kind == "gemma4_text experts" and name.endswith("gate_up_proj")):
        yield f"{name}.weight", array
    elif name.endswith("router.scale"):
        yield name.replace("router.scale", "router.proj.scale"), array
    elif name.endswith("router.per_expert_scale"):
        yield name.replace("router.per_expert_scale", "experts.down_proj.scale"), array
    elif name.endswith("experts.gate_up_proj"):
        stem, half = name.removesuffix("gate_up_proj"), array.shape[1] // 2
        yield f"{stem}gate_proj.weight", array[:, :half]
        yield f"{stem}up_proj.weight", array[:, half:]
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", array
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), array
    else:
        yield name, array


def is_transposed(kind: str, name: str) -> bool:
    return kind in ("gpt2", "gpt_oss") and TRANSPOSED.fullmatch(name) is not None


def is_quantized(array: np.ndarray) -> bool:
    """Is it a matrix that llama.cpp quantizes? It leaves routers, of 3 experts here."""
    return array.ndim > 1 and array.shape[-1] % 32 == 0 and (array.ndim > 2 or len(array) > 3)


def type_of(kind: str, name: str) -> Any:
    """What the matrices of a model are quantized to: the experts of gpt-oss to MXFP4, as it has them."""
    return MXFP4 if kind == "gpt_oss" and "experts" in name else Q8_0


def values(kind: str, model: Any) -> dict[str, torch.Tensor]:
    """The state of a model, with the values that its file has."""
    found: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        rows = array.swapaxes(-1, -2) if is_transposed(kind, name) else array
        if is_quantized(rows):
            of = type_of(kind, name)
            rows = library.dequantize(library.quantize(rows, of), of)
            array = rows.swapaxes(-1, -2) if is_transposed(kind, name) else rows
        found[name] = torch.from_numpy(array)
    return found


def written(folder: Path, kind: str, model: Any) -> Path:
    """The model in GGUF: matrices as Q8_0 where their rows have whole blocks."""
    architecture, path = ARCHITECTURES.get(kind, kind), folder / "m.gguf"
    number = next(number for number, name in library.MODEL_ARCH_NAMES.items() if name == architecture)
    names = library.get_tensor_name_map(number, 2)
    out = library.GGUFWriter(path, architecture)
    out.add_name(kind)  # by which transformers tells umt5 from t5
    add_keys(out, kind, architecture, model.config)
    for name, value in model.state_dict().items():
        if name in model.all_tied_weights_keys:
            continue
        for changed, array in converted(kind, model.config, name, value.float().numpy()):
            stem, end = re.fullmatch(r"(.*?)((?:\.weight|\.bias|\.scale)?)", changed).groups()
            found = names.get_name(stem.removeprefix("transformer.")) or names.get_name(stem)
            assert found is not None, changed
            data = np.ascontiguousarray(array)
            if is_quantized(array):
                of = type_of(kind, name)
                out.add_tensor(f"{found}{end}", library.quantize(data, of), raw_dtype=of)
            else:
                out.add_tensor(f"{found}{end}", data)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def add_keys(out: Any, kind: str, architecture: str, config: Any) -> None:
    """What transformers makes the config of, and a vocabulary."""
    for key, name in GGUF_CONFIG_MAPPING[kind.split()[0].removesuffix("_text")].items():
        value = getattr(config, name, None) if name else None
        if kind == "lfm2" and name in ("rms_norm_eps", "rope_theta"):
            value = config.norm_eps if name == "rms_norm_eps" else config.rope_parameters["rope_theta"]
        if kind == "lfm2" and key == "attention.head_count_kv":
            out.add_array(f"{architecture}.{key}", [0, config.num_key_value_heads])
        elif "falcon" in kind and key == "attention.head_count_kv":
            out.add_uint32(f"{architecture}.{key}", config.num_kv_heads)
        elif key == "expert_gating_func":
            out.add_uint32(f"{architecture}.{key}", 2)
        elif type(value) is int:
            out.add_uint32(f"{architecture}.{key}", value)
        elif type(value) is float:
            out.add_float32(f"{architecture}.{key}", value)
    out.add_tokenizer_model("gpt2")
    out.add_token_list([f"t{n}" for n in range(VOCABULARY)])


def loaded(file: Path, kind: str, **options: Any) -> Any:
    """The model of a file, by transformers."""
    found = AutoModelForSeq2SeqLM if "t5" in kind else AutoModelForCausalLM
    return found.from_pretrained(file.parent, gguf_file=file.name, **options)


def assert_same(found: Any, wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_has_its_own_values_and_those_of_transformers_loader(tmp_path: Path, kind: str) -> None:
    original = made(kind)
    file = written(tmp_path, kind, original)
    # transformers makes no config of these from the file.
    given = {"config": original.config} if kind in NOT_THEIRS else {}
    model, report = loaded(file, kind, quantization_config=BrecciaConfig(), output_loading_info=True, **given)
    assert not any(report.values()), report
    found = model.dequantize().state_dict()
    own = values(kind, original)
    if kind == "mamba":  # the file has exponentials of this parameter
        own |= {name: torch.from_numpy(np.log(np.exp(value.numpy()))) for name, value in own.items() if "A_log" in name}
    assert_same(found, own)
    if kind not in NOT_THEIRS:
        assert_same(found, loaded(file, kind).state_dict())


@pytest.mark.parametrize("kind", ["gemma4_text experts", "gpt2", "gpt_oss"])
def test_a_model_of_transposed_or_joined_matrices_computes_what_the_decoded_one_does(tmp_path: Path, kind: str) -> None:
    original = made(kind)
    file = written(tmp_path, kind, original)
    model = loaded(file, kind, quantization_config=BrecciaConfig(), config=original.config).eval()
    held = {name: module.weight for name, module in model.named_modules() if isinstance(module, ScaledLinear)}
    held |= {name: module for name, module in model.named_modules() if isinstance(module, ScaledExperts)}
    in_layers = {"gemma4_text experts": 4 + 3 + 2, "gpt2": 2 + 2, "gpt_oss": 4 + 2}  # of attention, of the MLP, of experts
    assert len(held) == 2 * in_layers[kind] + 1  # the head
    ids = torch.arange(10, 18).reshape(1, 8)
    with torch.no_grad():
        found = model(ids).logits
        wanted = model.dequantize()(ids).logits
    # FP32 products of other orders of summation: 256 terms at most, over 2 layers.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_config_without_the_experts_of_the_file_is_refused(tmp_path: Path) -> None:
    """transformers makes no other of a file of Gemma 4."""
    file = written(tmp_path, "gemma4_text experts", made("gemma4_text experts"))
    said = (
        r"the file has experts \(model\.layers\.0\..*\), and the config that transformers makes of it has none\. Pass config="
    )
    with pytest.raises(UnsupportedError, match=said):
        loaded(file, "gemma4_text experts", quantization_config=BrecciaConfig())
    report = convert(file, tmp_path / "out", "none")
    (missing,) = [one for one in report.not_made if one.startswith("config.json")]
    assert re.search("the model has experts, and the config that transformers makes of m.gguf has none", missing)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_a_converted_model_is_a_folder_that_transformers_loads(tmp_path: Path, kind: str) -> None:
    source, out, original = tmp_path / "source", tmp_path / "out", made(kind)
    source.mkdir()
    file = written(source, kind, original)
    if kind in NOT_THEIRS:
        original.config.save_pretrained(source)
    convert(source, out, "none")
    auto = AutoModelForSeq2SeqLM if "t5" in kind else AutoModelForCausalLM
    model, report = auto.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    given = {"config": original.config} if kind in NOT_THEIRS else {}
    wanted = loaded(file, kind, quantization_config=BrecciaConfig(), **given)
    assert_same(model.dequantize().state_dict(), wanted.dequantize().state_dict())


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_a_file_that_is_quantized_again_keeps_names_and_the_rest(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path, kind, made(kind))
    convert(file, tmp_path / "new.gguf", "int4,group_size=32", dialect="gguf")
    old, new = (library.GGUFReader(path) for path in (file, tmp_path / "new.gguf"))
    assert [one.name for one in old.tensors] == [one.name for one in new.tensors]
    plain = [(one, other) for one, other in zip(old.tensors, new.tensors, strict=True) if other.tensor_type.name == "F32"]
    assert plain and all(np.array_equal(one.data, other.data) for one, other in plain)
    quantized = [(one, other) for one, other in zip(old.tensors, new.tensors, strict=True) if other.tensor_type.name == "Q4_0"]
    for one, other in quantized:
        wanted, found = (library.dequantize(t.data, t.tensor_type) for t in (one, other))
        assert wanted.shape == found.shape and np.corrcoef(wanted.reshape(-1), found.reshape(-1))[0, 1] > 0.98


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_load_model_reads_transposed_and_joined_matrices(tmp_path: Path, kind: str) -> None:
    original = made(kind)
    file, model = written(tmp_path, kind, original), AutoModelForCausalLM.from_config(original.config)
    assert breccia_torch.load_model(model, file) == ([], [])
    held = {name: module for name, module in model.named_modules() if isinstance(module, ScaledWeight)}
    own = values(kind, original)
    found = {name: module.decoded() if isinstance(module, ScaledExperts) else module.tensor for name, module in held.items()}
    for name, value in found.items():
        dense = breccia.dequantize(value) if isinstance(value, breccia.ScaledTensor) else value
        assert torch.equal(dense, own[name]), name
    assert len(held) == {"gpt2": 9, "gpt_oss": 13}[kind]
