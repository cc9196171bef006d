# pyright: reportUnsupportedDunderAll=false
"""The API for backends, kernels and bridges: the only module of core that other distributions import besides `breccia`.

`breccia`'s own distributions and third parties use the same names; `tests/repository/test_arrows.py` checks the former.
Names are imported on first use, so that a bridge does not load kernels, nor a kernel the command line.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Name -> module that defines it, "" for modules of `breccia` itself. docs/scripts/stubs.py writes `backend.pyi` from it.
_HOMES: dict[str, str] = {
    # The arguments of a kernel, and the facts it may require of a call.
    **dict.fromkeys(("Call", "Operand"), "dispatch.call"),
    **dict.fromkeys(("Kernel", "Prefer", "Tier", "named"), "dispatch.kernel"),
    **dict.fromkeys(("CASTING", "Kind", "OPERATIONS", "Operation", "Result"), "operations"),
    "Described": "dispatch.facts",
    "Table": "dispatch.table",
    **dict.fromkeys(("Device",), "arrays.frameworks"),
    **dict.fromkeys(("COLUMNS", "CastOptions", "DEFAULT", "FLOAT32", "PLAIN", "ProductOptions", "product_options"), "options"),
    "public": "api",
    # Calling other kernels, and the generic algorithm: modules.
    "calls": "dispatch",
    "rules": "",
    "storing": "",
    "targets": "",
    **dict.fromkeys(("checks", "composites", "measuring", "reference", "storages", "threads"), "kernels"),
    # Arrays of any framework.
    **dict.fromkeys(
        ("FLOATS", "Framework", "bit_pattern", "device_of", "dtype_name", "framework_of", "ops_of", "output_dtype"),
        "arrays.frameworks",
    ),
    **dict.fromkeys(("Array", "NUMPY", "Ops"), "arrays.ops"),
    # Tensors, their components and metadata.
    **dict.fromkeys(
        (
            "FIELDS",
            "ScaledTensor",
            "check_scaled",
            "fill",
            "from_buffer",
            "logical_shape",
            "restored",
            "scaled",
            "transposed",
        ),
        "tensors.tensor",
    ),
    "ADVICE": "tensors.advice",
    "TensorPair": "tensors.pair",
    **dict.fromkeys(("PARTS", "components", "part_grids", "words"), "tensors.components"),
    **dict.fromkeys(("cast_and_record", "record_amax"), "tensors.history"),
    **dict.fromkeys(("check_parts", "contraction_axis"), "tensors.checks"),
    "Metadata": "tensors.metadata",
    **dict.fromkeys(("cast_nbytes", "packed_length", "packing", "part_shapes", "whole_unit"), "tensors.grids"),
    **dict.fromkeys(("cached_property", "reentrant"), "locks"),
    **dict.fromkeys(
        (
            "InStorage",
            "Layout",
            "PerBlockK",
            "PerBlockMN",
            "PerChannel",
            "PerTensor",
            "Shape",
            "layout_of_tensor",
            "placed",
        ),
        "layouts",
    ),
    **dict.fromkeys(("Plain", "Storage"), "tensors.storage"),
    "fragments": "tensors",
    # Formats and recipes.
    **dict.fromkeys(
        (
            "BF16",
            "CODECS",
            "Codec",
            "E2M1",
            "E2M3",
            "E3M2",
            "E4M3",
            "E5M2",
            "E8M0",
            "F16",
            "F32",
            "F32_INF",
            "FLOAT_CODECS",
            "FLOAT_NAMES",
            "INT4",
            "INT8",
            "Integer",
            "Lookup",
            "MAGNITUDE",
            "MANTISSA",
            "Minifloat",
            "NF4",
            "NORMAL",
            "PowerOfTwo",
            "UE4M3",
            "UE5M3",
            "UINT4",
            "UINT8",
            "f32",
            "f32_bits",
            "float_codec",
        ),
        "codecs",
    ),
    **dict.fromkeys(("FloatForm", "IntegerForm", "ROUNDER", "TableForm", "WHOLE", "form_of"), "forms"),
    **dict.fromkeys(("Block", "Format", "TENSOR"), "formats"),
    **dict.fromkeys(
        (
            "DelayedScaling",
            "Float8BlockScaling",
            "Float8CurrentScaling",
            "Float8RowScaling",
            "INT4Scaling",
            "INT8Scaling",
            "MXFP4BlockScaling",
            "MXFP6BlockScaling",
            "MXFP8BlockScaling",
            "NF4Scaling",
            "NVFP4BlockScaling",
            "ScalingRecipe",
            "check_choices",
            "check_recipe",
            "one_of",
        ),
        "recipes",
    ),
    **dict.fromkeys(("Declared", "InternedKey", "check_positive", "rebuilt", "spelled"), "declared"),
    **dict.fromkeys(("keeps_parts", "renames", "repeats"), "kernels.exact"),
    **dict.fromkeys(("pack", "unpack"), "kernels.reference"),
    # The NumPy kernels, for compiled kernels that replace parts of them.
    **dict.fromkeys(("numpy",), "kernels"),
    **dict.fromkeys(
        ("Blocks", "FloatCodes", "IntegerCodes", "ScaledCodes", "Microkernels", "TableCodes"), "kernels.numpy.codes"
    ),
    # Errors, the registry and the command line.
    **dict.fromkeys(
        (
            "BrecciaError",
            "CorruptFileError",
            "DialectError",
            "OptionError",
            "ShapeError",
            "UnknownNameError",
            "UnsupportedError",
            "abbreviated",
            "check_names",
            "printable",
            "suggestion",
        ),
        "errors",
    ),
    **dict.fromkeys(("parsed_json", "unique_keys"), "json_text"),
    **dict.fromkeys(("registry",), "dispatch.registry"),
    **dict.fromkeys(("ML_DTYPES", "install"), "siblings"),
    "as_recipe": "specs",
    **dict.fromkeys(("once",), "targets"),
    **dict.fromkeys(
        ("CONVOLUTION", "KEPT", "NO_MATRIX", "PRESETS", "Policy", "check_patterns", "kept_kind", "matches"), "policies"
    ),
    **dict.fromkeys(
        ("Chosen", "Parameter", "QuantizeSummary", "choose", "kind_in_file", "matrix_of", "none_chosen", "size"), "models"
    ),
    **dict.fromkeys(("Json", "print_json", "print_table", "recipe_names"), "cli.main"),
}

#: Deprecated name -> the present one.
_EARLIER = {"Stored": "InStorage"}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    name = _EARLIER.get(name, name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = __name__.rpartition(".")[0]
    home = import_module(f".{_HOMES[name]}" if _HOMES[name] else ".", package)
    try:
        value = getattr(home, name)
    except AttributeError:  # a module that has not been imported yet
        value = import_module(f"{home.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
