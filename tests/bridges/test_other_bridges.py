"""bitsandbytes, qwix, MLX layers and compressed modules: what the libraries make decodes to their own floats, and returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from broken import untyped
from in_frameworks import convert

import breccia
from breccia import DialectError, UnsupportedError, bytes_equal

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.covering(1, 2)]


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


#: bitsandbytes' types and the recipe of each with blocks of 64.
KINDS = {"nf4": "nf4", "fp4": "bnb_fp4"}
both = pytest.mark.parametrize("kind", KINDS)


def every_byte() -> np.ndarray:
    """Codes of a weight of shape (64, 256), with each byte 32 times."""
    return ((np.arange(64)[:, None] * 67 + np.arange(128)) % 256).astype(np.uint8).reshape(-1, 1)


@pytest.mark.long
@both
@pytest.mark.parametrize("block", (64, 128))
@pytest.mark.parametrize("nested", (False, True))
def test_4_bit_weights_of_bitsandbytes_decode_to_its_floats(bnb: Any, kind: str, nested: bool, block: int) -> None:
    import torch

    theirs = params(bnb, kind, nested=nested, block=block)
    ours = breccia.from_foreign(theirs)
    assert ours.recipe == breccia.recipe(KINDS[kind], block_size=block) and ours.shape == (64, 256)
    assert torch.equal(breccia.dequantize(ours), bnb.functional.dequantize_4bit(theirs.data, theirs.quant_state))


@pytest.mark.long
@both
def test_experts_and_adversarial_weights_of_bitsandbytes_decode_to_its_floats(bnb: Any, kind: str) -> None:
    """Three dimensions; zeros, numbers near the ends of FP32, one large number among small ones, NaN and Inf."""
    import torch

    x = torch.from_numpy(numbers(4, 8, 128))
    x[0, 0], x[0, 1], x[0, 2], x[1, 0, 5], x[1, 1, 70] = 0.0, -0.0, 1e-37 * x[0, 2], 1e6, 1e-30
    x[2] *= 1e38
    x[3, 0, 3], x[3, 1, 64], x[3, 2, :] = torch.nan, torch.inf, -torch.inf
    data, state = bnb.functional.quantize_4bit(x, blocksize=64, quant_type=kind)
    ours = breccia.bridges.from_bitsandbytes(data, quant_state=state)
    expected = bnb.functional.dequantize_4bit(data, state)
    assert ours.shape == (4, 8, 128) and torch.equal(breccia.dequantize(ours).nan_to_num(7.0), expected.nan_to_num(7.0))
    back = breccia.to_foreign(ours, "bitsandbytes")
    assert torch.equal(back.data, data) and back.quant_state.shape == x.shape
    assert torch.equal(back.quant_state.absmax.view(torch.int32), state.absmax.view(torch.int32))


@pytest.mark.long
@both
def test_every_code_decodes_to_the_number_in_the_librarys_table(bnb: Any, kind: str) -> None:
    """Bits of FP32 numbers: FP4's second code for zero is +0, too."""
    import torch

    table = bnb.functional.get_4bit_type(kind, device="cpu")
    codec = breccia.recipe(KINDS[kind]).format.element
    assert codec.table == tuple(table.view(torch.int32).numpy().view(np.uint32).tolist())
    data = torch.arange(16, dtype=torch.uint8).repeat_interleave(32).reshape(-1, 1) * 17
    state = bnb.functional.QuantState(torch.ones(16), torch.Size((16, 64)), table, 64, kind, torch.float32)
    decoded = breccia.dequantize(breccia.bridges.from_bitsandbytes(data, quant_state=state))
    assert torch.equal(decoded, table[:, None].expand(16, 64))
    assert torch.equal(decoded, bnb.functional.dequantize_4bit(data, state))


@pytest.mark.long
@both
@pytest.mark.parametrize("storage", ("uint8", "bfloat16", "float32"))
@pytest.mark.parametrize("nested", (False, True))
def test_4_bit_weights_return_to_bitsandbytes(bnb: Any, kind: str, nested: bool, storage: str) -> None:
    import torch

    theirs = params(bnb, kind, nested)
    theirs.quant_storage = getattr(torch, storage)
    theirs.data = torch.from_numpy(every_byte()).reshape(-1).view(theirs.quant_storage).reshape(-1, 1)
    ours = breccia.from_foreign(theirs)
    back = breccia.to_foreign(ours, "bitsandbytes", like=theirs)
    assert type(back) is type(theirs) and back.shape == theirs.shape and back.quant_storage == theirs.quant_storage
    assert torch.equal(back.data.view(torch.uint8), theirs.data.view(torch.uint8))
    found, expected = (p.quant_state.as_dict() for p in (back, theirs))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name
    assert bytes_equal(breccia.from_foreign(back), ours)
    plain = breccia.to_foreign(ours, "bitsandbytes")
    assert not plain.quant_state.nested and torch.equal(plain.data, torch.from_numpy(every_byte()))
    decoded = [bnb.functional.dequantize_4bit(p.data, p.quant_state) for p in (back, theirs, plain)]
    assert torch.equal(decoded[0], decoded[1]) and torch.equal(decoded[0], decoded[2])


