# pyright: reportUnsupportedDunderAll=false
"""JAX for breccia: importing this does not load JAX; `import breccia` finds the plug-in."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Load public names on first use. `__init__.pyi` declares them for type checkers; a test compares the two."""
    from importlib import import_module

    if name in ("flax", "equinox"):  # these import those libraries
        return import_module(f"{__name__}.{name}")
    homes = {
        **dict.fromkeys(("combine", "dequantize", "partition", "quantize", "to_storage"), "trees"),
        **dict.fromkeys(("advance", "histories"), "delayed"),
        "assembled": "checkpoints",
        "DotGeneral": "dot_general",
        "ScaledWeight": "weights",
        "shardings": "meshes",
        "register": "container",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "DotGeneral",
    "ScaledWeight",
    "advance",
    "assembled",
    "combine",
    "dequantize",
    "histories",
    "partition",
    "quantize",
    "register",
    "shardings",
    "to_storage",
]
