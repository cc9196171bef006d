"""Checkpoints of AMD Quark in its own format (`quant_method` "quark"): MXFP4, and FP8 per tensor, row or block.

    fp4        weight U8 (N, K / 2), weight_scale U8 (N, K / 32), the exponent of a power of two
    fp8_e4m3   weight F8_E4M3, weight_scale (), (N,) or one per block

The weights of a module have the `weight` of the first pattern of `layer_quant_config` that matches its name, else of
`global_quant_config`; `exclude` comes before both.

Source: amd-quark 0.13 (export_safetensors), run on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

from breccia import CorruptFileError, MXFP4BlockScaling, ScaledTensor, UnsupportedError
from breccia.backend import SettingsOf, StoredForm, StoredValue, ValueForm

from . import fp8, packed_floats
from .patterns import globs
from .scales import POWERS
from .schemes import Scheme, agree, one_form
from .writing import check_matrix, check_not_stacked, inputs, refused

_ORIGINAL = "Convert the checkpoint that it was made from."


def settings(config: Mapping[str, Any]) -> SettingsOf:
    """{"schemes": what may be the settings of a module's weights}, several where classes of modules have their own.

    None for a module that is excluded or has no settings of weights. Raises CorruptFileError for settings that are not what the
    library writes.
    """
    if not config:
        return lambda module: {"schemes": ({},)}
    excluded = config.get("exclude") or []
    if not isinstance(excluded, list) or not all(isinstance(name, str) for name in excluded):
        raise CorruptFileError(f"exclude lists names of modules; found {short(excluded)}. Fix it, or download it again.")
    by_name, by_class = (_object(config, key) for key in ("layer_quant_config", "layer_type_quant_config"))
    patterns = list(by_name)
    unquantized, by_glob = globs(excluded, "{} in exclude"), globs(patterns, "{} in layer_quant_config")
    common = [_scheme(one, f"layer_type_quant_config[{name!r}]") for name, one in by_class.items()]
    common.append(_scheme(config.get("global_quant_config") or {}, "global_quant_config"))

    def of(module: str) -> Mapping[str, Any] | None:
        if unquantized.first(module) is not None:
            return None
        place = by_glob.first(module)
        pattern = None if place is None else patterns[place]
        schemes = common if pattern is None else [_scheme(by_name[pattern], f"layer_quant_config[{pattern!r}]")]
        weights = tuple(scheme for scheme in schemes if scheme is not None)
        return {"schemes": weights} if weights else None

    return of


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
    value.need(
        "weight_zero_point" not in value.entries,
        f"it has a 'weight_zero_point', which {'MXFP4' if codes.dtype == 'U8' else 'FP8'} of Quark has not.",
    )
    if codes.dtype == "U8":
        agree(value, scheme, "MXFP4", dtype=("fp4",), qscheme=("per_group",), group_size=(32,), scale_format=("e8m0",))
        agree(value, scheme, "MXFP4", ch_axis=(-1, len(codes.shape) - 1))
        return packed_floats.form(value, "weight", "weight_scale", MXFP4BlockScaling())
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


# -- writing ----------------------------------------------------------------------------------------------------------

_NAME = "quark"


def stored(form: ValueForm) -> StoredForm:
    """Matrices in MXFP4, and in FP8 per tensor, row or block."""
    check_matrix(form, _NAME)
    check_not_stacked(form, _NAME)
    if packed_floats.kind_of(form) == "mxfp4":
        parts = ("weight", "U8"), ("weight_scale", "U8")
        return packed_floats.stored_as(form, _NAME, *parts, weight=_powers(is_dynamic=False))
    fmt, kind = form.recipe.format, fp8.kind_of(form)
    if fmt.element.name not in ("E4M3", "E5M2"):
        raise refused(form, _NAME)
    dtype = f"fp8_{fmt.element.name.lower()}"
    match kind:
        case "tensor":
            return fp8.stored_as(form, "weight", "weight_scale", weight=_tensor(dtype, "per_tensor"))
        case "row":
            scheme = _tensor(dtype, "per_channel", ch_axis=0)
            return fp8.stored_as(form, "weight", "weight_scale", form.shape[:1], weight=scheme)
        case "block":
            scheme = _tensor(dtype, "per_block", block_size=list(fmt.block))
            return fp8.stored_as(form, "weight", "weight_scale", weight=scheme)
        case _:
            raise refused(form, _NAME)


#: What observes values, by what a scale is for: a config has to name one.
_OBSERVERS = {
    "per_tensor": "PerTensorMinMaxObserver",
    "per_channel": "PerChannelMinMaxObserver",
    "per_group": "PerGroupMinMaxObserver",
    "per_block": "PerBlock2DMinMaxObserver",
}


def _tensor(dtype: str, qscheme: str, **settings: Any) -> dict[str, Any]:
    """The settings of a tensor whose scales are FP32. settings: those that differ from the ones of static scales."""
    return {
        "dtype": dtype,
        "qscheme": qscheme,
        "is_dynamic": False,
        "symmetric": True,
        "observer_cls": _OBSERVERS[qscheme],
        "scale_type": "float32",
        "round_method": "half_even",
        "ch_axis": None,
        "group_size": None,
        "block_size": None,
        **settings,
    }


def _powers(is_dynamic: bool) -> dict[str, Any]:
    """The settings of a tensor in MXFP4."""
    return {
        **_tensor("fp4", "per_group", ch_axis=-1, group_size=32, is_dynamic=is_dynamic),
        "symmetric": None,
        "observer_cls": "PerBlockMXObserver",
        "scale_type": "float",
        "scale_format": "e8m0",
        "scale_calculation_mode": "even",
    }


def _inputs(weight: Mapping[str, Any], activations: str | None) -> dict[str, Any] | None:
    """The settings of the inputs of a layer with these weights: by default in FP8 as they come for FP8, else none."""
    dtype, block = weight["dtype"], weight["block_size"]
    if dtype == "fp4":
        return inputs(_NAME, activations, {None: None, "none": None, "mxfp4": _powers(is_dynamic=True)})
    codes = f",fp8_format={dtype.removeprefix('fp8_').upper()}"
    if block is not None:
        groups = _tensor(dtype, "per_group", ch_axis=-1, group_size=block[1], is_dynamic=True)
        return inputs(_NAME, activations, {None: groups, "none": None, f"fp8_block,block_k={block[1]}{codes}": groups})
    tokens, whole = (_tensor(dtype, "per_channel", ch_axis=1, is_dynamic=True), _tensor(dtype, "per_tensor", is_dynamic=True))
    return inputs(_NAME, activations, {None: tokens, "none": None, f"fp8_row{codes}": tokens, f"fp8_current{codes}": whole})


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, Any]:
    """Codes and scales as they are."""
    return (packed_floats if stored.entries["weight"].dtype == "U8" else fp8).write(st, stored)


def config(stored: Mapping[str, StoredForm], plain: Sequence[str], activations: str | None) -> dict[str, dict[str, Any]]:
    """The settings that most modules have as those of all, and the others by the names of their modules."""
    weights = {module: one.settings["weight"] for module, one in stored.items()}
    (common, _), *_ = Counter(map(repr, weights.values())).most_common(1) or [("", 0)]
    layers = {
        module: {**_LAYER, "weight": weight, "input_tensors": _inputs(weight, activations)}
        for module, weight in weights.items()
    }
    quantization = {
        "quant_method": "quark",
        "global_quant_config": next((layers[m] for m, weight in weights.items() if repr(weight) == common), _LAYER),
        "layer_quant_config": {m: layers[m] for m, weight in weights.items() if repr(weight) != common},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "exclude": sorted(plain),
        "algo_config": None,
        "quant_mode": "eager_mode",
        "export": {"pack_method": "reorder", "weight_format": "real_quantized", "kv_cache_group": []},
        "version": "0.13",
    }
    return {"config.json": {"quantization_config": quantization}}


_LAYER = {"weight": None, "input_tensors": None, "output_tensors": None, "bias": None, "target_device": None}
