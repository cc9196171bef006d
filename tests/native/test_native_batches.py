"""Compiled products of many matrices: one call for all, the bits of each matrix alone, and what the call refuses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import breccia
from breccia.arrays.frameworks import Device
from breccia_native import availability

if reason := availability.missing_products(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

from breccia_native import matmul as native
from breccia_native import products
from breccia_native.weights import KINDS, weight_of

RECIPES = ("fp8_current", "fp8_row", "fp8_block", "fp8_block,block_m=128", "mxfp8", "mxfp6", "nvfp4", "int4", "int8", "nf4")
ASYMMETRIC = "int4,signed=false,symmetric=false"


@pytest.fixture(autouse=True)
def compiled_however_few_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_FEW_CODES", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the compiled functions that products call."""
    made: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            made.append(name)
            return function(*arguments)

        return call

    for module, names in ((native.products, ("each", "multiply")), (native.columns, ("multiply",))):
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return made


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def alone(x: np.ndarray, st: Any, **options: Any) -> np.ndarray:
    """The product of each matrix by itself."""
    lead = np.broadcast_shapes(x.shape[:-2], st.shape[:-2])
    every = np.broadcast_to(x, (*lead, *x.shape[-2:]))
    index = np.broadcast_to(np.arange(np.prod(st.shape[:-2])).reshape(st.shape[:-2]), lead)
    product = np.empty((*lead, x.shape[-2], st.shape[-2]), np.float32)
    for i in np.ndindex(*lead):
        matrix = st[np.unravel_index(int(index[i]), st.shape[:-2])]
        product[i] = breccia.matmul(every[i], matrix.mT, **options)
    return product


@pytest.mark.parametrize("recipe", [*RECIPES, ASYMMETRIC])
def test_a_batch_has_the_bits_of_its_matrices_alone(recipe: str) -> None:
    for lead, other in (((5,), (5,)), ((2, 3), (2, 3)), ((3,), (2, 1)), ((3,), ()), ((1, 3), (2, 1)), ((1,), (4,))):
        st = breccia.cast(normal(*lead, 33, 130), recipe)
        for m in (1, 7, 40):
            x = normal(*other, m, 130)
            assert np.array_equal(breccia.matmul(x, st.mT), alone(x, st)), (lead, other, m)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("prefer", [None, "native.matmul_int8", "native.matmul_bf16"])
def test_batches_of_every_dtype_and_mode_have_those_bits(instruction_set: str, dtype: Any, prefer: str | None) -> None:
    for recipe in ("int4", "mxfp4", "int8"):
        st = breccia.cast(normal(6, 40, 256), recipe)
        for m in (1, 5, 33):
            x = normal(6, m, 256).astype(dtype)
            assert np.array_equal(breccia.matmul(x, st.mT, prefer=prefer), alone(x, st, prefer=prefer)), (recipe, m)


def test_matrices_of_any_strides_and_scales_of_their_own_are_multiplied() -> None:
    each = [breccia.cast(2.0**i * normal(16, 64), "nvfp4") for i in range(6)]
    stacked = breccia.stack(each)
    assert stacked.global_scale is not None and stacked.global_scale.shape == (6,)
    whole = breccia.cast(normal(6, 16, 128), "int8")
    into = breccia.cast(normal(6, 64, 16), "mxfp8", axis=-2).mT
    x = normal(6, 64, 3)
    for st in (stacked, stacked[::2], stacked[::-1], whole[:, ::2], into, breccia.cast(normal(6, 16, 64), "fp8_current")):
        k, count = st.shape[-1], st.shape[0]
        for rows in (x[:count].swapaxes(-1, -2), normal(count, 9, 2 * k)[:, ::3, ::2], normal(2, count, 4, k)[:, ::-1]):
            rows = rows[..., :k] if rows.shape[-1] >= k else np.concatenate([rows, rows], -1)
            assert np.array_equal(breccia.matmul(rows, st.mT), alone(rows, st))
    bias = normal(32)[::2]
    assert np.array_equal(breccia.matmul(normal(6, 2, 64), stacked.mT, bias=bias), alone(normal(6, 2, 64), stacked, bias=bias))
    # The weight on the left:
    assert np.array_equal(breccia.matmul(stacked, x), alone(x.swapaxes(-1, -2), stacked).swapaxes(-1, -2))


@pytest.mark.parametrize("heads, m, n, k", [(1024, 1, 32, 64), (300, 33, 16, 64), (3, 1, 256, 256)])
def test_a_batch_is_one_call_of_the_kernel(calls: list[str], heads: int, m: int, n: int, k: int) -> None:
    for recipe in ("int8", "nvfp4", "fp8_block"):
        st, x = breccia.cast(normal(heads, n, k), recipe), normal(heads, m, k)
        del calls[:]
        breccia.matmul(x, st.mT)
        assert calls == ["each"]
        del calls[:]
        breccia.grouped_matmul(x.reshape(-1, k), st.mT, np.arange(m, heads * m + 1, m, dtype=np.int32))
        assert calls == ["each"]


