"""The mutation run: which mutants there are, which tests meet them, and that nothing survives unseen."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutation
import pytest
from mutation import PACKAGE, ROOT, TARGETS, TESTS, Fault, Finder, Mutant, Reason

HEAD = "from __future__ import annotations\n"


def found(source: str) -> list[Mutant]:
    return Finder("file.py", (HEAD + source).encode()).found


def changes(source: str) -> list[tuple[str, str]]:
    return [(m.operator, m.now) for m in found(source)]


@pytest.fixture(scope="module")
def every() -> list[Mutant]:
    return mutation.mutants(ROOT / PACKAGE)


# -- which mutants there are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("A = 7\n", [("number + 1", "A = 8"), ("number - 1", "A = 6")]),
        ("A = 0xFF\n", [("number + 1", "A = 0x100"), ("number - 1", "A = 0xfe")]),
        ("A = 0.5\n", [("number + 1", "A = 1.5"), ("number - 1", "A = -0.5")]),
        ("A = b < c\n", [("comparison", "A = b <= c")]),
        ("A = b is not c\n", [("comparison", "A = b is c")]),
        ("A = b not in c\n", [("comparison", "A = b in c")]),
        ("A = b <= c < d\n", [("comparison", "A = b < c < d"), ("comparison", "A = b <= c <= d")]),
        ("A = b and c and d\n", [("boolean", "A = b or c and d"), ("boolean", "A = b and c or d")]),
        ("A = not b\n", [("condition", "A = (b)")]),
        ("A = b if c else d\n", [("condition", "A = b if not (c) else d")]),
        ("A = b if not c else d\n", [("condition", "A = b if (c) else d")]),
        ("A = [b for b in c if d]\n", [("condition", "A = [b for b in c if not (d)]")]),
        ("A = b + c\n", [("arithmetic", "A = b - c")]),
        ("A = b - c\n", [("swap", "A = c - b"), ("arithmetic", "A = b + c")]),
        ("A = (b + c) % d\n", [("swap", "A = d % (b + c)"), ("arithmetic", "A = (b - c) % d")]),
        ("A = b // c\n", [("swap", "A = c // b")]),
        ("A = b << c\n", [("swap", "A = c << b"), ("arithmetic", "A = b >> c")]),
        ("A = b & c | d\n", [("arithmetic", "A = b & c & d"), ("arithmetic", "A = b | c | d")]),
        ("A = MASK | SIGN\n", [("arithmetic", "A = MASK & SIGN")]),
        ("def f(x):\n    g(x)\n", [("statement", "pass")]),
        ("def f(x):\n    return x\n", [("statement", "return None")]),
        ("def f(x):\n    x += y\n", [("arithmetic", "x -= y"), ("statement", "pass")]),
        ("def f(x):\n    x = g(x)\n", [("statement", "pass")]),
        ("def f(x):\n    y = g(x)\n    y = h(y)\n", [("statement", "pass")]),
        ("def f(x):\n    if x:\n        raise E(f'{x + 1}', 2)\n", [("condition", "if not (x):"), ("statement", "pass")]),
        ("def f(x=1):\n    ...\n", [("number + 1", "def f(x=2):"), ("number - 1", "def f(x=0):")]),
    ],
)  # fmt: skip
def test_each_operator_changes_one_place(source: str, expected: list[tuple[str, str]]) -> None:
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""7 < 8"""\n',
        'def f():\n    """7 < 8"""\n',
        "Shape = tuple[int, ...]\n",
        "Cut = int | range | tuple[int, ...]\n",
        "__all__ = [*names, 7]\n",
        "class A:\n    x: Literal[7]\n    y: ClassVar[str] = 'section 7'\n",
        "def f(x: Literal[7]) -> Literal[8]:\n    ...\n",
        "@lru_cache(maxsize=64)\ndef f():\n    ...\n",
        "if TYPE_CHECKING:\n    A = 7\n",
        "def f(x):\n    assert x > 7\n",
        "A = isinstance(x, int | float)\n",
        "A = f'{x + 1}'\n",
        "A = True\n",
    ],
)
def test_what_changes_nothing_is_no_mutant(source: str) -> None:
    assert changes(source) == []


