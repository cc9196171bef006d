# pyright: reportUnsupportedDunderAll=false
"""Triton kernels for breccia tensors on CUDA: importing this loads nothing; `import breccia` finds the plug-in."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Load public names on first use. `__init__.pyi` declares them for type checkers; a test compares the two."""
    from importlib import import_module

    homes = {
        "configure": "tuning",
        **dict.fromkeys(("block_scaled_matmul_triton", "scaled_matmul_triton"), "cuda.named"),
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = ["block_scaled_matmul_triton", "configure", "scaled_matmul_triton"]
