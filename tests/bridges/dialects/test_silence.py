"""What could be read wrongly without a word is refused: clashes of names, parts left over, settings that change values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_dialects import read, unpacked
from safetensors.numpy import load_file, save_file

import breccia
from breccia.bridges import compare, convert, load_checkpoint

X = np.ones((4, 64), np.float32)
UP = "model.layers.0.mlp.up_proj"


def unpacked_file(name: str, folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """(the folder of a golden checkpoint of dtypes that NumPy has, its tensors, its config)."""
    path, _ = unpacked(name, folder)
    return path, load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())


def refused(path: Path, error: type[Exception], message: str, **options: Any) -> None:
    """Both ways of reading raise it, and nothing is written."""
    for call in (load_checkpoint, lambda p, **o: convert(p, path.with_name("out" + path.suffix), "bf16", **o)):
        with pytest.raises(error, match=message):
            call(path, **options)
    assert not path.with_name("out" + path.suffix).exists()


@pytest.fixture
def gptq(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    path, _ = unpacked("gptq_v1_int4_sym", tmp_path)
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "numpy") as file:
        names = [name for name in file.keys() if "proj" in name]  # noqa: SIM118  # the rest is BF16, which NumPy lacks
        tensors = {name: file.get_tensor(name) for name in names}
    save_file(tensors, path / "model.safetensors")
    return path, tensors, json.loads((path / "config.json").read_text())


def test_a_plain_tensor_of_the_name_of_a_value_is_refused(gptq: Any) -> None:
    path, tensors, _ = gptq
    save_file(tensors | {f"{UP}.weight": X}, path / "model.safetensors")
    refused(path, breccia.CorruptFileError, rf"has the tensor '{UP}.weight', and a quantized value of this name \(GPTQ: ")


@pytest.mark.parametrize("end", ["qweight", "scales", "qzeros"])
def test_a_value_that_lacks_a_part_is_refused(end: str, gptq: Any) -> None:
    path, tensors, _ = gptq
    del tensors[f"{UP}.{end}"]
    save_file(tensors, path / "model.safetensors")
    refused(path, breccia.CorruptFileError, rf"'{UP}.q\w+' is a part of GPTQ without the others: no file has '{UP}.{end}'")


def test_a_dialect_that_no_tensor_follows_is_refused(gptq: Any) -> None:
    path, _, _ = gptq
    (path / "config.json").unlink()
    (path / "quantize_config.json").unlink(missing_ok=True)
    refused(path, breccia.DialectError, "no tensors are a value of ComfyUI; they end in", source_dialect="comfy_quant")


def test_values_of_another_dialect_beside_the_given_one_are_refused(gptq: Any) -> None:
    path, tensors, _ = gptq
    (path / "config.json").unlink()
    (path / "quantize_config.json").unlink(missing_ok=True)
    experts = {"e_blocks": np.zeros((2, 4, 1, 16), np.uint8), "e_scales": np.full((2, 4, 1), 127, np.uint8)}
    save_file(tensors | experts, path / "model.safetensors")
    refused(path, breccia.UnsupportedError, "look like MXFP4, as gpt-oss.*source_dialect is 'gptq'", source_dialect="gptq")


def test_parts_of_a_model_with_other_settings_are_refused(gptq: Any) -> None:
    path, _, config = gptq
    other = {"quantization_config": {**config["quantization_config"], "checkpoint_format": "gptq_v2"}}
    (path / "config.json").write_text(json.dumps({**config, "vision_config": other}))
    refused(path, breccia.UnsupportedError, "vision_config.quantization_config have other settings; breccia reads a checkpoint")


def test_rotated_weights_are_refused(tmp_path: Path) -> None:
    path, _ = unpacked("ct_pack_int4_g128_sym", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {"config_groups": {"R1": {"type": "hadamard"}}}
    (path / "config.json").write_text(json.dumps(config))
    refused(path, breccia.UnsupportedError, "the config has a transform_config: the weights are rotated")


def test_a_weight_whose_inputs_are_scaled_leaves_its_dialect_with_all_of_it_or_not_at_all(tmp_path: Path) -> None:
    path, _ = unpacked("modelopt_int4_awq", tmp_path)
    with pytest.raises(breccia.UnsupportedError, match=r"are multiplied by .*pre_quant_scale.*Recipe 'none' keeps both"):
        convert(path, tmp_path / "out", "bf16")
    report = convert(path, tmp_path / "out", "none")
    names = {t.name for t in report.tensors}
    assert f"{UP}.weight" in {t.name for t in report.codes_kept} and any(name.endswith("pre_quant_scale") for name in names)


def test_layers_that_the_metadata_of_a_file_describes_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": np.zeros((16, 8), np.int8), "a.weight_scale": np.ones((16, 1), np.float32)}
    save_file(tensors, tmp_path / "m.safetensors", {"_quantization_metadata": '{"layers": {"a": {"format": "int8"}}}'})
    refused(tmp_path / "m.safetensors", breccia.UnsupportedError, r"\(ComfyUI\): its metadata has _quantization_metadata")


def test_the_same_bytes_under_other_settings_are_compared_by_their_values(tmp_path: Path) -> None:
    path, _ = unpacked("autoround_gptq_int4", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for file in path.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["packing_format"] = "auto_round:gptqmodel"
    (other / "config.json").write_text(json.dumps(config))
    assert compare(path, path).verdict.startswith("identical")
    assert compare(path, other).verdict.startswith("rounded: 2 of")


def test_asking_for_a_name_reads_nothing(gptq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = gptq
    checkpoint = load_checkpoint(path)
    monkeypatch.setattr("breccia_bridges.stored.Stored.tensor", lambda self: pytest.fail("it was read"))
    assert f"{UP}.weight" in checkpoint and "other" not in checkpoint and len(read(path)) == len(checkpoint)


def test_what_a_dialect_does_not_expect_has_a_typed_error(gptq: Any) -> None:
    path, _, config = gptq
    config["quantization_config"]["dynamic"] = {"a{99999999999}": {}}
    (path / "config.json").write_text(json.dumps(config))
    refused(path, breccia.DialectError, r"the pattern 'a\{99999999999\}' of dynamic is not a regular expression")
