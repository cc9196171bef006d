"""The compiled search for scales: what a recipe tells it, and the arrays of a chunk."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays.ops import NUMPY, Array
from ...codecs import BF16, F16, F32, Codec, Minifloat, PowerOfTwo
from ...formats import TENSOR
from ...recipes import ScalingRecipe
from ...rules import Search, takes_signs
from .. import reference
from .codes import FloatCodes, IntegerCodes, TableCodes, scale_writer
from .scales import GlobalScale, Scales
from .workspace import F4, I4, U4, UNIT

#: Bits of the smallest and the largest amax that need no care (2^-60 and 2^100).
_LEAST, _MOST = 0x21800000, 0x71800000
#: Codecs of float scales, and their numbers and those of others for microkernels.
_FLOATS: dict[Codec, int] = {F16: 2, BF16: 3, F32: 4}
_POWERS, _BYTES = 0, 1
_NOTHING = np.empty(0, F4)


class Searching:
    """The search for the scales of a recipe, by a microkernel."""

    def __init__(
        self, recipe: ScalingRecipe, codes: FloatCodes | IntegerCodes | TableCodes, microkernel: Callable[..., None]
    ) -> None:
        fmt, rule = recipe.format, recipe.rules[-1]
        codec = fmt.scale.codec
        assert isinstance(rule, Search)
        window, signs = rule.tried(codec, fmt.element), takes_signs(codec, fmt.element)
        self._codes, self._microkernel, self._qmax = codes, microkernel, fmt.qmax(fmt.scale)
        self._codec = _number_of(codec)
        opposite = window.opposite if signs else ()
        self._window = (np.array(window.factors, F4), np.array(opposite, F4), np.array(window.steps, I4))
        writer, lowest, highest = None, 0, 254
        if self._codec == _BYTES:
            assert isinstance(codec, Minifloat)
            writer, lowest, highest = scale_writer(codec), 1, codec.highest
        #: The largest amax that scales of 8 bits reach without a global one; larger ones make products that count as zero.
        self._reach = codec.max * self._qmax if self._codec == _BYTES else 0.0
        self._scales = (writer, codec.scale_min, codec.scale_max, lowest, highest)

    @classmethod
    def of(cls, recipe: ScalingRecipe, codes: Any, microkernel: Callable[..., None] | None) -> Searching | None:
        """None where microkernels do not search for the scales of this recipe."""
        fmt = recipe.format
        codec = fmt.scale.codec
        plain = fmt.offset == "none" and not fmt.features - {"scales_first"}
        if microkernel is None or not plain or fmt.scale.block == TENSOR or codes is None:
            return None
        if isinstance(codes, FloatCodes) and codes.codec.fnuz:
            return None
        number = _number_of(codec)
        if number < 0 or (number == _BYTES and (codec.scale_min or scale_writer(codec) is None)):
            return None
        # Then no product of a code and a scale counts as zero, as those below `SMALLEST` do. The smallest scale of 8 bits is
        # 1 / 9.5 of the unrounded one, where steps lead from code 9 to code 1; other scales are at least 1 / 3 of it.
        match codes:
            case FloatCodes():
                least = codes.step
            case IntegerCodes():
                least = codes.unit
            case _:
                least = min(abs(value) for value in codes.codec.values if value)
        part = 10 if number == _BYTES else 4
        return cls(recipe, codes, microkernel) if least / fmt.element.max / part >= reference.SMALLEST else None

    def scales(
        self,
        scales: Scales,
        source: Array,
        m: int,
        k: int,
        amax: Array,
        plain: tuple[Array, Array],
        global_scale: GlobalScale | None,
        weights: Array | None,
        first: int,
        across: int,
    ) -> tuple[Array, Array] | None:
        """(stored, inverse) as `Scales.fast_path`; None where numbers need care.

        plain: of `fast_path`; its arrays may be written. The chunk has rows of `across` blocks of m x k, each from block
        `first` on. weights: `k` for each block of a row of the tensor.
        """
        if amax.max() > _MOST or int((amax - U4(1)).min()) + 1 < _LEAST:  # of zero: 2^32
            return None
        if self._reach and global_scale is None and amax.view(F4).max() > self._reach:
            return None
        by = 1.0 if global_scale is None else float(global_scale.value)
        weights = _NOTHING if weights is None else weights
        if self._codec <= _BYTES:
            found, inverses, inverse = plain[0], scales.inverse_table(global_scale), plain[1]
        else:
            found, inverses, inverse = np.empty(amax.size, F4), _NOTHING, _NOTHING
        arrays = source, m, k, amax, found, inverses, inverse
        self._microkernel(self._codes, *arrays, self._codec, self._qmax, by, self._window, self._scales, weights, first, across)
        if self._codec <= _BYTES:
            return plain
        np.copyto(found, UNIT, where=amax == 0)
        stored, numbers = scales.rounded(found)
        return stored, np.divide(UNIT, numbers)


def weights_of(importance: Array, columns: int, k: int) -> Array:
    """The weights of a row's blocks of `k`, one after another, padded with zeros."""
    real = min(k, columns)
    tiles = reference.Tiles(NUMPY, (1, columns), (1, real))
    of_blocks = reference.weights_of(NUMPY, importance, tiles, -1).reshape(-1, real)
    return np.ascontiguousarray(np.pad(of_blocks, ((0, 0), (0, k - real))), F4).reshape(-1)


def _number_of(codec: Codec) -> int:
    """The number of a codec of scales for microkernels, -1 if they do not know it."""
    if isinstance(codec, PowerOfTwo):
        return _POWERS if codec.bias == 127 else -1
    return _BYTES if type(codec) is Minifloat and codec.bits == 8 else _FLOATS.get(codec, -1)
