"""The ops of the frontend as operators: while `torch.export` traces without Dynamo, and for derivatives in compiled graphs.

Without Dynamo nothing substitutes the ops of `breccia`: they run, on fake tensors whose sizes may be symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from breccia.backend import Operation, registry

from . import graphs


def function_of(op: Operation) -> Callable[..., Any]:
    """The function of the frontend for an op, as one operator."""
    traced = graphs.function_of(op)

    def called(*arguments: Any, prefer: Any = None) -> Any:
        *positional, options = op.with_defaults(arguments) if op.options else (*arguments, None)
        named = {} if options is None else {name: value for name, value in options.given().items() if name in op.options}
        return traced(*positional, **named, prefer=prefer)

    return called


class Operators:
    """The ops as operators, by name."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = function_of(registry().operation(name))
        setattr(self, name, function)
        return function
