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
from breccia.bridges import compare, convert, load_checkpoint, load_safetensors, save_safetensors
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
    expected, stored, checkpoint = tensors(folder), read(folder), load_checkpoint(folder)
    scaled = {value for value in checkpoint if isinstance(checkpoint[value], breccia.ScaledTensor)}
    assert scaled == set(expected) and all(breccia.bytes_equal(checkpoint[value], expected[value]) for value in scaled)
    assert len(checkpoint.dialects) == 1 and checkpoint.dialects[0] in repr(checkpoint)
    for name, value in checkpoint.items():
        shape, dtype, recipe, axis, layout, dialect, parts = checkpoint.header(name)
        scaled = isinstance(value, breccia.ScaledTensor)
        assert shape == tuple(value.shape) and (dtype is None) == scaled
        assert (recipe, axis, layout) == ((value.recipe, value.axis, value.layout) if scaled else (None, -1, None))
        assert dialect == (checkpoint.dialects[0] if scaled else None)
        assert set(parts) == (set(stored[name].parts.values()) if scaled else {name})
    with pytest.raises(KeyError, match="no.such"):
        checkpoint.header("no.such")


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


def test_some_files_of_a_folder_are_read_with_the_configs_beside_them(tmp_path: Path) -> None:
    folder, _ = unpacked("gptq_v1_int4_sym", tmp_path)
    (file,) = folder.glob("*.safetensors")
    other = folder / "other.safetensors"
    breccia.bridges.save_safetensors({"model.norm.weight": np.ones(3, np.float32)}, other)
    with pytest.raises(breccia.CorruptFileError, match="is in both"):
        load_checkpoint(folder)
    expected = tensors(folder)
    breccia.bridges.save_safetensors({"other": np.ones(3, np.float32)}, other, force=True)
    for path in (file, [str(file)], [file, other]):
        checkpoint = load_checkpoint(path)
        assert all(breccia.bytes_equal(checkpoint[value], st) for value, st in expected.items())


