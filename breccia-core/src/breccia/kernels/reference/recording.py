"""Delayed scaling: `record_amax` in backend primitives, and the cast before it."""

from __future__ import annotations

from typing import Any

from ...arrays.frameworks import ops_of
from ...arrays.ops import Array
from ...fp32 import F32_INF, MAGNITUDE, NORMAL
from ...options import DEFAULT, CastOptions
from ...recipes import DelayedScaling
from ...tensors.tensor import ScaledTensor
from .casting import cast
from .composed import cast_pair


def record_amax(x: Array, recipe: DelayedScaling, amaxes: Any, scale: Any) -> tuple[Array, Array]:
    """(`amaxes` with the amax of `x` appended, the scale for the next cast), as `breccia.AmaxHistory` documents.

    The number of operations does not depend on the length of the history.
    """
    ops = ops_of(x)
    y = ops.f32(x)
    every = tuple(range(len(y.shape)))
    newest = ops.reshape(ops.bitcast_to_float(ops.amax(ops.bitcast_to_int(y) & MAGNITUDE, every)), (1,))
    previous = amaxes[max(len(amaxes) + 1 - recipe.amax_history_len, 0) :]
    history = ops.concat([previous, newest]) if len(previous) else newest
    usable, codes = _scales(ops, ops.amax(ops.bitcast_to_int(history), (0,)), recipe)
    before = scale if hasattr(scale, "shape") else ops.constant(float(scale), x)
    after = ops.where(usable, ops.bitcast_to_float(codes), ops.reshape(before, (1,)))
    return history, ops.reshape(after, ())


def scales_of_amaxes(amaxes: Array, recipe: DelayedScaling) -> Array:
    """The scales that `record_amax` computes for amaxes, which are the largest of their histories; of any shape.

    Both are the bits of FP32 numbers, as int32. The scale is 0 where `record_amax` keeps the one before.
    """
    ops = ops_of(amaxes)
    usable, codes = _scales(ops, amaxes, recipe)
    return ops.where(usable, codes, 0)


def _scales(ops: Any, largest: Array, recipe: DelayedScaling) -> tuple[Array, Array]:
    """(whether an amax gives a scale, the bits of the scale) for the bits of amaxes."""
    level, fmt = recipe.format.scale, recipe.format
    usable = (largest < F32_INF) & (largest >= NORMAL)
    statistic = ops.bitcast_to_float(ops.where(usable, largest, 0))
    return usable, recipe.rules[0].scale(ops, statistic, level.codec, fmt.element, fmt.qmax(level), None)


def cast_and_record(
    x: Array, recipe: DelayedScaling, amaxes: Any, scale: Any, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, Array, Array]:
    """`cast` under the supplied `scale`, and what `record_amax` returns."""
    return cast(x, recipe, options.replace(scale=scale)), *record_amax(x, recipe, amaxes, scale)


def cast_pair_and_record(
    x: Array, recipe: DelayedScaling, amaxes: Any, scale: Any, options: CastOptions = DEFAULT
) -> tuple[ScaledTensor, ScaledTensor, Array, Array]:
    """`cast_pair` under the supplied `scale`, and what `record_amax` returns."""
    return *cast_pair(x, recipe, options.replace(scale=scale)), *record_amax(x, recipe, amaxes, scale)
