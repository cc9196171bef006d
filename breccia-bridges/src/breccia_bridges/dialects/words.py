"""Unsigned integer codes in words: a dense stream of bits, from the lowest one up, in blocks of 32 codes; and their recipes.

GPTQ (gptqmodel 7.7), AWQ (AutoAWQ 0.2.9) and AutoRound (0.16) pack codes and zero-points in this way, along other axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from breccia import INT4Scaling, INT8Scaling, ScalingRecipe
from breccia.backend import Shape, StoredValue

from .integers import nibbles
from .scales import SCALE_DTYPES


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


def packed(codes: np.ndarray, recipe: ScalingRecipe) -> np.ndarray:
    """Codes, one a byte, as a recipe of 4 or 8 bits packs them: the even code of a pair in the low nibble."""
    return np.ascontiguousarray(codes) if recipe.format.element.bits == 8 else nibbles(codes)


def integers(bits: int, group_size: int, dtype: str) -> ScalingRecipe:
    """The recipe of unsigned codes with zero-points, of 4 bits for up to 4, else of 8. dtype: of scales, in the file."""
    kind = INT4Scaling if bits <= 4 else INT8Scaling
    return kind(group_size=group_size, signed=False, scale_dtype=SCALE_DTYPES[dtype], symmetric=False)


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


def group_size_of(value: StoredValue, size: int | None, length: int, groups: int) -> int:
    """Elements along K that share a scale: `size`, of a config, where -1 is all of them; or what `groups` groups have.

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
    size = length if size == -1 else size
    wanted = -(-length // size)
    value.need(
        groups == wanted,
        f"'scales' has {groups} groups; {length} columns in groups of {size} need {wanted}. Check group_size in the config, or "
        "download the checkpoint again.",
        group_size=size,
        groups=groups,
    )
    return size
