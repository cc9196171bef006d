"""TransformerEngine's tensors: Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor, both ways; and its recipes.

A TransformerEngine tensor has up to two orientations: rowwise (blocks along the last axis) and columnwise (along the first,
for a backward pass). Columnwise codes are the transposed matrix, except in MXFP8. Block scales are padded, and transposed for
1 x 128 blocks; breccia keeps them so, in a storage of the same order, and nothing is copied:

    MXFP8, NVFP4           rows to 128, columns to 4     "padded_128x4", or "swizzle_128x4" if swizzled for a GEMM
    FP8 tiles 128 x 128    columns to 4                  "padded_1x4"
    FP8 blocks 1 x 128     transposed, rows to 4         "column_major"

Classes are recognized by name and read by attributes, so TransformerEngine is needed only to build its tensors without `like=`.
Source: TransformerEngine 2.20.
"""

from __future__ import annotations

import math
from importlib import import_module
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
    OptionError,
    ScaledTensor,
    ScalingRecipe,
    TensorPair,
    UnsupportedError,
)
from breccia.backend import E4M3, E5M2, Array
from breccia.internal import check_scaled

from .wrapping import attribute, buffer_or_none, check_padding, chosen, title, wrapped

Tensor = Any

_CLASSES = ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor")
_USAGES = ("rowwise", "columnwise", "both")
_PADDING = ("refuse", "keep", "drop")
_DROP = 'Pass padding="drop" to copy the scales without it, if their values are right.'


class _Part(NamedTuple):
    """One orientation: codes, scales, and an NVFP4 tensor's amax."""

    data: Array
    scale: Array
    amax: Array | None = None


# ------------------------------------------------------------------------------------------------ reading


def from_transformer_engine(
    te_t: Tensor, recipe: ScalingRecipe | None = None, *, usage: str | None = None, padding: str | None = None
) -> Any:
    """Convert a TransformerEngine tensor, zero-copy: codes and scales are shared, padded and transposed scales as storages.

    te_t: Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor or NVFP4Tensor, or its storage class.
    recipe: by default the one that the tensor's quantizer implies; without a quantizer, FP8 per tensor is `DelayedScaling`.
    usage: "rowwise" or "columnwise" gives a ScaledTensor of that orientation (axis -1 or -2), "both" a TensorPair. By default
        rowwise if the tensor has it. Where the other orientation follows exactly (one scale per tensor, 128 x 128 tiles), it is
        derived from the one present.
    padding: of scales. "refuse" raises where it is not zero, which reads it (a GPU is synchronized); "keep" shares it as it is;
        "drop" copies the scales without it. By default "keep" for Float8BlockwiseQTensor, whose padding TransformerEngine 2.20
        leaves uninitialized (measured) and no product reads, and "refuse" for the others.

    Raises UnsupportedError for another class, DialectError for a missing orientation, contradictory buffers, and variants that
    decode otherwise (row-scaled NVFP4, rotated columnwise data).

        >>> import torch
        >>> st = breccia.cast(torch.tensor([[1.0, 448.0]]), "fp8_current")
        >>> te_t = breccia.bridges.to_transformer_engine(st, dtype=torch.bfloat16)
        >>> tensor = breccia.bridges.from_transformer_engine(te_t)
        >>> tensor.recipe.spec, breccia.dequantize(tensor).tolist()
        ('fp8_current,scale_rule=te', [[1.0, 448.0]])
    """
    if usage not in (None, *_USAGES):
        raise OptionError(f"usage is one of {', '.join(_USAGES)}; got {usage!r}.", usage=usage)
    if padding not in (None, *_PADDING):
        raise OptionError(f"padding is one of {', '.join(_PADDING)}; got {padding!r}.", padding=padding)
    name = _class_name(te_t)
    if name is None:
        raise UnsupportedError(
            f"from_transformer_engine converts {', '.join(_CLASSES)} and their storage classes; got {title(te_t)}. "
            f"Dequantize it, "
            "or wrap its buffers with breccia.from_buffer.",
            found=type(te_t).__name__,
        )
    if padding is None:
        padding = "keep" if name == "Float8BlockwiseQTensor" else "refuse"
    tensor_recipe = chosen(recipe, _recipe_of(te_t, name), te_t)
    if usage is None:
        present = attribute(te_t, "_data" if name == "Float8Tensor" else "_rowwise_data") is not None
        usage = "rowwise" if present else "columnwise"
    if usage == "both":
        return TensorPair(*(_oriented(te_t, name, tensor_recipe, columnwise, padding) for columnwise in (False, True)))
    return _oriented(te_t, name, tensor_recipe, usage == "columnwise", padding)


