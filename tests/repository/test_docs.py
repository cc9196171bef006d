"""Examples and code blocks of the documents run as printed, links resolve, and every name in the documents exists."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
import textwrap
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from marks import jax_is_long
from paths import ROOT
from program import Run

import breccia
from breccia.dispatch import registry

DOCS = ROOT / "docs"
PAGES = [p for p in [*ROOT.glob("*.md"), *DOCS.glob("**/*.md")]]
#: Languages of code fences: code that runs or parses, commands, and diagrams.
LANGUAGES = ("python", "console", "json", "toml", "yaml", "text")

FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\2[`~]*$", re.DOTALL | re.MULTILINE)
#: A call of print, on one line or as the formatter breaks it, and the comment after it.
PRINTED = re.compile(r"^( *)print\((?:.*|\n(?:\1 +.*\n)+\1)\)  # (?:prints )?(.+)$", re.MULTILINE)
#: Before a block of Python that needs a package which not every environment of the tests has: it runs where it is installed.
NEEDS = re.compile(r"<!-- needs: (\w+) -->\s*\Z")
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?(?: [^)]*)?\)")


@dataclass(frozen=True)
class Fence:
    language: str
    text: str
    line: int
    needs: str | None = None


def fences(page: Path) -> Iterator[Fence]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        needs = NEEDS.search(text, 0, found.start())
        line = text.count("\n", 0, found.start()) + 1
        yield Fence(found[3].strip(), textwrap.dedent(found[4]), line, needs and needs[1])


def has_python(page: Path) -> bool:
    return any(fence.language == "python" for fence in fences(page))


#: Pages whose blocks JAX compiles for half a minute. tests/jax tests what they show.
SLOW = ("training-jax", "flax")


def every(language: str) -> list[pytest.ParameterSet]:
    """Parameters (page, block) for all blocks in this language."""
    found = [(page, fence) for page in PAGES for fence in fences(page) if fence.language == language]
    return [pytest.param(p, f, id=f"{p.relative_to(ROOT)}:{f.line}") for p, f in found]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def terminal():
    """docs/scripts/terminal.py, whose sessions docs/scripts/generate.py runs."""
    known, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(DOCS / "scripts"), str(ROOT / "benchmarks")]
    yield importlib.import_module("terminal")
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if str(DOCS) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture(scope="module")
def sessions(terminal: ModuleType) -> set[str]:
    """The commands whose output the documents show."""
    return {command for session in terminal.sessions() for command in session.commands}


@pytest.fixture
def acme(terminal: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plug-ins of the tutorials, installed for one test."""
    for name in ("acme", "volt"):
        monkeypatch.syspath_prepend(terminal.installed(f"{name}-breccia", tmp_path / name))
    registry.reload()
    yield
    monkeypatch.undo()
    registry.reload()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("acme_breccia", "volt_breccia")]:
        del sys.modules[name]


