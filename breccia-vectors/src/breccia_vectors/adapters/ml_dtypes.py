"""ml_dtypes: `astype` of NumPy arrays."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import numpy as np

from .dtypes import adapter


def _encode(dtype: str, x: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return x.astype(getattr(ml_dtypes, dtype)).view(np.uint8)


def _decode(dtype: str, codes: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return np.ascontiguousarray(codes).view(getattr(ml_dtypes, dtype)).astype(np.float32)


ADAPTERS = (adapter("astype", _encode, _decode, "E4M3", "E5M2", "E2M3", "E3M2", "E2M1"),)
