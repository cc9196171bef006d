"""The smallest and the largest element of a tensor, by bits and by codes, are those of its decoded values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import breccia
from breccia.internal import measuring
from breccia_bridges.extremes import Extremes, of_bits, of_codes
from breccia_bridges.measure import FileTensor
from breccia_bridges.slab_casts import SlabCasts

SHAPES = [(256, 384), (3, 128, 256), (40, 128)]


def normal(shape: tuple[int, ...], shift: float = 0.0) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32) + np.float32(shift)


def ends(x: np.ndarray) -> list[float]:
    return [float(x.min()), float(x.max())]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shift", [0.0, 50.0, -50.0])
@pytest.mark.parametrize("recipe", ["fp8_block,block_m=128", "fp8_row", "fp8_current", "fp8_block,fp8_format=e5m2"])
def test_the_extremes_of_wide_blocks_follow_from_their_codes(recipe: str, shift: float, shape: tuple[int, ...]) -> None:
    st = breccia.cast(normal(shape, shift), recipe)
    found = of_codes(st)
    if st.shape[-2] % (st.layout.block()[0] or 1) == 0:
        assert found is not None
    assert found is None or list(map(float, found)) == ends(breccia.dequantize(st))


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "int8", "int4", "fp8_block,fp8_format=e4m3fnuz"])
def test_the_codes_of_other_tensors_are_decoded(recipe: str) -> None:
    st = breccia.cast(normal((256, 384)), recipe)
    assert of_codes(st) is None
    assert Extremes.of([FileTensor(st)]).numbers.tolist() == ends(breccia.dequantize(st))


@pytest.mark.parametrize("shift", [0.0, 50.0, -50.0])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_extremes_of_plain_numbers_follow_from_their_bits(dtype: str, shift: float) -> None:
    x = normal((64, 96), shift).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    found = of_bits(x.view(np.uint16) if dtype == "bfloat16" else x)
    assert found is not None and list(map(float, found)) == ends(x.astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("recipe", ["", "fp8_block,block_m=128"])
def test_numbers_that_are_not_finite_are_noted_beside_the_extremes_of_the_others(recipe: str, bad: float) -> None:
    x = normal((256, 384))
    x[3, 5] = bad
    st = breccia.cast(x, recipe) if recipe else None
    decoded = x if st is None else breccia.dequantize(st)
    low, high, other = Extremes.of([FileTensor(x, "F32") if st is None else FileTensor(st)]).numbers
    assert [low, high] == ends(decoded[np.isfinite(decoded)]) and np.isnan(other)


def test_the_extremes_of_several_tensors_are_found_once_and_together() -> None:
    x, y = normal((2, 300, 256)), normal((40, 64), 30.0)
    both = Extremes([FileTensor(x, "F32"), FileTensor(y, "F32")])
    items = both.items()
    assert both.items() == []
    for item in items:
        item(measuring.Rooms())
    assert both.numbers.tolist() == [float(x.min()), float(y.max())]


@pytest.mark.parametrize("largest", [3.0, 1 + 2.0**-20, np.nan])
def test_a_tensor_of_bf16_shares_its_range_with_numbers_that_bf16_has_and_lacks(largest: float) -> None:
    """It is cast as BF16, or as FP32 where an extreme is between two numbers of BF16."""
    x = (normal((64, 96)) / 8).astype(ml_dtypes.bfloat16)
    other = np.full((1, 96), largest, np.float32)
    among = Extremes.of([FileTensor(x.view(np.uint16), "BF16"), FileTensor(other, "F32")])
    (found,) = SlabCasts(FileTensor(x.view(np.uint16), "BF16"), breccia.recipe("nvfp4"), among).tensors()
    whole = breccia.cast(np.concatenate([other, x.astype(np.float32)]), "nvfp4")
    assert breccia.bytes_equal(found[0], whole[1:])


def test_no_element_has_extremes() -> None:
    assert Extremes.of([FileTensor(np.zeros((0, 4), np.float32), "F32")]).numbers.size == 0
