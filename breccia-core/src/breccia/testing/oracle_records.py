"""The oracle's scale records: codes of several levels as bytes and back, one integer at a time.

It shares nothing with `breccia.kernels.reference.records`: a record is a number in base 2, written by Python's integers.
"""

from __future__ import annotations

import numpy as np

from ..formats import Level


def sizes(levels: tuple[Level, ...]) -> list[tuple[int, int]]:
    """(codes, bytes) of each level in a record: as many bytes as whole groups of codes that end with a byte."""
    out: list[tuple[int, int]] = []
    for level in levels:
        outer, inner, bits = levels[0].block[1], level.block[1], level.codec.bits
        assert outer is not None and inner is not None
        group = next(n for n in range(1, 9) if n * bits % 8 == 0)
        count = outer // inner
        out.append((count, -(-count // group) * group * bits // 8))
    return out


def to_bytes(levels: tuple[Level, ...], codes: list[np.ndarray]) -> np.ndarray:
    """uint32 bytes of shape (..., records * bytes) from the codes of each level, of shape (..., blocks)."""
    lead, records = codes[0].shape[:-1], codes[0].shape[-1]
    rows: list[list[int]] = []
    for row in np.ndindex(*lead):
        of_row: list[int] = []
        for n in range(records):
            for level, (count, size), of_level in zip(levels, sizes(levels), codes, strict=True):
                word = 0
                for place, code in enumerate(of_level[row][n * count : (n + 1) * count]):
                    word |= int(code) << (place * level.codec.bits)
                of_row += word.to_bytes(size, "little")
        rows.append(of_row)
    width = records * sum(size for _, size in sizes(levels))
    return np.array(rows, np.uint32).reshape(*lead, width)


def from_bytes(levels: tuple[Level, ...], stored: np.ndarray) -> list[np.ndarray]:
    """Inverse of `to_bytes`."""
    width = sum(size for _, size in sizes(levels))
    lead, records = stored.shape[:-1], stored.shape[-1] // width
    codes = [np.zeros((*lead, records * count), np.uint32) for count, _ in sizes(levels)]
    for row in np.ndindex(*lead):
        for n in range(records):
            start = n * width
            for level, (count, size), of_level in zip(levels, sizes(levels), codes, strict=True):
                word = int.from_bytes(bytes(stored[row][start : start + size].astype(np.uint8)), "little")
                start += size
                for place in range(count):
                    of_level[(*row, n * count + place)] = word >> (place * level.codec.bits) & ((1 << level.codec.bits) - 1)
    return codes
