"""`cast` along axis -2 into memory that has the order of the array: blocks are columns, and nothing is transposed."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...arrays.ops import NUMPY, Array
from ...fp32 import F32_INF
from ...options import CastOptions
from ...tensors.grids import packed_length
from ...tensors.tensor import ScaledTensor
from .. import reference
from .codes import NEAREST
from .pieces import load_piece, with_buffers
from .scales import GlobalScale
from .workspace import U1, U4, chunk_size, thread_count

if TYPE_CHECKING:
    from ...formats import Block
    from .plan import Plan
    from .workspace import Buffers

#: The most elements of blocks side by side that a chunk has uncut; longer ones are cut.
_MOST_ELEMENTS = 1 << 19


class _Chunk(NamedTuple):
    """Rows of a matrix."""

    matrix: int
    start: int
    stop: int


class _Columns(NamedTuple):
    """One call. x: (matrices, K, N). data, scale, offset: of `out`, with as many axes. k: rows of a block."""

    plan: Plan
    x: Array
    data: Array
    scale: Array
    offset: Array | None
    k: int

    @property
    def full_blocks(self) -> bool:
        """Whether chunks consist of full blocks. Else each is a part of the blocks that share rows."""
        return math.lcm(self.k, self.plan.count) * self.x.shape[-1] <= _MOST_ELEMENTS

    def chunks(self) -> list[_Chunk]:
        matrices, rows, columns = self.x.shape
        unit, within = (math.lcm(self.k, self.plan.count), rows) if self.full_blocks else (self.plan.count, self.k)
        height = max(chunk_size() // columns // unit, 1) * unit
        starts = [r for first in range(0, rows, within) for r in range(first, first + within, height)]
        ends = [min(r + height, (r // within + 1) * within) for r in starts]
        return [_Chunk(matrix, *pair) for matrix in range(matrices) for pair in zip(starts, ends, strict=True)]

    def load(self, work: Buffers, chunk: _Chunk) -> Array:
        values = self.x[chunk.matrix, chunk.start : chunk.stop]
        rows, columns = values.shape
        return load_piece(values, rows, columns, work.source, self.plan.microkernels.load, not self.plan.narrow)

    def amax(self, work: Buffers, chunk: _Chunk) -> Array:
        """FP32 bits of the largest magnitudes of the blocks in a chunk, or of their parts."""
        columns, k = self.x.shape[-1], self.k if self.full_blocks else chunk.stop - chunk.start
        largest = np.empty((chunk.stop - chunk.start) // k * columns, U4)
        assert self.plan.microkernels.amax is not None
        self.plan.microkernels.amax(self.load(work, chunk), k, largest, columns)
        return largest

    def target(self, chunk: _Chunk) -> Array:
        """The bytes of a chunk."""
        codec = self.plan.fmt.element
        return self.data[chunk.matrix, packed_length(codec, chunk.start) : packed_length(codec, chunk.stop)]

    def of_blocks(self, part: Array, chunk: _Chunk) -> Array:
        """The scales or offsets of a chunk."""
        return part[chunk.matrix, chunk.start // self.k : -(-chunk.stop // self.k)]

    def hand_over(self, chunk: _Chunk, scale: Array | None) -> None:
        """A chunk of whole blocks by the generic algorithm."""
        values = self.x[chunk.matrix, chunk.start : chunk.stop]
        written = reference.cast(values, self.plan.recipe, CastOptions(-2, scale))
        self.target(chunk)[...] = written.data.view(U1)
        self.of_blocks(self.scale, chunk)[...] = written.scale
        if self.offset is not None:
            self.of_blocks(self.offset, chunk)[...] = written.zero_point

    def write(self, work: Buffers, chunk: _Chunk, amax: Array, global_scale: GlobalScale | None) -> None:
        """The scales of a chunk of whole blocks, and its codes."""
        plan, scale = self.plan, self.of_blocks(self.scale, chunk)
        assert plan.scales is not None
        block_scales = plan.scales.fast_path(amax, global_scale)
        if block_scales is None:  # numbers that are not normal
            return self.hand_over(chunk, None if global_scale is None else global_scale.stored)
        scale[...] = block_scales[0].reshape(scale.shape)
        self.write_codes(work, chunk, self.k, plan.scales.read(*block_scales) if plan.divides else block_scales[1])

    def write_codes(self, work: Buffers, chunk: _Chunk, k: int, by: Array) -> None:
        """Codes of numbers times `by`, or divided by it, in blocks of `k` rows."""
        plan, source = self.plan, self.load(work, chunk)
        assert plan.scaled is not None
        codes = self.room(work, chunk, source.size)
        plan.scaled(source, by, k, codes, across=self.x.shape[-1])
        self.pack(chunk, codes)

    def write_shifted(self, work: Buffers, chunk: _Chunk) -> None:
        """A chunk of whole blocks with a zero-point or a bias for each."""
        source, columns = self.load(work, chunk), self.x.shape[-1]
        codes = self.room(work, chunk, source.size)
        scales_and_offsets = self.plan.offsets(source, self.k, codes, NEAREST, across=columns)
        if scales_and_offsets is None:
            return self.hand_over(chunk, None)
        assert self.offset is not None
        for part, stored in zip((self.scale, self.offset), scales_and_offsets, strict=True):
            self.of_blocks(part, chunk)[...] = stored.reshape(-1, columns)
        self.pack(chunk, codes)

    def room(self, work: Buffers, chunk: _Chunk, n: int) -> Array:
        """Room for the codes of a chunk, one a byte."""
        return self.target(chunk).reshape(-1) if self.plan.bits == 8 else work.codes[:n]

    def pack(self, chunk: _Chunk, codes: Array) -> None:
        if self.plan.bits != 8:
            assert self.plan.microkernels.down is not None
            self.plan.microkernels.down(codes.reshape(-1, self.x.shape[-1]), self.plan.bits, self.target(chunk))


def cast_columns(plan: Plan, x: Array, block: Block, options: CastOptions, out: ScaledTensor) -> bool:
    """Write `out`, whose recipe, layout and shape are those of the cast; False where the call is not supported here."""
    k, shifted = block[1] or x.shape[-2], plan.shifted is not None
    writes = plan.microkernels.columns and (shifted or (plan.fast and plan.scaled is not None))
    if not writes or block[0] != 1 or plan.unsupported or not x.size or x.shape[-2] % k:
        return False
    if x.shape[-2] % math.lcm(k, plan.count) or k % plan.count or not x.flags.c_contiguous:
        return False
    if options.scale is not None or options.rounding != "nearest" or options.nonfinite != "propagate":
        return False
    parts = [part for part in (out.data, out.scale, out.zero_point, out.global_scale) if part is not None]
    if not all(type(a) is np.ndarray and a.flags.carray and not np.may_share_memory(a, x) for a in parts):
        return False
    data, scale, offset = (
        None if part is None else part.reshape(-1, *part.shape[-2:]) for part in (out.data.view(U1), out.scale, out.zero_point)
    )
    assert data is not None and scale is not None
    call = _Columns(plan, x.reshape(-1, *x.shape[-2:]), data, scale, offset, k)
    if shifted and not call.full_blocks:
        return False
    chunks = call.chunks()
    largest = max(chunk.stop - chunk.start for chunk in chunks) * x.shape[-1]

    def each(step: Callable[[Buffers, int], None]) -> None:
        with_buffers(step, len(chunks), largest, thread_count())

    if shifted:
        each(lambda work, i: call.write_shifted(work, chunks[i]))
        return True
    two_level = out.global_scale is not None
    if call.full_blocks and not two_level:
        each(lambda work, i: call.write(work, chunks[i], call.amax(work, chunks[i]), None))
        return True
    amaxes: list[Array] = [np.empty(0, U4)] * len(chunks)

    def find(work: Buffers, i: int) -> None:
        amaxes[i] = call.amax(work, chunks[i])

    each(find)
    global_scale = None
    if two_level:
        global_scale = _global_scale(plan, np.array([max(map(int, (amax.max() for amax in amaxes)))], U4), out.global_scale)
        if global_scale is None:
            return False
    if call.full_blocks:
        each(lambda work, i: call.write(work, chunks[i], amaxes[i], global_scale))
        return True
    by = _scales_of_parts(call, chunks, amaxes, global_scale)
    if by is None:
        return False
    each(lambda work, i: call.write_codes(work, c := chunks[i], c.stop - c.start, by[c.matrix, c.start // k]))
    return True


def _global_scale(plan: Plan, amax: Array, target: Array) -> GlobalScale | None:
    """The only global scale, which is written; None where numbers are not normal."""
    scales = plan.global_scales
    tensor_scales = None if scales is None or target.size != 1 or amax[0] >= F32_INF else scales.fast_path(amax, None)
    if tensor_scales is None:
        return None
    target[...] = tensor_scales[0].reshape(target.shape)
    return GlobalScale(reference.multiplier(NUMPY, tensor_scales[0], plan.fmt)[0], plan.scales, tensor_scales[0][0])


def _scales_of_parts(
    call: _Columns, chunks: list[_Chunk], part_amaxes: list[Array], global_scale: GlobalScale | None
) -> Array | None:
    """What numbers of each block are multiplied or divided by, from the amax of parts; scales are written.

    None where numbers are not normal.
    """
    plan = call.plan
    amax = np.zeros(call.scale.shape, U4)
    for chunk, part in zip(chunks, part_amaxes, strict=True):
        own = amax[chunk.matrix, chunk.start // call.k]
        np.maximum(own, part, out=own)
    assert plan.scales is not None
    with np.errstate(all="ignore"):
        block_scales = plan.scales.fast_path(amax.reshape(-1), global_scale)
        if block_scales is None:
            return None
        call.scale[...] = block_scales[0].reshape(amax.shape)
        return (plan.scales.read(*block_scales) if plan.divides else block_scales[1]).reshape(amax.shape)
