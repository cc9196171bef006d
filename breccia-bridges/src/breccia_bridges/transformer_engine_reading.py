"""What a TransformerEngine tensor holds, as a ScaledTensor: its class, its recipe, and the buffers of one orientation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from breccia import (
    DelayedScaling,
    DialectError,
    Float8BlockScaling,
    Float8CurrentScaling,
    InStorage,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScaledTensor,
    ScalingRecipe,
)
from breccia.backend import Array

from .wrapping import attribute, buffer_or_none, check_padding, rounded_up, title, wrapped

Tensor = Any
CLASSES = ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor")
_DROP = 'Pass padding="drop" to copy the scales without it, if their values are right.'


class _Part(NamedTuple):
    """One orientation: codes, scales, and an NVFP4 tensor's amax."""

    data: Array
    scale: Array
    amax: Array | None = None


def oriented(te_t: Tensor, name: str, recipe: ScalingRecipe, columnwise: bool, padding: str) -> ScaledTensor:
    """One orientation; derived from the other where that is exact."""
    if name == "Float8Tensor":
        return _per_tensor(te_t, recipe, columnwise)
    part = _part(te_t, name, columnwise)
    if part is None:
        exact = name == "Float8BlockwiseQTensor" and attribute(te_t, "_is_2D_scaled")
        other = _part(te_t, name, not columnwise) if exact else None
        if other is None:
            side = "columnwise" if columnwise else "rowwise"
            raise DialectError(
                f"{title(te_t)} has no {side} data, and they cannot be derived from the other orientation, whose "
                f"blocks run across. "
                f'Quantize with {side} usage, or pass usage="{"rowwise" if columnwise else "columnwise"}".',
                usage=side,
            )
        turned = _blocks(te_t, name, recipe, other, not columnwise, padding)
        plain = turned.to_plain()  # tiles are the same across: only the contraction axis differs
        fields = {"layout": plain.layout, "axis": -1 if plain.axis == -2 else -2}
        return wrapped(te_t, plain.data, plain.scale, recipe, **fields)
    if columnwise and getattr(getattr(te_t, "_quantizer", None), "with_rht", False):
        raise DialectError(
            f"{title(te_t)} has columnwise data of rotated values (random Hadamard transform), which decode to other "
            f"values than "
            'the tensor\'s. Pass usage="rowwise".'
        )
    return _blocks(te_t, name, recipe, part, columnwise, padding)


def _per_tensor(te_t: Tensor, recipe: ScalingRecipe, columnwise: bool) -> ScaledTensor:
    """One FP32 scale; the columnwise codes are the transposed ones, or the same seen along the other axis."""
    data, scale = buffer_or_none(te_t, "_data"), buffer_or_none(te_t, "_scale_inv")
    turned = None if attribute(te_t, "_transpose_invalid") else buffer_or_none(te_t, "_transpose")
    if scale is None or scale.numel() != 1 or scale.dtype != torch.float32:
        facts = None if scale is None else (scale.dtype, tuple(scale.shape))
        raise DialectError(f"{title(te_t)} has one FP32 scale, _scale_inv of shape (1,); found {facts}.", found=facts)
    if turned is not None and data is not None and tuple(turned.shape) != (data.shape[-1], *data.shape[:-1]):
        raise DialectError(
            f"{title(te_t)} has _data of shape {tuple(data.shape)}, and _transpose of shape {tuple(turned.shape)} does "
            f"not fit.",
            found=tuple(turned.shape),
        )
    if data is None and turned is None:
        raise DialectError(f"{title(te_t)} has neither _data nor a valid _transpose: its buffers have been freed.")
    if turned is not None and (columnwise or data is None):
        data = turned.movedim(0, -1)
    assert data is not None
    _check_shape(te_t, (math.prod(data.shape[:-1]), data.shape[-1]))
    return wrapped(te_t, data, scale.reshape(()), recipe, axis=-2 if columnwise and len(data.shape) > 1 else -1)


