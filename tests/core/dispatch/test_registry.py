"""The registry: what a plug-in may declare, and isolation of broken ones. Plug-ins here are distributions on disk."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fresh import printed, ran
from marks import long_but

import breccia
from breccia import PluginError, PluginWarning, siblings, targets
from breccia.arrays import frameworks
from breccia.arrays.frameworks import framework_of
from breccia.dispatch import builtin, registry
from breccia.dispatch.registry import KINDS, Plugin, Registry
from breccia.siblings import SIBLINGS

Install = Callable[..., None]

HEAD = """
from dataclasses import dataclass
from breccia import *
api = 1
@hookimpl
def breccia_bridges():
    return [Bridge("leftover", "json:dumps")]
"""
RECIPE = """
@dataclass(frozen=True)
class Acme(MXFP8BlockScaling):
    name = "acme"
"""


def write(folder: Path, name: str, manifest: str, version: str = "0.1", module: str = "", distribution: str = "") -> None:
    """A distribution (`<name>-breccia`) whose entry point `<name>` is a manifest of that source."""
    module = module or f"{name}_manifest_{folder.name.replace('-', '_')}"
    distribution = distribution or f"{name}-breccia"
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(manifest, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[breccia]\n{name} = {module}\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The registry of the process, as it was, for tests of other files that follow."""
    before = registry.registry()
    yield
    monkeypatch.undo()
    if registry.registry() is not before:
        registry.reload()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs distributions for one test; the caller reloads the registry."""

    def installing(name: str, manifest: str, version: str = "0.1") -> None:
        write(tmp_path, name, manifest, version)
        importlib.invalidate_caches()

    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield installing
    monkeypatch.undo()
    for name in set(sys.modules) - before:
        if "_manifest_" in name:
            del sys.modules[name]
    registry.reload()


def reloaded() -> tuple[Registry, list[str]]:
    """(the new registry, its warnings)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = registry.reload()
    assert all(w.category is PluginWarning for w in caught)
    return found, [str(w.message) for w in caught]


def plugin(name: str) -> Plugin:
    return next(p for p in breccia.plugins() if p.name == name)


def names() -> dict[str, set[str]]:
    return {hook: set(declared) for hook, declared in registry.registry().declared.items()}


def fresh(script: str, path: Path) -> str:
    """What `script` prints in a new interpreter that finds the distributions in `path`."""
    return printed(script, PYTHONPATH=str(path), **dict.fromkeys(name for name in os.environ if name.startswith("BRECCIA_")))


# -- core ------------------------------------------------------------------------------------------------------------


def test_core_is_itself_a_plug_in() -> None:
    core = breccia.plugins()[0]
    assert (core.name, core.distribution, core.version, core.status) == ("core", "breccia-core", breccia.__version__, "active")
    assert core.module == "breccia.dispatch.builtin"
    assert all(not declared for declared in Registry([], {}).declared.values()), "nothing is registered beside the hooks"
    assert {"recipes:mxfp8", "layouts:per_tensor", "codecs:E4M3", "rules:rceil", "frameworks:numpy"} <= set(core.declares)
    assert {"kernels:reference.cast", "storages:swizzle_128x4", "cli:explain"} <= set(core.declares)


def test_the_manifest_of_core_is_never_set_aside() -> None:
    """Nothing works without core, so a fault in its manifest is an error, not a warning."""
    core = Plugin("core", "breccia-core", "0", "breccia.dispatch.builtin")
    with pytest.raises(PluginError, match="sets no `api`"):
        Registry([(core, lambda: ModuleType("empty"))], {})


@pytest.mark.together
def test_every_sibling_is_found_and_active() -> None:
    found = {p.distribution: p for p in breccia.plugins()}
    for part in ("torch", "jax", "mlx", "triton", "bridges"):
        p = found[f"breccia-{part}"]
        assert (p.name, p.version, p.module, p.status) == (part, breccia.__version__, f"breccia_{part}.plugin", "active")


def test_a_good_plug_in_adds_a_recipe_to_every_backend(install: Install) -> None:
    install("acme", HEAD + RECIPE + "@hookimpl\ndef breccia_recipes():\n    return [Acme]\n", version="3.1")
    _, messages = reloaded()
    assert messages == []
    found = plugin("acme")
    assert (found.distribution, found.version, found.status, found.reason) == ("acme-breccia", "3.1", "active", "")
    assert found.hooks == ("breccia_recipes", "breccia_bridges")
    assert found.declares == ("recipes:acme", "bridges:leftover")
    st = breccia.cast(np.full((2, 32), 3.0, np.float32), breccia.recipe("acme"))
    assert breccia.dequantize(st).tolist() == [[3.0] * 32] * 2


