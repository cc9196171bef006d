# pyright: reportUnsupportedDunderAll=false
"""The API for backends, kernels and bridges: the only module of core that other distributions import besides `breccia`.

`breccia`'s own distributions and third parties use the same names; `tests/repository/test_arrows.py` checks the former.
Names are imported on first use, so that a bridge does not load kernels, nor a kernel the command line.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .lazy_names import value_of

#: Name -> module that defines it, "" for modules of `breccia` itself. docs/scripts/stubs.py writes `backend.pyi` from it.
_HOMES: dict[str, str] = {
    # The arguments of a kernel, and the facts it may require of a call.
    **dict.fromkeys(("Call", "Operand"), "dispatch.call"),
    **dict.fromkeys(("Prefer", "Tier"), "dispatch.kernel"),
    **dict.fromkeys(("Kind", "OPERATIONS", "Operation", "Result"), "operations"),
    "Described": "dispatch.facts",
    **dict.fromkeys(("COLUMNS", "CastOptions", "DEFAULT", "FLOAT32", "PLAIN", "ProductOptions", "product_options"), "options"),
    "public": "api",
    # Calling other kernels, and the generic algorithm: modules.
    "calls": "dispatch",
    "targets": "",
    **dict.fromkeys(("checks", "composites", "reference", "threads"), "kernels"),
    # Arrays of any framework.
    **dict.fromkeys(("FLOATS", "dtype_name", "framework_of", "ops_of"), "arrays.frameworks"),
    **dict.fromkeys(("Array", "NUMPY", "Ops"), "arrays.ops"),
    # Tensors, their components and metadata.
    "scaled": "tensors.tensor",
    **dict.fromkeys(("PARTS", "components", "words"), "tensors.components"),
    **dict.fromkeys(("cast_and_record", "cast_pair_and_record", "record_amax"), "tensors.history"),
    "contraction_axis": "tensors.checks",
    "Metadata": "tensors.metadata",
    **dict.fromkeys(("cast_nbytes", "packing", "part_shapes"), "tensors.grids"),
    "Shape": "layouts",
    "Plain": "tensors.storage",
    # Formats and recipes.
    "Rotation": "rotations",
    **dict.fromkeys(
        (
            "BF16",
            "CODECS",
            "E2M1",
            "E2M3",
            "E3M2",
            "E4M3",
            "E4M3FNUZ",
            "E5M2",
            "E5M2FNUZ",
            "E8M0",
            "F16",
            "F32",
            "INT4",
            "INT8",
            "INTEGERS",
            "NF4",
            "UE4M3",
            "UE5M3",
            "UINT4",
            "UINT8",
            "float_codec",
        ),
        "codecs",
    ),
    **dict.fromkeys(("F32_INF", "f32"), "fp32"),
    **dict.fromkeys(("FloatForm", "IntegerForm", "ROUNDER", "TableForm", "WHOLE", "form_of", "magnitudes_of"), "forms"),
    **dict.fromkeys(("Block", "TENSOR"), "formats"),
    "check_recipe": "recipe_bases",
    "Declared": "declared",
    **dict.fromkeys(("pack", "unpack"), "kernels.reference"),
    # Checkpoints of other libraries.
    **dict.fromkeys(("Entry", "SettingsOf", "StoredForm", "StoredValue", "TensorGroup", "ValueForm"), "dialects"),
    # Errors, the registry and the command line.
    "registry": "dispatch.registry",
    "as_recipe": "specs",
    **dict.fromkeys(("CONVOLUTION", "KEPT", "NO_MATRIX"), "policies"),
    **dict.fromkeys(
        ("Chosen", "Parameter", "QuantizeSummary", "TrainingSummary", "choose", "matrix_of", "none_chosen"), "models"
    ),
    **dict.fromkeys(("Json", "print_json", "print_table"), "cli.printing"),
}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return _earlier(name)
    value = globals()[name] = value_of(_HOMES, name)
    return value


def _earlier(name: str) -> Any:
    """Deprecated: names that are in `breccia` or in `breccia.internal` now."""
    for module in ("breccia", "breccia.internal"):
        home = import_module(module)
        if name in (*home.__all__, *vars(home).get("_EARLIER", ())):
            return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
