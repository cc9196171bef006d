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
from breccia_bridges.gguf_types import NAMED
from breccia_bridges.safetensors_file import Container

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
    file = opened(tmp_path, "gemma3", [plain("blk.0.attn_q.weight", floats(8, 8))], expert_count=2)
    assert list(file.entries) == ["blk.0.attn_q.weight"]
    assert file.unmapped.startswith("breccia does not map the tensors of architecture 'gemma3' with experts")
    assert opened(tmp_path, "gemma3", [plain("blk.0.attn_q.weight", floats(8, 8))], expert_count=0).unmapped == ""


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


def coded(name: str, kind: str, blocks: np.ndarray) -> Tensor:
    """Blocks of a type, (..., bytes), as a tensor."""
    one = NAMED[kind]
    return Tensor(name, (blocks.shape[-1] // one.size * one.length, *blocks.shape[-2::-1]), NUMBERS[kind], blocks.tobytes())


def blocks_of_q8_0(*shape: int) -> np.ndarray:
    """Random codes under scales of a half, of a tensor of that shape."""
    blocks = _RNG.integers(0, 256, (*shape[:-1], shape[-1] // 32, 34), np.uint8)
    blocks[..., :2] = np.float16(0.5).reshape(1).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def codes_of_q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks.reshape(*blocks.shape[:-1], -1, 34)[..., 2:].reshape(*blocks.shape[:-1], -1).view(np.int8)


def test_matrices_of_gpt2_are_transposed(tmp_path: Path) -> None:
    """Those of blocks have blocks along the axis before the last."""
    blocks, dense, bias, table = blocks_of_q8_0(24, 64), floats(64, 96), floats(24), floats(40, 64)
    dense_half = dense.astype(np.float16)
    tensors = [
        coded("blk.1.attn_qkv.weight", "Q8_0", blocks),
        plain("blk.1.attn_qkv.bias", bias),
        plain("blk.1.ffn_down.weight", dense),
        Tensor("blk.1.ffn_up.weight", (96, 64), NUMBERS["F16"], dense_half.tobytes()),
        plain("position_embd.weight", table),
    ]
    opened(tmp_path, "gpt2", tensors)
    found = load_checkpoint(tmp_path)
    layer = "transformer.h.1."
    st = found[f"{layer}attn.c_attn.weight"]
    assert st.shape == (64, 24) == found.header(f"{layer}attn.c_attn.weight").shape and st.axis == -2
    np.testing.assert_array_equal(st.data, codes_of_q8_0(blocks).T)
    np.testing.assert_array_equal(breccia.dequantize(st), codes_of_q8_0(blocks).T * np.float32(0.5))
    np.testing.assert_array_equal(found[f"{layer}mlp.c_proj.weight"], dense.T)
    np.testing.assert_array_equal(found[f"{layer}mlp.c_fc.weight"], dense_half.T)
    np.testing.assert_array_equal(found[f"{layer}attn.c_attn.bias"], bias)
    np.testing.assert_array_equal(found["transformer.wpe.weight"], table)
    assert found.header(f"{layer}mlp.c_proj.weight").shape == (96, 64)


def test_a_transposed_tensor_of_a_type_without_codes_is_decoded(tmp_path: Path) -> None:
    library = pytest.importorskip("gguf")
    blocks = _RNG.integers(0, 256, (4, 74), np.uint8)
    blocks[:, :2] = np.float16(0.25).reshape(1).view(np.uint8)
    opened(tmp_path, "gpt2", [coded("blk.0.ffn_up.weight", "IQ2_XS", blocks)])
    found = load_checkpoint(tmp_path)["transformer.h.0.mlp.c_fc.weight"]
    assert found.shape == (256, 4)
    np.testing.assert_array_equal(found, library.dequantize(blocks, library.GGMLQuantizationType.IQ2_XS).T)


GATE, UP = "blk.2.ffn_gate_exps", "blk.2.ffn_up_exps"
EXPERTS = "model.layers.2.mlp.experts."


def test_rows_of_gate_and_up_of_gpt_oss_alternate(tmp_path: Path) -> None:
    gate, up, down = blocks_of_q8_0(3, 4, 64), blocks_of_q8_0(3, 4, 64), floats(3, 64, 4)
    biases, sinks = floats(2, 3, 4), floats(8)
    tensors = [
        coded(f"{UP}.weight", "Q8_0", up),
        coded(f"{GATE}.weight", "Q8_0", gate),
        plain(f"{GATE}.bias", biases[0]),
        plain(f"{UP}.bias", biases[1]),
        plain("blk.2.ffn_down_exps.weight", down),
        plain("blk.2.ffn_down_exps.bias", biases[0]),
        plain("blk.2.attn_sinks.weight", sinks),
    ]
    file = opened(tmp_path, "gpt-oss", tensors, expert_count=3)
    assert file.unmapped == ""
    assert file.entries[f"{EXPERTS}gate_up_proj"].nbytes == 2 * gate.nbytes
    found = load_checkpoint(tmp_path)
    assert sorted(found) == [
        *(f"{EXPERTS}{name}" for name in ("down_proj", "down_proj_bias", "gate_up_proj", "gate_up_proj_bias")),
        "model.layers.2.self_attn.sinks",
    ]
    st = found[f"{EXPERTS}gate_up_proj"]
    assert st.shape == (3, 64, 8) and st.axis == -2
    np.testing.assert_array_equal(st.data[:, :, ::2], codes_of_q8_0(gate).swapaxes(1, 2))
    np.testing.assert_array_equal(st.data[:, :, 1::2], codes_of_q8_0(up).swapaxes(1, 2))
    np.testing.assert_array_equal(found[f"{EXPERTS}gate_up_proj_bias"][:, ::2], biases[0])
    np.testing.assert_array_equal(found[f"{EXPERTS}gate_up_proj_bias"][:, 1::2], biases[1])
    np.testing.assert_array_equal(found[f"{EXPERTS}down_proj"], down.swapaxes(1, 2))
    np.testing.assert_array_equal(found[f"{EXPERTS}down_proj_bias"], biases[0])
    np.testing.assert_array_equal(found["model.layers.2.self_attn.sinks"], sinks)


def test_halves_without_experts_are_an_empty_value(tmp_path: Path) -> None:
    opened(tmp_path, "gpt-oss", [plain(f"{name}.weight", floats(0, 4, 32)) for name in (GATE, UP)])
    assert load_checkpoint(tmp_path)[f"{EXPERTS}gate_up_proj"].shape == (0, 32, 8)


def test_experts_of_gpt_oss_are_those_of_its_checkpoint_of_transformers(tmp_path: Path) -> None:
    """ggml has element j and j + 16 of a block of MXFP4 in one byte, behind the scale; transformers 2j and 2j + 1."""
    codes, scales = _RNG.integers(0, 16, (3, 8, 2, 32), np.uint8), _RNG.integers(100, 140, (3, 8, 2, 1), np.uint8)
    blocks = np.concatenate([scales, codes[..., :16] | codes[..., 16:] << 4], axis=-1).reshape(3, 8, -1)
    tensors = [coded(f"{name}.weight", "MXFP4", blocks[:, half::2]) for half, name in enumerate((GATE, UP))]
    opened(tmp_path, "gpt-oss", tensors, expert_count=3)
    folder = tmp_path / "theirs"
    folder.mkdir()
    theirs = {f"{EXPERTS}gate_up_proj_blocks": codes[..., ::2] | codes[..., 1::2] << 4}
    theirs |= {f"{EXPERTS}gate_up_proj_scales": scales[..., 0]}
    breccia.bridges.save_safetensors(theirs, folder / "model.safetensors")
    name = f"{EXPERTS}gate_up_proj"
    found, wanted = load_checkpoint(tmp_path / "m.gguf")[name], load_checkpoint(folder)[name]
    assert found.recipe == wanted.recipe and found.shape == wanted.shape == (3, 64, 8)
    assert breccia.bytes_equal(found, wanted)


@pytest.mark.parametrize("first", [GATE, UP])
def test_halves_in_two_parts_of_a_model_are_one_value(tmp_path: Path, first: str) -> None:
    halves = {GATE: floats(2, 4, 32), UP: floats(2, 4, 32)}
    second = UP if first == GATE else GATE
    for number, name in enumerate((first, second)):
        keys = [key("general.architecture", STRING, "gpt-oss")] if number == 0 else []
        keys += [key("split.count", U32, 2), key("split.no", U32, number), key("split.tensors.count", U32, 2)]
        part = gguf(keys, [plain(f"{name}.weight", halves[name])])
        (tmp_path / f"m-{number + 1:05}-of-00002.gguf").write_bytes(part)
    found = load_checkpoint(tmp_path)
    assert list(found) == [f"{EXPERTS}gate_up_proj"]
    stack = found[f"{EXPERTS}gate_up_proj"].swapaxes(1, 2)
    np.testing.assert_array_equal(stack[:, ::2], halves[GATE])
    np.testing.assert_array_equal(stack[:, 1::2], halves[UP])


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            {GATE: (2, 4, 32)},
            rf"'{GATE}\.weight' is a half of '.*gate_up_proj' .*, of which the other, '{UP}\.weight', is missing",
        ),
        (
            {UP: (2, 4, 32)},
            rf"'{UP}\.weight' is a half of '.*gate_up_proj' .*, of which the other, '{GATE}\.weight', is missing",
        ),
        (
            {GATE: (2, 4, 32), UP: (2, 3, 32)},
            rf"'{GATE}\.weight' has shape \[2, 4, 32\], and '{UP}\.weight' \[2, 3, 32\]; in transformers they are the halves",
        ),
        ({GATE: (4, 32), UP: (4, 32)}, rf"'{GATE}\.weight' has shape \[4, 32\], .* with an axis for the experts"),
    ],
)
def test_halves_that_do_not_fit_together_are_refused(tmp_path: Path, shapes: dict[str, tuple[int, ...]], said: str) -> None:
    tensors = [plain(f"{name}.weight", floats(*shape)) for name, shape in shapes.items()]
    with pytest.raises(breccia.CorruptFileError, match=rf"m\.gguf: tensor {said}.* Download the file again\.") as caught:
        opened(tmp_path, "gpt-oss", tensors, expert_count=2)
    assert caught.value.found["name"] == f"{next(iter(shapes))}.weight"


def test_halves_of_two_types_are_refused(tmp_path: Path) -> None:
    tensors = [plain(f"{GATE}.weight", floats(2, 4, 32)), coded(f"{UP}.weight", "Q8_0", blocks_of_q8_0(2, 4, 32))]
    said = rf"m\.gguf: tensor '{GATE}\.weight' is F32, and '{UP}\.weight' Q8_0; transformers has both in '.*gate_up_proj'"
    with pytest.raises(breccia.UnsupportedError, match=said):
        opened(tmp_path, "gpt-oss", tensors, expert_count=2)


def test_experts_of_gemma4_are_one_value(tmp_path: Path) -> None:
    fused, down, scales = blocks_of_q8_0(2, 8, 32), floats(2, 32, 4), floats(2)
    tensors = [
        coded("blk.0.ffn_gate_up_exps.weight", "Q8_0", fused),
        plain("blk.0.ffn_down_exps.weight", down),
        plain("blk.0.ffn_down_exps.scale", scales),
        plain("blk.0.ffn_gate_inp.weight", down[:, :, 0]),
        plain("blk.0.ffn_gate_inp.scale", down[0, :, 0]),
    ]
    opened(tmp_path, "gemma4", tensors, expert_count=2)
    found, layer = load_checkpoint(tmp_path), "model.layers.0."
    np.testing.assert_array_equal(found[f"{layer}experts.gate_up_proj"].data, codes_of_q8_0(fused))
    np.testing.assert_array_equal(found[f"{layer}experts.down_proj"], down)
    np.testing.assert_array_equal(found[f"{layer}router.per_expert_scale"], scales)
    np.testing.assert_array_equal(found[f"{layer}router.proj.weight"], down[:, :, 0])
    np.testing.assert_array_equal(found[f"{layer}router.scale"], down[0, :, 0])


@pytest.mark.parametrize(
    ("architecture", "stem", "new"),
    [
        ("gemma4", "blk.0.ffn_gate_up_exps", "model.layers.0.experts.gate_up_proj"),
        ("gpt-oss", "blk.0.ffn_down_exps", "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_scales_of_experts_that_are_one_value_are_refused(tmp_path: Path, architecture: str, stem: str, new: str) -> None:
    stack = coded(f"{stem}.weight", "NVFP4", _RNG.integers(0, 112, (2, 4, 36), np.uint8))
    said = rf"m\.gguf: tensor '{stem}\.scale' has a scale for each expert, for which '{new}', their one value in transformers"
    with pytest.raises(breccia.UnsupportedError, match=said):
        opened(tmp_path, architecture, [stack, plain(f"{stem}.scale", floats(2))], expert_count=2)


@pytest.mark.parametrize("architecture", ["gpt-oss", "gpt2"])
def test_a_file_that_is_written_from_another_has_its_tensors_as_they_are(tmp_path: Path, architecture: str) -> None:
    pytest.importorskip("gguf")  # writes the keys
    blocks = blocks_of_q8_0(3, 4, 64)
    if architecture == "gpt2":
        tensors = [coded("blk.2.attn_qkv.weight", "Q8_0", blocks[0]), plain("blk.2.ffn_up.weight", floats(4, 64))]
    else:
        tensors = [coded(f"{name}.weight", "Q8_0", blocks) for name in (UP, GATE)]
    opened(tmp_path, architecture, tensors)
    breccia.bridges.convert(tmp_path / "m.gguf", tmp_path / "same.gguf", "none", dialect="gguf")
    breccia.bridges.convert(tmp_path / "m.gguf", tmp_path / "new.gguf", "int4,group_size=32", dialect="gguf")
    old, same, new = (GGUFFile(tmp_path / f"{name}.gguf").as_stored() for name in ("m", "same", "new"))
    assert list(old.entries) == list(same.entries) == list(new.entries) == [one.name for one in tensors]
    for name in old.entries:
        assert np.array_equal(old.read(name), same.read(name))
        assert (new.entries[name].dtype, new.entries[name].shape) == ("Q4_0", old.entries[name].shape)


def test_a_converted_folder_says_nothing_about_tensors_of_the_file(tmp_path: Path) -> None:
    """What is transposed is by then: the value has the axis of its blocks."""
    opened(tmp_path, "gpt2", [coded("blk.1.attn_qkv.weight", "Q8_0", blocks_of_q8_0(24, 64))])
    breccia.bridges.convert(tmp_path / "m.gguf", tmp_path / "m.safetensors", "none")
    name = "transformer.h.1.attn.c_attn.weight"
    before, after = load_checkpoint(tmp_path / "m.gguf"), load_checkpoint(tmp_path / "m.safetensors")
    assert after.header(name).axis == -2 and breccia.bytes_equal(before[name], after[name])
    assert "transposed" not in Container(tmp_path / "m.safetensors").metadata.values()
