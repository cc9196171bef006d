"""Where the bits of codes are in a block of GGUF, and how they get there.

`read` takes them out as breccia has them: packed from the lowest bit up without gaps. `write` is its inverse. In between, `get`
and `put` have codes one a byte.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, NamedTuple

import numpy as np

#: Unsigned integers by their bytes.
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def items(rows: np.ndarray, field: slice) -> np.ndarray:
    """A view of a range of the bytes of each row, as one item, which is copied at once."""
    width = rows.shape[1]
    start, stop, _ = field.indices(width)
    item: Any = {"names": ["field"], "formats": [f"V{stop - start}"], "offsets": [start], "itemsize": width}
    return rows.view(np.dtype(item))["field"][:, 0]


class Codes(ABC):
    """Codes of `bits` bits in blocks: arrays of bytes (n, size), of which those to be written are zeros before."""

    bits: int

    @abstractmethod
    def get(self, blocks: np.ndarray) -> np.ndarray:
        """The codes of blocks, one a byte."""

    @abstractmethod
    def put(self, blocks: np.ndarray, codes: np.ndarray) -> None:
        """Set the codes of blocks."""

    def read(self, out: np.ndarray, blocks: np.ndarray) -> None:
        """Write the codes of blocks to `out`, packed."""
        out[:] = _packed(self.get(blocks), self.bits)

    def write(self, blocks: np.ndarray, data: np.ndarray) -> None:
        """Set the codes of blocks from packed ones."""
        self.put(blocks, _spread(data, self.bits))


class Plane(NamedTuple):
    """Where bits of codes are: `field`, the bytes of a block, in runs of `run` bytes.

    The lowest `bits` bits of a run's bytes belong to the first `run` codes, the next ones to the next codes.
    """

    field: slice
    bits: int
    run: int


class Planes(Codes):
    """Codes whose bits are in planes, from the lowest ones up. flip: the bits that are stored inverted.

    Inverting the highest bit makes a code without a sign the two's complement of the signed one.
    """

    def __init__(self, *planes: Plane, flip: int = 0) -> None:
        self.planes, self.flip, self.bits = planes, np.uint8(flip), sum(plane.bits for plane in planes)

    def get(self, blocks: np.ndarray) -> np.ndarray:
        codes, bits = _unpacked(blocks, self.planes[0], 0), self.planes[0].bits
        for plane in self.planes[1:]:
            codes.view(np.uint64)[:] |= _unpacked(blocks, plane, bits).view(np.uint64)
            bits += plane.bits
        return codes ^ self.flip if self.flip else codes

    def put(self, blocks: np.ndarray, codes: np.ndarray) -> None:
        codes, bits = np.ascontiguousarray(codes ^ self.flip if self.flip else codes), 0
        for plane in self.planes:
            blocks[:, plane.field] = _of_plane(codes, plane, bits)
            bits += plane.bits


class Nibbles(Planes):
    """Codes of one plane of 4 bits in runs of 8 bytes or more: two bytes, of four codes, at a time.

    A run's byte has a code of its first half and one of its second; packed, it would have two neighbours.
    """

    def __init__(self, start: int, stop: int, run: int, flip: int = 0) -> None:
        super().__init__(Plane(slice(start, stop), 4, run), flip=flip)
        self._field, self._flips, self._words = slice(start, stop), np.uint16(flip * 0x1111), min(run // 2, 8)
        self._in_half = run // 2 // self._words

    def _halves(self, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views of the packed codes of the first and the second half of each run, as words."""
        halves = data.view(_WORDS[self._words]).reshape(len(data), -1, 2, self._in_half)
        return halves[:, :, 0], halves[:, :, 1]

    def read(self, out: np.ndarray, blocks: np.ndarray) -> None:
        pairs = np.ascontiguousarray(items(blocks, self._field)).view(np.uint16) ^ self._flips
        first, second = self._halves(out)
        for half, codes in ((first, pairs), (second, pairs >> np.uint16(4))):
            packed = ((codes & np.uint16(0x0F)) | (codes >> np.uint16(4) & np.uint16(0xF0))).astype(np.uint8)
            half[:] = packed.view(half.dtype).reshape(half.shape)

    def write(self, blocks: np.ndarray, data: np.ndarray) -> None:
        first, second = self._halves(data)
        mask, four = _mask(4, 8).astype(first.dtype), first.dtype.type(4)
        even, odd = first & mask | (second & mask) << four, first >> four & mask | second & ~mask
        pairs = even.view(np.uint8).astype(np.uint16) | odd.view(np.uint8).astype(np.uint16) << np.uint16(8)
        items(blocks, self._field)[:] = items((pairs ^ self._flips).view(np.uint8).reshape(len(data), -1), slice(None))


class HalfBytes(Codes):
    """The 4 bits from `shift` on, of each byte."""

    bits = 4

    def __init__(self, field: slice, shift: int) -> None:
        self._field, self._shift = field, np.uint8(shift)

    def get(self, blocks: np.ndarray) -> np.ndarray:
        return (blocks[:, self._field] >> self._shift) & np.uint8(15)

    def put(self, blocks: np.ndarray, codes: np.ndarray) -> None:
        blocks[:, self._field] |= codes << self._shift