def test_minus_two_is_minus_one_to_a_reshape() -> None:
    changed = changes("A = a.reshape(n[-1], -1)\n")
    assert changed == [
        ("number + 1", "A = a.reshape(n[-2], -1)"),
        ("number - 1", "A = a.reshape(n[-0], -1)"),
        ("number - 1", "A = a.reshape(n[-1], -0)"),
    ]


def test_what_an_error_carries_is_left_alone() -> None:
    assert changes("def f(x):\n    raise E('a' + x, n=x - 1)\n") == [("statement", "pass")]


def test_names_survive_edits_of_other_lines_and_comments() -> None:
    one = "def f(x):\n    x = x + 1  # why\n    return x\n"
    two = "B = 3\n\ndef f(x):\n    '''What.'''\n    # More.\n    x = x + 1\n    y = 5\n    return x\n"
    names = {m.name for m in found(one)}
    assert names < {m.name for m in found(two)} and "file.py: f: x = x + 1 -> x = x - 1" in names


def test_like_lines_of_a_function_are_told_apart_by_their_number() -> None:
    source = "def f(x):\n    g(x + 1)\n    g(x + 1)\n"
    assert [m.name for m in found(source) if m.operator == "number + 1"] == [
        "file.py: f: g(x + 1) -> g(x + 2)",
        "file.py: f: g(x + 1) -> g(x + 2) (2)",
    ]


def test_a_line_over_several_is_named_as_one() -> None:
    source = "def f(x):\n    g(\n        x\n        - y,\n    )\n"
    assert [(m.was, m.now) for m in found(source)] == [("x - y,", "y - x,"), ("- y,", "+ y,"), ("g( x - y, )", "pass")]


def test_every_mutant_is_a_program_of_a_name_of_its_own(every: list[Mutant]) -> None:
    assert len({m.key for m in every}) == len(every) >= 300
    sources = {file: (ROOT / PACKAGE / file).read_bytes() for file in TARGETS}
    assert {m.file for m in every} == set(TARGETS)
    for m in mutation.sample(every, 200, seed=0):
        changed = m.applied(sources[m.file])
        assert changed != sources[m.file]
        compile(changed, m.name, "exec")


def test_a_diff_shows_the_one_line() -> None:
    source = (HEAD + "def f(x):\n    return x < 3\n").encode()
    (m,) = (m for m in Finder("codecs.py", source).found if m.operator == "comparison")
    shown = m.diff(source).splitlines()
    assert shown[0].endswith("breccia/codecs.py") and shown[2:] == ["@@ -3 +3 @@", "-    return x < 3", "+    return x <= 3"]


# -- which are chosen --------------------------------------------------------------------------------------------------


def test_a_sample_takes_of_each_file_and_operator_its_share(every: list[Mutant]) -> None:
    some = mutation.sample(every, 400, seed=1)
    assert len({m.key for m in some}) == 400 and some == mutation.sample(list(reversed(every)), 400, seed=1)
    assert {m.key for m in mutation.sample(every, 100, seed=1)} < {m.key for m in some}
    assert {m.key for m in some} != {m.key for m in mutation.sample(every, 400, seed=2)}
    wanted, got = (Counter((m.file, m.operator) for m in ms) for ms in (every, some))
    for group, count in wanted.items():  # a share is whole to one mutant
        assert abs(got[group] - 400 * count / len(every)) <= 1, group


def test_tests_that_reach_a_statement_are_chosen_one_case_of_each_first() -> None:
    tests = [mutation.Test(f"tests/a.py::f[{i}]", 2.0, frozenset()) for i in range(9)]
    tests += [mutation.Test(f"tests/b.py::g[{i}]", 1.0, frozenset()) for i in range(8)]
    picked = mutation.within_budget(tests, 12.0)  # 6 s in turns: g f, g f; and 6 of the shortest
    assert Counter(t.function for t in picked.values()) == {"tests/a.py::f": 2, "tests/b.py::g": 8}
    ordered = [name.partition("[")[0] for name in mutation.in_order(picked.values())]
    assert ordered == ["tests/b.py::g"] * 2 + ["tests/a.py::f"] * 2 + ["tests/b.py::g"] * 6


