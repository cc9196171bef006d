"""FP8 and FP4 written for other libraries: their tensors, their configs, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_folders import Tensor, decoded, floats, folder, values

import breccia
from breccia import BrecciaError, DialectError, OptionError, UnsupportedError, targets
from breccia.backend import StoredForm, ValueForm, registry
from breccia.bridges import convert, save_safetensors

UP, DOWN = "mlp.up_proj.weight", "mlp.down_proj.weight"
BLOCKS = "fp8_block,block_m=128"
POWERS = f"{BLOCKS},power_of_two_scale=true"


def weight(*shape: int) -> Tensor:
    return floats("BF16", np.random.default_rng(7).normal(size=shape))


def written(tmp: Path, dialect: str, recipe: Any, *shape: int, **options: Any) -> Path:
    """What `convert` makes of a folder with two weights of a shape."""
    tensors = {UP: weight(*shape or (256, 256)), DOWN: weight(*shape or (256, 256)), "lm_head.weight": weight(8, 8)}
    convert(folder(tmp, tensors, {"dtype": "bfloat16"}), tmp / "written", recipe, dialect=dialect, **options)
    return tmp / "written"


def quantization(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(
    ("dialect", "recipe", "settings"),
    [
        ("deepseek_v3", BLOCKS, {"fmt": "e4m3", "weight_block_size": [128, 128]}),
        ("deepseek_v3", POWERS, {"fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}),
        ("deepseek_v3", "fp8_current", {"fmt": "e4m3", "weight_block_size": None}),
        ("deepseek_v3", "mxfp8", {"fmt": "e4m3", "weight_block_size": [1, 32], "scale_fmt": "ue8m0", "quant_method": "mxfp8"}),
        ("deepseek_v4", POWERS, {"fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}),
    ],
)
def test_block_fp8_has_the_config_of_transformers(tmp_path: Path, dialect: str, recipe: str, settings: dict[str, Any]) -> None:
    path = written(tmp_path, dialect, recipe)
    common = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    assert quantization(path) == common | settings
    assert {name: stored.form.recipe.spec for name, stored in values(path).items()} == dict.fromkeys((DOWN, UP), recipe)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("fp8_row", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}),
        ("fp8_current", {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}),
    ],
)
def test_fp8_with_weight_scale_has_the_config_of_its_engine(tmp_path: Path, recipe: str, settings: dict[str, Any]) -> None:
    assert quantization(written(tmp_path, "fp8_scale", recipe)) == settings


def test_experts_of_deepseek_v4_are_named_fp4(tmp_path: Path) -> None:
    policy = {"default": "keep", "*up_proj*": "mxfp4", "*down_proj*": POWERS}
    path = written(tmp_path, "deepseek_v4", policy)
    assert json.loads((path / "config.json").read_text())["expert_dtype"] == "fp4"
    assert {name: stored.value.entries["weight"].dtype for name, stored in values(path).items()} == {DOWN: "F8_E4M3", UP: "I8"}


def test_modules_of_two_recipes_have_settings_of_their_own(tmp_path: Path) -> None:
    policy = {"default": "keep", "*up_proj*": "mxfp4", "*down_proj*": "fp8_row"}
    for dialect in ("modelopt", "quark"):
        (tmp_path / dialect).mkdir()
        path = written(tmp_path / dialect, dialect, policy)
        recipes = {name: stored.form.recipe.spec for name, stored in values(path).items()}
        assert recipes == {DOWN: "fp8_row", UP: "mxfp4"}
    listed = quantization(tmp_path / "modelopt" / "written")
    rows = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    assert listed["quant_algo"] == "MIXED_PRECISION"
    assert listed["quantized_layers"] == {"mlp.up_proj": {"quant_algo": "mxfp4"}, "mlp.down_proj": rows}
    own = json.loads((tmp_path / "modelopt" / "written" / "hf_quant_config.json").read_text())["quantization"]
    assert own["quantized_layers"] == listed["quantized_layers"] and own["exclude_modules"] == ["lm_head"]
    listed = quantization(tmp_path / "quark" / "written")
    assert listed["exclude"] == ["lm_head"] and len(listed["layer_quant_config"]) == 1


def test_inputs_are_those_that_are_asked_for(tmp_path: Path) -> None:
    schemes = {}
    for activations in (None, "none", "fp8_current"):
        path = tmp_path / str(activations)
        path.mkdir()
        listed = quantization(written(path, "quark", "fp8_row", activations=activations))
        inputs = listed["global_quant_config"]["input_tensors"]
        schemes[activations] = inputs and (inputs["qscheme"], inputs["is_dynamic"])
    assert schemes == {None: ("per_channel", True), "none": None, "fp8_current": ("per_tensor", True)}


def test_experts_of_gpt_oss_keep_their_codes(tmp_path: Path) -> None:
    """Their blocks run along the axis before the last, as the file of breccia that they come from has them."""
    st = breccia.cast(np.random.default_rng(1).normal(size=(2, 64, 48)).astype(np.float32), "mxfp4", axis=-2)
    source = tmp_path / "source"
    source.mkdir()
    save_safetensors({"mlp.experts.down_proj": st}, source / "model.safetensors")
    convert(source, tmp_path / "written", "none", dialect="gpt_oss")
    (stored,) = values(tmp_path / "written").values()
    assert {end: entry.shape for end, entry in stored.value.entries.items()} == {
        "_blocks": (2, 48, 2, 16),
        "_scales": (2, 48, 2),
    }
    assert stored.shape == (2, 64, 48) and np.array_equal(decoded(stored), np.asarray(breccia.dequantize(st)))
    assert quantization(tmp_path / "written") == {"quant_method": "mxfp4", "modules_to_not_convert": []}


def test_fused_experts_of_modelopt_keep_their_codes(tmp_path: Path) -> None:
    recipe = "nvfp4,order=scales_first"
    st = breccia.cast(np.random.default_rng(1).normal(size=(2, 64, 48)).astype(np.float32), recipe, axis=-2)
    source = tmp_path / "source"
    source.mkdir()
    save_safetensors({"mlp.experts.down_proj": st}, source / "model.safetensors")
    convert(source, tmp_path / "written", "none", dialect="modelopt")
    (stored,) = values(tmp_path / "written").values()
    assert {end: entry.shape for end, entry in stored.value.entries.items()} == {
        "": (2, 32, 48),
        "_weight_scale": (2, 4, 48),
        "_weight_scale_2": (2,),
    }
    assert np.array_equal(decoded(stored), np.asarray(breccia.dequantize(st)))


@pytest.mark.parametrize(
    ("dialect", "recipe", "shape", "said"),
    [
        ("deepseek_v3", "fp8_row", (256, 256), "not 'fp8_row'. The nearest is 'fp8_block,block_m=128'."),
        ("deepseek_v3", "fp8_current", (2, 256, 256), "experts have scales of their own there: use 'fp8_block,block_m=128'."),
        ("deepseek_v4", BLOCKS, (256, 256), "not 'fp8_block,block_m=128'. The nearest is 'fp8_block,block_m=128,power_of_two"),
        ("deepseek_v4", "mxfp4", (2, 256, 256), "its weights are matrices, one for each expert."),
        ("fp8_scale", BLOCKS, (256, 256), "it holds 'fp8_row', 'fp8_current' and others of the same formats, not 'fp8_block"),
        ("fp8_scale", "fp8_row", (2, 256, 256), "'fp8_row' of shape 2x256x256: its weights are matrices, one for each expert."),
        ("gpt_oss", "nvfp4", (2, 256, 256), "not 'nvfp4'. The nearest is 'mxfp4'."),
        (
            "gpt_oss",
            "mxfp4",
            (2, 256, 256),
            "cast the weight with breccia.cast(w, 'mxfp4', axis=-2), save it, and convert that",
        ),
        ("modelopt", "nvfp4", (256, 256), "not 'nvfp4'. The nearest is 'nvfp4,order=scales_first'."),
        (
            "modelopt",
            "mxfp4",
            (256, 240),
            "240 columns are no whole number of blocks of 32; leave this weight as it is: exclude=",
        ),
        ("modelopt", "int4", (255, 256), "two rows are a byte there, and groups of 128 are whole; use 'fp8_row'."),
        ("modelopt", "int8", (2, 256, 256), "its 8-bit integers are matrices; stacks of experts are 'fp8_row' there."),
        ("quark", "mxfp8", (256, 256), "not 'mxfp8'. The nearest is 'fp8_block,block_m=128'."),
        ("quark", "fp8_row", (2, 256, 256), "its weights are matrices, one for each expert."),
        ("comfy_quant", "fp8_row", (256, 256), "not 'fp8_row'. The nearest is 'fp8_current'."),
    ],
)
def test_what_it_does_not_hold_is_refused(dialect: str, recipe: str, shape: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as e:
        written(tmp_path, dialect, recipe, *shape, include=[UP])
    assert f"{UP}: {registry().dialects[dialect].title} does not store it: " in str(e.value) and said in str(e.value)
    assert not (tmp_path / "written").exists()


def _form(**changes: Any) -> ValueForm:
    return replace(ValueForm(breccia.MXFP4BlockScaling(), (64, 64)), **changes)


@pytest.mark.parametrize(
    ("dialect", "form", "said"),
    [
        ("quark", _form(shape=(64,)), "its weights have two axes or more; leave this one as it is: exclude= (--exclude)."),
        ("quark", _form(is_transposed=True), "its blocks run along the axis before the last of the model's value, and there"),
        ("gpt_oss", _form(shape=(2, 4, 48), is_transposed=True), "48 numbers along the axis of its blocks are no whole number"),
        (
            "quark",
            _form(layout=breccia.PerGroupIndex((0, 1) * 32, 2)),
            "its columns are in groups by index, which it has no place for; decode it first, with recipe 'bf16'.",
        ),
    ],
)
def test_forms_of_other_shapes_are_refused(dialect: str, form: ValueForm, said: str) -> None:
    with pytest.raises(UnsupportedError) as e:
        targets.load(registry().dialects[dialect].stored or "")(form)
    assert said in str(e.value)


@pytest.mark.parametrize(
    ("dialect", "recipe", "activations", "kind", "said"),
    [
        (
            "deepseek_v3",
            BLOCKS,
            "none",
            OptionError,
            "layers of deepseek_v3 (block FP8, as DeepSeek-V3) with these weights have",
        ),
        (
            "fp8_scale",
            "fp8_row",
            "int8",
            OptionError,
            "activations='int8': layers of fp8_scale (FP8 with weight_scale) with these",
        ),
        ("modelopt", "fp8_row", "fp8_current", OptionError, "with these weights have 'fp8_row'. Leave it out for what the"),
        ("quark", "mxfp4", "int8", OptionError, "with these weights have 'none' or 'mxfp4'. Leave it out for what the library"),
        ("quark", "mxfp4", "fp9", OptionError, "activations='fp9' is no recipe: "),
        (
            "deepseek_v3",
            {"default": "keep", "*up_proj*": BLOCKS, "*down_proj*": "fp8_current"},
            None,
            UnsupportedError,
            "has one setting for all modules: 'mlp.up_proj' needs {'fmt': 'e4m3', 'weight_block_size': [128, 128]}, and",
        ),
    ],
)
def test_what_a_config_does_not_say_is_refused(
    dialect: str, recipe: Any, activations: str | None, kind: type[BrecciaError], said: str, tmp_path: Path
) -> None:
    with pytest.raises(kind) as e:
        written(tmp_path, dialect, recipe, activations=activations)
    assert said in str(e.value)
    assert not (tmp_path / "written").exists()


def _stored(dialect: str, st: breccia.ScaledTensor) -> StoredForm:
    return targets.load(registry().dialects[dialect].stored or "")(ValueForm(st.recipe, tuple(st.shape), st.layout))


def test_scales_that_e8m0_does_not_hold_are_refused() -> None:
    """A recipe says that scales are powers of two; the tensor was made under another one."""
    st = breccia.cast(np.random.default_rng(1).normal(size=(256, 128)).astype(np.float32), BLOCKS)
    named = replace(st, recipe=breccia.backend.as_recipe(POWERS))
    with pytest.raises(DialectError) as e:
        targets.load(registry().dialects["deepseek_v3"].write or "")(named, _stored("deepseek_v3", named))
    assert "'_scale_inv' is in E8M0, and 2 of its scales are no powers of two, the first " in str(e.value)
    assert "Write them in FP32: under a recipe with power_of_two_scale=false." in str(e.value)
