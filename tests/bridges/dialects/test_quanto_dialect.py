"""quanto's weights: written here, read exactly; packed types of a length of rows that the caller knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_folders import NUMBERS, PLAIN, Tensor, decoded, floats, folder, numbers, quantized, untyped, values
from dialect_values import digest
from golden_dialects import unpacked

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
    (
        ("I8", "int8", "int8"),
        ("F8_E4M3", "float8", "fp8_row"),
        ("F8_E5M2", "float8_e5m2", "fp8_row,fp8_format=E5M2"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz", "fp8_row,fp8_format=E4M3FNUZ"),
    ),
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
    with pytest.raises(DialectError, match=rf"{UP}\.weight \(quanto\): its settings are 'qint8', not an object\. Download"):
        _ = next(iter(values(folder(tmp_path, tensors, quanto_qmap={UP: "qint8"})).values())).form
    with pytest.raises(UnsupportedError, match=r"quanto_qmap\.json is 'quanto'; but no tensor is quantized"):
        values(folder(tmp_path, PLAIN, quanto_qmap=QMAP))


def test_weights_without_a_config_are_recognized(tmp_path: Path) -> None:
    tensors = weight()
    (stored,) = values(folder(tmp_path, tensors)).values()
    assert np.array_equal(decoded(stored), expected(tensors))


def packed(bits: int = 4, dtype: str = "BF16", shape: tuple[int, int] = (6, 32), size: int = 16) -> tuple[Any, np.ndarray]:
    """The tensors of a packed weight, and its values with quanto's two roundings."""
    codes = RNG.integers(0, 1 << bits, shape).astype(np.uint8).reshape(-1, size)
    scale, shift = (floats(dtype, RNG.uniform(0.01, 1, (len(codes), 1))) for _ in range(2))
    rows = np.concatenate([codes, np.zeros((-len(codes) % (8 // bits), size), np.uint8)])
    items = np.zeros((len(rows) * bits // 8, size), np.uint8)
    for n, part in enumerate(np.split(rows, 8 // bits)):
        items |= part << bits * n
    half = NUMBERS.get(dtype, np.float16 if dtype == "F16" else np.float32)
    product = (numbers(scale) * codes).astype(half).astype(np.float32)
    values = (product - numbers(shift)).astype(half).astype(np.float32)
    parts = {"_data._data": ("U8", items), "_scale": scale, "_shift": shift}
    return {f"{UP}.weight.{end}": tensor for end, tensor in parts.items()}, values.reshape(shape)


@pytest.mark.parametrize("shape", [(6, 32), (3, 16)])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bits", [2, 4])
def test_packed_types_are_read_with_the_roundings_of_quanto(bits: int, dtype: str, shape: Any, tmp_path: Path) -> None:
    tensors, x = packed(bits, dtype, shape)
    qmap = {UP: {"weights": f"qint{bits}", "activations": "none", "in_features": shape[1]}}
    (stored,) = values(folder(tmp_path, PLAIN | tensors, quanto_qmap=qmap)).values()
    assert stored.shape == shape and np.array_equal(decoded(stored), x)
    assert stored.form.recipe.format.precision == {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}[dtype]


def test_the_packed_weights_that_quanto_wrote_decode_to_its_values(tmp_path: Path) -> None:
    path, record = unpacked("quanto_qint4", tmp_path)
    shapes = {name.removesuffix(".weight"): value["shape"] for name, value in record["values"].items()}
    entries = {name: {"weights": "qint4", "in_features": shape[1]} for name, shape in shapes.items()}
    (path / "quanto_qmap.json").write_text(json.dumps(entries))
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    found = values(path)
    for name, value in record["values"].items():
        assert digest(decoded(found[name])) == value["sha256"] and found[name].form.recipe.name == "int_rounded"


@pytest.mark.parametrize(
    ("change", "settings", "kind", "message"),
    (
        ({}, {}, UnsupportedError, 'no file says how long its rows are: it is 192 codes in groups of 16. Add "in_features"'),
        ({}, {"in_features": 24}, DialectError, "in_features is 24; 12 groups of 16 are rows of a multiple of 16"),
        ({}, {"in_features": 128}, DialectError, "in_features is 128; 12 groups of 16 are rows"),
        ({}, {"in_features": "32"}, DialectError, "in_features is '32'; 12"),
        ({}, {"weights": "int2"}, DialectError, "its tensors are qint4, and the config says weights 'int2'"),
        (
            {"_shift": ("I8", np.ones((12, 1), np.int8))},
            {"in_features": 32},
            UnsupportedError,
            "'._shift' is I8 and '._scale' BF16",
        ),
        (
            {"_shift": floats("BF16", np.ones(12))},
            {"in_features": 32},
            DialectError,
            "'._shift' has shape [12]; its other parts",
        ),
        (
            {"_scale": floats("BF16", np.ones((9, 1)))},
            {},
            DialectError,
            "'._data._data' has 6 rows and '._scale' shape 9x1; qint4",
        ),
        ({"_scale": ("I32", np.ones((12, 1), np.int32))}, {}, DialectError, "'._scale' is I32; quanto has F32 or BF16 or F16"),
        (
            {"_data._data": ("I8", np.ones((6, 16), np.int8))},
            {},
            DialectError,
            "'._data._data' is I8 of shape 6x16; quanto has U8",
        ),
        (
            {"_scale": floats("BF16", np.full((12, 1), np.inf))},
            {"in_features": 32},
            DialectError,
            "'._scale' has 12 scales that",
        ),
    ),
)
def test_packed_types_that_contradict_themselves_are_refused(
    tmp_path: Path, change: Any, settings: Any, kind: type[BrecciaError], message: str
) -> None:
    tensors = packed()[0] | {f"{UP}.weight.{end}": tensor for end, tensor in change.items()}
    with pytest.raises(kind) as e:
        (stored,) = values(folder(tmp_path, tensors, quantized("quanto", **{"weights": "int4", **settings}))).values()
        stored.tensor()
    assert f"{UP}.weight (quanto): {message}" in str(e.value)


@pytest.mark.leftover
def test_damaged_packed_tensors_raise_breccias_errors(tmp_path: Path) -> None:
    listed = quantized("quanto", weights="int4", in_features=32)
    assert untyped(packed()[0], lambda tensors: folder(tmp_path, tensors, listed)) == []


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
            "float8",
            DialectError,
            "'._data' is F8_E4M3FNUZ, and the config says weights 'float8'",
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
