"""How a tensor is cut into tiles, one for each program. Imports no framework."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from breccia.backend import PLAIN, TENSOR, Block

from .specs import Spec

#: The most elements of a tile, which its program holds in registers.
LARGEST_TILE = 16384


@dataclass(frozen=True)
class Tile:
    """A tile of down x along blocks, in slots of tall x wide elements (powers of two).

    axis: the contraction axis, 0 for rows or 1 for columns of the matrix in memory. block_rows, block_columns: sides of a
    block; 0 for the side of the matrix, which one tile covers, or several where the amax of the block is known before.
    large: whether positions need 64 bits. folded: whether one number counts the programs, as a grid has a limit for each axis.
    backward: whether the first programs take the last tiles, which a pass before left in the cache.
    elements: of a thread. vector: the most columns that a thread loads at once, 0 for any. A thread computes the scales of all
    blocks that it has elements of, so it should have many elements of few.
    """

    axis: int
    down: int
    block_rows: int
    tall: int
    along: int
    block_columns: int
    wide: int
    large: bool = False
    folded: bool = False
    backward: bool = False
    elements: int = 32
    vector: int = 0

    @property
    def rows(self) -> int:
        return self.down * self.tall

    @property
    def columns(self) -> int:
        return self.along * self.wide

    @property
    def each(self) -> int:
        """Elements of a thread."""
        return self.rows * self.columns // (32 * self.warps)

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return min(16, max(1, self.rows * self.columns // (32 * self.elements)))

    def counts(self, rows: int, columns: int) -> tuple[int, int]:
        """The number of tiles along rows and columns of a matrix."""

        def side(extent: int, blocks: int, block: int, slots: int) -> int:
            return divided_up(extent, slots) if block == 0 else divided_up(divided_up(extent, block), blocks)

        down = side(rows, self.down, self.block_rows, self.tall)
        return down, side(columns, self.along, self.block_columns, self.wide)


@dataclass(frozen=True)
class Lanes:
    """A tile of consecutive elements in blocks along the last axis: `lane` of them for each of `lanes` threads.

    chunk: elements of one load of 16 bytes. steps: tiles of a program. large, backward: as of a `Tile`.
    """

    block: int
    lane: int
    lanes: int
    chunk: int
    steps: int = 1
    large: bool = False
    backward: bool = False

    @property
    def warps(self) -> int:
        return self.lanes // 32

    @property
    def blocks(self) -> int:
        """Blocks of a program."""
        return self.lane * self.lanes // self.block * self.steps


@dataclass(frozen=True)
class Strips:
    """A tile of blocks down the columns, `wide` columns wide; a thread holds `each` adjacent columns of `lane` rows."""

    block: int
    lane: int
    each: int
    wide: int
    warps: int
    large: bool = False
    backward: bool = False


def strips_of(block: Block, rows: int, columns: int, bits: int, most: int) -> Strips | None:
    """The strips for whole blocks of codes of 4 or 6 bits down the columns of a contiguous tensor, if they are such.

    most: the rows of a thread whose numbers fit its registers.
    """
    length = block[1] if block[0] == 1 else None
    if length is None or bits not in (4, 6) or rows % length or length != power_of_two(length) or not 16 <= length <= 512:
        return None
    if columns % 16 or length * columns >= 2**31:
        return None
    lane = min(length, most)
    warps = max(4, length // lane)
    return Strips(length, lane, 4, 128 * warps * lane // length, warps)


def lanes_of(block: Block, columns: int, bits: int, itemsize: int) -> Lanes | None:
    """The lanes for whole blocks of codes of 4 or 6 bits along the last axis of a contiguous tensor, if they are such."""
    length = block[1] if block[0] == 1 else None
    if length is None or bits not in (4, 6) or columns % length or length != power_of_two(length) or not 16 <= length <= 1024:
        return None
    # Four loads of 16 bytes each: more would leave too much of a cache line to other loads.
    return Lanes(length, 64 // itemsize, 128, 16 // itemsize)


@dataclass(frozen=True)
class Variant:
    """What else a kernel is compiled for.

    source: where the amax of blocks comes from: "tile", or a pass before, for the "tensor", "rows" or "columns"; or "supplied"
        scales. tensor: one scale for the tensor.
    ptx: for NVIDIA GPUs. native: the device converts to FP8. stochastic: rounding.
    subnormals: the input may hold FP32 subnormals. strided: it is not contiguous.
    finite, steps: the pass for the amax ignores NaN and Inf; tiles of each of its programs.
    ragged: the last group of packed codes is not full. words: rows of 6-bit codes are whole words of 32 bits.
    pairs: the amax is that of 16-bit numbers, two of which are compared at once.
    storage: of the scales. values: what the codes decode to is written in place of codes and scales.
    """

    source: str
    tensor: bool = False
    ptx: bool = False
    native: bool = False
    stochastic: bool = False
    subnormals: bool = True
    finite: bool = False
    steps: int = 1
    strided: bool = False
    ragged: bool = False
    words: bool = False
    storage: str = PLAIN
    values: bool = False
    pairs: bool = False


@dataclass(frozen=True)
class Source:
    """A ScaledTensor as the input of a kernel.

    block_rows, block_columns: sides of its blocks in memory, 0 for the side of the matrix. run_rows, run_columns: lengths that
    divide the sides of the tile and lie within one block; 1 where the positions of the tile are not contiguous. paired: bytes
    of two 4-bit codes belong to one tile. shared: one scale for all matrices. axis, storage, native, ptx: as of `Tile` and
    `Variant`.
    """

    spec: Spec
    axis: int
    block_rows: int
    block_columns: int
    run_rows: int
    run_columns: int
    paired: bool
    shared: bool
    storage: str = PLAIN
    native: bool = False
    ptx: bool = False

    @staticmethod
    def of(spec: Spec, block: Block, axis: int, tile: Tile, shared: bool, storage: str, native: bool, ptx: bool) -> Source:
        """The source for a tile."""
        tall, wide = (0, 0) if block == TENSOR else (n or 0 for n in in_memory(block, axis))
        run_rows = math.gcd(tall, tile.rows) if tile.block_rows in (0, tile.tall) else 1
        run_columns = math.gcd(wide, tile.columns) if tile.block_columns in (0, tile.wide) else 1
        along = 1 if axis == -1 else 0
        side, block_side, slots = (
            (tile.columns, tile.block_columns, tile.wide) if along else (tile.rows, tile.block_rows, tile.tall)
        )
        paired = spec.element.bits == 4 and side % 2 == 0 and block_side in (0, slots)
        return Source(spec, along, tall, wide, run_rows, run_columns, paired, shared, storage, native, ptx)


def in_memory(block: Block, axis: int) -> Block:
    """The (rows, columns) of a block in memory; axis: -1 or -2."""
    return block if axis == -1 else (block[1], block[0])


def divided_up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def tile_of(block: Block, axis: int, rows: int, columns: int) -> tuple[Tile, str] | str:
    """The tile for blocks of a matrix, and where their amax comes from ("tile", or the axis that a pass before goes along).

    Returns the reason instead where there is no tile. A tile has about 4096 elements, where blocks allow it: enough loads in
    flight, in few registers. Blocks down the columns have narrow tiles, so that a thread holds many elements of each.
    """
    memory_axis = 1 if axis == -1 else 0
    elements, wide = 4096, 512
    if block == TENSOR:
        across = min(power_of_two(columns), elements if rows == 1 else 1024)
        return Tile(memory_axis, 1, 0, max(1, elements // across), 1, 0, across), "tensor"
    tall, across = in_memory(block, axis)
    if tall is not None and across is not None:
        slots = power_of_two(tall), power_of_two(across)
        if slots[0] * slots[1] > LARGEST_TILE:
            return f"blocks of {tall}x{across} do not fit a tile of {LARGEST_TILE} elements"
        if axis == -2 and across == 1:
            elements, wide = slots[0] * 64, 64
        left = max(1, elements // (slots[0] * slots[1]))
        along = max(1, min(wide // slots[1], left, power_of_two(divided_up(columns, across))))
        down = max(1, min(left // along, power_of_two(divided_up(rows, tall))))
        tile = Tile(memory_axis, down, tall, slots[0], along, across, slots[1])
        narrow = axis == -2 and across == 1 and tall > 1
        return (replace(tile, elements=64, vector=8) if narrow else tile), "tile"
    if across is None:  # whole rows
        if tall != 1:
            return f"blocks of {tall} whole rows have no tile"
        if (slots := power_of_two(columns)) <= LARGEST_TILE:
            return Tile(memory_axis, max(1, min(elements // slots, power_of_two(rows))), 1, 1, 1, 0, slots), "tile"
        return Tile(memory_axis, max(1, elements // 1024), 1, 1, 1, 0, 1024), "rows"
    if across != 1:
        return f"blocks of {across} whole columns have no tile"
    if (slots := power_of_two(rows)) * 32 <= LARGEST_TILE:
        along = min(max(32, elements // slots), power_of_two(columns))
        return Tile(memory_axis, 1, 0, slots, along, 1, 1, elements=64, vector=8), "tile"
    return Tile(memory_axis, 1, 0, 128, min(64, power_of_two(columns)), 1, 1, elements=64, vector=8), "columns"


def pair_of(block: Block, rows: int, columns: int) -> tuple[tuple[Tile, str], tuple[Tile, str]] | str:
    """The same tile for blocks along the rows and for blocks down the columns, as `tile_of` returns them; or a reason.

    The amax of whole rows and columns comes from a pass before.
    """
    memory = [(0, 0) if block == TENSOR else tuple(n or 0 for n in in_memory(block, axis)) for axis in (-1, -2)]
    if any(n != power_of_two(n) for sides in memory for n in sides if n):
        return f"blocks of {block[0]}x{block[1]} are not powers of two"
    tall, wide = (max(1, *(sides[i] for sides in memory)) for i in (0, 1))
    if tall * wide > LARGEST_TILE:
        return f"blocks of {tall}x{wide} do not fit a tile of {LARGEST_TILE} elements"
    wide = max(wide, min(128, power_of_two(columns)))
    tall = max(tall, min(4096 // wide, power_of_two(rows))) if tall * wide < 4096 else tall

    def oriented(axis: int, down: int, along: int) -> tuple[Tile, str] | str:
        heights, widths = (tall // (down or tall), down, down or tall), (wide // (along or wide), along, along or wide)
        tile = Tile(axis, *heights, *widths)
        if 1 in (down, along):  # blocks of one row or column
            tile = replace(tile, elements=64 if tall * wide <= 4096 else 128, vector=16)
        if down and along:
            return tile, "tile"
        if not down and not along:
            return tile, "tensor"
        return (tile, "columns" if down == 0 else "rows") if 1 in (down, along) else "blocks are several whole rows"

    found = oriented(1, *memory[0]), oriented(0, *memory[1])
    return next((f for f in found if isinstance(f, str)), found)  # pyright: ignore[reportReturnType]


def plain_tile(axis: int, rows: int, columns: int) -> Tile:
    """A tile of contiguous positions, whatever the blocks."""
    wide = min(512, power_of_two(columns))
    tall = max(1, min(4096 // wide, power_of_two(rows)))
    return Tile(axis, 1, tall, tall, 1, wide, wide)
