"""Examples in docstrings: every public function has one, and each prints what it shows.

The sources are parsed and not imported: a function whose library is not installed must have its example too.
"""

from __future__ import annotations

import ast
import doctest
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT

import breccia
from breccia.dispatch.registry import registry
from breccia.kernels import threads

pytestmark = pytest.mark.together

#: Modules whose public names are those of their stub, or else of their `__all__`.
MODULES = (
    *("breccia", "breccia.testing", "breccia_torch", "breccia_torch.hf", "breccia_jax", "breccia_jax.flax"),
    *("breccia_jax.equinox", "breccia_mlx"),
)
#: What has a docstring.
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Docstring:
    """A docstring of the sources. name: that of its object, `breccia.api.cast`. line: of the object, from 1."""

    name: str
    path: Path
    line: int
    text: str

    def run(self, **names: Any) -> None:
        """Run the examples with these global names. Raises what an example raises, and AssertionError for another output."""
        place = f"{self.path}:{self.line}"
        examples = doctest.DocTestParser().get_doctest(self.text, names, self.name, place, None)
        try:
            doctest.DebugRunner(optionflags=doctest.ELLIPSIS).run(examples)
        except doctest.DocTestFailure as e:
            shown, got = e.example.source + e.example.want, e.got
            raise AssertionError(f"{place}: the docstring of {self.name} shows\n{shown}and it prints\n{got}") from None
        except doctest.UnexpectedException as e:
            raise e.exc_info[1] from None


# -- the sources -----------------------------------------------------------------------------------------------------


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def file_of(module: str) -> Path:
    part = module.replace(".", "/")
    return next(path for end in (".py", "/__init__.py") for path in ROOT.glob(f"breccia-*/src/{part}{end}"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts[2:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(module: str) -> dict[str, tuple[str, str]]:
    """Names that a module, or the stub beside it, imports from breccia's modules: its own name -> (module, name there)."""
    path = file_of(module)
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    stub = path.with_suffix(".pyi")
    return {
        alias.asname or alias.name: (f"{package}.{node.module}", alias.name)
        for node in ast.walk(parsed(stub if stub.exists() else path))
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
        for alias in node.names
    }


def public_names(module: str) -> list[str]:
    """What a module's stub exports; without a stub, the names in its `__all__`."""
    path = file_of(module)
    if path.with_suffix(".pyi").exists():
        return list(imports(module))
    listed = (n.value for n in parsed(path).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    return ast.literal_eval(next(listed))


def definition(module: str, name: str) -> Docstring | None:
    """The docstring of a function of a module; None for names of other things."""
    for node in parsed(file_of(module)).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return Docstring(f"{module}.{name}", file_of(module), node.lineno, ast.get_docstring(node) or "")
    home = imports(module).get(name)
    return None if home is None else definition(*home)


def public_functions() -> dict[str, Docstring]:
    """Every function that users call, by its public name."""
    places = {f"{module}.{name}": (module, name) for module in MODULES for name in public_names(module)}
    places["breccia.backend.public"] = ("breccia.backend", "public")
    for bridge in registry().bridges.values():
        if bridge.plugin == "bridges":
            module, _, name = bridge.target.partition(":")
            places[f"breccia.bridges.{bridge.name}"] = (module, name)
    found = {public: definition(*place) for public, place in places.items()}
    return {public: doc for public, doc in found.items() if doc is not None}


def docstrings(path: Path) -> Iterator[Docstring]:
    """The docstrings of a file, with those of classes and methods."""

    def under(node: Documented, name: str) -> Iterator[Docstring]:
        if text := ast.get_docstring(node):
            yield Docstring(name, path, getattr(node, "lineno", 1), text)
        for child in node.body:
            if isinstance(child, Documented):
                yield from under(child, f"{name}.{child.name}")

    yield from under(parsed(path), module_of(path))


def with_examples() -> list[Docstring]:
    """Every docstring of the sources with an example."""
    paths = (path for path in sorted(ROOT.glob("breccia-*/src/**/*.py")) if ">>> " in path.read_text(encoding="utf-8"))
    return [doc for path in paths for doc in docstrings(path) if ">>> " in doc.text]


# -- the tests -------------------------------------------------------------------------------------------------------


def skip_if_absent(error: ImportError) -> None:
    """Skip the test if the error says that a library is not installed; otherwise raise the error."""
    library = (error.name or "breccia").partition(".")[0]
    if library.startswith("breccia") or find_spec(library) is not None:
        raise error
    pytest.skip(f"not installed: {library}")


@pytest.mark.parametrize("name", MODULES)
def test_the_sources_have_the_public_functions_of_the_imported_module(name: str) -> None:
    functions: set[str] = set()
    try:
        module = import_module(name)
        functions = {f"{name}.{public}" for public in module.__all__ if inspect.isroutine(getattr(module, public))}
    except ImportError as e:
        skip_if_absent(e)
    assert functions and functions == {public for public in public_functions() if public.rpartition(".")[0] == name}


@pytest.mark.parametrize("doc", [pytest.param(doc, id=name) for name, doc in public_functions().items()])
def test_a_public_function_has_an_example(doc: Docstring) -> None:
    has = ">>> " in doc.text or doc.text.startswith("Deprecated")
    assert has, f"{doc.path}:{doc.line}: the docstring of {doc.name} has no example"


@pytest.mark.parametrize("doc", [pytest.param(doc, id=doc.name) for doc in with_examples()])
def test_an_example_prints_what_it_shows(doc: Docstring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_threads", None)  # an example sets it
    if doc.name.startswith("breccia_bridges.transformer_engine"):
        pytest.importorskip("torch")
        import_module("te_standins").put_in_place(monkeypatch)
    try:
        doc.run(breccia=breccia, np=np, tmp=tmp_path)
    except ImportError as e:
        skip_if_absent(e)
