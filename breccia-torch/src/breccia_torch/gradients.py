"""Straight-through gradients: the forward pass quantizes, the backward pass goes by as if it had not.

Bengio, Leonard and Courville 2013 (arXiv 1308.3432), section 4; the clipped form as in Hubara et al. 2016.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from breccia.frameworks import dtype_name
from breccia.kernels import reference
from breccia.recipes import ScalingRecipe

from . import cpu

Array = Any
#: The range inside which gradients pass; None for all.
Bounds = tuple[float, float] | None


class _Straight(Function):
    """The round trip of `x`; gradients of `x` outside the bounds are zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Array, recipe: ScalingRecipe, bounds: Bounds, options: dict[str, Any]) -> Array:
        return cpu.dequantize(cpu.cast(x, recipe, **options), out_dtype=dtype_name(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        x, _, ctx.bounds, _ = inputs
        if ctx.bounds is not None:
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        return _passed(ctx, gradients[0]), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Array:
        return _passed(ctx, tangents[0])


def _passed(ctx: Any, gradient: Array) -> Array:
    if ctx.bounds is None:
        return gradient.clone()  # an output that is an input would alias it
    (x,) = ctx.saved_tensors
    return clipped(gradient, x, *ctx.bounds)


def clipped(gradient: Array, x: Array, low: float, high: float) -> Array:
    """The gradient where `x` lies in [low, high], and zero elsewhere, be it infinite or not."""
    return torch.where((x >= low) & (x <= high), gradient, torch.zeros_like(gradient))


def cast_ste(x: Array, recipe: ScalingRecipe, **options: Any) -> Array:
    """`reference.cast_ste`, differentiable in `x`: the gradient passes as it is."""
    return _Straight.apply(x, recipe, None, options)


def cast_ste_clipped(
    x: Array, recipe: ScalingRecipe, clip_min: float | None = None, clip_max: float | None = None, **options: Any
) -> Array:
    """`reference.cast_ste_clipped`, differentiable in `x`: the gradient passes where `x` lies in [clip_min, clip_max]."""
    return _Straight.apply(x, recipe, reference.clip_bounds(recipe, clip_min, clip_max), options)
