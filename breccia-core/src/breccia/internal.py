# pyright: reportUnsupportedDunderAll=false
"""What breccia's own distributions import of core beside `breccia` and `breccia.backend`. It changes without notice.

Plug-ins of others import `breccia` and `breccia.backend` alone.
"""

from __future__ import annotations

from typing import Any

from .lazy_names import value_of

#: Name -> module that defines it. docs/scripts/stubs.py writes `internal.pyi` from it.
_HOMES: dict[str, str] = {
    "named": "dispatch.kernel",
    "CASTING": "operations",
    "Table": "dispatch.table",
    "storing": "",
    **dict.fromkeys(("affine", "measuring", "rotating", "storages"), "kernels"),
    **dict.fromkeys(("bit_pattern", "device_of", "output_dtype"), "arrays.frameworks"),
    **dict.fromkeys(("FIELDS", "check_scaled", "fill", "logical_shape", "restored", "transposed"), "tensors.tensor"),
    "ADVICE": "tensors.advice",
    **dict.fromkeys(("part_grids", "with_parts"), "tensors.components"),
    "check_parts": "tensors.checks",
    **dict.fromkeys(("in_records", "packed_length", "whole_unit"), "tensors.grids"),
    **dict.fromkeys(("cached_property", "reentrant"), "locks"),
    **dict.fromkeys(("layout_of_tensor", "placed"), "layouts"),
    "fragments": "tensors",
    **dict.fromkeys(("FLOAT_CODECS", "FLOAT_NAMES"), "codecs"),
    **dict.fromkeys(("MAGNITUDE", "MANTISSA", "NORMAL", "f32_bits"), "fp32"),
    **dict.fromkeys(("check_choices", "choices_of", "one_of"), "recipe_fields"),
    **dict.fromkeys(("InternedKey", "check_positive", "rebuilt", "spelled"), "declared"),
    **dict.fromkeys(("keeps_parts", "repeats"), "kernels.exact"),
    **dict.fromkeys(("NEW_CODES", "decided", "keeps_values"), "kernels.exactness"),
    "Record": "formats",
    "ROTATIONS": "rotations",
    "signs_of": "kernels.reference.rotating",
    **dict.fromkeys(("apply_scale", "scales_of_amaxes"), "kernels.reference"),
    "numpy": "kernels",
    **dict.fromkeys(
        ("Blocks", "FloatCodes", "IntegerCodes", "ScaledCodes", "Microkernels", "TableCodes"), "kernels.numpy.codes"
    ),
    **dict.fromkeys(("abbreviated", "check_names", "did_you_mean", "printable", "suggestion"), "errors"),
    **dict.fromkeys(("parsed_json", "unique_keys"), "json_text"),
    **dict.fromkeys(("ML_DTYPES", "install"), "siblings"),
    "once": "targets",
    **dict.fromkeys(("COMPLETE", "PRESETS", "check_patterns", "kept_kind", "matches"), "policies"),
    **dict.fromkeys(("TEXT_LENGTH", "kind_in_file", "size"), "models"),
    **dict.fromkeys(("GEMMS", "GemmOperand", "TENSORS"), "training"),
    **dict.fromkeys(("policy_names", "recipe_names"), "cli.completion"),
}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = value_of(_HOMES, name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
