# pyright: reportUnsupportedDunderAll=false
"""JAX for breccia: importing this loads nothing of JAX; `import breccia` finds the plug-in by itself."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Names arrive on first use. `__init__.pyi` says the same to type checkers; a test holds them together."""
    from importlib import import_module

    homes = {"dequantize": "trees", "quantize": "trees", "register": "container"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = ["dequantize", "quantize", "register"]
