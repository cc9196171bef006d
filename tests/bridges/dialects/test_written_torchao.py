"""What breccia writes for torchao, read back; and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_folders import floats, values
from written_folders import refusal_of, stored_of, written

import breccia
from breccia import OptionError, UnsupportedError
from breccia.backend import StoredForm, ValueForm, registry
from breccia_bridges.dialects.torchao_writer import config, header, stored, write

W = np.random.default_rng(46).standard_normal((64, 256)).astype(np.float32)
TORCHAO = registry().dialects["torchao"]
UNSIGNED = "int4,group_size=32,signed=false,symmetric=false"


def form(spec: str, shape: tuple[int, ...] = (64, 256), **fields: Any) -> ValueForm:
    return ValueForm(breccia.recipe(spec), shape, **fields)


def attributes(spec: str, **fields: Any) -> dict[str, Any]:
    """Those of a value, by the metadata of its file."""
    return json.loads(header({"up.weight": stored(form(spec, **fields))})["up.weight"])["_data"]


@pytest.mark.parametrize("spec", [*TORCHAO.recipes, "fp8_block,block_m=32", "int8,symmetric=false,signed=false"])
def test_every_recipe_is_read_back(spec: str, tmp_path: Path) -> None:
    st = breccia.cast(W, spec)
    folder = written(tmp_path, "torchao", {"up.weight": st, "down.weight": st}, {"lm_head.weight": floats("BF16", W)})
    found = values(folder)
    assert breccia.bytes_equal(found["up.weight"].tensor(), st) and found.keys() == {"up.weight", "down.weight"}
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["lm_head"] and settings["quant_type"].keys() == {"default"}


@pytest.mark.parametrize("spec", ["fp8_row", "int8", "int8,signed=false,symmetric=false"])
def test_scales_of_columns_are_written_as_the_model_has_them(spec: str, tmp_path: Path) -> None:
    st = breccia.cast(W, spec)
    wanted = stored(ValueForm(st.recipe, (64, 256), st.layout, is_transposed=True))
    parts = write(st, wanted)
    assert parts["_qdata"].shape == (256, 64) and parts["_scale"].shape == (1, 64)
    assert wanted.settings["attributes"]["block_size"] == [256, 1]


def test_a_stack_has_one_scale_for_all_its_matrices() -> None:
    stacked = W.reshape(2, 32, 256)
    st = breccia.cast(stacked, "nvfp4,order=scales_first")
    assert write(st, stored_of(TORCHAO, st))["_per_tensor_scale"].shape == ()
    of_each = replace(st, global_scale=np.ones(2, np.float32))
    with pytest.raises(UnsupportedError, match="'_per_tensor_scale' of shape scalar for this value, which has 2 of them"):
        write(of_each, stored_of(TORCHAO, of_each))


def test_zero_points_that_torchao_does_not_have_are_refused() -> None:
    st = breccia.cast(W, UNSIGNED)
    assert st.zero_point is not None
    beyond = replace(st, zero_point=np.full_like(st.zero_point, 16))
    with pytest.raises(
        UnsupportedError, match=r"zero-points in 0\.\.15 with unsigned codes of 4 bits; these are uint8, up to 16\."
    ):
        write(beyond, stored_of(TORCHAO, beyond))


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("nvfp4", "nvfp4,order=scales_first"),
        ("int,bits=3,group_size=32", "int4,group_size=32"),
        ("int4,group_size=32,offset=bias", UNSIGNED.replace("int4,group_size=32", "int4")),
        ("nf4", "int4,group_size=32"),
    ],
)
def test_other_recipes_are_refused_with_the_nearest_one(spec: str, nearest: str) -> None:
    said = refusal_of(TORCHAO, breccia.cast(W, spec))
    assert said.startswith("it holds FP8 with an FP32 scale for each tensor, row or block, mxfp8,")
    assert said.endswith(f"{breccia.recipe(spec).spec!r} is none of these. The nearest recipe for it is {nearest!r}.")


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (form("fp8_block,block_m=128"), "it holds whole blocks; those of 128x128 do not divide shape 64x256. The nearest"),
        (
            form("fp8_block", (64, 128)),
            "blocks as long as the axes of shape 64x128 have the same block_size as another recipe.",
        ),
        (form("mxfp8", is_transposed=True), "blocks along the last axis; those of this value run along axis -2."),
        (form("fp8_row", (64,)), "it holds matrices and stacks of them; this value has shape 64. None of its recipes"),
        (form("int4,group_size=128", layout=breccia.PerGroupIndex((0, 1) * 128, 2)), "this value has PerGroupIndex"),
    ],
)
def test_other_forms_are_refused(refused: ValueForm, said: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        stored(refused)
    assert said in str(caught.value)


def test_inputs_of_8_bit_layers_are_quantized_by_default() -> None:
    assert attributes("fp8_row")["act_quant_kwargs"]["_data"]["granularity"] == {"_type": "PerRow", "_data": {"dim": -1}}
    assert attributes("fp8_current")["act_quant_kwargs"]["_data"]["granularity"]["_type"] == "PerTensor"
    assert attributes("int8")["act_quant_kwargs"]["_type"] == "QuantizeTensorToInt8Kwargs"
    assert attributes("mxfp4")["act_quant_kwargs"]["_data"]["elem_dtype"]["_data"] == "float4_e2m1fn_x2"
    for spec in ("fp8_block", "fp8_row,fp8_format=E5M2", "nvfp4,order=scales_first"):
        assert attributes(spec)["act_quant_kwargs"] is None
    assert attributes("fp8_row", dtype="F32")["act_quant_kwargs"] is None  # no kernel returns FP32
    assert attributes("fp8_row", activations="none")["act_quant_kwargs"] is None
    dynamic = attributes("nvfp4,order=scales_first", activations="nvfp4,order=scales_first")["act_quant_kwargs"]
    assert dynamic["_data"] == {"use_dynamic_per_tensor_scale": True}


@pytest.mark.parametrize(
    ("spec", "activations", "has"),
    [
        ("fp8_row", "int8", "'none' or 'fp8_row'."),
        ("mxfp4", "none", "'mxfp4'."),
        ("int4,group_size=32", "fp8_row", "'none'."),
    ],
)
def test_inputs_that_torchao_does_not_multiply_are_refused(spec: str, activations: str, has: str) -> None:
    with pytest.raises(OptionError) as caught:
        stored(form(spec, activations=activations))
    assert f"activations={activations!r}: layers of torchao (torchao) with these weights have {has}" in str(caught.value)


def test_the_config_has_the_type_of_most_modules_and_the_dtype_of_the_model() -> None:
    forms = {"a": "mxfp8", "b": "fp8_row", "c": "mxfp8"}
    stored_forms: dict[str, StoredForm] = {module: stored(form(spec)) for module, spec in forms.items()}
    quantization = config(stored_forms, ("lm_head",), None)["config.json"]["quantization_config"]
    assert quantization["quant_type"]["default"]["_type"] == "MXDynamicActivationMXWeightConfig"
    assert quantization["modules_to_not_convert"] == ["lm_head"]
    assert attributes("mxfp8", dtype="F16")["orig_dtype"] == {"_type": "torch.dtype", "_data": "float16"}
    assert json.loads(header(stored_forms)["tensor_names"]) == ["a", "b", "c"]
