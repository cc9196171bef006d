"""One config and several forms of values: mixtures that a library writes are read, those of two libraries are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_folders import Entry, floats, folder, fp4, fp8, spread, values

import breccia
from breccia.bridges import compare, convert, load_checkpoint

LAYER = "model.layers.0"
EXPERT, DENSE, ATTENTION = f"{LAYER}.mlp.experts.3.up_proj", f"{LAYER}.mlp.shared.up_proj", f"{LAYER}.self_attn.q_proj"
Family = tuple[dict[str, Entry], dict[str, Any], dict[str, tuple[str, np.ndarray]]]


def deepseek_v4() -> Family:
    """FP4 experts and FP8 weights with scales in E8M0, and block FP8 as DeepSeek-V3 has it, under one `fp8` config."""
    (data, q4), (scale4, s4) = fp4(64, 128), floats("F8_E8M0", 64, 4)
    (codes, q8), (scale8, s8), (scale3, s3) = fp8(256, 128), floats("F8_E8M0", 2, 1), floats("F32", 2, 1)
    tensors = {
        f"{EXPERT}.weight": ("I8", data.view(np.int8)),
        f"{EXPERT}.scale": scale4,
        f"{DENSE}.weight": codes,
        f"{DENSE}.scale": scale8,
        f"{ATTENTION}.weight": codes,
        f"{ATTENTION}.weight_scale_inv": scale3,
    }
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    tiles = [q8 * spread(s, 128, 128, (256, 128)) for s in (s8, s3)]
    expected = {
        EXPERT: ("mxfp4", q4 * np.repeat(s4, 32, 1)),
        DENSE: ("fp8_block", tiles[0]),
        ATTENTION: ("fp8_block", tiles[1]),
    }
    return tensors, config, expected


def compressed_tensors() -> Family:
    """NVFP4 experts and FP8 attention in two groups."""
    (data, q4), (scale4, s4), divisor = fp4(64, 128), fp8(64, 8), np.array([0.5], np.float32)
    (codes, q8), (scale8, s8) = fp8(64, 128), floats("F32", 64, 1)
    tensors = {
        f"{EXPERT}.weight_packed": ("U8", data),
        f"{EXPERT}.weight_scale": ("F8_E4M3", scale4[1] & 0x7F),
        f"{EXPERT}.weight_global_scale": ("F32", divisor),
        f"{ATTENTION}.weight": codes,
        f"{ATTENTION}.weight_scale": scale8,
    }
    four = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    eight = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    groups = {
        "group_0": {"targets": [r"re:.*experts\.\d+\..*"], "weights": four, "format": "nvfp4-pack-quantized"},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": eight, "format": "float-quantized"},
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head"]}
    expected = {EXPERT: ("nvfp4", q4 * np.repeat(np.abs(s4), 16, 1) / divisor), ATTENTION: ("fp8_row", q8 * s8)}
    return tensors, config, expected


def modelopt() -> Family:
    """NVFP4 experts and FP8 attention, module by module."""
    tensors, _, expected = compressed_tensors()
    scale = tensors.pop(f"{ATTENTION}.weight_scale")[1].reshape(-1)
    data, _ = tensors.pop(f"{EXPERT}.weight_packed"), tensors.pop(f"{EXPERT}.weight_global_scale")
    tensors |= {f"{EXPERT}.weight": data, f"{EXPERT}.weight_scale_2": ("F32", np.array(2, np.float32))}
    tensors[f"{ATTENTION}.weight_scale"] = ("F32", scale)
    layers = {
        EXPERT: {"quant_algo": "NVFP4", "group_size": 16},
        ATTENTION: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["lm_head"]}
    return tensors, config, expected


@pytest.mark.parametrize("family", [deepseek_v4, compressed_tensors, modelopt])
def test_a_mixture_that_a_library_writes_is_read_by_everything(family: Any, tmp_path: Path) -> None:
    tensors, config, expected = family()
    tensors["lm_head.weight"] = floats("BF16", 64, 128)[0]
    path = folder(tmp_path / "source", tensors, config)
    checkpoint = load_checkpoint(path)
    for module, (recipe, x) in expected.items():
        st = checkpoint[f"{module}.weight"]
        assert st.recipe.name == recipe
        np.testing.assert_array_equal(np.asarray(breccia.dequantize(st)), x.astype(np.float32))
    report = convert(path, tmp_path / "codes", "none")
    assert {t.name for t in report.codes_kept} == {f"{module}.weight" for module in expected}
    assert [t.name for t in report.kept] == ["lm_head.weight"]
    assert compare(path, tmp_path / "codes").verdict.startswith("equal: ")
    convert(path, tmp_path / "dense", "fp32")
    assert compare(path, tmp_path / "dense").verdict.startswith("equal: ")


@pytest.mark.parametrize("family", [deepseek_v4, compressed_tensors, modelopt])
def test_values_of_another_library_beside_those_of_a_config_are_refused(family: Any, tmp_path: Path) -> None:
    tensors, config, _ = family()
    other = {
        f"{LAYER}.o_proj.qweight": ("I32", np.zeros((16, 8), np.int32)),
        f"{LAYER}.o_proj.qzeros": ("I32", np.zeros((1, 1), np.int32)),
        f"{LAYER}.o_proj.scales": ("F16", np.ones((1, 8), np.float16)),
    }
    path = folder(tmp_path / "source", tensors | other, config)
    with pytest.raises(
        breccia.UnsupportedError, match=rf"and its tensors look like .*{config['quant_method']}.*o_proj.qweight is I32"
    ):
        values(path)
    with pytest.raises(breccia.UnsupportedError):
        convert(path, tmp_path / "out", "none", dry_run=True)
