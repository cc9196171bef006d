"""DeepSeek-V4: experts in MXFP4, two E2M1 codes to a byte of I8, and dense weights in block FP8; all scales are E8M0.

Source: the model cards and inference code of DeepSeek-V4 (FP4 experts per 1 x 32, FP8 per 128 x 128).
"""

from __future__ import annotations

from breccia import MXFP4BlockScaling, ScaledTensor
from breccia.backend import StoredValue, ValueForm

from . import fp8, packed_floats


def form(value: StoredValue) -> ValueForm:
    """MXFP4 for codes in I8, else what `fp8` says."""
    if value.entries["weight"].dtype != "I8":
        return fp8.form(value)
    return packed_floats.form(value, "weight", "scale", MXFP4BlockScaling())


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes and scales as they are."""
    if value.entries["weight"].dtype != "I8":
        return fp8.read(value, form)
    return packed_floats.read(value, form, "weight", "scale")
