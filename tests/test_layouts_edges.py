"""Layouts and levels of scales: how one is spelled, and how many there are."""

from __future__ import annotations

import pytest

from breccia import PerGroupIndex
from breccia.codecs import E2M1, E4M3, F32
from breccia.errors import RecipeError
from breccia.formats import TENSOR, Format, Level


def test_an_index_of_more_than_eight_entries_is_shown_by_its_first_eight() -> None:
    assert repr(PerGroupIndex((0, 1, 0, 1, 1, 1, 0, 0), 2)) == "PerGroupIndex(index=(0, 1, 0, 1, 1, 1, 0, 0) of 8, groups=2)"
    assert repr(PerGroupIndex((2,) * 9, 3)) == "PerGroupIndex(index=(2, 2, 2, 2, 2, 2, 2, 2, ...) of 9, groups=3)"
    assert repr(PerGroupIndex((1, 0), 2)) == "PerGroupIndex(index=(1, 0) of 2, groups=2)"


def test_a_format_has_one_or_two_levels_of_scales() -> None:
    tensor, block = Level(F32, TENSOR), Level(E4M3, (1, 16))
    assert Format(E2M1, (block,)).global_scale is None
    assert Format(E2M1, (tensor, block)).global_scale == tensor
    for levels in ((), (tensor, tensor, block)):
        with pytest.raises(RecipeError, match=f"a format has one or two scale levels; got {len(levels)}"):
            Format(E2M1, levels)
