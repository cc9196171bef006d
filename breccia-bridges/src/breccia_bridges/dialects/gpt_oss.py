"""gpt-oss: experts in MXFP4, as `X_blocks` and `X_scales`.

    X_blocks U8 [experts, N, K / 32, 16]  two E2M1 codes to a byte, the even one in the low nibble
    X_scales U8 [experts, N, K / 32]      E8M0

The parameter X of transformers' model is the transpose of each matrix, [experts, K, N].

Source: transformers 5.24 (integrations.mxfp4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from breccia import MXFP4BlockScaling, ScaledTensor
from breccia.backend import Entry, StoredForm, StoredValue, ValueForm

from . import packed_floats
from .scales import assembled, check_scale, widened
from .writing import check_matrix, inputs, parts_of, refused


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


# -- writing ----------------------------------------------------------------------------------------------------------

_NAME = "gpt_oss"


def stored(form: ValueForm) -> StoredForm:
    """MXFP4 with blocks along the axis before the last of the model's value."""
    if packed_floats.kind_of(form) != "mxfp4":
        raise refused(form, _NAME)
    if not form.is_transposed:
        raise refused(
            form,
            _NAME,
            "the blocks of its experts run along the axis before the last, and these along the last; cast the weight with "
            "breccia.cast(w, 'mxfp4', axis=-2), save it, and convert that file or folder with recipe 'none'",
        )
    check_matrix(form, _NAME, is_transposed=True)
    *lead, columns = form.shape
    if columns % 32:
        raise refused(
            form,
            _NAME,
            f"{columns} numbers along the axis of its blocks are no whole number of blocks of 32; leave this weight as it is: "
            "exclude= (--exclude)",
        )
    blocks = (*lead, columns // 32)
    return StoredForm({"_blocks": Entry("U8", (*blocks, 16)), "_scales": Entry("U8", blocks)})


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, Any]:
    """Codes and scales as they are."""
    return parts_of(st, stored, data="_blocks", scale="_scales")


def config(stored: Mapping[str, StoredForm], plain: Sequence[str], activations: str | None) -> dict[str, dict[str, Any]]:
    """The names of what is not quantized. The config says nothing about inputs, which are not quantized."""
    inputs(_NAME, activations, {None: None, "none": None})
    return {"config.json": {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": sorted(plain)}}}
