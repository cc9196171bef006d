"""The NumPy kernels with compiled steps: the same chunks, threads and scales; amax, codes and packing in C."""

from __future__ import annotations

from functools import partial
from typing import Any

from breccia.backend import (
    DEFAULT,
    CastOptions,
    FloatCodes,
    IntegerCodes,
    ScaledCodes,
    ScaledTensor,
    ScalingRecipe,
    Steps,
    TableCodes,
)
from breccia.backend import numpy as kernels

from . import steps


def cast(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`breccia.kernels.numpy.casting.cast`, several times faster on large arrays."""
    return kernels.cast(x, recipe, options, _STEPS)


def dequantize(st: ScaledTensor, out_dtype: str = "float32", out: Any = None) -> Any:
    """`breccia.kernels.numpy.decoding.dequantize`, faster on small tensors."""
    return kernels.dequantize(st, out_dtype, out, _STEPS)


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


_STEPS = Steps(amax=steps.amax, pairs=steps.pairs, scaled=_scaled, values=steps.values)
