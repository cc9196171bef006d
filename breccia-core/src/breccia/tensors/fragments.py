"""Storage "mma_16x128": codes in the order in which tensor cores take them, with their scales, in one buffer.

A chunk is 64 rows by 128 columns: four slices of 16 rows, each `[codes][scales][zero-points]`. Codes lie in the order of the
A operand of `mma.m16n8k16` (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"): lane 4 g + t holds rows
g and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each 16 columns. So one 16-byte load of a lane is what it needs of 64
columns (4-bit codes) or 32 (8-bit codes), and one copy moves codes and scales together.

- 4-bit integers: a lane's word of 16 columns has at bit 16 (column % 2) + 4 i the code of row g + 8 (i % 2) and
  column half i // 2.
- E2M1: the same 16 bits hold magnitudes at bits 6, 3, 0, 9 and signs at bits 15, 12, 13, 14 for i = 0 ... 3: each magnitude is
  one shift away from the exponent of a 16-bit float.
- 8-bit codes: a lane's 16 bytes are (16 columns, column half, column % 2, row half).
- Scales, then zero-points: (row g, group of the chunk, row half). Scales of larger blocks are repeated. E4M3 scales of E2M1
  codes are renamed (see `UE5M3_OF`), so that one multiply-add makes a 16-bit float of them.

Stored: data (..., row blocks, chunks, bytes of a chunk), padded with zeros; scale (..., row blocks, 2): flags, and for
minifloat codes with E8M0 scales the largest scale. Flags say which 64 rows hold values that a kernel's fast decoding does not
take, for activations in bfloat16 (bit 0) and float16 (bit 1), so that no host has to look. Bit 2: values that may be subnormal,
or less than that, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..codecs import E2M1, E4M3, Integer, Minifloat, PowerOfTwo
from ..formats import TENSOR

if TYPE_CHECKING:
    from ..arrays.ops import Array, Ops
    from .storage import Parts, Plain

#: Rows and columns of a chunk, and rows of its slices.
ROWS, COLUMNS, TILE = 64, 128, 16
#: Columns that share a scale within a chunk; longer blocks are whole chunks.
GROUPS = (16, 32, 64, 128)
#: Flags of 64 rows: the fast decoding does not take them.
SLOW_BF16, SLOW_F16 = 1, 2
#: A flag of 64 rows: bfloat16 may not hold a value as a normal number.
SUBNORMAL = 4
#: Bits of magnitude and sign of the E2M1 code of index i in its 16 bits.
_MAGNITUDES, _SIGNS = (6, 3, 0, 9), (15, 12, 13, 14)
#: How columns of a chunk split, 4-bit codes: (half, 16 columns, column half, t, column % 2); 8-bit codes: (quarter, ...).
_COLUMNS = {4: (2, 4, 2, 4, 2), 8: (4, 2, 2, 4, 2)}
#: The axes (row tile, row half, g, chunk, *columns) in the order of memory: chunk, row tile, half or quarter, g, t, ...
_ORDER = {4: (3, 0, 4, 2, 7, 5, 8, 6, 1), 8: (3, 0, 4, 2, 7, 5, 6, 8, 1)}
#: Codes that are rearranged at a time: each takes some 20 bytes meanwhile.
_AT_ONCE = 1 << 25
#: Limits of fast decoding of E8M0 scales with E2M1 codes. A product of a code and a scale relative to the largest one is exact
#: in float16 down to 2^-24; in bfloat16 it is kept so large that no product with an activation is lost.
_SPAN_BF16, _SPAN_F16, _LARGEST = 100, 24, 157
#: Limits of fast decoding of E8M0 scales with E4M3 and E5M2 codes in bfloat16. What FP32 sums may lose of a product is below
#: 2^-149 times the largest scale, and with scales up to 2^23 below 2^-126, which the bound of products allows.
_SPAN_FP8, _LARGEST_FP8 = 90, 150
#: The least scale whose products with all codes but 0 are normal numbers of bfloat16: E5M2 has codes down to 2^-16.
_LEAST = 17


def _renamed() -> tuple[int, ...]:
    """UE5M3_OF."""
    table = [0] * 256
    for code in range(1, 127):
        exponent, mantissa = code >> 3, code & 7
        if exponent:
            table[code] = code + 24
        else:  # mantissa * 2^-9
            top = mantissa.bit_length() - 1
            table[code] = (top + 1) << 3 | ((mantissa << (3 - top)) & 7)
    table[0], table[127] = 176, 169
    positive = {table[code] for code in range(128)}
    table[128:] = [code for code in range(256) if code not in positive]
    return tuple(table)


#: E4M3 codes as unsigned floats of 5 exponent bits (bias 10) and 3 mantissa bits: subnormals become normal. Zero is 176, NaN
#: 169: 16 times these plus 0x7500 are -0 and NaN in bfloat16; 128 times these plus 0x2800 in float16. The codes of negative
#: numbers take the other bytes in order; their rows are flagged.
UE5M3_OF = _renamed()
_E4M3_OF = tuple(UE5M3_OF.index(code) for code in range(256))


class _Shape(NamedTuple):
    """Sizes of a stored tensor. group: columns of a scale within a chunk; groups: scales of a row of a chunk."""

    bits: int
    blocks: int
    chunks: int
    group: int
    groups: int

    @staticmethod
    def of(plain: Plain) -> _Shape:
        rows, columns = plain.shape[-2:]
        width = plain.block[1]
        group = width if width is not None and width < COLUMNS else COLUMNS
        return _Shape(plain.format.element.bits, -(-rows // ROWS), -(-columns // COLUMNS), group, COLUMNS // group)


def accepts(plain: Plain) -> str | None:
    """Why codes and scales have no order here, or None."""
    element, scale, width = plain.format.element, plain.format.scale.codec, plain.block[1]
    if not (element.bits == 8 or element == E2M1 or (element.bits == 4 and isinstance(element, Integer))):
        return f"its codes are {element.name}, and the order is one of 4-bit integers, E2M1 and 8-bit codes"
    if width is not None and width not in GROUPS and width % COLUMNS:
        return f"its blocks have {width} columns; the order needs 16, 32, 64 or a multiple of 128"
    if plain.block == TENSOR and len(plain.shape) > 2:
        return "it has one scale for each matrix"
    if plain.format.offset == "bias":
        return "it has a bias for each block"
    if scale.bits not in (8, 16, 32):
        return f"its scales are {scale.name}"
    return "it is empty" if 0 in plain.shape else None


def in_fragments(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Codes in the order of operand A of `mma.m16n8k16`, with their scales behind them, for each 16 rows by 128 columns; four
    of these slices are a chunk, zeros as padding. Stored (..., row blocks, chunks, bytes of a chunk); `scale` has flags of each
    64 rows."""
    chunks = [_chunks(ops, parts, plain, rows) for rows in _pieces(plain)]
    data = [piece for piece, _ in chunks]
    flags = [piece for _, piece in chunks]
    stored = {**parts, "data": ops.concat(data, -3), "scale": ops.concat(flags, -2)}
    if "zero_point" in parts:  # an empty array keeps its dtype
        words = ops.reshape(ops.load(parts["zero_point"]), (-1,))[:0]
        stored["zero_point"] = ops.store(words, _dtype(parts["zero_point"]))
    return stored


