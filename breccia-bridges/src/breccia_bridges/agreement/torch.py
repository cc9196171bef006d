"""PyTorch: `Tensor.to` of the eight-bit floating dtypes, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from breccia.backend import E4M3, E5M2, E8M0

from . import TO_INF, Library, Quantizer, Setting, Written, installed


def _to(dtype: str) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import torch

        t = torch.from_numpy(x).to(getattr(torch, dtype))
        return Written(t.view(torch.uint8).numpy(), t.to(torch.float32).numpy())

    return write


LIBRARIES = (
    Library(
        "PyTorch",
        installed("torch"),
        (
            Quantizer("to(float8_e4m3fn)", _to("float8_e4m3fn"), Setting(E4M3)),
            Quantizer("to(float8_e5m2)", _to("float8_e5m2"), Setting(E5M2, TO_INF)),
            Quantizer("to(float8_e8m0fnu)", _to("float8_e8m0fnu"), Setting(E8M0)),
        ),
    ),
)
