"""ml_dtypes: `astype` of NumPy arrays."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from breccia import Codec
from breccia.backend import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT4

from . import TO_INF, TO_NAN, Library, Quantizer, Setting, Written, installed, packed


def _astype(dtype: str, codec: Codec) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import ml_dtypes

        y = x.astype(getattr(ml_dtypes, dtype))
        return Written(packed(y.view(np.uint8), codec), y.astype(np.float32))

    return write


_CUT = "Fractions are truncated, and values out of range wrap around; breccia rounds to nearest and saturates."

LIBRARIES = (
    Library(
        "ml_dtypes",
        installed("ml_dtypes"),
        (
            Quantizer("float8_e4m3fn", _astype("float8_e4m3fn", E4M3), Setting(E4M3, TO_NAN)),
            Quantizer("float8_e5m2", _astype("float8_e5m2", E5M2), Setting(E5M2, TO_INF)),
            Quantizer("float6_e2m3fn", _astype("float6_e2m3fn", E2M3), Setting(E2M3)),
            Quantizer("float6_e3m2fn", _astype("float6_e3m2fn", E3M2), Setting(E3M2)),
            Quantizer("float4_e2m1fn", _astype("float4_e2m1fn", E2M1), Setting(E2M1)),
            Quantizer("float8_e8m0fnu", _astype("float8_e8m0fnu", E8M0), Setting(E8M0)),
            Quantizer(
                "int4",
                _astype("int4", INT4),
                Setting(
                    INT4,
                    _CUT,
                ),
            ),
        ),
    ),
)