@pytest.mark.long
@both
def test_bitsandbytes_computes_with_the_weights_that_breccia_makes(bnb: Any, kind: str) -> None:
    import torch

    ours = breccia.cast(torch.from_numpy(numbers(64, 256)), KINDS[kind])
    made = breccia.to_foreign(ours, "bitsandbytes")
    assert torch.equal(bnb.functional.dequantize_4bit(made.data, made.quant_state), breccia.dequantize(ours))
    assert bytes_equal(breccia.from_foreign(made), ours)
    layer = bnb.nn.Linear4bit(256, 64, bias=False, quant_type=kind, compute_dtype=torch.float32)
    layer.weight = made
    x = torch.from_numpy(numbers(8, 256, seed=1))
    assert torch.equal(layer(x), torch.nn.functional.linear(x, breccia.dequantize(ours)))


@pytest.mark.long
def test_a_nested_absmax_of_other_scales_is_not_taken_over(bnb: Any) -> None:
    theirs = params(bnb, "fp4", nested=True)
    ours = breccia.from_foreign(params(bnb, "fp4"))
    back = breccia.to_foreign(ours, "bitsandbytes", like=theirs)
    assert not back.quant_state.nested and bytes_equal(breccia.from_foreign(back), ours)


@pytest.mark.long
@both
def test_a_weight_that_a_layer_has_packed_for_the_cpu_is_refused(bnb: Any, kind: str) -> None:
    """On processors with BF16 products, Linear4bit does this in its first product in eval mode; state_dict() undoes a part."""
    theirs = params(bnb, kind)
    theirs.data, _ = bnb.functional._convert_weight_packed_for_cpu(theirs.data, theirs.quant_state)
    with pytest.raises(DialectError, match=r"Params4bit \(bitsandbytes .*packing_format_for_cpu=True: .* before that"):
        breccia.from_foreign(theirs)
    theirs.data, _ = bnb.functional._convert_weight_packed_for_cpu_inverse(theirs.data, theirs.quant_state)
    with pytest.raises(DialectError, match=r"absmax of shape \(4, 64\); blocks of 64 need \(256,\)"):
        breccia.from_foreign(theirs)


@pytest.mark.long
def test_what_no_recipe_describes_is_refused(bnb: Any) -> None:
    import torch

    for kind in KINDS:
        with pytest.raises(DialectError, match="reach across rows"):
            breccia.from_foreign(params(bnb, kind, shape=(64, 96)))
    odd = params(bnb)
    odd.quant_state.quant_type = "int4"
    with pytest.raises(DialectError, match=r"Params4bit \(bitsandbytes .*quant_type='int4'; recipes exist for 'nf4' and 'fp4'"):
        breccia.from_foreign(odd)
    odd.quant_state.quant_type = "fp4"
    with pytest.raises(DialectError, match=r"is of type 'fp4' and has the table of another type: \[-1.0, -0.69"):
        breccia.from_foreign(odd)
    with pytest.raises(DialectError, match="has no quant_state: it is not quantized before it moves"):
        breccia.from_foreign(bnb.nn.Params4bit(torch.ones(64, 64), requires_grad=False))
    with pytest.raises(DialectError, match="bitsandbytes holds NF4 and its own FP4 in whole blocks"):
        breccia.to_foreign(breccia.cast(torch.ones(64, 64), "mxfp8"), "bitsandbytes")
    with pytest.raises(DialectError, match="in whole blocks .* this tensor is"):
        breccia.to_foreign(breccia.cast(torch.ones(64, 96), "bnb_fp4"), "bitsandbytes")
    with pytest.raises(DialectError, match=r"FP32 scales of blocks of a power of two, from 32; this recipe is .*block_size=16"):
        breccia.to_foreign(breccia.cast(torch.ones(64, 96), "bnb_fp4,block_size=16"), "bitsandbytes")


