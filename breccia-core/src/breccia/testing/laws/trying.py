"""Helpers of the laws of kernels: calls of a single kernel, and the features that a place supports."""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import Any

import numpy as np
import pytest

from ... import targets
from ...arrays.frameworks import FLOATS, place_of
from ...dispatch.kernel import ANY_STORAGE, Kernel
from ...dispatch.registry import registry
from ...errors import NoKernelError, UnsupportedError
from ...recipes import ScalingRecipe
from ...tensors.tensor import ScaledTensor
from ..compare import expect, expect_tensor
from ..examples import special_rows, wide
from ..places import Place


def matches(declared: type | None, recipe: ScalingRecipe | None) -> bool:
    """Whether a kernel declared for `declared` accepts an operand of `recipe` (None: a plain array)."""
    return declared is None or (declared is NoneType if recipe is None else isinstance(recipe, declared))


def knows(kernel: Kernel, recipe: ScalingRecipe) -> bool:
    """Whether the kernel is asked about calls with this recipe: whether it knows all features of its format."""
    return kernel.kind != "kernel" or recipe.format.features <= set(kernel.knows)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Two arrays: one tests every clause of the contract and has partial blocks; one has full blocks of the usual sizes."""
    return np.concatenate([special_rows(67), wide((5, 67), seed=1)]), wide((16, 256), seed=2, exponents=8)


def run_alone(kernel: Kernel, op: Any, *operands: Any, **options: Any) -> Any:
    """The result of a call run by this kernel; None if the kernel declines it.

    Skips the test if the kernel cannot run on this machine. Raises AssertionError if its `accepts` raises, or if a kernel
    without `accepts` does not run.
    """
    try:
        return op(*operands, **options, prefer=kernel.name)
    except NoKernelError as e:
        reason = unavailable(kernel, operands[0])
        if reason is not None:
            pytest.skip(reason)
        if kernel.accepts is None:
            raise AssertionError(f"it has no accepts=, but does not run for this call:\n{e}") from e
        for line in str(e).splitlines():
            if f"its check {kernel.accepts} " in line:  # dispatch skips such a kernel, and warns
                raise AssertionError(line.partition("skipped: ")[2]) from e
        return None


def unavailable(kernel: Kernel, x: Any) -> str | None:
    """Why the kernel cannot run where `x` is, or None."""
    if kernel.available is None:
        return None
    return targets.load(kernel.available)(place_of(x.data if isinstance(x, ScaledTensor) else x))


def skip_unless_run(kernel: Kernel, ran: bool) -> None:
    """Skip the test if the kernel never ran in it."""
    if not ran:
        pytest.skip(f"{kernel.name} declined every array tried here")


# -- what a place supports -------------------------------------------------------------------------------------------


@cache
def float_dtypes(place: Place) -> tuple[str, ...]:
    """The input dtypes of the place. NumPy without ml_dtypes has no bfloat16."""
    dtypes: list[str] = []
    for dtype in FLOATS:
        try:
            place.ops.to_float(place.array(np.zeros(1, np.float32)), dtype)
        except UnsupportedError:
            continue
        dtypes.append(dtype)
    return tuple(dtypes)


@cache
def takes_out(place: Place) -> bool:
    """Whether arrays of the place are mutable, which `out=` requires."""
    one = place.array(np.zeros(1, np.float32))
    try:
        place.ops.assign(one, one)
    except UnsupportedError:
        return False
    return True


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """FP32 `x` without NaN, rounded to a dtype (to nearest, ties to even) and converted back to FP32."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    return (half_words(x, dtype).astype(np.uint32) << np.uint32(16)).view(np.float32) if dtype == "bfloat16" else x


def half_words(x: np.ndarray, dtype: str) -> np.ndarray:
    """The bit patterns of FP32 `x`, without NaN, in "float16" or "bfloat16"."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    bits = np.asarray(x, np.float32, order="C").view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def numbers(place: Place, a: Any, dtype: str) -> np.ndarray:
    """An array of the place, of floating dtype `dtype`, as an FP32 NumPy array."""
    words = place.words(a)
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.view(dtype).astype(np.float32)


def floats(place: Place, x: np.ndarray, dtype: str, view: bool = False) -> Any:
    """FP32 `x` at the place, in a dtype that represents it exactly. `view`: as a transposed view."""
    if view:
        return place.ops.swap(floats(place, np.asarray(x.swapaxes(-1, -2), order="C"), dtype))
    there = place.array(x)
    return there if dtype == "float32" else place.ops.to_float(there, dtype)


def storages_of(declared: tuple[str, ...], st: ScaledTensor) -> list[str]:
    """The declared storages (or all, if `declared` is ANY_STORAGE) that support this tensor."""
    supported: list[str] = []
    for name in registry().declared["breccia_storages"] if declared == ANY_STORAGE else declared:
        try:
            st.to_storage(name)
        except UnsupportedError:
            continue
        supported.append(name)
    return supported


# -- inputs are unchanged --------------------------------------------------------------------------------------------


def expect_array_unchanged(place: Place, array: Any, before: np.ndarray) -> None:
    """Raise AssertionError unless an array still has the bit patterns `before`."""
    expect(bool((place.words(array) == before).all()), "it writes into its input")


def expect_tensor_unchanged(place: Place, operand: Any, st: ScaledTensor | None) -> None:
    """Raise AssertionError unless the tensor `operand` still equals `st`. Does nothing for a plain operand (`st` is None)."""
    if st is None:
        return
    try:
        expect_tensor(place, operand, st)
    except AssertionError as e:
        raise AssertionError(f"it writes into its input: {e}") from None
