"""Registry: reads entry points and manifests, and builds the dispatch table.

A broken plug-in is set aside with a warning and its reason is recorded; the others work. The registry is built under a
lock and swapped whole, so a reader sees the old one or the new one. Warnings are issued after the swap: where they are
errors, one is raised once, and the next call uses the new registry.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from ..arrays import frameworks
from ..arrays.frameworks import Framework
from ..codecs import Codec, Lookup
from ..dialects import Dialect
from ..errors import PluginError, PluginWarning, UnknownNameError, suggestion
from ..formats import Format
from ..layouts import Layout
from ..locks import at_fork, reentrant
from ..operations import Operation
from ..recipes import ScalingRecipe
from ..rules import Rule
from ..siblings import SIBLINGS
from ..tensors.storage import Storage
from . import builtin, hookspecs
from .hookspecs import Bridge, Command, Foreign
from .kernel import Kernel, kernels_of
from .table import Table

_T = TypeVar("_T")

GROUP = "breccia"
#: The distribution whose broken manifest raises instead of being set aside.
CORE = "breccia-core"
_CORE_NAME = "core"
#: Modules a manifest must not import: they take seconds in every process.
HEAVY = ("numpy", "torch", "jax", "mlx", "triton", "tensorflow", "safetensors", "torchao")


@dataclass(frozen=True)
class Plugin:
    """One installed plug-in: `status` is "active", "set aside" or "blocked", with the reason; "active" ones may break rules.

    hooks: the hooks through which it declares something. declares: the declarations, as "kernels:reference.cast".
    """

    name: str
    distribution: str
    version: str
    module: str
    status: str = "active"
    reason: str = ""
    hooks: tuple[str, ...] = ()
    declares: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Its title in messages."""
        return f"plug-in {self.name!r} ({self.distribution} {self.version})"


@dataclass(frozen=True)
class _Kind:
    """The type of one hook's declarations (instances of `type`, or subclasses), and their check."""

    type: type
    of_classes: bool
    check: Callable[[Any], None] = lambda declared: None


def _value_class(declared: type[Any]) -> None:
    """Raise PluginError unless instances compare and hash by value: dispatch and files depend on it."""
    parameters = getattr(declared, "__dataclass_params__", None)
    if not (parameters and parameters.frozen and parameters.eq):
        raise PluginError(f"{declared.__name__} is not a frozen dataclass; put @dataclass(frozen=True) above it.")


def _recipe_class(declared: type[ScalingRecipe]) -> None:
    """Raise PluginError unless it is a value class whose default instance, if it has one, is valid."""
    _value_class(declared)
    if declared.needed_fields():
        return
    what = f"recipe {declared.name!r}: {declared.__name__}()"
    recipe = _evaluated(what, declared, declared)
    levels = len(_evaluated(f"{what}.format", lambda: recipe.format, Format).levels)
    rules = _evaluated(f"{what}.rules", lambda: recipe.rules, tuple)
    layout = _evaluated(f"{what}.layout", lambda: recipe.layout, Layout)
    if layout != (canonical := layout.canonical(-1)):
        raise PluginError(f"{what}.layout is {layout}; the canonical layout of these blocks is {canonical}. Declare that.")
    if not isinstance(declared.aliases, tuple) or not all(isinstance(alias, str) for alias in declared.aliases):
        raise PluginError(f"recipe {declared.name!r}: aliases is a tuple of names; got {declared.aliases!r}.")
    for rule in rules:
        if not isinstance(rule, Rule):
            raise PluginError(f"{what}.rules contains {rule!r}, which is not a Rule.")
    for element in (recipe.format.element, recipe.format.alternative):
        if isinstance(element, Lookup) and 0.0 not in element.values and not recipe.decode_only:
            raise PluginError(
                f"{what} has elements of {element.name}, which has no 0: declare `decode_only`, why cast cannot write it."
            )
    if len(rules) != levels:
        raise PluginError(f"{what} gives {len(rules)} rule(s) for the {levels} scale level(s) of its format; give one a level.")


