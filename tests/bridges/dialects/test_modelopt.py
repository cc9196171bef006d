"""Checkpoints of ModelOpt, packed here by its documentation, are read exactly; what cannot be read is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stored_folders import E2M1, RNG, Entry, decoded, floats, folder, fp4, fp8, refusal, spread, values

import breccia
from breccia import CorruptFileError, DialectError, UnsupportedError

UP, DOWN, ATTN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"
FUSED = "model.layers.0.feed_forward.experts.gate_up_proj"
PLAIN: dict[str, Entry] = {
    "lm_head.weight": floats("BF16", 4, 8)[0],
    f"{UP}.input_scale": ("F32", np.array(0.5, np.float32)),
    f"{UP}.pre_quant_scale": floats("BF16", 64)[0],
    f"{ATTN}.k_scale": ("F32", np.array(1, np.float32)),
}


def quantization(algorithm: str | None, **settings: Any) -> dict[str, Any]:
    """The settings of hf_quant_config.json."""
    listed = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "*router"], **settings}
    return {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": listed}


def flat(algorithm: str | None, **settings: Any) -> dict[str, Any]:
    """The same as config.json has them."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*router"], **settings}


def nvfp4(*shape: int) -> tuple[list[Entry], np.ndarray, np.ndarray]:
    """Codes, scales and the scale of scales; q * (s * s2), as ModelOpt computes it, and (q * s) * s2."""
    (data, q), e4m3 = fp4(*shape), RNG.uniform(1, 400, (*shape[:-1], shape[-1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    second = np.array(0.37, np.float32)  # under which the two orders differ
    s = np.repeat(e4m3.astype(np.float32), 16, -1)
    return [("U8", data), ("F8_E4M3", e4m3.view(np.uint8)), ("F32", second)], q * (s * second), q * s * second


def parts(name: str, weight: Entry, scale: Entry, second: Entry | None = None) -> dict[str, Entry]:
    tensors = {f"{name}.weight": weight, f"{name}.weight_scale": scale}
    return tensors if second is None else tensors | {f"{name}.weight_scale_2": second}


def int4(n: int, k: int, size: int) -> tuple[dict[str, Entry], np.ndarray]:
    """Rows 2i and 2i + 1 in the low and high bits of a byte."""
    codes, (scale, s) = RNG.integers(-8, 8, (n, k)), floats("F32", n, k // size)
    weight = ((codes[0::2] & 15) + 16 * (codes[1::2] & 15)).astype(np.uint8)
    return parts(UP, ("U8", weight), scale), codes.astype(np.float32) * np.repeat(s, size, 1)


@pytest.mark.parametrize("both", ["config", "hf_quant_config", "both"])
@pytest.mark.parametrize(
    ("algorithm", "shape", "recipe"),
    [
        ("FP8", (), breccia.Float8CurrentScaling()),
        ("FP8_PER_CHANNEL_PER_TOKEN", (200,), breccia.Float8RowScaling()),
        ("fp8_pb_wo", (2, 1, 3, 1), breccia.Float8BlockScaling(block_m=128)),
    ],
)
def test_fp8(algorithm: str, shape: tuple[int, ...], recipe: Any, both: str, tmp_path: Path) -> None:
    (codes, q), (scale, s) = fp8(200, 320), floats("F32", *shape)
    tensors = PLAIN | parts(UP, codes, scale)
    files = {} if both == "config" else {"hf_quant_config": quantization(algorithm)}
    listed = values(folder(tmp_path, tensors, flat(algorithm) if both != "hf_quant_config" else None, **files))
    assert list(listed) == [f"{UP}.weight"] and listed[f"{UP}.weight"].form.recipe == recipe
    s = s[:, None] if len(shape) == 1 else spread(s[:, 0, :, 0], 128, 128, (200, 320)) if shape else s
    assert np.array_equal(decoded(listed[f"{UP}.weight"]), q * s)


def test_mx_formats(tmp_path: Path) -> None:
    (codes, q), (scale, s), (data, q4) = fp8(6, 64), floats("U8", 6, 2), fp4(6, 64)
    for algorithm, weight, x in (("MXFP8", codes, q), ("mxfp4", ("U8", data), q4), ("W4A8_MXFP4_FP8", ("U8", data), q4)):
        path = folder(tmp_path / algorithm, PLAIN | parts(UP, weight, scale), flat(algorithm, group_size=32))
        listed = values(path)
        assert list(listed) == [f"{UP}.weight"] and np.array_equal(decoded(listed[f"{UP}.weight"]), x * np.repeat(s, 32, 1))


@pytest.mark.parametrize("settings", [flat("NVFP4", group_size=16), flat("NVFP4_AWQ"), flat("W4A16_NVFP4"), None])
def test_nvfp4_has_codes_and_scales_as_stored(settings: Any, tmp_path: Path) -> None:
    entries, x, other = nvfp4(6, 64)
    stored = values(folder(tmp_path, PLAIN | parts(UP, *entries), settings))[f"{UP}.weight"]
    st = stored.tensor()
    for part, (_, array) in zip((st.data, st.scale, st.global_scale), entries, strict=True):
        assert np.array_equal(np.asarray(part), array)
    assert st.recipe == breccia.NVFP4BlockScaling(order="scales_first") and np.array_equal(decoded(stored), x)
    assert not np.array_equal(x, other), "the order shows"


@pytest.mark.parametrize("size", [16, 64])
def test_int4_of_two_rows_to_a_byte(size: int, tmp_path: Path) -> None:
    tensors, x = int4(6, 64, size)
    settings = quantization("W4A16_AWQ", group_size=size, has_zero_point=False, pre_quant_scale=True)
    for name, config in (("with", settings), ("without", None)):
        listed = values(folder(tmp_path / name, PLAIN | tensors, hf_quant_config=config))
        assert list(listed) == [f"{UP}.weight"], "pre_quant_scale is a tensor of its own"
        assert np.array_equal(decoded(listed[f"{UP}.weight"]), x)
        assert listed[f"{UP}.weight"].form.recipe == breccia.INT4Scaling(size, scale_dtype="fp32")


@pytest.mark.parametrize("algorithm", ["W8A16", "W8A8_SQ_PER_CHANNEL"])
def test_int8(algorithm: str, tmp_path: Path) -> None:
    codes, (scale, s) = RNG.integers(-128, 128, (6, 64)).astype(np.int8), floats("F32", 6)
    stored = values(folder(tmp_path, PLAIN | parts(UP, ("I8", codes), scale), flat(algorithm)))[f"{UP}.weight"]
    assert np.array_equal(decoded(stored), codes * s[:, None]) and stored.form.recipe == breccia.INT8Scaling()


@pytest.mark.parametrize("in_config", [True, False])
def test_mixed_precision_by_module(in_config: bool, tmp_path: Path) -> None:
    """A listed module stands for all in it, as for experts that were fused."""
    entries, x, _ = nvfp4(6, 64)
    (codes, q), (scale, s) = fp8(6, 64), floats("F32")
    ints, x4 = int4(6, 64, 16)
    expert = "model.layers.1.mlp.experts.3.down_proj"
    tensors = PLAIN | ints | parts(DOWN, *entries) | parts(ATTN, codes, scale) | parts(expert, codes, scale)
    layers = {
        ATTN: {"quant_algo": "FP8"},
        DOWN: {"quant_algo": "NVFP4", "group_size": 16},
        UP: {"quant_algo": "W4A16_AWQ", "group_size": 16, "has_zero_point": False, "pre_quant_scale": True},
        "model.layers.1.mlp.experts": {"quant_algo": "FP8"},
    }
    inner = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = {"quant_method": "modelopt", "ignore": [], **inner} if in_config else None
    path = folder(tmp_path, tensors, config, hf_quant_config={"quantization": {**inner, "kv_cache_quant_algo": None}})
    listed = values(path)
    assert set(listed) == {f"{name}.weight" for name in (ATTN, DOWN, UP, expert)}
    for name, values_ in ((ATTN, q * s), (DOWN, x), (UP, x4), (expert, q * s)):
        assert np.array_equal(decoded(listed[f"{name}.weight"]), values_)


def test_fused_experts(tmp_path: Path) -> None:
    """(E, K, N): FP8 with one scale; NVFP4 packed along K, which is not the last axis."""
    (codes, q), (scale, s) = fp8(2, 8, 6), floats("F32")
    codes4, e4m3 = RNG.integers(0, 16, (2, 32, 6)), RNG.uniform(1, 400, (2, 2, 6)).astype(ml_dtypes.float8_e4m3fn)
    data, second = (codes4[:, 0::2] + 16 * codes4[:, 1::2]).astype(np.uint8), np.float32(0.002)
    down = FUSED.replace("gate_up", "down")
    tensors: dict[str, Entry] = {
        f"{FUSED}": ("U8", data),
        f"{FUSED}_weight_scale": ("F8_E4M3", e4m3.view(np.uint8)),
        f"{FUSED}_weight_scale_2": ("F32", np.asarray(second)),
        f"{FUSED}_input_scale": ("F32", np.asarray(second)),
        f"{FUSED}_bias": floats("BF16", 2, 6)[0],
        down: codes,
        f"{down}_weight_scale": scale,
    }
    listed = values(folder(tmp_path, tensors, flat("NVFP4") | {"quant_algo": None}))
    assert set(listed) == {FUSED, down} and listed[FUSED].shape == (2, 32, 6)
    assert np.array_equal(decoded(listed[FUSED]), E2M1[codes4] * np.repeat(e4m3.astype(np.float32) * second, 16, 1))
    assert np.array_equal(decoded(listed[down]), q * s)


def test_one_scale_of_scales_for_each_matrix(tmp_path: Path) -> None:
    entries, _, _ = nvfp4(2, 6, 64)
    entries[2] = ("F32", np.array([0.5, 0.25], np.float32))
    st = values(folder(tmp_path, parts(UP, *entries), flat("NVFP4")))[f"{UP}.weight"].tensor()
    assert np.asarray(st.global_scale).tolist() == [0.5, 0.25]


NV = parts(UP, *nvfp4(6, 64)[0])
INT4 = int4(6, 64, 16)[0]
FP8 = parts(UP, fp8(6, 64)[0], floats("F32")[0])
MX = parts(UP, ("U8", fp4(6, 64)[0]), floats("U8", 6, 2)[0])
INT8 = parts(UP, ("I8", np.ones((6, 64), np.int8)), floats("F32", 6)[0])


def changed(tensors: dict[str, Entry], end: str, dtype: str, array: Any) -> dict[str, Entry]:
    return tensors | {f"{UP}.{end}": (dtype, np.asarray(array))}


def fused(dtype: str, codes: np.ndarray, scale: Entry) -> dict[str, Entry]:
    return {f"{UP}.weight": (dtype, codes), f"{UP}.weight_weight_scale": scale}


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (NV, flat("FP8"), "its tensors are NVFP4, but the config has quant_algo 'FP8', not 'NVFP4' or"),
        (FP8, flat("NVFP4"), "its tensors are FP8, but"),
        (MX, flat("NVFP4"), "its tensors are MXFP4, but"),
        (MX, flat("MXFP4", group_size=16), "has group_size 16, not 0 or 32"),
        (INT4, flat("W8A16"), "its tensors are INT4, but"),
        (INT8, flat("W4A16_AWQ"), "its tensors are INT8, but"),
        (FP8, flat("MXFP8"), "its tensors are FP8, but"),
        (
            INT4,
            flat("W4A16_AWQ", group_size=32),
            "needs scales of shape 6x(groups of 32 columns); 'weight_scale' has shape 6x4",
        ),
        (INT4, flat("W4A16_AWQ", group_size="16"), "(groups of 16 columns)"),
        (
            changed(NV, "weight_scale", "F8_E4M3", np.ones((6, 3), np.uint8)),
            None,
            "has shape [6, 3]; its other parts need [6, 4]",
        ),
        ({k: v for k, v in NV.items() if not k.endswith("_2")}, None, "'weight_scale_2' is missing"),
        (changed(NV, "weight_scale_2", "F16", np.float16(1)), None, "'weight_scale_2' is F16; it is F32 there"),
        (changed(NV, "weight_scale_2", "F32", np.ones(3, np.float32)), None, "has shape [3]; its other parts need [] or [1]"),
        (changed(NV, "weight_scale_2", "F32", np.float32(np.inf)), None, "the first is inf at position 0"),
        (changed(NV, "weight_scale", "F8_E4M3", np.full((6, 4), 127, np.uint8)), None, "has 24 scales that are not finite"),
        (
            changed(INT8, "weight_scale", "F32", np.ones(7, np.float32)),
            flat("W8A16"),
            "has shape [7]; its other parts need [6]",
        ),
        (changed(INT8, "weight_scale", "U8", np.ones(6, np.uint8)), flat("W8A16"), "'weight_scale' is U8; it is F16 or"),
        (changed(INT8, "weight", "I8", np.ones((2, 3, 4), np.int8)), flat("W8A16"), "has shape 2x3x4; a weight has two"),
        (changed(FP8, "weight_scale", "F32", np.ones((2, 3), np.float32)), flat("FP8"), "need a scale of shape 1x1"),
        (changed(FP8, "weight_scale", "F32", np.float32(np.nan)), flat("FP8"), "the first is nan at position 0"),
    ],
)
def test_what_the_library_does_not_write_is_refused(
    tensors: dict[str, Entry], settings: Any, message: str, tmp_path: Path
) -> None:
    stored = values(folder(tmp_path, tensors, settings))[f"{UP}.weight"]
    error = refusal(stored, DialectError)
    assert error.found["name"] == f"{UP}.weight" and stored.dialect.title == "ModelOpt" and message in str(error)
    assert error.found["dialect"] == "modelopt"


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (FP8, flat(None) | {"quant_algo": 3}, "has quant_algo 3; breccia reads FP8, FP8_PB_REAL"),
        (FP8, flat("NVFP4_SVD"), "has quant_algo 'NVFP4_SVD'; breccia reads"),
        (FP8, flat("MIXED_PRECISION", quantized_layers={UP: {"quant_algo": "W4A8_AWQ"}}), "quantized_layers['model."),
        (changed(INT4, "weight_scale_2", "F32", np.float32(1)), None, "it is W4A8_AWQ"),
        (changed(NV, "svdquant_lora_a", "BF16", np.ones((2, 64), np.uint16)), None, "is the sum of 'weight' and of the"),
        (changed(NV, "weight_scale", "F8_E4M3", np.ones((6, 2), np.uint8)), None, "a scale per 32 codes"),
        (fused("F8_E4M3", fp8(2, 6, 4)[0][1], floats("F32", 2, 6)[0]), None, "F8_E4M3 codes and F32 scales of shape 2x6"),
        (fused("U8", np.ones((2, 3, 4), np.uint8), floats("F32", 2, 6)[0]), None, "reads FP8 with one scale, and NVFP4"),
    ],
)
def test_what_no_recipe_holds_is_refused_with_a_way_out(
    tensors: dict[str, Entry], settings: Any, message: str, tmp_path: Path
) -> None:
    stored = values(folder(tmp_path, tensors, settings))[f"{UP}.weight"]
    error = refusal(stored, UnsupportedError)
    assert error.found["name"] == f"{UP}.weight" and stored.dialect.title == "ModelOpt" and message in str(error)
    assert "Convert the checkpoint that it was made from" in str(error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (flat("FP8") | {"ignore": ["*up_proj"]}, f"leaves {UP} as it is, but the files have"),
        (flat("MIXED_PRECISION", quantized_layers={DOWN: {"quant_algo": "FP8"}}), f"leaves {UP} as it is"),
        (flat("FP8") | {"ignore": "lm_head"}, "exclude_modules lists names of modules; found 'lm_head'"),
        (flat("MIXED_PRECISION", quantized_layers=[UP]), "quantized_layers is an object; found ['model."),
        (flat("MIXED_PRECISION", quantized_layers={UP: "FP8"}), f"quantized_layers['{UP}'] is an object; found 'FP8'"),
        ({"quant_method": "modelopt", "quantization": 3}, "quantization is an object; found 3"),
    ],
)
def test_a_config_that_the_library_does_not_write_is_refused(settings: Any, message: str, tmp_path: Path) -> None:
    stored = values(folder(tmp_path, FP8, settings))[f"{UP}.weight"]
    with pytest.raises(CorruptFileError) as e:
        stored.tensor()
    assert message in str(e.value) and "ownload" in str(e.value)
