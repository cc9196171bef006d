"""FP8 codecs without -0 and Inf, compared with torch and ml_dtypes, and held apart from OCP's."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import breccia
from breccia.arrays.ops import NUMPY
from breccia.codecs import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, INT4, Minifloat
from breccia.kernels import exact
from breccia.testing import oracle

FNUZ = pytest.mark.parametrize("codec", [E4M3FNUZ, E5M2FNUZ], ids=lambda c: c.name)
NAN = 0x80


def by_ml_dtypes(y: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return y.astype(getattr(ml_dtypes, dtype)).view(np.uint8)


def by_torch(y: np.ndarray, dtype: str) -> np.ndarray:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(y).to(getattr(torch, dtype)).view(torch.uint8).numpy()


def values_of_ml_dtypes(codes: np.ndarray, dtype: str) -> np.ndarray:
    return codes.view(getattr(ml_dtypes, dtype)).astype(np.float32)


def values_of_torch(codes: np.ndarray, dtype: str) -> np.ndarray:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(codes).view(getattr(torch, dtype)).float().numpy()


def dense(codec: Minifloat) -> np.ndarray:
    """Values and midpoints of a codec, with the 64 FP32 numbers on either side of each; and numbers far below and above."""
    values = [float(v) for v in oracle.ladder(codec)[0]]
    points = np.array(values + [(low + high) / 2 for low, high in pairwise(values)], np.float32)
    around = (points.view(np.int32)[:, None] + np.arange(-64, 65, dtype=np.int32)).view(np.float32).reshape(-1)
    far = np.array([0.0, 2.0**-126, 2.0**-40, 1e30, np.inf, np.nan], np.float32)
    numbers = np.concatenate([around, far, -far])
    return numbers[(np.abs(numbers) >= 2.0**-126) | (numbers == 0) | np.isnan(numbers)]


@FNUZ
@pytest.mark.parametrize("values", [values_of_ml_dtypes, values_of_torch])
def test_every_code_has_the_value_of_other_libraries(codec: Minifloat, values: Any) -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs, ours = values(codes, codec.dtype), codec.decode(NUMPY, codes.astype(np.int32))
    assert np.flatnonzero(np.isnan(ours)).tolist() == np.flatnonzero(np.isnan(theirs)).tolist() == [NAN]
    assert not np.isinf(ours).any()
    np.testing.assert_array_equal(np.delete(ours, NAN).view(np.uint32), np.delete(theirs, NAN).view(np.uint32))


@FNUZ
@pytest.mark.parametrize("encode", [by_ml_dtypes, by_torch])
def test_numbers_around_every_midpoint_have_the_codes_of_other_libraries(codec: Minifloat, encode: Any) -> None:
    """They write NaN beyond the largest number, where breccia saturates. The oracle has the codes of all in range, too."""
    y = dense(codec)
    assert y.size > 50_000
    ours, theirs = codec.encode(NUMPY, y), encode(y, codec.dtype)
    beyond = np.isfinite(y) & (np.abs(y) > codec.max)
    np.testing.assert_array_equal(ours[~beyond], theirs[~beyond])
    np.testing.assert_array_equal(ours[beyond], np.where(np.signbit(y[beyond]), 0xFF, 0x7F))
    some = np.flatnonzero(np.isfinite(y))[::17]
    expected = [oracle.encode(codec, Fraction(float(y[i])), bool(np.signbit(y[i]))) for i in some]
    assert ours[some].tolist() == expected


@FNUZ
def test_what_rounds_to_zero_is_written_as_zero_without_a_sign(codec: Minifloat) -> None:
    smallest = np.float32(codec.value(1))
    y = np.array([-0.0, -(2.0**-126), -smallest / 2, smallest / 2, -smallest * np.float32(0.5000001)], np.float32)
    assert codec.encode(NUMPY, y).tolist() == [0, 0, 0, 0, 0x81]
    words = np.array([0, 0, 0, 0, -1, -1], np.int32)
    y = np.array([-smallest / 4, -0.0, smallest / 4, -smallest, -smallest / 4, -0.0], np.float32)
    assert codec.encode(NUMPY, y, words).tolist() == [0, 0, 0, 0x81, 0x81, 0]


@FNUZ
def test_under_a_supplied_scale_nan_and_infinities_are_written_as_the_nan_code(codec: Minifloat) -> None:
    x = np.array([[np.nan, np.inf, -np.inf, -1e30, 1e30, -0.0, -1e-30, 1.0]], np.float32)
    st = breccia.cast(x, breccia.Float8CurrentScaling(codec.name), scale=1.0)
    one = codec.bias << codec.mantissa_bits
    assert st.data.tolist() == [[NAN, NAN, NAN, 0xFF, 0x7F, 0, 0, one]]
    assert [math.isnan(v) for v in breccia.dequantize(st)[0]] == [True] * 3 + [False] * 5


@pytest.mark.parametrize(("ocp", "fnuz"), [(E4M3, E4M3FNUZ), (E5M2, E5M2FNUZ)], ids=lambda c: c.name)
def test_ocp_codes_stand_for_twice_the_numbers(ocp: Minifloat, fnuz: Minifloat) -> None:
    """Where both are numbers and not -0. So neither codec holds the other's numbers: `requantize` has to cast."""
    theirs, ours = (np.array(codec.table, np.uint32).view(np.float32) for codec in (ocp, fnuz))
    numbers = np.isfinite(theirs) & np.isfinite(ours)
    np.testing.assert_array_equal(theirs[numbers], 2 * ours[numbers])
    assert numbers.sum() == (253 if ocp is E4M3 else 247)
    assert exact.renamed(ocp, fnuz) is exact.renamed(fnuz, ocp) is None
    assert exact.renamed(INT4, E4M3FNUZ) is not None  # no -0 among integers


