"""Rule "te" against TransformerEngine 2.20.2's CUDA quantizers, recorded on an H200 (README.md beside the recording)."""

from __future__ import annotations

import lzma

import numpy as np
import pytest
from paths import GOLDEN

import breccia

GOLDEN = GOLDEN / "transformer_engine_2_20_2" / "tiles.safetensors.xz"
CASES = ("randn", "wide", "rowwide", "edge", "tiny")
QUANTIZERS = {
    "current.e4m3": breccia.Float8CurrentScaling("E4M3", "te"),
    "current.e5m2": breccia.Float8CurrentScaling("E5M2", "te"),
    **{
        f"{name}.{kind}": breccia.Float8BlockScaling(block_m=m, power_of_two_scale=kind == "pow2", scale_rule="te")
        for name, m in (("block1d", 1), ("block2d", 128))
        for kind in ("fp32", "pow2")
    },
}
MIN_NORMAL = np.float32(2.0**-126)


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    safetensors = pytest.importorskip("safetensors.numpy")
    return safetensors.load(lzma.decompress(GOLDEN.read_bytes()))


def read(recorded: dict[str, np.ndarray], case: str, dtype: str, quantizer: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(FP32 input, TransformerEngine's codes, its scales in the shape of breccia's)."""
    x = recorded[f"{case}.{dtype}.input"]
    x = x if dtype == "float32" else (x.astype(np.uint32) << 16).view(np.float32)
    scale = recorded[f"{case}.{dtype}.{quantizer}.scale_inv"]
    return x, recorded[f"{case}.{dtype}.{quantizer}.data"], scale.reshape(() if "current" in quantizer else (-1, 1))


def cast(x: np.ndarray, recipe: breccia.ScalingRecipe) -> tuple[np.ndarray, np.ndarray]:
    st = breccia.cast(x, recipe)
    return np.asarray(st.data), np.asarray(st.scale)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_scales_and_codes_match_transformer_engine_except_for_fp32_subnormals(
    recorded: dict[str, np.ndarray], case: str, dtype: str, quantizer: str
) -> None:
    x, their_codes, their_scale = read(recorded, case, dtype, quantizer)
    codes, scale = cast(x, QUANTIZERS[quantizer])
    normal = their_scale >= MIN_NORMAL
    np.testing.assert_array_equal(scale.view("u4")[normal], their_scale.view("u4")[normal])
    subnormal = (np.abs(x) < MIN_NORMAL) & (x != 0)
    compared = normal & ~subnormal
    np.testing.assert_array_equal(codes[compared], their_codes[compared])
    # The contract, sections 1 and 5.2: such input is a signed zero, and a scale is at least 2^-126, or 1 for zeros.
    np.testing.assert_array_equal(codes[subnormal], np.signbit(x[subnormal]) * np.uint8(0x80))
    assert np.isin(scale[~normal], [MIN_NORMAL, np.float32(1)]).all()
    if case in ("randn", "wide", "tiny") or "block1d" not in quantizer:
        assert normal.all() and np.array_equal(codes, their_codes)


def test_the_recording_includes_the_differing_cases(recorded: dict[str, np.ndarray]) -> None:
    """The exceptions above occur: subnormal scales, and subnormal input under a normal scale."""
    scales = inputs = 0
    for case in ("edge", "rowwide"):
        for dtype in ("float32", "bfloat16"):
            for kind in ("fp32", "pow2"):
                x, their_codes, their_scale = read(recorded, case, dtype, f"block1d.{kind}")
                codes, _ = cast(x, QUANTIZERS[f"block1d.{kind}"])
                normal = their_scale >= MIN_NORMAL
                scales += int((~normal).sum())
                inputs += int(((codes != their_codes) & normal).sum())
    assert (scales, inputs) == (10, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_rule_differs_from_te_in_the_last_bit(recorded: dict[str, np.ndarray], dtype: str) -> None:
    """Why "te" has a name of its own: amax / 448 against 1 / (448 / amax), each division rounded once.

    The two lie within 3 units in the last place of each other: the quotient 448 / amax is off by at most 2^-24 of itself, its
    reciprocal by that and 2^-24 more, amax / 448 by 2^-24; 3 · 2^-24 of a number is at most 3 units of its last place.
    """
    x, _, their_scale = read(recorded, "randn", dtype, "block1d.fp32")
    _, scale = cast(x, breccia.Float8BlockScaling())
    apart = np.abs(scale.view("i4").astype(np.int64) - their_scale.view("i4"))
    assert 0 < apart.max() <= 3 and (apart > 0).mean() < 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_power_of_two_scales_are_the_same_under_the_default_rule(recorded: dict[str, np.ndarray], dtype: str) -> None:
    """They leave no room for rounding: rceil and "te" agree unless amax is 448 · 2^n."""
    x, their_codes, their_scale = read(recorded, "randn", dtype, "block1d.pow2")
    codes, scale = cast(x, breccia.Float8BlockScaling(power_of_two_scale=True))
    assert np.array_equal(scale.view("u4"), their_scale.view("u4")) and np.array_equal(codes, their_codes)
