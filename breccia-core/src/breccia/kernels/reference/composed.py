"""Ops composed of `cast` and `dequantize`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from ...arrays.frameworks import dtype_name, ops_of
from ...arrays.ops import Array
from ...codecs import Codec
from ...errors import OptionError
from ...options import DEFAULT, CastOptions, product_options
from ...recipes import ScalingRecipe
from ...tensors.tensor import ScaledTensor
from .casting import cast
from .decoding import dequantize, negative_scales, ungrouped
from .packing import pack
from .requantizing import GENERIC
from .tiles import Tiles

if TYPE_CHECKING:
    from .requantizing import Primitives


def cast_pair(
    x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, by: Primitives = GENERIC
) -> tuple[ScaledTensor, ScaledTensor]:
    """`x` with blocks along its last axis and with blocks along the one before it."""
    return by.cast(x, recipe, options.replace(axis=-1)), by.cast(x, recipe, options.replace(axis=-2))


def cast_ste(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> Array:
    """The round trip `dequantize(cast(x))` in `x`'s dtype. Its derivative is that of the composite."""
    return dequantize(cast(x, recipe, options), product_options(dtype_name(x)))


def extremes(st: ScaledTensor) -> tuple[ScaledTensor, ScaledTensor]:
    """`st` with all codes replaced by the code of the lowest value, and by that of the highest."""
    ops, fmt, axis = ops_of(st.data, "data"), st.recipe.format, st.axis
    if fmt.rotation is not None:
        raise OptionError(
            f'clip="scale" has a range for each block of values, and under {st.recipe.spec} these are sums of codes. Pass '
            "clip_min and clip_max, or clip=None.",
            recipe=st.recipe.spec,
        )
    st = ungrouped(ops, st.to_plain()) if fmt.alternative is not None else st.to_plain()

    def filled(code: int, other: int) -> ScaledTensor:
        codes = ops.broadcast(ops.to_int32(ops.constant(float(code), st.data)), tuple(st.shape))
        if code != other:  # under negative scales
            tiles = Tiles.along(ops, axis, tuple(st.shape), st.layout.block(axis))
            codes = tiles.join(ops.where(negative_scales(ops, st, tiles), other, tiles.split(codes)))
        data = pack(ops, codes, fmt.element, axis)
        return ScaledTensor.from_parts(data, st.scale, st.recipe, st.layout, st.zero_point, st.global_scale, axis, st.padding)

    low, high = map(filled, _ends(fmt.element), _ends(fmt.alternative or fmt.element))
    return low, high


@lru_cache
def _ends(element: Codec) -> tuple[int, int]:
    """The codes of a codec's lowest and highest finite value."""
    values = {code: value for code in range(1 << element.bits) if math.isfinite(value := element.value(code))}
    return min(values, key=lambda code: values[code]), max(values, key=lambda code: values[code])