# -- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        *jax_is_long(page for page in PAGES if has_python(page) and page.stem not in SLOW),
        *(pytest.param(page, marks=pytest.mark.slow) for page in PAGES if page.stem in SLOW),
    ],
    ids=name_of,
)
def test_python_blocks_of_a_page_run_and_print_the_output_shown(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """All run in order, in one namespace and an empty folder. A comment after `print(...)` is its output; `...` is any text."""
    monkeypatch.chdir(tmp_path)
    if page.parent == DOCS / "tutorial":
        request.getfixturevalue("acme")
    np.random.seed(0)
    namespace = {"__name__": "__main__"}
    for fence in fences(page):
        if fence.language != "python" or (fence.needs and find_spec(fence.needs) is None):
            continue
        place = f"{page}:{fence.line}"
        exec(compile("\n" * fence.line + fence.text, str(page), "exec"), namespace)
        printed = iter(capsys.readouterr().out.splitlines())
        for _, wanted in PRINTED.findall(fence.text):
            pattern = ".*".join(map(re.escape, wanted.split("...")))
            lines: list[str] = []
            while not lines or not re.fullmatch(pattern, lines[-1].strip()):
                line = next(printed, None)
                assert line is not None, f"{place}: nothing printed is {wanted!r}; after the one before it came {lines}"
                lines.append(line)


def test_the_front_page_example_runs_as_printed() -> None:
    """The first example: a block cast, a 256 x 64 weight in blocks of 128, and their product."""
    x = np.random.randn(8, 256).astype(np.float32)
    st = breccia.cast(x, breccia.Float8BlockScaling(block_k=128))
    assert st.shape == (8, 256) and st.scale.shape == (8, 2)
    A = breccia.cast(np.random.randn(16, 256).astype(np.float32), breccia.Float8CurrentScaling())
    W = breccia.cast(np.random.randn(256, 64).astype(np.float32), breccia.Float8BlockScaling(block_k=128))
    y = breccia.matmul(A, W)
    assert y.shape == (16, 64) and y.dtype == np.float32
    assert W.layout == breccia.PerBlockK(128, partial=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_has_a_language(page: Path) -> None:
    wrong = [f"{fence.line}: {fence.language!r}" for fence in fences(page) if fence.language not in LANGUAGES]
    assert not wrong, f"a block is one of {LANGUAGES}"


@pytest.mark.parametrize(("page", "fence"), [*every("json"), *every("toml"), *every("yaml")])
def test_data_blocks_can_be_parsed(page: Path, fence: Fence) -> None:
    yaml: Any = pytest.importorskip("yaml") if fence.language == "yaml" else None
    parsers = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml and yaml.safe_load}
    assert parsers[fence.language](fence.text) is not None


# -- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "fence"), every("console"))
def test_commands_exist(page: Path, fence: Fence, sessions: set[str]) -> None:
    commands = [re.split(r"\s{2,}# ", line[2:])[0] for line in fence.text.splitlines() if line.startswith("$ ")]
    assert commands, "a console block shows commands behind `$ `"
    for command in commands:
        match command.split(maxsplit=2):
            case ["make", target]:
                assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), command
            case ["pip", "install", what]:
                for requirement in (word for word in shlex.split(what) if not word.startswith("-")):
                    check_requirement(requirement)
            case ["python", "-m", words] if words.startswith("breccia_vectors "):
                importlib.import_module("breccia_vectors.__main__").parser().parse_args(shlex.split(words)[1:])
            case ["python", script, *_] if script.endswith(".py"):
                assert (ROOT / script).is_file(), command
            case _:
                assert command in sessions, f"{command!r} is none of the sessions of docs/scripts/terminal.py"


def check_requirement(requirement: str) -> None:
    """Check that it is a breccia distribution, by name or by path, with extras that it declares."""
    found = re.fullmatch(r"(?:\./)?(breccia(?:-\w+)?)(?:\[([\w,-]+)\])?", requirement)
    assert found, f"{requirement} is no distribution of breccia"
    folder = ROOT / "release" / "breccia" if found[1] == "breccia" else ROOT / found[1]
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == found[1]
    assert set(filter(None, (found[2] or "").split(","))) <= set(project.get("optional-dependencies", {})), requirement


# -- blocks pasted one after another -----------------------------------------------------------------------------------


#: Pages that readers paste from, into a folder of their own, and the commands there that need the clone instead. Those of
#: docs/index.md are for the reader's own model.
PASTED, IN_THE_CLONE = (ROOT / "README.md",), ("make", "pip")


def pasted(page: Path) -> Iterator[Fence]:
    """The blocks of Python, and each command of the console, in the order of the page."""
    for fence in fences(page):
        if fence.language == "console":
            commands = [re.split(r"\s{2,}# ", line[2:])[0] for line in fence.text.splitlines() if line.startswith("$ ")]
            yield from (Fence("command", c, fence.line) for c in commands if c.split()[0] not in IN_THE_CLONE)
        elif fence.language == "python" and not (fence.needs and find_spec(fence.needs) is None):
            yield fence


