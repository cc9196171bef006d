"""The ops of the frontend while `torch.export` traces without Dynamo: one operator each, as in compiled graphs.

Without Dynamo nothing substitutes the ops of `breccia`: they run, on fake tensors whose sizes may be symbols.
"""

from __future__ import annotations

from typing import Any

from breccia.backend import DEFAULT, CastOptions, ScaledTensor, ScalingRecipe

from . import graphs

Array = Any


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Any = None) -> ScaledTensor:
    """`cast` of the frontend."""
    return graphs.cast(x, recipe, **options.given(), prefer=prefer)


def cast_pair(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Any = None) -> tuple[Any, ...]:
    """`cast_pair` of the frontend."""
    return tuple(graphs.cast_pair(x, recipe, **options.given(), prefer=prefer))


def record_amax(x: Array, recipe: ScalingRecipe, amaxes: Any, scale: Any, prefer: Any = None) -> tuple[Any, ...]:
    """`record_amax` of the frontend."""
    return graphs.record_amax(x, recipe, amaxes, scale)


def cast_and_record(
    x: Array, recipe: ScalingRecipe, amaxes: Any, scale: Any, options: CastOptions = DEFAULT, prefer: Any = None
) -> tuple[Any, ...]:
    """`cast_and_record` of the frontend."""
    return graphs.cast_and_record(x, recipe, amaxes, scale, **options.given(), prefer=prefer)


def dequantize(st: ScaledTensor, out_dtype: str = "float32", out: Any = None, prefer: Any = None) -> Array:
    """`dequantize` of the frontend."""
    return graphs.dequantize(st, out_dtype=out_dtype, out=out, prefer=prefer)


def requantize(
    st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT, require_exact: bool = False, prefer: Any = None
) -> ScaledTensor:
    """`requantize` of the frontend."""
    given = {name: value for name, value in options.given().items() if name != "axis"}  # it is that of `st`
    return graphs.requantize(st, recipe, **given, require_exact=require_exact, prefer=prefer)


def matmul(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None, prefer: Any = None) -> Array:
    """`matmul` of the frontend."""
    return graphs.matmul(a, b, out_dtype, bias=bias, out=out, prefer=prefer)


def cast_matmul(
    x: Array, recipe: ScalingRecipe, b: Any, bias: Any = None, out_dtype: str = "float32", prefer: Any = None
) -> Array:
    """`cast_matmul` of the frontend."""
    return graphs.cast_matmul(x, recipe, b, out_dtype, bias=bias, prefer=prefer)


def grouped_matmul(a: Any, b: Any, offsets: Array, out_dtype: str = "float32", out: Any = None, prefer: Any = None) -> Array:
    """`grouped_matmul` of the frontend."""
    return graphs.grouped_matmul(a, b, offsets, out_dtype, out=out, prefer=prefer)


def cast_ste(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Any = None) -> Array:
    """`cast_ste` of the frontend."""
    return graphs.cast_ste(x, recipe, **options.given(), prefer=prefer)


def cast_ste_clipped(x: Array, recipe: ScalingRecipe, clip: Any, options: CastOptions = DEFAULT, prefer: Any = None) -> Array:
    """`cast_ste_clipped` of the frontend."""
    low, high, clip = (None, None, clip) if isinstance(clip, str) else (*clip, "element")
    return graphs.cast_ste_clipped(x, recipe, low, high, clip=clip, **options.given(), prefer=prefer)
