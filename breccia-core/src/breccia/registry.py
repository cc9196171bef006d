"""Registry: entry points to manifests to one table.

One broken plug-in is set aside with one warning and its reason kept; the others work. The registry is built under a
lock and swapped whole, so a reader sees the old one or the new one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from . import builtin, dispatch, frameworks, hookspecs
from .codecs import Codec
from .dispatch import Kernel, Table
from .errors import PluginError, PluginWarning, UnknownNameError, suggestion
from .frameworks import Framework
from .hookspecs import Bridge, Command
from .layouts import Layout
from .recipes import ScalingRecipe
from .rules import Rule

GROUP = "breccia"
#: Modules a manifest must not load: seconds of import for everybody, for nothing.
HEAVY = ("numpy", "torch", "jax", "mlx", "triton", "tensorflow", "safetensors", "torchao")


@dataclass(frozen=True)
class Plugin:
    """One plug-in found: `status` is "active", "set aside" or "blocked", with the reason."""

    name: str
    distribution: str
    version: str
    module: str
    status: str = "active"
    reason: str = ""
    hooks: tuple[str, ...] = ()
    declares: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Kind:
    """How one hook's declarations are checked and named."""

    type: type
    of_classes: bool
    name: Callable[[Any], str]
    check: Callable[[Any], None] = field(default=lambda declared: None)


def _targets(declared: Any) -> None:
    from . import targets

    targets.check(declared.target)


KINDS: dict[str, _Kind] = {
    "breccia_codecs": _Kind(Codec, False, lambda d: d.name),
    "breccia_rules": _Kind(Rule, False, lambda d: d.name),
    "breccia_layouts": _Kind(Layout, True, lambda d: d.name),
    "breccia_recipes": _Kind(ScalingRecipe, True, lambda d: d.name),
    "breccia_frameworks": _Kind(Framework, False, lambda d: d.name),
    "breccia_kernels": _Kind(Kernel, False, lambda d: d.name, lambda d: d.check()),
    "breccia_bridges": _Kind(Bridge, False, lambda d: d.name, _targets),
    "breccia_cli": _Kind(Command, False, lambda d: d.name, _targets),
}


