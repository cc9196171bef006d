"""Tensors in any framework, and what tests compare of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import breccia
from breccia import ScaledTensor
from breccia.arrays.frameworks import ops_of

FRAMEWORKS = ["numpy", "torch", "jax", "mlx"]


def ops_for(framework: str) -> Any:
    if framework == "numpy":
        return ops_of(np.zeros(1))
    module = pytest.importorskip({"torch": "torch", "jax": "jax.numpy", "mlx": "mlx.core"}[framework])
    return ops_of(module.zeros(1))


def convert(framework: str, x: np.ndarray) -> Any:
    return ops_for(framework).from_numpy(x)


def moved(st: ScaledTensor, framework: str) -> ScaledTensor:
    """The NumPy tensor `st` in another framework, as a cast there stores it."""
    ops, fmt = ops_for(framework), st.recipe.format
    codecs = {"data": fmt.element, "scale": fmt.scale.codec, "zero_point": fmt.scale.codec if fmt.offset == "bias" else None}
    parts: dict[str, Any] = {}
    for name in ("data", "scale", "zero_point", "global_scale"):
        part, codec = getattr(st, name), codecs.get(name)
        dtype = ops.storage(codec) if codec else ""
        viewed = dtype if dtype.startswith(("float8", "bfloat16")) else None
        parts[name] = None if part is None else ops.from_numpy(part, viewed)
    return ScaledTensor(**parts, recipe=st.recipe, layout=st.layout, axis=st.axis, shape=st.shape)


def values(st: ScaledTensor) -> np.ndarray:
    y = breccia.dequantize(st)
    return np.asarray(ops_of(y).to_numpy(y))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def sound(st: ScaledTensor) -> ScaledTensor:
    """`st`, rebuilt by the constructor, which checks its components."""
    parts = (st.data, st.scale, st.recipe, st.layout, st.zero_point, st.global_scale, st.axis)
    again = ScaledTensor(*parts, shape=st.shape)
    assert (again.shape, again.padding) == (st.shape, st.padding)
    return st


def bits(y: Any) -> np.ndarray:
    """FP32 of any framework as int32, on NumPy."""
    return np.ascontiguousarray(ops_of(y).to_numpy(y)).view(np.int32)


def assert_equal_values(framework: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bits, with NaN equal to NaN; XLA alone may return signed zeros for results below 2^-126 (spec, section 4)."""
    a, b = ours & 0x7FFFFFFF, theirs & 0x7FFFFFFF
    both_nan = (a > 0x7F800000) & (b > 0x7F800000)
    if framework == "jax":
        ours = np.where((a < 0x00800000) & (b == 0), theirs, ours)
    np.testing.assert_array_equal(ours[~both_nan], theirs[~both_nan])
