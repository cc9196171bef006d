"""The smallest and the largest element of tensors, for which slabs are read before they are cast."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from breccia import Codec, ScaledTensor
from breccia.backend import NUMPY, TENSOR, Rotation
from breccia.internal import apply_scale, measuring, rotating

from .ahead import Item, results
from .measure import FileTensor, Slab, slabs

#: The smallest and the largest of no elements.
_NONE = np.float32(np.inf), np.float32(-np.inf)
#: Bytes of codes or bits that are reduced at once: enough that threads seldom wait for the GIL, and not long for each other.
_BYTES = 1 << 22
#: Columns of a block from which reducing its codes takes less than decoding them.
_WIDE = 128


class Extremes:
    """The smallest and the largest finite element of all tensors, and whether there are others, found slab by slab.

    rotation: of the tensors as it rotates them.
    """

    def __init__(self, tensors: Sequence[FileTensor], rotation: Rotation | None = None) -> None:
        self._rotation = rotation
        self._slabs = [(tensor, several) for tensor in tensors for several in _several(tensor)]
        self._left, self._found = len(self._slabs), list[tuple[np.float32, np.float32, bool]]()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._are_given = False
        if not self._left:
            self._ended.set()

    @classmethod
    def of(cls, tensors: Sequence[FileTensor]) -> Extremes:
        """Those of tensors, found."""
        extremes = cls(tensors)
        for _ in results(extremes.items()):
            continue
        return extremes

    def items(self) -> list[Item[None]]:
        """What finds them, all of which is begun before `numbers` are asked for; nothing for who asks again."""
        are_given, self._are_given = self._are_given, True
        return [] if are_given else [self._item(*of) for of in self._slabs]

    @property
    def numbers(self) -> np.ndarray:
        """The smallest and the largest finite one, and NaN if there are others. Waits until they are found."""
        self._ended.wait()
        lows, highs, others = zip(*self._found, strict=True) if self._found else ([], [], [])
        low, high = min(lows, default=_NONE[0]), max(highs, default=_NONE[1])
        return np.array([*((low, high) if low <= high else ()), *([np.float32(np.nan)] if any(others) else [])], np.float32)

    def _item(self, tensor: FileTensor, several: list[Slab]) -> Item[None]:
        def find(rooms: measuring.Rooms) -> None:
            try:
                self._found.extend(_found(tensor, several, rooms, self._rotation))
            finally:
                with self._lock:
                    self._left -= 1
                    if not self._left:
                        self._ended.set()

        return find


def _several(tensor: FileTensor) -> list[list[Slab]]:
    """Slabs beside each other, as many as have at most `_BYTES`, where codes or bits are reduced; else single ones."""
    listed: list[list[Slab]] = []
    most = 8 * _BYTES // (tensor.bits * measuring.stacked(tensor.shape)[2] or 1) if _is_reduced(tensor) else 0  # rows
    for slab in slabs(tensor.shape, tensor.unit):
        last = listed[-1] if listed else []
        follows = bool(last) and last[-1][0] == slab[0] and last[-1][1].stop == slab[1].start
        if follows and (slab[0].stop - slab[0].start) * (slab[1].stop - last[0][1].start) <= most:
            last.append(slab)
        else:
            listed.append([slab])
    return listed


def _found(
    tensor: FileTensor, several: list[Slab], rooms: measuring.Rooms, rotation: Rotation | None
) -> Iterable[tuple[np.float32, np.float32, bool]]:
    """The smallest and the largest finite element of slabs beside each other, and whether there are others."""
    if rotation is not None:
        return [_of_numbers(rotating.rotated(tensor.values(slab, rooms), rotation, -1)) for slab in several]
    matrices, rows = several[0]
    whole = matrices, slice(rows.start, several[-1][1].stop)
    if _is_reduced(tensor):
        st = tensor.codes(whole, rooms)
        ends = of_bits(tensor.stored(whole, rooms)) if st is None else of_codes(st)
        if ends is not None:
            return [(*ends, False)]
    return [_of_numbers(tensor.values(slab, rooms)) for slab in several]


def _is_reduced(tensor: FileTensor) -> bool:
    """Are its bits or codes reduced, not its numbers?"""
    return tensor.recipe is None or _in_order(tensor.recipe.format.element)


def _of_numbers(x: np.ndarray) -> tuple[np.float32, np.float32, bool]:
    if x.size:
        low, high = x.min(), x.max()
        if np.isfinite(low) and np.isfinite(high):  # NaN would be both
            return low, high, False
    finite = np.isfinite(x)
    low, high = (of(where=finite, initial=initial) for of, initial in zip((x.min, x.max), _NONE, strict=True))
    return low, high, not finite.all()


def of_bits(stored: np.ndarray) -> tuple[np.float32, np.float32] | None:
    """Of FP32, FP16, or BF16 as uint16, by their bits; None if some are not finite, or there are none."""
    if stored.dtype == np.float64 or not stored.size:
        return None
    bits = stored.reshape(-1).view(f"u{stored.itemsize}")
    found = measuring.numbers_of(np.stack(_ends(bits)).view(stored.dtype))
    return (found[0], found[1]) if np.isfinite(found).all() else None


def of_codes(st: ScaledTensor) -> tuple[np.float32, np.float32] | None:
    """Of a tensor whose blocks are wide: its smallest and largest codes of each block are decoded. None of others."""
    fmt, (m, k) = st.recipe.format, st.layout.block() if st.layout.block() != TENSOR else (None, None)
    *lead, rows, columns = st.data.shape
    m, k = m or rows, k or columns
    one_level = len(fmt.levels) == 1 and fmt.offset == "none" and fmt.scale_record is None and fmt.alternative is None
    if not (one_level and _in_order(fmt.element) and st.axis == -1 and st.data.size and k >= _WIDE):
        return None
    if rows % m or columns % k:
        return None
    table = np.array(fmt.element.table, np.uint32).view(np.float32)
    lows, highs = _ends(st.data.view(np.uint8).reshape(*lead, rows // m, m, columns), -2)
    grid = *lead, rows // m, columns // k
    found: list[np.ndarray] = []
    for codes in (_ends(lows.reshape(*grid, k), -1)[0], _ends(highs.reshape(*grid, k), -1)[1]):
        scale = st.scale.reshape(grid) if st.scale.ndim else st.scale
        with np.errstate(all="ignore"):
            found.append(apply_scale(NUMPY, table[codes], scale, fmt, fmt.scale))
    low, high = min(one.min() for one in found), max(one.max() for one in found)  # a negative scale swaps the two
    return (low, high) if np.isfinite(low) and np.isfinite(high) else None


def _ends(bits: np.ndarray, axis: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The bits of the smallest and the largest of numbers with a sign before their magnitude.

    As integers, positive numbers are in their order, and negative ones in the opposite one, below them if they are signed.
    """
    signed = bits.view(f"i{bits.itemsize}")
    low, high = bits.max(axis), signed.max(axis).view(bits.dtype)
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    if np.any(low < sign):  # of some, no number has a sign
        low = np.where(low < sign, bits.min(axis), low)
    if np.any(high >= sign):  # of some, all have
        high = np.where(high >= sign, signed.min(axis).view(bits.dtype), high)
    return low, high


@cache
def _in_order(codec: Codec) -> bool:
    """Are codes a byte with a sign before the magnitude, of which those that are not finite have the largest?"""
    if codec.bits != 8:
        return False
    values = np.array(codec.table, np.uint32).view(np.float32)
    positive, negative = values[:128], values[128:]
    count = int(np.isfinite(positive).sum())
    return bool(
        np.array_equal(positive, -negative, equal_nan=True)
        and np.isfinite(positive[:count]).all()
        and (np.diff(positive[:count]) > 0).all()
    )
