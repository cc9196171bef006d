"""`cast` for compiled functions on a CPU, in the operations that MLX's compiler makes fast.

MLX fuses chains of elementwise operations into loops that the system's compiler builds. Chains end at every bitcast. Loops
that broadcast an operand, shift by a variable, mix booleans and integers, or narrow the result of a long chain are scalar. New
memory costs more than what is computed in it: writing 64 MiB takes 40 ms, reading them 4 (measured). Hence:

* The extremes of blocks are reductions of the numbers themselves, whose bits are compared as signed and as unsigned integers:
  nothing is written to memory for them.
* Rows are cast in slabs, whose intermediate results stay in a cache and reuse memory; codes are written into their place one
  slab after the other.
* Scales are broadcast to numbers by views that are not fused (`Grid.spread`), so that MLX's own loops multiply by them.
* Codes are rounded by adding a constant to numbers, or to their bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from breccia import Codec, Integer, Lookup, Minifloat, ScaledTensor, ScalingRecipe, rules
from breccia.backend import (
    DEFAULT,
    F32_INF,
    TENSOR,
    WHOLE,
    Block,
    Call,
    CastOptions,
    FloatForm,
    IntegerForm,
    checks,
    contraction_axis,
    form_of,
    magnitudes_of,
    packing,
    reference,
)
from breccia.internal import MAGNITUDE, NORMAL, f32_bits

from .ops import MLX

Array = Any

#: Elements of a slab: 1 MiB of FP32. Reductions, which write little, read longer ones.
SLAB, READ = 2**18, 2**20
_MIN_NORMAL = 2.0**-126
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


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
    form = magnitudes_of(element) or form_of(element)
    if form is None or (isinstance(element, Minifloat) and not element.signed):
        return f"it does not round to {element.name}"
    if type(rule).scaled not in (rules.Rule.scaled, rules.Inverse.scaled):
        return f"scale rule {rule.name!r} does not multiply by one reciprocal per block"
    if fmt.offset != "none" and (not isinstance(element, Integer) or getattr(rule, "margin", 0) or level.block == TENSOR):
        return "it supports offsets of integers in blocks, without a margin"
    if call.a.empty or (level.block != TENSOR and call.a.ndim < 2):
        return "empty arrays, and those of too few axes, are the generic algorithm's"
    return None


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`cast` in few passes over the array."""
    checks.check_cast(x, recipe)
    axis = contraction_axis(options.axis, x.ndim)
    layout = checks.fitted_layout(recipe, tuple(x.shape), axis)
    fmt, swapped, shape = recipe.format, axis == -2 and x.ndim > 1, x.shape
    x = _in_whole_blocks(x, fmt.scale.block, swapped)
    grid = Grid.of(x.shape, fmt.scale.block, swapped)
    slabs = grid.slabs(x)

    global_scale = factor = None
    if fmt.global_scale is not None:
        amax = mx.max(mx.stack([_largest_finite(MLX.bitcast_to_int(MLX.f32(slab))) for slab in slabs]))
        global_scale = reference.global_scale_of(MLX, amax.view(mx.float32), recipe)
        factor = reference.multiplier(MLX, MLX.f32(global_scale), fmt)
    scales = _scales(grid, x, recipe, factor)
    spread = [None if part is None else grid.spread(part) for part in (scales.reciprocal, scales.bias, scales.zero)]
    data: list[Array] = []
    padding = -shape[axis] % packing(fmt.element)[0]
    for slab, cut in zip(slabs, grid.cuts, strict=True):
        codes = _codes(grid.split(MLX.f32(slab)), fmt.element, *(None if s is None else of_slab(s, cut) for s in spread))
        codes = mx.reshape(codes, slab.shape)[:, : shape[axis]]
        data.append(_packed(mx.pad(codes, [(0, 0), (0, padding)]) if padding else codes, fmt.element))
    stored, offset = (None if part is None else grid.join(part) for part in (scales.stored, scales.offset))
    joined = grid.joined(data).view(getattr(mx, MLX.storage(fmt.element)))
    if len(shape) == 1:
        joined = mx.reshape(joined, (-1,))
    else:
        joined = joined[..., : shape[-1]] if swapped else joined[..., : shape[-2], :]
    return ScaledTensor.from_parts(joined, stored, recipe, layout, offset, global_scale, axis, padding)


