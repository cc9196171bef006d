"""MLX: words of every mode, packed here, read exactly without MLX."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from packed_words import checkpoint, decoded, values, words

import breccia
from breccia_bridges.recipes import AffineScaling

RNG = np.random.default_rng(9)
UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.fixture(autouse=True)
def _without_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlx", "mlx.core", "mlx.nn"):
        monkeypatch.setitem(sys.modules, name, None)


class Affine:
    """A matrix in mode "affine", and its values."""

    def __init__(self, bits: int, group: int, shape: tuple[int, ...] = (5, 128), dtype: Any = np.float16) -> None:
        scales = (*shape[:-1], shape[-1] // group)
        self.codes = RNG.integers(0, 1 << bits, shape)
        self.scales, self.biases = (RNG.standard_normal(scales).astype(dtype) for _ in range(2))
        self.bits, self.group = bits, group

    def tensors(self, module: str = UP, bias_end: str = "biases", **changes: Any) -> dict[str, Any]:
        parts = {"weight": words(self.codes, self.bits, np.uint32), "scales": self.scales, bias_end: self.biases} | changes
        return {f"{module}.{end}": part for end, part in parts.items() if part is not None}

    @property
    def expected(self) -> np.ndarray:
        scales, biases = (np.repeat(part.astype(np.float32), self.group, -1) for part in (self.scales, self.biases))
        return scales * self.codes.astype(np.float32) + biases


def config(bits: Any = 4, group: Any = 64, **settings: Any) -> dict[str, Any]:
    quantization = {"group_size": group, "bits": bits, **settings}
    return {"quantization": quantization, "quantization_config": quantization}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_width_of_mode_affine_is_read_exactly(bits: int, dtype: Any, tmp_path: Path) -> None:
    matrix = Affine(bits, 64, (2, 3, 128), dtype)
    stored = values(checkpoint(tmp_path / "m", matrix.tensors(), config(bits, mode="affine")))
    assert list(stored) == [f"{UP}.weight"]
    st = stored[f"{UP}.weight"].tensor()
    name = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[np.dtype(dtype).name]
    if bits in (4, 8):
        kind = breccia.INT4Scaling if bits == 4 else breccia.INT8Scaling
        assert st.recipe == kind(group_size=64, signed=False, scale_dtype=name, symmetric=False, offset="bias")
    else:
        assert st.recipe == AffineScaling(bits, 64, name)
    assert st.shape == (2, 3, 128) and st.data.tobytes() == words(matrix.codes, bits).tobytes()
    assert (decoded(stored[f"{UP}.weight"]) == matrix.expected).all()


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("mode", "group", "bits"), [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)])
def test_every_mode_with_coded_scales_is_read_exactly(mode: str, group: int, bits: int, is_known: bool, tmp_path: Path) -> None:
    """Without a config too: their shapes differ."""
    codes = RNG.integers(0, 1 << bits, (2, 3, 64))
    codes = np.where(codes & 127 == 127, 1, codes) if bits == 8 else codes
    scales = RNG.integers(100, 126, (2, 3, 64 // group)).astype(np.uint8)
    e4m3 = ml_dtypes.float8_e4m3fn
    factors = scales.view(e4m3).astype(np.float32) if mode == "nvfp4" else np.exp2(scales.astype(np.float32) - 127)
    numbers = codes.astype(np.uint8).view(e4m3).astype(np.float32) if bits == 8 else E2M1[codes]
    tensors = {f"{UP}.weight": words(codes, bits, np.uint32), f"{UP}.scales": scales}
    settings = config(bits, group, mode=mode) if is_known else None
    stored = values(checkpoint(tmp_path / "m", tensors, settings))[f"{UP}.weight"]
    st = stored.tensor()
    assert st.recipe.name == mode and st.global_scale is None and st.scale.tobytes() == scales.tobytes()
    assert (decoded(stored) == numbers * np.repeat(factors, group, -1)).all()


def test_modules_have_options_of_their_own(tmp_path: Path) -> None:
    """Where they name no mode, it is affine, as mlx.nn.quantize has it, whatever the others have."""
    wide, default = Affine(6, 32), Affine(4, 64)
    codes, scales = RNG.integers(0, 16, (4, 64)), np.full((4, 2), 127, np.uint8)
    tensors = {"a.weight": words(codes, 4, np.uint32), "a.scales": scales} | wide.tensors(DOWN) | default.tensors(UP)
    own = {DOWN: {"bits": 6, "group_size": 32}, UP: {}, "a": True, "lm_head": False}
    stored = values(checkpoint(tmp_path / "m", tensors, config(4, 32, mode="mxfp4", **own)))
    assert (decoded(stored[f"{DOWN}.weight"]) == wide.expected).all()
    assert (decoded(stored[f"{UP}.weight"]) == default.expected).all()
    assert (decoded(stored["a.weight"]) == E2M1[codes]).all()


def test_a_module_that_the_config_leaves_is_not_quantized(tmp_path: Path) -> None:
    stored = values(checkpoint(tmp_path / "m", Affine(4, 64).tensors(), config(**{UP: False})))[f"{UP}.weight"]
    with pytest.raises(breccia.CorruptFileError, match=f"quantization leaves {UP} as it is, but the files have {UP}.weight"):
        stored.tensor()


def test_metal_of_transformers_names_its_biases_otherwise(tmp_path: Path) -> None:
    matrix = Affine(2, 128)
    settings = {"quantization_config": {"quant_method": "metal", "bits": 2, "group_size": 128, "modules_to_not_convert": None}}
    stored = values(checkpoint(tmp_path / "m", matrix.tensors(bias_end="qbiases"), settings))[f"{UP}.weight"]
    assert (decoded(stored) == matrix.expected).all()


@pytest.mark.parametrize(("bits", "group"), [(5, 32), (5, 64), (5, 128), (3, 32), (8, 128)])
def test_without_a_config_shapes_say_the_options_of_some(bits: int, group: int, tmp_path: Path) -> None:
    matrix = Affine(bits, group)
    stored = values(checkpoint(tmp_path / "m", matrix.tensors()))[f"{UP}.weight"]
    assert (decoded(stored) == matrix.expected).all()


@pytest.mark.parametrize(
    ("bits", "group", "said"),
    [
        (2, 32, "2 bits in groups of 32 or 1 bit in groups of 64, and no config says which. Give"),
        (4, 64, "8 bits in groups of 32 or 4 bits in groups of 64 or 2 bits in groups of 128, and no config says which. Give"),
        (
            6,
            32,
            "6 bits in groups of 32 or 3 bits in groups of 64, and no config says which. Give the folder with config.json.",
        ),
    ],
)
def test_without_a_config_others_are_asked_for(bits: int, group: int, said: str, tmp_path: Path) -> None:
    stored = values(checkpoint(tmp_path / "m", Affine(bits, group).tensors()))[f"{UP}.weight"]
    with pytest.raises(breccia.DialectError) as caught:
        stored.tensor()
    assert f"{UP}.weight (MLX): 'weight' of shape" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        (
            {},
            {"bits": 8},
            "'weight' of shape [5, 16] is 64 codes of 8 bits a row; 'scales' of shape [5, 2] does not fit groups of 64",
        ),
        (
            {},
            {"bits": 7},
            "affine arrays of 2, 3, 4, 5, 6, 8 bits, in groups of 32, 64 or 128, with scales in float32, float16",
        ),
        ({}, {"bits": "4"}, "bits is an integer; the config has '4'."),
        ({}, {"bits": 0}, "the config has group_size 64 and bits 0; neither is 0."),
        ({}, {"mode": "mxfp4", "group": 32}, "the config has mode 'mxfp4', but the files have scales in F16 with biases."),
        ({}, {"mode": "fp2"}, "the config has mode 'fp2', but the files have scales in F16 with biases."),
        ({"biases": None}, {}, "'scales' is F16 without biases; MLX has float scales with biases (affine), or U8 without."),
        ({"biases": np.ones((5, 2), np.float32)}, {}, "'biases' is F32 and 'scales' F16; MLX has one dtype for both."),
        ({"biases": np.ones((5, 1), np.float16)}, {}, "'biases' has shape [5, 1]; its other parts need [5, 2]."),
        ({"scales": np.full((5, 2), np.nan, np.float16)}, {}, "'scales' has 10 scales that are not finite; the first is nan"),
        ({"biases": np.full((5, 2), np.inf, np.float16)}, {}, "'biases' has 10 scales that are not finite; the first is inf"),
        (
            {"weight": np.ones(16, np.uint32)},
            {},
            "'weight' has shape [16] and 'scales' [5, 2]; they are (..., M, K * bits / 32)",
        ),
        (
            {"scales": np.ones((5, 4), np.uint8), "biases": None},
            {"mode": "mxfp4"},
            "mode 'mxfp4' has group_size=32 and bits=4; got group_size=64, bits=4.",
        ),
        (
            {"scales": np.full((5, 4), 255, np.uint8), "biases": None},
            {"mode": "mxfp4", "group": 32},
            "'scales' has 20 scales that are not finite; the first is nan at position 0.",
        ),
        (
            {"scales": np.full((5, 8), 127, np.uint8), "biases": None},
            {"mode": "nvfp4", "group": 16},
            "'scales' has 40 scales that are not finite; the first is nan at position 0.",
        ),
        (
            {"scales": np.ones((5, 4), np.uint8), "biases": None},
            {},
            "the config has mode 'affine', but the files have scales in U8 without biases. Download the checkpoint again.",
        ),
        (
            {"scales": np.ones((5, 4), np.uint8), "biases": None},
            {"mode": "fp2"},
            "mode is one of affine, mxfp4, mxfp8, nvfp4; got 'fp2'.",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    stored = values(checkpoint(tmp_path / "m", Affine(4, 64).tensors(**changes), config(**settings)))[f"{UP}.weight"]
    with pytest.raises(breccia.DialectError) as caught:
        stored.tensor()
    assert said in str(caught.value) and f"{UP}.weight (MLX): " in str(caught.value)


def test_without_a_config_arrays_of_no_mode_are_refused(tmp_path: Path) -> None:
    tensors = Affine(4, 64).tensors(scales=np.ones((5, 3), np.uint8), biases=None)
    with pytest.raises(breccia.DialectError, match="'scales' of shape \\[5, 3\\] are of no mode of MLX"):
        values(checkpoint(tmp_path / "m", tensors))[f"{UP}.weight"].tensor()


@pytest.mark.parametrize("is_known", [True, False])
def test_one_bit_is_refused_by_name(is_known: bool, tmp_path: Path) -> None:
    stored = values(checkpoint(tmp_path / "m", Affine(1, 32).tensors(), config(1, 32) if is_known else None))[f"{UP}.weight"]
    with pytest.raises(
        breccia.UnsupportedError, match="it has 1 bit; recipes have 2, 3, 4, 5, 6, 8 bits. Convert the checkpoint"
    ):
        stored.tensor()
