"""Scale records: several levels of scales, or of biases, in one component of bytes (docs/spec/numerics.md, section 2).

Arrays here have K last: components of shape (..., M, records * bytes), and one array for each level, of shape (..., M, blocks).
"""

from __future__ import annotations

from ...arrays.ops import Array, Ops
from ...codecs import Codec
from ...formats import Format, Level, Record
from .packing import pack, unpack


def read_levels(ops: Ops, stored: Array, record: Record) -> list[Array]:
    """The codes of each level: int32."""
    lead, records = tuple(stored.shape[:-1]), stored.shape[-1] // record.nbytes
    rows = ops.reshape(stored, (*lead, records, record.nbytes))
    codes: list[Array] = []
    start = 0
    for level, count, size in zip(record.levels, record.counts, record.sizes, strict=True):
        part = rows[..., start : start + size]
        start += size
        if level.codec.bits <= 8:
            whole = size * 8 // level.codec.bits  # packing groups may be longer than the codes
            each = unpack(ops, ops.reshape(part, (*lead, records * size)), level.codec, records * whole)
            level_codes = ops.reshape(each, (*lead, records, whole))[..., :count]
        else:
            of_code = ops.load(ops.reshape(part, (*lead, records, count, level.codec.bits // 8)))
            level_codes = of_code[..., 0]
            for byte in range(1, level.codec.bits // 8):
                level_codes = level_codes | (of_code[..., byte] << (8 * byte))
        codes.append(ops.reshape(level_codes, (*lead, records * count)))
    return codes


def write_levels(ops: Ops, codes: list[Array], record: Record) -> Array:
    """Inverse of `read_levels`: uint8. The last record is completed by codes of 0."""
    lead, records = tuple(codes[0].shape[:-1]), codes[0].shape[-1]
    parts: list[Array] = []
    for level, count, size, of_level in zip(record.levels, record.counts, record.sizes, codes, strict=True):
        missing = records * count - of_level.shape[-1]
        whole = ops.pad(of_level, (0,) * len(lead) + (missing,)) if missing else of_level
        whole = ops.reshape(whole, (*lead, records, count))
        if level.codec.bits == 8:
            parts.append(ops.store(whole, "uint8"))
        elif level.codec.bits < 8:
            parts.append(ops.reshape(pack(ops, whole, level.codec), (*lead, records, size)))
        else:
            bytes_ = [
                ops.reshape(whole >> (8 * byte) & 0xFF, (*lead, records, count, 1)) for byte in range(level.codec.bits // 8)
            ]
            parts.append(ops.store(ops.reshape(ops.concat(bytes_, -1), (*lead, records, size)), "uint8"))
    return ops.reshape(ops.concat(parts, -1), (*lead, records * record.nbytes))


def effective(ops: Ops, codes: list[Array], record: Record, blocks: int) -> Array:
    """The scales of `blocks` finest blocks, FP32: fl(fl(level 0 * level 1) * level 2), and so on."""
    coarse, *finer = zip(record.levels, record.counts, codes, strict=True)
    level, count, of_level = coarse
    scale: Array = None
    for fine, more, fine_codes in finer:
        values = value_of(ops, fine.codec, fine_codes)
        if scale is None:  # an E8M0 scale may be an FP32 subnormal, which `multiply` avoids
            outer = repeated(ops, of_level, more // count)[..., : values.shape[-1]]
            scale = level.codec.multiply(ops, values, stored_of(ops, level.codec, outer))
        else:
            scale = repeated(ops, scale, more // count)[..., : values.shape[-1]] * values
        count = more
    if scale is None:
        scale = value_of(ops, level.codec, of_level)
    return scale[..., :blocks]


def repeated(ops: Ops, a: Array, times: int) -> Array:
    """Each item of the last axis, `times` times."""
    if times == 1:
        return a
    wide = ops.broadcast(ops.reshape(a, (*a.shape, 1)), (*a.shape, times))
    return ops.reshape(wide, (*a.shape[:-1], a.shape[-1] * times))


def value_of(ops: Ops, codec: Codec, codes: Array) -> Array:
    """FP32 values of int32 codes."""
    return codec.decode(ops, codes) if codec.bits <= 8 else codec.read(ops, stored_of(ops, codec, codes))


def stored_of(ops: Ops, codec: Codec, codes: Array) -> Array:
    """int32 codes, one per item of the dtype that scales of the codec have."""
    return ops.store(codes, ops.storage(codec))


def coarser(ops: Ops, magnitudes: Array, level: Level, finest: Level) -> Array:
    """The largest of int32 `magnitudes` of the finest blocks in each block of a coarser level."""
    inner, outer = finest.block[1], level.block[1]
    assert inner is not None and outer is not None
    times = outer // inner
    records = -(-magnitudes.shape[-1] // times)
    missing = records * times - magnitudes.shape[-1]
    whole = ops.pad(magnitudes, (0,) * (len(magnitudes.shape) - 1) + (missing,)) if missing else magnitudes
    largest = ops.amax(ops.reshape(whole, (*whole.shape[:-1], records, times)), (-1,))
    return ops.reshape(largest, (*whole.shape[:-1], records))


def scale_values(ops: Ops, stored: Array, fmt: Format) -> Array:
    """FP32 scales of blocks from a component `scale` with K last; of several levels, those of the finest blocks."""
    record = fmt.scale_record
    if record is None:
        return fmt.scale.codec.read(ops, stored)
    codes = read_levels(ops, stored, record)
    return effective(ops, codes, record, codes[-1].shape[-1])
