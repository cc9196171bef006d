"""The tensors of GGUF files under the names, and with the rows and shapes, that transformers has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import ARRAY, NUMBERS, STRING, U32, Tensor, gguf, key

import breccia
from breccia.bridges import load_checkpoint
from breccia_bridges.gguf_file import GGUFFile
from breccia_bridges.gguf_names import ARCHITECTURES

_RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)


def plain(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name, array.shape[::-1], NUMBERS["F32"], array.tobytes())


def opened(folder: Path, architecture: str, tensors: list[Tensor], **numbers: Any) -> GGUFFile:
    """A file of that architecture. numbers: keys of it."""
    keys = [key("general.architecture", STRING, architecture)]
    for name, number in numbers.items():
        kind, content = (ARRAY, (U32, number)) if isinstance(number, list) else (U32, number)
        keys.append(key(f"{architecture}.{name.replace('__', '.')}", kind, content))
    (folder / "m.gguf").write_bytes(gguf(keys, tensors))
    return GGUFFile(folder / "m.gguf")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_those_of_the_map_of_gguf(architecture: str) -> None:
    """The map has no name for a tensor that models of the architecture lack."""
    library = pytest.importorskip("gguf")
    number = next(number for number, name in library.MODEL_ARCH_NAMES.items() if name == architecture)
    names, known = library.get_tensor_name_map(number, 2), ARCHITECTURES[architecture]
    # Converters join the experts under a name without numbers.
    wanted = [*known.names().items(), *known.names(has_second=True).items()]
    wanted += [(ours, theirs.replace("experts.{}.", "experts.")) for ours, theirs in known.of_experts().items()]
    wanted += [(ours.removesuffix(".weight"), theirs) for ours, theirs in known.whole.items()]
    found = {ours.format(1): _mapped(names, theirs.format(1)) for ours, theirs in wanted}
    other = {ours: name for ours, name in found.items() if name not in (None, ours)}
    assert other == {}
    assert sum(name is not None for name in found.values()) > 6


def _mapped(names: Any, name: str) -> str | None:
    """GGUF's name by the map, which knows models that are converted without their head by names without a prefix."""
    return names.get_name(name) or names.get_name(name.removeprefix("transformer."))


def test_tensors_of_other_architectures_keep_their_names(tmp_path: Path) -> None:
    tensors = [plain(name, floats(4, 4)) for name in ("blk.0.attn_q.weight", "token_embd.weight", "x")]
    assert list(opened(tmp_path, "rwkv7", tensors).entries) == ["blk.0.attn_q.weight", "token_embd.weight", "x"]
    assert list(opened(tmp_path, "", tensors).entries) == ["blk.0.attn_q.weight", "token_embd.weight", "x"]


def test_what_transformers_lacks_keeps_its_name_and_what_it_computes_is_left_out(tmp_path: Path) -> None:
    names = ("blk.0.attn_norm_2.weight", "blk.0.unknown", "rope_freqs.weight", "output.weight", "blk.12.ffn_up.bias")
    file = opened(tmp_path, "qwen2", [plain(name, floats(4)) for name in names])
    found = ["blk.0.attn_norm_2.weight", "blk.0.unknown", "lm_head.weight", "model.layers.12.mlp.up_proj.bias"]
    assert list(file.entries) == found
    assert "rope_freqs.weight" in file.header.tensors


