# pyright: reportUnsupportedDunderAll=false
"""MLX for breccia: importing this does not load MLX; `import breccia` finds the plug-in."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Load public names on first use. `__init__.pyi` declares them for type checkers; a test compares the two."""
    from importlib import import_module

    homes = {
        **dict.fromkeys(("from_tree", "to_tree"), "container"),
        **dict.fromkeys(("QuantizeSummary", "quantize"), "quantizing"),
        "export_function": "exporting",
        **dict.fromkeys(("load_model", "save_model"), "loading"),
    }
    if name == "nn":
        return import_module(f"{__name__}.nn")
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = ["QuantizeSummary", "export_function", "from_tree", "load_model", "nn", "quantize", "save_model", "to_tree"]
