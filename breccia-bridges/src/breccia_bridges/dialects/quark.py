"""Checkpoints of AMD Quark in its own format (`quant_method` "quark"): MXFP4, and FP8 per tensor, row or block.

    fp4        weight U8 (N, K / 2), weight_scale U8 (N, K / 32), the exponent of a power of two
    fp8_e4m3   weight F8_E4M3, weight_scale (), (N,) or one per block

The weights of a module have the `weight` of the first pattern of `layer_quant_config` that matches its name, else of
`global_quant_config`; `exclude` comes before both.

Source: amd-quark 0.13 (export_safetensors), run on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from reprlib import repr as short
from typing import Any

from breccia import CorruptFileError, MXFP4BlockScaling, ScaledTensor, UnsupportedError
from breccia.backend import StoredValue, ValueForm

from . import fp8, packed_floats
from .scales import POWERS
from .schemes import Scheme, agree, one_form

_ORIGINAL = "Convert the checkpoint that it was made from."


def settings(config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """{"schemes": what may be the settings of a module's weights}, several where classes of modules have their own.

    None for a module that is excluded or has no settings of weights. Raises CorruptFileError for settings that are not what the
    library writes.
    """
    if not config:
        return {"schemes": ({},)}
    excluded = config.get("exclude") or []
    if not isinstance(excluded, list) or not all(isinstance(name, str) for name in excluded):
        raise CorruptFileError(f"exclude lists names of modules; found {short(excluded)}. Fix it, or download it again.")
    if any(fnmatchcase(module, name) for name in excluded):
        return None
    by_name, by_class = (_object(config, key) for key in ("layer_quant_config", "layer_type_quant_config"))
    pattern = next((pattern for pattern in by_name if fnmatchcase(module, pattern)), None)
    if pattern is not None:
        schemes = [_scheme(by_name[pattern], f"layer_quant_config[{pattern!r}]")]
    else:
        schemes = [_scheme(one, f"layer_type_quant_config[{name!r}]") for name, one in by_class.items()]
        schemes.append(_scheme(config.get("global_quant_config") or {}, "global_quant_config"))
    weights = tuple(scheme for scheme in schemes if scheme is not None)
    return {"schemes": weights} if weights else None


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    listed = config.get(key) or {}
    if not isinstance(listed, dict):
        raise CorruptFileError(f"{key} is an object; found {short(listed)}. Fix it, or download it again.")
    return listed


def _scheme(listed: Any, where: str) -> Scheme | None:
    """The settings of weights; None where they are not quantized."""
    weight = listed.get("weight") if isinstance(listed, dict) else listed
    if isinstance(listed, dict) and weight is None:
        return None
    every = weight if isinstance(weight, list) else [weight]  # several steps of rounding are a list
    steps: list[dict[str, Any]] = [step for step in every if isinstance(step, dict)]
    if not steps or len(steps) != len(every):
        raise CorruptFileError(f"{where} is an object with the settings of weights; found {short(listed)}. Download it again.")
    return {**steps[0], "where": where, "dtype": " and ".join(str(step.get("dtype")) for step in steps)}


def form(value: StoredValue) -> ValueForm:
    """What the tensors are, which the settings of the module have to agree with."""
    return one_form(value, _form)


def _form(value: StoredValue, scheme: Scheme) -> ValueForm:
    codes, scale, dtype = value.entries["weight"], value.entries["weight_scale"], scheme.get("dtype")
    readable = codes.dtype in fp8.FORMATS or (codes.dtype == "U8" and scale.dtype in POWERS)
    if not readable or dtype not in (None, "fp4", "fp8_e4m3", "fp8_e5m2"):
        raise UnsupportedError(
            f"its codes are {codes.dtype} with scales in {scale.dtype}, and {scheme.get('where', 'no config')} has dtype "
            f"{dtype!r}; of Quark, breccia reads fp4 with scales that are powers of two, fp8_e4m3 and fp8_e5m2. {_ORIGINAL}",
            dtype=dtype,
        )
    if codes.dtype == "U8":
        agree(value, scheme, "MXFP4", dtype=("fp4",), qscheme=("per_group",), group_size=(32,), scale_format=("e8m0",))
        agree(value, scheme, "MXFP4", ch_axis=(-1, len(codes.shape) - 1))
        return packed_floats.form(value, "weight", "weight_scale", MXFP4BlockScaling())
    value.need("weight_zero_point" not in value.entries, "it has a 'weight_zero_point', which FP8 of Quark has not.")
    agree(value, scheme, f"FP8 ({codes.dtype})", dtype=(f"fp8_{fp8.FORMATS[codes.dtype].lower()}",))
    agree(value, scheme, "FP8", qscheme=("per_tensor", "per_channel", "per_block"))
    match scheme.get("qscheme"):
        case "per_tensor":
            value.need_shape("weight_scale", (), (1,))
        case "per_channel":
            agree(value, scheme, "FP8 with a scale per row", ch_axis=(0, -len(codes.shape)))
            value.need_shape("weight_scale", codes.shape[:1], (*codes.shape[:1], 1))
        case "per_block":
            return fp8.form_of(value, scheme.get("block_size"))
        case _:
            return fp8.form_of(value, fp8.TILE)
    return fp8.form_of(value, None)


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes and scales as stored."""
    if value.entries["weight"].dtype == "U8":
        return packed_floats.read(value, form, "weight", "weight_scale")
    return fp8.read(value, form)