def test_a_plug_in_of_one_file_declares_scales_without_a_sign(install: Install) -> None:
    """breccia's UE5M3, and the plug-in's own codec for larger scales."""
    recipes = """
from breccia.backend import E2M1, UE5M3

UE6M2 = Minifloat("UE6M2", 8, None, "tests", 6, 2, 31, 1.5 * 2.0**32, nan=0xFF, signed=False)

@dataclass(frozen=True)
class Wide(ScalingRecipe):
    name = "wide"
    source = "tests"
    format = Format(E2M1, (Level(UE5M3, (1, 16)),))

@dataclass(frozen=True)
class Wider(ScalingRecipe):
    name = "wider"
    source = "tests"
    format = Format(E2M1, (Level(UE6M2, (1, 16)),))

@hookimpl
def breccia_codecs():
    return [UE6M2]

@hookimpl
def breccia_recipes():
    return [Wide, Wider]
"""
    install("acme", HEAD + recipes)
    _, messages = reloaded()
    assert messages == [] and plugin("acme").status == "active"
    for name, amax in (("wide", 6 * 114688.0), ("wider", 6 * 1.5 * 2.0**32)):
        x = np.full((2, 32), amax, np.float32)
        x[1] = 0
        st = breccia.cast(x, breccia.recipe(name))
        assert st.scale.tolist() == [[0xFE, 0xFE], [0, 0]]
        assert breccia.dequantize(st).tolist() == x.tolist()


@pytest.mark.together
def test_the_table_of_siblings_is_what_their_manifests_declare() -> None:
    """So that error messages can name the distribution that would provide a missing feature."""
    for sibling in SIBLINGS:
        found = plugin(sibling.plugin)
        assert found.distribution == sibling.distribution
        declared = {
            d
            for d in found.declares
            if not d.startswith(("kernels:", "bridges:", "foreign:", "dialects:", "recipes:", "codecs:"))
        }
        brought = {f"cli:{name}" for name in sibling.commands}
        assert declared == brought | ({f"frameworks:{sibling.plugin}"} if sibling.arrays else set())
    assert {p.plugin for p in SIBLINGS} == {p.name for p in breccia.plugins()} - {"core"}


# -- one broken plug-in ----------------------------------------------------------------------------------------------


def returns(hook: str, *declared: str) -> str:
    """The source of a hook that returns these declarations."""
    return f"@hookimpl\ndef breccia_{hook}():\n    return [{', '.join(declared)}]"


def acme(body: str, base: str = "MXFP8BlockScaling", name: str = "acme") -> str:
    """The source of a recipe class; a line each for what `body` parts by semicolons."""
    lines = "".join(f"\n    {line.strip()}" for line in body.split(";") if line)
    return f"@dataclass(frozen=True)\nclass {name.title()}({base}):\n    name = {name!r}{lines}\n"


#: What is wrong -> (source after HEAD, the reason given).
BROKEN = {
    "raises on import": ("raise RuntimeError('boom')", "RuntimeError: boom"),
    "needs what is absent": ("import module_of_nobody", "ModuleNotFoundError: No module named 'module_of_nobody'"),
    "leaves the process": ("raise SystemExit('bye')", "SystemExit: bye"),
    "does not parse": ("def (", "SyntaxError: invalid syntax"),
    "no api": ("del api", "sets no `api`; a manifest sets `api = 1`."),
    "too new": ("api = 99", "it is written for api 99, this breccia-core reads api 1; upgrade breccia-core."),
    "api of no number": ("api = '1'", "`api` is an integer, at present 1;"),
    "api before the first": ("api = 0", "`api` is an integer, at present 1;"),
    "misspelt hook": (returns("kernel"), "it implements no hook of breccia: 'breccia_kernel'; did you mean 'breccia_kernels'?"),
    "misspelt hook without the marker": ("def breccia_recipe():\n    return []",
        "it defines 'breccia_recipe', which is not a hook; did you mean 'breccia_recipes'?"),
    "hook without the marker": ("def breccia_kernels():\n    return []",
        "breccia_kernels is not marked; put @breccia.hookimpl above it."),
    "hook with an argument": (returns("kernels").replace("()", "(config)"),
        "Argument(s) {'config'} are declared in the hookimpl but can not be found in the hookspec"),
    "hook that wraps": ("@hookimpl(wrapper=True)\ndef breccia_kernels():\n    return (yield)",
        "breccia_kernels is a wrapper; hooks here return declarations."),
    "hook that raises": ("@hookimpl\ndef breccia_kernels():\n    raise KeyError('x')",
        "breccia_kernels failed: KeyError: 'x'; a hook returns an iterable of declarations."),
    "hook that raises on the way": (
        "@hookimpl\ndef breccia_codecs():\n    yield Integer('A8', 8, None, 'here', True)\n    1 / 0",
        "breccia_codecs failed: ",
    ),
    "hook that returns nothing": ("@hookimpl\ndef breccia_kernels():\n    pass",
        "breccia_kernels failed: TypeError: 'NoneType' object is not iterable"),
    "declaration of another type": (returns("kernels", "'acme:cast'"),
        "breccia_kernels returns Kernel instances; it returned 'acme:cast'."),
    "recipe instance for a recipe class": (returns("recipes", "MXFP8BlockScaling()"),
        "breccia_recipes returns subclasses of ScalingRecipe; it returned MXFP8BlockScaling("),
    "recipe without a name": ("class Mute(ScalingRecipe): pass\n" + returns("recipes", "Mute"), "Mute'>, which has no name."),
    "recipe that is mutable": ("class Loose(ScalingRecipe):\n    name = 'loose'\n" + returns("recipes", "Loose"),
        "Loose is not a frozen dataclass; put @dataclass(frozen=True) above it."),
    "alias of core": (acme("", name="block") + returns("recipes", "Block"),
        "breccia_recipes: the name 'block' is taken by plug-in 'core'; choose another."),
    "alias that is another's name": (acme("") + acme("aliases = ('acme',)", name="emca") + returns("recipes", "Acme", "Emca"),
        "breccia_recipes: it declares the name 'acme' twice."),
    "name of core": (returns("recipes", "MXFP8BlockScaling"),
        "breccia_recipes: the name 'mxfp8' is taken by plug-in 'core'; choose another."),
    "name given twice": (RECIPE + returns("recipes", "Acme", "Acme"), "breccia_recipes: it declares the name 'acme' twice."),
}  # fmt: skip

