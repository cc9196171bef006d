"""One call of `cast`: the components that it writes, and the chunks of whole blocks that fill them.

Each chunk is processed by amax, scales, codes and packing in cache.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.ops import NUMPY, Array
from ...formats import TENSOR, Block
from ...fp32 import F32_INF, MAGNITUDE, NORMAL
from ...layouts import Layout, Shape
from ...options import CastOptions
from ...tensors.components import PARTS
from ...tensors.grids import packed_length
from ...tensors.tensor import ScaledTensor
from .. import reference
from ..plans import scattered
from .codes import NEAREST, FloatCodes, pack_codes
from .pieces import (
    FEW,
    Piece,
    all_jobs,
    block_sides,
    byte_range,
    chunks,
    cut_pieces,
    load_piece,
    rounded_up,
    run_each,
    turned,
    unit_of,
    within_blocks,
)
from .scales import LARGE, GlobalScale
from .searching import weights_of
from .workspace import F4, I4, U1, U4, block_amax, chunk_size, flushed, thread_count, times_scale

if TYPE_CHECKING:
    from .codes import Dither
    from .pieces import Job
    from .plan import Plan
    from .workspace import Buffers


#: Elements of a chunk for the generic algorithm, which needs some 100 bytes per element.
GENERIC = 1 << 15
#: Elements of a chunk of numbers that are read where they lie.
_LONG = 1 << 20
#: The most blocks whose amax is kept between two passes: 8 MB.
_MOST_BLOCKS = 1 << 21
Parts = tuple[Any, Any, Any, Any]


class Cast:
    """One call of `cast`, for a non-empty `x`. All components here have K last, unless they are `in_order`."""

    def __init__(self, plan: Plan, x: Array, block: Block, axis: int, in_order: bool = False) -> None:
        self.plan, self.x, self.axis, self.logical = plan, x, axis, x.shape
        self.swapped = axis == -2 and not in_order
        self.block = block
        y = x.swapaxes(-1, -2) if self.swapped else x
        self.shape: Shape = y.shape
        self.y = y if y.ndim > 1 else y.reshape(1, -1)
        self.per_tensor = block == TENSOR
        columns = self.y.shape[-1]
        self.m, k = block_sides(block, self.y.shape)
        self.unit = plan.count if self.per_tensor else unit_of(k, columns, plan.count)
        self.k = k if k < columns else self.unit
        self.large = self.per_tensor or self.m * self.unit > chunk_size()
        self.two_level = plan.fmt.global_scale is not None
        #: Supplied scales of the only level; of the global one; and the shape of a supplied per-tensor one.
        self.supplied: Array | None = None
        self.supplied_global: Array | None = None
        self.lead: Shape = ()
        self.own_codes = False
        #: Of a search for scales, FP32: as given, and of the blocks of a row for microkernels.
        self.importance: Array | None = None
        self.weights: Array | None = None
        #: Of stochastic rounding
        self.seed: int | None = None
        self.pieces: list[Piece] = []
        self.global_scales: list[GlobalScale] = []
        #: Bits of the amax of blocks, by chunk, where the global scale needed them already.
        self.block_amaxes: list[Array] = []

    @property
    def possible(self) -> bool:
        """Whether this kernel supports the call; else the generic algorithm takes the whole array."""
        codes = self.plan.codes
        by_chunks = codes is None or codes.zero != 0 or self.two_level or self.plan.searches
        return not self.plan.unsupported and not (self.large and by_chunks)

    def supply(self, scale: Array) -> None:
        if self.two_level:
            self.supplied_global = scale
        else:
            self.supplied, self.own_codes = scale, self.plan.fmt.element.nan_code is not None
        if self.two_level or self.per_tensor:
            self.lead = scale.shape

    def weigh(self, importance: Array) -> None:
        """Multiply the errors that a search for scales compares."""
        self.importance = NUMPY.f32(importance)
        if self.plan.search is not None:
            self.weights = weights_of(self.importance, self.y.shape[-1], self.k)

    def gather(self) -> None:
        """Copy many small matrices to where their rows are those of one matrix, with rows of zeros that complete blocks."""
        if not scattered(self.y.shape, self.block, (), self.y.flags.c_contiguous, FEW):
            return
        *lead, rows, columns = self.y.shape
        padded = rounded_up(rows, self.m)
        if padded == rows or self.seed is not None or self.plan.fmt.offset != "none":
            self.y = np.ascontiguousarray(self.y)
        else:
            y = np.zeros((*lead, padded, columns), self.y.dtype)
            y[..., :rows, :] = self.y
            self.y = y

    # -- components ----------------------------------------------------------------------------------------------

    def _specs(self) -> list[tuple[Shape, str] | None]:
        """(shape, dtype) of data, scale, zero_point and global_scale."""
        fmt, y = self.plan.fmt, self.y
        scale: Shape = (*y.shape[:-2], -(-y.shape[-2] // self.m), -(-y.shape[-1] // self.k))
        if self.per_tensor:
            scale = self.lead
        data = (*self.shape[:-1], packed_length(fmt.element, self.shape[-1]))
        shapes = {"data": data, "scale": scale, "zero_point": scale, "global_scale": self.lead}
        dtypes = NUMPY.dtypes(fmt)
        return [(shapes[name], dtypes[name]) if name in dtypes else None for name in PARTS]

    def fresh(self) -> Parts:
        """Uninitialized components."""
        data, scale, zero_point, global_scale = (None if spec is None else np.empty(*spec) for spec in self._specs())
        return data, scale, zero_point, global_scale

    def in_order(self, options: CastOptions) -> Cast | None:
        """The same call, in the order of the array, where that changes no byte."""
        square = self.block[0] == self.block[1]  # whole tensors too
        plain = options.scale is None and self.seed is None and self.plan.bits == 8 and self.plan.fmt.offset == "none"
        plain &= not self.plan.searches
        if not (square and plain):
            return None
        call = Cast(self.plan, self.x, self.block, self.axis, in_order=True)
        call.gather()
        return call

    def describes(self, out: Any, layout: Layout) -> bool:
        """Whether `out` is what this call writes, of any strides."""
        wanted = (self.plan.recipe, layout, self.axis, self.logical)
        return isinstance(out, ScaledTensor) and (out.recipe, out.layout, out.axis, out.shape) == wanted

    def fitting(self, out: Any, layout: Layout) -> Parts | None:
        """The components of `out`, if they can be written in place."""
        if not self.describes(out, layout):
            return None
        parts: list[Any] = []
        for name, spec in zip(PARTS, self._specs(), strict=True):
            part = getattr(out, name)
            if self.swapped and part is not None and (name == "data" or (name != "global_scale" and not self.per_tensor)):
                part = part.swapaxes(-1, -2)
            if (part is None) != (spec is None):
                return None
            if spec is not None and not (
                type(part) is np.ndarray
                and (part.shape, part.dtype) == spec
                and part.flags.carray
                and not any(
                    a is not None and np.may_share_memory(part, a) for a in (self.y, self.supplied, self.supplied_global)
                )
            ):
                return None
            parts.append(part)
        data, scale, zero_point, global_scale = parts
        return data, scale, zero_point, global_scale

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, parts: Parts, refuse: bool) -> None:
        """Write all components; under `refuse`, raise NonFiniteError for NaN and Inf before writing a byte."""
        data, scale, zero_point, global_scale = parts
        of_blocks = (None, None, None) if self.per_tensor else (scale, zero_point, self.supplied)
        rows, wanted = self.y.shape[-2], data.view(U1).reshape(*self.y.shape[:-2], -1, data.shape[-1])
        data = wanted if wanted.shape[-2] == rows else np.empty((*wanted.shape[:-2], rows, wanted.shape[-1]), U1)
        self.pieces, flat = cut_pieces(self.y, self.block, self.unit, self.lead, data, *of_blocks)
        step = self._write if self.plan.fast else self._hand_over
        if self.plan.shifted is not None and self.m == 1:
            step = self._write_shifted
        if step == self._hand_over:
            for piece in self.pieces:
                piece.limit = min(piece.limit, GENERIC)
        if step == self._write and self._in_one_pass:
            step = self._write_at_once
        if self.plan.narrow and self.y.flags.c_contiguous:  # without buffers, longer chunks take less of Python
            shares = 4 * thread_count() if thread_count() > 1 else 1
            most = self.y.size if step == self._write_at_once else _LONG  # which keeps numbers in cache itself
            longer = min(max(self.y.size // shares, chunk_size()), most)
            for piece in self.pieces:
                piece.limit = min(longer, piece.limit) if step == self._hand_over else longer
        tensor_jobs = all_jobs(list(map(turned, self.pieces)), 1, 1) if refuse or self.per_tensor or self.two_level else []
        if refuse and self._largest(tensor_jobs, False).max() >= F32_INF:
            reference.refuse_nonfinite(NUMPY, np.full(1, np.nan, F4))
        m = 1 if flat else self.m
        jobs = [] if self.large else all_jobs(self.pieces, m, self.unit)
        if global_scale is not None:
            self._write_global(global_scale, tensor_jobs, jobs)
        if self.per_tensor:
            self._write_large(scale, all_jobs(self.pieces, 1, self.plan.count), tensor_jobs)
        elif self.large:
            jobs = within_blocks(self.pieces, self.m, self.k, self.plan.count)
            self._write_large(scale, jobs, jobs)
        else:
            run_each(step, jobs, m, self.unit)
        if data is not wanted:  # without the rows that complete blocks
            wanted[...] = data[..., : wanted.shape[-2], :]

    def _largest(self, jobs: list[Job], finite: bool) -> Array:
        """Bits of the largest magnitude of each job, or of its finite ones."""
        largest = np.zeros(len(jobs), U4)

        def step(work: Buffers, i: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, _: int) -> None:
            values = piece.values[r0:r1, c0:c1]
            source = self._load(work, values, *values.shape)
            largest[i : i + 1] = self._amax(work, source, source.size)
            if finite and largest[i] >= F32_INF:
                source = self._load(work, values, *values.shape, wide=True)
                a = np.bitwise_and(source.view(U4), MAGNITUDE, out=work.a[: source.size])
                largest[i] = a.max(where=a < F32_INF, initial=0)

        run_each(step, jobs, 1, self.plan.count)
        return largest

    def _load(self, work: Buffers, values: Array, rows: int, columns: int, wide: bool = False) -> Array:
        """A chunk in one row, padded with zeros: in FP32, or unless `wide` in a dtype that the microkernels read."""
        return load_piece(values, rows, columns, work.source, self.plan.microkernels.load, wide or not self.plan.narrow)

    def _dither(self, piece: Piece, r0: int, c0: int, columns: int) -> Dither:
        """Of a chunk in rows of `columns`."""
        if self.seed is None:
            return NEAREST
        across = piece.shape[1]
        return self.seed, piece.first + r0 * across + c0, columns, across

    def _room(self, piece: Piece, r0: int, r1: int, c0: int, c1: int, blocks: int) -> Array:
        """Room for a number of each block of a chunk: that of its codes, which are written later, where it can be used.

        New memory costs a page fault for every 1024 numbers, in all as much as reading them again.
        """
        target = piece.data[r0:r1, byte_range(self.plan.fmt.element, c0, c1)]
        if target.flags.c_contiguous and target.size >= 4 * blocks:
            room = target.reshape(-1)[: 4 * blocks].view(U4)
            if room.flags.aligned:
                return room
        return np.empty(blocks, U4)

    def _amax(self, work: Buffers, source: Array, k: int, out: Array | None = None) -> Array:
        """Bits of the largest magnitude of each `k` numbers, as FP32; in `out`, where microkernels compute them."""
        n = source.size
        if self.plan.microkernels.amax is None:
            np.bitwise_and(source.view(U4), MAGNITUDE, out=work.a[:n])
            return block_amax(work, n, k)
        if out is None:
            out = np.empty(n // k, U4)
        self.plan.microkernels.amax(source, k, out)
        return out

    def _amax_of_blocks(self, jobs: list[Job]) -> Array:
        """Bits of the largest finite magnitude of all, keeping those of each block for `_write`, which has the same jobs."""
        self.block_amaxes = [np.empty(0, U4)] * len(jobs)

        def step(work: Buffers, i: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, _: int) -> None:
            source = self._load(work, piece.values[r0:r1, c0:c1], r1 - r0, rounded_up(c1 - c0, self.unit))
            self.block_amaxes[i] = self._amax(work, source, self.k, self._room(piece, r0, r1, c0, c1, source.size // self.k))

        run_each(step, jobs, 1, self.unit)
        return np.array([amax.view(I4).max() for amax in self.block_amaxes], U4)  # faster of signed integers

    def _write_global(self, target: Array, tensor_jobs: list[Job], jobs: list[Job]) -> None:
        """Write the global scale. tensor_jobs: the chunks of the tensor. jobs: the chunks that `_write` writes."""
        scales = self.plan.global_scales
        with np.errstate(all="ignore"):
            fmt = self.plan.fmt
            if self.supplied_global is not None:
                target[...] = fmt.levels[0].codec.accept(NUMPY, self.supplied_global).view(F4)
            else:
                amax = np.full(1, F32_INF, U4)
                if self.plan.narrow and self.m == 1 and self.y.flags.c_contiguous and self.y.size <= _MOST_BLOCKS * self.k:
                    amax = self._amax_of_blocks(jobs).max(keepdims=True)
                if amax[0] >= F32_INF:  # of the finite numbers only
                    amax = self._largest(tensor_jobs, True).max(keepdims=True)
                if scales is None:
                    target[...] = reference.sensed(NUMPY, np.where(amax < NORMAL, U4(0), amax).view(F4), fmt)[0]
                else:
                    target[...] = (scales.fast_path(amax, None) or scales.slow_path(amax, None, None))[0][0]
            multipliers = reference.multiplier(NUMPY, target.reshape(-1), fmt)
            self.global_scales = [
                GlobalScale(*pair)
                for pair in zip(multipliers, [self.plan.scales] * target.size, target.reshape(-1), strict=True)
            ]

    def run_coded(self, parts: Parts, matrices: list[Any]) -> bool:
        """Write all components from matrices of codes, under a supplied global scale. None is to be used if it returns False.

        A microkernel decodes and casts each matrix in one pass; of `x`, only the shape is read.
        """
        data, scale, _, global_scale = parts
        plan, scales, k = self.plan, self.plan.scales, self.k
        assert scales is not None and plan.microkernels.blocks is not None and global_scale is not None
        self._write_global(global_scale, [], [])
        of_tensor = self.global_scales[0]
        if len(self.global_scales) > 1 or of_tensor.inverses is None:
            return False
        stored, codes = (part.view(U1).reshape(len(matrices), -1) for part in (scale, data))
        for n, matrix in enumerate(matrices):
            arrays = of_tensor.inverses, stored[n], codes[n]
            largest = plan.microkernels.blocks(
                plan.codes, scales.writer, matrix, k, scales.qmax, *arrays, float(of_tensor.value)
            )
            if largest > scales.high:
                return False
        return True

    @property
    def takes_codes(self) -> bool:
        """Whether `run_coded` may be tried."""
        k, columns = self.k, self.shape[-1]
        fits = 16 <= k <= 256 and k & (k - 1) == 0 and columns % k == 0 and len(self.shape) > 1
        return fits and self.possible and self.plan.microkernels.matrix is not None and self.two_level and self._in_one_pass

    @property
    def _in_one_pass(self) -> bool:
        """Whether a microkernel may take chunks from their numbers to their codes, reading them once."""
        plan, scales = self.plan, self.plan.scales
        known = plan.microkernels.blocks is not None and scales is not None and scales.in_bytes and self.m == 1
        by = not self.two_level or self.supplied_global is not None  # else the amax of blocks is there when they are written
        codes = isinstance(plan.codes, FloatCodes) and not plan.codes.codec.fnuz and plan.bits in (4, 8)
        plain = self.seed is None and self.supplied is None and not plan.searches and not plan.divides
        return known and by and codes and plain

    def _write_at_once(self, work: Buffers, i: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, number: int) -> None:
        """One chunk of whole blocks of one row, in one pass; by `_write`, where its memory or its numbers need more."""
        plan, scales, k = self.plan, self.plan.scales, self.k
        assert scales is not None and piece.scale is not None and plan.microkernels.blocks is not None
        values = piece.values[r0:r1, c0:c1]
        target, codes = piece.scale[r0:r1, c0 // k : -(-c1 // k)], piece.data[r0:r1, byte_range(plan.fmt.element, c0, c1)]
        global_scale = self.global_scales[piece.lead] if self.global_scales else None
        inverses = scales.inverses if global_scale is None else global_scale.inverses
        whole = values.size % k == 0 and target.size == values.size // k and values.size * plan.bits == 8 * codes.size
        if whole and inverses is not None and target.flags.c_contiguous and codes.flags.c_contiguous:
            source = self._load(work, values, *values.shape)
            by = 1.0 if global_scale is None else float(global_scale.value)
            arrays = inverses, target.view(U1).reshape(-1), codes.reshape(-1)
            if plan.microkernels.blocks(plan.codes, scales.writer, source, k, scales.qmax, *arrays, by) <= scales.high:
                return
        self._write(work, i, piece, r0, r1, c0, c1, number)

    def _write(self, work: Buffers, i: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, _: int) -> None:
        """One chunk of whole blocks."""
        scales, writer, m, k = self.plan.scales, self.plan.codes, self.m, self.k
        assert scales is not None and writer is not None and piece.scale is not None
        rows, columns = rounded_up(r1 - r0, m), rounded_up(c1 - c0, self.unit)
        source = self._load(work, piece.values[r0:r1, c0:c1], rows, columns)
        height, length = (1, m * k) if columns == k else (m, k)  # rows that are one block wide are adjacent
        amax = self.block_amaxes[i] if self.block_amaxes else self._amax(work, source, length)
        if height > 1:
            amax = amax.reshape(rows // m, m, -1).max(axis=1).reshape(-1)
        global_scale = self.global_scales[piece.lead] if self.global_scales else None
        block_scales = scales.fast_path(amax, global_scale) if piece.supplied is None else None
        if self.plan.search is not None and piece.supplied is None:
            if block_scales is not None and self.supplied_global is None:
                where = c0 // k, columns // k
                block_scales = self.plan.search.scales(
                    scales, source, m, k, amax, block_scales, global_scale, self.weights, *where
                )
            if block_scales is None or self.supplied_global is not None:
                return self._hand_over(work, i, piece, r0, r1, c0, c1, 0)
        if block_scales is None:
            if self.own_codes and amax.max() >= F32_INF:
                return self._hand_over(work, i, piece, r0, r1, c0, c1, 0)
            accepted = None if piece.supplied is None else self._accepted(piece, r0, c0, rows // m, columns // k)
            block_scales = scales.slow_path(amax, accepted, global_scale, self.own_codes)
            if scales.subnormal(block_scales[0]).any():
                return self._hand_over(work, i, piece, r0, r1, c0, c1, 0)
            if block_scales[1].max() > LARGE:
                source = flushed(work, self._load(work, piece.values[r0:r1, c0:c1], rows, columns, True))
        stored, inverse = block_scales
        target = piece.scale[r0 // m : -(-r1 // m), c0 // k : -(-c1 // k)]
        target[...] = stored.reshape(rows // m, -1)[:, : target.shape[1]]
        clamp = self.plan.scaled is None and not np.maximum.reduce(amax.view(F4) * inverse) < writer.limit
        if self.plan.divides:
            inverse = scales.read(stored, inverse)
        if height > 1:
            inverse = inverse.reshape(rows // m, -1).repeat(m, axis=0).reshape(-1)
        target = piece.data[r0:r1, byte_range(self.plan.fmt.element, c0, c1)]
        dither = self._dither(piece, r0, c0, columns)
        self._write_codes(work, source, inverse, length, target, (rows, columns), c1 - c0, clamp, dither)

    def _write_shifted(self, work: Buffers, i: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, _: int) -> None:
        """One chunk of whole blocks of one row, with a zero-point or a bias for each."""
        plan, k = self.plan, self.k
        rows, columns = r1 - r0, c1 - c0
        if columns % k:  # padding is not among the numbers of its block
            return self._hand_over(work, i, piece, r0, r1, c0, c1, 0)
        source = self._load(work, piece.values[r0:r1, c0:c1], rows, columns)
        accepted = None if piece.supplied is None else self._accepted(piece, r0, c0, rows, columns // k)
        codes = work.codes[: source.size]
        scales_and_offsets = plan.offsets(source, k, codes, self._dither(piece, r0, c0, columns), accepted)
        if scales_and_offsets is None:
            return self._hand_over(work, i, piece, r0, r1, c0, c1, 0)
        stored, offset = scales_and_offsets
        assert piece.scale is not None and piece.zero_point is not None
        blocks = rows, columns // k
        places = slice(r0, r1), slice(c0 // k, c1 // k)
        piece.scale[places] = stored.reshape(blocks)
        piece.zero_point[places] = offset.reshape(blocks)
        target = piece.data[r0:r1, byte_range(plan.fmt.element, c0, c1)]
        self._pack(work, codes, target, (rows, columns))

    def _accepted(self, piece: Piece, r0: int, c0: int, rows: int, columns: int) -> Array:
        """int32 codes of the supplied scales of a chunk, `rows` by `columns` including the blocks of padding."""
        assert piece.supplied is not None and self.plan.scales is not None
        r, c = r0 // self.m, c0 // self.k
        supplied = piece.supplied[r : r + rows, c : c + columns]
        codes = np.zeros((rows, columns), I4)
        rule, codec = self.plan.recipe.rules[-1], self.plan.scales.codec
        codes[: supplied.shape[0], : supplied.shape[1]] = rule.accept(NUMPY, supplied, codec, self.plan.fmt.element)
        return codes.reshape(-1)

    def _write_codes(
        self,
        work: Buffers,
        source: Array,
        inverse: Array,
        k: int,
        target: Array,
        padded: tuple[int, int],
        columns: int,
        clamp: bool,
        dither: Dither,
    ) -> None:
        """Codes of `source`, of shape `padded` with `columns` real ones, times `inverse` of each `k`, to `target`.

        Blocks whose inverse is 0 have codes of +0.
        """
        plan, writer, n = self.plan, self.plan.codes, source.size
        assert writer is not None
        if plan.packs and 2 * target.size == n and target.flags.c_contiguous and not (writer.zero and columns < padded[1]):
            assert plan.scaled is not None
            return plan.scaled(source, inverse, k, target.reshape(-1), dither)
        in_place = plan.bits == 8 and target.size == n and target.flags.c_contiguous
        codes = target.reshape(-1) if in_place else work.codes[:n]
        if plan.scaled is not None:
            plan.scaled(source, inverse, k, codes, dither)
        else:
            times_scale(source, inverse, k, work.scaled[:n].view(F4))
            writer.write(work, n, codes, clamp)
            if not np.logical_and.reduce(inverse):
                codes.reshape(-1, k)[inverse == 0] = writer.zero
        if writer.zero and columns < padded[1]:
            codes.reshape(padded)[:, columns:] = 0
        if not in_place:
            self._pack(work, codes, target, padded)

    def _pack(self, work: Buffers, codes: Array, target: Array, padded: tuple[int, int]) -> None:
        """Codes, one a byte and of shape `padded`, to `target`."""
        bits, pack = self.plan.bits, self.plan.microkernels.pack
        size = codes.size * bits // 8
        in_place = target.flags.c_contiguous and target.size == size  # else rows are padded, or not adjacent in `target`
        packed = target if in_place else work.sign[:size]
        if not pack(codes, bits, packed):
            pack_codes(codes.reshape(padded), bits, target, work.sign)
        elif not in_place:
            target[...] = packed.reshape(padded[0], -1)[: target.shape[0], : target.shape[1]]

    # -- blocks larger than a chunk ------------------------------------------------------------------------------

    def _write_large(self, scale: Array, jobs: list[Job], read: list[Job]) -> None:
        """The amax of every block first, from the jobs `read`, then the codes."""
        scales, writer = self.plan.scales, self.plan.codes
        assert scales is not None and writer is not None
        amax = np.zeros(scale.size, U4)
        if not self.own_codes:
            np.maximum.at(amax, [job[-1] for job in read], self._largest(read, False))
        with np.errstate(all="ignore"):
            block_scales = scales.fast_path(amax, None) if self.supplied is None else None
            if block_scales is None:
                accepted = None if self.supplied is None else scales.codec.accept(NUMPY, self.supplied).reshape(-1)
                block_scales = scales.slow_path(amax, accepted, None, self.own_codes)
            stored, inverse = block_scales
            scale[...] = stored.reshape(scale.shape)
            fits = amax.view(F4) * inverse < writer.limit
            subnormal = scales.subnormal(stored)
            by = scales.read(stored, inverse) if self.plan.divides else inverse

        def step(work: Buffers, i: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, number: int) -> None:
            target = piece.data[r0:r1, byte_range(self.plan.fmt.element, c0, c1)]
            if not inverse[number] and not subnormal[number]:
                target[...] = 0
                return
            padded = r1 - r0, rounded_up(c1 - c0, self.plan.count)
            chunk = piece.values[r0:r1, c0:c1]
            source = self._load(work, chunk, *padded)
            n, fit, special = source.size, fits[number], subnormal[number]
            if self.own_codes:
                largest = self._amax(work, source, n)[0]
                special |= largest >= F32_INF
                fit = largest.view(F4) * inverse[number] < writer.limit
            if special or not self.plan.fast:
                block_scale = stored[number].reshape(() if self.per_tensor else (1, 1))
                target[...] = self._generic(piece, r0, r1, c0, c1, chunk.shape, block_scale).data.view(U1)
                return
            if inverse[number] > LARGE:
                source = flushed(work, self._load(work, chunk, *padded, True))
            dither = self._dither(piece, r0, c0, padded[1])
            self._write_codes(work, source, by[number : number + 1], n, target, padded, c1 - c0, not fit, dither)

        run_each(step, jobs, 1, self.plan.count)

    # -- without a fast path ------------------------------------------------------------------------------------

    def _generic(self, piece: Piece, r0: int, r1: int, c0: int, c1: int, shape: Shape, scale: Any) -> ScaledTensor:
        """A chunk in another shape, by the generic algorithm."""
        words, values = None, piece.values[r0:r1, c0:c1]
        if self.seed is not None and self.plan.microkernels.words is not None:
            words = np.empty(values.shape, U4)
            for r in range(r0, r1):
                self.plan.microkernels.words(self.seed, piece.first + r * piece.shape[1] + c0, words[r - r0])
            words = words.view(I4).reshape(shape)
        importance, values = self.importance, values.reshape(shape)
        if importance is not None:  # a flat piece has the columns of several rows
            importance = importance.take(np.arange(c0, c0 + values.shape[-1]) % importance.size)
        global_scale = self.global_scales[piece.lead].stored.reshape(()) if self.global_scales else None
        return reference.cast(values, self.plan.recipe, CastOptions(scale=scale, importance=importance), words, global_scale)

    def _hand_over(self, work: Buffers, i: int, piece: Piece, r0: int, r1: int, c0: int, c1: int, _: int) -> None:
        """One chunk of whole blocks, by the generic algorithm, which takes a dozen times its input: in parts, if it is long."""
        assert piece.scale is not None
        if piece.limit > GENERIC:
            for part in chunks(replace(piece, limit=GENERIC), (r0, c0), (r1, c1), self.m, self.unit, 0):
                self._hand_over(work, i, *part)
            return
        shape, scale = (r1 - r0, c1 - c0), None
        places = slice(r0 // self.m, -(-r1 // self.m)), slice(c0 // self.k, -(-c1 // self.k))
        if piece.supplied is not None:
            scale = piece.supplied[places]
        whole, alone = self.k >= self.y.shape[-1], self.m in (1, self.y.shape[-2])
        if whole or (alone and self.m > 1):  # blocks are whole rows, which would be longer in a flat piece, or whole columns
            height = (self.m,) if alone else ()  # those of several matrices are blocks of their own
            shape = -1, *height, self.y.shape[-1] if whole else c1 - c0
            scale = None if scale is None else scale.reshape(-1, *(1,) * alone, 1 if whole else scale.shape[-1])
        written = self._generic(piece, r0, r1, c0, c1, shape, scale)
        for part, target in (
            (written.data.view(U1), piece.data[r0:r1, byte_range(self.plan.fmt.element, c0, c1)]),
            (written.scale, piece.scale[places]),
            (written.zero_point, None if piece.zero_point is None else piece.zero_point[places]),
        ):
            if target is not None:
                target[...] = part.reshape(target.shape)
