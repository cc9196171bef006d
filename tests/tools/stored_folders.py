"""Folders of small checkpoints of other libraries, and what `recognized` makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import breccia
from breccia_bridges.checkpoint import checkpoint_files
from breccia_bridges.recognition import recognized
from breccia_bridges.safetensors_file import Container
from breccia_bridges.safetensors_writer import Writer
from breccia_bridges.stored import Stored

#: A dtype of a file, and an array of its bits.
Entry = tuple[str, np.ndarray]

RNG = np.random.default_rng(20)
#: The values of E2M1 codes.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def folder(path: Path, tensors: dict[str, Entry], quantization: Any = None, **files: Any) -> Path:
    """A folder of one file, with the quantization of config.json, and other JSON files by their names."""
    path.mkdir(exist_ok=True)
    with Writer(path / "model.safetensors", {name: (dtype, a.shape) for name, (dtype, a) in tensors.items()}) as writer:
        for name, (_, array) in tensors.items():
            writer.write(name, array)
    for name, listed in {"config": {"quantization_config": quantization} if quantization else None, **files}.items():
        if listed is not None:
            (path / f"{name}.json").write_text(json.dumps(listed))
    return path


def values(path: Path, source_dialect: str | None = None) -> dict[str, Stored]:
    """The values of a folder, by name."""
    return recognized(path, [Container(file) for file in checkpoint_files(path)], source_dialect)


def decoded(stored: Stored) -> np.ndarray:
    """The values of a tensor, and that its form says what it is."""
    st = stored.tensor()
    assert (st.recipe, tuple(st.shape)) == (stored.form.recipe, stored.shape)
    return np.asarray(breccia.dequantize(st))


def refusal(stored: Stored, error: type[breccia.BrecciaError]) -> breccia.BrecciaError:
    """The error of a value that cannot be read, which names it and its dialect."""
    with pytest.raises(error) as e:
        stored.tensor()
    assert f"{stored.name} ({stored.dialect.title}): " in str(e.value)
    return e.value


def floats(dtype: str, *shape: int) -> tuple[Entry, np.ndarray]:
    """Positive floats of about 1/100 in a dtype of a file, and their values."""
    x = RNG.uniform(0.5, 2, shape) / 100
    match dtype:
        case "F32" | "F16":
            array = x.astype(np.float32 if dtype == "F32" else np.float16)
            return (dtype, array), array.astype(np.float32)
        case "BF16":
            array = x.astype(ml_dtypes.bfloat16)
            return (dtype, array.view(np.uint16)), array.astype(np.float32)
        case _:
            exponents = RNG.integers(115, 123, shape, np.uint8)
            return (dtype, exponents), np.exp2(exponents.astype(np.float32) - 127)


def fp8(*shape: int, dtype: Any = ml_dtypes.float8_e4m3fn) -> tuple[Entry, np.ndarray]:
    """FP8 codes of finite numbers, and their values."""
    array = RNG.uniform(-100, 100, shape).astype(dtype)
    name = "F8_E4M3" if dtype is ml_dtypes.float8_e4m3fn else "F8_E5M2"
    return (name, array.view(np.uint8)), array.astype(np.float32)


def fp4(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """E2M1 codes of a shape, two to a byte, the first in the low bits; and their values."""
    codes = RNG.integers(0, 16, shape, np.uint8)
    return np.array(codes[..., 0::2] + 16 * codes[..., 1::2], np.uint8), E2M1[codes]


def spread(scale: np.ndarray, rows: int, columns: int, shape: tuple[int, ...]) -> np.ndarray:
    """Each scale for its block of rows and columns."""
    return np.repeat(np.repeat(scale, rows, -2), columns, -1)[..., : shape[-2], : shape[-1]]
