"""bitsandbytes, qwix, MLX layers and compressed modules: what the libraries make decodes to their own floats, and returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from broken import untyped

import breccia
from breccia import DialectError, UnsupportedError, bytes_equal

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.covering(1)]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------------------------------------ bitsandbytes


@pytest.fixture
def bnb() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("bitsandbytes")


def params(bnb: Any, kind: str = "nf4", nested: bool = False, block: int = 64, shape: tuple[int, int] = (64, 256)) -> Any:
    import torch

    weight = torch.from_numpy(numbers(*shape))
    held = bnb.nn.Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=nested, blocksize=block)
    return held.to("cpu")


@pytest.mark.rest
@pytest.mark.parametrize("block", (64, 128))
@pytest.mark.parametrize("nested", (False, True))
def test_nf4_weights_of_bitsandbytes_decode_to_its_floats(bnb: Any, nested: bool, block: int) -> None:
    import torch

    theirs = params(bnb, nested=nested, block=block)
    ours = breccia.from_foreign(theirs)
    assert ours.recipe == breccia.NF4Scaling(block_size=block) and ours.shape == (64, 256)
    assert torch.equal(breccia.dequantize(ours), bnb.functional.dequantize_4bit(theirs.data, theirs.quant_state))


@pytest.mark.rest
def test_nf4_weights_return_to_bitsandbytes(bnb: Any) -> None:
    import torch

    theirs = params(bnb)
    back = breccia.to_foreign(breccia.from_foreign(theirs), "bitsandbytes", like=theirs)
    assert type(back) is type(theirs) and torch.equal(back.data, theirs.data)
    assert torch.equal(back.quant_state.absmax, theirs.quant_state.absmax)
    assert back.quant_state.shape == theirs.quant_state.shape and back.quant_state.dtype == theirs.quant_state.dtype
    decoded = (bnb.functional.dequantize_4bit(p.data, p.quant_state) for p in (back, theirs))
    assert torch.equal(*decoded)
    ours = breccia.cast(torch.from_numpy(numbers(64, 256)), "nf4")
    made = breccia.to_foreign(ours, "bitsandbytes")
    assert torch.equal(bnb.functional.dequantize_4bit(made.data, made.quant_state), breccia.dequantize(ours))
    assert bytes_equal(breccia.from_foreign(made), ours)


@pytest.mark.rest
def test_what_no_recipe_describes_is_refused(bnb: Any) -> None:
    import torch

    with pytest.raises(DialectError, match=r"Params4bit \(bitsandbytes .*'fp4', whose table has two codes for zero"):
        breccia.from_foreign(params(bnb, "fp4"))
    with pytest.raises(DialectError, match="reach across rows"):
        breccia.from_foreign(params(bnb, shape=(64, 96)))
    with pytest.raises(DialectError, match="has no quant_state: it is not quantized before it moves"):
        breccia.from_foreign(bnb.nn.Params4bit(torch.ones(64, 64), requires_grad=False))
    with pytest.raises(DialectError, match="bitsandbytes holds NF4 in whole blocks"):
        breccia.to_foreign(breccia.cast(torch.ones(64, 64), "mxfp8"), "bitsandbytes")


def test_bitsandbytes_is_read_by_attributes_without_the_library() -> None:
    """Codes and absmax by hand: the first number of a byte is in its high nibble."""
    torch = pytest.importorskip("torch")
    from breccia_bridges.bitsandbytes import from_bitsandbytes

    codes = torch.arange(128, dtype=torch.uint8).reshape(2, 64) % 16
    data = (codes.reshape(-1)[::2] << 4 | codes.reshape(-1)[1::2]).reshape(-1, 1)
    state = SimpleNamespace(
        quant_type="nf4", shape=(2, 64), blocksize=64, code=None, absmax=torch.tensor([2.0, 0.5]), nested=False
    )
    ours = from_bitsandbytes(data, quant_state=state)
    table = torch.tensor(breccia.codecs.NF4.values)
    assert torch.equal(breccia.dequantize(ours), table[codes.long()] * torch.tensor([[2.0], [0.5]]))


@pytest.mark.rest
@pytest.mark.parametrize("nested", (False, True))
def test_a_broken_state_of_bitsandbytes_is_a_typed_error_that_names_class_and_version(bnb: Any, nested: bool) -> None:
    from breccia_bridges.bitsandbytes import from_bitsandbytes

    def state() -> Any:
        return params(bnb, nested=nested).quant_state

    data, names = params(bnb, nested=nested).data, ("quant_type", "shape", "blocksize", "code", "absmax", "offset", "state2")
    names = names if nested else names[:-2]
    assert untyped(state, names, lambda found: from_bitsandbytes(data, quant_state=found), "(") == []
    theirs = params(bnb)
    theirs.quant_state.absmax = theirs.quant_state.absmax[:5]
    with pytest.raises(DialectError, match=r"Params4bit \(bitsandbytes .* has 5 numbers in absmax; blocks of 64 need 256"):
        breccia.from_foreign(theirs)
    theirs.quant_state.absmax = None
    with pytest.raises(DialectError, match=r"QuantState \(bitsandbytes .* has absmax=None, where this bridge reads an array"):
        breccia.from_foreign(theirs)
    theirs = params(bnb, nested=True)
    theirs.quant_state.state2.absmax = theirs.quant_state.state2.absmax.repeat(2)
    with pytest.raises(
        DialectError, match=r"has a nested absmax of 256 codes in torch.uint8, with 2 numbers for blocks of 256"
    ):
        breccia.from_foreign(theirs)


# ------------------------------------------------------------------------------------------------ qwix


QWIX = {
    "int8": ({}, (0,), breccia.INT8Scaling()),
    "int8 by output": ({}, (1,), breccia.INT8Scaling()),
    "int8 in groups": ({1: 32}, (0,), breccia.INT8Scaling(group_size=32)),
    "int4": ({1: 32}, (0,), breccia.INT4Scaling(group_size=32, scale_dtype="fp32")),
    "int4 by output": ({0: 32}, (1,), breccia.INT4Scaling(group_size=32, scale_dtype="fp32")),
    "float8_e4m3fn": ({}, (0,), breccia.Float8RowScaling()),
    "float8_e4m3fn in one": ({}, (), breccia.Float8CurrentScaling()),
    "float8_e5m2": ({1: 32}, (0,), breccia.Float8BlockScaling("E5M2", block_k=32)),
    "mxfp8": ({1: 32}, (0,), breccia.MXFP8BlockScaling()),
    "mxfp4": ({1: 32}, (0,), breccia.MXFP4BlockScaling()),
    "mxfp4 by output": ({0: 32}, (1,), breccia.MXFP4BlockScaling()),
    "nvfp4": ({1: 16}, (0,), breccia.NVFP4BlockScaling(two_level=False)),
    "nf4": ({1: 64}, (0,), breccia.NF4Scaling()),
}


def qarray(name: str) -> Any:
    pytest.importorskip("qwix")
    import jax.numpy as jnp
    from qwix._src.core import qarray as core

    tiles, channels, _ = QWIX[name]
    how = core.HowToQuantize(qtype=name.split()[0], channelwise_axes=channels, tiled_axes=tiles)
    return core.quantize(jnp.asarray(numbers(64, 128)), how)


@pytest.mark.parametrize("name", [n if n == "mxfp8" else pytest.param(n, marks=pytest.mark.rest) for n in QWIX])
def test_qwix_arrays_decode_to_its_floats_and_return(name: str) -> None:
    theirs = qarray(name)
    from qwix._src.core import qarray as core

    ours = breccia.from_foreign(theirs)
    assert ours.recipe == QWIX[name][2] and ours.axis == (-2 if "by output" in name else -1)
    assert np.array_equal(np.asarray(breccia.dequantize(ours)), np.asarray(core.dequantize(theirs)))
    back = breccia.to_foreign(ours, "qwix", like=theirs)
    assert type(back) is type(theirs) and back.qtype == theirs.qtype
    for a, b in ((back.qvalue, theirs.qvalue), (back.scale, theirs.scale)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.array_equal(np.asarray(a.astype("float32")), np.asarray(b.astype("float32")))
    assert bytes_equal(breccia.from_foreign(back), ours)


def test_qwix_arrays_without_a_recipe_are_refused() -> None:
    theirs = qarray("mxfp8")
    import dataclasses

    with pytest.raises(DialectError, match="has scales that E8M0 does not have"):
        breccia.from_foreign(dataclasses.replace(theirs, scale=theirs.scale * 1.5))
    with pytest.raises(DialectError, match="has a zero-point"):
        breccia.from_foreign(dataclasses.replace(theirs, zero_point=theirs.scale))
    with pytest.raises(DialectError, match=r"QArray \(qwix .*has scales of shape \(64, 3\), which do not cut it into tiles"):
        breccia.from_foreign(dataclasses.replace(theirs, scale=theirs.scale[:, :3]))
    with pytest.raises(DialectError, match=r"QArray \(qwix .*has no attribute 'zero_point', which this bridge reads"):
        breccia.bridges.from_qwix(type("QArray", (), {"__module__": "qwix", "qvalue": theirs.qvalue, "scale": theirs.scale})())
    with pytest.raises(UnsupportedError, match="to_qwix takes a JAX ScaledTensor"):
        breccia.to_foreign(breccia.cast(numbers(32, 32), "mxfp8"), "qwix")


@pytest.mark.rest
@pytest.mark.parametrize("name", ["int4", "mxfp4", "float8_e4m3fn in one"])
def test_a_broken_array_of_qwix_is_a_typed_error_that_names_class_and_version(name: str) -> None:
    theirs, names = qarray(name), ("qvalue", "scale", "zero_point", "qtype")

    class QArray(SimpleNamespace):
        __module__ = "qwix"

    def made() -> Any:
        return QArray(**{n: getattr(theirs, n) for n in names})

    assert untyped(made, names, breccia.bridges.from_qwix, "QArray (qwix ") == []


# ------------------------------------------------------------------------------------------------ MLX


MLX = {
    "affine": {"group_size": 64, "bits": 4},
    "affine of 8 bits": {"group_size": 32, "bits": 8},
    "mxfp4": {"mode": "mxfp4"},
    "mxfp8": {"mode": "mxfp8"},
    "nvfp4": {"mode": "nvfp4"},
}


@pytest.mark.parametrize("name", MLX)
def test_quantized_layers_of_mlx_keep_their_arrays_and_outputs(name: str) -> None:
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as nn

    layer = nn.Linear(128, 64)
    layer.weight = mx.array(numbers(64, 128))
    theirs = nn.QuantizedLinear.from_linear(layer, **MLX[name])
    ours = breccia.from_foreign(theirs)
    assert ours.shape == (64, 128)
    back = breccia.to_foreign(ours, "mlx", bias=theirs.bias)
    assert set(back.keys()) == set(theirs.keys())
    for key in ("weight", "scales", "biases", "bias"):
        if key in theirs:
            assert mx.array_equal(back[key], theirs[key])
    x = mx.array(numbers(4, 128, seed=1))
    assert mx.array_equal(back(x), theirs(x))


def test_a_broken_layer_of_mlx_is_a_typed_error_that_names_class_and_version() -> None:
    pytest.importorskip("mlx.core")
    import mlx.nn as nn

    theirs = nn.QuantizedLinear(128, 64, mode="mxfp8", group_size=32, bits=8)
    theirs.scales = theirs.scales[:, :3]
    with pytest.raises(DialectError, match=r"scales are .* \(64, 4\) for w .*; got \(64, 3\).* a QuantizedLinear \(mlx "):
        breccia.from_foreign(theirs)
    theirs.bits = 4
    with pytest.raises(DialectError, match=r"mode 'mxfp8' has group_size=32 and bits=8; got .*QuantizedLinear \(mlx "):
        breccia.from_foreign(theirs)
    del theirs["scales"]
    with pytest.raises(DialectError, match=r"QuantizedLinear \(mlx .*has no attribute 'scales', which this bridge reads"):
        breccia.from_foreign(theirs)


def test_quantized_embeddings_of_mlx_are_read() -> None:
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as nn

    theirs = nn.QuantizedEmbedding(64, 128)
    ours = breccia.from_foreign(theirs)
    w = mx.dequantize(theirs.weight, theirs.scales, theirs.biases, theirs.group_size, theirs.bits, dtype=mx.float32)
    assert np.array_equal(np.asarray(breccia.dequantize(ours)), np.asarray(w))


# ------------------------------------------------------------------------------------------------ compressed-tensors


SCHEMES = {
    "W4A16": breccia.INT4Scaling(scale_dtype="fp32"),
    "W8A16": breccia.INT8Scaling(group_size=128),
    "W8A8": breccia.INT8Scaling(),
    "FP8": breccia.Float8CurrentScaling(),
    "FP8_DYNAMIC": breccia.Float8RowScaling(),
    "FP8_BLOCK": breccia.Float8BlockScaling(block_m=128),
    "NVFP4": breccia.NVFP4BlockScaling(global_sense="divisor"),
    "MXFP4": breccia.MXFP4BlockScaling(scale_rule="even"),
    "MXFP8A16": breccia.MXFP8BlockScaling(),
}


def compressed(scheme: str) -> tuple[Any, Any]:
    """(a module that compressed-tensors compressed, the weight that it decompresses to)."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.model_compressors.model_compressor import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))
    model[0].weight.data = torch.from_numpy(numbers(128, 256))
    apply_quantization_config(model, QuantizationConfig(config_groups={"group": preset_name_to_scheme(scheme, ["Linear"])}))
    layer = model[0]
    weight, args = layer.weight.data, layer.quantization_scheme.weights
    if args.strategy == "tensor":
        tiles = weight.reshape(1, 1, -1)
    elif args.strategy == "block":
        tiles = weight.reshape(1, 128, 2, 128).movedim(1, 2).reshape(1, 2, -1)
    else:
        tiles = weight.reshape(128, -1, args.group_size or 256)
    low, high = tiles.amin(-1), tiles.amax(-1)
    whole = None
    if hasattr(layer, "weight_global_scale"):
        whole = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
        layer.weight_global_scale.data = whole
    scale, _ = calculate_qparams(low, high, args, global_scale=whole)
    layer.weight_scale.data = scale.reshape(layer.weight_scale.shape).to(layer.weight_scale.dtype)
    compressor = ModelCompressor()
    compressor.compress_model(model)
    values = torch.nn.Module()
    import copy

    twin = copy.deepcopy(model)
    compressor.decompress_model(twin)
    values = twin[0].weight.data
    return layer, values


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_of_compressed_modules_decode_to_what_the_library_decompresses(scheme: str) -> None:
    layer, values = compressed(scheme)
    ours = breccia.bridges.from_compressed_tensors(layer)
    assert ours.recipe == SCHEMES[scheme] and ours.shape == (128, 256)
    import torch

    assert torch.equal(breccia.dequantize(ours, out_dtype=str(values.dtype).removeprefix("torch.")), values)