def _oriented(te_t: Tensor, name: str, recipe: ScalingRecipe, columnwise: bool, padding: str) -> ScaledTensor:
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
        forms = {(columns, _up(rows, 4)): "column_major"}
    elif name == "Float8BlockwiseQTensor":
        forms = {(rows, _up(columns, 4)): "padded_1x4"}
    else:
        forms = {(_up(rows, 128), _up(columns, 4)): "padded_128x4"}
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


def _recipe_of(te_t: Tensor, name: str) -> ScalingRecipe:
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
    fmt = _fp8_format(te_t)
    if name == "MXFP8Tensor":
        return MXFP8BlockScaling(fmt)
    if name == "Float8BlockwiseQTensor":
        powers = bool(getattr(quantizer, "force_pow_2_scales", False))
        rows = 128 if attribute(te_t, "_is_2D_scaled") else 1
        return Float8BlockScaling(fmt, block_m=rows, power_of_two_scale=powers, scale_rule="te")
    if type(quantizer).__name__ == "Float8CurrentScalingQuantizer":
        return Float8CurrentScaling(fmt, scale_rule="te")
    return DelayedScaling(fmt, scale_rule="te")


def _fp8_format(te_t: Tensor) -> str:
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


def _class_name(te_t: Tensor) -> str | None:
    """The class without "Storage", of the nearest base that is known."""
    names = (kind.__name__.removesuffix("Base").removesuffix("Storage") for kind in type(te_t).__mro__)
    return next((name for name in names if name in _CLASSES), None)


# ------------------------------------------------------------------------------------------------ writing


def to_transformer_engine(
    scaled: ScaledTensor | TensorPair,
    *,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    quantizer: Any = None,
) -> Tensor:
    """Convert a tensor, or a pair of orientations, to TransformerEngine's class of its format, sharing buffers where possible.

    scaled: `DelayedScaling` or `Float8CurrentScaling` becomes a Float8Tensor, `Float8BlockScaling` with blocks 1 x 128 or tiles
        128 x 128 a Float8BlockwiseQTensor, `MXFP8BlockScaling` an MXFP8Tensor, `NVFP4BlockScaling(global_sense="amax")` an
        NVFP4Tensor. A tensor with axis -2 is columnwise data alone.
    like: a TransformerEngine tensor whose class, quantizer and dtype to take over.
    dtype: the dtype that the tensor pretends to have, FP32 by default; that of a layer's other weights.
    columnwise: derive the columnwise data too. Exact for one scale per tensor and for 128 x 128 tiles; the others need a
        TensorPair, from `breccia.cast_pair`.
    quantizer: TransformerEngine's quantizer; by default that of `like`, or a new one of the format.

    Scales are padded with zeros as TransformerEngine needs them.

    Raises ImportError without TransformerEngine (unless `like` is given), DialectError for other formats and shapes.

        >>> import torch
        >>> pair = breccia.cast_pair(torch.ones(128, 256), "mxfp8")
        >>> te_t = breccia.bridges.to_transformer_engine(pair, dtype=torch.bfloat16)
        >>> type(te_t).__name__, te_t.shape, te_t.dtype
        ('MXFP8Tensor', torch.Size([128, 256]), torch.bfloat16)
    """
    if like is None:
        _load(_CLASSES[0])
    pair = _pair(scaled)
    first = pair[0] if pair[0] is not None else pair[1]
    assert first is not None
    name = _target(first)
    if columnwise and pair[1] is None:
        pair = (pair[0], _derived(first))
    arguments = _buffers(name, first.recipe, pair)
    kind: Any = type(like) if like is not None else _load(name)
    if like is not None and _class_name(like) != name:
        raise DialectError(f"this tensor is for a {name}; like= is {title(like)}.", found=type(like).__name__)
    if like is not None and name != "NVFP4Tensor" and _fp8_format(like) != _element(first):
        raise DialectError(f"this tensor has {_element(first)} codes; like= has {_fp8_format(like)}.", found=_fp8_format(like))
    arguments |= _metadata(name, first, like, quantizer, pair)
    build: Any = kind
    if not issubclass(kind, torch.Tensor):
        return build(**arguments)
    fake = dtype or (like.dtype if like is not None else torch.float32)
    return build(shape=_shape(pair), dtype=fake, device=first.data.device, requires_grad=False, **arguments)


