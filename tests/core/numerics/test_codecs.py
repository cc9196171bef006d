"""Codecs of the generic algorithm compared with ml_dtypes, NumPy and the oracle: all codes, and over 10^7 inputs each."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from repeated_codes import REPEATED

from breccia.arrays.ops import NUMPY
from breccia.codecs import (
    BF16,
    CODECS,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    F16,
    F32,
    FLOAT_CODECS,
    FLOAT_NAMES,
    INT4,
    INT8,
    MXINT8,
    NF4,
    UINT4,
    UINT8,
    Codec,
    Integer,
    Lookup,
    Minifloat,
    float_codec,
)
from breccia.errors import RecipeError
from breccia.testing import oracle

FOREIGN = {
    E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: ml_dtypes.float4_e2m1fn,
    E2M3: ml_dtypes.float6_e2m3fn, E3M2: ml_dtypes.float6_e3m2fn, E8M0: ml_dtypes.float8_e8m0fnu, F16: np.float16,
    BF16: ml_dtypes.bfloat16, E4M3FNUZ: ml_dtypes.float8_e4m3fnuz, E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
SMALL = [c for c in CODECS if c.bits <= 8]


def inputs(codec: Codec, chunk: int) -> np.ndarray:
    """2^20 FP32 numbers: random bit patterns, numbers near the codec's range, its values, midpoints and adjacent numbers."""
    rng = np.random.default_rng([chunk, codec.bits])
    n = 1 << 20
    if chunk % 3 == 0:
        return rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32).view(np.float32)
    if chunk % 3 == 1:
        low, high = (-126, 127) if codec in (BF16, E8M0) else (-30, math.log2(codec.max) + 2)
        return (np.exp2(rng.uniform(low, high, n)) * rng.choice([-1, 1], n)).astype(np.float32)
    values = [2.0**n for n in range(-126, 128)] if codec is E8M0 else oracle.ladder(codec)[0]
    grid = np.array([float(v) for v in values])
    middle = (grid[1:] + grid[:-1]) / 2
    points = np.concatenate([grid, middle]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])
    return rng.choice(points, n)


@pytest.mark.long
@pytest.mark.parametrize("codec", FOREIGN, ids=lambda c: c.name)
def test_ten_million_inputs_encode_as_in_ml_dtypes(codec: Codec) -> None:
    """Codes in range are equal. Outside it and for NaN, the differences in section 2 of the spec are applied to ml_dtypes."""
    seen = 0
    for chunk in range(11):
        x = inputs(codec, chunk)
        x = x[(np.abs(x) >= 2.0**-126) | (x == 0) | np.isnan(x)]  # breccia reads smaller magnitudes as zero
        if codec is E8M0:
            x = np.abs(x)[np.abs(x) > 0]  # the codec has no sign and no zero
        with np.errstate(all="ignore"):
            theirs = x.astype(FOREIGN[codec]).view(np.uint16 if codec.bits == 16 else np.uint8).astype(np.int32)
        ours = codec.encode(NUMPY, x)
        sign = np.where(np.signbit(x), 1 << (codec.bits - 1), 0)
        if isinstance(codec, Minifloat):
            largest = next(c for c in range(1 << (codec.bits - 1)) if oracle.decode(codec, c) == codec.max)
            theirs = np.where(np.isfinite(x) & (np.abs(x) > codec.max), largest | sign, theirs)
            if codec.nan is not None:
                theirs = np.where(np.isnan(x), codec.nan, theirs)
                infinite = codec.nan if codec.inf is None else codec.inf | sign
                theirs = np.where(np.isinf(x), infinite, theirs)
            else:
                keep = ~np.isnan(x)  # without a NaN code; casts never ask for one
                ours, theirs = ours[keep], theirs[keep]
        else:
            theirs = np.where(np.isfinite(x) & (x > codec.max), 254, theirs)
        np.testing.assert_array_equal(ours, theirs)
        seen += x.size
    assert seen >= 10**7