def _evaluated(what: str, question: Callable[[], _T], kind: type) -> _T:
    """The result of `question`, of type `kind`. Raises PluginError naming `what`."""
    try:
        value = question()
    except Exception as e:
        raise PluginError(f"{what} raised {type(e).__name__}: {e}") from e
    if not isinstance(value, kind):
        raise PluginError(f"{what} must be {kind.__name__}; got {value!r}.")
    return value


def _declaration(declared: Framework | Operation | Kernel | Storage | Bridge | Foreign | Dialect | Command) -> None:
    declared.check()


KINDS: dict[str, _Kind] = {
    "breccia_codecs": _Kind(Codec, False),
    "breccia_rules": _Kind(Rule, False),
    "breccia_layouts": _Kind(Layout, True, _value_class),
    "breccia_storages": _Kind(Storage, False, _declaration),
    "breccia_recipes": _Kind(ScalingRecipe, True, _recipe_class),
    "breccia_frameworks": _Kind(Framework, False, _declaration),
    "breccia_operations": _Kind(Operation, False, _declaration),
    "breccia_kernels": _Kind(Kernel, False, _declaration),
    "breccia_bridges": _Kind(Bridge, False, _declaration),
    "breccia_foreign": _Kind(Foreign, False, _declaration),
    "breccia_dialects": _Kind(Dialect, False, _declaration),
    "breccia_cli": _Kind(Command, False, _declaration),
}


def _warn(message: str) -> None:
    warnings.warn(message, PluginWarning, stacklevel=3)


