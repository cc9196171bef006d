"""Frameworks: the framework of an array, and the backend primitives (`Ops`) that compute on it.

An array exists only if its framework was imported, so a framework that is not in `sys.modules` is
never imported for the lookup.
"""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from .. import targets
from ..codecs import BF16, F16, F32, float_codec
from ..errors import PluginError, PluginWarning, UnsupportedError
from ..locks import at_fork
from ..siblings import SIBLINGS

if TYPE_CHECKING:
    from .ops import Ops

#: Floating dtypes `cast` reads and `dequantize` writes, by the names common to all frameworks.
FLOATS = tuple(str(codec.dtype) for codec in (F32, F16, BF16))


@dataclass(frozen=True)
class Framework:
    """One array library: the module that defines its `types`, and an object reference to its `Ops` instance.

    types: names of its array types in `module`; "ma.MaskedArray" is one of the submodule `ma`.
    refuses: (name, remedy) of subtypes that do not compute like plain arrays; the error message ends with the remedy.
    kinds: all kinds of device its arrays can be on; empty where unknown.
    devices: object reference to a function that lists the available devices, one line of text each, for `breccia doctor`.
    device: object reference to a function that returns the kind of device of arrays without one, such as traced arrays.
    container: object reference to a function that registers ScaledTensor with the framework. It is called once, at
        the first array of a new type of any framework, if this one is imported. A failure is a warning.
    frontend: the module between ops and kernels: gradients, tracing, compilers. Its `runner_of(operation)` gives
        f((*arguments, options), prefer), as that of `breccia.dispatch.calls` does, which runs where there is no frontend.
    opaque: object reference to f(*arrays) -> None | a description, for arrays without readable memory: fakes, placeholders of
        transformations, subclasses. Only kernels that declare `traces` receive such arrays.
    capability: object reference to f(device) -> (major, minor) | None, the compute capability of an array's device.
    traced: the module of the functions that a compiler of the framework traces in place of those marked by
        `breccia.tracing.traced_by_framework`.
    forks: whether its arrays can be used in a child that was forked after the parent used some. The operations of a framework
        whose threads do not exist there would never end.
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
    frontend: str | None = None
    opaque: str | None = None
    capability: str | None = None
    traced: str | None = None
    forks: bool = True

    @property
    def package(self) -> str:
        """The top-level package of `module`."""
        return self.module.partition(".")[0]

    def check(self) -> None:
        """Raise PluginError if the declaration is invalid."""
        what = f"framework {self.name!r}"
        targets.check_fields(self, what)
        for field in ("ops", "devices", "device", "container", "opaque", "capability"):
            if (target := getattr(self, field)) is not None:
                targets.check(target, f"{what}: {field}")
        for field in ("frontend", "traced"):
            name = getattr(self, field)
            if name is not None and not all(part.isidentifier() for part in name.split(".")):
                raise PluginError(f"{what}: {field} is a module, written 'package.module'; got {name!r}.")
        if not self.types:
            raise PluginError(f"{what}: types names the array types in {self.module}; got none.")


class Snapshot(Protocol):
    """The declarations at one time. It is replaced as a whole, so that frameworks and kernels stay consistent."""

    #: The framework of each type of array met so far.
    types: dict[type, Framework]

    @property
    def frameworks(self) -> dict[str, Framework]:
        """All frameworks, by name."""
        ...


#: The registry in use; None before its first use. `breccia.dispatch.registry` sets it.
current: Snapshot | None = None


def framework_of(x: object, what: str = "x") -> Framework:
    """The framework of array `x`. Raises UnsupportedError, naming `what` and the remedy."""
    framework = None if current is None else current.types.get(type(x))
    return _find(x, what) if framework is None else framework


def _find(x: object, what: str) -> Framework:
    """`framework_of` for the first array of a type. Uses isinstance, since tracers are virtual instances."""
    declared: Snapshot = current or targets.load(targets.REGISTRY)()
    frameworks, kind = declared.frameworks.values(), type(x)
    title = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    for framework in frameworks:
        if framework.container is not None and _types(framework.module, framework.types):
            _introduce(framework.name, framework.container)
    for framework in frameworks:
        if isinstance(x, _types(framework.module, framework.types)):
            for name, remedy in framework.refuses:
                if isinstance(x, _types(framework.module, (name,))):
                    raise UnsupportedError(f"{what} is a {title}, not a plain {framework.name} array. {remedy}", found=title)
            if framework.name in _lost:
                raise UnsupportedError(
                    f"{what} is a {title} in a process that was forked after {framework.name} had started its threads, which "
                    "do not exist here: the operation would never end. Start processes by the method 'spawn' or 'forkserver' "
                    "of multiprocessing, or pass NumPy arrays.",
                    found=title,
                )
            declared.types[kind] = framework
            return framework
    known = ", ".join(declared.frameworks)
    raise UnsupportedError(
        f"{what} must be an array of an installed framework ({known}); got {title}. {_remedy(kind)}", found=title
    )


#: Frameworks that cannot be used in this process, which was forked.
_lost: set[str] = set()


def _lose() -> None:
    """In a forked child: refuse arrays of frameworks whose threads do not exist."""
    types = {} if current is None else current.types
    for kind, framework in list(types.items()):
        if not framework.forks:
            _lost.add(framework.name)
            del types[kind]


at_fork(_lose)


def _introduce(framework: str, container: str) -> None:
    """Register ScaledTensor with a framework. A failure affects only that framework: it is reported once, as a warning."""
    if framework in _under_way():  # by this thread: the function itself uses arrays
        return
    message = _introduction(framework, container)
    if message and message not in _reported:
        _reported.add(message)
        warnings.warn(message, PluginWarning, stacklevel=4)


_reported: set[str] = set()


_local = threading.local()


def _under_way() -> set[str]:
    """The frameworks with which this thread is registering ScaledTensor."""
    return vars(_local).setdefault("frameworks", set[str]())


@targets.once
def _introduction(framework: str, container: str) -> str:
    """Empty, or the reason for the failure."""
    try:
        _under_way().add(framework)
        targets.load(container)()
    except Exception as e:
        return (
            f"breccia cannot register ScaledTensor with {framework}: {container} raised {type(e).__name__}: {e}. Trees, "
            f"transformations and checkpoints of {framework} will not handle it; casts work."
        )
    finally:
        _under_way().discard(framework)
    return ""


def _types(module: str, names: tuple[str, ...]) -> tuple[type, ...]:
    """The types that exist so far: none before their module is imported, some during that import."""
    homes = ((".".join((module, *path)), name) for *path, name in (n.split(".") for n in names))
    return tuple(t for home, name in homes if isinstance(t := getattr(sys.modules.get(home), name, None), type))


def _remedy(kind: type) -> str:
    root = kind.__module__.partition(".")[0]
    for sibling in SIBLINGS:
        if root in sibling.arrays and (current is None or sibling.plugin not in current.frameworks):
            return f"Install its plug-in: {sibling.remedy}.{targets.load(targets.REGISTRY)().absence(sibling.distribution)}"
    return "Convert it first: np.asarray(x, dtype=np.float32)."


def shape_of(x: Any, what: str = "x") -> tuple[int, ...]:
    """The shape of an array. Raises UnsupportedError for what has none: no array, or one of torch's nested tensors."""
    try:
        return tuple(x.shape)
    except Exception as e:
        name = framework_of(x, what).name  # raises for what is no array
        raise UnsupportedError(
            f"{what} is a {name} array whose shape cannot be read ({type(e).__name__}: {e}). breccia computes on dense arrays.",
            found=type(x).__name__,
        ) from e