@pytest.mark.parametrize(("name", "field"), [("bnb_fp4", "block_size"), ("int4_bias", "group_size")])
@pytest.mark.parametrize("size", [0, -32])
def test_recipes_of_the_bridges_refuse_empty_blocks(name: str, field: str, size: int) -> None:
    with pytest.raises(breccia.RecipeError, match=f"{field} must be > 0, got {size}"):
        breccia.recipe(name, **{field: size})


@both
def test_bitsandbytes_is_read_by_attributes_without_the_library(kind: str) -> None:
    """Codes and absmax by hand: the first number of a byte is in its high nibble."""
    torch = pytest.importorskip("torch")
    from breccia_bridges.bitsandbytes import from_bitsandbytes

    codes = torch.arange(128, dtype=torch.uint8).reshape(2, 64) % 16
    data = (codes.reshape(-1)[::2] << 4 | codes.reshape(-1)[1::2]).reshape(-1, 1)
    state = SimpleNamespace(
        quant_type=kind, shape=(2, 64), blocksize=64, code=None, absmax=torch.tensor([2.0, 0.5]), nested=False
    )
    ours = from_bitsandbytes(data, quant_state=state)
    twelfths = [0, 1 / 16, 8, 12, 4, 6, 2, 3]
    table = torch.tensor(
        breccia.codecs.NF4.values if kind == "nf4" else [sign * float(np.float32(n / 12)) for sign in (1, -1) for n in twelfths]
    )
    assert torch.equal(breccia.dequantize(ours), table[codes.long()] * torch.tensor([[2.0], [0.5]]))


@pytest.mark.long
@both
@pytest.mark.parametrize("nested", (False, True))
def test_a_broken_state_of_bitsandbytes_is_a_typed_error_that_names_class_and_version(
    bnb: Any, kind: str, nested: bool
) -> None:
    from breccia_bridges.bitsandbytes import from_bitsandbytes

    def state() -> Any:
        return params(bnb, kind, nested=nested).quant_state

    data, names = params(bnb, kind, nested).data, ("quant_type", "shape", "blocksize", "code", "absmax", "offset", "state2")
    names = names if nested else names[:-2]
    assert untyped(state, names, lambda found: from_bitsandbytes(data, quant_state=found), "(") == []
    theirs = params(bnb, kind)
    theirs.quant_state.absmax = theirs.quant_state.absmax[:5]
    with pytest.raises(DialectError, match=r"Params4bit \(bits.* has absmax of shape \(5,\); blocks of 64 need \(256,\)"):
        breccia.from_foreign(theirs)
    theirs.quant_state.absmax = None
    with pytest.raises(DialectError, match=r"QuantState \(bitsandbytes .* has absmax=None, where this bridge reads an array"):
        breccia.from_foreign(theirs)
    theirs = params(bnb, kind, nested=True)
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


@pytest.mark.parametrize("name", [n if n == "mxfp8" else pytest.param(n, marks=pytest.mark.long) for n in QWIX])
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
    with pytest.raises(UnsupportedError, match="to_qwix takes a ScaledTensor of jax, got numpy; .*from_dlpack"):
        breccia.to_foreign(breccia.cast(numbers(32, 32), "mxfp8"), "qwix")


@pytest.mark.long
@pytest.mark.parametrize("name", ["int4", "mxfp4", "float8_e4m3fn in one"])
def test_a_broken_array_of_qwix_is_a_typed_error_that_names_class_and_version(name: str) -> None:
    theirs, names = qarray(name), ("qvalue", "scale", "zero_point", "qtype")

    class QArray(SimpleNamespace):
        __module__ = "qwix"

    def made() -> Any:
        return QArray(**{n: getattr(theirs, n) for n in names})

    assert untyped(made, names, breccia.bridges.from_qwix, "QArray (qwix ") == []


# ------------------------------------------------------------------------------------------------ integers by either name


@pytest.mark.parametrize(
    ("library", "framework", "named", "wide"),
    [
        ("torchao", "torch", "int8", "int,bits=8,group_size=null,scale_dtype=fp32"),
        ("torchao", "torch", "int4,group_size=32,symmetric=false", "int,group_size=32,symmetric=false"),
        ("qwix", "jax", "int4,group_size=32,scale_dtype=fp32", "int,group_size=32,scale_dtype=fp32"),
        ("mlx", "mlx", "int4,group_size=32,offset=bias", "int,group_size=32,offset=bias"),
        ("mlx", "mlx", "mlx_affine,bits=3", "int3,group_size=64,offset=bias"),
    ],
)
def test_integers_of_one_format_become_the_same_tensor_of_a_library(
    library: str, framework: str, named: str, wide: str
) -> None:
    pytest.importorskip(library)
    x = convert(framework, numbers(64, 128))
    theirs = [breccia.from_foreign(breccia.to_foreign(breccia.cast(x, spec), library)) for spec in (named, wide)]
    assert theirs[0].recipe == theirs[1].recipe == breccia.recipe(named) and bytes_equal(*theirs)


