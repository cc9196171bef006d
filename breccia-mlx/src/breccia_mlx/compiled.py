"""`cast` for compiled functions on a CPU, in the operations that MLX's compiler makes fast.

MLX fuses chains of elementwise operations into loops that the system's compiler builds. Chains end at every bitcast. Loops that
shift by a variable, or mix booleans and integers, are scalar. New memory costs more than what is computed in it: writing 64 MiB
takes 40 ms, reading them 4 (measured). Hence:

* The extremes of blocks are reductions of the array itself, whose bits are compared as signed and as unsigned integers.
* Rows are cast in slabs, whose intermediate results stay in a cache and reuse memory.
* Codes are rounded by adding a constant to numbers, or to their bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from breccia.backend import (
    DEFAULT,
    F32_INF,
    MAGNITUDE,
    NORMAL,
    TENSOR,
    Block,
    Call,
    CastOptions,
    Codec,
    Integer,
    Lookup,
    Minifloat,
    ScaledTensor,
    ScalingRecipe,
    checks,
    contraction_axis,
    f32_bits,
    packing,
    reference,
    rules,
)

from .ops import MLX

Array = Any

#: Elements of a slab: 1 MiB of FP32.
SLAB = 2**18
#: The element codecs, by exact class: a subclass may encode otherwise.
_ELEMENTS = (Minifloat, Integer, Lookup)


def accepts(call: Call) -> str | None:
    """Why this kernel does not cast, or None."""
    recipe = call.a.recipe
    assert recipe is not None
    fmt, rule = recipe.format, recipe.rules[-1]
    if mx.default_device().type != mx.cpu:
        return "its arithmetic has been tested on MLX's CPU only"
    if sys.byteorder != "little":
        return "it packs codes on little-endian machines"
    if call.option("rounding") == "stochastic" or call.option("scale") is not None or call.option("out") is not None:
        return "stochastic rounding, supplied scales and out= are the generic algorithm's"
    if call.option("nonfinite") == "raise":
        return "nonfinite='raise' reads values, as the generic algorithm does"
    element, level = fmt.element, fmt.scale
    if type(element) not in _ELEMENTS or (isinstance(element, Minifloat) and not element.signed):
        return f"it does not round to {element.name}"
    if type(rule).scaled not in (rules.Rule.scaled, rules.Inverse.scaled):
        return f"scale rule {rule.name!r} does not multiply by one reciprocal per block"
    if fmt.offset != "none" and (not isinstance(element, Integer) or getattr(rule, "margin", 0) or level.block == TENSOR):
        return "it supports offsets of integers in blocks, without a margin"
    if call.a.empty or (level.block != TENSOR and call.a.ndim < 2):
        return "empty arrays, and those of too few axes, are the generic algorithm's"
    rows, columns = call.a.aligned[::-1] if call.option("axis", -1) == -2 and call.a.ndim > 1 else call.a.aligned
    m, k = level.block
    if columns % (k or 1) or rows % (m or 1) or columns % packing(element)[0]:
        return "it casts whole blocks, and packing groups, of 2^n numbers along an axis, up to 256"
    return None


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`cast` in few passes over the array."""
    checks.check_cast(x, recipe)
    axis = contraction_axis(options.axis, x.ndim)
    layout = checks.fitted_layout(recipe, tuple(x.shape), axis)
    fmt = recipe.format
    grid = Grid.of(x.shape, fmt.scale.block, axis == -2 and x.ndim > 1)
    slabs = grid.slabs(x)

    global_scale = factor = None
    if fmt.global_scale is not None:
        amax = mx.max(mx.stack([_largest_finite(MLX.bitcast_to_int(MLX.f32(slab))) for slab in slabs]))
        global_scale = reference.global_scale_of(MLX, amax.view(mx.float32), recipe)
        factor = reference.multiplier(MLX, MLX.f32(global_scale), fmt)
    scales = _scales(grid, x, recipe, factor)
    data: list[Array] = []
    for slab, cut in zip(slabs, grid.cuts, strict=True):
        codes = _codes(grid.split(MLX.f32(slab)), fmt.element, scales.cut(cut))
        data.append(_packed(mx.reshape(codes, slab.shape), fmt.element))
    stored, offset = (None if part is None else grid.join(part) for part in (scales.stored, scales.offset))
    joined = grid.joined(data)
    joined = mx.reshape(joined, (-1,)) if x.ndim == 1 else joined
    return ScaledTensor.from_parts(joined, stored, recipe, layout, offset, global_scale, axis)


