"""The compiled search for scales writes the bytes of the generic algorithm, by every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from recipes import declared

import breccia
from breccia import Level
from breccia.backend import E4M3, CastOptions, reference
from breccia.internal import numpy as kernels
from breccia.rules import MSE
from breccia.testing.compare import expect_tensor
from breccia.testing.places import Place

pytest.importorskip("breccia_native.searching")

from breccia_native import searching
from breccia_native.kernels import cast

NUMPY = Place("numpy")
SPECS = (
    "nvfp4,scale_rule=mse", "nvfp4,scale_rule=four_six", "nvfp4,two_level=false,scale_format=UE5M3,scale_rule=mse",
    "nvfp4,global_sense=amax,scale_rule=mse", "mxfp4,scale_rule=mse", "mxfp6,scale_rule=mse", "mxfp8,scale_rule=mse",
    "mxfp8,fp8_format=E5M2,scale_rule=mse", "mxint8,scale_rule=mse", "int4,group_size=12,scale_rule=mse",
    "int4,scale_dtype=bf16,scale_rule=mse", "int8,scale_rule=mse",
    "int4,group_size=8,signed=false,scale_dtype=fp32,scale_rule=mse",
    "int,bits=2,group_size=1,scale_rule=mse", "nf4,block_size=16,scale_rule=mse",
)  # fmt: skip


def arrays() -> Iterator[np.ndarray]:
    """Whole rows and partial blocks, of one chunk and of several; 16-bit numbers; zeros, NaN, and numbers that need care."""
    rng = np.random.default_rng(0)
    smooth = rng.standard_normal((40, 96)).astype(np.float32)
    yield smooth
    yield smooth.astype(np.float16)[:, ::2]
    wide = (rng.standard_normal((3, 5, 37)) * 2.0 ** rng.integers(-80, 60, (3, 5, 37))).astype(np.float32)
    wide[0, 0, :20], wide[1, 1, 3], wide[2, 4, 30:33] = 0, np.nan, [1e-40, -1e-39, 2.0**-126]
    yield wide
    yield rng.integers(0, 2**32, (7, 64), dtype=np.uint32).view(np.float32)


@pytest.fixture(params=searching.use())
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    searching.use(request.param)
    yield
    searching.use(searching.use()[0])


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("spec", SPECS)
def test_every_instruction_set_writes_the_bytes_of_the_generic_algorithm(spec: str, instructions: None) -> None:
    recipe, rng = breccia.recipe(spec), np.random.default_rng(1)
    for x in arrays():
        for axis in (-1, -2):
            importance = (rng.random(x.shape[axis]) ** 8).astype(np.float32)
            for options in (CastOptions(axis=axis), CastOptions(axis=axis, importance=importance)):
                expect_tensor(NUMPY, cast(x, recipe, options), reference.cast(x, recipe, options))


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("spec", SPECS)
def test_of_equal_errors_the_first_scale_is_taken(spec: str, instructions: None) -> None:
    """Numbers that are codes under several scales; blocks of one magnitude, of one number, of zeros; weights of zero."""
    recipe, rng = breccia.recipe(spec), np.random.default_rng(6)
    x = rng.choice(np.array([0, 0.5, -1, 1.5, -2, 3, 4, -6, -8], np.float32), (64, 96))
    x[:8], x[8:16, 5::12] = -3, 0
    x[16:24] = np.where(np.arange(96) % 16 == 3, 2.0**-30, 0)
    x[24:32, 16:48] = 0
    for importance in (None, np.resize(np.array([1, 0, 0, 2, 0], np.float32), 96), np.zeros(96, np.float32)):
        options = CastOptions(importance=importance)
        expect_tensor(NUMPY, cast(x, recipe, options), reference.cast(x, recipe, options))


@pytest.mark.parametrize("spec", ["nvfp4,scale_rule=mse", "int4,group_size=32,scale_rule=mse"])
def test_chunks_of_long_rows_take_the_columns_of_an_importance_in_turn(spec: str) -> None:
    recipe, rng = breccia.recipe(spec), np.random.default_rng(2)
    x, importance = rng.standard_normal((24, 9024)).astype(np.float32), rng.random(9024).astype(np.float32)
    x[5, 100] = np.inf  # a chunk for the generic algorithm
    for options in (CastOptions(importance=importance), CastOptions(importance=importance, rounding="stochastic", seed=9)):
        expected = reference.cast(x, recipe, options)
        expect_tensor(NUMPY, cast(x, recipe, options), expected)
    nearest = CastOptions(importance=importance)
    expect_tensor(NUMPY, kernels.cast(x[:4], recipe, nearest), reference.cast(x[:4], recipe, nearest))


def test_products_that_count_as_zero_are_left_to_the_generic_algorithm() -> None:
    """Steps lead from code 9 of E4M3 to code 1, a tenth of amax / 448, under which E4M3's smallest code is below 2^-20."""
    recipe, rng = declared(E4M3, Level(E4M3, (1, 16)), rule=MSE), np.random.default_rng(5)
    x = (rng.uniform(0.3, 3, (500, 16)) * 2.0**-18).astype(np.float32)
    x[:, 0] = rng.uniform(8.5, 9.5, 500) * 2.0**-9 * 448
    options = CastOptions(importance=np.array([0, *(1,) * 15], np.float32))
    expect_tensor(NUMPY, cast(x, recipe, options), reference.cast(x, recipe, options))