def test_marks_say_which_statements_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        HEAD + "def f(x):\n    '''What.'''\n    if x:\n        return 1\n    elif x is None:\n        return 2\n    return 3\n"
    )
    reached: list[tuple[int, int, int]] = []
    monkeypatch.setattr(builtins, "__reach__", reached.append, raising=False)
    space: dict[str, Any] = {}
    exec(mutation.marked(source.encode(), 5), space)
    assert (space["f"](0), reached, space["f"].__doc__) == (3, [(5, 4, 4), (5, 6, 4), (5, 8, 4)], "What.")
    statements = {m.statement for m in found(source.removeprefix(HEAD)) if m.statement}
    assert {(line, column) for _, line, column in reached} <= statements


def test_every_file_that_judges_is_there() -> None:
    assert [file for file in TESTS if not (ROOT / "tests" / file).exists()] == []


# -- what survives and why ---------------------------------------------------------------------------------------------


def test_each_entry_of_the_list_is_about_mutants_there_are(every: list[Mutant]) -> None:
    assert mutation.unmatched(mutation.reasons(), every) == []


LINE = ("codecs.py", "f", "return x < 3", "because nobody reads it")


@pytest.fixture
def three() -> list[Mutant]:
    return Finder("codecs.py", (HEAD + "def f(x):\n    return x < 3\n").encode()).found[:-1]


@pytest.mark.parametrize(
    ("listed", "fault"),
    [
        ([Reason(*LINE)], None),
        ([Reason(*LINE, now=("return x <= 3",))], None),
        ([Reason(*LINE, now=("return x <= 3", "return x > 3"))], "codecs.py: f: return x < 3 -> return x > 3: no such mutant"),
        ([Reason("codecs.py", "g", *LINE[2:])], "codecs.py: g: return x < 3: no such mutant"),
        ([Reason(*LINE), Reason(*LINE, now=("return x < 4",))], "return x < 3 -> return x < 4: listed 2 times"),
    ],
)
def test_an_entry_names_mutants_that_there_are_once(three: list[Mutant], listed: list[Reason], fault: str | None) -> None:
    faults = mutation.unmatched(listed, three)
    assert faults == [] if fault is None else len(faults) == 1 and fault in faults[0]


def test_an_entry_may_be_of_one_of_several_like_lines() -> None:
    two = [m for m in found("def f(x):\n    g(x + 1)\n    g(x + 1)\n") if m.operator == "number + 1"]
    entry = ("file.py", "f", "g(x + 1)", "because nobody reads it", ("g(x + 2)",))
    assert [Reason(*entry, nth=2).holds(m) for m in two] == [False, True] and all(map(Reason(*entry).holds, two))
    assert mutation.unmatched([Reason(*entry, nth=3)], two) == ["file.py: f: g(x + 1) -> g(x + 2): no such mutant"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('file = "a"\nwhere = "f"\nwas = "x"\nwhy = "dead"', "say why nobody could tell; got 'dead'"),
        ('file = "a"\nwhere = "f"\nwhy = "of no effect here"', "an entry has file, where, was, why and maybe now and nth; got"),
        ('file = "a"\nwhere = "f"\nwas = "x"\nline = 3\nwhy = "of no effect here"', "an entry has file, where, was, why"),
    ],
)
def test_an_entry_says_why(tmp_path: Path, entry: str, said: str) -> None:
    path = tmp_path / "justified.toml"
    path.write_text(f"[[mutant]]\n{entry}\n")
    with pytest.raises(Fault, match=said):
        mutation.reasons(path)


def results(mutants: list[Mutant], *status: str) -> dict[str, Any]:
    return {
        m.key: {"status": s, "by": "tests/a.py::t", "why": "no test here reaches it"}
        for m, s in zip(mutants, status, strict=True)
    }


def test_a_survivor_that_nobody_justified_fails_a_run(three: list[Mutant], tmp_path: Path) -> None:
    (tmp_path / "codecs.py").write_text(HEAD + "def f(x):\n    return x < 3\n")
    told = results(three, "survived", "killed", "unreached")
    text, wrong = mutation.report(three, told, [], tmp_path)
    assert wrong == 2 and "+    return x <= 3" in text and "survived (no test here reaches it): f" in text
    assert text.splitlines()[1].split() == ["codecs.py", "3", "1", "0", "2", "0"]
    text, wrong = mutation.report(three, told, [Reason(*LINE, now=("return x <= 3", "return x < 2"))], tmp_path)
    assert wrong == 0 and text.splitlines()[1].split() == ["codecs.py", "3", "1", "0", "0", "2"]


