"""`cast` for NumPy arrays: small ones at once, others by a `Cast`; the generic algorithm takes what neither supports."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...arrays.ops import NUMPY, Array
from ...formats import TENSOR
from ...options import DEFAULT, CastOptions
from ...recipes import ScalingRecipe
from ...tensors.checks import contraction_axis
from ...tensors.tensor import ScaledTensor
from .. import checks, reference
from ..plans import scattered
from .call import Cast
from .codes import PLAIN
from .columns import cast_columns
from .plan import plan_of
from .workspace import F32_DTYPE

if TYPE_CHECKING:
    from .codes import Microkernels

#: The size of arrays whose cost is dominated by NumPy's call overhead.
_SMALL_ARRAY = 1 << 13


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, microkernels: Microkernels = PLAIN) -> ScaledTensor:
    """A faster `reference.cast`, which uses at most 16 MB of memory in addition to its result, and to a copy of small matrices.

    Up to 6 MB of that are buffers, which each thread keeps for its next call.

    microkernels: compiled replacements of NumPy's loops.
    """
    if (
        options is DEFAULT
        and type(x) is np.ndarray
        and x.dtype is F32_DTYPE
        and 0 < x.size <= _SMALL_ARRAY
        and x.ndim > 1
        and x.flags.c_contiguous
        and x.flags.aligned
        and isinstance(recipe, ScalingRecipe)
    ):
        with np.errstate(all="ignore"):
            written = plan_of(recipe, microkernels).short(x)
        if written is not None:
            return written
    scale, out = options.scale, options.out
    if type(x) is not np.ndarray or x.dtype is not F32_DTYPE or not x.ndim or not isinstance(recipe, ScalingRecipe):
        checks.check_cast(x, recipe)
    plan = plan_of(recipe, microkernels)
    axis = contraction_axis(options.axis, x.ndim)
    layout = plan.layout(x.shape, axis)
    call = Cast(plan, np.asarray(x), layout.block(axis), axis)
    if options.rounding == "stochastic":
        low, high = NUMPY.words(options.seed)
        call.seed = (high & 0xFFFFFFFF) << 32 | (low & 0xFFFFFFFF)
    known = (call.seed is None or microkernels.words is not None) and x.size > 0 and call.possible
    if known and scale is not None:
        supplied = reference.check_supplied(NUMPY, scale, x, recipe.format, layout, axis)
        across = axis == -2 and layout.block(axis) != TENSOR and recipe.format.global_scale is None
        call.supply(supplied.swapaxes(-1, -2) if across else supplied)
    if options.importance is not None:
        checks.check_importance(options.importance, x, recipe, axis)
        call.weigh(options.importance)
    call.gather()
    if not known or scattered(call.y.shape, call.block, call.lead, call.y.flags.c_contiguous):
        return reference.cast(x, recipe, options)
    own = call.fitting(out, layout)
    if own is None and out is not None and axis == -2 and call.describes(out, layout):
        if not plan.searches and cast_columns(plan, call.x, call.block, options, out):
            return out
        call = call.in_order(options) or call
        own = call.fitting(out, layout)
    data, stored, zero_point, global_scale = parts = own or call.fresh()
    call.run(parts, options.nonfinite == "raise")
    if own and out is not None:
        return out
    if axis == -2:
        data = data.swapaxes(-1, -2)
        if layout.block(axis) != TENSOR:
            stored, zero_point = stored.swapaxes(-1, -2), zero_point if zero_point is None else zero_point.swapaxes(-1, -2)
    padding = -x.shape[axis] % plan.count
    written = ScaledTensor.from_parts(data, stored, recipe, layout, zero_point, global_scale, axis, padding)
    return written if out is None else reference.assign(NUMPY, out, written)
