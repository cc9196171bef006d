"""MLX models with quantized weights: files of every writer, and layers that MLX itself has quantized."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from program import Run
from recipes import as_mlx

import breccia
import breccia_mlx
from breccia import bridges
from breccia.tensors.equality import bytes_equal
from breccia_mlx.nn import ScaledEmbedding, ScaledLinear

MXFP8, NVFP4 = breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling()
IDS = mx.array([[1, 2, 3], [39, 0, -1]])
#: Options of `mlx.nn.quantize`.
MODES: dict[str, dict[str, Any]] = {
    "affine, 3 bits": {"bits": 3, "group_size": 32},
    "affine, 4 bits": {"bits": 4},
    "affine, 8 bits": {"bits": 8, "group_size": 128},
    "mxfp4": {"mode": "mxfp4"},
    "mxfp8": {"mode": "mxfp8"},
    "nvfp4": {"mode": "nvfp4"},
}


class Model(nn.Module):
    def __init__(self, dims: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, dims)
        self.blocks = [{"up": nn.Linear(dims, 256), "norm": nn.LayerNorm(256), "down": nn.Linear(256, dims)}]
        self.head = nn.Linear(dims, 8, bias=False)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        for b in self.blocks:
            x = x + b["down"](nn.gelu(b["norm"](b["up"](x))))
        return self.head(x)


WEIGHTS = ("embed.weight", "blocks.0.up.weight", "blocks.0.down.weight", "head.weight")


@pytest.fixture
def model() -> Model:
    mx.random.seed(0)
    return Model()


def dense(model: nn.Module) -> dict[str, Any]:
    return dict(tree_flatten(model.parameters()))


def weight(model: nn.Module, name: str) -> Any:
    modules = dict(model.named_modules())
    return modules[name.removesuffix(".weight")].weight.tensor


def saved(model: nn.Module, path: Path) -> Path:
    model.save_weights(str(path))
    return path


# -- load_model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["nvfp4", "fp8_block", "int4,symmetric=false,signed=false", "mlx_affine,bits=3"])
def test_a_model_loads_what_convert_wrote(spec: str, model: Model, tmp_path: Path) -> None:
    source, target = saved(model, tmp_path / "model.safetensors"), tmp_path / "small.safetensors"
    bridges.convert(source, target, spec, include=["*"])
    written = bridges.load_safetensors(target)
    assert {name for name, t in written.items() if isinstance(t, breccia.ScaledTensor)} >= set(WEIGHTS)
    fresh = Model()
    assert breccia_mlx.load_model(fresh, target) == ([], [])
    assert [type(m) for m in (fresh.embed, fresh.blocks[0]["up"], fresh.head)] == [ScaledEmbedding, ScaledLinear, ScaledLinear]
    for name in WEIGHTS:
        assert weight(fresh, name).digest() == written[name].digest()
    ours = copy.deepcopy(model)
    breccia_mlx.quantize(ours, as_mlx(spec))
    assert mx.array_equal(fresh(IDS), ours(IDS)) or not np.isfinite(np.array(fresh(IDS))).all()
    norm = (
        breccia.dequantize(written["blocks.0.norm.weight"])
        if isinstance(written["blocks.0.norm.weight"], breccia.ScaledTensor)
        else written["blocks.0.norm.weight"]
    )
    assert np.array_equal(np.array(fresh.blocks[0]["norm"].weight), norm)


def test_a_model_loads_every_writer_s_file_of_one_quantized_model(model: Model, tmp_path: Path) -> None:
    """`save_weights` names components after the recipe, `save_model` as `breccia convert` does; MLX's own names are others."""
    breccia_mlx.quantize(model, as_mlx(NVFP4))
    breccia_mlx.save_model(model, tmp_path / "ours.safetensors", {"note": "kept"})
    saved(model, tmp_path / "mlx.safetensors")
    listed = bridges.load_safetensors(tmp_path / "ours.safetensors")
    assert set(listed) == {*WEIGHTS, "blocks.0.up.bias", "blocks.0.down.bias", "blocks.0.norm.weight", "blocks.0.norm.bias"}
    assert "head.weight.nvfp4.data" in mx.load(str(tmp_path / "mlx.safetensors"))
    for name in ("ours", "mlx"):
        for start in (Model(), model.__class__()):
            assert breccia_mlx.load_model(start, tmp_path / f"{name}.safetensors") == ([], [])
            assert all(bytes_equal(weight(start, w), weight(model, w)) for w in WEIGHTS)
            assert mx.array_equal(start(IDS), model(IDS))


