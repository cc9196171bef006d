"""Values of checkpoints of other libraries, compared bit for bit: for tests/dialects and their golden files."""

from __future__ import annotations

import hashlib

import numpy as np

_NAN = np.float32(np.nan)


def digest(values: np.ndarray) -> str:
    """SHA-256 of values as FP32, in which NaN has one bit pattern."""
    values = np.ascontiguousarray(values, "<f4")
    return hashlib.sha256(np.where(np.isnan(values), _NAN, values).tobytes()).hexdigest()


def to_bf16(values: np.ndarray) -> np.ndarray:
    """FP32 values rounded to BF16, to nearest even, as FP32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.view(np.float32))
