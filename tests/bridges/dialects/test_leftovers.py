"""What `convert` leaves of other libraries in a new folder: nothing that a loader would misread; and what it reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from golden_dialects import unpacked
from program import Run
from safetensors.numpy import save_file
from stored_folders import Entry, floats, folder, fp8

import breccia
from breccia.backend import registry
from breccia.bridges import convert, load_checkpoint, load_safetensors
from breccia_bridges import beside, completeness, recognition, refusals, stored
from breccia_bridges import convert as convert_module
from breccia_bridges import source as source_module
from breccia_bridges.announcements import announcements
from breccia_bridges.safetensors_file import Container

LAYER = "model.layers.0"
UP, DOWN, EXPERTS = f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj", f"{LAYER}.experts.gate_up_proj"
KEYS = f"{LAYER}.self_attn.k_proj"
ONE = ("F32", np.array(1, np.float32))
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}


def source(path: Path) -> Path:
    """Layers with scales of their activations, an attention with those of its cache, and the model's own `q_scale`."""
    tensors: dict[str, Entry] = {
        f"{UP}.weight": fp8(8, 64)[0],
        f"{UP}.weight_scale": ONE,
        f"{UP}.input_scale": ONE,
        EXPERTS: fp8(2, 8, 64)[0],
        f"{EXPERTS}_weight_scale": ONE,
        f"{EXPERTS}_input_scale": ONE,
        f"{KEYS}.weight": fp8(8, 64)[0],
        f"{KEYS}.weight_scale": ONE,
        f"{LAYER}.self_attn.k_scale": ONE,
        f"{LAYER}.self_attn.q_scale": floats("F32", 8)[0],
        "norm.weight": floats("BF16", 64)[0],
    }
    return folder(path, tensors, FP8)


DROPPED = {f"{UP}.input_scale", f"{EXPERTS}_input_scale", f"{LAYER}.self_attn.k_scale"}


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "none"])
def test_scales_of_activations_go_with_their_dialect(recipe: str, tmp_path: Path) -> None:
    path = source(tmp_path / "source")
    names = set(Container(path / "model.safetensors").entries)
    for dry in (True, False):
        report = convert(path, tmp_path / "out", recipe, dry_run=dry)
        assert set(report.dropped) == (set() if recipe == "none" else DROPPED)
    kept = {name for name in names if name.endswith(("_scale", "norm.weight")) and "weight_scale" not in name} - set(
        report.dropped
    )
    written = set(Container(tmp_path / "out" / "model.safetensors").entries)
    assert kept == {name for name in written if not name.startswith((UP, EXPERTS, KEYS)) or name in DROPPED}
    assert f"{LAYER}.self_attn.q_scale" in written, "a model's own parameter of such a name has more than one element"


def test_metadata_about_the_old_parts_is_dropped(tmp_path: Path) -> None:
    path, _ = unpacked("torchao_int8", tmp_path)
    assert {"tensor_names", "model.norm.weight"} <= Container(path / "model.safetensors").metadata.keys()
    for recipe in ("none", "bf16"):
        convert(path, tmp_path / recipe, recipe)
        metadata = Container(tmp_path / recipe / "model.safetensors").metadata
        assert metadata["format"] == "pt" and not any("_type" in text for text in metadata.values())
        assert "tensor_names" not in metadata and "model.norm.weight" not in metadata
        load_safetensors(tmp_path / recipe)


def test_metadata_of_plain_checkpoints_is_kept(tmp_path: Path) -> None:
    x = np.ones((8, 64), np.float32)
    save_file({"up.weight": x}, tmp_path / "m.safetensors", {"up.weight": "mine", "tensor_names": "mine"})
    convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", "mxfp8")
    metadata = Container(tmp_path / "out.safetensors").metadata
    assert metadata["up.weight"] == metadata["tensor_names"] == "mine"


def test_a_quantization_of_parts_of_parts_is_read_and_replaced(tmp_path: Path) -> None:
    inner = {"quantization_config": FP8, "dtype": "float16"}
    config = {"thinker_config": {"text_config": inner, "audio_config": {"dtype": "float32"}}, "dtype": "float16"}
    path = source(tmp_path / "source")
    (path / "config.json").write_text(json.dumps(config))
    said = [one.where for one in announcements(path)]
    assert said == [f"{path / 'config.json'}: thinker_config.text_config.quantization_config"]
    assert load_checkpoint(path).dialects == ["modelopt"]
    convert(path, tmp_path / "dense", "bf16")
    new = json.loads((tmp_path / "dense" / "config.json").read_text())
    parts = {"text_config": {"dtype": "bfloat16"}, "audio_config": {"dtype": "float32"}}
    assert new == {"thinker_config": parts, "dtype": "bfloat16"}
    convert(path, tmp_path / "codes", "none")
    new = json.loads((tmp_path / "codes" / "config.json").read_text())
    assert new["thinker_config"] == parts | {"text_config": {"dtype": "float16"}} and new["dtype"] == "float16"
    assert new["quantization_config"]["quant_method"] == "breccia" and announcements(tmp_path / "codes")[0].method == "breccia"


