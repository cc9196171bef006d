"""The error bounds of products: an emulated FP8 tensor core keeps its bound when promoted every 128 along K, and not otherwise.

The emulation follows the assumption of docs/spec/numerics.md, section 9: an instruction adds 32 products to the sum so far, all
aligned to the largest of them and truncated to 13 fraction bits.
"""

from __future__ import annotations

import numpy as np
import pytest

import breccia
from breccia.kernels import bounds

FP8, ROW, NVFP4 = breccia.Float8CurrentScaling(), breccia.Float8RowScaling("E5M2"), breccia.NVFP4BlockScaling()
#: Codes of E4M3 whose first product is large and whose others are just too small for a tensor core beside it.
LARGE, SMALL = 448.0, (2.0, 4.0)


def instruction(products: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The sums of 32 products and of the sum so far, in a tensor core."""
    terms = np.concatenate([products, sums[..., None]], -1)
    exponent = np.frexp(np.abs(terms).max(-1, keepdims=True))[1] - 1.0
    unit = np.exp2(exponent - 13)
    return (
        np.where(exponent[..., 0] < -1000, 0.0, (np.trunc(terms / unit) * unit).sum(-1)).astype(np.float32).astype(np.float64)
    )


def tensor_core(a: np.ndarray, b: np.ndarray, promoted: int) -> np.ndarray:
    """a (M, K) times b (N, K) transposed; sums go to FP32 after so many products along K."""
    products = a[:, None, :] * b[None, :, :]
    total = np.zeros(products.shape[:2], np.float32)
    for start in range(0, products.shape[-1], promoted):
        sums = np.zeros(products.shape[:2])
        for k in range(start, min(start + promoted, products.shape[-1]), 32):
            sums = instruction(products[..., k : k + 32], sums)
        total += sums.astype(np.float32)
    return total.astype(np.float64)


def in_fp16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product with every partial sum in FP16, scaled so that none overflows."""
    products = a[:, None, :] * b[None, :, :] * 2.0**-6
    total = np.zeros(products.shape[:2], np.float16)
    for k in range(products.shape[-1]):
        total = (total + products[..., k].astype(np.float16)).astype(np.float16)
    return total.astype(np.float64) * 2.0**6


def adversarial(k: int) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.full((2, k), SMALL[0]), np.full((3, k), SMALL[1])
    a[:, 0], b[:, 0] = LARGE, LARGE
    return a, b


def worst(found: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The largest error over the bound of FP8 tensor cores."""
    k = a.shape[-1]
    bound = bounds.accumulated(np.abs(a) @ np.abs(b).T, k, k, True)
    return float((np.abs(found - a @ b.T) / bound).max())


@pytest.mark.parametrize("k", [4096, 16384])
def test_adversarial_data_accept_promotion_and_nothing_less(k: int) -> None:
    a, b = adversarial(k)
    assert worst(tensor_core(a, b, 128), a, b) <= 1
    assert worst(tensor_core(a, b, k), a, b) > 1
    assert worst(tensor_core(a, b, 8192), a, b) > 1 or k < 8192
    assert worst(in_fp16(a, b), a, b) > 1


def test_random_data_stay_within_the_bound_of_promoted_tensor_cores() -> None:
    rng = np.random.default_rng(0)
    for scale in (1.0, 2.0**-9, 448.0):
        a, b = (np.clip(rng.standard_normal((4, 1024)) * scale, -448, 448) for _ in range(2))
        a, b = (breccia.dequantize(breccia.cast(x.astype(np.float32), FP8)).astype(np.float64) for x in (a, b))
        assert worst(tensor_core(a, b, 128), a, b) <= 1


def test_a_tensor_core_violates_the_bound_of_fp32_which_the_wider_one_includes() -> None:
    a, b = adversarial(4096)
    found, exact, magnitude = tensor_core(a, b, 128), a @ b.T, a @ b.T
    fp32 = bounds.accumulated(magnitude, 4096, 4096)
    assert (np.abs(found - exact) > fp32).all()
    for k in (32, 4096):
        assert bounds.accumulated(1.0, k, k) < bounds.accumulated(1.0, k, k, True)
    assert bounds.accumulated(1.0, 2**20, 2**20) <= bounds.accumulated(1.0, 2**20, 2**20, True)


def test_only_two_fp8_tensors_on_cuda_may_be_summed_in_tensor_cores() -> None:
    assert bounds.in_tensor_cores(FP8, ROW, "cuda")
    assert not bounds.in_tensor_cores(FP8, ROW, "cpu")
    assert not bounds.in_tensor_cores(FP8, None, "cuda")
    assert not bounds.in_tensor_cores(FP8, NVFP4, "cuda")


def test_the_bound_is_that_of_the_specification() -> None:
    u = 2.0**-24
    tau, c = 4 * 34 * 2.0**-13, 4096 // 128
    gamma = (c + 2) * u / (1 - (c + 2) * u)
    assert bounds.accumulated(3.0, 4096, 4096, True) == pytest.approx(
        (tau + gamma * (1 + tau)) * 3 + 4096 * 2.0**-118, rel=1e-12
    )
    n = 4097 * u
    assert bounds.accumulated(3.0, 4097, 4096) == pytest.approx(n / (1 - n) * 3 + 4096 * 2.0**-126, rel=1e-12)
