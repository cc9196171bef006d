"""Import rules between the distributions and inside core, checked on the syntax trees, imports in functions included."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

import breccia

CORE = "breccia"

#: The distribution without plug-in; all but its adapters import the standard library alone.
VECTORS = "breccia-vectors"
#: Distribution -> (its import package, the other breccia packages it may import).
PACKAGES = {
    "breccia-core": (CORE, set[str]()),
    "breccia-torch": ("breccia_torch", {CORE}),
    "breccia-jax": ("breccia_jax", {CORE}),
    "breccia-mlx": ("breccia_mlx", {CORE}),
    "breccia-native": ("breccia_native", {CORE}),
    "breccia-triton": ("breccia_triton", {CORE, "breccia_torch"}),
    "breccia-bridges": ("breccia_bridges", {CORE}),
    VECTORS: ("breccia_vectors", set[str]()),
}

#: Package -> (third-party packages it may import at the top of a module, those it may import only inside functions).
TERMINAL = {"typer", "rich", "packaging"}
REPORT = {"jinja2", "markupsafe"}
NEIGHBOURS = {
    "torch", "jax", "mlx", "torchao", "transformer_engine", "compressed_tensors", "ml_dtypes", "qwix", "gguf",
    "bitsandbytes", "transformers",
}  # fmt: skip
FOREIGN: dict[str, tuple[set[str], set[str]]] = {
    "breccia_torch": ({"torch", "numpy"}, {"ml_dtypes", "accelerate", "safetensors"}),
    "breccia_jax": ({"jax", "numpy", "ml_dtypes"}, set()),
    "breccia_mlx": ({"mlx", "numpy"}, {"ml_dtypes"}),
    "breccia_native": ({"numpy"}, set()),
    "breccia_vectors": (set(), set()),
    "breccia_triton": ({"triton", "torch", "jax", "numpy", "platformdirs"}, {"jax_triton"}),
    "breccia_bridges": (
        {"numpy", "safetensors", *TERMINAL},
        NEIGHBOURS | REPORT | {"re2", "ray", "fsspec", "platformdirs", "xxhash"},
    ),
}
#: Libraries that the adapters of breccia_vectors run.
ADAPTED = {
    "torch", "torchao", "compressed_tensors", "modelopt", "mlx", "gguf", "qwix", "jax", "ml_dtypes", "bitsandbytes", "optimum",
}  # fmt: skip
#: Modules of breccia_jax that are for another library, and import it at the top.
OF_LIBRARIES = {
    **dict.fromkeys(("flax", "flax_layers", "flax_state", "flax_training", "flax_trees"), "flax"),
    **dict.fromkeys(("equinox", "equinox_training", "equinox_trees", "serialised"), "equinox"),
}
#: Modules of breccia_bridges that import torch at the top: they are loaded for torch tensors only.
OF_TORCH = {
    "torchao", "torchao_codes", "torchao_reading", "torchao_writing",
    "transformer_engine", "transformer_engine_reading", "transformer_engine_writing",
    "bitsandbytes", "compressed_tensors",
}  # fmt: skip
#: The package of breccia_torch that alone may import transformers, and its module for peft; that which alone may import vLLM.
HF, LORA, VLLM = "hf", "hf.lora", "vllm"
#: The same for parts of core; the rest of core imports pluggy only. NumPy is for its backend and the conformance kit.
FOREIGN_IN_CORE: dict[str, tuple[set[str], set[str]]] = {
    "arrays.ops": ({"numpy"}, {"ml_dtypes"}),
    "kernels": ({"numpy"}, set()),
    "testing": ({"numpy", "pytest", "hypothesis"}, {"ml_dtypes"}),
    "cli.bench": ({"numpy"}, set()),
    "cli": (TERMINAL, set()),
    "__main__": (set(), TERMINAL),
    "dispatch.hookspecs": ({"pluggy"}, set()),
    "yaml_text": ({"yaml"}, set()),
    "dispatch.registry": ({"pluggy"}, set()),
}

#: Modules that declare what a manifest lists, and import no more than it does.
DECLARATIONS = {"breccia-bridges": ("recipes", "dialects.declared")}

#: Layers of core: a module never imports from a later entry. A folder stands for its modules; they may import each other,
#: without cycles.
ORDER = [
    {"", "backend", "internal", "lazy_names"},  # names for users and other distributions: lazy, they import nothing
    {"errors", "locks"},
    {"siblings", "targets", "declared", "error_metrics", "json_text", "yaml_text"},
    {"codec_checks", "fp32", "recipe_fields", "tracing"},
    {"codec_base", "codecs", "rotations", "rules", "options"},
    {"formats", "forms"},
    {"layouts", "recipe_bases", "recipes"},
    {"specs", "operations", "policies", "dialects", "training"},
    {"arrays"},
    {"tensors"},
    {"dispatch"},
    {"kernels"},
    {"calling"},
    {"api", "bridges", "foreign", "models"},
    {"storing"},
    {"cli"},
    {"__main__"},
]
#: The oracle checks the generic algorithm, so it may read declarations but must not share any arithmetic.
ORACLE = {
    "testing.oracle",
    "testing.oracle_numbers",
    "testing.oracle_records",
    "testing.oracle_rotation",
    "testing.oracle_scales",
    "testing.oracle_search",
}
ORACLE_READS = ORACLE | {"", "errors", "codecs", "rotations", "rules", "formats", "layouts", "recipes"}


@dataclass(frozen=True)
class Import:
    """One import: the dotted module, or module and name for `from` imports. `lazy`: it is inside a function."""

    name: str
    line: int
    lazy: bool

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]


def imports(source: str, package: str) -> list[Import]:
    """Run-time imports of a module of `package`: includes `import_module("...")`, excludes `if TYPE_CHECKING:`."""
    return list(_imports(ast.parse(source).body, package, lazy=False))


def _imports(nodes: list[ast.AST] | list[ast.stmt], package: str, lazy: bool) -> Iterator[Import]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno, lazy) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*parents, *([module] if module else [])])
                yield from (Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in names)
            case ast.Call(func=ast.Name(id=f) | ast.Attribute(attr=f), args=[ast.Constant(value=str(name)), *_]) if f in (
                "import_module",
                "__import__",
            ):
                yield Import(name, node.lineno, lazy)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _imports(node.orelse, package, lazy)
            case _:
                inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from _imports(list(ast.iter_child_nodes(node)), package, inside)


@cache
def modules(distribution: str) -> dict[str, Path]:
    """Dotted name inside the package -> file. The package itself has the name ""."""
    folder = ROOT / distribution / "src" / PACKAGES[distribution][0]
    names = {path: ".".join(path.relative_to(folder).with_suffix("").parts) for path in sorted(folder.rglob("*.py"))}
    return {name.removesuffix("__init__").removesuffix("."): path for path, name in names.items()}


@cache
def read(distribution: str, name: str) -> list[Import]:
    package, path = PACKAGES[distribution][0], modules(distribution)[name]
    dotted = f"{package}.{name}" if name else package
    return imports(path.read_text(encoding="utf-8"), dotted if path.name == "__init__.py" else dotted.rpartition(".")[0])


def allowed(distribution: str, name: str) -> tuple[set[str], set[str]]:
    """(top-level packages a module may import at its top, those it may import inside functions)."""
    package, ours = PACKAGES[distribution]
    if package == CORE:
        match = (v for k, v in FOREIGN_IN_CORE.items() if name == k or name.startswith(f"{k}."))
        top, lazy = next(match, (set[str](), set[str]()))
    else:
        top, lazy = FOREIGN[package]
        if distribution == "breccia-torch" and name.partition(".")[0] == HF:
            top = top | {"transformers", "safetensors"} | ({"peft"} if name == LORA else set())
        if distribution == "breccia-torch" and name.partition(".")[0] == VLLM:
            top = top | {"vllm"}
        if distribution == "breccia-jax" and name in OF_LIBRARIES:
            top = top | {OF_LIBRARIES[name]}
        if distribution == "breccia-bridges" and name in OF_TORCH:
            top = top | {"torch"}
        if distribution == VECTORS and name.startswith("adapters."):
            top, lazy = {"numpy"}, ADAPTED
    return {package, *ours, *top}, {package, *ours, *top, *lazy}


def place(name: str) -> int | None:
    """Position in ORDER of a core module or of its folder; None without one."""
    return next((i for i, group in enumerate(ORDER) if name in group or name.partition(".")[0] in group), None)


def module_of(found: Import, package: str, known: dict[str, Path]) -> str:
    """The module of `package` that an import loads: `errors` for `breccia.errors.suggestion`."""
    name = found.name.removeprefix(package).removeprefix(".")
    while name not in known:
        name = name.rpartition(".")[0]
    return name


CORE_MODULES = modules("breccia-core")
ALL = [(distribution, name) for distribution in PACKAGES for name in modules(distribution)]


def test_every_form_of_import_is_found() -> None:
    source = """
