"""MXFP4, MXFP6 and NVFP4 codes in bytes, as breccia packs them along K: two codes of 4 bits (the even one in the low bits), or
four of 6 bits in three bytes.

DeepSeek-V4, compressed-tensors (0.20), ModelOpt (0.47) and Quark (0.13) differ in names, and in the global scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia import Format, Level, ScaledTensor, ScalingRecipe
from breccia.backend import E2M1, E2M3, E3M2, E4M3, E8M0, F32, TENSOR, Entry, StoredForm, StoredValue, ValueForm, packing

from ..text import spelled
from .scales import assembled, check_scale, widened
from .writing import parts_of, refused


def form(value: StoredValue, codes: str, scale: str, recipe: ScalingRecipe, is_transposed: bool = False) -> ValueForm:
    """Codes (..., N, bytes), and scales (..., N, K / block). codes, scale: the ends of their names.

    is_transposed: whether they are (..., bytes, N) and (..., K / block, N), of the model's (..., K, N).
    """
    shape = value.entries[codes].shape
    value.need(len(shape) > 1, f"{codes!r} has shape {spelled(shape)}; a weight has two axes or more.", shape=shape)
    count, size = packing(recipe.format.element)
    *lead, rows, length = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
    value.need(length % size == 0, f"{codes!r} has {length} bytes along K; {count} codes take {size}.", shape=shape)
    columns, block = length // size * count, recipe.format.scale.block[1] or 1
    blocks = -(-columns // block)
    value.need_shape(scale, (*lead, blocks, rows) if is_transposed else (*lead, rows, blocks))
    return ValueForm(recipe, (*lead, rows, columns), is_transposed=is_transposed)


def read(value: StoredValue, form: ValueForm, codes: str, scale: str, global_scale: str | None = None) -> ScaledTensor:
    """Codes and scales as they are, or in memory with K as the last axis.

    global_scale: the end of its name: one number, or one for each matrix.
    """
    check_scale(value, scale, widened(value, scale))
    level, numbers = form.recipe.format.global_scale, None
    if global_scale is not None:
        numbers = widened(value, global_scale)
        check_scale(value, global_scale, numbers)
        divides = level is not None and level.convention == "divisor"
        value.need(not divides or bool(np.all(numbers)), f"{global_scale!r} is 0, and scales are divided by it.")
    if form.is_transposed:
        parts = [np.ascontiguousarray(np.swapaxes(value[end], -1, -2)) for end in (codes, scale)]
        return assembled(form, *parts, global_scale=numbers)
    return assembled(form, value.view(codes).view(np.uint8), value[scale], global_scale=numbers)


def kind_of(form: ValueForm) -> str:
    """ "mxfp4", "mxfp6", "nvfp4", by the format; "" for others.

    "nvfp4" is any with E4M3 scales per 16 codes, with a global scale in FP32 of any convention and order, or without.
    """
    fmt = form.recipe.format
    if fmt.offset != "none" or fmt.features - {"scales_first"}:
        return ""
    if fmt == Format(fmt.element, (Level(E8M0, (1, 32)),)):
        return "mxfp4" if fmt.element == E2M1 else "mxfp6" if fmt.element in (E2M3, E3M2) else ""
    level = fmt.global_scale
    is_global = level is None or (level.codec, level.block) == (F32, TENSOR)
    return "nvfp4" if fmt.element == E2M1 and fmt.block_levels == (Level(E4M3, (1, 16)),) and is_global else ""


def stored_as(
    form: ValueForm,
    dialect: str,
    codes: tuple[str, str],
    scale: tuple[str, str],
    global_scale: tuple[str, tuple[int, ...]] | None = None,
    **settings: Any,
) -> StoredForm:
    """Codes and scales as parts of a file, the scale first; of a form that is transposed (..., bytes, N) and (..., blocks, N).

    codes, scale: the ends of their names, and their dtypes: `("weight", "U8")`. global_scale: the end of its name, and its
    shape. settings: of the module. Raises UnsupportedError, naming `dialect`, for K that does not fill its blocks.
    """
    count, size = packing(form.recipe.format.element)
    block = form.recipe.format.scale.block[1] or 1
    *lead, rows, columns = form.shape
    if columns % block:
        raise refused(
            form,
            dialect,
            f"{columns} columns are no whole number of blocks of {block}; leave this weight as it is: exclude= (--exclude)",
        )
    shapes = [(*lead, rows, length) for length in (columns // block, columns // count * size)]
    if form.is_transposed:
        shapes = [(*lead, length, rows) for *_, length in shapes]
    entries = {end: Entry(dtype, shape) for (end, dtype), shape in zip((scale, codes), shapes, strict=True)}
    if global_scale is not None:
        entries[global_scale[0]] = Entry("F32", global_scale[1])
    return StoredForm(entries, settings)


def write(st: ScaledTensor, stored: StoredForm, is_transposed: bool = False) -> dict[str, np.ndarray]:
    """Codes and scales as they are. is_transposed: whether the file has K as the axis before the last."""
    ends = dict(zip(("scale", "data", "global_scale"), stored.entries, strict=False))
    if not is_transposed:
        return parts_of(st, stored, **ends)
    flipped = {
        end: Entry(entry.dtype, (*entry.shape[:-2], *entry.shape[:-3:-1]) if end != ends.get("global_scale") else entry.shape)
        for end, entry in stored.entries.items()
    }
    parts = parts_of(st, StoredForm(flipped), **ends)
    return {
        end: array if end == ends.get("global_scale") else np.ascontiguousarray(np.swapaxes(array, -1, -2))
        for end, array in parts.items()
    }
