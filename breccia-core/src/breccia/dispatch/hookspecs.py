"""The extension API: everything that a plug-in's manifest may declare.

A manifest is a module named by an entry point of group `breccia`. It sets `api = 1`, imports only `breccia` and the
standard library, and returns declarations; it does nothing else. Implementations are object references (strings).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pluggy

from .. import targets
from ..arrays.frameworks import Framework
from ..codecs import Codec
from ..dialects import Dialect
from ..errors import PluginError
from ..layouts import Layout
from ..operations import Operation
from ..recipes import ScalingRecipe
from ..rules import Rule
from ..tensors.storage import Storage
from .kernel import Kernel

#: Version of this API. A manifest with a higher `api` is set aside with a message.
API = 1

hookspec = pluggy.HookspecMarker("breccia")
hookimpl = pluggy.HookimplMarker("breccia")


@dataclass(frozen=True)
class Bridge:
    """A function of `breccia.bridges`, by name.

    requires: modules it needs. install: the requirement that provides them, for pip.
    """

    name: str
    target: str
    requires: tuple[str, ...] = ()
    install: str = ""
    plugin: str = field(default="", compare=False)

    def check(self) -> None:
        """Raise PluginError if the declaration is invalid."""
        what = f"bridge {self.name!r}"
        targets.check_fields(self, what)
        targets.check(self.target, f"{what}: target")
        if not self.name.isidentifier() or self.name.startswith("_"):
            raise PluginError(f"{what}: its name is a public attribute of breccia.bridges, like 'to_acme'.")
        if bool(self.requires) != bool(self.install):
            raise PluginError(
                f"{what}: requires is a tuple of modules, and install their pip requirement; got "
                f"requires={self.requires!r}, install={self.install!r}."
            )


@dataclass(frozen=True)
class Foreign:
    """Another library's classes of quantized tensors, which `breccia.from_foreign` and `breccia.to_foreign` convert.

    name: the library, as `to_foreign(st, name)` takes it.
    classes: "module:Class" each. They are never imported: an object is of a class if its own class or a base has that name and
        was defined in that module or below it, so that "acme:Tensor" names any class `Tensor` of the package acme.
    from_foreign: object reference of f(obj, **options) -> ScaledTensor or TensorPair.
    to_foreign: object reference of f(st, **options) -> the library's object; None if there is no way back.
    requires: modules that `to_foreign` needs. install: the requirement that provides them, for pip.
    """

    name: str
    classes: tuple[str, ...]
    from_foreign: str
    to_foreign: str | None = None
    requires: tuple[str, ...] = ()
    install: str = ""
    plugin: str = field(default="", compare=False)

    def check(self) -> None:
        """Raise PluginError if the declaration is invalid."""
        what = f"foreign library {self.name!r}"
        targets.check_fields(self, what)
        for reference in self.classes:
            targets.check(reference, f"{what}: classes")
        if not self.classes:
            raise PluginError(f"{what}: classes names at least one class, like ('acme:Tensor',).")
        targets.check(self.from_foreign, f"{what}: from_foreign")
        if self.to_foreign is not None:
            targets.check(self.to_foreign, f"{what}: to_foreign")
        if bool(self.requires) != bool(self.install):
            raise PluginError(
                f"{what}: requires is a tuple of modules, and install their pip requirement; got "
                f"requires={self.requires!r}, install={self.install!r}."
            )


@dataclass(frozen=True)
class Command:
    """A command of the `breccia` program, loaded on first use.

    target: a function that Typer supports, or a `typer.Typer` with commands of its own.

    help: the line that `breccia --help` shows.
    """

    name: str
    target: str
    help: str
    plugin: str = field(default="", compare=False)

    def check(self) -> None:
        """Raise PluginError if the declaration is invalid."""
        what = f"command {self.name!r}"
        targets.check_fields(self, what)
        targets.check(self.target, f"{what}: target")
        if self.name.split() != [self.name] or self.name.startswith("-"):
            raise PluginError(f"{what}: its name is one word of a command line, like 'acme'.")


@hookspec
def breccia_codecs() -> Iterable[Codec]:
    """Number formats for elements and scales."""
    return ()


@hookspec
def breccia_rules() -> Iterable[Rule]:
    """Scale rules, written over `Ops`."""
    return ()


@hookspec
def breccia_layouts() -> Iterable[type[Layout]]:
    """Layout classes, found by name when a file is read."""
    return ()


@hookspec
def breccia_storages() -> Iterable[Storage]:
    """Exact rearrangements of codes and scales for kernels."""
    return ()


@hookspec
def breccia_recipes() -> Iterable[type[ScalingRecipe]]:
    """Recipe classes, found by name in files and on the command line."""
    return ()


@hookspec
def breccia_frameworks() -> Iterable[Framework]:
    """Array libraries and their backend primitives."""
    return ()


@hookspec
def breccia_operations() -> Iterable[Operation]:
    """Ops. Each has a kernel for any framework by its declaration."""
    return ()


@hookspec
def breccia_kernels() -> Iterable[Kernel]:
    """Implementations of the ops."""
    return ()


@hookspec
def breccia_bridges() -> Iterable[Bridge]:
    """Functions of `breccia.bridges`."""
    return ()


@hookspec
def breccia_foreign() -> Iterable[Foreign]:
    """Classes of other libraries that `breccia.from_foreign` and `breccia.to_foreign` convert."""
    return ()


@hookspec
def breccia_dialects() -> Iterable[Dialect]:
    """How other libraries store quantized values in checkpoints."""
    return ()


@hookspec
def breccia_cli() -> Iterable[Command]:
    """Commands of the `breccia` program."""
    return ()
