"""Shapes of parts and grids, against what a cast writes and against counting."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import wide

import breccia
from breccia import Float8CurrentScaling, MXFP8BlockScaling, ScalingRecipe
from breccia.kernels import reference
from breccia.options import CastOptions
from breccia.tensors.grids import part_shapes


@pytest.mark.parametrize("axis", [-1, -2])
def test_shapes_of_parts_are_those_that_a_cast_writes(recipe: ScalingRecipe, axis: int) -> None:
    st = reference.cast(wide((3, 6, 40), seed=1), recipe, CastOptions(axis=axis))
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


def test_leading_axes_may_go_or_be_none_already() -> None:
    x = wide((1, 4, 64), seed=3)
    for recipe in (MXFP8BlockScaling(), Float8CurrentScaling()):
        st = breccia.cast(x, recipe)
        flat = st.reshape(4, 64)
        assert flat.shape == (4, 64) and breccia.bytes_equal(flat, breccia.cast(x[0], recipe))
        assert flat.reshape(4, 64) is flat and flat.reshape((4, 64)) is flat
        assert breccia.bytes_equal(flat.reshape(1, 4, 64), st)


def test_an_axis_of_no_length_splits_into_one_piece_of_none() -> None:
    """As in torch, so that the pieces joined are the tensor again."""
    for shape, axis in (((0, 64), 0), ((0, 4, 64), 0), ((4, 0), 1)):
        st = breccia.cast(np.zeros(shape, np.float32), MXFP8BlockScaling())
        pieces = st.split(32, axis)
        assert [piece.shape for piece in pieces] == [shape]
        assert breccia.bytes_equal(breccia.concat(pieces, axis), st)