@pytest.mark.parametrize("status", ["killed", "timeout"])
def test_a_justified_mutant_that_is_killed_fails_a_run(three: list[Mutant], tmp_path: Path, status: str) -> None:
    (tmp_path / "codecs.py").write_text(HEAD + "def f(x):\n    return x < 3\n")
    text, wrong = mutation.report(three, results(three, "survived", status, "survived"), [Reason(*LINE)], tmp_path)
    assert wrong == 1 and "listed as justified, and killed by tests/a.py::t" in text
    text, wrong = mutation.report(three, {}, [Reason(*LINE)], tmp_path)  # none of them was in the run
    assert wrong == 0


# -- a run -------------------------------------------------------------------------------------------------------------

SUMS = """
def total(n):
    found = 0
    while n > 0:
        found = found + n
        n = n - 1
    return found


def spare(n):
    return n
"""
JUDGES = """
import breccia.sums


def test_total():
    assert breccia.sums.total(3) == 6
"""
DRIVER = """
import sys
import mutation
mutation.TARGETS, mutation.TESTS, mutation.BESIDE = ("sums.py",), ("test_sums.py",), ("tests", "pyproject.toml")
mutation.COMPUTE = mutation.MULTIPLE = 1.0
sys.exit(mutation.main(sys.argv[1:]))
"""
Tiny = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """A tree of one module and one test, and the program run on it."""
    package = tmp_path / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sums.py").write_text(HEAD + SUMS)
    folder = tmp_path / "tests"
    (folder / "mutants").mkdir(parents=True)
    (folder / "mutants" / "justified.toml").write_text("")
    (folder / "mutation.py").write_bytes((ROOT / "tests" / "mutation.py").read_bytes())
    (folder / "conftest.py").write_text("")
    (folder / "test_sums.py").write_text(JUDGES)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow', 'gpu', 'together']\n")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(folder)}
        command = (sys.executable, "-c", DRIVER, *words)
        return subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=300)

    return run


def test_a_run_says_of_each_mutant_what_became_of_it(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tiny("--all", "--out", str(out))
    assert done.returncode == 1, done.stdout + done.stderr
    kept = json.loads((out / "mutation.json").read_text())
    status = {(r["was"], r["now"]): r["status"] for r in kept["results"].values()}
    assert status["found = found + n", "found = found - n"] == "killed"
    assert status["while n > 0:", "while n >= 0:"] == "survived"  # adds 0 once more
    assert status["n = n - 1", "n = n + 1"] == "timeout"
    assert status["return n", "return None"] == "unreached"
    by = {r["by"] for r in kept["results"].values() if r["status"] == "killed"}
    assert by == {"tests/test_sums.py::test_total"}
    assert "+    while n >= 0:" in done.stdout and (tmp_path / PACKAGE / "sums.py").read_text() == HEAD + SUMS

    # What stands is not run again; what a new test might see is.
    (tmp_path / "tests" / "test_sums.py").write_text(JUDGES + "    assert breccia.sums.spare(2) == 2\n")
    again = tiny("--all", "--out", str(out), "--resume", str(out / "mutation.json"))
    assert again.returncode == 1 and "return n -> return None" in again.stdout and "survived (no test" not in again.stdout


def test_a_run_of_tests_that_fail_anyway_says_nothing(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "tests" / "test_sums.py").write_text(JUDGES.replace("6", "7"))
    done = tiny("--all")
    assert done.returncode == 1 and "without a mutation, tests/test_sums.py::test_total fails" in done.stderr


def test_a_run_that_ends_early_is_gone_on_with(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tiny("--only", "found = 0 -> found = 1", "--out", str(out))
    done = tiny("--only", "found", "--limit-minutes", "0", "--out", str(out), "--resume", str(out / "mutation.json"))
    assert done.returncode == 1 and "time ran out; go on with --resume" in done.stderr
    assert len(json.loads((out / "mutation.json").read_text())["results"]) == 1


@pytest.mark.slow
def test_no_mutant_of_a_sample_survives_unjustified(tmp_path: Path) -> None:
    """Some minutes. CONTRIBUTING.md says how all of them are run."""
    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    command = (sys.executable, "tests/mutation.py", "--sample", "24", "--jobs", str(jobs), "--out", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
