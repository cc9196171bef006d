"""Formats that plug-ins declare in one file each (tests/third_party), by hand; test_third_party.py runs their own tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from one_file_plugins import installed

import breccia
from breccia import PerBlockK
from breccia.codecs import E2M1
from breccia.testing.examples import wide
from breccia.testing.kit import laws_of
from breccia.testing.places import Place

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def hif4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed("hif4", tmp_path_factory.mktemp("hif4")) as module:
        yield module


@pytest.fixture(scope="module")
def if4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed("if4", tmp_path_factory.mktemp("if4")) as module:
        yield module


def frameworks_agree(recipe: breccia.ScalingRecipe, framework: str) -> None:
    """On a small array; JAX, which compiles casts for seconds, is in test_third_party.py."""
    x = wide((4, 70), seed=1, exponents=2)
    st, found = breccia.cast(x, recipe), breccia.cast(Place(framework).array(x), recipe)
    assert breccia.bytes_equal(found, st)
    assert (np.asarray(breccia.dequantize(found)) == breccia.dequantize(st)).all()


def the_kit_tests_it_on_numpy(name: str) -> None:
    """The laws of recipes and codecs that are not slow; all laws, on four frameworks, are tested in test_third_party.py."""
    laws = [law for law in laws_of(name, places=(Place("numpy"),)) if law.kind in ("recipes", "codecs")]
    laws = [law for law in laws if law.sentence != "any_bit_pattern_is_cast_as_the_oracle_casts_it"]
    assert len(laws) > 10
    for law in laws:
        law.check()


# -- HiFloat4 --------------------------------------------------------------------------------------------------------


def test_hif4_by_hand(hif4: Any) -> None:
    """64 elements q / 4 times 1.5 * 2^3, by 2 where a bit of 8 or of 16 is set: all numbers are exact in FP32."""
    q, eight, sixteen = np.arange(64) % 16, 0b10100011, 0b0110_1001_0000_1111
    scale = np.array([[(48 + 3) << 2 | 2, eight, sixteen & 255, sixteen >> 8]], np.uint8)
    st = breccia.from_buffer((q[::2] | q[1::2] << 4).astype(np.uint8)[None], scale, hif4.HiF4Scaling(), PerBlockK(64))
    assert st.nbytes * 8 == 4.5 * 64
    code = np.where(q < 8, q, 8 - q) / 4
    by = 2.0 ** ((eight >> np.arange(64) // 8 & 1) + (sixteen >> np.arange(64) // 4 & 1))
    assert (breccia.dequantize(st)[0] == code * 12 * by).all()


def test_hif4_has_numbers_from_the_least_scale_to_the_largest_and_nan(hif4: Any) -> None:
    codes = np.array([0, 1, 4, 253, 254, 255], np.uint8)
    scale = np.zeros((6, 4), np.uint8)
    scale[:, 0] = codes
    st = breccia.from_buffer(np.full((6, 32), 0x44, np.uint8), scale, hif4.HiF4Scaling(), PerBlockK(64))
    expected = [2.0**-48, 1.25 * 2.0**-48, 2.0**-47, 1.25 * 2.0**15, 1.5 * 2.0**15, np.nan]
    np.testing.assert_array_equal(breccia.dequantize(st)[:, 0], expected)


def test_hif4_factors_are_those_of_the_paper(hif4: Any) -> None:
    """Level 1 is amax / 7; a block with 4 or more times it gets a factor of 2, and one with 2 or more times both another."""
    x = np.zeros((1, 64), np.float32)
    x[0, [0, 8, 16, 24, 32, 36]] = [7, 4, 3.99, 2, 1.99, 3]
    st = breccia.cast(x, hif4.HiF4Scaling())
    assert st.scale.tolist() == [[48 << 2, 0b00000011, 0b01010101, 0b00000010]]
    assert breccia.dequantize(st)[0, [0, 8, 16, 24, 32, 36]].tolist() == [7, 4, 3.5, 2, 1.75, 3]


def test_hif4_errors_are_half_a_step_of_the_block_or_what_lies_beyond_its_largest_code(hif4: Any) -> None:
    x = wide((16, 256), seed=3, exponents=10)
    st = breccia.cast(x, hif4.HiF4Scaling())
    record = st.scale.reshape(16, 4, 4).astype(np.uint32)
    level = (1 + record[..., 0] % 4 / 4) * 2.0 ** (record[..., 0] // 4 - 48.0)
    place = np.arange(64)
    factors = 2.0 ** ((record[..., 1:2] >> place // 8 & 1) + ((record[..., 2:3] | record[..., 3:4] << 8) >> place // 4 & 1))
    step = (level[..., None] * factors).reshape(x.shape) / 4
    error = np.abs(breccia.dequantize(st) - x)
    assert (error <= np.maximum(step / 2, np.abs(x) - 7 * step)).all()


def test_the_kit_tests_hif4(hif4: Any) -> None:
    the_kit_tests_it_on_numpy("hif4")


@pytest.mark.parametrize("framework", ["torch", "mlx"])
def test_frameworks_write_the_same_hif4(hif4: Any, framework: str) -> None:
    frameworks_agree(hif4.HiF4Scaling(), framework)


# -- IF4 -------------------------------------------------------------------------------------------------------------


def test_if4_is_nvfp4_where_scales_are_positive_and_sevenths_of_6_where_they_are_negative(if4: Any) -> None:
    data, scale = np.arange(16, dtype=np.uint8)[None] * 17, np.array([[0x40, 0xC0]], np.uint8)
    st = breccia.from_buffer(data, scale, if4.IF4Scaling(), PerBlockK(16), global_scale=np.float32(0.25))
    q = np.repeat(np.arange(16), 2)
    numbers = [E2M1.value(int(c)) for c in q[:16]] + [np.float32((c - 16 if c > 7 else c) * 6 / 7) for c in q[16:]]
    assert breccia.dequantize(st)[0].tolist() == [float(n) / 2 for n in numbers]


def test_if4_of_evenly_spaced_numbers_is_exact(if4: Any) -> None:
    """Up to 4 roundings of FP32. NVFP4 has no number between 4 and 6 sevenths, so 5 of them is off by one."""
    x = np.tile(np.arange(-7, 9).clip(max=7), (1, 4)).astype(np.float32) * 6
    assert (breccia.cast(x, if4.IF4Scaling()).scale >> 7).all()
    errors = [np.abs(breccia.dequantize(breccia.cast(x, recipe)) - x).max() for recipe in (if4.IF4Scaling(), "nvfp4")]
    assert errors[0] <= 42 * 4 * 2.0**-24 and errors[1] == 6


def test_the_command_line_names_both_codecs_of_if4(if4: Any, run: Run) -> None:
    assert "E2M1, 4 bits; under negative scales SCALED_INT4" in run("recipes", "if4")[1]
    (found,) = json.loads(run("recipes", "if4", "--json")[1])
    assert found["alternative"] == {"codec": "SCALED_INT4", "bits": 4}


def test_the_kit_tests_if4(if4: Any) -> None:
    the_kit_tests_it_on_numpy("if4")


@pytest.mark.parametrize("framework", ["torch", "mlx"])
def test_frameworks_write_the_same_if4(if4: Any, framework: str) -> None:
    frameworks_agree(if4.IF4Scaling(), framework)
