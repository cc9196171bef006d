"""torchao's tensors: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, MXTensor, NVFP4Tensor, both ways.

Their codes and scales are breccia's, in other packings at most: 6-bit and integer codes one to a byte, swizzled scales,
zero-points of signed codes. A bridge relabels or repacks them; it computes no value. Attributes that a ScaledTensor lacks (the
dtype that torchao decodes to, kernel preferences, how inputs are quantized) come from `like=` or keywords on the way back.

Source: torchao 0.18.0, run on a CPU. AffineQuantizedTensor, of torchao before 0.16, is read by its attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from breccia import (
    Codec,
    DialectError,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    InStorage,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScaledTensor,
    ScalingRecipe,
    UnsupportedError,
)
from breccia.backend import E2M1, E2M3, E3M2, E4M3, E5M2, FLOATS, TENSOR, Array, dtype_name, ops_of, pack, targets, unpack
from breccia.internal import FLOAT_NAMES, check_scaled

from .plugin import SignedInt4Scaling
from .torchao_parts import SWIZZLE, integer_form, matrix_block, moved, mx_recipe, unsigned
from .wrapping import (
    attribute,
    buffer,
    buffer_or_none,
    check_padding,
    chosen,
    float8_recipe,
    lengths,
    title,
    wrapped,
)

Tensor = Any

_WORKFLOWS = "torchao.quantization.quantize_.workflows"
#: Where torchao 0.18 defines its classes.
_CLASSES = {
    "Float8Tensor": f"{_WORKFLOWS}.float8.float8_tensor",
    "Int8Tensor": f"{_WORKFLOWS}.int8.int8_tensor",
    "IntxUnpackedToInt8Tensor": f"{_WORKFLOWS}.intx.intx_unpacked_to_int8_tensor",
    "Int4Tensor": f"{_WORKFLOWS}.int4.int4_tensor",
    "MXTensor": "torchao.prototype.mx_formats.mx_tensor",
    "NVFP4Tensor": "torchao.prototype.mx_formats.nvfp4_tensor",
}
_FP8 = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}


def from_torchao(tensor: Tensor, recipe: ScalingRecipe | None = None) -> ScaledTensor:
    """Convert a torchao tensor, bit by bit; codes and scales are shared where torchao packs them as breccia does.

    tensor: Float8Tensor (scales per tensor, row or block), Int8Tensor, IntxUnpackedToInt8Tensor, MXTensor (FP8, FP6, FP4),
        NVFP4Tensor, Int4Tensor, or the AffineQuantizedTensor of older releases. Swizzled scales stay so, in storage
        "swizzle_128x4". A transposed tensor (`.t()`) has its blocks along axis -2.
    recipe: the recipe that wrote the tensor, which its bytes do not tell: `MXFP8BlockScaling(scale_rule="floor")`, say. By
        default one of the same format.

    How the tensor's linear layer quantizes its inputs is not part of the result; see `torchao_activation`.

    Raises UnsupportedError for another class, DialectError for a format without a recipe and for contradictory attributes.

        >>> import torch
        >>> from torchao.quantization import Int8WeightOnlyConfig, quantize_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        >>> quantize_(model, Int8WeightOnlyConfig())
        >>> breccia.bridges.from_torchao(model[0].weight)
        breccia.ScaledTensor('int8', shape=(32, 64), torch cpu, 8.5 bits per value)
    """
    name = next((kind.__name__ for kind in type(tensor).__mro__ if kind.__name__ in _READERS), None)
    if name is None:
        raise UnsupportedError(
            f"from_torchao converts {', '.join(_READERS)}; got {title(tensor)}. Quantize with a config that gives one "
            f"of these, "
            "or pass a tensor of high precision to breccia.cast.",
            found=type(tensor).__name__,
        )
    return _READERS[name](tensor, recipe)


def to_torchao(
    scaled: ScaledTensor,
    *,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
    activation: ScalingRecipe | None = None,
    **attributes: Any,
) -> Tensor:
    """Convert a tensor to the torchao class of its format, bit by bit.

    FP8 becomes a Float8Tensor, MX an MXTensor, NVFP4 an NVFP4Tensor, `int4_bias` an Int4Tensor, symmetric INT8 by rows
    an Int8Tensor. Other INT8 and INT4 becomes an IntxUnpackedToInt8Tensor, one code to a byte, because torchao's linear layer
    ignores an Int8Tensor's zero-points.

    like: a torchao tensor whose class and attributes to take over: `to_torchao(from_torchao(t), like=t)` equals `t`.
    dtype: the dtype that torchao decodes to, and that a linear layer's inputs have; by default that of `like`, else FP32.
    activation: the recipe under which torchao's linear layer quantizes its inputs; None leaves them alone. torchao multiplies
        by an MXTensor only with inputs in MX.
    attributes: further arguments of the class, such as `act_quant_kwargs=`.

    Raises ImportError without torchao, DialectError for a format or layout that torchao has no class for.

        >>> import torch
        >>> st = breccia.cast(torch.ones(4, 64), "fp8_row")
        >>> tensor = breccia.bridges.to_torchao(st, dtype=torch.bfloat16)
        >>> type(tensor).__name__, tensor.dtype, tensor.qdata.dtype
        ('Float8Tensor', torch.bfloat16, torch.float8_e4m3fn)
    """
    if like is None:
        _class("Float8Tensor")
    check_scaled("to_torchao", scaled, "torch")
    name = _class_of(scaled) if like is None else type(like).__name__
    if name not in _WRITERS:
        raise UnsupportedError(f"to_torchao builds {', '.join(_WRITERS)}; like= is {title(like)}.", found=name)
    kind: Any = _class(name) if like is None else type(like)
    options: dict[str, Any] = {} if like is None else {n: getattr(like, n) for n in _attribute_names(kind)}
    if dtype is not None or like is None:
        options["orig_dtype" if name in ("MXTensor", "NVFP4Tensor") else "dtype"] = dtype or torch.float32
    if activation is not None:
        options |= _activation_options(activation)
    options |= attributes
    fields = _WRITERS[name](scaled, options, kind)
    try:
        return kind(**(options | fields))
    except TypeError as e:
        raise DialectError(
            f"torchao's {name} does not take these attributes: {e}. This bridge is written for torchao 0.18.", found=name
        ) from e


def _activation_options(recipe: ScalingRecipe) -> dict[str, Any]:
    """The attributes with which torchao quantizes inputs under a recipe: the inverse of `torchao_activation`."""

    def build(path: str, **options: Any) -> Any:
        return targets.load(path)(**options)

    granularity = "torchao.quantization.granularity"
    if isinstance(recipe, Float8RowScaling | Float8CurrentScaling | Float8BlockScaling):
        if isinstance(recipe, Float8BlockScaling):
            each = targets.load(f"{granularity}:PerBlock")([recipe.block_m, recipe.block_k])
        else:
            each = build(f"{granularity}:{'PerRow' if isinstance(recipe, Float8RowScaling) else 'PerTensor'}")
        codes = next(dtype for dtype, fmt in _FP8.items() if fmt == recipe.fp8_format)
        path = f"{_CLASSES['Float8Tensor']}:QuantizeTensorToFloat8Kwargs"
        config = build("torchao.float8.inference:Float8MMConfig", use_fast_accum=False)
        options = build(path, float8_dtype=codes, granularity=each, mm_config=config)
        return {"act_quant_kwargs": options, "mm_config": config}
    if isinstance(recipe, INT8Scaling) and recipe.signed and recipe.group_size is None:
        each = build(f"{granularity}:PerRow")
        return {"act_quant_kwargs": build(f"{_CLASSES['Int8Tensor']}:QuantizeTensorToInt8Kwargs", granularity=each)}
    if isinstance(recipe, MXFP8BlockScaling | MXFP6BlockScaling | MXFP4BlockScaling):
        mode = targets.load("torchao.prototype.mx_formats.config:ScaleCalculationMode")(recipe.scale_rule)
        path = f"{_CLASSES['MXTensor']}:QuantizeTensorToMXKwargs"
        return {"act_quant_kwargs": build(path, elem_dtype=_mx_element(recipe.format.element), scaling_mode=mode)}
    if isinstance(recipe, NVFP4BlockScaling):
        path = f"{_CLASSES['NVFP4Tensor']}:QuantizeTensorToNVFP4Kwargs"
        return {"act_quant_kwargs": build(path, use_dynamic_per_tensor_scale=recipe.two_level)}
    raise DialectError(f"torchao has no way to quantize inputs under {recipe!r}.", recipe=recipe)


def torchao_activation(tensor: Tensor) -> ScalingRecipe | None:
    """The recipe under which torchao's linear layer quantizes its inputs for this weight; None if it leaves them alone.

    Raises DialectError if breccia has no such recipe: static scales, asymmetric codes, a smoothing factor.

        >>> import torch
        >>> st = breccia.cast(torch.ones(4, 64), "fp8_row")
        >>> tensor = breccia.bridges.to_torchao(st, activation=breccia.Float8RowScaling())
        >>> breccia.bridges.torchao_activation(tensor)
        Float8RowScaling(fp8_format='E4M3', power_of_two_scale=False, scale_rule='linear')
    """
    for name in ("act_pre_scale", "act_quant_scale", "act_per_tensor_scale"):
        if getattr(tensor, name, None) is not None:
            raise DialectError(
                f"{title(tensor)} has {name}, a fixed scale of the inputs, which no recipe describes.", found=name
            )
    if (mode := getattr(tensor, "activation_quantization", None)) is not None:
        raise DialectError(f"{title(tensor)} quantizes inputs as {mode}: asymmetric per token, which no recipe describes.")
    options = getattr(tensor, "act_quant_kwargs", None)
    if options is None:
        return None
    kind, granularity = type(options).__name__, type(getattr(options, "granularity", None)).__name__
    if kind == "QuantizeTensorToFloat8Kwargs" and options.float8_dtype in _FP8:
        fmt = _FP8[options.float8_dtype]
        if granularity == "PerRow":
            return Float8RowScaling(fmt)
        if granularity == "PerTensor":
            return Float8CurrentScaling(fmt)
        block = getattr(options.granularity, "block_size", None)
        if granularity == "PerBlock" and block is not None:
            return float8_recipe(fmt, (block[-2], block[-1]))
    if kind == "QuantizeTensorToInt8Kwargs" and granularity == "PerRow" and options.mapping_type.name == "SYMMETRIC":
        return INT8Scaling(scale_rule="half_range")
    if kind == "QuantizeTensorToMXKwargs" and (rule := options.scaling_mode.value) in ("floor", "rceil", "even"):
        return mx_recipe("torchao's MXTensor", str(options.elem_dtype), rule)
    if kind == "QuantizeTensorToNVFP4Kwargs":
        return NVFP4BlockScaling(two_level=bool(options.use_dynamic_per_tensor_scale))
    raise DialectError(f"{title(tensor)} quantizes its inputs by {options}, which no recipe describes.", found=kind)


# ------------------------------------------------------------------------------------------------ reading


def _float8(tensor: Tensor, recipe: ScalingRecipe | None) -> ScaledTensor:
    data, scale = buffer(tensor, "qdata"), buffer(tensor, "scale")
    fmt = _FP8.get(data.dtype)
    if fmt is None:
        raise DialectError(f"{title(tensor)} has codes in {data.dtype}; a recipe exists for {_listed(_FP8)}.", found=data.dtype)
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
        codes = _packed(ops_of(codes).load(codes) & 15, tensor_recipe.format.element, axis)
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
        axis = -2 if _is_transposed(data) else -1
        data = _packed(ops_of(data).load(data), element, axis)
    return _blocks(tensor, data, scale, None, chosen(recipe, inferred, tensor))


def _nvfp4(tensor: Tensor, recipe: ScalingRecipe | None) -> ScaledTensor:
    data, scale, size = buffer(tensor, "qdata"), buffer(tensor, "scale"), attribute(tensor, "block_size")
    if size != 16:
        raise DialectError(f"{title(tensor)} has block_size={size}; NVFP4 has blocks of 16.", found=size)
    global_scale = buffer_or_none(tensor, "per_tensor_scale")
    inferred = NVFP4BlockScaling(two_level=global_scale is not None)
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
    if transposed := _is_transposed(tensor.qdata):
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


_READERS: dict[str, Callable[[Tensor, ScalingRecipe | None], ScaledTensor]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Int4Tensor": _int4,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
    "AffineQuantizedTensor": _affine,
}


# ------------------------------------------------------------------------------------------------ writing


def _to_float8(scaled: ScaledTensor, options: dict[str, Any], kind: type) -> dict[str, Any]:
    scaled = scaled.to_plain()
    if scaled.recipe.format.element not in (E4M3, E5M2) or scaled.recipe.format.scale.codec.bits != 32:
        raise _unlike(scaled, "Float8Tensor", "FP8 codes under FP32 scales")
    block = _block_size(scaled, "Float8Tensor")
    data = scaled.data
    if data.dtype == torch.uint8:
        data = data.view(torch.float8_e4m3fn if scaled.recipe.format.element == E4M3 else torch.float8_e5m2)
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
    if not isinstance(scaled.recipe, INT4Scaling if bits == 4 else INT8Scaling) or fmt.offset == "bias":
        raise _unlike(scaled, name, f"integers of {bits} bits without a bias")
    block, half = _block_size(scaled, name), 8 if bits == 4 else 128
    signed = scaled.recipe.signed
    codes = _unpacked(scaled) if bits == 4 else scaled.data.view(torch.uint8)
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
        fields["qdata"] = _unpacked(scaled).to(torch.uint8)
    elif fmt.element is not E2M1:
        fields["qdata"] = fields["qdata"].view(_mx_element(fmt.element))
    options.setdefault("act_quant_kwargs", None)
    if "kernel_preference" not in options:
        options["kernel_preference"] = targets.load("torchao.quantization.quantize_.common:KernelPreference").EMULATED
    return fields | {"elem_dtype": _mx_element(fmt.element), "block_size": 32}


def _to_nvfp4(scaled: ScaledTensor, options: dict[str, Any], kind: type) -> dict[str, Any]:
    recipe = scaled.recipe
    if not isinstance(recipe, NVFP4BlockScaling):
        raise _unlike(scaled, "NVFP4Tensor", "NVFP4")
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


_WRITERS: dict[str, Callable[[ScaledTensor, dict[str, Any], type], dict[str, Any]]] = {
    "Float8Tensor": _to_float8,
    "Int8Tensor": _to_int8,
    "IntxUnpackedToInt8Tensor": _to_intx,
    "Int4Tensor": _to_int4,
    "MXTensor": _to_mx,
    "NVFP4Tensor": _to_nvfp4,
}


# ------------------------------------------------------------------------------------------------ shared


def _class_of(scaled: ScaledTensor) -> str:
    """The torchao class of a tensor's format. Raises DialectError."""
    recipe, fmt = scaled.recipe, scaled.recipe.format
    if isinstance(recipe, NVFP4BlockScaling):
        return "NVFP4Tensor"
    if isinstance(recipe, SignedInt4Scaling):
        return "Int4Tensor"
    if fmt.scale.codec.name == "E8M0" and fmt.element in (E4M3, E5M2, E2M3, E3M2, E2M1):
        return "MXTensor"
    if fmt.element in (E4M3, E5M2) and fmt.scale.codec.bits == 32:
        return "Float8Tensor"
    if isinstance(recipe, INT4Scaling | INT8Scaling) and fmt.offset != "bias":
        by_rows = fmt.element.bits == 8 and recipe.signed and scaled.layout.block(scaled.axis) == (1, None)
        return "Int8Tensor" if by_rows else "IntxUnpackedToInt8Tensor"  # Int8Tensor's linear ignores zero-points
    raise _unlike(scaled, "classes", "FP8, INT8, INT4 without a bias, MX and NVFP4")


