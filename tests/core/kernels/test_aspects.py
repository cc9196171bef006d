"""Arrays of any aspect ratio and any number of matrices: the same bytes, in as few steps of Python as others take."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import breccia
from breccia.kernels.numpy import casting, products
from breccia.kernels.numpy.workspace import chunk_size

RECIPES = (
    *("fp8_current", "fp8_row", "fp8_block", "fp8_block,block_m=128", "mxfp8", "mxfp6"),
    *("mxfp4", "nvfp4", "int4", "int8", "nf4"),
)
#: Tall and narrow, the other way round, and lengths that are no powers of two.
SHAPES = ((1, 1 << 13), (1 << 13, 1), (1 << 12, 2), (3, 2731), (2731, 3), (600, 17), (5, 300, 4))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_casts_of_every_aspect_ratio_write_the_bytes_of_the_generic_algorithm(recipe: str) -> None:
    for shape in SHAPES:
        for axis in (-1, -2):
            x = normal(*shape)
            st = breccia.cast(x, recipe, axis=axis)
            assert breccia.bytes_equal(st, breccia.cast(x, recipe, axis=axis, prefer="reference.cast")), (shape, axis)
            copy = np.ascontiguousarray(x.swapaxes(-1, -2))
            assert breccia.bytes_equal(st, breccia.cast(copy, recipe, axis=-3 - axis).mT), (shape, axis)
            values, generic = (breccia.dequantize(st, prefer=prefer) for prefer in (None, "reference.dequantize"))
            assert np.array_equal(values.view(np.uint32), generic.view(np.uint32)), (shape, axis)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_row", "mxfp8", "nvfp4", "int4"])
@pytest.mark.parametrize("columns", [1, 2, 4, 16, 100])
def test_a_tall_array_is_cast_along_axis_minus_2_in_chunks_of_full_size(
    recipe: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[int] = []
    run_each = casting.run_each

    def counted(step: Any, of: list[Any], *arguments: Any) -> None:
        jobs.append(len(of))
        run_each(step, of, *arguments)

    monkeypatch.setattr(casting, "run_each", counted)
    x = normal((4 * chunk_size() // columns), columns)
    breccia.cast(x, recipe, axis=-2, prefer="numpy.cast")
    assert jobs and max(jobs) <= 2 * 4 + 1


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that NumPy's products decode, in tiles of 64 KiB."""
    shapes: list[tuple[int, ...]] = []
    dense = products._dense

    def recorded(x: Any) -> Any:
        if isinstance(x, breccia.ScaledTensor):
            shapes.append(tuple(x.shape))
        return dense(x)

    monkeypatch.setattr(products, "_dense", recorded)
    monkeypatch.setattr(products, "TILE", 1 << 16)
    return shapes


@pytest.mark.parametrize("recipe", ["int8", "nvfp4", "fp8_current"])
@pytest.mark.parametrize(
    "lead, other",
    [((64,), (64,)), ((4, 16), (4, 16)), ((64,), (1,)), ((64,), ()), ((2, 32), (32,)), ((32,), (2, 32)), ((1, 64), (3, 1))],
)
def test_a_batch_is_decoded_as_many_matrices_at_a_time_as_fit(
    recipe: str, lead: tuple[int, ...], other: tuple[int, ...], decoded: list[tuple[int, ...]]
) -> None:
    st, x = breccia.cast(normal(*lead, 16, 64), recipe), normal(*other, 3, 64)
    y = breccia.matmul(x, st.mT, prefer="numpy.matmul")
    w = breccia.dequantize(st)
    assert len(decoded) == max(4 * math.prod(lead) // 64, 1)
    np.testing.assert_allclose(y, x @ w.swapaxes(-1, -2), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows, columns", [(2, 4096), (700, 64), (1, 64)])
def test_a_batch_of_rows_decodes_a_large_matrix_once(rows: int, columns: int, decoded: list[tuple[int, ...]]) -> None:
    st, x = breccia.cast(normal(columns, 64), "mxfp8"), normal(40, rows, 64)
    y = breccia.matmul(x, st.mT, prefer="numpy.matmul")
    assert sum(shape[-1] for shape in decoded) <= columns * -(-x.size * 4 // (1 << 16))
    np.testing.assert_allclose(y, x @ breccia.dequantize(st).T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("recipe", ["int8", "nvfp4", "fp8_current"])
@pytest.mark.parametrize("counts", [[1] * 64, [0] * 60 + [9, 0, 0, 2], [0, 7] * 32, [0] * 64, [100] + [0] * 63])
def test_only_matrices_of_groups_with_rows_are_decoded(recipe: str, counts: list[int], decoded: list[tuple[int, ...]]) -> None:
    st, offsets = breccia.cast(normal(64, 16, 64), recipe), np.cumsum(counts).astype(np.int32)
    x = normal(int(offsets[-1]) + 2, 64)  # and two rows of no group
    y = breccia.grouped_matmul(x, st.mT, offsets, prefer="numpy.grouped_matmul")
    used = sum(shape[0] for shape in decoded)
    assert used == np.count_nonzero(counts) and len(decoded) <= max(4, np.count_nonzero(np.diff(counts, prepend=0) > 0))
    expected, start = np.zeros_like(y), 0
    for matrix, end in zip(breccia.dequantize(st), offsets.tolist(), strict=True):
        expected[start:end], start = x[start:end] @ matrix.T, end
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)
