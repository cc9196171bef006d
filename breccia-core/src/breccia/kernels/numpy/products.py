"""`matmul` for NumPy arrays: weights are decoded tile by tile into BLAS products."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...arrays.frameworks import output_dtype
from ...arrays.ops import NUMPY, Array
from ...dispatch import calls
from ...formats import TENSOR
from ...tensors.grids import packing
from ...tensors.tensor import ScaledTensor
from .. import reference
from ..checks import check_matmul
from .workspace import F4

#: Bytes of FP32 that `matmul` decodes at a time.
TILE = 8 << 20


def matmul(a: Any, b: Any, bias: Array | None = None, out_dtype: Any = "float32", out: Array | None = None) -> Array:
    """`reference.matmul`, decoding operands larger than `TILE` piece by piece."""
    check_matmul(a, b, bias)
    left, right, name = tuple(a.shape), tuple(b.shape), output_dtype(out_dtype)
    product = np.empty((*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1]), F4)
    with np.errstate(all="ignore"):
        _product(a, b, product)
        if bias is not None:
            np.add(product, NUMPY.f32(bias), out=product)
        return product if out is None and name == "float32" else reference.result(NUMPY, product, name, out)


def _product(a: Any, b: Any, product: Array) -> None:
    """a @ b into `product`; each element comes from one BLAS call over all of K."""
    small = [4 * math.prod(x.shape) <= TILE for x in (a, b)]
    if all(small):
        np.matmul(_dense(a), _dense(b), out=product)
        return
    if product.ndim > 2 and not (small[0] and len(b.shape) == 2):
        for i in range(len(product)):
            left, right = (x if len(x.shape) < product.ndim else x[i if x.shape[0] > 1 else 0] for x in (a, b))
            _product(left, right, product[i])
        return
    rows, columns = (range(0, x.shape[axis], _step(x, axis)) for x, axis in ((a, -2), (b, -1)))
    for r in rows:
        left = _dense(a if len(rows) == 1 else a[..., r : r + rows.step, :])
        for c in columns:
            right = _dense(b if len(columns) == 1 else b[..., c : c + columns.step])
            np.matmul(left, right, out=product[..., r : r + rows.step, c : c + columns.step])


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
