"""`cast` in backend primitives: every recipe on every framework."""

from __future__ import annotations

from typing import Any

from ...arrays.frameworks import dtype_name, ops_of, same_framework, shape_of
from ...arrays.ops import Array, Ops
from ...codecs import F32_INF, MAGNITUDE, NORMAL, Integer
from ...errors import LayoutError, NonFiniteError, UnsupportedError
from ...formats import TENSOR, Format
from ...layouts import Layout, PerTensor
from ...options import DEFAULT, CastOptions
from ...recipes import ScalingRecipe
from ...rules import flushed, saturated
from ...tensors.checks import check_codes, contraction_axis
from ...tensors.components import PARTS
from ...tensors.grids import packing
from ...tensors.printing import description
from ...tensors.tensor import ScaledTensor
from ..checks import check_cast, check_writable, fitted_layout
from .packing import pack
from .tiles import Tiles, k_last


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, words: Array | None = None) -> ScaledTensor:
    """Quantize FP32, FP16 or BF16 `x` (at least 1-D; 2-D for block recipes) as `breccia.cast` documents, in plain storage.

    words: for a part of an array, int32 random words in place of those of the seed, of the part's shape with K last.

    Nothing is transposed but random words: blocks along axis -2 are blocks of swapped sides in the array as it is.
    """
    check_cast(x, recipe)
    ops = ops_of(x)
    axis, scale, out = contraction_axis(options.axis, len(x.shape)), options.scale, options.out
    fmt = recipe.format
    layout = fitted_layout(recipe, tuple(x.shape), axis)
    with ops.errstate():
        y = ops.f32(x)
        if scale is not None:
            scale = check_supplied(ops, scale, x, fmt, layout, axis)
        lead = len(scale.shape) if scale is not None and (fmt.global_scale or layout.block(axis) == TENSOR) else 0
        tiles = Tiles.along(ops, axis, tuple(y.shape), layout.block(axis), lead)
        if options.nonfinite == "raise":
            refuse_nonfinite(ops, y)
        if options.rounding == "stochastic":
            words = random_words(ops, k_last(ops, y, axis), options.seed)
        words = k_last(ops, words, axis)
        y = y if words is None else ops.mapped_like(y, words)
        codes, stored, zero_point, global_scale = _write(ops, y, words, recipe, fmt, tiles, scale)
        data = pack(ops, codes, fmt.element, axis)
    written = ScaledTensor.from_parts(
        data,
        stored,
        recipe,
        layout,
        zero_point,
        global_scale,
        axis,
        padding=-x.shape[axis] % packing(fmt.element)[0],
    )
    return written if out is None else assign(ops, out, written)


def _write(
    ops: Ops, y: Array, words: Array | None, recipe: ScalingRecipe, fmt: Format, tiles: Tiles, supplied: Any
) -> tuple[Array, Array, Array | None, Array | None]:
    """(codes, scale, zero_point, global_scale) of FP32 `y`."""
    u = ops.bitcast_to_int(y)
    magnitude = u & MAGNITUDE
    finite = magnitude < F32_INF
    # Input below 2^-126 is zero on every backend; Inf and NaN are excluded from arithmetic.
    ordinary = finite & (magnitude >= NORMAL)
    clean = tiles.split(ops.bitcast_to_float(ops.where(ordinary, u, u & ~MAGNITUDE)))
    words = None if words is None else tiles.split(words)

    level, element, rule = fmt.scale, fmt.element, recipe.rules[-1]
    factor = global_scale = None
    if fmt.global_scale is not None:
        global_scale = _global_scale(ops, y, magnitude, recipe, fmt, supplied)
        factor, supplied = tiles.broadcast_global(multiplier(ops, ops.f32(global_scale), fmt)), None

    amax = ops.amax(tiles.split(magnitude), tiles.axes)
    low, statistic = _statistic(ops, amax, clean, tiles, fmt.offset)
    # Under a supplied scale, NaN and Inf get their own codes if the element has them; else their block is marked.
    own_codes = supplied is not None and element.nan_code is not None
    if supplied is None:
        codes = block_scales(ops, amax, statistic, recipe, factor)
    else:
        codes, statistic = tiles.broadcast_to_blocks(level.codec.accept(ops, supplied)), None
        if not own_codes:
            codes = ops.where(amax >= F32_INF, level.codec.need_nan(), codes)
    stored = ops.store(codes, ops.storage(level.codec))

    def in_units_of_scale(x: Array) -> tuple[Array, Array]:
        y, usable = rule.scaled(ops, x, stored, level.codec, factor, statistic, fmt.qmax(level))
        return saturated(ops, y), usable

    zero_point = None
    if fmt.offset == "zero_point":
        assert isinstance(element, Integer)  # Format checks this
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
    return tiles.join(written), tiles.scale(stored), zero_point, global_scale


