"""Functions that a compiler traces another function for, such as Dynamo of torch.compile. Imports no framework.

A compiler that reads Python follows an op into dispatch, where it cannot go. It finds the function to trace instead in an
attribute of the op, so that nothing has to be enabled beforehand and eager calls take no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from . import targets
from .errors import UnsupportedError

_F = TypeVar("_F", bound=Callable[..., Any])


def traced_by_framework(function: _F) -> _F:
    """Let compilers trace the function of the same name in the module that a framework declares as `Framework.traced`."""
    function.__dict__["_torchdynamo_inline"] = _calling(function.__name__)
    return function


def _calling(name: str) -> Any:
    """`_traced` for a name. A constant of its code, as Dynamo looks for a closure in the function that this one replaces."""
    constants = tuple(name if value == _NAME else value for value in _traced.__code__.co_consts)
    return FunctionType(_traced.__code__.replace(co_consts=constants, co_name=name), globals(), name)


def _traced(*arguments: Any, **options: Any) -> Any:
    _load("the name")
    return getattr(_module, "the name")(*arguments, **options)


_NAME = "the name"


def constant_in_graphs(function: _F) -> _F:
    """Let compilers call the function while they trace: its arguments and its result are constants of the graph."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


#: The module with the functions that are traced. Global, since the guards of a graph name what they guard.
_module: Any = None


@constant_in_graphs
def _load(name: str) -> None:
    """Import that module, and have it define a function for the op of a plug-in.

    Raises UnsupportedError if no plug-in declares such a module.
    """
    global _module
    if _module is None:
        frameworks = targets.load(targets.REGISTRY)().frameworks.values()
        declared = next((framework.traced for framework in frameworks if framework.traced is not None), None)
        if declared is None:
            raise UnsupportedError("breccia's ops inside torch.compile need breccia-torch: pip install breccia-torch.")
        _module = targets.load_module(declared)
    if not hasattr(_module, name):
        setattr(_module, name, _module.function_of(targets.load(targets.REGISTRY)().operation(name)))
