"""DeepSeek-V4: experts in MXFP4, two E2M1 codes to a byte of I8, and dense weights in block FP8; all scales are E8M0.

Source: the model cards and inference code of DeepSeek-V4 (FP4 experts per 1 x 32, FP8 per 128 x 128).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from breccia import MXFP4BlockScaling, ScaledTensor
from breccia.backend import E4M3, StoredForm, StoredValue, ValueForm

from . import fp8, packed_floats
from .writing import check_matrix, check_not_stacked, inputs, refused


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


# -- writing ----------------------------------------------------------------------------------------------------------

_NAME = "deepseek_v4"


def stored(form: ValueForm) -> StoredForm:
    """Matrices in MXFP4, and in blocks of 128 x 128 of FP8 whose scales are powers of two."""
    check_matrix(form, _NAME)
    check_not_stacked(form, _NAME)
    if packed_floats.kind_of(form) == "mxfp4":
        return packed_floats.stored_as(form, _NAME, ("weight", "I8"), ("scale", "F8_E8M0"))
    fmt = form.recipe.format
    is_block = fp8.kind_of(form) == "block" and fmt.element == E4M3 and fmt.block == fp8.TILE
    if not is_block or not fp8.is_power_of_two(form):
        raise refused(form, _NAME)
    return fp8.stored_as(form, "weight", "scale", dtype="F8_E8M0")


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, Any]:
    """Codes as they are; scales as bytes of E8M0. Raises DialectError for scales that E8M0 does not hold."""
    return (packed_floats if stored.entries["weight"].dtype == "I8" else fp8).write(st, stored)


def config(stored: Mapping[str, StoredForm], plain: Sequence[str], activations: str | None) -> dict[str, dict[str, Any]]:
    """That of FP8. Layers quantize their inputs in blocks of 128; `expert_dtype` is that of the experts."""
    scheme = inputs(_NAME, activations, {None: "dynamic", "fp8_block": "dynamic"})
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": scheme,
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": list(fp8.TILE),
        "modules_to_not_convert": sorted(plain),
    }
    is_packed = any(one.entries["weight"].dtype == "I8" for one in stored.values())
    return {"config.json": {"expert_dtype": "fp4" if is_packed else "fp8", "quantization_config": quantization}}
