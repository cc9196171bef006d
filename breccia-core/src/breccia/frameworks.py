"""Frameworks: whose array is this, and which vocabulary (`Ops`) computes on it.

An array of a framework exists only if that framework was imported, so a framework not in `sys.modules` is
never imported to answer the question.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import targets
from .errors import PluginError, UnsupportedError
from .siblings import SIBLINGS

if TYPE_CHECKING:
    from .ops import Ops

#: Floating dtypes `cast` reads and `dequantize` writes, by the names all frameworks share.
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Framework:
    """One array library: the module that defines its `types`, and the target of its `Ops` instance.

    types: names of its array types in `module`; "ma.MaskedArray" is one of the submodule `ma`.
    refuses: (name, remedy) of subtypes that compute as no plain array does; the remedy is a sentence for the error.
    kinds: the kinds of device its arrays can be on, where there are no others; empty where nobody can tell.
    devices: the target of a function that lists the devices there are, a line of text for each, for `breccia doctor`.
    device: the target of a function that gives the kind of device of arrays that do not say theirs, as traced ones do not.
    container: the target of a function that makes ScaledTensor known to the framework. It is called, maybe often, when breccia
        meets the first array of a type, of whatever framework, and this one is imported.
    """

    name: str
    module: str
    types: tuple[str, ...]
    ops: str
    refuses: tuple[tuple[str, str], ...] = ()
    devices: str | None = None
    kinds: tuple[str, ...] = ()
    device: str | None = None
    container: str | None = None

    @property
    def package(self) -> str:
        """The top-level package that `module` is in."""
        return self.module.partition(".")[0]

    def check(self) -> None:
        """Raise PluginError where the declaration cannot work."""
        what = f"framework {self.name!r}"
        targets.check_fields(self, what)
        for field in ("ops", "devices", "device", "container"):
            if (target := getattr(self, field)) is not None:
                targets.check(target, f"{what}: {field}")
        if not self.types:
            raise PluginError(f"{what}: types names the array types in {self.module}; got none.")


_installed: tuple[Framework, ...] = ()
_by_type: dict[type, Framework] = {}


def install(frameworks: tuple[Framework, ...]) -> None:
    """Replace the known frameworks (the registry calls this, once per load)."""
    global _installed, _by_type
    _installed, _by_type = frameworks, {}


def framework_of(x: object, what: str = "x") -> Framework:
    """The framework of array `x`. Raises UnsupportedError, naming `what` was given and the way out."""
    found = _by_type.get(type(x))
    return _find(x, what) if found is None else found


def _find(x: object, what: str) -> Framework:
    """`framework_of` for the first array of a type. Asked with isinstance, since tracers are instances only."""
    if not _installed:
        targets.load(targets.REGISTRY)()  # it installs the declared frameworks here
    table, kind = _by_type, type(x)
    found = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    for framework in _installed:
        if framework.container is not None and _types(framework.module, framework.types):
            targets.load(framework.container)()
    for framework in _installed:
        if isinstance(x, _types(framework.module, framework.types)):
            for name, remedy in framework.refuses:
                if isinstance(x, _types(framework.module, (name,))):
                    raise UnsupportedError(f"{what} is a {found}, not a plain {framework.name} array. {remedy}", found=found)
            table[kind] = framework
            return framework
    known = ", ".join(f.name for f in _installed)
    raise UnsupportedError(
        f"{what} must be an array of an installed framework ({known}); got {found}. {_remedy(kind)}", found=found
    )


def _types(module: str, names: tuple[str, ...]) -> tuple[type, ...]:
    """The types that exist by now: none before their module is imported, fewer while that import is under way."""
    homes = ((".".join((module, *path)), name) for *path, name in (n.split(".") for n in names))
    return tuple(t for home, name in homes if isinstance(t := getattr(sys.modules.get(home), name, None), type))


def _remedy(kind: type) -> str:
    root = kind.__module__.partition(".")[0]
    for sibling in SIBLINGS:
        if root in sibling.arrays and sibling.plugin not in {f.name for f in _installed}:
            return f"Install its plug-in: {sibling.remedy}.{targets.load(targets.REGISTRY)().absence(sibling.distribution)}"
    return "Convert it first: np.asarray(x, dtype=np.float32)."


def ops_of(x: Any, what: str = "x") -> Ops:
    """The vocabulary of `x`'s framework."""
    return targets.load(framework_of(x, what).ops)


def device_of(array: object) -> str:
    """Kind of device an array is on: "cpu", "cuda", ...; "cpu" where the framework does not say."""
    device = getattr(array, "device", None)
    framework = _by_type.get(type(array)) if device is None else None
    if framework is not None and framework.device is not None:
        device = targets.load(framework.device)()
    device = next(iter(getattr(device, "device_set", ())), device)  # JAX: the sharding of an array over devices of one kind
    name = device if isinstance(device, str) else getattr(device, "type", None) or getattr(device, "platform", None) or "cpu"
    return {"gpu": "cuda"}.get(str(name), str(name).partition(":")[0])


def _place(array: Any) -> str | None:
    """The device, with its number where arrays of its kind have one; None for an array that does not say."""
    if getattr(array, "device", None) is None:
        return None
    number = getattr(getattr(array, "device", None), "index", None)
    return f"{device_of(array)}:{number}" if isinstance(number, int) else device_of(array)


def same_framework(arrays: dict[str, Any]) -> Framework:
    """The one framework of all arrays, which are on one device. Raises UnsupportedError naming two that differ."""
    first, *rest = arrays.items()
    framework = framework_of(first[1], first[0])
    for name, array in rest:
        other = framework_of(array, name)
        if other is not framework:
            raise UnsupportedError(
                f"{first[0]} is a {framework.name} array and {name} a {other.name} array; move both to one framework: "
                f"breccia.bridges.from_dlpack(x, {framework.name!r}) takes a ScaledTensor there, {framework.name}'s own "
                "from_dlpack a plain array.",
                first=framework.name,
                second=other.name,
            )
        here, there = _place(first[1]), _place(array)
        if here != there and None not in (here, there):
            raise UnsupportedError(
                f"{first[0]} is on {here} and {name} on {there}; move both to one device. Nothing is copied between devices "
                "unasked.",
                first=here,
                second=there,
            )
    return framework


def dtype_name(x: Any) -> str:
    """The bare name of an array's or dtype's dtype: "float32", "float8_e4m3fn", ... in every framework's spelling."""
    dtype = getattr(x, "dtype", x)
    return str(getattr(dtype, "name", None) or dtype).rpartition(".")[2]


def output_dtype(dtype: Any) -> str:
    """The name of a floating output dtype, from any framework's spelling. Raises UnsupportedError."""
    name = dtype.__name__ if isinstance(dtype, type) else str(getattr(dtype, "name", None) or dtype).rpartition(".")[2]
    if name not in FLOATS:
        raise UnsupportedError(f"out_dtype is one of {', '.join(FLOATS)} in any framework's spelling; got {dtype!r}.")
    return name
