"""Writes block FP8 as DeepSeek-V3 and transformers' `fp8` and `mxfp8` have it: `weight`, and `weight_scale_inv`, a multiplier.

    fp8    scales in FP32, () or one per block; or in E8M0 ("scale_fmt": "ue8m0"), for recipes with power_of_two_scale
    mxfp8  scales in U8, the exponent, per 32 codes

All modules have one block, `weight_block_size`. What it reads: `fp8`.

Source: transformers 5.24 (integrations.finegrained_fp8), run on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from breccia.backend import StoredForm, ValueForm

from . import fp8
from .writing import check_matrix, inputs, refused, same_settings

_NAME = "deepseek_v3"


def stored(form: ValueForm) -> StoredForm:
    """FP8 per tensor and per block, and MXFP8."""
    fmt, kind = form.recipe.format, fp8.kind_of(form)
    check_matrix(form, _NAME)
    if kind == "tensor" and len(form.shape) > 2:
        raise refused(form, _NAME, "experts have scales of their own there: use 'fp8_block,block_m=128'")
    if kind not in ("tensor", "block", "mx"):
        raise refused(form, _NAME)
    codes = fmt.element.name.lower()
    if kind == "tensor":
        return fp8.stored_as(form, "", "_scale_inv", fmt=codes, weight_block_size=None)
    size: dict[str, Any] = {"fmt": codes, "weight_block_size": list(fmt.block)}
    if kind == "mx":
        return fp8.stored_as(form, "", "_scale_inv", dtype="U8", **size, scale_fmt="ue8m0", quant_method="mxfp8")
    if fp8.is_power_of_two(form):
        return fp8.stored_as(form, "", "_scale_inv", dtype="F8_E8M0", **size, scale_fmt="ue8m0")
    return fp8.stored_as(form, "", "_scale_inv", **size)


write = fp8.write


def config(stored: Mapping[str, StoredForm], plain: Sequence[str], activations: str | None) -> dict[str, dict[str, Any]]:
    """The `quantization_config` of all modules. They quantize their inputs per token, in blocks as long as those of weights."""
    settings = same_settings(_NAME, stored)
    size = settings.get("weight_block_size")
    own = "fp8_row" if size is None else "mxfp8" if "quant_method" in settings else f"fp8_block,block_k={size[1]}"
    scheme = inputs(_NAME, activations, {None: "dynamic", own: "dynamic"})
    quantization = {"quant_method": "fp8", "activation_scheme": scheme, **settings, "modules_to_not_convert": sorted(plain)}
    return {"config.json": {"quantization_config": quantization}}
