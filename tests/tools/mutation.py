# pyright: basic, reportMissingImports=false
"""Mutation testing of the core: cosmic-ray changes one place at a time, and some test must fail.

    python tests/tools/mutation.py --jobs 8 --out FOLDER                       # every module; resumes an interrupted run
    python tests/tools/mutation.py --out FOLDER --only exact.py                # one module
    python tests/tools/mutation.py --out FOLDER --sample 300                    # a sample of all modules

mutants/config.toml beside this file lists the modules, operators and tests; mutants/justified.toml lists the survivors that
change no result. The run fails on any other survivor, and on a justification without one. Each job works in its own copy.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import resource
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("breccia-core/src/breccia")
MUTANTS = ROOT / "tests" / "tools" / "mutants"
#: What each working copy contains.
COPIED = ("breccia-core", "tests", "docs/spec", "examples", "pyproject.toml")
#: The tests of core, of which those that run a changed line judge it, and the cases that count: those of `make test`.
CORE = [f"tests/core/{folder}" for folder in ("kernels", "numerics", "tensors", "testing")]
MARKS = "not (leftover or exhaustive or long or slow or gpu or together)"
#: Memory limit of one test run, in bytes: a mutant that needs more fails.
MEMORY = 8 << 30

Position = tuple[int, int]


class Mutant(NamedTuple):
    """Identifies a mutant in justified.toml: `where` is the function's qualified name, `was` and `now` its lines."""

    file: str
    where: str
    was: str
    now: str


def function_at(tree: ast.AST, row: int) -> str:
    """The qualified name of the innermost class or function that contains a line; `module` at module level."""
    defined = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef))
    around = (node.name for node in defined if node.lineno <= row <= (node.end_lineno or row))
    return ".".join(around) or "module"


