"""bitsandbytes' weights: packed here, read exactly, and every fault named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dialect_folders import PLAIN, Tensor, bytes_of, decoded, floats, folder, quantized, untyped, values

import breccia
from breccia import BrecciaError, CorruptFileError, DialectError, UnsupportedError

RNG = np.random.default_rng(8)
UP = "model.layers.0.mlp.up_proj.weight"
F32 = np.float32
_TWELFTHS = [0, 1 / 16, 8, 12, 4, 6, 2, 3]
#: bitsandbytes' tables, as FP32.
TABLES = {
    "nf4": np.array(breccia.codecs.NF4.values, F32),
    "fp4": np.array([sign * float(F32(n / 12)) or 0.0 for sign in (1, -1) for n in _TWELFTHS], F32),
}
STATE = ".quant_state.bitsandbytes__"


def four_bits(
    kind: str = "nf4", shape: tuple[int, ...] = (4, 64), block: int = 32, nested: int = 0, storage: str = "U8"
) -> tuple[dict[str, Tensor], np.ndarray]:
    """The parts of a weight by the ends of their names, and its numbers."""
    codes = RNG.integers(0, 16, shape, np.uint8)
    packed = (codes.reshape(-1)[::2] << 4 | codes.reshape(-1)[1::2]).reshape(-1, 1)
    if storage != "U8":
        packed = packed.reshape(-1).view(np.uint16 if storage == "BF16" else np.float32).reshape(-1, 1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    blocks = codes.size // block
    parts: dict[str, Tensor] = {"": (storage, packed), ".quant_map": ("F32", TABLES[kind])}
    if nested:
        coarse = RNG.uniform(0.1, 2, -(-blocks // nested)).astype(F32)
        table, inner = np.linspace(-1, 1, 256, dtype=F32), RNG.integers(0, 256, blocks, np.uint8)
        offset = F32(0.731)
        absmax = table[inner] * np.repeat(coarse, nested)[:blocks] + offset
        parts |= {".absmax": ("U8", inner), ".nested_absmax": ("F32", coarse), ".nested_quant_map": ("F32", table)}
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": float(offset)}
    else:
        absmax = RNG.uniform(0.01, 2, blocks).astype(F32)
        parts[".absmax"] = "F32", absmax
    parts[f"{STATE}{kind}"] = bytes_of(state)
    return parts, TABLES[kind][codes] * np.repeat(absmax, block).reshape(shape)


def eight_bits() -> tuple[dict[str, Tensor], np.ndarray]:
    codes, absmax = RNG.integers(-127, 128, (6, 16), np.int8), RNG.uniform(0.1, 60000, 6).astype(np.float16).astype(F32)
    parts: dict[str, Tensor] = {
        "weight": ("I8", codes),
        "SCB": ("F32", absmax),
        "weight_format": ("U8", np.asarray(0, np.uint8)),
    }
    return parts, (codes * absmax[:, None]) * F32(7.874015718698502e-3)


def named(parts: dict[str, Tensor], name: str = UP) -> dict[str, Tensor]:
    return {name + end: tensor for end, tensor in parts.items()}


def save(path: Path, parts: dict[str, Tensor], **settings: Any) -> Path:
    name = UP.removesuffix("weight") if "SCB" in parts else UP
    return folder(path, PLAIN | named(parts, name), quantized("bitsandbytes", **settings))


def read(path: Path, parts: dict[str, Tensor], **settings: Any) -> np.ndarray:
    (stored,) = values(save(path, parts, **settings)).values()
    return decoded(stored)


@pytest.mark.parametrize("nested", (0, 4))
@pytest.mark.parametrize("storage", ("U8", "BF16", "F32"))
@pytest.mark.parametrize("kind", ("nf4", "fp4"))
def test_four_bits_are_read_exactly(tmp_path: Path, kind: str, storage: str, nested: int) -> None:
    parts, expected = four_bits(kind, nested=nested, storage=storage)
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
    (stored,) = values(save(tmp_path, parts, **config)).values()
    assert stored.form.recipe == breccia.recipe("nf4" if kind == "nf4" else "bnb_fp4", block_size=32)
    assert np.array_equal(decoded(stored), expected)


def test_experts_and_weights_of_other_names_are_read_beside_each_other(tmp_path: Path) -> None:
    names = {"experts.gate_up_proj": (2, 3, 64), "head.weight": (5, 32)}
    cases = {name: four_bits(shape=shape, nested=3) for name, shape in names.items()}
    tensors = {n: tensor for name, (parts, _) in cases.items() for n, tensor in named(parts, name).items()}
    found = values(folder(tmp_path, PLAIN | tensors, {"quantization_config": {"load_in_4bit": True}}))
    assert set(found) == set(names)
    for name, (_, expected) in cases.items():
        assert np.array_equal(decoded(found[name]), expected)


@pytest.mark.parametrize("largest", [0.1, 1e6])
def test_an_absmax_that_fp16_has_not_is_held_in_fp32(largest: float, tmp_path: Path) -> None:
    parts, _ = eight_bits()
    absmax = np.linspace(largest / 3, largest, 6, dtype=F32)
    (stored,) = values(save(tmp_path, parts | {"SCB": ("F32", absmax)}, load_in_8bit=True)).values()
    assert stored.form.recipe == breccia.recipe("bnb_int8", scale_dtype="fp32")
    assert np.array_equal(decoded(stored), (parts["weight"][1] * absmax[:, None]) * F32(7.874015718698502e-3))
    assert breccia.recipe("bnb_int8").format.fingerprint() != stored.form.recipe.format.fingerprint()
    assert "scale_dtype" not in breccia.recipe("bnb_int8").to_json(), "files of before have no such field"


def test_eight_bits_are_read_with_both_roundings_of_bitsandbytes(tmp_path: Path) -> None:
    parts, expected = eight_bits()
    (stored,) = values(save(tmp_path, parts, load_in_8bit=True)).values()
    assert stored.name == UP and stored.form.recipe == breccia.recipe("bnb_int8")
    assert np.array_equal(decoded(stored), expected)
    scale = parts["SCB"][1][:, None] * F32(1 / 127)
    assert not np.array_equal(parts["weight"][1] * scale, expected)
    assert np.array_equal(read(tmp_path, parts | {"SCB": ("F32", parts["SCB"][1][:, None])}), expected)
    assert np.array_equal(read(tmp_path, {end: part for end, part in parts.items() if end != "weight_format"}), expected)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    (
        ({"SCB": floats("F32", [np.nan] * 6)}, DialectError, "'SCB' has 6 scales that are not finite"),
        ({"SCB": floats("F16", [1] * 6)}, DialectError, "'SCB' is F16; bitsandbytes has F32 there"),
        ({"SCB": floats("F32", [1] * 5)}, DialectError, "'SCB' has shape [5]; its other parts need [6] or [6, 1]"),
        ({"weight_format": ("U8", np.asarray(2, np.uint8))}, UnsupportedError, "its codes are in the order 2 of old releases"),
        ({"weight": ("I8", np.ones(6, np.int8))}, DialectError, "its codes have shape 6; a weight of LLM.int8() is a matrix"),
    ),
)
def test_a_fault_of_eight_bits_is_named(
    tmp_path: Path, change: dict[str, Tensor], kind: type[BrecciaError], message: str
) -> None:
    with pytest.raises(kind) as e:
        read(tmp_path, eight_bits()[0] | change)
    assert f"{UP} (bitsandbytes): {message}" in str(e.value)


def state(**changes: Any) -> dict[str, Tensor]:
    listed = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [4, 64]} | changes
    return {f"{STATE}nf4": bytes_of({key: item for key, item in listed.items() if item != "absent"})}


NESTED = {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.5}


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    (
        ({f"{STATE}nf4": bytes_of("{")}, DialectError, f"'{STATE}nf4' holds JSON in bytes; they are not ("),
        ({f"{STATE}nf4": bytes_of([])}, DialectError, f"'{STATE}nf4' has quant_type 'nf4', a blocksize and a shape; got "),
        (state(quant_type="fp4"), DialectError, f"'{STATE}nf4' has quant_type 'nf4', a blocksize and a shape; got "),
        (state(blocksize=48), DialectError, "its blocksize is 48; bitsandbytes has 32, 64, 128, 256, 512, 1024, 2048, 4096."),
        (state(shape=[8, 32], blocksize=64), UnsupportedError, "its shape 8x32 has blocks of 64 over its flattened values"),
        (state(shape=[256]), UnsupportedError, "its shape 256 has blocks of 32 over its flattened values"),
        (state(shape=[5, 64]), DialectError, "its codes are U8 of shape 128x1; shape 5x64 needs half as many bytes as numbers"),
        (state(**NESTED), DialectError, "'.absmax' is F32 with no nested parts, and the quant_state has a nested_blocksize"),
        (
            state(**NESTED | {"nested_offset": "odd"}),
            DialectError,
            f"'{STATE}nf4' has nested_blocksize, a finite nested_offset, and nested_dtype 'float32'; got ",
        ),
        ({".absmax": floats("F32", [1] * 7)}, DialectError, "'.absmax' has shape [7]; its other parts need [8]"),
        ({".absmax": floats("F32", [np.inf] * 8)}, DialectError, "'.absmax' has 8 scales that are not finite"),
        (
            {".absmax": ("U8", np.ones(8, np.uint8))},
            DialectError,
            "'.absmax' is U8 with no nested parts, and the quant_state ",
        ),
        ({".quant_map": ("F32", TABLES["fp4"])}, DialectError, "'.quant_map' has other numbers than bitsandbytes' table"),
        ({".quant_map": floats("F16", TABLES["nf4"])}, DialectError, "'.quant_map' is F16; bitsandbytes has F32 there"),
        (
            {f"{STATE}fp4": bytes_of({})},
            DialectError,
            f"it has 2 quant_states; a weight has one, named {STATE}nf4 or ",
        ),
    ),
)
def test_a_fault_of_four_bits_is_named(
    tmp_path: Path, change: dict[str, Tensor], kind: type[BrecciaError], message: str
) -> None:
    with pytest.raises(kind) as e:
        read(tmp_path, four_bits()[0] | change)
    assert f"{UP} (bitsandbytes): {message}" in str(e.value)


def test_parts_that_are_missing_and_configs_that_disagree_are_named(tmp_path: Path) -> None:
    parts, _ = four_bits(nested=4)

    def without(end: str) -> dict[str, Tensor]:
        return {other: tensor for other, tensor in parts.items() if other != end}

    with pytest.raises(DialectError, match=r"it has 0 quant_states; a weight has one"):
        read(tmp_path, without(f"{STATE}nf4"))
    with pytest.raises(DialectError, match=r"no file has its '\.absmax'"):
        read(tmp_path, without(".absmax"))
    with pytest.raises(DialectError, match=r"no file has its '\.quant_map'"):
        read(tmp_path, without(".quant_map"))
    with pytest.raises(DialectError, match=r"'\.absmax' is U8 with '\.nested_absmax', and the quant_state has a nested_bl"):
        read(tmp_path, without(".nested_quant_map"))
    bare = named(without(""), "head.weight") | named(parts)
    with pytest.raises(CorruptFileError, match=r"'head.weight.absmax' is a part of bitsandbytes without the others: no file"):
        values(folder(tmp_path, bare, quantized("bitsandbytes")))
    with pytest.raises(DialectError, match=r"says 'nf4', and the config says bnb_4bit_quant_type 'fp4'"):
        read(tmp_path, parts, load_in_4bit=True, bnb_4bit_quant_type="fp4")


@pytest.mark.parametrize("nested", (0, 4))
def test_faults_of_files_are_typed_errors(tmp_path: Path, nested: int) -> None:
    assert untyped(four_bits(nested=nested)[0], lambda parts: save(tmp_path, parts)) == []
    assert untyped(eight_bits()[0], lambda parts: save(tmp_path, parts)) == []
