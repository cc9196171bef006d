"""`dequantize`, and products of decoded weights, for compiled functions on a CPU, in slabs of rows and few operations.

See `breccia_mlx.compiled`.
"""

from __future__ import annotations

import itertools
import math
import sys
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from breccia import Codec, Format, Integer, Minifloat, PowerOfTwo, ScaledTensor
from breccia.backend import FLOAT32, TENSOR, Call, Operand, ProductOptions, calls, composites, packing, reference
from breccia.internal import MAGNITUDE, NORMAL

from .compiled import Grid, flushed, of_slab
from .ops import MLX

Array = Any

_QUIET = 0x7FC00000


def accepts(call: Call) -> str | None:
    """Why this kernel does not decode, or None."""
    return "out= is the generic algorithm's" if call.option("out") is not None else _unsupported(call.a)


def accepts_product(call: Call) -> str | None:
    """Why `matmul` does not multiply by the second operand, or None."""
    w = call.b
    if w is None or w.recipe is None:
        return "it multiplies by a quantized b"
    if call.option("out") is not None:
        return "out= is the generic algorithm's"
    if w.axis != -2 or w.ndim != 2 or call.a.empty:
        return "b must be the .mT of one weight (N, K) with blocks along K, and a must have rows"
    if call.opaque is None:
        return "outside transformed functions other kernels decode in less time"
    return _unsupported(w)


def _unsupported(x: Operand) -> str | None:
    """Why the numbers of an operand are not decoded in slabs of its rows, or None."""
    recipe, layout = x.recipe, x.layout
    assert recipe is not None
    fmt = recipe.format
    if mx.default_device().type != mx.cpu:
        return "its arithmetic has been tested on MLX's CPU only"
    if sys.byteorder != "little":
        return "it unpacks codes on little-endian machines"
    if any(level.convention == "divisor" for level in fmt.levels):
        return "scales that divide are the generic algorithm's"
    if type(fmt.scale.codec) not in (Minifloat, PowerOfTwo):
        return f"it does not multiply by {fmt.scale.codec.name} scales"
    if layout is None or not layout.in_order:
        return "its layouts have a scale per tensor or per block"
    if x.empty or x.ndim < 2:
        return "empty tensors, and those of one axis, are the generic algorithm's"
    rows, columns = x.aligned if x.axis == -1 else x.aligned[::-1]
    m, k = layout.block(x.axis)
    if columns % (k or 1) or rows % (m or 1) or columns % packing(fmt.element)[0]:
        return "it decodes whole blocks, and packing groups, of 2^n numbers along an axis, up to 256"
    return None


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Array:
    """`dequantize` in few passes over the result."""
    name, _, out = options
    if out is not None or _several(st):
        return reference.dequantize(st, options)
    grid = _grid(st)
    return grid.joined([v if name == "float32" else MLX.to_float(v, name) for v in _slabs(st, grid)])


def matmul(a: Any, b: ScaledTensor, options: ProductOptions = FLOAT32) -> Array:
    """`a @ b` in FP32, for `b` the `.mT` of a weight (N, K), of which one slab of rows is decoded at a time."""
    out_dtype, bias, out = options
    if out is not None or _several(b):
        return composites.matmul(a, b, options)
    x = calls.dequantize(a) if isinstance(a, ScaledTensor) else MLX.f32(a)
    y = mx.concatenate([x @ MLX.swap(v) for v in _slabs(b, _grid(b))], axis=-1)
    return reference.result(MLX, y if bias is None else y + MLX.f32(bias), out_dtype, out)


def _grid(st: ScaledTensor) -> Grid:
    return Grid.of(st.shape, st.layout.block(st.axis), st.axis == -2)


def _several(st: ScaledTensor) -> bool:
    """Whether matrices have scales of their own"""
    several_scales = st.layout.block(st.axis) == TENSOR and st.scale.ndim > 0
    return several_scales or (st.global_scale is not None and st.global_scale.ndim > 0)