def _class(name: str) -> type:
    try:
        return targets.load(f"{_CLASSES[name]}:{name}")
    except ImportError as e:
        raise ImportError(
            f"to_torchao needs torchao, which cannot be imported ({e}): pip install torchao.", name="torchao"
        ) from e


def _attribute_names(kind: Any) -> list[str]:
    """The arguments of a torchao class that are not the codes and scales; `zero_point` says whether there is one."""
    names = [*kind.tensor_attribute_names, *getattr(kind, "optional_tensor_attribute_names", ())]
    names += getattr(kind, "optional_tensor_data_names", ())
    return [name for name in names if name not in ("per_tensor_scale", "is_swizzled_scales", "elem_dtype")]


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


def _mx_element(element: Codec) -> Any:
    """torchao's name of an MX element: a dtype, or text for FP6."""
    if element in (E2M3, E3M2):
        return f"fp6_{element.name.lower()}"
    return {E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2, E2M1.name: torch.float4_e2m1fn_x2}[element.name]


def _is_transposed(data: Array) -> bool:
    return data.ndim > 1 and data.stride(-2) < data.stride(-1)


def _packed(codes: Array, element: Codec, axis: int) -> Array:
    """int32 codes in breccia's packing along `axis`."""
    ops = ops_of(codes)
    return pack(ops, codes, element) if axis == -1 else pack(ops, codes.mT, element).mT


def _unpacked(scaled: ScaledTensor) -> Array:
    """The codes of a plain tensor, one per int32."""
    ops, element, length = ops_of(scaled.data), scaled.recipe.format.element, scaled.shape[scaled.axis]
    if scaled.axis == -1:
        return unpack(ops, scaled.data, element, length)
    return unpack(ops, scaled.data.mT, element, length).mT


def _unlike(scaled: ScaledTensor, name: str, wanted: str) -> DialectError:
    return DialectError(
        f"torchao's {name} hold {wanted}; this tensor is {scaled.recipe!r}. Requantize it first: "
        "breccia.requantize(st, breccia.MXFP8BlockScaling()), for example.",
        recipe=scaled.recipe,
    )


def _listed(dtypes: dict[Any, Any]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
