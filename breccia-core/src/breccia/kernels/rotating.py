"""Rotated formats by the kernels that know none: what is rotated first is cast, and what is decoded is rotated back."""

from __future__ import annotations

from typing import Any

from ..arrays.frameworks import ops_of
from ..dispatch import calls
from ..options import DEFAULT, FLOAT32, CastOptions, ProductOptions
from ..recipes import ScalingRecipe
from ..tensors.checks import contraction_axis
from ..tensors.tensor import ScaledTensor
from . import reference

Array = Any


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """The kernel of `cast` on the rotated array."""
    ops, rotation = ops_of(x), recipe.format.rotation
    assert rotation is not None
    with ops.errstate():
        y = reference.rotated(ops, ops.f32(x), rotation, contraction_axis(options.axis, len(x.shape)))
    st = renamed(calls.cast(y, recipe.unrotated, options.replace(out=None)), recipe)
    return st if options.out is None else reference.assign(ops, options.out, st)


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Array:
    """The kernel of `dequantize`, rotated back."""
    ops, rotation = ops_of(st.data, "data"), st.recipe.format.rotation
    assert rotation is not None
    decoded = calls.dequantize(renamed(st, st.recipe.unrotated))
    with ops.errstate():
        values = reference.unrotated(ops, decoded, rotation, st.axis)
        return reference.result(ops, values, options.out_dtype, options.out)


def renamed(st: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    """The same components under another recipe."""
    parts = (st.zero_point, st.global_scale, st.axis, st.padding)
    return ScaledTensor.from_parts(st.data, st.scale, recipe, st.layout, *parts)