class Sixes(Codes):
    """Eight codes of 6 bits in bytes 4 to 16 of Q4_K and Q5_K: four in the 4 bytes from `at` on.

    The other four have their low bits in the last 4 bytes, from `shift` on, and their high bits above the first four.
    """

    bits = 6

    def __init__(self, at: int, shift: int) -> None:
        self._field, self._shift = slice(at, at + 4), np.uint8(shift)

    def get(self, blocks: np.ndarray) -> np.ndarray:
        first, last = blocks[:, self._field], blocks[:, 12:16]
        high = (last >> self._shift) & np.uint8(15) | (first >> np.uint8(6)) << np.uint8(4)
        return np.concatenate([first & np.uint8(63), high], axis=-1)

    def put(self, blocks: np.ndarray, codes: np.ndarray) -> None:
        first, last = codes[:, :4], codes[:, 4:]
        blocks[:, self._field] = first | (last >> np.uint8(4)) << np.uint8(6)
        blocks[:, 12:16] |= (last & np.uint8(15)) << self._shift


class Trits(Codes):
    """The codes of TQ1_0, digits of base 3: a byte is ceil(256 / 243 * number), so its first digit is in 3 * byte >> 8.

    13 of 256 bytes are no such number; they are read as the one below. The last 4 bytes of a block have four digits.
    """

    bits = 2
    _FIELDS = ((slice(0, 32), 5), (slice(32, 48), 5), (slice(48, 52), 4))
    _POWERS = np.array([1, 3, 9, 27, 81], np.uint8)

    def get(self, blocks: np.ndarray) -> np.ndarray:
        scaled = [
            (blocks[:, None, field] * self._POWERS[:digits, None]).reshape(len(blocks), -1) for field, digits in self._FIELDS
        ]
        return (np.concatenate(scaled, axis=-1).astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)

    def put(self, blocks: np.ndarray, codes: np.ndarray) -> None:
        at = 0
        for field, digits in self._FIELDS:
            count = (field.stop - field.start) * digits
            of = codes[:, at : at + count].reshape(len(codes), digits, -1)
            number = (of * self._POWERS[::-1][:digits, None]).sum(axis=1, dtype=np.uint16)
            blocks[:, field] = (number * np.uint16(256) + np.uint16(242)) // np.uint16(243)
            at += count


def _unpacked(blocks: np.ndarray, plane: Plane, at: int) -> np.ndarray:
    """The bits of a plane, those of a code in each byte from bit `at` on. Works on whole words, of which NumPy shifts more."""
    field = np.ascontiguousarray(blocks[:, plane.field])
    if plane.bits == 8:
        return field
    if plane.bits == plane.run == 1:
        return np.unpackbits(field, axis=-1, bitorder="little") << np.uint8(at)
    words = field.view(_WORDS[min(field.shape[-1] & -field.shape[-1], 8)])
    mask = words.dtype.type(_mask(plane.bits, 8) & np.iinfo(words.dtype).max)
    codes = np.empty((len(blocks), field.shape[-1] // plane.run, 8 // plane.bits, plane.run), np.uint8)
    for n, shift in enumerate(range(0, 8, plane.bits)):
        bits = (words >> words.dtype.type(shift)) & mask
        codes[:, :, n] = (bits << words.dtype.type(at)).view(np.uint8).reshape(len(blocks), -1, plane.run)
    return codes.reshape(len(blocks), -1)


def _of_plane(codes: np.ndarray, plane: Plane, at: int) -> np.ndarray:
    """The field of a plane: the inverse of `_unpacked`. codes: one a byte, 8 or a multiple of 8 in a block."""
    if plane.bits == 8:
        return codes
    bits = (codes.view(np.uint64) >> np.uint64(at)) & _mask(plane.bits, 8)
    if plane.bits == plane.run == 1:
        return np.packbits(bits.view(np.uint8), axis=-1, bitorder="little")
    words = bits.view(_WORDS[min(plane.run & -plane.run, 8)])
    runs = words.reshape(len(codes), -1, 8 // plane.bits, plane.run // words.itemsize)
    field = np.zeros_like(runs[:, :, 0])
    for n, shift in enumerate(range(0, 8, plane.bits)):
        field |= runs[:, :, n] << words.dtype.type(shift)
    return field.view(np.uint8).reshape(len(codes), -1)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (n, length), one a byte, as a stream of `bits` bits each: 8 at a time, in a word of 64 bits."""
    if bits == 8:
        return codes
    words = np.ascontiguousarray(codes).view(np.uint64)
    for lane in (16, 32, 64):  # two neighbours become one of twice the width
        width = bits * lane // 16
        high = (words >> np.uint64(lane // 2 - width)) & _mask(width, lane, width)
        words = (words & _mask(width, lane)) | high
    return words.view(np.uint8).reshape(len(codes), -1, 8)[:, :, :bits].reshape(len(codes), -1)


def _spread(data: np.ndarray, bits: int) -> np.ndarray:
    """A stream of codes, one a byte: the inverse of `_packed`."""
    if bits == 8:
        return data
    groups = data.reshape(len(data), -1, bits)
    whole = np.zeros((*groups.shape[:2], 8), np.uint8)
    whole[:, :, :bits] = groups
    words = whole.view(np.uint64)[:, :, 0]
    for lane in (64, 32, 16):  # one becomes two neighbours of half the width
        width = bits * lane // 16
        high = (words >> np.uint64(width)) & _mask(width, lane)
        words = (words & _mask(width, lane)) | high << np.uint64(lane // 2)
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(data), -1)


@cache
def _mask(width: int, lane: int, at: int = 0) -> np.uint64:
    """`width` ones from bit `at` on, in each lane of a word of 64 bits."""
    return np.uint64(sum((1 << width) - 1 << at << start for start in range(0, 64, lane)))
