"""What TransformerEngine's constructors take for a ScaledTensor: the class of its format, buffers, dtype and quantizer."""

from __future__ import annotations

import math
from typing import Any

import torch

from breccia import (
    DelayedScaling,
    DialectError,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScaledTensor,
    ScalingRecipe,
    TensorPair,
)
from breccia.backend import E4M3, E5M2, Array
from breccia.internal import check_scaled

from .transformer_engine_library import find, modules
from .wrapping import rounded_up

Tensor = Any


def pair_of(scaled: Any) -> tuple[ScaledTensor | None, ScaledTensor | None]:
    """(rowwise, columnwise). Raises UnsupportedError or DialectError where they do not belong together."""
    tensors = tuple(scaled) if isinstance(scaled, TensorPair) else (scaled,)
    for st in tensors:
        check_scaled("to_transformer_engine", st, "torch", also=", or a TensorPair of two")
    if len(tensors) == 1:
        return (tensors[0], None) if tensors[0].axis == -1 else (None, tensors[0])
    rows, columns = tensors
    if (rows.axis, columns.axis) != (-1, -2) or rows.shape != columns.shape or rows.recipe != columns.recipe:
        raise DialectError(
            "a TensorPair has one matrix with blocks along its last axis, and again along the one before it, under one "
            "recipe; got "
            f"{rows!r} and {columns!r}."
        )
    return rows, columns


def class_for(st: ScaledTensor) -> str:
    """The class of a tensor's format. Raises DialectError."""
    recipe, fmt = st.recipe, st.recipe.format
    fp8 = fmt.element in (E4M3, E5M2)
    if isinstance(recipe, DelayedScaling | Float8CurrentScaling) and fp8 and not st.scale.shape:
        return "Float8Tensor"
    if isinstance(recipe, Float8BlockScaling) and fp8 and fmt.scale.block in ((1, 128), (128, 128)):
        return "Float8BlockwiseQTensor"
    if isinstance(recipe, MXFP8BlockScaling) and fp8:
        return "MXFP8Tensor"
    if isinstance(recipe, NVFP4BlockScaling) and recipe.two_level and fmt.scale.codec == E4M3:
        if recipe.global_sense != "amax":
            raise DialectError(
                f"TransformerEngine stores an NVFP4 tensor's amax; this tensor has its scale as a "
                f"{recipe.global_sense}, and the "
                'conversion can round. Cast with breccia.NVFP4BlockScaling(global_sense="amax").',
                found=recipe.global_sense,
            )
        return "NVFP4Tensor"
    raise DialectError(
        "TransformerEngine has FP8 (E4M3 or E5M2) with one scale or in blocks of 1 x 128 or 128 x 128, MXFP8, and NVFP4 with "
        f"two levels and E4M3 scales; this tensor is {recipe!r}. Requantize it first: "
        "breccia.requantize(st, breccia.MXFP8BlockScaling()), for example.",
        recipe=recipe,
    )


def derived(st: ScaledTensor) -> ScaledTensor:
    """The columnwise tensor of the same codes. Raises DialectError where blocks would differ."""
    plain = st.to_plain()
    m, k = plain.layout.block(-1)
    if m != k:
        raise DialectError(
            f"columnwise data of {plain.recipe.name!r} have other blocks than rowwise ones and cannot be derived from "
            f"them. Pass "
            "breccia.cast_pair(x, recipe) instead.",
            recipe=plain.recipe,
        )
    return ScaledTensor(plain.data, plain.scale, plain.recipe, plain.layout, axis=-2)


def buffers(name: str, recipe: ScalingRecipe, pair: tuple[ScaledTensor | None, ScaledTensor | None]) -> dict[str, Any]:
    """The constructor's tensors."""
    rows, columns = pair
    if name == "Float8Tensor":
        turned = None if columns is None else _bytes(columns.data).movedim(-1, 0).contiguous()
        scale = (rows or columns).scale  # pyright: ignore[reportOptionalMemberAccess]
        data = None if rows is None else _bytes(rows.data).contiguous()
        return {"data": data, "data_transpose": turned, "fp8_scale_inv": scale.reshape(1)}
    arguments: dict[str, Any] = {}
    swizzled = [st.layout.storage == "swizzle_128x4" for st in pair if st is not None]
    for side, st in zip(("rowwise", "columnwise"), pair, strict=True):
        data = scale = amax = None
        if st is not None:
            turned = st if side == "rowwise" else st.mT
            if side == "columnwise" and turned.ndim != 2:
                raise DialectError(f"columnwise data are those of a matrix; this tensor has shape {st.shape}.", shape=st.shape)
            data, scale = _bytes(turned.data), _scales(name, turned, all(swizzled))
            if side == "columnwise" and name == "MXFP8Tensor":
                data, scale = data.mT, scale.mT
            data, scale = data.contiguous(), scale.contiguous()
            amax = None if st.global_scale is None else st.global_scale.reshape(-1)
        arguments[f"{side}_data"], arguments[f"{side}_scale_inv"] = data, scale
        if name == "NVFP4Tensor":
            if amax is not None and amax.numel() != 1:
                raise DialectError(
                    f"TransformerEngine has one amax for a tensor; this one has {amax.numel()}.", found=amax.numel()
                )
            arguments[f"amax_{side}"] = amax
    if name in ("MXFP8Tensor", "NVFP4Tensor"):
        if any(swizzled) and name == "MXFP8Tensor" and columns is not None:
            raise DialectError("columnwise MXFP8 scales swizzled for a GEMM have an order that breccia does not write.")
        arguments["with_gemm_swizzled_scales"] = all(swizzled)
    else:
        arguments["is_2D_scaled"] = recipe.format.scale.block == (128, 128)
    return arguments


