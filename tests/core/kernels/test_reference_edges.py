"""Edge cases of the generic algorithm: empty blocks, components that do not fit, scales that are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import breccia
from breccia import Float8RowScaling, INT8Scaling, NVFP4BlockScaling, ScaledTensor
from breccia.arrays.ops import NUMPY
from breccia.errors import LayoutError, UnsupportedError
from breccia.kernels import reference
from breccia.kernels.reference.requantizing import differ
from breccia.options import CastOptions
from breccia.testing import oracle
from breccia.testing.compare import expect_numbers, expect_written, written
from breccia.testing.examples import wide
from breccia.testing.places import Place

HERE = Place("numpy")


@pytest.mark.parametrize("offset", ["zero_point", "bias"])
def test_an_empty_row_has_the_scale_of_zeros(offset: str) -> None:
    recipe = INT8Scaling(signed=False, symmetric=False, offset=offset)
    x = np.zeros((4, 0), np.float32)
    found = reference.cast(x, recipe)
    assert found.scale.shape == found.zero_point.shape == (4, 1)
    expect_written(HERE, found, oracle.cast(x, recipe))


def test_supplied_scales_of_rows_have_the_axis_that_a_cast_writes() -> None:
    """PerChannel's form (M,) is one to read, not to write."""
    x, recipe = wide((4, 32), seed=1, exponents=2), Float8RowScaling()
    scale = np.array([[1.0], [0.5], [2.0], [3.0]], np.float32)
    expect_written(
        HERE, reference.cast(x, recipe, CastOptions(scale=scale)), oracle.cast(x, recipe, scale=scale.view(np.uint32))
    )
    for other in ((4,), (1, 4), ()):
        with pytest.raises(LayoutError, match=r"scale= must have shape \(4, 1\) for x of shape \(4, 32\) and PerChannel"):
            reference.cast(x, recipe, CastOptions(scale=np.ones(other, np.float32)))


class Foreign:
    """An array of an undeclared framework: it has only a shape and a dtype."""

    def __init__(self, like: Any) -> None:
        self.shape, self.dtype = like.shape, like.dtype


@pytest.mark.parametrize("part", ["data", "scale", "global_scale"])
@pytest.mark.parametrize(
    ("kind", "found"),
    [(Foreign, "Foreign"), (np.ma.masked_array, "numpy.ma.MaskedArray, not a plain numpy array")],
    ids=["foreign", "masked"],
)
def test_out_with_a_component_of_another_framework_is_refused_before_writing(part: str, kind: Any, found: str) -> None:
    x, recipe = wide((4, 32), seed=2, exponents=2), NVFP4BlockScaling()
    st = reference.cast(np.zeros_like(x), recipe)
    parts = {name: np.array(getattr(st, name)) for name in ("data", "scale", "global_scale")}
    before = {name: array.tobytes() for name, array in parts.items()}
    held = parts | {part: kind(parts[part])}
    out = ScaledTensor.from_parts(held["data"], held["scale"], recipe, st.layout, global_scale=held["global_scale"])
    with pytest.raises(UnsupportedError, match=rf"out\.{part} (must be an array of|is a) .*{found}"):
        reference.cast(x, recipe, CastOptions(out=out))
    assert {name: array.tobytes() for name, array in parts.items()} == before


def test_requantizing_to_finer_blocks_keeps_every_scale_bit_of_the_same_codec() -> None:
    """Section 6, of scales that no cast writes: BF16 subnormals, and NaN of other bits."""
    rows, groups = (INT8Scaling(scale_dtype="bf16", group_size=size) for size in (None, 16))
    scale = np.array([[0x0001], [0x007F], [0x3F80], [0x7FC1], [0xFFC0], [0x8001]], np.uint16)
    st = breccia.from_buffer(np.resize(np.arange(-128, 128, dtype=np.int8), (6, 40)), scale, rows, rows.layout)
    kept = reference.requantize(st, groups)
    np.testing.assert_array_equal(kept.scale, np.repeat(scale, 3, axis=1))
    np.testing.assert_array_equal(kept.data, st.data)
    for one in (st, kept):
        expect_numbers("decoded", HERE, reference.dequantize(one), oracle.dequantize(written(HERE, st), rows))


def test_infinity_differs_from_nan_and_all_nans_are_equal() -> None:
    words = np.array([0x7F800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF800000, 0, 1 << 31, 0x3F800000], np.uint32)
    a, b = (grid.view(np.float32) for grid in np.meshgrid(words, words))
    alike = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    np.testing.assert_array_equal(differ(NUMPY, a, b), ~alike)
