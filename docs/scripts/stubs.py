"""Writes the stubs of the modules that import their names on first use, from the tables of these modules.

The stub of the bridges has the signatures of the functions that breccia-bridges declares. Core knows no type of other packages:
what an annotation takes from them is Any.

python docs/scripts/stubs.py             # writes __init__.pyi, backend.pyi, internal.pyi and bridges.pyi of core
python docs/scripts/stubs.py --check     # exits with 1 where a stub says anything else
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import breccia
from breccia import backend, bridges, internal
from breccia.backend import registry, targets

#: Columns of a line, as in pyproject.toml.
WIDTH = 128
#: The types that stubs name, of collections.abc and builtins, and those of `breccia` with the modules that define them.
ABSTRACT, BUILTINS = set(collections.abc.__all__), set(vars(builtins))
HOMES: dict[str, str] = vars(breccia)["_HOMES"]
GETATTR = "def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]"


def stub(module: ModuleType) -> str:
    """The stub of a module: each name of its table `_HOMES` from its module, and those of `_EARLIER` if any."""
    homes: dict[str, str] = dict.fromkeys(getattr(module, "_MODULES", ()), "") | vars(module)["_HOMES"]
    imports = [f"from .{home} import {name} as {name}" for name, home in sorted(homes.items(), key=_order)]
    earlier = [f"{name} = {present}" for name, present in vars(module).get("_EARLIER", {}).items()]
    deprecated = ["", "#: Deprecated.", *earlier] if earlier else []
    last = "__version__: str" if module is breccia else "__all__: list[str]"
    return "\n".join([*imports, *deprecated, "", last, ""])


def _order(item: tuple[str, str]) -> tuple[str, int, str]:
    """The order of ruff: by module, then constants, classes and functions."""
    name, home = item
    return home, 0 if name.isupper() else 1 if name[0].isupper() else 2, name


def stub_of_bridges() -> str:
    """The stub of `breccia.bridges`."""
    declared = sorted((b for b in registry().bridges.values() if b.plugin == "bridges"), key=lambda bridge: bridge.name)
    functions = [signature(bridge.name, targets.load(bridge.target)) for bridge in declared]
    names = {node.id for node in ast.walk(ast.parse("\n".join(functions))) if isinstance(node, ast.Name)}
    imports = ["import os"] if "os" in names else []
    imports += [f"from collections.abc import {', '.join(abstract)}"] if (abstract := sorted(names & ABSTRACT)) else []
    imports += ["from typing import Any", ""]
    imports += [f"from .{home} import {name}" for home, name in sorted((HOMES[name], name) for name in names & HOMES.keys())]
    return "\n".join([*imports, "", *functions, "", "# Bridges that other plug-ins declare.", GETATTR, ""])


def signature(name: str, function: Callable[..., Any]) -> str:
    """The line of a stub for a function, broken as ruff breaks it."""
    parts = [*_parameters(function)]
    result = f") -> {annotation(inspect.signature(function).return_annotation)}: ..."
    for first, between, last in ((f"def {name}(", ", ", result), (f"def {name}(\n    ", ", ", "\n" + result)):
        text = first + between.join(parts) + last
        if max(map(len, text.splitlines())) <= WIDTH:
            return text
    return f"def {name}(\n    " + ",\n    ".join(parts) + ",\n" + result


def _parameters(function: Callable[..., Any]) -> Iterator[str]:
    """The parameters, with annotations and defaults."""
    keyword_only = False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            yield "*"
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f" = {_text(p.default)}"
        yield f"{stars}{p.name}: {annotation(p.annotation)}{default}"


def _text(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else repr(default)


def annotation(text: str) -> str:
    """An annotation in terms of Python and `breccia`."""
    return ast.unparse(_known(ast.parse(text, mode="eval").body))


def _known(node: ast.expr) -> ast.expr:
    """The annotation with Any for each type that a user of core may not have; a union with it is Any."""
    match node:
        case ast.Name(id=name) if name not in BUILTINS | ABSTRACT | HOMES.keys():
            return ast.Name("Any")
        case ast.Attribute(value=ast.Name(id=module)) if module != "os":
            return ast.Name("Any")
        case ast.BinOp(left, op, right):
            sides = _known(left), _known(right)
            return ast.Name("Any") if any(ast.unparse(side) == "Any" for side in sides) else ast.BinOp(sides[0], op, sides[1])
        case ast.Subscript(value, part):
            return ast.Subscript(_known(value), _known(part))
        case ast.Tuple(elts):
            return ast.Tuple([_known(element) for element in elts])
        case _:
            return node


def stubs() -> dict[Path, str]:
    """The text of each stub by its path."""
    texts = {module: stub(module) for module in (breccia, backend, internal)} | {bridges: stub_of_bridges()}
    return {Path(str(module.__file__)).with_suffix(".pyi"): text for module, text in texts.items()}


def main(check: bool) -> int:
    wrong = {path: text for path, text in stubs().items() if path.read_text(encoding="utf-8") != text}
    for path, text in wrong.items():
        print(f"{path} differs from the table of its module" if check else f"wrote {path}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
