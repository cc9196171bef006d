"""quanto's 8-bit weights: written here, read exactly; its packed types are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_folders import NUMBERS, PLAIN, Tensor, decoded, floats, folder, numbers, quantized, untyped, values

import breccia
from breccia import BrecciaError, CorruptFileError, DialectError, UnsupportedError

RNG = np.random.default_rng(4)
UP = "model.layers.0.mlp.up_proj"
QMAP = {UP: {"weights": "qint8", "activations": "none"}}


def weight(codes: str = "I8", scale: str = "BF16", shape: tuple[int, ...] = (6, 16)) -> dict[str, Tensor]:
    """Codes, and a scale for each row; with the scales of activations that quanto writes beside them."""
    data: Any = RNG.integers(-127, 128, shape, np.int8)
    if codes != "I8":
        data = (data.astype(np.float32) / 64).astype(NUMBERS[codes]).view(np.uint8)
    scales = floats(scale, RNG.uniform(0.001, 1, (shape[0], *(1 for _ in shape[1:]))))
    return {f"{UP}.weight._data": (codes, data), f"{UP}.weight._scale": scales, f"{UP}.input_scale": floats("BF16", 1.0)}


def expected(tensors: dict[str, Tensor]) -> np.ndarray:
    return numbers(tensors[f"{UP}.weight._data"]) * numbers(tensors[f"{UP}.weight._scale"])


def read(path: Path, tensors: dict[str, Tensor], weights: str = "int8") -> np.ndarray:
    (stored,) = values(folder(path, PLAIN | tensors, quantized("quanto", weights=weights))).values()
    return decoded(stored)


@pytest.mark.parametrize("scale", ("BF16", "F16", "F32"))
@pytest.mark.parametrize(
    ("codes", "weights", "recipe"),
    (("I8", "int8", "int8"), ("F8_E4M3", "float8", "fp8_row"), ("F8_E5M2", "float8_e5m2", "fp8_row,fp8_format=E5M2")),
)
def test_weights_are_read_exactly(tmp_path: Path, codes: str, weights: str, recipe: str, scale: str) -> None:
    tensors = weight(codes, scale)
    (stored,) = values(folder(tmp_path, PLAIN | tensors, quantized("quanto", weights=weights))).values()
    kind = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}[scale]
    assert stored.name == f"{UP}.weight"
    assert stored.form.recipe == (breccia.recipe("int8", scale_dtype=kind) if codes == "I8" else breccia.recipe(recipe))
    assert np.array_equal(decoded(stored), expected(tensors))


@pytest.mark.parametrize("codes", ("I8", "F8_E4M3"))
def test_convolutions_and_one_scale_for_all_are_read(tmp_path: Path, codes: str) -> None:
    weights = "int8" if codes == "I8" else "float8"
    kernel = weight(codes, shape=(4, 3, 2, 2))
    assert np.array_equal(read(tmp_path, kernel, weights), expected(kernel))
    single = weight(codes) | {f"{UP}.weight._scale": floats("BF16", 0.37)}
    assert np.array_equal(read(tmp_path, single, weights), expected(single))


def test_the_map_of_quanto_announces_it_and_says_the_type_of_each_module(tmp_path: Path) -> None:
    tensors = weight()
    (stored,) = values(folder(tmp_path, PLAIN | tensors, quanto_qmap=QMAP)).values()
    assert np.array_equal(decoded(stored), expected(tensors))
    (stored,) = values(folder(tmp_path, PLAIN | tensors, quantized("quanto", weights="int8"), quanto_qmap=QMAP)).values()
    assert np.array_equal(decoded(stored), expected(tensors))
    with pytest.raises(DialectError, match=r"'\._data' is I8, and the config says weights 'qfloat8'"):
        _ = next(iter(values(folder(tmp_path, tensors, quanto_qmap={UP: {"weights": "qfloat8"}})).values())).form
    with pytest.raises(CorruptFileError, match=rf"quanto_qmap\.json leaves {UP} as it is, but the files have"):
        _ = next(iter(values(folder(tmp_path, tensors, quanto_qmap={"head": {"weights": "qint8"}})).values())).form
    with pytest.raises(UnsupportedError, match=r"quanto_qmap\.json is 'quanto'; but no tensor is quantized"):
        values(folder(tmp_path, PLAIN, quanto_qmap=QMAP))


def test_weights_without_a_config_are_recognized(tmp_path: Path) -> None:
    tensors = weight()
    (stored,) = values(folder(tmp_path, tensors)).values()
    assert np.array_equal(decoded(stored), expected(tensors))


def test_packed_types_are_refused_with_the_reason(tmp_path: Path) -> None:
    tensors = {
        f"{UP}.weight._data._data": ("U8", np.ones((8, 16), np.uint8)),
        f"{UP}.weight._scale": floats("BF16", np.ones((16, 1))),
        f"{UP}.weight._shift": floats("BF16", np.ones((16, 1))),
    }
    with pytest.raises(UnsupportedError) as e:
        read(tmp_path, tensors, "int4")
    assert str(e.value).partition("safetensors: ")[2] == (
        f"{UP}.weight (quanto): it is one of quanto's packed types, qint4 or qint2: quanto computes code * scale - shift in "
        "the dtype of the scale and rounds after each step, which no format of ScaledTensor does. Load it with optimum-quanto "
        "and save each weight.dequantize(), or convert the original checkpoint."
    )


@pytest.mark.parametrize(
    ("change", "weights", "kind", "message"),
    (
        ({}, "float8", DialectError, "'._data' is I8, and the config says weights 'float8'"),
        ({"_data": ("U8", np.ones((6, 16), np.uint8))}, "int8", DialectError, "'._data' is U8; quanto has I8 or F8_E4M3 or"),
        ({"_scale": ("I32", np.ones((6, 1), np.int32))}, "int8", DialectError, "'._scale' is I32; quanto has F32 or BF16 or"),
        (
            {"_scale": floats("F32", np.ones((1, 16)))},
            "int8",
            DialectError,
            "'._scale' has shape [1, 16]; its other parts need",
        ),
        (
            {"_scale": floats("F32", np.full((6, 1), np.nan))},
            "int8",
            DialectError,
            "'._scale' has 6 scales that are not finite",
        ),
        ({"_data": ("I8", np.ones(6, np.int8))}, "int8", DialectError, "its codes have shape 6; a weight has two axes or more"),
        (
            {"_data": ("F8_E4M3FNUZ", np.ones((6, 16), np.uint8))},
            "float8_e4m3fnuz",
            UnsupportedError,
            "its codes are F8_E4M3FNUZ; ScaledTensors have E4M3 and E5M2 as F8_E4M3 and F8_E5M2",
        ),
    ),
)
def test_a_fault_is_named(
    tmp_path: Path, change: dict[str, Tensor], weights: str, kind: type[BrecciaError], message: str
) -> None:
    changed = weight() | {f"{UP}.weight.{end}": tensor for end, tensor in change.items()}
    with pytest.raises(kind) as e:
        read(tmp_path, changed, weights)
    assert f"{UP}.weight (quanto): {message}" in str(e.value)


def test_faults_of_files_are_typed_errors(tmp_path: Path) -> None:
    for codes in ("I8", "F8_E4M3"):
        assert untyped(weight(codes), lambda tensors: folder(tmp_path, tensors, quantized("quanto"))) == []
