"""Values of checkpoints of other libraries, compared bit for bit: for tests/dialects and their golden files."""

from __future__ import annotations

import hashlib

import numpy as np

_NAN = np.float32(np.nan)
#: The values of the codes of E2M1.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def digest(values: np.ndarray) -> str:
    """SHA-256 of values as FP32, in which NaN has one bit pattern."""
    values = np.ascontiguousarray(values, "<f4")
    return hashlib.sha256(np.where(np.isnan(values), _NAN, values).tobytes()).hexdigest()


def to_bf16(values: np.ndarray) -> np.ndarray:
    """FP32 values rounded to BF16, to nearest even, as FP32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.view(np.float32))


def scales_first(codes: np.ndarray, scale: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
    """NVFP4 as torchao and ModelOpt compute it, q · (s · g) in FP32; breccia's order is (q · s) · g.

    codes: bytes of two E2M1, the first in the low bits (m, k / 2). scale: bytes of E4M3 (m, k / 16). global_scale: FP32 ().
    """
    q = _E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)]
    exponent, fraction = (scale >> 3 & 15).astype(np.float32), (scale & 7).astype(np.float32)
    s = np.where(exponent > 0, np.exp2(exponent - 7) * (1 + fraction / 8), np.exp2(np.float32(-6)) * fraction / 8)
    s = np.where(scale >> 7, -s, s).astype(np.float32)
    return q * np.repeat(s * np.float32(global_scale), 16, -1)
