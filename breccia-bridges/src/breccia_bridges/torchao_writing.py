"""What torchao's classes hold for a ScaledTensor: its class, and one writer for each.

`WRITERS[class name](tensor, options, class)` returns the arguments for codes and scales. `options` are the others, from `like=`
and keywords: a writer sets those that follow from the format, and drops those that do not apply. All raise DialectError for
a format or layout that the class does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from breccia import DialectError, NVFP4BlockScaling, ScaledTensor
from breccia.backend import E2M1, E2M3, E3M2, E4M3, E5M2, TENSOR, targets

from .recipes import SignedInt4Scaling
from .torchao_codes import mx_element, unpacked
from .torchao_parts import FP8, SWIZZLE
from .wrapping import IntegerRecipe


def _to_float8(scaled: ScaledTensor, options: dict[str, Any], kind: type) -> dict[str, Any]:
    scaled = scaled.to_plain()
    element = scaled.recipe.format.element
    if element.name not in FP8.values() or scaled.recipe.format.scale.codec.bits != 32:
        raise _unlike(scaled, "Float8Tensor", "FP8 codes under FP32 scales")
    block = _block_size(scaled, "Float8Tensor")
    data = scaled.data
    if data.dtype == torch.uint8:
        data = data.view(getattr(torch, str(element.dtype)))
    scale = scaled.scale.reshape([n // b for n, b in zip(scaled.shape, block, strict=True)])
    _keep_block(options, block)
    return {"qdata": data, "scale": scale, "block_size": options.get("block_size") or block}


def _to_int8(scaled: ScaledTensor, options: dict[str, Any], kind: type) -> dict[str, Any]:
    return _to_integers(scaled, options, kind.__name__, 8)


def _to_intx(scaled: ScaledTensor, options: dict[str, Any], kind: type) -> dict[str, Any]:
    bits = scaled.recipe.format.element.bits
    fields = _to_integers(scaled, options, kind.__name__, bits)
    options.setdefault("target_dtype", getattr(torch, f"int{bits}"))
    options.setdefault("activation_quantization", None)
    if fields["zero_point"] is None:
        fields["zero_point"] = torch.zeros_like(fields["scale"], dtype=torch.int8)
    return fields


def _to_integers(scaled: ScaledTensor, options: dict[str, Any], name: str, bits: int) -> dict[str, Any]:
    scaled = scaled.to_plain()
    fmt = scaled.recipe.format
    if not isinstance(scaled.recipe, IntegerRecipe) or fmt.element.bits != bits or fmt.offset == "bias":
        raise _unlike(scaled, name, f"integers of {bits} bits without a bias")
    block, half = _block_size(scaled, name), 8 if bits == 4 else 128
    signed = scaled.recipe.signed
    codes = unpacked(scaled) if bits == 4 else scaled.data.view(torch.uint8)
    zero = scaled.zero_point
    if signed:
        data = (((codes + half) & (2 * half - 1)) - half).to(torch.int8) if bits == 4 else codes.view(torch.int8)
    else:
        data = (codes.to(torch.int16) - half).to(torch.int8)
        zero = torch.zeros_like(scaled.scale, dtype=torch.int16) if zero is None else zero
        floating = zero.dtype.is_floating_point
        zero = zero - half if floating else (zero.to(torch.int16) - half)
        if not floating:
            if bool(((zero < -128) | (zero > 127)).any()):
                raise DialectError(f"torchao's {name} has zero-points in int8; some of this tensor's lie outside {-half}..127.")
            zero = zero.to(torch.int8)
        elif name == "IntxUnpackedToInt8Tensor" and options.get("dtype") is not None:
            narrow = zero.to(scaled.scale.dtype)
            zero = narrow if torch.equal(narrow.float(), zero.float()) else zero
    shape = [n // b for n, b in zip(scaled.shape, block, strict=True)]
    scale = scaled.scale.reshape(shape)
    zero = None if zero is None else zero.reshape(shape)
    wanted = options.get("block_size")
    if wanted is not None and list(wanted) == list(scaled.shape) and list(wanted) != block:  # like= has one scale for all
        first = (slice(0, 1),) * scale.ndim
        if not torch.equal(scale, scale[first].expand_as(scale)):
            raise DialectError(f"like= has one scale for the whole tensor; this tensor has different ones: {scaled!r}.")
        scale, zero, block = scale[first], None if zero is None else zero[first], list(wanted)
    if zero is None and options.pop("zero_point", None) is not None:
        zero = torch.zeros_like(scale, dtype=torch.int8)
    _keep_block(options, block)
    return {"qdata": data, "scale": scale, "zero_point": zero, "block_size": options.get("block_size") or block}


def _to_int4(scaled: ScaledTensor, options: dict[str, Any], kind: type) -> dict[str, Any]:
    if not isinstance(scaled.recipe, SignedInt4Scaling):
        raise _unlike(scaled, "Int4Tensor", "signed 4-bit integers with a float bias")
    block = _block_size(scaled.to_plain(), "Int4Tensor")
    if scaled.axis != -1:
        raise DialectError(f"torchao's Int4Tensor has groups along the last axis; this tensor is {scaled!r}. Pass its .mT.")
    stored = scaled.to_storage("transposed")
    for name in ("dtype", "zero_point"):
        options.pop(name, None)
    _keep_block(options, block)
    parts = {"qdata": stored.data.view(torch.int8), "scale": stored.scale, "zero_point": stored.zero_point}
    return parts | {"block_size": options.get("block_size") or block, "shape": torch.Size(scaled.shape)}


def _to_mx(scaled: ScaledTensor, options: dict[str, Any], kind: type) -> dict[str, Any]:
    fmt = scaled.recipe.format
    if fmt.element not in (E4M3, E5M2, E2M3, E3M2, E2M1) or fmt.scale.codec.name != "E8M0" or len(fmt.levels) > 1:
        raise _unlike(scaled, "MXTensor", "an MX format of FP8, FP6 or FP4")
    fields = _to_blocks(scaled, "MXTensor", torch.float8_e8m0fnu)
    if fmt.element in (E2M3, E3M2):
        fields["qdata"] = unpacked(scaled).to(torch.uint8)
    elif fmt.element is not E2M1:
        fields["qdata"] = fields["qdata"].view(mx_element(fmt.element))
    options.setdefault("act_quant_kwargs", None)
    if "kernel_preference" not in options:
        options["kernel_preference"] = targets.load("torchao.quantization.quantize_.common:KernelPreference").EMULATED
    return fields | {"elem_dtype": mx_element(fmt.element), "block_size": 32}


def _to_nvfp4(scaled: ScaledTensor, options: dict[str, Any], kind: type) -> dict[str, Any]:
    recipe = scaled.recipe
    if not isinstance(recipe, NVFP4BlockScaling) or recipe.scale_format != "E4M3":
        raise _unlike(scaled, "NVFP4Tensor", "NVFP4 with E4M3 scales")
    if recipe.global_sense != "multiplier":
        raise DialectError(
            f"torchao stores the tensor scale of NVFP4 as a multiplier, amax / 2688; this tensor has it as "
            f"{recipe.global_sense}. "
            "Converting it can round; requantize to breccia.NVFP4BlockScaling() if that is acceptable.",
            found=recipe.global_sense,
        )
    fields, global_scale = _to_blocks(scaled, "NVFP4Tensor", torch.float8_e4m3fn), scaled.global_scale
    if global_scale is not None and global_scale.ndim:
        if scaled.ndim != 3 or global_scale.ndim != 1:
            raise DialectError(f"torchao has one tensor scale for all, or one per expert of a 3-D tensor; got {scaled!r}.")
        global_scale = global_scale[:, None, None]
    return fields | {"block_size": 16, "per_tensor_scale": global_scale}


def _to_blocks(scaled: ScaledTensor, name: str, scale_dtype: torch.dtype) -> dict[str, Any]:
    """qdata, scale and is_swizzled_scales of blocks within a row."""
    transposed = scaled.axis == -2
    scaled = scaled.mT if transposed else scaled
    swizzled = scaled.layout.storage == SWIZZLE
    scaled = scaled if swizzled else scaled.to_plain()
    if scaled.layout.plain.partial or scaled.ndim < 2 or scaled.padding:
        raise DialectError(f"torchao's {name} has whole blocks along the last axis; this tensor is {scaled!r}.")
    data, scale = scaled.data, scaled.scale
    if swizzled:
        *lead, down, along, _ = scale.shape
        scale = scale.reshape(*lead, 32 * down, 16 * along)
    scale = scale if scale.dtype == scale_dtype else scale.view(scale_dtype)
    if transposed:
        data, scale = data.mT, scale.mT
    return {"qdata": data, "scale": scale, "is_swizzled_scales": swizzled}


WRITERS: dict[str, Callable[[ScaledTensor, dict[str, Any], type], dict[str, Any]]] = {
    "Float8Tensor": _to_float8,
    "Int8Tensor": _to_int8,
    "IntxUnpackedToInt8Tensor": _to_intx,
    "Int4Tensor": _to_int4,
    "MXTensor": _to_mx,
    "NVFP4Tensor": _to_nvfp4,
}


def class_for(scaled: ScaledTensor) -> str:
    """The torchao class of a tensor's format. Raises DialectError."""
    recipe, fmt = scaled.recipe, scaled.recipe.format
    if isinstance(recipe, NVFP4BlockScaling):
        return "NVFP4Tensor"
    if isinstance(recipe, SignedInt4Scaling):
        return "Int4Tensor"
    if fmt.scale.codec.name == "E8M0" and fmt.element in (E4M3, E5M2, E2M3, E3M2, E2M1):
        return "MXTensor"
    if fmt.element.name in FP8.values() and fmt.scale.codec.bits == 32:
        return "Float8Tensor"
    if isinstance(recipe, IntegerRecipe) and fmt.element.bits in (4, 8) and fmt.offset != "bias":
        by_rows = fmt.element.bits == 8 and recipe.signed and scaled.layout.block(scaled.axis) == (1, None)
        return "Int8Tensor" if by_rows else "IntxUnpackedToInt8Tensor"  # Int8Tensor's linear ignores zero-points
    raise _unlike(scaled, "classes", "FP8, INT8, INT4 without a bias, MX and NVFP4")


