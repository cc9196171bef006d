"""Pieces of an array: whole blocks that fit the buffers."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.frameworks import FLOATS, dtype_name
from ...arrays.ops import Array
from ...codecs import Codec
from ...formats import TENSOR, Block
from ...layouts import Shape
from ...tensors.grids import packed_length
from ..plans import alone
from ..threads import spread
from .workspace import F4, U2, Buffers, chunk_size, return_buffers, take_buffers, thread_count

#: The most small pieces that take no longer than a copy of all of them.
FEW = 4


def block_sides(block: Block, shape: Shape) -> tuple[int, int]:
    """(m, k) of `block` over a K-last shape of at least two axes; m is at most the number of rows."""
    return min(block[0] or shape[-2], shape[-2]), block[1] or shape[-1]


def rounded_up(length: int, group: int) -> int:
    """`length` rounded up to whole groups."""
    return -(-length // group) * group


def unit_of(k: int, length: int, count: int) -> int:
    """Elements along K that form whole blocks and packing groups; one padded block where K is at most one block."""
    return math.lcm(k, count) if k < length else rounded_up(length, count)


@dataclass(slots=True)
class Piece:
    """One matrix of the tensor, rows by K, with views of its components; a flat one has all its blocks in one row.

    values are high-precision numbers, data packed codes, and the others one item per block, None if absent.
    lead: index of the matrix among those with their own per-tensor scale. limit: elements of a chunk.
    first: the number of its first element in C order, K last.
    """

    values: Array
    data: Array
    scale: Array | None
    zero_point: Array | None
    supplied: Array | None
    lead: int
    limit: int
    first: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape

    @property
    def width(self) -> int:
        """The most columns of a chunk, where blocks allow it.

        Adjacent columns that are rows in memory lie in a page each, and many are slow to read, unless they are short: then so
        few would make tiny chunks.
        """
        down, along = self.values.strides
        return max(_TURNED, self.limit // self.shape[0]) if 0 < down < along else self.limit


def cut_pieces(
    values: Array, block: Block, unit: int, lead: Shape, data: Array, *of_blocks: Array | None
) -> tuple[list[Piece], bool]:
    """(matrices of K-last components, whether flat). `lead`: the shape of per-tensor scales. `of_blocks`: three arrays."""
    shape = values.shape
    m, limit = block_sides(block, shape)[0], chunk_size()
    merged = alone(shape, block) and values.flags.c_contiguous and data.flags.c_contiguous
    flat = merged and shape[-1] % unit == 0 and (block == TENSOR or m == 1)
    prefix = shape[: len(lead) if merged else len(shape) - 2]

    def matrix(part: Array | None, index: tuple[int, ...]) -> Any:
        return None if part is None else part[index].reshape(1 if flat else -1, -1 if flat else part.shape[-1])

    pieces: list[Piece] = []
    for index in np.ndindex(*prefix) if prefix else ((),):
        number = int(np.ravel_multi_index(index[: len(lead)], lead)) if lead else 0
        parts = [matrix(part, index) for part in (values, data, *of_blocks)]
        first = len(pieces) * parts[0].size
        pieces.append(Piece(parts[0], parts[1], parts[2], parts[3], parts[4], number, limit, first))
    return pieces, flat


def turned(piece: Piece) -> Piece:
    """The numbers of a matrix in the order of memory, for what does not depend on their order."""
    down, along = piece.values.strides
    if down >= along:
        return piece
    values = piece.values.T
    values = values.reshape(1, -1) if values.flags.c_contiguous else values
    return Piece(values, piece.data, None, None, None, piece.lead, piece.limit, piece.first)


#: Columns of a chunk that are rows in memory.
_TURNED = 128

#: One chunk: its piece, first row, end, first column, end; and the index of its block, where the block is larger.
Job = tuple[Piece, int, int, int, int, int]


def chunks(piece: Piece, corner: tuple[int, int], end: tuple[int, int], m: int, unit: int, number: int) -> Iterator[Job]:
    """Chunks of a region of `piece`, in multiples of `m` rows and `unit` columns, except the last ones."""
    limit = piece.limit
    step = min(rounded_up(end[1] - corner[1], unit), max(min(limit // m, piece.width) // unit, 1) * unit)
    rise = max(limit // step // m, 1) * m
    for r in range(corner[0], end[0], rise):
        for c in range(corner[1], end[1], step):
            yield piece, r, min(r + rise, end[0]), c, min(c + step, end[1]), number


def byte_range(element: Codec, c0: int, c1: int) -> slice:
    """The bytes of a range of columns that begins at a packing group."""
    start = c0 * element.bits // 8
    return slice(start, start + packed_length(element, c1 - c0))


def all_jobs(pieces: list[Piece], m: int, unit: int) -> list[Job]:
    """Chunks of all pieces, with the index of their piece's per-tensor scale."""
    return [job for p in pieces for job in chunks(p, (0, 0), p.shape, m, unit, p.lead)]


