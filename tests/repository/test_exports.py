"""Lazy modules: the stub, `__all__`, `dir` and `getattr` agree on one set of names."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fresh import printed, ran
from paths import ROOT, TESTS

import breccia
import breccia.backend
import breccia.bridges
import breccia.internal
import breccia.kernels.triton
import breccia.testing
from breccia import Bridge, Kernel, PluginWarning, hookimpl
from breccia.dispatch import builtin
from breccia.dispatch.registry import Plugin, Registry
from breccia.siblings import install

#: Modules that define nothing and re-export names of others.
FACADES = [breccia, breccia.backend, breccia.internal]
LAZY = [*FACADES, breccia.kernels, breccia.kernels.triton, breccia.testing]


def stub(module: ModuleType) -> list[ast.stmt]:
    return ast.parse(Path(module.__file__ or "").with_suffix(".pyi").read_text(encoding="utf-8")).body


def stubbed(module: ModuleType) -> set[str]:
    """Names that a stub exports to type checkers: `import x as x`, functions and annotated names, without the module's own."""
    names: set[str] = set()
    for node in stub(module):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names - {"__getattr__", "__all__"}


def fake(*plugins: tuple[Plugin, dict[str, Any]]) -> Callable[[], Registry]:
    """A registry with only core and these manifests."""

    def manifest(contents: dict[str, Any]) -> ModuleType:
        module = ModuleType("manifest")
        module.__dict__.update({"api": 1} | contents)
        return module

    core = (Plugin("core", "breccia-core", breccia.__version__, builtin.__name__), lambda: builtin)
    found = [core, *((plugin, lambda c=contents: manifest(c)) for plugin, contents in plugins)]
    registry = Registry(found, {})
    return lambda: registry


def declares(hook: str, *values: Any) -> dict[str, Any]:
    def implementation() -> tuple[Any, ...]:
        return values

    return {hook: hookimpl(implementation)}


