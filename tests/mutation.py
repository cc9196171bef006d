"""Mutants of the core: each changes one place of it by rule, and some test here must notice.

    python tests/mutation.py --list                       # how many there are, by file and operator
    python tests/mutation.py --sample 40 --out results    # a choice of 40 over all files and operators
    python tests/mutation.py --all --jobs 16 --limit-minutes 9 --out results --resume results/mutation.json

A first pass runs every test on a copy that notes which statements it reaches, so that a mutant meets the tests that can see it
and no others. Then each mutant is written into a copy of the package and tested by a process of its own. What survives is
killed by a new test, or stands in tests/mutants/justified.toml with the reason why nobody could tell.

cosmic-ray and mutmut do the like; this is a script because the operators are the ones asked for, a copy of one package for each
process needs neither a database nor a changed checkout, and a mutant's name here survives edits of other lines.

Needs NumPy, pytest, hypothesis and ml_dtypes; on Linux and macOS, since processes are forked. What is optional is hidden.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import compileall
import difflib
import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("breccia-core/src/breccia")
JUSTIFIED = ROOT / "tests" / "mutants" / "justified.toml"

#: What is mutated, from the package's folder.
TARGETS = (
    "codecs.py",
    "rules.py",
    "layouts.py",
    "grids.py",
    "exact.py",
    "formats.py",
    "kernels/checks.py",
    "kernels/plans.py",
    "kernels/reference.py",
    "kernels/numpy.py",
)
#: What judges and is not judged: results stand when it changes, as they do when a test is added.
KIT = "testing"
#: The tests that judge: of arithmetic and structure, with NumPy alone.
TESTS = (
    "test_codecs.py",
    "test_codecs_edges.py",
    "test_conformance.py",
    "test_contract.py",
    "test_declarations.py",
    "test_exact.py",
    "test_extremes.py",
    "test_grids.py",
    "test_layouts_edges.py",
    "test_numpy_edges.py",
    "test_numpy_kernels.py",
    "test_oracle.py",
    "test_reference.py",
    "test_reference_edges.py",
    "test_requantize.py",
    "test_rules_edges.py",
    "test_spec.py",
    "test_steps.py",
    "test_structure.py",
    "test_tensor.py",
    "test_vectors.py",
)
#: What these tests read beside the package, from the root.
BESIDE = ("tests", "docs/spec", "examples", "pyproject.toml")
#: As if not installed in a run: other kernels would serve NumPy in place of those under mutation, and a result would depend on
#: what happens to be there.
HIDDEN = ("torch", "jax", "jaxlib", "mlx", "triton", "breccia_bridges", "breccia_jax", "breccia_mlx", "breccia_native")
HIDDEN += ("breccia_torch", "breccia_triton")

#: Seconds of tests, as the first pass measured them, that a mutant meets at most.
BUDGET = 20.0
#: Seconds of computing, and of waiting, allowed to a test beyond a multiple of what it took: more means that it hangs.
COMPUTE, WAIT, MULTIPLE = 15.0, 90.0, 10.0
#: Memory of one process: a mutant that asks for more fails there.
MEMORY = 8 << 30


#: What becomes of a mutant that no test notices.
SURVIVED = ("survived", "unreached")


class Fault(Exception):
    """Why a run says nothing."""


# ---------------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """One change. `file`, `where` (qualified name), `was`, `now` and `nth` name it: lines as text, without numbers."""

    file: str
    where: str
    operator: str
    was: str
    now: str
    nth: int
    #: Bytes of the file that are replaced, by what; and the statement they are in, None where it runs on import.
    span: tuple[int, int] = field(compare=False)
    text: str = field(compare=False)
    statement: tuple[int, int] | None = field(compare=False)

    @property
    def name(self) -> str:
        return f"{self.file}: {self.where}: {self.was} -> {self.now}" + (f" ({self.nth})" if self.nth > 1 else "")

    @property
    def key(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]

    def applied(self, source: bytes) -> bytes:
        return source[: self.span[0]] + self.text.encode() + source[self.span[1] :]

    def diff(self, source: bytes) -> str:
        before, after = (text.decode().splitlines() for text in (source, self.applied(source)))
        name = (PACKAGE / self.file).as_posix()
        return "\n".join(difflib.unified_diff(before, after, name, f"{name} ({self.operator})", n=0, lineterm=""))


#: Of a comparison its words, and those that it flips to.
FLIPS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
REPLACED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
ORDERED: dict[type[ast.operator], str] = {
    ast.Sub: "-",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
#: Comparisons whose flip is their negation.
OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
#: What `+` and `|` join without being numbers.
COLLECTIONS = (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.JoinedStr)
#: What stands alone as an operand.
ATOMS = (ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.Subscript)


class Finder(ast.NodeVisitor):
    """Collects the mutants of one source.

    Left out is what changes nothing by construction: docstrings, annotations and aliases of types, decorators (sizes of
    memos), texts and what an error carries, asserts (which say what holds), and what only a type checker reads.
    """

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.names: list[str] = []
        #: Names bound so far in each function around.
        self.bound: list[set[str]] = []
        self.statement: tuple[int, int] | None = None
        #: The 1 of each -1 in a reshape: NumPy takes any negative length for the one to be found.
        self.found_length: set[int] = set()
        self.found: list[Mutant] = []
        self.seen: Counter[tuple[str, str, str]] = Counter()
        self.made: set[int] = set()
        self.visit(ast.parse(source))

    def begin(self, node: Any) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: Any) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Any) -> str:
        return self.source[self.begin(node) : self.end(node)].decode()

    def add(self, operator: str, begin: int, end: int, text: str, whole: bool = False) -> None:
        """One mutant; its lines are those of the bytes replaced, or these bytes alone if `whole`."""
        head = begin if whole else self.source.rindex(b"\n", 0, begin) + 1
        tail = end if whole else self.source.index(b"\n", end)
        was = line_of(self.source[head:tail])
        now = line_of(self.source[head:begin] + text.encode() + self.source[end:tail])
        mutated = self.source[:begin] + text.encode() + self.source[end:]
        if (effect := hash(mutated)) in self.made or was == now:
            return
        self.made.add(effect)
        where = ".".join(self.names) or "module"
        self.seen[where, was, now] += 1
        nth = self.seen[where, was, now]
        self.found.append(Mutant(self.file, where, operator, was, now, nth, (begin, end), text, self.statement))

    def replace(self, operator: str, node: Any, text: str) -> None:
        self.add(operator, self.begin(node), self.end(node), text)

    def between(self, operator: str, left: Any, right: Any, old: str, new: str) -> None:
        """Replace the one `old` between two nodes."""
        begin, end = self.end(left), self.begin(right)
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self.source[begin:end])
        places = list(re.finditer(re.escape(old.encode()).replace(rb"\ ", rb"\s+"), gap))
        if len(places) == 1:
            self.add(operator, begin + places[0].start(), begin + places[0].end(), new)

    def drop(self, node: ast.stmt, instead: str = "pass") -> None:
        self.add("statement", self.begin(node), self.end(node), instead, whole=True)

    # -- statements

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        outer = self.statement
        self.statement = (node.lineno, node.col_offset) if self.bound else None
        super().visit(node)
        self.statement = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        self.names.append(node.name)
        outer, first = self.statement, node.body[min(1, len(node.body) - 1) if ast.get_docstring(node) else 0]
        self.statement = (first.lineno, first.col_offset)  # a default is for those who call
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self.statement = outer
        self.bound.append({a.arg for a in arguments})
        for statement in node.body:
            self.visit(statement)
        self.names.pop()
        self.bound.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self.bound and (is_alias(node.value) or self.text(node.targets[0]) == "__all__"):
            return
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)
        if self.bound and len(node.targets) == 1:
            names = {n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            # Without its only assignment a name is not there at all, which any test sees.
            if names <= self.bound[-1]:
                self.drop(node)
            self.bound[-1] |= names

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is None:
            return
        self.visit(node.value)
        if self.bound and isinstance(node.target, ast.Name):
            self.bound[-1].add(node.target.id)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if type(node.op) in REPLACED and not isinstance(node.value, COLLECTIONS):
            old, new = REPLACED[type(node.op)]
            self.between("arithmetic", node.target, node.value, f"{old}=", f"{new}=")
        self.drop(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        self.visit(node.value)
        if isinstance(node.value, ast.Call):
            self.drop(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.drop(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not is_none(node.value):
            self.visit(node.value)
            self.drop(node, "return None")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.drop(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.drop(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        return

    def visit_If(self, node: ast.If) -> None:
        if self.text(node.test) == "TYPE_CHECKING":
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        if self.bound:
            self.bound[-1] |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        self.generic_visit(node)

    # -- expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], OPPOSITES):
            return
        if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self.replace("condition", test, f"not ({self.text(test)})")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            self.replace("condition", node, f"({self.text(node.operand)})")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("boolean", left, right, old, new)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        terms = [node.left, *node.comparators]
        for left, op, right in zip(terms, node.ops, terms[1:], strict=False):
            self.between("comparison", left, right, *FLIPS[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        left, right = self.text(node.left), self.text(node.right)
        if not isinstance(node.left, COLLECTIONS) and not isinstance(node.right, COLLECTIONS):
            if type(node.op) in ORDERED and left != right:
                a, b = (t if isinstance(n, ATOMS) else f"({t})" for n, t in ((node.left, left), (node.right, right)))
                self.replace("swap", node, f"{b} {ORDERED[type(node.op)]} {a}")
            if type(node.op) in REPLACED:
                self.between("arithmetic", node.left, node.right, *REPLACED[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) not in (int, float):
            return
        old = self.text(node)
        for operator, value in (("number + 1", node.value + 1), ("number - 1", node.value - 1)):
            if operator == "number + 1" and id(node) in self.found_length:
                continue
            self.replace(operator, node, hex(value) if old.startswith("0x") else repr(value))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "isinstance":
            self.visit(node.args[0])
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "reshape":
            ends = [n for a in node.args for n in ((a.body, a.orelse) if isinstance(a, ast.IfExp) else (a,))]
            self.found_length |= {id(n.operand) for n in ends if isinstance(n, ast.UnaryOp)}
            self.generic_visit(node)
        elif name != "TypeVar":
            self.generic_visit(node)


def line_of(source: bytes) -> str:
    """Source as one line, without comments and the spaces that formatting gives."""
    lines = (re.sub(r"(^|\s\s)#.*$", "", line).strip() for line in source.decode().splitlines())
    return " ".join(line for line in lines if line)


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def is_alias(node: ast.expr) -> bool:
    """Is it an expression of types: one with parameters, or several joined by `|`?"""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and all(is_type(n) or is_alias(n) for n in (node.left, node.right))
    return isinstance(node, ast.Subscript) and is_type(node.value)


def is_type(node: ast.expr) -> bool:
    """Is it the name of a type, by its spelling?"""
    name = node.id if isinstance(node, ast.Name) else ""
    return isinstance(getattr(builtins, name, None), type) or not (name.islower() or name.isupper() or name == "")


def mutants(package: Path) -> list[Mutant]:
    """All of the package in that folder, in the order of the sources."""
    return [mutant for file in TARGETS for mutant in Finder(file, (package / file).read_bytes()).found]


def sample(every: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them, from each file and operator its share. A larger sample holds the smaller one of that seed."""
    groups: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in every:
        groups[mutant.file, mutant.operator].append(mutant)
    placed: list[tuple[float, str, Mutant]] = []
    for group in groups.values():
        drawn = sorted(((hashlib.sha256(f"{seed} {m.name}".encode()).hexdigest(), m) for m in group), key=lambda pair: pair[0])
        placed += [((place + 0.5) / len(drawn), digest, mutant) for place, (digest, mutant) in enumerate(drawn)]
    return [mutant for _, _, mutant in sorted(placed, key=lambda entry: entry[:2])[:count]]


