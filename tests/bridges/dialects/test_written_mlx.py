"""What breccia writes for MLX: opened by MLX itself, as mlx-lm does; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_folders import floats, values
from written_folders import stored_of, written

import breccia
from breccia import OptionError, UnsupportedError
from breccia.backend import StoredForm, ValueForm, registry
from breccia_bridges.dialects.mlx import config, stored

mx = pytest.importorskip("mlx.core")  # a machine with CUDA may lack it
nn = pytest.importorskip("mlx.nn")
model = pytest.importorskip("mlx_models").model

W = np.random.default_rng(46).standard_normal((96, 256)).astype(np.float32)
MLX = registry().dialects["mlx"]
PLAIN = {"norm.weight": floats("BF16", np.ones(256)), "head.weight": floats("BF16", W[:4])}
FOUR = "int4,group_size=64,offset=bias,scale_dtype=bf16"


def decoded(layer: Any) -> np.ndarray:
    """The FP32 values of a layer's weight, by MLX."""
    options: dict[str, Any] = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    if layer.mode == "affine":
        scales, biases = (layer[name].astype(mx.float32) for name in ("scales", "biases"))
        return np.array(mx.dequantize(layer.weight, scales, biases, **options))
    return np.array(mx.dequantize(layer.weight, layer.scales, dtype=mx.float32, **options))


def opened(folder: Path) -> Any:
    """The model of a folder, by the steps of mlx-lm's `load_model`."""
    weights: Any = mx.load(str(folder / "model.safetensors"))
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    shapes = {name: tuple(array.shape) for name, array in weights.items() if name.endswith("weight")}
    for name in shapes:
        scales = weights.get(name.replace("weight", "scales"))
        if scales is not None:
            shapes[name] = (shapes[name][0], 256)
    out = model(shapes)
    options = {key: quantization[key] for key in ("group_size", "bits", "mode")}
    nn.quantize(out, **options, class_predicate=lambda path, _: quantization.get(path, f"{path}.scales" in weights))
    out.load_weights(list(weights.items()), strict=True)
    return out


@pytest.mark.parametrize("spec", MLX.recipes)
def test_mlx_opens_every_recipe_to_the_same_values(spec: str, tmp_path: Path) -> None:
    st = breccia.cast(W, spec)
    folder = written(tmp_path, "mlx", {"layers.0.up.weight": st, "embed.weight": st[:32]}, PLAIN)
    found, ours = opened(folder), np.asarray(breccia.dequantize(st))
    assert np.array_equal(decoded(found.layers[0].up), ours) and np.array_equal(decoded(found.embed), ours[:32])
    assert isinstance(found.embed, nn.QuantizedEmbedding) and isinstance(found.head, nn.Linear)
    assert breccia.bytes_equal(values(folder)["layers.0.up.weight"].tensor(), st)


def test_mlx_opens_a_model_of_many_recipes(tmp_path: Path) -> None:
    names = {f"layers.{i}.up.weight": breccia.cast(W, spec) for i, spec in enumerate(MLX.recipes)}
    folder = written(tmp_path, "mlx", names, PLAIN)
    found = opened(folder)
    for i, st in enumerate(names.values()):
        assert np.array_equal(decoded(found.layers[i].up), np.asarray(breccia.dequantize(st))), st.recipe.spec
    listed = json.loads((folder / "config.json").read_text())
    assert listed["quantization"] == listed["quantization_config"]
    most = {"group_size": 64, "bits": 4, "mode": "affine"}  # with scales of three dtypes
    assert {key: listed["quantization"].pop(key) for key in most} == most
    assert listed["quantization"].keys() == {
        f"layers.{i}.up" for i, spec in enumerate(MLX.recipes) if "int4,group_size=64" not in spec
    }
    assert {
        name: breccia.bytes_equal(stored.tensor(), names[name]) for name, stored in values(folder).items() if name in names
    } == (dict.fromkeys(names, True))


def test_experts_are_written_with_their_axes(tmp_path: Path) -> None:
    st = breccia.cast(W.reshape(3, 32, 256), FOUR)
    folder = written(tmp_path, "mlx", {"experts.weight": st})
    parts: Any = mx.load(str(folder / "model.safetensors"))
    w, scales, biases = (parts[f"experts.{end}"] for end in ("weight", "scales", "biases"))
    theirs = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), group_size=64, bits=4)
    assert w.shape == (3, 32, 32) and np.array_equal(np.array(theirs), np.asarray(breccia.dequantize(st)))


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("int4,group_size=64,scale_dtype=bf16", FOUR),
        ("int4,group_size=128,symmetric=false", "int4,group_size=128,offset=bias,scale_dtype=fp16"),
        ("int,bits=3,group_size=16", "mlx_affine,bits=3,group_size=32"),
        ("int8", "int8,group_size=128,offset=bias,scale_dtype=fp32"),
        ("fp8_block", "mxfp8"),
        ("nvfp4", "nvfp4,two_level=false"),
    ],
)
def test_other_recipes_are_refused_with_the_nearest_one(spec: str, nearest: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        stored_of(MLX, breccia.cast(W, spec))
    said = "; '" + breccia.recipe(spec).spec + f"' is none of these. The nearest recipe for it is '{nearest}'."
    assert str(caught.value).startswith("it holds mxfp4, mxfp8, nvfp4 without") and str(caught.value).endswith(said)
    stored(ValueForm(breccia.recipe(nearest), W.shape))


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (ValueForm(breccia.recipe(FOUR), (8, 96)), "groups of 64 do not divide shape [8, 96]. The nearest recipe for it is"),
        (
            ValueForm(breccia.recipe("mxfp8"), (8, 40)),
            "do not divide shape [8, 40]. None of its recipes fits this shape: leave",
        ),
        (ValueForm(breccia.recipe("mxfp8"), (8, 64), is_transposed=True), "along the last axis; those of this value run along"),
        (
            ValueForm(breccia.recipe(FOUR), (2, 128), breccia.PerGroupIndex((0, 1) * 64, 2)),
            "it has groups of neighboring columns; this value has PerGroupIndex",
        ),
    ],
)
def test_other_forms_are_refused(form: ValueForm, said: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        stored(form)
    assert said in str(caught.value)


def test_inputs_are_quantized_where_mlx_does() -> None:
    def keys(activations: str | None, *specs: str) -> dict[str, Any]:
        forms = {f"m{i}": stored(ValueForm(breccia.recipe(spec), (8, 256))) for i, spec in enumerate(specs)}
        return config(dict[str, StoredForm](forms), (), activations)["config.json"]

    assert "quantize_activations" not in keys(None, "mxfp8") and "quantize_activations" not in keys("none", "mxfp8")
    assert keys("mxfp8,scale_rule=floor", "mxfp8", "mxfp8")["quantize_activations"] is True
    for activations, specs in (("fp8_row", ("mxfp8",)), ("mxfp8", ("mxfp8", "mxfp4")), (FOUR, (FOUR,))):
        with pytest.raises(
            OptionError, match=rf"activations='{activations}': layers of mlx \(MLX\) with these weights have 'none'"
        ):
            keys(activations, *specs)


def test_experts_one_by_one_are_refused() -> None:
    form = stored(ValueForm(breccia.recipe(FOUR), (96, 256)))
    said = r"model.layers.0.mlp.experts.0.up_proj: mlx-lm has the experts of a layer as one stack.*exclude='\*.experts.\*'"
    with pytest.raises(UnsupportedError, match=said):
        config({"model.layers.0.mlp.experts.0.up_proj": form, "head": form}, (), None)
    assert config({"model.layers.0.mlp.shared_experts.up_proj": form}, (), None)