class Grid(NamedTuple):
    """How blocks of (height, width) numbers lie in an array: `down` of them along all rows, `across` along the columns.

    lead: the lengths before the matrix. swapped: whether the array has its last two axes in the other order. whole: whether the
    tensor has one scale; its blocks are then those that share a row.
    """

    lead: tuple[int, ...]
    down_each: int
    across: int
    height: int
    width: int
    swapped: bool
    whole: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], block: Block, swapped: bool) -> Grid:
        *lead, rows, columns = (1, *shape)[-max(len(shape), 2) :]
        if swapped:
            rows, columns = columns, rows
        whole = block == TENSOR
        height, width = 1 if whole else block[0] or rows, block[1] or columns
        return cls(tuple(lead), rows // height, columns // width, height, width, swapped, whole)

    @property
    def down(self) -> int:
        return math.prod(self.lead) * self.down_each

    @property
    def columns(self) -> int:
        return self.across * self.width

    @property
    def cuts(self) -> list[slice]:
        """The blocks down of each slab."""
        height = max(SLAB // self.columns // self.height, 1)
        return [slice(start, start + height) for start in range(0, self.down, height)]

    def slabs(self, x: Array) -> list[Array]:
        """The rows of each slab."""
        rows = MLX.swap(x) if self.swapped else x
        flat = mx.reshape(rows, (self.down * self.height, -1))
        return [flat[cut.start * self.height : cut.stop * self.height] for cut in self.cuts]

    def joined(self, slabs: list[Array]) -> Array:
        """The array of these slabs, whose rows may be of another length."""
        found = mx.reshape(mx.concatenate(slabs), (*self.lead, self.down_each * self.height, -1))
        return MLX.swap(found) if self.swapped else found

    def split(self, rows: Array) -> Array:
        """Rows as (blocks down, height, blocks across, width)."""
        return mx.reshape(rows, (-1, self.height, self.across, self.width))

    def join(self, scales: Array) -> Array:
        """Scales of (blocks down, 1, blocks across, 1) as they are stored."""
        if self.whole:
            return mx.reshape(scales, ())
        found = mx.reshape(scales, (*self.lead, self.down_each, self.across))
        return MLX.swap(found) if self.swapped else found

    def of_blocks(self, stored: Array) -> Array:
        """The inverse of `join`, also of one scale for each row of a matrix."""
        if self.whole:
            return mx.reshape(stored, (1, 1, 1, 1))
        if stored.ndim == 1:
            stored = mx.broadcast_to(stored, (*self.lead, stored.size))
        elif self.swapped:
            stored = MLX.swap(stored)
        return mx.reshape(stored, (self.down, 1, self.across, 1))

    def reduced(self, reduce: Callable[..., Array], x: Array) -> Array:
        """A reduction of each block, as (blocks down, 1, blocks across, 1)."""
        if self.whole:
            return mx.reshape(reduce(x), (1, 1, 1, 1))
        if self.swapped:  # in the order of memory
            found = reduce(mx.reshape(x, (-1, self.across, self.width, self.down_each, self.height)), axis=(2, 4))
            return mx.reshape(MLX.swap(found), (self.down, 1, self.across, 1))
        return reduce(mx.reshape(x, (self.down, self.height, self.across, self.width)), axis=(1, 3), keepdims=True)


def of_slab(part: Array, cut: slice) -> Array:
    """The scales of a slab."""
    return part if len(part) == 1 else part[cut]


# ------------------------------------------------------------------------------------------------ scales


class _Scales(NamedTuple):
    """Of blocks, as (blocks down, 1, blocks across, 1), or (1, 1, 1, 1) for all.

    reciprocal: FP32, NaN where codes are 0. stored, offset: components. bias: FP32. zero: zero-points as int32.
    """

    reciprocal: Array
    stored: Array
    offset: Array | None = None
    bias: Array | None = None
    zero: Array | None = None

    def cut(self, cut: slice) -> _Scales:
        """Those of some rows of blocks."""
        return _Scales(*(None if part is None else of_slab(part, cut) for part in self))


def _scales(grid: Grid, x: Array, recipe: ScalingRecipe, factor: Array | None) -> _Scales:
    """factor: the multiplier of the global scale."""
    fmt, rule = recipe.format, recipe.rules[-1]
    codec, element = fmt.scale.codec, fmt.element
    # As a signed integer, the largest of some numbers, or that farthest from zero if all are negative; as an unsigned one, that
    # farthest below zero, or the largest if none is negative.
    largest, lowest = (_extreme(grid, x, mx.max, kind) for kind in _KINDS[x.dtype.size])
    amax = mx.maximum(_magnitude(largest), _magnitude(lowest))
    low = None
    if fmt.offset == "none":
        statistic = mx.where((amax >= NORMAL) & (amax < F32_INF), amax, 0).view(mx.float32)
    else:  # the smallest signed integer is the smallest of positive numbers, and the largest of negative ones
        nearest = 0 if fmt.offset == "zero_point" else _extreme(grid, x, mx.min, _KINDS[x.dtype.size][0])
        low = flushed(mx.where(lowest < 0, lowest, nearest)).view(mx.float32)
        high = flushed(mx.where(largest < 0, nearest, largest)).view(mx.float32)
        statistic = rules.flushed(MLX, rules.saturated(MLX, high - low))
    stored = MLX.store(reference.block_scales(MLX, amax, statistic, recipe, factor), MLX.storage(codec))

    def divided(numbers: Array) -> tuple[Array, Array]:
        return rule.scaled(MLX, numbers, stored, codec, factor, statistic, fmt.qmax(fmt.scale))

    reciprocal, usable = divided(MLX.constant(1.0, x))
    # A bitcast, after which MLX does not compute the reciprocal of a block for each of its elements.
    reciprocal = mx.where(usable, MLX.bitcast_to_int(reciprocal), f32_bits(math.nan)).view(mx.float32)
    if fmt.offset == "bias":
        bias = MLX.store(codec.encode(MLX, low), MLX.storage(codec))
        offset = MLX.store(mx.where(usable, MLX.load(bias), 0), MLX.storage(codec))
        return _Scales(reciprocal, stored, offset, bias=codec.read(MLX, bias))
    if low is not None:
        zero = mx.where(usable, element.encode(MLX, rules.saturated(MLX, divided(-low)[0])), 0)
        return _Scales(reciprocal, stored, zero.astype(mx.uint8), zero=MLX.to_int32(element.decode(MLX, zero)))
    return _Scales(reciprocal, stored)


_KINDS = {2: (mx.int16, mx.uint16), 4: (mx.int32, mx.uint32)}


def _extreme(grid: Grid, x: Array, reduce: Callable[..., Array], kind: Any) -> Array:
    """FP32 bits of the extreme of each block, whose bits are compared as integers of that kind."""
    return MLX.bitcast_to_int(MLX.f32(grid.reduced(reduce, mx.stop_gradient(x).view(kind)).view(x.dtype)))


def _largest_finite(u: Array) -> Array:
    """The largest magnitude of the finite numbers whose bits these are, without those below 2^-126."""
    magnitude = _magnitude(u)
    return mx.max(magnitude & ((magnitude - F32_INF) >> 31) & ((NORMAL - 1 - magnitude) >> 31))


def _magnitude(u: Array) -> Array:
    return u & MAGNITUDE


def flushed(u: Array) -> Array:
    """Bits of numbers, of those below 2^-126 and of -0 those of 0."""
    return mx.where(_magnitude(u) < NORMAL, 0, u)


# ------------------------------------------------------------------------------------------------ codes


def _codes(x: Array, element: Codec, scales: _Scales) -> Array:
    """Codes, one per uint8, of FP32 `x` (blocks down, height, blocks across, width)."""
    u = MLX.bitcast_to_int(x)
    if scales.bias is not None:
        x = flushed(u).view(mx.float32) - scales.bias
        u = MLX.bitcast_to_int(x)
    return _ENCODERS[type(element)](element, MLX.bitcast_to_int(x * scales.reciprocal), u, scales.zero)


def _finite(scaled: Array) -> Array:
    """Minus one, all bits set, except for NaN."""
    return (_magnitude(scaled) - (F32_INF + 1)) >> 31


def _clean(scaled: Array, u: Array, limit: float) -> Array:
    """Magnitudes of scaled numbers as bits, up to `limit`: 0 for NaN, and where the number itself is below 2^-126."""
    normal = (NORMAL - 1 - _magnitude(u)) >> 31
    return mx.minimum(_magnitude(scaled) & _finite(scaled) & normal, f32_bits(limit))


def _steps(magnitude: Array, step: float) -> Array:
    """The multiple of `step`, a power of two, nearest to each of these numbers (as bits), in steps. More from 2^23 steps on."""
    magic = step * 2.0**23
    return MLX.bitcast_to_int(magnitude.view(mx.float32) + magic) - f32_bits(magic)


def _minifloats(element: Minifloat, scaled: Array, u: Array, zero: Array | None) -> Array:
    bits, mantissa_bits = element.bits, element.mantissa_bits
    magnitude = _clean(scaled, u, element.largest)
    # Of normal codes: half a step is added, less one in the last place where the code below is even; exponents are rebased.
    shift, rebased = 23 - mantissa_bits, (127 - element.bias) << 23
    normal = (magnitude + ((magnitude >> shift) & 1) + ((1 << (shift - 1)) - 1 - rebased)) >> shift
    # Of subnormal ones, whose steps are of one size; the first normal code for greater numbers.
    subnormal = mx.minimum(_steps(magnitude, 2.0 ** (1 - element.bias - mantissa_bits)), 1 << mantissa_bits)
    sign = (scaled >> (32 - bits)) & (1 << (bits - 1)) & _finite(scaled)
    return (mx.maximum(normal, subnormal) | sign).astype(mx.uint8)


def _integers(element: Integer, scaled: Array, u: Array, zero: Array | None) -> Array:
    step = 2.0**-element.fraction_bits
    # Numbers beyond twice the range round to an integer beyond it, also after a zero-point is added.
    whole = _steps(_clean(scaled, u, step * 2.0 ** (element.bits + 1)), step)
    sign = scaled >> 31
    whole = (whole ^ sign) - sign
    whole = whole if zero is None else whole + zero
    return (mx.minimum(mx.maximum(whole, element.low), element.high) & ((1 << element.bits) - 1)).astype(mx.uint8)


def _looked_up(element: Lookup, scaled: Array, u: Array, zero: Array | None) -> Array:
    sign = scaled >> 31
    # FP32 bits in the order of the numbers. Those beyond the table are as far as its ends: no difference overflows.
    ordered = (_clean(scaled, u, 2.0 * max(map(abs, element.values))) ^ sign) - sign
    reached = [(_ordered(t) - 1 - ordered) >> 31 for t in element.thresholds[1:]]
    while len(reached) > 1:  # in pairs: MLX fuses short chains
        reached = [sum(reached[i + 1 : i + 2], reached[i]) for i in range(0, len(reached), 2)]
    place: Array = -reached[0]
    found = place if element.order == tuple(range(len(element.order))) else MLX.take(element.order, place)
    return found.astype(mx.uint8)


def _ordered(u: int) -> int:
    """FP32 bits as a signed integer in the order of the numbers; both zeros are 0."""
    return u if u <= MAGNITUDE else -(u & MAGNITUDE)


_ENCODERS: dict[type[Codec], Callable[[Any, Array, Array, Array | None], Array]] = {
    Minifloat: _minifloats,
    Integer: _integers,
    Lookup: _looked_up,
}


def _packed(codes: Array, element: Codec) -> Array:
    """Codes, one per uint8, as the storage of `element` along the last axis: the groups as words, whose gaps are closed."""
    count, size = packing(element)
    bits = element.bits
    if count == 1:
        return codes.view(getattr(mx, MLX.storage(element)))
    kind = {2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[count]
    words = codes.view(kind)
    closed = words & mx.array((1 << bits) - 1, kind)
    for i in range(1, count):
        closed = closed | ((words >> mx.array(i * (8 - bits), kind)) & mx.array(((1 << bits) - 1) << (i * bits), kind))
    if size == 1:
        return closed.astype(mx.uint8)
    bytes_ = mx.reshape(closed.view(mx.uint8), (*words.shape, count))[..., :size]
    return mx.reshape(bytes_, (*codes.shape[:-1], -1))
