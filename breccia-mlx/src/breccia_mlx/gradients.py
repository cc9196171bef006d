"""Straight-through gradients: the forward pass quantizes, the backward pass goes by as if it had not.

Bengio, Leonard and Courville 2013 (arXiv 1308.3432), section 4; the clipped form as in Hubara et al. 2016.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from breccia.kernels import reference
from breccia.recipes import ScalingRecipe

Array = Any
#: Inside which bounds gradients pass; "scale" for those of each block; None for all.
Clip = tuple[float, float] | str | None


def _straight(x: Array, recipe: ScalingRecipe, clip: Clip, scale: Any = None, **options: Any) -> Array:
    """The round trip of `x`; gradients of elements that the clip leaves out are zero."""
    arrays = [scale] if isinstance(scale, mx.array) else []  # an argument of its own, so that MLX maps over it too

    def given(arrays: tuple[Array, ...]) -> dict[str, Any]:
        return {**options, "scale": arrays[0] if arrays else scale}

    def forward(x: Array, *arrays: Array) -> Array:
        return reference.cast_ste(x, recipe, **given(arrays))

    def passed(gradient: Array, x: Array, *arrays: Array) -> Array:
        if clip is None:
            return gradient
        low, high = clip if clip != "scale" else _range(x, recipe, **given(arrays))
        # An infinite gradient outside the bounds is zero too, which it would not be if it were multiplied.
        return mx.where((x >= low) & (x <= high), gradient, mx.zeros_like(gradient))

    return _with_rules(forward, passed)(x, *arrays)


def _range(x: Array, recipe: ScalingRecipe, **options: Any) -> tuple[Array, ...]:
    """What the blocks of a cast can hold under the scales they have, lowest and highest."""
    return tuple(map(reference.dequantize, reference.extremes(reference.cast(x, recipe, **options))))


def _with_rules(forward: Callable[..., Array], passed: Callable[..., Array]) -> Any:
    """`forward`, a function of arrays, with rules for MLX's transformations.

    passed: the gradient of its first array from that of the result, and as well the tangent of the result from that of the
        first array; the arrays follow. The other arrays have no gradient.
    """
    function: Any = mx.custom_function(forward)

    @function.vjp
    def _(primals: Any, gradient: Array, output: Array) -> Any:
        first, *others = _listed(primals)
        found = passed(gradient, first, *others)
        return (found, *map(mx.zeros_like, others)) if others else found

    @function.jvp
    def _(primals: Any, tangents: Any) -> Array:
        return passed(_listed(tangents)[0], *_listed(primals))

    @function.vmap
    def _(inputs: Any, axes: Any) -> tuple[Array, int]:
        # Without this rule MLX maps over `forward` itself, and the gradient's rule is lost.
        first, *others = _listed(inputs)
        axis, *axes = _listed(axes)
        first = _batched(first, others, axis, axes)
        batch = (0, *axes)
        return _with_rules(mx.vmap(forward, in_axes=batch), mx.vmap(passed, in_axes=(0, *batch)))(first, *others), 0

    return function


def _batched(x: Array, others: list[Array], axis: int | None, axes: list[int | None]) -> Array:
    """`x` with the mapped axis first; repeated along it where only `others` are mapped."""
    if axis is not None:
        return mx.moveaxis(x, axis, 0)
    size = next(other.shape[a] for other, a in zip(others, axes, strict=True) if a is not None)
    return mx.broadcast_to(x, (size, *x.shape))


def _listed(found: Any) -> list[Any]:
    """What MLX passes to a rule: one thing by itself, several in a sequence."""
    return list(found) if isinstance(found, list | tuple) else [found]


def cast_ste(x: Array, recipe: ScalingRecipe, **options: Any) -> Array:
    """`reference.cast_ste`, differentiable in `x`: the gradient passes as it is."""
    return _straight(x, recipe, None, **options)


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
    return _straight(x, recipe, bounds or "scale", **options)
