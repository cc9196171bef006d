"""JAX: `astype` of its arrays, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from breccia import Codec
from breccia.backend import E2M1, E4M3, E5M2, E8M0, INT4

from . import TO_INF, TO_NAN, Library, Quantizer, Setting, Written, installed, packed


def _astype(dtype: str, codec: Codec) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import jax.numpy as jnp

        y = jnp.asarray(x).astype(getattr(jnp, dtype))
        return Written(packed(np.asarray(y).view(np.uint8), codec), np.asarray(y.astype(jnp.float32)))

    return write


_CUT = "Fractions are truncated; breccia rounds to nearest, ties to even."

LIBRARIES = (
    Library(
        "JAX",
        installed("jax"),
        (
            Quantizer("astype(float8_e4m3fn)", _astype("float8_e4m3fn", E4M3), Setting(E4M3, TO_NAN)),
            Quantizer("astype(float8_e5m2)", _astype("float8_e5m2", E5M2), Setting(E5M2, TO_INF)),
            Quantizer("astype(float4_e2m1fn)", _astype("float4_e2m1fn", E2M1), Setting(E2M1)),
            Quantizer("astype(float8_e8m0fnu)", _astype("float8_e8m0fnu", E8M0), Setting(E8M0)),
            Quantizer("astype(int4)", _astype("int4", INT4), Setting(INT4, _CUT)),
        ),
    ),
)