def _pair(scaled: Any) -> tuple[ScaledTensor | None, ScaledTensor | None]:
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


def _target(st: ScaledTensor) -> str:
    """The class of a tensor's format. Raises DialectError."""
    recipe, fmt = st.recipe, st.recipe.format
    fp8 = fmt.element in (E4M3, E5M2)
    if isinstance(recipe, DelayedScaling | Float8CurrentScaling) and not st.scale.shape:
        return "Float8Tensor"
    if isinstance(recipe, Float8BlockScaling) and fmt.scale.block in ((1, 128), (128, 128)):
        return "Float8BlockwiseQTensor"
    if isinstance(recipe, MXFP8BlockScaling) and fp8:
        return "MXFP8Tensor"
    if isinstance(recipe, NVFP4BlockScaling) and recipe.two_level:
        if recipe.global_sense != "amax":
            raise DialectError(
                f"TransformerEngine stores an NVFP4 tensor's amax; this tensor has its scale as a "
                f"{recipe.global_sense}, and the "
                'conversion can round. Cast with breccia.NVFP4BlockScaling(global_sense="amax").',
                found=recipe.global_sense,
            )
        return "NVFP4Tensor"
    raise DialectError(
        "TransformerEngine has FP8 with one scale, FP8 in blocks of 1 x 128 or 128 x 128, MXFP8 and NVFP4 with two "
        "levels; this "
        f"tensor is {recipe!r}. Requantize it first: breccia.requantize(st, breccia.MXFP8BlockScaling()), for example.",
        recipe=recipe,
    )


def _derived(st: ScaledTensor) -> ScaledTensor:
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


def _buffers(name: str, recipe: ScalingRecipe, pair: tuple[ScaledTensor | None, ScaledTensor | None]) -> dict[str, Any]:
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
    wanted = (along, _up(down, 4)) if storage == "column_major" else (down, _up(along, 4))
    wanted = wanted if name == "Float8BlockwiseQTensor" else (_up(down, 128), _up(along, 4))
    agrees = st.layout.storage == "plain" and storage.startswith("padded") and tuple(st.scale.shape) == wanted
    scale = st.scale if agrees else st.to_storage(storage).scale
    return (scale if scale.dtype == torch.float32 else scale.view(torch.uint8)).reshape(wanted)


