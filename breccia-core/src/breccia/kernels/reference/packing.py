"""Packing: codes of fewer than 8 bits as bytes."""

from __future__ import annotations

from functools import reduce

from ...arrays.ops import Array, Ops
from ...codecs import Codec
from ...tensors.grids import packing


def pack(ops: Ops, codes: Array, codec: Codec) -> Array:
    """Codes, one per int32, to the storage of `codec`, groups of whole bytes along the last axis."""
    count, size = packing(codec)
    dtype = ops.storage(codec)
    if count == 1:
        return ops.store(codes, dtype)
    length = codes.shape[-1]
    groups = -(-length // count)
    if groups * count != length:
        codes = ops.pad(codes, (0,) * (len(codes.shape) - 1) + (groups * count - length,))
    codes = ops.reshape(codes, (*codes.shape[:-1], groups, count))
    if size <= _WORD:
        word = ops.pack_bits(codes, codec.bits)
        if size == 1:
            return ops.store(word, dtype)
        bytes_ = [word >> (8 * i) for i in range(size)]
    else:
        bytes_ = _bytes(codes, codec.bits, size)
    parts = [ops.reshape(byte & 0xFF, (*byte.shape, 1)) for byte in bytes_]
    return ops.store(ops.reshape(ops.concat(parts), (*codes.shape[:-2], groups * size)), dtype)


def unpack(ops: Ops, data: Array, codec: Codec, length: int) -> Array:
    """Inverse of `pack`: int32 codes of logical `length` along the last axis."""
    count, size = packing(codec)
    stored = ops.load(data)
    if count == 1:
        return stored
    groups = stored.shape[-1] // size
    bytes_ = ops.reshape(stored, (*stored.shape[:-1], groups, size))
    if size <= _WORD:
        word = bytes_[..., 0]
        for i in range(1, size):
            word = word | (bytes_[..., i] << (8 * i))
        codes = ops.unpack_bits(word, codec.bits, count)
    else:
        each = _codes(bytes_, codec.bits, count)
        codes = ops.concat([ops.reshape(code, (*code.shape, 1)) for code in each])
    return ops.reshape(codes, (*stored.shape[:-1], groups * count))[..., :length]


#: Bytes of a packing group that fit one int32; groups of 5- and 7-bit codes are longer.
_WORD = 4


def _bytes(codes: Array, bits: int, size: int) -> list[Array]:
    """The `size` bytes of a group of codes along the last axis, each in the low 8 bits of an int32; upper bits vary."""
    found: list[Array] = []
    for start in range(0, 8 * size, 8):
        reaching = range(start // bits, (start + 7) // bits + 1)
        shifts = [i * bits - start for i in reaching]
        moved = [codes[..., i] << s if s >= 0 else codes[..., i] >> -s for i, s in zip(reaching, shifts, strict=True)]
        found.append(reduce(lambda a, b: a | b, moved))
    return found


def _codes(bytes_: Array, bits: int, count: int) -> list[Array]:
    """Inverse of `_bytes`, for bytes along the last axis: each of the `count` codes as an int32."""
    found: list[Array] = []
    for start in range(0, bits * count, bits):
        byte, shift = divmod(start, 8)
        word = bytes_[..., byte]
        if shift + bits > 8:
            word = word | (bytes_[..., byte + 1] << 8)
        found.append((word >> shift) & ((1 << bits) - 1))
    return found
