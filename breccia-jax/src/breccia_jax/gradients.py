"""Straight-through gradients: the forward pass quantizes, the backward pass goes by as if it had not.

Bengio, Leonard and Courville 2013 (arXiv 1308.3432), section 4; the clipped form as in Hubara et al. 2016. The rule is that of
a tangent, which JAX transposes: it serves `jax.grad`, `jax.jvp` and what is built of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from breccia.errors import OptionError
from breccia.frameworks import dtype_name
from breccia.kernels import reference
from breccia.recipes import ScalingRecipe

from . import verbs

Array = Any
#: Inside which bounds gradients pass; "scale" for those of each block; None for all.
Clip = tuple[float, float] | str | None


#: The places of arguments that are no arrays.
_STATIC = (3, 4, 5, 6)


@partial(jax.custom_jvp, nondiff_argnums=_STATIC)
def _straight(x: Array, scale: Any, seed: Any, recipe: ScalingRecipe, clip: Clip, axis: int, rounding: str) -> Array:
    """The round trip of `x`; tangents of elements that the clip leaves out are zero."""
    st = reference.cast(x, recipe, axis=axis, scale=scale, rounding=rounding, seed=seed)
    return reference.dequantize(st, out_dtype=dtype_name(x))


@_straight.defjvp
def _(recipe: ScalingRecipe, clip: Clip, axis: int, rounding: str, primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, scale, seed = primals
    y, tangent = _straight(*primals, recipe, clip, axis, rounding), tangents[0]
    if clip is None:
        return y, tangent
    low, high = clip if clip != "scale" else _extremes(x, recipe, axis=axis, scale=scale, rounding=rounding, seed=seed)
    # An infinite gradient outside the bounds is zero too, which it would not be if it were multiplied.
    return y, jnp.where((x >= low) & (x <= high), tangent, jnp.zeros_like(tangent))


_compiled = jax.jit(_straight, static_argnums=_STATIC)


def _extremes(x: Array, recipe: ScalingRecipe, **options: Any) -> tuple[Array, ...]:
    """What the blocks of a cast can hold under the scales they have, lowest and highest."""
    return tuple(map(reference.dequantize, reference.extremes(reference.cast(x, recipe, **options))))


def cast_ste(
    x: Array,
    recipe: ScalingRecipe,
    *,
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: Any = None,
    nonfinite: str = "propagate",
    clip: Clip = None,
) -> Array:
    """`reference.cast_ste`, differentiable in `x`: the gradient passes as it is, or inside the bounds of a clip."""
    scale = verbs.supplied(scale)
    if not verbs.traceable(scale) or verbs.refused(x, nonfinite):
        return reference.cast_ste(x, recipe, axis=axis, scale=scale, rounding=rounding, seed=seed, nonfinite=nonfinite)
    return _compiled(x, scale, verbs.words(seed), recipe, clip, axis, rounding)


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
    for name, bound in (("clip_min", clip_min), ("clip_max", clip_max)):
        if isinstance(bound, Tracer):
            raise OptionError(f"{name} is a number that is known when a function is traced; got {bound}.", **{name: bound})
    return cast_ste(x, recipe, clip=reference.clip_bounds(recipe, clip_min, clip_max, clip) or "scale", **options)
