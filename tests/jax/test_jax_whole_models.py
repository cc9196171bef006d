"""Checkpoints of other libraries in models of Flax and Equinox: weights have the values that NumPy decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resident
from fresh import printed
from marks import long_but
from paths import GOLDEN, ROOT

import breccia

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("equinox")
pytest.importorskip("breccia_bridges")
import foreign_models  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax_models  # noqa: E402
from golden_dialects import EXPECTED, REFUSED, read, spoil, unpacked  # noqa: E402

from breccia.bridges import load_checkpoint, save_safetensors  # noqa: E402
from breccia_jax import equinox as be  # noqa: E402
from breccia_jax import flax as bf  # noqa: E402

LOADERS: dict[str, Any] = {"linen": bf.load_model, "nnx": bf.load_model, "equinox": be.load_model}
KINDS = [kind for kind, how in foreign_models.KINDS.items() if how.module]
READ = [name for name, expected in EXPECTED.items() if not expected.startswith(REFUSED)]
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


def decoded(value: Any) -> np.ndarray:
    return np.asarray(breccia.dequantize(value) if isinstance(value, breccia.ScaledTensor) else value, np.float32)


def as_stored(path: Path, **changed: Any) -> dict[str, Any]:
    """A parameter for each value of a checkpoint, under its name and of its shape."""
    checkpoint = load_checkpoint(path, **changed)
    return {name: jax.ShapeDtypeStruct(checkpoint.header(name).shape, jnp.float32) for name in checkpoint}


@pytest.mark.long
@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("library", jax_models.MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_of_another_library_is_loaded(kind: str, library: str, tmp_path: Path) -> None:
    weights = foreign_models.llama(foreign_models.SMALL)
    foreign_models.write(tmp_path / "m", weights, foreign_models.SMALL, kind, shards=5)
    shapes = {name: w.shape for name, w in weights.items()}
    model = LOADERS[library](jax_models.MODELS[library](shapes), tmp_path / "m")
    checkpoint = load_checkpoint(tmp_path / "m")
    for name in weights:
        assert isinstance(jax_models.weight(model, name), bf.ScaledWeight) == foreign_models.is_quantized(name)
        assert np.array_equal(jax_models.decoded(model, name), decoded(checkpoint[name])), name


@pytest.mark.parametrize("name", long_but(READ[:1], READ))
def test_every_dialect_is_loaded_with_its_codes_and_scales(name: str, tmp_path: Path) -> None:
    """Experts of three axes too: a parameter of the same shape takes them."""
    folder, _ = unpacked(name, tmp_path)
    loaded = bf.load_model(as_stored(folder), folder)
    for value, stored in read(folder).items():
        assert loaded[value].tensor.digest() == stored.tensor().digest() and loaded[value].shape == stored.shape


@pytest.mark.long
@pytest.mark.parametrize("library", jax_models.MODELS)
def test_a_split_gguf_model_is_loaded(library: str) -> None:
    path = GOLDEN / "gguf" / "llama-00001-of-00002.gguf"
    checkpoint = load_checkpoint(path)
    shapes = {name: checkpoint.header(name).shape for name in checkpoint if not name.endswith("bias")}
    model = LOADERS[library](jax_models.MODELS[library](shapes), path, strict=False)  # it has no biases
    for name in shapes:
        held = checkpoint.header(name).recipe is not None
        assert isinstance(jax_models.weight(model, name), bf.ScaledWeight) == held
        assert np.array_equal(jax_models.decoded(model, name), decoded(checkpoint[name])), name


def test_scales_of_inputs_may_be_there_and_factors_of_inputs_may_not(tmp_path: Path) -> None:
    folder, _ = unpacked("modelopt_fp8", tmp_path)
    model = {name: like for name, like in as_stored(folder).items() if not name.endswith("input_scale")}
    assert bf.load_model(model, folder).keys() == model.keys()
    folder, _ = unpacked("modelopt_int4_awq", tmp_path)
    model = {name: like for name, like in as_stored(folder).items() if not name.endswith("pre_quant_scale")}
    with pytest.raises(breccia.UnsupportedError, match=r"the inputs of \S+\.weight are multiplied by \S+\.pre_quant_scale"):
        bf.load_model(model, folder, strict=False)


def test_stacked_experts_of_gpt_oss_decode_to_their_values(tmp_path: Path) -> None:
    folder, _ = unpacked("gpt_oss_mxfp4", tmp_path)
    loaded = bf.load_model(as_stored(folder), folder)
    experts = [name for name, array in loaded.items() if array.ndim == 3]
    assert experts == ["model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.gate_up_proj"]
    for name in experts:
        assert loaded[name].tensor.axis == -2
        assert np.array_equal(loaded[name].unbox(), decoded(load_checkpoint(folder)[name]))


def test_names_are_those_of_the_model_and_values_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied weights share their components, where no order differs."""
    folder, _ = unpacked("gptq_v1_int4_sym", tmp_path)
    asked: list[str] = []
    kind = type(load_checkpoint(folder))
    monkeypatch.setattr(kind, "__getitem__", lambda self, name, get=kind.__getitem__: asked.append(name) or get(self, name))
    st = load_checkpoint(folder)[UP]
    asked.clear()
    kernel = jax.ShapeDtypeStruct(st.shape[::-1], jnp.float32)
    loaded = bf.load_model({"up": {"kernel": kernel}, "tied": {"kernel": kernel}}, folder, names=lambda _: UP, strict=False)
    assert asked == [UP]
    assert np.array_equal(loaded["up"]["kernel"].unbox(), decoded(st).T)
    assert np.array_equal(loaded["tied"]["kernel"].unbox(), decoded(st).T)


