"""The tensors with the lowest and the highest value under given scales, which bound gradients with clip="scale"."""

from __future__ import annotations

import numpy as np
import pytest

from breccia import MXFP8BlockScaling, ScalingRecipe
from breccia.arrays.frameworks import ops_of
from breccia.errors import OptionError
from breccia.kernels import reference
from breccia.kernels.checks import clip_bounds
from breccia.options import CastOptions
from breccia.testing import oracle
from breccia.testing.examples import wide


@pytest.mark.parametrize("axis", [-1, -2])
def test_extremes_have_the_scales_of_the_tensor_and_a_single_code(recipe: ScalingRecipe, axis: int) -> None:
    """By the oracle's table: all codes are that of the lowest, or of the highest, finite value."""
    st = reference.cast(wide((6, 40), seed=3, exponents=2), recipe, CastOptions(axis=axis))
    element = recipe.format.element
    values = {code: float(value) for code in range(1 << element.bits) if np.isfinite(value := oracle.decode(element, code))}
    for found, end in zip(reference.extremes(st), (min, max), strict=True):
        code = end(values, key=values.__getitem__)
        assert (found.shape, found.axis, found.layout, found.recipe) == (st.shape, axis, st.layout, recipe)
        assert found.scale is st.scale and found.zero_point is st.zero_point and found.global_scale is st.global_scale
        data = found.data if axis == -1 else found.data.swapaxes(-1, -2)
        codes = reference.unpack(ops_of(data), data, element, 40 if axis == -1 else 6)
        assert {int(c) & ((1 << element.bits) - 1) for c in codes.ravel()} == {code}


def test_bounds_are_those_given_of_the_codec_or_of_each_block() -> None:
    recipe = MXFP8BlockScaling()
    assert clip_bounds(recipe, None, None) == (-448.0, 448.0)
    assert clip_bounds(recipe, None, 3) == (-3.0, 3.0)
    assert clip_bounds(recipe, -1, None) == (-1.0, 448.0)
    assert clip_bounds(recipe, None, None, "scale") is None
    for given in ((-1.0, None), (None, 1.0), (-1.0, 1.0)):
        with pytest.raises(OptionError, match='clip="scale" computes its own bounds; omit clip_min and clip_max'):
            clip_bounds(recipe, *given, "scale")
    with pytest.raises(OptionError, match="clip_min must be less than clip_max; got 1.0 and 1.0"):
        clip_bounds(recipe, 1, 1)
