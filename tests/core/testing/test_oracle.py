"""The oracle against ml_dtypes and NumPy, which share no code with it."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from breccia.codecs import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, F16, INT4, INT8, UINT4, UINT8, Codec
from breccia.testing import oracle

FOREIGN = {
    E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: ml_dtypes.float4_e2m1fn,
    E2M3: ml_dtypes.float6_e2m3fn, E3M2: ml_dtypes.float6_e3m2fn, E8M0: ml_dtypes.float8_e8m0fnu,
    INT4: ml_dtypes.int4, UINT4: ml_dtypes.uint4, INT8: np.int8, UINT8: np.uint8, F16: np.float16,
    BF16: ml_dtypes.bfloat16,
}  # fmt: skip


def bits(value: float) -> int:
    return -1 if math.isnan(value) else oracle.f32_bits(value)


@pytest.mark.parametrize("codec", FOREIGN, ids=lambda c: c.name)
def test_every_code_decodes_as_ml_dtypes_decodes_it(codec: Codec) -> None:
    word = np.uint16 if codec.bits == 16 else np.uint8
    theirs = np.arange(1 << codec.bits).astype(word).view(FOREIGN[codec]).astype(np.float32)
    assert [bits(oracle.decode(codec, c)) for c in range(1 << codec.bits)] == [bits(float(v)) for v in theirs]


@pytest.mark.parametrize("codec", [E4M3, E5M2, E2M1, E2M3, E3M2, F16, BF16], ids=lambda c: c.name)
def test_values_encode_as_ml_dtypes_encodes_them(codec: Codec) -> None:
    """Grid points, midpoints, their neighbours and random numbers, within range (overflow differs on purpose)."""
    values, _ = oracle.ladder(codec)
    grid = np.array([float(v) for v in values])
    grid = grid if codec.bits <= 8 else grid[:: len(grid) // 2000]
    middle = (grid[1:] + grid[:-1]) / 2
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-20, math.log2(min(codec.max, 1e30)), 2000)) * rng.choice([-1, 1], 2000)
    x = np.concatenate([grid, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), spread])
    x = x[np.abs(x) <= codec.max].astype(np.float32)
    x = x[(np.abs(x) <= codec.max) & ((np.abs(x) >= 2.0**-126) | (x == 0))]
    word = np.uint16 if codec.bits == 16 else np.uint8
    theirs = x.astype(FOREIGN[codec]).view(word)
    ours = [oracle.encode(codec, Fraction(float(v)), negative=math.copysign(1, v) < 0) for v in x]
    assert ours == theirs.tolist()


def test_fl_rounds_as_ieee_float32_does() -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(0, 1 << 32, 4000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    b = rng.integers(0, 1 << 32, 4000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    keep = np.isfinite(a) & np.isfinite(b) & (a != 0) & (b != 0)
    for p, q in zip(a[keep], b[keep], strict=True):
        with np.errstate(all="ignore"):
            product, quotient = np.multiply(p, q), np.divide(p, q)
        assert abs(float(oracle.fl(Fraction(float(p)) * Fraction(float(q))))) == abs(float(product))
        assert abs(float(oracle.fl(Fraction(float(p)) / Fraction(float(q))))) == abs(float(quotient))
