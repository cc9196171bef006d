"""The values that the codes of a tensor decode to under its scales, and tensors with chosen codes. For NumPy arrays."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ..arrays.ops import NUMPY
from ..codecs import Codec
from ..dispatch import calls
from ..errors import UnsupportedError
from ..options import FLOAT32
from ..tensors.components import components, with_parts
from ..tensors.grids import packing
from ..tensors.tensor import ScaledTensor
from .reference import pack, unpack


def data_of_one_code(st: ScaledTensor, code: int) -> np.ndarray:
    """The data of the tensor with every code replaced by `code`."""
    codec = st.recipe.format.element
    group = pack(NUMPY, np.full((1, packing(codec)[0]), code, np.int32), codec).reshape(-1).astype(np.uint8)
    length = st.data.shape[st.axis]
    line = np.resize(group, length)
    data = np.empty(st.data.shape, np.uint8)
    data[...] = line if st.axis == -1 else line[:, None]
    return data


def with_data(st: ScaledTensor, data: np.ndarray) -> ScaledTensor:
    """A tensor of other codes, packed, under the same scales."""
    parts = (data, st.scale, st.recipe, st.layout, st.zero_point, st.global_scale, st.axis)
    return ScaledTensor.from_parts(*parts, padding=st.padding)


def of_one_code(st: ScaledTensor, code: int) -> ScaledTensor:
    """The tensor with every code replaced by `code`, under the same scales."""
    return with_data(st, data_of_one_code(st, code))


def affine(st: ScaledTensor) -> tuple[np.ndarray, np.ndarray]:
    """(zero, step), FP32 of the shape of `st`: a code whose codec says `n` decodes to zero + step * n.

    Exact up to the rounding of FP32 in `dequantize`. Both follow from decoding two codes, so that formats of any number of
    levels, with any offset, have them. step is 0 or NaN under scales that are unusable.

    Raises UnsupportedError for a format whose blocks choose between two codecs of elements: their codes have no one codec.
    """
    fmt = st.recipe.format
    if fmt.rotation is not None:
        raise UnsupportedError(
            f"under {st.recipe.spec} a value is a sum of {fmt.rotation.block} codes, so that no code stands for a number of "
            "its own. Pass breccia.dequantize(st), or cast without rotation.",
            recipe=st.recipe.spec,
        )
    if fmt.alternative is not None:
        raise UnsupportedError(
            f"the blocks of {st.recipe.spec} choose between {fmt.element.name} and {fmt.alternative.name}, so that the number "
            "of a code depends on its block.",
            recipe=st.recipe.spec,
        )
    (n0, first), (n1, second) = _two_codes(fmt.element)
    v0, v1 = (calls.dequantize(of_one_code(st, code), FLOAT32) for code in (first, second))
    if (n0, n1) == (0.0, 1.0):
        with np.errstate(invalid="ignore"):
            return v0, v1 - v0
    with np.errstate(invalid="ignore"):
        step = (v1.astype(np.float64) - v0) / (n1 - n0)
        return (v0 - step * n0).astype(np.float32), step.astype(np.float32)


def with_codes(st: ScaledTensor, codes: np.ndarray) -> ScaledTensor:
    """The tensor with other codes under the same scales. codes: int32, of the shape of `st`, the codec's."""
    return with_parts(st, components(st) | {"data": _stored(st, pack(NUMPY, codes, st.recipe.format.element, st.axis))})


def codes_of(st: ScaledTensor) -> np.ndarray:
    """The codes of a tensor as int32, of its shape."""
    return unpack(NUMPY, st.data, st.recipe.format.element, st.shape[st.axis], st.axis)


@cache
def numbers_of_codec(codec: Codec) -> tuple[np.ndarray, np.ndarray]:
    """(numbers in ascending order, FP32, each once; the first code of each, int32) of the finite codes of a codec."""
    values = [(codec.value(code), code) for code in range(1 << codec.bits)]
    codes: dict[float, int] = {}
    for number, code in values:
        if math.isfinite(number):
            codes.setdefault(number + 0.0, code)
    numbers = sorted(codes)
    return np.array(numbers, np.float32), np.array([codes[number] for number in numbers], np.int32)


@cache
def _two_codes(codec: Codec) -> tuple[tuple[float, int], tuple[float, int]]:
    """Two numbers of a codec with their codes: 0 and 1 where it has them, so that their values subtract exactly."""
    numbers, codes = numbers_of_codec(codec)
    pairs = dict(zip(numbers.tolist(), codes.tolist(), strict=True))
    low = min(pairs, key=abs)
    high = 1.0 if 1.0 in pairs and low < 1.0 else max(pairs)
    return (low, pairs[low]), (high, pairs[high])


def _stored(st: ScaledTensor, data: np.ndarray) -> np.ndarray:
    """Packed codes in the dtype of the tensor's, which may be signed."""
    return data.view(st.data.dtype) if data.dtype != st.data.dtype and data.itemsize == st.data.dtype.itemsize else data