@pytest.mark.parametrize(
    ("before", "recipe", "after"),
    [
        ({"torch_dtype": "float16"}, "bf16", {"torch_dtype": "bfloat16"}),
        ({"dtype": "bfloat16", "torch_dtype": None}, "fp32", {"dtype": "float32", "torch_dtype": None}),
        ({}, "fp16", {"dtype": "float32"}),  # q_scale is F32, and no config lets a loader round it
        ({"dtype": "float32"}, "bf16", {"dtype": "float32"}),
        ({"dtype": "float32"}, "fp32", {"dtype": "float32"}),
        ({"dtype": "float16"}, "mxfp8", {"dtype": "float16"}),
        ({"dtype": 5, "torch_dtype": "float16"}, "bf16", {"dtype": 5, "torch_dtype": "bfloat16"}),
    ],
)
def test_the_dtype_of_the_model_is_that_of_its_decoded_values(before: Any, recipe: str, after: Any, tmp_path: Path) -> None:
    path = source(tmp_path / "source")
    (path / "config.json").write_text(json.dumps({**before, "quantization_config": FP8}))
    convert(path, tmp_path / "out", recipe)
    new = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: value for key, value in new.items() if "dtype" in key} == after


@pytest.mark.parametrize(
    ("before", "plain", "after"),
    [
        ({}, "BF16", "float16"),
        ({"dtype": "float32"}, "BF16", "float16"),
        ({"dtype": "bfloat16"}, "F32", "float16"),
        ({"dtype": "float32"}, "F32", "float32"),
    ],
)
def test_the_dtype_of_the_model_is_the_widest_of_what_loaders_had_whole(
    before: Any, plain: str, after: str, tmp_path: Path
) -> None:
    tensors = {f"{UP}.weight": fp8(8, 64)[0], f"{UP}.weight_scale": ONE, f"{DOWN}.weight": floats(plain, 8, 64)[0]}
    path = folder(tmp_path / "source", tensors, FP8)
    (path / "config.json").write_text(json.dumps({**before, "quantization_config": FP8}))
    convert(path, tmp_path / "out", "fp16")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": after}


def test_the_dtype_of_a_model_of_which_nothing_is_decoded_stays_and_a_warning_says_so(tmp_path: Path) -> None:
    path = folder(tmp_path / "source", {"up.weight": floats("F16", 8, 64)[0]})
    (path / "config.json").write_text(json.dumps({"dtype": "float16"}))
    said = f"no tensor of {path} is quantized, so none was decoded to BF16: plain tensors keep their dtypes."
    assert convert(path, tmp_path / "dry", "bf16", dry_run=True).warnings == [said]
    assert convert(path, tmp_path / "out", "bf16").warnings == [said]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "float16"}
    assert convert(path, tmp_path / "codes", "none").warnings == [], "asked to change nothing"
    assert not convert(source(tmp_path / "quantized"), tmp_path / "decoded", "fp32").warnings


def test_what_is_beside_values_is_declared_by_dialects_alone() -> None:
    """No module that serves all dialects names a tensor or a key of one."""
    ends = {end for dialect in registry().dialects.values() for end in (*dialect.factors, *dialect.metadata)}
    assert ends == {"pre_quant_scale", "_pre_quant_scale", "_quantization_metadata", "tensor_names"}
    for module in (beside, completeness, convert_module, recognition, refusals, source_module, stored):
        text = Path(module.__file__).read_text(encoding="utf-8")
        assert not [end for end in ends if end in text], module.__name__


# -- the report -------------------------------------------------------------------------------------------------------


