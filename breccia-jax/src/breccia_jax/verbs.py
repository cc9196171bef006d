"""The generic algorithm, compiled once for each recipe, shape and set of options. Calls inside traced functions share it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from breccia.frameworks import output_dtype
from breccia.kernels import reference
from breccia.recipes import ScalingRecipe
from breccia.tensor import ScaledTensor

from .ops import JAX

Array = Any


def cast(
    x: Array,
    recipe: ScalingRecipe,
    *,
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: Any = None,
    nonfinite: str = "propagate",
    out: ScaledTensor | None = None,
) -> ScaledTensor:
    """`reference.cast`, compiled."""
    scale = supplied(scale)
    if out is not None or not traceable(scale) or refused(x, nonfinite):
        options: dict[str, Any] = {"rounding": rounding, "seed": seed, "nonfinite": nonfinite}
        return reference.cast(x, recipe, axis=axis, scale=scale, out=out, **options)
    return _cast(x, recipe, axis=axis, scale=scale, rounding=rounding, seed=words(seed))


def dequantize(st: ScaledTensor, *, out_dtype: Any = "float32", out: Array | None = None) -> Array:
    """`reference.dequantize`, compiled."""
    if out is not None:
        return reference.dequantize(st, out_dtype=out_dtype, out=out)
    return _dequantize(st, out_dtype=output_dtype(out_dtype))


def requantize(
    st: ScaledTensor,
    recipe: ScalingRecipe,
    *,
    scale: Any = None,
    rounding: str = "nearest",
    seed: Any = None,
    nonfinite: str = "propagate",
    require_exact: bool = False,
    out: ScaledTensor | None = None,
) -> ScaledTensor:
    """`reference.requantize`, compiled where it reads no value and computes something."""
    scale = supplied(scale)
    renames = scale is None and reference.keeps_parts(st.recipe, st.layout, st.axis, recipe)
    if out is not None or renames or require_exact or nonfinite != "propagate" or not traceable(scale):
        options: dict[str, Any] = {"rounding": rounding, "seed": seed, "nonfinite": nonfinite, "require_exact": require_exact}
        return reference.requantized(cast, dequantize, st, recipe, scale=scale, out=out, **options)
    return _requantize(st, recipe, scale=scale, rounding=rounding, seed=words(seed))


def matmul(a: Any, b: Any, out_dtype: Any = "float32", *, out: Array | None = None) -> Array:
    """`reference.matmul`, compiled, and differentiable in operands that are arrays."""
    if out is not None:
        return reference.matmul(a, b, out_dtype, out=out)
    return _matmul(a, b, output_dtype(out_dtype))


def supplied(scale: Any) -> Any:
    """A caller's scale; a number as an array, since a compiled function would be one for each number."""
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not number:
        return scale
    with np.errstate(over="ignore"):
        return jax.device_put(np.asarray(float(scale), np.float32))


def words(seed: Any) -> Any:
    """A seed as an array of its two words, for the same reason."""
    if seed is None:
        return None
    found = JAX.words(seed)
    return jnp.stack(found) if isinstance(seed, jax.Array) else jax.device_put(np.array(found, np.int32))


def traceable(scale: Any) -> bool:
    """Can a compiled function take it? What else there is, the generic algorithm refuses by name."""
    return scale is None or isinstance(scale, jax.Array)


def refused(x: Array, nonfinite: str) -> bool:
    """Does a caller who wants to know of NaN and Inf have some? The generic algorithm says so."""
    return nonfinite == "raise" and JAX.any(~jnp.isfinite(x))


def fixed(x: Any) -> Any:
    """An operand through which no gradient passes if it is scaled: a scale alone is no weight's derivative."""
    return jax.tree.map(lax.stop_gradient, x) if isinstance(x, ScaledTensor) else x


@partial(jax.jit, static_argnames=("recipe", "axis", "rounding"))
def _cast(x: Array, recipe: ScalingRecipe, **options: Any) -> ScaledTensor:
    return reference.cast(x, recipe, **options)


@partial(jax.jit, static_argnames=("out_dtype",))
def _dequantize(st: ScaledTensor, *, out_dtype: str) -> Array:
    return reference.dequantize(fixed(st), out_dtype=out_dtype)


@partial(jax.jit, static_argnames=("recipe", "rounding"))
def _requantize(st: ScaledTensor, recipe: ScalingRecipe, **options: Any) -> ScaledTensor:
    return reference.requantize(st, recipe, **options)


@partial(jax.jit, static_argnums=2)
@partial(jax.checkpoint, static_argnums=2)  # the backward pass decodes a weight again, instead of keeping it in FP32
def _matmul(a: Any, b: Any, out_dtype: str) -> Array:
    return reference.matmul(fixed(a), fixed(b), out_dtype)
