"""Packing: codes of fewer than 8 bits as bytes."""

from __future__ import annotations

from functools import reduce

from ...arrays.ops import Array, Ops
from ...codecs import Codec
from ...tensors.grids import packing


def pack(ops: Ops, codes: Array, codec: Codec, axis: int = -1) -> Array:
    """Codes, one per int32, to the storage of `codec`, groups of whole bytes along the axis, the last one or the one before."""
    count, size = packing(codec)
    dtype = ops.storage(codec)
    if count == 1:
        return ops.store(codes, dtype)
    length = codes.shape[axis]
    groups = -(-length // count)
    if groups * count != length:
        codes = ops.pad(codes, _at(axis, groups * count - length, (0,) * len(codes.shape)))
    codes = _parted(ops, codes, count, axis)
    if size <= _WORD:
        word = ops.pack_bits(codes, codec.bits) if axis == -1 else _word(ops.items(codes, axis), codec.bits)
        if size == 1:
            return ops.store(word, dtype)
        bytes_ = [word >> (8 * i) for i in range(size)]
    else:
        bytes_ = _bytes(ops.items(codes, axis), codec.bits, size)
    return ops.store(_interleaved(ops, [byte & 0xFF for byte in bytes_], axis), dtype)


def unpack(ops: Ops, data: Array, codec: Codec, length: int, axis: int = -1) -> Array:
    """Inverse of `pack`: int32 codes of logical `length` along the axis."""
    count, size = packing(codec)
    stored = ops.load(data)
    if count == 1:
        return stored
    bytes_ = ops.items(_parted(ops, stored, size, axis), axis)
    if size <= _WORD:
        word = _word(bytes_, 8)
        if axis == -1:
            grouped_codes = ops.unpack_bits(word, codec.bits, count)
            codes = ops.reshape(grouped_codes, (*stored.shape[:-1], grouped_codes.shape[-2] * count))
        else:
            mask = (1 << codec.bits) - 1
            codes = _interleaved(ops, [(word >> (i * codec.bits)) & mask for i in range(count)], axis)
    else:
        codes = _interleaved(ops, _codes(bytes_, codec.bits, count), axis)
    return codes[..., :length] if axis == -1 else codes[..., :length, :]


#: Bytes of a packing group that fit one int32; groups of 5- and 7-bit codes are longer.
_WORD = 4


def _at(axis: int, n: int, of: tuple[int, ...]) -> tuple[int, ...]:
    """`of` with `n` at the axis."""
    return (*of[:-1], n) if axis == -1 else (*of[:-2], n, of[-1])


def _parted(ops: Ops, a: Array, count: int, axis: int) -> Array:
    """The axis as groups of `count` items, which get the axis."""
    groups = a.shape[axis] // count
    return ops.reshape(a, (*a.shape[:-1], groups, count) if axis == -1 else (*a.shape[:-2], groups, count, a.shape[-1]))


def _interleaved(ops: Ops, items: list[Array], axis: int) -> Array:
    """Inverse of `Ops.items`, with groups one after the other along the axis."""
    shape = items[0].shape
    single = (*shape, 1) if axis == -1 else (*shape[:-1], 1, shape[-1])
    joined = ops.concat([ops.reshape(item, single) for item in items], axis)
    return ops.reshape(joined, _at(axis, shape[axis] * len(items), tuple(shape)))


def _word(items: list[Array], bits: int) -> Array:
    """The items as bits of one int32, the first in the lowest bits."""
    return reduce(lambda a, b: a | b, [item << (i * bits) if i else item for i, item in enumerate(items)])


def _bytes(codes: list[Array], bits: int, size: int) -> list[Array]:
    """The `size` bytes of groups of codes, each in the low 8 bits of an int32; upper bits vary."""
    bytes_: list[Array] = []
    for start in range(0, 8 * size, 8):
        reaching = range(start // bits, (start + 7) // bits + 1)
        shifts = [i * bits - start for i in reaching]
        moved = [codes[i] << s if s >= 0 else codes[i] >> -s for i, s in zip(reaching, shifts, strict=True)]
        bytes_.append(reduce(lambda a, b: a | b, moved))
    return bytes_


def _codes(bytes_: list[Array], bits: int, count: int) -> list[Array]:
    """Inverse of `_bytes`: each of the `count` codes as an int32."""
    codes: list[Array] = []
    for start in range(0, bits * count, bits):
        byte, shift = divmod(start, 8)
        word = bytes_[byte]
        if shift + bits > 8:
            word = word | (bytes_[byte + 1] << 8)
        codes.append((word >> shift) & ((1 << bits) - 1))
    return codes
