"""HQQ's weights: packed here as hqq packs them, read exactly in every width and along both axes; others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dialect_folders import NUMBERS, PLAIN, Tensor, decoded, floats, folder, numbers, quantized, untyped, values

import breccia
from breccia import BrecciaError, DialectError, UnsupportedError
from breccia_bridges.recipes import RoundedIntScaling
from breccia_bridges.safetensors_file import DTYPES

RNG = np.random.default_rng(0)
UP = "model.layers.0.mlp.up_proj"
NAMES = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
WIDTHS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 8, 6: 8, 8: 8}


def text(letters: str) -> Tensor:
    return "U8", np.frombuffer(letters.encode(), np.uint8)


def packed(rows: np.ndarray, width: int) -> np.ndarray:
    """The first part of the rows in the highest bits; ten codes of 3 bits to a word, after rows of zeros."""
    count, dtype = (10, np.uint32) if width == 3 else (8 // width, np.uint8)
    rows = np.concatenate([rows, np.zeros((-len(rows) % count, rows.shape[1]), np.uint8)]).astype(dtype)
    items = np.zeros((len(rows) // count, rows.shape[1]), dtype)
    for part in np.split(rows, count):
        items = items << dtype(width) | part
    return items


def weight(
    bits: int = 4, axis: int = 1, shape: tuple[int, int] = (16, 24), size: int = 8, dtype: str = "BF16"
) -> tuple[dict[str, Tensor], np.ndarray, np.ndarray, np.ndarray]:
    """The tensors of a layer; its codes, and each one's zero-point and scale, (N, K)."""
    codes = RNG.integers(0, 1 << bits, shape).astype(np.uint8)
    rows = codes.reshape((-1, size) if axis else (size, -1))
    of_groups = (len(rows), 1) if axis else (1, rows.shape[1])
    scale, zero = floats(dtype, RNG.uniform(0.01, 1, of_groups)), floats(dtype, RNG.uniform(0, 1 << bits, of_groups))
    width = WIDTHS[bits]
    items = packed(rows, width)
    tensors: dict[str, Tensor] = {
        "W_q": ("I32", items.view(np.int32)) if width == 3 else ("U8", items),
        "scale": scale,
        "zero": zero,
        "shape": ("I64", np.array(shape)),
        "packing": text(NAMES[width]),
        "unpack_view_dtype": text("torch.int32" if width == 3 else "torch.uint8"),
        "compute_dtype": text("torch.bfloat16"),
    }
    tensors |= {end: ("I32", np.asarray(n, np.int32)) for end, n in (("nbits", bits), ("axis", axis), ("group_size", size))}
    flags = {"channel_wise": 1, "optimize": 1, "round_zero": 0, "view_as_float": 0, "quant_scale": 0, "quant_zero": 0}
    flags |= {"offload_meta": 0, "encoded_state_dict": 1, "stores_quant_config": 1}
    tensors |= {end: ("U8", np.asarray(n, np.uint8)) for end, n in flags.items()}
    z, s = (np.broadcast_to(numbers(x), rows.shape).reshape(shape) for x in (zero, scale))
    return tensors, codes, z, s


def config(**settings: Any) -> dict[str, Any]:
    params = {"nbits": 4, "group_size": 8, "axis": 1}
    return quantized("hqq", quant_config={"weight_quant_params": params}, skip_modules=["lm_head"], **settings)


def save(path: Path, tensors: dict[str, Tensor], listed: Any = None) -> Path:
    return folder(path, PLAIN | {f"{UP}.{end}": tensor for end, tensor in tensors.items()}, listed)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width_is_read_exactly(bits: int, axis: int, with_config: bool, tmp_path: Path) -> None:
    tensors, codes, zero, scale = weight(bits, axis)
    (stored,) = values(save(tmp_path, tensors, config() if with_config else None)).values()
    assert stored.name == f"{UP}.weight" and stored.shape == codes.shape and stored.axis == (-1 if axis else -2)
    fmt = stored.form.recipe.format
    assert fmt.element.name == f"UINT{bits}" and fmt.offset == "float_zero_point" and fmt.precision == "fp32"
    assert np.array_equal(decoded(stored), (codes - zero) * scale)


