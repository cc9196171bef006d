"""The generic algorithm: every recipe on every framework, in the words of `Ops`.

It is the contract of docs/spec/numerics.md as arithmetic that any array library can do; kernels are overrides that
must write the same bytes. Nothing here asks which recipe or framework it serves.

Shapes: blocks run along K, the last axis (arrays are swapped first where `axis=-2`). An array is *split* into
(..., M/m, m, K/k, k), padded with zeros to whole blocks; scales are (..., M/m, 1, K/k, 1) beside it. Per-tensor scales
need no split and broadcast from the left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, NamedTuple

from ..codecs import BF16, F32_INF, MAGNITUDE, NORMAL, Codec, Integer
from ..errors import InexactError, LayoutError, NonFiniteError, ShapeError, UnsupportedError
from ..exact import covered, hold_scales, keeps_parts, renamed, same_scales
from ..formats import TENSOR, Block, Format
from ..frameworks import FLOATS, dtype_name, ops_of, output_dtype, same_framework
from ..grids import packing
from ..layouts import Layout, PerBlockK, PerChannel, PerGroupIndex, PerTensor, Shape
from ..ops import Array, Ops
from ..options import DEFAULT, CastOptions
from ..recipes import ScalingRecipe, check_recipe
from ..rules import flushed, saturated
from ..tensor import PARTS, ScaledTensor, check_codes, check_layout, contraction_axis
from .checks import check_cast, check_grouped, check_matmul, fitted_layout

# ------------------------------------------------------------------------------------------------ geometry


@dataclass(frozen=True)
class _Tiles:
    """Blocks (m, k) over a K-last shape; per-tensor ones over all but the first `lead` axes, which each have their own."""

    ops: Ops
    shape: Shape
    block: Block
    lead: int = 0

    @property
    def sides(self) -> tuple[int, int]:
        m, k = self.block
        return m or max(self.shape[-2], 1), k or max(self.shape[-1], 1)

    @property
    def counts(self) -> tuple[int, int]:
        (rows, columns), (m, k) = self.shape[-2:], self.block  # one block for all of a side, be it empty
        return -(-rows // m) if m else 1, -(-columns // k) if k else 1

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of a split array that lie within one block."""
        return tuple(range(self.lead, len(self.shape))) if self.block == TENSOR else (-3, -1)

    def split(self, a: Array) -> Array:
        if self.block == TENSOR:
            return a
        (m, k), (rows, columns) = self.sides, self.counts
        widths = (0,) * (len(self.shape) - 2) + (rows * m - self.shape[-2], columns * k - self.shape[-1])
        padded = self.ops.pad(a, widths) if any(widths) else a
        return self.ops.reshape(padded, (*self.shape[:-2], rows, m, columns, k))

    def join(self, a: Array) -> Array:
        if self.block == TENSOR:
            return a
        (m, k), (rows, columns) = self.sides, self.counts
        whole = self.ops.reshape(a, (*self.shape[:-2], rows * m, columns * k))
        return whole[..., : self.shape[-2], : self.shape[-1]]

    def scale(self, a: Array) -> Array:
        """Reduced split array to the shape a layout stores, K last."""
        return self.ops.reshape(a, self.shape[: self.lead] if self.block == TENSOR else (*self.shape[:-2], *self.counts))

    def beside(self, a: Array) -> Array:
        """Stored scales, K last, to a shape that broadcasts against split arrays."""
        if self.block == TENSOR:
            return self.coarse(a)
        rows, columns = self.counts
        return self.ops.reshape(a, (*self.shape[:-2], rows, 1, columns, 1))

    def respread(self, a: Array, finer: _Tiles) -> Array:
        """A part as scales are stored, K last, repeated over the blocks of `finer`, which lie within the blocks here."""
        if finer.block == self.block:
            return a
        lead, (rows, columns), (tall, wide) = self.shape[:-2], finer.counts, self.counts
        if self.block == TENSOR:
            return self.ops.broadcast(self.coarse(a), (*lead, rows, columns))
        down, along = (-(-outer // inner) for outer, inner in zip(self.sides, finer.sides, strict=True))
        beside = self.ops.broadcast(self.ops.reshape(a, (*lead, tall, 1, wide, 1)), (*lead, tall, down, wide, along))
        return self.ops.reshape(beside, (*lead, tall * down, wide * along))[..., :rows, :columns]

    def coarse(self, a: Array) -> Array:
        """A scale of shape () or a prefix of the leading axes, likewise."""
        ndim = len(self.shape) + (0 if self.block == TENSOR else 2)
        return self.ops.reshape(a, (*a.shape, *(1,) * (ndim - len(a.shape))))


def _k_last(ops: Ops, a: Any, axis: int) -> Any:
    return ops.swap(a) if axis == -2 and a is not None and len(a.shape) >= 2 else a


def _k_last_shape(shape: Shape, axis: int) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2]) if axis == -2 else tuple(shape)


