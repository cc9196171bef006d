"""What is timed against what: breccia, the older package that is also called breccia, and NumPy with ml_dtypes.

Each runs in a process of its own: two packages of one name cannot meet, and no rival inherits another's heap or caches.
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from common import HERE

OURS, STRAIGHTFORWARD, OLD = "breccia", "ml_dtypes", "breccia-0.1.3"
RIVALS = (STRAIGHTFORWARD, OLD)
OLD_VERSION = "0.1.3"
CACHE = HERE / ".rivals"

#: The recipes that all three have, and the class that both packages call them by.
RECIPES = {
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
    "int4": "INT4Scaling",
}

#: Where a rival defines the stored scale as we do, so that its bytes must be ours. The older package rounds the exponent of
#: an E8M0 scale to nearest, and has no tensor scale in NVFP4.
SAME_SCALE = {STRAIGHTFORWARD: tuple(RECIPES), OLD: ("current", "block", "int4")}

#: Casts with many FP32 temporaries per element (as many as the element has codes, several times): timed on a slab of rows
#: and multiplied.
SLAB_ROWS = 256
SLABS = {OLD: ("current", "block", "mxfp8", "nvfp4")}


@dataclass(frozen=True)
class Rival:
    """How a rival casts and decodes `recipe` (a key of RECIPES). What `cast` returns is its own affair."""

    version: str
    cast: Callable[[str], Callable[[np.ndarray], Any]]
    dequantize: Callable[[Any], np.ndarray]
    scale: Callable[[Any], np.ndarray]
    #: `taller(cast, n)`: the same rows n times, to decode a full matrix of what was cast as a slab; for rivals in SLABS.
    taller: Callable[[Any, int], Any] | None = None
    #: What serves (op, recipe, x), where there is a choice.
    kernel: Callable[[str, str, np.ndarray], str | None] = lambda op, recipe, x: None


def rival(name: str) -> Rival:
    """The rival of that name, ready in this process."""
    return straightforward() if name == STRAIGHTFORWARD else packaged(name)


# ------------------------------------------------------------------------------------------------ the two packages


def packaged(name: str) -> Rival:
    """The package `breccia` that this process imports. Exits unless it is the one of that name."""
    package = importlib.import_module("breccia")
    found = package.__version__
    if (found == OLD_VERSION) != (name == OLD):
        sys.exit(f"rivals: this process was to time {name}, but `import breccia` gives {found}; look at PYTHONPATH.")

    def cast(recipe: str) -> Callable[[np.ndarray], Any]:
        chosen = getattr(package, RECIPES[recipe])()
        return lambda x: package.cast(x, chosen)

    def taller(st: Any, n: int) -> Any:
        scale = np.asarray(st.scale)
        return dataclasses.replace(st, data=np.tile(st.data, (n, 1)), scale=np.tile(scale, (n, 1)) if scale.ndim else scale)

    def kernel(op: str, recipe: str, x: np.ndarray) -> str | None:
        chosen = getattr(package, RECIPES[recipe])()
        operands = (x, chosen) if op == "cast" else (chosen,)
        winner = package.explain(op, *operands).winner
        return winner.name if winner else None

    parts = (lambda *_: None) if name == OLD else kernel
    return Rival(found, cast, package.dequantize, lambda st: np.asarray(st.scale), taller, parts)


def fetched_old() -> Path:
    """The folder that holds breccia 0.1.3; installed there, and nowhere else, on first use."""
    target = old_folder()
    if target.is_dir():
        return target
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--target", f"{folder}/got", f"breccia=={OLD_VERSION}"], stdout=sys.stderr)
        if done.returncode:
            sys.exit(
                f"rivals: asked pip for breccia=={OLD_VERSION}, and it failed (its message is above). "
                f"Leave {OLD} out of --rivals, or install that version into {target.relative_to(HERE.parent)} yourself."
            )
        shutil.move(f"{folder}/got", target)
    return target


def old_folder() -> Path:
    return CACHE / f"breccia-{OLD_VERSION}"


def absence(name: str) -> str:
    """Why the rival cannot run without further ado; empty where it can."""
    if name == OLD and not old_folder().is_dir():
        return f"not fetched yet; --rivals {OLD} fetches it"
    if name == STRAIGHTFORWARD and find_spec("ml_dtypes") is None:
        return "ml_dtypes is not installed; pip install ml_dtypes"
    return ""


def python_path(name: str) -> Path | None:
    """What must precede everything installed in the rival's process."""
    return fetched_old() if name == OLD else None


