"""Straight-through gradients: the forward pass quantizes, the backward pass goes by as if it had not.

Bengio, Leonard and Courville 2013 (arXiv 1308.3432), section 4; the clipped form as in Hubara et al. 2016.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from breccia.frameworks import dtype_name
from breccia.kernels import reference
from breccia.recipes import ScalingRecipe

from . import cpu

Array = Any
#: Where, among the elements of `x`, gradients pass: a mask.
Inside = Callable[[Array], Array]


class _Straight(Function):
    """The round trip of `x`; gradients of elements that are not `inside` are zero. None: all are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Array, recipe: ScalingRecipe, inside: Inside | None, options: dict[str, Any]) -> Array:
        return cpu.dequantize(cpu.cast(x, recipe, **options), out_dtype=dtype_name(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        x, _, ctx.inside, _ = inputs
        if ctx.inside is not None:
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        return _passed(ctx, gradients[0]), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Array:
        return _passed(ctx, tangents[0])


def _passed(ctx: Any, gradient: Array) -> Array:
    if ctx.inside is None:
        return gradient.clone()  # an output that is an input would alias it
    (x,) = ctx.saved_tensors
    return masked(gradient, ctx.inside(x))


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
    return _Straight.apply(x, recipe, None, options)


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

    def inside(x: Array) -> Array:
        return within_scales(x, recipe, **options) if bounds is None else within(x, *bounds)

    return _Straight.apply(x, recipe, inside, options)
