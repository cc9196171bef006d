"""Which cases `-m` leaves out before pytest makes items of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from covering import excluded_by, mark_cases


@pytest.mark.parametrize(
    ("expression", "excluded"),
    [
        ("", set()),
        ("slow", set()),
        ("a or b", set()),
        ("not a", {"a"}),
        ("not (a or b)", {"a", "b"}),
        ("(a or b) and not (c or d)", {"c", "d"}),
        ("a and not (b or c)", {"b", "c"}),
        ("not a and not b", {"b"}),
        ("a or b and not c", set()),
        ("not a or not b", set()),
    ],
)
def test_a_mark_is_excluded_only_where_no_case_with_it_is_selected(expression: str, excluded: set[str]) -> None:
    assert excluded_by(expression) == excluded


def test_a_test_keeps_the_cases_that_may_be_selected_and_one_at_least() -> None:
    def left(excluded: set[str]) -> list[str]:
        calls = [SimpleNamespace(name=name, marks=[pytest.mark.long.mark] * (name == "b")) for name in "abc"]
        definition = SimpleNamespace(iter_markers=lambda: iter([pytest.mark.slow.mark]), get_closest_marker=lambda name: None)
        metafunc: Any = SimpleNamespace(_calls=calls, definition=definition)
        mark_cases(metafunc, excluded)
        return [call.name for call in calls]

    assert left(set()) == ["a", "b", "c"]
    assert left({"long"}) == ["a", "c"]
    assert left({"slow"}) == ["a"]
