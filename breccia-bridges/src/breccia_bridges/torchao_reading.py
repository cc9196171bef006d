"""What a torchao tensor holds, as a ScaledTensor: one reader for each class.

`READERS[class name](tensor, recipe)`, where `recipe` is the caller's choice or None. All raise DialectError for attributes that
contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from breccia import DialectError, InStorage, NVFP4BlockScaling, ScaledTensor, ScalingRecipe
from breccia.backend import E2M3, E3M2, FLOATS, TENSOR, Array, dtype_name, ops_of
from breccia.internal import FLOAT_NAMES

from .recipes import SignedInt4Scaling
from .torchao_codes import FP8_DTYPES, is_transposed, packed
from .torchao_parts import SWIZZLE, integer_form, matrix_block, moved, mx_recipe, nvfp4_recipe, unsigned
from .wrapping import attribute, buffer, buffer_or_none, check_padding, chosen, float8_recipe, lengths, title, wrapped

Tensor = Any


def _float8(tensor: Tensor, recipe: ScalingRecipe | None) -> ScaledTensor:
    data, scale = buffer(tensor, "qdata"), buffer(tensor, "scale")
    fmt = FP8_DTYPES.get(data.dtype)
    if fmt is None:
        listed = ", ".join(map(str, FP8_DTYPES))
        raise DialectError(f"{title(tensor)} has codes in {data.dtype}; a recipe exists for {listed}.", found=data.dtype)
    block = lengths(tensor, "block_size")
    if not block and scale.numel() == 1:
        block = list(data.shape)
    m, k, axis = matrix_block(title(tensor), tuple(data.shape), tuple(scale.shape), block)
    if recipe is not None and list(recipe.format.scale.block) == block[-2:]:
        m, k, axis = *block[-2:], -1  # blocks as long as the rows: both readings decode alike, and the caller chose
    if (m, k) == TENSOR:
        scale = scale.reshape(scale.shape[:-2] if any(n > 1 for n in scale.shape) else ())
    inferred = float8_recipe(fmt, (m, k))
    tensor_recipe = chosen(recipe, inferred, tensor)
    return wrapped(tensor, data, scale, tensor_recipe, layout=inferred.layout.oriented(axis), axis=axis)


def _int8(tensor: Tensor, recipe: ScalingRecipe | None) -> ScaledTensor:
    if getattr(tensor, "act_pre_scale", None) is not None:
        raise DialectError(
            f"{title(tensor)} has act_pre_scale: its layer multiplies the inputs by it, so the weight alone is not that of the "
            "model. Fold the factor into the layer before, or quantize without SmoothQuant and AWQ."
        )
    return _integers(tensor, recipe, 8)


def _intx(tensor: Tensor, recipe: ScalingRecipe | None) -> ScaledTensor:
    """Integers of up to 8 bits, one to a byte; those of 4 bits are packed, others stay 8-bit codes."""
    target = attribute(tensor, "target_dtype")
    digits = str(target).rpartition("torch.int")[2]
    if digits not in map(str, range(1, 9)):
        raise DialectError(f"{title(tensor)} has target_dtype={target}; this bridge reads torch.int1 to int8.", found=target)
    bits = int(digits)
    data = buffer(tensor, "qdata")
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if bool(((data < low) | (data > high)).any()):
        raise DialectError(
            f"{title(tensor)}: codes of {target} lie in {low}..{high}; found {int(data.min())}..{int(data.max())}."
        )
    return _integers(tensor, recipe, 4 if bits == 4 else 8)


def _integers(tensor: Tensor, recipe: ScalingRecipe | None, bits: int) -> ScaledTensor:
    data, scale, zero = buffer(tensor, "qdata"), buffer(tensor, "scale"), buffer_or_none(tensor, "zero_point")
    return _of_integers(tensor, recipe, bits, data, scale, zero, lengths(tensor, "block_size"))


def _of_integers(
    tensor: Tensor, recipe: ScalingRecipe | None, bits: int, data: Array, scale: Array, zero: Array | None, block: list[int]
) -> ScaledTensor:
    """Signed codes in int8; symmetric if all zero-points are 0, else unsigned codes with zero-points moved as much."""
    scale_dtype = FLOAT_NAMES.get(dtype_name(scale))
    if scale_dtype is None or data.dtype != torch.int8:
        raise DialectError(
            f"{title(tensor)} has codes in {data.dtype} and scales in {scale.dtype}; recipes have int8 codes and scales in "
            f"{', '.join(FLOATS)}."
        )
    if zero is not None and zero.shape != scale.shape:
        raise DialectError(
            f"{title(tensor)} has scales of shape {tuple(scale.shape)} and zero-points of shape {tuple(zero.shape)}; every "
            "block has one of each.",
            expected=tuple(scale.shape),
            found=tuple(zero.shape),
        )
    zero = None if zero is None or not bool((zero != 0).any()) else zero
    asymmetric, shape = zero is not None, tuple(data.shape)
    form = integer_form(title(tensor), bits, shape, tuple(scale.shape), block, scale_dtype, asymmetric)
    tensor_recipe, axis = chosen(recipe, form.recipe, tensor), form.axis
    scale, codes = scale.expand(form.scale), unsigned(data, bits) if asymmetric else data
    if zero is not None:
        floating = zero.dtype.is_floating_point
        zero = moved(title(tensor), zero.float(), bits) if floating else unsigned(zero.to(torch.int8), bits)
    if bits == 4:
        codes = packed(ops_of(codes).load(codes) & 15, tensor_recipe.format.element, axis)
    return wrapped(
        tensor,
        codes,
        scale,
        tensor_recipe,
        layout=form.layout,
        zero_point=None if zero is None else zero.expand(form.scale),
        axis=axis,
        shape=shape,
    )


def _mx(tensor: Tensor, recipe: ScalingRecipe | None) -> ScaledTensor:
    data, scale, size = buffer(tensor, "qdata"), buffer(tensor, "scale"), attribute(tensor, "block_size")
    if size != 32:
        raise DialectError(f"{title(tensor)} has block_size={size}; the MX recipes have blocks of 32.", found=size)
    inferred = mx_recipe(title(tensor), str(attribute(tensor, "elem_dtype")))
    element = inferred.format.element
    if element in (E2M3, E3M2):
        if data.dtype != torch.uint8 or bool((data >= 64).any()):
            raise DialectError(
                f"{title(tensor)} has FP6 codes in {data.dtype}, up to {int(data.max())}; they are torch.uint8 below 64.",
                found=data.dtype,
            )
        axis = -2 if is_transposed(data) else -1
        data = packed(ops_of(data).load(data), element, axis)
    return _blocks(tensor, data, scale, None, chosen(recipe, inferred, tensor))


def _nvfp4(tensor: Tensor, recipe: ScalingRecipe | None) -> ScaledTensor:
    data, scale, size = buffer(tensor, "qdata"), buffer(tensor, "scale"), attribute(tensor, "block_size")
    if size != 16:
        raise DialectError(f"{title(tensor)} has block_size={size}; NVFP4 has blocks of 16.", found=size)
    global_scale = buffer_or_none(tensor, "per_tensor_scale")
    inferred = nvfp4_recipe(global_scale is not None)
    if isinstance(recipe, NVFP4BlockScaling) and global_scale is not None:
        inferred = replace(inferred, order=recipe.order)  # the caller may choose faster products over torchao's last bits
    if global_scale is not None:
        if global_scale.numel() != math.prod(global_scale.shape[:-2]):
            raise DialectError(
                f"{title(tensor)} has per_tensor_scale of shape {tuple(global_scale.shape)}; it is one number, or one for each "
                "expert, of shape (experts, 1, 1).",
                found=tuple(global_scale.shape),
            )
        global_scale = global_scale.reshape(global_scale.shape[:-2])
    return _blocks(tensor, data, scale, global_scale, chosen(recipe, inferred, tensor))


def _blocks(tensor: Tensor, data: Array, scale: Array, global_scale: Array | None, recipe: ScalingRecipe) -> ScaledTensor:
    """Codes of blocks within a row, plain or swizzled; transposed if their strides are."""
    if data.dtype == torch.float4_e2m1fn_x2:
        data = data.view(torch.uint8)
    if transposed := is_transposed(tensor.qdata):
        data, scale = data.mT, scale.mT
    layout = recipe.layout
    if attribute(tensor, "is_swizzled_scales"):
        *lead, rows, columns = (0, *scale.shape) if scale.ndim > 1 else (0, 1, 1)
        if rows % 32 or columns % 16:
            raise DialectError(
                f"{title(tensor)} has swizzled scales of shape {tuple(scale.shape)}: not tiles of 32 x 16 bytes."
            )
        scale = scale.reshape(*lead[1:], rows // 32, columns // 16, 512)
        layout = InStorage(layout, SWIZZLE)
    st = wrapped(tensor, data, scale, recipe, layout=layout, global_scale=global_scale)
    check_padding(st, title(tensor), "scale", "Quantize the tensor again.")
    return st.mT if transposed else st


def _int4(tensor: Tensor, recipe: ScalingRecipe | None) -> ScaledTensor:
    """Signed codes with a float bias; scales and biases lie transposed, (K / group, N)."""
    if getattr(tensor, "act_pre_scale", None) is not None:
        raise DialectError(f"{title(tensor)} has act_pre_scale, by which its layer multiplies the inputs. Fold it in before.")
    data, scale, bias = (buffer(tensor, name) for name in ("qdata", "scale", "zero_point"))
    *lead, rows, group = lengths(tensor, "block_size") if len(lengths(tensor, "block_size")) > 1 else (0, 1)
    dtype = FLOAT_NAMES.get(dtype_name(scale))
    shape = (*data.shape[:-1], 2 * data.shape[-1])
    expected = (*shape[:-2], shape[-1] // group, shape[-2])
    if rows != 1 or any(n != 1 for n in lead) or dtype is None or tuple(scale.shape) != expected or bias.dtype != scale.dtype:
        raise DialectError(
            f"{title(tensor)} of shape {shape} with block_size {[*lead, rows, group]} has scales and biases of shape "
            f"{expected} and "
            f"one float dtype; found {tuple(scale.shape)} of {scale.dtype} and {tuple(bias.shape)} of {bias.dtype}.",
            expected=expected,
            found=tuple(scale.shape),
        )
    inferred = SignedInt4Scaling(group, dtype)
    layout = InStorage(inferred.layout, "transposed")
    return wrapped(tensor, data.view(torch.uint8), scale, chosen(recipe, inferred, tensor), layout=layout, zero_point=bias)


def _affine(tensor: Tensor, recipe: ScalingRecipe | None) -> ScaledTensor:
    """AffineQuantizedTensor: torchao before 0.16, with plain layouts; by attributes, in any of the spellings it had."""
    inner = next((impl for n in ("tensor_impl", "layout_tensor") if (impl := getattr(tensor, n, None)) is not None), None)
    if inner is not None and hasattr(inner, "get_plain"):
        data, scale, zero = inner.get_plain()
    else:
        data, scale, zero = buffer(tensor, "int_data"), buffer(tensor, "scale"), getattr(tensor, "zero_point", None)
    domain = getattr(getattr(tensor, "zero_point_domain", None), "name", "INT")
    if domain not in ("INT", "NONE"):
        raise DialectError(f"{title(tensor)} has zero-points in domain {domain}, values instead of codes; no recipe has these.")
    shape = tuple(data.shape)
    if scale.numel() == 1:
        scale = scale.reshape((1,) * data.ndim)
    elif scale.ndim == data.ndim - 1:
        scale = scale[..., None]
    if scale.ndim != data.ndim or 0 in scale.shape or (zero is not None and zero.numel() != scale.numel()):
        raise DialectError(
            f"{title(tensor)} has codes of shape {shape}, scales of shape {tuple(scale.shape)} and "
            f"{'no' if zero is None else zero.numel()} zero-points, which contradict each other.",
            found=tuple(scale.shape),
        )
    zero = zero if zero is None else zero.reshape(scale.shape)
    block = list(getattr(tensor, "block_size", None) or (n // s for n, s in zip(shape, scale.shape, strict=True)))
    low, high = getattr(tensor, "quant_min", None), getattr(tensor, "quant_max", None)
    if data.dtype == torch.uint8:  # unsigned codes: the same values from signed ones
        half = 8 if (low, high) == (0, 15) else 128
        data = (data.to(torch.int16) - half).to(torch.int8)
        zero = zero.to(torch.int16) - half if zero is not None else torch.full_like(scale, -half, dtype=torch.int16)
        low, high = (None if n is None else n - half for n in (low, high))
    bits = 4 if (low, high) in ((-8, 7), (-7, 7)) else 8
    return _of_integers(tensor, recipe, bits, data, scale, zero, block)


READERS: dict[str, Callable[[Tensor, ScalingRecipe | None], ScaledTensor]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Int4Tensor": _int4,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
    "AffineQuantizedTensor": _affine,
}
