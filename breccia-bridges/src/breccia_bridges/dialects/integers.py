"""Integers of 4 and 8 bits with scales per row or per group along K, and zero-points, as components of ScaledTensors.

breccia has signed codes without zero-points and unsigned ones with; 4-bit codes are two to a byte along K, the even one in the
low bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia import ScaledTensor
from breccia.backend import Shape, StoredValue, ValueForm

from ..wrapping import integer_recipe
from .scales import SCALE_DTYPES, assembled, check_scale, widened

#: What no recipe holds, and what users can do.
WIDTHS = "a ScaledTensor has integers of 4 and 8 bits"


def form(value: StoredValue, shape: Shape, bits: int, symmetric: bool, group: int | None, scale: str) -> ValueForm:
    """A value of `shape`. group: columns per scale; None for one scale per row. scale: the end of its name."""
    dtype = SCALE_DTYPES[value.entries[scale].dtype]
    recipe = integer_recipe(bits, group, shape[-1], signed=symmetric, symmetric=symmetric, scale_dtype=dtype)
    return ValueForm(recipe, shape)


def read(
    value: StoredValue, form: ValueForm, codes: np.ndarray, scale: str, zero_point: np.ndarray | None = None
) -> ScaledTensor:
    """Codes as the recipe packs them; scales as stored, one for the whole value repeated for each row."""
    check_scale(value, scale, widened(value, scale))
    zero = None if zero_point is None else per_row(zero_point, form)
    return assembled(form, codes, per_row(value[scale], form), zero)


def per_row(array: np.ndarray, form: ValueForm) -> np.ndarray:
    """One item repeated for each row; other arrays as they are."""
    shape = form.fitted_layout.scale_shapes(form.shape)[0]
    return np.full(shape, array.reshape(()), array.dtype) if array.size == 1 else array


def offset(data: Any, bits: int) -> Any:
    """Bytes of two's complement codes as those of codes with half of the range added, and back.

    data: uint8, of any framework.
    """
    return data ^ (0x88 if bits == 4 else 0x80)


def row_bytes(value: StoredValue, end: str, words: np.ndarray, length: int, bits: int) -> np.ndarray:
    """Rows of int32 words, filled from the lowest bit up, as rows of bytes that hold `length` codes of `bits`.

    Raises DialectError where what follows the last code is not zero.
    """
    stored = words.view(np.uint8)
    size = -(-length * bits // 8)
    tail = stored[..., size:]
    half = stored[..., size - 1] >> 4 if length * bits % 8 else tail[..., :0]
    value.need(not tail.any() and not half.any(), f"{end!r} has bits after the last of {length} codes of a row; they are 0.")
    return np.ascontiguousarray(stored[..., :size])


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Bytes of two codes each, of codes 0..15 in bytes along the last axis; a last byte of one code ends with 0."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], -1)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def split(data: np.ndarray, axis: int = -1) -> np.ndarray:
    """The codes 0..15 of bytes of two each, the low bits first, along `axis`."""
    pairs = np.stack([data & 15, data >> 4], axis if axis >= 0 else data.ndim + axis + 1)
    shape = list(data.shape)
    shape[axis] *= 2
    return pairs.reshape(shape)
