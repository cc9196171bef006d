"""Checkpoints that are recognized only: each is named, with the way out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dialect_folders import PLAIN, Tensor, floats, folder, quantized, values

from breccia import UnsupportedError
from breccia.backend import registry

ORIGINAL = "convert the checkpoint that it was made from, in BF16, FP16 or FP32."
I32, U8, I8 = ("I32", np.ones((4, 4), np.int32)), ("U8", np.ones((4, 4), np.uint8)), ("I8", np.ones((4, 4), np.int8))
F16 = floats("F16", np.ones(4))
#: Tensors of a module by the ends of their names, by what messages call their dialect.
SHOWN: dict[str, dict[str, Tensor]] = {
    "AQLM": {"codebooks": F16, "codes": I8, "scales": F16},
    "EETQ": {"weight_scales": F16, "weight": I8},
    "EXL2": {"q_weight": I32, "q_scale": I32, "q_scale_max": F16, "q_groups": I32, "q_invperm": I32},
    "EXL3": {"trellis": ("I16", np.ones((2, 2, 32), np.int16)), "suh": F16, "svh": F16},
    "ONNX Runtime": {"weight_quantized": U8, "weight_scale": F16, "weight_zero_point": U8},
}


@pytest.mark.parametrize("title", SHOWN)
def test_tensors_alone_show_a_dialect(tmp_path: Path, title: str) -> None:
    with pytest.raises(UnsupportedError) as e:
        values(folder(tmp_path, PLAIN | {f"layers.0.up.{end}": tensor for end, tensor in SHOWN[title].items()}))
    first = next(iter(SHOWN[title]))
    assert f"is already quantized ({title}): layers.0.up.{first} is {SHOWN[title][first][0]}" in str(e.value)
    assert str(e.value).endswith(ORIGINAL)


@pytest.mark.parametrize(
    ("method", "title"),
    (
        ("aqlm", "AQLM"),
        ("bitnet", "BitNet"),
        ("eetq", "EETQ"),
        ("exl2", "EXL2"),
        ("exl3", "EXL3"),
        ("fouroversix", "Four Over Six"),
        ("fp_quant", "FP-Quant"),
        ("gemma", "Gemma's integers"),
        ("higgs", "HIGGS"),
        ("nvfp4", "NVFP4 of transformers"),
        ("sinq", "SINQ"),
        ("spqr", "SpQR"),
        ("vptq", "VPTQ"),
    ),
)
def test_a_config_names_a_dialect(tmp_path: Path, method: str, title: str) -> None:
    with pytest.raises(UnsupportedError) as e:
        values(folder(tmp_path, PLAIN | {"layers.0.up.odd": I32}, quantized(method)))
    assert f"is already quantized ({title}): " in str(e.value)
    assert f"config.json: quantization_config is {method!r}; layers.0.up.odd is codes; Breccia does not read it" in str(e.value)
    assert str(e.value).endswith(ORIGINAL)


def test_ways_out_that_a_library_has_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"load it with transformers, call model\.dequantize\(\) and save the model; or"):
        values(folder(tmp_path, {"layers.0.up.weight": ("I16", np.ones((4, 4), np.int16))}, quantized("higgs")))


def test_every_quantization_of_transformers_is_known() -> None:
    config = pytest.importorskip("transformers.utils.quantization_config")
    known = {method for dialect in registry().dialects.values() for method in dialect.methods}
    assert {method.value for method in config.QuantizationMethod} - known == set()
