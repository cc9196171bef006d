"""gpt-oss: experts in MXFP4, as `X_blocks` and `X_scales`.

    X_blocks U8 [experts, N, K / 32, 16]  two E2M1 codes to a byte, the even one in the low nibble
    X_scales U8 [experts, N, K / 32]      E8M0

The parameter X of transformers' model is the transpose of each matrix, [experts, K, N].

Source: transformers 5.24 (integrations.mxfp4).
"""

from __future__ import annotations

from breccia import MXFP4BlockScaling, ScaledTensor
from breccia.backend import StoredValue, ValueForm

from .scales import assembled, check_scale, widened


def form(value: StoredValue) -> ValueForm:
    """MXFP4, transposed."""
    shape = value.entries["_blocks"].shape
    value.need(
        len(shape) > 2 and shape[-1] == 16,
        f"'_blocks' has shape {list(shape)}; it is (experts, N, K / 32, 16), 32 codes to a block.",
        shape=shape,
    )
    value.need_shape("_scales", shape[:-1])
    scales = value.entries["_scales"].shape
    return ValueForm(MXFP4BlockScaling(), (*scales[:-1], 32 * scales[-1]), is_transposed=True)


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes and scales as they are."""
    check_scale(value, "_scales", widened(value, "_scales"))
    *lead, length = form.shape
    return assembled(form, value.view("_blocks").reshape(*lead, length // 2), value["_scales"])
