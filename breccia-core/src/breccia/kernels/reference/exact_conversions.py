"""Conversions of a tensor that may keep all decoded values: with its scales as numbers, or with powers of two moved into codes.

Some are promised for every tensor of a format (`promise`), and read no values. Otherwise a function proposes a tensor, and
`requantize` compares what it decodes to before it calls the conversion exact. Codes and scales come from integer arithmetic on
significands and exponents, so that the bytes are the same on every framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ...arrays.ops import Array, Ops
from ...codecs import Codec, Integer, PowerOfTwo
from ...formats import Block, Format
from ...fp32 import F32_INF, MAGNITUDE, MANTISSA, NORMAL
from ...recipe_bases import powers_of_two
from ...recipes import ScalingRecipe
from ...tensors.grids import packing
from ...tensors.tensor import ScaledTensor
from ..checks import fitted_layout
from ..exact import covered, hold_scales, nests, renamed
from ..exactness import convertible, middle, moved_by, promise
from ..numbers import Extent, extent, moves
from .decoding import multiplier, offset_of_blocks, scale_of_blocks, scales_of_blocks, ungrouped
from .packing import pack, unpack
from .tiles import Tiles

#: Larger than any exponent here in magnitude, so that sums with it are positive, as `Ops.amax` needs.
_FAR = 2048
_ONE = 127 << 23


def promised(ops: Ops, st: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor | None:
    """`st` under `recipe` with the same values, where the formats promise that every tensor has such a conversion."""
    found = promise(st.recipe, st.layout, st.axis, recipe)
    if found is None:
        return None
    with ops.errstate():
        return _by_tables(ops, st, recipe) if found.moves else _with_its_scales(ops, st, recipe, checking=False)


def proposals(ops: Ops, st: ScaledTensor, recipe: ScalingRecipe) -> Iterator[ScaledTensor]:
    """Tensors under `recipe` that may decode to the values of `st`, the one that changes least first."""
    if not convertible(st.recipe.format, recipe.format):
        return
    st = ungrouped(ops, st)
    for convert in (_with_its_scales, _with_moved_exponents):
        with ops.errstate():
            proposal = convert(ops, st, recipe)
        if proposal is not None:
            yield proposal


def _blocks(st: ScaledTensor) -> Block:
    """The block (m, k) of the finest scale."""
    fmt = st.recipe.format
    return covered(st.recipe, st.layout, st.axis)[1] if fmt.scale_record is None else fmt.scale.block


def _built(
    ops: Ops, st: ScaledTensor, recipe: ScalingRecipe, codes: Array, scale: Array, offset: Array, global_scale: Array
) -> ScaledTensor:
    element, axis, shape = recipe.format.element, st.axis, tuple(st.shape)
    return ScaledTensor.from_parts(
        pack(ops, codes, element, axis),
        scale,
        recipe,
        fitted_layout(recipe, shape, axis),
        offset,
        global_scale,
        axis,
        padding=-shape[axis] % packing(element)[0],
    )


# ------------------------------------------------------------------------------------------- scales as they are


def _with_its_scales(ops: Ops, st: ScaledTensor, recipe: ScalingRecipe, checking: bool = True) -> ScaledTensor | None:
    """With the scale of each block as one number, codes of the same values or integers moved by a constant, and the offset in
    the kind that `recipe` has.

    checking: None for scales that backends may read as zero, or that `recipe` does not write.
    """
    old, new, shape, axis = st.recipe.format, recipe.format, tuple(st.shape), st.axis
    layout_of_result = fitted_layout(recipe, shape, axis)
    if not nests(_blocks(st), layout_of_result.block(axis)):
        return None
    codes = _renamed(ops, old, new, unpack(ops, st.data, old.element, shape[axis], axis))
    if codes is None:
        return None
    written, added = codes
    tiles, finer = (Tiles.along(ops, axis, shape, block) for block in (_blocks(st), layout_of_result.block(axis)))
    numbers = _numbers(ops, st, tiles, new)
    stored = new.scale.codec.encode(ops, numbers)
    if new.scale.codec == old.scale.codec and _are_stored(old, new):
        stored = ops.load(scale_of_blocks(ops, st.scale, tiles))
    if checking:
        safe = _are_stored(old, new) and hold_scales(old.scale.codec, new.scale.codec)
        flushed, refused = not safe and ops.any(is_subnormal(ops, numbers)), powers_of_two(recipe)
        if flushed or (refused and ops.any(_has_fraction(ops, numbers))):
            return None
    offset = None
    if new.offset != "none":
        offset = _offset(ops, st, tiles, numbers, added, new)
        offset = ops.store(tiles.repeat_per_block(offset, finer), _offset_dtype(ops, new))
    elif old.offset != "none" or added:
        return None
    scale = ops.store(tiles.repeat_per_block(stored, finer), ops.storage(new.scale.codec))
    return _built(ops, st, recipe, written, scale, offset, _global(ops, st, new, 0))


def _are_stored(old: Format, new: Format) -> bool:
    """Whether `_numbers` are the scales of blocks as they are stored."""
    return old.scale_record is None and (old.global_scale is None or new.global_scale is not None)


def _renamed(ops: Ops, old: Format, new: Format, codes: Array) -> tuple[Array, int] | None:
    """Codes under `new`, and what was added to integers; None where there are none."""
    table = renamed(old.element, new.element)
    if table is not None:
        return (codes if table == tuple(range(len(table))) else ops.take(table, codes)), 0
    added = moved_by(old, new)
    if added is None:
        return None
    mask = (1 << new.element.bits) - 1
    return ops.take(tuple((int(old.element.value(code)) + added) & mask for code in range(1 << old.element.bits)), codes), added


def _numbers(ops: Ops, st: ScaledTensor, tiles: Tiles, new: Format) -> Array:
    """The FP32 scale of each block; with the global one, where the result keeps none."""
    old = st.recipe.format
    if _are_stored(old, new):
        return old.scale.codec.read(ops, scale_of_blocks(ops, st.scale, tiles))
    numbers = scales_of_blocks(ops, st, tiles)
    if old.global_scale is None or old.order == "scales_first":
        return numbers
    of_tensor = multiplier(ops, st.global_scale, old)
    return numbers * ops.reshape(of_tensor, (*of_tensor.shape, *(1,) * (len(numbers.shape) - len(of_tensor.shape))))


def _global(ops: Ops, st: ScaledTensor, new: Format, exponent: Any) -> Array | None:
    """The global scale of the result: that of `st`, or 2^exponent, in the convention of `new`."""
    level = new.global_scale
    if level is None:
        return None
    if st.global_scale is not None:
        if st.recipe.format.global_scale == level:
            return st.global_scale
        value = multiplier(ops, st.global_scale, st.recipe.format)
    elif isinstance(exponent, int):
        value = ops.constant(2.0**exponent, st.data)
    else:
        value = ops.bitcast_to_float((exponent + 127) << 23)
    if level.convention == "divisor":
        value = ops.div(ops.constant(1.0, st.data), value)
    elif level.convention == "amax":
        value = value * new.qmax(level)
    return ops.store(level.codec.encode(ops, value), ops.storage(level.codec))


def _offset(ops: Ops, st: ScaledTensor, tiles: Tiles, numbers: Array, added: int, new: Format) -> Array:
    """int32 words of the offset of each block, where codes are larger by `added`."""
    old = st.recipe.format
    offset = 0.0 * numbers if old.offset == "none" else offset_of_blocks(ops, st, tiles)
    if new.offset == "bias":
        bias = offset if old.offset == "bias" else -(offset * numbers)
        codec = new.offset_codec
        assert codec is not None
        return codec.encode(ops, bias - numbers * float(added) if added else bias)
    zero = -ops.div(offset, numbers) if old.offset == "bias" else offset
    zero = ops.where(ops.bitcast_to_int(zero) & MAGNITUDE < F32_INF, zero, 0.0) + float(added)
    return ops.to_int32(ops.minimum(ops.maximum(zero, 0.0), 255.0))


def _offset_dtype(ops: Ops, new: Format) -> str:
    return "uint8" if new.offset_codec is None else ops.storage(new.offset_codec)


def is_subnormal(ops: Ops, a: Array) -> Array:
    """Where FP32 numbers are subnormal: some backends read them as zero"""
    magnitude = ops.bitcast_to_int(a) & MAGNITUDE
    return (magnitude > 0) & (magnitude < NORMAL)


def _has_fraction(ops: Ops, a: Array) -> Array:
    """Where FP32 numbers are not powers of two, which 0, Inf and NaN are not counted as"""
    bits = ops.bitcast_to_int(a)
    return (bits & MANTISSA != 0) & (bits & MAGNITUDE < F32_INF)


# ------------------------------------------------------------------------------------- powers of two into codes


def _by_tables(ops: Ops, st: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    """With the new scale of each old one, and the codes that every value has under it."""
    old, new, shape, axis = st.recipe.format, recipe.format, tuple(st.shape), st.axis
    found = moves(old.element, old.scale.codec, new.element, new.scale.codec, powers_of_two(recipe))
    assert found is not None
    layout = fitted_layout(recipe, shape, axis)
    tiles, finer = (Tiles.along(ops, axis, shape, block) for block in (_blocks(st), layout.block(axis)))
    stored = ops.load(scale_of_blocks(ops, st.scale, tiles))
    codes = unpack(ops, st.data, old.element, shape[axis], axis)
    if any(found.rows):
        rows = ops.take(found.rows, stored) << old.element.bits
        codes = tiles.join(tiles.split(codes) + tiles.broadcast_to_blocks(rows))
    codes = ops.take(found.codes, codes)
    scale = ops.store(tiles.repeat_per_block(ops.take(found.scales, stored), finer), ops.storage(new.scale.codec))
    return _built(ops, st, recipe, codes, scale, None, _global(ops, st, new, 0))


class _Parts(NamedTuple):
    """FP32 numbers as `significand * 2^exponent`: FP32, +-[1, 2), 0, Inf or NaN; and int32."""

    significand: Array
    exponent: Array


def _with_moved_exponents(ops: Ops, st: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor | None:
    """With the smallest scale that each block's values fit under, of those that differ from the old ones by powers of two.

    Where the scales of a block have one significand, and the new codec has it, the new scale keeps it; else it is a power of
    two, and codes take the old significands. None where values do not fit under such scales.
    """
    old, new, shape, axis = st.recipe.format, recipe.format, tuple(st.shape), st.axis
    layout = fitted_layout(recipe, shape, axis)
    element, codec = new.element, new.scale.codec
    zero = middle(element) if new.offset == "zero_point" else 0
    of_codes, of_scales = extent(element, zero), extent(codec)
    if of_codes is None or of_scales is None or old.offset == "bias" or new.offset not in ("none", "zero_point"):
        return None
    tiles = Tiles.along(ops, axis, shape, _blocks(st))
    v = tiles.split(unpack(ops, st.data, old.element, shape[axis], axis))
    v = old.element.decode(ops, v)
    if old.offset != "none":
        v = v - tiles.broadcast_to_blocks(offset_of_blocks(ops, st, tiles))
    scale = _Parts(*(_of_elements(ops, tiles, part, v.shape) for part in _scale_parts(ops, st, tiles, new)))

    lead = len(st.scale.shape) if tiles.block == (None, None) else 0
    blocks = Tiles.along(ops, axis, shape, layout.block(axis), lead)
    v, significand, exponent = (blocks.split(a) for a in (tiles.join(v), *scale))
    zeros = (ops.bitcast_to_int(v) & MAGNITUDE == 0) | (ops.bitcast_to_int(significand) & MAGNITUDE == 0)
    lost = ops.amax(ops.to_int32(~zeros & (ops.bitcast_to_int(significand) & MAGNITUDE >= F32_INF)), blocks.axes) > 0
    # the significand that all scales of a block have, or 1
    own = ops.where(zeros, 0, ops.bitcast_to_int(significand) & MANTISSA)
    common = ops.amax(own, blocks.axes)
    shared = ops.amax(ops.to_int32(~zeros & (own != common)), blocks.axes) == 0
    finest = 0 if powers_of_two(recipe) or of_scales.bits < 1 else of_scales.bits - 1
    usable = shared & (common & ((1 << (23 - finest)) - 1) == 0)
    common = ops.where(usable, common, 0)
    sign = ops.bitcast_to_float((ops.bitcast_to_int(significand) & ~MAGNITUDE) | _ONE)
    w = v * ops.where(usable & ~zeros, sign, significand)

    bits = ops.bitcast_to_int(w)
    magnitude = bits & MAGNITUDE
    counts = (magnitude >= NORMAL) & (magnitude < F32_INF)
    least, most = _allowed(ops, bits, exponent, of_codes)
    least = ops.amax(ops.where(counts, least + _FAR, 0), blocks.axes) - _FAR
    most = _FAR - ops.amax(ops.where(counts, _FAR - most, 0), blocks.axes)
    used = least > -_FAR
    low, high = _allowed_scales(ops, common, of_scales)
    shift: Any = 0
    if new.global_scale is not None and st.global_scale is None:
        everywhere = tuple(range(len(least.shape)))
        shift = ops.reshape(ops.amax(ops.where(used, least - high + _FAR, 0), everywhere), ()) - _FAR
        shift = ops.where(shift > -_FAR, ops.minimum(ops.maximum(shift, -126), 126), 0)
    n = ops.maximum(least, low + shift)
    if ops.any(used & ~lost & ((n > most) | (n > high + shift))):
        return None

    n = ops.where(used, n, shift)
    moved = bits + ((exponent - n) << 23)
    y = ops.where(lost, 0.0, ops.where(counts, ops.bitcast_to_float(moved), w))
    y_codes = element.encode(ops, y, zero_point=float(zero)) if isinstance(element, Integer) else element.encode(ops, y)
    stored = _stored_scales(ops, codec, common, ops.where(used, n - shift, 0))
    stored = blocks.scale(ops.where(lost, codec.need_nan(), ops.where(used, stored, codec.zero_scale)))
    offset = ops.store(stored * 0 + zero, "uint8") if new.offset == "zero_point" else None
    scale = ops.store(stored, ops.storage(codec))
    return _built(ops, st, recipe, blocks.join(y_codes), scale, offset, _global(ops, st, new, shift))


def _scale_parts(ops: Ops, st: ScaledTensor, tiles: Tiles, new: Format) -> _Parts:
    """The scale of each block, exactly; with the global one, where the result keeps none."""
    old = st.recipe.format
    codec = old.scale.codec
    if old.scale_record is None and isinstance(codec, PowerOfTwo):  # 2^-127 is an FP32 subnormal
        code = ops.load(scale_of_blocks(ops, st.scale, tiles))
        parts = _Parts(ops.bitcast_to_float(ops.where(code == codec.nan, F32_INF + 1, code * 0 + _ONE)), code - codec.bias)
        if _are_stored(old, new):
            return parts
        of_tensor = multiplier(ops, st.global_scale, old)
        of_tensor = ops.reshape(of_tensor, (*of_tensor.shape, *(1,) * (len(code.shape) - len(of_tensor.shape))))
        beside = _parts(ops, of_tensor)
        return _Parts(parts.significand * beside.significand, parts.exponent + beside.exponent)
    return _parts(ops, _numbers(ops, st, tiles, new))


def _parts(ops: Ops, a: Array) -> _Parts:
    """FP32 subnormals count as zero."""
    bits = ops.bitcast_to_int(a)
    field = (bits & MAGNITUDE) >> 23
    normal = (field > 0) & (field < 255)
    significand = ops.where(normal, (bits & ~F32_INF) | _ONE, ops.where(field == 0, bits & ~MAGNITUDE, bits))
    return _Parts(ops.bitcast_to_float(significand), ops.where(normal, field - 127, 0))


def _of_elements(ops: Ops, tiles: Tiles, a: Array, shape: tuple[int, ...]) -> Array:
    """A number of each block, once for each of its elements."""
    return tiles.join(ops.broadcast(tiles.broadcast_to_blocks(a), tuple(shape)))


def _allowed(ops: Ops, bits: Array, exponent: Array, of_codes: Extent) -> tuple[Array, Array]:
    """The least and the greatest n for which `w * 2^(exponent - n)` lies in the codec's range and on its finest grid."""
    magnitude = bits & MAGNITUDE
    top = (magnitude >> 23) - 127 + exponent
    significand = (magnitude & MANTISSA) | NORMAL
    trailing = (ops.bitcast_to_int(ops.int_to_float(significand & -significand)) >> 23) - 127
    negative = bits < 0
    limit, limit_bits = (ops.where(negative, a, magnitude * 0 + b) for a, b in zip(of_codes.bottom, of_codes.top, strict=True))
    least = top - limit + ops.to_int32(magnitude & MANTISSA > limit_bits)
    return least, top - 23 + trailing - of_codes.last


def _allowed_scales(ops: Ops, common: Array, of_scales: Extent) -> tuple[Array, Array]:
    """The least and the greatest exponent of a scale with the mantissa `common`."""
    significand = common | NORMAL
    below = 23 - ((ops.bitcast_to_int(ops.int_to_float(significand & -significand)) >> 23) - 127)
    most, most_bits = of_scales.top
    return ops.maximum(below + of_scales.last, of_scales.least), most - ops.to_int32(common > most_bits)


def _stored_scales(ops: Ops, codec: Codec, common: Array, n: Array) -> Array:
    """Codes of the scales `common`, mantissa bits of FP32, times 2^n."""
    if isinstance(codec, PowerOfTwo):
        return codec.encode_exponent(ops, n)
    return codec.encode(ops, ops.bitcast_to_float(((n + 127) << 23) | common))
