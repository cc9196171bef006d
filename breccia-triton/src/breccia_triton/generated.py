"""Functions of generated text. What calls do in the same way with other objects is compiled once; the objects are its globals.

A call with as many arguments as kernels have, put together from tuples, takes three times as long as one that is written out.
Imports no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import CodeType
from typing import Any


def defined(text: str, names: Mapping[str, Any]) -> Any:
    """The function `run` that a text defines. names: its globals."""
    space = dict(names)
    exec(_compiled(text), space)
    return space["run"]


@lru_cache(maxsize=1024)
def _compiled(text: str) -> CodeType:
    """It takes a hundred times as long as to make a function of it."""
    return compile(text, "<breccia_triton>", "exec")