def _global_scale(ops: Ops, y: Array, magnitude: Array, recipe: ScalingRecipe, fmt: Format, supplied: Any) -> Array:
    """The global scale, over the finite elements of the whole tensor: FP32, shape ()."""
    level = fmt.global_scale
    assert level is not None
    tiles = Tiles(ops, tuple(y.shape), TENSOR, 0 if supplied is None else len(supplied.shape))
    if supplied is not None:
        return tiles.scale(ops.store(level.codec.accept(ops, supplied), ops.storage(level.codec)))
    finite = ops.where((magnitude < F32_INF) & (magnitude >= NORMAL), magnitude, 0)
    return tiles.scale(global_scale_of(ops, ops.bitcast_to_float(ops.amax(finite, tiles.axes)), recipe))


def block_scales(ops: Ops, amax: Array, statistic: Array, recipe: ScalingRecipe, factor: Array | None) -> Array:
    """int32 codes of the scales of blocks; NaN where `amax`, the largest magnitude as FP32 bits, is Inf or NaN.

    statistic: FP32, as in `Rule.scale`, 0 for blocks of zeros. factor: the multiplier of the global scale, or None.
    """
    fmt = recipe.format
    codec = fmt.scale.codec
    codes = recipe.rules[-1].scale(ops, statistic, codec, fmt.element, fmt.qmax(fmt.scale), factor)
    codes = ops.where(statistic == 0, codec.zero_scale, codes)
    return ops.where(amax >= F32_INF, codec.need_nan(), codes)


def global_scale_of(ops: Ops, amax: Array, recipe: ScalingRecipe) -> Array:
    """The global scale as stored, from the largest FP32 magnitude of the finite elements."""
    fmt = recipe.format
    level = fmt.levels[0]
    if level.convention != "multiplier":
        return ops.store(level.codec.encode(ops, sensed(ops, amax, fmt)), ops.storage(level.codec))
    codes = recipe.rules[0].scale(ops, amax, level.codec, fmt.element, fmt.qmax(level), None)
    return ops.store(ops.where(amax == 0, level.codec.zero_scale, codes), ops.storage(level.codec))


def sensed(ops: Ops, amax: Array, fmt: Format) -> Array:
    """The global scale, in FP32, of tensors with these amax, where it is stored as an amax or as a divisor."""
    level = fmt.levels[0]
    qmax = fmt.qmax(level)
    ordinary = ops.where(amax == 0, qmax, ops.maximum(amax, qmax * 2.0**-126))
    return ordinary if level.convention == "amax" else ops.minimum(ops.div(qmax, ordinary), 2.0**126)


def multiplier(ops: Ops, stored: Array, fmt: Format) -> Array:
    """The multiplier of a stored global scale."""
    level = fmt.levels[0]
    if level.convention == "multiplier":
        return stored
    return ops.div(stored, fmt.qmax(level)) if level.convention == "amax" else ops.div(1.0, stored)


def _statistic(ops: Ops, amax: Array, clean: Array, tiles: Tiles, offset: str) -> tuple[Array, Array]:
    """(low end, statistic for the scale) of each block: amax, or with an offset the width of its range."""
    if offset == "none":
        statistic = ops.bitcast_to_float(ops.where((amax >= NORMAL) & (amax < F32_INF), amax, 0))
        return statistic, statistic
    low, high = (_range if offset == "zero_point" else _extremes)(ops, clean, tiles)
    return low, flushed(ops, saturated(ops, high - low))


def _range(ops: Ops, clean: Array, tiles: Tiles) -> tuple[Array, Array]:
    """(min(0, smallest), max(0, largest)) of each block, from the magnitudes of each sign."""
    u = ops.bitcast_to_int(clean)
    high = ops.bitcast_to_float(ops.amax(ops.where(u < 0, 0, u), tiles.axes))
    low = -ops.bitcast_to_float(ops.amax(ops.where(u < 0, u & MAGNITUDE, 0), tiles.axes))
    return low, high


