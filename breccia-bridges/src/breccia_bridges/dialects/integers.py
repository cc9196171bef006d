"""Integers with scales per row or per group along K, and zero-points, as components of ScaledTensors.

breccia has signed codes without zero-points and unsigned ones with, packed along K from the lowest bit up.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from breccia import Format, Integer, Level, ScaledTensor
from breccia.backend import INTEGERS, Entry, Shape, StoredForm, StoredValue, ValueForm
from breccia.internal import packed_length

from ..wrapping import integer_recipe
from .scales import SCALE_DTYPES, assembled, check_scale, widened
from .writing import parts_of


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


class Integers(NamedTuple):
    """What a format of integers is: the width, whether codes are signed, its offset ("none", "zero_point", ...), the columns
    per scale or None for one scale per row, and the dtype of scales in a file."""

    bits: int
    signed: bool
    offset: str
    group: int | None
    scale_dtype: str


def kind_of(form: ValueForm) -> Integers | None:
    """What the integers of a form are; None for other formats. Groups may be in any order: see `writing.check_matrix`."""
    fmt = form.recipe.format
    element, (rows, group) = fmt.element, fmt.block
    if not isinstance(element, Integer) or INTEGERS.get((element.bits, element.signed)) != element or rows != 1:
        return None
    if fmt.scale.codec.name not in SCALE_DTYPES or fmt.offset not in ("none", "zero_point", "bias"):
        return None
    if fmt != Format(element, (Level(fmt.scale.codec, (1, group)),), fmt.offset):
        return None
    return Integers(element.bits, element.signed, fmt.offset, group, fmt.scale.codec.name)


def stored_as(form: ValueForm, codes: str, scale: str, shape: Shape | None = None, **settings: Any) -> StoredForm:
    """Signed 8-bit codes without zero-points as the parts `codes` (I8) and `scale`, the scale first.

    shape: of the scale; by default (..., N, groups). settings: of the module.
    """
    grid = form.fitted_layout.plain.scale_shapes(form.shape)[0] if shape is None else shape
    return StoredForm({scale: Entry(form.recipe.format.scale.codec.name, grid), codes: Entry("I8", form.shape)}, settings)


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, Any]:
    """Codes and scales of `stored_as` as they are."""
    scale_end, codes_end = list(stored.entries)[:2]
    return parts_of(st, stored, data=codes_end, scale=scale_end)


def per_row(array: np.ndarray, form: ValueForm) -> np.ndarray:
    """One item repeated for each row; other arrays as they are."""
    shape = form.fitted_layout.scale_shapes(form.shape)[0]
    return np.full(shape, array.reshape(()), array.dtype) if array.size == 1 else array


def offset(data: Any, bits: int) -> Any:
    """Bytes of two's complement codes as those of codes with half of the range added, and back.

    data: uint8, of NumPy or torch: rows of packed codes.
    """
    group = math.lcm(bits, 8)
    tops = sum(1 << at for at in range(bits - 1, group, bits)).to_bytes(group // 8, "little")
    flipped = data ^ tops[0]
    for place, top in enumerate(tops[1:], 1):
        flipped[..., place :: len(tops)] ^= tops[0] ^ top
    return flipped


def cut(data: Any, length: int, bits: int) -> Any:
    """Rows of packed codes with zeros after `length` codes, in place."""
    whole, rest = divmod(length * bits, 8)
    data[..., whole : whole + 1] &= (1 << rest) - 1
    data[..., whole + 1 :] = 0
    return data


def row_bytes(value: StoredValue, end: str, words: np.ndarray, length: int, bits: int) -> np.ndarray:
    """Rows of int32 words, filled from the lowest bit up, as rows of `length` packed codes of `bits`.

    Raises DialectError where what follows the last code is not zero.
    """
    stored = words.view(np.uint8)
    whole, rest = divmod(length * bits, 8)
    value.need(
        not (stored[..., whole : whole + 1] >> rest).any() and not stored[..., whole + 1 :].any(),
        f"{end!r} has bits after the last of {length} codes of a row; they are 0.",
    )
    data = np.zeros((*stored.shape[:-1], packed_length(INTEGERS[bits, False], length)), np.uint8)
    held = min(data.shape[-1], stored.shape[-1])
    data[..., :held] = stored[..., :held]
    return data


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