# ------------------------------------------------------------------------------------------------ NumPy and ml_dtypes


def straightforward() -> Rival:
    """The formats in a few lines of NumPy and ml_dtypes, as one writes them first: amax, scale, divide, astype.

    Finite input that is not zero only. The bytes are those of the formats: packed nibbles, stored scales.
    """
    import ml_dtypes

    e4m3, e2m1, e8m0, f32 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu, np.float32
    block = {"block": 128, "mxfp8": 32, "nvfp4": 16, "int4": 128}

    def blocks(x: np.ndarray, recipe: str) -> tuple[np.ndarray, np.ndarray]:
        b = x.reshape(x.shape[0], -1, block[recipe])
        return b, np.abs(b).max(axis=-1, keepdims=True)

    def packed(codes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        nibbles = codes.reshape(shape)
        return nibbles[:, 0::2] | nibbles[:, 1::2] << 4

    def unpacked(data: np.ndarray, recipe: str) -> np.ndarray:
        nibbles = np.empty((data.shape[0], 2 * data.shape[1]), np.uint8)
        nibbles[:, 0::2], nibbles[:, 1::2] = data & 15, data >> 4
        return nibbles.reshape(data.shape[0], -1, block[recipe])

    def current(x: np.ndarray) -> Any:
        scale = np.abs(x).max() / f32(448)
        return "current", (x / scale).astype(e4m3), scale

    def fp8_blocks(x: np.ndarray) -> Any:
        b, amax = blocks(x, "block")
        scale = amax / f32(448)
        return "block", (b / scale).astype(e4m3), scale

    def mxfp8(x: np.ndarray) -> Any:
        b, amax = blocks(x, "mxfp8")
        scale = np.exp2(np.ceil(np.log2(amax / f32(448))))
        return "mxfp8", (b / scale).astype(e4m3), scale.astype(e8m0)

    def nvfp4(x: np.ndarray) -> Any:
        b, amax = blocks(x, "nvfp4")
        tensor = amax.max() / f32(2688)
        scale = (amax / f32(6) / tensor).astype(e4m3)
        codes = (b / (scale.astype(f32) * tensor)).astype(e2m1)
        return "nvfp4", packed(codes.view(np.uint8), x.shape), scale, tensor

    def int4(x: np.ndarray) -> Any:
        b, amax = blocks(x, "int4")
        scale = (amax / f32(7)).astype(np.float16)
        codes = np.rint(b / scale.astype(f32)).astype(np.int8)
        return "int4", packed(codes.view(np.uint8) & 15, x.shape), scale

    def dequantize(cast: Any) -> np.ndarray:
        recipe, data, scale, *tensor = cast
        rows = data.shape[0]
        if recipe == "nvfp4":
            return (unpacked(data, recipe).view(e2m1).astype(f32) * (scale.astype(f32) * tensor[0])).reshape(rows, -1)
        if recipe == "int4":
            signed = (unpacked(data, recipe) ^ 8).view(np.int8) - np.int8(8)
            return (signed.astype(f32) * scale.astype(f32)).reshape(rows, -1)
        return (data.astype(f32) * scale.astype(f32)).reshape(rows, -1)

    casts = {"current": current, "block": fp8_blocks, "mxfp8": mxfp8, "nvfp4": nvfp4, "int4": int4}

    def scale_of(cast: Any) -> np.ndarray:
        found = np.asarray(cast[2])
        return found.view(np.uint8) if found.dtype.itemsize == 1 else found

    return Rival(ml_dtypes.__version__, casts.__getitem__, dequantize, scale_of)
