"""`dequantize` in backend primitives."""

from __future__ import annotations

from typing import Any

from ...arrays.frameworks import FLOATS, dtype_name, ops_of, same_framework, shape_of
from ...arrays.ops import Array, Ops
from ...codecs import BF16
from ...errors import ShapeError
from ...formats import Format
from ...layouts import PerBlockK, PerGroupIndex
from ...options import FLOAT32, ProductOptions
from ...rules import flushed
from ...tensors.checks import need_one_device
from ...tensors.storing import check_layout
from ...tensors.tensor import ScaledTensor
from ..checks import check_writable
from .packing import unpack
from .tiles import Tiles


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Array:
    """High-precision values of `st`, as `breccia.dequantize` documents."""
    ops = ops_of(st.data, "data")
    name, out = options.out_dtype, options.out
    if st.held is not None and st.held.is_transposed:  # codes are read in the order of memory
        return result(ops, ops.swap(dequantize(st.mT)), name, out)
    check_layout(st.layout)
    need_one_device(st=st)  # frameworks compute with scales of shape () of some other devices
    st = st.to_plain()
    if isinstance(st.layout, PerGroupIndex):
        st = _ungrouped(ops, st, st.layout.index)
    fmt, axis = st.recipe.format, st.axis
    shape = tuple(st.shape)
    with ops.errstate():
        codes = unpack(ops, st.data, fmt.element, shape[axis], axis)
        tiles = Tiles.along(ops, axis, shape, st.layout.block(axis))
        v = fmt.element.decode(ops, tiles.split(codes))
        scale = tiles.broadcast_to_blocks(scale_of_blocks(ops, st.scale, tiles))
        if fmt.offset == "zero_point":
            v = v - tiles.broadcast_to_blocks(offsets_of(ops, scale_of_blocks(ops, st.zero_point, tiles)))
        v = apply_scale(ops, v, scale, fmt, fmt.scale)
        if fmt.global_scale is not None:
            v = apply_scale(ops, v, tiles.broadcast_global(st.global_scale), fmt, fmt.global_scale)
        if fmt.offset == "bias":
            bias = tiles.broadcast_to_blocks(offsets_of(ops, scale_of_blocks(ops, st.zero_point, tiles)))
            # Flushing subnormal products makes the sum equal on every backend, and prevents fusing into an FMA.
            v = flushed(ops, v) + flushed(ops, bias)
        return result(ops, tiles.join(v), name, out)


def _ungrouped(ops: Ops, st: ScaledTensor, index: tuple[int, ...]) -> ScaledTensor:
    """`st` with one scale (and zero-point) per element of the contraction axis, taken from its group."""
    scale, zero_point = (a if a is None else ops.gather(a, index, st.axis) for a in (st.scale, st.zero_point))
    return ScaledTensor.from_parts(st.data, scale, st.recipe, PerBlockK(1), zero_point, st.global_scale, st.axis, st.padding)


def scale_of_blocks(ops: Ops, scale: Array, tiles: Tiles) -> Array:
    """A scale as its layout stores it; PerChannel's (M,) form gets its other axes."""
    if len(scale.shape) == 1 and tiles.block in ((1, None), (None, 1)):
        flat = ops.reshape(scale, (*(1,) * (len(tiles.shape) - 2), *tiles.counts))
        return ops.broadcast(flat, (*tiles.shape[:-2], *tiles.counts))
    return scale


def offsets_of(ops: Ops, zero_point: Array) -> Array:
    """Zero-points or biases of any dtype as FP32."""
    if ops.is_bit_pattern(zero_point):
        return BF16.read(ops, zero_point)
    return ops.f32(zero_point) if dtype_name(zero_point) in FLOATS else ops.int_to_float(zero_point)


def apply_scale(ops: Ops, v: Array, stored: Array, fmt: Format, level: Any) -> Array:
    """`v` under the stored scale of one level, in any scale convention."""
    if level.convention == "multiplier":
        return level.codec.multiply(ops, v, stored)
    value = level.codec.read(ops, stored)
    if level.convention == "divisor":
        return ops.div(v, value)
    return v * ops.div(value, fmt.qmax(level))


def result(ops: Ops, value: Array, dtype: str, out: Array | None) -> Array:
    """FP32 `value` in the dtype named, in `out` if given. Raises before the first byte if `out` does not match."""
    if dtype != "float32":
        value = ops.to_float(value, dtype)
    if out is None:
        return value
    same_framework({"the result": value, "out": out})
    wanted, actual = (tuple(value.shape), dtype_name(value)), (shape_of(out, "out"), dtype_name(out))
    if wanted != actual:
        raise ShapeError(f"out= must have shape {wanted[0]} and dtype {wanted[1]}; got {actual[0]} and {actual[1]}.")
    check_writable("out=", out)
    ops.assign(out, value)
    return out
