"""`convert(..., dialect=)`: the folder of another library, from plain weights, from breccia's and from a third library's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import breccia
from breccia import DialectError, OptionError, UnknownNameError, UnsupportedError
from breccia.bridges import compare, convert, load_checkpoint
from breccia.cli.main import run
from breccia_bridges.fused import fused

CT = "compressed_tensors"
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (64, 128),
    **{f"{LAYER}self_attn.{name}_proj.weight": (rows, 128) for name, rows in (("q", 128), ("k", 64), ("v", 64))},
    f"{LAYER}mlp.down_proj.weight": (128, 256),
    f"{LAYER}input_layernorm.weight": (128,),
    "lm_head.weight": (64, 128),
}
QUANTIZED = [name for name in SHAPES if "_proj" in name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of BF16 weights; those of q, k and v have different largest magnitudes."""
    rng = np.random.default_rng(0)
    factors = {name: 2.0**n for n, name in enumerate(SHAPES)}
    tensors = {n: (factors[n] * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16) for n, shape in SHAPES.items()}
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_it_has_the_librarys_tensors_and_config_and_reads_as_our_own_folder(model: Path, tmp_path: Path) -> None:
    report = convert(model, tmp_path / "theirs", "int4", dialect=CT)
    convert(model, tmp_path / "ours", "int4")
    assert report.dialect == CT and report.used == [breccia.recipe("int4")]
    names = load_file(tmp_path / "theirs" / "model.safetensors").keys()
    assert {f"{LAYER}mlp.down_proj.weight_{end}" for end in ("packed", "scale", "shape")} <= names
    config = config_of(tmp_path / "theirs")
    assert config["quantization_config"]["quant_method"] == "compressed-tensors" and config["model_type"] == "llama"
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    ours, theirs = (load_checkpoint(tmp_path / folder) for folder in ("ours", "theirs"))
    assert all(breccia.bytes_equal(ours[name], theirs[name]) for name in QUANTIZED)
    assert compare(tmp_path / "ours", tmp_path / "theirs").verdict.startswith("equal")


@pytest.mark.parametrize(
    ("one", "other", "recipe"),
    [
        (CT, "gptq", "int4"),
        ("gptq_v2", "awq", "int4,symmetric=false"),
        (CT, "deepseek_v3", "fp8_block,block_m=128"),
        (CT, "torchao", "mxfp4"),
        ("quark", "modelopt", "mxfp4"),
    ],
)
def test_two_dialects_of_one_model_are_equal(one: str, other: str, recipe: str, model: Path, tmp_path: Path) -> None:
    for dialect in (one, other):
        convert(model, tmp_path / dialect, recipe, dialect=dialect)
    found = compare(tmp_path / one, tmp_path / other)
    assert found.verdict.startswith("equal"), found.verdict
    assert compare(tmp_path / one, model).verdict != found.verdict