@pytest.mark.parametrize("stored", ["torch", "jax"])
def test_the_blocks_of_a_square_matrix_tell_its_order_under_a_given_name(stored: str, tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((64, 64), np.float32)  # (out, in)
    st = breccia.cast(w, "mxfp8") if stored == "torch" else breccia.cast(w.T, "mxfp8", axis=-2)
    save_safetensors({"w": st}, tmp_path / "m.safetensors")
    expected, square = decoded(breccia.cast(w, "mxfp8")), jax.ShapeDtypeStruct(w.shape, jnp.float32)
    for leaf, values in (("kernel", expected.T), ("weight", expected)):
        loaded = bf.load_model({leaf: square}, tmp_path / "m.safetensors", names={leaf: "w"})
        assert np.array_equal(loaded[leaf].unbox(), values)


def test_two_dialects_are_named_and_the_caller_chooses(tmp_path: Path) -> None:
    folder, _ = unpacked("gptq_v1_int4_sym", tmp_path)
    expected = {name: stored.tensor() for name, stored in read(folder).items()}
    model = as_stored(folder)
    for config in ("config.json", "quantize_config.json"):
        (folder / config).unlink(missing_ok=True)
    two = r"_proj.weight has two readings, as GPTQ \('gptq'\) and GPTQ version 2 \('gptq_v2'\), .* Give source_dialect= "
    for load in (bf.load_model, be.load_model):
        with pytest.raises(breccia.DialectError, match=two):
            load(model, folder)
        with pytest.raises(breccia.UnknownNameError, match="no dialect 'gptqq'; did you mean 'gptq'?"):
            load(model, folder, source_dialect="gptqq")
        loaded = load(model, folder, source_dialect="gptq")
        assert all(loaded[name].tensor.digest() == st.digest() for name, st in expected.items())
        other = load(model, folder, source_dialect="gptq_v2")
        assert any(other[name].tensor.digest() != st.digest() for name, st in expected.items())


@pytest.mark.parametrize("library", jax_models.MODELS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "float8_e4m3fn"])
def test_codes_without_scales_are_refused_in_place_of_floats(dtype: str, library: str, tmp_path: Path) -> None:
    save_safetensors({"up.weight": np.ones((32, 64), dtype)}, tmp_path / "m.safetensors")
    said = r"up\.weight is \w+ of shape 32x64, without scales that breccia knows, and the model has floats there"
    with pytest.raises(breccia.DialectError, match=said):
        LOADERS[library](jax_models.MODELS[library]({"up.weight": (32, 64)}), tmp_path / "m.safetensors", strict=False)


def test_codes_without_scales_are_refused_in_place_of_a_quantized_weight(tmp_path: Path) -> None:
    save_safetensors({"up.kernel": np.ones((64, 32), np.int8)}, tmp_path / "m.safetensors")
    scaled, _ = bf.quantize({"up": {"kernel": jnp.ones((64, 32))}}, "mxfp8")
    with pytest.raises(breccia.DialectError, match=r"up\.kernel is I8 of shape 64x32, without scales"):
        bf.load_model(scaled, tmp_path / "m.safetensors")


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float8_e4m3fn"])
def test_codes_are_read_in_place_of_codes(dtype: str, tmp_path: Path) -> None:
    expected = np.arange(6).reshape(2, 3).astype(dtype)
    save_safetensors({"table": expected}, tmp_path / "m.safetensors")
    loaded = bf.load_model({"table": jax.ShapeDtypeStruct((2, 3), dtype)}, tmp_path / "m.safetensors")
    assert loaded["table"].dtype == dtype and np.array_equal(np.asarray(loaded["table"]), expected)


