"""Writes FP8 as transformers' `fbgemm_fp8` and vLLM's `fp8` have it: `weight` F8_E4M3, and `weight_scale` F32, a multiplier.

    fbgemm_fp8  a scale per row, (N, 1)
    fp8         one scale, ()

What reads it: `fp8`. Source: transformers 5.24 (integrations.fbgemm_fp8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from breccia.backend import E4M3, StoredForm, ValueForm

from . import fp8
from .writing import check_matrix, check_not_stacked, inputs, refused, same_settings

_NAME = "fp8_scale"
#: Of the largest magnitude of an input that counts for its scale: what transformers does by default.
_LARGEST_INPUT = 1200.0


def stored(form: ValueForm) -> StoredForm:
    """Matrices with one scale, or one per row."""
    check_matrix(form, _NAME)
    kind = fp8.kind_of(form) if form.recipe.format.element == E4M3 else ""
    if kind not in ("tensor", "row"):
        raise refused(form, _NAME)
    check_not_stacked(form, _NAME)
    if kind == "tensor":
        return fp8.stored_as(form, "weight", "weight_scale", quant_method="fp8")
    return fp8.stored_as(form, "weight", "weight_scale", quant_method="fbgemm_fp8")


write = fp8.write


def config(stored: Mapping[str, StoredForm], plain: Sequence[str], activations: str | None) -> dict[str, dict[str, Any]]:
    """The `quantization_config` of all modules. They quantize their inputs as they come, per token or with one scale."""
    method = same_settings(_NAME, stored).get("quant_method", "fbgemm_fp8")
    if method == "fp8":
        scheme: dict[str, Any] = {"activation_scheme": inputs(_NAME, activations, {None: "dynamic", "fp8_current": "dynamic"})}
        names = "ignored_layers"  # vLLM's
    else:
        scheme = {"activation_scale_ub": inputs(_NAME, activations, {None: _LARGEST_INPUT, "fp8_row": _LARGEST_INPUT})}
        names = "modules_to_not_convert"
    return {"config.json": {"quantization_config": {"quant_method": method, **scheme, names: sorted(plain)}}}
