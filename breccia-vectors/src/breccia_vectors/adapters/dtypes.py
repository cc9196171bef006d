"""What the adapters of bare dtypes share: elements that are cast under a scale that the case gives, and decoded."""

# NumPy is imported by the adapters alone.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..comparing import NotSupported
from ..sets import Case
from . import Adapter
from .shapes import back, matrix, values

#: FP32 to codes, one per byte; and codes to FP32.
Encode = Callable[[str, np.ndarray], np.ndarray]
Decode = Callable[[str, np.ndarray], np.ndarray]

#: Element codec -> the name of its dtype in ml_dtypes, JAX and torch.
DTYPES = {
    "E4M3": "float8_e4m3fn",
    "E5M2": "float8_e5m2",
    "E2M1": "float4_e2m1fn",
    "E2M3": "float6_e2m3fn",
    "E3M2": "float6_e3m2fn",
}
#: The formats of OCP MX with floating elements.
MX = ("mxfp8", "mxfp8,fp8_format=E5M2", "mxfp6", "mxfp6,fp6_format=E3M2", "mxfp4")


def formats(*elements: str) -> tuple[str, ...]:
    """The formats with these elements, in which a scale of the vectors is a power of two, so that x / scale is exact."""
    of = dict(zip(MX, ("E4M3", "E5M2", "E2M3", "E3M2", "E2M1"), strict=True))
    return tuple(name for name in MX if of[name] in elements)


def adapter(name: str, encode: Encode, decode: Decode, *elements: str) -> Adapter:
    """Casts of the edges whose scale is given: supplied, or one. Everything is decoded."""

    def repeated(case: Case, codes: np.ndarray) -> np.ndarray:
        return np.repeat(decode("float8_e8m0fnu", codes), 32, axis=-1)[:, : case.k_last[-1]]

    def cast(case: Case) -> dict[str, np.ndarray]:
        if case.edge not in ("ties", "supplied"):
            raise NotSupported("a dtype has no scales; its casts run the edges whose scales are given")
        x, of = values(case), DTYPES[case.format.element.name]
        scale = np.float32(1) if case.edge == "ties" else repeated(case, matrix(case, "supplied"))
        with np.errstate(all="ignore"):
            codes = encode(of, x / scale)
            return {"codes": back(case, codes), "decoded": back(case, decode(of, codes) * scale)}

    def decoded(case: Case) -> np.ndarray:
        with np.errstate(all="ignore"):
            values_of = decode(DTYPES[case.format.element.name], matrix(case, "codes"))
            return back(case, values_of * repeated(case, matrix(case, "scale")))

    return Adapter(name, formats(*elements), cast, decoded)
