"""The NumPy kernels write and read the bytes of the generic algorithm, faster and in less memory."""

from __future__ import annotations

import math
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fresh import printed
from recipes import RECIPES, declared, recipe_id

import breccia
from breccia import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP8BlockScaling,
    NonFiniteError,
    NVFP4BlockScaling,
    OptionError,
    ScaledTensor,
    ScalingRecipe,
)
from breccia.arrays.frameworks import Device
from breccia.codecs import BF16, E4M3, E5M2, E8M0, F16, F32, Codec, Integer, Lookup, Minifloat
from breccia.errors import LayoutError, RecipeError, ShapeError, UnsupportedError
from breccia.formats import TENSOR, Level
from breccia.kernels import numpy as kernels
from breccia.kernels import reference, threads
from breccia.kernels.numpy import products, workspace
from breccia.options import CastOptions, product_options
from breccia.rules import FLOOR, LINEAR, RCEIL, Rule
from breccia.tensors.components import PARTS
from breccia.testing.examples import special_rows, wide

#: Every recipe and every framework in `make test`; their products in `make test-all`.
pytestmark = pytest.mark.covering(1, 2)

MIB = 1 << 20


def random_bits(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """FP32 of uniformly random bit patterns: every exponent, NaN and Inf, subnormals."""
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)


