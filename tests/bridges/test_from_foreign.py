"""`from_foreign` and `to_foreign`: other libraries' classes, found by the names that plug-ins declare. Plug-ins are on disk."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from fresh import printed

import breccia
from breccia import (
    DialectError,
    Foreign,
    PluginError,
    ScaledTensor,
    TensorPair,
    UnknownNameError,
    UnsupportedError,
    bytes_equal,
)
from breccia.dispatch import registry

#: A library that exists as a module only once the test imports it, and a plug-in that converts its tensors.
LIBRARY = """
__version__ = "3.1"
class Tensor:
    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales
class Special(Tensor):
    pass
class Other:
    pass
"""
MANIFEST = """
from breccia import Foreign, hookimpl
api = 1
@hookimpl
def breccia_foreign():
    return [Foreign("zenith", ("zenith:Tensor",), "zenith_bridge:read", {back}, requires=("zenith",), install="zenith-quant")]
"""
BRIDGE = """
from breccia import MXFP8BlockScaling, from_buffer
def read(tensor, scale_rule="rceil"):
    recipe = MXFP8BlockScaling(scale_rule=scale_rule)
    return from_buffer(tensor.codes, tensor.scales, recipe, recipe.layout)
def write(st, special=False):
    import zenith
    return (zenith.Special if special else zenith.Tensor)(st.data, st.scale)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a distribution `<name>-breccia` with that manifest, and modules beside it, for one test."""
    before, modules = registry.registry(), set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def installing(name: str, manifest: str, **beside: str) -> None:
        info = tmp_path / f"{name}_breccia-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-breccia\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(f"[breccia]\n{name} = {name}_manifest\n")
        for module, source in {f"{name}_manifest": manifest, **beside}.items():
            (tmp_path / f"{module}.py").write_text(source)
        importlib.invalidate_caches()
        registry.reload()

    yield installing
    monkeypatch.undo()
    for name in set(sys.modules) - modules:
        if name.startswith(("zenith", "zweith")):
            del sys.modules[name]
    importlib.invalidate_caches()
    breccia.targets.load.cache_clear()
    if registry.registry() is not before:
        registry.reload()


@pytest.fixture
def zenith(install: Callable[..., None]) -> ModuleType:
    install("zenith", MANIFEST.format(back="'zenith_bridge:write'"), zenith=LIBRARY, zenith_bridge=BRIDGE)
    return importlib.import_module("zenith")


def tensor(recipe: str = "mxfp8") -> ScaledTensor:
    return breccia.cast(np.linspace(-3, 3, 64 * 64, dtype=np.float32).reshape(64, 64), recipe)


def test_a_third_partys_class_converts_both_ways_by_its_name(zenith: ModuleType) -> None:
    st = tensor()
    theirs = breccia.to_foreign(st, "zenith")
    assert type(theirs) is zenith.Tensor and theirs.codes is st.data
    assert bytes_equal(breccia.from_foreign(theirs), st)


def test_options_reach_the_bridge_and_subclasses_count(zenith: ModuleType) -> None:
    theirs = breccia.to_foreign(tensor(), "zenith", special=True)
    assert type(theirs) is zenith.Special
    assert breccia.from_foreign(theirs, scale_rule="floor").recipe == breccia.MXFP8BlockScaling(scale_rule="floor")


def test_a_class_of_a_module_below_the_declared_one_counts_and_of_one_beside_it_does_not(zenith: ModuleType) -> None:
    st = tensor()
    below = type("Tensor", (SimpleNamespace,), {"__module__": "zenith.deep.inside"})
    beside = type("Tensor", (SimpleNamespace,), {"__module__": "zenith2"})
    assert bytes_equal(breccia.from_foreign(below(codes=st.data, scales=st.scale)), st)
    with pytest.raises(UnsupportedError, match=r"converts zenith2\.Tensor\. Declared: .*zenith:Tensor \(zenith\)"):
        breccia.from_foreign(beside(codes=st.data, scales=st.scale))


def test_the_library_is_not_imported_by_finding_the_plug_in(install: Callable[..., None]) -> None:
    install("zenith", MANIFEST.format(back="None"), zenith="raise RuntimeError('imported')", zenith_bridge=BRIDGE)
    assert "zenith" in registry.registry().foreign
    with pytest.raises(UnsupportedError, match=r"converts builtins\.int"):
        breccia.from_foreign(3)
    assert "zenith" not in sys.modules


def test_an_unknown_class_is_named_with_its_version(zenith: ModuleType) -> None:
    with pytest.raises(UnsupportedError, match=r"converts zenith\.Other \(zenith 3\.1\)\. Declared: .*breccia\.from_buffer"):
        breccia.from_foreign(zenith.Other())


def test_a_scaled_tensor_and_what_contains_one_are_returned() -> None:
    st = tensor()
    assert breccia.from_foreign(st) is st
    assert breccia.from_foreign(SimpleNamespace(__scaled_tensor__=st)) is st


def test_an_unknown_library_is_an_error_with_a_suggestion(zenith: ModuleType) -> None:
    with pytest.raises(UnknownNameError, match=r"the library 'zenit'; did you mean 'zenith'"):
        breccia.to_foreign(tensor(), "zenit")


def test_a_library_without_a_way_back_says_so(install: Callable[..., None]) -> None:
    install("zenith", MANIFEST.format(back="None"), zenith=LIBRARY, zenith_bridge=BRIDGE)
    with pytest.raises(UnsupportedError, match="reads tensors of zenith and has no way back"):
        breccia.to_foreign(tensor(), "zenith")


def test_a_missing_library_says_what_to_install(install: Callable[..., None]) -> None:
    install("zenith", MANIFEST.format(back="'zenith_bridge:write'"), zenith_bridge=BRIDGE)
    with pytest.raises(ImportError, match=r"needs zenith, which is not installed: pip install zenith-quant"):
        breccia.to_foreign(tensor(), "zenith")


def test_two_plug_ins_of_one_class_are_an_error_that_names_both(install: Callable[..., None], zenith: ModuleType) -> None:
    install("zweith", MANIFEST.format(back="None").replace('Foreign("zenith"', 'Foreign("zweith"'))
    with pytest.raises(UnsupportedError, match=r"zenith\.Tensor \(zenith 3\.1\) is declared by zenith and zweith; block one"):
        breccia.from_foreign(zenith.Tensor(None, None))


def test_the_deeper_of_two_declared_modules_wins(install: Callable[..., None], zenith: ModuleType) -> None:
    manifest = MANIFEST.format(back="None").replace('Foreign("zenith"', 'Foreign("deep"')
    install("zweith", manifest.replace("zenith:Tensor", "zenith.deep:Tensor").replace(":read", ":write"))
    kind = type("Tensor", (SimpleNamespace,), {"__module__": "zenith.deep.inside"})
    st = tensor()
    assert type(breccia.from_foreign(kind(data=st.data, scale=st.scale))) is zenith.Tensor, "the other plug-in's function"


def test_breccia_plugins_lists_them(zenith: ModuleType, tmp_path: Path) -> None:
    found = {p.name: p for p in breccia.plugins()}
    assert found["zenith"].declares == ("foreign:zenith",) and found["zenith"].hooks == ("breccia_foreign",)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from breccia.cli.main import run; run(['plugins', '--json'])"
    listed = {p["name"]: p for p in json.loads(printed(code))}
    assert listed["zenith"]["declares"] == ["foreign:zenith"]


@pytest.mark.parametrize(
    ("declared", "message"),
    (
        (Foreign("acme", (), "acme:f"), r"foreign library 'acme': classes names at least one class"),
        (Foreign("acme", ("acme",), "acme:f"), r"classes: an object reference is written"),
        (Foreign("acme", ("acme:T",), "f"), r"from_foreign: an object reference is written"),
        (Foreign("acme", ("acme:T",), "acme:f", "f"), r"to_foreign: an object reference is written"),
        (Foreign("acme", ("acme:T",), "acme:f", requires=("acme",)), r"requires is a tuple of modules, and install"),
        (Foreign("acme", ["acme:T"], "acme:f"), r"classes must be tuple"),  # type: ignore[arg-type]
    ),
)
def test_invalid_declarations_are_named(declared: Foreign, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        declared.check()


def test_errors_of_a_bridge_pass_through(zenith: ModuleType) -> None:
    st = tensor()
    with pytest.raises(breccia.LayoutError):
        breccia.from_foreign(zenith.Tensor(st.data, st.scale[:3]))
    assert issubclass(DialectError, breccia.BrecciaError)


# ------------------------------------------------------------------------------------------------ pairs


def test_cast_pair_returns_a_named_pair_that_unpacks_as_a_tuple() -> None:
    x = np.linspace(-3, 3, 64 * 64, dtype=np.float32).reshape(64, 64)
    pair = breccia.cast_pair(x, "mxfp8")
    rows, columns = pair
    assert type(pair) is TensorPair and pair.rowwise is rows and pair.columnwise is columns
    assert bytes_equal(rows, breccia.cast(x, "mxfp8")) and bytes_equal(columns, breccia.cast(x, "mxfp8", axis=-2))


@pytest.mark.parametrize("framework", ("torch", "jax"))
def test_a_pair_is_a_tree_of_both_tensors(framework: str) -> None:
    module = pytest.importorskip(framework)
    x = np.linspace(-3, 3, 64 * 64, dtype=np.float32).reshape(64, 64)
    array = module.from_numpy(x) if framework == "torch" else module.numpy.asarray(x)
    pair = breccia.cast_pair(array, "mxfp8")
    if framework == "torch":
        from torch.utils import _pytree

        leaves, spec = _pytree.tree_flatten(pair)
        again = _pytree.tree_unflatten(leaves, spec)
    else:
        leaves, spec = module.tree_util.tree_flatten(pair)
        again = module.tree_util.tree_unflatten(spec, leaves)
    assert type(again) is TensorPair
    assert all(bytes_equal(a, b) for a, b in zip(again, pair, strict=True))


@pytest.mark.slow
def test_a_compiled_function_returns_a_pair() -> None:
    torch = pytest.importorskip("torch")
    x = torch.linspace(-3, 3, 64 * 64).reshape(64, 64)

    @torch.compile(fullgraph=True, backend="eager")
    def both(x: torch.Tensor) -> torch.Tensor:
        pair = breccia.cast_pair(x, breccia.MXFP8BlockScaling())
        return breccia.dequantize(pair.rowwise) + breccia.dequantize(pair.columnwise)

    rows, columns = breccia.cast_pair(x, "mxfp8")
    assert torch.equal(both(x), breccia.dequantize(rows) + breccia.dequantize(columns))


@dataclass
class Unrelated:
    """A class that no plug-in declares."""


def test_without_breccia_bridges_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRECCIA_BLOCK", "bridges")
    registry.reload()
    try:
        with pytest.raises(UnsupportedError, match="breccia's own come with breccia-bridges: pip install"):
            breccia.from_foreign(Unrelated())
    finally:
        monkeypatch.undo()
        registry.reload()
