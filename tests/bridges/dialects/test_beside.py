"""Tensors beside quantized values: factors of inputs, without which weights are wrong, and scales of activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_folders import Entry, floats, folder, fp8

import breccia
from breccia.bridges import convert, load_checkpoint, save_safetensors
from breccia_bridges.safetensors_file import Container

LAYER = "model.layers.0"
UP, EXPERTS, ATTENTION = f"{LAYER}.mlp.up_proj", f"{LAYER}.experts.down_proj", f"{LAYER}.self_attn"
ONE = ("F32", np.array(1, np.float32))
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
UP_PARTS = {f"{UP}.weight": fp8(8, 64)[0], f"{UP}.weight_scale": ONE}


def stacked(experts: int) -> dict[str, Entry]:
    return {EXPERTS: fp8(experts, 8, 64)[0], f"{EXPERTS}_weight_scale": ONE}


FACTOR = floats("F32", 64)[0]
SCALED_INPUTS: list[tuple[dict[str, Entry], Any, str]] = [
    (UP_PARTS | {f"{UP}.pre_quant_scale": FACTOR}, FP8, f"{UP}.pre_quant_scale"),
    (stacked(2) | {f"{EXPERTS}_pre_quant_scale": FACTOR}, FP8, f"{EXPERTS}_pre_quant_scale"),
    (UP_PARTS | {f"{UP}.pre_quant_scale": FACTOR}, None, f"{UP}.pre_quant_scale"),
]


@pytest.mark.parametrize(("tensors", "config", "factor"), SCALED_INPUTS, ids=["module", "stack", "of no dialect's config"])
def test_weights_are_not_parted_from_the_factor_of_their_inputs(
    tensors: dict[str, Entry], config: Any, factor: str, tmp_path: Path
) -> None:
    """In their dialect, and in breccia's files that keep their codes."""
    foreign = folder(tmp_path / "foreign", tensors, config)
    convert(foreign, tmp_path / "own", "none")
    weight = next(iter(tensors))
    for path in (foreign, tmp_path / "own"):
        for recipe in ("bf16", "mxfp8"):
            with pytest.raises(breccia.UnsupportedError, match=f"the inputs of {weight} are multiplied by {factor}, for which"):
                convert(path, tmp_path / "out", recipe)
        checkpoint = load_checkpoint(path)
        with pytest.raises(breccia.UnsupportedError, match=f"the inputs of {weight} are multiplied by {factor}, for which"):
            checkpoint.check_inputs({weight})
        checkpoint.check_inputs({weight, factor})
        checkpoint.check_inputs({factor})
    convert(tmp_path / "own", tmp_path / "again", "none")
    assert factor in load_checkpoint(tmp_path / "again")


def test_a_plain_weight_with_such_a_parameter_is_converted(tmp_path: Path) -> None:
    tensors = {"up.weight": np.ones((64, 64), np.float32), "up.pre_quant_scale": np.ones(64, np.float32)}
    save_safetensors(tensors, tmp_path / "m.safetensors")
    convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", "mxfp8")
    load_checkpoint(tmp_path / "m.safetensors").check_inputs({"up.weight"})


DROPPED = {f"{UP}.input_scale", f"{EXPERTS}_input_scale", f"{ATTENTION}.k_scale", f"{ATTENTION}.k_proj.v_scale"}
OWN = {f"{UP}.q_scale", f"{EXPERTS}_output_scale", f"{LAYER}.gate.q_scale", "norm.output_scale", f"{ATTENTION}.q_scale"}


def with_activations(path: Path) -> Path:
    tensors = UP_PARTS | stacked(3) | {f"{ATTENTION}.k_proj.weight": fp8(8, 64)[0], f"{ATTENTION}.k_proj.weight_scale": ONE}
    tensors |= {name: ONE for name in DROPPED} | {f"{EXPERTS}_input_scale": floats("F32", 3)[0]}
    tensors |= {f"{LAYER}.gate.q_scale": ONE, "norm.output_scale": ONE, f"{ATTENTION}.q_scale": floats("F32", 8)[0]}
    tensors |= {f"{UP}.q_scale": floats("F32", 64)[0], f"{EXPERTS}_output_scale": floats("F32", 8)[0]}
    return folder(path, tensors, FP8)


def test_only_what_surely_belongs_to_codes_is_dropped_with_them(tmp_path: Path) -> None:
    """One element, or one of each expert, beside a quantized value or in the attention that has one."""
    foreign = with_activations(tmp_path / "foreign")
    assert not convert(foreign, tmp_path / "own", "none").dropped
    for path in (foreign, tmp_path / "own"):
        report = convert(path, tmp_path / "out", "bf16", force=True)
        assert set(report.dropped) == DROPPED
        written = Container(tmp_path / "out" / "model.safetensors").entries
        assert written.keys() >= OWN and not written.keys() & DROPPED


def test_a_quantized_model_may_lack_scales_of_activations_that_breccia_s_files_kept(tmp_path: Path) -> None:
    foreign = with_activations(tmp_path / "foreign")
    convert(foreign, tmp_path / "own", "none")
    convert(foreign, tmp_path / "plain", "bf16")
    for path in (foreign, tmp_path / "own"):
        assert set(load_checkpoint(path).activations) >= DROPPED
    assert load_checkpoint(tmp_path / "plain").activations == [], "a model without codes has none"
