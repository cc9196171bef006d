"""The NumPy kernels with compiled microkernels: the same chunks, threads and scales; amax, codes and packing in C."""

from __future__ import annotations

from functools import partial
from typing import Any

from breccia.backend import (
    DEFAULT,
    CastOptions,
    FloatCodes,
    IntegerCodes,
    Microkernels,
    ScaledCodes,
    ScaledTensor,
    ScalingRecipe,
    TableCodes,
)
from breccia.backend import numpy as kernels

from . import microkernels


def cast(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`breccia.kernels.numpy.casting.cast`, several times faster on large arrays."""
    return kernels.cast(x, recipe, options, _MICROKERNELS)


def dequantize(st: ScaledTensor, out_dtype: str = "float32", out: Any = None) -> Any:
    """`breccia.kernels.numpy.decoding.dequantize`, faster on small tensors."""
    return kernels.dequantize(st, out_dtype, out, _MICROKERNELS)


def _scaled(codes: FloatCodes | IntegerCodes | TableCodes, divides: bool = False) -> ScaledCodes | None:
    match codes:
        case FloatCodes():
            fields = (codes.floor, codes.lift, codes.largest, codes.shift, codes.sign)
            return partial(_write, microkernels.floats, divides, fields)
        case IntegerCodes():
            return partial(_write, microkernels.integers, divides, (codes.low, codes.high, float(codes.magic), codes.mask))
        case _:
            return None


def _write(step: Any, divides: bool, fields: tuple[float, ...], source: Any, inverse: Any, k: int, codes: Any) -> None:
    step(source, inverse, k, divides, codes, *fields)


def _shifted(codes: IntegerCodes, source: Any, inverse: Any, before: Any, after: Any, k: int, found: Any) -> None:
    fields = (codes.low, codes.high, float(codes.magic), codes.mask)
    microkernels.shifted(source, inverse, before, after, k, found, *fields)


def _load(values: Any, dtype: str, columns: int, found: Any) -> None:
    microkernels.load(values, _KINDS[dtype], columns, found)


def _store(values: Any, dtype: str, found: Any) -> None:
    microkernels.store(values, _KINDS[dtype], found)


#: The numbers of dtypes in C.
_KINDS = {"float32": 32, "bfloat16": 16, "float16": -16}
_MICROKERNELS = Microkernels(
    amax=microkernels.amax,
    pairs=microkernels.pairs,
    scaled=_scaled,
    divided=partial(_scaled, divides=True),
    values=microkernels.values,
    load=_load,
    store=_store,
    extremes=microkernels.extremes,
    shifted=_shifted,
)