def test_a_file_is_converted_and_inspected_with_the_configs_beside_it(tmp_path: Path, run: Run) -> None:
    folder, _ = unpacked("gptq_v1_int4_sym", tmp_path)
    (file,) = folder.glob("*.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    code, out, _ = run("inspect", file)
    assert code == 0 and f"{folder / 'config.json'}: quantization_config is 'gptq'" in out
    report = convert(file, tmp_path / "out.safetensors", "mxfp8", exclude=["*up_proj*"])
    assert [t.stored_as for t in report.decoded] == ["F16"], "as config.json says"
    assert compare(file, folder).verdict.startswith("identical")
    (folder / "config.json").write_text("[")
    with pytest.raises(breccia.CorruptFileError, match=r"config\.json is not JSON"):
        load_checkpoint(file)


@pytest.mark.parametrize(
    "text", ['{"quantization_config": {"quant_method": "gptq", "bits": 4}}', '{"quantization_config": 3}', "["]
)
def test_configs_beside_a_file_without_codes_of_others_are_not_about_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    x = np.ones((64, 64), np.float32)
    breccia.bridges.save_safetensors({"w": x}, tmp_path / "plain.safetensors")
    assert load_checkpoint(tmp_path / "plain.safetensors").dialects == []
    convert(tmp_path / "plain.safetensors", tmp_path / "out.safetensors", "mxfp8", include=["w"])
    (tmp_path / "out.safetensors").rename(tmp_path / "ours")
    if text != "[":
        assert load_checkpoint(tmp_path / "ours").dialects == ["breccia"]
    with pytest.raises(breccia.BrecciaError, match=r"config\.json"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("path", [[], None, b"x", 3, [3], {"a": "b"}])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(
        breccia.OptionError, match="path must be that of a file or folder, or a list of files of one folder; got"
    ):
        load_checkpoint(path)


def test_files_of_several_folders_are_no_checkpoint(tmp_path: Path) -> None:
    files = [tmp_path / folder / "m.safetensors" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        breccia.bridges.save_safetensors({f"{file.parent.name}.w": np.ones(3, np.float32)}, file)
    with pytest.raises(breccia.OptionError) as e:
        load_checkpoint(files)
    assert f"got files of {tmp_path / 'a'}, {tmp_path / 'b'}. Load each folder by itself." in str(e.value)
    again = tmp_path / "b" / ".." / "a" / "n.safetensors"
    breccia.bridges.save_safetensors({"n": np.ones(3, np.float32)}, again)
    assert set(load_checkpoint([files[0], again])) == {"a.w", "n"}, "one folder under two names"


def test_a_file_may_have_any_name_and_has_to_be_what_it_is_named(tmp_path: Path) -> None:
    breccia.bridges.save_safetensors({"w": np.ones(3, np.float32)}, tmp_path / "weights.st")
    assert list(load_checkpoint(tmp_path / "weights.st")) == ["w"]
    (tmp_path / "weights.gguf").write_bytes(bytes(24))
    with pytest.raises(breccia.CorruptFileError, match=r"weights\.gguf: it starts with .*, not b'GGUF': it is no GGUF file"):
        load_checkpoint(tmp_path / "weights.gguf")
    with pytest.raises(FileNotFoundError, match="no checkpoint .*weights; give a .safetensors or .gguf file, or a folder"):
        load_checkpoint(tmp_path / "weights")


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


def test_a_caller_says_of_values_without_a_config_what_a_config_would_say(tmp_path: Path) -> None:
    folder, _ = unpacked("mlx_affine_4", tmp_path)
    expected = tensors(folder)
    options = json.loads((folder / "config.json").read_text())["quantization"]
    file = (folder / "model.safetensors").rename(tmp_path / "weights")  # a file may have any name
    with pytest.raises(breccia.DialectError, match="and no config says which"):
        load_checkpoint(file)
    asked: list[str] = []

    def settings(value: Any) -> Any:
        asked.append(value.name)
        return options if value.name.endswith("up_proj.weight") else None

    checkpoint = load_checkpoint(file, settings=settings)
    assert set(asked) == set(expected), "one by one, each value that is quantized"
    up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    assert checkpoint.header(up).recipe == expected[up].recipe and breccia.bytes_equal(checkpoint[up], expected[up])
    with pytest.raises(breccia.DialectError, match="down_proj.weight.*and no config says which"):
        checkpoint.header(down)
    announced = load_checkpoint(unpacked("mlx_affine_4", tmp_path)[0], settings=lambda value: {"bits": 8})
    assert breccia.bytes_equal(announced[down], expected[down]), "a config is not asked about"


@pytest.mark.together
@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_an_array_that_the_framework_would_narrow_stays_a_numpy_array(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(f"breccia_{framework}")
    positions = np.arange(3) / 3
    save_safetensors({"positions": positions, "b": np.ones(2, np.float32)}, tmp_path / "m.safetensors")
    checkpoint = load_checkpoint(tmp_path / "m.safetensors", framework=framework)
    with pytest.warns(breccia.DtypeWarning, match=rf"m.safetensors: {framework} would narrow positions \(float64\)") as caught:
        array = checkpoint["positions"]
    assert caught[0].filename == __file__
    assert type(array) is np.ndarray and array.tobytes() == positions.tobytes()
    assert type(checkpoint["b"]) is not np.ndarray


def test_each_side_of_a_comparison_has_its_own_dialect(tmp_path: Path, run: Run) -> None:
    path, _ = unpacked("gptq_v1_int4_sym", tmp_path / "gptq")
    convert(path, tmp_path / "dense", "fp32")
    for file in ("config.json", "quantize_config.json"):
        (path / file).unlink(missing_ok=True)
    dense = tmp_path / "dense"
    with pytest.raises(breccia.DialectError, match="dense: no tensors are a value of GPTQ"):
        compare(dense, path, source_dialect="gptq")
    assert compare(dense, path, source_dialect=(None, "gptq")).verdict.startswith("equal: ")
    assert compare(path, dense, source_dialect=("gptq", None)).verdict.startswith("equal: ")
    assert compare(path, path, source_dialect="gptq").verdict.startswith("identical: ")
    assert compare(path, path, source_dialect=("gptq", "gptq_v2")).verdict.startswith("rounded: ")
    for sides, options, verdict in (
        ((dense, path), ("--candidate-from", "gptq"), "equal: "),
        ((path, dense), ("--reference-from", "gptq"), "equal: "),
        ((path, path), ("--reference-from", "gptq", "--candidate-from", "gptq_v2"), "rounded: "),
        ((path, path), ("--from", "gptq"), "identical: "),
    ):
        code, text, _ = run("compare", *sides, *options)
        assert code == 0 and f"verdict: {verdict}" in text
    code, _, err = run("compare", path, path, "--from", "gptq", "--candidate-from", "gptq")
    assert code == 2 and "--from is for REFERENCE and CANDIDATE; give it, or --reference-from and" in " ".join(err.split())
