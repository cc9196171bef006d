"""Shapes of components and block grids, compared with casts."""

from __future__ import annotations

import numpy as np
import pytest

import breccia
from breccia import Float8CurrentScaling, MXFP8BlockScaling, ScalingRecipe, UnsupportedError
from breccia.kernels import reference
from breccia.options import CastOptions
from breccia.tensors.grids import Gathered, cast_nbytes, part_shapes
from breccia.testing.examples import wide


@pytest.mark.parametrize("axis", [-1, -2])
def test_component_shapes_and_bytes_are_those_of_a_cast(recipe: ScalingRecipe, axis: int) -> None:
    st = reference.cast(wide((3, 6, 40), seed=1), recipe, CastOptions(axis=axis))
    written = {name: tuple(part.shape) for name in recipe.format.parts if (part := getattr(st, name)) is not None}
    assert part_shapes(recipe.format, st.layout, (3, 6, 40), axis) == written
    assert cast_nbytes(recipe.format, st.layout, (3, 6, 40), axis) == st.nbytes
    if axis == -1:
        assert part_shapes(recipe.format, st.layout, (3, 6, 40)) == written


def test_a_slice_of_one_position_accepts_any_step() -> None:
    """The last block of 33 elements has one element, and can be sliced off."""
    st = breccia.cast(wide((4, 33), seed=2), MXFP8BlockScaling())
    for step in (1, 5, 64):
        part = st[:, 32::step]
        assert part.shape == (4, 1)
        np.testing.assert_array_equal(breccia.dequantize(part), breccia.dequantize(st)[:, 32::step])


def test_leading_axes_can_be_removed_and_added() -> None:
    x = wide((1, 4, 64), seed=3)
    for recipe in (MXFP8BlockScaling(), Float8CurrentScaling()):
        st = breccia.cast(x, recipe)
        flat = st.reshape(4, 64)
        assert flat.shape == (4, 64) and breccia.bytes_equal(flat, breccia.cast(x[0], recipe))
        assert flat.reshape(4, 64) is flat and flat.reshape((4, 64)) is flat
        assert breccia.bytes_equal(flat.reshape(1, 4, 64), st)


def test_an_axis_of_length_zero_splits_into_one_empty_piece() -> None:
    """As in torch, so that concat of the pieces gives the tensor."""
    for shape, axis in (((0, 64), 0), ((0, 4, 64), 0), ((4, 0), 1)):
        st = breccia.cast(np.zeros(shape, np.float32), MXFP8BlockScaling())
        pieces = st.split(32, axis)
        assert [piece.shape for piece in pieces] == [shape]
        assert breccia.bytes_equal(breccia.concat(pieces, axis), st)


def test_positions_that_only_a_run_knows_are_not_listed() -> None:
    with pytest.raises(UnsupportedError, match="this layout has one entry for each position, so positions must be numbers; a"):
        list(Gathered(np.array([0, 1], np.int32), False))
