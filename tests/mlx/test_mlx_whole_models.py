"""Checkpoints of other libraries in models of MLX: weights have the values that NumPy decodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import resident
from fresh import printed
from paths import GOLDEN, ROOT

import breccia

pytest.importorskip("breccia_bridges")
pytest.importorskip("mlx.core")
import foreign_models
import mlx.core as mx
import mlx_models
from dialect_folders import folder, quantized
from golden_dialects import ACROSS, EXPECTED, REFUSED, read, spoil, unpacked
from mlx import nn

import breccia_mlx
from breccia.bridges import load_checkpoint, save_safetensors
from breccia_mlx.nn import ScaledLinear

KINDS = [kind for kind, how in foreign_models.KINDS.items() if how.module]
READ = [name for name, expected in EXPECTED.items() if not expected.startswith(REFUSED)]
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


def decoded(value: Any) -> np.ndarray:
    return np.asarray(breccia.dequantize(value) if isinstance(value, breccia.ScaledTensor) else value, np.float32)


def check_same(model: nn.Module, name: str, st: breccia.ScaledTensor) -> None:
    """A layer has the components of a tensor; experts of three axes have its values."""
    if st.ndim == 2 and name.endswith(".weight"):
        assert mlx_models.weight(model, name).digest() == st.digest()
    else:
        assert np.array_equal(mlx_models.decoded(model, name), decoded(st), equal_nan=True)


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's weights, without scales of inputs and outputs."""
    checkpoint = load_checkpoint(path)
    return {name: checkpoint.header(name).shape for name in checkpoint if "scale" not in name}


def parameters(model: nn.Module) -> dict[str, Any]:
    every: Any = mlx_models.tree_flatten(model.parameters())
    return dict(every)


def test_a_split_gguf_model_is_loaded() -> None:
    path = GOLDEN / "gguf" / "llama-00001-of-00002.gguf"
    checkpoint = load_checkpoint(path)
    shapes = {name: checkpoint.header(name).shape for name in checkpoint if not name.endswith("bias")}
    model = mlx_models.model(shapes)
    assert breccia_mlx.load_model(model, path, strict=False) == ([], ["model.layers.0.self_attn.q_proj.bias"])
    for name in shapes:
        scaled = isinstance(mlx_models.weight(model, name), breccia.ScaledTensor)
        assert scaled == (checkpoint.header(name).recipe is not None)
        assert np.array_equal(mlx_models.decoded(model, name), decoded(checkpoint[name])), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_of_another_library_is_loaded(kind: str, tmp_path: Path) -> None:
    weights = foreign_models.llama(foreign_models.SMALL)
    foreign_models.write(tmp_path / "m", weights, foreign_models.SMALL, kind, shards=5)
    model = mlx_models.model({name: w.shape for name, w in weights.items()})
    assert breccia_mlx.load_model(model, tmp_path / "m") == ([], [])
    checkpoint = load_checkpoint(tmp_path / "m")
    for name in weights:
        scaled = isinstance(mlx_models.weight(model, name), breccia.ScaledTensor)
        assert scaled == foreign_models.is_quantized(name)
        assert np.array_equal(mlx_models.decoded(model, name), decoded(checkpoint[name])), name


@pytest.mark.parametrize("name", [name for name in READ if name not in ("modelopt_int4_awq", ACROSS)])
def test_every_dialect_is_loaded_with_its_codes_and_scales(name: str, tmp_path: Path) -> None:
    folder, _ = unpacked(name, tmp_path)
    model = mlx_models.model(shapes_of(folder))
    missing, unexpected = breccia_mlx.load_model(model, folder)
    assert not missing and all("scale" in name for name in unexpected)
    for value, stored in read(folder).items():
        check_same(model, value, stored.tensor())


def test_weights_whose_layer_multiplies_its_inputs_are_refused(tmp_path: Path) -> None:
    folder, _ = unpacked("modelopt_int4_awq", tmp_path)
    model = mlx_models.model({name: shape for name, shape in shapes_of(folder).items() if not name.endswith("pre_quant_scale")})
    with pytest.raises(breccia.UnsupportedError, match=r"the inputs of \S+\.weight are multiplied by \S+\.pre_quant_scale"):
        breccia_mlx.load_model(model, folder, strict=False)


