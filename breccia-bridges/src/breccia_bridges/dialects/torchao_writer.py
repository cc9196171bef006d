"""torchao's tensors in safetensors, written: the inverse of `torchao`.

A value's parts are arrays of its class; the class and its attributes are in the metadata of every file, because loaders keep
those of one file only. The config names a type for all modules, which loaders check and otherwise leave alone.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from breccia import Format, INT8Scaling, ScaledTensor, ScalingRecipe, UnsupportedError
from breccia.backend import E2M3, E3M2, E4M3, NUMPY, TENSOR, Entry, Shape, StoredForm, ValueForm, unpack
from breccia.internal import FLOAT_CODECS

from ..recipes import SignedInt4Scaling
from ..text import spelled
from ..torchao_parts import FP4, FP6, FP8, half_of, matrix_block, mx_recipe, nvfp4_recipe
from ..wrapping import float8_recipe, integer_recipe
from . import integers, writing
from .fp8 import FORMATS
from .scales import SCALE_DTYPES

_DTYPES = {codec.name: str(codec.dtype) for codec in FLOAT_CODECS.values()}
_CODES = {name: dtype for dtype, name in FORMATS.items()}
#: torchao's names of MX elements, by the formats that they give.
_MX: dict[Format, str] = {mx_recipe("", name).format: name for name in (*FP8, FP4, *FP6) if "fnuz" not in name}


def _object(kind: str, **fields: Any) -> dict[str, Any]:
    """An object of a class, as torchao has it in JSON."""
    return {"_type": kind, "_data": fields}


def _member(kind: str, name: str) -> dict[str, Any]:
    """A member of an enumeration."""
    return {"_type": kind, "_data": name}


def _dtype(name: str) -> dict[str, Any]:
    return _member("torch.dtype", name)


#: How FP8 is multiplied, as torchao has it by default.
_MM = _object("Float8MMConfig", emulate=False, use_fast_accum=True, pad_inner_dim=False)


def stored(form: ValueForm) -> StoredForm:
    """The parts of a value, and its class with the attributes. Raises UnsupportedError for other formats and partial blocks."""
    writing.check(form, "torchao", _misfit)
    kind, fmt = _kind(form), form.recipe.format
    assert kind is not None
    *lead, rows, columns = shape = _shape(form)
    block = _block_size(form)
    scale = Entry(fmt.scale.codec.name, tuple(n // b for n, b in zip(shape, block, strict=True)))
    bits = fmt.element.bits
    inputs = _inputs(form, kind)
    dtype = _dtype(_DTYPES[form.dtype])
    match kind:
        case "Float8Tensor":
            parts = {"_qdata": Entry(_CODES[fmt.element.name], shape), "_scale": scale}
            attributes = {
                "block_size": block,
                "mm_config": _MM if inputs else None,
                "act_quant_kwargs": inputs,
                "kernel_preference": _member("KernelPreference", "AUTO"),
                "dtype": dtype,
            }
        case "Int8Tensor":
            parts = {"_zero_point": Entry("I8", scale.shape), "_qdata": Entry("I8", shape), "_scale": scale}
            attributes = {"act_quant_kwargs": inputs, "reduce_range": False, "block_size": block, "dtype": dtype}
        case "IntxUnpackedToInt8Tensor":
            parts = {"_qdata": Entry("I8", shape), "_scale": scale, "_zero_point": Entry("I8", scale.shape)}
            attributes = {
                "target_dtype": _dtype(f"int{bits}"),
                "block_size": block,
                "dtype": dtype,
                "activation_quantization": None,
            }
        case "Int4Tensor":
            scale = Entry(scale.dtype, (*lead, columns // block[-1], rows))
            parts = {"_qdata": Entry("I8", (*lead, rows, columns // 2)), "_scale": scale, "_zero_point": scale}
            attributes = {"activation_dtype": _dtype("bfloat16"), "block_size": block, "shape": list(shape)}
        case "MXTensor":
            fp8 = _CODES.get(fmt.element.name)
            codes = Entry(fp8 or "U8", shape if bits != 4 else (*lead, rows, columns // 2))
            parts = {"_qdata": codes, "_scale": Entry("F8_E8M0", scale.shape)}
            attributes = {
                "elem_dtype": _element(fmt),
                "block_size": 32,
                "orig_dtype": dtype,
                "kernel_preference": _member("KernelPreference", "EMULATED"),
                "act_quant_kwargs": inputs,
                "is_swizzled_scales": False,
            }
        case _:
            level = {} if fmt.global_scale is None else {"_per_tensor_scale": Entry("F32", ())}
            codes = Entry("U8", (*lead, rows, columns // 2))
            parts = {**level, "_qdata": codes, "_scale": Entry("F8_E4M3", scale.shape)}
            attributes = {
                "is_swizzled_scales": False,
                "use_triton_kernel": False,
                "act_quant_kwargs": inputs,
                "block_size": 16,
                "orig_dtype": dtype,
            }
    config = _config_of(kind, fmt, inputs is not None)
    return StoredForm(parts, {"kind": kind, "attributes": attributes, "config": config, "is_transposed": form.is_transposed})


def _kind(form: ValueForm) -> str | None:
    """torchao's class of tensors with the codes and scales of a form; None if it has none."""
    fmt, length = form.recipe.format, form.shape[-1]
    element, block, scale = fmt.element, fmt.scale.block, SCALE_DTYPES.get(fmt.scale.codec.name)
    is_block = block in (TENSOR, (1, None)) or None not in block
    if element.name in _CODES and is_block and float8_recipe(element.name, block).format == fmt:
        return "Float8Tensor"
    if fmt in _MX:
        return "MXTensor"
    if fmt in [nvfp4_recipe(two_level).format for two_level in (False, True)]:
        return "NVFP4Tensor"
    if scale is None or block[0] != 1 or element.bits not in (4, 8):
        return None
    group, symmetric = block[1], fmt.offset == "none"
    if group is not None and SignedInt4Scaling(group, scale).format == fmt:
        return "Int4Tensor"
    known = integer_recipe(element.bits, group, length, scale_dtype=scale, signed=symmetric, symmetric=symmetric)
    if known.format != fmt:
        return None
    # The layer of an Int8Tensor multiplies without zero-points.
    return "Int8Tensor" if symmetric and group is None else "IntxUnpackedToInt8Tensor"


