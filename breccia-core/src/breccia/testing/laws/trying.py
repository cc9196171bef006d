"""Helpers of the laws of kernels: calls of a single kernel, and what can be tried at a place."""

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
    """Whether a kernel declared for `declared` takes an operand of `recipe`, or a plain array if that is None."""
    return declared is None or (declared is NoneType if recipe is None else isinstance(recipe, declared))


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Every clause of the contract in a shape with partial blocks, and whole blocks of the usual sizes."""
    return np.concatenate([special_rows(67), wide((5, 67), seed=1)]), wide((16, 256), seed=2, exponents=8)


def asked(kernel: Kernel, op: Any, *operands: Any, **options: Any) -> Any:
    """The result of this kernel alone; None if it declines the call.

    Skips the test if the kernel cannot run on this machine. Raises AssertionError if its check raises, or if it declines
    the call without having a check.
    """
    try:
        return op(*operands, **options, prefer=kernel.name)
    except NoKernelError as e:
        reason = unavailable(kernel, operands[0])
        if reason is not None:
            pytest.skip(reason)
        if kernel.accepts is None:
            raise AssertionError(f"it has no accepts=, and does not run for this call:\n{e}") from e
        for line in str(e).splitlines():
            if f"its check {kernel.accepts} " in line:  # dispatch skips such a kernel, and warns
                raise AssertionError(line.partition("skipped: ")[2]) from e
        return None


def unavailable(kernel: Kernel, x: Any) -> str | None:
    """Why the kernel cannot run where `x` is, or None."""
    if kernel.available is None:
        return None
    return targets.load(kernel.available)(place_of(x.data if isinstance(x, ScaledTensor) else x))


def skip_unless_run(kernel: Kernel, served: bool) -> None:
    """Skip the test if the kernel never ran in it."""
    if not served:
        pytest.skip(f"{kernel.name} declined every array tried here")


# -- what can be tried at a place ------------------------------------------------------------------------------------


@cache
def float_dtypes(place: Place) -> tuple[str, ...]:
    """The input dtypes of the place: NumPy without ml_dtypes has no bfloat16."""
    found: list[str] = []
    for dtype in FLOATS:
        try:
            place.ops.to_float(place.array(np.zeros(1, np.float32)), dtype)
        except UnsupportedError:
            continue
        found.append(dtype)
    return tuple(found)


@cache
def takes_out(place: Place) -> bool:
    """Are arrays of the place mutable, so that `out=` can be given?"""
    one = place.array(np.zeros(1, np.float32))
    try:
        place.ops.assign(one, one)
    except UnsupportedError:
        return False
    return True


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """FP32 `x`, free of NaN, rounded to the nearest number of a dtype, ties to even; FP32 again."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    return (half_words(x, dtype).astype(np.uint32) << np.uint32(16)).view(np.float32) if dtype == "bfloat16" else x


def half_words(x: np.ndarray, dtype: str) -> np.ndarray:
    """The bit patterns of FP32 `x`, free of NaN, in "float16" or "bfloat16"."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    bits = np.asarray(x, np.float32, order="C").view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def numbers(place: Place, a: Any, dtype: str) -> np.ndarray:
    """An array of the place, of that floating dtype, as FP32 of NumPy."""
    words = place.words(a)
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.view(dtype).astype(np.float32)


def floats(place: Place, x: np.ndarray, dtype: str, view: bool = False) -> Any:
    """FP32 `x` in a dtype that holds it, at the place; a view of its transpose where `view` says so."""
    if view:
        return place.ops.swap(floats(place, np.asarray(x.swapaxes(-1, -2), order="C"), dtype))
    there = place.array(x)
    return there if dtype == "float32" else place.ops.to_float(there, dtype)


def storages_of(declared: tuple[str, ...], st: ScaledTensor) -> list[str]:
    """Those among the storages that a kernel declares (all, where it declares any) which hold this tensor."""
    held: list[str] = []
    for name in registry().declared["breccia_storages"] if declared == ANY_STORAGE else declared:
        try:
            st.to_storage(name)
        except UnsupportedError:
            continue
        held.append(name)
    return held


# -- inputs stay as they were ----------------------------------------------------------------------------------------


def expect_untouched(place: Place, given: Any, before: np.ndarray) -> None:
    """Raise AssertionError unless an array has the bit patterns that it had."""
    expect(bool((place.words(given) == before).all()), "it writes into its input")


def expect_kept(place: Place, given: Any, st: ScaledTensor | None) -> None:
    """Raise AssertionError unless a tensor of the place is what it was made of; nothing is known of a plain operand."""
    if st is None:
        return
    try:
        expect_tensor(place, given, st)
    except AssertionError as e:
        raise AssertionError(f"it writes into its input: {e}") from None