def _metadata(
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
    dtypes = _find("DType", ("transformer_engine.pytorch.constants", "transformer_engine_torch"))
    dtype = dtypes.kFloat4E2M1 if name == "NVFP4Tensor" else getattr(dtypes, f"kFloat8{_element(st)}")
    return {key: dtype, "quantizer": quantizer or _quantizer(name, st, dtype)}


def _quantizer(name: str, st: ScaledTensor, dtype: Any) -> Any:
    """A quantizer of TransformerEngine that would write this format again."""
    recipe = st.recipe
    if isinstance(recipe, DelayedScaling):
        scale = st.scale.reshape(1).reciprocal()
        return _find("Float8Quantizer", _modules("Float8Tensor"))(scale, torch.zeros_like(scale), dtype)
    if isinstance(recipe, Float8CurrentScaling):
        return _find("Float8CurrentScalingQuantizer", _modules("Float8Tensor"))(dtype, device=st.data.device)
    if isinstance(recipe, Float8BlockScaling):
        build = _find("Float8BlockQuantizer", _modules(name))
        options = {"force_pow_2_scales": recipe.power_of_two_scale, "block_scaling_dim": 1 if recipe.block_m == 1 else 2}
        return build(dtype, rowwise=True, columnwise=True, **options)
    return _find("MXFP8Quantizer" if name == "MXFP8Tensor" else "NVFP4Quantizer", _modules(name))(dtype)


_FILES = {
    "Float8Tensor": "float8_tensor",
    "Float8BlockwiseQTensor": "float8_blockwise_tensor",
    "MXFP8Tensor": "mxfp8_tensor",
    "NVFP4Tensor": "nvfp4_tensor",
}


def _modules(name: str) -> tuple[str, ...]:
    return (
        f"transformer_engine.pytorch.tensor.{_FILES[name]}",
        "transformer_engine.pytorch.tensor",
        "transformer_engine.pytorch",
    )


def _load(name: str) -> Any:
    return _find(name, _modules(name))


def _find(name: str, modules: tuple[str, ...]) -> Any:
    """An attribute of the first module that has it. Raises ImportError, naming what is missing."""
    failure: Exception | None = None
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError, OSError, RuntimeError) as e:  # its compiled library may fail to load
            failure = failure or e
    raise ImportError(
        f"to_transformer_engine needs TransformerEngine 2.x, whose {name} cannot be imported "
        f"({type(failure).__name__}: {failure}): "
        "pip install 'transformer-engine[pytorch]', on Linux with CUDA; or pass like=, one of its tensors.",
        name="transformer_engine",
    ) from failure


# ------------------------------------------------------------------------------------------------ recipes


def from_te_recipe(recipe: Any, role: str = "weight") -> ScalingRecipe:
    """The recipe of the tensors that a TransformerEngine recipe quantizes in one role: "input", "weight" or "grad".

    A TransformerEngine recipe covers all roles: HYBRID is E4M3 for inputs and weights and E5M2 for gradients; 128 x 128 tiles
    are for weights. Its further settings (amax reduction, Hadamard transforms, 2-D NVFP4 blocks) have no counterpart here.

    Raises DialectError for recipes and settings that breccia has no recipe for.

        >>> from transformer_engine.common.recipe import Format, MXFP8BlockScaling
        >>> breccia.bridges.from_te_recipe(MXFP8BlockScaling(fp8_format=Format.HYBRID), role="grad")
        MXFP8BlockScaling(fp8_format='E5M2', block_size=32, scale_rule='rceil')
    """
    if role not in ("input", "weight", "grad"):
        raise OptionError(f'role is "input", "weight" or "grad"; got {role!r}.', role=role)
    name = type(recipe).__name__
    fp8_format = str(getattr(attribute(recipe, "fp8_format"), "name", ""))
    fmt = ("E5M2" if role == "grad" else "E4M3") if fp8_format == "HYBRID" else fp8_format
    margin = getattr(recipe, "margin", 0)
    if fmt not in ("E4M3", "E5M2"):
        raise DialectError(
            f"{title(recipe)} has fp8_format {fp8_format or 'without a name'}, which no recipe has.", found=fp8_format
        )
    if name == "DelayedScaling":
        algorithm = attribute(recipe, "amax_compute_algo")
        if algorithm != "max" or attribute(recipe, "scaling_factor_compute_algo") is not None:
            raise DialectError(
                f"{title(recipe)} has amax_compute_algo {algorithm!r}; breccia.AmaxHistory takes the maximum, and the "
                f"standard scale."
            )
        length = attribute(recipe, "amax_history_len")
        return DelayedScaling(fmt, amax_history_len=length, margin=margin, scale_rule="te")
    if margin:
        raise DialectError(f"{title(recipe)} has margin={margin}, which only DelayedScaling has here.", margin=margin)
    if name == "Float8CurrentScaling":
        if getattr(recipe, "use_power_2_scales", False):
            raise DialectError(
                f"{title(recipe)} rounds its scales to powers of two, which Float8CurrentScaling does not do here."
            )
        return Float8CurrentScaling(fmt, scale_rule="te")
    if name == "Float8BlockScaling":
        side = {"input": "x", "weight": "w", "grad": "grad"}[role]
        rows = 128 if attribute(recipe, f"{side}_block_scaling_dim") == 2 else 1
        powers = not getattr(recipe, "use_f32_scales", False)
        return Float8BlockScaling(fmt, block_m=rows, power_of_two_scale=powers, scale_rule="te")
    if name == "MXFP8BlockScaling":
        return MXFP8BlockScaling(fmt)
    if name == "NVFP4BlockScaling":
        if getattr(recipe, "row_scaled_activation", False) or getattr(recipe, "nvfp4_4over6", "none") != "none":
            raise DialectError(f"{title(recipe)} has row-scaled activations or 4over6 blocks, which no recipe has.")
        return NVFP4BlockScaling(global_sense="amax")
    raise DialectError(
        f"{title(recipe)} has no counterpart; known are Delayed, Float8Current, Float8Block, MXFP8Block and NVFP4."
    )


