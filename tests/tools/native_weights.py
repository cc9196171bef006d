"""Every format that compiled products read, and the bound of their products."""

from __future__ import annotations

from typing import Any

import numpy as np
import weights

from breccia import codecs as c
from breccia.formats import TENSOR, Format, Level


def check_bound(found: Any, x: Any, w: np.ndarray, bias: Any = None) -> None:
    """The bound of docs/spec/numerics.md, section 9."""
    x, w, k = x.astype(np.float64), w.astype(np.float64).swapaxes(-1, -2), x.shape[-1]
    added = 0.0 if bias is None else bias.astype(np.float64)
    exact, size = x @ w + added, np.abs(x) @ np.abs(w) + np.abs(added)
    n = (k + (bias is not None)) * 2.0**-24
    bound = n / (1 - n) * size + k * 2.0**-126
    assert found.shape == exact.shape
    nan = np.isnan(exact)
    np.testing.assert_array_equal(np.isnan(found), nan)
    worst = np.max(np.where(nan, 0, np.abs(found - exact) / np.where(nan, 1, bound)))
    assert worst <= 1, f"the error is {worst:.3g} times the bound"


def integer(bits: int, signed: bool = False, fraction_bits: int = 0) -> c.Integer:
    return c.Integer(f"i{bits}", bits, None, "", signed, fraction_bits)


#: Those of weight-only kernels too.
SHARED = ("int4-row", "mxfp4", "nvfp4", "nvfp4-divisor", "nvfp4-amax", "mxfp8", "int8-row")
FORMATS = {
    **{name: weights.FORMATS[name] for name in SHARED},
    "int4": Format(c.INT4, (Level(c.F16, (1, 128)),)),
    "int4-32": Format(c.INT4, (Level(c.F32, (1, 32)),)),
    "int4-tensor": Format(c.INT4, (Level(c.F32, TENSOR),)),
    "uint4-zero-128": Format(c.UINT4, (Level(c.BF16, (1, 128)),), "zero_point"),
    "uint4-zero-16": Format(c.UINT4, (Level(c.F16, (1, 16)),), "zero_point"),
    "uint4-bias-64": Format(c.UINT4, (Level(c.F16, (1, 64)),), "bias"),
    "uint4-bias-256": Format(c.UINT4, (Level(c.F32, (1, 256)),), "bias"),
    "e2m1-divisor-8": Format(c.E2M1, (Level(c.UE4M3, (1, 8), "divisor"),)),
    "nf4": Format(c.NF4, (Level(c.F32, (1, 64)),)),
    "nf4-24": Format(c.NF4, (Level(c.F32, (1, 24)),)),
    "e4m3-block": Format(c.E4M3, (Level(c.F32, (128, 128)),)),
    "e4m3-row": Format(c.E4M3, (Level(c.F32, (1, None)),)),
    "e5m2-tensor": Format(c.E5M2, (Level(c.F32, TENSOR),)),
    "e5m2-amax-40": Format(c.E5M2, (Level(c.BF16, (1, 40), "amax"),)),
    "mxfp8-16": Format(c.E4M3, (Level(c.E8M0, (1, 16)),)),
    "int8": Format(c.INT8, (Level(c.F32, (1, 32)),)),
    "uint8-zero": Format(c.UINT8, (Level(c.F16, (1, 48)),), "zero_point"),
    "int8-bias": Format(c.INT8, (Level(c.F16, (1, 16)),), "bias"),
    "ue4m3": Format(c.UE4M3, (Level(c.F32, (3, 40)),)),
    "mxfp6-e2m3": Format(c.E2M3, (Level(c.E8M0, (1, 32)),)),
    "mxfp6-e3m2": Format(c.E3M2, (Level(c.E8M0, (1, 32)),)),
    "e3m2-row": Format(c.E3M2, (Level(c.F32, (1, None)),)),
    "int4-12": Format(c.INT4, (Level(c.F16, (1, 12)),)),
    "uint4-zero-20": Format(c.UINT4, (Level(c.F16, (1, 20)),), "zero_point"),
    "uint8-bias-7": Format(c.UINT8, (Level(c.F32, (1, 7)),), "bias"),
    "e4m3-100": Format(c.E4M3, (Level(c.F32, (2, 100)),)),
    "e2m3-4": Format(c.E2M3, (Level(c.F16, (1, 4)),)),
    "uint2-bias-64": Format(integer(2), (Level(c.F16, (1, 64)),), "bias"),
    "uint3-bias-64": Format(integer(3), (Level(c.F32, (1, 64)),), "bias"),
    "uint5-bias-32": Format(integer(5), (Level(c.F16, (1, 32)),), "bias"),
    "uint6-bias-128": Format(integer(6), (Level(c.BF16, (1, 128)),), "bias"),
    "uint7-bias-16": Format(integer(7), (Level(c.F32, (1, 16)),), "bias"),
    "uint3-zero-32": Format(integer(3), (Level(c.F16, (1, 32)),), "zero_point"),
    "uint5-zero-8": Format(integer(5), (Level(c.F16, (1, 8)),), "zero_point"),
    "uint6-zero-20": Format(integer(6), (Level(c.F16, (1, 20)),), "zero_point"),
    "uint8-bias-64": Format(c.UINT8, (Level(c.F16, (1, 64)),), "bias"),
    "uint8-tensor": Format(c.UINT8, (Level(c.F32, TENSOR),)),
    "uint8-e8m0": Format(c.UINT8, (Level(c.E8M0, (1, 32)),)),
    "uint6-e4m3": Format(integer(6), (Level(c.E4M3, (1, 16)),)),
    "uint7-row": Format(integer(7, fraction_bits=6), (Level(c.F32, (1, None)),)),
    "int2-32": Format(integer(2, True), (Level(c.F16, (1, 32)),)),
    "int3-row": Format(integer(3, True, fraction_bits=1), (Level(c.F32, (1, None)),)),
    "int4-fraction": Format(integer(4, True, fraction_bits=2), (Level(c.F32, (1, 32)),)),
    "int5-divisor-24": Format(integer(5, True), (Level(c.F32, (1, 24), "divisor"),)),
    "int6-tensor": Format(integer(6, True, fraction_bits=3), (Level(c.F32, TENSOR),)),
    "table3-32": Format(
        c.Lookup("three", 3, None, "", values=(-2.5, -1.25, -0.5, 0.0, 0.0625, 0.75, 1.5, 3.0)), (Level(c.E8M0, (1, 32)),)
    ),
}