def _blocks(te_t: Tensor, name: str, recipe: ScalingRecipe, part: _Part, columnwise: bool, padding: str) -> ScaledTensor:
    """Blocks within rows, or tiles, of the matrix that TransformerEngine sees: all leading axes as rows."""
    data, scale, amax = part
    per_byte = 2 if name == "NVFP4Tensor" else 1
    ndim = te_t.ndim if isinstance(te_t, torch.Tensor) else data.ndim  # NVFP4's columnwise data are always a matrix
    if columnwise and ndim != 2:
        raise DialectError(
            f"{title(te_t)} has columnwise blocks along all its leading axes (data of shape {tuple(data.shape)}); pass "
            "tensor.view(-1, tensor.shape[-1]).",
            found=tuple(data.shape),
        )
    if columnwise and name == "MXFP8Tensor":
        data, scale = data.mT, scale.mT  # not transposed by TransformerEngine
    matrix = (math.prod(data.shape[:-1]), data.shape[-1] * per_byte)
    _check_shape(te_t, (matrix[1], matrix[0]) if columnwise else matrix)
    m, k = recipe.format.scale.block
    assert m is not None and k is not None
    shape = (-(-matrix[0] // m), -(-matrix[1] // k))
    scale, storage = _storage(te_t, name, scale, shape, columnwise)
    layout = recipe.layout.fitted(matrix)
    layout = layout if storage is None else InStorage(layout, storage)
    flat = data if data.ndim == 2 else data.reshape(-1, data.shape[-1])
    st = wrapped(te_t, flat, scale, recipe, layout=layout, global_scale=amax)
    if padding == "refuse":
        check_padding(st, title(te_t), "_columnwise_scale_inv" if columnwise else "_rowwise_scale_inv", _DROP)
    elif padding == "drop":
        st = st.to_plain()
    if data.ndim != 2:
        st = _stacked(te_t, st, tuple(data.shape), m)
    return st.mT if columnwise else st


def _check_shape(te_t: Tensor, matrix: tuple[int, int]) -> None:
    """Raise DialectError if the tensor pretends to have another shape than its codes; storage classes have none."""
    if isinstance(te_t, torch.Tensor) and (math.prod(te_t.shape[:-1]), te_t.shape[-1]) != matrix:
        raise DialectError(
            f"{title(te_t)} has shape {tuple(te_t.shape)}, and its codes are those of a matrix of shape {matrix}.",
            expected=tuple(te_t.shape),
            found=matrix,
        )


def _storage(te_t: Tensor, name: str, scale: Array, shape: tuple[int, int], columnwise: bool) -> tuple[Array, str | None]:
    """The scales as breccia's storage has them, and its name, None for plain. Raises DialectError for any other shape."""
    rows, columns = shape
    scale_shape = tuple(scale.shape)
    if name == "Float8BlockwiseQTensor" and not attribute(te_t, "_is_2D_scaled"):
        forms = {(columns, rounded_up(rows, 4)): "column_major"}
    elif name == "Float8BlockwiseQTensor":
        forms = {(rows, rounded_up(columns, 4)): "padded_1x4"}
    else:
        forms = {(rounded_up(rows, 128), rounded_up(columns, 4)): "padded_128x4"}
    if scale_shape not in forms:
        raise DialectError(
            f"{title(te_t)}: the {'columnwise' if columnwise else 'rowwise'} data need scales of shape {next(iter(forms))} "
            f"(for {rows} x {columns} blocks, padded); found {scale_shape}.",
            expected=next(iter(forms)),
            found=scale_shape,
        )
    if getattr(te_t, "_with_gemm_swizzled_scales", False):
        if columnwise and name == "MXFP8Tensor":
            raise DialectError(
                f"{title(te_t)} has columnwise scales swizzled for a GEMM, an order that breccia does not read. Quantize with "
                'quantizer.optimize_for_gemm = False, or pass usage="rowwise".'
            )
        return scale.reshape(scale_shape[0] // 128, scale_shape[1] // 4, 512), "swizzle_128x4"
    storage = forms[scale_shape]
    return scale, None if storage != "column_major" and scale_shape == shape else storage


def _stacked(te_t: Tensor, st: ScaledTensor, shape: tuple[int, ...], m: int) -> ScaledTensor:
    """Rows split into leading axes again."""
    if shape[-2] % m:
        raise DialectError(
            f"{title(te_t)} of shape {shape} has tiles of {m} rows that reach across matrices of {shape[-2]}; pass "
            "tensor.view(-1, tensor.shape[-1]).",
            shape=shape,
        )
    plain = st.to_plain()
    scale = plain.scale.reshape(*shape[:-2], shape[-2] // m, plain.scale.shape[-1])
    fields = {"layout": plain.layout, "global_scale": plain.global_scale}
    return wrapped(te_t, plain.data.reshape(shape), scale, plain.recipe, **fields)


def _part(te_t: Tensor, name: str, columnwise: bool) -> _Part | None:
    side = "columnwise" if columnwise else "rowwise"
    data, scale = buffer_or_none(te_t, f"_{side}_data"), buffer_or_none(te_t, f"_{side}_scale_inv")
    if data is None:
        return None
    wanted = torch.float32 if name == "Float8BlockwiseQTensor" else torch.uint8
    if scale is None or scale.ndim != 2 or scale.dtype != wanted or data.dtype != torch.uint8:
        facts = None if scale is None else (scale.dtype, tuple(scale.shape))
        raise DialectError(
            f"{title(te_t)}: _{side}_data are uint8 and _{side}_scale_inv a {wanted} matrix; found {data.dtype} and {facts}.",
            found=facts,
        )
    if name != "NVFP4Tensor":
        return _Part(data, scale)
    amax = buffer_or_none(te_t, f"_amax_{side}")
    if amax is None or amax.numel() != 1 or amax.dtype != torch.float32:
        amax_facts = None if amax is None else f"{tuple(amax.shape)} in {amax.dtype}"
        raise DialectError(
            f"{title(te_t)}: _amax_{side} is one FP32 number, of shape (1,); found {amax_facts}.", found=amax_facts
        )
    return _Part(data, scale, amax.reshape(()))


def recipe_of(te_t: Tensor, name: str) -> ScalingRecipe:
    """The recipe that the attributes and the quantizer imply."""
    quantizer = attribute(te_t, "_quantizer")
    if name == "NVFP4Tensor":
        if getattr(te_t, "_row_scaled_nvfp4", False):
            raise DialectError(f"{title(te_t)} has one amax per row (row_scaled_nvfp4), which no recipe has. Disable it.")
        if (bound := getattr(te_t, "_nvfp4_e4m3_max", 448)) != 448:
            raise DialectError(
                f"{title(te_t)} scales blocks to {bound} instead of 448 (4over6), which no recipe has.", found=bound
            )
        if "E2M1" not in (dtype := _dtype_name(te_t, "_fp4_dtype")):
            raise DialectError(f"{title(te_t)} has FP4 dtype {dtype}; a recipe exists for E2M1.", found=dtype)
        return NVFP4BlockScaling(global_sense="amax")
    fmt = fp8_format(te_t)
    if name == "MXFP8Tensor":
        return MXFP8BlockScaling(fmt)
    if name == "Float8BlockwiseQTensor":
        powers = bool(getattr(quantizer, "force_pow_2_scales", False))
        rows = 128 if attribute(te_t, "_is_2D_scaled") else 1
        return Float8BlockScaling(fmt, block_m=rows, power_of_two_scale=powers, scale_rule="te")
    if type(quantizer).__name__ == "Float8CurrentScalingQuantizer":
        return Float8CurrentScaling(fmt, scale_rule="te")
    return DelayedScaling(fmt, scale_rule="te")


def fp8_format(te_t: Tensor) -> str:
    """E4M3 or E5M2, by the name of TransformerEngine's DType."""
    name = _dtype_name(te_t, "_fp8_dtype")
    for fmt in ("E4M3", "E5M2"):
        if fmt in name:
            return fmt
    raise DialectError(f"{title(te_t)} has FP8 dtype {name}; a recipe exists for E4M3 and E5M2.", found=name)


def _dtype_name(te_t: Tensor, attribute_name: str) -> str:
    """The name of one of TransformerEngine's DTypes: "KFLOAT8E4M3"."""
    dtype = attribute(te_t, attribute_name)
    return str(getattr(dtype, "name", dtype)).upper()


def class_name(te_t: Tensor) -> str | None:
    """The class without "Storage", of the nearest base that is known."""
    names = (kind.__name__.removesuffix("Base").removesuffix("Storage") for kind in type(te_t).__mro__)
    return next((name for name in names if name in CLASSES), None)
