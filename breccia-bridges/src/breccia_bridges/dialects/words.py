"""Unsigned integer codes in words: a dense stream of bits, from the lowest one up, in blocks of 32 codes; and their recipes.

GPTQ (gptqmodel 7.7), AWQ (AutoAWQ 0.2.9) and AutoRound (0.16) pack codes and zero-points in this way, along other axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from breccia import ScalingRecipe
from breccia.backend import INTEGERS, NUMPY, Shape, StoredValue, ValueForm, pack, unpack

from ..safetensors_file import read as loaded
from ..text import either
from ..wrapping import integers_of
from .holding import check_format
from .integers import nibbles, split
from .scales import SCALE_DTYPES

#: Dtypes of scales that layers of gptqmodel and AutoAWQ have: they are the dtype of the model.
HALVES = ("F16", "BF16")


def matrices(value: StoredValue) -> dict[str, Shape]:
    """The shapes of 'qweight', 'qzeros' and 'scales'. Raises DialectError unless they are matrices."""
    shapes = {end: value.entries[end].shape for end in ("qweight", "qzeros", "scales")}
    value.need(
        all(len(shape) == 2 and all(shape) for shape in shapes.values()),
        f"'qweight', 'qzeros' and 'scales' are matrices; they have shapes {', '.join(str(list(s)) for s in shapes.values())}.",
        shapes=shapes,
    )
    return shapes


def bits_of(words: Sequence[int], codes: int) -> int:
    """The width of `codes` codes in a row of 32-bit words of that shape; 0 where no width fits."""
    bits, rest = divmod(32 * words[-1], codes) if codes else (0, 1)
    return 0 if rest else bits


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 1 to 8 bits, one a byte: (..., n * 32 / bits) of 32-bit words (..., n)."""
    words = np.ascontiguousarray(words)
    codes: np.ndarray = words.view(np.uint8)
    if bits == 8:
        return codes
    mask = np.uint8((1 << bits) - 1)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return ((codes[..., None] >> shifts) & mask).reshape(*words.shape[:-1], -1)
    blocks = words.view(np.uint32).reshape(*words.shape[:-1], -1, bits)
    out = np.empty((*blocks.shape[:-1], 32), np.uint8)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        code = blocks[..., word] >> np.uint32(shift)
        if shift + bits > 32:
            code = code | (blocks[..., word + 1] << np.uint32(32 - shift))
        out[..., i] = code.astype(np.uint8) & mask
    return out.reshape(*words.shape[:-1], -1)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes, one a byte, as recipes pack them."""
    if bits == 8:
        return np.ascontiguousarray(codes)
    return nibbles(codes) if bits == 4 else pack(NUMPY, codes.astype(np.int32), INTEGERS[bits, False])


def code_bytes(data: np.ndarray, bits: int, length: int) -> np.ndarray:
    """The inverse of `packed`: rows of `length` codes as recipes pack them, one a byte."""
    if bits == 8:
        return np.asarray(data).view(np.uint8)
    if bits == 4:
        return split(np.asarray(data))[..., :length]
    return unpack(NUMPY, data, INTEGERS[bits, False], length).astype(np.uint8)


def codes_in_parts(items: np.ndarray, width: int, shifts: Sequence[int], rows: slice) -> np.ndarray:
    """Some rows of codes, one a byte: each item has a code of as many rows as `shifts` says, which are equally far apart.

    items: (n, columns), which may be mapped, of which those of other rows are not read. The first n rows are under the first of
    `shifts`.
    """
    mask, row, pieces = items.dtype.type((1 << width) - 1), rows.start, list[np.ndarray]()
    while row < rows.stop:
        part, at = divmod(row, len(items))
        some = loaded(items[at : min(at + rows.stop - row, len(items))])
        pieces.append((some >> items.dtype.type(shifts[part]) & mask).astype(np.uint8))
        row += len(some)
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def blocks_of(rows: slice, bits: int) -> slice:
    """The words of all blocks of 32 codes that have any of these. They begin with the code `rows.start // 32 * 32`."""
    return slice(rows.start // 32 * bits, -(-rows.stop // 32) * bits)


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpacked`: codes (..., n), one a byte, as 32-bit words (..., n * bits / 32)."""
    return packed(np.ascontiguousarray(codes), bits).view(np.int32)