# ---------------------------------------------------------------------------------------------- what survives and why


@dataclass(frozen=True)
class Reason:
    """An entry of the list: mutants that change no result, and why."""

    file: str
    where: str
    was: str
    why: str
    #: None: every mutant of that line.
    now: tuple[str, ...] | None = None
    #: Which of several like lines of a function; None: each.
    nth: int | None = None

    def holds(self, mutant: Mutant) -> bool:
        same = (self.file, self.where, self.was) == (mutant.file, mutant.where, mutant.was)
        return same and (self.now is None or mutant.now in self.now) and self.nth in (None, mutant.nth)

    def __str__(self) -> str:
        return f"{self.file}: {self.where}: {self.was}"


def reasons(path: Path = JUSTIFIED) -> list[Reason]:
    """The list. Raises Fault for an entry of another form."""
    found: list[Reason] = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        now = entry.get("now")
        entry["now"] = (now,) if isinstance(now, str) else None if now is None else tuple(now)
        try:
            reason = Reason(**entry)
        except TypeError as e:
            raise Fault(f"{path.name}: an entry has file, where, was, why and maybe now and nth; got {entry} ({e}).") from e
        if len(reason.why.split()) < 3:
            raise Fault(f"{path.name}: {reason}: say why nobody could tell; got {reason.why!r}.")
        found.append(reason)
    return found