@pytest.mark.parametrize("library", ["torchao", "qwix", "mlx"])
def test_integers_of_a_width_that_a_library_lacks_are_refused(library: str) -> None:
    pytest.importorskip(library)
    framework = {"torchao": "torch", "qwix": "jax", "mlx": "mlx"}[library]
    st = breccia.cast(convert(framework, numbers(64, 128)), "int7,group_size=64,offset=bias")
    with pytest.raises(DialectError, match="INTScaling\\(bits=7|'int,bits=7"):
        breccia.to_foreign(st, library)


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
    "W4A16_ASYM": breccia.INT4Scaling(signed=False, scale_dtype="fp32", symmetric=False),
    "W2A16_ASYM": breccia.INTScaling(2, 128, False, "fp32", False),
    "W3A16": breccia.INTScaling(3, 128, scale_dtype="fp32"),
    "W3A16_ASYM": breccia.INTScaling(3, 128, False, "fp32", False),
    "W6A16": breccia.INTScaling(6, 128, scale_dtype="fp32"),
    "W8A16": breccia.INT8Scaling(group_size=128),
    "W8A16_ASYM": breccia.INT8Scaling(group_size=128, signed=False, symmetric=False),
    "W8A8": breccia.INT8Scaling(),
    "W8A8_ASYM": breccia.INT8Scaling(signed=False, symmetric=False),
    "FP8": breccia.Float8CurrentScaling(),
    "FP8_DYNAMIC": breccia.Float8RowScaling(),
    "FP8_BLOCK": breccia.Float8BlockScaling(block_m=128),
    "NVFP4": breccia.NVFP4BlockScaling(global_sense="divisor"),
    "MXFP4": breccia.MXFP4BlockScaling(scale_rule="even"),
    "MXFP6A16": breccia.MXFP6BlockScaling(),
    "MXFP8A16": breccia.MXFP8BlockScaling(),
}
#: Schemes in which one argument differs from a preset.
PRESETS = {"W8A16_ASYM": "W8A16", "W8A8_ASYM": "W8A8", "W3A16": "W4A16", "W6A16": "W4A16"} | dict.fromkeys(
    ("W2A16_ASYM", "W3A16_ASYM"), "W4A16_ASYM"
)


