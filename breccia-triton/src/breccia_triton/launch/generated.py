"""Functions of generated text. What calls do in the same way with other objects is compiled once, and takes them by a closure.

A call with as many arguments as kernels have, put together from tuples, takes three times as long as one that is written out.
Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from textwrap import indent
from typing import Any


def defined(text: str, names: Mapping[str, Any]) -> Any:
    """The function `run` that a text defines. names: the variables around it.

    They are no globals: the interpreter remembers in the code where it found a global, so functions of the same code that take
    turns, such as those of a model's layers, would each look up all of them anew.
    """
    return _maker(text, tuple(names))(*names.values())


@lru_cache(maxsize=1024)
def _maker(text: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """It takes a hundred times as long as to make a function of it."""
    space = dict[str, Any]()
    around = f"def make({', '.join(names)}):\n{indent(text.rstrip(), '    ')}\n    return run"
    exec(compile(around, "<breccia_triton>", "exec"), space)
    return space["make"]