def unmatched(listed: Iterable[Reason], every: Sequence[Mutant]) -> list[str]:
    """Entries, and changes they name, that are no mutants of the sources, or that two entries name."""
    faults: list[str] = []
    named: Counter[str] = Counter()
    for reason in listed:
        matched = [m for m in every if reason.holds(m)]
        named.update(m.name for m in matched)
        lacking = set(reason.now or ()) - {m.now for m in matched}
        faults += [f"{reason} -> {now}: no such mutant" for now in sorted(lacking)]
        if reason.now is None and not matched:
            faults.append(f"{reason}: no such mutant")
    return faults + [f"{name}: listed {times} times" for name, times in named.items() if times > 1]


# ---------------------------------------------------------------------------------------------- one process


#: A statement: the number of its file among TARGETS, line, column.
Place = tuple[int, int, int]


def marked(source: bytes, number: int) -> str:
    """The source with a call before each statement of a function, which says that it is reached."""
    tree = ast.parse(source)
    functions = (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef))
    inside = {s for f in functions for s in ast.walk(f) if isinstance(s, ast.stmt) and s is not f}

    def with_mark(s: ast.stmt) -> Iterator[ast.stmt]:
        text = isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
        if s in inside and not text:
            yield ast.parse(f"__reach__(({number}, {s.lineno}, {s.col_offset}))").body[0]
        yield s

    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [each for s in statements for each in with_mark(s)])
    # Where nobody listens, in a process that a test starts, the calls do nothing.
    listener = ast.parse("__reach__ = getattr(__import__('builtins'), '__reach__', lambda place: None)").body
    head = next(n for n, s in enumerate(tree.body) if isinstance(s, ast.ImportFrom) and s.module == "__future__") + 1
    tree.body[head:head] = listener
    return ast.unparse(tree)


