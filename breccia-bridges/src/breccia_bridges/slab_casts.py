"""`cast` of a tensor that does not fit into memory: slab by slab, with the bytes of one cast."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np

from breccia import ScaledTensor, ScalingRecipe, cast, from_buffer
from breccia.backend import NUMPY, TENSOR, Rotation, components, part_shapes, reference, threads
from breccia.internal import measuring, rotating

from . import compiled
from .measure import FileTensor, slabs
from .safetensors_file import Shape

_T = TypeVar("_T")


class SlabCasts:
    """A tensor to quantize, by slabs of complete blocks in C order.

    A block's bytes depend on that block alone and, where the recipe has a tensor-level scale, on the smallest and the largest
    element of the tensor and on whether it has NaN or Inf. Each slab is cast below rows of these, which are then cut off: so
    every rule sees the statistics of the whole tensor, and nothing else of the algorithm is needed here.

    among: the `extremes` of more than this tensor, where several share one tensor-level scale.
    importance: of each column, as `breccia.cast` takes it; None for none.
    """

    def __init__(
        self,
        stored: FileTensor,
        recipe: ScalingRecipe,
        among: np.ndarray | None = None,
        importance: np.ndarray | None = None,
        unit: int = 1,
    ) -> None:
        self.stored, self.recipe, self.among = stored, recipe, among
        self.rotation, self.written_by = recipe.format.rotation, recipe.unrotated
        self.importance = importance
        block = recipe.layout.block()
        self.has_tensor_scale = recipe.format.levels[0].block == TENSOR
        self.rows = 1 if block == TENSOR else block[0] or stored.shape[-2]
        self.slabs = list(slabs(stored.shape, stored.unit, self.rows, unit))

    def cast(self) -> Generator[dict[str, np.ndarray]]:
        """The components of the cast tensor in consecutive pieces; per-tensor components come with the first."""
        for n, st in enumerate(self.tensors()):
            yield {part: a for part, a in components(st).items() if a.ndim or n == 0}

    def tensors(self) -> Generator[ScaledTensor]:
        """The cast tensor, slab by slab; each with the per-tensor components of all."""
        above = np.empty(0, np.float32)
        if self.has_tensor_scale and (self.among is not None or len(self.slabs) > 1):
            found = extremes([self.stored], self.rotation) if self.among is None else self.among
            above = np.resize(found, math.ceil(found.size / self.rows) * self.rows)
        yield from in_order(lambda slab, rooms: self._cast(slab, above, rooms), self.slabs)

    def _cast(self, slab: measuring.Slab, above: np.ndarray, rooms: measuring.Rooms) -> ScaledTensor:
        """A slab, below rows of the numbers of `above` while it is cast."""
        x = self._numbers(slab, above, rooms)
        if self.rotation is not None:  # what is above is of the rotated tensor
            x[:, above.size :] = rotated(x[:, above.size :], self.rotation)
        st = rotating.renamed(cast(x, self.written_by, importance=self.importance), self.recipe)
        return st[:, above.size :] if above.size else st

    def _numbers(self, slab: measuring.Slab, above: np.ndarray, rooms: measuring.Rooms) -> np.ndarray:
        """The numbers of a slab below rows of those of `above`."""
        matrices, rows = (part.stop - part.start for part in slab)
        columns = self.stored.shape[-1]
        whole = rooms.array("numbers", (matrices, above.size + rows, columns))
        whole[:, : above.size] = above[:, None]
        below = whole[:, above.size :]
        if below.flags.c_contiguous and self.stored.decode_into(slab, below):
            return whole
        x = self.stored.stored(slab)
        if x.dtype != np.uint16 and not above.size:
            return measuring.numbers_of(x)
        if x.dtype == np.uint16:
            np.left_shift(x, 16, out=below.view(np.uint32), dtype=np.uint32)
        else:
            below[...] = measuring.numbers_of(x)
        return whole


def in_order(work: Callable[[measuring.Slab, measuring.Rooms], _T], every: Sequence[measuring.Slab]) -> Generator[_T]:
    """What `work` makes of each slab, in order. Each thread makes one; the caller takes those before it meanwhile."""
    workers = min(threads.get_num_threads(), len(every))
    if workers <= 1 or compiled.missing():  # NumPy's short loops would wait for the interpreter, not for each other
        rooms = measuring.Rooms()
        for slab in every:
            yield work(slab, rooms)
        return
    free = deque(measuring.Rooms() for _ in range(workers))

    def made(slab: measuring.Slab) -> _T:
        rooms = free.pop()
        try:
            return threads.at_most(1, work, slab, rooms)
        finally:
            free.append(rooms)

    with ThreadPoolExecutor(workers) as pool:
        left = iter(every)
        begun = deque(pool.submit(made, slab) for slab in islice(left, workers))
        try:
            while begun:
                found = begun.popleft().result()
                begun.extend(pool.submit(made, slab) for slab in islice(left, 1))
                yield found
        finally:
            for future in begun:
                future.cancel()


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


def extremes(tensors: Sequence[FileTensor], rotation: Rotation | None = None) -> np.ndarray:
    """The smallest and the largest finite element of all, as `rotation` rotates them, and NaN if there are others."""
    every = [(tensor, slab) for tensor in tensors for slab in slabs(tensor.shape, tensor.unit)]
    found: list[tuple[np.float32, np.float32, bool]] = []

    def work(first: int, end: int) -> None:
        rooms = measuring.Rooms()
        for tensor, slab in every[first:end]:
            found.append(threads.at_most(1, _extremes_of, tensor, slab, rooms, rotation))

    threads.spread(work, len(every), threads.get_num_threads())
    low, high = min((each[0] for each in found), default=_NONE[0]), max((each[1] for each in found), default=_NONE[1])
    bad = any(each[2] for each in found)
    return np.array([*((low, high) if low <= high else ()), *([np.float32(np.nan)] if bad else [])], np.float32)


#: The smallest and the largest of no elements.
_NONE = np.float32(np.inf), np.float32(-np.inf)


def _extremes_of(
    tensor: FileTensor, slab: measuring.Slab, rooms: measuring.Rooms, rotation: Rotation | None
) -> tuple[np.float32, np.float32, bool]:
    x = tensor.values(slab, rooms)
    return _extremes(x if rotation is None else rotated(x, rotation))


def rotated(x: np.ndarray, rotation: Rotation) -> np.ndarray:
    """FP32 numbers, rotated along the last axis; without -0."""
    with np.errstate(all="ignore"):
        return reference.rotated(NUMPY, x, rotation, -1)


def _extremes(x: np.ndarray) -> tuple[np.float32, np.float32, bool]:
    """The smallest and the largest finite element, and whether there are others."""
    if x.size:
        low, high = x.min(), x.max()
        if np.isfinite(low) and np.isfinite(high):  # NaN would be both
            return low, high, False
    finite = np.isfinite(x)
    low, high = (of(where=finite, initial=initial) for of, initial in zip((x.min, x.max), _NONE, strict=True))
    return low, high, not finite.all()