def test_groups_of_axis_0_have_rows_apart(tmp_path: Path) -> None:
    tensors, codes, zero, scale = weight(axis=0, shape=(24, 6), size=8)
    (stored,) = values(save(tmp_path, tensors)).values()
    assert stored.layout == breccia.PerGroupIndex(tuple(range(3)) * 8, 3)
    tensors, codes, zero, scale = weight(axis=0, shape=(8, 6), size=8)
    (stored,) = values(save(tmp_path, tensors)).values()
    assert stored.layout == breccia.PerBlockK(8), "a group is a whole column"
    assert np.array_equal(decoded(stored), (codes - zero) * scale)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_codes_viewed_as_floats_are_the_same_bytes(dtype: str, tmp_path: Path) -> None:
    for bits in (3, 4):
        tensors, codes, zero, scale = weight(bits, dtype=dtype)
        items = tensors["W_q"][1]
        tensors |= {"W_q": (dtype, items.view(DTYPES[dtype][1])), "view_as_float": ("U8", np.asarray(1, np.uint8))}
        assert values(save(tmp_path, tensors)) == {}, "a float W_q may be anything, without a config"
        (stored,) = values(save(tmp_path, tensors, config())).values()
        assert np.array_equal(decoded(stored), (codes - zero) * scale)


@pytest.mark.parametrize(("dtype", "wanted"), [("BF16", "bfloat16"), ("F16", "torch.float16")])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_caller_gets_the_roundings_of_a_layer_in_half_precision(dtype: str, wanted: str, axis: int, tmp_path: Path) -> None:
    tensors, codes, zero, scale = weight(8, axis, dtype=dtype)
    (stored,) = values(save(tmp_path, tensors, config(compute_dtype=wanted))).values()
    half = NUMBERS.get(dtype, np.float16)
    shifted = (codes - zero).astype(half)
    expected = (shifted.astype(np.float32) * scale).astype(half).astype(np.float32)
    assert np.array_equal(decoded(stored), expected) and not np.array_equal(expected, (codes - zero) * scale)
    assert stored.form.recipe == RoundedIntScaling(8, 8, {"BF16": "bf16", "F16": "fp16"}[dtype], "float_zero_point")
    (plain,) = values(save(tmp_path, tensors, config(compute_dtype="float32"))).values()
    assert np.array_equal(decoded(plain), (codes - zero) * scale)
    other = values(save(tmp_path, tensors, config(compute_dtype="float16" if dtype == "BF16" else "bfloat16")))
    with pytest.raises(DialectError, match=r"compute_dtype is '\w+', and its scales are in \w+: hqq would round them\. Set"):
        _ = other[f"{UP}.weight"].form


def test_the_codes_0_to_2_of_1_58_bits(tmp_path: Path) -> None:
    tensors, codes, zero, scale = weight(2)
    tensors["nbits"] = ("F32", np.asarray(1.58, np.float32))
    (stored,) = values(save(tmp_path, tensors)).values()
    assert np.array_equal(decoded(stored), (codes - zero) * scale)


def test_biases_beside_a_weight_are_tensors_of_their_own(tmp_path: Path) -> None:
    tensors, *_ = weight()
    checkpoint = breccia.bridges.load_checkpoint(save(tmp_path, tensors | {"bias": floats("BF16", np.ones(16))}))
    assert set(checkpoint) == {*PLAIN, f"{UP}.weight", f"{UP}.bias"} and checkpoint.dialects == ["hqq"]


