"""GPTQ for any recipe: codes against the optimal update computed step by step, damping, and what keeps the codes of a cast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import breccia
from breccia import NonFiniteError
from breccia.internal import affine
from breccia_torch.calibration.feedback import corrected, damped, output_error, rank
from breccia_torch.calibration.moments import Moments, Products

RECIPES = [
    "nvfp4",
    "mxfp4",
    "int4,group_size=32",
    "int4,offset=bias,group_size=16",
    "int4,symmetric=false",
    "q4_k",
    "nf4",
    "mxfp8",
]
ROWS, COLUMNS = 3, 64


def moments_of(x: np.ndarray) -> Moments:
    moments, products = Moments("layer", x.shape[-1], "cpu"), Products()
    products.observer(moments)(torch.from_numpy(x))
    return moments


def drawn(columns: int = COLUMNS, tokens: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and correlated inputs."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((columns, columns)) * np.exp(rng.standard_normal(columns))[:, None]
    x = rng.standard_normal((tokens, columns)) @ mixed / 8
    return rng.standard_normal((ROWS, columns)).astype(np.float32), x.astype(np.float32)


def optimal(weight: np.ndarray, st: Any, second: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, float]:
    """Codes' numbers, column by column, and the least distance of any from the middle of two codes.

    Where the columns F are fixed with the errors e, the others R are best at w + inverse(H_RR) H_RF e: the definition of
    error feedback, without Cholesky factors, in FP64.
    """
    numbers, _ = affine.numbers_of_codec(st.recipe.format.element)
    zero, step = (part.astype(np.float64) for part in affine.affine(st))
    found, margin = np.zeros(weight.shape), np.inf
    for row in range(len(weight)):
        errors = np.zeros(0)
        for n, j in enumerate(order):
            fixed, rest = order[:n], order[n:]
            shift = np.linalg.solve(second[np.ix_(rest, rest)], second[np.ix_(rest, fixed)] @ errors)[0] if n else 0.0
            units = (weight[row, j] + shift - zero[row, j]) / step[row, j]
            distance = np.abs(numbers - units)
            nearest = int(distance.argmin())
            first, second_nearest = np.sort(distance)[:2]
            margin = min(margin, second_nearest - first)
            found[row, j] = numbers[nearest]
            errors = np.append(errors, weight[row, j] - (zero[row, j] + step[row, j] * numbers[nearest]))
    return found, margin


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("by_importance", [False, True])
@pytest.mark.parametrize("spec", RECIPES)
def test_codes_are_those_of_the_optimal_update_column_by_column(spec: str, by_importance: bool) -> None:
    weight, x = drawn(seed=7)
    moments, st = moments_of(x), breccia.cast(weight, spec)
    new, (made,) = corrected(torch.from_numpy(weight), st, [moments], 0.01, by_importance)
    square = moments.second.numpy() / moments.count
    order = np.argsort(-square.diagonal(), kind="stable") if by_importance else np.arange(COLUMNS)
    second = square + 0.01 * square.diagonal().mean() * np.eye(COLUMNS)
    expected, margin = optimal(weight, st, second, order)
    assert made == (0.01, 0, COLUMNS)
    # Numbers of at most 16 steps lose at most 64 updates * 16 * 2^-24 of a step to FP32, and none lies so close to the middle
    # of two codes.
    codec = st.recipe.format.element
    table = np.array([codec.value(code) for code in range(1 << codec.bits)])
    found = table[affine.codes_of(new) & ((1 << codec.bits) - 1)]
    assert margin > 2.0**-14 and (found == expected).all()
    same = breccia.bytes_equal(affine.with_codes(new, affine.codes_of(st)), st)
    assert same, "scales changed"


@pytest.mark.parametrize("spec", RECIPES)
def test_outputs_have_less_error_than_those_of_a_cast(spec: str) -> None:
    weight, x = drawn()
    st = breccia.cast(weight, spec)
    new, _ = corrected(torch.from_numpy(weight), st, [moments_of(x)], 0.01, True)
    before, after = (np.linalg.norm((breccia.dequantize(each) - weight) @ x.T) for each in (st, new))
    assert after < 0.7 * before


def test_inputs_without_correlation_leave_the_codes_of_a_cast() -> None:
    weight, _ = drawn()
    st = breccia.cast(weight, "int4,group_size=32")
    new, (made,) = corrected(torch.from_numpy(weight), st, [moments_of(np.eye(COLUMNS, dtype=np.float32))], 0.01, True)
    assert made == (None, 0, COLUMNS) and breccia.bytes_equal(new, st)  # feedback has nothing to lower


def test_fewer_tokens_than_columns_are_damped_more() -> None:
    _, x = drawn(tokens=16)
    found = damped(moments_of(x), 0.01, torch.arange(COLUMNS))
    assert found is not None and found.damping == 0.01 * COLUMNS / 16


def test_damping_grows_until_a_singular_moment_can_be_inverted() -> None:
    _, x = drawn()
    found = damped(moments_of(np.repeat(x[:, :1], COLUMNS, 1)), 1e-18, torch.arange(COLUMNS))  # all columns are one
    assert (
        found is not None
        and found.grown
        and found.damping == pytest.approx(1e-18 * 10**found.grown)
        and bool(torch.isfinite(found.inverse).all())
    )


@pytest.mark.parametrize("spanned", [1, 5, COLUMNS - 3])
def test_rank_is_that_of_the_inputs_whatever_the_sizes_of_their_columns(spanned: int) -> None:
    rng = np.random.default_rng(spanned)
    first = rng.standard_normal((400, spanned)).astype(np.float32)
    dependent = first[:, rng.integers(0, spanned, COLUMNS - spanned - 1)]  # copies, so that rounding leaves the rank alone
    x = np.concatenate([first, dependent, np.zeros((400, 1), np.float32)], 1)[:, rng.permutation(COLUMNS)]
    x *= 2.0 ** rng.integers(-12, 12, COLUMNS).astype(np.float32)
    assert rank(moments_of(x).second) == spanned


def test_correlated_inputs_have_full_rank() -> None:
    assert rank(moments_of(drawn()[1]).second) == COLUMNS
    assert rank(torch.zeros(4, 4, dtype=torch.float64)) == 0


def test_inputs_that_are_all_zero_leave_the_codes_of_a_cast() -> None:
    weight, _ = drawn()
    st = breccia.cast(weight, "nvfp4")
    new, made = corrected(torch.from_numpy(weight), st, [moments_of(np.zeros((8, COLUMNS), np.float32))], 0.01, True)
    assert made == [(None, 0, 0)] and breccia.bytes_equal(new, st)


def test_blocks_of_zeros_stay_zeros() -> None:
    weight, x = drawn()
    weight[:, :32] = 0
    st = breccia.cast(weight, "mxfp4")
    new, _ = corrected(torch.from_numpy(weight), st, [moments_of(x)], 0.01, False)
    assert np.isfinite(breccia.dequantize(new)).all()


def test_moments_are_sums_in_fp64() -> None:
    _, x = drawn(tokens=100)
    moments = moments_of(x)
    precise = x.astype(np.float64)
    # An FP64 sum of 100 products, in any order, is off by at most 100 roundings of the sum of magnitudes.
    allowed = 100 * 2.0**-53 * (np.abs(precise).T @ np.abs(precise))
    assert (np.abs(moments.second.numpy() - precise.T @ precise) <= allowed).all()
    assert moments.count == 100


def test_nan_in_the_inputs_of_a_layer_names_it() -> None:
    _, x = drawn()
    x[3, 5] = np.nan
    with pytest.raises(NonFiniteError, match="the inputs of layer have NaN or Inf, after 0 tokens. Find the layer before it"):
        moments_of(x)


def test_the_error_of_outputs_is_that_of_the_products() -> None:
    weight, x = drawn(tokens=50)
    moments = moments_of(x)
    expected = float(((weight.astype(np.float64) @ x.T.astype(np.float64)) ** 2).sum())
    # FP32 products and sums of 64 terms, twice.
    assert abs(output_error(torch.from_numpy(weight), moments.second) - expected) <= 128 * 2.0**-24 * expected * 8
