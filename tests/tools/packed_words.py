"""Checkpoints of packed integers as other libraries write them, packed by Python's integers, one code after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import breccia
from breccia_bridges.checkpoint import checkpoint_files
from breccia_bridges.recognition import recognized
from breccia_bridges.safetensors_file import Container
from breccia_bridges.safetensors_writer import Writer
from breccia_bridges.stored import Stored

#: A dtype of a file, and an array of its bits.
Tensor = tuple[str, np.ndarray]
#: Tensors of no dialect, which every checkpoint has.
PLAIN: dict[str, Tensor] = {
    "model.embed_tokens.weight": ("BF16", np.ones((4, 8), ml_dtypes.bfloat16).view(np.uint16)),
    "model.norm.weight": ("F32", np.ones(8, np.float32)),
}
_NAMES = {
    "float16": "F16",
    "float32": "F32",
    "bfloat16": "BF16",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
    "uint32": "U32",
}


def tensor(array: np.ndarray, dtype: str | None = None) -> Tensor:
    """An array with the dtype of the file that its own is."""
    name = dtype or _NAMES[array.dtype.name]
    return name, array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def words(codes: np.ndarray, bits: int, dtype: type = np.int32) -> np.ndarray:
    """Codes (..., n) as 32-bit words (..., n * bits / 32): code i is at bit i * bits of its row."""
    rows = [sum(int(code) << (i * bits) for i, code in enumerate(row)) for row in codes.reshape(-1, codes.shape[-1])]
    count = codes.shape[-1] * bits // 32
    return np.frombuffer(b"".join(row.to_bytes(4 * count, "little") for row in rows), dtype).reshape(*codes.shape[:-1], count)


def checkpoint(path: Path, tensors: dict[str, np.ndarray | Tensor], config: Any = None, **files: Any) -> Path:
    """A folder with one safetensors file of these tensors and `PLAIN`, config.json, and other JSON files."""
    path.mkdir()
    entries = PLAIN | {name: array if isinstance(array, tuple) else tensor(array) for name, array in tensors.items()}
    with Writer(path / "model.safetensors", {name: (dtype, array.shape) for name, (dtype, array) in entries.items()}) as writer:
        for name, (_, array) in entries.items():
            writer.write(name, array)
    for name, listed in {"config": config, **files}.items():
        if listed is not None:
            (path / f"{name}.json").write_text(json.dumps(listed))
    return path


def values(path: Path, source_dialect: str | None = None) -> dict[str, Stored]:
    """The values that other programs quantized."""
    return recognized(path, [Container(file) for file in checkpoint_files(path)], source_dialect)


def decoded(stored: Stored) -> np.ndarray:
    """FP32 values of a tensor that was read."""
    return np.asarray(breccia.dequantize(stored.tensor()))
