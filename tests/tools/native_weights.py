"""Weights of every format that compiled products read, and the bound of their products."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

import breccia
from breccia.codecs import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    F16,
    F32,
    INT4,
    INT8,
    NF4,
    UE4M3,
    UINT4,
    UINT8,
    Codec,
    Integer,
    Lookup,
)
from breccia.formats import TENSOR, Format, Level
from breccia.layouts import PerBlockK, PerBlockMN, PerChannel, PerTensor
from breccia.tensors.grids import packed_length
from breccia.tensors.tensor import ScaledTensor


@dataclasses.dataclass(frozen=True, eq=False)
class _Recipe(breccia.ScalingRecipe):
    """A format without a way to write it: tensors are made of drawn codes and scales."""

    fmt: Any = None

    @property
    def format(self) -> Format:  # type: ignore[override]
        return self.fmt


def tensor(fmt: Format, n: int, k: int, seed: int = 0) -> ScaledTensor:
    """Finite codes of every kind, and scales around 2^-4, of (n, k)."""
    rng = np.random.default_rng(seed)
    element, level = fmt.element, fmt.scale
    finite = [c for c in range(1 << element.bits) if np.isfinite(element.value(c))]
    group = 8 // math.gcd(element.bits, 8)
    codes = rng.choice(np.array(finite, np.uint8), (n, -(-k // group) * group))
    codes[:, k:] = 0
    data = packed(codes, element.bits)
    m, width = level.block
    shape = () if level.block == TENSOR else (-(-n // (m or n)), -(-k // (width or k)))
    scale = written(level.codec, rng.uniform(0.03, 0.12, shape))
    zero_point = None
    if fmt.offset == "zero_point":
        zero_point = rng.integers(0, 1 << element.bits, shape, dtype=np.uint8)
    elif fmt.offset == "bias":
        zero_point = written(level.codec, rng.standard_normal(shape) / 10)
    layout: Any = PerTensor() if level.block == TENSOR else PerChannel() if width is None else PerBlockK(width, bool(k % width))
    if level.block != TENSOR and m != 1:
        assert width is not None and m is not None
        layout = PerBlockMN(m, width, bool(n % m or k % width))
    g, recipe = None if fmt.global_scale is None else np.array(3.7, np.float32), _Recipe(fmt)
    assert data.shape[1] == packed_length(element, k)
    return ScaledTensor.from_parts(data, scale, recipe, layout, zero_point, g, -1, -k % group)


def packed(codes: np.ndarray, width: int) -> np.ndarray:
    """Rows of codes of `width` bits each, the first in the lowest bits."""
    bits = codes[..., None] >> np.arange(width, dtype=np.uint8) & 1
    return np.packbits(bits.reshape(len(codes), -1), axis=-1, bitorder="little")


def written(codec: Codec, values: Any) -> np.ndarray:
    """Positive numbers in a scale codec."""
    x = np.asarray(values, np.float32)
    if codec in (F32, F16):
        return x.astype(np.float32 if codec == F32 else np.float16)
    if codec == BF16:
        return (
            (x.view(np.uint32) >> 16).astype(np.uint16)
            if x.ndim
            else np.asarray(x.reshape(1).view(np.uint32)[0] >> 16, np.uint16)
        )
    numbers = np.array([codec.value(c) for c in range(256)])
    numbers = np.where(np.isfinite(numbers), numbers, 1e30)
    return np.abs(numbers[:, None] - np.abs(x).reshape(1, -1)).argmin(axis=0).astype(np.uint8).reshape(x.shape)


def check_bound(found: Any, x: Any, w: np.ndarray, bias: Any = None) -> None:
    """The bound of docs/spec/numerics.md, section 9."""
    x, w, k = x.astype(np.float64), w.astype(np.float64).swapaxes(-1, -2), x.shape[-1]
    added = 0.0 if bias is None else bias.astype(np.float64)
    exact, size = x @ w + added, np.abs(x) @ np.abs(w) + np.abs(added)
    n = (k + (bias is not None)) * 2.0**-24
    bound = n / (1 - n) * size + k * 2.0**-126
    assert found.shape == exact.shape
    nan = np.isnan(exact)
    np.testing.assert_array_equal(np.isnan(found), nan)
    worst = np.max(np.where(nan, 0, np.abs(found - exact) / np.where(nan, 1, bound)))
    assert worst <= 1, f"the error is {worst:.3g} times the bound"


def integer(bits: int, signed: bool = False, fraction_bits: int = 0) -> Integer:
    return Integer(f"i{bits}", bits, None, "", signed, fraction_bits)


FORMATS = {
    "int4": Format(INT4, (Level(F16, (1, 128)),)),
    "int4-32": Format(INT4, (Level(F32, (1, 32)),)),
    "int4-row": Format(INT4, (Level(F32, (1, None)),)),
    "int4-tensor": Format(INT4, (Level(F32, TENSOR),)),
    "uint4-zero-128": Format(UINT4, (Level(BF16, (1, 128)),), "zero_point"),
    "uint4-zero-16": Format(UINT4, (Level(F16, (1, 16)),), "zero_point"),
    "uint4-bias-64": Format(UINT4, (Level(F16, (1, 64)),), "bias"),
    "uint4-bias-256": Format(UINT4, (Level(F32, (1, 256)),), "bias"),
    "mxfp4": Format(E2M1, (Level(E8M0, (1, 32)),)),
    "nvfp4": Format(E2M1, (Level(F32, TENSOR), Level(E4M3, (1, 16)))),
    "nvfp4-divisor": Format(E2M1, (Level(F32, TENSOR, "divisor"), Level(E4M3, (1, 16)))),
    "nvfp4-amax": Format(E2M1, (Level(F32, TENSOR, "amax"), Level(E4M3, (1, 16)))),
    "e2m1-divisor-8": Format(E2M1, (Level(UE4M3, (1, 8), "divisor"),)),
    "nf4": Format(NF4, (Level(F32, (1, 64)),)),
    "nf4-24": Format(NF4, (Level(F32, (1, 24)),)),
    "e4m3-block": Format(E4M3, (Level(F32, (128, 128)),)),
    "e4m3-row": Format(E4M3, (Level(F32, (1, None)),)),
    "e5m2-tensor": Format(E5M2, (Level(F32, TENSOR),)),
    "e5m2-amax-40": Format(E5M2, (Level(BF16, (1, 40), "amax"),)),
    "mxfp8": Format(E4M3, (Level(E8M0, (1, 32)),)),
    "mxfp8-16": Format(E4M3, (Level(E8M0, (1, 16)),)),
    "int8": Format(INT8, (Level(F32, (1, 32)),)),
    "int8-row": Format(INT8, (Level(F32, (1, None)),)),
    "uint8-zero": Format(UINT8, (Level(F16, (1, 48)),), "zero_point"),
    "int8-bias": Format(INT8, (Level(F16, (1, 16)),), "bias"),
    "ue4m3": Format(UE4M3, (Level(F32, (3, 40)),)),
    "mxfp6-e2m3": Format(E2M3, (Level(E8M0, (1, 32)),)),
    "mxfp6-e3m2": Format(E3M2, (Level(E8M0, (1, 32)),)),
    "e3m2-row": Format(E3M2, (Level(F32, (1, None)),)),
    "int4-12": Format(INT4, (Level(F16, (1, 12)),)),
    "uint4-zero-20": Format(UINT4, (Level(F16, (1, 20)),), "zero_point"),
    "uint8-bias-7": Format(UINT8, (Level(F32, (1, 7)),), "bias"),
    "e4m3-100": Format(E4M3, (Level(F32, (2, 100)),)),
    "e2m3-4": Format(E2M3, (Level(F16, (1, 4)),)),
    "uint2-bias-64": Format(integer(2), (Level(F16, (1, 64)),), "bias"),
    "uint3-bias-64": Format(integer(3), (Level(F32, (1, 64)),), "bias"),
    "uint5-bias-32": Format(integer(5), (Level(F16, (1, 32)),), "bias"),
    "uint6-bias-128": Format(integer(6), (Level(BF16, (1, 128)),), "bias"),
    "uint7-bias-16": Format(integer(7), (Level(F32, (1, 16)),), "bias"),
    "uint3-zero-32": Format(integer(3), (Level(F16, (1, 32)),), "zero_point"),
    "uint5-zero-8": Format(integer(5), (Level(F16, (1, 8)),), "zero_point"),
    "uint6-zero-20": Format(integer(6), (Level(F16, (1, 20)),), "zero_point"),
    "uint8-bias-64": Format(UINT8, (Level(F16, (1, 64)),), "bias"),
    "uint8-tensor": Format(UINT8, (Level(F32, TENSOR),)),
    "uint8-e8m0": Format(UINT8, (Level(E8M0, (1, 32)),)),
    "uint6-e4m3": Format(integer(6), (Level(E4M3, (1, 16)),)),
    "uint7-row": Format(integer(7, fraction_bits=6), (Level(F32, (1, None)),)),
    "int2-32": Format(integer(2, True), (Level(F16, (1, 32)),)),
    "int3-row": Format(integer(3, True, fraction_bits=1), (Level(F32, (1, None)),)),
    "int4-fraction": Format(integer(4, True, fraction_bits=2), (Level(F32, (1, 32)),)),
    "int5-divisor-24": Format(integer(5, True), (Level(F32, (1, 24), "divisor"),)),
    "int6-tensor": Format(integer(6, True, fraction_bits=3), (Level(F32, TENSOR),)),
    "table3-32": Format(
        Lookup("three", 3, None, "", values=(-2.5, -1.25, -0.5, 0.0, 0.0625, 0.75, 1.5, 3.0)), (Level(E8M0, (1, 32)),)
    ),
}
