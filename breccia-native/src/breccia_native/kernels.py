"""The NumPy kernels with compiled steps: the same chunks, threads and scales; amax, codes and packing in C."""

from __future__ import annotations

from functools import partial
from typing import Any

from breccia.kernels import numpy as kernels
from breccia.kernels import reference
from breccia.kernels.numpy import FloatCodes, IntegerCodes, ScaledCodes, Steps, TableCodes
from breccia.recipes import ScalingRecipe
from breccia.tensor import ScaledTensor

from . import steps


def cast(x: Any, recipe: ScalingRecipe, **options: Any) -> ScaledTensor:
    """`breccia.kernels.numpy.cast`, several times faster on large arrays."""
    return kernels.cast(x, recipe, steps=_STEPS, **options)


def requantize(st: ScaledTensor, recipe: ScalingRecipe, **options: Any) -> ScaledTensor:
    """`breccia.kernels.numpy.requantize` by way of `cast` here."""
    return reference.requantized(cast, kernels.dequantize, st, recipe, **options)


def cast_ste(x: Any, recipe: ScalingRecipe, **options: Any) -> Any:
    """`breccia.kernels.numpy.cast_ste` by way of `cast` here."""
    return kernels.cast_ste(x, recipe, steps=_STEPS, **options)


def cast_ste_clipped(
    x: Any, recipe: ScalingRecipe, clip_min: float | None = None, clip_max: float | None = None, **options: Any
) -> Any:
    """`breccia.kernels.numpy.cast_ste_clipped` by way of `cast` here."""
    return kernels.cast_ste_clipped(x, recipe, clip_min, clip_max, steps=_STEPS, **options)


def _scaled(codes: FloatCodes | IntegerCodes | TableCodes) -> ScaledCodes | None:
    match codes:
        case FloatCodes():
            fields = (codes.floor, codes.lift, codes.largest, codes.shift, codes.sign)
            return partial(_write, steps.floats, fields)
        case IntegerCodes():
            return partial(_write, steps.integers, (codes.low, codes.high, float(codes.magic), codes.mask))
        case _:
            return None


def _write(step: Any, fields: tuple[float, ...], source: Any, inverse: Any, k: int, codes: Any) -> None:
    step(source, inverse, k, codes, *fields)


_STEPS = Steps(amax=steps.amax, pairs=steps.pairs, scaled=_scaled)