def _misfit(form: ValueForm) -> str | None:
    fmt, shape = form.recipe.format, form.shape
    if _kind(form) is None:
        return (
            "it holds FP8 with an FP32 scale for each tensor, row or block, mxfp8, mxfp6, mxfp4, nvfp4 with "
            "order=scales_first or without a tensor scale, and integers of 4 bits in groups or 8 in rows or groups, signed or "
            f"unsigned with zero-points; {form.recipe.spec!r} is none of these."
        )
    if form.is_transposed and fmt.scale.block != (1, None):
        return "it has its blocks along the last axis; those of this value run along axis -2."
    if len(shape) < 2 or not all(shape):
        return f"it holds matrices and stacks of them; this value has shape {spelled(shape)}."
    block = _block_size(form)
    if any(n % b for n, b in zip(_shape(form), block, strict=True)):
        return f"it holds whole blocks; those of {spelled(block)} do not divide shape {spelled(_shape(form))}."
    scales = tuple(n // b for n, b in zip(_shape(form), block, strict=True))
    axis = -2 if form.is_transposed else -1
    if matrix_block("torchao", _shape(form), scales, block) != (*fmt.scale.block, axis):
        return f"blocks as long as the axes of shape {spelled(shape)} have the same block_size as another recipe."
    if form.fitted_layout.plain != form.recipe.layout.fitted(shape):
        return f"it has blocks of neighboring columns; this value has {form.layout!r}."
    return None


def _shape(form: ValueForm) -> Shape:
    """The shape of the model's value."""
    *lead, rows, columns = form.shape
    return (*lead, columns, rows) if form.is_transposed else form.shape


def _block_size(form: ValueForm) -> list[int]:
    """The elements of the model's value that share a scale: one length for each axis."""
    (m, k), shape = form.recipe.format.scale.block, form.shape
    if (m, k) == TENSOR:
        return list(shape)
    block = [m or shape[-2], k or shape[-1]]
    return [1] * (len(shape) - 2) + (block[::-1] if form.is_transposed else block)


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """Codes and scales as they are, in torchao's packings; unsigned codes and their zero-points become signed ones.

    Raises UnsupportedError for zero-points that are not integers of the codes' width, and for a scale of each matrix of a stack
    where torchao has one for all.
    """
    element = st.recipe.format.element
    parts: dict[str, Any] = {"_scale": st.scale, "_per_tensor_scale": st.global_scale}
    match stored.settings["kind"]:
        case "Int8Tensor" | "IntxUnpackedToInt8Tensor":
            parts |= {"_qdata": _signed_codes(st), "_zero_point": _zero_points(st)}
        case "Int4Tensor":
            parts = {end: NUMPY.swap(part) for end, part in (("_scale", st.scale), ("_zero_point", st.zero_point))}
            parts["_qdata"] = st.data.view(np.int8)
        case _ if element in (E2M3, E3M2):
            parts["_qdata"] = np.asarray(unpack(NUMPY, st.data, element, st.shape[-1])).astype(np.uint8)
        case _:
            parts["_qdata"] = st.data
    if stored.settings["is_transposed"]:
        parts["_qdata"] = NUMPY.swap(parts["_qdata"])
    return {end: _shaped(end, parts[end], entry.shape) for end, entry in stored.entries.items()}


def _shaped(end: str, part: np.ndarray, shape: Shape) -> np.ndarray:
    if part.size != math.prod(shape):
        raise UnsupportedError(
            f"torchao has {end!r} of shape {spelled(shape)} for this value, which has {part.size} of them: one scale for all "
            "matrices of a stack. Store each matrix as a value of its own.",
            shape=part.shape,
        )
    return np.ascontiguousarray(part).reshape(shape)


def _signed_codes(st: ScaledTensor) -> np.ndarray:
    """One code to a byte, in two's complement; unsigned ones are moved by half of their range."""
    if st.recipe.format.element.bits == 8:
        return (st.data if st.zero_point is None else st.data ^ 128).view(np.int8)
    codes = integers.split(st.data)[..., : st.shape[-1]]
    return (codes ^ 8 if st.zero_point is None else codes).view(np.int8) - np.int8(8)


def _zero_points(st: ScaledTensor) -> np.ndarray:
    zero, bits = st.zero_point, st.recipe.format.element.bits
    if zero is None:
        return np.zeros(st.scale.shape, np.int8)
    most = (1 << bits) - 1
    if zero.dtype != np.uint8 or zero.max(initial=0) > most:
        raise UnsupportedError(
            f"torchao has zero-points in 0..{most} with unsigned codes of {bits} bits; these are {zero.dtype}, up to "
            f"{zero.max()}. Quantize the original again under {st.recipe.spec!r}.",
            recipe=st.recipe,
        )
    return (zero.astype(np.int16) - half_of(bits)).astype(np.int8)


# ------------------------------------------------------------------------------------------------ what describes it


def header(stored: Mapping[str, StoredForm]) -> dict[str, str]:
    """The class and attributes of each value, and their names."""
    listed = {
        name: {
            "_type": form.settings["kind"],
            "_data": form.settings["attributes"],
            "_tensor_data_names": [end.removeprefix("_") for end in form.entries],
        }
        for name, form in stored.items()
    }
    return {name: json.dumps(entry) for name, entry in listed.items()} | {"tensor_names": json.dumps(list(listed))}


def config(stored: Mapping[str, StoredForm], plain: Sequence[str], activations: str | None) -> dict[str, dict[str, Any]]:
    """transformers' `TorchAoConfig`, whose one type is that of most modules: the metadata of the files says the others'."""
    types = {repr(form.settings["config"]): form.settings["config"] for form in stored.values()}
    counts = Counter(repr(form.settings["config"]) for form in stored.values())
    settings = {
        "quant_method": "torchao",
        "quant_type": {"default": types[counts.most_common(1)[0][0]]},
        "modules_to_not_convert": sorted(plain),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
    return {"config.json": {"quantization_config": settings}}


def _element(fmt: Format) -> Any:
    """The elements of a format of MX: a dtype, or a word for those that torch has none for."""
    name = _MX[fmt]
    return name if name in FP6 else _dtype(name)


def _config_of(kind: str, fmt: Format, dynamic: bool) -> dict[str, Any]:
    """torchao's config that gives such tensors, or ones of its class."""
    codes, group = fmt.element.bits, fmt.scale.block[1]
    match kind, dynamic:
        case "Float8Tensor", False:
            dtype = next(dtype for dtype, name in FP8.items() if name == fmt.element.name)
            return _type("Float8WeightOnlyConfig", 2, weight_dtype=_dtype(dtype))
        case "Float8Tensor", True:
            each = _granularity("PerTensor") if fmt.scale.block == TENSOR else _granularity("PerRow")
            return _type("Float8DynamicActivationFloat8WeightConfig", 2, granularity=[each, each])
        case "Int8Tensor", _:
            return _type("Int8DynamicActivationInt8WeightConfig" if dynamic else "Int8WeightOnlyConfig", 2)
        case "IntxUnpackedToInt8Tensor", _:
            each = _granularity("PerAxis", axis=0) if group is None else _granularity("PerGroup", group_size=group)
            return _type("IntxWeightOnlyConfig", 2, weight_dtype=_dtype(f"int{codes}"), granularity=each)
        case "Int4Tensor", _:
            return _type("Int4WeightOnlyConfig", 2, group_size=group)
        case "MXTensor", _:
            return _type("MXDynamicActivationMXWeightConfig", 1, activation_dtype=_element(fmt), weight_dtype=_element(fmt))
        case _:
            two_level = fmt.global_scale is not None
            if dynamic:
                return _type(
                    "NVFP4DynamicActivationNVFP4WeightConfig",
                    1,
                    use_triton_kernel=False,
                    use_dynamic_per_tensor_scale=two_level,
                )
            return _type("NVFP4WeightOnlyConfig", 1, use_dynamic_per_tensor_scale=two_level)


def _type(kind: str, version: int, **fields: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": version, "_data": fields}


def _granularity(kind: str, **fields: Any) -> dict[str, Any]:
    return _type(kind, 1, **fields)


# ------------------------------------------------------------------------------------------------ inputs


def _inputs(form: ValueForm, kind: str) -> dict[str, Any] | None:
    """How a layer quantizes its inputs; None if it leaves them as they are.

    By default it does so for MX, whose layers take no other inputs; for 8-bit integers with a scale per row; and for FP8 with
    one per row or tensor in models of BF16, which torch's kernels take. Raises OptionError for what torchao has no layer for.
    """
    dynamic = _dynamic(form, kind)
    known: dict[str | None, dict[str, Any] | None] = {} if kind == "MXTensor" else {"none": None}
    is_default = kind in ("MXTensor", "Int8Tensor") or (kind == "Float8Tensor" and form.dtype == "BF16")
    known[None] = dynamic[1] if dynamic and is_default else None
    if dynamic:
        known[dynamic[0].spec] = dynamic[1]
    return writing.inputs("torchao", form.activations, known)


def _dynamic(form: ValueForm, kind: str) -> tuple[ScalingRecipe, dict[str, Any]] | None:
    """The recipe of inputs that torchao multiplies with such weights, and its description; None if it has none."""
    fmt = form.recipe.format
    if form.is_transposed:
        return None
    match kind:
        case "Float8Tensor" if fmt.element == E4M3 and fmt.scale.block in (TENSOR, (1, None)):
            each = _object("PerTensor") if fmt.scale.block == TENSOR else _object("PerRow", dim=-1)
            inputs = _object(
                "QuantizeTensorToFloat8Kwargs", float8_dtype=_dtype("float8_e4m3fn"), granularity=each, mm_config=_MM
            )
            return float8_recipe("E4M3", fmt.scale.block), inputs
        case "Int8Tensor":
            each = _object("PerRow", dim=-1)
            return INT8Scaling(), _object("QuantizeTensorToInt8Kwargs", granularity=each)
        case "MXTensor":
            mode = _member("ScaleCalculationMode", "RCEIL")
            return form.recipe, _object("QuantizeTensorToMXKwargs", elem_dtype=_element(fmt), scaling_mode=mode)
        case "NVFP4Tensor":
            two_level = fmt.global_scale is not None
            return form.recipe, _object("QuantizeTensorToNVFP4Kwargs", use_dynamic_per_tensor_scale=two_level)
        case _:
            return None
