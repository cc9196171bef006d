"""Writing GPTQ, AWQ, AutoRound, HQQ and quanto: the same bytes again, configs, and what none of them holds.

tests/dialects/written_integers.py compares what is written with what the libraries themselves decode.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_dialects import unpacked
from packed_words import checkpoint, values
from safetensors.numpy import save_file

import breccia
from breccia import BrecciaError, DialectError, OptionError, PerGroupIndex, UnsupportedError
from breccia.backend import StoredForm, ValueForm, as_recipe, registry, targets
from breccia.bridges import compare, convert, load_checkpoint
from breccia_bridges.safetensors_file import Container

INT4, FLOAT_ZERO = "int4,symmetric=false", "int4,symmetric=false,group_size=64,offset=float_zero_point"
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (32, 256),
    f"{LAYER}self_attn.q_proj.weight": (64, 256),
    f"{LAYER}mlp.up_proj.weight": (96, 256),
    "lm_head.weight": (32, 256),
}
UP, Q = f"{LAYER}mlp.up_proj", f"{LAYER}self_attn.q_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(7)
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    return folder


def config_of(folder: Path, file: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / file).read_text(encoding="utf-8"))


def stored(dialect: str, spec: str, shape: tuple[int, ...] = (64, 256), **form: Any) -> StoredForm:
    function = registry().dialects[dialect].stored
    assert function is not None
    return targets.load(function)(ValueForm(as_recipe(spec), shape, **form))


# -- what is written --------------------------------------------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    container = Container(folder / "model.safetensors")
    return {name: (entry.dtype, entry.shape, container.read(name).tobytes()) for name, entry in container.entries.items()}


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("gptq_v1_int4_asym_desc_act", "gptq"),
        ("gptq_v1_int4_sym", "gptq"),
        ("gptq_v1_int8_sym", "gptq"),
        ("gptq_v2_int2_asym", "gptq_v2"),
        ("gptq_v2_int3_sym", "gptq_v2"),
        ("gptq_v2_int4_asym", "gptq_v2"),
        ("awq_gemm_int4", "awq"),
        ("hqq_2bit_axis1", "hqq"),
        ("hqq_3bit_axis1", "hqq"),
        ("hqq_4bit_axis0", "hqq"),
        ("hqq_4bit_axis1", "hqq"),
        ("hqq_8bit_axis1", "hqq"),
    ],
)
def test_a_checkpoint_of_the_library_is_written_again_byte_for_byte(name: str, dialect: str, tmp_path: Path) -> None:
    folder, _ = unpacked(name, tmp_path)
    convert(folder, tmp_path / "again", "none", dialect=dialect)
    assert tensors_of(tmp_path / "again") == tensors_of(folder)


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("autoround_gptq_int4", "auto_round"), ("quanto_qint8", "quanto"), ("quanto_qfloat8", "quanto")],
)
def test_other_packings_and_scales_have_the_same_values(name: str, dialect: str, tmp_path: Path) -> None:
    """AutoRound's zero-points are written as they are, and quanto's scales of FP8 in FP32."""
    folder, _ = unpacked(name, tmp_path)
    convert(folder, tmp_path / "again", "none", dialect=dialect)
    before, after = values(folder), values(tmp_path / "again")
    assert before.keys() == after.keys() and before
    assert all(breccia.bytes_equal(before[name].tensor(), after[name].tensor()) for name in before)


def test_quantos_packed_weights_are_written_again_once_the_length_of_rows_is_known(tmp_path: Path) -> None:
    folder, _ = unpacked("quanto_qint4", tmp_path)
    config = config_of(folder)
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    lengths = {"up_proj": config["hidden_size"], "down_proj": config["intermediate_size"]}
    modules = config_of(folder, "quanto_qmap.json")
    modules = {name: {**own, "in_features": lengths[name.rpartition(".")[2]]} for name, own in modules.items()}
    (folder / "quanto_qmap.json").write_text(json.dumps(modules))
    convert(folder, tmp_path / "again", "none", dialect="quanto")
    ours, theirs = tensors_of(tmp_path / "again"), tensors_of(folder)
    assert ours == {name: theirs[name] for name in ours} and sum("_shift" in name for name in ours) == 2
    assert config_of(tmp_path / "again", "quanto_qmap.json") == modules


@pytest.mark.parametrize("dialect", ["gptq", "gptq_v2", "awq", "auto_round", "hqq", "quanto"])
def test_it_reads_as_our_own_folder(dialect: str, model: Path, tmp_path: Path) -> None:
    report = convert(model, tmp_path / "theirs", dialect=dialect)
    assert [recipe.spec for recipe in report.used] == [as_recipe(registry().dialects[dialect].recipes[0]).spec]
    convert(model, tmp_path / "ours", report.used[0])
    ours, theirs = load_checkpoint(tmp_path / "ours"), load_checkpoint(tmp_path / "theirs")
    assert all(breccia.bytes_equal(ours[f"{name}.weight"], theirs[f"{name}.weight"]) for name in (UP, Q))
    assert compare(tmp_path / "ours", tmp_path / "theirs").verdict.startswith("equal")


@pytest.mark.parametrize("spec", ["int4", "int,bits=3", "int8,scale_dtype=bf16"])
@pytest.mark.parametrize("dialect", ["gptq", "gptq_v2"])
def test_signed_codes_have_zero_points_that_are_half_of_the_range(dialect: str, spec: str, model: Path, tmp_path: Path) -> None:
    """Where the config has sym and the file has others, as some tools write, codes are read as unsigned ones with them."""
    convert(model, tmp_path / "theirs", spec, dialect=dialect)
    st = values(tmp_path / "theirs")[f"{UP}.weight"].tensor()
    assert st.recipe.format == as_recipe(spec).format and config_of(tmp_path / "theirs")["quantization_config"]["sym"] is True
    container = Container(tmp_path / "theirs" / "model.safetensors")
    tensors = {name: (entry.dtype, container.read(name)) for name, entry in container.entries.items() if name.startswith(UP)}
    zeros = tensors[f"{UP}.qzeros"][1].copy()
    zeros[0, 0] ^= 1
    tensors[f"{UP}.qzeros"] = ("I32", zeros)
    changed = checkpoint(tmp_path / "changed", tensors, config_of(tmp_path / "theirs"))
    other = values(changed)[f"{UP}.weight"].tensor()
    half = 1 << (st.recipe.format.element.bits - 1)
    assert other.zero_point is not None and np.count_nonzero(np.asarray(other.zero_point) != half) == 1
    assert (np.asarray(breccia.dequantize(other))[1:] == np.asarray(breccia.dequantize(st))[1:]).all()


@pytest.mark.parametrize(
    ("spec", "dialects"),
    [
        ("int4", ("compressed_tensors", "gptq", "gptq_v2", "compressed_tensors")),
        (INT4, ("awq", "gptq", "auto_round", "gptq_v2", "awq")),
    ],
)
def test_codes_come_back_through_other_dialects(spec: str, dialects: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    folders = [tmp_path / str(n) for n in range(len(dialects))]
    convert(model, folders[0], spec, dialect=dialects[0])
    for before, after, dialect in zip(folders[:-1], folders[1:], dialects[1:], strict=True):
        report = convert(before, after, "none", dialect=dialect)
        assert len(report.codes_kept) == 2 and compare(before, after).verdict.startswith("equal")
    assert tensors_of(folders[-1]) == tensors_of(folders[0])


# -- configs ----------------------------------------------------------------------------------------------------------

MIXED = {"*.mlp.*": "int8,symmetric=false,scale_dtype=fp16", "*.self_attn.*": INT4}


@pytest.mark.parametrize(("dialect", "version"), [("gptq", "gptq"), ("gptq_v2", "gptq_v2")])
def test_gptq_names_modules_by_patterns(dialect: str, version: str, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "theirs", {**MIXED, "*.self_attn.*": "int4"}, dialect=dialect)
    config = config_of(tmp_path / "theirs")
    settings = config["quantization_config"]
    assert settings == config_of(tmp_path / "theirs", "quantize_config.json")
    assert (config["dtype"], config["torch_dtype"]) == ("float16", "float16"), "that of scales"
    assert (settings["quant_method"], settings["checkpoint_format"]) == ("gptq", version)
    both = {UP: {"bits": 8, "group_size": -1, "sym": False}, Q: {"bits": 4, "group_size": 128, "sym": True}}
    common = {key: settings[key] for key in both[UP]}
    other = next(module for module, own in both.items() if own != common)
    assert common in both.values() and (settings["desc_act"], settings["lm_head"]) == (False, False)
    escaped = other.replace(".", r"\.")
    assert settings["dynamic"] == {"-:^lm_head$": {}, f"+:^{escaped}$": both[other]}


def test_auto_round_names_modules_and_those_outside_of_blocks(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "theirs", {**MIXED, "lm_head.weight": INT4}, dialect="auto_round")
    settings = config_of(tmp_path / "theirs")["quantization_config"]
    named = {"data_type": "int", "sym": False}
    assert (settings["quant_method"], settings["packing_format"]) == ("auto-round", "auto_round")
    assert (settings["bits"], settings["group_size"]) == (4, 128)
    assert settings["extra_config"] == {
        "lm_head": {"bits": 4, "group_size": 128, **named},
        UP: {"bits": 8, "group_size": -1, **named},
    }
    convert(model, tmp_path / "plain", INT4, dialect="auto_round")
    settings = config_of(tmp_path / "plain")["quantization_config"]
    assert settings["extra_config"] == {"lm_head": {"bits": 16, "data_type": "float"}}


def test_awq_lists_plain_modules(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "theirs", f"{INT4},group_size=32,scale_dtype=bf16", dialect="awq")
    config = config_of(tmp_path / "theirs")
    assert config["dtype"] == "bfloat16" and config["quantization_config"] == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "modules_to_not_convert": ["lm_head"],
    }


def test_hqq_says_in_which_dtype_it_computes_where_values_are_rounded_to_it(model: Path, tmp_path: Path) -> None:
    spec = "int_rounded,bits=4,group_size=64,scale_dtype=bf16,offset=float_zero_point"
    convert(model, tmp_path / "rounded", spec, dialect="hqq")
    settings = config_of(tmp_path / "rounded")["quantization_config"]
    assert settings["compute_dtype"] == "bfloat16" and settings["skip_modules"] == ["lm_head"]
    assert settings["quant_config"]["weight_quant_params"].items() >= {"nbits": 4, "group_size": 64, "axis": 1}.items()
    assert all(one.form.recipe.spec == as_recipe(spec).spec for one in values(tmp_path / "rounded").values())
    convert(model, tmp_path / "exact", FLOAT_ZERO, dialect="hqq")
    assert "compute_dtype" not in config_of(tmp_path / "exact")["quantization_config"]


def test_quanto_has_a_file_of_its_own_and_none_of_transformers(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "theirs", {"*.mlp.*": "int8", "*.self_attn.*": "int_rounded"}, dialect="quanto")
    assert "quantization_config" not in config_of(tmp_path / "theirs")
    assert config_of(tmp_path / "theirs", "quanto_qmap.json") == {
        UP: {"activations": "none", "weights": "qint8"},
        Q: {"activations": "none", "weights": "qint4", "in_features": 256},
    }


@pytest.mark.parametrize("dialect", ["gptq", "awq", "auto_round", "hqq", "quanto"])
def test_a_folder_without_quantized_values_has_no_config_of_them(dialect: str, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "plain", "none", dialect=dialect)
    assert config_of(tmp_path / "plain") == config_of(model)
    assert tensors_of(tmp_path / "plain") == tensors_of(model)


# -- what none of them holds ------------------------------------------------------------------------------------------

GROUPS = "of 16, 32, 64, 128, 256, 512 or 1024"


@pytest.mark.parametrize(
    ("dialect", "spec", "has", "nearest"),
    [
        ("gptq", "fp8_row", "signed integers of 2, 3, 4 or 8 bits, and a scale in FP16 or BF16", "int8,scale_dtype=fp16"),
        ("gptq", f"{INT4},offset=bias", "with zero-points, and a scale in FP16 or BF16", INT4),
        ("gptq", f"{INT4},group_size=48", GROUPS, f"{INT4},group_size=32"),
        ("gptq", "int,bits=5,symmetric=false", "2, 3, 4 or 8 bits", "int8,symmetric=false,group_size=128,scale_dtype=fp16"),
        ("gptq_v2", "nvfp4", GROUPS, "int4,group_size=16"),
        ("awq", "int8", "unsigned integers of 4 bits", INT4),
        ("awq", f"{INT4},scale_dtype=fp32", "a scale in FP16 or BF16", INT4),
        ("auto_round", f"{INT4},scale_dtype=bf16", "a scale in FP16 for", INT4),
        ("auto_round", "int,bits=1,symmetric=false", "2, 3, 4, 5, 6, 7 or 8 bits", "int,bits=2,symmetric=false"),
        ("hqq", INT4, "with float zero-points", f"{INT4},offset=float_zero_point"),
        ("hqq", "fp8_row", "1, 2, 3, 4, 5, 6 or 8 bits", "int8,symmetric=false,offset=float_zero_point"),
        ("hqq", "int_rounded", "float zero-points", f"{INT4},scale_dtype=bf16,offset=float_zero_point"),
        ("quanto", "int4", "integers of 4 and 2 bits with a bias", "int_rounded,scale_dtype=fp16"),
        ("quanto", "int_rounded,group_size=64", "in the groups of its layers", "int_rounded"),
        ("quanto", "fp8_block", "FP8 (E4M3, E5M2, E4M3FNUZ) per row", "fp8_row"),
        ("quanto", "int8,group_size=64", "INT8", "int8"),
    ],
)
def test_another_format_is_refused_with_the_nearest_recipe(dialect: str, spec: str, has: str, nearest: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        stored(dialect, spec)
    message, wanted = str(refusal.value), as_recipe(nearest).spec
    assert has in message and f"not {as_recipe(spec).spec!r}" in message
    assert message.endswith(f"The nearest recipe is {wanted!r}.") and refusal.value.found["nearest"] == wanted
    assert stored(dialect, wanted).entries, "which it holds"


@pytest.mark.parametrize(
    ("dialect", "spec", "shape", "units"),
    [
        ("gptq", INT4, (60, 256), "8x8"),
        ("gptq", "int,bits=3,symmetric=false", (64, 272), "32x32"),
        ("awq", INT4, (64, 200), "8x128"),
        ("auto_round", INT4, (40, 256), "32x128"),
        ("hqq", "int,bits=1,symmetric=false,group_size=64,offset=float_zero_point", (3, 64), "8x64"),
        ("hqq", "int,bits=1,symmetric=false,group_size=64,offset=float_zero_point", (64, 96), "8x64"),
    ],
)
def test_a_matrix_that_codes_do_not_fill_is_refused(dialect: str, spec: str, shape: tuple[int, int], units: str) -> None:
    with pytest.raises(
        UnsupportedError,
        match=f"of shape {shape[0]}x{shape[1]}: its lengths are multiples of {units} there; leave this value as it is",
    ):
        stored(dialect, spec, shape)


@pytest.mark.parametrize("dialect", ["gptq", "awq", "auto_round", "quanto"])
def test_matrices_with_groups_along_the_last_axis_are_held_alone(dialect: str) -> None:
    spec = registry().dialects[dialect].recipes[0]
    with pytest.raises(
        UnsupportedError, match="of shape 2x64x256: its weights are matrices; leave this value as it is: exclude="
    ):
        stored(dialect, spec, (2, 64, 256))
    with pytest.raises(
        UnsupportedError, match="its blocks run along the axis before the last of the model's value, and there along the last"
    ):
        stored(dialect, spec, is_transposed=True)


OUT_OF_ORDER = PerGroupIndex(tuple(k % 2 for k in range(256)), 2)
IN_ORDER = PerGroupIndex(tuple(k // 128 for k in range(256)), 2)


def test_only_gptq_has_an_index_of_groups_and_only_of_groups_out_of_order() -> None:
    assert stored("gptq", INT4, layout=OUT_OF_ORDER).settings["desc_act"] is True
    for dialect in ("awq", "auto_round"):
        with pytest.raises(
            UnsupportedError, match="its columns are in groups by index, which it has no place for; decode it first"
        ):
            stored(dialect, INT4, layout=OUT_OF_ORDER)
    with pytest.raises(
        UnsupportedError, match=r"its index has 2 groups of 128 out of order there, .* the layout PerBlockK\(128\)"
    ):
        stored("gptq", INT4, layout=IN_ORDER)


def test_hqq_has_groups_along_the_first_axis_of_rows_far_apart() -> None:
    spaced = PerGroupIndex(tuple(row % 4 for row in range(256)), 4)
    settings = stored("hqq", FLOAT_ZERO, is_transposed=True, layout=spaced).settings
    assert (settings["axis"], settings["group_size"]) == (0, 64)
    with pytest.raises(UnsupportedError, match="groups along the first axis have every 4th row there, not PerBlockK"):
        stored("hqq", FLOAT_ZERO, is_transposed=True)
    three = PerGroupIndex(tuple(row % 4 for row in range(12)), 4)
    with pytest.raises(UnsupportedError, match="groups along the first axis have multiples of 2 codes there"):
        stored("hqq", "int4,symmetric=false,group_size=3,offset=float_zero_point", (8, 12), is_transposed=True, layout=three)


@pytest.mark.parametrize("dialect", ["gptq", "gptq_v2", "awq", "auto_round", "hqq", "quanto"])
def test_inputs_are_not_quantized(dialect: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"activations='fp8_row': layers of {dialect} .* have 'none'. Leave it out"):
        convert(model, tmp_path / "theirs", dialect=dialect, activations="fp8_row")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("dialect", "first", "second", "message"),
    [
        (
            "gptq",
            INT4,
            f"{INT4},scale_dtype=bf16",
            "scales in the dtype of the model; those of .* Give all modules one scale_dtype",
        ),
        (
            "awq",
            INT4,
            f"{INT4},group_size=32",
            "awq .AWQ. has one setting for all modules: .* Give both the same recipe",
        ),
        (
            "hqq",
            FLOAT_ZERO,
            "int_rounded,bits=4,group_size=64,offset=float_zero_point",
            "the config of HQQ has one compute_dtype; that of .* Give all modules one recipe",
        ),
    ],
)
def test_what_a_config_says_of_all_modules_is_the_same(
    dialect: str, first: str, second: str, message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        convert(model, tmp_path / "theirs", {"*.mlp.*": first, "*.self_attn.*": second}, dialect=dialect)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("end", "text", "wanted"),
    [
        ("packing", "3bit_32", "4bit_u8"),
        ("unpack_view_dtype", "torch.int32", "torch.uint8"),
        ("compute_dtype", "torch.int8", "torch.float16 or torch.bfloat16 or torch.float32"),
    ],
)
def test_hqqs_names_are_those_of_its_numbers(end: str, text: str, wanted: str, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "theirs", FLOAT_ZERO, dialect="hqq", include=[f"{UP}.weight"], exclude=[f"{Q}.weight"])
    container = Container(tmp_path / "theirs" / "model.safetensors")
    tensors = {name: (entry.dtype, container.read(name)) for name, entry in container.entries.items() if name.startswith(UP)}
    tensors[f"{UP}.{end}"] = ("U8", np.frombuffer(text.encode(), np.uint8))
    changed = checkpoint(tmp_path / "changed", tensors, config_of(tmp_path / "theirs"))
    with pytest.raises(DialectError, match=f"'{end}' is '{text}'; it is {wanted}. Download the checkpoint again"):
        values(changed)[f"{UP}.weight"].tensor()


def test_a_refusal_names_the_value(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BrecciaError, match=f"{Q}.weight: AWQ does not store it: it has unsigned integers"):
        convert(model, tmp_path / "theirs", "int4", dialect="awq", exclude=[f"{UP}.weight"])