def test_layers_that_are_quantized_already_take_other_libraries_codes(tmp_path: Path) -> None:
    folder, _ = unpacked("awq_gemm_int4", tmp_path)
    model = mlx_models.model(shapes_of(folder))
    nn.quantize(model, group_size=32, class_predicate=lambda path, _: path.endswith("up_proj"))
    breccia_mlx.quantize(model, {"*.down_proj.weight": "mxfp8"}, activation="mxfp8")
    breccia_mlx.load_model(model, folder)
    for value, stored in read(folder).items():
        assert mlx_models.weight(model, value).digest() == stored.tensor().digest()
    mlp = model.model.layers[0].mlp
    assert mlp.down_proj.activation == breccia.MXFP8BlockScaling() and mlp.up_proj.activation is None


def test_an_index_of_groups_is_kept_by_save_model_and_missed_by_save_weights(tmp_path: Path) -> None:
    folder, _ = unpacked("gptq_v1_int4_asym_desc_act", tmp_path)
    st = read(folder)[UP].tensor()
    assert isinstance(st.layout, breccia.PerGroupIndex)
    model, fresh, other = (mlx_models.model({UP: st.shape}) for _ in range(3))
    breccia_mlx.load_model(model, folder, strict=False)
    breccia_mlx.save_model(model, tmp_path / "model.safetensors")
    breccia_mlx.load_model(fresh, tmp_path / "model.safetensors")
    assert mlx_models.weight(fresh, UP).digest() == st.digest()
    model.save_weights(str(tmp_path / "weights.safetensors"))
    said = rf"{UP} has a group index, which save_weights does not write; save the model with breccia_mlx\.save_model"
    with pytest.raises(breccia.UnsupportedError, match=said):
        breccia_mlx.load_model(other, tmp_path / "weights.safetensors")
    fresh.load_weights(str(tmp_path / "weights.safetensors"))  # of the same index
    reversed_index = breccia.PerGroupIndex(st.layout.index[::-1], st.layout.groups)
    save_safetensors(
        {UP: breccia.from_buffer(st.data, st.scale, st.recipe, reversed_index, zero_point=st.zero_point)}, tmp_path / "r"
    )
    breccia_mlx.load_model(other, tmp_path / "r")
    with pytest.raises(ValueError, match="g_idx-"):
        other.load_weights(str(tmp_path / "weights.safetensors"))


# ------------------------------------------------------------------------------------------------ MLX's own format


@pytest.mark.parametrize("name", [name for name in READ if name.startswith("mlx_")])
def test_a_file_of_mlx_needs_no_config_for_a_model(name: str, tmp_path: Path) -> None:
    folder, _ = unpacked(name, tmp_path)
    expected = {value: stored.tensor() for value, stored in read(folder).items()}
    shapes = shapes_of(folder)
    (folder / "config.json").unlink()
    model = mlx_models.model(shapes)
    assert breccia_mlx.load_model(model, folder) == ([], [])
    for value, st in expected.items():
        check_same(model, value, st)


def test_values_that_the_model_lacks_need_no_config(tmp_path: Path) -> None:
    folder, _ = unpacked("mlx_affine_4", tmp_path)
    model = mlx_models.model({UP: shapes_of(folder)[UP]})
    (folder / "config.json").unlink()
    missing, unexpected = breccia_mlx.load_model(model, folder, strict=False)
    assert missing == [] and DOWN in unexpected and type(model.model.layers[0].mlp.up_proj) is ScaledLinear


class Experts(nn.Module):
    """Stacked experts in MLX's words, as mlx-lm's QuantizedSwitchLinear holds them."""

    def __init__(self, w: Any, group_size: int, bits: int, mode: str = "affine") -> None:
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight, self.scales, *biases = mx.quantize(w, group_size, bits, mode=mode)
        if biases:
            (self.biases,) = biases


