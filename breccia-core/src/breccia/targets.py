"""Checks of declarations: field types, and object references.

An object reference is a string `"package.module:attribute"`; the module is imported on first use only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import UnionType
from typing import Any, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

from .errors import PluginError
from .locks import reentrant

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: The registry of all declarations. Modules that the registry itself imports reach it through this object reference.
REGISTRY = "breccia.dispatch.registry:registry"


@cache
def load(target: str) -> Any:
    """Import the object that `target` references. Raises PluginError for a missing attribute; ImportError passes through."""
    module, _, path = target.partition(":")
    value: Any = import_module(module)
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError as e:
            raise PluginError(f"target {target!r}: {module} has no {path!r}; correct the declaration.") from e
    return value


#: Import the module with that name.
load_module = cache(import_module)


def once(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A thread-safe cache: `function` runs once per set of arguments, and concurrent callers wait for its result.

    Exceptions are not cached: the next call tries again.
    """
    lock, results = reentrant(), dict[Any, _T]()

    @wraps(function)
    def called(*arguments: _P.args, **options: _P.kwargs) -> _T:
        key = (arguments, tuple(options.items()))
        if key not in results:
            with lock:
                if key not in results:
                    results[key] = function(*arguments, **options)
        return results[key]

    return called


def load_declared(what: str, target: str, remedy: str = "") -> Any:
    """`load(target)` for the declaration `what`. Raises PluginError with its name and the cause, whatever the module raises."""
    try:
        return load(target)
    except (Exception, SystemExit) as e:
        cause = str(e).removesuffix(".") if isinstance(e, PluginError) else f"{type(e).__name__}: {e}"
        raise PluginError(f"{what} cannot be loaded: {cause}.{remedy}", target=target) from e


def check(target: Any, what: str) -> None:
    """Raise PluginError, naming `what`, unless `target` has the form `module:attribute`."""
    module, colon, path = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *path.split(".")]):
        raise PluginError(f"{what}: an object reference is written 'package.module:attribute'; got {target!r}.")


def check_fields(declaration: object, what: str) -> None:
    """Raise PluginError, naming `what`, unless each field of the dataclass has its annotated type."""
    for field, kind in _annotations(type(declaration)).items():
        value = getattr(declaration, field)
        if not _holds(value, kind):
            wanted = kind.__name__ if get_origin(kind) is None and isinstance(kind, type) else str(kind)
            raise PluginError(f"{what}: {field} must be {wanted}; got {value!r}.", **{field: value})


_annotations = cache(get_type_hints)


def _holds(value: Any, kind: Any) -> bool:
    """Whether `value` is of type `kind`: a class, a union, or a tuple of these"""
    inner = get_args(kind)
    if isinstance(kind, UnionType):
        return any(_holds(value, one) for one in inner)
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        items = cast("tuple[Any, ...]", value)
        each = inner[:1] * len(items) if inner[-1] is ... else inner
        return len(items) == len(each) and all(map(_holds, items, each))
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def installed(module: str) -> bool:
    """Whether `module` can be found, without importing it (its parent packages are imported)"""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent is missing; or the module was created by hand, without a spec
        return module in sys.modules


@cache
def locate(target: str) -> str:
    """`file:line` of the definition, found without importing its module; or the reason it was not found."""
    module, _, path = target.partition(":")
    try:
        spec = _spec(module)
    except (ImportError, ValueError) as e:
        return f"{target} ({e})"
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return f"{target} (no Python source found)"
    try:
        with open(spec.origin, encoding="utf-8") as f:
            body = ast.parse(f.read()).body
    except (OSError, SyntaxError, ValueError) as e:
        return f"{target} ({e})"
    line = 1
    for name in path.split("."):
        named = {name: node for node in _statements(body) for name in _defined(node)}
        definition = named.get(name) or named.get("__getattr__")  # which makes what a module does not define
        if definition is None:
            return f"{spec.origin} (no definition of {path})"
        line, body = definition.lineno, getattr(definition, "body", [])
    return f"{spec.origin}:{line}"


def _spec(module: str) -> ModuleSpec | None:
    """`find_spec`, without importing its parent packages."""
    name, *inner = module.split(".")
    spec = find_spec(name)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, including those under `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for block in (node.body, *(getattr(node, part, []) for part in ("orelse", "finalbody"))):
                yield from _statements(block)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    bound = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for t in bound if isinstance(t, ast.Name)]