def ops_of(x: Any, what: str = "x") -> Ops:
    """The backend primitives of `x`'s framework."""
    return targets.load(framework_of(x, what).ops)


@dataclass(frozen=True)
class Device:
    """The device of an array. kind: "cpu", "cuda", ...; index: its number, None if it has none; capability: (9, 0), say."""

    kind: str
    index: int | None = None
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def device_of(array: object) -> str:
    """The kind of device of an array: "cpu", "cuda", ...; "cpu" where the framework does not say."""
    return _kind(_declared_device(array))


def place_of(array: object) -> Device:
    """The device of an array, with its number and compute capability where the framework knows them."""
    framework = _known(array)
    return _place(_declared_device(array), None if framework is None else framework.capability)


def _declared_device(array: object) -> Any:
    """The framework's device object of an array; None if it has none."""
    device = getattr(array, "device", None)
    if device is None and (framework := _known(array)) is not None and framework.device is not None:
        device = targets.load(framework.device)()
    return next(iter(getattr(device, "device_set", ())), device)  # JAX: the sharding of an array over devices of one kind


def _known(array: object) -> Framework | None:
    """The framework of an array, which may be the first of its type; None of other objects."""
    try:
        return None if current is None else framework_of(array)
    except UnsupportedError:
        return None


def _kind(device: Any) -> str:
    name = device if isinstance(device, str) else getattr(device, "type", None) or getattr(device, "platform", None) or "cpu"
    return {"gpu": "cuda"}.get(str(name), str(name).partition(":")[0])


