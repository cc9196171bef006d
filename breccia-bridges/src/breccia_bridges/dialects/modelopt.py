"""Checkpoints of NVIDIA ModelOpt: the formats of its `quant_algo`, told apart by names and dtypes of tensors.

    FP8, FP8_PER_CHANNEL_PER_TOKEN, fp8_pb_wo  weight F8_E4M3, weight_scale (), (N,) or (N / 128, 1, K / 128, 1)
    MXFP8                                      weight F8_E4M3, weight_scale U8 (E8M0)
    NVFP4, NVFP4_AWQ, W4A16_NVFP4              weight U8 (N, K / 2), weight_scale F8_E4M3, weight_scale_2 F32
    mxfp4, W4A8_MXFP4_FP8                      weight U8 (N, K / 2), weight_scale U8 (E8M0)
    W4A8_NVFP4_FP8                             the same with a scale per 32 codes, which no recipe holds
    W4A16_AWQ                                  weight U8 (N / 2, K): rows 2i and 2i + 1 in the low and high bits; weight_scale
                                               F32 (N, K / group)
    W8A16, W8A8_SQ_PER_CHANNEL                 weight I8, weight_scale (N,)

Fused experts are X (E, K, N) with X_weight_scale in place of X.weight, packed along K: FP8 with one scale, and NVFP4.

Modules of a model in mixed precision are in `quantized_layers`, each with its `quant_algo`. `pre_quant_scale`, by which
activations are multiplied, is no part of a value: it stays a tensor of its own beside it, as `input_scale` does.

Codes and scales of NVFP4 are exact, as stored. ModelOpt decodes them as q * (s * s2), the numerics contract as (q * s) * s2:
some decoded numbers differ in the last bit.

Source: nvidia-modelopt 0.47 (export_hf_checkpoint), run on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from reprlib import repr as short
from typing import Any

from breccia import CorruptFileError, MXFP4BlockScaling, NVFP4BlockScaling, ScaledTensor, UnsupportedError
from breccia.backend import StoredValue, ValueForm

from ..text import spelled
from . import fp8, integers, packed_floats
from .scales import POWERS
from .schemes import Scheme, agree, one_form

#: The values of `quant_algo`, in upper case, by what the tensors are.
ALGORITHMS = {
    "FP8": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL"),
    "MXFP8": ("MXFP8",),
    "NVFP4": ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8"),
    "MXFP4": ("MXFP4", "W4A8_MXFP4_FP8"),
    "INT4": ("W4A16_AWQ",),
    "INT8": ("W8A16", "W8A8_SQ_PER_CHANNEL"),
}
#: The end of the name of scales of fused experts, of the model's (E, K, N): `experts.gate_up_proj_weight_scale`.
_FUSED = "_weight_scale"
_ORIGINAL = "Convert the checkpoint that it was made from."


def settings(config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """{"schemes": the scheme of a module}; None for one that is excluded, or that is not in the list of quantized ones.

    config: of config.json, or of hf_quant_config.json, where it is under "quantization". A listed module stands for all in it.
    Raises CorruptFileError for settings that are not what the library writes.
    """
    inner = config.get("quantization", config)
    if not isinstance(inner, Mapping):
        raise CorruptFileError(f"quantization is an object; found {short(inner)}. Fix it, or download it again.")
    excluded = inner.get("exclude_modules") or inner.get("ignore") or []
    if not isinstance(excluded, list) or not all(isinstance(name, str) for name in excluded):
        raise CorruptFileError(
            f"exclude_modules lists names of modules; found {short(excluded)}. Fix it, or download it again."
        )
    if any(fnmatchcase(module, name) for name in excluded):
        return None
    layers = inner.get("quantized_layers")
    if layers is None:
        return {"schemes": (_scheme(inner, "the config"),)}
    if not isinstance(layers, dict):
        raise CorruptFileError(f"quantized_layers is an object; found {short(layers)}. Fix it, or download it again.")
    name = module
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return {"schemes": (_scheme(layers[name], f"quantized_layers[{name!r}]"),)} if name else None


def _scheme(listed: Any, where: str) -> Scheme:
    if not isinstance(listed, Mapping):
        raise CorruptFileError(f"{where} is an object; found {short(listed)}. Fix it, or download it again.")
    algorithm = listed.get("quant_algo")
    return {**listed, "where": where, "quant_algo": algorithm.upper() if isinstance(algorithm, str) else algorithm}


def form(value: StoredValue) -> ValueForm:
    """What the tensors are, which the `quant_algo` of the module has to agree with."""
    return one_form(value, _form)


def _form(value: StoredValue, scheme: Scheme) -> ValueForm:
    scale_end, codes_end = list(value.entries)[:2]
    scale, codes = value.entries[scale_end], value.entries[codes_end]
    _refuse(value, scheme)
    if codes.dtype in fp8.FORMATS:
        _agree(value, scheme, "MXFP8" if scale.dtype in POWERS else "FP8")
        return fp8.form_of(value, fp8.TILE)
    if codes.dtype == "I8":
        _agree(value, scheme, "INT8")
        value.need(len(codes.shape) == 2, f"{codes_end!r} has shape {spelled(codes.shape)}; a weight has two axes.")
        value.need_shape(scale_end, codes.shape[:1], ())
        return integers.form(value, codes.shape, 8, True, None, scale_end)
    if scale.dtype == "F8_E4M3":
        return _nvfp4(value, scheme, scale_end, codes_end)
    if scale.dtype in POWERS:
        _agree(value, scheme, "MXFP4")
        return packed_floats.form(value, codes_end, scale_end, MXFP4BlockScaling())
    return _rows(value, scheme)


def _agree(value: StoredValue, scheme: Scheme, what: str) -> None:
    agree(value, scheme, what, quant_algo=ALGORITHMS[what])
    if what in ("MXFP8", "MXFP4"):
        agree(value, scheme, what, group_size=(0, 32))


def _refuse(value: StoredValue, scheme: Scheme) -> None:
    """Raise UnsupportedError for values that are more than one ScaledTensor, and for formats that breccia does not know."""
    algorithm = scheme.get("quant_algo")
    known = sorted({name for names in ALGORITHMS.values() for name in names})
    if any(end.startswith("svdquant_lora") for end in value.entries):
        raise UnsupportedError(
            "its weight is the sum of 'weight' and of the product of 'svdquant_lora_b' and 'svdquant_lora_a'; a ScaledTensor "
            f"is one of them. {_ORIGINAL}"
        )
    if algorithm is not None and algorithm not in known:
        raise UnsupportedError(
            f"{scheme.get('where')} has quant_algo {algorithm!r}; breccia reads {', '.join(known)}. {_ORIGINAL}",
            quant_algo=algorithm,
        )
    scale_end, codes_end = list(value.entries)[:2]
    scale, codes = value.entries[scale_end], value.entries[codes_end]
    one_scale = codes.dtype in fp8.FORMATS and scale.shape in ((), (1,))
    if scale_end == _FUSED and not one_scale and (codes.dtype, scale.dtype) != ("U8", "F8_E4M3"):
        raise UnsupportedError(
            f"its experts are fused, with {codes.dtype} codes and {scale.dtype} scales of shape {spelled(scale.shape)}; of "
            f"fused experts breccia reads FP8 with one scale, and NVFP4. {_ORIGINAL}"
        )


def _nvfp4(value: StoredValue, scheme: Scheme, scale_end: str, codes_end: str) -> ValueForm:
    """Blocks of 16 under one FP32 scale; of fused experts, along the axis before the last."""
    _agree(value, scheme, "NVFP4")
    is_transposed = scale_end == _FUSED
    bytes_, blocks = (value.entries[end].shape[-2 if is_transposed else -1 :][:1] for end in (codes_end, scale_end))
    if bytes_ and blocks and 2 * bytes_[0] == 32 * blocks[0]:
        raise UnsupportedError(f"it has a scale per 32 codes, as W4A8_NVFP4_FP8 has; NVFP4 has blocks of 16. {_ORIGINAL}")
    second_end = f"{scale_end}_2"
    value.need(second_end in value.entries, f"{second_end!r} is missing, by which scales in F8_E4M3 are multiplied.")
    second = value.entries[second_end]
    value.need(second.dtype == "F32", f"{second_end!r} is {second.dtype}; it is F32 there.", dtype=second.dtype)
    value.need_shape(second_end, (), (1,), value.entries[codes_end].shape[:-2])
    return packed_floats.form(value, codes_end, scale_end, NVFP4BlockScaling(), is_transposed)


def _rows(value: StoredValue, scheme: Scheme) -> ValueForm:
    """4-bit integers, of two rows to a byte."""
    if "weight_scale_2" in value.entries:
        raise UnsupportedError(
            f"it is W4A8_AWQ: 4-bit integers that are rounded again to FP8, with two scales; no recipe has them. {_ORIGINAL}"
        )
    _agree(value, scheme, "INT4")
    codes, scales = value.entries["weight"].shape, value.entries["weight_scale"].shape
    value.need(len(codes) > 1, f"'weight' has shape {spelled(codes)}; a weight has two axes or more.", shape=codes)
    *lead, half, columns = codes
    size: Any = scheme.get("group_size") or columns // max(scales[-1] if scales else 1, 1)
    value.need(
        type(size) is int and size > 0 and columns % size == 0 and scales == (*lead, 2 * half, columns // size),
        f"'weight' of shape {spelled(codes)} has two rows to a byte, and needs scales of shape {spelled((*lead, 2 * half))}x"
        f"(groups of {size} columns); 'weight_scale' has shape {spelled(scales)}.",
        shape=scales,
    )
    return integers.form(value, (*lead, 2 * half, columns), 4, True, size, "weight_scale")


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes and scales as stored; 4-bit integers with two columns to a byte, in place of two rows."""
    scale_end, codes_end = list(value.entries)[:2]
    dtype = value.entries[codes_end].dtype
    if dtype in fp8.FORMATS:
        return fp8.read(value, form)
    if dtype == "I8":
        return integers.read(value, form, value.view(codes_end), scale_end)
    if form.recipe.format.scale.codec.bits > 8:
        return integers.read(value, form, integers.nibbles(integers.split(value[codes_end], -2)), scale_end)
    second = f"{scale_end}_2" if form.recipe.format.global_scale else None
    return packed_floats.read(value, form, codes_end, scale_end, second)
