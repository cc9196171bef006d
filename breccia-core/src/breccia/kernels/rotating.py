"""Rotated formats by the kernels that know none: what is rotated first is cast, and what is decoded is rotated back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays.frameworks import ops_of
from ..dispatch import calls
from ..options import DEFAULT, FLOAT32, CastOptions, ProductOptions
from ..recipes import ScalingRecipe
from ..rotations import Rotation
from ..tensors.checks import contraction_axis
from ..tensors.tensor import ScaledTensor
from . import reference

Array = Any
#: f(array, rotation, axis) -> the FP32 array rotated, or rotated back.
Rotate = Callable[[Array, Rotation, int], Array]


def rotated(x: Array, rotation: Rotation, axis: int) -> Array:
    """The generic algorithm on FP32, FP16 or BF16 `x`."""
    ops = ops_of(x)
    with ops.errstate():
        return reference.rotated(ops, ops.f32(x), rotation, axis)


def unrotated(x: Array, rotation: Rotation, axis: int) -> Array:
    """The generic algorithm that rotates back."""
    ops = ops_of(x)
    with ops.errstate():
        return reference.unrotated(ops, ops.f32(x), rotation, axis)


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, rotate: Rotate = rotated) -> ScaledTensor:
    """The kernel of `cast` on the rotated array. rotate: a kernel with the bits of `rotated`."""
    ops, rotation = ops_of(x), recipe.format.rotation
    assert rotation is not None
    y = rotate(x, rotation, contraction_axis(options.axis, len(x.shape)))
    st = renamed(calls.cast(y, recipe.unrotated, options if options.out is None else options.replace(out=None)), recipe)
    return st if options.out is None else reference.assign(ops, options.out, st)


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32, rotate: Rotate = unrotated) -> Array:
    """The kernel of `dequantize`, rotated back. rotate: a kernel with the bits of `unrotated`."""
    ops, rotation = ops_of(st.data, "data"), st.recipe.format.rotation
    assert rotation is not None
    decoded = calls.dequantize(renamed(st, st.recipe.unrotated))
    values = rotate(decoded, rotation, st.axis)
    with ops.errstate():
        return reference.result(ops, values, options.out_dtype, options.out)


def renamed(st: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    """The same components under another recipe."""
    parts = (st.zero_point, st.global_scale, st.axis, st.padding)
    return ScaledTensor.from_parts(st.data, st.scale, recipe, st.layout, *parts)
