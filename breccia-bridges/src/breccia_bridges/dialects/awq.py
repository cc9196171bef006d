"""AWQ as "gemm": codes and zero-points in words of 32 bits along N, and FP16 scales, all with K first.

    qweight  I32 [K, N * bits / 32]
    qzeros   I32 [groups, N * bits / 32]
    scales   F16 [groups, N]

Each 8 columns are stored in the order 0, 2, 4, 6, 1, 3, 5, 7. A value is (code - zero_point) * scale.

Source: AutoAWQ 0.2.9 (WQLinear_GEMM), transformers 5.24 (AwqConfig).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from breccia import ScaledTensor, UnsupportedError
from breccia.backend import Entry, StoredForm, StoredValue, ValueForm

from ..safetensors_file import is_far
from ..safetensors_file import read as loaded
from . import writing
from .holding import NO_INPUTS, check_matrix, check_multiples, model_dtype
from .scales import RowReader, assembled, check_columns, check_scale, widened
from .words import (
    bits_of,
    blocks_of,
    check_bits,
    code_bytes,
    group_size_of,
    held,
    integers,
    matrices,
    packed,
    unpacked,
    whole_number,
    words_of,
)

#: The place in the stored order of columns 0 to 7.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
#: The columns 0 to 7 in the stored order.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def form(value: StoredValue) -> ValueForm:
    """Unsigned 4-bit integers with zero-points."""
    return form_of(value, (4,))


def form_of(value: StoredValue, widths: tuple[int, ...]) -> ValueForm:
    """The same, of a library that has these widths."""
    value.need("g_idx" not in value.entries, "it has a 'g_idx', which the packing of AWQ has not: its groups are in order.")
    shapes = matrices(value)
    groups, rows = shapes["scales"]
    length, words = shapes["qweight"]
    value.need_shape("qzeros", (groups, words))
    stored = bits_of(shapes["qweight"], rows)
    value.need(
        stored > 0 and rows % 8 == 0,
        f"'scales' has {rows} columns; {words} words of 'qweight' fit no such number in blocks of 8. Download the checkpoint "
        "again.",
        shapes=shapes,
    )
    bits = whole_number(value, value.settings, "bits", "w_bit")
    check_bits(value, stored if bits is None else bits, stored, "'qweight' and 'scales'")
    if stored not in widths:
        raise UnsupportedError(
            f"it has {stored} bits; AWQ as gemm has {', '.join(map(str, widths))}. Convert the checkpoint that it was made "
            "from.",
            bits=stored,
        )
    size = group_size_of(value, whole_number(value, value.settings, "group_size", "q_group_size"), length, groups)
    return ValueForm(integers(stored, size, length, value.entries["scales"].dtype), (rows, length))


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes, scales and zero-points."""
    check_scale(value, "scales", widened(value, "scales"))
    bits = form.recipe.format.element.bits
    return _made(form, _columns(value["qweight"], bits), value["scales"], _columns(value["qzeros"], bits))


def rows(value: StoredValue, form: ValueForm) -> RowReader | None:
    """What reads rows, which are columns of each tensor."""
    words, scales, zeros = (value.view(end) for end in ("qweight", "scales", "qzeros"))
    if is_far(words):
        return None
    bits = form.recipe.format.element.bits

    def some(rows: slice) -> ScaledTensor:
        scale, count, blocks = loaded(scales[:, rows]), rows.stop - rows.start, blocks_of(rows, bits)
        check_columns(value, "scales", scale)
        codes, zero = (_columns(loaded(part[:, blocks]), bits)[rows.start % 32 :][:count] for part in (words, zeros))
        return _made(replace(form, shape=codes.shape), codes, scale, zero)

    return some


def _made(form: ValueForm, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> ScaledTensor:
    """The tensor of codes and zero-points with N first, one a byte, and scales with K first."""
    data = packed(codes, form.recipe.format.element.bits)
    return assembled(form, data, np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros))


def _columns(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of a part, one a byte, with N first: (N, K) or (N, groups)."""
    codes = unpacked(words, bits)
    return codes.reshape(len(codes), -1, 8)[..., _PLACES].reshape(len(codes), -1).T


def stored(form: ValueForm) -> StoredForm:
    """Unsigned 4-bit integers with zero-points, in whole groups."""
    check_matrix(form, "awq")
    bits, size = held(form, (4,))
    check_multiples(form, "awq", 8, size or 1)
    rows, length = form.shape
    words, groups = rows * bits // 32, length // (size or length)
    entries = {
        "qweight": Entry("I32", (length, words)),
        "qzeros": Entry("I32", (groups, words)),
        "scales": Entry(form.recipe.format.scale.codec.name, (groups, rows)),
    }
    return StoredForm(entries, {"bits": bits, "group_size": size or -1})


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """Codes, scales and zero-points."""
    bits = stored.settings["bits"]
    return {
        "qweight": _words(code_bytes(st.data, bits, st.shape[1]), bits),
        "qzeros": _words(np.asarray(st.zero_point), bits),
        "scales": np.ascontiguousarray(st.scale.T),
    }


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (N, K) or (N, groups), one a byte, as words along N; the inverse of `_columns`."""
    columns = np.ascontiguousarray(codes.T)
    return words_of(columns.reshape(len(columns), -1, 8)[..., _ORDER].reshape(columns.shape), bits)


def config(stored: Mapping[str, StoredForm], plain: Collection[str], activations: str | None) -> dict[str, Any]:
    """What AutoAWQ, gptqmodel and transformers expect. Raises UnsupportedError for modules with groups of different sizes."""
    writing.inputs("awq", activations, NO_INPUTS)
    config = {
        "quant_method": "awq",
        "version": "gemm",
        **writing.same_settings("awq", stored),
        "zero_point": True,
        "modules_to_not_convert": sorted(plain) or None,
    }
    return {"config.json": {**model_dtype(stored, "AWQ"), "quantization_config": config}}
