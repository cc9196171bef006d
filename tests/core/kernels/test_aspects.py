"""Arrays of any aspect ratio and any number of matrices: the same bytes, in as few steps of Python as others take."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import breccia
from breccia.kernels.numpy import call, decoding, products
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


#: Stacks of small matrices, most of which have no whole number of the blocks below.
STACKS = ((300, 2, 3), (300, 1, 1), (90, 5, 3), (2, 3, 300), (70, 1, 9), (70, 9, 1), (70, 130, 3), (3, 30, 6, 5), (6, 17, 33))
#: With blocks of several rows: higher than all rows, of a few of them, and of other widths.
TALL = ("fp8_block,block_m=128", *(f"fp8_block,block_m={m},block_k={k}" for m, k in ((4, 4), (4, 8), (2, 1), (3, 32))))


@pytest.mark.parametrize("kernel", ["numpy", "native"])
@pytest.mark.parametrize("recipe", (*RECIPES, *TALL))
def test_stacks_of_small_matrices_have_the_bytes_of_the_generic_algorithm(recipe: str, kernel: str) -> None:
    if kernel == "native":
        pytest.importorskip("breccia_native")
    for shape in STACKS:
        for axis in (-1, -2):
            x = normal(*shape)
            if shape[0] % 4 == 2:
                x[..., 0, 0], x[0, ..., -1, -1] = 1e-44, np.inf  # numbers that are not normal
            st = breccia.cast(x, recipe, axis=axis, prefer=f"{kernel}.cast")
            generic = breccia.cast(x, recipe, axis=axis, prefer="reference.cast")
            assert breccia.bytes_equal(st, generic), (shape, axis)
            out = breccia.cast(np.ones_like(x), recipe, axis=axis)
            breccia.cast(x, recipe, axis=axis, out=out, prefer=f"{kernel}.cast")
            assert breccia.bytes_equal(out, generic), (shape, axis)
            for dtype in ("float32", "bfloat16"):
                values, expected = (
                    np.asarray(breccia.dequantize(st, out_dtype=dtype, prefer=prefer))
                    for prefer in (f"{kernel}.dequantize", "reference.dequantize")
                )
                words = f"u{values.itemsize}"
                assert np.array_equal(values.view(words), expected.view(words)), (shape, axis, dtype)


@pytest.mark.parametrize("kernel", ["numpy", "native"])
@pytest.mark.parametrize("recipe", ["fp8_block,block_m=128", "fp8_block,block_m=4,block_k=4"])
def test_many_small_matrices_are_cast_and_decoded_in_few_steps(
    recipe: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "native":
        pytest.importorskip("breccia_native")
    steps: list[int] = []
    for module in (call, decoding):
        run_each = module.run_each

        def counted(step: Any, of: list[Any], *arguments: Any, run_each: Any = run_each) -> None:
            steps.append(len(of))
            run_each(step, of, *arguments)

        monkeypatch.setattr(module, "run_each", counted)
    for shape in ((1000, 130, 3), (1000, 3, 130), (30, 5, 7), (30, 7, 5)):
        for axis in (-1, -2):
            st = breccia.cast(normal(*shape), recipe, axis=axis, prefer=f"{kernel}.cast")
            breccia.dequantize(
                st, out_dtype="bfloat16", prefer=f"{kernel}.dequantize"
            )  # FP32 of a few blocks has a way of its own
            assert steps and max(steps) <= 2 * math.prod(shape) // chunk_size() + 2, (shape, axis)
            steps.clear()


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp6", "int8", "nvfp4", "int4_bias", "fp8_block"])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 8, 31])
def test_short_rows_decode_to_the_numbers_of_the_generic_algorithm(recipe: str, columns: int) -> None:
    x = normal(700, columns) * np.float32(2.0) ** np.random.default_rng(columns).integers(-140, 100, (700, 1))
    st = breccia.cast(x.astype(np.float32), recipe)
    if recipe == "mxfp8":
        assert (st.scale.view(np.uint8) == 0).any()  # 2^-127, which is no normal number
    for dtype in ("float32", "float16"):
        values, numpy, generic = (
            breccia.dequantize(st, out_dtype=dtype, prefer=prefer)
            for prefer in (None, "numpy.dequantize", "reference.dequantize")
        )
        out = np.full((700, 2 * columns), 7, dtype)[:, ::2]
        breccia.dequantize(st, out_dtype=dtype, out=out)
        words = f"u{values.itemsize}"
        for other in (values, numpy, out):
            assert np.array_equal(other.copy().view(words), generic.view(words)), dtype


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_row", "mxfp8", "nvfp4", "int4"])
@pytest.mark.parametrize("columns", [1, 2, 4, 16, 100])
def test_a_tall_array_is_cast_along_axis_minus_2_in_chunks_of_full_size(
    recipe: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[int] = []
    run_each = call.run_each

    def counted(step: Any, of: list[Any], *arguments: Any) -> None:
        jobs.append(len(of))
        run_each(step, of, *arguments)

    monkeypatch.setattr(call, "run_each", counted)
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