def _block_size(scaled: ScaledTensor, name: str) -> list[int]:
    """torchao's block_size: the shape of the elements that share a scale. Raises DialectError for partial blocks."""
    shape = scaled.shape
    if scaled.layout.partial or len(shape) < 2:
        raise DialectError(
            f"torchao's {name} has whole blocks; this tensor has shape {shape} and {scaled.layout}. Cast its values padded.",
            shape=shape,
        )
    m, k = scaled.layout.block(scaled.axis)
    if (m, k) == TENSOR and not scaled.scale.shape:
        return list(shape)
    if (m, k) == TENSOR and len(scaled.scale.shape) != len(shape) - 2:
        raise DialectError(f"torchao's {name} has one scale for all matrices or one for each; this tensor is {scaled!r}.")
    rows, length = (shape[-2], shape[-1]) if scaled.axis == -1 else (shape[-1], shape[-2])
    pair = [m or rows, k or length]
    return [1] * (len(shape) - 2) + (pair if scaled.axis == -1 else pair[::-1])


def _keep_block(options: dict[str, Any], block: list[int]) -> None:
    """Raise DialectError if block_size, of `like` or a keyword, is another one than the tensor's; `like` keeps its type."""
    wanted = options.get("block_size")
    if wanted and list(wanted) != block:
        raise DialectError(f"block_size is {list(wanted)} in like= or the keywords, and {block} in the tensor.", found=block)


def _unlike(scaled: ScaledTensor, name: str, wanted: str) -> DialectError:
    return DialectError(
        f"torchao's {name} hold {wanted}; this tensor is {scaled.recipe!r}. Requantize it first: "
        "breccia.requantize(st, breccia.MXFP8BlockScaling()), for example.",
        recipe=scaled.recipe,
    )