import a.b, c
from d import e
from . import f
from .. import g
from .h import i
if TYPE_CHECKING:
    import hidden
else:
    import shown
try:
    import j
except ImportError:
    from importlib import import_module
    import_module("k.l")
class C:
    import m
    def method(self):
        import n
        __import__("o")
"""
    found = {(x.name, x.lazy) for x in imports(source, "p.q")}
    top = {"a.b", "c", "d.e", "p.q.f", "p.g", "p.q.h.i", "shown", "j", "importlib.import_module", "k.l", "m"}
    assert found == {(name, False) for name in top} | {("n", True), ("o", True)}


def offences(of: Iterable[tuple[str, str]], allows: Callable[[str, str, Import], bool]) -> list[str]:
    """The imports of these modules that a rule does not allow, each with its place."""
    found = ((distribution, name, x) for distribution, name in of for x in read(distribution, name))
    return [f"{modules(d)[name].relative_to(ROOT)}:{x.line} imports {x.name}" for d, name, x in found if not allows(d, name, x)]


def is_standard(found: Import) -> bool:
    return found.root in sys.stdlib_module_names


def test_a_module_imports_only_allowed_packages() -> None:
    assert not offences(ALL, lambda d, name, x: is_standard(x) or x.root in allowed(d, name)[x.lazy])


def test_a_manifest_imports_only_breccia_the_standard_library_and_its_declarations() -> None:
    manifests = [(d, "dispatch.builtin" if d == "breccia-core" else "plugin") for d in PACKAGES if d != VECTORS]
    manifests += [(d, name) for d, names in DECLARATIONS.items() for name in names]
    declared = {f"{PACKAGES[d][0]}.{name}" for d, names in DECLARATIONS.items() for name in names}

    def is_allowed(d: str, name: str, x: Import) -> bool:
        return is_standard(x) or x.root == CORE or x.name.rpartition(".")[0] in declared

    assert not offences(manifests, is_allowed)


@pytest.mark.parametrize("distribution", sorted(PACKAGES.keys() - {"breccia-core", VECTORS}))
def test_the_package_of_a_manifest_runs_nothing_on_import(distribution: str) -> None:
    """Importing the manifest runs `__init__.py` first, in every process: it may only define functions, which import lazily."""
    body = ast.parse(modules(distribution)[""].read_text(encoding="utf-8")).body
    assert ast.get_docstring(ast.Module(body, []))
    for node in body[1:]:
        ours = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        assert ours or future or isinstance(node, ast.FunctionDef), ast.unparse(node)


def test_a_core_module_imports_no_later_layer() -> None:
    """The conformance kit, `testing`, has no layer: it imports what it tests, and no module imports it."""
    ranked = [name for name in CORE_MODULES if not name.startswith("testing")]
    assert not [name for name in ranked if place(name) is None], "give them a place in ORDER"

    def is_earlier(distribution: str, name: str, found: Import) -> bool:
        other, own = place(module_of(found, CORE, CORE_MODULES)), place(name)
        return other is not None and own is not None and other <= own

    assert not offences(
        [("breccia-core", name) for name in ranked], lambda d, name, x: x.root != CORE or is_earlier(d, name, x)
    )


def test_other_distributions_import_only_public_names_and_the_facades_of_core() -> None:
    def is_public(name: str) -> bool:
        return name == "" or name in breccia.__all__ or name.startswith(("backend.", "internal."))

    others = [(d, name) for d, name in ALL if d != "breccia-core"]
    assert not offences(others, lambda d, name, x: x.root != CORE or is_public(x.name.removeprefix(CORE).removeprefix(".")))


def test_only_the_agreement_command_imports_the_adapters_of_other_libraries() -> None:
    loading = {
        (distribution, name)
        for distribution, name in ALL
        for found in read(distribution, name)
        if found.name.startswith("breccia_bridges.agreement")
    }
    assert loading and all(d == "breccia-bridges" and name.startswith("agreement") for d, name in loading)


def test_the_order_lists_modules_that_exist() -> None:
    assert set().union(*ORDER) <= set(CORE_MODULES)


def test_the_oracle_shares_no_arithmetic_with_the_generic_algorithm() -> None:
    oracle = [("breccia-core", name) for name in ORACLE]
    assert not offences(oracle, lambda d, name, x: x.root != CORE or module_of(x, CORE, CORE_MODULES) in ORACLE_READS)


@pytest.mark.parametrize("distribution", PACKAGES)
def test_there_are_no_import_cycles(distribution: str) -> None:
    package, known = PACKAGES[distribution][0], modules(distribution)
    graph: dict[str, set[str]] = {}
    for name in known:
        own = (x for x in read(distribution, name) if x.root == package)
        graph[name] = {module_of(x, package, known) for x in own} - {"", name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(f"{' -> '.join(e.args[1])}")


# -- metadata of the distributions-----------------------------------------------------------------------------------


def project(distribution: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / distribution / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def siblings(distribution: str) -> set[str]:
    return {d.partition("~=")[0].partition("[")[0] for d in project(distribution)["dependencies"] if d.startswith("breccia-")}


def test_all_distributions_are_listed() -> None:
    assert {path.parent.name for path in ROOT.glob("breccia-*/pyproject.toml")} == set(PACKAGES)


@pytest.mark.parametrize("distribution", PACKAGES)
def test_every_distribution_has_types_and_the_version_and_license_of_core(distribution: str) -> None:
    assert (modules(distribution)[""].parent / "py.typed").is_file()
    assert (ROOT / distribution / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    metadata = project(distribution)
    assert (metadata["version"], metadata["license"]) == (breccia.__version__, "Apache-2.0")


@pytest.mark.parametrize("distribution", PACKAGES)
def test_breccia_dependencies_are_the_imported_distributions_pinned_to_this_minor_version(distribution: str) -> None:
    metadata = project(distribution)
    extras: dict[str, list[str]] = metadata.get("optional-dependencies", {})
    wanted = [*metadata["dependencies"], *(d for extra in extras.values() for d in extra)]
    itself = f"{distribution}["  # an extra that combines other extras of the distribution
    ours = [d for d in wanted if d.startswith("breccia-") and not d.startswith(itself)]
    pin = "~=" + ".".join(breccia.__version__.split(".")[:2]) + ".0"
    assert all(d.endswith(pin) and d.removesuffix(pin).partition("[")[0] in PACKAGES for d in ours), ours
    assert bool(ours) == (distribution != VECTORS)
    by_package = {p: d for d, (p, _) in PACKAGES.items()}
    direct = siblings(distribution)
    reached = direct.union(*(siblings(other) for other in direct))
    assert reached == {by_package[other] for other in PACKAGES[distribution][1]}
