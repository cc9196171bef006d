"""Targets: strings `"package.module:attribute"` that declarations hold so that nothing is imported before it wins."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .errors import PluginError

#: What knows every declaration by name. Modules that the registry itself imports reach it through this target.
REGISTRY = "breccia.registry:registry"


@cache
def load(target: str) -> Any:
    """Import what `target` names. Raises PluginError where the attribute is missing; ImportError passes through."""
    module, _, path = target.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as e:
            raise PluginError(f"target {target!r}: {module} has no {path!r}; correct the declaration.") from e
    return found


def check(target: Any) -> None:
    """Raise PluginError unless `target` is written `module:attribute`."""
    module, colon, path = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *path.split(".")]):
        raise PluginError(f"a target is written 'package.module:attribute'; got {target!r}.")


def installed(module: str) -> bool:
    """Can `module` be imported, as far as can be told without importing it (but for its parents)?"""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent is missing; or the module was put in place by hand, without a spec
        return module in sys.modules


@cache
def locate(target: str) -> str:
    """`file:line` of the definition, found without importing its module; or why it was not found."""
    module, _, path = target.partition(":")
    try:
        spec = find_spec(module)
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
        found = next((node for node in _statements(body) if name in _defined(node)), None)
        if found is None:
            return f"{spec.origin} (no definition of {path})"
        line, body = found.lineno, getattr(found, "body", [])
    return f"{spec.origin}:{line}"


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under `if`, `try` and `with` included."""
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
