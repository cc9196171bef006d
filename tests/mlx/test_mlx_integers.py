"""Products of integers that MLX has no mode for: they run as its affine codes, decoded exactly, within the bound."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import breccia
from breccia.kernels import bounds
from breccia_mlx import integers, native
from breccia_mlx.nn import ScaledLinear

K, N = 512, 24
#: Recipe -> its parts: sums, terms of each, MLX's group, whether the scale is inside.
RECIPES = {
    "int4": (1, K, 128, True),
    "int4,group_size=64,symmetric=false,signed=false": (1, K, 64, True),
    "int4,group_size=32,signed=false,scale_dtype=fp32": (16, 32, 32, False),
    "int4,group_size=64,scale_dtype=bf16,signed=false,symmetric=false": (8, 64, 64, False),
    "int4,group_size=512": (1, K, 128, True),
    "int8": (2, 256, 128, False),
    "int8,signed=false,symmetric=false": (2, 256, 128, False),
    "int8,group_size=32,scale_dtype=fp16,signed=false,symmetric=false": (1, K, 32, True),
    "int8,group_size=128": (4, 128, 128, False),
    "int8,group_size=256,scale_dtype=bf16": (2, 256, 128, False),
}


def weight(recipe: str, rows: int = N, columns: int = K) -> breccia.ScaledTensor:
    """Codes of every kind, in blocks of sizes from 2^-20 to 2^20."""
    rng = np.random.default_rng(len(recipe))
    w = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-20, 20, (rows, columns // 32)).repeat(32, 1)
    return breccia.cast(mx.array(w.astype(np.float32)), recipe)


def within(y: Any, x: np.ndarray, st: breccia.ScaledTensor, terms: int) -> bool:
    values = np.array(breccia.dequantize(st), np.float64)
    wide = x.astype(np.float64)
    bound = bounds.accumulated(np.abs(wide) @ np.abs(values).T, terms, terms)
    return bool((np.abs(np.array(y, np.float64) - wide @ values.T) <= bound).all())


@pytest.mark.parametrize("spec", RECIPES)
def test_the_parts_of_a_weight_follow_from_its_scales(spec: str) -> None:
    how = integers.parts(weight(spec).mT)
    assert how == RECIPES[spec]
    assert how.s_is_scale or how.length + how.sums + 1 <= K, "roundings of a term, where the bound allows K"


@pytest.mark.parametrize("spec", RECIPES)
def test_every_term_is_the_number_that_dequantize_gives(spec: str) -> None:
    """Each row of x has one number, so each sum has one term: exact, except that an FP32 scale is rounded once, as there."""
    st = weight(spec)
    values = breccia.dequantize(st)
    found = breccia.matmul(mx.eye(K), st.mT, prefer=native.NAME)
    assert mx.array_equal(found.T, values).item()


@pytest.mark.parametrize("spec", RECIPES)
def test_one_large_and_many_small_terms_stay_within_the_bound(spec: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 1, (3, K)).astype(np.float32)
    x[:, 7] = 2.0**12
    st = weight(spec)
    for y in (
        breccia.matmul(mx.array(x), st.mT, prefer=native.NAME),
        breccia.matmul(mx.array(x[None]), st.mT, prefer=native.NAME)[0],
        mx.compile(lambda x: breccia.matmul(x, st.mT, prefer=native.NAME))(mx.array(x)),
    ):
        assert within(y, x, st, K)


def test_numbers_near_the_ends_of_fp32_neither_overflow_nor_vanish() -> None:
    """The power of two of a scale is inside the sum: codes times activations alone would overflow."""
    x = np.full((1, K), 2.0**120, np.float32)
    for size in (2.0**-126, 2.0**-100, 1.0):
        w = np.zeros((2, K), np.float32)
        w[:, ::64] = size * np.float32([[1], [0.75]])
        st = breccia.cast(mx.array(w), "int8")
        assert within(breccia.matmul(mx.array(x), st.mT, prefer=native.NAME), x, st, K)


@pytest.mark.parametrize("spec", ["int4", "int8", "int8,group_size=128"])
def test_nan_and_scales_that_no_cast_writes_keep_their_meaning(spec: str) -> None:
    st = weight(spec)
    scale = np.array(st.scale)
    scale[0], scale[1], scale[2], scale[3] = np.nan, 0, -scale[2], 2.0**-24 if scale.dtype == np.float16 else 2.0**-140
    odd = breccia.from_buffer(st.data, mx.array(scale), st.recipe, st.layout)
    x = np.ones((1, K), np.float32)
    y = breccia.matmul(mx.array(x), odd.mT, prefer=native.NAME)
    assert np.isnan(np.array(y)[0, 0])
    assert within(y[:, 1:], x, odd[1:], K)


def test_zero_points_of_more_than_8_bits_are_decoded() -> None:
    st = weight("int8,group_size=32,scale_dtype=fp16,signed=false,symmetric=false")
    x = np.ones((1, K), np.float32)
    for zero in (st.zero_point.astype(mx.int32) + 2**20, st.zero_point.astype(mx.float32) + 0.3):
        odd = breccia.from_buffer(st.data, st.scale, st.recipe, st.layout, zero)
        assert within(breccia.matmul(mx.array(x), odd.mT, prefer=native.NAME), x, odd, K)


def test_weights_without_room_for_the_roundings_are_refused() -> None:
    for spec, columns in (("int8,group_size=16", K), ("int8", 32), ("int8,group_size=32", 32), ("mxint8", K), ("nf4", K)):
        st = weight(spec, columns=columns)
        assert integers.parts(st.mT) is None
        with pytest.raises(breccia.NoKernelError, match=re.escape("4 and 8 bits need FP16 scales, or sums of several blocks")):
            breccia.matmul(mx.ones((1, columns)), st.mT, prefer=native.NAME)
    with pytest.raises(breccia.NoKernelError, match="MLX has no mode for this"):
        breccia.matmul(mx.ones((1, 500)), breccia.cast(mx.ones((N, 500)), "int4").mT, prefer=native.NAME)


@pytest.mark.parametrize("spec", ["int4", "int8", "int4,group_size=32,signed=false,scale_dtype=fp32"])
def test_compiled_layers_multiply_by_their_codes(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ScaledLinear.in_place_of(weight(spec))
    ran: list[int] = []
    product = integers.product
    monkeypatch.setattr(integers, "product", lambda x, *rest: ran.append(len(x)) or product(x, *rest))
    run = mx.compile(lambda x: layer(x), inputs=layer.state)
    for rows in (1, 8, 9):
        x = np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float32)
        assert within(run(mx.array(x)), x, layer.weight.tensor, K)
    assert ran == [1, 8], "more rows are multiplied by the decoded weight"
