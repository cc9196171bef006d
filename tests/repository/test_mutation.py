# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
"""The mutation run: what is mutated, how mutants are named, and that every survivor is reported."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from mutation import MUTANTS, PACKAGE, ROOT, Mutant, changed, function_at, is_skipped, judged, path_of

SOURCE = """\
@memo(64)
class A:
    x: Literal[7] = 8

    def f(self, y: Literal[7] = 9) -> Literal[7]:
        def g():
            return 3
        assert y > 7
        if y:
            raise E(y + 1)
        return y.reshape(2, -1)
B = 4
"""
TREE = ast.parse(SOURCE)
DIFF = """\
--- mutation diff ---
--- a/x.py
+++ b/x.py
@@ -1,3 +1,3 @@
 unchanged
-    return g(  # why
-        x + 1)
+    return None  # why
"""
SURVIVOR = Mutant("exact.py", "A.f", "return x < 3", "return x <= 3")
ENTRY = {**SURVIVOR._asdict(), "why": "both give the same"}


def position(text: str) -> tuple[int, int]:
    head = SOURCE[: SOURCE.index(text)]
    return head.count("\n") + 1, len(head) - head.rfind("\n") - 1


@pytest.mark.parametrize(("row", "name"), [(3, "A"), (5, "A.f"), (7, "A.f.g"), (9, "A.f"), (11, "A.f"), (12, "module")])
def test_a_mutant_is_named_by_the_function_around_it(row: int, name: str) -> None:
    assert function_at(TREE, row) == name


@pytest.mark.parametrize("text", ["64", "7] = 8", "7] = 9", "7]:\n", "y > 7", "y + 1", "-1)"])
def test_annotations_decorators_asserts_and_messages_are_not_mutated(text: str) -> None:
    assert is_skipped(TREE, position(text))


@pytest.mark.parametrize("text", ["8\n", "9)", "3\n", "raise", "2, -1", "4\n"])
def test_other_code_is_mutated(text: str) -> None:
    assert not is_skipped(TREE, position(text))


def test_the_lines_of_a_diff_are_read_as_one_without_comments() -> None:
    assert (changed(DIFF, "-"), changed(DIFF, "+")) == ("return g( x + 1)", "return None")


def test_a_survivor_without_a_justification_is_an_error() -> None:
    assert judged([SURVIVOR], [], ["exact.py"]) == ["survived: exact.py: A.f: return x < 3 -> return x <= 3"]


@pytest.mark.parametrize("now", ["return x <= 3", "return x<=3", ["return x <= 3"]])
def test_a_justified_survivor_is_not_an_error(now: str | list[str]) -> None:
    assert judged([SURVIVOR], [ENTRY | {"now": now}], ["exact.py"]) == []


@pytest.mark.parametrize("change", [{"where": "f"}, {"was": "return x < 4"}, {"now": ["return x > 3"]}])
def test_a_justification_that_matches_no_survivor_is_an_error(change: dict[str, Any]) -> None:
    unneeded, survived = judged([SURVIVOR], [ENTRY | change], ["exact.py"])
    assert unneeded.startswith("justified, but no survivor: exact.py: ") and survived.startswith("survived: exact.py: A.f")


def test_justifications_of_modules_that_were_not_run_are_left_alone() -> None:
    assert judged([], [ENTRY], ["codecs.py"]) == []


def test_a_justification_needs_a_reason() -> None:
    (fault,) = judged([SURVIVOR], [ENTRY | {"why": "dead"}], ["exact.py"])
    assert fault == "say why nobody could notice, not 'dead': exact.py: A.f: return x <= 3"


def test_the_configuration_names_files_that_exist() -> None:
    config = tomllib.loads((MUTANTS / "config.toml").read_text(encoding="utf-8"))
    tests = {name for names in config["modules"].values() for name in names}
    missing = [name for name in config["modules"] if not (ROOT / PACKAGE / name).is_file()]
    assert missing == []
    assert all(path_of(name).parent.is_relative_to("tests/core") for name in tests)


def test_each_justification_is_about_a_line_that_exists() -> None:
    for entry in tomllib.loads((MUTANTS / "justified.toml").read_text(encoding="utf-8"))["mutant"]:
        source = (ROOT / PACKAGE / entry["file"]).read_text(encoding="utf-8")
        rows = [row for row, line in enumerate(source.splitlines(), 1) if line.partition("  #")[0].strip() == entry["was"]]
        assert entry["where"] in {function_at(ast.parse(source), row) for row in rows}, entry


# -- with cosmic-ray, which `make mutants` installs ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DropStatement", "FlipMembership"])
def test_operators_make_the_changes_of_their_examples(name: str) -> None:
    pytest.importorskip("cosmic_ray", reason="cosmic-ray comes with `make mutants`")
    from cosmic_ray.mutating import MutationVisitor
    from mutants.operators import OPERATORS

    for example in OPERATORS[name].examples():
        assert MutationVisitor.mutate_code(example.pre_mutation_code, OPERATORS[name](), 0) == example.post_mutation_code


DRIVER = """
import sys
import mutation
from pathlib import Path
mutation.ROOT, mutation.MUTANTS, mutation.COPIED = Path.cwd(), Path("tests/tools/mutants").resolve(), ("breccia-core", "tests")
mutation.CORE = ["tests/test_sums.py"]
sys.exit(mutation.main(["--out", "out", *sys.argv[1:]]))
"""
SUMS = "def total(n):\n    found = 0\n    while n > 0:\n        found = found + n\n        n = n - 1\n    return found\n"


def test_a_run_reports_the_survivor_and_resumes_from_saved_results(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="cosmic-ray comes with `make mutants`")
    package, folder = tmp_path / PACKAGE, tmp_path / "tests" / "tools" / "mutants"
    package.mkdir(parents=True)
    folder.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sums.py").write_text(SUMS)
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from breccia.sums import total\n\ndef test():\n    assert total(3) == 6\n"
    )
    (folder / "operators.py").write_bytes((MUTANTS / "operators.py").read_bytes())
    operators = '["core/ReplaceComparisonOperator_Gt_GtE", "core/ReplaceBinaryOperator_Add_Sub", "breccia/.*"]'
    (folder / "config.toml").write_text(f'operators = {operators}\n[modules]\n"sums.py" = ["sums"]\n')
    survived = "survived: sums.py: total: while n > 0: -> while n >= 0:\n"
    (folder / "justified.toml").write_text("mutant = []\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'tools')!r})\n{DRIVER}"]
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (1, f"sums.py: 3 mutants, 2 killed, 1 survived\n{survived}"), done.stderr
    entry = 'file = "sums.py"\nwhere = "total"\nwas = "while n > 0:"\nnow = "while n >= 0:"\nwhy = "it adds 0 once more"\n'
    (folder / "justified.toml").write_text(f"[[mutant]]\n{entry}")
    assert subprocess.run(command, cwd=tmp_path, timeout=300).returncode == 0
    assert (package / "sums.py").read_text() == SUMS