#: Hook -> a declaration that is in order; below, one field of it at a time is not.
SOUND = {
    "kernels": "Kernel(op='cast', framework='numpy', target='acme:cast', name='acme'",
    "frameworks": "Framework(name='acme', module='acme', types=('Array',), ops='acme:OPS'",
    "storages": "Storage(name='acme', from_plain='acme:to', to_plain='acme:back'",
    "bridges": "Bridge(name='acme', target='acme:to'",
    "cli": "Command(name='acme', target='acme:it', help='Does it.'",
}
#: The reason given, with the field and its value -> hooks, each with a field and a value that is wrong.
REFERENCE = "acme': {0}: an object reference is written 'package.module:attribute'; got {1!r}."
WRONG = {
    "acme': {0} must be str; got {1!r}.": """kernels.op=['cast'] kernels.framework=None kernels.target=None
        kernels.plugin=7 frameworks.module=None frameworks.ops=print storages.from_plain=None bridges.target=5
        bridges.install=None cli.target=5 cli.help=None""",
    "{0} must be str; got {1!r}.": "kernels.name=5",
    "acme': {0} must be str | None; got {1!r}.": """kernels.device=('cuda',) frameworks.container=5 frameworks.capability=(9,0)
        frameworks.frontend=5 storages.accepts=True""",
    "acme': {0} must be bool; got {1!r}.": "kernels.traces=1 kernels.opt_in='no'",
    "acme': {0} must be int; got {1!r}.": """kernels.rank='5' kernels.rank=True kernels.contract='1' storages.data_axes='3'
        storages.data_axes=True""",
    "acme': {0} must be tuple[str, ...]; got {1!r}.": """kernels.reads='interleaved' kernels.writes=['interleaved']
        kernels.writes=None frameworks.types=(5,) frameworks.types=['Array'] frameworks.types='Array' bridges.requires='acme'
        bridges.requires=(5,)""",
    "acme': {0} must be tuple[tuple[str, str], ...]; got {1!r}.": """frameworks.refuses=('Sparse',)
        frameworks.refuses=(('a','b','c'),)""",
    "acme': {0} must be a recipe class, its base, None or type(None); got {1!r}.": """kernels.recipe=3 kernels.recipe='mxfp8'
        kernels.other=int""",
    REFERENCE: """kernels.available=True kernels.accepts='even' kernels.accepts='a:b\\x20c' kernels.score=0.5
        kernels.plan='calls' frameworks.container='register' frameworks.opaque='fake' frameworks.capability='sm'
        storages.from_plain='to' storages.to_plain='back' storages.accepts='fits' kernels.target='acme.cast'
        kernels.target=print cli.target='acme'""",
    "acme': {0} is a module, written 'package.module'; got {1!r}.": """frameworks.frontend='acme..front'
        frameworks.frontend='acme.frontend:cast'""",
    "acme': {0} names the array types in acme; got none.": "frameworks.types=()",
    "acme': no {0} 'casts'; did you mean 'cast'?": "kernels.op='casts'",
    "which has no {0}.": "kernels.name=''",
    "acme' implements version 2 of the {0} of 'cast'; this is version 1.": "kernels.contract=2",
    "{1!r}: the {0} is reserved by breccia; choose another.": "storages.name='plain' storages.name='*'",
    "breccia_storages: the {0} {1!r} is taken by plug-in 'core'; choose another.": "storages.name='interleaved'",
    "acme': {0} must be 0, or the number of axes of codes; got -1.": "storages.data_axes=-1",
    "{1!r}: its {0} is a public attribute of breccia.bridges, like 'to_acme'.": "bridges.name='to-acme'",
    "{1!r}: its {0} is one word of a command line, like 'acme'.": "cli.name='ac\\x20me' cli.name='--acme'",
    "acme': {0} is a tuple of modules, and install their pip requirement;": "bridges.requires=('acme',)",
}


