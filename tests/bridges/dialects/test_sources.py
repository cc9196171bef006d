"""Checkpoints of other libraries as sources: convert, compare, inspect and load_checkpoint, for every golden one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_dialects import EXPECTED, REFUSED, read, unpacked
from program import Run

import breccia
from breccia.bridges import compare, convert, load_checkpoint, load_safetensors
from breccia_bridges.inspection import inspected
from breccia_bridges.safetensors_file import Container

READ = [name for name, expected in EXPECTED.items() if not expected.startswith(REFUSED)]
#: A few of different kinds, for the slower ways.
SOME = ["ct_pack_int4_g128_asym", "deepseek_v4_fp4", "gpt_oss_mxfp4", "gptq_v1_int4_asym_desc_act", "mlx_affine_mixed_4_6"]


def tensors(folder: Path) -> dict[str, breccia.ScaledTensor]:
    return {name: stored.tensor() for name, stored in read(folder).items()}


@pytest.mark.parametrize("name", READ)
def test_every_code_and_scale_is_in_the_file_that_convert_writes(name: str, tmp_path: Path) -> None:
    folder, _ = unpacked(name, tmp_path)
    expected = tensors(folder)
    report = convert(folder, tmp_path / "out", "none")
    assert {t.name for t in report.codes_kept} == set(expected) == {t.name for t in report.quantized}
    assert all(t.measured.lossless or t.measured.bad for t in report.quantized)
    loaded = load_safetensors(tmp_path / "out")
    for value, st in expected.items():
        assert breccia.bytes_equal(loaded[value], st) and loaded[value].recipe == st.recipe
    has_nan = any(t.measured.bad for t in report.quantized)  # quanto's codes of a row of zeros
    assert has_nan or compare(folder, tmp_path / "out").verdict.startswith("equal: ")


@pytest.mark.parametrize("name", READ)
def test_values_are_loaded_one_by_one_under_the_names_of_the_model(name: str, tmp_path: Path) -> None:
    folder, _ = unpacked(name, tmp_path)
    expected, checkpoint = tensors(folder), load_checkpoint(folder)
    scaled = {value for value in checkpoint if isinstance(checkpoint[value], breccia.ScaledTensor)}
    assert scaled == set(expected) and all(breccia.bytes_equal(checkpoint[value], expected[value]) for value in scaled)
    assert len(checkpoint.dialects) == 1 and checkpoint.dialects[0] in repr(checkpoint)


@pytest.mark.together
@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
@pytest.mark.parametrize("name", SOME)
def test_every_framework_decodes_the_same_values(name: str, framework: str, tmp_path: Path) -> None:
    pytest.importorskip(f"breccia_{framework}")
    folder, _ = unpacked(name, tmp_path)
    checkpoint = load_checkpoint(folder, framework=framework, names=["*proj*"])
    for value, st in tensors(folder).items():
        assert checkpoint[value].digest() == st.digest()
        decoded = np.asarray(breccia.dequantize(checkpoint[value]))
        assert decoded.tobytes() == np.ascontiguousarray(breccia.dequantize(st)).tobytes()


@pytest.mark.parametrize("name", SOME)
def test_what_a_recipe_does_not_hold_is_quantized_again_from_decoded_values(name: str, tmp_path: Path) -> None:
    folder, _ = unpacked(name, tmp_path)
    report = convert(folder, tmp_path / "out", "int8")
    loaded = load_safetensors(tmp_path / "out")
    expected = tensors(folder)
    assert {t.name for t in report.quantized} == set(expected) and not report.codes_kept
    for value, st in expected.items():
        assert breccia.bytes_equal(loaded[value], breccia.cast(np.ascontiguousarray(breccia.dequantize(st)), "int8"))
    planned = convert(folder, tmp_path / "out", "int8", force=True, dry_run=True)
    assert [(t.name, t.bytes_out) for t in planned.tensors] == [(t.name, t.bytes_out) for t in report.tensors]


@pytest.mark.parametrize("name", SOME)
def test_a_quantized_folder_becomes_dense_without_a_trace_of_its_dialect(name: str, tmp_path: Path) -> None:
    folder, _ = unpacked(name, tmp_path)
    expected = tensors(folder)
    convert(folder, tmp_path / "out", "fp32")
    loaded = load_safetensors(tmp_path / "out")
    for value, st in expected.items():
        assert loaded[value].tobytes() == np.ascontiguousarray(breccia.dequantize(st)).tobytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization_config", "compression_config", "quantization"} & config.keys()
    assert load_checkpoint(tmp_path / "out").dialects == []


def test_codes_that_a_recipe_holds_exactly_are_kept(tmp_path: Path) -> None:
    folder, _ = unpacked("gpt_oss_mxfp4", tmp_path)
    report = convert(folder, tmp_path / "out", "mxfp8", include=["*experts.*_proj"])  # E4M3 has every E2M1 number
    assert len(report.codes_kept) == 2 == len(report.quantized) and {t.stored_as for t in report.quantized} == {"mxfp8"}
    assert compare(folder, tmp_path / "out").verdict.startswith("equal: ")


@pytest.mark.parametrize("name", READ)
def test_inspect_counts_values_and_names_the_dialect(name: str, tmp_path: Path) -> None:
    folder, _ = unpacked(name, tmp_path)
    stored = read(folder)
    inspection = inspected(folder, scales=True)
    rows = {row["name"]: row for row in inspection.rows}
    assert inspection.problem == "" and [d["values"] for d in inspection.dialects] == [len(stored)]
    for value, one in stored.items():
        assert rows[value]["shape"] == list(one.shape) and rows[value]["recipe"] == one.form.recipe.to_dict()
        assert rows[value]["bytes"] == one.nbytes and rows[value]["dialect"] == one.dialect.name
        assert not [doubt for doubt in rows[value]["suspicious"] if "times the median" not in doubt and "negative" not in doubt]
    files = [Container(path) for path in folder.glob("*.safetensors")]
    assert sum(row["bytes"] for row in inspection.rows) == sum(e.nbytes for file in files for e in file.entries.values())


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - set(READ)))
def test_what_cannot_be_decoded_is_inspected_with_the_reason(name: str, tmp_path: Path, run: Run) -> None:
    folder, _ = unpacked(name, tmp_path)
    code, out, _ = run("inspect", folder)
    assert code == 0 and EXPECTED[name].removeprefix(REFUSED) in out
    code, out, err = run("convert", folder, tmp_path / "out", "-r", "none")
    assert (code, out) == (1, "") and EXPECTED[name].removeprefix(REFUSED) in err and not (tmp_path / "out").exists()


def test_names_choose_values_and_one_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    folder, _ = unpacked("gptq_v1_int4_sym", tmp_path)
    assert list(load_checkpoint(folder, names="*up_proj*")) == ["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(breccia.UnknownNameError, match="qweight"):
        load_checkpoint(folder, names=["*.qweight"])
    checkpoint: Any = load_checkpoint(folder, names=["model.norm.weight"])
    with pytest.raises(KeyError):
        checkpoint["model.layers.0.mlp.up_proj.weight"]


def test_two_readings_are_named_and_the_caller_chooses(tmp_path: Path, run: Run) -> None:
    folder, _ = unpacked("gptq_v1_int4_sym", tmp_path)
    expected = tensors(folder)
    (folder / "config.json").unlink()
    (folder / "quantize_config.json").unlink(missing_ok=True)
    code, _, err = run("convert", folder, tmp_path / "out", "-r", "none")
    assert code == 1 and "GPTQ ('gptq')" in err and "GPTQ version 2 ('gptq_v2')" in err and "--from" in err
    code, _, err = run("convert", folder, tmp_path / "out", "-r", "none", "--from", "gptq")
    assert (code, err) == (0, "")
    loaded = load_safetensors(tmp_path / "out")
    assert all(breccia.bytes_equal(loaded[value], st) for value, st in expected.items())
    other = load_checkpoint(folder, source_dialect="gptq_v2")
    assert any(not breccia.bytes_equal(other[value], st) for value, st in expected.items())
    with pytest.raises(breccia.UnknownNameError, match="no dialect 'gptqq'; did you mean 'gptq'?"):
        load_checkpoint(folder, source_dialect="gptqq")