class Registry:
    """What all active plug-ins declare, by hook and name. `warn` receives the text of each problem."""

    def __init__(
        self,
        loaders: Iterable[tuple[Plugin, Callable[[], ModuleType]]],
        environ: Mapping[str, str],
        warn: Callable[[str], None] = _warn,
    ) -> None:
        self._warn = warn
        self.plugins: list[Plugin] = []
        self.declared: dict[str, dict[str, Any]] = {hook: {} for hook in KINDS}
        self._manager = pluggy.PluginManager("breccia")
        self._manager.add_hookspecs(hookspecs)
        blocked = _list(environ.get("BRECCIA_BLOCK", ""))
        for plugin, load in loaders:
            if plugin.name in blocked and plugin.distribution != CORE:
                self.plugins.append(replace(plugin, status="blocked", reason="named in BRECCIA_BLOCK"))
            else:
                self.plugins.append(self._add(plugin, load))
        prefer = _list(environ.get("BRECCIA_PREFER", ""))
        tracing = environ.get("BRECCIA_TRACE", "") not in ("", "0")
        auditing = environ.get("BRECCIA_CHECK", "") not in ("", "0")
        #: The recipes of specs read so far; see `specs.as_recipe`.
        self.specs: dict[str, ScalingRecipe] = {}
        #: The function of each op and framework called so far; see `calling.run`.
        self.functions: dict[tuple[str, str], Callable[..., Any]] = {}
        #: The framework of each type of array met so far; see `frameworks.framework_of`.
        self.types: dict[type, Framework] = {}
        #: The library of each foreign class met so far; see `foreign.library_of`.
        self.foreign_types: dict[type, Foreign] = {}
        self.table = Table(self.declared["breccia_kernels"].values(), prefer, tracing, self.frameworks, auditing)
        if _CORE_NAME in blocked:
            warn("BRECCIA_BLOCK names 'core', which cannot be blocked: every call needs it. It stays.")
        for kernel in self.declared["breccia_kernels"].values():
            for name in (*kernel.reads, *kernel.writes):
                known = list(self.declared["breccia_storages"])
                if name not in ("*", *known):
                    where = f"kernel {kernel.name!r} of {self.origin(kernel.plugin)}"
                    warn(f"{where} names storage {name!r}, which no plug-in declares{suggestion(name, known)}")
        plugins = [p.name for p in self.plugins if p.distribution != CORE]
        self._doubt("BRECCIA_BLOCK", "plug-in", [n for n in blocked if n != _CORE_NAME], plugins)
        self._doubt("BRECCIA_PREFER", "kernel", prefer, list(self.declared["breccia_kernels"]))

    @property
    def recipes(self) -> dict[str, type[ScalingRecipe]]:
        return self.declared["breccia_recipes"]

    @property
    def layouts(self) -> dict[str, type[Layout]]:
        return self.declared["breccia_layouts"]

    @property
    def frameworks(self) -> dict[str, Framework]:
        return self.declared["breccia_frameworks"]

    @property
    def operations(self) -> dict[str, Operation]:
        return self.declared["breccia_operations"]

    def operation(self, name: str) -> Operation:
        """The op with that name or alias. Raises UnknownNameError with a suggestion."""
        op = self.operations.get(name)
        return self.look_up("breccia_operations", name, "op") if op is None else op

    @property
    def bridges(self) -> dict[str, Bridge]:
        return self.declared["breccia_bridges"]

    @property
    def foreign(self) -> dict[str, Foreign]:
        return self.declared["breccia_foreign"]

    @property
    def dialects(self) -> dict[str, Dialect]:
        return self.declared["breccia_dialects"]

    @property
    def commands(self) -> dict[str, Command]:
        return self.declared["breccia_cli"]

    def look_up(self, hook: str, name: str, what: str) -> Any:
        """The declaration with that name or alias. Raises UnknownNameError with a suggestion."""
        table = self.declared[hook]
        if name in table:
            return table[name]
        declaration = next((value for n, value in table.items() if name in _names(n, value)), None)
        if declaration is None:
            ours = next((s for s in SIBLINGS if hook == "breccia_frameworks" and s.plugin == name and s.arrays), None)
            remedy = f" It comes with {ours.distribution}: {ours.remedy}.{self.absence(ours.distribution)}" if ours else ""
            message = f"no {what} {name!r}{suggestion(str(name), list(table))}{remedy}"
            raise UnknownNameError(message, name=name, known=list(table))
        return declaration

    def absence(self, distribution: str) -> str:
        """Why an installed distribution lacks a declaration; empty if it is not installed."""
        for p in self.plugins:
            if p.distribution == distribution:
                state = (
                    f"{p.status}: {p.reason}" if p.status != "active" else f"version {p.version}, which lacks it; upgrade it"
                )
                return f" It is installed but {state.removesuffix('.')}."
        return ""

    def origin(self, plugin: str) -> str:
        """The title in messages of the plug-in with that name."""
        return next((p.title for p in self.plugins if p.name == plugin), f"plug-in {plugin!r}")

    def _doubt(self, variable: str, what: str, names: list[str], known: list[str]) -> None:
        for name in names:
            if name not in known:
                self._warn(f"{variable} names {name!r}, which is no {what} here{suggestion(name, known)}")

    # -- adding one plug-in ---------------------------------------------------------------------------------------

    def _add(self, plugin: Plugin, load: Callable[[], ModuleType]) -> Plugin:
        before = set(sys.modules)
        try:
            manifest = load()
            hooks, declared = self._read(plugin, manifest)
        except (Exception, SystemExit) as e:  # errors in a third party's module must not stop the others
            if plugin.distribution == CORE:
                raise
            why = str(e) if isinstance(e, PluginError) else f"{type(e).__name__}: {e}"
            self._warn(f"breccia {plugin.title} is set aside: {why}")
            return replace(plugin, status="set aside", reason=why)
        heavy = [m for m in HEAVY if m in sys.modules and m not in before]
        fault = f"imported {', '.join(heavy)} while declaring itself" if heavy else ""
        if heavy:
            self._warn(
                f"breccia plug-in {plugin.name!r} ({plugin.module}) {fault}; move that import into the module that its object "
                "references name."
            )
        for hook, name, value in declared:
            self.declared[hook][name] = value
        return replace(plugin, reason=fault, hooks=hooks, declares=tuple(_declares(h, n) for h, n, _ in declared))

    def _read(self, plugin: Plugin, manifest: ModuleType) -> tuple[tuple[str, ...], list[tuple[str, str, Any]]]:
        """(hooks, [(hook, name, declaration)]) of a manifest. Raises PluginError; registers nothing on failure."""
        api = getattr(manifest, "api", None)
        if api is None:
            raise PluginError(f"{plugin.module} sets no `api`; a manifest sets `api = {hookspecs.API}`.")
        if type(api) is not int or api < 1:
            raise PluginError(f"`api` is an integer, at present {hookspecs.API}; {plugin.module} sets {api!r}.")
        if api > hookspecs.API:
            raise PluginError(
                f"it is written for api {api}, this breccia-core reads api {hookspecs.API}; upgrade breccia-core."
            )
        for other in self.plugins:
            if other.status == "active" and plugin.name == other.name:
                raise PluginError(
                    f"the plug-in name {plugin.name!r} is taken by {other.distribution}; rename the entry point of one."
                )
        try:
            self._manager.register(manifest, plugin.name)
            declared = self._declarations(plugin, manifest)
        except BaseException:
            if self._manager.get_plugin(plugin.name) is manifest:
                self._manager.unregister(manifest)
            raise
        return tuple(dict.fromkeys(hook for hook, _, _ in declared)), declared

    def _declarations(self, plugin: Plugin, manifest: ModuleType) -> list[tuple[str, str, Any]]:
        for name, value in vars(manifest).items():
            if name.startswith("breccia_") and callable(value) and not self._manager.parse_hookimpl_opts(manifest, name):
                if name in KINDS:
                    raise PluginError(f"{name} is not marked; put @breccia.hookimpl above it.")
                raise PluginError(f"it defines {name!r}, which is not a hook{suggestion(name, list(KINDS))}")
        implementations: dict[str, list[pluggy.HookImpl]] = {hook: [] for hook in KINDS}
        for caller in self._manager.get_hookcallers(manifest) or ():
            for implementation in (i for i in caller.get_hookimpls() if i.plugin is manifest):
                if caller.name in KINDS:
                    implementations[caller.name].append(implementation)
                elif not implementation.optionalhook:  # an optional hook belongs to a later breccia-core
                    raise PluginError(
                        f"it implements no hook of breccia: {caller.name!r}{suggestion(caller.name, list(KINDS))}"
                    )
        out: list[tuple[str, str, Any]] = []
        for hook, kind in KINDS.items():
            returned = [value for implementation in implementations[hook] for value in _returned(hook, implementation)]
            if hook == "breccia_kernels":
                own = [value for other, _, value in out if other == "breccia_operations"]
                returned = [*(kernel for op in own for kernel in kernels_of(op)), *returned]
            for value in returned:
                name = self._checked(hook, kind, value, out)
                if hook == "breccia_kernels":
                    value = self._for_an_op(value, out)
                out.append((hook, name, _stamped(value, plugin.name)))
        return out

    def _for_an_op(self, kernel: Kernel, so_far: list[tuple[str, str, Any]]) -> Kernel:
        """The kernel, of the op that it names or gives an alias of. Raises PluginError if there is none."""
        declared = [*self.operations.values(), *(value for hook, _, value in so_far if hook == "breccia_operations")]
        names = {name: op.name for op in declared for name in (op.name, *op.aliases)}
        if kernel.op not in names:
            raise PluginError(f"kernel {kernel.name!r}: no op {kernel.op!r}{suggestion(kernel.op, list(names))}")
        return kernel if names[kernel.op] == kernel.op else replace(kernel, op=names[kernel.op])

    def _checked(self, hook: str, kind: _Kind, value: Any, so_far: list[tuple[str, str, Any]]) -> str:
        fits = isinstance(value, type) and issubclass(value, kind.type) if kind.of_classes else isinstance(value, kind.type)
        if not fits:
            wanted = f"subclasses of {kind.type.__name__}" if kind.of_classes else f"{kind.type.__name__} instances"
            raise PluginError(f"{hook} returns {wanted}; it returned {value!r}.")
        name = _name_of(value, hook)
        kind.check(value)
        names = _names(name, value)
        for other_hook, other, declared in so_far:
            if other_hook == hook and (taken := sorted(names & _names(other, declared))):
                raise PluginError(f"{hook}: it declares the name {taken[0]!r} twice.")
        for other, declared in self.declared[hook].items():
            if taken := sorted(names & _names(other, declared)):
                owner = next(p.name for p in self.plugins if _declares(hook, other) in p.declares)
                raise PluginError(f"{hook}: the name {taken[0]!r} is taken by plug-in {owner!r}; choose another.")
        return name