def compressed(scheme: str) -> tuple[Any, Any]:
    """(a module that compressed-tensors compressed, the weight that it decompresses to)."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.model_compressors.model_compressor import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))
    model[0].weight.data = torch.from_numpy(numbers(128, 256)) + (1 if "ASYM" in scheme else 0)
    given = preset_name_to_scheme(PRESETS.get(scheme, scheme), ["Linear"])
    given.weights.symmetric &= "ASYM" not in scheme
    if scheme.startswith("W"):
        given.weights.num_bits = int(scheme[1])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group": given}))
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
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    if not args.symmetric:
        layer.weight_zero_point.data = zero.reshape(layer.weight_zero_point.shape).to(layer.weight_zero_point.dtype)
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


def parameters(module: Any) -> dict[str, tuple[Any, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of each parameter."""
    import torch

    found = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    return {n: (p.dtype, tuple(p.shape), p.detach().contiguous().view(torch.uint8).numpy().tobytes()) for n, p in found.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_return_to_compressed_modules(scheme: str) -> None:
    """Into a copy of the module, and into a new layer with its weight, which the library decompresses to the same numbers."""
    import torch
    from compressed_tensors.compressors.base import decompress_module

    layer, values = compressed(scheme)
    before, ours = parameters(layer), breccia.bridges.from_compressed_tensors(layer)
    back = breccia.bridges.to_compressed_tensors(ours, like=layer)
    assert back is not layer and parameters(back) == parameters(layer) == before
    assert back.quantization_scheme == layer.quantization_scheme and back.quantization_status == layer.quantization_status
    bias = torch.arange(128.0)
    new = breccia.bridges.to_compressed_tensors(ours, bias=bias)
    assert bytes_equal(breccia.bridges.from_compressed_tensors(new), ours) and torch.equal(new.bias, bias)
    if scheme.startswith("W8A8"):  # integers are packed where the scheme has no activations
        assert new.quantization_scheme.format == "pack-quantized"
    else:
        weights = {name: part for name, part in before.items() if name.startswith("weight")}
        assert {name: part for name, part in parameters(new).items() if name != "bias"} == weights
    for made in (back, new):
        decompress_module(made)
        assert torch.equal(made.weight, values)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("int4,group_size=32,signed=false,symmetric=false,scale_dtype=bf16", (13, 96)),
        ("int8,signed=false,symmetric=false", (7, 37)),
        ("int8", (5, 37)),
        ("int,bits=1,signed=false,symmetric=false,group_size=null", (5, 19)),
        ("int2,group_size=null,scale_dtype=fp32", (3, 37)),
        ("int3,group_size=32,symmetric=false,scale_dtype=bf16", (5, 96)),
        ("int5,group_size=null,symmetric=false", (7, 5)),
        ("int7,group_size=null,scale_dtype=fp32", (3, 9)),
        ("int,bits=8,group_size=32", (4, 64)),
        ("fp8_row", (3, 37)),
        ("fp8_block,block_m=128", (300, 500)),
        ("fp8_block", (2, 256)),
        ("fp8_block", (3, 40)),
    ],
)
def test_compressed_tensors_decompresses_the_partial_words_and_blocks_that_breccia_makes(
    spec: str, shape: tuple[int, int]
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import decompress_module

    ours = breccia.cast(torch.from_numpy(numbers(*shape)), spec)
    made = breccia.bridges.to_compressed_tensors(ours)
    back = breccia.bridges.from_compressed_tensors(made)
    assert bytes_equal(breccia.requantize(back, ours.recipe), ours) and back.recipe.format == ours.recipe.format
    decompress_module(made)
    assert torch.equal(made.weight, breccia.dequantize(ours, out_dtype=made.weight.dtype))


def test_what_compressed_tensors_does_not_have_is_refused() -> None:
    torch = pytest.importorskip("torch")
    from breccia.bridges import from_compressed_tensors, to_compressed_tensors

    x = torch.from_numpy(numbers(128, 256))
    for spec in ("nvfp4", "fp8_row,fp8_format=E5M2", "int4,offset=bias,signed=false,symmetric=false", "bnb_fp4"):
        with pytest.raises(DialectError, match="compressed-tensors has matrices of integers .* this tensor is"):
            to_compressed_tensors(breccia.cast(x, spec))
    with pytest.raises(DialectError, match="in whole groups along K"):
        to_compressed_tensors(breccia.cast(x[:, :40], "mxfp8"))
    with pytest.raises(UnsupportedError, match="to_compressed_tensors takes a ScaledTensor of torch, got numpy"):
        to_compressed_tensors(breccia.cast(x.numpy(), "mxfp8"))
    layer, _ = compressed("FP8")
    ours = breccia.cast(x, "fp8_current")
    with pytest.raises(DialectError, match=r"Linear \(torch .*has a weight .*fp8_current.* this tensor is .*Requantize it to"):
        to_compressed_tensors(breccia.cast(x, "fp8_row"), like=layer)
    with pytest.raises(DialectError, match="pass one of like= and bias="):
        to_compressed_tensors(ours, like=layer, bias=torch.zeros(128))
    layer.weight_scale.data = layer.weight_scale.data.bfloat16()
    with pytest.raises(DialectError, match=r"has weight_scale of shape \(1,\) in torch.bfloat16, which does not hold this"):
        to_compressed_tensors(ours, like=layer)
    exact = to_compressed_tensors(from_compressed_tensors(layer), like=layer)
    assert parameters(exact) == parameters(layer)
    mixed, _ = compressed("W8A8")
    mixed.weight_scale.data = torch.full((1,), 0.5)
    exact = to_compressed_tensors(from_compressed_tensors(mixed), like=mixed)
    assert parameters(exact) == parameters(mixed)
    odd, _ = compressed("W4A16_ASYM")
    odd.weight_zero_point.data = odd.weight_zero_point.data[:3]
    with pytest.raises(DialectError, match=r"weight_zero_point of shape \(3, 2\) in torch.int32; 4 bits for scales of shape"):
        from_compressed_tensors(odd)
    odd, _ = compressed("W8A8_ASYM")
    odd.weight_zero_point.data = odd.weight_zero_point.data[:3]
    with pytest.raises(
        DialectError, match=r"weight_zero_point of shape \(3, 1\) in torch.int8; it is torch.int8, one for each"
    ):
        from_compressed_tensors(odd)


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


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "FP8"])
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
