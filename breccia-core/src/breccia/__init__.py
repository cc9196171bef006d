# pyright: reportUnsupportedDunderAll=false
"""breccia: block-scaled low-precision tensors, the same bytes in every framework.

Importing this loads only the standard library: neither NumPy nor any framework. Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers treat it as True; importing `typing` takes ten times as long as all the rest
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.2.0"

#: Public name -> module that defines it. docs/scripts/stubs.py writes `__init__.pyi` from it.
_HOMES: dict[str, str] = {
    **dict.fromkeys(
        (
            "cast",
            "cast_pair",
            "dequantize",
            "requantize",
            "matmul",
            "cast_matmul",
            "grouped_matmul",
            "cast_ste",
            "cast_ste_clipped",
            "explain",
            "exactness",
            "metrics",
            "plugins",
        ),
        "api",
    ),
    **dict.fromkeys(("ScaledTensor", "from_buffer"), "tensors.tensor"),
    "bytes_equal": "tensors.equality",
    **dict.fromkeys(("concat", "stack"), "tensors.structure"),
    "TensorPair": "tensors.pair",
    **dict.fromkeys(("from_foreign", "to_foreign"), "foreign"),
    "ScalingRecipe": "recipe_bases",
    **dict.fromkeys(
        (
            "DelayedScaling",
            "Float8CurrentScaling",
            "Float8RowScaling",
            "GGUFScaling",
            "FlatScaling",
            "Float8BlockScaling",
            "MXFP8BlockScaling",
            "MXFP6BlockScaling",
            "MXFP4BlockScaling",
            "MXINT8BlockScaling",
            "NVFP4BlockScaling",
            "INT4Scaling",
            "INT8Scaling",
            "INTScaling",
            "NF4Scaling",
        ),
        "recipes",
    ),
    "recipe": "specs",
    "TrainingRecipe": "training",
    "Policy": "policies",
    **dict.fromkeys(("Layout", "PerTensor", "PerBlockK", "PerChannel", "PerBlockMN", "PerGroupIndex", "InStorage"), "layouts"),
    **dict.fromkeys(("Format", "Level"), "formats"),
    **dict.fromkeys(("Codec", "Minifloat", "PowerOfTwo", "Integer", "Lookup"), "codecs"),
    "Kernel": "dispatch.kernel",
    "Explanation": "dispatch.explanation",
    **dict.fromkeys(("Device", "Framework"), "arrays.frameworks"),
    "Storage": "tensors.storage",
    **dict.fromkeys(("Bridge", "Command", "Foreign", "hookimpl"), "dispatch.hookspecs"),
    "Dialect": "dialects",
    "AmaxHistory": "tensors.history",
    "ErrorMetrics": "error_metrics",
    "Exactness": "kernels.exactness",
    **dict.fromkeys(("set_num_threads", "get_num_threads"), "kernels.threads"),
    **dict.fromkeys(
        (
            "BrecciaError",
            "RecipeError",
            "UnknownNameError",
            "ShapeError",
            "LayoutError",
            "OutOfRangeError",
            "OptionError",
            "UnsupportedError",
            "NonFiniteError",
            "InexactError",
            "NoKernelError",
            "AmbiguousKernelError",
            "KernelError",
            "DialectError",
            "DialectWarning",
            "DtypeWarning",
            "CorruptFileError",
            "PluginError",
            "PluginWarning",
        ),
        "errors",
    ),
}
#: Deprecated name -> the present one.
_EARLIER = {"Stored": "InStorage"}
_REGISTRY = "dispatch.registry"
_MODULES = ("backend", "bridges", "codecs", "errors", "formats", "kernels", "layouts", "recipes", "rules", "testing")

__all__ = ["__version__", *sorted(_HOMES), *_MODULES]


def __getattr__(name: str) -> Any:
    name = _EARLIER.get(name, name)
    if name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    elif name in _MODULES:
        value = import_module(f".{name}", __name__)
    else:
        hint = "" if name.startswith("_") else _hint(name)
        raise AttributeError(f"module 'breccia' has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    from importlib.util import find_spec

    if find_spec(f"{__name__}.{name}"):  # the import system calls this before it imports a submodule
        return ""
    errors = __getattr__("errors")
    try:
        bridges = import_module(f".{_REGISTRY}", __name__).registry().bridges
    except errors.PluginError:  # called from a manifest while the registry is being built
        bridges = {}
    if name in bridges:
        return f"; it is breccia.bridges.{name}"
    return errors.suggestion(name, list(_HOMES)).partition(" Known:")[0]


def __dir__() -> list[str]:
    return sorted(__all__)