def integers(bits: int, group_size: int | None, length: int, dtype: str, is_symmetric: bool = False) -> ScalingRecipe:
    """The recipe of unsigned codes with zero-points, or of signed ones without. dtype: of scales, in the file.

    group_size: None for all of `length`, which the recipe of 4 bits says by its number.
    """
    size = length if group_size is None and bits == 4 else group_size
    fields = {"signed": is_symmetric, "symmetric": is_symmetric, "scale_dtype": SCALE_DTYPES[dtype]}
    return integers_of(bits)(group_size=size, **fields)


def held(
    form: ValueForm,
    widths: Sequence[int],
    sizes: Sequence[int] = (),
    dtypes: Sequence[str] = HALVES,
    is_symmetric: bool = False,
) -> tuple[int, int | None]:
    """(bits, group size) of unsigned codes with zero-points, or of signed ones; None for a group of the whole row.

    sizes: of groups, beside the whole row; () for any. dtypes: of scales, in a file. Raises UnsupportedError for other forms,
    naming the nearest recipe.
    """
    fmt, length = form.recipe.format, form.shape[1]
    bits = min((bits for bits in widths if bits >= fmt.element.bits), default=max(widths))
    size = 128 if fmt.block[1] is None and bits == 4 else fmt.block[1]
    if sizes and size is not None and size not in sizes:
        is_whole = bits == 4 and size == length
        size = None if is_whole else max((one for one in sizes if one <= size), default=min(sizes))
    dtype = fmt.scale.codec.name if fmt.scale.codec.name in dtypes else dtypes[0]
    scale = either([SCALE_DTYPES[dtype].upper() for dtype in dtypes])
    codes = "signed" if is_symmetric else "unsigned"
    has = f"{codes} integers of {either(widths)} bits"
    has += f"{'' if is_symmetric else ' with zero-points'}, and a scale in {scale} for each row or group"
    has += f" of {either(sizes)}" if sizes else ""
    check_format(form, has, integers(bits, size, length, dtype, is_symmetric))
    return bits, size


def whole_number(value: StoredValue, settings: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these settings that the config has. Raises DialectError unless it is an integer."""
    key = next((key for key in keys if settings.get(key) is not None), None)
    if key is None:
        return None
    number = settings[key]
    value.need(type(number) is int, f"{key} is an integer; the config has {number!r}.", **{key: number})
    return number


def check_bits(value: StoredValue, bits: int, stored: int, ends: str) -> None:
    """Raise DialectError where the config has another width than the tensors."""
    value.need(
        bits == stored,
        f"the config has bits={bits}, but the shapes of {ends} are those of {stored} bits. Download the checkpoint again.",
        bits=bits,
        stored=stored,
    )


def group_size_of(value: StoredValue, size: int | None, length: int, groups: int) -> int | None:
    """Elements along K that share a scale, None for all of them: `size`, of a config, where -1 is all; or what `groups` have.

    Raises DialectError where the config contradicts the scales, and without one unless all groups are equally long.
    """
    if size is None:
        value.need(
            groups > 0 and length % groups == 0,
            f"'scales' has {groups} groups for {length} columns, and no config says how long a group is. Give the folder with "
            "config.json.",
            groups=groups,
        )
        return length // groups
    value.need(size == -1 or size > 0, f"group_size is -1 or at least 1; the config has {size}.", group_size=size)
    known = length if size == -1 else size
    wanted = -(-length // known)
    value.need(
        groups == wanted,
        f"'scales' has {groups} groups; {length} columns in groups of {known} need {wanted}. Check group_size in the config, "
        "or download the checkpoint again.",
        group_size=known,
        groups=groups,
    )
    return None if size == -1 else size
