"""Modules that read the weight of a layer they own, as Mamba's do, which a quantized layer does not have as a tensor."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache

from torch import nn

#: Attributes of a weight that a quantized one has, too.
_METADATA = ("dtype", "device", "shape", "ndim", "requires_grad")
#: Functions that ask about a weight without using its numbers.
_QUESTIONS = ("isinstance", "hasattr", "getattr", "type", "id")


def reader_of_weight(model: nn.Module, name: str) -> str | None:
    """The class of the module that reads the weight of the layer `name` of the model as a tensor, if there is one.

    It is found in the source of the layer's owner: an expression such as `self.dt_proj.weight` outside of initialization.
    """
    owner, _, leaf = name.rpartition(".")
    kind = type(model.get_submodule(owner))
    return kind.__name__ if leaf in _read(kind) else None


@lru_cache(maxsize=1024)
def _read(kind: type) -> frozenset[str]:
    """The names of layers whose weight the methods of a class read."""
    classes = [each for each in kind.__mro__ if issubclass(each, nn.Module) and not each.__module__.startswith("torch.nn.")]
    return frozenset(leaf for each in classes if each is not nn.Module for leaf in _read_by(each))


def _read_by(kind: type) -> Iterator[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # no source, as of classes that were made in a session
        return
    for method in ast.walk(tree):
        if isinstance(method, ast.FunctionDef) and "init" not in method.name and method.name != "reset_parameters":
            asked = {id(part) for node in ast.walk(method) for part in _asked(node)}
            for node in ast.walk(method):
                match node:
                    case ast.Attribute(ast.Attribute(attr=leaf), "weight") if id(node) not in asked:
                        yield leaf
                    case _:
                        pass


def _asked(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of which a node only asks metadata."""
    match node:
        case ast.Attribute(value, attribute) if attribute in _METADATA:
            yield value
        case ast.Call(ast.Name(function), [first, *_]) if function in _QUESTIONS:
            yield first
        case _:
            pass