def paste(page: Path, run: Run) -> Iterator[str]:
    """Run the blocks of a page in the current folder and in one session of Python. Yields a line for each that fails."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for fence in pasted(page):
        place = f"{page.name}:{fence.line}: {fence.text.splitlines()[0]}"
        if fence.language == "command":
            program, *words = shlex.split(fence.text)
            code, _, err = run(*words)
            if program != "breccia" or code:
                yield f"{place}: {code}: {err}"
        else:
            try:
                exec(compile(fence.text, str(page), "exec"), namespace)
            except Exception as e:
                yield f"{place}: {type(e).__name__}: {e}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.long
@pytest.mark.together
@pytest.mark.parametrize("page", PASTED, ids=name_of)
def test_the_blocks_of_a_first_page_run_in_an_empty_folder_and_destroy_nothing_in_another(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """The other has the reader's own file or folder under one of the names that the page writes. A block may then fail."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert list(paste(page, run)) == []
    written = sorted(path.name for path in Path().iterdir())
    assert written
    model = {"mine": np.ones((64, 64), np.float32)}
    for number, (name, folder) in enumerate((name, folder) for name in written for folder in (False, True)):
        place = tmp_path / str(number)
        own = place / name / "thesis.txt" if folder else place / name
        own.parent.mkdir(parents=True)
        monkeypatch.chdir(place)
        if folder or own.suffix != ".safetensors":
            own.write_text("years of work")
        else:
            breccia.bridges.save_safetensors(model, own)
        before = contents(place)
        failed = list(paste(page, run))
        assert {path: bytes for path, bytes in contents(place).items() if path in before} == before, f"{name}: {failed}"


# -- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page: Path) -> None:
    """Links are resolved as on a code host. The site build creates and checks the anchors of API pages."""
    for path, anchor in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor and target.suffix == ".md" and target.parent.name != "api":
            assert anchor in anchors(target), f"{path}#{anchor}"
        elif anchor and target.suffix != ".md":
            if anchor in ("only-light", "only-dark"):  # of an image: the grounds that it is for
                continue
            assert re.fullmatch(r"L\d+", anchor), f"{path}#{anchor}"
            assert int(anchor[1:]) <= len(target.read_text(encoding="utf-8").splitlines()), f"{path}#{anchor}"


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"`[^`\n]*`", "`code`", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as the site generates them, and explicit anchors."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = set(re.findall(r'(?:\{ *#|id="|name=")([\w.-]+)', text))
    for heading in re.findall(r"^#+ (.+?)(?: *\{.*\})?$", text, re.MULTILINE):
        plain = (
            unicodedata.normalize("NFKD", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).encode("ascii", "ignore").decode()
        )
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


def test_every_public_name_is_on_an_api_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    documented = set(re.findall(r"^::: breccia\.(\w+)$", text, re.MULTILINE))
    modules = {name for name in breccia.__all__ if type(getattr(breccia, name)).__name__ == "module"}
    in_modules = {name for name in breccia.__all__ if name in vars(breccia.errors)} if "::: breccia.errors\n" in text else set()
    assert set(breccia.__all__) - modules - in_modules - documented - {"__version__", "hookimpl"} == set()


#: Sentences that say what breccia does not have, and the names of libraries as pages write them.
MISSING = re.compile(r"[^.|\n]*\b(?:planned|no bridge|not yet)\b[^.|\n]*", re.IGNORECASE)


def test_no_page_calls_a_bridge_missing_that_a_plug_in_declares() -> None:
    """Checkpoints of a library are another matter than a bridge to its tensors, and may be missing."""
    bridges = {name.removeprefix("from_") for name in registry.registry().bridges if name.startswith("from_")} - {"foreign"}
    libraries = {name: re.compile(name.replace("_", "[-_ ]?") + r"\b", re.IGNORECASE) for name in bridges}
    assert {"torchao", "transformer_engine", "compressed_tensors"} <= set(libraries)
    wrong: list[str] = []
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):
        text = re.sub(r"(?<!\n)\n(?![\n|])", " ", page.read_text(encoding="utf-8"))  # a sentence may take several lines
        for said in MISSING.findall(text):
            named = [name for name, pattern in libraries.items() if pattern.search(said)]
            wrong += [f"{name_of(page)}: {said.strip()}" for _ in named[:1] if "checkpoint" not in said]
    assert not wrong, "\n".join(wrong)


def test_the_table_of_gguf_files_is_that_of_the_record() -> None:
    record = json.loads((DOCS / "gguf.json").read_text(encoding="utf-8"))
    rows = [
        (one["file"], ", ".join(t for t in one["types"] if t != "F32"), one["values"], len(one["differ"]), one["bytes_held"])
        for one in record["files"]
    ]
    text = (DOCS / "dialects.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (.*\.gguf) \| (.*) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert [tuple(row) for row in listed] == [tuple(map(str, row)) for row in rows]
    assert all(one["bytes_held"] == one["bytes_in_file"] for one in record["files"])
