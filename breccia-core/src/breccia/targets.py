"""Targets: strings `"package.module:attribute"` that declarations hold so that nothing is imported before it wins."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .errors import PluginError


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


def check(target: str) -> None:
    """Raise PluginError unless `target` is written `module:attribute`."""
    module, colon, path = target.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *path.split(".")]):
        raise PluginError(f"a target is written 'package.module:attribute'; got {target!r}.")


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
    with open(spec.origin, encoding="utf-8") as f:
        body: list[ast.stmt] = ast.parse(f.read()).body
    line = 1
    for name in path.split("."):
        for node in body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) else []
            if isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            if name in names:
                line = node.lineno
                body = list(getattr(node, "body", []))
                break
        else:
            return f"{spec.origin} (no definition of {path})"
    return f"{spec.origin}:{line}"
