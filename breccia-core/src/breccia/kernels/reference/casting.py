"""`cast` in backend primitives: every recipe on every framework."""

from __future__ import annotations

import math
from typing import Any

from ...arrays.frameworks import dtype_name, ops_of, same_framework, shape_of
from ...arrays.ops import Array, Ops
from ...codecs import Integer
from ...errors import LayoutError, NonFiniteError, UnsupportedError
from ...formats import TENSOR, Format, Level
from ...fp32 import F32_INF, MAGNITUDE, NORMAL
from ...layouts import Layout, PerTensor
from ...options import DEFAULT, CastOptions
from ...recipes import ScalingRecipe
from ...rules import LINEAR, Rule, Search, flushed, saturated
from ...tensors.checks import check_codes, contraction_axis
from ...tensors.components import PARTS
from ...tensors.grids import packing
from ...tensors.printing import description
from ...tensors.tensor import ScaledTensor
from ..checks import check_cast, check_importance, check_searchable, check_writable, fitted_layout
from .decoding import multiplier
from .packing import pack
from .random_words import random_words
from .records import coarser, repeated, value_of, write_levels
from .rotating import rotated
from .searching import searched, weights_of
from .tiles import Tiles, k_last


def cast(
    x: Array,
    recipe: ScalingRecipe,
    options: CastOptions = DEFAULT,
    words: Array | None = None,
    global_scale: Array | None = None,
) -> ScaledTensor:
    """Quantize FP32, FP16 or BF16 `x` (at least 1-D; 2-D for block recipes) as `breccia.cast` documents, in plain storage.

    words: for a part of an array, int32 random words in place of those of the seed, of the part's shape with K last.
    global_scale: for a part of an array, the stored global scale of the whole array, of shape ().

    Nothing is transposed but random words: blocks along axis -2 are blocks of swapped sides in the array as it is.
    """
    check_cast(x, recipe)
    ops = ops_of(x)
    axis, scale, out = contraction_axis(options.axis, len(x.shape)), options.scale, options.out
    if options.importance is not None:
        check_importance(options.importance, x, recipe, axis)
    fmt = recipe.format
    layout = fitted_layout(recipe, tuple(x.shape), axis)
    with ops.errstate():
        y = ops.f32(x)
        if fmt.rotation is not None:
            y = rotated(ops, y, fmt.rotation, axis)
        if scale is not None:
            scale = check_supplied(ops, scale, x, fmt, layout, axis)
        lead = len(scale.shape) if scale is not None and (fmt.global_scale or layout.block(axis) == TENSOR) else 0
        block = layout.block(axis) if fmt.scale_record is None else fmt.scale.block
        tiles = Tiles.along(ops, axis, tuple(y.shape), block, lead)
        if options.nonfinite == "raise":
            refuse_nonfinite(ops, y)
        if options.rounding == "stochastic":
            words = random_words(ops, k_last(ops, y, axis), options.seed)
        words = k_last(ops, words, axis)
        y = y if words is None else ops.mapped_like(y, words)
        codes, stored, zero_point, global_scale = _write(
            ops, y, words, recipe, fmt, tiles, axis, scale, global_scale, options.importance
        )
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
    ops: Ops,
    y: Array,
    words: Array | None,
    recipe: ScalingRecipe,
    fmt: Format,
    tiles: Tiles,
    axis: int,
    supplied: Any,
    global_scale: Array | None,
    importance: Array | None,
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
    factor = scale_records = None
    if fmt.global_scale is not None:
        if global_scale is None:
            global_scale = _global_scale(ops, y, magnitude, recipe, fmt, supplied)
        factor, supplied = tiles.broadcast_global(multiplier(ops, ops.f32(global_scale), fmt)), None

    amax = ops.amax(tiles.split(magnitude), tiles.axes)
    low, statistic = _statistic(ops, amax, clean, tiles, fmt)
    if fmt.scale_record is not None:
        scale_records, factor = _coarse_scales(ops, amax, statistic, recipe, tiles, axis, factor)
    # Under a supplied scale, NaN and Inf get their own codes if the element has them; else their block is marked.
    own_codes = supplied is not None and element.nan_code is not None
    if supplied is None:
        codes = block_scales(ops, amax, statistic, recipe, factor)
        if isinstance(rule, Search):
            check_searchable(recipe)
            by = factor

            def divided(stored: Array) -> tuple[Array, Array]:
                y, usable = rule.scaled(ops, clean, stored, level.codec, by, statistic, fmt.qmax(level))
                return saturated(ops, y), usable

            weights = None if importance is None else weights_of(ops, importance, tiles, axis)
            found = searched(ops, rule, fmt, clean, statistic, factor, tiles, axis, weights, divided)
            codes = ops.where((statistic == 0) | (amax >= F32_INF), codes, found)
        if scale_records is not None:  # a coarser scale marks NaN, and codes have none
            scale_records.append(k_last(ops, tiles.scale(codes), axis))
    else:
        codes, statistic = tiles.broadcast_to_blocks(rule.accept(ops, supplied, level.codec, element)), None
        if not own_codes:
            codes = ops.where(amax >= F32_INF, level.codec.need_nan(), codes)
    stored = ops.store(codes, ops.storage(level.codec))
    if fmt.factor != 1.0:
        factor = fmt.factor if factor is None else factor * fmt.factor

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
    elif fmt.offset == "float_zero_point":
        shift, usable = in_units_of_scale(-low)
        z = ops.store(level.codec.encode(ops, ops.where(usable, shift, 0.0)), ops.storage(level.codec))
        written = element.encode(ops, saturated(ops, in_units_of_scale(clean)[0] + level.codec.read(ops, z)), words)
        zero_point = tiles.scale(z)
    elif fmt.offset_record is not None:
        offsets, bias = _coded_biases(ops, low, fmt, tiles, axis)
        scaled, _ = in_units_of_scale(flushed(ops, saturated(ops, clean - bias)))
        written = element.encode(ops, scaled, words)
        zero_point = k_last(ops, write_levels(ops, offsets, fmt.offset_record), axis)
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
        if fmt.alternative is not None:
            other = fmt.alternative.encode(ops, scaled, words)
            better = _largest_error(ops, scaled, fmt.alternative.decode(ops, other), tiles) < _largest_error(
                ops, scaled, element.decode(ops, written), tiles
            )
            written = ops.where(better, other, written)
            stored = ops.store(ops.where(better, codes | 1 << (level.codec.bits - 1), codes), ops.storage(level.codec))
    if fmt.scale_record is not None:
        assert scale_records is not None
        return (
            tiles.join(written),
            k_last(ops, write_levels(ops, scale_records, fmt.scale_record), axis),
            zero_point,
            global_scale,
        )
    return tiles.join(written), tiles.scale(stored), zero_point, global_scale