def out_of_fragments(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Inverse of `in_fragments`."""
    shape, plain_parts = _Shape.of(plain), dict(parts)
    data, lead, columns = parts["data"], plain.shape[:-2], plain.shape[-1]
    dtypes = {"scale": plain.dtypes["scale"]}
    if "zero_point" in parts:
        dtypes["zero_point"] = _dtype(parts["zero_point"])
    codes: list[Array] = []
    words: dict[str, list[Array]] = {name: [] for name in dtypes}
    for rows in _pieces(plain):
        first, count = rows.start // ROWS, -(-len(rows) // ROWS)
        chunks = ops.load(data[..., first : first + count, :, :])
        chunks = ops.reshape(chunks, (*lead, count, shape.chunks, 4, -1))
        end = ROWS * COLUMNS * shape.bits // 8 // 4
        codes.append(_codes_of(ops, chunks[..., :end], shape, count, plain)[..., : len(rows), :])
        for name, dtype in dtypes.items():
            size = _itemsize(dtype)
            start, end = end, end + TILE * shape.groups * size
            words[name].append(_words_of(ops, chunks[..., start:end], shape, count, size)[..., : len(rows), :])
    length = -(-columns * shape.bits // 8)
    plain_parts["data"] = ops.store(ops.concat(codes, -2)[..., :length], plain.dtypes["data"])
    for name, dtype in dtypes.items():
        word = ops.concat(words[name], -2)
        if name == "scale" and _renames(plain):
            word = ops.take(_E4M3_OF, word)
        plain_parts[name] = ops.store(_one_each(ops, word, plain), dtype)
    return plain_parts


# -- codes -----------------------------------------------------------------------------------------------------------


def _pieces(plain: Plain) -> Iterator[range]:
    """Rows that are rearranged together, in whole chunks."""
    rows, columns = plain.shape[-2:]
    lead = 1
    for n in plain.shape[:-2]:
        lead *= max(1, n)
    step = max(1, _AT_ONCE // (ROWS * columns * lead)) * ROWS
    return (range(start, min(rows, start + step)) for start in range(0, rows, step))


def _chunks(ops: Ops, parts: Parts, plain: Plain, rows: range) -> tuple[Array, Array]:
    """(the chunks of these rows, their flags)."""
    shape, lead = _Shape.of(plain), plain.shape[:-2]
    count = -(-len(rows) // ROWS)
    stored = ops.load(parts["data"][..., rows.start : rows.stop, :])
    codes = ops.reshape(ops.unpack_bits(stored, 4, 2), (*stored.shape[:-1], -1)) if shape.bits == 4 else stored
    codes = _padded(ops, codes, count * ROWS, shape.chunks * COLUMNS)
    scale = ops.load(parts["scale"])
    spread = _padded(ops, _spread(ops, scale, plain, rows), count * ROWS, shape.chunks * shape.groups)
    flags = _flags(ops, codes, spread, plain, count)
    if _renames(plain):
        spread = ops.take(UE5M3_OF, spread)
    pieces = [_in_order(ops, codes, shape, count, plain), _in_slices(ops, spread, shape, count, ops.itemsize(parts["scale"]))]
    if "zero_point" in parts:
        points = _padded(
            ops, _spread(ops, ops.load(parts["zero_point"]), plain, rows), count * ROWS, shape.chunks * shape.groups
        )
        pieces.append(_in_slices(ops, points, shape, count, ops.itemsize(parts["zero_point"])))
    joined = ops.concat(pieces)
    return ops.store(ops.reshape(joined, (*lead, count, shape.chunks, -1)), "uint8"), flags


def _in_order(ops: Ops, codes: Array, shape: _Shape, count: int, plain: Plain) -> Array:
    """Codes (..., rows, columns) as bytes (..., row blocks, chunks, slices, bytes)."""
    lead, bits = codes.shape[:-2], shape.bits
    n = len(lead)
    split = ops.reshape(codes, (*lead, count, 4, 2, 8, shape.chunks, *_COLUMNS[bits]))
    moved = ops.transpose(split, (*range(n + 1), *(n + 1 + axis for axis in _ORDER[bits])))
    if bits == 8:
        return ops.reshape(moved, (*lead, count, shape.chunks, 4, -1))
    four = ops.reshape(moved, (*lead, count, shape.chunks, 4, -1, 4))
    half = None
    for i in range(4):
        code = four[..., i]
        e2m1 = plain.format.element == E2M1
        code = ((code & 7) << _MAGNITUDES[i] | (code >> 3) << _SIGNS[i]) if e2m1 else code << (4 * i)
        half = code if half is None else half | code
    assert half is not None
    return ops.reshape(ops.unpack_bits(half, 8, 2), (*lead, count, shape.chunks, 4, -1))


def _codes_of(ops: Ops, chunks: Array, shape: _Shape, count: int, plain: Plain) -> Array:
    """Inverse of `_in_order`: packed codes (..., rows, bytes)."""
    lead, bits = chunks.shape[:-4], shape.bits
    n = len(lead)
    if bits == 4:
        pairs = ops.reshape(chunks, (*lead, count, shape.chunks, 4, -1, 2))
        half = pairs[..., 0] | pairs[..., 1] << 8
        four: list[Array] = []
        for i in range(4):
            if plain.format.element == E2M1:
                code = ((half >> _MAGNITUDES[i]) & 7) | ((half >> _SIGNS[i]) & 1) << 3
            else:
                code = (half >> (4 * i)) & 15
            four.append(ops.reshape(code, (*code.shape, 1)))
        chunks = ops.concat(four)
    lengths = (4, 2, 8, shape.chunks, *_COLUMNS[bits])
    moved = ops.reshape(chunks, (*lead, count, *(lengths[axis] for axis in _ORDER[bits])))
    inverse = (n + 1 + _ORDER[bits].index(axis) for axis in range(len(lengths)))
    codes = ops.transpose(moved, (*range(n + 1), *inverse))
    codes = ops.reshape(codes, (*lead, count * ROWS, shape.chunks * COLUMNS))
    return ops.pack_bits(ops.reshape(codes, (*codes.shape[:-1], -1, 2)), 4) if bits == 4 else codes


def _in_slices(ops: Ops, words: Array, shape: _Shape, count: int, size: int) -> Array:
    """Scales or zero-points (..., rows, groups) as bytes (..., row blocks, chunks, slices, bytes)."""
    lead = words.shape[:-2]
    n = len(lead)
    split = ops.reshape(words, (*lead, count, 4, 2, 8, shape.chunks, shape.groups))
    moved = ops.transpose(split, (*range(n + 1), n + 4, n + 1, n + 3, n + 5, n + 2))
    moved = ops.reshape(moved, (*lead, count, shape.chunks, 4, -1))
    if size == 1:
        return moved
    parts = [ops.reshape((moved >> (8 * i)) & 0xFF, (*moved.shape, 1)) for i in range(size)]
    return ops.reshape(ops.concat(parts), (*moved.shape[:-1], -1))


def _words_of(ops: Ops, chunks: Array, shape: _Shape, count: int, size: int) -> Array:
    """Inverse of `_in_slices`."""
    lead = chunks.shape[:-4]
    n = len(lead)
    bytes_ = ops.reshape(chunks, (*lead, count, shape.chunks, 4, 8, shape.groups, 2, size))
    word = bytes_[..., 0]
    for i in range(1, size):
        word = word | (bytes_[..., i] << (8 * i))
    moved = ops.transpose(word, (*range(n + 1), n + 2, n + 5, n + 3, n + 1, n + 4))
    return ops.reshape(moved, (*lead, count * ROWS, shape.chunks * shape.groups))


# -- scales ----------------------------------------------------------------------------------------------------------


def _spread(ops: Ops, words: Array, plain: Plain, rows: range) -> Array:
    """Scales or zero-points of these rows: (..., rows, groups), repeated for blocks of several rows or chunks."""
    tall, width = plain.block
    chunks = -(-plain.shape[-1] // COLUMNS)
    if len(words.shape) < 2:  # of the whole tensor
        words = ops.reshape(words, (1, 1))
    if tall == 1:
        words = words[..., rows.start : rows.stop, :]
    else:
        words = ops.gather(words, tuple(0 if tall is None else r // tall for r in rows), -2)
    if width is not None and width <= COLUMNS:
        return words
    return ops.gather(words, tuple(0 if width is None else c * COLUMNS // width for c in range(chunks)), -1)


def _one_each(ops: Ops, words: Array, plain: Plain) -> Array:
    """Inverse of `_spread`: of all rows."""
    (tall, width), (rows, columns) = plain.block, plain.shape[-2:]
    if plain.block == TENSOR:
        return ops.reshape(words[..., :1, :1], ())
    down = tuple(range(0, rows, rows if tall is None else tall))
    if tall != 1:
        words = ops.gather(words, down, -2)
    if width is not None and width <= COLUMNS:
        return words[..., : -(-columns // width)]
    return ops.gather(words, tuple(range(0, words.shape[-1], words.shape[-1] if width is None else width // COLUMNS)), -1)


def _flags(ops: Ops, codes: Array, scale: Array, plain: Plain, count: int) -> Array:
    """Flags and the largest scale of each 64 rows: uint8 (..., row blocks, 2)."""
    element, codec, shape = plain.format.element, plain.format.scale.codec, _Shape.of(plain)
    lead = codes.shape[:-2]
    n = len(lead)

    def most(numbers: Array) -> Array:
        """The largest of non-negative numbers in each 64 rows: (..., row blocks)."""
        of_rows = ops.reshape(numbers, (*lead, count, -1))
        return ops.reshape(ops.amax(of_rows, (n + 1,)), (*lead, count))

    def any_of(condition: Array) -> Array:
        return most(ops.where(condition, 1, 0))

    both = SLOW_BF16 | SLOW_F16
    flags = any_of((codes & 0) != 0)
    base = flags
    if isinstance(element, Minifloat) and element.bits == 8:
        special = codes == element.nan if element.fnuz else (codes & element.magnitude_mask) > element.highest
        flags = any_of(special) * both
    if isinstance(codec, PowerOfTwo):
        nan = codec.need_nan()
        if isinstance(element, Minifloat):
            base = most(ops.where(scale == nan, 0, scale))
            groups = ops.reshape(codes & element.magnitude_mask, (*scale.shape, shape.group))
            used = ops.reshape(ops.amax(groups, (len(lead) + 2,)), tuple(scale.shape))
            # Blocks of zeros may have any scale but NaN.
            apart = ops.reshape(base, (*lead, count, 1)) - ops.reshape(ops.where(used == 0, 255, scale), (*lead, count, -1))
            far = ops.reshape(ops.amax(ops.maximum(apart, 0), (n + 1,)), (*lead, count))
            if element == E2M1:
                flags = flags | ops.where((far > _SPAN_BF16) | (base > _LARGEST), both, ops.where(far > _SPAN_F16, SLOW_F16, 0))
            else:
                flags = flags | ops.where((far > _SPAN_FP8) | (base > _LARGEST_FP8), SLOW_BF16, 0)
            small = most(ops.where(used == 0, 0, 255 - scale)) > 255 - _LEAST
            flags = flags | ops.where(small, SUBNORMAL, 0)
        flags = flags | any_of(scale == nan) * both
    elif element == E2M1 and codec == E4M3:
        flags = flags | any_of(scale > 127) * both
    elif isinstance(codec, Minifloat) and codec.bits > 8:
        top = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[codec.name]
        flags = flags | any_of((scale & top) == top) * both
    pair = [ops.reshape(part, (*lead, count, 1)) for part in (flags, base)]
    return ops.store(ops.concat(pair), "uint8")


def _renames(plain: Plain) -> bool:
    return plain.format.element == E2M1 and plain.format.scale.codec == E4M3


def _padded(ops: Ops, words: Array, rows: int, columns: int) -> Array:
    return ops.pad(words, (*(0 for _ in words.shape[:-2]), rows - words.shape[-2], columns - words.shape[-1]))


def _dtype(part: Array) -> str:
    from ..arrays.frameworks import dtype_name

    return dtype_name(part)


def _itemsize(dtype: str) -> int:
    return 1 if dtype.startswith("float8") else int("".join(filter(str.isdigit, dtype))) // 8