def unmutated(tree: ast.AST) -> Iterator[ast.AST]:
    """Code that is not mutated: annotations, decorators, error messages, asserts, and the -1 in a reshape."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.expr() as inner) | ast.AnnAssign(annotation=inner) | ast.Raise(exc=ast.expr() as inner):
                yield inner
            case ast.Assert() | ast.JoinedStr() | ast.If(test=ast.Name("TYPE_CHECKING")):
                yield node
            case ast.Call(func=ast.Attribute(attr="reshape"), args=args):
                yield from (n for a in args for n in ast.walk(a) if isinstance(n, ast.UnaryOp))
            case ast.FunctionDef() | ast.ClassDef():
                yield from (*node.decorator_list, *filter(None, [getattr(node, "returns", None)]))


def is_skipped(tree: ast.AST, at: Position) -> bool:
    return any((n.lineno, n.col_offset) <= at < (n.end_lineno, n.end_col_offset) for n in unmutated(tree))  # type: ignore[attr-defined]


def changed(diff: str, sign: str) -> str:
    """The lines of a diff that begin with `sign`, joined into one line without comments."""
    lines = (line[1:] for line in diff.splitlines()[3:] if line.startswith(sign))
    return " ".join(re.sub(r"(^|\s\s)#.*$", "", line).strip() for line in lines)


def judged(survivors: Iterable[Mutant], entries: Iterable[dict[str, Any]], files: Iterable[str]) -> list[str]:
    """The faults of a run over `files`: survivors without a justification, and justifications without a survivor.

    An entry has file, where, was, now and why; `now` is one line or a list of lines. Whitespace is ignored.
    """
    left = {Mutant(*(re.sub(r"\s", "", part) for part in m)): m for m in survivors}
    found: list[str] = []
    needed: set[Mutant] = set()
    for entry in (entry for entry in entries if entry["file"] in files):
        for now in [entry["now"]] if isinstance(entry["now"], str) else entry["now"]:
            key = Mutant(*(re.sub(r"\s", "", part) for part in (entry["file"], entry["where"], entry["was"], now)))
            if key not in left:
                found.append(f"justified, but no survivor: {entry['file']}: {entry['where']}: {entry['was']} -> {now}")
            if len(entry["why"].split()) < 3:
                found.append(f"say why nobody could notice, not {entry['why']!r}: {entry['file']}: {entry['where']}: {now}")
            needed.add(key)
    return found + [f"survived: {m.file}: {m.where}: {m.was} -> {m.now}" for key, m in left.items() if key not in needed]


# -- the run, with cosmic-ray ------------------------------------------------------------------------------------------


def extend_cosmic_ray() -> None:
    """Add the operators of tests/tools/mutants to those of cosmic-ray, in this process."""
    from cosmic_ray import plugins

    sys.path.insert(0, str(MUTANTS))
    from operators import Provider

    plugins.OPERATOR_PROVIDERS["breccia"] = Provider()


def enter_copy(copies: str) -> None:
    """Move this process into a copy of the repository, which its tests import."""
    extend_cosmic_ray()
    folder = Path(tempfile.mkdtemp(dir=copies))
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, folder / name)
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder / PACKAGE.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def path_of(name: str) -> Path:
    """The test file of that name, relative to the repository."""
    (found,) = ROOT.glob(f"tests/**/test_{name}.py")
    return found.relative_to(ROOT)


class Stage(NamedTuple):
    """Tests that judge a mutant: the words of pytest, and the seconds that they take without a mutation."""

    words: list[str]
    seconds: float


def without_mutation(files: Sequence[str], options: Sequence[str] = ()) -> tuple[Stage, list[str]]:
    """The stage of these test files, and their tests that fail without a mutation, as some that need other distributions do.

    Those are left out of the stage. options: further words of pytest for this run. Raises RuntimeError if no test passes."""
    from cosmic_ray.testing import run_tests

    words = ["-m", MARKS, *files]
    begin = time.monotonic()
    _, output = run_tests(command([*options, *words]), 3600)
    taken = time.monotonic() - begin
    if not re.search(r"^\d+ passed|, \d+ passed", output, re.MULTILINE):
        raise RuntimeError(f"no test passes without a mutation: {shlex.join(words)}\n{output[-2000:]}")
    failed = [name for name in re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)]
    return Stage([*words, *(f"--deselect={name}" for name in failed)], taken), failed


def command(words: Sequence[str]) -> str:
    return shlex.join([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", *words])


class Lines(NamedTuple):
    """Which tests of core run which lines: a data file of coverage.py, the copy that it is about, and tests to leave out."""

    data: str
    folder: str
    seconds: float
    failed: list[str]

    def of(self, file: str) -> dict[int, set[str]]:
        """The tests that run each line of a module; a line that runs at import has none."""
        from coverage import CoverageData

        data = CoverageData(self.data)
        data.read()
        contexts = data.contexts_by_lineno(str(Path(self.folder, PACKAGE, file)))
        return {line: {name.rpartition("|")[0] for name in names} - {"", *self.failed} for line, names in contexts.items()}


def lines_of_tests() -> Lines:
    """Run the tests of core once and note the lines that each runs."""
    folder = os.getcwd()
    options = ["-p", "pytest_cov", f"--cov={Path(folder, PACKAGE)}", "--cov-context=test", "--cov-report="]
    stage, failed = without_mutation(CORE, options)
    return Lines(str(Path(folder, ".coverage")), folder, stage.seconds, failed)


def tested(mutations: Any, stages: Sequence[Stage]) -> Any:
    """The result of a mutant: of the first stage of tests that kills it, or of the last."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import TestOutcome

    for words, seconds in stages:
        Path("words").write_text("\n".join(words), encoding="utf-8")
        result = mutate_and_test(mutations, command(["-x", "@words"]), 30 + 5 * seconds)
        if result.test_outcome != TestOutcome.SURVIVED:
            break
    return result


def begun(file: str, operators: Sequence[str], out: Path) -> Path:
    """The session file in `out` of a module's mutants. It keeps results, so that an interrupted run resumes."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    source = (ROOT / PACKAGE / file).read_bytes()
    version = hashlib.sha256(source + repr(operators).encode()).hexdigest()[:12]
    session = out / f"{file.replace('/', '.')}.{version}.sqlite"
    tree, chosen = ast.parse(source), re.compile("|".join(operators))
    with use_db(str(session)) as db:
        if not db.num_work_items:
            init([PACKAGE / file], db, {})
        for item in list(db.pending_work_items):
            (mutation,) = item.mutations
            if not chosen.fullmatch(mutation.operator_name) or is_skipped(tree, tuple(mutation.start_pos)):
                db.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED))
    return session


def drawn(sessions: Iterable[Path], count: int) -> set[str]:
    """The ids of `count` mutants, the same ones for the same source: those with the smallest hashes."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import WorkerOutcome

    hashes: dict[str, str] = {}
    for session in sessions:
        with use_db(str(session)) as db:
            skipped = {job for job, result in db.results if result.worker_outcome == WorkerOutcome.SKIPPED}
            for item in db.work_items:
                (m,) = item.mutations
                if item.job_id not in skipped:
                    identity = repr((str(m.module_path), m.operator_name, m.occurrence, sorted(m.operator_args.items())))
                    hashes[item.job_id] = hashlib.sha256(identity.encode()).hexdigest()
    return set(sorted(hashes, key=hashes.__getitem__)[:count])


