# pyright: reportUnsupportedDunderAll=false
"""Triton kernels for breccia tensors on CUDA: importing this loads nothing; `import breccia` finds the plug-in."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Load public names on first use. `__init__.pyi` declares them for type checkers; a test compares the two."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from .tuning.timing import configure

    return configure


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = ["configure"]
