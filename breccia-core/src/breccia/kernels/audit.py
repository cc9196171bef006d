"""BRECCIA_CHECK=1: compare every kernel's result with the generic algorithm, bit by bit or within its error bound.

It is slow and doubles memory; it names the wrong kernel. Calls without values (traced arrays, fakes) are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import targets
from ..arrays.frameworks import device_of, dtype_name, ops_of
from ..dispatch.table import Chosen
from ..errors import BrecciaError, UnsupportedError
from ..fp32 import F32_INF, MAGNITUDE, NORMAL
from ..operations import Operation
from ..options import CastOptions, ProductOptions
from ..recipes import ScalingRecipe
from ..tensors.equality import stored_parts
from ..tensors.tensor import ScaledTensor
from . import bounds, reference

#: Per output dtype of products: unit roundoff, the spacing of subnormals where it matters, the largest number.
_ROUNDING = {
    "float32": (2.0**-24, 0.0, (2 - 2.0**-23) * 2.0**127),
    "float16": (2.0**-11, 2.0**-24, 65504.0),
    "bfloat16": (2.0**-8, 0.0, (2 - 2.0**-7) * 2.0**127),
}


def check(op: Operation, chosen: Chosen, arguments: tuple[Any, ...], actual: Any) -> None:
    """Raise KernelError where `actual`, the result of a kernel for these arguments, violates the contract."""
    try:
        expected = targets.load(op.reference)(*map(_without_out, arguments))
        differences = list(_differences(op, arguments, actual, expected))
    except (UnsupportedError, TypeError, ValueError, RuntimeError) as e:
        if _unreadable(arguments, e):
            return
        raise
    if differences:
        raise chosen.refused(f"BRECCIA_CHECK: {op.name} differs from the generic algorithm: {'; '.join(differences)}.")


def _without_out(argument: Any) -> Any:
    if isinstance(argument, ProductOptions):
        return argument._replace(out=None)
    return argument.replace(out=None) if isinstance(argument, CastOptions) else argument


def _unreadable(arguments: tuple[Any, ...], error: Exception) -> bool:
    """Whether the error was caused by arrays without readable values"""
    if isinstance(error, BrecciaError) and not isinstance(error, UnsupportedError):
        return False
    for x in arguments:
        array = x.data if isinstance(x, ScaledTensor) else x
        if hasattr(array, "shape"):
            try:
                ops_of(array).to_numpy(array)
            except Exception:
                return True
    return False


def _differences(op: Operation, arguments: tuple[Any, ...], actual: Any, expected: Any) -> Iterator[str]:
    if op.product:
        yield from _of_products(op.name, arguments, actual)
    elif len(op.results) == 1:
        yield from _of_one(actual, expected)
    else:
        for n, (result, one, other) in enumerate(zip(op.results, actual, expected, strict=True), 1):
            along = f" along axis {result.axis}" if result.axis is not None else ""
            yield from (f"result {n}{along}: {what}" for what in _of_one(one, other))


def _of_one(actual: Any, expected: Any) -> Iterator[str]:
    yield from _of_tensors(actual, expected) if isinstance(expected, ScaledTensor) else _of_values(actual, expected)


def _of_tensors(actual: ScaledTensor, expected: ScaledTensor) -> Iterator[str]:
    actual = actual.to_plain()
    for name in ("recipe", "layout", "axis", "padding"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        if ours != theirs:
            yield f"{name} is {ours!r}, not {theirs!r}"
            return
    left, right = stored_parts(actual), stored_parts(expected)
    for name, theirs in right.items():
        ours = left.get(name)
        if ours is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            was = None if ours is None else (ours.dtype.name, ours.shape)
            yield f"{name} is {was}, not {(theirs.dtype.name, theirs.shape)}"
        else:
            differ = ours.reshape(-1).view("u1") != theirs.reshape(-1).view("u1")
            if differ.any():
                yield f"{int(differ.sum())} of {differ.size} bytes of {name}"


def _of_values(actual: Any, expected: Any) -> Iterator[str]:
    """Decoded values: all NaNs are equal, and a backend may flush values below 2^-126 to zero."""
    ops = ops_of(actual)
    with ops.errstate():
        ours, theirs = (np.asarray(ops.to_numpy(ops.f32(x)), np.float32, order="C").view(np.uint32) for x in (actual, expected))
    a, b = ours & MAGNITUDE, theirs & MAGNITUDE
    flushed = (a == 0) & (b > 0) & (b < NORMAL) & (ours >> 31 == theirs >> 31)
    differ = (ours != theirs) & ~((a > F32_INF) & (b > F32_INF)) & ~(flushed & _flushes(actual))
    if differ.any():
        yield f"{int(differ.sum())} of {differ.size} values"


def _flushes(like: Any) -> bool:
    """Whether the framework flushes results below 2^-126 to zero. XLA does, and the contract allows it."""
    ops = ops_of(like)
    least = ops.constant(2.0**-126, like)
    return not ops.to_numpy(least * 0.5).any() or not ops.to_numpy(ops.div(least, 2.0)).any()


def _of_products(op: str, arguments: tuple[Any, ...], actual: Any) -> Iterator[str]:
    """The error is within `bounds.accumulated` of the exact sum of K + 2 terms, and one rounding to the output's dtype.

    Where a partial sum may overflow or holds Inf there is no bound. Where every order of summation gives NaN, NaN is due.
    """
    ops = ops_of(actual)
    a, b, rest = arguments[0], arguments[1], arguments[-1].bias
    if op == "cast_matmul":
        a, b = reference.cast(arguments[0], arguments[1]), arguments[2]
    elif op == "grouped_matmul":
        rest = arguments[2]
    left, right = (_host(reference.values(ops, x)) for x in (a, b))
    ours = _host(ops.f32(actual))
    unit, spacing, largest = _ROUNDING[dtype_name(actual)]
    with np.errstate(all="ignore"):
        if op == "grouped_matmul":
            exact, magnitude, start = np.zeros(ours.shape), np.zeros(ours.shape), 0
            for matrix, end in zip(right, _host(rest).astype(int), strict=True):
                exact[start:end] = left[start:end] @ matrix
                magnitude[start:end] = np.abs(left[start:end]) @ np.abs(matrix)
                start = max(start, end)
        else:
            exact, magnitude = left @ right, np.abs(left) @ np.abs(right)
            if rest is not None:
                bias = _host(ops.f32(rest))
                exact, magnitude = exact + bias, magnitude + np.abs(bias)
        k, fp8 = left.shape[-1], bounds.in_tensor_cores(_recipe(a), _recipe(b), device_of(actual))
        accumulated = bounds.accumulated(magnitude, k + 2, k, fp8)
        bound = accumulated + unit * (np.abs(exact) + accumulated) + spacing
        known = magnitude + accumulated <= _ROUNDING["float32"][2]
        overflows = np.isinf(ours) & (np.sign(ours) == np.sign(exact)) & (np.abs(exact) + bound > largest)
        wrong = np.where(known, ~(np.abs(ours - exact) <= bound) & ~overflows, np.isnan(exact) & ~np.isnan(ours))
    if wrong.any():
        kind = "FP8 tensor cores, promoted to FP32 every 128 along K" if fp8 else "FP32 accumulation"
        yield f"{int(wrong.sum())} of {wrong.size} numbers of the product are beyond the bound of {kind}"


def _recipe(x: Any) -> ScalingRecipe | None:
    return x.recipe if isinstance(x, ScaledTensor) else None


def _host(x: Any) -> np.ndarray:
    return np.asarray(ops_of(x).to_numpy(x), np.float64)