def rows_of_llama_cpp(array: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as llama.cpp arranges them, from those of transformers."""
    half = array.shape[0] // heads // 2
    order = [head * 2 * half + side * half + pair for head in range(heads) for pair in range(half) for side in range(2)]
    return array[order]


@pytest.mark.parametrize("architecture", [name for name, one in ARCHITECTURES.items() if one.permutes])
def test_rows_of_q_and_k_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    q, k, bias, v = floats(24, 8), floats(12, 8), floats(24), floats(12, 8)
    stored = {"attn_q.weight": rows_of_llama_cpp(q, 4), "attn_k.weight": rows_of_llama_cpp(k, 2)}
    stored |= {"attn_q.bias": rows_of_llama_cpp(bias, 4), "attn_v.weight": v}
    tensors = [plain(f"blk.0.{name}", array) for name, array in stored.items()]
    opened(tmp_path, architecture, tensors, attention__head_count=4, attention__head_count_kv=2)
    found = load_checkpoint(tmp_path / "m.gguf")
    attention = "model.layers.0.self_attn."
    np.testing.assert_array_equal(found[f"{attention}q_proj.weight"], q)
    np.testing.assert_array_equal(found[f"{attention}k_proj.weight"], k)
    np.testing.assert_array_equal(found[f"{attention}q_proj.bias"], bias)
    np.testing.assert_array_equal(found[f"{attention}v_proj.weight"], v)


@pytest.mark.parametrize("architecture", ["bloom", "falcon"])
def test_rows_of_heads_that_attend_together_are_beside_each_other(tmp_path: Path, architecture: str) -> None:
    """llama.cpp has all heads of q, then those of k, then those of v."""
    heads, q, k, v = floats(2, 4, 4, 8), slice(0, 2), 2, 3  # two groups, each of two heads of q, one of k and one of v
    parts = [heads[:, part].reshape(-1, 8) for part in (q, k, v)]
    tensors = [plain("blk.0.attn_qkv.weight", np.concatenate(parts)), plain("blk.0.attn_qkv.bias", np.concatenate(parts)[:, 0])]
    opened(tmp_path, architecture, tensors, attention__head_count=4, attention__head_count_kv=2)
    found = load_checkpoint(tmp_path)
    name = "transformer.h.0.self_attention.query_key_value."
    np.testing.assert_array_equal(found[f"{name}weight"], heads.reshape(32, 8))
    np.testing.assert_array_equal(found[f"{name}bias"], heads.reshape(32, 8)[:, 0])


@pytest.mark.parametrize(("heads", "kv"), [(4, 3), (5, 5), (4, 0)])
def test_heads_that_do_not_make_up_the_rows_are_refused(tmp_path: Path, heads: int, kv: int) -> None:
    said = (
        rf"'blk\.0\.attn_qkv\.weight' has shape \[32, 8\], and by the keys of the file {heads} heads of q and {kv} of k and v"
    )
    with pytest.raises(breccia.CorruptFileError, match=said):
        numbers = {"attention__head_count": heads, "attention__head_count_kv": kv}
        opened(tmp_path, "falcon", [plain("blk.0.attn_qkv.weight", floats(32, 8))], **numbers)


def test_the_logarithms_of_state_spaces_are_those_of_transformers(tmp_path: Path) -> None:
    stored = -np.abs(floats(8, 4))
    conv = floats(8, 4)
    opened(
        tmp_path, "mamba", [plain("blk.2.ssm_a", stored), plain("blk.2.ssm_conv1d.weight", conv), plain("blk.2.ssm_d", conv[0])]
    )
    found, mixer = load_checkpoint(tmp_path), "backbone.layers.2.mixer."
    np.testing.assert_array_equal(found[f"{mixer}A_log"], np.log(-stored))
    np.testing.assert_array_equal(found[f"{mixer}conv1d.weight"], conv[:, None])
    np.testing.assert_array_equal(found[f"{mixer}D"], conv[0])
    with pytest.raises(breccia.CorruptFileError, match=r"'blk\.2\.ssm_a' is F16; llama\.cpp stores A of state spaces as F32"):
        opened(tmp_path, "mamba", [Tensor("blk.2.ssm_a", (8,), NUMBERS["F16"], bytes(16))])


def test_experts_of_an_architecture_without_declared_ones_leave_it_unmapped(tmp_path: Path) -> None:
    """transformers would otherwise leave the experts alone at random."""
    file = opened(tmp_path, "gemma4", [plain("blk.0.attn_q.weight", floats(8, 8))], expert_count=2)
    assert list(file.entries) == ["blk.0.attn_q.weight"]
    assert file.unmapped.startswith("breccia does not map the tensors of architecture 'gemma4' with experts")
    assert opened(tmp_path, "gemma4", [plain("blk.0.attn_q.weight", floats(8, 8))], expert_count=0).unmapped == ""


def test_heads_may_differ_between_layers(tmp_path: Path) -> None:
    arrays = {layer: floats(24, 8) for layer in range(2)}
    tensors = [plain(f"blk.{n}.attn_k.weight", rows_of_llama_cpp(array, (2, 4)[n])) for n, array in arrays.items()]
    opened(tmp_path, "llama", tensors, attention__head_count=8, attention__head_count_kv=[2, 4])
    for n, array in arrays.items():
        np.testing.assert_array_equal(load_checkpoint(tmp_path)[f"model.layers.{n}.self_attn.k_proj.weight"], array)


def test_k_has_the_heads_of_q_where_the_file_names_no_others(tmp_path: Path) -> None:
    k = floats(24, 8)
    opened(tmp_path, "llama", [plain("blk.0.attn_k.weight", rows_of_llama_cpp(k, 4))], attention__head_count=4)
    np.testing.assert_array_equal(load_checkpoint(tmp_path)["model.layers.0.self_attn.k_proj.weight"], k)


@pytest.mark.parametrize(
    "numbers", [{}, {"attention__head_count": 5}, {"attention__head_count": 0}, {"attention__head_count": [4]}]
)
def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path: Path, numbers: dict[str, Any]) -> None:
    with pytest.raises(breccia.CorruptFileError, match=r"m\.gguf: tensor 'blk\.1\.attn_q\.weight' has shape \[24, 8\], and by"):
        opened(tmp_path, "llama", [plain("blk.1.attn_q.weight", floats(24, 8))], **numbers)


@pytest.mark.parametrize("architecture", [name for name, one in ARCHITECTURES.items() if one.shifts])
def test_the_weights_of_norms_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    stored, bias = floats(8), floats(8)
    tensors = [plain("output_norm.weight", stored), plain("blk.0.attn_norm.weight", stored)]
    opened(tmp_path, architecture, [*tensors, plain("output_norm.bias", bias), plain("output.weight", floats(4, 8))])
    found = load_checkpoint(tmp_path)
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        np.testing.assert_array_equal(found[name], stored - np.float32(1))
    np.testing.assert_array_equal(found["model.norm.bias"], bias)
    with pytest.raises(
        breccia.CorruptFileError, match=r"'output_norm\.weight' is F16; llama\.cpp stores the weights of norms as F32"
    ):
        opened(tmp_path, architecture, [Tensor("output_norm.weight", (8,), NUMBERS["F16"], bytes(16))])


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        ("qwen3moe", "model.layers.3.mlp.experts.{}.gate_proj.weight"),
        ("llama", "model.layers.3.block_sparse_moe.experts.{}.w1.weight"),
    ],
)
def test_experts_are_values_of_their_own(tmp_path: Path, architecture: str, form: str) -> None:
    stack, codes = floats(3, 4, 32), _RNG.integers(0, 256, (3, 4, 34), np.uint8)
    codes[..., :2] = np.float16(0.5).reshape(1).view(np.uint8)
    coded = Tensor("blk.3.ffn_up_exps.weight", (32, 4, 3), NUMBERS["Q8_0"], codes.tobytes())
    file = opened(tmp_path, architecture, [plain("blk.3.ffn_gate_exps.weight", stack), coded])
    assert len(file.entries) == 6
    found = load_checkpoint(tmp_path)
    for n in range(3):
        np.testing.assert_array_equal(found[form.format(n)], stack[n])
        up = form.format(n).replace("gate_proj", "up_proj").replace("w1", "w3")
        np.testing.assert_array_equal(found[up].data, codes[n, :, 2:].view(np.int8))


def test_the_scales_of_experts_are_theirs(tmp_path: Path) -> None:
    codes = _RNG.integers(0, 112, (3, 2, 36), np.uint8)
    stack = Tensor("blk.0.ffn_up_exps.weight", (64, 2, 3), NUMBERS["NVFP4"], codes.tobytes())
    factors = np.array([0.5, 1, 2], np.float32)
    opened(tmp_path, "qwen3moe", [stack, plain("blk.0.ffn_up_exps.scale", factors)])
    found = load_checkpoint(tmp_path)
    assert len(found) == 3
    for n in range(3):
        assert found[f"model.layers.0.mlp.experts.{n}.up_proj.weight"].global_scale == factors[n]


def test_the_scales_of_q_and_k_have_no_rows(tmp_path: Path) -> None:
    codes = _RNG.integers(0, 112, (8, 36), np.uint8)
    q = Tensor("blk.0.attn_q.weight", (64, 8), NUMBERS["NVFP4"], codes.tobytes())
    opened(tmp_path, "llama", [q, plain("blk.0.attn_q.scale", np.array([3], np.float32))], attention__head_count=2)
    assert load_checkpoint(tmp_path)["model.layers.0.self_attn.q_proj.weight"].global_scale == 3


def test_a_stack_of_one_expert_is_that_expert(tmp_path: Path) -> None:
    stack = floats(1, 4, 8)
    opened(tmp_path, "olmoe", [plain("blk.0.ffn_down_exps.weight", stack)])
    np.testing.assert_array_equal(load_checkpoint(tmp_path)["model.layers.0.mlp.experts.0.down_proj.weight"], stack[0])


@pytest.mark.parametrize("dims", [(0, 4, 3), (1, 1, 5000)])
def test_stacks_of_no_or_too_many_experts_are_refused(tmp_path: Path, dims: tuple[int, ...]) -> None:
    tensor = Tensor("blk.0.ffn_up_exps.weight", dims, NUMBERS["F32"], bytes(4 * int(np.prod(dims))))
    with pytest.raises(breccia.CorruptFileError, match=r"'blk\.0\.ffn_up_exps\.weight' has shape .*it is of 1 to 4096 experts"):
        opened(tmp_path, "qwen2moe", [tensor])


def test_the_gate_of_a_shared_expert_is_a_row(tmp_path: Path) -> None:
    gate = floats(8)
    opened(tmp_path, "qwen2moe", [plain("blk.0.ffn_gate_inp_shexp.weight", gate)])
    found = load_checkpoint(tmp_path)
    assert found.header("model.layers.0.mlp.shared_expert_gate.weight").shape == (1, 8)
    np.testing.assert_array_equal(found["model.layers.0.mlp.shared_expert_gate.weight"], gate[None])


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    said = re.escape("tensor 'lm_head.weight' and 'output.weight' are both 'lm_head.weight' in transformers")
    with pytest.raises(breccia.CorruptFileError, match=said):
        opened(tmp_path, "qwen2", [plain("output.weight", floats(4)), plain("lm_head.weight", floats(4))])