@pytest.mark.parametrize("recipe", ["int8", "nvfp4", "fp8_current"])
@pytest.mark.parametrize("counts", [[1] * 40, [0, 9, 0, 0, 300, 1], [0] * 5, [2000, 0, 1]])
def test_groups_have_the_bits_of_their_matrices_alone(recipe: str, counts: list[int]) -> None:
    st, offsets = breccia.cast(normal(len(counts), 48, 96), recipe), np.cumsum(counts).astype(np.int32)
    x = normal(int(offsets[-1]) + 2, 96)
    expected, start = np.zeros((len(x), 48), np.float32), 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            expected[start:end] = breccia.matmul(x[start:end], st[group].mT)
        start = end
    for threads in (1, 2, 5):
        before = breccia.get_num_threads()
        breccia.set_num_threads(threads)
        try:
            assert np.array_equal(breccia.grouped_matmul(x, st.mT, offsets), expected)
            assert np.array_equal(breccia.grouped_matmul(x.astype(np.float64).astype(np.float32), st.mT, offsets + 0), expected)
        finally:
            breccia.set_num_threads(before)
    descending = np.maximum(offsets[::-1].copy(), 0)  # ends before their start are groups without rows
    y = breccia.grouped_matmul(x, st.mT, descending)
    generic = breccia.grouped_matmul(x, st.mT, descending, prefer="reference.grouped_matmul")
    np.testing.assert_allclose(y, generic, rtol=0, atol=1e-3)


def test_numbers_of_one_matrix_beyond_the_limits_are_left_to_numpy(calls: list[str]) -> None:
    st, x = breccia.cast(normal(4, 16, 64), "int8"), normal(4, 2, 64)
    for value in (2.0**110, np.inf, np.nan):
        x[2, 1, 5] = value
        y, generic = breccia.matmul(x, st.mT), breccia.matmul(x, st.mT, prefer="reference.matmul")
        assert np.array_equal(np.isfinite(y), np.isfinite(generic))
        np.testing.assert_allclose(y[[0, 1, 3]], generic[[0, 1, 3]], rtol=0, atol=1e-4)
    assert "each" in calls and "multiply" not in calls


@pytest.mark.parametrize("n, k", [(16, 64), (256, 256)])
def test_matrices_in_k_n_order_are_multiplied_too(n: int, k: int) -> None:
    st = breccia.cast(normal(5, n, k), "int8")
    swapped = breccia.ScaledTensor.from_parts(
        np.ascontiguousarray(st.data.swapaxes(-1, -2)).swapaxes(-1, -2), st.scale, st.recipe, st.layout
    )
    x, ends = normal(5, 2, k), np.array([2, 2, 5, 9, 10], np.int32)
    np.testing.assert_allclose(breccia.matmul(x, swapped.mT), breccia.matmul(x, st.mT), rtol=0, atol=1e-3)
    rows = x.reshape(-1, k)
    found, expected = (breccia.grouped_matmul(rows, each.mT, ends) for each in (swapped, st))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


def test_jobs_of_other_sizes_and_missing_addresses_are_refused() -> None:
    st, x, y = breccia.cast(normal(16, 64), "int8"), normal(1, 64), np.full((2, 16), 7, np.float32)
    weight = weight_of(st, 16, 64)
    call = products.prepare(x, KINDS["f32"], 1, 16, 64, 0, *weight, y[:1], b"", 1)
    job = np.array([[1, *(a.ctypes.data for a in (x, st.data, st.scale)), 0, y.ctypes.data]], np.int64)
    one = np.ones(1, np.float32)
    assert products.each(call, job, one, 0, 64, 1) is True
    assert np.array_equal(y[:1], breccia.matmul(x, st.mT)) and (y[1] == 7).all()
    for place, wrong in ((0, 0), (1, 0), (1, x.ctypes.data + 1), (2, 0), (3, 0), (5, 0), (5, y.ctypes.data + 2)):
        changed = job.copy()
        changed[0, place] = wrong
        assert products.each(call, changed, one, 0, 64, 1) is False
    two = np.ones(2, np.float32)
    for jobs, factors, bias, rows in ((job[:, :5], one, 0, 64), (job, two, 0, 64), (job, one, 2, 64), (job, one, 0, 0)):
        with pytest.raises(ValueError, match="jobs"):
            products.each(call, np.ascontiguousarray(jobs), factors, bias, rows, 1)
    with pytest.raises(ValueError, match="Capsule"):
        products.each(weight, job, one, 0, 64, 1)
    assert products.each(call, job[:0].copy(), one[:0].copy(), 0, 64, 4) is True