def _name_of(value: Any, hook: str) -> str:
    if not value.name:
        raise PluginError(f"{hook} returned {value!r}, which has no name.")
    if not isinstance(value.name, str):
        raise PluginError(f"{hook} returned {value!r}: name must be str; got {value.name!r}.")
    return value.name


def _names(name: str, value: Any) -> set[str]:
    """The names of a declaration, including aliases."""
    return {name, *getattr(value, "aliases", ())}


def _returned(hook: str, implementation: pluggy.HookImpl) -> Iterable[Any]:
    """The declarations of a plug-in's implementation of `hook`. Raises PluginError naming the hook on any error."""
    if implementation.wrapper or implementation.hookwrapper:
        raise PluginError(f"{hook} is a wrapper; hooks here return declarations.")
    function: Callable[[], Any] = implementation.function
    try:
        return tuple(function())
    except Exception as e:
        raise PluginError(f"{hook} failed: {type(e).__name__}: {e}; a hook returns an iterable of declarations.") from e


def _declares(hook: str, name: str) -> str:
    return f"{hook.removeprefix('breccia_')}:{name}"


def _stamped(value: Any, plugin: str) -> Any:
    stamped = Operation | Kernel | Storage | Bridge | Foreign | Dialect | Command
    return replace(value, plugin=plugin) if isinstance(value, stamped) else value


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _core() -> tuple[Plugin, Callable[[], ModuleType]]:
    from .. import __version__

    return Plugin(_CORE_NAME, CORE, __version__, builtin.__name__), lambda: builtin