# -- one set of names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", LAZY, ids=lambda m: m.__name__)
def test_stub_and_all_have_the_same_names(module: ModuleType) -> None:
    assert stubbed(module) == set(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("module", FACADES, ids=lambda m: m.__name__)
def test_dir_of_a_facade_equals_all(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)


@pytest.mark.together
def test_dir_of_the_bridges_lists_what_plug_ins_declare() -> None:
    declared = {b.name: b.plugin for b in breccia.dispatch.registry.registry().bridges.values()}
    assert dir(breccia.bridges) == sorted(declared)
    assert set(breccia.bridges.__all__) <= declared.keys()
    assert {name for name, plugin in declared.items() if plugin == "bridges"} == stubbed(breccia.bridges)


def test_dir_of_the_triton_kernels_lists_all_and_the_importable_kernels() -> None:
    expected = {"TRITON_AVAILABLE"}
    if breccia.kernels.triton.TRITON_AVAILABLE:
        declared = [k for k in breccia.dispatch.registry.registry().table.kernels if k.plugin == "triton"]
        expected |= {k.target.rpartition(":")[2] for k in declared if k.framework == "torch"}
        expected |= set(import_module("breccia_triton").__all__)
    assert dir(breccia.kernels.triton) == sorted(expected)


@pytest.mark.parametrize("module", FACADES, ids=lambda m: m.__name__)
def test_stub_imports_each_name_from_the_module_that_defines_it(module: ModuleType) -> None:
    for node in stub(module):
        if isinstance(node, ast.ImportFrom):
            home = import_module(f".{node.module}" if node.module else ".", "breccia")
            for alias in node.names:
                assert getattr(module, alias.name) is getattr(home, alias.name), alias.name


@pytest.mark.long
@pytest.mark.parametrize("module", ["backend", "internal"])
def test_each_name_for_other_distributions_resolves_in_a_fresh_process(module: str) -> None:
    """A module that has not been imported yet is not an attribute of its package."""
    script = (
        f"import sys\nfrom breccia import {module} as facade\n"
        "for name in facade.__all__:\n"
        "    for loaded in [m for m in sys.modules if m.startswith('breccia')]: del sys.modules[loaded]\n"
        f"    from breccia import {module} as facade\n    assert getattr(facade, name) is not None, name"
    )
    printed(script)


def test_the_modules_for_other_distributions_share_no_name() -> None:
    """One place per name. `backend` still gives the names that it had in earlier versions, but does not list them."""
    names = [name for module in FACADES for name in module.__all__]
    assert len(names) == len(set(names))
    assert breccia.backend.ScaledTensor is breccia.ScaledTensor and breccia.backend.fragments is breccia.internal.fragments
    assert breccia.backend.Stored is breccia.InStorage


def test_plug_ins_need_no_internal_names() -> None:
    """The plug-ins of the tests, each written as a third party would, import `breccia` and `breccia.backend` alone."""
    for path in (TESTS / "third_party").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "breccia":
                known = {"breccia": breccia, "breccia.backend": breccia.backend, "breccia.bridges": breccia.bridges}
                assert node.module in known or node.module.startswith("breccia.testing"), f"{path}:{node.lineno}"
                for alias in node.names if node.module in known else ():
                    assert alias.name in known[node.module].__all__, f"{path}:{node.lineno} imports {alias.name}"


def test_importing_a_submodule_replaces_no_public_name() -> None:
    folder = Path(breccia.__file__ or "").parent
    submodules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    public = {name for name in breccia.__all__ if not inspect.ismodule(getattr(breccia, name))}
    assert not public & submodules


@pytest.mark.together
@pytest.mark.long
def test_stubs_are_what_their_script_writes() -> None:
    """`python docs/scripts/stubs.py` writes them: names and modules of the tables, and the signatures of the bridges."""
    done = subprocess.run([sys.executable, "docs/scripts/stubs.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


# -- missing names and distributions ---------------------------------------------------------------------------------


def test_an_unknown_attribute_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'breccia' has no attribute 'casts'; did you mean 'cast'\?$"):
        breccia.casts  # noqa: B018
    assert not hasattr(breccia, "_private")
    with pytest.raises(AttributeError, match=r"^module 'breccia\.backend' has no attribute 'casts'"):
        breccia.backend.casts  # noqa: B018


def test_an_unknown_bridge_is_an_attribute_error_with_a_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"no bridge 'load_safetensor' in any .*; did you mean 'load_safetensors'\?"):
        breccia.bridges.load_safetensor  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'breccia.bridges' has no attribute '_private'$"):
        breccia.bridges._private  # noqa: B018


def test_a_bridge_of_a_missing_distribution_names_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breccia.bridges, "registry", fake())
    with pytest.raises(ImportError) as e:
        breccia.bridges.save_safetensors  # noqa: B018
    assert str(e.value) == (
        "no installed plug-in declares breccia.bridges.save_safetensors; breccia's own bridges come with breccia-bridges: "
        f"{install('breccia-bridges')}."
    )
    assert e.value.name == "save_safetensors"


def test_a_bridge_of_a_blocked_distribution_says_that_it_is_blocked(tmp_path: Path) -> None:
    code = "import breccia\ntry: breccia.bridges.load_safetensors\nexcept ImportError as e: print(e)"
    assert printed(code, cwd=tmp_path, BRECCIA_BLOCK="bridges") == (
        "no installed plug-in declares breccia.bridges.load_safetensors; breccia's own bridges come with breccia-bridges: "
        f"{install('breccia-bridges')}. "
        "It is installed but blocked: named in BRECCIA_BLOCK.\n"
    )


def test_a_bridge_of_a_broken_distribution_says_why_it_was_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(PluginWarning, match="set aside"):
        broken = fake((Plugin("bridges", "breccia-bridges", "9.0", "manifest"), {"api": 99}))
    monkeypatch.setattr(breccia.bridges, "registry", broken)
    with pytest.raises(
        ImportError, match=r"It is installed but set aside: it is written for api 99, .*; upgrade breccia-core\.$"
    ):
        breccia.bridges.save_safetensors  # noqa: B018


def test_core_gets_the_names_of_bridges_only_from_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = Bridge("to_acme", "json:dumps")
    plugins = (Plugin("bridges", "breccia-bridges", "0.1", "manifest"), declares("breccia_bridges", bridge))
    monkeypatch.setattr(breccia.bridges, "registry", fake(plugins))
    assert breccia.bridges.__all__ == dir(breccia.bridges) == ["to_acme"]
    with pytest.raises(AttributeError, match=r"^no bridge 'save_safetensors' in any installed plug-in. Known: to_acme"):
        breccia.bridges.save_safetensors  # noqa: B018


def test_import_star_takes_the_bridges_whose_requirements_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    bridges = (Bridge("to_acme", "json:dumps"), Bridge("from_acme", "acme:f", requires=("acme_missing",), install="acme"))
    monkeypatch.setattr(
        breccia.bridges, "registry", fake((Plugin("acme", "acme", "0.1", "manifest"), declares("breccia_bridges", *bridges)))
    )
    names: dict[str, Any] = {}
    exec("from breccia.bridges import *", names)
    assert names.keys() - {"__builtins__"} == {"to_acme"}
    assert dir(breccia.bridges) == ["from_acme", "to_acme"], "dir lists all"


def test_import_star_works_without_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = breccia.targets.installed
    monkeypatch.setattr(breccia.targets, "installed", lambda module: module != "mlx" and installed(module))
    of_mlx = {bridge.name for bridge in breccia.dispatch.registry.registry().bridges.values() if "mlx" in bridge.requires}
    assert of_mlx == {"from_mlx", "to_mlx", "from_mlx_layer", "to_mlx_layer"}
    assert not of_mlx & set(breccia.bridges.__all__) and of_mlx <= set(dir(breccia.bridges))
    exec("from breccia.bridges import *", {})
    with pytest.raises(
        ImportError, match=r"^breccia\.bridges\.to_mlx needs mlx, which is not installed: pip install breccia-mlx"
    ):
        breccia.bridges.to_mlx  # noqa: B018


@pytest.mark.parametrize("module", ["torchao_missing", "torchao_missing.quantization"])
def test_a_bridge_to_a_missing_library_names_the_library(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    bridge = Bridge("to_torchao", "json:dumps", requires=("json", module), install="'breccia-bridges[torchao]'")
    registry = fake((Plugin("bridges", "breccia-bridges", "0.2", "manifest"), declares("breccia_bridges", bridge)))
    monkeypatch.setattr(breccia.bridges, "registry", registry)
    with pytest.raises(ImportError) as e:
        breccia.bridges.to_torchao  # noqa: B018
    assert str(e.value) == (
        f"breccia.bridges.to_torchao needs {module}, which is not installed: pip install 'breccia-bridges[torchao]'."
    )
    assert e.value.name == module


def test_a_bridge_of_any_plug_in_resolves_to_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    bridge = Bridge("to_acme", "json:dumps", requires=("json",), install="acme")
    registry = fake((Plugin("acme", "acme-breccia", "1", "manifest"), declares("breccia_bridges", bridge)))
    monkeypatch.setattr(breccia.bridges, "registry", registry)
    assert breccia.bridges.to_acme is json.dumps
    assert "to_acme" in dir(breccia.bridges)


def test_a_bridge_looked_up_on_the_package_says_where_it_is() -> None:
    wanted = "module 'breccia' has no attribute 'load_safetensors'; it is breccia.bridges.load_safetensors"
    with pytest.raises(AttributeError, match=f"^{wanted}$"):
        breccia.load_safetensors  # noqa: B018


def test_a_manifest_that_misspells_a_name_of_the_package_gets_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core cannot look up bridges of that name while the registry is being built."""
    monkeypatch.setattr(breccia.dispatch.registry, "_building", True)
    monkeypatch.setattr("breccia.arrays.frameworks.current", None)
    with pytest.raises(AttributeError, match=r"no attribute 'Bridg'; did you mean 'Bridge'"):
        breccia.Bridg  # noqa: B018


# -- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", breccia.kernels.__all__)
def test_kernel_modules_are_attributes_after_importing_breccia_alone(name: str) -> None:
    script = f"import breccia; print(breccia.kernels.{name}.__name__, dir(breccia.kernels))"
    done = ran(script)
    assert (done.stdout, done.stderr) == (f"breccia.kernels.{name} {breccia.kernels.__all__}\n", "")


def test_kernels_have_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="module 'breccia.kernels' has no attribute 'pallas'"):
        breccia.kernels.pallas  # noqa: B018


# -- kernels.triton --------------------------------------------------------------------------------------------------

TRITON = Plugin("triton", "breccia-triton", "0.2", "manifest")
BLOCK = Kernel("cast", "torch", "json:dumps", "triton.cast", device="cuda")
FOR_JAX = Kernel("cast", "jax", "pickle:dumps", "triton.jax.cast", device="cuda")


def test_triton_is_available_if_it_and_torch_can_be_imported() -> None:
    available = breccia.kernels.triton.TRITON_AVAILABLE
    assert isinstance(available, bool)
    assert available is (find_spec("triton") is not None and find_spec("torch") is not None)


def test_kernels_without_breccia_triton_name_the_missing_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breccia.kernels.triton, "registry", fake())
    assert breccia.kernels.triton.TRITON_AVAILABLE is False
    with pytest.raises(ImportError) as e:
        breccia.kernels.triton.dumps  # noqa: B018
    assert str(e.value) == f"breccia.kernels.triton.dumps comes with breccia-triton: {install('breccia-triton')}."


def test_kernels_without_triton_name_the_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breccia.kernels.triton, "registry", fake((TRITON, declares("breccia_kernels", BLOCK))))
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]
    assert breccia.kernels.triton.TRITON_AVAILABLE is False
    assert dir(breccia.kernels.triton) == sorted(breccia.kernels.triton.__all__)
    with pytest.raises(
        ImportError, match=r"^breccia.kernels.triton.dumps needs triton, which is not installed: pip install triton "
    ):
        breccia.kernels.triton.dumps  # noqa: B018


@pytest.mark.together
def test_what_breccia_triton_exports_is_in_the_facade_of_core() -> None:
    if not breccia.kernels.triton.TRITON_AVAILABLE:
        pytest.skip("needs torch and triton")
    package = import_module("breccia_triton")
    assert stubbed(package) == set(package.__all__)
    assert set(package.__all__) == {"configure"}
    for name in package.__all__:
        assert getattr(breccia.kernels.triton, name) is getattr(package, name)
    with pytest.raises(AttributeError, match=r"^module 'breccia_triton' has no attribute 'configur'; it has configure"):
        package.configur  # noqa: B018


def test_kernels_of_breccia_triton_for_torch_are_found_by_function_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.setattr(breccia.kernels.triton, "registry", fake((TRITON, declares("breccia_kernels", BLOCK, FOR_JAX))))
    for name in ("torch", "triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert breccia.kernels.triton.TRITON_AVAILABLE is True
    assert breccia.kernels.triton.dumps is json.dumps
    assert dir(breccia.kernels.triton) == ["TRITON_AVAILABLE", "configure", "dumps"]
    with pytest.raises(AttributeError, match=r"^breccia-triton declares no kernel function 'dump'; did you mean 'dumps'\?"):
        breccia.kernels.triton.dump  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'breccia.kernels.triton' has no attribute '_x'$"):
        breccia.kernels.triton._x  # noqa: B018
