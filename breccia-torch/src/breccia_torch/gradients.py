"""Straight-through gradients: the forward pass quantizes, the backward pass goes by as if it had not.

Bengio, Leonard and Courville 2013 (arXiv 1308.3432), section 4; the clipped form as in Hubara et al. 2016.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from breccia.frameworks import FLOATS, dtype_name, output_dtype
from breccia.kernels import reference
from breccia.recipes import ScalingRecipe
from breccia.tensor import ScaledTensor, held

from . import cpu
from .ops import wrapped

Array = Any
#: Inside which bounds gradients pass; "scale" for those of each block; None for all.
Clip = tuple[float, float] | str | None


class _Straight(Function):
    """The round trip of `x`; gradients of elements that the clip leaves out are zero.

    The scale, where one is given, is an argument of its own, so that autograd sees it change before the backward pass.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Array, scale: Any, recipe: ScalingRecipe, clip: Clip, options: dict[str, Any]) -> Array:
        return cpu.dequantize(cpu.cast(x, recipe, scale=scale, **options), out_dtype=dtype_name(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        x, scale, ctx.recipe, ctx.clip, ctx.options = inputs
        if ctx.clip is not None:
            ctx.number = None if isinstance(scale, torch.Tensor) else scale
            kept = (x, scale if ctx.number is None else None)
            ctx.save_for_backward(*kept)
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        return _passed(ctx, gradients[0]), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Array:
        return _passed(ctx, tangents[0])


def _passed(ctx: Any, gradient: Array) -> Array:
    if ctx.clip is None:
        return gradient.clone()  # an output that is an input would alias it
    x, scale = ctx.saved_tensors
    if ctx.clip == "scale":
        scale = ctx.number if scale is None else scale
        return masked(gradient, within_scales(x, ctx.recipe, scale=scale, **ctx.options))
    return masked(gradient, within(x, *ctx.clip))


class _Product(Function):
    """`x @ w`, or `w @ x` where `x` is the right operand: for the backward pass `w` is decoded again, and not kept in FP32."""

    @staticmethod
    def forward(ctx: Any, x: Array, w: ScaledTensor, right: bool, dtype: str) -> Array:
        ctx.w, ctx.right, ctx.dtypes = w, right, (x.dtype, dtype)
        ctx.save_for_backward(*held(w).values())  # which nobody may change before then
        ctx.shape = x.shape
        return reference.matmul(*_ordered(x, cpu.dequantize(w), right), dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # raises where a part has been changed
        found = product_gradient(gradients[0].float(), cpu.dequantize(ctx.w), ctx.shape, ctx.right)
        return found.to(ctx.dtypes[0]), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Array:
        return reference.matmul(*_ordered(tangents[0], cpu.dequantize(ctx.w), ctx.right), ctx.dtypes[1])


def product_gradient(gradient: Array, other: Array, shape: Any, right: bool) -> Array:
    """That of an operand of `shape`, the left or the right one, of a product whose other operand is `other`."""
    return (other.mT @ gradient if right else gradient @ other.mT).sum_to_size(shape)


def _ordered(x: Array, w: Array, right: bool) -> tuple[Array, Array]:
    return (w, x) if right else (x, w)


def matmul(a: Any, b: Any, out_dtype: Any = "float32", *, out: Array | None = None) -> Array:
    """`reference.matmul`, differentiable in an operand that is a tensor."""
    x, w = (b, a) if isinstance(a, ScaledTensor) else (a, b)
    wanted = isinstance(w, ScaledTensor) and isinstance(x, torch.Tensor) and torch.is_grad_enabled() and x.requires_grad
    if wanted and out is None and dtype_name(x) in FLOATS and not any(map(wrapped, (x, *held(w).values()))):
        reference.check_matmul_shapes(tuple(a.shape), tuple(b.shape))
        return _Product.apply(x, w, x is b, output_dtype(out_dtype))
    left, right = (cpu.dequantize(x) if isinstance(x, ScaledTensor) else x for x in (a, b))
    return reference.matmul(left, right, out_dtype, out=out)


def masked(gradient: Array, mask: Array) -> Array:
    """The gradient where the mask is true, and zero elsewhere, be it infinite or not."""
    return torch.where(mask, gradient, torch.zeros_like(gradient))


def within(x: Array, low: Any, high: Any) -> Array:
    """Where `x` lies in [low, high], which NaN does nowhere."""
    return (x >= low) & (x <= high)


def within_scales(x: Array, recipe: ScalingRecipe, **options: Any) -> Array:
    """Where the blocks of a cast can hold `x` under the scales they have, without saturating."""
    with torch.no_grad():
        low, high = map(cpu.dequantize, reference.extremes(cpu.cast(x, recipe, **options)))
        return within(x, low, high)


def cast_ste(x: Array, recipe: ScalingRecipe, **options: Any) -> Array:
    """`reference.cast_ste`, differentiable in `x`: the gradient passes as it is."""
    return _Straight.apply(x, options.pop("scale", None), recipe, None, options)


def cast_ste_clipped(
    x: Array,
    recipe: ScalingRecipe,
    clip_min: float | None = None,
    clip_max: float | None = None,
    *,
    clip: str = "element",
    **options: Any,
) -> Array:
    """`reference.cast_ste_clipped`, differentiable in `x`: the gradient passes where `x` lies within the bounds."""
    bounds = reference.clip_bounds(recipe, clip_min, clip_max, clip)
    return _Straight.apply(x, options.pop("scale", None), recipe, bounds or "scale", options)