def stacked(options: Mapping[str, Any], fill: float = 0) -> nn.Module:
    mx.random.seed(0)
    model = nn.Module()
    model.experts = Experts(mx.random.normal((3, 32, 128)) if not fill else mx.full((3, 32, 128), float(fill)), **options)
    return model


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize(
    "options", [{"group_size": 64, "bits": 4}, {"group_size": 32, "bits": 3}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}]
)
def test_modules_that_hold_words_keep_them(options: dict[str, Any], config: bool, tmp_path: Path) -> None:
    model = stacked(options)
    model.save_weights(str(tmp_path / "model.safetensors"))
    if config:
        (tmp_path / "config.json").write_text(json.dumps({"quantization": options}))
    fresh = stacked(options, fill=1)
    assert breccia_mlx.load_model(fresh, tmp_path) == ([], [])
    before, after = parameters(model), parameters(fresh)
    assert before.keys() == after.keys() and all(mx.array_equal(before[name], after[name]) for name in before)
    plain = mlx_models.model({"experts.weight": (3, 32, 128)})
    assert breccia_mlx.load_model(plain, tmp_path) == ([], []), "decoded"
    experts = model.experts
    values = mx.dequantize(experts.weight, experts.scales, experts.get("biases"), dtype=mx.float32, **options)
    assert mx.array_equal(plain.experts.weight, values)


def test_a_module_of_words_at_two_places_needs_one_name(tmp_path: Path) -> None:
    options = {"group_size": 64, "bits": 4}
    model, fresh = stacked(options), stacked(options, fill=1)
    fresh.again = fresh.experts
    expected = parameters(model)
    mx.save_safetensors(str(tmp_path / "m.safetensors"), {name.replace("experts", "again"): a for name, a in expected.items()})
    assert breccia_mlx.load_model(fresh, tmp_path / "m.safetensors") == ([], [])
    assert fresh.again is fresh.experts
    assert all(mx.array_equal(parameters(fresh)[name], array) for name, array in expected.items())
    both = expected | {name.replace("experts", "again"): array for name, array in expected.items()}
    mx.save_safetensors(str(tmp_path / "m.safetensors"), both)
    assert breccia_mlx.load_model(fresh, tmp_path / "m.safetensors") == ([], [])
    mx.save_safetensors(str(tmp_path / "m.safetensors"), both | {"again.biases": expected["experts.biases"] + 1})
    with pytest.raises(breccia.ShapeError, match=r"one layer for experts\.weight and again\.weight, but they differ"):
        breccia_mlx.load_model(fresh, tmp_path / "m.safetensors")


def test_modules_that_hold_words_refuse_others(tmp_path: Path) -> None:
    options = {"group_size": 64, "bits": 4}
    model = stacked(options)
    breccia_mlx.save_model(model, tmp_path / "model.safetensors")
    assert breccia_mlx.load_model(stacked(options, fill=1), tmp_path / "model.safetensors") == ([], [])
    fresh = stacked({"group_size": 128, "bits": 4}, fill=1)
    before = parameters(fresh)
    with pytest.raises(
        breccia.DialectError, match=r"experts\.weight has .*'group_size': 64.* in the file, and its Experts .*128"
    ):
        breccia_mlx.load_model(fresh, tmp_path / "model.safetensors")
    other = breccia.cast(np.ones((3, 32, 128), np.float32), "int4")
    save_safetensors({"experts.weight": other}, tmp_path / "other.safetensors")
    with pytest.raises(breccia.DialectError, match=r"experts\.weight, of Experts: MLX's modes are"):
        breccia_mlx.load_model(fresh, tmp_path / "other.safetensors")
    save_safetensors({"experts.weight": np.ones((3, 32, 128), np.float32)}, tmp_path / "plain.safetensors")
    with pytest.raises(breccia.UnknownNameError, match=r"missing: experts\.scales, experts\.biases\."):
        breccia_mlx.load_model(fresh, tmp_path / "plain.safetensors")
    with pytest.raises(breccia.ShapeError, match=r"experts\.weight has shape \(3, 32, 128\) in the file and \(3, 32, 16\) in"):
        breccia_mlx.load_model(fresh, tmp_path / "plain.safetensors", strict=False)
    assert all(parameters(fresh)[name] is array for name, array in before.items())


# ------------------------------------------------------------------------------------------------ what does not fit


