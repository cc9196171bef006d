"""`dequantize` for compiled functions on a CPU, in slabs of rows and few operations: see `breccia_mlx.compiled`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from breccia.backend import (
    F32_INF,
    MAGNITUDE,
    Call,
    Codec,
    Format,
    Integer,
    Lookup,
    Minifloat,
    PerBlockK,
    PerBlockMN,
    PerChannel,
    PerTensor,
    PowerOfTwo,
    ScaledTensor,
    output_dtype,
    packing,
    reference,
)

from .compiled import Grid, flushed, of_slab
from .ops import MLX

Array = Any

_LAYOUTS = (PerTensor, PerBlockK, PerChannel, PerBlockMN)
_QUIET = 0x7FC00000
_SIGN = ~MAGNITUDE


def accepts(call: Call) -> str | None:
    """Why this kernel does not decode, or None."""
    recipe, layout = call.a.recipe, call.a.layout
    assert recipe is not None
    fmt = recipe.format
    if mx.default_device().type != mx.cpu:
        return "its arithmetic has been tested on MLX's CPU only"
    if sys.byteorder != "little":
        return "it unpacks codes on little-endian machines"
    if call.option("out") is not None:
        return "out= is the generic algorithm's"
    if type(fmt.element) not in _DECODERS or fmt.element.bits > (4 if isinstance(fmt.element, Lookup) else 8):
        return f"it does not decode {fmt.element.name}"
    if any(level.sense == "divisor" for level in fmt.levels):
        return "scales that divide are the generic algorithm's"
    if type(fmt.scale.codec) not in (Minifloat, PowerOfTwo):
        return f"it does not multiply by {fmt.scale.codec.name} scales"
    if layout is None or type(layout) not in _LAYOUTS:
        return "its layouts have a scale per tensor or per block"
    if call.a.empty or call.a.ndim < 2:
        return "empty tensors, and those of one axis, are the generic algorithm's"
    rows, columns = call.a.aligned if call.a.axis == -1 else call.a.aligned[::-1]
    m, k = layout.block(call.a.axis)
    if columns % (k or 1) or rows % (m or 1) or columns % packing(fmt.element)[0]:
        return "it decodes whole blocks, and packing groups, of 2^n numbers along an axis, up to 256"
    return None


def dequantize(st: ScaledTensor, out_dtype: str = "float32", out: Array | None = None) -> Array:
    """`dequantize` in few passes over the result."""
    fmt, name = st.recipe.format, output_dtype(out_dtype)
    grid = Grid.of(st.shape, st.layout.block(st.axis), st.axis == -2)
    several = (grid.whole and st.scale.ndim) or (st.global_scale is not None and st.global_scale.ndim)  # one per matrix
    if out is not None or several:
        return reference.dequantize(st, out_dtype, out)
    scale, factor = _multiplier(fmt, grid.of_blocks(st.scale)), None
    if fmt.global_scale is not None:
        factor = reference.multiplier(MLX, MLX.f32(st.global_scale), fmt)
    offset = None if st.zero_point is None else reference.offsets_of(MLX, grid.of_blocks(st.zero_point))
    if fmt.offset == "bias":
        offset = flushed(offset)

    scale, offset = grid.spread(scale), None if offset is None else grid.spread(offset)
    found: list[Array] = []
    for stored, cut in zip(grid.slabs(st.data), grid.cuts, strict=True):
        v = grid.split(_DECODERS[type(fmt.element)](fmt.element, _unpacked(stored, fmt.element)))
        if fmt.offset == "zero_point":
            v = v - of_slab(offset, cut)
        v = v * of_slab(scale, cut)
        if factor is not None:
            v = v * factor
        if fmt.offset == "bias":
            v = flushed(v) + of_slab(offset, cut)
        found.append(mx.reshape(v if name == "float32" else MLX.to_float(v, name), (-1, grid.columns)))
    return grid.joined(found)


def _multiplier(fmt: Format, stored: Array) -> Array:
    """The FP32 numbers that codes are multiplied by."""
    level = fmt.scale
    if isinstance(level.codec, PowerOfTwo) and level.sense == "multiplier":
        code = MLX.load(stored)  # MLX multiplies exactly by 2^-127, code 0, though it is no normal number
        return mx.where(code == 0, 1 << 22, mx.where(code == level.codec.nan, _QUIET, code << 23)).view(mx.float32)
    value = level.codec.read(MLX, stored)
    return value if level.sense == "multiplier" else MLX.div(value, fmt.qmax(level))


def _unpacked(data: Array, element: Codec) -> Array:
    """Codes, one per item of 8 bits, of stored ones along the last axis: the gaps between them are opened."""
    count, size = packing(element)
    bits = element.bits
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


def _minifloats(element: Minifloat, codes: Array) -> Array:
    c = codes.astype(mx.int32)
    magnitude, shift, bias = c & element.magnitude_mask, 23 - element.mantissa_bits, 127 - element.bias
    bits = (magnitude << shift) + (bias << 23)
    # A subnormal code has no implicit one: its number is read under the exponent of the smallest normal ones, less that one.
    subnormal = (magnitude - (1 << element.mantissa_bits)) >> 31
    implicit = subnormal & ((bias + 1) << 23)
    bits = bits + (subnormal & (1 << 23))
    if element.inf is not None:
        bits = bits + (((element.highest - magnitude) >> 31) & (F32_INF - (element.inf << shift) - (bias << 23)))
    elif element.nan is not None:
        bits = bits | (((element.highest - magnitude) >> 31) & _QUIET)
    v = MLX.bitcast_to_int(bits.view(mx.float32) - implicit.view(mx.float32))
    if element.signed:
        v = v | ((c << (32 - element.bits)) & _SIGN)
    return v.view(mx.float32)


def _integers(element: Integer, codes: Array) -> Array:
    c = codes.astype(mx.int32)
    if element.signed:
        c = (c ^ (1 << (element.bits - 1))) - (1 << (element.bits - 1))
    v = c.astype(mx.float32)
    return v * 2.0**-element.fraction_bits if element.fraction_bits else v


def _looked_up(element: Lookup, codes: Array) -> Array:
    c = codes.astype(mx.int32)
    found: list[Any] = [u - ((u & ~MAGNITUDE & 0xFFFFFFFF) << 1) for u in element.table]  # as signed integers
    for bit in range(element.bits):
        chosen = -((c >> bit) & 1)
        found = [(chosen & (low ^ high)) ^ low for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0].view(mx.float32)


_DECODERS: dict[type[Codec], Callable[[Any, Array], Array]] = {
    Minifloat: _minifloats,
    Integer: _integers,
    Lookup: _looked_up,
}
