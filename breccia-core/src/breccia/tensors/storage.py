"""Storages: exact rearrangements of codes and scales, for hardware and kernels that need another memory order.

A tensor in a storage has the values, shape, digest and files of the plain one; `st.to_plain()` restores it bit by bit. Storages
are defined for blocks along the last axis; a tensor with blocks along the one before it is stored like its transpose.

A mapping is a pair of functions `f(ops, parts, plain) -> parts` over `Ops`, inverse to each other. `parts` are the arrays of a
tensor by name ("data", "scale", and "zero_point" if present); `plain` describes the plain tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import targets
from ..errors import PluginError, UnsupportedError
from ..formats import TENSOR, Block, Format
from ..layouts import Shape
from ..options import PLAIN
from .grids import packed_length, packing

if TYPE_CHECKING:
    from ..arrays.ops import Array, Ops

Parts = dict[str, Any]


class Plain(NamedTuple):
    """The plain tensor of a storage: its logical shape, scale blocks, format, and the dtypes of its components."""

    shape: Shape
    block: Block
    format: Format
    dtypes: dict[str, str]

    @property
    def scale_shape(self) -> Shape:
        """The shape of `scale`, by rows and columns of blocks."""
        (m, k), (rows, columns) = self.block, self.shape[-2:]
        return (*self.shape[:-2], -(-rows // m) if m else 1, -(-columns // k) if k else 1)


@dataclass(frozen=True)
class Storage:
    """A named, exact rearrangement of codes and scales.

    from_plain, to_plain: object references to the two functions.
    accepts: object reference to f(plain: Plain) -> None | the reason why such a tensor is unsupported.
    data_axes: the number of axes of the stored `data` that replace the last two logical ones; 0 where codes are not moved.
        Moved codes may include the scales: `scale` is then an empty array.
    """

    name: str
    from_plain: str
    to_plain: str
    accepts: str | None = None
    data_axes: int = 0
    plugin: str = field(default="", compare=False)

    def check(self) -> None:
        """Raise PluginError if the declaration is invalid."""
        what = f"storage {self.name!r}"
        targets.check_fields(self, what)
        if self.name in (PLAIN, "*"):
            raise PluginError(f"{what}: the name is reserved by breccia; choose another.")
        for name in ("from_plain", "to_plain", "accepts"):
            if (target := getattr(self, name)) is not None:
                targets.check(target, f"{what}: {name}")
        if self.data_axes < 0:
            raise PluginError(f"{what}: data_axes must be 0, or the number of axes of codes; got {self.data_axes}.")

    def refuse(self, plain: Plain) -> None:
        """Raise UnsupportedError where this storage does not support a tensor."""
        reason = "a matrix has scales of its own order here" if len(plain.shape) < 2 else None
        if reason is None and self.accepts is not None:
            reason = targets.load(self.accepts)(plain)
        if reason is not None:
            raise UnsupportedError(f"storage {self.name!r} cannot hold this tensor: {reason}. It stays in plain storage.")


# -- scales ----------------------------------------------------------------------------------------------------------


def accepts_blocks(plain: Plain) -> str | None:
    """Reordered scales require one scale per block."""
    return "it has one scale for the whole tensor, or for each matrix" if plain.block == TENSOR else None


def accepts_byte_scales(plain: Plain) -> str | None:
    """The swizzle requires one-byte scales."""
    if plain.format.scale.codec.bits != 8:
        return f"its scales are {plain.format.scale.codec.name}, and the order is one of bytes"
    return accepts_blocks(plain)


def swizzled(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Scales in tiles of 128 rows by 4 columns of 512 bytes, zeros as padding: row r, column c of a tile at
    (r % 32) * 16 + (r // 32) * 4 + c. cuBLAS 12.8, "1D block scaling factors layout"; torch.nn.functional.scaled_mm calls it
    SWIZZLE_32_4_4. Stored (..., row tiles, column tiles, 512)."""

    def change(scale: Array) -> Array:
        words = ops.load(scale)
        *lead, rows, columns = words.shape
        down, along = -(-rows // 128), -(-columns // 4)
        words = ops.pad(words, (*(0 for _ in lead), down * 128 - rows, along * 4 - columns))
        n = len(lead)
        tiles = ops.reshape(words, (*lead, down, 4, 32, along, 4))
        tiles = ops.transpose(tiles, (*range(n), n, n + 3, n + 2, n + 1, n + 4))
        return ops.store(ops.reshape(tiles, (*lead, down, along, 512)), _dtype(ops, scale))

    return _scales(parts, change)


def unswizzled(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Inverse of `swizzled`."""

    def change(scale: Array) -> Array:
        *lead, rows, columns = plain.scale_shape
        down, along, n = -(-rows // 128), -(-columns // 4), len(plain.shape) - 2
        tiles = ops.reshape(ops.load(scale), (*lead, down, along, 32, 4, 4))
        tiles = ops.transpose(tiles, (*range(n), n, n + 3, n + 2, n + 1, n + 4))
        words = ops.reshape(tiles, (*lead, down * 128, along * 4))[..., :rows, :columns]
        return ops.store(words, _dtype(ops, scale))

    return _scales(parts, change)


#: Columns of scales are padded to this many bytes, as TMA descriptors require.
_TMA_BYTES = 16


def column_major(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Scales (columns, rows), rows padded with zeros to a multiple of 16 bytes: the order that DeepGEMM reads by TMA."""

    def change(scale: Array) -> Array:
        words = ops.swap(ops.load(scale))
        rows = words.shape[-1]
        unit = _TMA_BYTES // ops.itemsize(scale)
        words = ops.pad(words, (*(0 for _ in words.shape[:-1]), -rows % unit))
        return ops.store(words, _dtype(ops, scale))

    return _scales(parts, change)


def padded_1x4(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Scales (rows, columns), columns padded with zeros to a multiple of 4: TransformerEngine's order for 128x128 tiles."""
    return _padded(ops, parts, 1, 4)


def padded_128x4(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Scales (rows, columns), padded with zeros to multiples of 128 and 4: `swizzle_128x4` before the swizzle."""
    return _padded(ops, parts, 128, 4)


def cropped(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Inverse of `padded_1x4` and of `padded_128x4`."""
    rows, columns = plain.scale_shape[-2:]

    def change(scale: Array) -> Array:
        words = ops.load(scale)[..., :rows, :columns]
        return ops.store(ops.reshape(ops.reshape(words, (-1,)), plain.scale_shape), _dtype(ops, scale))

    return _scales(parts, change)


def _padded(ops: Ops, parts: Parts, rows: int, columns: int) -> Parts:
    def change(scale: Array) -> Array:
        words = ops.load(scale)
        *lead, m, n = words.shape
        return ops.store(ops.pad(words, (*(0 for _ in lead), -m % rows, -n % columns)), _dtype(ops, scale))

    return _scales(parts, change)


def transposed(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Scales (columns, rows), without padding."""

    def change(scale: Array) -> Array:
        # `reshape` copies what `swap` may return as a view.
        words = ops.swap(ops.load(scale))
        return ops.store(ops.reshape(ops.reshape(words, (-1,)), tuple(words.shape)), _dtype(ops, scale))

    return _scales(parts, change)


def rows_first(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Inverse of `transposed` and of `column_major`."""

    def change(scale: Array) -> Array:
        words = ops.swap(ops.load(scale)[..., : plain.scale_shape[-2]])
        return ops.store(ops.reshape(ops.reshape(words, (-1,)), plain.scale_shape), _dtype(ops, scale))

    return _scales(parts, change)


def _scales(parts: Parts, change: Any) -> Parts:
    """Apply `change` to scales, and to zero-points, which have the same order."""
    return {name: change(part) if name in ("scale", "zero_point") else part for name, part in parts.items()}


def _dtype(ops: Ops, part: Array) -> str:
    from ..arrays.frameworks import dtype_name

    return dtype_name(part)


# -- codes and scales in one buffer ----------------------------------------------------------------------------------


def accepts_rows(plain: Plain) -> str | None:
    """Blocks must be runs within a row, in whole bytes."""
    m, k = plain.block
    if m != 1:
        return f"its blocks are {m or 'all'} rows high, and this storage needs blocks within one row"
    if k is not None and k % packing(plain.format.element)[0]:
        return f"its blocks of {k} {plain.format.element.name} codes do not end on a byte boundary"
    if plain.format.offset != "none":
        return "it has an offset, which this storage does not support"
    return None


def interleaved(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Each block's codes, then its scale: bytes (..., rows, blocks of a row, bytes of a block), zeros as padding of the last.

    One read loads a block with its scale, as in GGUF.
    """
    codes, scale = ops.load(parts["data"]), parts["scale"]
    *lead, rows, columns = plain.scale_shape
    codes = ops.pad(codes, (*(0 for _ in codes.shape[:-1]), columns * _block_bytes(plain) - codes.shape[-1]))
    codes = ops.reshape(codes, (*lead, rows, columns, _block_bytes(plain)))
    words = ops.reshape(ops.load(scale), (*lead, rows, columns, 1))
    bytes_ = [(words >> (8 * i)) & 0xFF for i in range(ops.itemsize(scale))]
    data = ops.store(ops.concat([codes, *bytes_]), "uint8")
    return {**parts, "data": data, "scale": ops.store(ops.reshape(words, (-1,))[:0] & 0xFF, "uint8")}


def deinterleaved(ops: Ops, parts: Parts, plain: Plain) -> Parts:
    """Inverse of `interleaved`."""
    stored, each = ops.load(parts["data"]), _block_bytes(plain)
    *lead, rows, columns = plain.scale_shape
    length = packed_length(plain.format.element, plain.shape[-1])
    codes = ops.reshape(stored[..., :each], (*lead, rows, columns * each))[..., :length]
    word = stored[..., each]
    for i in range(1, stored.shape[-1] - each):
        word = word | (stored[..., each + i] << (8 * i))
    dtypes = plain.dtypes
    return {**parts, "data": ops.store(codes, dtypes["data"]), "scale": ops.store(word, dtypes["scale"])}


def _block_bytes(plain: Plain) -> int:
    """Bytes of one block's codes."""
    return packed_length(plain.format.element, plain.block[1] or plain.shape[-1])


_HERE = "breccia.tensors.storage:"
_FRAGMENTS = "breccia.tensors.fragments:"
#: The storages that breccia declares.
STORAGES: tuple[Storage, ...] = (
    Storage("swizzle_128x4", f"{_HERE}swizzled", f"{_HERE}unswizzled", f"{_HERE}accepts_byte_scales"),
    Storage("column_major", f"{_HERE}column_major", f"{_HERE}rows_first", f"{_HERE}accepts_blocks"),
    Storage("transposed", f"{_HERE}transposed", f"{_HERE}rows_first", f"{_HERE}accepts_blocks"),
    Storage("mma_16x128", f"{_FRAGMENTS}in_fragments", f"{_FRAGMENTS}out_of_fragments", f"{_FRAGMENTS}accepts", data_axes=3),
    Storage("padded_1x4", f"{_HERE}padded_1x4", f"{_HERE}cropped", f"{_HERE}accepts_blocks"),
    Storage("padded_128x4", f"{_HERE}padded_128x4", f"{_HERE}cropped", f"{_HERE}accepts_blocks"),
    Storage("interleaved", f"{_HERE}interleaved", f"{_HERE}deinterleaved", f"{_HERE}accepts_rows", data_axes=3),
)