def _installed() -> list[tuple[Plugin, Callable[[], ModuleType]]]:
    def plugin_of(point: EntryPoint) -> tuple[Plugin, Callable[[], ModuleType]]:
        dist = point.dist
        plugin = Plugin(point.name, dist.name if dist else "unknown", dist.version if dist else "unknown", point.value)
        return plugin, lambda: import_module(point.value)

    def place(point: EntryPoint) -> tuple[str, str, str]:  # by name, not by order of installation
        return point.name, point.value, point.dist.name if point.dist else ""

    return [_core(), *(plugin_of(point) for point in sorted(entry_points(group=GROUP), key=place))]


_lock = reentrant()
_building = False


def registry() -> Registry:
    """The registry, built on first use."""
    current = frameworks.current
    return _first() if current is None else current  # pyright: ignore[reportReturnType]


def _first() -> Registry:
    with _lock:
        current = frameworks.current
        return reload() if current is None else current  # pyright: ignore[reportReturnType]


def reload() -> Registry:
    """Read entry points and the environment again (BRECCIA_BLOCK, BRECCIA_PREFER, BRECCIA_TRACE, BRECCIA_CHECK)."""
    global _building
    with _lock:
        if _building:  # by this thread, which has the lock
            raise PluginError("a manifest used the registry while it is being built; a manifest only returns declarations.")
        _building = True
        try:
            messages: list[str] = []
            fresh = Registry(_installed(), os.environ, messages.append)
        finally:
            _building = False
        frameworks.current = fresh  # replaces frameworks and table together
        for message in messages:
            _warn(message)
        return fresh


def _nobody_builds() -> None:
    """In a forked child, another thread that was building the registry does not exist."""
    global _building
    _building = False


at_fork(_nobody_builds)