@pytest.mark.parametrize("recipe", ["int4", "int8,group_size=32", "fp8_row", "nf4", "mlx_affine,scale_dtype=bf16"])
def test_float_scales_of_save_weights_are_read_from_their_bit_patterns(recipe: str, model: Model, tmp_path: Path) -> None:
    breccia_mlx.quantize(model, as_mlx(recipe))
    path = saved(model, tmp_path / "w.safetensors")
    fresh = Model()
    breccia_mlx.load_model(fresh, path)
    for name in WEIGHTS:
        assert bytes_equal(weight(fresh, name), weight(model, name)), name


@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_in_mlx_s_own_format_keep_their_codes_and_scales(mode: str, model: Model, tmp_path: Path) -> None:
    nn.quantize(model, class_predicate=lambda _, m: hasattr(m, "to_quantized"), **{"group_size": None, **MODES[mode]})
    path = saved(model, tmp_path / "model.safetensors")
    header = (raw := path.read_bytes())[8 : 8 + int.from_bytes(raw[:8], "little")]
    assert json.loads(header).get("__metadata__", "absent") is None, "what MLX writes"
    for start in (Model(), copy.deepcopy(model)):
        assert breccia_mlx.load_model(start, path) == ([], [])
        for name in WEIGHTS:
            theirs = bridges.from_mlx_layer(dict(model.named_modules())[name.removesuffix(".weight")])
            assert bytes_equal(weight(start, name), theirs)


def test_plain_weights_are_cast_for_quantized_layers_and_copied_for_others(model: Model, tmp_path: Path) -> None:
    path = saved(model, tmp_path / "plain.safetensors")
    ours, theirs, plain = Model(), Model(), Model()
    breccia_mlx.quantize(ours, as_mlx(MXFP8), activation=MXFP8)
    nn.quantize(theirs, mode="mxfp8")
    for start in (ours, theirs, plain):
        assert breccia_mlx.load_model(start, path) == ([], [])
    for start in (ours, theirs):
        assert all(bytes_equal(weight(start, name), breccia.cast(dense(model)[name], MXFP8)) for name in WEIGHTS)
    assert ours.head.activation == MXFP8 and theirs.head.activation is None
    assert mx.array_equal(plain(IDS), model(IDS))


def test_other_quantized_tensors_are_decoded_in_the_dtype_of_the_parameter(model: Model, tmp_path: Path) -> None:
    table = mx.random.normal((4, 32))
    bridges.save_safetensors({"table": breccia.cast(table, MXFP8)}, tmp_path / "t.safetensors")
    holder = nn.Module()
    holder.table = mx.zeros((4, 32), mx.bfloat16)
    breccia_mlx.load_model(holder, tmp_path / "t.safetensors")
    assert mx.array_equal(holder.table, breccia.dequantize(breccia.cast(table, MXFP8)).astype(mx.bfloat16))


def test_layers_at_several_places_stay_one_layer(tmp_path: Path) -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    bridges.convert(saved(model, tmp_path / "m.safetensors"), tmp_path / "q.safetensors", "mxfp8", include=["*"])
    breccia_mlx.load_model(model, tmp_path / "q.safetensors", activation="mxfp8")
    assert model.layers[0] is model.layers[2] and model.layers[0].activation == MXFP8


