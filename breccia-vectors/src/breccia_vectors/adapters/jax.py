"""JAX: `astype` of its arrays, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import numpy as np

from .dtypes import adapter


def _encode(dtype: str, x: np.ndarray) -> np.ndarray:
    import jax.numpy as jnp

    return np.asarray(jnp.asarray(x).astype(getattr(jnp, dtype))).view(np.uint8)


def _decode(dtype: str, codes: np.ndarray) -> np.ndarray:
    import jax.numpy as jnp
    import ml_dtypes

    of = np.ascontiguousarray(codes).view(getattr(ml_dtypes, dtype))
    return np.asarray(jnp.asarray(of).astype(jnp.float32))


ADAPTERS = (adapter("astype", _encode, _decode, "E4M3", "E5M2", "E2M1"),)
