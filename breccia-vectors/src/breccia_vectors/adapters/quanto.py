"""optimum-quanto: float8 and integer weights with one scale per row."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import numpy as np

from ..sets import Case
from . import Adapter
from .shapes import back, plain, tensor


def _cast(case: Case) -> dict[str, np.ndarray]:
    import torch
    from optimum.quanto import AbsmaxOptimizer, qfloat8_e4m3fn, qfloat8_e5m2, qint8, quantize_weight

    plain(case)
    qtype = {"E4M3": qfloat8_e4m3fn, "E5M2": qfloat8_e5m2, "INT8": qint8}[case.format.element.name]
    x = tensor(case)
    q = quantize_weight(x, qtype=qtype, axis=0, scale=AbsmaxOptimizer()(x, qtype=qtype, axis=0))
    parts = {"codes": back(case, q._data.view(torch.uint8).numpy()), "scale": back(case, q._scale.float().numpy(), "scale")}
    return parts | {"decoded": back(case, q.dequantize().float().numpy())}


_FORMATS = ("fp8_row,scale_rule=divide", "fp8_row,fp8_format=E5M2,scale_rule=divide", "int8")
ADAPTERS = (Adapter("quantize_weight", _FORMATS, _cast),)
