# pyright: reportUnsupportedDunderAll=false
"""Kernels: `reference` is the generic algorithm, `numpy` its override; `triton` a façade for the kernels of breccia-triton.

Submodules are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["numpy", "reference", "triton"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'breccia.kernels' has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return list(__all__)