@pytest.mark.parametrize(("old", "new"), [("E4M3", "E4M3FNUZ"), ("E4M3FNUZ", "E4M3"), ("E5M2FNUZ", "E5M2")])
def test_requantize_casts_from_one_to_the_other(old: str, new: str) -> None:
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    st = breccia.cast(x, breccia.Float8RowScaling(old))
    again = breccia.requantize(st, breccia.Float8RowScaling(new))
    assert breccia.bytes_equal(again, breccia.cast(breccia.dequantize(st), breccia.Float8RowScaling(new)))


def test_exact_requantizing_to_e4m3_accepts_numbers_that_both_have_and_refuses_others() -> None:
    """Under scale 1 both have 2^-9, and FNUZ alone has 2^-10."""
    old, new = (breccia.Float8RowScaling(name, power_of_two_scale=True) for name in ("E4M3FNUZ", "E4M3"))
    st = breccia.cast(np.array([[1.0, -2.0, 2.0**-9, 240.0]], np.float32), old)
    assert st.data.tolist() == [[0x40, 0xC8, 0x02, 0x7F]] and st.scale.tolist() == [[1.0]]
    again = breccia.requantize(st, new, require_exact=True)
    assert again.data.tolist() == [[0x38, 0xC0, 0x01, 0x77]] and again.scale.tolist() == [[1.0]]
    with pytest.raises(breccia.InexactError, match="1 of 2 values do not fit"):
        breccia.requantize(breccia.cast(np.array([[2.0**-10, 240.0]], np.float32), old), new, require_exact=True)


@pytest.mark.parametrize("kind", [breccia.DelayedScaling, breccia.Float8RowScaling, breccia.Float8BlockScaling])
def test_recipes_of_ocp_and_fnuz_are_told_apart(kind: Any) -> None:
    recipes = [kind(codec.name) for codec in (E4M3, E4M3FNUZ, E5M2, E5M2FNUZ)]
    assert len({recipe.fingerprint() for recipe in recipes}) == len({recipe.format.fingerprint() for recipe in recipes}) == 4
