"""What the parts of torchao's tensors mean, by shapes and by names of dtypes: of tensors in memory and of those in files.

It imports neither torch nor torchao. `what` names the tensor in messages.

Source: torchao 0.18.0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from breccia import (
    DialectError,
    Layout,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerChannel,
    ScalingRecipe,
)
from breccia.backend import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, TENSOR, Array, Shape, ops_of

from .wrapping import integer_recipe

_WORKFLOWS = "torchao.quantization.quantize_.workflows"
#: Where torchao 0.18 defines its classes.
CLASSES = {
    "Float8Tensor": f"{_WORKFLOWS}.float8.float8_tensor",
    "Int8Tensor": f"{_WORKFLOWS}.int8.int8_tensor",
    "IntxUnpackedToInt8Tensor": f"{_WORKFLOWS}.intx.intx_unpacked_to_int8_tensor",
    "Int4Tensor": f"{_WORKFLOWS}.int4.int4_tensor",
    "MXTensor": "torchao.prototype.mx_formats.mx_tensor",
    "NVFP4Tensor": "torchao.prototype.mx_formats.nvfp4_tensor",
}
#: The storage of block scales in the order of cuBLAS.
SWIZZLE = "swizzle_128x4"
#: Formats of FP8 codes by torch's names of their dtypes.
FP8 = {str(codec.dtype): codec.name for codec in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)}
#: torchao's names of MX elements that have no dtype in torch.
FP6 = {"fp6_e2m3": "E2M3", "fp6_e3m2": "E3M2"}
FP4 = "float4_e2m1fn_x2"


def matrix_block(what: str, shape: Shape, scale: Shape, block: list[int]) -> tuple[int | None, int | None, int]:
    """(rows, length, axis) of a scale's block, None for all; the axis that blocks run along. Raises DialectError.

    shape, scale: of codes and scales. block: torchao's `block_size`, one length for each axis of the codes.
    """
    if len(block) != len(shape) or len(shape) < 2 or any(b < 1 or n % b for n, b in zip(shape, block, strict=True)):
        raise DialectError(
            f"{what} of shape {shape} has block_size {block}, which does not divide it; a matrix, or a stack of "
            "matrices, has whole blocks.",
            block_size=block,
            shape=shape,
        )
    expected = tuple(n // b for n, b in zip(shape, block, strict=True))
    if scale != expected and math.prod(scale) != 1:
        raise DialectError(
            f"{what} of shape {shape} with block_size {block} has scales of shape {expected}; found {scale}.",
            expected=expected,
            found=scale,
        )
    *lead, m, k = block
    if any(b != 1 for b in lead) and block != list(shape):
        raise DialectError(f"{what} has block_size {block}: scales that matrices share, which no layout describes.")
    if (m, k) == shape[-2:] and m > 1:
        return None, None, -1
    if k == shape[-1] and m == 1:
        return 1, None, -1
    if m == shape[-2] and k == 1:
        return 1, None, -2
    return m, k, -1


class IntegerForm(NamedTuple):
    """The recipe and layout of integers, the axis that their groups run along, and the shape to broadcast their scales to."""

    recipe: ScalingRecipe
    layout: Layout
    axis: int
    scale: Shape


def integer_form(
    what: str, bits: int, shape: Shape, scale: Shape, block: list[int], scale_dtype: str, asymmetric: bool
) -> IntegerForm:
    """The form of signed codes in int8: symmetric, or unsigned with zero-points moved as much. One scale for a whole matrix is
    repeated for its rows.

    bits: 4 or 8, the width of codes. scale_dtype: as recipes name it. Raises DialectError where no recipe has such blocks.
    """
    m, k, axis = matrix_block(what, shape, scale, block)
    if (m, k) == TENSOR:
        m, k, scale = 1, None, (*shape[:-1], 1)
    if m != 1:
        raise DialectError(f"{what} has one scale per {m} x {k} integers; recipes have one per row, or group of a row.")
    recipe = integer_recipe(bits, k, shape[axis], scale_dtype=scale_dtype, signed=not asymmetric, symmetric=not asymmetric)
    return IntegerForm(recipe, PerChannel() if k is None else recipe.layout.oriented(axis), axis, scale)


def half_of(bits: int) -> int:
    """By how much unsigned codes of a width are more than signed ones."""
    return 1 << (bits - 1)


def unsigned(codes: Array, bits: int) -> Array:
    """Signed codes of 4 or 8 bits, or their zero-points, in int8 as unsigned ones in uint8: 8 or 128 more."""
    return ops_of(codes).view(codes, "uint8") + half_of(bits)


def moved(what: str, zero: Array, bits: int) -> Array:
    """Float zero-points, as FP32, of signed codes as those of unsigned ones. Raises DialectError if one would be rounded."""
    half = half_of(bits)
    wide = zero + half
    if ops_of(zero).any(wide - half != zero):
        raise DialectError(f"{what} has float zero-points that cannot be moved to unsigned codes without rounding.")
    return wide


def mx_recipe(what: str, element: str, rule: str = "rceil") -> ScalingRecipe:
    """The recipe of MX elements, by torch's or torchao's name of them: "torch.float8_e4m3fn", "fp6_e2m3". Raises DialectError
    for others."""
    name = element.removeprefix("torch.")
    if FP8.get(name) in (E4M3.name, E5M2.name):
        return MXFP8BlockScaling(FP8[name], scale_rule=rule)
    if name == FP4:
        return MXFP4BlockScaling(scale_rule=rule)
    if name in FP6:
        return MXFP6BlockScaling(FP6[name], scale_rule=rule)
    raise DialectError(f"{what} has elements {element}, which no MX recipe has.", found=element)


def nvfp4_recipe(two_level: bool) -> NVFP4BlockScaling:
    """The recipe of an NVFP4Tensor, with a tensor scale, by which torchao multiplies those of blocks first, or without."""
    return NVFP4BlockScaling(order="scales_first") if two_level else NVFP4BlockScaling(two_level=False)
