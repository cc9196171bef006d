"""The compiled search for scales writes the bytes of the generic algorithm, by every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import declared

import breccia
from breccia import Level, Lookup, ScalingRecipe
from breccia.backend import CastOptions, reference
from breccia.codecs import BF16, E2M1, E4M3, E8M0, F16, F32, INT4, NF4
from breccia.internal import numpy as kernels
from breccia.rules import MSE
from breccia.testing import strategies
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
    "int,bits=2,group_size=1,scale_rule=mse", "int,bits=2,group_size=32,scale_rule=mse",
    "int,bits=3,group_size=20,scale_rule=mse", "int,bits=1,group_size=24,signed=false,scale_rule=mse",
    "int,bits=6,group_size=null,scale_dtype=bf16,scale_rule=mse", "int4,group_size=600,scale_rule=mse",
    "nvfp4,block_m=16,scale_rule=mse", "nf4,block_size=16,scale_rule=mse", "nf4,scale_dtype=bf16,scale_rule=mse",
)  # fmt: skip
#: A table whose ends differ, and one in which a 16th of the largest number is wider than several codes.
UNEVEN = Lookup(
    "uneven", 4, None, "a test", tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 0, 1, 13, 25, 38, 53, 69, 89)))
)
DENSE = Lookup("dense", 4, None, "a test", tuple(n / 64 for n in (0, -32, 64, 1, 2, 3, 4, 5, -1, -2, -3, -4, 16, 32, 48, -64)))
#: Tiles of several rows, and tables.
DECLARED = (
    declared(INT4, Level(F16, (8, 16)), rule=MSE, name="int4 tiles"),
    declared(E2M1, Level(E8M0, (3, 40)), rule=MSE, name="e2m1 tiles"),
    declared(NF4, Level(BF16, (2, 270)), rule=MSE, name="nf4 tiles"),
    declared(E4M3, Level(F32, (128, 128)), rule=MSE, name="e4m3 tiles"),
    declared(UNEVEN, Level(F16, (1, 32)), rule=MSE, name="uneven"),
    declared(DENSE, Level(E4M3, (1, 20)), rule=MSE, name="dense"),
)
EVERY = [pytest.param(breccia.recipe(spec), id=spec) for spec in SPECS] + [
    pytest.param(each, id=each.name) for each in DECLARED
]


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
    yield (rng.standard_normal((17, 700)) * np.exp(rng.standard_normal((17, 1)))).astype(np.float32)


@pytest.fixture(params=searching.use())
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    searching.use(request.param)
    yield
    searching.use(searching.use()[0])


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("recipe", EVERY)
def test_every_instruction_set_writes_the_bytes_of_the_generic_algorithm(recipe: ScalingRecipe, instructions: None) -> None:
    rng = np.random.default_rng(1)
    for x in arrays():
        for axis in (-1, -2):
            importance = (rng.random(x.shape[axis]) ** 8).astype(np.float32)
            for options in (CastOptions(axis=axis), CastOptions(axis=axis, importance=importance)):
                expect_tensor(NUMPY, cast(x, recipe, options), reference.cast(x, recipe, options))


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("recipe", EVERY)
def test_of_equal_errors_the_first_scale_is_taken(recipe: ScalingRecipe, instructions: None) -> None:
    """Numbers that are codes under several scales; blocks of one magnitude, of one number, of zeros; weights of zero."""
    rng = np.random.default_rng(6)
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


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        (breccia.recipe("int8,scale_rule=mse"), (3, 17000)),
        (breccia.recipe("int,bits=3,group_size=null,scale_rule=mse"), (3, 17000)),
        (declared(E2M1, Level(F32, (40, 500)), rule=MSE, name="e2m1 long tiles"), (40, 1000)),
    ],
    ids=["int8", "int3", "tiles"],
)
def test_blocks_too_long_for_one_estimate_have_the_bytes_of_the_generic_algorithm(
    recipe: ScalingRecipe, shape: tuple[int, int], instructions: None
) -> None:
    """Blocks of 17000 and 20000 numbers, of which the largest come last."""
    rng = np.random.default_rng(9)
    x = (rng.standard_normal(shape) * np.linspace(0.2, 1, shape[1])).astype(np.float32)
    for options in (CastOptions(), CastOptions(importance=rng.random(shape[1]).astype(np.float32))):
        expect_tensor(NUMPY, cast(x, recipe, options), reference.cast(x, recipe, options))


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


def test_errors_that_hardly_differ_are_told_apart(instructions: None) -> None:
    """Blocks near the middle between two choices, of which the estimates of the compiled kernel keep both."""
    rng = np.random.default_rng(7)
    for spec in (
        "nvfp4,scale_rule=mse",
        "int4,group_size=32,scale_rule=mse",
        "nf4,scale_rule=mse",
        "int8,group_size=32,scale_rule=mse",
    ):
        recipe = breccia.recipe(spec)
        k = recipe.format.scale.block[1]
        assert k
        found = rng.standard_normal((400, k)).astype(np.float32)
        low, high = found[:200], found[200:]
        for _ in range(30):  # bisect between blocks with other scales, in units of their amax
            middle = ((low + high) / 2).astype(np.float32)
            same = breccia.cast(middle, recipe).scale == breccia.cast(low, recipe).scale
            low, high = np.where(same, middle, low), np.where(same, high, middle)
        x = np.concatenate([low, high])
        expect_tensor(NUMPY, cast(x, recipe), reference.cast(x, recipe))


@pytest.mark.parametrize("recipe", EVERY)
def test_all_instruction_sets_find_the_same_scales_of_thousands_of_blocks(recipe: ScalingRecipe) -> None:
    """So many that some errors differ by less than what estimates tell apart."""
    rng = np.random.default_rng(8)
    x, importance = rng.standard_normal((128, 512)).astype(np.float32), (rng.random(512) ** 4).astype(np.float32)
    for numbers in (x, x**3, x.astype(np.float16)):
        for options in (CastOptions(), CastOptions(importance=importance)):
            found = []
            for instructions in searching.use():
                searching.use(instructions)
                found.append(cast(numbers, recipe, options))
            searching.use(searching.use()[0])
            for other in found[1:]:
                expect_tensor(NUMPY, other, found[0])


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_drawn_arrays_are_cast_as_by_the_generic_algorithm(data: Any) -> None:
    recipe = data.draw(st.sampled_from([each.values[0] for each in EVERY]))
    x = data.draw(strategies.arrays((data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))), recipe=recipe))
    weights = data.draw(strategies.arrays((x.shape[1],), finite=True)) if data.draw(st.booleans()) else None
    options = CastOptions(importance=None if weights is None else np.abs(weights))
    expect_tensor(NUMPY, cast(x, recipe, options), reference.cast(x, recipe, options))


@pytest.mark.parametrize("spec", ["nf4", "int4,group_size=4096", "nvfp4,block_m=16", "int8"])
def test_tables_long_blocks_and_tiles_are_searched_by_the_compiled_kernel(spec: str) -> None:
    winner = breccia.explain("cast", f"{spec},scale_rule=mse").winner
    assert winner and winner.name == "native.cast"


def test_what_the_compiled_kernel_does_not_search_is_said() -> None:
    """Tables of other than 16 codes: the generic algorithm searches."""
    three = Lookup("three", 3, None, "a test", (-1, -0.5, -0.25, 0, 0.125, 0.25, 0.5, 1))
    found = breccia.explain("cast", declared(three, Level(F16, (1, 32)), rule=MSE))
    assert found.winner and found.winner.name == "numpy.cast"
    assert "skipped: its search does not take this format, so the generic algorithm searches, in chunks" in str(found)


def test_sizes_that_do_not_agree_are_refused() -> None:
    x, one, nothing = np.zeros(64, np.float32), np.zeros(1, np.float32), np.zeros(0, np.float32)
    scales: Any = (0.0, 1.0, 1, 126, (0, 0, 0, 0, 0))
    for m, k, amax, found, steps in ((1, 0, 4, 4, 1), (0, 16, 4, 4, 1), (1, 16, 3, 4, 1), (1, 16, 4, 5, 1), (1, 16, 4, 4, 40)):
        scale = np.zeros(found, np.uint8), np.zeros(256, np.float32), np.zeros(4, np.float32)
        arrays = x, 32, m, k, np.zeros(amax, np.uint32), *scale
        window = one, one, np.zeros(steps, np.int32)
        with pytest.raises(
            ValueError, match=r"wanted numbers in blocks of m rows of k.* fewer than 32 steps.*Call breccia\.cast\."
        ):
            searching.search(*arrays, 1, 6.0, 1.0, window, scales, (0,) * 5, nothing, 0, 1)
    with pytest.raises(ValueError, match="this processor has the instruction sets"):
        searching.use("none")