def test_modules_that_are_not_compressed_are_refused() -> None:
    torch = pytest.importorskip("torch")
    from breccia_bridges.compressed_tensors import from_compressed_tensors

    layer = torch.nn.Linear(32, 32)
    with pytest.raises(DialectError, match=r"Linear \(torch .*has no quantization_scheme"):
        from_compressed_tensors(layer)
    args = SimpleNamespace(symmetric=True, num_bits=4, group_size=32)
    layer.quantization_scheme = SimpleNamespace(weights=args, format="pack-quantized")
    with pytest.raises(DialectError, match=r"lacks weight_packed, weight_scale, weight_shape; it has weight, bias"):
        from_compressed_tensors(layer)
    layer.quantization_scheme.format = "marlin-24"
    with pytest.raises(DialectError, match="in format 'marlin-24'; known are float-quantized"):
        from_compressed_tensors(layer)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4", "MXFP8A16"])
def test_broken_parameters_of_compressed_modules_are_typed_errors_that_name_class_and_version(scheme: str) -> None:
    import copy

    import torch

    from breccia_bridges.compressed_tensors import from_compressed_tensors

    layer, _ = compressed(scheme)
    for name, value in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
        for wrong in (value[:0], value[:-1], value.reshape(-1)[None], value.double()):
            found = copy.deepcopy(layer)
            delattr(found, name)
            found.register_buffer(name, wrong.detach())
            try:
                from_compressed_tensors(found)
            except DialectError as e:
                assert "Linear (torch " in str(e)
    bad = copy.deepcopy(layer)
    del bad.weight_scale
    with pytest.raises(DialectError, match=r"Linear \(torch .*in format '.*' lacks weight_scale; it has .*weight"):
        from_compressed_tensors(bad)
    bad.weight_scale = torch.nn.Parameter(torch.ones(3, 5), requires_grad=False)
    with pytest.raises(DialectError, match=r"Linear \(torch .*(\(3, 5\)|scales in torch.float32|dtype float32)"):
        from_compressed_tensors(bad)