class Twice(nn.Module):
    """Layers that it holds at two places, as parts of another module and in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32))
        self.late = [self.early, nn.Linear(32, 32)]


NAMES = [f"layers.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]


def twice(recipe: Any, **changed: Any) -> dict[str, Any]:
    """The tensors of a Twice under every name; those of "late" differ by `changed`."""
    rng = np.random.default_rng(0)
    shapes = ((32, 64), (32,), (32,), (32,))
    shared = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in zip(NAMES, shapes, strict=True)}
    tensors = {f"early.{name}": a for name, a in shared.items()} | {f"late.0.{name}": a for name, a in shared.items()}
    tensors |= {"late.1.weight": np.ones((32, 32), np.float32), "late.1.bias": np.ones(32, np.float32)} | changed
    return {name: breccia.cast(a, recipe) if recipe and name.endswith("0.weight") else a for name, a in tensors.items()}


@pytest.mark.parametrize("layer", ["plain", "mlx", "breccia"])
@pytest.mark.parametrize("recipe", [None, MXFP8])
@pytest.mark.parametrize("places", [("early.",), ("late.0.",), ("early.", "late.0.")])
def test_one_name_of_a_layer_at_two_places_is_enough(places: tuple[str, ...], recipe: Any, layer: str, tmp_path: Path) -> None:
    tensors = twice(recipe)
    file = {name: a for name, a in tensors.items() if name.startswith((*places, "late.1."))}
    bridges.save_safetensors(file, tmp_path / "m.safetensors")
    model = Twice()
    if layer == "mlx":
        nn.quantize(model, group_size=32, class_predicate=lambda path, _: path.endswith("layers.0"))
    elif layer == "breccia":
        breccia_mlx.quantize(model, {"early.layers.0.weight": "nvfp4"})
    shared = model.early
    assert breccia_mlx.load_model(model, tmp_path / "m.safetensors") == ([], [])
    assert model.early is shared and model.late[0] is shared
    found, expected = shared.layers[0].weight, tensors["early.layers.0.weight"]
    if recipe:
        assert breccia.bytes_equal(found.tensor, expected)
    elif layer == "plain":
        assert mx.array_equal(found, mx.array(expected))
    else:
        assert breccia.bytes_equal(found.tensor, breccia.cast(mx.array(expected), found.tensor.recipe))
    for name, array in (("0.bias", shared.layers[0].bias), ("1.weight", shared.layers[1].weight)):
        assert mx.array_equal(array, mx.array(tensors[f"early.layers.{name}"]))


@pytest.mark.parametrize("recipe", [None, MXFP8])
@pytest.mark.parametrize("name", ["layers.0.weight", "layers.0.bias", "layers.1.weight"])
def test_names_of_one_layer_that_differ_are_refused(name: str, recipe: Any, tmp_path: Path) -> None:
    shape = (32, 64) if name == "layers.0.weight" else (32,)
    bridges.save_safetensors(twice(recipe, **{f"late.0.{name}": np.ones(shape, np.float32)}), tmp_path / "m.safetensors")
    model = Twice()
    before = dense(model)
    said = rf"the model has one layer for early\.{name} and late\.0\.{name}, but they differ in the file\. Make it two in the"
    with pytest.raises(breccia.ShapeError, match=said):
        breccia_mlx.load_model(model, tmp_path / "m.safetensors")
    after = dense(model)
    assert all(after[name] is array for name, array in before.items())


def test_names_of_one_layer_are_compared_in_its_dtype(tmp_path: Path) -> None:
    """NaNs are equal, and so are values of which the model rounds one."""
    tensors = twice(None)
    tensors["early.layers.0.weight"][0, 0] = np.nan
    tensors["late.0.layers.1.weight"] = mx.array(tensors["early.layers.1.weight"]).astype(mx.bfloat16)
    bridges.save_safetensors({name: mx.array(a) for name, a in tensors.items()}, tmp_path / "m.safetensors")
    model = Twice()
    with pytest.raises(breccia.ShapeError, match=r"early\.layers\.1\.weight and late\.0\.layers\.1\.weight, but they differ"):
        breccia_mlx.load_model(model, tmp_path / "m.safetensors")
    model.set_dtype(mx.bfloat16)
    assert breccia_mlx.load_model(model, tmp_path / "m.safetensors") == ([], [])
    assert bool(mx.isnan(model.late[0].layers[0].weight[0, 0]))


def test_a_layer_at_two_places_that_the_file_lacks_is_missing_once(tmp_path: Path) -> None:
    file = {name: a for name, a in twice(None).items() if "layers.0.weight" not in name}
    bridges.save_safetensors(file, tmp_path / "m.safetensors")
    with pytest.raises(breccia.UnknownNameError, match=r"missing: early\.layers\.0\.weight\. Pass strict=False"):
        breccia_mlx.load_model(Twice(), tmp_path / "m.safetensors")
    assert breccia_mlx.load_model(Twice(), tmp_path / "m.safetensors", strict=False) == (["early.layers.0.weight"], [])


def test_files_that_do_not_fit_change_nothing(model: Model, tmp_path: Path) -> None:
    breccia_mlx.quantize(model, as_mlx(NVFP4))
    breccia_mlx.save_model(model, tmp_path / "m.safetensors")
    tensors = bridges.load_safetensors(tmp_path / "m.safetensors", framework="mlx")

    def file(name: str, **changed: Any) -> Path:
        listed = {key: a for key, a in (tensors | changed).items() if a is not None}
        bridges.save_safetensors(listed, tmp_path / name)
        return tmp_path / name

    fresh = Model()
    before = dense(fresh)
    gone = file("gone", **{"head.weight": None, "tail.weight": mx.zeros(3)})
    with pytest.raises(breccia.UnknownNameError, match=r"missing: head\.weight; unexpected: tail\.weight\. Pass strict=False"):
        breccia_mlx.load_model(fresh, gone)
    short = file("short", **{"head.weight": breccia.cast(mx.zeros((8, 64)), NVFP4)})
    with pytest.raises(breccia.ShapeError, match=r"head\.weight has shape \(8, 64\) in the file and \(8, 128\) in the model"):
        breccia_mlx.load_model(fresh, short)
    tall = file("tall", **{"blocks.0.norm.bias": mx.zeros(3)})
    with pytest.raises(breccia.ShapeError, match=r"blocks\.0\.norm\.bias has shape \(3,\) in the file and \(256,\)"):
        breccia_mlx.load_model(fresh, tall)
    turned = file("turned", **{"head.weight": breccia.cast(mx.zeros((8, 128)), NVFP4, axis=-2)})
    with pytest.raises(
        breccia.ShapeError, match=r"head\.weight has blocks along axis -2 in the file; those of a layer run along"
    ):
        breccia_mlx.load_model(fresh, turned)
    w, scales, biases = mx.quantize(mx.zeros((8, 128)))
    odd = {"head.weight": w[:, :3], "head.scales": scales, "head.biases": biases}
    with pytest.raises(breccia.ShapeError, match=r"head\.weight has rows of 3 words and 2 scales in the file; no width"):
        breccia_mlx.load_model(fresh, file("odd", **odd))
    bare = {"head.weight": w, "head.scales": scales}
    with pytest.raises(breccia.DialectError, match=r"head\.weight: mode is one of affine, .* got 'of 4 bits in groups of 64'"):
        breccia_mlx.load_model(fresh, file("bare", **bare))
    half = {"head.weight": None, "head.weight.nvfp4.data": weight(model, "head.weight").data}
    with pytest.raises(breccia.ShapeError, match=r"head\.weight: the file has only its data; "):
        breccia_mlx.load_model(fresh, file("half", **half))
    after = dense(fresh)
    assert before.keys() == after.keys() and all(mx.array_equal(before[k], after[k]) for k in before)
    assert breccia_mlx.load_model(fresh, gone, strict=False) == (["head.weight"], ["tail.weight"])
    assert type(fresh.embed) is ScaledEmbedding and type(fresh.head) is nn.Linear
    for op in (breccia_mlx.load_model, breccia_mlx.save_model):
        with pytest.raises(breccia.UnsupportedError, match=r"a model, an mlx\.nn\.Module of layers, and a path; got a Linear"):
            op(nn.Linear(2, 2), tmp_path / "m.safetensors")


# -- files of MLX ----------------------------------------------------------------------------------------------------


def test_the_program_reads_files_that_mlx_saved(model: Model, tmp_path: Path, run: Run) -> None:
    """MLX writes `"__metadata__": null`."""
    plain, small = str(saved(model, tmp_path / "plain.safetensors")), str(tmp_path / "small.safetensors")
    for words in (("inspect", plain), ("convert", plain, small, "--recipe", "mxfp8"), ("compare", plain, small)):
        code, out, err = run(*words)
        assert code == 0, err
    assert "blocks.0.up.weight" in out


# -- layers that MLX has quantized -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_mlx_has_quantized_are_taken_over_byte_for_byte(mode: str, model: Model) -> None:
    """Rows and products have the same values: MLX's products are within K roundings of the exact ones too."""
    nn.quantize(model, class_predicate=lambda _, m: hasattr(m, "to_quantized"), **{"group_size": None, **MODES[mode]})
    model.blocks[0]["up"].bias = mx.random.normal((256,))
    ours = copy.deepcopy(model)
    summary = breccia_mlx.quantize(ours)
    assert set(summary.kept) == set(WEIGHTS) and not summary.quantized and not summary.recast
    assert "quantized by MLX, codes and scales kept: embed.weight" in repr(summary)
    for name in WEIGHTS:
        theirs = bridges.from_mlx_layer(dict(model.named_modules())[name.removesuffix(".weight")])
        assert bytes_equal(weight(ours, name), theirs)
    rows = ours.embed(IDS)
    assert rows.dtype == model.embed(IDS).dtype and mx.array_equal(rows, model.embed(IDS))
    x = mx.random.normal((3, 128))
    values = np.array(breccia.dequantize(weight(ours, "blocks.0.up.weight")), np.float64)
    size = np.abs(np.array(x, np.float64)) @ np.abs(values).T + np.abs(np.array(model.blocks[0]["up"].bias))
    found, wanted = (np.array(m.blocks[0]["up"](x)) for m in (ours, model))
    assert (np.abs(found - wanted) <= 2 * 130 * 2.0**-24 * size).all()