def with_field(sound: str, field: str, value: str) -> str:
    """The call `sound`, still open, closed with `field` set to `value`."""
    kind, _, arguments = sound.partition("(")
    kept = [a for a in arguments.split(", ") if not a.startswith(f"{field}=")]
    return f"{kind}({', '.join([*kept, f'{field}={value}'])})"


#: Declarations that get the complaint of another one.
ALIKE: set[str] = set()
for complaint, wrong in WRONG.items():
    for n, each in enumerate(wrong.split()):
        hook, field, bad = re.split("[.=]", each, maxsplit=2)
        declared = with_field(SOUND[hook], field, bad)
        BROKEN[declared] = (returns(hook, declared), complaint.format(field, eval(bad)))
        if n:
            ALIKE.add(declared)

#: A recipe of name "acme" with this base and body -> the reason given.
UNSOUND_RECIPES = {
    ("ScalingRecipe", ""): "Acme().format raised RecipeError: recipe Acme declares no format",
    ("MXFP8BlockScaling", "format = property(lambda self: 1 / 0)"): "Acme().format raised ZeroDivisionError: division by zero",
    ("MXFP8BlockScaling", "rules = property(lambda self: 1 / 0)"): "Acme().rules raised ZeroDivisionError: division by zero",
    ("MXFP8BlockScaling", "layout = property(lambda self: 1 / 0)"): "Acme().layout raised ZeroDivisionError: division by zero",
    ("MXFP8BlockScaling", "block_size: int = 33"): "Acme() raised RecipeError: Acme block_size is fixed at 32",
    ("MXFP8BlockScaling", "format = 'E4M3'"): "Acme().format must be Format; got 'E4M3'.",
    ("MXFP8BlockScaling", "layout = PerBlockK"): "Acme().layout must be Layout; got <class ",
    ("MXFP8BlockScaling", "layout = PerBlockMN(32, 1).mT"): (
        "Acme().layout is PerBlockMN(block_m=32, block_n=1, partial=False).mT; the canonical layout of these blocks is "
        "PerBlockK(block_size=32, partial=False). Declare that."
    ),
    ("MXFP8BlockScaling", "rules = None"): "Acme().rules must be tuple; got None.",
    ("MXFP8BlockScaling", "rules = ('r',)"): "Acme().rules contains 'r', which is not a Rule.",
    ("MXFP8BlockScaling", "aliases = 'ac'"): "aliases is a tuple of names; got 'ac'.",
    ("NVFP4BlockScaling", "rules = MXFP8BlockScaling().rules"): (
        "Acme() gives 1 rule(s) for the 2 scale level(s) of its format; give one a level."
    ),
}
for (base, body), complaint in UNSOUND_RECIPES.items():
    BROKEN[f"recipe: {complaint}"] = (acme(body, base) + returns("recipes", "Acme"), f"recipe 'acme': {complaint}")


@pytest.mark.parametrize("fault", long_but(BROKEN.keys() - ALIKE, BROKEN))
def test_a_broken_plug_in_is_set_aside_with_one_warning_and_the_others_work(install: Install, fault: str) -> None:
    source, reason = BROKEN[fault]
    before = names()
    install("acme", HEAD + source)
    install("good", HEAD.replace("leftover", "welcome"))
    _, (message, *more) = reloaded()
    assert more == []
    assert message.startswith("breccia plug-in 'acme' (acme-breccia 0.1) is set aside: ")
    assert reason in message
    found = plugin("acme")
    assert (found.status, found.hooks, found.declares) == ("set aside", (), ())
    assert message.endswith(found.reason)
    assert plugin("good").status == "active"
    assert names() == before | {"breccia_bridges": before["breccia_bridges"] | {"welcome"}}, "nothing of it remains"
    st = breccia.cast(np.ones((2, 32), np.float32), breccia.MXFP8BlockScaling())
    assert breccia.dequantize(st).tolist() == [[1.0] * 32] * 2


def test_a_recipe_that_needs_a_field_is_not_asked_for_an_instance(install: Install) -> None:
    needs = "@dataclass(frozen=True)\nclass Acme(ScalingRecipe):\n    bits: int\n    name = 'acme'\n"
    install("acme", HEAD + needs + "@hookimpl\ndef breccia_recipes():\n    return [Acme]")
    assert reloaded()[1] == []
    assert plugin("acme").declares == ("recipes:acme", "bridges:leftover")
    with pytest.raises(breccia.UnknownNameError, match="'fp8' is an element format, not a recipe"):
        breccia.recipe("fp8")
    assert breccia.recipe("Acme", bits=3).to_dict() == {"name": "acme", "fields": {"bits": 3}}