def to_te_recipe(recipe: ScalingRecipe, *, grad: ScalingRecipe | None = None) -> Any:
    """TransformerEngine's recipe for inputs and weights under `recipe`, and gradients under `grad` (by default the same).

    E4M3 with E5M2 gradients is HYBRID. `Float8BlockScaling` is always tiles for weights and blocks for the others there, so
    `block_m` says only the role.

    Raises ImportError without TransformerEngine, DialectError for recipes that it has no counterpart for, among them E5M2 for
    inputs and weights.

        >>> weights, grads = breccia.MXFP8BlockScaling("E4M3"), breccia.MXFP8BlockScaling("E5M2")
        >>> breccia.bridges.to_te_recipe(weights, grad=grads).fp8_format.name
        'HYBRID'
    """
    module = "transformer_engine.common.recipe"
    grad = grad or recipe
    if type(grad) is not type(recipe):
        raise DialectError(
            f"a TransformerEngine recipe is of one kind for all roles; got {recipe!r} and {grad!r}.", recipe=grad
        )
    kinds = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
    if not isinstance(recipe, kinds):
        raise DialectError(f"TransformerEngine has no counterpart of {recipe!r}.", recipe=recipe)
    build = _find(type(recipe).__name__, (module,))
    if isinstance(recipe, NVFP4BlockScaling):
        return build()
    assert not isinstance(grad, NVFP4BlockScaling)
    formats = (recipe.fp8_format, grad.fp8_format)  # pyright: ignore[reportAttributeAccessIssue]
    name = formats[0] if formats[0] == formats[1] else "HYBRID"
    if name == "HYBRID" and formats != ("E4M3", "E5M2"):
        raise DialectError(
            f"TransformerEngine has E4M3 with E5M2 gradients (HYBRID), or one format; got {formats}.", found=formats
        )
    if name == "E5M2":
        raise DialectError(
            f"TransformerEngine has no recipe with E5M2 inputs and weights; got {recipe!r}. Pass the recipe of the weights, "
            "and this one as grad=.",
            recipe=recipe,
        )
    options: dict[str, Any] = {"fp8_format": getattr(_find("Format", (module,)), name)}
    if isinstance(recipe, DelayedScaling):
        options |= {"margin": recipe.margin, "amax_history_len": recipe.amax_history_len}
    if isinstance(recipe, Float8BlockScaling):
        options["use_f32_scales"] = not recipe.power_of_two_scale
    return build(**options)


# ------------------------------------------------------------------------------------------------ shared


def _element(st: ScaledTensor) -> str:
    return st.recipe.format.element.name


def _shape(pair: tuple[ScaledTensor | None, ScaledTensor | None]) -> tuple[int, ...]:
    return next(st.shape for st in pair if st is not None)


def _bytes(data: Array) -> Array:
    return data if data.dtype == torch.uint8 else data.view(torch.uint8)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