class Hidden(importlib.abc.MetaPathFinder):
    """Finds nothing of what is hidden, before anybody else finds it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def hide() -> None:
    """Let nothing of what is hidden be imported, or be found among distributions."""
    sys.meta_path.insert(0, Hidden())
    discover = Distribution.discover

    def discovered(**context: Any) -> Iterator[Distribution]:
        return (found for found in discover(**context) if (found.name or "").replace("-", "_") not in HIDDEN)

    Distribution.discover = discovered  # type: ignore[assignment,method-assign]


class Judge:
    """A pytest plug-in: runs the tests chosen, in their order, each within its time, and says what failed first."""

    def __init__(self, out: Path, chosen: dict[str, float] | None, part: tuple[int, int], reached: set[Place] | None) -> None:
        self.out, self.chosen, self.part, self.reached = out, chosen, part, reached
        self.by, self.why = "", ""
        self.imported: list[Place] = []
        self.tests: dict[str, tuple[float, list[Place]]] = {}

    def pytest_collection_modifyitems(self, items: list[Any], config: Any) -> None:
        if self.chosen is not None:
            there = {item.nodeid: item for item in items}
            items[:] = [there[test] for test in self.chosen if test in there]
        items[:] = items[self.part[0] :: self.part[1]]
        self.imported = sorted(self.reached or ())

    def pytest_collectreport(self, report: Any) -> None:
        self._failed(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._failed(report)

    def _failed(self, report: Any) -> None:
        if report.failed and not self.by:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr)
            self.by, self.why = report.nodeid, said.strip().splitlines()[0 if crash else -1][:200] if said.strip() else ""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Iterator[None]:
        usual = (self.chosen or {}).get(item.nodeid, 60.0)
        (self.out.with_suffix(".now")).write_text(item.nodeid)
        within(COMPUTE + MULTIPLE * usual, WAIT + MULTIPLE * usual)
        if self.reached is not None:
            forget()
            self.reached.clear()
        started = time.perf_counter()
        yield
        if self.reached is not None:
            self.tests[item.nodeid] = (round(time.perf_counter() - started, 4), sorted(self.reached))
        within(0, 0)


def within(compute: float, wait: float) -> None:
    """End this process by a signal after so many seconds of its own computing, or of the clock; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, compute)
    signal.setitimer(signal.ITIMER_REAL, wait)


