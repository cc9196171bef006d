"""FP8 codes with float scales or powers of two: per tensor, per row, per block.

DeepSeek-V3 and V4 (their model cards and inference code), transformers' `fp8` and `fbgemm_fp8` (5.24), ModelOpt's FP8 (0.47)
and compressed-tensors' float-quantized and mxfp8-quantized (0.20) differ in names, and in the shapes of scales.
"""

from __future__ import annotations

from reprlib import repr as short
from typing import Any

from breccia import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Format,
    Level,
    MXFP8BlockScaling,
    ScaledTensor,
    ScalingRecipe,
)
from breccia.backend import E8M0, F32, TENSOR, Entry, Shape, StoredForm, StoredValue, ValueForm

from ..text import spelled
from .scales import POWERS, assembled, check_scale, widened
from .writing import parts_of

#: The formats of FP8 codes, by the dtype of the file.
FORMATS = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2", "F8_E4M3FNUZ": "E4M3FNUZ", "F8_E5M2FNUZ": "E5M2FNUZ"}
#: The dtypes, by the name of the codec.
DTYPES = {name: dtype for dtype, name in FORMATS.items()}
#: Those of MX; others have powers of two in FP32.
_MX = ("E4M3", "E5M2")
#: The block of a scale where no config says another.
TILE = (128, 128)


def form(value: StoredValue) -> ValueForm:
    """Codes of any number of axes, and the scales that their shape tells apart."""
    return form_of(value, value.settings.get("weight_block_size", TILE))


def form_of(value: StoredValue, size: Any) -> ValueForm:
    """The same. size: rows and columns of a block as a list; None where scales are not per block, `TILE` if they may be."""
    scale_end, codes_end = list(value.entries)[:2]
    codes, scale = value.entries[codes_end], value.entries[scale_end]
    shape, fmt = codes.shape, FORMATS[codes.dtype]
    value.need(len(shape) > 1, f"its codes have shape {spelled(shape)}; a weight has two axes or more.", shape=shape)
    scales = _squeezed(scale.shape, len(shape))
    *lead, rows, columns = shape
    valid = isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    value.need(size is None or valid, f"weight_block_size is two integers >= 1; found {short(size)}. Fix config.json.")
    block = tuple(size) if size is not None else None
    if block and scales == (*lead, -(-rows // block[0]), -(-columns // block[1])):
        return ValueForm(_of_blocks(fmt, block, scale.dtype), shape)
    if scale.dtype in POWERS and scales == (*lead, rows, -(-columns // 32)):
        return ValueForm(_of_blocks(fmt, (1, 32), scale.dtype), shape)
    if scales in ((), (1,), (1,) * len(shape)) and size in (None, TILE):
        return ValueForm(Float8CurrentScaling(fmt), shape)
    if scales in ((*lead, rows, 1), (*lead, rows)):
        return ValueForm(Float8RowScaling(fmt), shape)
    tiles = spelled((*lead, -(-rows // TILE[0]), -(-columns // TILE[1])))
    value.need(
        False,
        f"codes of shape {spelled(shape)} need a scale of shape {tiles}, one per {spelled(block or TILE)}, one per row, or "
        f"one; {scale_end!r} has shape {spelled(scale.shape)}. Check weight_block_size in config.json, or "
        "download the checkpoint again.",
        shape=scale.shape,
    )
    raise AssertionError


def _squeezed(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """ModelOpt's scales of tiles have an axis of length one after each: (rows, 1, columns, 1)."""
    return shape[::2] if len(shape) == 2 * ndim and set(shape[1::2]) == {1} else shape


def _of_blocks(fmt: str, block: tuple[int, ...], dtype: str) -> ScalingRecipe:
    m, k = block
    if dtype in POWERS and block == (1, 32) and fmt in _MX:
        return MXFP8BlockScaling(fmt)
    return Float8BlockScaling(fmt, block_k=k, block_m=m, power_of_two_scale=dtype in POWERS)


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """The codes as they are; scales in FP32, or as the bytes of E8M0 where the recipe has them."""
    scale_end, codes_end = list(value.entries)[:2]
    scale = widened(value, scale_end)
    check_scale(value, scale_end, scale)
    if form.recipe.format.scale.codec.bits == 8:
        scale = value[scale_end]
    return assembled(form, value.view(codes_end), scale)


def kind_of(form: ValueForm) -> str:
    """What a scale of FP8 codes is for: "tensor", "row", "block", or "mx" (32 codes, in E8M0); "" for what is not FP8.

    Other scales are multipliers in FP32.
    """
    fmt = form.recipe.format
    if fmt.element.name not in DTYPES or fmt != Format(fmt.element, (Level(fmt.scale.codec, fmt.block),)):
        return ""
    match fmt.scale.codec, fmt.block:
        case codec, (1, 32) if codec == E8M0:
            return "mx"
        case codec, block if codec != F32:
            return ""
        case _, block if block == TENSOR:
            return "tensor"
        case _, (1, None):
            return "row"
        case _, (int(), int()):
            return "block"
        case _:
            return ""


def is_power_of_two(form: ValueForm) -> bool:
    """Whether scales per block are declared to be powers of two, which E8M0 holds; `write` verifies it."""
    return bool(getattr(form.recipe, "power_of_two_scale", False))


def stored_as(
    form: ValueForm, codes: str, scale: str, shape: Shape | None = None, dtype: str = "F32", **settings: Any
) -> StoredForm:
    """Codes of one of `kind_of` and their scales as the parts `codes` and `scale`, the scale first as `read` takes them.

    shape: of the scale; by default (), (..., N, 1), or the grid of blocks. dtype: "F32", or one of `POWERS` for powers of two.
    settings: of the module.
    """
    grid = form.fitted_layout.plain.scale_shapes(form.shape)[0] if shape is None else shape
    return StoredForm({scale: Entry(dtype, grid), codes: Entry(DTYPES[form.recipe.format.element.name], form.shape)}, settings)


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, Any]:
    """The codes as they are; scales in FP32, or as bytes of E8M0. Raises DialectError for scales that E8M0 does not hold."""
    scale_end, codes_end = list(stored.entries)[:2]
    return parts_of(st, stored, data=codes_end, scale=scale_end)
