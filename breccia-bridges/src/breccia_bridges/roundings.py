"""How the codes of a tensor were rounded, given the numbers that were quantized and the scales that were used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from breccia import Codec, ScaledTensor
from breccia.backend import NUMPY
from breccia.internal import affine, measuring

from .measure import FileTensor, Numbers, slabs

#: f(values, next below, next above, codec) -> which of the two a rounding takes.
_Rounding = Callable[[np.ndarray, np.ndarray, np.ndarray, Codec], np.ndarray]


def _nearest(v: np.ndarray, low: np.ndarray, high: np.ndarray, codec: Codec) -> np.ndarray:
    return codec.decode(NUMPY, codec.encode(NUMPY, v))


def _away(v: np.ndarray, low: np.ndarray, high: np.ndarray, codec: Codec) -> np.ndarray:
    below, above = v.astype(np.float64) - low, high.astype(np.float64) - v
    return np.where((below > above) | ((below == above) & (v > 0)), high, low)


_ROUNDINGS: dict[str, _Rounding] = {
    "to nearest, ties to even": _nearest,
    "to nearest, ties away from zero": _away,
    "toward zero": lambda v, low, high, codec: np.where(v >= 0, low, high),
    "down": lambda v, low, high, codec: low,
    "up": lambda v, low, high, codec: high,
}
#: Where each code is one of the two next to its number, as stochastic rounding writes them, and other ways to choose.
EITHER = "up or down to the next code"


class _Steps(FileTensor):
    """The codes of a tensor as numbers, and other numbers on the scale of codes."""

    def read(self, slab: measuring.Slab, of: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(numbers of the codes, `of` divided by the scale) for each way to divide; elements under unusable scales left out."""
        assert self._scaled is not None
        piece = self._piece(self._scaled, slab)
        codec = piece.recipe.format.element
        values = codec.decode(NUMPY, affine.codes_of(piece)).reshape(of.shape)
        zero, step = (part.reshape(of.shape) for part in affine.affine(piece))
        with np.errstate(all="ignore"):
            usable = np.isfinite(step) & (step != 0) & np.isfinite(of)
            shifted = (of - zero).astype(np.float32)
            for quotient in (shifted * (np.float32(1) / step), shifted / step):
                yield values[usable], quotient[usable]


def rounding_of(st: ScaledTensor, original: Numbers) -> str | None:
    """The rounding by which all codes of `st` follow from the original under its scales; None if none does.

    st: with blocks along the last axis. Of several, the first; that of division before that of a product with a reciprocal.
    """
    fmt, steps = st.recipe.format, _Steps(st)
    codec = fmt.element
    numbers = [codec.value(code) for code in range(1 << codec.bits)]
    if original.shape != steps.shape or fmt.alternative is not None or not {0.0, 1.0} <= set(numbers):
        return None
    grid = np.unique(np.array([number for number in numbers if np.isfinite(number)], np.float32))
    alive = {(way, name) for way in range(2) for name in (*_ROUNDINGS, EITHER)}
    for slab in slabs(steps.shape, steps.unit, original.unit):
        for way, (codes, quotient) in enumerate(steps.read(slab, original.values(slab))):
            v = np.clip(quotient, grid[0], grid[-1])
            low = grid[np.searchsorted(grid, v, "right") - 1]
            high = grid[np.searchsorted(grid, v, "left")]
            for name in [name for of, name in alive if of == way]:
                holds = (codes == low) | (codes == high) if name == EITHER else codes == _ROUNDINGS[name](v, low, high, codec)
                if not holds.all():
                    alive.remove((way, name))
        if not alive:
            return None
    return next(name for name in (*_ROUNDINGS, EITHER) if any(of == name for _, of in alive))