def forget() -> None:
    """Empty what the package remembers, so that a test reaches what it needs and not what the first one left to do."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "breccia" or name.startswith("breccia.testing"):
            continue
        for key, value in list(vars(module).items()):
            if hasattr(value, "cache_clear") and getattr(value, "__module__", "").startswith("breccia"):
                value.cache_clear()
            elif isinstance(value, dict) and key in MEMOS:
                value.clear()
    shared = (("breccia.codecs", "CODECS"), ("conftest", "RECIPES"))
    for value in (each for module, name in shared for each in getattr(sys.modules.get(module), name, ())):
        for kind in type(value).__mro__:
            for key, made in vars(kind).items():
                if type(made).__name__ == "cached_property":
                    vars(value).pop(key, None)


#: Dictionaries of the package that remember.
MEMOS = ("_plans", "_values")


@dataclass
class Task:
    """What one process does: run these tests (None: all) of these files against the package in `copy`.

    part: (n, of): every `of`-th of them, from the n-th on.
    """

    tree: Path
    copy: Path
    out: Path
    files: Sequence[str]
    chosen: dict[str, float] | None = None
    part: tuple[int, int] = (0, 1)
    cpu: int | None = None
    survey: bool = False

    def start(self) -> int:
        """The process: its number."""
        self.out.unlink(missing_ok=True)
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            os.setsid()
            log = os.open(self.out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = self.run()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)

    def run(self) -> int:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.cpu is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {self.cpu})  # a process computes with as many threads as it may use CPUs
        os.chdir(self.tree)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.copy), os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, str(self.copy))
        hide()
        importlib.invalidate_caches()
        reached: set[Place] | None = None
        if self.survey:
            reached = set()
            builtins.__reach__ = reached.add  # type: ignore[attr-defined]
        settle()
        spec = importlib.util.find_spec("breccia")
        if spec is None or spec.origin != str(self.copy / "breccia" / "__init__.py"):
            raise Fault(f"breccia would be imported from {spec and spec.origin}, not from {self.copy}.")
        judge = Judge(self.out, self.chosen, self.part, reached)
        options = (
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not gpu and not together",
            "--tb=line",
            *(() if self.survey else ("-x",)),
        )
        within(WAIT, 3 * WAIT)  # for the imports
        code = int(pytest.main([*options, *(f"tests/{file}" for file in self.files)], plugins=[judge]))
        within(0, 0)
        strange = [
            f"{name} was imported from {module.__file__}"
            for name, module in sys.modules.items()
            if name.partition(".")[0] == "breccia" and not str(module.__file__).startswith(str(self.copy))
        ]
        facts = {"code": code, "by": judge.by, "why": judge.why, "strange": strange}
        if self.survey:
            facts |= {"imported": judge.imported, "tests": judge.tests}
        self.out.write_text(json.dumps(facts))
        return 0


def settle() -> None:
    """Let Hypothesis draw the same examples each time, and take the time it takes."""
    import hypothesis

    hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutation")


# ---------------------------------------------------------------------------------------------- many processes


class Pool:
    """Processes side by side, each in a slot, until a moment on the clock."""

    def __init__(self, jobs: int, until: float) -> None:
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.cpus = [cpus[-1 - slot % len(cpus)] if cpus else None for slot in range(jobs)]
        self.until = until

    def run(self, names: Iterable[Any], task: Any, done: Any) -> bool:
        """`task(name, slot)` for each, and `done(name, slot, facts, seconds)`; False where time ran out."""
        waiting = iter(names)
        free = list(range(len(self.cpus)))
        running: dict[int, tuple[Any, int, Task, float]] = {}
        more = True
        try:
            while more or running:
                while more and free:
                    name = next(waiting, waiting)
                    if name is waiting:
                        more = False
                        break
                    slot = free.pop()
                    work = task(name, slot)
                    work.cpu = self.cpus[slot]
                    running[work.start()] = (name, slot, work, time.monotonic())
                pid, status = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
                if not pid:
                    if time.monotonic() > self.until:
                        return False
                    time.sleep(0.02)
                    continue
                name, slot, work, started = running.pop(pid)
                stop(pid)
                free.append(slot)
                done(name, slot, facts_of(work, os.waitstatus_to_exitcode(status)), time.monotonic() - started)
            return True
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                stop(pid)
                os.waitpid(pid, 0)


def stop(group: int) -> None:
    """End what a process started, and itself."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def facts_of(task: Task, code: int) -> dict[str, Any]:
    """What a process said, or how it ended."""
    if code == 0 and task.out.exists():
        facts: dict[str, Any] = json.loads(task.out.read_text())
        if facts["strange"]:
            raise Fault(f"not the copy was tested: {'; '.join(facts['strange'][:3])}.")
        return facts
    if code >= 0:
        raise Fault(f"a process ended with {code} before it had a result:\n{task.out.with_suffix('.log').read_text()[-3000:]}")
    now = task.out.with_suffix(".now")
    by = now.read_text() if now.exists() else "imports"
    late = -code in (signal.SIGPROF, signal.SIGALRM)
    return {
        "code": code,
        "by": by,
        "why": "ran out of time" if late else f"ended by {signal.Signals(-code).name}",
        "late": late,
    }


# ---------------------------------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Test:
    """A test as the first pass saw it."""

    name: str
    seconds: float
    reached: frozenset[Place]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0].removeprefix("tests/")

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    @property
    def draw(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()


def digest(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in sorted(paths))).hexdigest()[:16]


