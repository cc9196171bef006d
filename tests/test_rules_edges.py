"""Scale rules where a step of docs/spec/numerics.md, section 5.2, decides alone, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from breccia import DelayedScaling, NVFP4BlockScaling
from breccia.codecs import E4M3
from breccia.kernels import numpy as kernels
from breccia.kernels import reference
from breccia.testing import oracle


@pytest.mark.parametrize("margin", [-3, 0, 3])
@pytest.mark.parametrize("exponent", [-125, -120, -119, -118, -110, 100, 126])
def test_te_clamps_its_multiplier_before_the_margin_and_after_it(margin: int, exponent: int) -> None:
    """448 / amax reaches 2^126 at amax 448 * 2^-126, which is 1.75 * 2^-118."""
    recipe = DelayedScaling(margin=margin, scale_rule="te")
    x = np.array([[1.25, -0.7, 0.3, 0.0]], np.float32) * np.float32(2.0**exponent)
    found, expected = reference.cast(x, recipe), oracle.cast(x, recipe)
    assert found.scale.view(np.uint32) == expected.scale
    np.testing.assert_array_equal(found.data, expected.codes)


@pytest.mark.parametrize("cast", [reference.cast, kernels.cast], ids=["generic", "NumPy"])
def test_a_block_whose_scales_multiply_to_less_than_a_normal_number_has_codes_of_zero(cast: Any) -> None:
    """Section 5.3: e = s * g below 2^-126 is not usable.

    An amax of 6 * 2^-126 asks for e = 2^-126, and under g = 1.54 * 2^-126 for s = 0.649, which E4M3 rounds to 0.625.
    """
    smooth = np.resize(np.array([1.0, -0.6, 0.3, 0.9], np.float32), 16)
    x = np.stack([smooth * np.float32(n * 2.0**-126) for n in (1, 4, 6, 6.25, 7, 12, 64)])
    for g in (1.0, 1.3, 1.54, 1.7, 2.9):
        coarse = float(np.float32(g * 2.0**-126))
        found, expected = cast(x, NVFP4BlockScaling(), scale=coarse), oracle.cast(x, NVFP4BlockScaling(), scale=coarse)
        scales, pairs = np.asarray(found.scale).view(np.uint8), np.asarray(found.data)
        np.testing.assert_array_equal(scales, expected.scale)
        np.testing.assert_array_equal(np.stack([pairs & 15, pairs >> 4], -1).reshape(x.shape), expected.codes)
        multiplied = [float(oracle.decode(E4M3, int(code))) * coarse for code in scales[:, 0]]
        assert expected.codes.any(1).tolist() == [e >= 2.0**-126 for e in multiplied]
        if g == 1.54:
            assert 0 < multiplied[2] < 2.0**-126