SCALAR = np.asarray(1, np.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"nbits": None}, DialectError, "no file has its 'nbits'. Download"),
        ({"scale": None, "shape": None}, DialectError, "no file has its 'scale', 'shape'. Download"),
        ({"nbits": ("I32", 7 * SCALAR)}, DialectError, "nbits is 7; hqq has 1, 1.58, 2, 3, 4, 5, 6, 8"),
        ({"nbits": ("F16", np.float16(4))}, DialectError, "'nbits' is one number; it is F16"),
        ({"nbits": ("F32", np.float32(np.nan))}, DialectError, "'nbits' is nan"),
        ({"axis": ("I32", 2 * SCALAR)}, DialectError, "axis is 0 or 1, and group_size positive; got 2 and 8"),
        ({"group_size": ("I32", 0 * SCALAR)}, DialectError, "got 1 and 0"),
        ({"group_size": ("I32", 5 * SCALAR)}, DialectError, "its shape [16, 24] has no whole groups of 5"),
        ({"shape": ("I64", np.array([16, -24]))}, DialectError, "its shape [16, -24] has no whole groups of 8"),
        ({"shape": ("F32", np.ones(2, np.float32))}, DialectError, "'shape' is integers; it is F32"),
        ({"channel_wise": ("U8", np.uint8(0))}, UnsupportedError, "it has one scale for all values (channel_wise is false)"),
        (
            {"quant_scale": ("U8", np.uint8(1))},
            UnsupportedError,
            "hqq gave up: it has quant_scale or quant_zero",
        ),
        (
            {"scale": None, "scale_q": ("U8", np.ones(4, np.uint8))},
            UnsupportedError,
            "which hqq gave up: it has scale_q",
        ),
        ({"W_q": ("I32", np.ones((24, 8), np.int32))}, DialectError, "'W_q' of 4 bits is U8; it is I32"),
        ({"W_q": ("U8", np.ones((23, 8), np.uint8))}, DialectError, "needs 24x8 items of 1 bytes"),
        (
            {"zero": floats("F16", np.ones((48, 1)))},
            DialectError,
            "'scale' is BF16 and 'zero' F16; both are F32 or",
        ),
        ({"scale": floats("BF16", np.ones((48, 2)))}, DialectError, "'scale' has shape [48, 2]; its other parts need [48, 1]"),
        ({"zero": floats("BF16", np.full((48, 1), np.nan))}, DialectError, "'zero' has 48 scales that are not finite"),
    ],
)
def test_what_is_no_hqq_weight_is_refused(
    change: dict[str, Tensor | None], error: type[BrecciaError], message: str, tmp_path: Path
) -> None:
    tensors = {end: tensor for end, tensor in {**weight()[0], **change}.items() if tensor is not None}
    with pytest.raises(error) as caught:
        (stored,) = values(save(tmp_path, tensors, config())).values()
        stored.tensor()
    assert f"{UP}.weight (HQQ): " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(("axis", "shape", "size", "shared"), [(1, (16, 24), 48, "rows"), (0, (4, 24), 8, "columns")])
def test_groups_over_several_rows_are_refused(
    axis: int, shape: tuple[int, int], size: int, shared: str, tmp_path: Path
) -> None:
    tensors, *_ = weight(axis=axis, shape=shape, size=size)
    with pytest.raises(UnsupportedError, match=f"groups of {size} over its flattened values, which share {shared} in part: no"):
        _ = next(iter(values(save(tmp_path, tensors)).values())).form


def test_codes_beyond_a_width_are_refused(tmp_path: Path) -> None:
    tensors, *_ = weight(6)
    tensors["W_q"] = ("U8", np.full((48, 8), 64, np.uint8))
    with pytest.raises(DialectError, match="'W_q' has codes up to 64, beyond 6 bits"):
        next(iter(values(save(tmp_path, tensors)).values())).tensor()


@pytest.mark.leftover
@pytest.mark.parametrize("axis", [0, 1])
def test_damaged_tensors_raise_breccias_errors(axis: int, tmp_path: Path) -> None:
    assert untyped(weight(axis=axis)[0], lambda tensors: save(tmp_path, tensors, config())) == []


def test_values_are_those_of_hqq_in_every_dtype() -> None:
    """Of one group, by hqq's own steps in ml_dtypes' arithmetic, which rounds as torch's does."""
    zero, scale = (np.array(x, ml_dtypes.bfloat16) for x in (7.09375, 0.0123))
    codes: Any = np.arange(16, dtype=np.uint8)
    theirs = (codes.astype(ml_dtypes.bfloat16) - zero) * scale
    recipe = RoundedIntScaling(4, 16, "bf16", "float_zero_point")
    data = (codes[::2] | codes[1::2] << 4).reshape(1, 8)
    parts = [x.reshape(1, 1).view(np.uint16) for x in (scale, zero)]
    st = breccia.from_buffer(data, parts[0], recipe, breccia.PerBlockK(16), parts[1], shape=(1, 16))
    assert np.array_equal(breccia.dequantize(st)[0], theirs.astype(np.float32))