class Run:
    """One run over a copy of the tree as it is at its start."""

    def __init__(self, folder: Path, jobs: int, until: float, budget: float, old: dict[str, Any] | None = None) -> None:
        self.folder, self.budget = folder, budget
        self.pool = Pool(jobs, until)
        self.tree, self.pristine = folder / "tree", folder / "pristine"
        for name in BESIDE:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.tree / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
            else:
                shutil.copy(source, self.tree / name)
        shutil.copytree(ROOT / PACKAGE, self.pristine / "breccia", ignore=shutil.ignore_patterns("__pycache__"))
        self.package = self.pristine / "breccia"
        compileall.compile_dir(self.package, quiet=1)
        self.inputs = {file: digest((self.tree / "tests" / file, self.tree / "tests" / "conftest.py")) for file in TESTS}
        self.code = digest(path for path in self.package.rglob("*.py") if not path.is_relative_to(self.package / KIT))
        self.slots: dict[int, Path] = {}
        self.survey: dict[str, Any] = {}
        self.results: dict[str, dict[str, Any]] = {}
        if old is not None and old["code"] == self.code:
            same = {file for file in TESTS if old["tests"].get(file) == self.inputs[file]}
            self.survey = {file: seen for file, seen in old["survey"].items() if file in same}
            self.results = {key: r for key, r in old["results"].items() if self._stands(r, same, budget)}
        self.tests: list[Test] = []

    @staticmethod
    def _stands(result: dict[str, Any], same: set[str], budget: float) -> bool:
        """Does an older result hold? One of a test that is as it was; a survivor's where all are, and it met as many."""
        if result["status"] in SURVIVED:
            return same == set(TESTS) and result["budget"] >= budget
        file = result["by"].partition("::")[0].removeprefix("tests/")
        return file in same or "::" not in result["by"]

    # -- the first pass

    def look(self) -> None:
        """Run every test on a copy that says what is reached. Raises Fault where one fails."""
        missing = [file for file in TESTS if file not in self.survey]
        if missing:
            copy = self.folder / "marked"
            shutil.copytree(self.package, copy / "breccia", ignore=shutil.ignore_patterns("__pycache__"))
            for number, file in enumerate(TARGETS):
                (copy / "breccia" / file).write_text(marked((self.package / file).read_bytes(), number), encoding="utf-8")
            compileall.compile_dir(copy, quiet=1)

            parts = min(len(self.pool.cpus), 4)
            seen: dict[str, list[dict[str, Any]]] = defaultdict(list)

            def task(name: tuple[str, int], slot: int) -> Task:
                file, part = name
                return Task(self.tree, copy, self.folder / f"survey-{slot}.json", (file,), part=(part, parts), survey=True)

            def done(name: tuple[str, int], slot: int, facts: dict[str, Any], seconds: float) -> None:
                file, part = name
                if facts["code"] not in (0, 5):  # 5: a part of none
                    raise Fault(f"without a mutation, {facts['by'] or file} fails: {facts['why']}.")
                seen[file].append(facts)
                print(f"{file} {part + 1}/{parts}: {len(facts['tests'])} tests, {seconds:.0f} s", flush=True)
                if len(seen[file]) == parts:
                    tests = {test: found for some in seen[file] for test, found in some["tests"].items()}
                    self.survey[file] = {"imported": facts["imported"], "tests": tests}

            # The long ones first; a size is a fair guess.
            order = sorted(missing, key=lambda file: -(self.tree / "tests" / file).stat().st_size)
            if not self.pool.run([(file, part) for file in order for part in range(parts)], task, done):
                raise Fault("time ran out in the first pass; its finished part is kept: go on with --resume.")
        self.tests = [
            Test(name, seconds, frozenset(tuple(place) for place in reached))
            for file in TESTS
            for name, (seconds, reached) in self.survey[file]["tests"].items()
        ]
        self.imported = {tuple(place) for seen in self.survey.values() for place in seen["imported"]}
        self.reaching: dict[Place, list[Test]] = defaultdict(list)
        for test in self.tests:
            for place in test.reached:
                self.reaching[place].append(test)

    def chosen(self, mutant: Mutant) -> dict[str, float]:
        """The tests that a mutant meets, in order, with the time each takes; none where none reaches it."""
        number = TARGETS.index(mutant.file)
        place = None if mutant.statement is None else (number, *mutant.statement)
        direct = self.reaching[place] if place else []
        picked = within_budget(direct, self.budget)
        if place is None or place in self.imported:  # what an import reaches, any test may see: those of that file before
            near = [t for t in self.tests if any(p[0] == number for p in t.reached)]
            for some, share in ((near, 0.75), (self.tests, 1.0)):
                left = self.budget * share - sum(t.seconds for t in picked.values())
                picked |= within_budget((t for t in some if t.name not in picked), left)
        return in_order(picked.values())

    # -- mutants

    def slot(self, number: int) -> Path:
        if number not in self.slots:
            self.slots[number] = self.folder / f"slot-{number}"
            shutil.copytree(self.pristine, self.slots[number])
        return self.slots[number]

    def check_unmutated(self) -> None:
        """Raise Fault unless the copy as it is passes one case of every test."""
        some = within_budget(self.tests, self.budget / 2)
        facts: list[dict[str, Any]] = []
        task = self._task(self.folder / "unmutated.json", in_order(some.values()))
        self.pool.run([None], lambda name, slot: task(self.slot(slot)), lambda name, slot, found, seconds: facts.append(found))
        if not facts:
            raise Fault("time ran out; go on with --resume.")
        if facts[0]["code"]:
            raise Fault(f"without a mutation, {facts[0]['by']} fails: {facts[0]['why']}.")

    def _task(self, out: Path, chosen: dict[str, float]) -> Any:
        files = dict.fromkeys(name.partition("::")[0].removeprefix("tests/") for name in chosen)
        return lambda copy: Task(self.tree, copy, out, tuple(files), chosen)

    def judge(self, wanted: Iterable[Mutant], keep: Any) -> bool:
        """Run mutants that have no result yet, and `keep()` now and then. False where time ran out."""
        todo: list[Mutant] = []
        for mutant in wanted:
            if mutant.key in self.results:
                continue
            if self.chosen(mutant):
                todo.append(mutant)
            else:
                self._note(mutant, "unreached", "", "no test here reaches it", 0.0)

        def task(mutant: Mutant, slot: int) -> Task:
            copy = self.slot(slot)
            path = copy / "breccia" / mutant.file
            path.write_bytes(mutant.applied((self.package / mutant.file).read_bytes()))
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                compiled.unlink()  # a change of one byte keeps a file's size, and may keep its time
            return self._task(self.folder / f"slot-{slot}.json", self.chosen(mutant))(copy)

        def done(mutant: Mutant, slot: int, facts: dict[str, Any], seconds: float) -> None:
            path = self.slot(slot) / "breccia" / mutant.file
            for source in (self.package / mutant.file).parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                shutil.copy2(source, path.parent / "__pycache__" / source.name)
            shutil.copy2(self.package / mutant.file, path)
            status = "timeout" if facts.get("late") else "survived" if facts["code"] in (0, 5) else "killed"
            self._note(mutant, status, facts["by"], facts["why"], seconds)
            print(f"{len(self.results):5} {status:8} {seconds:5.1f} s  {mutant.name}", flush=True)
            if len(self.results) % 25 == 0:
                keep()

        finished = self.pool.run(todo, task, done)
        keep()
        return finished

    def _note(self, mutant: Mutant, status: str, by: str, why: str, seconds: float) -> None:
        names = ("file", "where", "operator", "was", "now", "nth")
        found = {"status": status, "by": by, "why": why, "seconds": round(seconds, 2), "budget": self.budget}
        self.results[mutant.key] = {name: getattr(mutant, name) for name in names} | found


