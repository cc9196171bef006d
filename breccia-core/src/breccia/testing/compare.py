"""Bitwise comparisons of the kit, with messages that name the differences."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from ..arrays.frameworks import dtype_name
from ..codecs import F32_INF, MAGNITUDE, NORMAL, Codec
from ..tensors.components import PARTS
from ..tensors.tensor import ScaledTensor
from . import oracle
from .places import Place, words

#: By place: decoded numbers below 2^-126 that came back as zeros, which the contract allows under XLA.
flushed: Counter[str] = Counter()


def expect(holds: bool, message: str) -> None:
    """Raise AssertionError unless the condition holds."""
    if not holds:
        raise AssertionError(message)


def expect_words(what: str, found: np.ndarray, expected: np.ndarray) -> None:
    """Raise AssertionError unless two arrays of bit patterns are equal, naming the first difference."""
    expect(found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}")
    different = found != expected
    if different.any():
        index = tuple(int(i) for i in np.argwhere(different)[0])
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.size} differ, the first at {list(index)}: "
            f"0x{int(found[index]):x}, expected 0x{int(expected[index]):x}"
        )


def expect_numbers(what: str, place: Place, found: Any, expected: np.ndarray) -> None:
    """Raise AssertionError unless FP32 `found` of a place has the bits of `expected`.

    One NaN is like another; and where a place flushes, a zero of its sign does for a number below 2^-126.
    """
    theirs = np.asarray(expected, np.float32, order="C").view(np.uint32)
    ours = fp32(what, place, found, theirs.shape).view(np.uint32)
    a, b = ours & MAGNITUDE, theirs & MAGNITUDE
    settled = (a > F32_INF) & (b > F32_INF)
    if place.flushes:
        lost = (a == 0) & (b > 0) & (b < NORMAL) & (ours >> 31 == theirs >> 31)
        if lost.any():
            flushed[str(place)] += int(lost.sum())
        settled |= lost
    expect_words(what, np.where(settled, 0, ours), np.where(settled, 0, theirs))


def fp32(what: str, place: Place, found: Any, shape: tuple[int, ...]) -> np.ndarray:
    """FP32 `found` of a place as a NumPy array. Raises AssertionError for another dtype or shape."""
    expect(dtype_name(found) == "float32", f"{what}: {dtype_name(found)}, expected float32")
    host = place.words(found)
    expect(host.shape == shape, f"{what}: shape {host.shape}, expected {shape}")
    return host.view(np.float32)


def expect_tensor(place: Place, found: ScaledTensor, expected: ScaledTensor) -> None:
    """Raise AssertionError unless `found`, of a place, says what `expected`, of NumPy, says, byte for byte."""
    for name in ("recipe", "layout", "axis", "padding", "shape"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        expect(ours == theirs, f"{name} is {ours!r}, expected {theirs!r}")
    expect(found.framework == place.framework, f"the result is a {found.framework} tensor, expected one of {place.framework}")
    for name in PARTS:
        ours, theirs = getattr(found, name), getattr(expected, name)
        expect((ours is None) == (theirs is None), f"{name} is {ours!r}, expected {theirs!r}")
        if ours is not None:
            found_words, expected_words = place.words(ours), words(np.asarray(theirs))
            sizes = found_words.itemsize, expected_words.itemsize
            expect(sizes[0] == sizes[1], f"{name}: items of {sizes[0]} bytes, expected {sizes[1]}")
            expect_words(name, found_words, expected_words)


def expect_written(place: Place, found: ScaledTensor, expected: oracle.Written) -> None:
    """Raise AssertionError unless a tensor with blocks along its last axis holds what the oracle wrote."""
    ours = written(place, found)
    expect_words("scale", ours.scale, expected.scale)
    expect_words("codes", ours.codes, expected.codes)
    expect(
        ours.global_scale == expected.global_scale,
        f"global_scale is {ours.global_scale!r}, expected {expected.global_scale!r} (FP32 bits)",
    )
    if expected.zero_point is not None:
        expect(ours.zero_point is not None, "zero_point is missing")
        expect_words("zero_point", np.asarray(ours.zero_point), expected.zero_point)


def written(place: Place, st: ScaledTensor) -> oracle.Written:
    """What a tensor with blocks along its last axis holds, in the oracle's terms."""
    part = {name: place.words(p).astype(np.uint32) for name in PARTS if (p := getattr(st, name)) is not None}
    codes = unpacked(st.recipe.format.element, place.words(st.data), st.shape[-1])
    global_scale = part.get("global_scale")
    return oracle.Written(codes, part["scale"], None if global_scale is None else int(global_scale), part.get("zero_point"))


def unpacked(codec: Codec, data: np.ndarray, length: int) -> np.ndarray:
    """Codes, one per item, by reading each row as one long number: another road than the generic algorithm's."""
    if codec.bits == 8:
        return data.astype(np.uint32)
    rows = data.reshape(math.prod(data.shape[:-1]), data.shape[-1])
    mask = (1 << codec.bits) - 1
    out = np.zeros((len(rows), length), np.uint32)
    for i, row in enumerate(rows):
        word = int.from_bytes(row.tobytes(), "little")
        out[i] = [(word >> (codec.bits * j)) & mask for j in range(length)]
    return out.reshape(*data.shape[:-1], length)
