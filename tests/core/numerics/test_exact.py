"""Which scale codecs can represent the scales of another codec exactly, compared with conversions in NumPy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from breccia.codecs import BF16, E2M1, E4M3, E5M2, E8M0, F16, F32, Codec, Lookup, Minifloat
from breccia.kernels.exact import hold_scales
from breccia.testing import oracle

WIDE = {F16: np.float16, BF16: ml_dtypes.bfloat16, F32: np.float32}


@pytest.mark.parametrize("source", [E2M1, E4M3, E5M2, E8M0], ids=lambda c: c.name)
@pytest.mark.parametrize("target", WIDE, ids=lambda c: c.name)
def test_a_float_codec_holds_scales_that_are_normal_numbers_in_it(source: Codec, target: Codec) -> None:
    """docs/spec/numerics.md, section 6."""
    values = np.array([float(oracle.decode(source, code)) for code in range(1 << source.bits)])
    numbers = values[np.isfinite(values) & (values != 0)]
    with np.errstate(over="ignore"):
        there = numbers.astype(np.float32).astype(WIDE[target]).astype(np.float64)
    smallest = float(ml_dtypes.finfo(WIDE[target]).smallest_normal)
    held = not np.isinf(values).any() and bool(((there == numbers) & (np.abs(numbers) >= smallest)).all())
    assert hold_scales(source, target) == held


@pytest.mark.parametrize(
    ("source", "target", "held"),
    [(E4M3, E4M3, True), (E2M1, E4M3, False), (E4M3, E8M0, False), (F16, F32, True), (F16, BF16, False)],
)
def test_an_8_bit_codec_holds_only_its_own_scales(source: Codec, target: Codec, held: bool) -> None:
    """docs/spec/numerics.md, section 6: 16-bit scales convert only to F32."""
    assert hold_scales(source, target) is held


@pytest.mark.parametrize(("target", "bits"), [(F16, 10), (BF16, 7), (F32, 23)], ids=lambda c: getattr(c, "name", c))
def test_a_float_codec_holds_scales_with_at_most_its_mantissa_bits(target: Codec, bits: int) -> None:
    """The scales come from a table, whose values may use any of the 23 mantissa bits of FP32."""
    for last in range(1, 24):
        source = Lookup("fine", 1, None, "this test", (0.0, 1 + 2.0**-last))
        assert hold_scales(source, target) == (last <= bits)


def test_no_codec_holds_scales_that_are_subnormal_in_fp32() -> None:
    """Even if they are normal numbers in the codec: some backends read them as zero."""
    deep = Minifloat("deep", 16, None, "this test", 8, 7, 140, (2 - 2.0**-7) * 2.0**115)
    for exponent, held in ((-125, True), (-126, True), (-127, False), (-130, False)):
        assert hold_scales(Lookup("small", 1, None, "this test", (0.0, 2.0**exponent)), deep) is held