def within_blocks(pieces: list[Piece], m: int, k: int, unit: int) -> list[Job]:
    """Chunks within single blocks, with the index of their block in the order of `scale`."""
    jobs: list[Job] = []
    number = 0
    for piece in pieces:
        rows, columns = piece.shape
        for r in range(0, rows, m):
            for c in range(0, columns, k):
                jobs += chunks(piece, (r, c), (min(r + m, rows), min(c + k, columns)), 1, unit, number)
                number += 1
    return jobs


def run_each(step: Any, jobs: list[Job], m: int, unit: int, buffers: bool = True, shares: bool = False) -> None:
    """`step(buffers, i, *jobs[i])` for all jobs, on all threads. buffers: whether they have room for a job.

    shares: whether a step uses all threads itself.
    """
    size = max(rounded_up(r1 - r0, m) * rounded_up(c1 - c0, unit) for _, r0, r1, c0, c1, _ in jobs) if buffers else 0

    with_buffers(lambda own, i: step(own, i, *jobs[i]), len(jobs), size, 1 if shares else thread_count())


def with_buffers(step: Callable[[Buffers, int], None], count: int, size: int, threads: int) -> None:
    """`step(buffers, i)` for each i below `count`, on up to `threads` threads. Buffers have room for `size` numbers."""

    def work(first: int, end: int) -> None:
        own = take_buffers(size)
        with np.errstate(all="ignore"):  # the contract allows overflow and NaN as results
            for i in range(first, end):
                step(own, i)
        return_buffers(own)

    spread(work, count, threads)


def aligned_array(a: Array) -> Array:
    """`a` itself, or a copy where its address is no multiple of its item size."""
    array = np.asarray(a)
    return array if array.flags.aligned else array.copy()


def load_piece(values: Array, rows: int, columns: int, buffer: Array, load: Any = None, wide: bool = True) -> Array:
    """`values` (r, c) as aligned FP32 in one row, padded with zeros to (rows, columns): a view where possible.

    load: of `Microkernels`. wide: whether 16-bit numbers, too, become FP32 where they could be viewed; BF16 is uint16 in views.
    """
    r, c = values.shape
    aligned = values.flags.aligned and values.dtype.isnative
    if (r, c) == (rows, columns) and values.dtype == F4 and values.flags.c_contiguous and aligned:
        return values.reshape(-1)
    flat = buffer[: rows * columns]
    name = dtype_name(values)
    if not wide and (r, c) == (rows, columns) and values.flags.c_contiguous and aligned and name in FLOATS:
        return (values.view(U2) if name == "bfloat16" else values).reshape(-1)
    if load is not None and aligned and name in FLOATS:
        load(values if values.dtype == F4 else values.view(U2), name, columns, flat)
        return flat.view(F4)
    words = flat.reshape(rows, columns)
    words[r:], words[:r, c:] = 0, 0
    if name == "bfloat16":
        np.copyto(words[:r, :c], values.view(U2))
        np.left_shift(flat, 16, out=flat)
    else:
        np.copyto(words.view(F4)[:r, :c], values)
    return flat.view(F4)