def test_a_head_that_is_tied_to_the_embedding_is_left_as_it_is(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    convert(model, tmp_path / "tied", "int4", dialect=CT)
    convert(model, tmp_path / "fp8", "fp8_block,block_m=128", dialect="deepseek_v3")
    convert(model, tmp_path / "torchao", "int8", dialect="torchao")
    assert config_of(tmp_path / "tied")["quantization_config"]["ignore"] == ["lm_head"]
    for folder in ("fp8", "torchao"):
        assert config_of(tmp_path / folder)["quantization_config"]["modules_to_not_convert"] == ["lm_head"]


def test_linear_layers_whose_names_are_those_of_embeddings_and_norms_are_left_as_they_are(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    linear = {f"{name}.weight": tensors["lm_head.weight"] for name in ("time_embed.linear_1", f"{LAYER}norm1.linear")}
    save_file({**tensors, **linear}, model / "model.safetensors", {"format": "pt"})
    convert(model, tmp_path / "out", "int4", dialect=CT)
    ignored = ["lm_head", f"{LAYER}norm1.linear", "time_embed.linear_1"]
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == ignored


def test_contents_that_a_dialect_does_not_hold_name_the_value(model: Path, tmp_path: Path) -> None:
    spec = "fp8_block,block_m=128,power_of_two_scale=true"
    weight = np.ones((128, 128), np.float32)
    codes, scale = breccia.cast(weight, spec).data, np.full((1, 1), 3.0, np.float32)
    folder = tmp_path / "other"
    folder.mkdir()
    st = breccia.from_buffer(codes, scale, breccia.recipe(spec), breccia.recipe(spec).layout, shape=weight.shape)
    breccia.bridges.save_safetensors({QUANTIZED[0]: st}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with pytest.raises(DialectError, match=rf"^{re.escape(QUANTIZED[0])}: DeepSeek-V4 does not store it: .* no powers of two"):
        convert(folder, tmp_path / "out", "none", dialect="deepseek_v4")
    assert [one.name for one in tmp_path.iterdir() if one.name not in ("model", "other")] == []


def test_without_a_recipe_a_plain_source_gets_the_dialects_first_and_a_quantized_one_keeps_its_codes(
    model: Path, tmp_path: Path
) -> None:
    first = convert(model, tmp_path / "first", dialect=CT)
    assert [recipe.spec for recipe in first.used] == ["int4"]
    convert(model, tmp_path / "ours", "int8")
    kept = convert(tmp_path / "ours", tmp_path / "kept", dialect=CT)
    assert sorted(t.name for t in kept.codes_kept) == sorted(QUANTIZED)
    again = convert(tmp_path / "kept", tmp_path / "again", "none", dialect=CT)
    assert sorted(t.name for t in again.codes_kept) == sorted(QUANTIZED)
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("kept", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ({"recipe": "int8"}, ("int", 8, "token")),
        ({"recipe": "int8", "activations": "none"}, None),
        ({"recipe": "int4"}, None),
        ({"recipe": "int4", "activations": "fp8_row"}, ("float", 8, "token")),
        ({"recipe": "fp8_block,block_m=128"}, ("float", 8, "group")),
    ],
)
def test_activations_are_dynamic_per_token_for_8_bits_and_none_for_4(
    model: Path, tmp_path: Path, given: Any, inputs: Any
) -> None:
    convert(model, tmp_path / "out", dialect=CT, **given)
    (group,) = config_of(tmp_path / "out")["quantization_config"]["config_groups"].values()
    found = group["input_activations"]
    assert (found and (found["type"], found["num_bits"], found["strategy"])) == inputs
    assert found is None or found["dynamic"] is True


def test_layers_that_engines_fuse_get_one_scale(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", "nvfp4,global_sense=divisor", dialect=CT)
    read = load_checkpoint(tmp_path / "out")
    q, k, v, down = (np.asarray(read[name].global_scale).item() for name in QUANTIZED)
    plain = load_checkpoint(model)
    largest = max(np.abs(plain[name].astype(np.float32)).max() for name in QUANTIZED[:3])
    assert q == k == v == np.float32(6 * 448) / largest and down != q  # NVFP4's own: E2M1's largest times E4M3's
    whole = breccia.cast(np.concatenate([plain[n] for n in QUANTIZED[:3]]), "nvfp4,global_sense=divisor")
    assert breccia.bytes_equal(whole, breccia.concat([read[n] for n in QUANTIZED[:3]]))


def test_layers_that_engines_fuse_and_another_dtype_of_the_model_are_warned_of(model: Path, tmp_path: Path) -> None:
    policy = {"*q_proj*": "int8", "default": "int4"}
    (said,) = convert(model, tmp_path / "out", policy, dialect=CT).warnings
    assert said.startswith("vLLM and SGLang compute each of these groups as one layer") and f"{QUANTIZED[0]} and " in said
    assert convert(model, tmp_path / "alike", "int4", dialect=CT).warnings == []
    assert convert(model, tmp_path / "ours", policy).warnings == []
    (said,) = convert(model, tmp_path / "gptq", "int4", dialect="gptq").warnings
    assert said.startswith("config.json says float16 now, the dtype of the scales, and the model has bfloat16: libraries round")
    (said,) = convert(model, tmp_path / "plain", "none", dialect=CT).warnings
    assert said.endswith("so none is stored as compressed-tensors does; a recipe such as 'int4' (--recipe) quantizes them.")
    assert convert(model, tmp_path / "bf16", "int4,scale_dtype=bf16", dialect="gptq").warnings == []


def test_fused_layers_are_those_beside_each_other() -> None:
    names = ["a.q_proj.weight", "a.k_proj.weight", "b.q_proj.weight", "c.gate_proj.weight", "c.up_proj.weight", "q_proj"]
    assert fused(names) == [names[:2], names[3:5]]


# -- refusals, all of them before a byte is written -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"dialect": "compressed"}, UnknownNameError, "dialect 'compressed'.*did you mean 'compressed_tensors'"),
        ({"dialect": "qwix"}, UnknownNameError, "dialect 'qwix'"),
        ({}, OptionError, r"convert needs a recipe or a dialect: give dialect= \(--dialect\), recipe= \(--recipe\), or both"),
        ({"recipe": "int8", "activations": "none"}, OptionError, "activations= is for the config of another library's dialect"),
        (
            {"recipe": "nvfp4", "dialect": CT},
            UnsupportedError,
            rf"{re.escape(QUANTIZED[-1])}: compressed-tensors does not store it: 'nvfp4' of shape \[128, 256\] is none of its "
            "schemes: .*The nearest recipe for it is 'nvfp4,global_sense=divisor'",
        ),
        (
            {"recipe": "int8", "dialect": CT, "activations": "nvfp4"},
            OptionError,
            "activations='nvfp4': compressed-tensors quant",
        ),
        (
            {"recipe": "bf16", "dialect": CT},
            OptionError,
            "recipe 'bf16' decodes all values, and compressed-tensors stores those that are quantized: leave dialect=.* out",
        ),
        ({"recipe": "int8", "dialect": CT, "activations": "int99"}, OptionError, "activations='int99' is no recipe"),
    ],
)
def test_what_cannot_be_written_is_refused(model: Path, tmp_path: Path, given: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        convert(model, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_file_is_refused_where_the_dialect_needs_a_config_beside_it(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"out.safetensors is one file, and compressed-tensors has its settings in config"
    ):
        convert(model / "model.safetensors", tmp_path / "out.safetensors", "int8", dialect=CT)
    assert not (tmp_path / "out.safetensors").exists()


def test_fused_layers_with_different_scales_are_refused_and_cast_again_under_one(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "ours", "nvfp4,global_sense=divisor")
    said = r"k_proj.*q_proj.*v_proj.weight have scales of the whole tensor that differ, and engines compute them as one layer"
    with pytest.raises(UnsupportedError, match=said) as caught:
        convert(tmp_path / "ours", tmp_path / "out", dialect=CT)
    assert "Give recipe='nvfp4,global_sense=divisor' (--recipe)" in str(caught.value) and not (tmp_path / "out").exists()
    convert(tmp_path / "ours", tmp_path / "out", "nvfp4,global_sense=divisor", dialect=CT)
    read = load_checkpoint(tmp_path / "out")
    assert len({np.asarray(read[name].global_scale).item() for name in QUANTIZED[:3]}) == 1


def test_codes_that_the_dialect_has_no_recipe_for_name_the_nearest(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "ours", "nf4")
    with pytest.raises(UnsupportedError, match=r"No recipe of compressed-tensors has the same values. Give recipe='int4'"):
        convert(tmp_path / "ours", tmp_path / "out", "none", dialect=CT)
    convert(model, tmp_path / "mxfp8", "mxfp8")
    with pytest.raises(UnsupportedError) as caught:
        convert(tmp_path / "mxfp8", tmp_path / "out", "none", dialect="gptq")
    nearest = re.search(r"The nearest recipe is ('[^']*')", str(caught.value))
    assert nearest and f"Give recipe={nearest[1]} (--recipe)" in str(caught.value)
    assert convert(tmp_path / "mxfp8", tmp_path / "out", nearest[1].strip("'"), dialect="gptq").quantized


@pytest.mark.parametrize("dialect", [CT, "gptq", "bitsandbytes", "torchao"])
def test_embeddings_are_refused_where_the_library_quantizes_linear_layers_only(
    model: Path, tmp_path: Path, dialect: str
) -> None:
    said = r"embed_tokens.weight is an embedding, and of .* there are quantized linear layers only. Leave it as it is: exclude="
    with pytest.raises(UnsupportedError, match=said):
        convert(model, tmp_path / "out", dialect=dialect, include=["*embed*"])
    convert(model, tmp_path / "mlx", dialect="mlx", include=["*embed*"])
    with pytest.raises(UnsupportedError, match=said):
        convert(tmp_path / "mlx", tmp_path / "out", "none", dialect=dialect)
    assert not (tmp_path / "out").exists()


def test_linear_layers_of_embeddings_are_written(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({"time_embed.linear_1.weight": tensors[QUANTIZED[0]]}, model / "model.safetensors", {"format": "pt"})
    assert convert(model, tmp_path / "out", "int4", dialect=CT, include=["*"]).quantized


def test_a_destination_that_is_there_is_named_before_anything_is_read(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(b"no header")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out"):
        convert(model, tmp_path / "out", dialect=CT)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_groups_by_index_are_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    index = np.arange(256) % 2
    st = breccia.cast(np.ones((64, 256), np.float32), "int4,group_size=128", group_index=index)
    breccia.bridges.save_safetensors({"mlp.down_proj.weight": st}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with pytest.raises(
        UnsupportedError, match="its columns are in groups by index, which it has no place for; decode it first"
    ):
        convert(folder, tmp_path / "out", "none", dialect=CT)
    assert not (tmp_path / "out").exists()


def test_the_command_takes_a_dialect(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["convert", str(model), str(tmp_path / "out"), "--dialect", CT, "--recipe", "int8", "--activations", "none"]
    with pytest.raises(SystemExit) as ended:
        run(given)
    assert not ended.value.code
    assert "breccia.bridges.load_checkpoint(folder), or by compressed-tensors" in " ".join(capsys.readouterr().out.split())
    (group,) = config_of(tmp_path / "out")["quantization_config"]["config_groups"].values()
    assert group["input_activations"] is None and group["format"] == "pack-quantized"
