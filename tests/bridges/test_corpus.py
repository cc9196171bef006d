"""The damaged checkpoints of tests/corpus, which `make fuzz` (tests/tools/fuzz.py) found or made."""

from __future__ import annotations

import pytest

pytest.importorskip("resource", reason="limits on time and memory, as POSIX has them")
from fuzz import Files, attempt, case, kept


@pytest.mark.parametrize("name", kept())
def test_a_damaged_checkpoint_is_read_or_refused_by_a_typed_error(name: str) -> None:
    done, fault = attempt(int(name), kept()[name], thorough=True)
    assert not fault and done["load and inspect"] == 1


def test_a_number_is_a_case() -> None:
    cases: list[Files] = [case(number) for number in range(40)]
    assert cases == [case(number) for number in range(40)]
    assert len({tuple(sorted(files.items())) for files in cases}) > 35