def test_a_repaired_plug_in_is_active_after_reload(install: Install, tmp_path: Path) -> None:
    install("acme", "raise RuntimeError('boom')")
    assert len(reloaded()[1]) == 1
    manifest = next(tmp_path.glob("acme_manifest_*.py"))
    manifest.write_text(HEAD, encoding="utf-8")
    importlib.invalidate_caches()
    assert reloaded()[1] == []
    assert plugin("acme").status == "active"


def test_a_hook_of_a_later_version_may_be_marked_optional(install: Install) -> None:
    install("acme", HEAD + "@hookimpl(optionalhook=True)\ndef breccia_telemetry():\n    return [1]")
    assert reloaded()[1] == []
    assert plugin("acme").hooks == ("breccia_bridges",)


def test_a_hook_may_be_implemented_under_another_function_name(install: Install) -> None:
    install("acme", HEAD + '@hookimpl(specname="breccia_cli")\ndef mine():\n    return [Command("acme", "json:dumps", "It.")]')
    assert reloaded()[1] == []
    assert plugin("acme").declares == ("bridges:leftover", "cli:acme")


@pytest.mark.together
def test_a_manifest_may_import_modules_whose_names_begin_as_hooks_do(install: Install) -> None:
    install("acme", HEAD + "import breccia_torch")
    assert reloaded()[1] == []


def test_declarations_carry_the_name_of_their_plug_in(install: Install) -> None:
    storage = "@hookimpl\ndef breccia_storages():\n    return [Storage('acme', 'acme:to', 'acme:back')]\n"
    kernel = "@hookimpl\ndef breccia_kernels():\n    return [Kernel('cast', 'acme', 'acme:cast', 'acme.cast')]"
    install("acme", HEAD + storage + kernel)
    found, _ = reloaded()
    assert found.bridges["leftover"].plugin == found.declared["breccia_storages"]["acme"].plugin == "acme"
    assert next(k for k in found.table.kernels if k.name == "acme.cast").plugin == "acme"


def test_the_second_of_two_plug_ins_with_one_name_is_set_aside(install: Install, tmp_path: Path) -> None:
    write(tmp_path, "acme", HEAD.replace("leftover", "first"), module="aaa_manifest_", distribution="other")
    install("acme", HEAD)
    _, (message, *more) = reloaded()
    assert more == []
    assert message == (
        "breccia plug-in 'acme' (acme-breccia 0.1) is set aside: the plug-in name 'acme' is taken by other; rename the entry "
        "point of one."
    )


def test_a_name_claimed_by_two_plug_ins_goes_to_the_first_by_name_whatever_the_path_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = HEAD.replace("leftover", "claimed")
    for name in ("zeta", "alpha"):
        write(tmp_path / name, name, claim)
    folders = [str(tmp_path / "zeta"), str(tmp_path / "alpha")]
    path = list(sys.path)
    seen: list[list[str]] = []
    for order in (folders, folders[::-1]):
        monkeypatch.setattr(sys, "path", [*order, *path])
        importlib.invalidate_caches()
        found, messages = reloaded()
        seen.append(messages)
        assert found.bridges["claimed"].plugin == "alpha"
        assert [p.name for p in found.plugins] == ["core", *sorted(p.name for p in found.plugins[1:])]
    monkeypatch.undo()
    registry.reload()
    assert seen[0] == seen[1]
    assert seen[0] == [
        "breccia plug-in 'zeta' (zeta-breccia 0.1) is set aside: breccia_bridges: the name 'claimed' is taken by plug-in "
        "'alpha'; choose another."
    ]


@pytest.mark.together
def test_a_partly_imported_framework_is_not_asked_for_missing_attributes(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        "acme", HEAD + "@hookimpl\ndef breccia_frameworks():\n    return [Framework('acme', 'acme', ('Array',), 'acme:OPS')]"
    )
    reloaded()
    half = ModuleType("acme")
    monkeypatch.setitem(sys.modules, "acme", half)

    class Array:
        pass

    with pytest.raises(breccia.UnsupportedError, match=r"installed framework \(numpy, acme, jax, mlx, torch\); got .*Array\."):
        framework_of(Array())
    half.Array = Array  # type: ignore[attr-defined]
    assert framework_of(Array()).name == "acme", "and is found once it has it"


# -- manifests that import too much -----------------------------------------------------------------------------------

REPORT = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import breccia
    found = {p.name: p.status for p in breccia.plugins()}