def within_budget(tests: Iterable[Test], budget: float) -> dict[str, Test]:
    """For half of the time one case of every test function, then a second one and so on; then the shortest of the others."""
    cases: dict[str, list[Test]] = defaultdict(list)
    for test in sorted(tests, key=lambda t: t.draw):
        cases[test.function].append(test)
    turns = [(turn, t.seconds, t.name, t) for same in cases.values() for turn, t in enumerate(same)]
    picked: dict[str, Test] = {}
    left = budget / 2
    for _, seconds, name, test in sorted(turns):
        if seconds <= left:
            picked[name] = test
            left -= seconds
    left += budget / 2
    for seconds, name, test in sorted((t.seconds, t.name, t) for _, _, _, t in turns):
        if name not in picked and seconds <= left:
            picked[name] = test
            left -= seconds
    return picked


def in_order(tests: Iterable[Test]) -> dict[str, float]:
    """Two cases of every function first, then the others; file by file, since fixtures are made once for each."""
    turn: Counter[str] = Counter()
    rounds: tuple[list[Test], list[Test]] = ([], [])
    for test in sorted(tests, key=lambda t: t.draw):
        rounds[turn[test.function] >= 2].append(test)
        turn[test.function] += 1
    found: dict[str, float] = {}
    for some in rounds:
        cost: Counter[str] = Counter()
        for test in some:
            cost[test.file] += test.seconds  # type: ignore[assignment]
        found |= {t.name: t.seconds for t in sorted(some, key=lambda t: (cost[t.file], t.file, t.seconds, t.name))}
    return found


# ---------------------------------------------------------------------------------------------- the report


