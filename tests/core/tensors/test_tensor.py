"""ScaledTensor and the arguments of ops: components, and refusal of contradictory ones."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

import breccia
from breccia import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    INT4Scaling,
    LayoutError,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerBlockK,
    PerBlockMN,
    PerChannel,
    PerTensor,
    ScaledTensor,
    ShapeError,
    UnsupportedError,
)
from breccia.internal import check_scaled
from breccia.testing.examples import wide

DATA = np.zeros((4, 8), np.uint8)
ONE = np.float32(1.0)


def test_a_tensor_holds_the_callers_buffers_zero_copy() -> None:
    st = ScaledTensor(data=DATA, scale=ONE, recipe=Float8CurrentScaling(), layout=PerTensor())
    assert st.data is DATA and st.scale is ONE
    assert (st.shape, st.ndim, st.axis, st.padding) == ((4, 8), 2, -1, 0)
    assert (st.data_dtype, st.scale_dtype, st.framework, st.device) == (np.uint8, np.float32, "numpy", "cpu")
    assert st.nbytes == 32 + 4
    same = breccia.from_buffer(DATA, ONE, Float8CurrentScaling(), PerTensor())
    assert same.data is DATA and same != st and hash(same) != hash(st)


def test_repr_is_one_line() -> None:
    st = breccia.cast(np.ones((4, 64), np.float32), MXFP8BlockScaling())
    assert repr(st) == ("breccia.ScaledTensor('mxfp8', shape=(4, 64), numpy cpu, 8.25 bits per value)")
    assert repr(st.mT).endswith("8.25 bits per value, axis=-2)")


def test_a_tensor_is_frozen_and_supports_pickle_copy_and_replace() -> None:
    st = breccia.cast(wide((3, 5), exponents=2), NVFP4BlockScaling())
    with pytest.raises(dataclasses.FrozenInstanceError):
        st.scale = ONE  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        st.other = 1  # type: ignore[attr-defined]
    for other in (pickle.loads(pickle.dumps(st)), copy.deepcopy(st), dataclasses.replace(st), copy.copy(st)):
        assert (other.shape, other.padding, other.recipe, other.layout) == ((3, 5), 1, st.recipe, st.layout)
        assert breccia.dequantize(other).tobytes() == breccia.dequantize(st).tobytes()
    halved = dataclasses.replace(st, global_scale=np.float32(st.global_scale / 2))
    assert (breccia.dequantize(halved) == breccia.dequantize(st) / 2).all()


def test_positive_axes_are_stored_negative() -> None:
    st = ScaledTensor(DATA, np.ones((1, 8), np.float32), Float8BlockScaling(block_k=4), PerBlockK(4), axis=0)
    assert st.axis == -2


BLOCK = Float8BlockScaling(block_k=4)
SCALE = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (([1], ONE, Float8CurrentScaling(), PerTensor()), TypeError,
            "data must be array-like with .shape and .dtype, got list"),
        ((DATA, 1.0, Float8CurrentScaling(), PerTensor()), TypeError, "scale must be array-like .* got float"),
        ((np.uint8(0), ONE, Float8CurrentScaling(), PerTensor()), ValueError, "data must be at least 1-D, got 0-D"),
        ((DATA, ONE, None, PerTensor()), ValueError, "recipe is required"),
        ((DATA, ONE, Float8CurrentScaling(), None), ValueError, "layout is required"),
        ((DATA, ONE, 8, PerTensor()), TypeError, "recipe must be a ScalingRecipe instance, got int"),
        ((DATA, ONE, "fp8_curent", PerTensor()), ValueError, "no recipe 'fp8_curent'; did you mean 'fp8_current'"),
        ((DATA, ONE, Float8CurrentScaling(), "per_tensor"), TypeError, "layout must be a Layout instance, got 'per_tensor'"),
        ((DATA, SCALE, Float8CurrentScaling(), PerTensor()), ValueError, r"PerTensor requires a scalar scale \(ndim=0\)"),
        ((DATA, SCALE[:, :1], BLOCK, PerBlockK(4)), ValueError, r"scale.shape must be \(4, 2\), got \(4, 1\)"),
        ((DATA, SCALE, Float8BlockScaling(), PerBlockK(4)), ValueError,
            r"recipe 'fp8_block' scales blocks of \(1, 128\).*\(1, 4\)"),
        ((DATA.astype("f4"), ONE, Float8CurrentScaling(), PerTensor()), TypeError,
            "data must hold E4M3 as float8_e4m3fn or uint8"),
        ((DATA, SCALE.astype("u1"), BLOCK, PerBlockK(4)), TypeError,
            "scale must hold F32 as bfloat16 or float16 or float32; got"),
        ((DATA, SCALE, MXFP8BlockScaling(), PerBlockMN(1, 4)), TypeError, "scale must hold E8M0 as float8_e8m0fnu or uint8"),
        ((DATA, SCALE, BLOCK, PerBlockK(4), SCALE), ValueError, "has no zero_point; got one"),
        ((DATA, SCALE, BLOCK, PerBlockK(4), None, ONE), ValueError, "has one scale level and no global_scale; got one"),
        ((DATA, SCALE, BLOCK, PerBlockK(4), None, None, -3), ValueError,
            "the contraction axis is one of the last two.*axis=-3"),
        ((DATA, SCALE, BLOCK, PerBlockK(4), None, None, -1, (4, 9)), ValueError,
            r"shape=\(4, 9\) needs data of shape \(4, 9\)"),
    ],
)  # fmt: skip
def test_components_that_contradict_each_other_are_refused(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        ScaledTensor(*arguments)
    assert isinstance(caught.value, breccia.BrecciaError)


def test_a_layout_of_whole_rows_is_for_recipes_whose_group_is_free() -> None:
    rows = np.ones((4, 1), np.uint8)
    with pytest.raises(LayoutError, match=r"recipe 'mxfp8' scales blocks of \(1, 32\)"):
        ScaledTensor(DATA, rows, MXFP8BlockScaling(), PerChannel())
    assert ScaledTensor(DATA, rows.astype("f4"), Float8BlockScaling(), PerChannel()).shape == (4, 8)


def test_a_zero_point_of_an_unsupported_dtype_is_refused() -> None:
    recipe = INT4Scaling(group_size=16, signed=False, symmetric=False)
    scales = np.ones((4, 1), np.float16)
    for dtype in ("c8", "?", "f8", "i8"):
        with pytest.raises(UnsupportedError, match="zero_point must be whole numbers as one of uint8, .*; got"):
            ScaledTensor(DATA, scales, recipe, recipe.layout, scales.astype(dtype))


def test_padding_longer_than_the_data_is_refused() -> None:
    recipe = INT4Scaling(group_size=4, scale_dtype="fp32")
    with pytest.raises(
        LayoutError, match=r"is not a multiple of packing groups of 2 INT4 codes in 1 bytes along axis -1 \(padding=1\)"
    ):
        ScaledTensor(np.zeros((2, 0), np.uint8), np.ones((2, 0), np.float32), recipe, PerBlockK(4), padding=1)


def test_global_scales_and_zero_points_are_checked() -> None:
    packed, scales = np.zeros((4, 8), np.uint8), np.zeros((4, 1), np.uint8)
    nvfp4 = NVFP4BlockScaling()
    with pytest.raises(LayoutError, match=r"needs a global_scale; got none. Data without it is .*two_level=False"):
        ScaledTensor(packed, scales, nvfp4, nvfp4.layout)
    with pytest.raises(LayoutError, match=r"global_scale.shape must be \(\) or a prefix .* got \(1,\); reshape a \(1,\)"):
        ScaledTensor(packed, scales, nvfp4, nvfp4.layout, global_scale=np.ones(1, np.float32))
    with pytest.raises(UnsupportedError, match="global_scale must be float32, got float64"):
        ScaledTensor(packed, scales, nvfp4, nvfp4.layout, global_scale=np.float64(1))
    asymmetric = INT4Scaling(group_size=16, signed=False, symmetric=False)
    with pytest.raises(LayoutError, match="needs a zero_point; got none"):
        ScaledTensor(packed, scales.astype(np.float16), asymmetric, asymmetric.layout)
    with pytest.raises(LayoutError, match=r"zero_point.shape \(\(4, 2\)\) must match scale.shape \(\(4, 1\)\)"):
        ScaledTensor(packed, scales.astype(np.float16), asymmetric, asymmetric.layout, np.zeros((4, 2), np.uint8))


def test_the_logical_shape_of_packed_data_is_checked_against_the_bytes() -> None:
    recipe = INT4Scaling(group_size=4, scale_dtype="fp32")
    data, scales = np.zeros((2, 3), np.uint8), np.ones((2, 2), np.float32)
    st = ScaledTensor(data, scales, recipe, PerBlockK(4, partial=True), shape=(2, 5))
    assert (st.shape, st.padding) == ((2, 5), 1)
    with pytest.raises(LayoutError, match=r"shape=\(2, 7\) needs data of shape \(2, 4\) \(INT4, 4 bits per code"):
        ScaledTensor(data, scales, recipe, PerBlockK(4, partial=True), shape=(2, 7))


def test_per_channel_scales_decode_in_both_of_their_shapes() -> None:
    data = np.arange(32, dtype=np.uint8).reshape(4, 8)
    rows = np.array([1, 2, 3, 4], np.float32)
    tall = breccia.from_buffer(data, rows[:, None], Float8BlockScaling(), PerChannel())
    flat = breccia.from_buffer(data, rows, Float8BlockScaling(), PerChannel())
    expected = breccia.dequantize(breccia.from_buffer(data, ONE, Float8CurrentScaling(), PerTensor())) * rows[:, None]
    for st in (tall, flat, tall.mT.mT, flat.mT.mT):
        np.testing.assert_array_equal(breccia.dequantize(st), expected)
    np.testing.assert_array_equal(breccia.dequantize(tall.mT), expected.T)
    batched = breccia.from_buffer(np.stack([data, data]), rows, Float8BlockScaling(), PerChannel())
    np.testing.assert_array_equal(breccia.dequantize(batched), np.stack([expected, expected]))


def test_one_scale_per_expert_decodes_along_the_leading_axis() -> None:
    x = wide((3, 4, 16), seed=1, exponents=2)
    singles = [breccia.cast(x[e], NVFP4BlockScaling()) for e in range(3)]
    stacked = breccia.from_buffer(
        np.stack([s.data for s in singles]),
        np.stack([s.scale for s in singles]),
        NVFP4BlockScaling(),
        singles[0].layout,
        global_scale=np.stack([s.global_scale for s in singles]),
    )
    np.testing.assert_array_equal(breccia.dequantize(stacked), np.stack([breccia.dequantize(s) for s in singles]))
    per_tensor = [breccia.cast(x[e], Float8CurrentScaling()) for e in range(3)]
    stacked = breccia.from_buffer(
        np.stack([s.data for s in per_tensor]), np.stack([s.scale for s in per_tensor]), Float8CurrentScaling(), PerTensor()
    )
    np.testing.assert_array_equal(breccia.dequantize(stacked), np.stack([breccia.dequantize(s) for s in per_tensor]))
    np.testing.assert_array_equal(breccia.dequantize(stacked.mT), breccia.dequantize(stacked).swapaxes(-1, -2))


def test_integer_and_float_zero_points_of_other_libraries_decode_to_the_same_values() -> None:
    recipe = INT4Scaling(group_size=16, signed=False, symmetric=False)
    st = breccia.cast(wide((4, 32), seed=2, exponents=2) + 1, recipe)
    for dtype in (np.int8, np.int32, np.float16, np.float32):
        other = dataclasses.replace(st, zero_point=st.zero_point.astype(dtype))
        assert breccia.dequantize(other).tobytes() == breccia.dequantize(st).tobytes()


# ------------------------------------------------------------------------------------------------ the ops refuse


X = np.ones((4, 32), np.float32)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: breccia.cast(X.astype("f8"), BLOCK), TypeError, "cast takes float32, float16, bfloat16; got float64. Convert"),
        (lambda: breccia.cast(X.astype("i4"), BLOCK), TypeError, "got int32. Only floating-point numbers are quantized"),
        (lambda: breccia.cast(X.astype("c8"), BLOCK), TypeError, "got complex64"),
        (lambda: breccia.cast([[1.0]], BLOCK), TypeError, r"x must be an array .*; got list. Convert it first: np.asarray"),
        (lambda: breccia.cast(None, BLOCK), TypeError, "got NoneType"),
        (lambda: breccia.cast(X, 4), TypeError, "recipe must be a ScalingRecipe instance, got int"),  # type: ignore[arg-type]
        (lambda: breccia.cast(X, "nvfp4,block_siz=16"), ValueError, "has no field 'block_siz'; did you mean 'block_size'"),
        (lambda: breccia.cast(breccia.cast(X, BLOCK), BLOCK), TypeError, r"x is a ScaledTensor already: breccia.requantize"),
        (lambda: breccia.cast(BLOCK, X), TypeError, "recipe must be a ScalingRecipe instance, got ndarray"),
        (lambda: np.asarray(breccia.cast(X, BLOCK)), TypeError, r"a ScaledTensor is not an array; breccia.dequantize\(st\)"),
        (lambda: breccia.explain("cast", "nvfp4", "mxfp8"), TypeError, "x is an array, not scaled"),
        (lambda: breccia.cast(X, "nvfp5"), ValueError, "no recipe 'nvfp5'; did you mean 'nvfp4'"),
        (lambda: breccia.cast(X, MXFP8BlockScaling), TypeError, r"did you mean MXFP8BlockScaling\(\)\?"),
        (lambda: breccia.cast(X[0], BLOCK), ValueError, r"Float8BlockScaling requires x.ndim >= 2, got 1 .*\(1, 32\)"),
        (lambda: breccia.cast(X[0, 0], DelayedScaling()), ValueError, r"at least one axis; got a 0-D array"),
        (lambda: breccia.cast(X, BLOCK, axis=-3), ValueError, "the contraction axis is one of the last two.*axis=-3"),
        (lambda: breccia.cast(X, BLOCK, rounding="up"), ValueError, "rounding is one of nearest, stochastic; got 'up'"),
        (lambda: breccia.cast(X, BLOCK, rounding="stochastic"), ValueError, "rounding='stochastic' needs a seed"),
        (lambda: breccia.cast(X, BLOCK, seed=3), ValueError, "rounding='nearest' takes no seed; got seed=3"),
        (lambda: breccia.cast(X, BLOCK, rounding="stochastic", seed=-1), ValueError,
            r"seed must lie in 0 .. 2\*\*64 - 1; got -1"),
        (lambda: breccia.cast(X, BLOCK, nonfinite="keep"), ValueError, "nonfinite is one of propagate, raise; got 'keep'"),
        (lambda: breccia.cast(X * np.inf, BLOCK, nonfinite="raise"), ValueError, "x holds NaN or Inf"),
        (lambda: breccia.cast(X, BLOCK, rounding="stochastic", seed=1.5), ValueError, "seed must be an integer, got 1.5"),
        (lambda: breccia.cast(X, BLOCK, rounding=["up"]), ValueError, "rounding is one of"),
        (lambda: breccia.cast(X, BLOCK, axis=-1.0), ValueError, "axis must be an integer, got -1.0"),
        (lambda: breccia.cast(X, DelayedScaling(), scale="1"), TypeError, "scale= must be a number or an array, got str"),
        (lambda: breccia.cast(X, DelayedScaling(), scale=np.ones((), "f8")), TypeError, "scale= must hold F32 as .* float64"),
        (lambda: breccia.cast(X, MXFP8BlockScaling(), scale=X[:, :1]), TypeError,
            "scale= must hold E8M0 as .* got dtype float32"),
        (lambda: breccia.cast(X, BLOCK, out=X), TypeError, "out= must be a ScaledTensor, got ndarray"),
        (lambda: breccia.requantize(breccia.cast(X, BLOCK), BLOCK, rounding="bogus"), ValueError, "rounding is one of"),
        (lambda: breccia.matmul(np.ones((2, 4, 4), "f4"), np.ones((3, 4, 4), "f4")), ValueError, "do not broadcast"),
        (lambda: breccia.from_buffer(DATA, ONE, DelayedScaling(), PerTensor(), shape=4), ValueError, "shape must be a tuple"),
        (lambda: breccia.from_buffer(DATA, ONE, DelayedScaling(), PerTensor(), shape=(4, -8)), ValueError, "lengths >= 0"),
        (lambda: breccia.recipe(None), TypeError, r"recipe\(\) takes a recipe's name, got None"),  # type: ignore[arg-type]
        (lambda: breccia.explain("matmul", "fp8_block"), TypeError, r"explain\('matmul', \.\.\.\) takes a, b; got 1\."),
        pytest.param(
            lambda: breccia.explain("cast", X, BLOCK, on="torch"),
            TypeError,
            "on='torch', but the operand is on numpy:cpu",
            marks=pytest.mark.together,
        ),
        (lambda: breccia.cast(X, BLOCK, scale=ONE), ValueError, r"scale= must have shape \(4, 8\) .* got \(\)"),
        (lambda: breccia.cast(X, DelayedScaling(), scale=SCALE), ValueError, r"scale= must have shape \(\)"),
        (lambda: breccia.cast(X, BLOCK, out=breccia.cast(X, DelayedScaling())), ValueError, "out= is .*, but the cast returns"),
        (lambda: breccia.dequantize(X), TypeError, "dequantize takes a ScaledTensor, got ndarray; quantize"),
        (lambda: breccia.dequantize(breccia.cast(X, BLOCK), out_dtype="int8"), TypeError, "out_dtype is one of float32"),
        (lambda: breccia.dequantize(breccia.cast(X, BLOCK), out=X[0]), ValueError, r"out= must have shape \(4, 32\)"),
        (lambda: breccia.requantize(X, BLOCK), TypeError, "requantize takes a ScaledTensor"),
        (lambda: breccia.requantize(breccia.cast(X, BLOCK), None), TypeError,
            "recipe must be a ScalingRecipe instance, got NoneType"),
        (lambda: breccia.matmul(breccia.cast(X, BLOCK), X), ValueError, r"a.shape\[-1\]=32 != b.shape\[-2\]=4 .*w.mT"),
        (lambda: breccia.matmul(X[0], X.T), ValueError, "at least two axes"),
        (lambda: breccia.matmul(X.astype("f8"), X.T), TypeError, "matmul takes ScaledTensors and .*; a is float64"),
        (lambda: breccia.matmul(X, X.T, out=X), ValueError, r"out= must have shape \(4, 4\)"),
        (lambda: breccia.cast_ste_clipped(X, BLOCK, 2.0, 1.0), ValueError,
            "clip_min must be less than clip_max; got 2.0 and 1.0"),
        (lambda: check_scaled("to_acme", X, "torch"), TypeError,
            r"^to_acme takes a ScaledTensor of torch, got ndarray; breccia\.cast makes one of an array\."),
        (lambda: check_scaled("to_acme", breccia.cast(X, BLOCK), "torch", " or a pair"), TypeError,
            r"^to_acme takes a ScaledTensor of torch or a pair, got numpy; convert it by .*from_dlpack\(st, 'torch'\)\."),
        (lambda: breccia.AmaxHistory(BLOCK), TypeError, "AmaxHistory needs a DelayedScaling recipe"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_impossible_call_raises_with_a_reason_and_a_remedy(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert isinstance(caught.value, breccia.BrecciaError)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 2.0**-140])
def test_an_unusable_supplied_scale_becomes_nan(bad: float) -> None:
    st = breccia.cast(X, Float8CurrentScaling(), scale=bad)
    assert np.isnan(st.scale) and np.isnan(breccia.dequantize(st)).all()
    st = breccia.cast(X, NVFP4BlockScaling(), scale=bad)
    assert np.isnan(breccia.dequantize(st)).all()


def test_one_supplied_scale_per_expert_is_used_for_its_expert() -> None:
    x = wide((3, 4, 16), seed=5, exponents=2)
    scales = np.array([0.5, 1.0, 2.0], np.float32)
    for recipe in (Float8CurrentScaling(), NVFP4BlockScaling()):
        together = breccia.cast(x, recipe, scale=scales)
        for e in range(3):
            alone = breccia.cast(x[e], recipe, scale=scales[e])
            assert together.data[e].tobytes() == alone.data.tobytes()
        kept = together.global_scale if recipe.name == "nvfp4" else together.scale
        assert kept.tobytes() == scales.tobytes()
        assert breccia.dequantize(together).shape == x.shape


def test_a_tensors_own_scales_can_be_supplied_in_any_dtype() -> None:
    x = wide((4, 64), seed=6, exponents=3)
    for dtype in ("fp16", "bf16", "fp32"):
        recipe = INT4Scaling(group_size=16, scale_dtype=dtype)
        first = breccia.cast(x, recipe)
        again = breccia.cast(x, recipe, scale=first.scale)
        assert (again.data.tobytes(), again.scale.tobytes()) == (first.data.tobytes(), first.scale.tobytes())


def test_out_of_another_dtype_is_refused_before_the_first_byte() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X)
    st = breccia.cast(x, BLOCK)
    raw = breccia.from_buffer(st.data.view(torch.uint8), st.scale, BLOCK, st.layout)
    with pytest.raises(LayoutError, match="out= is .*uint8.*but the cast returns .*float8_e4m3fn"):
        breccia.cast(x, BLOCK, out=raw)
    assert breccia.requantize(st, BLOCK, out=breccia.cast(x * 2, BLOCK)).data.view(torch.uint8).equal(st.data.view(torch.uint8))


def test_a_supplied_block_scale_keeps_the_orientation_of_the_tensor() -> None:
    x = wide((32, 6), seed=3, exponents=2)
    first = breccia.cast(x, Float8BlockScaling(block_k=16), axis=-2)
    again = breccia.cast(x, Float8BlockScaling(block_k=16), axis=-2, scale=first.scale)
    assert again.scale.tobytes() == first.scale.tobytes() and again.data.tobytes() == first.data.tobytes()
    codes = breccia.cast(x, MXFP8BlockScaling(), axis=-2)
    assert breccia.cast(x, MXFP8BlockScaling(), axis=-2, scale=codes.scale).data.tobytes() == codes.data.tobytes()


def test_nan_under_a_supplied_scale_marks_the_block_of_integers_and_the_element_of_fp8() -> None:
    x = X.copy()
    x[1, 3] = np.nan
    st = breccia.cast(x, INT4Scaling(group_size=16), scale=np.full((4, 2), 0.5, np.float16))
    assert np.isnan(st.scale).tolist() == [[False, False], [True, False], [False, False], [False, False]]
    y = breccia.dequantize(breccia.cast(x, Float8CurrentScaling(), scale=0.5))
    assert np.isnan(y).sum() == 1 and np.isnan(y[1, 3])


def test_errors_carry_the_values_they_name() -> None:
    with pytest.raises(ShapeError) as caught:
        breccia.matmul(X, X)
    assert caught.value.found == {"a": (4, 32), "b": (4, 32)}
    assert pickle.loads(pickle.dumps(caught.value)).found == caught.value.found