import numpy as np
st = breccia.cast(np.ones((2, 32), np.float32), breccia.MXFP8BlockScaling())
assert breccia.dequantize(st).tolist() == [[1.0] * 32] * 2
print(json.dumps([[f"{w.category.__name__}: {w.message}" for w in caught], found, "leftover" in dir(breccia.bridges)]))
"""


@pytest.mark.together
@pytest.mark.parametrize("heavy", ["numpy", "mlx"])
def test_a_manifest_that_imports_a_framework_is_named_but_stays_active(tmp_path: Path, heavy: str) -> None:
    write(tmp_path, "acme", f"import {heavy}\n" + HEAD, module="acme_heavy")
    messages, found, works = json.loads(fresh(REPORT, tmp_path))
    assert messages == [
        f"PluginWarning: breccia plug-in 'acme' (acme_heavy) imported {heavy} while declaring itself; move that import into "
        "the module that its object references name."
    ]
    assert found["acme"] == "active" and works


def test_a_manifest_is_not_blamed_for_a_framework_the_user_imported(tmp_path: Path) -> None:
    write(tmp_path, "acme", "import numpy\n" + HEAD)
    messages, found, works = json.loads(fresh("import numpy" + REPORT, tmp_path))
    assert messages == []
    assert found["acme"] == "active" and works


def test_a_manifest_that_uses_the_registry_it_is_part_of_is_set_aside(tmp_path: Path) -> None:
    write(tmp_path, "acme", HEAD + "@hookimpl\ndef breccia_cli():\n    return [Command(p.name, 'a:b', '') for p in plugins()]")
    messages, found, works = json.loads(fresh(REPORT, tmp_path))
    assert messages == [
        "PluginWarning: breccia plug-in 'acme' (acme-breccia 0.1) is set aside: breccia_cli failed: PluginError: a manifest "
        "used the registry while it is being built; a manifest only returns declarations.; a hook returns an iterable of "
        "declarations."
    ]
    assert found["acme"] == "set aside" and not works


def test_a_broken_plug_in_does_not_affect_others_in_a_fresh_process(tmp_path: Path) -> None:
    write(tmp_path, "acme", HEAD + "raise RuntimeError('boom')")
    messages, found, works = json.loads(fresh(REPORT, tmp_path))
    assert messages == ["PluginWarning: breccia plug-in 'acme' (acme-breccia 0.1) is set aside: RuntimeError: boom"]
    assert found.pop("acme") == "set aside" and not works
    assert set(found.values()) == {"active"}


# -- the environment, reload, threads -----------------------------------------------------------------------------------


@pytest.mark.together
def test_blocked_plug_ins_are_not_even_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme", "raise RuntimeError('boom')")
    monkeypatch.setenv("BRECCIA_BLOCK", " acme, bridges ,")
    found, messages = reloaded()
    assert messages == []
    for name in ("acme", "bridges"):
        p = plugin(name)
        assert (p.status, p.reason, p.declares) == ("blocked", "named in BRECCIA_BLOCK", ())
    assert not [bridge for bridge in found.bridges.values() if bridge.plugin in ("acme", "bridges")]


@pytest.mark.together
def test_core_cannot_be_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRECCIA_BLOCK", "core,bridges")
    _, messages = reloaded()
    assert messages == ["BRECCIA_BLOCK names 'core', which cannot be blocked: every call needs it. It stays."]
    assert (plugin("core").status, plugin("bridges").status) == ("active", "blocked")
    assert breccia.cast(np.ones((2, 32), np.float32), breccia.MXFP8BlockScaling()).shape == (2, 32)


@pytest.mark.together
def test_unknown_names_in_environment_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRECCIA_BLOCK", "bridgs,jax")
    monkeypatch.setenv("BRECCIA_PREFER", "reference.cast,reference.matmull")
    _, (block, prefer, *more) = reloaded()
    assert more == []
    assert block == (
        "BRECCIA_BLOCK names 'bridgs', which is no plug-in here; did you mean 'bridges'? Known: bridges, jax, mlx, native, "
        "torch, triton."
    )
    assert prefer.startswith(
        "BRECCIA_PREFER names 'reference.matmull', which is no kernel here; did you mean 'reference.matmul'? Known: composite."
    )
    assert plugin("jax").status == "blocked"


ERRORS = """
import warnings
warnings.simplefilter("error")
import numpy as np
import breccia
raised = []
for _ in range(3):
    try:
        st = breccia.cast(np.ones((2, 32), np.float32), breccia.MXFP8BlockScaling())
    except Warning as e:
        raised.append(str(e))
