"""Small checkpoints as other libraries write them, for tests of their readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import breccia
from breccia import BrecciaError
from breccia_bridges.checkpoint import checkpoint_files
from breccia_bridges.recognition import recognized
from breccia_bridges.safetensors_file import DTYPES, Container
from breccia_bridges.safetensors_writer import Writer
from breccia_bridges.stored import Stored

#: A dtype of a file, and an array of its bits.
Tensor = tuple[str, np.ndarray]

#: NumPy dtypes that hold the numbers of dtypes of a file.
NUMBERS: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
#: The numbers of E2M1 codes.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
#: Tensors of no dialect.
PLAIN: dict[str, Tensor] = {"norm.weight": ("BF16", np.ones(8, np.uint16)), "ids": ("I64", np.arange(3))}

_numbers = count()


def floats(dtype: str, array: Any) -> Tensor:
    """Numbers as a tensor of a float dtype, rounded to it."""
    stored = np.asarray(array, NUMBERS.get(dtype, DTYPES[dtype][1]))
    return dtype, stored.view(DTYPES[dtype][1])


def numbers(tensor: Tensor) -> np.ndarray:
    """The numbers of a tensor as FP32."""
    dtype, array = tensor
    return array.view(NUMBERS.get(dtype, array.dtype)).astype(np.float32)


def bytes_of(listed: Any) -> Tensor:
    """JSON in bytes; text as it is."""
    text = listed if isinstance(listed, str) else json.dumps(listed)
    return "U8", np.frombuffer(text.encode(), np.uint8)


def folder(
    path: Path, tensors: Mapping[str, Tensor], config: Any = None, metadata: Mapping[str, str] | None = None, **files: Any
) -> Path:
    """A folder of one safetensors file, with config.json and other JSON files; a new one below `path` at each call."""
    path = path / str(next(_numbers))
    path.mkdir()
    with Writer(path / "model.safetensors", {n: (dtype, a.shape) for n, (dtype, a) in tensors.items()}, metadata) as writer:
        for name, (_, array) in tensors.items():
            writer.write(name, array)
    for name, listed in {"config": config, **files}.items():
        if listed is not None:
            (path / f"{name}.json").write_text(json.dumps(listed))
    return path


def quantized(method: str, **settings: Any) -> dict[str, Any]:
    """A config.json of a `quant_method`."""
    return {"quantization_config": {"quant_method": method, **settings}}


def values(path: Path) -> dict[str, Stored]:
    """The values of a checkpoint that other programs quantized."""
    return recognized(path, [Container(file) for file in checkpoint_files(path)])


def decoded(stored: Stored) -> np.ndarray:
    """The FP32 numbers of a value."""
    st = stored.tensor()
    assert st.shape == stored.shape
    return np.asarray(breccia.dequantize(st))


def faults(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(what happened to one tensor, the tensors)."""
    for name, (dtype, array) in tensors.items():
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        yield f"{name} is missing", rest
        for other in ("F32", "F16", "U8", "I8", "I32", "I64", "F8_E4M3", "BF16"):
            if other != dtype:
                yield f"{name} is {other}", rest | {name: (other, np.ones(array.shape, DTYPES[other][1]))}
        shapes = {"flat": array.reshape(-1), "with another axis": array[None], "empty": array[..., :0] if array.ndim else array}
        shapes["shorter"] = array[:-1] if array.ndim else array
        for shape, part in shapes.items():
            if part.shape != array.shape:
                yield f"{name} is {shape}", rest | {name: (dtype, np.ascontiguousarray(part))}
        if array.size and dtype != "F32":
            yield f"{name} has other bits", rest | {name: (dtype, np.full_like(array, np.iinfo(np.uint8).max // 2))}
        elif array.size:
            yield f"{name} is NaN", rest | {name: (dtype, np.full_like(array, np.nan))}


def untyped(tensors: Mapping[str, Tensor], write: Callable[[dict[str, Tensor]], Path]) -> list[str]:
    """The faults to which a reader answers with other errors than breccia's."""
    out: list[str] = []
    for what, changed in faults(tensors):
        try:
            for stored in values(write(changed)).values():
                decoded(stored)
        except BrecciaError:
            continue
        except Exception as e:
            out.append(f"{what}: {type(e).__name__}: {e}")
    return out