@lru_cache(maxsize=256)
def _place(device: Any, capability: str | None) -> Device:
    kind = _kind(device)
    if isinstance(device, str) and ":" in device:
        return Device(kind, int(device.rpartition(":")[2]) if device.rpartition(":")[2].isdigit() else None)
    index = getattr(device, "index", None) if kind != "cpu" else None
    index = getattr(device, "id", None) if index is None and kind != "cpu" else index
    number = index if isinstance(index, int) else None
    return Device(kind, number, targets.load(capability)(device) if capability is not None else None)


def _named_place(array: Any) -> str | None:
    """The device, with its number where arrays of its kind have one; None for an array without one."""
    if getattr(array, "device", None) is None:
        return None
    number = getattr(getattr(array, "device", None), "index", None)
    return f"{device_of(array)}:{number}" if isinstance(number, int) else device_of(array)


def common_framework(*arrays: object) -> Framework | None:
    """The one framework of arrays on one device, of types met before; None where `same_framework` has to find out.

    An array may be None: absent.
    """
    if current is None:
        return None
    types, first = current.types, arrays[0]
    framework, place = types.get(type(first)), getattr(first, "device", None)
    for x in arrays[1:]:
        if x is not None and (types.get(type(x)) is not framework or getattr(x, "device", None) != place):
            return None
    return framework


def same_framework(arrays: dict[str, Any]) -> Framework:
    """The one framework of all arrays, which are on one device. Raises UnsupportedError naming two that differ."""
    pairs = iter(arrays.items())
    first = next(pairs)
    framework = framework_of(first[1], first[0])
    place = getattr(first[1], "device", None)
    for name, array in pairs:
        other = framework_of(array, name)
        if other is framework and getattr(array, "device", None) == place:
            continue
        if other.name != framework.name:  # another declaration of the same name predates a reload
            raise UnsupportedError(
                f"{first[0]} is a {framework.name} array and {name} a {other.name} array; move both to one framework: "
                f"breccia.bridges.from_dlpack(x, {framework.name!r}) takes a ScaledTensor there, {framework.name}'s own "
                "from_dlpack a plain array.",
                first=framework.name,
                second=other.name,
            )
        here, there = _named_place(first[1]), _named_place(array)
        if here != there and None not in (here, there):
            raise UnsupportedError(
                f"{first[0]} is on {here} and {name} on {there}; move both to one device. Nothing is copied between devices "
                "unasked.",
                first=here,
                second=there,
            )
    return framework


def dtype_name(x: Any) -> str:
    """The bare name of an array's or dtype's dtype: "float32", "float8_e4m3fn", ... for any framework."""
    dtype = getattr(x, "dtype", x)
    return _name_of(dtype) if dtype.__hash__ else _bare_name(dtype)


def bit_pattern(dtype: str) -> str:
    """The name of the unsigned integers that hold a dtype's bits where NumPy, files or DLPack lack it; other dtypes stay."""
    return "uint8" if dtype.startswith("float8") else "uint16" if dtype == "bfloat16" else dtype


def _bare_name(dtype: Any) -> str:
    return str(getattr(dtype, "name", None) or dtype).rpartition(".")[2]


_name_of = lru_cache(maxsize=256)(_bare_name)


def output_dtype(dtype: Any) -> str:
    """The name of a floating output dtype, from any framework's spelling. Raises UnsupportedError."""
    if type(dtype) is str and dtype in FLOATS:
        return dtype
    name = dtype.__name__ if isinstance(dtype, type) else dtype_name(dtype)
    codec = float_codec(name.lower())
    if codec is None:
        raise UnsupportedError(f"out_dtype is one of {', '.join(FLOATS)} in any framework's spelling; got {dtype!r}.")
    return str(codec.dtype)
