# pyright: reportUnsupportedDunderAll=false
"""MLX for breccia: importing this loads nothing of MLX; `import breccia` finds the plug-in by itself."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Names arrive on first use. `__init__.pyi` says the same to type checkers; a test holds them together."""
    from importlib import import_module

    homes = {"from_tree": "container", "quantize": "nn", "to_tree": "container"}
    if name == "nn":
        return import_module(f"{__name__}.nn")
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = ["from_tree", "nn", "quantize", "to_tree"]