def _extremes(ops: Ops, clean: Array, tiles: Tiles) -> tuple[Array, Array]:
    """(smallest, largest) of each block's real elements, without -0; both 0 for a block without any."""
    u = ops.bitcast_to_int(clean)
    magnitude = u & MAGNITUDE
    real = tiles.split(ops.broadcast(ops.to_int32(ops.constant(1.0, clean)), tiles.shape)) != 0

    def ends(here: Array) -> tuple[Array, Array, Array]:
        """(whether there are any, smallest magnitude, largest magnitude) of the elements `here` in each block."""
        largest = ops.amax(ops.where(here, magnitude, 0), tiles.axes)
        smallest = F32_INF - ops.amax(ops.where(here, F32_INF - magnitude, 0), tiles.axes)
        return ops.amax(ops.where(here, 1, 0), tiles.axes) > 0, ops.bitcast_to_float(smallest), ops.bitcast_to_float(largest)

    negative = (u < 0) & (magnitude > 0)
    below, nearest, farthest = ends(ops.where(real, negative, False))
    above, lowest, highest = ends(ops.where(real, ~negative, False))
    low = ops.where(below, -farthest, ops.where(above, lowest, 0.0))
    return low, ops.where(above, highest, ops.where(below, -nearest, 0.0))


def check_supplied(ops: Ops, scale: Any, x: Array, fmt: Format, layout: Layout, axis: int) -> Array:
    """A supplied scale as an array with the dtype, shape and framework of its level."""
    level = fmt.global_scale or fmt.scale
    if not hasattr(scale, "dtype"):
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise UnsupportedError(f"scale= must be a number or an array, got {type(scale).__name__}.", scale=scale)
        scale = ops.constant(float(scale), x)
    shape = shape_of(scale, "scale")
    same_framework({"x": x, "scale": scale})
    check_codes("scale=", scale, level.codec)
    along = PerTensor() if fmt.global_scale else layout
    expected = along.scale_shapes(tuple(x.shape), axis)
    if along.block(axis) == (1, None):  # (M,) is a form to read only
        expected = expected[:1]
    if shape not in expected:
        wanted = " or ".join(map(str, expected))
        raise LayoutError(
            f"scale= must have shape {wanted} for x of shape {tuple(x.shape)} and {along}; got {shape}.",
            expected=expected,
            found=shape,
        )
    return scale


def refuse_nonfinite(ops: Ops, y: Array) -> None:
    """Raise NonFiniteError where `y` holds NaN or Inf."""
    if ops.any((ops.bitcast_to_int(y) & MAGNITUDE) >= F32_INF):
        raise NonFiniteError(
            "cast(nonfinite='raise'): x holds NaN or Inf. Clean it first, or pass nonfinite='propagate' to mark the blocks "
            "they are in."
        )


def random_words(ops: Ops, like: Array, seed: Any) -> Array:
    """int32 words of Threefry-2x32-20 for every element (docs/spec/numerics.md, section 5.5)."""
    low, high = ops.words(seed)
    schedule = (low, high, low ^ high ^ 0x1BD11BDA)
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
    """`written`, copied into `out` if given."""
    return written if out is None else assign(ops_of(written.data), out, written)


def assign(ops: Ops, out: ScaledTensor, written: ScaledTensor) -> ScaledTensor:
    """Copy the components of `written` into those of `out`. Raises before the first byte if any does not match."""
    if not isinstance(out, ScaledTensor):
        raise UnsupportedError(f"out= must be a ScaledTensor, got {type(out).__name__}; allocate it with the same call once.")
    parts = [(part, getattr(out, part), getattr(written, part)) for part in PARTS]
    there, here = ((st.recipe, st.layout, st.axis, st.shape) for st in (out, written))
    fits = there == here and all(
        (a is None) == (b is None) and (b is None or (tuple(a.shape), dtype_name(a)) == (tuple(b.shape), dtype_name(b)))
        for _, a, b in parts
    )
    if not fits:
        asked, result = description(out), description(written)
        raise LayoutError(f"out= is {asked}, but the cast returns {result}; allocate it with the same call once.")
    same_framework({"the result": written.data} | {f"out.{part}": a for part, a, _ in parts if a is not None})
    for part, a, _ in parts:
        check_writable(f"out.{part}", a)
    for _, a, b in parts:
        if b is not None:
            ops.assign(a, b)
    return out
