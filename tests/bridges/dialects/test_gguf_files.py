"""GGUF files that `convert` writes: rewritten ones, and those of folders of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import ARRAY, F32, NUMBERS, STRING, Tensor, gguf, key
from gguf_models import keys, llama, norm, tensors

import breccia
from breccia.bridges import convert, load_checkpoint, save_safetensors
from breccia_bridges.gguf_file import GGUFFile
from breccia_bridges.gguf_names import ARCHITECTURES, Namer

library = pytest.importorskip("gguf")
Q8_0, Q4_0 = "int8,group_size=32,scale_dtype=fp16", "int4,group_size=32"
HEADS = 4
CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 40},
    **{"num_attention_heads": HEADS, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64},
}
_ATTENTION = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
SHAPES = {
    "model.embed_tokens.weight": (40, 64),
    **{f"model.layers.0.self_attn.{name}_proj.weight": shape for name, shape in _ATTENTION.items()},
    **{f"model.layers.0.mlp.{name}_proj.weight": (128, 64) for name in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (64, 128),
    **{f"model.layers.0.{name}_layernorm.weight": (64,) for name in ("input", "post_attention")},
    "model.norm.weight": (64,),
}


def model(folder: Path, shapes: dict[str, tuple[int, ...]] | None = None, **config: Any) -> Path:
    """A folder of transformers with random weights."""
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (shapes or SHAPES).items()}
    save_safetensors(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def written(source: Path, recipe: Any, **options: Any) -> Path:
    """The GGUF file of a source, beside it."""
    new = source.with_name("new.gguf")
    convert(source, new, recipe, dialect="gguf", **options)
    return new


def found(file: Path) -> dict[str, Any]:
    """Keys and tensors by the library."""
    reader = library.GGUFReader(file)
    tensors = {one.name: library.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    return {key: one.contents() for key, one in reader.fields.items() if not key.startswith("GGUF.")} | tensors


def refused(source: Path, recipe: Any, said: str, **options: Any) -> None:
    before = sorted(source.parent.iterdir())
    with pytest.raises(breccia.BrecciaError, match=said):
        written(source, recipe, **options)
    assert sorted(source.parent.iterdir()) == before


# ------------------------------------------------------------------------------------------------ files that are rewritten


def test_a_file_that_is_rewritten_keeps_every_byte(tmp_path: Path) -> None:
    file = llama(tmp_path)
    assert written(file, "none").read_bytes() == file.read_bytes()


def test_what_is_neither_a_value_nor_known_stays_as_it_is(tmp_path: Path) -> None:
    """Norms to which llama.cpp has added 1, values that are decoded when they are read, and keys of any type."""
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 256, (4, 66), np.uint8)
    rows[:, :2] = np.array([0x3C00], np.uint16).view(np.uint8)
    extra = [
        Tensor("blk.0.attn_q.weight", (256, 4), NUMBERS["IQ2_XXS"], rows.tobytes()),
        *(norm(rng, name) for name in ("blk.0.attn_norm.weight", "output_norm.weight", "rope_freqs.weight", "other")),
    ]
    beside = [key("x.bool", 7, True), key("x.ids", ARRAY, (5, [-1, 7]))]
    beside += [key("x.floats", ARRAY, (F32, [0.1, -0.0])), key("x.texts", ARRAY, (STRING, ["", "ü"]))]
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf([key("general.architecture", STRING, "gemma"), *beside], extra, alignment=64))
    assert written(file, "none").read_bytes() == file.read_bytes()


def test_a_file_under_a_recipe_has_its_other_tensors_as_they_are(tmp_path: Path) -> None:
    file = llama(tmp_path)
    before, after = found(file), found(written(file, Q8_0))
    assert after.pop("general.file_type") == library.LlamaFileType.MOSTLY_Q8_0
    assert after.pop("general.quantization_version") == 2
    assert before.keys() == after.keys()
    types = {one.name: one.tensor_type.name for one in library.GGUFReader(file.with_name("new.gguf")).tensors}
    original = {one.name: one.tensor_type.name for one in library.GGUFReader(file).tensors}
    assert {types[name] for name in types if "norm" not in name} == {"Q8_0"}
    for name in before:
        if name not in types or types[name] == original[name]:
            np.testing.assert_array_equal(after[name], before[name])
    values, again = load_checkpoint(file), load_checkpoint(file.with_name("new.gguf"))
    for name, is_kept in (("self_attn.q_proj", True), ("self_attn.k_proj", False)):
        wanted = values[f"model.layers.0.{name}.weight"]  # Q8_0 has all codes of Q4_0, but no biases of Q4_1
        wanted = wanted if is_kept else breccia.cast(breccia.dequantize(wanted), Q8_0)
        np.testing.assert_array_equal(breccia.dequantize(again[f"model.layers.0.{name}.weight"]), breccia.dequantize(wanted))


def test_a_file_that_is_decoded_says_so(tmp_path: Path) -> None:
    file = llama(tmp_path)
    after = found(written(file, "bf16"))
    assert after["general.file_type"] == library.LlamaFileType.MOSTLY_BF16
    np.testing.assert_array_equal(after["output_norm.weight"], found(file)["output_norm.weight"])


def test_the_parts_of_a_split_model_become_one_file(tmp_path: Path) -> None:
    every, split = tensors(), [key("split.count", 2, 2), key("split.tensors.count", 5, len(tensors()))]
    for n, part in enumerate((every[:9], every[9:])):
        of = [*(keys() if n == 0 else keys()[:1]), key("split.no", 2, n), *split]
        (tmp_path / f"m-{n + 1:05}-of-00002.gguf").write_bytes(gguf(of, part))
    new = tmp_path / "new.gguf"
    convert(tmp_path / "m-00001-of-00002.gguf", new, "none", dialect="gguf")
    assert new.read_bytes() == llama(tmp_path).read_bytes()


# ------------------------------------------------------------------------------------------------ folders of transformers


@pytest.mark.parametrize("recipe", [Q8_0, Q4_0, "mxfp4", "nvfp4"])
def test_a_folder_has_its_values_in_the_order_of_llama_cpp(tmp_path: Path, recipe: str) -> None:
    folder = model(tmp_path / "m")
    there = found(written(folder, recipe))
    weights = breccia.bridges.load_safetensors(folder / "model.safetensors")
    rows = [head * 16 + side * 8 + pair for head in range(HEADS) for pair in range(8) for side in range(2)]
    q = np.asarray(breccia.dequantize(breccia.cast(weights["model.layers.0.self_attn.q_proj.weight"], recipe)))
    scale = there.get("blk.0.attn_q.scale", np.float32(1))
    np.testing.assert_array_equal(there["blk.0.attn_q.weight"] * scale, q[rows])
    np.testing.assert_array_equal(there["token_embd.weight"], weights["model.embed_tokens.weight"])
    assert there["llama.attention.head_count_kv"] == 2 and there["llama.rope.dimension_count"] == 16
    assert there["tokenizer.ggml.model"] == "no_vocab"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_places_are_those_that_are_read(tmp_path: Path, architecture: str) -> None:
    """Every tensor of an architecture gets a name that is read as its own."""
    known = ARCHITECTURES[architecture]
    given = {"general.architecture": architecture} | {f"{architecture}.attention.head_count": 2}
    namer = Namer(tmp_path, given)
    both = known.names() | known.names(has_second=True) | known.of_experts()
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in both.items()} | known.whole
    joined = {*known.pairs, *known.pairs.values(), *known.transposed}
    for form, theirs in names.items():
        ours, place = form.format(3), namer.place(theirs.format(3, 0), (12, 8))
        if ours.split(".")[-2] in joined:
            assert place is None or ours.endswith(".bias")
            continue
        assert place is not None and place.name == ours
        assert place.expert == (0 if form.removesuffix(".weight") in known.of_experts() else None)
    assert namer.place("model.layers.3.other.weight", (4, 8)) is None
    assert namer.place("model.other", (4, 8)) is None


def test_experts_become_stacks(tmp_path: Path) -> None:
    expert = {
        f"model.layers.0.mlp.experts.{n}.{name}_proj.weight": shape
        for n in range(12)
        for name, shape in {"gate": (64, 64), "up": (64, 64), "down": (64, 64)}.items()
    }
    shapes = {name: shape for name, shape in SHAPES.items() if ".mlp." not in name}
    folder = model(
        tmp_path / "m",
        {**shapes, **expert, "model.layers.0.mlp.gate.weight": (12, 64)},
        model_type="qwen3_moe", num_experts=12, num_experts_per_tok=2, moe_intermediate_size=64,
    )  # fmt: skip
    file = written(folder, "nvfp4")
    there, weights = found(file), breccia.bridges.load_safetensors(folder / "model.safetensors")
    assert there["blk.0.ffn_down_exps.weight"].shape == (12, 64, 64) and there["blk.0.ffn_down_exps.scale"].shape == (12,)
    down = np.asarray(breccia.dequantize(breccia.cast(weights["model.layers.0.mlp.experts.11.down_proj.weight"], "nvfp4")))
    np.testing.assert_array_equal(there["blk.0.ffn_down_exps.weight"][11] * there["blk.0.ffn_down_exps.scale"][11], down)
    np.testing.assert_array_equal(there["blk.0.ffn_gate_inp.weight"], weights["model.layers.0.mlp.gate.weight"])
    assert written(file.rename(tmp_path / "m.gguf"), "none").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    policy = {"*experts.3.up_proj*": Q8_0, "default": Q4_0}
    refused(
        folder, policy, r"experts of a layer in one tensor blk\.0\.ffn_up_exps\.weight, of one type; .* one recipe", force=True
    )


def test_norms_of_gemma_get_1_more_and_vectors_are_f32(tmp_path: Path) -> None:
    around = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    shapes = {**SHAPES, **{f"model.layers.0.{name}.weight": (64,) for name in around}}
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 8}
    folder = model(tmp_path / "m", shapes, model_type="gemma2", **caps)
    weights = breccia.bridges.load_safetensors(folder / "model.safetensors")
    half = {name: array.astype(np.float16) for name, array in weights.items()}
    save_safetensors(half, folder / "model.safetensors", force=True)
    there = found(written(folder, Q8_0))
    np.testing.assert_array_equal(there["output_norm.weight"], half["model.norm.weight"].astype(np.float32) + np.float32(1))
    np.testing.assert_array_equal(there["token_embd.weight"], half["model.embed_tokens.weight"])
    assert there["gemma2.attn_logit_softcapping"] == 50 and there["gemma2.attention.sliding_window"] == 8


def test_the_factors_of_llama3_are_a_tensor(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = model(tmp_path / "m", rope_parameters={**rope, "original_max_position_embeddings": 64})
    there = found(written(folder, Q8_0))
    factors = there["rope_freqs.weight"]
    assert factors.shape == (8,) and factors[0] == 1 and factors[-1] == 8 and (np.diff(factors) >= 0).all()
    assert there["llama.rope.freq_base"] == 500000


def test_a_tokenizer_has_its_tokens_merges_and_special_tokens(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<s>": 3}
    added = [{"id": 3, "content": "<s>", "special": True}, {"id": 4, "content": "<x>", "special": False}]
    bpe = {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]]}
    steps = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}]}
    tokenizer = {"model": bpe, "added_tokens": added, "pre_tokenizer": steps}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    there = found(written(folder, Q8_0))
    assert there["tokenizer.ggml.tokens"][:6] == ["a", "b", "ab", "<s>", "<x>", "[PAD5]"]
    assert there["tokenizer.ggml.token_type"] == [1, 1, 1, 3, 4, *[5] * 35]
    assert (there["tokenizer.ggml.model"], there["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    assert there["tokenizer.ggml.merges"] == ["a b"]
    assert there["tokenizer.ggml.bos_token_id"] == 3 and there["tokenizer.ggml.add_bos_token"] is True


def test_pieces_have_scores_in_the_order_of_merges(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "▁": 2, "b": 3, "▁b": 4, "bb": 5}
    bpe = {"type": "BPE", "vocab": vocabulary, "merges": ["b b", "▁ b"], "byte_fallback": True, "unk_token": "<unk>"}
    added = [{"id": 6, "content": "▁▁", "special": False}]
    tokenizer = {"model": bpe, "added_tokens": added, "normalizer": {"type": "Prepend", "prepend": "▁"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    there = found(written(folder, Q8_0))
    assert there["tokenizer.ggml.scores"][:6] == [-2, -2, -2, -2, -1, 0]
    assert there["tokenizer.ggml.token_type"][:8] == [2, 6, 1, 1, 1, 1, 4, 5]
    assert there["tokenizer.ggml.tokens"][6] == "  " and there["tokenizer.ggml.add_space_prefix"] is True


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_tokenizer_that_is_not_known_is_left_out_and_said(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    report = convert(folder, tmp_path / "new.gguf", Q8_0, dialect="gguf")
    (said,) = report.not_made
    assert said.startswith("the file has no tokenizer: tokenizer.json has a model 'Unigram', and breccia writes those of type")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {}}}))
    (said,) = convert(folder, tmp_path / "new.gguf", Q8_0, dialect="gguf", force=True).not_made
    assert "splits text in a way for which breccia knows no name of llama.cpp" in said
    many = {"model": {"type": "BPE", "vocab": {"a": 40}}, "pre_tokenizer": {"type": "ByteLevel"}}
    (folder / "tokenizer.json").write_text(json.dumps(many))
    (said,) = convert(folder, tmp_path / "new.gguf", Q8_0, dialect="gguf", force=True).not_made
    assert "tokenizer.json has 41 tokens, and the model 40" in said


def test_recipes_that_gguf_lacks_are_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    refused(
        folder, "int8", "GGUF does not store it: GGUF has no type for 'int8'.*nearest .*'int8,group_size=32,scale_dtype=fp16'"
    )
    refused(folder, "gguf,type=Q4_K", r"Q4_K has whole blocks of 256 elements, which do not divide the last axis")


def test_scales_that_llama_cpp_ignores_are_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", model_type="qwen2")
    refused(
        folder, "nvfp4", "multiplies by the scale of a tensor of NVFP4 in .*llama.*, and not in 'qwen2'. Give 'nvfp4,two_level"
    )
    assert found(written(folder, "nvfp4,two_level=false"))["general.file_type"] == library.LlamaFileType.MOSTLY_NVFP4


def test_models_without_a_declaration_are_refused(tmp_path: Path) -> None:
    refused(
        model(tmp_path / "m", model_type="mamba"), Q8_0, "says model_type='mamba'; breccia writes GGUF files of gemma, .*llama"
    )
    (tmp_path / "m" / "config.json").unlink()
    refused(tmp_path / "m", Q8_0, "has no config.json, which says what the model is, and a GGUF file has to")


def test_names_that_the_architecture_lacks_are_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {**SHAPES, "model.layers.0.self_attn.x_proj.weight": (64, 64)})
    refused(
        folder, Q8_0, r"GGUF's 'llama', the architecture by config.json, has no place for model\.layers\.0\.self_attn\.x_proj"
    )


def test_frequencies_that_programs_compute_are_left_out(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {**SHAPES, "model.layers.0.self_attn.rotary_emb.inv_freq": (8,)})
    assert not [name for name in found(written(folder, Q8_0)) if "inv_freq" in name]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": None}, "says hidden_size=None, and GGUF needs a number for llama.embedding_length"),
        ({"rope_scaling": {"type": "longrope"}}, "type 'longrope'; breccia writes default, linear, yarn and llama3"),
        ({"rope_scaling": {"type": "linear"}}, "has rotary embeddings without factor"),
        ({"layer_types": ["sliding_attention"]}, "has layer_types other than those of every llama in llama.cpp"),
        ({"use_sliding_window": True}, "has use_sliding_window=true, which llama.cpp does not compute"),
        ({"query_pre_attn_scalar": 99}, "has query_pre_attn_scalar=99, for which llama.cpp takes the size of heads, 16"),
        ({"num_attention_heads": 5}, "attn_q of layer 0 has shape .*64, 64.*, and the model 5 heads, of pairs of rows"),
    ],
)
def test_configs_that_llama_cpp_does_not_compute_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    refused(model(tmp_path / "m", **config), Q8_0, said)


def test_dtypes_that_gguf_lacks_are_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    weights = breccia.bridges.load_safetensors(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.uint16)
    save_safetensors(weights, folder / "model.safetensors", force=True)
    refused(folder, Q8_0, r"q_proj\.bias is U16, which GGUF does not have. Give recipe='bf16'")


def test_destinations_are_files_of_gguf(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    for name, said in (("new", "does not end in .gguf; add the suffix"), ("m-00001-of-00002.gguf", "a part of a split model")):
        with pytest.raises(breccia.UnsupportedError, match=said):
            convert(folder, tmp_path / name, Q8_0, dialect="gguf")
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(
        breccia.UnsupportedError, match="is a folder but the dialect writes a file; give a name that ends in .gguf"
    ):
        convert(folder, tmp_path / "x.gguf", Q8_0, dialect="gguf")


def test_without_the_library_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "m")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    refused(folder, Q8_0, r"the library gguf writes the keys of GGUF files: .*breccia-bridges\[gguf\]")


def test_bytes_that_change_on_the_way_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from breccia_bridges.gguf_plan import GGUFWriter

    check = GGUFWriter.check

    def damaged(self: GGUFWriter) -> None:
        with self.path.open("r+b") as file:
            file.seek(-40, 2)
            file.write(b"\x01" * 8)
        check(self)

    monkeypatch.setattr(GGUFWriter, "check", damaged)
    refused(model(tmp_path / "m"), Q8_0, "reads back bytes other than those written; check the disk")


def test_a_file_of_gguf_is_read_as_what_it_was_written_from(tmp_path: Path) -> None:
    file = GGUFFile(written(model(tmp_path / "m"), Q8_0))
    assert set(file.entries) == set(SHAPES)
