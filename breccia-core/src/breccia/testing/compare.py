"""The kit's bitwise comparisons, with messages that name the differences."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from ..arrays.frameworks import dtype_name
from ..codecs import Codec
from ..fp32 import F32_INF, MAGNITUDE, NORMAL
from ..tensors.components import PARTS
from ..tensors.tensor import ScaledTensor
from . import oracle
from .places import Place, words

#: By place: how many decoded values below 2^-126 came back as zeros, which the contract allows under XLA.
flushed: Counter[str] = Counter()


def expect(holds: bool, message: str) -> None:
    """Raise AssertionError unless the condition holds."""
    if not holds:
        raise AssertionError(message)


def expect_words(what: str, patterns: np.ndarray, expected: np.ndarray) -> None:
    """Raise AssertionError unless two arrays of bit patterns are equal, naming the first difference."""
    expect(patterns.shape == expected.shape, f"{what}: shape {patterns.shape}, expected {expected.shape}")
    different = patterns != expected
    if different.any():
        index = tuple(int(i) for i in np.argwhere(different)[0])
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.size} differ, the first at {list(index)}: "
            f"0x{int(patterns[index]):x}, expected 0x{int(expected[index]):x}"
        )


def expect_numbers(what: str, place: Place, array: Any, expected: np.ndarray) -> None:
    """Raise AssertionError unless an FP32 array, at a place, has the bits of `expected`.

    Any NaN equals any NaN. Where a place flushes, a zero of the same sign equals a number below 2^-126.
    """
    expected_bits = np.asarray(expected, np.float32, order="C").view(np.uint32)
    bits = fp32(what, place, array, expected_bits.shape).view(np.uint32)
    a, b = bits & MAGNITUDE, expected_bits & MAGNITUDE
    equal = (a > F32_INF) & (b > F32_INF)
    if place.flushes:
        lost = (a == 0) & (b > 0) & (b < NORMAL) & (bits >> 31 == expected_bits >> 31)
        if lost.any():
            flushed[str(place)] += int(lost.sum())
        equal |= lost
    expect_words(what, np.where(equal, 0, bits), np.where(equal, 0, expected_bits))


def fp32(what: str, place: Place, array: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An FP32 array, at a place, as a NumPy array. Raises AssertionError for another dtype or shape."""
    expect(dtype_name(array) == "float32", f"{what}: {dtype_name(array)}, expected float32")
    host = place.words(array)
    expect(host.shape == shape, f"{what}: shape {host.shape}, expected {shape}")
    return host.view(np.float32)


def expect_tensor(place: Place, st: ScaledTensor, expected: ScaledTensor) -> None:
    """Raise AssertionError unless tensor `st`, at a place, equals NumPy tensor `expected` byte for byte."""
    for name in ("recipe", "layout", "axis", "padding", "shape"):
        value, wanted = getattr(st, name), getattr(expected, name)
        expect(value == wanted, f"{name} is {value!r}, expected {wanted!r}")
    expect(st.framework == place.framework, f"the result is a {st.framework} tensor, expected one of {place.framework}")
    for name in PARTS:
        value, wanted = getattr(st, name), getattr(expected, name)
        expect((value is None) == (wanted is None), f"{name} is {value!r}, expected {wanted!r}")
        if value is not None:
            part_words, expected_words = place.words(value), words(np.asarray(wanted))
            sizes = part_words.itemsize, expected_words.itemsize
            expect(sizes[0] == sizes[1], f"{name}: items of {sizes[0]} bytes, expected {sizes[1]}")
            expect_words(name, part_words, expected_words)


def expect_written(place: Place, st: ScaledTensor, expected: oracle.Written) -> None:
    """Raise AssertionError unless a tensor with blocks along its last axis holds what the oracle wrote."""
    actual = written(place, st)
    expect_words("scale", actual.scale, expected.scale)
    expect_words("codes", actual.codes, expected.codes)
    expect(
        actual.global_scale == expected.global_scale,
        f"global_scale is {actual.global_scale!r}, expected {expected.global_scale!r} (FP32 bits)",
    )
    if expected.zero_point is not None:
        expect(actual.zero_point is not None, "zero_point is missing")
        expect_words("zero_point", np.asarray(actual.zero_point), expected.zero_point)


def written(place: Place, st: ScaledTensor) -> oracle.Written:
    """The codes and scales of a tensor with blocks along its last axis, as the oracle writes them."""
    part = {name: place.words(p).astype(np.uint32) for name in PARTS if (p := getattr(st, name)) is not None}
    codes = unpacked(st.recipe.format.element, place.words(st.data), st.shape[-1])
    global_scale = part.get("global_scale")
    return oracle.Written(codes, part["scale"], None if global_scale is None else int(global_scale), part.get("zero_point"))


def unpacked(codec: Codec, data: np.ndarray, length: int) -> np.ndarray:
    """Codes, one per item. Reads each row as one long integer, independently of the generic algorithm."""
    if codec.bits == 8:
        return data.astype(np.uint32)
    rows = data.reshape(math.prod(data.shape[:-1]), data.shape[-1])
    mask = (1 << codec.bits) - 1
    out = np.zeros((len(rows), length), np.uint32)
    for i, row in enumerate(rows):
        word = int.from_bytes(row.tobytes(), "little")
        out[i] = [(word >> (codec.bits * j)) & mask for j in range(length)]
    return out.reshape(*data.shape[:-1], length)