def _slabs(st: ScaledTensor, grid: Grid) -> list[Array]:
    """The FP32 numbers, in slabs of rows along the blocks."""
    fmt = st.recipe.format
    scale, factor = _multiplier(fmt, grid.of_blocks(st.scale)), None
    if fmt.global_scale is not None:
        factor = reference.multiplier(MLX, MLX.f32(st.global_scale), fmt)
    offset = None if st.zero_point is None else reference.offsets_of(MLX, grid.of_blocks(st.zero_point))
    if fmt.offset == "bias":
        offset = flushed(offset)

    scale, offset = grid.spread(scale), None if offset is None else grid.spread(offset)
    slabs: list[Array] = []
    for stored, cut in zip(grid.slabs(st.data), grid.cuts, strict=True):
        v = grid.split(_numbers(stored, fmt.element))
        if fmt.offset == "zero_point":
            v = v - of_slab(offset, cut)
        v = v * of_slab(scale, cut)
        if factor is not None:
            v = v.view(mx.int32).view(mx.float32) * factor  # bitcasts, so that one number does not make a loop scalar
        if fmt.offset == "bias":
            v = _flushed(v) + of_slab(offset, cut)
        slabs.append(mx.reshape(v, (-1, grid.columns)))
    return slabs


def _flushed(x: Array) -> Array:
    """`flushed` by bits. The bitcasts end loops, but these are not scalar, as those with a comparison are."""
    u = MLX.bitcast_to_int(x)
    return (u & ((NORMAL - 1 - (u & MAGNITUDE)) >> 31)).view(mx.float32)


def _multiplier(fmt: Format, stored: Array) -> Array:
    """The FP32 numbers that codes are multiplied by."""
    level = fmt.scale
    if isinstance(level.codec, PowerOfTwo) and level.convention == "multiplier":
        code = MLX.load(stored)  # MLX multiplies exactly by 2^-127, code 0, though it is no normal number
        return mx.where(code == 0, 1 << 22, mx.where(code == level.codec.nan, _QUIET, code << 23)).view(mx.float32)
    value = _numbers(stored, level.codec) if level.codec.bits == 8 else level.codec.read(MLX, stored)
    return value if level.convention == "multiplier" else MLX.div(value, fmt.qmax(level))


def _numbers(data: Array, element: Codec) -> Array:
    """The FP32 numbers of stored codes, along the last axis: a table has them, two at a time where two codes fit into a byte.

    `mx.take_along_axis` looks up a number in less time than MLX computes it from the bits of its code, and in a fifth of the
    time of `mx.take` (measured).
    """
    if isinstance(element, Integer) and element.bits == 8:  # a conversion takes less time still
        numbers = data.view(mx.int8 if element.signed else mx.uint8).astype(mx.float32)
        return numbers * 2.0**-element.fraction_bits if element.fraction_bits else numbers
    each = 2 if 2 * element.bits <= 8 else 1
    codes = _unpacked(data, each * element.bits)
    groups = mx.take_along_axis(_table(element.table, each), mx.reshape(codes, (-1,)), axis=0)
    return mx.reshape(groups, codes.shape).view(mx.float32)


@cache
def _table(table: tuple[int, ...], each: int) -> Array:
    """FP32 bits of groups of `each` codes, the first one in the lowest bits, as one item per group."""
    groups = np.array([group[::-1] for group in itertools.product(table, repeat=each)], np.uint32)
    return mx.array(groups.view(np.uint32 if each == 1 else np.uint64)[:, 0])


def _unpacked(data: Array, bits: int) -> Array:
    """Codes of that many bits, one per byte, of packed ones along the last axis: the gaps between them are opened."""
    count, size = math.lcm(bits, 8) // bits, math.lcm(bits, 8) // 8
    if count == 1:
        return data.view(mx.uint8)
    kind = {2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[count]
    if size == 1:
        words = data.astype(kind)
    else:
        groups = mx.reshape(data, (*data.shape[:-1], -1, size))
        words = mx.reshape(mx.pad(groups, [(0, 0)] * data.ndim + [(0, count - size)]), (*data.shape[:-1], -1)).view(kind)
    opened = words & mx.array((1 << bits) - 1, kind)
    for i in range(1, count):
        opened = opened | ((words << mx.array(i * (8 - bits), kind)) & mx.array(((1 << bits) - 1) << (8 * i), kind))
    return opened.view(mx.uint8)