def of_every_way(path: Path) -> Path:
    """Under fp8_row, which has E4M3 codes, without `*down*`: codes kept, quantized again, decoded, quantized, and kept."""
    row, tensor = floats("F32", 8, 1)[0], ONE
    tensors = {
        f"{UP}.weight": fp8(8, 64)[0],
        f"{UP}.weight_scale": row,
        f"{UP}.input_scale": ONE,
        f"{LAYER}.gate_proj.weight": fp8(8, 64, dtype=ml_dtypes.float8_e5m2)[0],
        f"{LAYER}.gate_proj.weight_scale": tensor,
        f"{DOWN}.weight": fp8(8, 64)[0],
        f"{DOWN}.weight_scale": tensor,
        f"{LAYER}.o_proj.weight": floats("BF16", 8, 64)[0],
        "norm.weight": floats("BF16", 64)[0],
    }
    return folder(path, tensors, FP8)


COUNTS = {"quantized": 1, "quantized again": 1, "with their codes kept": 1, "decoded": 1, "kept": 1, "dropped": 1}


def test_a_report_counts_what_became_of_each_tensor(tmp_path: Path) -> None:
    path = of_every_way(tmp_path / "source")
    report = convert(path, tmp_path / "out", "fp8_row", exclude=["*down*"])
    assert report.counts == COUNTS and report.to_dict()["counts"] == COUNTS
    ways = {"codes_kept": UP, "requantized": f"{LAYER}.gate_proj", "decoded": DOWN}
    for way, module in ways.items():
        assert [t.name for t in getattr(report, way)] == [f"{module}.weight"]
        assert [t["name"] for t in report.to_dict()["tensors"] if t[way]] == [f"{module}.weight"]
    assert [t.name for t in report.kept] == ["norm.weight"] and report.dropped == [f"{UP}.input_scale"]
    assert "3 tensors quantized under fp8_row, 1 decoded, 1 kept" in repr(report)
    assert report.verdict == (
        "5 tensors: 1 quantized, 1 quantized again, 1 with their codes kept, 1 decoded, 1 kept, 1 dropped"
    )
    assert sum(report.reasons.values()) == 2, "what is not quantized has a reason"


def test_the_command_says_what_became_of_each_tensor(tmp_path: Path, run: Run) -> None:
    path = of_every_way(tmp_path / "source")
    arguments = ("convert", str(path), str(tmp_path / "out"), "-r", "fp8_row", "--exclude", "*down*")
    code, text, _ = run(*arguments, "--dry-run")
    assert code == 0
    assert "kept        1 tensors, 128 B in their original precision: 1 fewer than two axes" in text
    assert "codes kept  of 1 tensors that were quantized before: no value changed" in text
    assert "again       1 tensors that were quantized before, from their decoded values" in text
    assert "decoded     1 tensors that were quantized before, 1.02 kB: 1 excluded and decoded to BF16" in text
    assert f"dropped     1 tensors of quantized activations: {UP}.input_scale" in text
    code, text, _ = run(*arguments, "--json")
    listed = json.loads(text)
    assert code == 0 and listed["counts"] == COUNTS and listed["verdict"].startswith("5 tensors: 1 quantized, 1 quantized")
    assert listed["dropped"] == [f"{UP}.input_scale"]


@pytest.mark.parametrize(("recipe", "verdict"), [("none", "5 tensors: 3 with their codes kept, 3 kept"), ("bf16", "3 decoded")])
def test_the_verdict_of_a_conversion_without_a_recipe_is_one_too(recipe: str, verdict: str, tmp_path: Path) -> None:
    report = convert(of_every_way(tmp_path / "source"), tmp_path / "out", recipe)
    assert verdict.removeprefix("5 tensors: ") in report.verdict and report.to_dict()["verdict"] == report.verdict


def test_a_comparison_has_no_counts(tmp_path: Path) -> None:
    path = of_every_way(tmp_path / "source")
    report = breccia.bridges.compare(path, path)
    assert report.to_dict()["counts"] is None and report.verdict.startswith("identical")


@pytest.mark.parametrize(
    ("old", "new"),
    [("fp8_current", "fp8_row"), ("fp8_row", "fp8_block"), ("fp8_block,block_m=128", "fp8_block"), ("mxfp4", "mxfp8")],
)
def test_codes_are_kept_where_scales_are_repeated_for_finer_blocks(old: str, new: str, tmp_path: Path) -> None:
    st = breccia.cast(np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32), old)
    breccia.bridges.save_safetensors({"up.weight": st}, tmp_path / "old.safetensors")
    report = convert(tmp_path / "old.safetensors", tmp_path / "new.safetensors", new)
    assert [t.name for t in report.codes_kept] == ["up.weight"] and report.fidelity.lossless
    loaded = load_safetensors(tmp_path / "new.safetensors")["up.weight"]
    expected = breccia.requantize(st, new, require_exact=True)
    assert breccia.bytes_equal(loaded, expected) and loaded.layout == expected.layout
