"""Rows of fragments with FNUZ codes are marked where they contain NaN, which has the code of -0."""

from __future__ import annotations

import numpy as np
import pytest

import breccia
from breccia.tensors.fragments import SLOW_BF16, SLOW_F16


@pytest.mark.parametrize("name", ["E4M3FNUZ", "E5M2FNUZ", "E4M3"])
def test_rows_with_nan_are_marked_and_others_are_not(name: str) -> None:
    recipe = breccia.Float8RowScaling(name)
    codes = np.full((128, 128), 0x7E if name == "E4M3" else 0x7F, np.uint8)
    marked = np.full_like(codes, codes[0, 0])
    marked[70, 3] = recipe.format.element.nan_code
    scale = np.ones((128, 1), np.float32)
    for data, expected in ((codes, [0, 0]), (marked, [0, SLOW_BF16 | SLOW_F16])):
        plain = breccia.from_buffer(data, scale, recipe, recipe.layout)
        stored = plain.to_storage("mma_16x128")
        assert breccia.bytes_equal(stored, plain)
        assert stored.scale[:, 0].tolist() == expected  # of each 64 rows
