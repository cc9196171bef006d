"""Names of a module that are imported from the modules that define them, on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def value_of(homes: Mapping[str, str], name: str) -> Any:
    """The value of a name. homes: module of `breccia` by name, "" for its own modules. Raises KeyError for an unknown name."""
    package = __name__.rpartition(".")[0]
    home = import_module(f".{homes[name]}" if homes[name] else ".", package)
    try:
        return getattr(home, name)
    except AttributeError:  # a module that has not been imported yet
        return import_module(f"{home.__name__}.{name}")