assert breccia.dequantize(st).tolist() == [[1.0] * 32] * 2
print(raised, [p.name for p in breccia.plugins() if p.status == "set aside"])
"""


def test_if_warnings_are_errors_one_is_raised_once_and_the_registry_works(tmp_path: Path) -> None:
    write(tmp_path, "acme", "raise RuntimeError('boom')")
    assert fresh(ERRORS, tmp_path) == (
        "[\"breccia plug-in 'acme' (acme-breccia 0.1) is set aside: RuntimeError: boom\"] ['acme']\n"
    )


@pytest.mark.together
def test_reload_reads_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRECCIA_BLOCK", "bridges")
    assert registry.reload() is registry.registry()
    assert plugin("bridges").status == "blocked"
    monkeypatch.delenv("BRECCIA_BLOCK")
    registry.reload()
    assert plugin("bridges").status == "active"


def test_a_failed_reload_leaves_the_registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = registry.registry()
    with monkeypatch.context() as patch:
        patch.setattr(builtin, "api", 99)
        with pytest.raises(PluginError, match="api 99"):
            registry.reload()
        assert registry.registry() is before
    assert registry.reload() is not before


def test_many_threads_at_first_use_build_one_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Registry] = []

    class Slow(Registry):
        def __init__(self, *args: object) -> None:
            time.sleep(0.05)  # long enough for every thread to ask meanwhile
            super().__init__(*args)  # type: ignore[arg-type]
            built.append(self)

    monkeypatch.setattr(registry, "Registry", Slow)
    monkeypatch.setattr(frameworks, "current", None)
    start = threading.Barrier(16)
    seen: list[Registry] = []

    def use() -> None:
        start.wait()
        seen.append(registry.registry())

    threads = [threading.Thread(target=use) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert seen == built * 16


@pytest.mark.long
def test_readers_during_a_reload_see_a_complete_registry() -> None:
    """The old or the new registry, never a partly filled one."""
    complete = names()
    stop, torn = threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            if names() != complete or breccia.cast(np.ones((1, 32), np.float32), breccia.MXFP8BlockScaling()).ndim != 2:
                torn.append(names())

    threads = [threading.Thread(target=watch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        registry.reload()
    stop.set()
    for thread in threads:
        thread.join()
    assert not torn


def together(count: int, work: Callable[[int], None]) -> list[BaseException]:
    """The exceptions of `count` threads that start `work(number)` at the same moment."""
    start, raised = threading.Barrier(count), list[BaseException]()

    def run(number: int) -> None:
        start.wait()
        try:
            work(number)
        except BaseException as e:
            raised.append(e)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_the_registry_in_use_is_one_snapshot_that_reload_replaces() -> None:
    old = registry.registry()
    assert frameworks.current is old and framework_of(np.ones(3)) is old.frameworks["numpy"]
    assert old.types[np.ndarray] is old.frameworks["numpy"]
    fresh = registry.reload()
    assert frameworks.current is fresh is registry.registry() and fresh is not old
    assert fresh.types == {} and old.types[np.ndarray] is old.frameworks["numpy"], "what one knows is no other's"
    assert framework_of(np.ones(3)) is fresh.frameworks["numpy"]


def test_arrays_and_kernels_of_a_plug_in_come_and_go_together(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    module = arrays(install)
    reloaded()
    array = importlib.import_module(module).Array()
    assert framework_of(array).name == "acme"
    assert any(k.name == "acme.cast" for k in registry.registry().table.kernels)
    monkeypatch.setenv("BRECCIA_BLOCK", "acme")
    reloaded()
    assert not any(k.name == "acme.cast" for k in registry.registry().table.kernels)
    with pytest.raises(breccia.UnsupportedError, match=r"^x must be an array of an installed framework \(numpy.*Array\. "):
        framework_of(array)


@pytest.mark.long
def test_eight_threads_cast_while_another_reloads() -> None:
    """Frameworks and table always belong to one registry, and no thread gets an error or different bytes."""
    x = np.linspace(-3, 3, 4 * 32, dtype=np.float32).reshape(4, 32)
    recipe = breccia.MXFP8BlockScaling()
    expected = breccia.cast(x, recipe).digest()
    stop, casts = threading.Event(), [0] * 8

    def work(number: int) -> None:
        if number == 8:
            try:
                for _ in range(20):
                    registry.reload()
            finally:
                stop.set()
            return
        while not stop.is_set():
            st = breccia.cast(x, recipe)
            assert st.digest() == expected
            assert breccia.matmul(st, st.mT).shape == (4, 4)
            seen: Any = frameworks.current
            assert all(seen.frameworks[found.name] is found for found in list(seen.types.values()))
            casts[number] += 1

    assert together(9, work) == []
    assert all(casts)


#: A framework, and a kernel for it, of a plug-in: source with the name of the module that has its arrays.
ARRAYS = """
@hookimpl
def breccia_frameworks():
    return [Framework("acme", "{0}", ("Array",), "{0}:OPS", container="{0}:register")]
@hookimpl
def breccia_kernels():
    return [Kernel("cast", "acme", "{0}:cast", "acme.cast")]