def _scales(name: str, st: ScaledTensor, swizzled: bool) -> Array:
    """Scales of blocks within rows, padded as TransformerEngine has them: zero-copy if they lie so already."""
    m, k = st.recipe.format.scale.block
    assert m is not None and k is not None
    *lead, rows, length = st.shape
    if name == "MXFP8Tensor" and (length % 32 or math.prod((*lead, rows)) % 32):
        raise DialectError(f"TransformerEngine has MXFP8 matrices of multiples of 32; this tensor has shape {st.shape}.")
    if name == "NVFP4Tensor" and length % 16:
        raise DialectError(f"TransformerEngine has NVFP4 rows of multiples of 16; this tensor has shape {st.shape}.")
    if lead:
        if rows % m:
            raise DialectError(
                f"TransformerEngine's tiles would reach across the matrices of shape {st.shape}.", shape=st.shape
            )
        plain = st.to_plain()
        fields = (plain.recipe, plain.layout, None, plain.global_scale)
        scale = plain.scale.reshape(-1, plain.scale.shape[-1])
        st = ScaledTensor(plain.data.reshape(-1, plain.data.shape[-1]), scale, *fields)
    if name == "Float8BlockwiseQTensor":
        storage = "column_major" if m == 1 else "padded_1x4"
    else:
        storage = "swizzle_128x4" if swizzled else "padded_128x4"
    down, along = -(-st.shape[-2] // m), -(-st.shape[-1] // k)
    wanted = (along, rounded_up(down, 4)) if storage == "column_major" else (down, rounded_up(along, 4))
    wanted = wanted if name == "Float8BlockwiseQTensor" else (rounded_up(down, 128), rounded_up(along, 4))
    agrees = st.layout.storage == "plain" and storage.startswith("padded") and tuple(st.scale.shape) == wanted
    scale = st.scale if agrees else st.to_storage(storage).scale
    return (scale if scale.dtype == torch.float32 else scale.view(torch.uint8)).reshape(wanted)


def metadata(
    name: str, st: ScaledTensor, like: Tensor | None, quantizer: Any, pair: tuple[ScaledTensor | None, ScaledTensor | None]
) -> dict[str, Any]:
    """The constructor's dtype and quantizer."""
    key = "fp4_dtype" if name == "NVFP4Tensor" else "fp8_dtype"
    if like is not None:
        options = {key: getattr(like, f"_{key}"), "quantizer": quantizer or like._quantizer}
        if name == "NVFP4Tensor":
            options["nvfp4_use_4over6"] = getattr(like, "_nvfp4_use_4over6", False)
            options = options if hasattr(like, "_nvfp4_use_4over6") else {key: options[key], "quantizer": options["quantizer"]}
        return options
    dtypes = find("DType", ("transformer_engine.pytorch.constants", "transformer_engine_torch"))
    dtype = dtypes.kFloat4E2M1 if name == "NVFP4Tensor" else getattr(dtypes, f"kFloat8{element_name(st)}")
    return {key: dtype, "quantizer": quantizer or _quantizer(name, st, dtype)}


def _quantizer(name: str, st: ScaledTensor, dtype: Any) -> Any:
    """A quantizer of TransformerEngine that would write this format again."""
    recipe = st.recipe
    if isinstance(recipe, DelayedScaling):
        scale = st.scale.reshape(1).reciprocal()
        return find("Float8Quantizer", modules("Float8Tensor"))(scale, torch.zeros_like(scale), dtype)
    if isinstance(recipe, Float8CurrentScaling):
        return find("Float8CurrentScalingQuantizer", modules("Float8Tensor"))(dtype, device=st.data.device)
    if isinstance(recipe, Float8BlockScaling):
        build = find("Float8BlockQuantizer", modules(name))
        options = {"force_pow_2_scales": recipe.power_of_two_scale, "block_scaling_dim": 1 if recipe.block_m == 1 else 2}
        return build(dtype, rowwise=True, columnwise=True, **options)
    return find("MXFP8Quantizer" if name == "MXFP8Tensor" else "NVFP4Quantizer", modules(name))(dtype)


def element_name(st: ScaledTensor) -> str:
    """The format of codes, "E4M3" say."""
    return st.recipe.format.element.name


def _bytes(data: Array) -> Array:
    return data if data.dtype == torch.uint8 else data.view(torch.uint8)
