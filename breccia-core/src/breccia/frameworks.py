"""Frameworks: whose array is this, and which vocabulary (`Ops`) computes on it.

A tensor of a framework exists only if that framework was imported, so a framework not in `sys.modules` is
never imported to answer the question.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import targets
from .errors import PluginError, UnsupportedError

if TYPE_CHECKING:
    from .ops import Ops

#: Floating dtypes `cast` reads and `dequantize` writes, by the names all frameworks share.
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Framework:
    """One array library: the module that defines its `types`, and the target of its `Ops` instance."""

    name: str
    module: str
    types: tuple[str, ...]
    ops: str

    def check(self) -> None:
        """Raise PluginError where the declaration cannot work."""
        targets.check(self.ops)
        if isinstance(self.types, str) or not self.types:
            raise PluginError(f"framework {self.name!r}: types is a tuple of names in {self.module}; got {self.types!r}.")


_installed: tuple[Framework, ...] = ()
_by_type: dict[type, Framework | None] = {}


def install(frameworks: tuple[Framework, ...]) -> None:
    """Replace the known frameworks (the registry calls this, once per load)."""
    global _installed, _by_type
    _installed, _by_type = frameworks, {}


def find(x: object) -> Framework | None:
    """The framework `x` is an array of, or None. Cached by type; asked with isinstance, since tracers are instances only."""
    kind = type(x)
    try:
        return _by_type[kind]
    except KeyError:
        pass
    if not _installed:
        targets.load(targets.REGISTRY)()  # it installs the declared frameworks here
    table = _by_type
    for framework in _installed:
        if isinstance(x, _types(framework)):
            table[kind] = framework
            return framework
    return None


def _types(framework: Framework) -> tuple[type, ...]:
    """Its array types that exist by now: none before its module is imported, fewer while that import is under way."""
    module = sys.modules.get(framework.module)
    return tuple(found for name in framework.types if isinstance(found := getattr(module, name, None), type))


def framework_of(x: object, what: str = "x") -> Framework:
    """The framework of array `x`. Raises UnsupportedError, naming `what` was given and the way out."""
    found = find(x)
    if found is None:
        known = ", ".join(f.name for f in _installed)
        given = type(x)
        kind = f"{given.__module__}.{given.__qualname__}".removeprefix("builtins.")
        raise UnsupportedError(
            f"{what} must be an array of an installed framework ({known}); got {kind}. {_remedy(given)}",
            found=kind,
        )
    return found


def _remedy(kind: type) -> str:
    root = kind.__module__.partition(".")[0]
    siblings = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "mlx": "mlx"}
    if root in siblings and siblings[root] not in {f.name for f in _installed}:
        return f"Install its plug-in: pip install breccia-{siblings[root]}."
    return "Convert it first: np.asarray(x, dtype=np.float32)."


def ops_of(x: Any, what: str = "x") -> Ops:
    """The vocabulary of `x`'s framework."""
    return targets.load(framework_of(x, what).ops)


def same_framework(arrays: dict[str, Any]) -> Framework:
    """The one framework of all arrays. Raises UnsupportedError naming two that differ."""
    first, *rest = arrays.items()
    framework = framework_of(first[1], first[0])
    for name, array in rest:
        other = framework_of(array, name)
        if other is not framework:
            raise UnsupportedError(
                f"{first[0]} is a {framework.name} array and {name} a {other.name} array; move both to one framework "
                "(breccia.bridges.from_dlpack, or the frameworks' own conversions).",
                first=framework.name,
                second=other.name,
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
