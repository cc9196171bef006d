"""Compare two FP32 products within an error bound: BLAS promises no order of summation, so `==` does not apply."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same_product(found: Any, expected: Any, a: Any, b: Any, *, rest: Any = 0.0) -> None:
    """Check |found - expected| <= 2 g (|a| @ |b| + |rest|), g = (K + 1) u / (1 - (K + 1) u), u = 2^-24.

    Each product is within g of the exact one in any order of summation: Higham, "Accuracy and Stability of Numerical
    Algorithms", section 3.1. `rest` is what was added to both products; that is one more rounding, hence K + 1.
    """
    found, expected, a, b = (np.asarray(x.detach() if hasattr(x, "detach") else x, np.float64) for x in (found, expected, a, b))
    rest = np.asarray(rest.detach() if hasattr(rest, "detach") else rest, np.float64)
    n = (a.shape[-1] + 1) * 2.0**-24
    bound = 2 * n / (1 - n) * (np.abs(a) @ np.abs(b) + np.abs(rest))
    assert found.shape == expected.shape
    worst = np.max(np.abs(found - expected) - bound, initial=-1.0)
    assert worst <= 0, f"{worst} beyond the bound of two orders of summation"
