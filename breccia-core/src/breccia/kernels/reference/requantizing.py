"""`requantize`: components are kept if the new format represents all values of the old one, else decoded and cast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ...arrays.frameworks import dtype_name, ops_of
from ...arrays.ops import Array, Ops
from ...codecs import Codec
from ...errors import InexactError
from ...fp32 import F32_INF, MAGNITUDE
from ...options import DEFAULT, CastOptions
from ...recipe_bases import ScalingRecipe, check_recipe
from ...tensors.checks import need_one_device
from ...tensors.grids import packing
from ...tensors.tensor import ScaledTensor
from ..checks import fitted_layout
from ..exact import translation
from .casting import assign, cast, refuse_nonfinite
from .decoding import dequantize, scale_of_blocks
from .exact_conversions import is_subnormal, promised, proposals
from .packing import pack, unpack
from .tiles import Tiles


class Primitives(NamedTuple):
    """The two ops that the others are composed of: the generic algorithm's, or the kernels selected by the table."""

    cast: Callable[[Array, ScalingRecipe, CastOptions], ScaledTensor]
    dequantize: Callable[[ScaledTensor], Array]


GENERIC = Primitives(cast, dequantize)


def requantize(
    st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT, by: Primitives = GENERIC
) -> ScaledTensor:
    """`st` under another recipe, as `breccia.requantize` documents."""
    check_recipe(recipe)
    need_one_device(st=st)
    st, ops, out, require_exact = st.to_plain(), ops_of(st.data, "data"), options.out, options.require_exact
    result = None if options.scale is not None else kept(ops, st, recipe, require_exact)
    if result is None:
        result, different = cast_again(ops, st, recipe, options, by)
        if different is not None:
            _refuse_inexact(ops, different, recipe)
    elif options.nonfinite == "raise":
        refuse_nonfinite(ops, by.dequantize(st))
    return result if out is None else assign(ops, out, result)


def kept(ops: Ops, st: ScaledTensor, recipe: ScalingRecipe, checking: bool) -> ScaledTensor | None:
    """`st` under `recipe` by a conversion that rounds nothing, whatever the codes are; None where there is none.

    checking: also where only these particular scales allow it, which reads their values.
    """
    result = _translated(ops, st, recipe, checking)
    return promised(ops, st, recipe) if result is None else result


def cast_again(
    ops: Ops, st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions, by: Primitives
) -> tuple[ScaledTensor, Array | None]:
    """`st` decoded and cast; with `require_exact`, another conversion where that one is exact and the cast is not.

    Also returned is where values differ, if `require_exact` asks and any does.
    """
    x = by.dequantize(st)
    written = by.cast(x, recipe, options.replace(axis=st.axis, out=None, require_exact=False))
    if not options.require_exact:
        return written, None
    different = differ(ops, x, by.dequantize(written))
    if not ops.any(different):
        return written, None
    for proposal in proposals(ops, st, recipe) if options.scale is None else ():
        if not ops.any(differ(ops, x, by.dequantize(proposal))):
            return proposal, None
    return written, different


def _translated(ops: Ops, st: ScaledTensor, recipe: ScalingRecipe, checking: bool) -> ScaledTensor | None:
    """`st` under `recipe` with the same scales, repeated over finer blocks, and codes of the same values; None if impossible.

    checking: also where only these particular scales allow it, which reads their values.
    """
    if recipe == st.recipe:
        return st
    conversion = translation(st.recipe, st.layout, st.axis, recipe)
    if conversion is None or not (conversion.promised or checking):
        return None
    if conversion.recipe_only:
        parts = (st.zero_point, st.global_scale, st.axis, st.padding)
        return ScaledTensor.from_parts(st.data, st.scale, recipe, st.layout, *parts)
    source, target, axis = st.recipe.format, recipe.format, st.axis
    layout = fitted_layout(recipe, st.shape, axis)
    shape = tuple(st.shape)
    old, new = (Tiles.along(ops, axis, shape, sides) for sides in (conversion.block, target.scale.block))

    def repeat_per_block(part: Array, codec: Codec | None, new_codec: Codec | None) -> Array:
        """A component of the scales' shape in the blocks and codec of `target`; None keeps the codec."""
        if codec == new_codec and old.block == new.block:
            return part
        part = scale_of_blocks(ops, part, old)
        words, dtype = ops.load(part), dtype_name(part)
        if codec is not None and new_codec is not None and codec != new_codec:
            words, dtype = new_codec.encode(ops, codec.read(ops, part)), ops.storage(new_codec)
        return ops.store(old.repeat_per_block(words, new), dtype)

    codecs = source.scale.codec, target.scale.codec

    def changed(part: Array, into: Array) -> bool:
        """Whether values of a component change in the codec of `target`, or become FP32 subnormals, which backends may flush"""
        before, after = codecs[0].read(ops, repeat_per_block(part, None, None)), codecs[1].read(ops, into)
        return ops.any(differ(ops, before, after) | is_subnormal(ops, after))

    biased = source.offset_codec is not None
    with ops.errstate():
        scale = repeat_per_block(st.scale, *codecs)
        offset = None if st.zero_point is None else repeat_per_block(st.zero_point, *(codecs if biased else (None, None)))
        if not conversion.promised and (changed(st.scale, scale) or (biased and changed(st.zero_point, offset))):
            return None
        data = st.data
        if source.element != target.element:
            unpacked = unpack(ops, data, source.element, shape[axis], axis)
            data = pack(ops, ops.take(conversion.codes, unpacked), target.element, axis)
    return ScaledTensor.from_parts(
        data,
        scale,
        recipe,
        layout,
        offset,
        st.global_scale,
        axis,
        padding=-shape[axis] % packing(target.element)[0],
    )


def differ(ops: Ops, a: Array, b: Array) -> Array:
    """Where two FP32 arrays differ in bits, treating all NaNs as equal."""
    p, q = ops.bitcast_to_int(a), ops.bitcast_to_int(b)
    return (p != q) & ~(((p & MAGNITUDE) > F32_INF) & ((q & MAGNITUDE) > F32_INF))


def total(ops: Ops, counts: Array) -> int:
    """The sum of an array of integers."""
    return int(ops.to_numpy(counts).sum())


def _refuse_inexact(ops: Ops, different: Array, recipe: ScalingRecipe) -> None:
    count = total(ops, ops.to_int32(different))
    raise InexactError(
        f"requantize(require_exact=True): {count} of {math.prod(different.shape)} values do not fit {recipe!r} under its "
        "scales. Omit require_exact to round them, or choose a recipe of more bits or finer blocks.",
        count=count,
    )