@pytest.mark.long
@pytest.mark.parametrize("codec", [INT4, UINT4, INT8, UINT8, MXINT8], ids=lambda c: c.name)
def test_ten_million_integers_encode_as_numpy_rint_and_clip(codec: Integer) -> None:
    """ml_dtypes wraps integers around, so NumPy's rint and clip are the reference here."""
    edge, step = 1.3 * codec.max, 2.0**-codec.fraction_bits / 4
    for chunk in range(10):
        rng = np.random.default_rng(chunk)
        steps = rng.integers(-edge / step, edge / step, 1 << 20) * step  # every midpoint among them
        x = (rng.uniform(-edge, edge, 1 << 20) if chunk % 2 else steps).astype(np.float32)
        expected = np.clip(np.rint(x * 2.0**codec.fraction_bits), codec.low, codec.high).astype(np.int32)
        np.testing.assert_array_equal(codec.encode(NUMPY, x), expected & ((1 << codec.bits) - 1))


@pytest.mark.parametrize("bias", [5, 6, 130])
@pytest.mark.parametrize("signed", [False, True])
def test_ties_without_a_mantissa_go_to_the_even_code(bias: int, signed: bool) -> None:
    """The two codes beside a midpoint differ in their exponent alone."""
    codec = Minifloat("powers", 4 + signed, None, "this test", 4, 0, bias, 2.0 ** (15 - bias), signed=signed)
    values = codec.decode(NUMPY, np.arange(16, dtype=np.int32))
    middles = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    normal = middles > 2.0**-126  # smaller numbers count as zero
    even = np.arange(15) + np.arange(15) % 2
    np.testing.assert_array_equal(codec.encode(NUMPY, middles)[normal], even[normal])
    beside = np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))
    for offset, numbers in enumerate(beside):
        np.testing.assert_array_equal(codec.encode(NUMPY, numbers)[normal], (np.arange(15) + offset)[normal])


#: Unordered codes, uneven steps, a tie between two even codes (0 and 2: to the smaller value) and ties with an odd code.
SCRAMBLED = Lookup("scrambled", 2, None, "this test", (0.0, -3.0, 2.0, 7.25))


@pytest.mark.parametrize("codec", [NF4, SCRAMBLED, REPEATED], ids=lambda c: c.name)
def test_a_table_encodes_to_the_nearest_value(codec: Lookup) -> None:
    """Compared with distances in FP64, exact for these tables: 10^6 numbers, every midpoint and the adjacent FP32 numbers."""
    values = np.array(codec.values)
    ascending = np.sort(values)
    middles = ((ascending[1:] + ascending[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(end)) for end in (-np.inf, np.inf)]
    some = np.random.default_rng(0).uniform(-1.5, 1.5, 1 << 20) * codec.max
    x = np.concatenate([middles, *beside, values, [0.0, 1e30, -1e30], some]).astype(np.float32)
    codes = codec.encode(NUMPY, x)
    distance = np.abs(x[:, None].astype(np.float64) - values)
    np.testing.assert_array_equal(np.take_along_axis(distance, codes[:, None], 1)[:, 0], distance.min(1))
    lowest = [codec.values.index(value) for value in codec.values]
    assert codec.encode(NUMPY, values.astype(np.float32)).tolist() == lowest and set(codes.tolist()) == set(lowest)
    for i in range(len(middles) if codec is not NF4 else 0):
        expected = oracle.encode(codec, Fraction(float(middles[i])))
        assert codes[i] == expected
    if codec is SCRAMBLED:
        assert codec.encode(NUMPY, np.array([1.0, -1.5, 4.625], np.float32)).tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ((0.0, 1.0), "got 2"),
        ((0.0, -0.0, 1.0, 2.0), "got 4"),
        ((0.0, 0.1, 1.0, 2.0), "got 4"),
        ((-4.0, -3.0, -2.0, 0.0), "got 4"),
        ((4.0, 3.0, -0.0, 1.0), "got 4"),
    ],
)
def test_an_invalid_table_is_refused(values: tuple[float, ...], found: str) -> None:
    with pytest.raises(RecipeError, match=f"codec 'odd': values must be 4 finite FP32 numbers for 2 bits.*; {found}"):
        Lookup("odd", 2, None, "this test", values)


