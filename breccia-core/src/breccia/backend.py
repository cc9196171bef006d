# pyright: reportUnsupportedDunderAll=false
"""What backends, kernels and bridges are written with: the one module of core that other distributions import beside `breccia`.

`breccia`'s own distributions and third parties' use the same names; `tests/test_arrows.py` holds the former to it. Names arrive
on first use, so that a bridge does not load kernels, nor a kernel the program.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Name -> module that defines it, "" for modules of `breccia` itself. `backend.pyi` says the same to type checkers.
_HOMES: dict[str, str] = {
    # What a kernel is given, and what it may say of a call.
    **dict.fromkeys(("Call", "Described", "Kernel", "Operand", "Options", "Prefer", "Table", "named"), "dispatch"),
    **dict.fromkeys(("Device",), "frameworks"),
    **dict.fromkeys(("CastOptions", "DEFAULT", "PLAIN"), "options"),
    # Calling other kernels, and the generic algorithm: modules.
    **dict.fromkeys(("calls", "targets"), ""),
    **dict.fromkeys(("checks", "composites", "reference"), "kernels"),
    # Arrays of any framework.
    **dict.fromkeys(("FLOATS", "Framework", "device_of", "dtype_name", "framework_of", "ops_of", "output_dtype"), "frameworks"),
    **dict.fromkeys(("Array", "NUMPY", "Ops"), "ops"),
    # Tensors, their components and metadata.
    **dict.fromkeys(
        (
            "FIELDS",
            "Meaning",
            "PARTS",
            "ScaledTensor",
            "contraction_axis",
            "fill",
            "held",
            "logical_shape",
            "part_grids",
            "restored",
            "transposed",
        ),
        "tensor",
    ),
    **dict.fromkeys(("packed_length", "packing", "part_shapes", "whole_unit"), "grids"),
    **dict.fromkeys(("Layout", "PerBlockMN", "Shape", "Stored"), "layouts"),
    **dict.fromkeys(("Plain", "Storage"), "storage"),
    # Formats and recipes.
    **dict.fromkeys(
        (
            "BF16",
            "CODECS",
            "Codec",
            "E2M1",
            "E4M3",
            "E5M2",
            "E8M0",
            "F16",
            "F32",
            "F32_INF",
            "MAGNITUDE",
            "MANTISSA",
            "NORMAL",
            "UE4M3",
            "UE5M3",
            "UINT4",
            "UINT8",
        ),
        "codecs",
    ),
    **dict.fromkeys(("Block", "Format", "TENSOR"), "formats"),
    **dict.fromkeys(("from_buffer",), "tensor"),
    **dict.fromkeys(
        (
            "Float8BlockScaling",
            "INT4Scaling",
            "INT8Scaling",
            "MXFP4BlockScaling",
            "MXFP8BlockScaling",
            "NVFP4BlockScaling",
            "ScalingRecipe",
            "check_recipe",
        ),
        "recipes",
    ),
    **dict.fromkeys(("Declared", "Identity", "rebuilt"), "declared"),
    **dict.fromkeys(("keeps_parts",), "exact"),
    **dict.fromkeys(("pack",), "kernels.reference"),
    # The NumPy kernels, for compiled ones that take their place in part.
    **dict.fromkeys(("numpy",), "kernels"),
    **dict.fromkeys(("FloatCodes", "IntegerCodes", "ScaledCodes", "Steps", "TableCodes"), "kernels.numpy"),
    # Errors, the registry and the program.
    **dict.fromkeys(
        (
            "BrecciaError",
            "CorruptFileError",
            "DialectError",
            "OptionError",
            "ShapeError",
            "UnknownNameError",
            "UnsupportedError",
            "suggestion",
        ),
        "errors",
    ),
    **dict.fromkeys(("registry",), "registry"),
    **dict.fromkeys(("ML_DTYPES", "install"), "siblings"),
    **dict.fromkeys(("once",), "targets"),
    **dict.fromkeys(("Json", "print_json", "print_table", "printable", "recipe_names"), "cli"),
}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = __name__.rpartition(".")[0]
    home = import_module(f".{_HOMES[name]}" if _HOMES[name] else ".", package)
    try:
        value = getattr(home, name)
    except AttributeError:  # a module that nobody has imported yet
        value = import_module(f"{home.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
