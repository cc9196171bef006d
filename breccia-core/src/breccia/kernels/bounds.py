"""The error bounds of products (docs/spec/numerics.md, section 9), for BRECCIA_CHECK and for the conformance kit."""

from __future__ import annotations

from typing import Any

from ..codecs import E4M3, E5M2
from ..recipes import ScalingRecipe

#: Unit roundoff of FP32.
UNIT = 2.0**-24
#: What flushing results below 2^-126 may lose, per term.
_FLUSHED = 2.0**-126
#: What rounding the product of two scales to a multiple of 2^-149 may lose, per term: two codes of at most 57344 multiply it.
_OF_SCALES = 2.0**-118
#: A tensor core sums this many terms along K before the sum is added in FP32: in instructions of `_TERMS` products.
CHUNK, _TERMS = 128, 32
#: Its fraction bits: the terms of an instruction are aligned to the largest of them and truncated.
_FRACTION_BITS = 13
#: Relative to the sum of magnitudes of a chunk: each instruction truncates its products, the sum so far, and the result.
TENSOR_CORE = (CHUNK // _TERMS) * (_TERMS + 2) * 2.0**-_FRACTION_BITS


def in_tensor_cores(a: ScalingRecipe | None, b: ScalingRecipe | None, device: str) -> bool:
    """Whether a product of operands under these recipes (None: plain) may be summed in FP8 tensor cores."""
    return device == "cuda" and all(x is not None and x.format.element in (E4M3, E5M2) for x in (a, b))


def accumulated(magnitude: Any, terms: int, k: int, tensor_cores: bool = False) -> Any:
    """The largest error of sums of `terms` terms, of which k are products, in FP32 before the rounding to the result's dtype.

    magnitude: the sums of the terms' magnitudes. tensor_cores: see `in_tensor_cores`.
    """
    fp32 = _gamma(terms) * magnitude + k * _FLUSHED
    if not tensor_cores:
        return fp32
    # Each chunk is within TENSOR_CORE of its sum; then come its scale (two roundings), and additions in FP32.
    promoted = _gamma(-(-k // CHUNK) + 2 + terms - k)
    relative = TENSOR_CORE + promoted * (1 + TENSOR_CORE)
    return max(_gamma(terms), relative) * magnitude + k * _OF_SCALES


def _gamma(n: int) -> float:
    return n * UNIT / (1 - n * UNIT)
