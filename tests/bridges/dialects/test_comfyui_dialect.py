"""ComfyUI's scaled FP8, old and new: read exactly; its other formats are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dialect_folders import PLAIN, Tensor, bytes_of, decoded, floats, folder, numbers, untyped, values

import breccia
from breccia import BrecciaError, DialectError, UnsupportedError

RNG = np.random.default_rng(6)
UP = "model.diffusion_model.blocks.0.up"


def codes(*shape: int) -> Tensor:
    return "F8_E4M3", RNG.integers(0, 0x7E, shape, np.uint8)


def layer(shape: tuple[int, ...] = (6, 16), listed: object = None) -> dict[str, Tensor]:
    """A layer with comfy_quant."""
    return {
        f"{UP}.weight": codes(*shape),
        f"{UP}.weight_scale": floats("F32", 0.37),
        f"{UP}.input_scale": floats("F32", 1.0),
        f"{UP}.comfy_quant": bytes_of({"format": "float8_e4m3fn"} if listed is None else listed),
    }


@pytest.mark.parametrize("scale", ((), (1,)))
@pytest.mark.parametrize("shape", ((6, 16), (4, 3, 2, 2)))
def test_scaled_fp8_is_read_exactly(tmp_path: Path, shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
    tensors = {
        f"{UP}.weight": codes(*shape),
        f"{UP}.scale_weight": floats("F32", np.full(scale, 0.37)),
        f"{UP}.scale_input": floats("F32", 1.0),
        f"{UP}.bias": floats("F16", np.ones(6)),
        "model.diffusion_model.scaled_fp8": ("F8_E4M3", np.zeros(2, np.uint8)),
    }
    (stored,) = values(folder(tmp_path, PLAIN | tensors) / "model.safetensors").values()
    assert stored.name == f"{UP}.weight" and stored.form.recipe == breccia.Float8CurrentScaling()
    assert np.array_equal(decoded(stored), numbers(tensors[f"{UP}.weight"]) * np.float32(0.37))


def test_a_layer_with_comfy_quant_is_read_exactly(tmp_path: Path) -> None:
    tensors = layer()
    (stored,) = values(folder(tmp_path, PLAIN | tensors)).values()
    assert stored.dialect.name == "comfy_quant" and stored.form.recipe == breccia.Float8CurrentScaling()
    assert np.array_equal(decoded(stored), numbers(tensors[f"{UP}.weight"]) * np.float32(0.37))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    (
        ({"comfy_quant": bytes_of({"format": "nvfp4"})}, UnsupportedError, "its format is ComfyUI's nvfp4; float8_e4m3fn and"),
        (
            {"pre_quant_scale": floats("F32", np.ones(16))},
            UnsupportedError,
            "its format is ComfyUI's float8_e4m3fn with pre_quant_scale, by which its layer multiplies the inputs;",
        ),
        ({"comfy_quant": bytes_of("{")}, DialectError, "'comfy_quant' holds JSON in bytes; they are not ("),
        ({"comfy_quant": bytes_of([1])}, DialectError, "'comfy_quant' is an object with a format; got [1]"),
        (
            {"comfy_quant": bytes_of({"format": "float8_e5m2"})},
            DialectError,
            "'weight' is F8_E4M3, and its format float8_e5m2 has F8_E5M2",
        ),
        ({"weight_scale": floats("F32", np.ones(6))}, DialectError, "'weight_scale' has shape [6]; its other parts need [] or"),
        ({"weight_scale": ("I8", np.ones(1, np.int8))}, DialectError, "'weight_scale' is I8; ComfyUI has F32 or BF16 or F16"),
        ({"weight_scale": floats("F32", np.nan)}, DialectError, "'weight_scale' has 1 scales that are not finite"),
    ),
)
def test_a_fault_is_named(tmp_path: Path, change: dict[str, Tensor], kind: type[BrecciaError], message: str) -> None:
    changed = layer() | {f"{UP}.{end}": tensor for end, tensor in change.items()}
    with pytest.raises(kind) as e:
        decoded(values(folder(tmp_path, changed))[f"{UP}.weight"])
    assert f"{UP}.weight (ComfyUI): {message}" in str(e.value)


def test_faults_of_files_are_typed_errors(tmp_path: Path) -> None:
    assert untyped(layer(), lambda tensors: folder(tmp_path, tensors)) == []