def test_stacked_experts_along_another_axis_are_decoded_or_refused(tmp_path: Path) -> None:
    """gpt-oss stores the transposes of the model's matrices."""
    st = breccia.cast(np.random.default_rng(0).standard_normal((3, 96, 64), np.float32), "mxfp4")
    parts = {f"gate_proj.weight{end}": tensor for end, tensor in foreign_models.KINDS["gpt_oss"].parts(st).items()}
    path = folder(tmp_path, parts, quantized("mxfp4"))
    model = mlx_models.model({"gate_proj.weight": (3, 64, 96)})
    assert breccia_mlx.load_model(model, path) == ([], [])
    assert np.array_equal(np.array(model.gate_proj.weight), decoded(st).swapaxes(-1, -2))
    model.gate_proj = Experts(mx.zeros((3, 64, 96)), 32, 4)
    with pytest.raises(
        breccia.ShapeError, match=r"gate_proj\.weight has blocks along axis -2 in the file; those of a layer run"
    ):
        breccia_mlx.load_model(model, path)


def test_groups_across_the_rows_of_a_linear_layer_are_refused(tmp_path: Path) -> None:
    folder, _ = unpacked(ACROSS, tmp_path)
    with pytest.raises(breccia.ShapeError, match=r"_proj\.weight has blocks along axis -2 in the file; those of a layer run"):
        breccia_mlx.load_model(mlx_models.model(shapes_of(folder)), folder)


def test_two_dialects_are_named_and_the_caller_chooses(tmp_path: Path) -> None:
    folder, _ = unpacked("gptq_v1_int4_sym", tmp_path)
    expected = {name: stored.tensor() for name, stored in read(folder).items()}
    model = mlx_models.model(shapes_of(folder))
    for config in ("config.json", "quantize_config.json"):
        (folder / config).unlink(missing_ok=True)
    before = parameters(model)
    two = r"_proj.weight has two readings, as GPTQ \('gptq'\) and GPTQ version 2 \('gptq_v2'\), .* Give source_dialect= "
    with pytest.raises(breccia.DialectError, match=two):
        breccia_mlx.load_model(model, folder)
    with pytest.raises(breccia.UnknownNameError, match="no dialect 'gptqq'; did you mean 'gptq'?"):
        breccia_mlx.load_model(model, folder, source_dialect="gptqq")
    assert all(parameters(model)[name] is array for name, array in before.items())
    breccia_mlx.load_model(model, folder, source_dialect="gptq")
    assert all(mlx_models.weight(model, name).digest() == st.digest() for name, st in expected.items())


@pytest.mark.parametrize("quantized", [None, "mlx", "breccia"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, ml_dtypes.float8_e4m3fn])
def test_codes_without_scales_are_refused_in_place_of_floats(dtype: Any, quantized: str | None, tmp_path: Path) -> None:
    layer, table = np.ones((32, 64), dtype), np.ones((2, 3), dtype)
    save_safetensors({"up.weight": layer, "table": np.ones((2, 3), np.float32)}, tmp_path / "layer.safetensors")
    save_safetensors({"up.weight": np.ones((32, 64), np.float32), "table": table}, tmp_path / "table.safetensors")
    model = mlx_models.model({"up.weight": (32, 64), "table": (2, 3)})
    if quantized == "mlx":
        nn.quantize(model, group_size=32)
    elif quantized:
        breccia_mlx.quantize(model, "mxfp8")
    before = parameters(model)
    for name, file in (("up.weight", "layer"), ("table", "table")):
        said = rf"{name} is \w+ of shape \d+x\d+, without scales that breccia knows, and the model has floats there"
        with pytest.raises(breccia.DialectError, match=said):
            breccia_mlx.load_model(model, tmp_path / f"{file}.safetensors", strict=False)
    assert all(parameters(model)[name] is array for name, array in before.items())


def test_integers_are_read_in_place_of_integers(tmp_path: Path) -> None:
    expected = np.arange(6, dtype=np.int32).reshape(2, 3)
    save_safetensors({"table": expected}, tmp_path / "m.safetensors")
    model = mlx_models.model({"table": (2, 3)})
    model.table = model.table.astype(mx.int32)
    assert breccia_mlx.load_model(model, tmp_path / "m.safetensors") == ([], [])
    assert np.array_equal(np.array(model.table), expected) and model.table.dtype == mx.int32