def _in_whole_blocks(x: Array, block: Block, swapped: bool) -> Array:
    """`x` with partial blocks filled by copies of their last numbers, which change no extremes."""
    if x.ndim < 2:
        return x
    sides = block[::-1] if swapped else block
    widths = [(0, -length % (side or 1)) for length, side in zip(x.shape[-2:], sides, strict=True)]
    return mx.pad(x, [(0, 0)] * (x.ndim - 2) + widths, mode="edge") if any(after for _, after in widths) else x


class Grid(NamedTuple):
    """How blocks of (height, width) numbers lie in an array: `down` of them along all rows, `across` along the columns.

    lead: the lengths before the matrix. swapped: whether the array has its last two axes in the other order. one_scale: whether
    the tensor has a single scale; its blocks are then those that share a row.
    """

    lead: tuple[int, ...]
    down_each: int
    across: int
    height: int
    width: int
    swapped: bool
    one_scale: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], block: Block, swapped: bool) -> Grid:
        *lead, rows, columns = (1, *shape)[-max(len(shape), 2) :]
        if swapped:
            rows, columns = columns, rows
        one_scale = block == TENSOR
        height, width = 1 if one_scale else block[0] or rows, block[1] or columns
        return cls(tuple(lead), rows // height, columns // width, height, width, swapped, one_scale)

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
        """The array of these slabs, whose rows may be of another length, or bytes in items as `_packed` returns them."""
        # Rows as words: MLX copies item by item. One slab after the other, so that their memory is that of one.
        first = slabs[0]
        kind, word = (
            (first.dtype, _WORDS[math.gcd(first.nbytes // len(first), 8)]) if first.ndim == 2 else (mx.uint8, first.dtype)
        )
        array, end = mx.zeros((self.down * self.height, *first.view(word).shape[1:]), word), 0
        for slab in slabs:
            start, end = end, end + len(slab)
            array[start:end] = slab.view(word)
        array = mx.reshape(array, (*self.lead, self.down_each * self.height, -1)).view(kind)
        return MLX.swap(array) if self.swapped else array

    def split(self, rows: Array) -> Array:
        """Rows as (1, blocks down, height, blocks across, width)."""
        return mx.reshape(rows, (1, -1, self.height, self.across, self.width))

    def spread(self, part: Array) -> Array:
        """Numbers of blocks, (blocks down, 1, blocks across, 1), for all numbers in a block, as `split` returns them.

        MLX does not fuse the added axis: fused, a product by a broadcast operand takes three times as long (measured).
        """
        if part.size == 1:
            return mx.reshape(part, (1,) * 5)
        return mx.expand_dims(mx.broadcast_to(part, (self.down, self.height, self.across, self.width)), 0)

    def join(self, scales: Array) -> Array:
        """Scales of (blocks down, 1, blocks across, 1) as they are stored."""
        if self.one_scale:
            return mx.reshape(scales, ())
        stored = mx.reshape(scales, (*self.lead, self.down_each, self.across))
        return MLX.swap(stored) if self.swapped else stored

    def of_blocks(self, stored: Array) -> Array:
        """The inverse of `join`, also of one scale for each row of a matrix."""
        if self.one_scale:
            return mx.reshape(stored, (1, 1, 1, 1))
        if stored.ndim == 1:
            stored = mx.broadcast_to(stored, (*self.lead, stored.size))
        elif self.swapped:
            stored = MLX.swap(stored)
        return mx.reshape(stored, (self.down, 1, self.across, 1))

    def reduced(self, x: Array, reductions: list[tuple[Any, Callable[..., Array]]]) -> list[Array]:
        """Reductions of the numbers in each block viewed as a dtype, as (blocks down, 1, blocks across, 1).

        In the order of memory, and slab by slab: each is read from memory once.
        """
        turned = self.swapped and not self.one_scale
        height, width, across = (self.width, self.height, self.down_each) if turned else (self.height, self.width, self.across)
        rows = mx.reshape(x, (-1, across * width))
        step = height * max(READ // (height * across * width), 1)
        slabs = [mx.reshape(rows[i : i + step], (-1, height, across, width)) for i in range(0, len(rows), step)]
        parts = [mx.concatenate([reduce(slab.view(kind), axis=(1, 3)) for slab in slabs]) for kind, reduce in reductions]
        if self.one_scale:
            return [mx.reshape(reduce(part), (1, 1, 1, 1)) for (_, reduce), part in zip(reductions, parts, strict=True)]
        if turned:
            parts = [MLX.swap(mx.reshape(part, (*self.lead, self.across, self.down_each))) for part in parts]
        return [mx.reshape(part, (self.down, 1, self.across, 1)) for part in parts]


def of_slab(part: Array, cut: slice) -> Array:
    """The part of a slab, of those that `Grid.spread` returns."""
    return part if part.size == 1 else part[:, cut]


# ------------------------------------------------------------------------------------------------ scales


class _Scales(NamedTuple):
    """Of blocks, as (blocks down, 1, blocks across, 1), or (1, 1, 1, 1) for all.

    stored, offset: components. reciprocal: FP32, NaN where codes are 0. bias: FP32. zero: zero-points as int32.
    """

    stored: Array
    offset: Array | None
    reciprocal: Array
    bias: Array | None = None
    zero: Array | None = None


def _scales(grid: Grid, x: Array, recipe: ScalingRecipe, factor: Array | None) -> _Scales:
    """factor: the multiplier of the global scale."""
    fmt, rule = recipe.format, recipe.rules[-1]
    codec, element = fmt.scale.codec, fmt.element
    least, largest = _extremes(grid, mx.stop_gradient(x), fmt.offset == "bias")
    amax, low = mx.maximum(_magnitude(least), _magnitude(largest)), None
    if fmt.offset == "none":
        statistic = mx.where((amax >= NORMAL) & (amax < F32_INF), amax, 0).view(mx.float32)
    else:
        low, high = (flushed(end.view(mx.float32)) for end in (least, largest))
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
        return _Scales(stored, offset, reciprocal, bias=codec.read(MLX, bias))
    if low is not None:
        zero = mx.where(usable, element.encode(MLX, rules.saturated(MLX, divided(-low)[0])), 0)
        return _Scales(stored, zero.astype(mx.uint8), reciprocal, zero=MLX.to_int32(element.decode(MLX, zero)))
    return _Scales(stored, None, reciprocal)


def _extremes(grid: Grid, x: Array, exact: bool) -> tuple[Array, Array]:
    """FP32 bits of the least and the largest number of each block, NaN beyond Inf; of these and 0, unless `exact`."""
    signed, unsigned = (mx.int16, mx.uint16) if x.dtype.size == 2 else (mx.int32, mx.uint32)
    # As signed integers, positive numbers are in order above all others; as unsigned ones, negative numbers from 0 downwards.
    # Where all have one sign, the least signed integer is the other end; MLX reduces signed ones in less time.
    asked = [(unsigned, mx.max), (signed, mx.max), (signed, mx.min)]
    least, largest, *nearest = (
        MLX.bitcast_to_int(MLX.f32(end.view(x.dtype))) for end in grid.reduced(x, asked if exact else asked[:2])
    )
    other = nearest[0] if exact else 0
    return mx.where(least < 0, least, other), mx.where(largest < 0, other, largest)


def _in_order(u: Array) -> Array:
    """FP32 bits as integers in the order of the numbers, -0 before 0."""
    return u ^ ((u >> 31) & MAGNITUDE)


def _largest_finite(u: Array) -> Array:
    """The largest magnitude of the finite numbers whose bits these are, without those below 2^-126."""
    magnitude = _magnitude(u)
    return mx.max(magnitude & ((magnitude - F32_INF) >> 31) & ((NORMAL - 1 - magnitude) >> 31))


def _magnitude(u: Array) -> Array:
    return u & MAGNITUDE


def flushed(x: Array) -> Array:
    """FP32 numbers, 0 for those below 2^-126 and for -0. Without bits, since two bitcasts would end loops."""
    return mx.where(mx.abs(x) < _MIN_NORMAL, 0, x)


# ------------------------------------------------------------------------------------------------ codes


def _codes(x: Array, element: Codec, reciprocal: Array, bias: Array | None, zero: Array | None) -> Array:
    """Codes, one per uint8, of FP32 `x` in blocks; the others are spread over them."""
    if isinstance(element, Integer):  # whose sign of zero does not matter
        x = flushed(x)
        scaled = (x if bias is None else flushed(x - bias)) * reciprocal
        if zero is not None:
            scaled = mx.where(mx.abs(scaled) >= _MIN_NORMAL, scaled, 0)  # NaN becomes 0 too
        return _integers(element, MLX.bitcast_to_int(scaled), zero)
    return _ENCODERS[type(element)](element, MLX.bitcast_to_int(x * reciprocal), MLX.bitcast_to_int(x))


def _bytes(codes: Array) -> Array:
    """Codes as bytes, in a loop of its own, which a bitcast starts."""
    return codes.view(mx.uint32).astype(mx.uint8)


def _mask(scaled: Array, u: Array) -> Array:
    """Minus one, all bits set, except where scaled numbers are NaN, or the number itself is below 2^-126."""
    return ((_magnitude(scaled) - (F32_INF + 1)) & (NORMAL - 1 - _magnitude(u))) >> 31


def _minifloats(element: Minifloat, scaled: Array, u: Array) -> Array:
    form, bits = FloatForm(element), element.bits
    magnitude = _magnitude(scaled)
    below_nan = magnitude - (F32_INF + 1)
    mask = (below_nan & (NORMAL - 1 - _magnitude(u))) >> 31
    # By integers. Half a step is added, less one in the last place where the code below is even.
    clipped, half = mx.minimum(magnitude, form.largest), 1 << (form.shift - 1)
    normal = (clipped + ((clipped >> form.shift) & 1) + (half - 1 - form.rebase)) >> form.shift
    # Of numbers that are not subnormal codes, at least the first normal code.
    magic = WHOLE * form.step
    steps = MLX.bitcast_to_int(mx.abs(scaled.view(mx.float32)) + magic) - f32_bits(magic)
    sign = (scaled >> (32 - bits)) & (1 << (bits - 1)) & (below_nan >> 31)
    codes = mx.maximum(normal, mx.minimum(steps, 1 << element.mantissa_bits)) & mask
    return _bytes(codes | (sign & (-codes >> 31) if element.fnuz else sign))


def _integers(element: Integer, scaled: Array, zero: Array | None) -> Array:
    """Codes of the FP32 bits of scaled numbers; `zero` has zero-points, for numbers without NaN."""
    # As integers, bits of sums are in the order of the numbers, except that those of negative ones are the least.
    magic = IntegerForm(element).magic
    low, high = (f32_bits(magic) + end for end in (element.low, element.high))
    bits = MLX.bitcast_to_int(scaled.view(mx.float32) + magic)
    if zero is not None:
        bits = (bits + zero).view(mx.uint32).view(mx.int32)  # not fused with what follows
        return mx.minimum(mx.maximum(bits, low), high).astype(mx.uint8)
    number = (_magnitude(bits) - (F32_INF + 1)) >> 31  # all bits set, except where scaled numbers are NaN
    codes = mx.minimum(mx.maximum(bits, low), high) & number
    return (codes & ((1 << element.bits) - 1) if element.signed and element.bits < 8 else codes).astype(mx.uint8)


def _looked_up(element: Lookup, scaled: Array, u: Array) -> Array:
    # Bitcasts, so that the comparisons are one loop.
    ordered = _in_order(scaled & _mask(scaled, u)).view(mx.uint32).view(mx.int32)
    reached = [(ordered >= _ordered(t)).astype(mx.int32) for t in element.thresholds[1:]]
    while len(reached) > 1:  # in pairs: MLX fuses short chains
        reached = [sum(reached[i + 1 : i + 2], reached[i]) for i in range(0, len(reached), 2)]
    place: Array = reached[0]
    return _bytes(place if element.order == tuple(range(len(element.order))) else MLX.take(element.order, place))


def _ordered(u: int) -> int:
    """FP32 bits as a signed integer in the order of the numbers, -0 next to 0; of a zero, the smaller of the two."""
    return u if 0 < u <= MAGNITUDE else ~(u & MAGNITUDE)


#: They make codes from the FP32 bits of scaled numbers and of the numbers.
_ENCODERS: dict[type[Codec], Callable[[Any, Array, Array], Array]] = {Minifloat: _minifloats, Lookup: _looked_up}


def _packed(codes: Array, element: Codec) -> Array:
    """Codes, one per uint8, as the bytes of storage along the last axis, which may lie apart, in items of an added last axis.

    Gaps between codes are closed in pairs.
    """
    count, size = packing(element)
    words, each = codes, 1  # words of that many bytes
    # Beyond a group where groups are several bytes: fewer and longer items to copy.
    while each < count or (size > 1 and each < 8 and words.shape[-1] % 2 == 0):
        kind, used = _WORDS[2 * each], element.bits * each
        words, low = words.view(kind), mx.array((1 << used) - 1, kind)
        high = mx.array(((1 << used) - 1) << used, kind)
        words = (words & low) | ((words >> mx.array(8 * each - used, kind)) & high)
        each *= 2
    if size == 1:
        return words.astype(mx.uint8)
    used = element.bits * each // 8
    item = math.gcd(used, each)
    return mx.reshape(words.view(_WORDS[item]), (*words.shape, each // item))[..., : used // item]
