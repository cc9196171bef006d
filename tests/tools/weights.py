"""Weights of drawn codes and scales, and every format that weight-only kernels take."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

import breccia
from breccia.codecs import BF16, E2M1, E4M3, E5M2, E8M0, F16, F32, INT4, INT8, MXINT8, UINT4, Codec
from breccia.formats import TENSOR, Format, Level
from breccia.layouts import PerBlockK, PerBlockMN, PerChannel, PerTensor
from breccia.tensors.components import components, with_parts
from breccia.tensors.grids import packed_length
from breccia.tensors.tensor import ScaledTensor

FORMATS = {
    "int4-128": Format(INT4, (Level(F16, (1, 128)),)),
    "int4-16": Format(INT4, (Level(F32, (1, 16)),)),
    "int4-64": Format(INT4, (Level(BF16, (1, 64)),)),
    "int4-row": Format(INT4, (Level(F32, (1, None)),)),
    "uint4": Format(UINT4, (Level(F16, (1, 32)),)),
    "uint4-zero-128": Format(UINT4, (Level(F16, (1, 128)),), "zero_point"),
    "uint4-zero-16": Format(UINT4, (Level(BF16, (1, 16)),), "zero_point"),
    "mxfp4": Format(E2M1, (Level(E8M0, (1, 32)),)),
    "nvfp4": Format(E2M1, (Level(F32, TENSOR), Level(E4M3, (1, 16)))),
    "nvfp4-divisor": Format(E2M1, (Level(F32, TENSOR, "divisor"), Level(E4M3, (1, 16)))),
    "nvfp4-amax": Format(E2M1, (Level(F32, TENSOR, "amax"), Level(E4M3, (1, 16)))),
    "nvfp4-one": Format(E2M1, (Level(E4M3, (1, 16)),)),
    "e2m1-f32": Format(E2M1, (Level(F32, (1, 64)),)),
    "e4m3-block": Format(E4M3, (Level(F32, (1, 128)),)),
    "e4m3-square": Format(E4M3, (Level(F32, (128, 128)),)),
    "e4m3-tensor": Format(E4M3, (Level(F32, TENSOR),)),
    "e5m2-row": Format(E5M2, (Level(F32, (1, None)),)),
    "mxfp8": Format(E4M3, (Level(E8M0, (1, 32)),)),
    "mxfp8-e5m2": Format(E5M2, (Level(E8M0, (1, 32)),)),
    "int8-row": Format(INT8, (Level(F32, (1, None)),)),
    "int8-32": Format(INT8, (Level(F16, (1, 32)),)),
    "mxint8": Format(MXINT8, (Level(E8M0, (1, 32)),)),
    "int4-256": Format(INT4, (Level(F32, (1, 256)),)),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn(breccia.ScalingRecipe):
    """A format without a way to write it: tensors are made of drawn codes and scales."""

    fmt: Any = None

    @property
    def format(self) -> Format:  # type: ignore[override]
        return self.fmt

    @property
    def spec(self) -> str:  # type: ignore[override]
        return "drawn"


recipe_of = functools.cache(Drawn)


def tensor(name: str | Format, n: int, k: int, seed: int = 0, wild: bool = False) -> ScaledTensor:
    """Random codes and scales of (n, k). wild: every bit pattern; else finite numbers with scales around 2^-4."""
    rng = np.random.default_rng(seed)
    fmt = FORMATS[name] if isinstance(name, str) else name
    element, level = fmt.element, fmt.scale
    codes = [c for c in range(1 << element.bits) if wild or np.isfinite(element.value(c))]
    group = 8 // math.gcd(element.bits, 8)
    data = rng.choice(np.array(codes, np.uint8), (n, -(-k // group) * group))
    data[:, k:] = 0
    data = packed(data, element.bits)
    assert data.shape[1] == packed_length(element, k)
    tall, width = level.block
    shape = () if level.block == TENSOR else (-(-n // (tall or n)), -(-k // (width or k)))
    scale = _patterns(rng, level.codec, shape) if wild else written(level.codec, rng.uniform(0.03, 0.12, shape))
    zero_point = None
    if fmt.offset == "zero_point":
        zero_point = rng.integers(0, 256 if wild else 1 << element.bits, shape, dtype=np.uint8)
    elif fmt.offset != "none":
        zero_point = written(level.codec, rng.standard_normal(shape) / 10)
    layout: Any = PerTensor() if level.block == TENSOR else PerChannel() if width is None else PerBlockK(width, bool(k % width))
    if level.block != TENSOR and tall != 1:
        assert width is not None and tall is not None
        layout = PerBlockMN(tall, width, bool(n % tall or k % width))
    g = None if fmt.global_scale is None else np.array(3.7, np.float32)
    data = data.view("int8") if element.dtype == "int8" else data
    return ScaledTensor.from_parts(data, scale, recipe_of(fmt), layout, zero_point, g, -1, -k % group)


def replaced(st: ScaledTensor, **parts: Any) -> ScaledTensor:
    """The tensor with some other components."""
    return with_parts(st, components(st) | parts)


def packed(codes: np.ndarray, width: int) -> np.ndarray:
    """Rows of codes of `width` bits each, the first in the lowest bits."""
    bits = codes[..., None] >> np.arange(width, dtype=np.uint8) & 1
    return np.packbits(bits.reshape(len(codes), -1), axis=-1, bitorder="little")


def _patterns(rng: Any, codec: Codec, shape: Any) -> Any:
    size = max(1, codec.bits // 8)
    return rng.integers(0, 256, (*shape, size), dtype=np.uint8).view(f"u{size}").reshape(shape).view(_dtype(codec))


def _dtype(codec: Codec) -> str:
    return {"F32": "f4", "F16": "f2", "BF16": "u2"}.get(codec.name, "u1")


def written(codec: Codec, values: Any) -> np.ndarray:
    """Numbers in a scale codec; the magnitudes of those for a codec of one byte."""
    x = np.asarray(values, np.float32)
    if codec in (F32, F16):
        return x.astype(_dtype(codec))
    if codec == BF16:
        return (x.reshape(-1).view(np.uint32) >> 16).astype(np.uint16).reshape(x.shape)
    numbers = np.array([codec.value(c) for c in range(256)])
    numbers = np.where(np.isfinite(numbers), numbers, 1e30)
    return np.abs(numbers[:, None] - np.abs(x).reshape(1, -1)).argmin(axis=0).astype(np.uint8).reshape(x.shape)


def in_torch(plain: ScaledTensor, device: str = "cpu") -> ScaledTensor:
    """The tensor in torch's storage dtypes, on a device."""
    import torch

    from breccia_torch.ops import TORCH

    dtypes = TORCH.dtypes(plain.recipe.format)

    def moved(name: str, part: Any) -> Any:
        words = torch.from_numpy(np.ascontiguousarray(part).reshape(-1).view(np.uint8).copy()).to(device)
        return words.view(getattr(torch, dtypes[name])).reshape(part.shape)

    return with_parts(plain, {name: moved(name, part) for name, part in components(plain).items()})