def narrow(x: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(dtype)


INPUTS: dict[str, Callable[[], np.ndarray]] = {
    "ordinary": lambda: wide((6, 256), seed=1, exponents=2),
    "wide": lambda: wide((40, 64), seed=2, exponents=100),
    "specials": lambda: special_rows(64),
    "specials of whole groups": lambda: special_rows(256),
    "ragged specials": lambda: special_rows(45),
    "random bits": lambda: random_bits((48, 160)),
    "partial": lambda: wide((7, 37), seed=3),
    "one column": lambda: wide((5, 1), seed=4),
    "one row": lambda: wide((1, 300), seed=4),
    "three axes": lambda: wide((2, 3, 20), seed=5),
    "four axes": lambda: wide((2, 1, 8, 32), seed=5),
    "three axes transposed": lambda: wide((3, 17, 20), seed=5).transpose(2, 0, 1),
    "four axes strided": lambda: wide((4, 3, 8, 64), seed=5)[::2, :, ::-1],
    "zeros": lambda: np.zeros((4, 48), np.float32),
    "negative zeros": lambda: np.full((4, 48), -0.0, np.float32),
    "zero blocks": lambda: wide((8, 256), seed=6, exponents=3) * np.tile(np.array([0, 1], np.float32).repeat(64), 2),
    "empty rows": lambda: np.zeros((0, 32), np.float32),
    "empty columns": lambda: np.zeros((3, 0), np.float32),
    "transposed": lambda: wide((64, 48), seed=7, exponents=3).T,
    "backwards": lambda: wide((20, 64), seed=8)[::-1, ::-1],
    "every other column": lambda: wide((20, 128), seed=8)[:, ::2],
    "big-endian": lambda: wide((20, 64), seed=9).astype(">f4"),
    "big-endian float16": lambda: narrow(special_rows(64), ">f2"),
    "float16": lambda: narrow(special_rows(64), np.float16),
    "float16 transposed": lambda: narrow(special_rows(64), np.float16).T,
    "bfloat16": lambda: narrow(special_rows(64), ml_dtypes.bfloat16),
    "bfloat16 strided": lambda: narrow(special_rows(64), ml_dtypes.bfloat16)[::-1, ::2],
    "scales beyond FP32's half": lambda: special_rows(256) * np.float32(2.0**-100),
}


def bytes_of(part: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def assert_same(found: ScaledTensor, expected: ScaledTensor, what: str = "") -> None:
    facts = [(st.recipe, st.layout, st.axis, st.padding, st.shape) for st in (found, expected)]
    assert facts[0] == facts[1]
    for name in PARTS:
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            np.testing.assert_array_equal(bytes_of(a), bytes_of(b), err_msg=f"{name} of {what}")


def assert_same_values(found: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    """Equal bits; any NaN equals any other."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    number = ~np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(~np.isnan(found.astype(np.float32)), number, err_msg=what)
    found, expected = (np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}")[number] for a in (found, expected))
    np.testing.assert_array_equal(found, expected, err_msg=what)


#: `cast` and `dequantize` of the NumPy kernels, with NumPy or compiled microkernels.
Cast = Callable[..., ScaledTensor]
Dequantize = Callable[..., np.ndarray]


def kernels_of(distribution: str) -> Any:
    """The kernel module, with NumPy or compiled microkernels."""
    if distribution == "numpy":
        return kernels
    if reason := pytest.importorskip("breccia_native.availability").missing(Device("cpu")):
        pytest.skip(reason)
    from breccia_native import kernels as native

    return native


@pytest.fixture(params=["numpy", "native"])
def cast(request: pytest.FixtureRequest) -> Cast:
    return kernels_of(request.param).cast


@pytest.fixture(params=["numpy", "native"])
def dequantize(request: pytest.FixtureRequest) -> Dequantize:
    return kernels_of(request.param).dequantize


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 256 elements, so that small arrays have many, and blocks larger than one."""
    monkeypatch.setattr("breccia.kernels.numpy.workspace.CHUNK", 256)


@pytest.fixture
def new_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool without threads of earlier tests, each of which would make buffers of its own."""
    monkeypatch.setattr(threads, "_offers", SimpleQueue())
    monkeypatch.setattr(threads, "_workers", 0)


@pytest.fixture
def keep_threads() -> Iterator[None]:
    before = breccia.get_num_threads()
    yield
    breccia.set_num_threads(before)


# -- cast ------------------------------------------------------------------------------------------------------------


def test_cast_matches_the_generic_algorithm(cast: Cast, recipe: ScalingRecipe) -> None:
    for name, make in INPUTS.items():
        x = make()
        x.setflags(write=False)
        for axis in (-1, -2):
            assert_same(
                cast(x, recipe, CastOptions(axis=axis)),
                reference.cast(x, recipe, CastOptions(axis=axis)),
                f"{name}, axis {axis}",
            )


@pytest.mark.usefixtures("small_chunks", "keep_threads")
@pytest.mark.parametrize("count", [1, 3])
def test_chunk_borders_and_the_number_of_threads_change_no_byte(cast: Cast, recipe: ScalingRecipe, count: int) -> None:
    breccia.set_num_threads(count)
    for x in (random_bits((12, 320), 1), wide((9, 150), 2, 3), wide((3, 12, 64), 3, 3), special_rows(300)):
        for axis in (-1, -2):
            expected = reference.cast(x, recipe, CastOptions(axis=axis))
            assert_same(cast(x, recipe, CastOptions(axis=axis)), expected)
            assert_same_values(kernels.dequantize(expected), reference.dequantize(expected))


def test_one_axis_is_enough_for_a_scale_per_tensor(cast: Cast) -> None:
    for x in (wide((1000,), 1, 3), special_rows(40)[3], np.zeros(0, np.float32)):
        for recipe in RECIPES:
            if recipe.format.scale.block == TENSOR:
                assert_same(cast(x, recipe), reference.cast(x, recipe))


@pytest.mark.parametrize(
    "scale", [1.0, 0.037, 2.0**-126, 2.0**126, 3e38, 2.0**100, 2.0**-120, 0.0, -1.0, float("nan"), float("inf")]
)
def test_a_supplied_scale_per_tensor_is_used_as_the_generic_algorithm_uses_it(cast: Cast, scale: float) -> None:
    for recipe in RECIPES:
        if (recipe.format.global_scale or recipe.format.scale).block == TENSOR:
            for x in (special_rows(64), wide((6, 64), 1, 3), random_bits((4, 64))):
                assert_same(cast(x, recipe, CastOptions(scale=scale)), reference.cast(x, recipe, CastOptions(scale=scale)))


@pytest.mark.parametrize("chunk", [256, workspace.CHUNK])
def test_supplied_scales_per_block_are_used_as_the_generic_algorithm_uses_them(
    cast: Cast, recipe: ScalingRecipe, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breccia.kernels.numpy.workspace.CHUNK", chunk)
    for x in (special_rows(300), wide((9, 64), 1, 40)):
        for axis in (-1, -2):
            computed = reference.cast(np.nan_to_num(x), recipe, CastOptions(axis=axis))
            scale = computed.scale if computed.global_scale is None else computed.global_scale
            odd = np.frombuffer(np.random.default_rng(3).bytes(scale.nbytes), scale.dtype).reshape(scale.shape)
            for supplied in (scale, odd):
                expected = reference.cast(x, recipe, CastOptions(axis=axis, scale=supplied))
                assert_same(cast(x, recipe, CastOptions(axis=axis, scale=supplied)), expected)


def test_supplied_scales_per_expert_are_used_as_the_generic_algorithm_uses_them(cast: Cast) -> None:
    x = np.stack([special_rows(32)[:15], wide((15, 32), 2, 3)])
    for recipe in (Float8CurrentScaling(), Float8CurrentScaling("E5M2"), NVFP4BlockScaling()):
        scale = np.array([0.5, 3.0], np.float32)
        for view in (x, x[:, ::-1]):
            assert_same(cast(view, recipe, CastOptions(scale=scale)), reference.cast(view, recipe, CastOptions(scale=scale)))


def test_stochastic_casts_match_the_generic_algorithm(cast: Cast, recipe: ScalingRecipe) -> None:
    options: dict[str, Any] = {"rounding": "stochastic", "seed": 5}
    x = wide((4, 64), 1, 3)
    assert_same(cast(x, recipe, CastOptions(**options)), reference.cast(x, recipe, CastOptions(**options)))
    assert_same(breccia.cast(x, recipe, **options), reference.cast(x, recipe, CastOptions(**options)))


def test_nonfinite_raise_raises_before_the_first_byte(cast: Cast, recipe: ScalingRecipe) -> None:
    x = wide((8, 64), 1, 3)
    assert_same(cast(x, recipe, CastOptions(nonfinite="raise")), reference.cast(x, recipe))
    out = cast(x, recipe)
    before = {name: part.copy() for name in PARTS if (part := getattr(out, name)) is not None}
    for bad in (np.nan, np.inf, -np.inf):
        y = x[::-1].copy()
        y[5, 7] = bad
        with pytest.raises(NonFiniteError, match="x holds NaN or Inf"):
            cast(y, recipe, CastOptions(nonfinite="raise", out=out))
    for name, part in before.items():
        np.testing.assert_array_equal(bytes_of(getattr(out, name)), bytes_of(part))


def test_out_is_written_in_place_and_returned(cast: Cast, recipe: ScalingRecipe) -> None:
    for x in (wide((8, 64), 1, 3), special_rows(37)):
        for axis in (-1, -2):
            out = cast(np.ones_like(x), recipe, CastOptions(axis=axis))
            data = out.data
            assert cast(x, recipe, CastOptions(axis=axis, out=out)) is out
            assert out.data is data
            assert_same(out, reference.cast(x, recipe, CastOptions(axis=axis)))


def test_out_with_strided_components_is_written_too(cast: Cast) -> None:
    x = wide((8, 64), 1, 3)
    whole = cast(np.ones((8, 128), np.float32), MXFP8BlockScaling())
    out = ScaledTensor(whole.data[:, ::2], whole.scale[:, ::2], whole.recipe, whole.layout)
    cast(x, MXFP8BlockScaling(), CastOptions(out=out))
    assert_same(out, reference.cast(x, MXFP8BlockScaling()))


def test_read_only_out_is_refused_before_the_first_byte(recipe: ScalingRecipe) -> None:
    x = wide((4, 64), seed=5)
    for part in ("data", "scale"):
        out = breccia.cast(0 * x, recipe)
        array = getattr(out, part)
        array.flags.writeable = False
        before = out.digest()
        with pytest.raises(breccia.OptionError, match=f"out.{part} is read-only; pass an array that can be written"):
            breccia.cast(x, recipe, out=out)
        assert out.digest() == before
    st, values = breccia.cast(x, recipe), np.zeros((4, 64), np.float32)
    product = np.zeros((4, 4), np.float32)
    values.flags.writeable = product.flags.writeable = False
    with pytest.raises(breccia.OptionError, match="out= is read-only"):
        breccia.dequantize(st, out=values)
    with pytest.raises(breccia.OptionError, match="out= is read-only"):
        breccia.matmul(x, st.mT, out=product)


def test_out_may_be_of_either_byte_order() -> None:
    x = wide((4, 64), seed=5)
    st = breccia.cast(x, NVFP4BlockScaling())
    out = np.zeros((4, 64), ">f4")
    assert breccia.dequantize(st, out=out) is out and np.array_equal(out, breccia.dequantize(st))
    product = np.zeros((4, 4), ">f4")
    breccia.matmul(x, st.mT, out=product)
    assert np.array_equal(product, breccia.matmul(x, st.mT))


def test_out_that_does_not_fit_is_refused(cast: Cast) -> None:
    x = wide((8, 64), 1, 3)
    for out in (cast(x[:4], MXFP8BlockScaling()), cast(x, Float8BlockScaling())):
        with pytest.raises(LayoutError, match="out= is"):
            cast(x, MXFP8BlockScaling(), CastOptions(out=out))


def test_what_the_generic_algorithm_refuses_is_refused(cast: Cast) -> None:
    x = np.ones((4, 64), np.float32)
    with pytest.raises(UnsupportedError, match="cast takes float32"):
        cast(x.astype(np.float64), MXFP8BlockScaling())
    with pytest.raises(ShapeError, match="at least one axis"):
        cast(np.float32(1), Float8CurrentScaling())
    with pytest.raises(ShapeError, match="requires x.ndim >= 2"):
        cast(x[0], MXFP8BlockScaling())
    with pytest.raises(UnsupportedError, match="did you mean"):
        cast(x, MXFP8BlockScaling)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="rounding"):
        cast(x, MXFP8BlockScaling(), CastOptions(rounding="up"))
    with pytest.raises(LayoutError, match="contraction axis"):
        cast(x, MXFP8BlockScaling(), CastOptions(axis=-3))
    with pytest.raises(LayoutError, match="scale= must have shape"):
        cast(x, Float8CurrentScaling(), CastOptions(scale=np.ones(3, np.float32)))


def test_flushed_subnormals_change_no_byte(cast: Cast) -> None:
    """Inputs below 2^-126 are zeros of their sign, however large the reciprocal of their scale."""
    tiny = np.float32(2.0**-127)
    for recipe in RECIPES:
        x = np.full((4, 256), tiny)
        x[1] = -tiny
        x[2, ::2] = 2.0**-126
        x[3, 1::7] = -(2.0**-120)
        assert_same(cast(x, recipe), reference.cast(x, recipe))


@pytest.mark.slow
def test_a_hundred_million_numbers_of_all_kinds_match_the_generic_algorithm(cast: Cast, recipe: ScalingRecipe) -> None:
    rows = max(2, 100_000_000 // len(RECIPES) // 4096 // 2)
    for seed in range(2):
        x = random_bits((rows, 4096), seed)
        if seed == 1:  # blocks without NaN and Inf, which half of the others have
            u = x.view(np.uint32)
            u &= np.uint32(0xBFFFFFFF)
        for r in range(0, rows, 256):
            part = x[r : r + 256]
            expected = reference.cast(part, recipe)
            assert_same(cast(part, recipe), expected)
            assert_same_values(kernels.dequantize(expected), reference.dequantize(expected))


@pytest.mark.long
@pytest.mark.usefixtures("new_pool")
@pytest.mark.parametrize("kind", ["float32", "transposed", "float16"])
def test_a_cast_needs_at_most_16_mib_beyond_its_result(cast: Cast, kind: str) -> None:
    x = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)
    x = x.T if kind == "transposed" else x.astype(kind)
    for recipe in (
        Float8CurrentScaling(),
        Float8BlockScaling(block_m=128),
        MXFP8BlockScaling(),
        NVFP4BlockScaling(),
        INT4Scaling(),
    ):
        cast(x[:64, :128], recipe)
        tracemalloc.start()
        st = cast(x, recipe)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= st.nbytes + 16 * MIB, recipe_id(recipe)


@pytest.mark.long
@pytest.mark.usefixtures("new_pool")
def test_a_cast_under_any_recipe_needs_at_most_16_mib_beyond_its_result(cast: Cast, recipe: ScalingRecipe) -> None:
    """Also for recipes whose chunks the generic algorithm casts; in one piece it would need a dozen times its input."""
    x = np.random.default_rng(0).standard_normal((1024, 2048), np.float32)
    cast(x, recipe)  # the first of so many elements makes the tables of some codecs
    tracemalloc.start()
    try:
        st = cast(x, recipe)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= st.nbytes + 16 * MIB


# -- dequantize ------------------------------------------------------------------------------------------------------


def test_dequantize_matches_the_generic_algorithm(dequantize: Dequantize, recipe: ScalingRecipe) -> None:
    for name, make in INPUTS.items():
        st = reference.cast(make(), recipe)
        assert_same_values(dequantize(st), reference.dequantize(st), name)
        for way, dtype in ((st, "float16"), (st.mT, "bfloat16")):
            expected = reference.dequantize(way, product_options(dtype))
            assert_same_values(dequantize(way, product_options(dtype)), expected, name)
            out = np.ones_like(expected)
            assert dequantize(way, product_options(dtype, out=out)) is out
            assert_same_values(out, expected, name)


@pytest.mark.parametrize("chunk", [256, workspace.CHUNK])
def test_every_code_under_every_scale_matches_the_generic_algorithm(
    dequantize: Dequantize, recipe: ScalingRecipe, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scales of random bytes: NaN, Inf, negative scales, scale 0, E8M0's 0 and 255."""
    monkeypatch.setattr("breccia.kernels.numpy.workspace.CHUNK", chunk)
    rng = np.random.default_rng(2)
    for shape in ((64, 512), (19, 45)):
        like = reference.cast(np.ones(shape, np.float32), recipe)
        parts = {name: a for name in PARTS if (a := getattr(like, name)) is not None}
        noise = {n: np.frombuffer(rng.bytes(a.nbytes), a.dtype).reshape(a.shape) for n, a in parts.items()}
        st = ScaledTensor.from_parts(recipe=recipe, layout=like.layout, padding=like.padding, **noise)  # type: ignore[arg-type]
        assert_same_values(dequantize(st), reference.dequantize(st))


def test_all_pairs_of_8_bit_codes_and_scales_match_the_generic_algorithm(dequantize: Dequantize) -> None:
    codes = np.repeat(np.arange(256, dtype=np.uint8)[None], 256, axis=0)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    for fp8 in ("E4M3", "E5M2"):
        recipe = MXFP8BlockScaling(fp8)
        st = ScaledTensor(codes, scales, recipe, recipe.layout)
        assert_same_values(dequantize(st), reference.dequantize(st))


def test_scales_of_other_shapes_and_dtypes_match_the_generic_algorithm(dequantize: Dequantize) -> None:
    x = wide((6, 64), 1, 3)
    st = kernels.cast(x, INT4Scaling(group_size=64))
    whole_rows = ScaledTensor(st.data, st.scale[:, 0].copy(), st.recipe, breccia.PerChannel())
    assert_same_values(dequantize(whole_rows), reference.dequantize(whole_rows))
    assert_same_values(dequantize(whole_rows.mT), reference.dequantize(whole_rows.mT))
    brain = kernels.cast(x, INT4Scaling(group_size=16, scale_dtype="bf16"))
    floats = ScaledTensor(brain.data, brain.scale.view(ml_dtypes.bfloat16), brain.recipe, brain.layout)
    assert_same_values(dequantize(floats), reference.dequantize(brain))
    native = kernels.cast(x, MXFP8BlockScaling())
    named = (native.data.view(ml_dtypes.float8_e4m3fn), native.scale.view(ml_dtypes.float8_e8m0fnu))
    assert_same_values(dequantize(ScaledTensor(*named, native.recipe, native.layout)), reference.dequantize(native))
    experts = np.stack([x, x])
    for recipe in (Float8CurrentScaling(), NVFP4BlockScaling()):
        st = kernels.cast(experts, recipe, CastOptions(scale=np.array([0.5, 2.0], np.float32)))
        assert_same_values(dequantize(st), reference.dequantize(st))


def test_out_of_another_shape_or_dtype_is_refused(dequantize: Dequantize) -> None:
    st = kernels.cast(np.ones((4, 64), np.float32), MXFP8BlockScaling())
    for out in (np.empty((4, 32), np.float32), np.empty((4, 64), np.float16)):
        with pytest.raises(ShapeError, match="out= must have shape"):
            dequantize(st, product_options("float32", out=out))
    strided = np.empty((4, 128), np.float32)[:, ::2]
    assert dequantize(st, product_options("float32", out=strided)) is strided
    assert_same_values(strided.copy(), reference.dequantize(st))


# -- matmul ----------------------------------------------------------------------------------------------------------


def exact(x: Any) -> np.ndarray:
    return (reference.dequantize(x) if isinstance(x, ScaledTensor) else x).astype(np.float64)


def assert_product(a: Any, b: Any, product: np.ndarray) -> None:
    """Within K rounding errors of FP32 of the sum of magnitudes, or K underflows, in whatever order BLAS adds."""
    left, right = exact(a), exact(b)
    bound = left.shape[-1] * (2.0**-23 * (np.abs(left) @ np.abs(right)) + 2.0**-126)
    assert product.dtype == np.float32
    assert (np.abs(product - left @ right) <= bound).all()


@pytest.mark.parametrize("tile", [1 << 12, products.TILE])
def test_matmul_multiplies_the_decoded_values(recipe: ScalingRecipe, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breccia.kernels.numpy.products.TILE", tile)
    x, w = wide((48, 128), 1, 2), wide((80, 128), 2, 2)
    a, b = breccia.cast(x, recipe), breccia.cast(w, recipe).mT
    across = breccia.cast(w.T.copy(), recipe)  # blocks along N
    for left, right in ((a, b), (x, b), (a, w.T), (a, across), (x.astype(np.float16), b)):
        assert_product(left, right, kernels.matmul(left, right))


@pytest.mark.parametrize("tile", [1 << 12, products.TILE])
def test_matmul_broadcasts_leading_axes(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breccia.kernels.numpy.products.TILE", tile)
    recipe = Float8BlockScaling(block_k=32)
    x, w = wide((3, 2, 8, 64), 1, 2), wide((2, 40, 64), 2, 2)
    a, b, flat = breccia.cast(x, recipe), breccia.cast(w, recipe).mT, breccia.cast(w[0], recipe).mT
    experts = breccia.cast(w, Float8CurrentScaling(), scale=np.array([0.5, 2.0], np.float32)).mT
    one = breccia.cast(x[:, :1], recipe)
    for left, right in ((a, b), (x, b), (a, flat), (x, flat), (a, experts), (one, b), (x[0, 0], b)):
        product = kernels.matmul(left, right)
        assert product.shape == reference.matmul(left, right).shape
        assert_product(left, right, product)


def test_matmul_writes_out_and_out_dtype() -> None:
    recipe = MXFP8BlockScaling()
    a, b = breccia.cast(wide((4, 64), 1, 2), recipe), breccia.cast(wide((8, 64), 2, 2), recipe).mT
    product = kernels.matmul(a, b)
    np.testing.assert_array_equal(kernels.matmul(a, b, product_options("float16")), product.astype(np.float16))
    out = np.empty((4, 8), ml_dtypes.bfloat16)
    assert kernels.matmul(a, b, product_options("bfloat16", out=out)) is out
    np.testing.assert_array_equal(out, product.astype(ml_dtypes.bfloat16))


def test_a_bias_is_added_in_fp32_before_the_one_rounding() -> None:
    recipe = MXFP8BlockScaling()
    a, b = breccia.cast(wide((4, 64), 1, 2), recipe), breccia.cast(wide((8, 64), 2, 2), recipe).mT
    product = kernels.matmul(a, b)
    for bias in (np.linspace(-3, 3, 8, dtype=np.float32), np.linspace(-3, 3, 8).astype(np.float16)):
        added = product + bias.astype(np.float32)
        np.testing.assert_array_equal(kernels.matmul(a, b, product_options("float32", bias=bias)), added)
        np.testing.assert_array_equal(kernels.matmul(a, b, product_options("float16", bias=bias)), added.astype(np.float16))
    with pytest.raises(ShapeError, match=r"bias has one number for each column of the product, shape \(8,\); got \(4,\)"):
        kernels.matmul(a, b, product_options("float32", bias=np.ones(4, np.float32)))
    with pytest.raises(UnsupportedError, match="bias is float64"):
        kernels.matmul(a, b, product_options("float32", bias=np.ones(8)))


def test_matmul_refuses_what_the_generic_algorithm_refuses() -> None:
    a = breccia.cast(np.ones((4, 64), np.float32), MXFP8BlockScaling())
    with pytest.raises(ShapeError, match="shape mismatch"):
        kernels.matmul(a, a)
    with pytest.raises(ShapeError, match="at least two axes"):
        kernels.matmul(a, np.ones(64, np.float32))
    with pytest.raises(UnsupportedError, match="b is float64"):
        kernels.matmul(a, np.ones((64, 4)))
    with pytest.raises(ShapeError, match="out= must have shape"):
        kernels.matmul(a, a.mT, product_options("float32", out=np.empty((4, 5), np.float32)))


@pytest.mark.long
def test_matmul_makes_no_dense_copy_of_a_large_weight() -> None:
    weight = breccia.cast(np.random.default_rng(0).standard_normal((4096, 4096), np.float32), MXFP8BlockScaling()).mT
    x = np.ones((2, 4096), np.float32)
    kernels.matmul(x, weight)
    tracemalloc.start()
    product = kernels.matmul(x, weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 2 * products.TILE + 16 * MIB < 4 * 4096 * 4096
    assert_product(x, weight, product)


# -- dispatch --------------------------------------------------------------------------------------------------------


def test_these_kernels_run_for_numpy_arrays() -> None:
    x = np.ones((4, 64), np.float32)
    st = breccia.cast(x, MXFP8BlockScaling())
    for explanation, name in (
        (breccia.explain("cast", x, MXFP8BlockScaling(), prefer="numpy.cast"), "numpy.cast"),
        (breccia.explain("dequantize", st, prefer="numpy.dequantize"), "numpy.dequantize"),
        (breccia.explain("matmul", st, st.mT, prefer="numpy.matmul"), "numpy.matmul"),
    ):
        assert explanation.winner is not None and explanation.winner.name == name


def test_each_recipe_is_accepted_or_declined_with_a_reason(recipe: ScalingRecipe) -> None:
    found = breccia.explain("cast", np.ones((4, 64), np.float32), recipe, prefer="numpy.cast")
    reason = next(v.reason for v in found.verdicts if v.kernel.name == "numpy.cast")
    assert reason is None or "no fast form" in reason


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("keep_threads")
def test_the_number_of_threads_is_what_was_set() -> None:
    breccia.set_num_threads(3)
    assert breccia.get_num_threads() == 3
    breccia.set_num_threads(np.int64(1))  # type: ignore[arg-type]
    assert breccia.get_num_threads() == 1


@pytest.mark.parametrize("n", [0, -1, 1.5, "two", None])
def test_an_invalid_number_of_threads_is_refused(n: Any) -> None:
    before = breccia.get_num_threads()
    with pytest.raises(OptionError, match=r"n >= 1|n must be an integer"):
        breccia.set_num_threads(n)
    assert breccia.get_num_threads() == before


def test_the_default_is_one_thread_per_cpu_available_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_threads", None)
    expected = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert breccia.get_num_threads() == expected


@pytest.mark.usefixtures("keep_threads", "new_pool")
def test_chunks_cover_the_range_and_run_in_a_persistent_pool() -> None:
    """Each range waits for the others, so that three threads take one each: the caller's and the pool's."""
    breccia.set_num_threads(3)
    pools: list[set[int]] = []
    for _ in range(2):
        seen: list[int] = []
        pool: set[int] = set()
        together = threading.Barrier(3)

        def work(
            first: int, end: int, seen: list[int] = seen, pool: set[int] = pool, together: threading.Barrier = together
        ) -> None:
            seen.extend(range(first, end))
            pool.add(threading.get_ident())
            together.wait(timeout=60)

        threads.spread(work, 10, 3)
        assert sorted(seen) == list(range(10))
        assert len(pool) == 3 and threading.get_ident() in pool
        pools.append(pool)
    assert pools[0] == pools[1] and threads._workers == 2


@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("part", [0, 2])
def test_an_exception_of_any_thread_is_raised(part: int) -> None:
    breccia.set_num_threads(3)

    def work(first: int, end: int) -> None:
        if first == part:
            raise ValueError("of a part")

    with pytest.raises(ValueError, match="^of a part$"):
        threads.spread(work, 3, 3)


#: In a process of its own: other frameworks' threads, which this one may have, do not survive a fork.
FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and newer warn of any fork beside threads
import numpy as np
import breccia
breccia.set_num_threads(2)
x = np.ones((1024, 1024), np.float32)
expected = breccia.cast(x, breccia.MXFP8BlockScaling()).digest()
child = os.fork()
if child == 0:
    os._exit(0 if breccia.cast(x, breccia.MXFP8BlockScaling()).digest() == expected else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_casts_with_threads_of_its_own() -> None:
    printed(FORKED)


# ------------------------------------------------------------------------------------------------ composed ops


def test_ops_composed_of_cast_and_dequantize_write_the_same_bytes(cast: Cast, recipe: ScalingRecipe) -> None:
    """With the kernels that dispatch selects, and with only the kernels of this module."""
    x = np.concatenate([wide((6, 96), seed=13, exponents=6), special_rows(96)])
    st = reference.cast(x, recipe)
    ours = reference.Primitives(cast, kernels.dequantize)
    for target in (MXFP8BlockScaling(), INT4Scaling(group_size=32), Float8CurrentScaling()):
        expected = reference.requantize(st, target)
        assert_same(breccia.requantize(st, target), expected)
        assert_same(reference.requantize(st, target, by=ours), expected)
    half = narrow(wide((6, 96), seed=14, exponents=3), np.float16)
    expected = reference.cast_ste(half, recipe)
    clipped = reference.cast_ste(half, recipe)
    assert kernels.dequantize(cast(half, recipe), product_options("float16")).tobytes() == expected.tobytes()
    for found, wanted in (
        (breccia.cast_ste(half, recipe), expected),
        (breccia.cast_ste_clipped(half, recipe, -1.0, 2.0), clipped),
    ):
        assert found.dtype == np.float16 and found.tobytes() == wanted.tobytes()
    with pytest.raises(OptionError, match="clip_min must be less than clip_max"):
        breccia.cast_ste_clipped(half, recipe, 2.0, 1.0)


# ------------------------------------------------------------------------------------------------ regressions


def test_decoding_by_tables_of_pairs_works_for_every_shape_and_memory_order(
    dequantize: Dequantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors use tables of pairs; here small ones do too: one row, one column, odd lengths, K first."""
    monkeypatch.setattr("breccia.kernels.numpy.decoding._PAIRED", 1)
    for chunk in (64, 256, 1 << 18):
        monkeypatch.setattr("breccia.kernels.numpy.workspace.CHUNK", chunk)
        monkeypatch.setattr("breccia.kernels.numpy.workspace.ALONE", chunk)
        for recipe in (Float8CurrentScaling(), MXFP8BlockScaling(), Float8BlockScaling(block_m=4, block_k=8), INT8Scaling()):
            for shape in ((1, 257), (257, 1), (33, 31), (64, 257), (3, 5, 33)):
                for axis in (-1, -2):
                    st = reference.cast(wide(shape, seed=3, exponents=3), recipe, CastOptions(axis=axis))
                    packed = [np.array(p, order="C") for p in (st.data, st.scale)]
                    same = ScaledTensor(*packed, recipe, st.layout, axis=axis)
                    for way in (st, same, st.mT):
                        assert_same_values(dequantize(way), reference.dequantize(way))


@pytest.mark.parametrize("recipe", [INT4Scaling(), INT8Scaling(group_size=128, scale_dtype="fp16")], ids=recipe_id)
def test_codes_under_subnormal_fp16_scales_saturate_and_do_not_wrap(recipe: ScalingRecipe) -> None:
    """Such a scale may be rounded to half of what the block needs."""
    for exponent in np.linspace(-24, -12, 97):
        x = np.full((1, 128), np.float32(2.0**exponent))
        x[0, ::2] *= -1
        assert_same(kernels.cast(x, recipe), reference.cast(x, recipe))


@pytest.mark.parametrize("columns", [32, 4096])
def test_block_scales_that_overflow_under_a_supplied_global_scale_saturate(columns: int) -> None:
    """The same bytes whether a chunk has few blocks or many."""
    for magnitude in (-90.0, -20.0, 20.0, 90.0):
        x = np.full((2, columns), np.float32(2.0**magnitude))
        for scale in (2.0**-60, 2.0**-50, 1.0, 2.0**50, 2.0**60):
            expected = reference.cast(x, NVFP4BlockScaling(), CastOptions(scale=scale))
            assert_same(kernels.cast(x, NVFP4BlockScaling(), CastOptions(scale=scale)), expected)


def test_no_floating_point_error_is_raised_under_errstate_raise(recipe: ScalingRecipe) -> None:
    x = np.concatenate([wide((4, 64), seed=9, exponents=60), special_rows(64)])
    weight = wide((3, 64), seed=10, exponents=3)
    with np.errstate(all="raise"):
        for part in (x[:1], x[:4], x):
            st = breccia.cast(part, recipe)
            breccia.dequantize(st)
            breccia.requantize(st, MXFP8BlockScaling())
            breccia.matmul(breccia.cast(weight, recipe), weight.T)


def test_scales_supplied_from_the_out_tensor_are_read_before_writing() -> None:
    x = wide((600, 256), seed=11, exponents=2)
    out = kernels.cast(x, Float8RowScaling())
    scale = out.scale[::-1]
    expected = reference.cast(x, Float8RowScaling(), CastOptions(scale=scale.copy()))
    assert_same(kernels.cast(x, Float8RowScaling(), CastOptions(scale=scale, out=out)), expected)


def test_many_experts_are_decoded_with_little_memory(dequantize: Dequantize) -> None:
    x = wide((512, 32, 64), seed=12, exponents=2)
    st = kernels.cast(x, Float8CurrentScaling(), CastOptions(scale=np.linspace(0.1, 1, 512, dtype=np.float32)))
    dequantize(st)
    tracemalloc.start()
    try:
        result = dequantize(st)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_same_values(result, reference.dequantize(st))
    assert peak <= 16 * result.nbytes  # the generic algorithm's own, which takes so many small matrices


def declared_at_random(rng: np.random.Generator) -> ScalingRecipe:
    """A recipe with a random codec (bits, bias, range, table) and random scale levels."""
    bits = int(rng.choice([4, 6, 8]))
    kind = rng.integers(3 if bits == 4 else 2)
    if kind == 0:
        mantissa = int(rng.integers(1, min(bits - 1, 6)))
        bias = int(rng.integers(-20, 21))
        top = (1 << (bits - 1)) - 1 if bits < 8 else (1 << (bits - 1)) - 2
        exponent, fraction = divmod(top, 1 << mantissa)
        largest = math.ldexp(fraction + (1 << mantissa), exponent - bias - mantissa)
        nan = top + 1 if bits == 8 else None
        element: Codec = Minifloat("random", bits, None, "this test", bits - 1 - mantissa, mantissa, bias, largest, nan)
    elif kind == 1:
        element = Integer("random", bits, None, "this test", bool(rng.integers(2)), int(rng.integers(-3, bits + 2)))
    else:
        others = np.float32(rng.standard_normal(14)).tolist()
        element = Lookup("random", bits, None, "this test", tuple(rng.permutation([0.0, 1.0, *others]).tolist()))
    m, k = (int(rng.choice(side)) for side in ([1, 1, 3], [8, 16, 32, 40]))
    powers = bool(rng.integers(2))
    if powers:
        levels = (Level(E8M0 if rng.integers(2) else F32, (m, k)),)
        rules: tuple[Rule, ...] = (rng.choice(np.array([RCEIL, FLOOR], object)),)
    else:
        fine = Level((F32, F16, BF16, E4M3, E5M2)[rng.integers(5)], (m, k))
        levels = (Level(F32, TENSOR), fine) if fine.codec is E4M3 and rng.integers(2) else (fine,)
        rules = (LINEAR,) * len(levels)

    return declared(element, *levels, rule=rules)


@pytest.mark.parametrize("seed", range(60))
def test_random_recipes_match_the_generic_algorithm(dequantize: Dequantize, seed: int) -> None:
    """Declarations that a plug-in may make: the kernels follow them, or fall back to the generic algorithm."""
    rng = np.random.default_rng(seed)
    recipe = None
    while recipe is None:
        try:
            recipe = declared_at_random(rng)
            _ = recipe.format.element.max
        except RecipeError:
            recipe = None
    for exponents in (2, 40, 110):
        for shape in ((1, 40), (7, 96), (70, 160)):
            x = wide(shape, seed=seed, exponents=exponents)
            x[0] = 0
            expected = reference.cast(x, recipe)
            assert_same(kernels.cast(x, recipe), expected, f"{recipe.format}, {shape}, {exponents}")
            assert_same_values(dequantize(expected), reference.dequantize(expected))