def counted(every: Sequence[Mutant]) -> str:
    """How many there are, by file and operator."""
    operators = sorted({m.operator for m in every})
    counts = Counter((m.file, m.operator) for m in every)
    rows = [[file, *(str(counts[file, o]) for o in operators), str(sum(m.file == file for m in every))] for file in TARGETS]
    rows.append(["all", *(str(sum(m.operator == o for m in every)) for o in operators), str(len(every))])
    return table(["file", *operators, "all"], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def report(
    every: Sequence[Mutant], results: dict[str, dict[str, Any]], listed: Sequence[Reason], package: Path
) -> tuple[str, int]:
    """(the table, survivors and faults of the list, as text; how many of them fail the run)"""
    status = {m.key: results[m.key]["status"] for m in every if m.key in results}
    known = {m.key: next((r for r in listed if r.holds(m)), None) for m in every}
    rows: list[list[str]] = []
    for file in (*TARGETS, "all"):
        own = [m for m in every if m.key in status and file in (m.file, "all")]
        lost = [m for m in own if status[m.key] in SURVIVED]
        excused = sum(known[m.key] is not None for m in lost)
        seen = Counter(status[m.key] for m in own)
        rows.append([file, *map(str, (len(own), seen["killed"], seen["timeout"], len(lost) - excused, excused))])
    parts = [table(["file", "mutants", "killed", "timeout", "survived", "justified"], rows)]
    survivors = [m for m in every if status.get(m.key) in SURVIVED and known[m.key] is None]
    for m in survivors:
        why = f" ({results[m.key]['why']})" if status[m.key] == "unreached" else ""
        parts.append(f"survived{why}: {m.where}\n{m.diff((package / m.file).read_bytes())}")
    faults = unmatched(listed, every)
    killed = [m for m in every if known[m.key] is not None and status.get(m.key) in ("killed", "timeout")]
    faults += [f"{m.name}: listed as justified, and killed by {results[m.key]['by']}" for m in killed]
    parts += [f"tests/mutants/{JUSTIFIED.name}: {fault}" for fault in faults]
    return "\n\n".join(parts), len(survivors) + len(faults)


# ---------------------------------------------------------------------------------------------- the program


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutants of the core, each to be noticed by a test.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--list", action="store_true", help="count the mutants there are, and check the list of those justified")
    which.add_argument("--sample", type=int, metavar="N", help="N of them, from each file and operator its share")
    which.add_argument("--all", action="store_true", help="all of them")
    which.add_argument("--only", metavar="TEXT", help="those whose name, `file: function: line -> line`, holds the text")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--files", nargs="*", default=TARGETS, choices=TARGETS, metavar="FILE", help="of these sources")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, each on a CPU of its own")
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help="seconds of tests for a mutant; a survivor of less is run again"
    )
    parser.add_argument("--unlisted", action="store_true", help="without those that are justified")
    parser.add_argument("--limit-minutes", type=float, default=24 * 60.0, help="stop then, with what is done")
    parser.add_argument("--out", type=Path, help="folder for mutation.json")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on from an earlier mutation.json, if it exists")
    given = parser.parse_args(words)
    until = time.monotonic() + 60 * given.limit_minutes
    listed = reasons()
    if given.list:
        every = mutants(ROOT / PACKAGE)
        faults = unmatched(listed, every)
        print("\n".join([counted(every), *faults]))
        return 1 if faults else 0
    old = json.loads(given.resume.read_text()) if given.resume and given.resume.exists() else None
    prepare()
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(Path(temporary).resolve(), given.jobs, until, given.budget, old)

        def keep() -> None:
            if given.out is None:
                return
            given.out.mkdir(parents=True, exist_ok=True)
            facts = {"code": run.code, "tests": run.inputs, "results": run.results, "survey": run.survey}
            partial = given.out / "mutation.json.part"
            partial.write_text(json.dumps(facts, indent=None, separators=(",", ":")))
            partial.replace(given.out / "mutation.json")

        every = mutants(run.package)
        wanted = [m for m in every if m.file in given.files]
        if given.sample is not None:
            wanted = sample(wanted, given.sample, given.seed)
        elif given.only is not None:
            wanted = [m for m in wanted if given.only in m.name]
        if given.unlisted:
            wanted = [m for m in wanted if not any(reason.holds(m) for reason in listed)]
        try:
            run.look()
            run.check_unmutated()
            finished = run.judge(wanted, keep)
        finally:
            keep()
        told = {m.key: run.results[m.key] for m in wanted if m.key in run.results}
        text, wrong = report(every, told, listed, run.package)
    left = len(wanted) - len(told)
    print(f"\n{text}\n\n{len(told)} of {len(wanted)} mutants" + ("" if finished else f"; {left} are left: go on with --resume"))
    if given.out is not None:
        (given.out / "mutation.txt").write_text(text + "\n")
    return 1 if wrong else 3 if left else 0


def prepare() -> None:
    """Load once what every process needs, and see to it that a process computes alone."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    for name in [name for name in os.environ if name.startswith("BRECCIA_")]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in ("numpy", "pytest", "hypothesis.extra.numpy", "ml_dtypes"):
        importlib.import_module(name)
    if loaded := [name for name in sys.modules if name.partition(".")[0] == "breccia"]:
        raise Fault(f"{loaded[0]} is loaded already; no copy can be.")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Fault as e:
        sys.exit(f"mutation: {e}")
