# pyright: reportUnsupportedDunderAll=false
"""PyTorch for breccia: importing this does not load torch; `import breccia` finds the plug-in."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Load public names on first use. `__init__.pyi` declares them for type checkers; a test compares the two."""
    from importlib import import_module

    homes = {
        **dict.fromkeys(("load_model", "save_model"), "checkpoint"),
        **dict.fromkeys(("from_torchao_model_", "to_torchao_model_"), "torchao"),
        **dict.fromkeys(("convert_from_training_", "convert_to_training_"), "training.convert"),
        "enable_compile": "operators",
        "end_of_step": "training.layer",
        "quantize_": "quantize",
    }
    if name == "nn":
        return import_module(f"{__name__}.nn")
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "convert_from_training_",
    "convert_to_training_",
    "enable_compile",
    "end_of_step",
    "from_torchao_model_",
    "load_model",
    "nn",
    "quantize_",
    "save_model",
    "to_torchao_model_",
]
