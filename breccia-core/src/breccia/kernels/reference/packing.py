"""Packing: codes of fewer than 8 bits in whole bytes."""

from __future__ import annotations

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
    word = ops.joined(ops.reshape(codes, (*codes.shape[:-1], groups, count)), codec.bits)
    if size == 1:
        return ops.store(word, dtype)
    parts = [ops.reshape((word >> (8 * i)) & 0xFF, (*word.shape, 1)) for i in range(size)]
    return ops.store(ops.reshape(ops.concat(parts), (*word.shape[:-1], groups * size)), dtype)


def unpack(ops: Ops, data: Array, codec: Codec, length: int) -> Array:
    """Inverse of `pack`: int32 codes of logical `length` along the last axis."""
    count, size = packing(codec)
    stored = ops.load(data)
    if count == 1:
        return stored
    groups = stored.shape[-1] // size
    bytes_ = ops.reshape(stored, (*stored.shape[:-1], groups, size))
    word = bytes_[..., 0]
    for i in range(1, size):
        word = word | (bytes_[..., i] << (8 * i))
    codes = ops.reshape(ops.parted(word, codec.bits, count), (*word.shape[:-1], groups * count))
    return codes[..., :length]
