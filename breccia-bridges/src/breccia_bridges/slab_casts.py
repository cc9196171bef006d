"""`cast` of a tensor that does not fit into memory: slab by slab, with the bytes of one cast."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from functools import cache, cached_property
from typing import Any

import numpy as np

from breccia import ScaledTensor, ScalingRecipe, cast, from_buffer
from breccia.backend import TENSOR, components, part_shapes
from breccia.internal import measuring, rotating

from .ahead import Item, results
from .extremes import Extremes
from .measure import FileTensor, slabs
from .safetensors_file import Shape

#: No rows above a slab.
_NOTHING = np.empty(0, np.float32)
#: Between this and its inverse, a global scale that is supplied gives the bytes of one that is computed.
_SMALL = 2.0**-60


class SlabCasts:
    """A tensor to quantize, by slabs of complete blocks in C order.

    A block's bytes depend on that block alone and, where the recipe has a tensor-level scale, on the smallest and the largest
    element of the tensor and on whether it has NaN or Inf. Rows of these are cast first. Where that gives a global scale, slabs
    are cast under it. Elsewhere each slab is cast below these rows, which are then cut off: so every rule sees the statistics
    of the whole tensor, and nothing else of the algorithm is needed here.

    among: the extremes of more than this tensor, where several share one tensor-level scale.
    importance: of each column, as `breccia.cast` takes it; None for none.
    """

    def __init__(
        self,
        stored: FileTensor,
        recipe: ScalingRecipe,
        among: Extremes | None = None,
        importance: np.ndarray | None = None,
        unit: int = 1,
    ) -> None:
        self.stored, self.recipe = stored, recipe
        self.rotation, self.written_by = recipe.format.rotation, recipe.unrotated
        self.importance = importance
        block = recipe.layout.block()
        self.rows = 1 if block == TENSOR else block[0] or stored.shape[-2]
        self.slabs = list(slabs(stored.shape, stored.unit, self.rows, unit))
        self._extremes: Extremes | None = None
        if recipe.format.levels[0].block == TENSOR and (among is not None or len(self.slabs) > 1):
            self._extremes = among or Extremes([stored], self.rotation)

    @property
    def before(self) -> list[Item[None]]:
        """What is done before the first slab is cast."""
        return self._extremes.items() if self._extremes else []

    @property
    def each(self) -> list[Item[ScaledTensor]]:
        """What is done for each slab: its cast, with the per-tensor components of all."""
        return [self._item(slab) for slab in self.slabs]

    @property
    def items(self) -> list[Item[ScaledTensor | None]]:
        """All that is done, in this order."""
        return [*self.before, *self.each]

    def _item(self, slab: measuring.Slab) -> Item[ScaledTensor]:
        return lambda rooms: self._cast(slab, rooms)

    def tensors(self) -> Generator[ScaledTensor]:
        """The cast tensor, slab by slab."""
        yield from (st for st in results(self.items) if st is not None)

    def cast(self) -> Generator[dict[str, np.ndarray]]:
        """The components of the cast tensor in consecutive pieces; per-tensor components come with the first."""
        yield from in_pieces(self.tensors())

    @cached_property
    def _of_all(self) -> tuple[np.ndarray, np.ndarray | None]:
        """What slabs know of the whole tensor: the numbers of rows to be above each, or none, and the global scale."""
        if self._extremes is None:
            return _NOTHING, None
        found = self._extremes.numbers
        above = np.resize(found, math.ceil(found.size / self.rows) * self.rows)
        if self.recipe.format.global_scale is None or self.recipe.searches or not above.size:
            return above, None
        rows = np.repeat(above[:, None], self.stored.shape[-1], 1)
        scale = cast(rows, self.written_by).global_scale
        # Others might not be accepted as they were computed.
        return (_NOTHING, scale) if scale is not None and _SMALL <= scale <= 1 / _SMALL else (above, None)

    @cached_property
    def _is_one_pass(self) -> bool:
        """Do codes become other codes without numbers between, once the global scale is known?"""
        plain = self.rotation is None and self.importance is None and self.recipe == self.written_by
        return plain and self.stored.takes_one_pass(self.recipe)

    def _cast(self, slab: measuring.Slab, rooms: measuring.Rooms) -> ScaledTensor:
        above, scale = self._of_all
        if scale is not None and self._is_one_pass:
            st = self.stored.requantized(slab, self.recipe, scale, rooms)
            return st.reshape(measuring.stacked(st.shape))
        x = self._numbers(slab, above, rooms)
        if self.rotation is not None:  # what is above is of the rotated tensor
            turned = rotating.rotated(x[:, above.size :], self.rotation, -1)
            x = _below(turned, above, rooms)
        st = rotating.renamed(cast(x, self.written_by, scale=scale, importance=self.importance), self.recipe)
        return st[:, above.size :] if above.size else st

    def _numbers(self, slab: measuring.Slab, above: np.ndarray, rooms: measuring.Rooms) -> np.ndarray:
        """The numbers of a slab below rows of those of `above`, in BF16 where all have it."""
        if self.stored.recipe is None:
            x = self.stored.stored(slab, rooms)
            if x.dtype == np.uint16 and self.rotation is None and not (above.view(np.uint32) & 0xFFFF).any() and _bfloat16():
                high = (above.view(np.uint32) >> 16).astype(np.uint16)
                return _below(x, high, rooms).view(_bfloat16())
            return _below(measuring.numbers_of(x), above, rooms)
        matrices, rows = (part.stop - part.start for part in slab)
        whole = rooms.array("numbers", (matrices, above.size + rows, self.stored.shape[-1]))
        whole[:, : above.size] = above[:, None]
        below = whole[:, above.size :]
        if not below.flags.c_contiguous or not self.stored.decode_into(slab, below, rooms):
            below[...] = self.stored.values(slab, rooms)
        return whole


def _below(x: np.ndarray, above: np.ndarray, rooms: measuring.Rooms) -> np.ndarray:
    """The rows of `x` below rows of the numbers of `above`, if there are any."""
    if not above.size:
        return x
    matrices, rows, columns = x.shape
    whole = rooms.array("numbers", (matrices, above.size + rows, columns), x.dtype)
    whole[:, : above.size], whole[:, above.size :] = above[:, None], x
    return whole


def in_pieces(tensors: Iterable[ScaledTensor | None]) -> Generator[dict[str, np.ndarray]]:
    """The components of a tensor's slabs; per-tensor components come with the first."""
    for n, st in enumerate(st for st in tensors if st is not None):
        yield {part: a for part, a in components(st).items() if a.ndim or n == 0}


def assembled(pieces: Iterable[Mapping[str, np.ndarray]], recipe: ScalingRecipe, shape: Shape) -> ScaledTensor:
    """The tensor of that shape whose components come in consecutive pieces."""
    collected: dict[str, list[np.ndarray]] = {}
    for piece in pieces:
        for part, array in piece.items():
            collected.setdefault(part, []).append(array.reshape(-1))
    layout = recipe.layout.fitted(shape)
    shapes = part_shapes(recipe.format, layout, shape, -1)
    parts = {part: np.concatenate(arrays).reshape(shapes[part]) for part, arrays in collected.items()}
    return from_buffer(
        parts["data"], parts["scale"], recipe, layout, parts.get("zero_point"), parts.get("global_scale"), shape=shape
    )


@cache
def _bfloat16() -> Any:
    """NumPy's dtype of BF16, which ml_dtypes has; None without it."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return ml_dtypes.bfloat16
