"""How a tensor is cut into tiles, one for each program. Imports no framework."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from breccia.backend import PLAIN, TENSOR, Block

from .specs import Spec
from .tuning.choices import DEFAULT, LIMITS, Choice

#: The most elements of a tile, which its program holds in registers.
LARGEST_TILE = LIMITS["elements"][1]
#: Rows and columns of a tile whose codes are written column by column: as many as write whole lines of 128 bytes.
_TURNED = 128, 64


@dataclass(frozen=True)
class Tile:
    """A tile of down x along blocks, in slots of tall x wide elements (powers of two).

    axis: the contraction axis, 0 for rows or 1 for columns of the matrix in memory. block_rows, block_columns: sides of a
    block; 0 for the side of the matrix, which one tile covers, or several where the amax of the block is known before.
    large: whether positions need 64 bits. folded: whether one number counts the programs, as a grid has a limit for each axis.
    backward: whether the first programs take the last tiles, which a pass before left in the cache.
    elements: of a thread. vector: the most columns that a thread loads at once, 0 for any. A thread computes the scales of all
    blocks that it has elements of, so it should have many elements of few. quads: a thread loads four rows below each other, so
    that four codes of a column are a word.
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
    quads: bool = False

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

    chunk: elements of one load of 16 bytes. steps: tiles of a program. apart: a thread's chunks are spread over its block, so
    that most of the numbers that a search for scales adds are in one thread. large, backward: as of a `Tile`.
    """

    block: int
    lane: int
    lanes: int
    chunk: int
    steps: int = 1
    apart: bool = False
    large: bool = False
    backward: bool = False

    @property
    def warps(self) -> int:
        return self.lanes // 32

    @property
    def blocks(self) -> int:
        """Blocks of a program."""
        return self.lane * self.lanes // self.block * self.steps

    @property
    def tile(self) -> Tile:
        """The tile with a row for each block."""
        return Tile(1, self.lane * self.lanes // self.block, 1, 1, 1, self.block, self.block)


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


@dataclass(frozen=True)
class Panels:
    """A tile of tall x wide elements in blocks down the columns, and with `both` also along the rows.

    A thread loads `vector` adjacent columns of eight rows.
    """

    block: int
    tall: int
    wide: int
    vector: int
    warps: int
    both: bool
    backward: bool = False


def panels_of(
    block: Block, rows: int, columns: int, bits: int, itemsize: int, both: bool, choice: Choice = DEFAULT
) -> Panels | None:  # fmt: skip
    """The panels for whole blocks of 4-bit codes, or 6-bit codes down columns alone, of a contiguous tensor; else None."""
    length = block[1] if block[0] == 1 else None
    if length is None or bits not in ((4,) if both else (4, 6)) or rows % length or length != power_of_two(length):
        return None
    if not 16 <= length <= 128 or columns % (length if both else 8) or length * columns >= 2**31:
        return None
    vector = choice.vector or 16 // itemsize
    tall, wide = max(128, length), max(choice.wide or 64, length if both else 1)
    warps = choice.warps or min(4, max(1, tall * wide // (256 * vector)))
    return Panels(length, tall, wide, vector, warps, both)


def strips_of(block: Block, rows: int, columns: int, bits: int, most: int, choice: Choice = DEFAULT) -> Strips | None:
    """The strips for whole blocks of codes of 4 or 6 bits down the columns of a contiguous tensor, if they are such.

    most: the rows of a thread whose numbers fit its registers, where nothing else is chosen.
    """
    length = block[1] if block[0] == 1 else None
    if length is None or bits not in (4, 6) or rows % length or length != power_of_two(length) or not 16 <= length <= 512:
        return None
    if columns % 16 or length * columns >= 2**31:
        return None
    across = max(4, choice.vector)  # columns that share a word of codes
    lane = min(length, max(choice.each // across, 8, length // 16) if choice.each else most)
    warps = max(choice.warps or 4, length // lane)
    return Strips(length, lane, across, 32 * across * warps * lane // length, warps)


def lanes_of(
    block: Block, lines: int, columns: int, bits: int, itemsize: int, choice: Choice = DEFAULT, steps: int = 1,
    searches: bool = False,
) -> Lanes | None:  # fmt: skip
    """The lanes for whole blocks of codes of 4 or 6 bits along the last axis of a contiguous tensor, if they are such.

    lines: rows of all matrices. searches: for scales.
    """
    length = block[1] if block[0] == 1 else None
    if length is None or bits not in (4, 6) or columns % length or length != power_of_two(length) or not 16 <= length <= 1024:
        return None
    # Four loads of 16 bytes each: more would leave too much of a cache line to other loads. In a search each
    # thread computes the scales of all blocks that it has a part of, again for each candidate: so it has one block.
    lane = min(max(length if searches else choice.each or 64 // itemsize, 16), 32 if bits == 6 else 64)
    while lines * columns % lane:  # the last lane would go beyond the tensor
        lane //= 2
    if searches:  # a warp by itself agrees without a barrier that further scales are in vain
        return Lanes(length, lane, max(32, length // lane), 16 // itemsize, apart=length > lane)
    lanes = max(32 * (choice.warps or 4), length // lane)
    return Lanes(length, lane, lanes, 16 // itemsize, choice.steps or steps)


@dataclass(frozen=True)
class Variant:
    """What else a kernel is compiled for.

    source: where the amax of blocks comes from: "tile", or a pass before, for the "tensor", "rows" or "columns"; or "supplied"
        scales. tensor: one scale for the tensor. tensor_amax: the cast takes the amax of the tensor, for its scale or the
        global one.
    ptx: for NVIDIA GPUs. native: the device converts to FP8. stochastic: rounding.
    subnormals: the input may hold FP32 subnormals. strided: it is not contiguous.
    finite, steps: the pass for the amax ignores NaN and Inf; tiles of each of its programs.
    ragged: the last group of packed codes is not full. words: rows of 6-bit codes are whole words of 32 bits.
    pairs: the amax is that of BF16 numbers (in the pass for the tensor, also FP16), two of which are compared at once.
    storage: of the scales. values: what the codes decode to is written in place of codes and scales.
    turned: blocks go down the columns, and codes are written column by column, so that those of a block are adjacent; so are
        scales of tiles.
    weighted: a search for scales weighs errors.
    """

    source: str
    tensor: bool = False
    tensor_amax: bool = False
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
    turned: bool = False
    weighted: bool = False


@dataclass(frozen=True)
class Source:
    """A ScaledTensor as the input of a kernel.

    block_rows, block_columns: sides of its blocks in memory, 0 for the side of the matrix. run_rows, run_columns: lengths that
    divide the sides of the tile and lie within one block; 1 where the positions of the tile are not contiguous. grouped: the
    bytes of a group of codes belong to one tile; words: and 16 codes of 6 bits are three words of 32 bits.
    shared: one scale for all matrices. axis, storage, native, ptx: as of `Tile` and `Variant`.
    """

    spec: Spec
    axis: int
    block_rows: int
    block_columns: int
    run_rows: int
    run_columns: int
    grouped: bool
    words: bool
    shared: bool
    storage: str = PLAIN
    native: bool = False
    ptx: bool = False

    @property
    def length(self) -> int:
        """Codes of a group of whole bytes."""
        return _group(self.spec.element.bits)

    @staticmethod
    def of(
        spec: Spec, block: Block, axis: int, tile: Tile, words: bool, shared: bool, storage: str, native: bool, ptx: bool
    ) -> Source:  # fmt: skip
        """The source for a tile. words: the codes of rows are words of 32 bits."""
        tall, wide = (0, 0) if block == TENSOR else (n or 0 for n in in_memory(block, axis))
        run_rows = math.gcd(tall, tile.rows) if tile.block_rows in (0, tile.tall) else 1
        run_columns = math.gcd(wide, tile.columns) if tile.block_columns in (0, tile.wide) else 1
        along = 1 if axis == -1 else 0
        side, block_side, slots = (
            (tile.columns, tile.block_columns, tile.wide) if along else (tile.rows, tile.block_rows, tile.tall)
        )
        count = _group(spec.element.bits)
        grouped = count > 1 and side % count == 0 and block_side in (0, slots)
        words = words and grouped and spec.element.bits == 6 and along == 1 and side % 16 == 0
        return Source(spec, along, tall, wide, run_rows, run_columns, grouped, words, shared, storage, native, ptx)


def _group(bits: int) -> int:
    """How many codes fill whole bytes."""
    return 8 // math.gcd(bits, 8)


def in_memory(block: Block, axis: int) -> Block:
    """The (rows, columns) of a block in memory; axis: -1 or -2."""
    return block if axis == -1 else (block[1], block[0])


def divided_up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def tile_of(
    block: Block, axis: int, rows: int, columns: int, choice: Choice = DEFAULT, turned: bool = False
) -> tuple[Tile, str] | str:  # fmt: skip
    """The tile for blocks of a matrix, and where their amax comes from ("tile", or the axis that a pass before goes along).

    Returns the reason instead where there is no tile. A tile has about 4096 elements, where blocks allow it: enough loads in
    flight, in few registers. Blocks down the columns have narrow tiles, so that a thread holds many elements of each. Where
    codes are `turned`, tiles are tall enough for whole lines of them.
    """
    memory_axis = 1 if axis == -1 else 0
    elements = choice.elements or (_TURNED[0] * _TURNED[1] if turned else 4096)

    def tile(down: int, tall: int, slots_down: int, along: int, wide: int, slots_along: int, columns: bool = False) -> Tile:
        each, vector = (64, 8) if columns or turned else (32, 0)
        sides = (memory_axis, down, tall, slots_down, along, wide, slots_along)
        return Tile(*sides, elements=choice.each or each, vector=choice.vector or vector)

    if block == TENSOR:
        if turned and not choice.elements:
            elements *= 2
        widest = choice.wide or (_TURNED[1] if turned else 1024)
        across = min(power_of_two(columns), elements if rows == 1 else min(elements, widest))
        return tile(1, 0, max(1, elements // across), 1, 0, across), "tensor"
    tall, across = in_memory(block, axis)
    if tall is not None and across is not None:
        slots = power_of_two(tall), power_of_two(across)
        if slots[0] * slots[1] > LARGEST_TILE:
            return f"blocks of {tall}x{across} do not fit a tile of {LARGEST_TILE} elements"
        narrow = axis == -2 and across == 1
        wide = choice.wide or (_TURNED[1] if turned else 64 if narrow else 512)
        if narrow and not choice.elements and not turned:
            elements = slots[0] * min(wide, max(64, LARGEST_TILE // slots[0]))
        left = max(1, elements // (slots[0] * slots[1]))
        along = max(1, min(wide // slots[1], left, power_of_two(divided_up(columns, across))))
        down = max(1, min(left // along, power_of_two(divided_up(rows, tall))))
        return tile(down, tall, slots[0], along, across, slots[1], narrow and tall > 1), "tile"
    if across is None:  # whole rows
        if tall != 1:
            return f"blocks of {tall} whole rows have no tile"
        if (slots := power_of_two(columns)) <= LARGEST_TILE:
            down = max(1, min(elements // slots, power_of_two(rows)))
            return tile(down, 1, 1, 1, 0, slots), "tile"
        wide = min(elements, choice.wide or 1024)
        return tile(max(1, elements // wide), 1, 1, 1, 0, wide), "rows"
    if across != 1:
        return f"blocks of {across} whole columns have no tile"
    if (slots := power_of_two(rows)) * 32 <= LARGEST_TILE:
        along = min(max(32, elements // slots), power_of_two(columns))
        return tile(1, 0, slots, along, 1, 1, True), "tile"
    wide = choice.wide or 64
    along, tall = min(wide, power_of_two(columns)), max(1, (choice.elements or 8192) // wide)
    return tile(1, 0, tall, along, 1, 1, True), "columns"


def pair_of(
    block: Block, rows: int, columns: int, turned: bool = False, choice: Choice = DEFAULT
) -> tuple[tuple[Tile, str], tuple[Tile, str]] | str:  # fmt: skip
    """The same tile for blocks along the rows and for blocks down the columns, as `tile_of` returns them; or a reason.

    The amax of whole rows and columns comes from a pass before. turned: as of `tile_of`.
    """
    memory = [(0, 0) if block == TENSOR else tuple(n or 0 for n in in_memory(block, axis)) for axis in (-1, -2)]
    if any(n != power_of_two(n) for sides in memory for n in sides if n):
        return f"blocks of {block[0]}x{block[1]} are not powers of two"
    tall, wide = (max(1, *(sides[i] for sides in memory)) for i in (0, 1))
    if tall * wide > LARGEST_TILE:
        return f"blocks of {tall}x{wide} do not fit a tile of {LARGEST_TILE} elements"
    wide = max(wide, min(choice.wide or 128, power_of_two(columns), LARGEST_TILE // tall))
    height = min(choice.elements // wide or _TURNED[0], power_of_two(rows), LARGEST_TILE // wide)
    tall = max(tall, height) if turned else tall
    tall = max(tall, min(4096 // wide, power_of_two(rows))) if tall * wide < 4096 else tall

    def oriented(axis: int, down: int, along: int) -> tuple[Tile, str] | str:
        heights, widths = (tall // (down or tall), down, down or tall), (wide // (along or wide), along, along or wide)
        tile = Tile(axis, *heights, *widths)
        if turned:
            tile = replace(tile, elements=choice.each or 64, vector=choice.vector or 8)
        elif 1 in (down, along):  # blocks of one row or column
            tile = replace(tile, elements=64 if tall * wide <= 4096 else 128, vector=16)
        if down and along:
            return tile, "tile"
        if not down and not along:
            return tile, "tensor"
        return (tile, "columns" if down == 0 else "rows") if 1 in (down, along) else "blocks are several whole rows"

    tiles = oriented(1, *memory[0]), oriented(0, *memory[1])
    return next((f for f in tiles if isinstance(f, str)), tiles)  # pyright: ignore[reportReturnType]


def plain_tile(axis: int, rows: int, columns: int, choice: Choice = DEFAULT) -> Tile:
    """A tile of contiguous positions, whatever the blocks."""
    elements = choice.elements or 4096
    wide = min(choice.wide or 512, power_of_two(columns), elements)
    tall = max(1, min(elements // wide, power_of_two(rows)))
    return Tile(axis, 1, tall, tall, 1, wide, wide, elements=choice.each or 32, vector=choice.vector)


def amax_tile(scope: str, rows: int, columns: int, large: bool, choice: Choice = DEFAULT) -> Tile:
    """A tile of a pass for the amax of a scope: the "tensor", its "rows" or its "columns"."""
    if scope == "columns":
        elements, wide = choice.elements or 8192, choice.wide or 128
        return Tile(1, 1, 0, max(1, elements // wide), 1, 0, min(wide, power_of_two(columns)), large)
    elements = choice.elements or 4096
    wide = min(elements, elements if rows == 1 else choice.wide or 1024, power_of_two(columns))
    return Tile(1, 1, 0, min(max(1, elements // wide), power_of_two(rows)), 1, 0, wide, large)