def test_arrays_of_64_bits_become_arrays_of_jax_in_the_dtype_of_the_parameter(tmp_path: Path) -> None:
    up, convolution, bias = np.arange(3.0)[None], np.arange(24.0).reshape(2, 3, 2, 2), np.arange(3.0)
    file = {"up.weight": up, "conv.weight": convolution, "up.bias": bias}
    save_safetensors(file, tmp_path / "m.safetensors")
    shapes = {"up": {"kernel": (3, 1), "bias": (3,)}, "conv": {"kernel": (2, 2, 3, 2)}}
    model = {
        owner: {leaf: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for leaf, shape in leaves.items()}
        for owner, leaves in shapes.items()
    }
    with pytest.warns(breccia.DtypeWarning, match="jax would narrow"):
        loaded = bf.load_model(model, tmp_path / "m.safetensors")
    assert all(isinstance(a, jax.Array) and a.dtype == jnp.bfloat16 for a in jax.tree.leaves(loaded))
    assert np.array_equal(np.asarray(loaded["up"]["kernel"], np.float32), up.T)
    assert np.array_equal(np.asarray(loaded["conv"]["kernel"], np.float32), convolution.transpose(2, 3, 1, 0))
    assert np.array_equal(np.asarray(loaded["up"]["bias"], np.float32), bias)


def test_what_does_not_fit_is_refused_before_a_value_is_read(tmp_path: Path) -> None:
    folder, _ = unpacked("mlx_affine_4", tmp_path)
    model = as_stored(folder)
    (file,) = folder.glob("*.safetensors")
    spoil(file)
    with pytest.raises(breccia.DialectError, match="'scales' has 128 scales that are not finite"):
        bf.load_model(model, folder)
    (rows, columns), wide = model[UP].shape, (model[UP].shape[0], model[UP].shape[1] + 1)
    with pytest.raises(breccia.ShapeError) as refused:
        bf.load_model({**model, UP: jax.ShapeDtypeStruct(wide, jnp.float32)}, folder)
    assert f"{UP} has shape {(rows, columns)} in the file, and {wide} in the model" in str(refused.value)
    other = {name: array for name, array in model.items() if name != DOWN} | {"other.weight": model[DOWN]}
    with pytest.raises(breccia.UnknownNameError, match=f"missing: other.weight; unexpected: {DOWN}. Pass names="):
        bf.load_model(other, folder)


SCRIPT = """
import json, sys
from pathlib import Path
tools, folder, tiny, library = sys.argv[1:]
sys.path.insert(0, tools)
import jax.numpy as jnp, numpy as np
import breccia, jax_models, resident
from breccia.bridges import load_checkpoint
from breccia_jax import equinox, flax

load = (equinox if library == "equinox" else flax).load_model

def loaded(path):
    checkpoint = load_checkpoint(path)
    shapes = {name: checkpoint.header(name).shape for name in checkpoint}
    return load(jax_models.MODELS[library](shapes, jnp.bfloat16), path)

loaded(tiny)  # compiles what the large model needs
model, grown = resident.grown(loaded, folder)
checkpoint, wrong = load_checkpoint(folder), []
for name in checkpoint:
    value = checkpoint[name]
    values = breccia.dequantize(value, out_dtype="bfloat16") if isinstance(value, breccia.ScaledTensor) else value
    if not np.array_equal(jax_models.decoded(model, name), np.asarray(values, np.float32)):
        wrong.append(name)
print(json.dumps({"grown": grown, "values": len(checkpoint), "wrong": wrong}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not resident.AVAILABLE, reason="peaks of memory are read as Linux tells them")
@pytest.mark.parametrize(("kind", "library"), list(zip(KINDS, ("linen", "nnx", "equinox", "nnx", "equinox"), strict=True)))
def test_a_model_of_the_size_of_smollm2_takes_its_quantized_size_and_one_tensor(
    kind: str, library: str, tmp_path: Path
) -> None:
    """The bound: the tensors of the file, a second copy of the largest one (the embedding, in BF16), and 16 MiB for objects of
    Python, parts of pages, and buffers of files and compiled functions. Measured beyond the tensors of the file: 4 to 7 MB."""
    config = foreign_models.SMOLLM2
    weights = foreign_models.llama(config)
    foreign_models.write(tmp_path / "large", weights, config, kind, shards=3)
    tiny = config | {"num_hidden_layers": 1, "vocab_size": 64}
    foreign_models.write(tmp_path / "tiny", foreign_models.llama(tiny), tiny, kind)
    # Freed arrays go back to the system, however many there were before: glibc raises the threshold else.
    words = [ROOT / "tests" / "tools", tmp_path / "large", tmp_path / "tiny", library]
    found = json.loads(printed(SCRIPT, *map(str, words), MALLOC_MMAP_THRESHOLD_="65536"))
    assert (found["values"], found["wrong"]) == (len(weights), [])
    size = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    largest = 2 * config["vocab_size"] * config["hidden_size"]
    print("bytes beyond the quantized size:", found["grown"] - size)
    assert found["grown"] <= size + largest + (16 << 20)