def run(
    file: str, session: Path, files: Sequence[str], pool: Executor, every: Future[Lines], again: bool, sample: set[str] | None
) -> list[Mutant]:
    """The survivors of one module, of all its mutants or of those in `sample`.

    The tests that run a changed line judge it first. files: the tests that judge what survives those, since a result that is
    kept between tests is computed in one of them only.
    """
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome

    tree = ast.parse((ROOT / PACKAGE / file).read_bytes())
    with use_db(str(session)) as db:
        items = {item.job_id: item for item in db.work_items if sample is None or item.job_id in sample}
        redo = {job for job, result in db.results if again and result.test_outcome == TestOutcome.SURVIVED}
        todo = [items[job] for job in (*(item.job_id for item in db.pending_work_items), *redo) if job in items]
        running: dict[Future[Any], str] = {}
        if todo:
            listed, _ = pool.submit(without_mutation, [str(path_of(name)) for name in files]).result()
            lines = every.result()
            tests = lines.of(file)
            for item in todo:
                (mutation,) = item.mutations
                rows = range(mutation.start_pos[0], mutation.end_pos[0] + 1)
                names = sorted(set[str]().union(*(tests.get(row, ()) for row in rows)))
                stages = [Stage(names, lines.seconds), listed] if names else [listed]
                running[pool.submit(tested, item.mutations, stages)] = item.job_id
        for done in as_completed(running):
            db.set_result(running[done], done.result())
        results = [
            (items[job].mutations[0], result)
            for job, result in db.results
            if job in items and result.worker_outcome != WorkerOutcome.SKIPPED
        ]
    left = [(mutation, result) for mutation, result in results if result.test_outcome != TestOutcome.KILLED]
    print(f"{file}: {len(results)} mutants, {len(results) - len(left)} killed, {len(left)} survived", flush=True)
    return [
        Mutant(file, function_at(tree, mutation.start_pos[0]), changed(result.diff or "", "-"), changed(result.diff or "", "+"))
        for mutation, result in left
    ]


def main(words: Sequence[str] | None = None) -> int:
    config = tomllib.loads((MUTANTS / "config.toml").read_text(encoding="utf-8"))
    entries = tomllib.loads((MUTANTS / "justified.toml").read_text(encoding="utf-8"))["mutant"]
    parser = argparse.ArgumentParser(description="Mutation testing of the core: some test must fail for each mutant.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the session files, from which a later run resumes")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel processes")
    parser.add_argument("--only", nargs="*", default=list(config["modules"]), choices=list(config["modules"]), metavar="FILE")
    parser.add_argument("--again", action="store_true", help="test the survivors of earlier runs again")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants, the same ones as long as the source stays")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    extend_cosmic_ray()
    os.chdir(ROOT)
    with (
        tempfile.TemporaryDirectory() as copies,
        ProcessPoolExecutor(given.jobs, initializer=enter_copy, initargs=(copies,)) as pool,
    ):
        sessions = {file: begun(file, config["operators"], given.out) for file in given.only}
        sample = None if given.sample is None else drawn(sessions.values(), given.sample)

        def survivors_of(file: str) -> list[Mutant]:
            return run(file, sessions[file], config["modules"][file], pool, every, given.again, sample)

        every = pool.submit(lines_of_tests)
        with ThreadPoolExecutor(len(sessions)) as waiting:  # so that the last mutants of a module leave no process idle
            survivors = [mutant for one in waiting.map(survivors_of, sessions) for mutant in one]
    faults = judged(survivors, entries, given.only)
    if sample is not None:  # a justified mutant may be outside the sample
        faults = [fault for fault in faults if fault.startswith("survived")]
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
