"""Shapes of parts and grids, against what a cast writes and against counting."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import wide

import breccia
from breccia import MXFP8BlockScaling, ScalingRecipe
from breccia.grids import part_shapes
from breccia.kernels import reference


@pytest.mark.parametrize("axis", [-1, -2])
def test_shapes_of_parts_are_those_that_a_cast_writes(recipe: ScalingRecipe, axis: int) -> None:
    st = reference.cast(wide((3, 6, 40), seed=1), recipe, axis=axis)
    written = {name: tuple(part.shape) for name in recipe.format.parts if (part := getattr(st, name)) is not None}
    assert part_shapes(recipe.format, st.layout, (3, 6, 40), axis) == written
    if axis == -1:
        assert part_shapes(recipe.format, st.layout, (3, 6, 40)) == written


def test_a_stretch_of_one_position_is_one_whatever_its_step() -> None:
    """The last block of 33 elements has one, and may be cut off alone."""
    st = breccia.cast(wide((4, 33), seed=2), MXFP8BlockScaling())
    for step in (1, 5, 64):
        part = st[:, 32::step]
        assert part.shape == (4, 1)
        np.testing.assert_array_equal(breccia.dequantize(part), breccia.dequantize(st)[:, 32::step])
