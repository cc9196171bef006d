"""`dequantize` in backend primitives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...arrays.frameworks import FLOATS, dtype_name, ops_of, same_framework, shape_of
from ...arrays.ops import Array, Ops
from ...codecs import BF16, FLOAT_CODECS
from ...errors import ShapeError
from ...formats import Format, Record
from ...layouts import PerBlockK, PerGroupIndex
from ...options import FLOAT32, ProductOptions
from ...rules import flushed
from ...tensors.checks import need_one_device
from ...tensors.storing import check_layout
from ...tensors.tensor import ScaledTensor
from ..checks import check_writable
from .packing import unpack
from .records import effective, read_levels
from .rotating import unrotated
from .tiles import Tiles, k_last


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Array:
    """High-precision values of `st`, as `breccia.dequantize` documents."""
    ops = ops_of(st.data, "data")
    name, out = options.out_dtype, options.out
    if st.held is not None and st.held.is_transposed:  # codes are read in the order of memory
        return result(ops, ops.swap(dequantize(st.mT)), name, out)
    check_layout(st.layout)
    need_one_device(st=st)  # frameworks compute with scales of shape () of some other devices
    st = st.to_plain()
    st = ungrouped(ops, st)
    fmt, axis = st.recipe.format, st.axis
    shape = tuple(st.shape)
    with ops.errstate():
        codes = unpack(ops, st.data, fmt.element, shape[axis], axis)
        block = st.layout.block(axis) if fmt.scale_record is None else fmt.scale.block
        tiles = Tiles.along(ops, axis, shape, block)
        v = fmt.element.decode(ops, tiles.split(codes))
        if fmt.alternative is not None:  # its values are negated, for scales that are negative
            v = ops.where(negative_scales(ops, st, tiles), -fmt.alternative.decode(ops, tiles.split(codes)), v)
        offset = None if fmt.offset == "none" else tiles.broadcast_to_blocks(offset_of_blocks(ops, st, tiles))
        if fmt.offset in ("zero_point", "float_zero_point"):
            v = _rounded(ops, v - offset, fmt)
        for scaled in _scaling(ops, st, fmt, tiles):
            v = _rounded(ops, scaled(v), fmt)
        if fmt.offset == "bias":
            # Flushing subnormal products makes the sum equal on every backend, and prevents fusing into an FMA.
            v = _rounded(ops, flushed(ops, v) + flushed(ops, offset), fmt)
        v = tiles.join(v)
        return result(ops, v if fmt.rotation is None else unrotated(ops, v, fmt.rotation, axis), name, out)


def _scaling(ops: Ops, st: ScaledTensor, fmt: Format, tiles: Tiles) -> Iterator[Callable[[Array], Array]]:
    """The steps from codes, less a zero-point, to values before a bias: each multiplies FP32 numbers by scales."""
    level = fmt.global_scale
    if fmt.scale_record is not None or fmt.order == "scales_first":
        of_blocks = tiles.broadcast_to_blocks(scales_of_blocks(ops, st, tiles))
        yield lambda v: v * of_blocks
    else:
        stored = tiles.broadcast_to_blocks(scale_of_blocks(ops, st.scale, tiles))
        yield lambda v: apply_scale(ops, v, stored, fmt, fmt.scale)
    if level is not None and fmt.order == "codes_first":
        of_tensor = tiles.broadcast_global(st.global_scale)
        yield lambda v: apply_scale(ops, v, of_tensor, fmt, level)
    if fmt.factor != 1.0:
        yield lambda v: v * fmt.factor


def scales_of_blocks(ops: Ops, st: ScaledTensor, tiles: Tiles) -> Array:
    """The FP32 scale of each block of `tiles`, of all levels of blocks, and of the global one in the order "scales_first"."""
    fmt = st.recipe.format
    if fmt.scale_record is not None:
        scale = _levels_of_blocks(ops, st.scale, fmt.scale_record, tiles, st.axis)
        return scale * _multiplier_beside(ops, st, scale) if fmt.order == "scales_first" else scale
    stored = scale_of_blocks(ops, st.scale, tiles)
    if fmt.order == "scales_first":
        return fmt.scale.codec.multiply(ops, _multiplier_beside(ops, st, stored), stored)
    return fmt.scale.codec.read(ops, stored)


def _multiplier_beside(ops: Ops, st: ScaledTensor, scale: Array) -> Array:
    """The multiplier of the global scale, to be broadcast against a scale for each block."""
    stored = st.global_scale
    return ops.reshape(
        multiplier(ops, stored, st.recipe.format), (*stored.shape, *(1,) * (len(scale.shape) - len(stored.shape)))
    )


def offset_of_blocks(ops: Ops, st: ScaledTensor, tiles: Tiles) -> Array:
    """The FP32 zero-point or bias of each block of `tiles`."""
    fmt = st.recipe.format
    if fmt.offset_record is None:
        return offsets_of(ops, scale_of_blocks(ops, st.zero_point, tiles))
    return _levels_of_blocks(ops, st.zero_point, fmt.offset_record, tiles, st.axis)


def _levels_of_blocks(ops: Ops, part: Array, record: Record, tiles: Tiles, axis: int) -> Array:
    """The effective scales of a component of records, FP32, in the shape of one for each block."""
    blocks = tiles.counts[axis]
    values = effective(ops, read_levels(ops, k_last(ops, part, axis), record), record, blocks)
    return k_last(ops, values, axis)


def multiplier(ops: Ops, stored: Array, fmt: Format) -> Array:
    """The multiplier of a stored global scale."""
    level = fmt.levels[0]
    if level.convention == "multiplier":
        return stored
    return ops.div(stored, fmt.qmax(level)) if level.convention == "amax" else ops.div(1.0, stored)


def _rounded(ops: Ops, v: Array, fmt: Format) -> Array:
    """The result of a step in the format's precision."""
    if fmt.precision == "fp32":
        return v
    return ops.f32(ops.to_float(v, str(FLOAT_CODECS[fmt.precision].dtype)))


def negative_scales(ops: Ops, st: ScaledTensor, tiles: Tiles) -> Array:
    """Whether the scale of each block has its sign bit set, to be broadcast against split arrays."""
    codes = ops.load(tiles.broadcast_to_blocks(scale_of_blocks(ops, st.scale, tiles)))
    return codes >= 1 << (st.recipe.format.scale.codec.bits - 1)


def ungrouped(ops: Ops, st: ScaledTensor) -> ScaledTensor:
    """`st`; under a group index with one scale (and zero-point) per element of the contraction axis, taken from its group."""
    if not isinstance(st.layout, PerGroupIndex):
        return st
    index = st.layout.index
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