class Registry:
    """What all active plug-ins declare, by hook and name."""

    def __init__(self, found: Iterable[tuple[Plugin, Callable[[], Any]]], environ: dict[str, str]) -> None:
        self.plugins: list[Plugin] = []
        self.declared: dict[str, dict[str, Any]] = {hook: {} for hook in KINDS}
        self._manager = pluggy.PluginManager("breccia")
        self._manager.add_hookspecs(hookspecs)
        blocked = _list(environ.get("BRECCIA_BLOCK", ""))
        for plugin, load in found:
            if plugin.name in blocked:
                self.plugins.append(replace(plugin, status="blocked", reason="named in BRECCIA_BLOCK"))
            else:
                self.plugins.append(self._add(plugin, load))
        prefer = _list(environ.get("BRECCIA_PREFER", ""))
        tracing = environ.get("BRECCIA_TRACE", "") not in ("", "0")
        if tracing and not dispatch.trace.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("breccia: %(message)s"))
            dispatch.trace.addHandler(handler)
            dispatch.trace.setLevel(logging.INFO)
        self.table = Table(self.declared["breccia_kernels"].values(), prefer, tracing)

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
    def bridges(self) -> dict[str, Bridge]:
        return self.declared["breccia_bridges"]

    @property
    def commands(self) -> dict[str, Command]:
        return self.declared["breccia_cli"]

    def look_up(self, hook: str, name: str, what: str) -> Any:
        """The declaration of that name. Raises UnknownNameError with a suggestion."""
        table = self.declared[hook]
        if name not in table:
            raise UnknownNameError(f"no {what} {name!r}{suggestion(str(name), list(table))}", name=name, known=list(table))
        return table[name]

    # -- adding one plug-in ---------------------------------------------------------------------------------------

    def _add(self, plugin: Plugin, load: Callable[[], Any]) -> Plugin:
        before = set(sys.modules)
        try:
            manifest = load()
            hooks, declared = self._read(plugin, manifest)
        except Exception as e:  # whatever a stranger's module raises must not stop the others
            if plugin.module == builtin.__name__:
                raise
            why = str(e) if isinstance(e, PluginError) else f"{type(e).__name__}: {e}"
            warnings.warn(
                f"breccia plug-in {plugin.name!r} ({plugin.distribution} {plugin.version}) is set aside: {why}",
                PluginWarning,
                stacklevel=2,
            )
            return replace(plugin, status="set aside", reason=why)
        heavy = [m for m in HEAVY if m in sys.modules and m not in before]
        if heavy:
            warnings.warn(
                f"breccia plug-in {plugin.name!r} ({plugin.module}) imported {', '.join(heavy)} while declaring itself; move "
                "that import into the module its targets name.",
                PluginWarning,
                stacklevel=2,
            )
        for hook, name, value in declared:
            self.declared[hook][name] = value
        return replace(plugin, hooks=hooks, declares=tuple(f"{h.removeprefix('breccia_')}:{n}" for h, n, _ in declared))

    def _read(self, plugin: Plugin, manifest: Any) -> tuple[tuple[str, ...], list[tuple[str, str, Any]]]:
        """(hooks, [(hook, name, declaration)]) of a manifest. Raises PluginError; registers nothing on failure."""
        api = getattr(manifest, "api", None)
        if api is None:
            raise PluginError(f"{plugin.module} sets no `api`; a manifest sets `api = {hookspecs.API}`.")
        if not isinstance(api, int) or api > hookspecs.API:
            raise PluginError(
                f"it is written for api {api}, this breccia-core reads api {hookspecs.API}; upgrade breccia-core."
            )
        self._manager.register(manifest, plugin.name)
        try:
            declared = self._declarations(plugin, manifest)
        except BaseException:
            self._manager.unregister(manifest)
            raise
        return tuple(dict.fromkeys(hook for hook, _, _ in declared)), declared

    def _declarations(self, plugin: Plugin, manifest: Any) -> list[tuple[str, str, Any]]:
        for caller in self._manager.get_hookcallers(manifest) or ():
            if not caller.has_spec():
                raise PluginError(f"it implements no hook of breccia: {caller.name!r}{suggestion(caller.name, list(KINDS))}")
        for name in vars(manifest):
            if name.startswith("breccia_") and name not in KINDS:
                raise PluginError(f"it defines {name!r}, which is no hook{suggestion(name, list(KINDS))}")
        out: list[tuple[str, str, Any]] = []
        for hook, kind in KINDS.items():
            implementation = getattr(manifest, hook, None)
            if implementation is None:
                continue
            if self._manager.parse_hookimpl_opts(manifest, hook) is None:
                raise PluginError(f"{hook} is not marked; put @breccia.hookimpl above it.")
            for value in implementation():
                out.append((hook, self._checked(hook, kind, value, out), _stamped(value, plugin.name)))
        return out

    def _checked(self, hook: str, kind: _Kind, value: Any, so_far: list[tuple[str, str, Any]]) -> str:
        fits = isinstance(value, type) and issubclass(value, kind.type) if kind.of_classes else isinstance(value, kind.type)
        if not fits:
            wanted = f"subclasses of {kind.type.__name__}" if kind.of_classes else f"{kind.type.__name__} instances"
            raise PluginError(f"{hook} returns {wanted}; it returned {value!r}.")
        name = kind.name(value)
        if not name:
            raise PluginError(f"{hook} returned {value!r}, which has no name.")
        twice = name in self.declared[hook] or any((h, n) == (hook, name) for h, n, _ in so_far)
        if twice:
            raise PluginError(f"{hook}: the name {name!r} is taken already; choose another.")
        kind.check(value)
        return name


def _stamped(value: Any, plugin: str) -> Any:
    return replace(value, plugin=plugin) if isinstance(value, Kernel | Bridge | Command) else value


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _core() -> tuple[Plugin, Callable[[], Any]]:
    from . import __version__

    return Plugin("core", "breccia-core", __version__, builtin.__name__), lambda: builtin


def _installed() -> list[tuple[Plugin, Callable[[], Any]]]:
    def found(point: EntryPoint) -> tuple[Plugin, Callable[[], Any]]:
        dist = point.dist
        plugin = Plugin(point.name, dist.name if dist else "unknown", dist.version if dist else "unknown", point.value)
        return plugin, lambda: import_module(point.value)

    return [_core(), *(found(p) for p in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value)))]


_lock = threading.RLock()
_current: Registry | None = None


def registry() -> Registry:
    """The registry, built on first use."""
    if _current is None:
        with _lock:
            return _current if _current is not None else reload()
    return _current


def reload() -> Registry:
    """Read entry points and the environment again (BRECCIA_BLOCK, BRECCIA_PREFER, BRECCIA_TRACE)."""
    global _current
    with _lock:
        fresh = Registry(_installed(), dict(os.environ))
        frameworks.install(tuple(fresh.frameworks.values()))
        _current = fresh
        return fresh
