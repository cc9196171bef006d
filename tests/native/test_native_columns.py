"""Products of a few rows by weights whose memory is (K, N): within the bound, in each instruction set, without a transpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import breccia
from breccia.testing.examples import wide

columns = pytest.importorskip("breccia_native.columns", reason="needs breccia-native, built with GCC or Clang")
native = pytest.importorskip("breccia_native.matmul")

SPECS = [
    "mxfp8", "mxfp8,fp8_format=E5M2", "fp8_block,block_m=128", "fp8_row", "fp8_current", "nvfp4",
    "mxfp4,scale_rule=even", "nf4", "int4", "int4,symmetric=false,signed=false", "int8",
    "int8,group_size=32,symmetric=false,signed=false",
    "int8,group_size=32,symmetric=false,signed=false,offset=bias", "int4,group_size=7,scale_dtype=fp32",
    "int4_bias", "mxfp6", "mxfp6,fp6_format=E3M2",
    *(f"mlx_affine,bits={bits},group_size=32" for bits in (2, 3, 5, 6)),
]  # fmt: skip


@pytest.fixture(params=columns.use())
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    columns.use(request.param)
    yield request.param
    columns.use(columns.use()[0])


def in_rows(st: breccia.ScaledTensor) -> breccia.ScaledTensor:
    """The same tensor with its (K, N) memory in C order."""
    parts = (None if part is None else part.copy(order="C") for part in (st.data, st.scale, st.zero_point, st.global_scale))
    data, scale, zero_point, global_scale = parts
    return breccia.ScaledTensor(data, scale, st.recipe, st.layout, zero_point, global_scale, st.axis, st.shape)


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("k", "n"), [(32, 5), (64, 64), (160, 530), (257, 1100), (130, 17)])
@pytest.mark.parametrize("m", [1, 5, 10])
def test_products_are_within_the_bound(version: str, spec: str, k: int, n: int, m: int) -> None:
    st = in_rows(breccia.cast(wide((k, n), seed=1, exponents=4), spec, axis=-2))
    x = wide((m, k), seed=2, exponents=4)
    y = native._by_columns(x, st.mT, n, k)
    assert y is not None
    w = breccia.dequantize(st).astype(np.float64)
    u = k * 2.0**-24  # docs/spec/numerics.md, section 9
    assert (np.abs(y - x.astype(np.float64) @ w) <= u / (1 - u) * (np.abs(x).astype(np.float64) @ np.abs(w))).all()


def test_rows_do_not_depend_on_one_another_nor_on_threads(version: str) -> None:
    st = in_rows(breccia.cast(wide((2048, 1500), seed=1, exponents=4), "mxfp8", axis=-2))
    x = wide((3, 2048), seed=2, exponents=4)
    every = breccia.matmul(x, st)
    before = breccia.get_num_threads()
    breccia.set_num_threads(1)
    try:
        assert np.array_equal(every, np.concatenate([breccia.matmul(x[i : i + 1], st) for i in range(3)]))
    finally:
        breccia.set_num_threads(before)


def test_nan_codes_and_scales_give_nan_in_their_columns(version: str) -> None:
    w = wide((64, 70), seed=1, exponents=4)
    w[40, 3] = np.nan  # its block's scale
    st = in_rows(breccia.cast(w, "mxfp8", axis=-2))
    st.data[5, 66] = 0x7F
    y = breccia.matmul(np.ones((1, 64), np.float32), st)
    assert np.flatnonzero(np.isnan(y[0])).tolist() == [3, 66]


def test_numbers_beyond_the_limits_are_multiplied_otherwise(version: str) -> None:
    st = in_rows(breccia.cast(wide((64, 70), seed=1, exponents=4), "mxfp8", axis=-2))
    x = np.full((1, 64), 2.0**101, np.float32)
    assert native._by_columns(x, st.mT, 70, 64) is None
    exact = x.astype(np.float64) @ breccia.dequantize(st).astype(np.float64)
    size = x.astype(np.float64) @ np.abs(breccia.dequantize(st)).astype(np.float64)
    assert (np.abs(breccia.matmul(x, st) - exact) <= 64 * 2.0**-24 / (1 - 64 * 2.0**-24) * size).all()
    infinite = np.ones((1, 64), np.float32)
    infinite[0, 0] = np.inf
    assert not np.isfinite(breccia.matmul(infinite, st)).any()


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_cancel_to_zero_are_zero(version: str, bits: int) -> None:
    spec = f"int{bits},group_size=32,signed=false,symmetric=false,offset=bias,scale_dtype=fp32"
    st = in_rows(breccia.cast(wide((64, 70), seed=1, exponents=4), spec, axis=-2))
    st.data[:] = 0x33 if bits == 4 else 3
    st.scale[:] = np.float32(1.1 / 3)
    st.zero_point[:] = -(3 * st.scale)
    assert not breccia.dequantize(st).any()
    assert not native._by_columns(np.ones((3, 64), np.float32), st.mT, 70, 64).any()


def test_buffers_of_other_sizes_are_refused() -> None:
    none, table = np.empty(0, np.float32), np.zeros(16, np.float32)

    def call(**changed: Any) -> Any:
        given = {
            "x": np.ones(64, np.float32), "m": 1, "k": 64, "n": 5, "data": np.zeros((64, 5), np.uint8), "kind": 6,
            "width": 8, "table": table, "scale": np.ones((2, 5), np.float32), "scale_kind": 11, "scale_table": none,
            "block": 32, "tall": 1, "divides": False, "factor": 1.0, "least": 0.0, "offset": none, "offset_kind": 11, "role": 0,
            "product": np.empty((1, 5), np.float32), "threads": 1,
        }  # fmt: skip
        return columns.multiply(*(given | changed).values())

    assert call() is True
    for changed, message in (
        ({"x": np.ones(63, np.float32)}, "wanted activations of 256 bytes; got 252"),
        ({"data": np.zeros((63, 5), np.uint8)}, "wanted codes of 320 bytes; got 315"),
        ({"scale": np.ones((1, 5), np.float32)}, "wanted scales of 40 bytes; got 20"),
        ({"product": np.empty((2, 5), np.float32)}, "wanted a product of 20 bytes; got 40"),
        ({"kind": 8}, "wanted lengths and kinds that breccia_native.matmul passes"),
        ({"width": 7}, "wanted codes of 280 bytes; got 320"),
        ({"width": 9}, "wanted lengths and kinds that breccia_native.matmul passes"),
        ({"k": 0}, "wanted lengths and kinds that breccia_native.matmul passes"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changed)
    with pytest.raises(ValueError, match="this processor has the instruction sets"):
        columns.use("mmx")


@pytest.mark.parametrize("shape", [(64, 64), (1, 5), (63, 65), (200, 64), (70, 1300)])
@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_are_transposed(version: str, shape: tuple[int, int], threads: int) -> None:
    codes = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    found = np.empty(shape[::-1], np.uint8)
    columns.turn(codes, *shape, found, threads)
    assert np.array_equal(found, codes.T)
    wanted = f"wanted two matrices of {shape[0]} x {shape[1]} bytes; got {codes.size} and {codes.size - 1} bytes"
    with pytest.raises(ValueError, match=wanted):
        columns.turn(codes, *shape, found.reshape(-1)[1:], threads)


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4", "mxfp6", "int4,symmetric=false,signed=false"])
def test_many_rows_by_a_weight_of_this_order_are_those_of_the_other_order(spec: str) -> None:
    """Its codes are transposed once, so that the sums are the same."""
    w, x = wide((160, 96), seed=1, exponents=2), wide((40, 160), seed=2, exponents=2)
    st = in_rows(breccia.cast(w, spec, axis=-2))
    other = breccia.cast(np.ascontiguousarray(w.T), spec)
    assert breccia.bytes_equal(st.mT, other) and np.array_equal(breccia.matmul(x, st), breccia.matmul(x, other.mT))