@pytest.mark.parametrize("codec", SMALL, ids=lambda c: c.name)
def test_every_code_decodes_as_the_oracle_and_encodes_back(codec: Codec) -> None:
    codes = np.arange(1 << codec.bits, dtype=np.int32)
    values = codec.decode(NUMPY, codes)
    for code, value in zip(codes.tolist(), values, strict=True):
        expected = oracle.decode(codec, code)
        assert math.isnan(value) if math.isnan(expected) else value.tobytes() == np.float32(expected).tobytes()
    finite = np.isfinite(values) & (np.abs(values) >= 2.0**-126) | (values == 0)
    np.testing.assert_array_equal(codec.encode(NUMPY, values)[finite], codes[finite])


@pytest.mark.parametrize("codec", [F16, BF16, F32], ids=lambda c: c.name)
def test_stored_floats_read_back_exactly(codec: Codec) -> None:
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 1 << codec.bits, 4096, dtype=np.uint64).astype(f"u{codec.bits // 8}")
    stored = NUMPY.store(NUMPY.load(patterns), NUMPY.storage(codec))
    values = codec.read(NUMPY, stored)
    expected = np.array([oracle.decode(codec, int(p)) for p in patterns], np.float64)
    np.testing.assert_array_equal(np.isnan(values), np.isnan(expected))
    keep = ~np.isnan(expected)
    np.testing.assert_array_equal(values[keep].astype(np.float64), expected[keep])


@pytest.mark.parametrize(
    "codec",
    [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E2M1, E2M3, E3M2, INT4, UINT4, INT8, MXINT8, NF4, REPEATED],
    ids=lambda c: c.name,
)
def test_stochastic_encoding_equals_the_oracle_and_is_unbiased(codec: Codec) -> None:
    rng = np.random.default_rng(3)
    edge = min(5, 0.9 * codec.max)
    x = np.repeat(rng.uniform(0 if codec is UINT4 else -edge, edge, 6), 4096).astype(np.float32)
    words = rng.integers(0, 1 << 32, x.size, dtype=np.uint64).astype(np.uint32)
    codes = codec.encode(NUMPY, x, words.view(np.int32))
    some = range(0, x.size, 37)
    if not isinstance(codec, Integer):
        expected = [oracle.encode(codec, Fraction(float(x[i])), x[i] < 0, int(words[i])) for i in some]
        assert codes[list(some)].tolist() == expected
    values = codec.decode(NUMPY, codes).reshape(6, 4096).astype(np.float64)
    low, high = values.min(1), values.max(1)
    # The mean of n draws between two values one step apart has a standard deviation of at most step / (2 sqrt n): six of them.
    bound = 6 * np.maximum(high - low, 1e-12) / (2 * math.sqrt(4096))
    assert (np.abs(values.mean(1) - x[::4096]) <= bound).all()


def test_codecs_compare_by_value_and_have_a_source() -> None:
    for codec in CODECS:
        assert codec.source and hash(codec) == hash(codec)
        assert codec.max > 0
    assert len({c.name for c in CODECS}) == len(CODECS)


def test_every_nan_encodes_to_the_same_code() -> None:
    """Devices produce NaNs with different payloads; stored scales must have the same bits everywhere."""
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0x7FC00000], np.uint32).view(np.float32)
    for codec in (F32, F16, BF16, E5M2, E4M3, E4M3FNUZ, E5M2FNUZ):
        assert {int(code) for code in codec.encode(NUMPY, nans)} == {codec.nan_code}


def test_floating_dtypes_have_one_codec_by_all_their_names() -> None:
    for name, codec in FLOAT_CODECS.items():
        assert float_codec(name) is codec and float_codec(str(codec.dtype)) is codec
        assert FLOAT_NAMES[str(codec.dtype)] == name
        assert ml_dtypes.finfo(codec.dtype).max == codec.max
    assert [float_codec(name) for name in ("half", "single", "float64", "float8_e4m3fn")] == [F16, F32, None, None]
