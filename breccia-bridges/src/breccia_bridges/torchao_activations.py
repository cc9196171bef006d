"""How torchao's linear layers quantize their inputs: attributes of the weight, and breccia's recipes."""

from __future__ import annotations

from typing import Any

from breccia import (
    DialectError,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.backend import targets

from .torchao_codes import FP8_DTYPES, mx_element
from .torchao_parts import CLASSES, mx_recipe
from .wrapping import float8_recipe, title

Tensor = Any


def activation_options(recipe: ScalingRecipe) -> dict[str, Any]:
    """The attributes with which torchao quantizes inputs under a recipe: the inverse of `torchao_activation`."""

    def build(path: str, **options: Any) -> Any:
        return targets.load(path)(**options)

    granularity = "torchao.quantization.granularity"
    if isinstance(recipe, Float8RowScaling | Float8CurrentScaling | Float8BlockScaling):
        if isinstance(recipe, Float8BlockScaling):
            each = targets.load(f"{granularity}:PerBlock")([recipe.block_m, recipe.block_k])
        else:
            each = build(f"{granularity}:{'PerRow' if isinstance(recipe, Float8RowScaling) else 'PerTensor'}")
        codes = next(dtype for dtype, fmt in FP8_DTYPES.items() if fmt == recipe.fp8_format)
        path = f"{CLASSES['Float8Tensor']}:QuantizeTensorToFloat8Kwargs"
        config = build("torchao.float8.inference:Float8MMConfig", use_fast_accum=False)
        options = build(path, float8_dtype=codes, granularity=each, mm_config=config)
        return {"act_quant_kwargs": options, "mm_config": config}
    if isinstance(recipe, INT8Scaling) and recipe.signed and recipe.group_size is None:
        each = build(f"{granularity}:PerRow")
        return {"act_quant_kwargs": build(f"{CLASSES['Int8Tensor']}:QuantizeTensorToInt8Kwargs", granularity=each)}
    if isinstance(recipe, MXFP8BlockScaling | MXFP6BlockScaling | MXFP4BlockScaling):
        mode = targets.load("torchao.prototype.mx_formats.config:ScaleCalculationMode")(recipe.scale_rule)
        path = f"{CLASSES['MXTensor']}:QuantizeTensorToMXKwargs"
        return {"act_quant_kwargs": build(path, elem_dtype=mx_element(recipe.format.element), scaling_mode=mode)}
    if isinstance(recipe, NVFP4BlockScaling) and recipe.scale_format == "E4M3":
        path = f"{CLASSES['NVFP4Tensor']}:QuantizeTensorToNVFP4Kwargs"
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
    if kind == "QuantizeTensorToFloat8Kwargs" and options.float8_dtype in FP8_DTYPES:
        fmt = FP8_DTYPES[options.float8_dtype]
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
