"""DeepSeek-V4: experts in MXFP4, two E2M1 codes to a byte of I8, and dense weights in block FP8; all scales are E8M0.

Source: the model cards and inference code of DeepSeek-V4 (FP4 experts per 1 x 32, FP8 per 128 x 128).
"""

from __future__ import annotations

import numpy as np

from breccia import MXFP4BlockScaling, ScaledTensor
from breccia.backend import StoredValue, ValueForm

from . import fp8
from .scales import assembled, check_scale, widened


def form(value: StoredValue) -> ValueForm:
    """MXFP4 for codes in I8, else what `fp8` says."""
    codes = value.entries["weight"]
    if codes.dtype != "I8":
        return fp8.form(value)
    value.need(len(codes.shape) > 1, f"'weight' has shape {list(codes.shape)}; a weight has two axes or more.")
    *lead, columns = codes.shape
    value.need_shape("scale", (*lead, -(-2 * columns // 32)))
    return ValueForm(MXFP4BlockScaling(), (*lead, 2 * columns))


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes and scales as they are."""
    if value.entries["weight"].dtype != "I8":
        return fp8.read(value, form)
    check_scale(value, "scale", widened(value, "scale"))
    return assembled(form, value.view("weight").view(np.uint8), value["scale"])