def test_supplied_scales_are_taken_as_they_are() -> None:
    x = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
    for spec, scale in (("nvfp4,scale_rule=mse", 0.01), ("int4,group_size=16,scale_rule=mse", None)):
        recipe = breccia.recipe(spec)
        found = np.resize(np.array([0.25, -0.5, np.nan, 0], np.float16), (8, 4)) if scale is None else scale
        options = CastOptions(scale=found)
        expect_tensor(NUMPY, cast(x, recipe, options), reference.cast(x, recipe, options))


def test_out_is_written_in_place() -> None:
    x = np.random.default_rng(4).standard_normal((64, 64)).astype(np.float32)
    for axis in (-1, -2):
        st = breccia.cast(np.ones_like(x), "mxfp4,scale_rule=mse", axis=axis)
        assert breccia.cast(x, st.recipe, axis=axis, out=st) is st
        expect_tensor(NUMPY, st, reference.cast(x, st.recipe, CastOptions(axis=axis)))


def test_every_framework_on_a_cpu_searches_by_the_compiled_kernel() -> None:
    for framework in ("numpy", "torch", "jax", "mlx"):
        pytest.importorskip({"mlx": "mlx.core"}.get(framework, framework))
        found = breccia.explain("cast", "nvfp4,scale_rule=mse", on=f"{framework}:cpu")
        assert "reference" not in str(found).splitlines()[1], found


@pytest.mark.parametrize("spec", ["nf4", "int4,group_size=260", "nvfp4,block_m=16"])
def test_what_the_compiled_kernel_does_not_search_is_said(spec: str) -> None:
    """Tables of codes, blocks of more than 256 numbers, and tiles of several rows: the generic algorithm searches."""
    found = breccia.explain("cast", f"{spec},scale_rule=mse")
    assert found.winner and found.winner.name == "numpy.cast"
    assert "skipped: its search does not take this format, so the generic algorithm searches, in chunks" in str(found)
    on_torch = breccia.explain("cast", f"{spec},scale_rule=mse", on="torch:cpu")
    assert "calls cast of" in str(on_torch) and ": numpy.cast " in str(on_torch)
    for taken in (spec, "int4,group_size=256,scale_rule=mse"):
        winner = breccia.explain("cast", taken).winner
        assert winner and winner.name == "native.cast"


def test_sizes_that_do_not_agree_are_refused() -> None:
    x, one = np.zeros(64, np.float32), np.zeros(1, np.float32)
    nothing, window = np.zeros(0, np.float32), (one, one, np.zeros(1, np.int32))
    scales: Any = (0.0, 1.0, 1, 126, (0, 0, 0, 0, 0))
    for k, amax, found in ((0, 4, 4), (257, 4, 4), (16, 3, 4), (16, 4, 5)):
        with pytest.raises(ValueError, match=r"wanted FP32 numbers in blocks of k = 1 to 256.*Call breccia\.cast\."):
            searching.search(
                x, k, np.zeros(amax, np.uint32), np.zeros(found, np.uint8), 1, 6.0, 1.0, window, scales, (0,) * 5, nothing, 0, 1
            )
    with pytest.raises(ValueError, match="this processor has the instruction sets"):
        searching.use("none")