def pack(ops: Ops, codes: Array, codec: Codec) -> Array:
    """Codes, one per int32, to the storage of `codec`, groups of whole bytes along the last axis."""
    count, size = packing(codec)
    dtype = ops.storage(codec)
    if count == 1:
        return ops.store(codes, dtype)
    length = codes.shape[-1]
    groups = -(-length // count)
    if groups * count != length:
        codes = ops.pad(codes, (0,) * (len(codes.shape) - 1) + (groups * count - length,))
    codes = ops.reshape(codes, (*codes.shape[:-1], groups, count))
    if size <= _WORD:
        word = ops.joined(codes, codec.bits)
        if size == 1:
            return ops.store(word, dtype)
        bytes_ = [word >> (8 * i) for i in range(size)]
    else:
        bytes_ = _bytes(codes, codec.bits, size)
    parts = [ops.reshape(byte & 0xFF, (*byte.shape, 1)) for byte in bytes_]
    return ops.store(ops.reshape(ops.concat(parts), (*codes.shape[:-2], groups * size)), dtype)


def unpack(ops: Ops, data: Array, codec: Codec, length: int) -> Array:
    """Inverse of `pack`: int32 codes of logical `length` along the last axis."""
    count, size = packing(codec)
    stored = ops.load(data)
    if count == 1:
        return stored
    groups = stored.shape[-1] // size
    bytes_ = ops.reshape(stored, (*stored.shape[:-1], groups, size))
    if size <= _WORD:
        word = bytes_[..., 0]
        for i in range(1, size):
            word = word | (bytes_[..., i] << (8 * i))
        codes = ops.parted(word, codec.bits, count)
    else:
        each = _codes(bytes_, codec.bits, count)
        codes = ops.concat([ops.reshape(code, (*code.shape, 1)) for code in each])
    return ops.reshape(codes, (*stored.shape[:-1], groups * count))[..., :length]


#: Bytes of a packing group that one int32 holds: groups of 5- and 7-bit codes are longer.
_WORD = 4


def _bytes(codes: Array, bits: int, size: int) -> list[Array]:
    """The `size` bytes of a group of codes along the last axis, each in the low 8 bits of an int32; the bits above vary."""
    found: list[Array] = []
    for start in range(0, 8 * size, 8):
        reaching = range(start // bits, (start + 7) // bits + 1)
        shifts = [i * bits - start for i in reaching]
        moved = [codes[..., i] << s if s >= 0 else codes[..., i] >> -s for i, s in zip(reaching, shifts, strict=True)]
        found.append(reduce(lambda a, b: a | b, moved))
    return found


def _codes(bytes_: Array, bits: int, count: int) -> list[Array]:
    """Inverse of `_bytes`, of bytes along the last axis: each of the `count` codes as an int32."""
    found: list[Array] = []
    for start in range(0, bits * count, bits):
        byte, shift = divmod(start, 8)
        word = bytes_[..., byte]
        if shift + bits > 8:
            word = word | (bytes_[..., byte + 1] << 8)
        found.append((word >> shift) & ((1 << bits) - 1))
    return found


# ------------------------------------------------------------------------------------------------ cast


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """Quantize FP32, FP16 or BF16 `x` (at least 1-D; 2-D for block recipes) as `breccia.cast` documents, in plain storage."""
    check_cast(x, recipe)
    ops = ops_of(x)
    axis, scale, out = contraction_axis(options.axis, len(x.shape)), options.scale, options.out
    fmt = recipe.format
    layout = fitted_layout(recipe, tuple(x.shape), axis)
    with ops.quiet():
        y = _k_last(ops, ops.f32(x), axis)
        if scale is not None:
            scale = _check_supplied(ops, scale, x, fmt, layout, axis)
        lead = len(scale.shape) if scale is not None and (fmt.global_scale or layout.block(axis) == TENSOR) else 0
        tiles = _Tiles(ops, tuple(y.shape), layout.block(axis), lead)
        if options.nonfinite == "raise":
            _refuse_nonfinite(ops, y)
        words = random_words(ops, y, options.seed) if options.rounding == "stochastic" else None
        st = _write(ops, y, words, recipe, fmt, tiles, scale)
    data, stored, zero_point, global_scale = st
    if tiles.block != TENSOR:  # per-tensor scales run along leading axes alone
        stored, zero_point = _k_last(ops, stored, axis), _k_last(ops, zero_point, axis)
    written = ScaledTensor.assemble(
        _k_last(ops, data, axis),
        stored,
        recipe,
        layout,
        zero_point,
        global_scale,
        axis,
        tail=-x.shape[axis] % packing(fmt.element)[0],
    )
    return written if out is None else _assign(ops, out, written)


def _write(
    ops: Ops, y: Array, words: Array | None, recipe: ScalingRecipe, fmt: Format, tiles: _Tiles, supplied: Any
) -> tuple[Array, Array, Array | None, Array | None]:
    """(data, scale, zero_point, global_scale) of K-last FP32 `y`."""
    u = ops.bits(y)
    magnitude = u & MAGNITUDE
    finite = magnitude < F32_INF
    # Input below 2^-126 is zero on every backend, and Inf and NaN take no part in finite arithmetic.
    ordinary = finite & (magnitude >= NORMAL)
    clean = tiles.split(ops.unbits(ops.where(ordinary, u, u & ~MAGNITUDE)))
    words = None if words is None else tiles.split(words)

    level, element, rule = fmt.scale, fmt.element, recipe.rules[-1]
    coarse = global_scale = None
    if fmt.global_scale is not None:
        global_scale = _global_scale(ops, y, magnitude, recipe, fmt, supplied)
        coarse, supplied = tiles.coarse(_multiplier(ops, ops.f32(global_scale), fmt)), None

    amax = ops.amax(tiles.split(magnitude), tiles.axes)
    faulty = amax >= F32_INF
    low, statistic = _statistic(ops, amax, clean, tiles, fmt.offset)
    if supplied is None:
        codes = rule.scale(ops, statistic, level.codec, element, fmt.capacity(level), coarse)
        codes = ops.where(statistic == 0, level.codec.zero_scale, codes)
    else:
        codes, statistic = tiles.beside(level.codec.accept(ops, supplied)), None
    # Under a supplied scale NaN and Inf have codes of their own, if the element has any; else their block is marked.
    own_codes = supplied is not None and element.nan_code is not None
    if not own_codes:
        codes = ops.where(faulty, level.codec.need_nan(), codes)
    stored = ops.store(codes, ops.storage(level.codec))

    def in_units_of_scale(x: Array) -> tuple[Array, Array]:
        y, usable = rule.scaled(ops, x, stored, level.codec, coarse, statistic, fmt.capacity(level))
        return saturated(ops, y), usable

    zero_point = None
    if fmt.offset == "zero_point":
        assert isinstance(element, Integer)  # Format sees to it
        shift, usable = in_units_of_scale(-low)
        z = ops.where(usable, element.encode(ops, shift), 0)
        written = element.encode(ops, in_units_of_scale(clean)[0], words, element.decode(ops, z))
        zero_point = tiles.scale(ops.store(z, "uint8"))
    elif fmt.offset == "bias":
        bias = ops.store(level.codec.encode(ops, low), ops.storage(level.codec))
        scaled, usable = in_units_of_scale(flushed(ops, saturated(ops, clean - level.codec.read(ops, bias))))
        written = element.encode(ops, scaled, words)
        zero_point = tiles.scale(ops.store(ops.where(usable, ops.load(bias), 0), ops.storage(level.codec)))
    else:
        scaled, usable = in_units_of_scale(clean)
        if own_codes:
            scaled = ops.where(usable, ops.where(tiles.split(finite), scaled, tiles.split(y)), scaled)
        written = element.encode(ops, scaled, words)
    return pack(ops, tiles.join(written), element), tiles.scale(stored), zero_point, global_scale


def _global_scale(ops: Ops, y: Array, magnitude: Array, recipe: ScalingRecipe, fmt: Format, supplied: Any) -> Array:
    """The coarse level's scale, over the finite elements of the whole tensor: FP32, shape ()."""
    level = fmt.global_scale
    assert level is not None
    whole = _Tiles(ops, tuple(y.shape), TENSOR, 0 if supplied is None else len(supplied.shape))
    if supplied is not None:
        return whole.scale(ops.store(level.codec.accept(ops, supplied), ops.storage(level.codec)))
    finite = ops.where((magnitude < F32_INF) & (magnitude >= NORMAL), magnitude, 0)
    amax = ops.unbits(ops.amax(finite, whole.axes))
    if level.sense != "multiplier":
        capacity = fmt.capacity(level)
        ordinary = ops.where(amax == 0, capacity, ops.maximum(amax, capacity * 2.0**-126))
        number = ordinary if level.sense == "amax" else ops.minimum(ops.div(capacity, ordinary), 2.0**126)
        return whole.scale(ops.store(level.codec.encode(ops, number), ops.storage(level.codec)))
    codes = recipe.rules[0].scale(ops, amax, level.codec, fmt.element, fmt.capacity(level), None)
    codes = ops.where(amax == 0, level.codec.zero_scale, codes)
    return whole.scale(ops.store(codes, ops.storage(level.codec)))


def _multiplier(ops: Ops, stored: Array, fmt: Format) -> Array:
    """What the number stored at the coarse level multiplies by."""
    level = fmt.levels[0]
    if level.sense == "multiplier":
        return stored
    return ops.div(stored, fmt.capacity(level)) if level.sense == "amax" else ops.div(1.0, stored)


def _statistic(ops: Ops, amax: Array, clean: Array, tiles: _Tiles, offset: str) -> tuple[Array, Array]:
    """(low end, what the scale is computed from) of each block: amax, or the width of its range under an offset."""
    if offset == "none":
        statistic = ops.unbits(ops.where((amax >= NORMAL) & (amax < F32_INF), amax, 0))
        return statistic, statistic
    low, high = (_range if offset == "zero_point" else _extremes)(ops, clean, tiles)
    return low, flushed(ops, saturated(ops, high - low))


def _range(ops: Ops, clean: Array, tiles: _Tiles) -> tuple[Array, Array]:
    """(min(0, smallest), max(0, largest)) of each block, from the magnitudes of each sign."""
    u = ops.bits(clean)
    high = ops.unbits(ops.amax(ops.where(u < 0, 0, u), tiles.axes))
    low = -ops.unbits(ops.amax(ops.where(u < 0, u & MAGNITUDE, 0), tiles.axes))
    return low, high


def _extremes(ops: Ops, clean: Array, tiles: _Tiles) -> tuple[Array, Array]:
    """(smallest, largest) of each block's real elements, without -0; both 0 for a block of none."""
    u = ops.bits(clean)
    magnitude = u & MAGNITUDE
    real = tiles.split(ops.broadcast(ops.whole(ops.constant(1.0, clean)), tiles.shape)) != 0

    def ends(here: Array) -> tuple[Array, Array, Array]:
        """(is there any?, smallest magnitude, largest magnitude) of the elements `here` in each block."""
        largest = ops.amax(ops.where(here, magnitude, 0), tiles.axes)
        smallest = F32_INF - ops.amax(ops.where(here, F32_INF - magnitude, 0), tiles.axes)
        return ops.amax(ops.where(here, 1, 0), tiles.axes) > 0, ops.unbits(smallest), ops.unbits(largest)

    negative = (u < 0) & (magnitude > 0)
    below, nearest, farthest = ends(ops.where(real, negative, False))
    above, lowest, highest = ends(ops.where(real, ~negative, False))
    low = ops.where(below, -farthest, ops.where(above, lowest, 0.0))
    return low, ops.where(above, highest, ops.where(below, -nearest, 0.0))


def _check_supplied(ops: Ops, scale: Any, x: Array, fmt: Format, layout: Layout, axis: int) -> Array:
    """A caller's scale, K last, as an array of the dtype, shape and framework that the (coarsest) level is stored in."""
    level = fmt.global_scale or fmt.scale
    if not hasattr(scale, "shape"):
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise UnsupportedError(f"scale= must be a number or an array, got {type(scale).__name__}.", scale=scale)
        scale = ops.constant(float(scale), x)
    same_framework({"x": x, "scale": scale})
    check_codes("scale=", scale, level.codec)
    along = PerTensor() if fmt.global_scale else layout
    expected = along.scale_shapes(tuple(x.shape), axis)
    if isinstance(along, PerChannel):
        expected = expected[:1]
    if tuple(scale.shape) not in expected:
        wanted = " or ".join(map(str, expected))
        raise LayoutError(
            f"scale= must have shape {wanted} for x of shape {tuple(x.shape)} and {along}; got {tuple(scale.shape)}.",
            expected=expected,
            found=tuple(scale.shape),
        )
    return scale if isinstance(along, PerTensor) else _k_last(ops, scale, axis)


def _refuse_nonfinite(ops: Ops, y: Array) -> None:
    if ops.any((ops.bits(y) & MAGNITUDE) >= F32_INF):
        raise NonFiniteError(
            "cast(nonfinite='raise'): x holds NaN or Inf. Clean it first, or pass nonfinite='propagate' to mark the blocks "
            "they are in."
        )


def random_words(ops: Ops, like: Array, seed: Any) -> Array:
    """int32 words of Threefry-2x32-20 for every element (docs/spec/numerics.md, section 5.5)."""
    low, high = ops.words(seed)
    schedule = (low, high, 0x1BD11BDA ^ low ^ high)
    x, y = ops.counter(like)
    x, y = x + schedule[0], y + schedule[1]
    rotations = (13, 15, 26, 6, 17, 29, 16, 24)
    for i in range(20):
        r = rotations[i % 8]
        x = x + y
        y = ((y << r) | ((y >> (32 - r)) & ((1 << r) - 1))) ^ x
        if i % 4 == 3:
            j = i // 4 + 1
            x = x + schedule[j % 3]
            y = y + schedule[(j + 1) % 3] + j
    return x


def assigned(out: ScaledTensor | None, written: ScaledTensor) -> ScaledTensor:
    """`written`, copied into `out` where there is one."""
    return written if out is None else _assign(ops_of(written.data), out, written)


def _assign(ops: Ops, out: ScaledTensor, written: ScaledTensor) -> ScaledTensor:
    """Copy the parts of `written` into those of `out`. Raises before the first byte where any part does not fit."""
    if not isinstance(out, ScaledTensor):
        raise UnsupportedError(f"out= must be a ScaledTensor, got {type(out).__name__}; allocate it with the same call once.")
    parts = [(part, getattr(out, part), getattr(written, part)) for part in PARTS]
    there, here = ((st.recipe, st.layout, st.axis, st.shape) for st in (out, written))
    fits = there == here and all(
        (a is None) == (b is None) and (b is None or (tuple(a.shape), dtype_name(a)) == (tuple(b.shape), dtype_name(b)))
        for _, a, b in parts
    )
    if not fits:
        raise LayoutError(f"out= is {out!r}, but the cast gives {written!r}; allocate it with the same call once.")
    same_framework({"the result": written.data} | {f"out.{part}": a for part, a, _ in parts if a is not None})
    for _, a, b in parts:
        if b is not None:
            ops.assign(a, b)
    return out


# ------------------------------------------------------------------------------------------------ dequantize


def dequantize(st: ScaledTensor, out_dtype: Any = "float32", out: Array | None = None) -> Array:
    """High-precision values of `st`, as `breccia.dequantize` documents."""
    ops = ops_of(st.data, "data")
    name = output_dtype(out_dtype)
    check_layout(st.layout)
    st = st.to_plain()
    if isinstance(st.layout, PerGroupIndex):
        st = _ungrouped(ops, st, st.layout.index)
    fmt, axis = st.recipe.format, st.axis
    shape = _k_last_shape(st.shape, axis)
    with ops.quiet():
        data = _k_last(ops, st.data, axis)
        codes = unpack(ops, data, fmt.element, shape[-1])
        tiles = _Tiles(ops, shape, st.layout.block(axis))
        v = fmt.element.decode(ops, tiles.split(codes))
        scale = tiles.beside(_scale_k_last(ops, st.scale, tiles, axis))
        if fmt.offset == "zero_point":
            v = v - tiles.beside(_offsets(ops, _scale_k_last(ops, st.zero_point, tiles, axis)))
        v = _apply(ops, v, scale, fmt, fmt.scale)
        if fmt.global_scale is not None:
            v = _apply(ops, v, tiles.coarse(st.global_scale), fmt, fmt.global_scale)
        if fmt.offset == "bias":
            bias = tiles.beside(_offsets(ops, _scale_k_last(ops, st.zero_point, tiles, axis)))
            # Flushed, a subnormal product adds alike on every backend; and no compiler fuses the product into the sum.
            v = flushed(ops, v) + flushed(ops, bias)
        v = _k_last(ops, tiles.join(v), axis)
        return result(ops, v, name, out)


def _ungrouped(ops: Ops, st: ScaledTensor, index: tuple[int, ...]) -> ScaledTensor:
    """`st` with the scale (and zero-point) of its group beside each element of the contraction axis: blocks of one."""
    scale, zero_point = (a if a is None else ops.gather(a, index, st.axis) for a in (st.scale, st.zero_point))
    return ScaledTensor.assemble(st.data, scale, st.recipe, PerBlockK(1), zero_point, st.global_scale, st.axis, st.tail)


def _scale_k_last(ops: Ops, scale: Array, tiles: _Tiles, axis: int) -> Array:
    """A scale as its layout stores it, K last; PerChannel's (M,) form gets its unit axis."""
    if tiles.block == TENSOR:
        return scale
    if tiles.block == (1, None) and len(scale.shape) == 1:
        flat = ops.reshape(scale, (*(1,) * (len(tiles.shape) - 2), scale.shape[0], 1))
        return ops.broadcast(flat, (*tiles.shape[:-1], 1))
    return _k_last(ops, scale, axis)


def _offsets(ops: Ops, zero_point: Array) -> Array:
    """Zero-points or biases of any dtype as FP32."""
    if ops.is_bit_pattern(zero_point):
        return BF16.read(ops, zero_point)
    return ops.f32(zero_point) if dtype_name(zero_point) in FLOATS else ops.number(zero_point)


def _apply(ops: Ops, v: Array, stored: Array, fmt: Format, level: Any) -> Array:
    if level.sense == "multiplier":
        return level.codec.multiply(ops, v, stored)
    value = level.codec.read(ops, stored)
    if level.sense == "divisor":
        return ops.div(v, value)
    return v * ops.div(value, fmt.capacity(level))


def result(ops: Ops, value: Array, dtype: str, out: Array | None) -> Array:
    """FP32 `value` in the dtype named, in `out` if that is given. Raises before the first byte where `out` does not fit."""
    if dtype != "float32":
        value = ops.to_float(value, dtype)
    if out is None:
        return value
    same_framework({"the result": value, "out": out})
    wanted, found = (tuple(value.shape), dtype_name(value)), (tuple(out.shape), dtype_name(out))
    if wanted != found:
        raise ShapeError(f"out= must have shape {wanted[0]} and dtype {wanted[1]}; got {found[0]} and {found[1]}.")
    ops.assign(out, value)
    return out


# ------------------------------------------------------------------------------------------------ the other ops


class Primitives(NamedTuple):
    """The two ops that the others are written over: the generic algorithm's own, or whatever the table finds."""

    cast: Callable[[Array, ScalingRecipe, CastOptions], ScaledTensor]
    dequantize: Callable[[ScaledTensor], Array]


GENERIC = Primitives(cast, dequantize)


def requantize(
    st: ScaledTensor,
    recipe: ScalingRecipe,
    options: CastOptions = DEFAULT,
    require_exact: bool = False,
    by: Primitives = GENERIC,
) -> ScaledTensor:
    """`st` under another recipe, as `breccia.requantize` documents."""
    check_recipe(recipe)
    st, ops, out = st.to_plain(), ops_of(st.data, "data"), options.out
    kept = _kept(ops, st, recipe, require_exact) if options.scale is None else None
    if kept is None:
        x = by.dequantize(st)
        written = by.cast(x, recipe, options.replace(axis=st.axis, out=None))
        if require_exact:
            _refuse_inexact(ops, x, by.dequantize(written), recipe)
        kept = written
    elif options.nonfinite == "raise":
        _refuse_nonfinite(ops, by.dequantize(st))
    return kept if out is None else _assign(ops, out, kept)


def _kept(ops: Ops, st: ScaledTensor, recipe: ScalingRecipe, checking: bool) -> ScaledTensor | None:
    """`st` under `recipe` with the same scales, repeated over finer blocks, and codes of the same values; None if it has none.

    checking: also where the recipes do not promise it but these very scales allow it, which reads them.
    """
    if recipe == st.recipe:
        return st
    if keeps_parts(st.recipe, st.layout, st.axis, recipe):
        parts = (st.zero_point, st.global_scale, st.axis, st.tail)
        return ScaledTensor.assemble(st.data, st.scale, recipe, st.layout, *parts)
    source, target, axis = st.recipe.format, recipe.format, st.axis
    grouped, block = covered(st.recipe, st.layout, axis)
    codes = renamed(source.element, target.element)
    if codes is None or not same_scales(st.recipe, recipe, block):
        return None
    promised = hold_scales(source.scale.codec, target.scale.codec)
    if grouped or not (promised or checking):
        return None
    layout = fitted_layout(recipe, st.shape, axis)
    shape = _k_last_shape(st.shape, axis)
    old, new = _Tiles(ops, shape, block), _Tiles(ops, shape, target.scale.block)

    def respread(part: Array, codec: Codec | None, new_codec: Codec | None) -> Array:
        """A part of the scales' shape in the blocks and codec of `target`, K last; None: the codec stays."""
        if codec == new_codec and old.block == new.block:
            return part if old.block == TENSOR else _k_last(ops, part, axis)
        part = _scale_k_last(ops, part, old, axis)
        words, dtype = ops.load(part), dtype_name(part)
        if codec is not None and new_codec is not None and codec != new_codec:
            words, dtype = new_codec.encode(ops, codec.read(ops, part)), ops.storage(new_codec)
        return ops.store(old.respread(words, new) | 0, dtype)  # a broadcast view would share items: `|` copies

    codecs = source.scale.codec, target.scale.codec

    def changed(part: Array, into: Array) -> bool:
        """Are numbers of a part other ones in the codec of `target`?"""
        return ops.any(_differ(ops, codecs[0].read(ops, respread(part, None, None)), codecs[1].read(ops, into)))

    biased = source.offset == "bias"
    with ops.quiet():
        scale = respread(st.scale, *codecs)
        offset = None if st.zero_point is None else respread(st.zero_point, *(codecs if biased else (None, None)))
        if not promised and (changed(st.scale, scale) or (biased and changed(st.zero_point, offset))):
            return None
        data = st.data
        if source.element != target.element:
            unpacked = unpack(ops, _k_last(ops, data, axis), source.element, shape[-1])
            data = _k_last(ops, pack(ops, ops.take(codes, unpacked), target.element), axis)
    return ScaledTensor.assemble(
        data,
        _k_last(ops, scale, axis) if new.block != TENSOR else scale,
        recipe,
        layout,
        offset if new.block == TENSOR else _k_last(ops, offset, axis),
        st.global_scale,
        axis,
        tail=-shape[-1] % packing(target.element)[0],
    )


def _differ(ops: Ops, a: Array, b: Array) -> Array:
    """Where two FP32 arrays differ in bits, one NaN being like another."""
    p, q = ops.bits(a), ops.bits(b)
    return (p != q) & ~(((p & MAGNITUDE) > F32_INF) & ((q & MAGNITUDE) > F32_INF))


def _refuse_inexact(ops: Ops, x: Array, y: Array, recipe: ScalingRecipe) -> None:
    different = _differ(ops, x, y)
    if ops.any(different):
        count = int(ops.to_numpy(ops.whole(different)).sum())
        raise InexactError(
            f"requantize(require_exact=True): {count} of {math.prod(x.shape)} values are no numbers of {recipe!r} under its "
            "scales. Leave require_exact out to round them, or choose a recipe of more bits or finer blocks.",
            count=count,
        )


def matmul(
    a: Any,
    b: Any,
    bias: Array | None = None,
    out_dtype: Any = "float32",
    out: Array | None = None,
    by: Primitives = GENERIC,
) -> Array:
    """`a @ b + bias` with FP32 accumulation; operands are dequantized first."""
    same_framework({name: _array(x) for name, x in (("a", a), ("b", b), ("bias", bias)) if x is not None})
    check_matmul(a, b, bias)
    return product(a, b, bias, output_dtype(out_dtype), out, by)


def product(a: Any, b: Any, bias: Array | None, dtype: str, out: Array | None, by: Primitives) -> Array:
    """`matmul` of operands that are known to fit."""
    ops = ops_of(_array(a), "a")
    with ops.quiet():
        found = ops.matmul(values(ops, a, by), values(ops, b, by))
        if bias is not None:
            found = found + ops.f32(bias)
        return found if out is None and dtype == "float32" else result(ops, found, dtype, out)


def grouped_matmul(
    a: Any,
    b: Any,
    offsets: Array,
    out_dtype: Any = "float32",
    out: Array | None = None,
    by: Primitives = GENERIC,
) -> Array:
    """Each group of rows of `a` times its own matrix of `b`, as `breccia.grouped_matmul` documents."""
    same_framework({"a": _array(a), "b": _array(b), "offsets": offsets})
    check_grouped(a, b, offsets)
    ops = ops_of(_array(a), "a")
    with ops.quiet():
        product = ops.grouped_matmul(values(ops, a, by), values(ops, b, by), offsets)
        return result(ops, product, output_dtype(out_dtype), out)


def values(ops: Ops, x: Any, by: Primitives = GENERIC) -> Array:
    """An operand in FP32."""
    return by.dequantize(x) if isinstance(x, ScaledTensor) else ops.f32(x)


def _array(x: Any) -> Array:
    return x.data if isinstance(x, ScaledTensor) else x


def cast_pair(
    x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, by: Primitives = GENERIC
) -> tuple[ScaledTensor, ScaledTensor]:
    """`x` with blocks along its last axis and with blocks along the one before it."""
    return by.cast(x, recipe, options.replace(axis=-1)), by.cast(x, recipe, options.replace(axis=-2))


def cast_ste(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> Array:
    """The round trip `dequantize(cast(x))` in `x`'s dtype. Gradients are the frontend's."""
    return dequantize(cast(x, recipe, options), dtype_name(x))


def cast_ste_clipped(x: Array, recipe: ScalingRecipe, clip: Any, options: CastOptions = DEFAULT) -> Array:
    """`cast_ste`: a clip shapes the gradient alone."""
    return cast_ste(x, recipe, options)


def cast_matmul(x: Array, recipe: ScalingRecipe, b: Any, bias: Array | None = None, out_dtype: Any = "float32") -> Array:
    """`matmul(cast(x), b)`."""
    return matmul(cast(x, recipe), b, bias, out_dtype)


def extremes(st: ScaledTensor) -> tuple[ScaledTensor, ScaledTensor]:
    """The lowest and the highest tensor of `st`'s scales: all of its codes replaced by those of either end."""
    st = st.to_plain()
    ops, element, axis = ops_of(st.data, "data"), st.recipe.format.element, st.axis

    def filled(code: int) -> ScaledTensor:
        codes = ops.broadcast(ops.whole(ops.constant(float(code), st.data)), _k_last_shape(st.shape, axis))
        data = _k_last(ops, pack(ops, codes, element), axis)
        return ScaledTensor.assemble(data, st.scale, st.recipe, st.layout, st.zero_point, st.global_scale, axis, st.tail)

    low, high = map(filled, _ends(element))
    return low, high


@lru_cache
def _ends(element: Codec) -> tuple[int, int]:
    """The codes of a codec's lowest and highest finite value."""
    values = {code: value for code in range(1 << element.bits) if math.isfinite(value := element.value(code))}
    return min(values, key=lambda code: values[code]), max(values, key=lambda code: values[code])
