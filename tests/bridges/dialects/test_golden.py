"""Checkpoints that other libraries wrote, against the values that their own code decodes (tests/golden/dialects/README.md).

tests/dialects/check.py compares larger ones with the same functions and the same table.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dialect_values import digest, to_bf16
from golden_dialects import EXACT, EXPECTED, GOLDEN, REFUSED, read, unpacked

import breccia
from breccia_bridges.stored import Stored


def outcome(stored: Stored, dtype: str, sha256: str) -> str:
    """How a value agrees with the library's, of that dtype and digest: EXACT or "wrong"."""
    st = stored.tensor()
    values = np.asarray(breccia.dequantize(st), np.float32)
    if st.recipe.format.order == "scales_first" and digest(values) != sha256:
        values = values + np.float32(0)  # ModelOpt decodes the code of -0 as +0, and so does adding 0
    return EXACT if digest(to_bf16(values) if dtype == "bfloat16" else values) == sha256 else "wrong"


@pytest.mark.parametrize("name", EXPECTED)
def test_the_values_of_a_checkpoint_are_those_that_its_library_decodes(name: str, tmp_path: Path) -> None:
    folder, record = unpacked(name, tmp_path)
    if EXPECTED[name].startswith(REFUSED):
        with pytest.raises((breccia.DialectError, breccia.UnsupportedError)) as caught:
            for stored in read(folder).values():
                stored.tensor()
        assert EXPECTED[name].removeprefix(REFUSED) in str(caught.value)
        return
    values = read(folder)
    assert {n: list(stored.shape) for n, stored in values.items()} == {n: v["shape"] for n, v in record["values"].items()}
    outcomes = {n: outcome(stored, record["dtype"], record["values"][n]["sha256"]) for n, stored in values.items()}
    assert set(outcomes.values()) == {EXPECTED[name]}, outcomes


def test_every_golden_checkpoint_is_in_the_table() -> None:
    assert {path.name.removesuffix(".tar.xz") for path in GOLDEN.glob("*.tar.xz")} == set(EXPECTED)


def test_a_value_of_another_digest_is_wrong(tmp_path: Path) -> None:
    folder, record = unpacked("fbgemm_fp8", tmp_path)
    name, stored = next(iter(read(folder).items()))
    assert outcome(stored, "float32", record["values"][name]["sha256"]) == EXACT
    assert outcome(stored, "float32", digest(np.zeros(stored.shape))) == "wrong"


def test_digests_and_roundings_are_those_of_fp32_and_bf16() -> None:
    x = np.array([1, np.nan, 1 + 2**-8, 1 + 3 * 2**-8, -3.4e38, 0.0, -0.0], np.float32)
    np.testing.assert_array_equal(to_bf16(x), np.array([1, np.nan, 1, 1 + 2**-6, -np.inf, 0, 0], np.float32))
    other_nan = np.where(np.isnan(x), -np.float32(np.nan), x)
    assert digest(x) == digest(other_nan) != digest(np.abs(x))
