"""`matmul` for NumPy arrays: weights are decoded tile by tile into BLAS products."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...arrays.ops import NUMPY, Array
from ...dispatch import calls
from ...formats import TENSOR
from ...options import FLOAT32, ProductOptions
from ...tensors.grids import packing
from ...tensors.tensor import ScaledTensor
from .. import reference
from ..checks import check_grouped, check_matmul
from .workspace import F4

#: Bytes of FP32 that `matmul` decodes at a time.
TILE = 8 << 20


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`reference.matmul`, decoding operands larger than `TILE` piece by piece."""
    name, bias, out = options
    check_matmul(a, b, bias)
    left, right = tuple(a.shape), tuple(b.shape)
    product = np.empty((*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1]), F4)
    with np.errstate(all="ignore"):
        _product(a, b, product)
        if bias is not None:
            np.add(product, NUMPY.f32(bias), out=product)
        return product if out is None and name == "float32" else reference.result(NUMPY, product, name, out)


def _product(a: Any, b: Any, product: Array) -> None:
    """a @ b into `product`; each element comes from one BLAS call over all of K."""
    small = [_bytes(x) <= TILE for x in (a, b)]
    if all(small):
        np.matmul(_dense(a), _dense(b), out=product)
        return
    if product.ndim > 2 and len(b.shape) == 2 and product.flags.c_contiguous and not isinstance(a, ScaledTensor):
        return _product(a.reshape(-1, a.shape[-1]), b, product.reshape(-1, product.shape[-1]))
    large = a if _bytes(a) > _bytes(b) else b
    axis = next((i for i in range(-len(large.shape), -2) if large.shape[i] > 1), None)
    if axis is not None:
        a, b = (_dense(x) if each else x for x, each in zip((a, b), small, strict=True))
        length = large.shape[axis]
        step = max(TILE * length // _bytes(large), 1)
        for i in range(0, length, step):
            _product(*(_part(x, axis, slice(i, i + step)) for x in (a, b, product)))
        return
    rows, columns = (range(0, x.shape[axis], _step(x, axis)) for x, axis in ((a, -2), (b, -1)))
    for r in rows:
        left = _dense(a if len(rows) == 1 else a[..., r : r + rows.step, :])
        for c in columns:
            right = _dense(b if len(columns) == 1 else b[..., c : c + columns.step])
            np.matmul(left, right, out=product[..., r : r + rows.step, c : c + columns.step])


def grouped_matmul(a: Any, b: Any, offsets: Array, options: ProductOptions = FLOAT32) -> Array:
    """`reference.grouped_matmul`, which decodes the matrices of groups with rows: adjacent ones together, up to `TILE`."""
    check_grouped(a, b, offsets)
    name, _, out = options
    with np.errstate(all="ignore"):
        rows, product = _dense(a), np.zeros((a.shape[0], b.shape[-1]), F4)
        starts, ends = (bounds.tolist() for bounds in group_bounds(offsets, len(rows)))
        count, first = len(ends), 0
        most = max(TILE * count // max(_bytes(b), 1), 1)
        decoded = np.empty((0, *b.shape[1:]), F4)
        for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end == start:
                continue
            if group >= first + len(decoded):
                limit = min(group + most, count)
                first, stop = group, next((i for i in range(group, limit) if ends[i] == starts[i]), limit)
                decoded = _dense(b[first:stop])
            np.matmul(rows[start:end], decoded[group - first], out=product[start:end])
        return product if out is None and name == "float32" else reference.result(NUMPY, product, name, out)


def group_bounds(offsets: Array, rows: int) -> tuple[Array, Array]:
    """The first row of each group, and the one after its last: int64 arrays of shape (E,), in order and within `rows`."""
    ends = np.minimum(np.maximum.accumulate(np.maximum(offsets, 0)), rows).astype(np.int64)
    return np.concatenate([np.zeros(1, np.int64), ends])[:-1], ends


def _part(x: Any, axis: int, part: slice) -> Any:
    """A part of a leading axis, counted from the end; all of `x` where it broadcasts along it."""
    before = len(x.shape) + axis
    return x if before < 0 or x.shape[axis] == 1 else x[(*(slice(None),) * before, part)]


def _bytes(x: Any) -> int:
    """Of the numbers of an operand in FP32."""
    return 4 * math.prod(x.shape)


def _step(x: Any, axis: int) -> int:
    """The number of positions along `axis` to decode at a time: whole blocks and packing groups, about `TILE` bytes."""
    length = max(x.shape[axis], 1)
    grain = 1
    if isinstance(x, ScaledTensor):
        m, k = x.layout.block(x.axis)
        per_tensor = x.layout.block(x.axis) == TENSOR
        side = (k if axis == x.axis else m) or (1 if per_tensor else length)
        grain = math.lcm(side, packing(x.recipe.format.element)[0] if axis == x.axis else 1)
    each = 4 * math.prod(x.shape) // length
    return max(TILE // max(each, 1) // grain, 1) * grain


def _dense(x: Any) -> Array:
    """FP32 values of an operand."""
    return calls.dequantize(x) if isinstance(x, ScaledTensor) else NUMPY.f32(x)
