"""Which cases `-m` leaves out before pytest makes items of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from covering import excluded_by, mark_cases
from paths import ROOT

#: What the packages of MORE in the Makefile are imported as; the first two of mkdocstrings and mkdocs-material.
MORE = ("griffe", "material", "mkdocs", "matplotlib", "playwright")


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


def _needing(path: Path) -> set[str]:
    """The tests of a file that need one of MORE, and are not marked `long`."""
    text = path.read_text(encoding="utf-8")
    needs = re.compile(rf"""importorskip\(['"]({"|".join(MORE)})\b""")
    if not needs.search(text):
        return set()
    tree = ast.parse(text)
    module = [ast.unparse(node) for node in tree.body if not isinstance(node, ast.FunctionDef)]
    if any("pytestmark" in line and "mark.long" in line for line in module):
        return set()
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    wide = any(needs.search(line) for line in module)
    short = [test for test in tests if not any("mark.long" in ast.unparse(mark) for mark in test.decorator_list)]
    lines = text.splitlines()
    return {test.name for test in short if wide or needs.search("\n".join(lines[test.lineno - 1 : test.end_lineno]))}


def test_what_make_test_does_not_install_is_needed_by_long_tests_alone(tmp_path: Path) -> None:
    assert {name for path in ROOT.glob("tests/**/test_*.py") for name in _needing(path)} == set()
    need = "pytest.importorskip" + '("mkdocs")'
    (tmp_path / "test_a.py").write_text(f"def test_a():\n    {need}\n@pytest.mark.long\ndef test_b():\n    {need}\n")
    (tmp_path / "test_b.py").write_text(f"{need}\ndef test_c(): pass\n")
    (tmp_path / "test_c.py").write_text(f"pytestmark = pytest.mark.long\n{need}\ndef test_d(): pass\n")
    assert [_needing(tmp_path / f"test_{name}.py") for name in "abc"] == [{"test_a"}, {"test_c"}, set()]
