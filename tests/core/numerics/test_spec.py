"""The worked blocks of docs/spec/numerics.md section 7, by the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from breccia.kernels import reference
from breccia.recipes import (
    Float8CurrentScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    MXINT8BlockScaling,
    NF4Scaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.testing import oracle


def row(*values: float, length: int = 0) -> np.ndarray:
    x = np.zeros((1, max(length, len(values))), np.float32)
    x[0, : len(values)] = values
    return x


def test_current_e4m3_block_of_the_spec() -> None:
    w = oracle.cast(row(1, -2, 3.5, 448), Float8CurrentScaling())
    assert w.scale == oracle.f32_bits(1.0)
    assert bytes(w.codes[0].tolist()).hex() == "38c0467e"


def test_mxfp8_block_of_the_spec() -> None:
    for rule in ("rceil", "floor"):
        w = oracle.cast(row(5, length=32), MXFP8BlockScaling(scale_rule=rule))
        assert (w.scale[0, 0], w.codes[0, 0]) == (121, 0x7A)


@pytest.mark.parametrize(
    ("amax", "rule", "byte", "code"),
    [
        (448.0, "rceil", 127, 0x7E), (448.0, "floor", 127, 0x7E), (448.0, "even", 127, 0x7E),
        (480.0, "rceil", 128, 0x77), (480.0, "floor", 127, 0x7E), (480.0, "even", 127, 0x7E),
        (500.0, "even", 128, 0x78),
    ],
)  # fmt: skip
def test_mxfp8_edges_of_the_spec(amax: float, rule: str, byte: int, code: int) -> None:
    w = oracle.cast(row(amax, length=32), MXFP8BlockScaling(scale_rule=rule))
    assert (w.scale[0, 0], w.codes[0, 0]) == (byte, code)


def test_nvfp4_block_of_the_spec() -> None:
    w = oracle.cast(row(6, -0.7, length=16), NVFP4BlockScaling())
    assert w.global_scale == oracle.f32_bits(float(np.float32(6) / np.float32(2688)))
    assert w.scale[0, 0] == 0x7E
    assert w.codes[0, :3].tolist() == [7, 9, 0]


def test_symmetric_int4_block_of_the_spec() -> None:
    w = oracle.cast(row(7, -3, 0.5, 1.5), INT4Scaling(group_size=4, scale_dtype="fp32"))
    assert w.scale[0, 0] == oracle.f32_bits(1.0)
    assert w.codes[0].tolist() == [7, 0xD, 0, 2]


def test_asymmetric_int4_block_of_the_spec() -> None:
    recipe = INT4Scaling(group_size=4, signed=False, scale_dtype="fp32", symmetric=False)
    w = oracle.cast(row(-1, 14, 0, 6.4), recipe)
    assert w.zero_point is not None
    assert (w.scale[0, 0], w.zero_point[0, 0]) == (oracle.f32_bits(1.0), 1)
    assert w.codes[0].tolist() == [0, 15, 1, 7]


def test_biased_int4_block_of_the_spec() -> None:
    recipe = INT4Scaling(group_size=4, signed=False, scale_dtype="fp32", symmetric=False, offset="bias")
    w = oracle.cast(row(1, 16, 2.4, 8.5), recipe)
    assert w.zero_point is not None
    assert w.scale[0, 0] == w.zero_point[0, 0] == oracle.f32_bits(1.0)
    assert w.codes[0].tolist() == [0, 15, 1, 8]


@pytest.mark.parametrize(
    ("recipe", "x", "scale", "data"),
    [
        (INT8Scaling(), row(127, -3, 0.5, 1.5), oracle.f32_bits(1.0), "7ffd0002"),
        (MXFP6BlockScaling(), row(5, -0.2, length=32), 127, "9a0800"),
        (MXFP4BlockScaling(), row(5, -0.7, length=32), 127, "96"),
        (MXINT8BlockScaling(), row(1.5, -0.26, length=32), 127, "60ef"),
        (NF4Scaling(4), row(2, -2, 0.2, 0), oracle.f32_bits(2.0), "0f78"),
        (Float8CurrentScaling(scale_rule="te"), row(3, 1), 0x3BDB6DB7, "7e71"),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_blocks_of_the_spec(recipe: ScalingRecipe, x: np.ndarray, scale: int, data: str) -> None:
    """By the oracle, and packed by the generic algorithm."""
    assert np.ravel(oracle.cast(x, recipe).scale)[0] == scale
    st = reference.cast(x, recipe)
    assert st.data.tobytes().hex().startswith(data)
    assert np.ravel(np.atleast_1d(st.scale).view(f"u{st.scale.itemsize}"))[0] == scale


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers_of_random123(
    key: tuple[int, int], counter: tuple[int, int], words: tuple[int, int]
) -> None:
    """Source: `kat_vectors` of Random123 1.14, lines "threefry2x32 20"."""
    assert oracle.threefry2x32(key, counter) == words
