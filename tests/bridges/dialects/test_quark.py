"""Checkpoints of AMD Quark, packed here by its documentation, are read exactly; what cannot be read is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stored_folders import Entry, decoded, floats, folder, fp4, fp8, refusal, spread, values

import breccia
from breccia import CorruptFileError, DialectError, UnsupportedError

UP, ATTN = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0", "symmetric": None}
TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "ch_axis": None, "group_size": None, "symmetric": True}
ROWS = {**TENSOR, "qscheme": "per_channel", "ch_axis": 0}
PLAIN: dict[str, Entry] = {"lm_head.weight": floats("BF16", 4, 8)[0], f"{UP}.input_scale": floats("BF16")[0]}


def config(weight: Any, **more: Any) -> dict[str, Any]:
    listed = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None}
    rest = {
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"pack_method": "reorder"},
    }
    return {"quant_method": "quark", "global_quant_config": listed, "quant_mode": "eager_mode", **rest, **more}


def parts(name: str, weight: Entry, scale: Entry) -> dict[str, Entry]:
    return {f"{name}.weight": weight, f"{name}.weight_scale": scale}


def test_mxfp4(tmp_path: Path) -> None:
    (data, q), (scale, s) = fp4(6, 64), floats("U8", 6, 2)
    listed = values(folder(tmp_path, PLAIN | parts(UP, ("U8", data), scale), config(MXFP4)))
    assert list(listed) == [f"{UP}.weight"] and listed[f"{UP}.weight"].form.recipe == breccia.MXFP4BlockScaling()
    assert np.array_equal(decoded(listed[f"{UP}.weight"]), q * np.repeat(s, 32, 1))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize(
    ("settings", "shape", "recipe"),
    [
        (TENSOR, (), breccia.Float8CurrentScaling),
        (ROWS, (20,), breccia.Float8RowScaling),
        (ROWS, (20, 1), breccia.Float8RowScaling),
        ({**TENSOR, "qscheme": "per_block", "block_size": [4, 8]}, (5, 4), breccia.Float8BlockScaling),
    ],
)
def test_fp8(settings: Any, shape: tuple[int, ...], recipe: Any, dtype: Any, tmp_path: Path) -> None:
    (codes, q), (scale, s) = fp8(20, 32, dtype=dtype), floats("BF16", *shape)
    settings = {**settings, "dtype": "fp8_e4m3" if dtype is ml_dtypes.float8_e4m3fn else "fp8_e5m2"}
    stored = values(folder(tmp_path, PLAIN | parts(UP, codes, scale), config(settings)))[f"{UP}.weight"]
    s = spread(s, 4, 8, (20, 32)) if shape == (5, 4) else s.reshape(-1, 1)
    assert np.array_equal(decoded(stored), q * s) and isinstance(stored.form.recipe, recipe)


def test_settings_by_pattern(tmp_path: Path) -> None:
    (data, q4), (exponents, s4) = fp4(6, 64), floats("U8", 6, 2)
    (codes, q), (scale, s), (one, s1) = fp8(6, 64), floats("F32", 6), floats("F32")
    gate = "model.layers.0.mlp.gate_proj"
    tensors = PLAIN | parts(UP, ("U8", data), exponents) | parts(ATTN, codes, one) | parts(gate, codes, scale)
    layers = {"*self_attn*": {"weight": TENSOR}, "*gate_proj": {"weight": ROWS}, "*": {"weight": MXFP4}}
    settings = config(None, layer_quant_config=layers)
    listed = values(folder(tmp_path, tensors, settings))
    for name, x in ((UP, q4 * np.repeat(s4, 32, 1)), (ATTN, q * s1), (gate, q * s[:, None])):
        assert np.array_equal(decoded(listed[f"{name}.weight"]), x)


def test_settings_of_a_class_are_told_apart_by_the_tensors(tmp_path: Path) -> None:
    (codes, q), (one, s) = fp8(6, 64), floats("F32")
    settings = config(MXFP4, layer_type_quant_config={"Linear": {"weight": TENSOR}})
    assert np.array_equal(decoded(values(folder(tmp_path, parts(UP, codes, one), settings))[f"{UP}.weight"]), q * s)


def test_a_folder_without_a_config_is_read_where_the_caller_names_the_dialect(tmp_path: Path) -> None:
    (data, q), (scale, s) = fp4(6, 64), floats("U8", 6, 2)
    path = folder(tmp_path, parts(UP, ("U8", data), scale))
    assert np.array_equal(decoded(values(path, "quark")[f"{UP}.weight"]), q * np.repeat(s, 32, 1))
    assert values(path)[f"{UP}.weight"].dialect.name == "modelopt", "it packs MXFP4 alike"


MX = parts(UP, ("U8", fp4(6, 64)[0]), floats("U8", 6, 2)[0])
FP8 = parts(UP, fp8(6, 6)[0], floats("BF16", 6)[0])


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (FP8, config(TENSOR), "'weight_scale' has shape [6]; its other parts need [] or [1]"),
        (FP8, config({**ROWS, "ch_axis": 1}), "are FP8 with a scale per row, but global_quant_config has ch_axis 1"),
        (FP8, config({**ROWS, "qscheme": "per_group"}), "has qscheme 'per_group', not 'per_tensor' or"),
        (FP8, config({**ROWS, "dtype": "fp8_e5m2"}), "are FP8 (F8_E4M3), but global_quant_config has dtype 'fp8_e5m2'"),
        (FP8, config(MXFP4), "has dtype 'fp4', not 'fp8_e4m3'"),
        (FP8, config(None, layer_quant_config={"*up_proj": {"weight": MXFP4}}), "layer_quant_config['*up_proj'] has"),
        (MX, config(TENSOR), "its tensors are MXFP4, but global_quant_config has dtype 'fp8_e4m3'"),
        (MX, config({**MXFP4, "group_size": 16}), "has group_size 16, not 32"),
        (MX, config({**MXFP4, "scale_format": "float32"}), "has scale_format 'float32', not 'e8m0'"),
        (MX, config({**MXFP4, "ch_axis": 0}), "has ch_axis 0, not -1 or 1"),
        (MX | {f"{UP}.weight_scale": ("U8", np.full((6, 2), 255, np.uint8))}, config(MXFP4), "12 scales that are not fin"),
        (MX | {f"{UP}.weight_scale": ("U8", np.ones((6, 3), np.uint8))}, config(MXFP4), "its other parts need [6, 2]"),
    ],
)
def test_what_the_library_does_not_write_is_refused(
    tensors: dict[str, Entry], settings: Any, message: str, tmp_path: Path
) -> None:
    stored = values(folder(tmp_path, tensors, settings))[f"{UP}.weight"]
    error = refusal(stored, DialectError)
    assert error.found["name"] == f"{UP}.weight" and stored.dialect.title == "AMD Quark" and message in str(error)
    assert error.found["dialect"] == "quark"


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (MX, config([MXFP4, TENSOR]), "has dtype 'fp4 and fp8_e4m3'; of Quark, breccia reads fp4"),
        (parts(UP, ("I8", np.ones((4, 8), np.int8)), floats("F32")[0]), config({"dtype": "int8"}), "has dtype 'int8'"),
        (
            parts(UP, ("I32", np.ones((4, 8), np.int32)), floats("F32", 4, 8)[0]),
            config(None) | {"global_quant_config": {"weight": {}}},
            "its codes are I32 with scales in F32",
        ),
    ],
)
def test_what_no_recipe_holds_is_refused_with_a_way_out(
    tensors: dict[str, Entry], settings: Any, message: str, tmp_path: Path
) -> None:
    stored = values(folder(tmp_path, tensors, settings))[f"{UP}.weight"]
    error = refusal(stored, UnsupportedError)
    assert error.found["name"] == f"{UP}.weight" and stored.dialect.title == "AMD Quark" and message in str(error)
    assert "Convert the checkpoint that it was made from" in str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exclude": ["*up_proj"]}, f"leaves {UP} as it is, but the files have"),
        ({"global_quant_config": None}, f"leaves {UP} as it is"),
        ({"exclude": "lm_head"}, "exclude lists names of modules; found 'lm_head'"),
        ({"layer_quant_config": [1]}, "layer_quant_config is an object; found [1]"),
        ({"global_quant_config": 3}, "global_quant_config is an object with the settings of weights; found 3"),
        ({"global_quant_config": {"weight": [1]}}, "global_quant_config is an object with the settings of weights"),
    ],
)
def test_a_config_that_the_library_does_not_write_is_refused(changes: Any, message: str, tmp_path: Path) -> None:
    stored = values(folder(tmp_path, MX, config(MXFP4) | changes))[f"{UP}.weight"]
    with pytest.raises(CorruptFileError) as e:
        stored.tensor()
    assert message in str(e.value) and "ownload" in str(e.value)
