"""`requantize` for NumPy arrays under a supplied global scale: decoded and cast in one pass, without FP32 numbers in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...arrays.ops import NUMPY
from ...options import DEFAULT, CastOptions
from ...options import PLAIN as PLAIN_STORAGE
from ...recipe_bases import ScalingRecipe
from ...tensors.tensor import ScaledTensor
from .. import composites, reference
from ..plans import accepts_dequantize
from .call import Cast
from .codes import PLAIN
from .decoding import matrices
from .plan import plan_of
from .workspace import F4

if TYPE_CHECKING:
    from ...dispatch.call import Call
    from .codes import Microkernels


def requantize(
    st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT, microkernels: Microkernels = PLAIN
) -> ScaledTensor:
    """`composites.requantize`; in one pass over the codes where a microkernel knows both formats and all numbers are normal."""
    written = _in_one_pass(st, recipe, options, microkernels)
    return composites.requantize(st, recipe, options) if written is None else written


def _in_one_pass(
    st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions, microkernels: Microkernels
) -> ScaledTensor | None:
    plan = plan_of(recipe, microkernels)
    layout = plan.layout(st.shape, -1)
    call = Cast(plan, np.broadcast_to(F4(0), st.shape), layout.block(), -1)
    if options.scale is None or not st.size:
        return None
    call.supply(reference.check_supplied(NUMPY, options.scale, call.x, recipe.format, layout, -1))
    found = matrices(st, microkernels) if call.takes_codes else None
    if found is None:
        return None
    parts = data, scale, zero_point, global_scale = call.fresh()
    if not call.run_coded(parts, found):
        return None
    return ScaledTensor.from_parts(data, scale, recipe, layout, zero_point, global_scale)


def accepts_requantize(call: Call) -> str | None:
    """Why `requantize` would decode all numbers before it casts them, or None."""
    recipe = call.recipe
    assert recipe is not None
    if (reason := accepts_dequantize(call)) is not None:
        return reason
    if call.option("scale") is None:
        return "it takes one pass only under a supplied scale; else the largest number has to be known first"
    if any(call.option(name) for name in ("require_exact", "out")) or call.storage != PLAIN_STORAGE:
        return "it writes new tensors in plain storage, and compares nothing"
    if call.option("rounding") == "stochastic" or call.option("nonfinite") == "raise":
        return "it rounds to nearest, and does not look for NaN and Inf"
    if call.a.axis != -1:
        return "blocks along columns are not adjacent in memory"
    scales = plan_of(recipe).scales
    if recipe.format.global_scale is None or scales is None or not scales.in_bytes:
        return f"{recipe.name!r} has no scales of 8 bits under a global scale"
    return None
