"""MXFP4, MXFP6 and NVFP4 codes in bytes, as breccia packs them along K: two codes of 4 bits (the even one in the low bits), or
four of 6 bits in three bytes.

DeepSeek-V4, compressed-tensors (0.20), ModelOpt (0.47) and Quark (0.13) differ in names, and in the global scale.
"""

from __future__ import annotations

import numpy as np

from breccia import ScaledTensor, ScalingRecipe
from breccia.backend import StoredValue, ValueForm, packing

from ..text import spelled
from .scales import assembled, check_scale, widened


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