"""


def arrays(install: Install, register: str = "pass") -> str:
    """The module of arrays of a plug-in whose container hook runs `register`, a line that may use the list `registered`."""
    folder = Path(sys.path[0])
    module = f"acme_manifest_arrays_{folder.name.replace('-', '_')}"
    source = f"import time\nregistered = []\nclass Array:\n    shape = (1,)\ndef register():\n    {register}\n"
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    install("acme", HEAD + ARRAYS.format(module))
    return module


def test_threads_that_share_a_frameworks_first_array_register_tensors_once(install: Install) -> None:
    module = arrays(install, "time.sleep(0.05); registered.append(1)")
    reloaded()
    acme = importlib.import_module(module)

    def work(number: int) -> None:
        assert framework_of(acme.Array()).name == "acme"
        assert acme.registered == [1], "none goes on before it is done"

    assert together(8, work) == []
    registry.reload()
    assert framework_of(acme.Array()).name == "acme"
    assert acme.registered == [1], "nor does a reload do it again"


def test_tensors_are_registered_when_a_framework_is_imported_later(install: Install) -> None:
    module = arrays(install, "registered.append(1)")
    reloaded()
    breccia.cast(np.ones((2, 32), np.float32), breccia.MXFP8BlockScaling())
    assert module not in sys.modules
    acme = importlib.import_module(module)
    framework_of(acme.Array())
    assert acme.registered == [1]


def test_a_failed_tensor_registration_warns_once_and_casts_still_work(install: Install) -> None:
    module = arrays(install, "raise RuntimeError('no trees')")
    reloaded()
    acme = importlib.import_module(module)
    x, recipe = np.full((2, 32), 3.0, np.float32), breccia.MXFP8BlockScaling()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert breccia.dequantize(breccia.cast(x, recipe)).tolist() == [[3.0] * 32] * 2
            assert framework_of(acme.Array()).name == "acme"
            assert framework_of(type("Derived", (acme.Array,), {})()).name == "acme", "the first array of another type"
            registry.reload()
    assert [(w.category, str(w.message)) for w in caught] == [
        (
            PluginWarning,
            f"breccia cannot register ScaledTensor with acme: {module}:register raised RuntimeError: no trees. Trees, "
            "transformations and checkpoints of acme will not handle it; casts work.",
        )
    ]


def test_if_warnings_are_errors_a_failed_tensor_registration_raises_once(install: Install) -> None:
    module = arrays(install, "raise RuntimeError('no trees')")
    reloaded()
    acme = importlib.import_module(module)
    x, recipe = np.full((2, 32), 3.0, np.float32), breccia.MXFP8BlockScaling()
    with pytest.raises(PluginWarning, match="cannot register ScaledTensor with acme"):
        breccia.cast(x, recipe)
    assert breccia.dequantize(breccia.cast(x, recipe)).tolist() == [[3.0] * 32] * 2
    assert framework_of(acme.Array()).name == "acme"


def test_a_tensor_registration_may_use_arrays_of_its_framework(install: Install) -> None:
    """A registration that uses an array of its framework does not start again recursively."""
    module = arrays(
        install, "registered.append(1); import breccia.arrays.frameworks; breccia.arrays.frameworks.framework_of(Array())"
    )
    reloaded()
    acme = importlib.import_module(module)
    assert framework_of(acme.Array()).name == "acme"
    assert acme.registered == [1]


def test_run_once_runs_once_per_arguments_and_again_after_an_error() -> None:
    calls: list[tuple[object, ...]] = []

    @targets.once
    def slow(name: str, *, fails: bool = False) -> str:
        time.sleep(0.01)
        calls.append((name, fails))
        if fails and len(calls) == 1:
            raise ValueError(name)
        return name.upper()

    with pytest.raises(ValueError, match=r"^a$"):
        slow("a", fails=True)
    found: list[str] = []
    assert together(8, lambda _: found.append(slow("a", fails=True))) == []
    assert found == ["A"] * 8 and calls == [("a", True)] * 2
    assert slow("b") == slow("b") == "B" and slow("a") == "A"
    assert calls[2:] == [("b", False), ("a", False)]


def test_unknown_names_are_errors_with_the_nearest_name() -> None:
    with pytest.raises(breccia.UnknownNameError, match=r"^no recipe 'nvpf4'; did you mean 'nvfp4'\? Known: .*mxfp8") as e:
        breccia.recipe("nvpf4")
    assert e.value.found["name"] == "nvpf4"


def test_plugins_returns_a_copy_of_immutable_entries() -> None:
    """`plugins()` hands out a copy of the list of frozen entries."""
    breccia.plugins().clear()
    first = breccia.plugins()[0]
    assert first == replace(first)
    assert set(KINDS) >= set(first.hooks)


@pytest.mark.together
def test_a_framework_of_a_missing_sibling_is_named_with_its_remedy() -> None:
    code = "import breccia; breccia.explain('cast', 'nvfp4', on='torch')"
    done = ran(code, code=1, BRECCIA_BLOCK="torch")
    assert "UnknownNameError: no framework 'torch'" in done.stderr
    assert (
        f"It comes with breccia-torch: {siblings.install('breccia-torch')}. It is installed but blocked: named in "
        "BRECCIA_BLOCK." in done.stderr
    )