def test_what_does_not_fit_is_refused_before_a_value_is_read(tmp_path: Path) -> None:
    folder, _ = unpacked("mlx_affine_4", tmp_path)
    shapes = shapes_of(folder)
    (file,) = folder.glob("*.safetensors")
    spoil(file)
    wide = (shapes[UP][0], shapes[UP][1] + 64)
    for changed, error, said in (
        ({}, breccia.DialectError, "scales that are not finite"),
        ({UP: wide}, breccia.ShapeError, f"{UP} has shape {shapes[UP]} in the file and {wide} in the model."),
        ({"more.weight": (1, 32)}, breccia.UnknownNameError, "missing: more.weight. Pass strict=False"),
    ):
        model = mlx_models.model(shapes | changed)
        before = parameters(model)
        with pytest.raises(error) as refused:
            breccia_mlx.load_model(model, folder)
        assert said in str(refused.value)
        assert all(parameters(model)[name] is array for name, array in before.items())


def test_arrays_of_64_bits_are_read_in_the_dtype_of_the_parameter(tmp_path: Path) -> None:
    save_safetensors({"table": np.arange(6).reshape(2, 3) / 4}, tmp_path / "m.safetensors")
    model = mlx_models.model({"table": (2, 3)})
    with pytest.warns(breccia.DtypeWarning, match=r"mlx would narrow table \(float64\)"):
        breccia_mlx.load_model(model, tmp_path / "m.safetensors")
    assert np.array_equal(np.array(model.table), np.arange(6, dtype=np.float32).reshape(2, 3) / 4)


# ------------------------------------------------------------------------------------------------ memory


SCRIPT = """
import json, sys
tools, folder, tiny = sys.argv[1:]
sys.path.insert(0, tools)
import mlx.core as mx, numpy as np
import breccia, breccia_mlx, mlx_models, resident
from breccia.bridges import load_checkpoint

def loaded(path):
    checkpoint = load_checkpoint(path)
    model = mlx_models.model({name: checkpoint.header(name).shape for name in checkpoint}, mx.bfloat16)
    assert breccia_mlx.load_model(model, path) == ([], [])
    return model

loaded(tiny)  # imports what the large model needs
model, grown = resident.grown(loaded, folder)
checkpoint, wrong = load_checkpoint(folder), []
for name in checkpoint:
    value = checkpoint[name]
    values = breccia.dequantize(value) if isinstance(value, breccia.ScaledTensor) else value
    if not np.array_equal(mlx_models.decoded(model, name), np.asarray(values, np.float32)):
        wrong.append(name)
print(json.dumps({"grown": grown, "values": len(checkpoint), "wrong": wrong}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not resident.AVAILABLE, reason="peaks of memory are read as Linux tells them")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_the_size_of_smollm2_takes_its_quantized_size_and_one_tensor(kind: str, tmp_path: Path) -> None:
    """The bound: the tensors of the file, a second copy of the largest one (the embedding, in BF16), and 16 MiB for objects of
    Python, parts of pages, and buffers of files. Measured beyond the tensors of the file and the copy: 5 MB."""
    config = foreign_models.SMOLLM2
    weights = foreign_models.llama(config)
    foreign_models.write(tmp_path / "large", weights, config, kind, shards=3)
    tiny = config | {"num_hidden_layers": 1, "vocab_size": 64}
    foreign_models.write(tmp_path / "tiny", foreign_models.llama(tiny), tiny, kind)
    # Freed arrays go back to the system, however many there were before: glibc raises the threshold else.
    words = [ROOT / "tests" / "tools", tmp_path / "large", tmp_path / "tiny"]
    found = json.loads(printed(SCRIPT, *map(str, words), MALLOC_MMAP_THRESHOLD_="65536"))
    assert (found["values"], found["wrong"]) == (len(weights), [])
    size = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    largest = 2 * config["vocab_size"] * config["hidden_size"]
    print("bytes beyond the quantized size and the copy:", found["grown"] - size - largest)
    assert found["grown"] <= size + largest + (16 << 20)
