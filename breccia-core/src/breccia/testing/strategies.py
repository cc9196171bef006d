"""Hypothesis strategies that draw numbers, arrays, recipes and tensors for tests of low-precision code.

    @given(x=strategies.arrays(recipe=breccia.NVFP4BlockScaling()))
    def test_mine(x): ...

Arrays are FP32 NumPy arrays; convert them for other frameworks. A failing example shrinks towards fewer rows and zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ..api import cast
from ..codecs import Codec, Integer, Lookup, Minifloat
from ..dispatch.registry import registry
from ..formats import TENSOR
from ..fp32 import F32_INF, MANTISSA, NORMAL, f32_bits
from ..recipes import ScalingRecipe
from ..tensors.tensor import ScaledTensor

_SIGN = 0x80000000
_LAST = F32_INF - 1


def numbers(recipe: ScalingRecipe | None = None, finite: bool = False) -> st.SearchStrategy[float]:
    """FP32 numbers: zeros, numbers near 1, powers of two and their neighbours, the smallest, the largest, subnormals.

    recipe: also draws the values of its element codec, the midpoints between them, and the neighbours of both.
    finite: without NaN and Inf.
    """
    return _bits(recipe, finite).map(_number)


def shapes(recipe: ScalingRecipe | None = None, max_side: int = 40) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of one to three axes that `recipe` accepts, each axis up to `max_side`; some have partial blocks or are empty."""
    flat = recipe is not None and recipe.format.scale.block == TENSOR
    return hnp.array_shapes(min_dims=1 if flat else 2, max_dims=3, min_side=0, max_side=max_side)


def arrays(
    shape: tuple[int, ...] | st.SearchStrategy[tuple[int, ...]] | None = None,
    *,
    recipe: ScalingRecipe | None = None,
    finite: bool = False,
) -> st.SearchStrategy[np.ndarray]:
    """FP32 arrays with elements from `numbers`, and shapes from `shapes` unless `shape` gives a shape or a strategy."""
    words = hnp.arrays(np.uint32, shapes(recipe) if shape is None else shape, elements=_bits(recipe, finite), fill=_fill)
    return words.map(_as_numbers)


def recipes(among: Sequence[ScalingRecipe] | None = None) -> st.SearchStrategy[ScalingRecipe]:
    """One of the recipes `among`; by default, one of the `defaults`."""
    return st.sampled_from(tuple(among) if among is not None else defaults())


@st.composite
def tensors(draw: Any, recipe: ScalingRecipe | None = None) -> ScaledTensor:
    """Tensors that `cast` makes from `arrays` under `recipe`, or under any of `recipes`."""
    chosen = draw(recipes()) if recipe is None else recipe
    return cast(draw(arrays(recipe=chosen)), chosen)


def defaults() -> tuple[ScalingRecipe, ...]:
    """The default instance of each recipe class of every active plug-in whose fields all have defaults."""
    return tuple(made for kind in registry().recipes.values() if (made := _default(kind)) is not None)


@cache
def _default(kind: type[ScalingRecipe]) -> ScalingRecipe | None:
    return None if kind.needed_fields() else kind()


_fill = st.just(0)


def _bits(recipe: ScalingRecipe | None, finite: bool) -> st.SearchStrategy[int]:
    """FP32 bit patterns."""
    ends = [0, 1, MANTISSA, NORMAL, NORMAL + 1, f32_bits(2.0**126), f32_bits(2.0**126) + 1, _LAST]
    ordinary = st.integers(f32_bits(2.0**-10), f32_bits(2.0**10))
    powers = st.integers(1, 254).flatmap(lambda e: st.integers((e << 23) - 1, (e << 23) + 1))
    kinds = [ordinary, st.sampled_from(ends), powers, st.integers(0, _LAST)]
    if recipe is not None:
        near = st.sampled_from(_landmarks(recipe))
        kinds.append(st.tuples(near, st.integers(-1, 1)).map(lambda pair: max(pair[0] + pair[1], 0)))
    if not finite:
        kinds.append(st.sampled_from([F32_INF, 0x7FC00000, 0x7F800001, 0x7FFFFFFF]))
    return st.tuples(st.one_of(*kinds), st.sampled_from([0, _SIGN])).map(sum)


def _landmarks(recipe: ScalingRecipe) -> list[int]:
    """Bit patterns of a codec's magnitudes, the midpoints between them, and the qmax of each level."""
    fmt = recipe.format
    tables = [codec.table for codec in (fmt.element, fmt.alternative) if codec is not None]
    values = np.unique(np.abs(np.array(tables, np.uint32).view(np.float32)))
    magnitudes = [float(v) for v in values[np.isfinite(values)]]
    middles = [(a + b) / 2 for a, b in pairwise(magnitudes)]
    return sorted({f32_bits(v) for v in (*magnitudes, *middles, *(fmt.qmax(level) for level in fmt.levels))})


def _number(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def _as_numbers(words: np.ndarray) -> np.ndarray:
    return words.view(np.float32)


# -- codecs that no plug-in declares -----------------------------------------------------------------------------------


@st.composite
def codecs(draw: Any, bits: int | None = None) -> Codec:
    """Element codecs of `bits` bits (default: 1 to 8): integers, minifloats with every split and kind of NaN, tables."""
    width = draw(st.integers(1, 8)) if bits is None else bits
    return draw(draw(st.sampled_from([_integers, _minifloats, _lookups]))(width))


@st.composite
def _integers(draw: Any, bits: int) -> Codec:
    signed = bits > 1 and draw(st.booleans())
    return Integer("drawn", bits, None, "drawn", signed, draw(st.integers(-3, bits + 2)))


@st.composite
def _minifloats(draw: Any, bits: int) -> Codec:
    signed = bits > 1 and draw(st.booleans())
    mantissa = draw(st.integers(0, bits - signed))
    exponent, top = bits - signed - mantissa, (1 << (bits - signed)) - 1
    ieee = top + 1 - (1 << mantissa)  # all exponent bits set
    ends: list[tuple[int | None, int | None, int]] = [(None, None, top)]  # (nan, inf, the largest finite code)
    ends += [(top, None, top - 1)] if top > 1 else []
    ends += [(top, ieee, ieee - 1)] if 1 < ieee < top else []
    ends += [(top + 1, None, top)] if signed else []  # in place of -0
    nan, inf, last = draw(st.sampled_from(ends))
    field, fraction = divmod(last, 1 << mantissa)
    lowest = max(-20, field - 110)  # the largest value is below 2^111, so its product with the largest scale fits FP32
    finest = 150 - mantissa  # the smallest value is at least 2^-149
    bias = draw(st.integers(lowest, max(lowest, min(lowest + 40, finest))))
    largest = float((Fraction(fraction, 1 << mantissa) + (field > 0)) * Fraction(2) ** (max(field, 1) - bias))
    return Minifloat("drawn", bits, None, "drawn", exponent, mantissa, bias, largest, nan, inf, signed=signed)


@st.composite
def _lookups(draw: Any, bits: int) -> Codec:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    repeated = draw(st.booleans())  # several codes for one value
    others = rng.choice(np.arange(-(2**12), 2**12), (1 << bits) - 2, replace=False) + 0.5
    if repeated:
        others = rng.choice([0.0, 2.0**12, *others[: 1 << (bits - 1)]], others.size)
    values = [0.0, 2.0**12, *others.tolist()]
    return Lookup("drawn", bits, None, "drawn", tuple(rng.permutation(values).tolist()))