def test_layers_that_mlx_has_quantized_are_cast_again_under_another_recipe(model: Model) -> None:
    nn.quantize(model, class_predicate=lambda path, m: "blocks" in path and isinstance(m, nn.Linear))
    held = {path: bridges.from_mlx_layer(model.blocks[0][path]) for path in ("up", "down")}
    summary = breccia_mlx.quantize(
        model,
        MXFP8,
        class_predicate=lambda path, m: (
            "norm" not in path and path != "embed" and ({"recipe": None} if path.endswith("down") else True)
        ),
    )
    affine = held["up"].recipe
    assert summary.quantized == ("blocks.0.up.weight", "head.weight") and summary.kept == ("blocks.0.down.weight",)
    assert dict(summary.recast) == {"blocks.0.up.weight": affine}
    assert summary.left == {"embed.weight": "left out by class_predicate"}
    assert summary.bytes_after == sum(a.nbytes for a in dense(model).values()) != summary.bytes_before
    text = repr(summary)
    assert text.startswith("2 parameters quantized; the model has ")
    assert "left in high precision (left out by class_predicate): embed.weight" in text
    assert f"quantized by MLX under {affine.spec}, cast again: blocks.0.up.weight" in text
    assert bytes_equal(weight(model, "blocks.0.up.weight"), breccia.requantize(held["up"], MXFP8))
    assert bytes_equal(weight(model, "blocks.0.down.weight"), held["down"])


def test_quantize_without_a_recipe_needs_layers_that_mlx_has_quantized(model: Model) -> None:
    with pytest.raises(breccia.OptionError, match=r"no parameter is chosen: not quantized by MLX: .*; pass a recipe\."):
        breccia_mlx.quantize(model)
    with pytest.raises(breccia.OptionError, match=r"head\.weight: the weight is not quantized; pass a recipe"):
        breccia_mlx.quantize(model, class_predicate=lambda path, _: path == "head")
    with pytest.raises(breccia.UnsupportedError, match=r"the weight of a Linear is not quantized; pass a recipe"):
        ScaledLinear.from_linear(model.head)
    nn.quantize(model, bits=1, class_predicate=lambda path, m: path == "head")
    with pytest.raises(breccia.DialectError, match=r"^quantize: head\.weight: affine arrays of 2, 3, 4, 5, 6, 8 bits"):
        breccia_mlx.quantize(model)
    assert type(model.head) is nn.QuantizedLinear