def _largest_error(ops: Ops, y: Array, values: Array, tiles: Tiles) -> Array:
    """The largest magnitude of y - values in each block, as FP32 bits."""
    return ops.amax(ops.bitcast_to_int(flushed(ops, flushed(ops, y) - values)) & MAGNITUDE, tiles.axes)


def _coarse_scales(
    ops: Ops, amax: Array, statistic: Array, recipe: ScalingRecipe, tiles: Tiles, axis: int, factor: Array | None
) -> tuple[list[Array], Array]:
    """(codes of all levels of blocks but the finest, K last; the FP32 scale that they leave to each finest block).

    The coarsest is NaN where a block has Inf or NaN; the statistic of a block of several is the largest of theirs.
    """
    fmt = recipe.format
    of_blocks = k_last(ops, tiles.scale(ops.bitcast_to_int(statistic)), axis)
    largest = k_last(ops, tiles.scale(amax), axis)
    above = None if factor is None else ops.reshape(factor, (*factor.shape[: len(tiles.shape) - 2], 1, 1))
    record, codes = fmt.scale_record, list[Array]()
    assert record is not None
    counts = record.counts
    for place, level in enumerate(fmt.block_levels[:-1]):
        rule = recipe.rules[place + len(fmt.levels) - len(fmt.block_levels)]
        statistics = ops.bitcast_to_float(coarser(ops, of_blocks, level, fmt.scale))
        if place:
            above = repeated(ops, above, counts[place] // counts[place - 1])[..., : statistics.shape[-1]]
        of_level = _scale_codes(ops, statistics, rule, level, fmt, above)
        if place == 0:
            of_level = ops.where(coarser(ops, largest, level, fmt.scale) >= F32_INF, level.codec.need_nan(), of_level)
        codes.append(of_level)
        value = value_of(ops, level.codec, of_level)
        above = value if above is None else value * above
    factor = repeated(ops, above, counts[-1] // counts[-2])[..., : of_blocks.shape[-1]]
    return codes, tiles.broadcast_to_blocks(k_last(ops, factor, axis))


def _scale_codes(ops: Ops, statistics: Array, rule: Rule, level: Level, fmt: Format, above: Array | None) -> Array:
    """The codes of one of several levels of blocks, 0 under a scale of NaN."""
    if above is None:
        usable, guarded = None, None
    else:
        usable = above > 0
        guarded = ops.where(usable, above, 1.0)
    codes = rule.scale(ops, statistics, level.codec, fmt.element, fmt.qmax(level), guarded)
    codes = ops.where(statistics == 0, level.codec.zero_scale, codes)
    return codes if usable is None else ops.where(usable, codes, 0)


def _coded_biases(ops: Ops, low: Array, fmt: Format, tiles: Tiles, axis: int) -> tuple[list[Array], Array]:
    """(codes of each level of the bias, K last; the bias of each block, FP32), which is at most 0: the coarsest is negative."""
    record = fmt.offset_record
    assert record is not None
    depth = k_last(ops, tiles.scale(ops.bitcast_to_int(low)), axis) & MAGNITUDE
    above: Array = None
    codes: list[Array] = []
    cap = math.prod(level.codec.max for level in record.levels)
    for place, level in enumerate(record.levels):
        cap /= level.codec.max
        statistics = ops.bitcast_to_float(coarser(ops, depth, level, record.levels[-1]))
        if place:
            above = repeated(ops, above, record.counts[place] // record.counts[place - 1])[..., : statistics.shape[-1]]
        guarded = None if above is None else ops.where(above > 0, above, 1.0)
        of_level = LINEAR.scale(ops, statistics, level.codec, fmt.element, cap, guarded)
        of_level = ops.where(statistics == 0, 0, of_level)
        value = value_of(ops, level.codec, of_level)
        above = value if above is None else value * above
        codes.append(of_level)
    sign = 1 << (record.levels[0].codec.bits - 1)
    codes[0] = ops.where(codes[0] == 0, 0, codes[0] | sign)
    return codes, tiles.broadcast_to_blocks(k_last(ops, -above, axis))


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
    if fmt.scale_record is not None:  # the coarsest scale says NaN
        return _scale_codes(ops, statistic, recipe.rules[-1], fmt.scale, fmt, factor)
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


def _statistic(ops: Ops, amax: Array, clean: Array, tiles: Tiles, fmt: Format) -> tuple[Array, Array]:
    """(low end, statistic for the scale) of each block: amax, or with an offset the width of its range."""
    if fmt.offset == "none":
        statistic = ops.bitcast_to_float(ops.where((amax >= NORMAL) & (amax < F32_INF), amax, 0))
        return statistic, statistic
    low, high = (_extremes if fmt.offset == "bias" and fmt.offset_record is None else _range)(ops, clean, tiles)
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
    if fmt.global_scale is None and fmt.scale_record is not None:
        raise UnsupportedError(
            f"scale= supplies one scale for each block; here {fmt.scale.codec.name} ones are coded under others. Omit it.",
            scale=scale,
        )
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
