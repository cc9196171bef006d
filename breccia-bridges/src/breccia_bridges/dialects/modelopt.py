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

ModelOpt decodes NVFP4 as q * (s * s2): the recipe has `order="scales_first"`.

Source: nvidia-modelopt 0.47 (export_hf_checkpoint), run on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

from breccia import CorruptFileError, MXFP4BlockScaling, NVFP4BlockScaling, ScaledTensor, UnsupportedError
from breccia.backend import E4M3, Entry, SettingsOf, StoredForm, StoredValue, ValueForm, words

from ..text import spelled
from . import fp8, integers, packed_floats
from .patterns import globs
from .scales import POWERS, SCALE_DTYPES
from .schemes import Scheme, agree, one_form
from .writing import check_matrix, inputs, parts_of, refused

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


def settings(config: Mapping[str, Any]) -> SettingsOf:
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
    layers = inner.get("quantized_layers")
    if not isinstance(layers, dict | None):
        raise CorruptFileError(f"quantized_layers is an object; found {short(layers)}. Fix it, or download it again.")
    unquantized = globs(excluded, "{} in exclude_modules")

    def of(module: str) -> Mapping[str, Any] | None:
        if unquantized.first(module) is not None:
            return None
        if layers is None:
            return {"schemes": (_scheme(inner, "the config"),)}
        name = module
        while name and name not in layers:
            name = name.rpartition(".")[0]
        return {"schemes": (_scheme(layers[name], f"quantized_layers[{name!r}]"),)} if name else None

    return of


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
        value.need(scale.dtype in SCALE_DTYPES, f"{scale_end!r} is {scale.dtype}; it is {' or '.join(SCALE_DTYPES)} there.")
        value.need_shape(scale_end, codes.shape[:1], ())
        return integers.form(value, codes.shape, 8, True, None, scale_end)
    if scale.dtype == "F8_E4M3":
        return _nvfp4(value, scheme, scale_end, codes_end)
    if scale.dtype in POWERS:
        _agree(value, scheme, "MXFP4")
        second = f"{scale_end}_2"
        value.need(second not in value.entries, f"it has {second!r}, which MXFP4 has not: its scales are powers of two.")
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
    return packed_floats.form(value, codes_end, scale_end, NVFP4BlockScaling(order="scales_first"), is_transposed)


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


# -- writing ----------------------------------------------------------------------------------------------------------

#: Of each `quant_algo` that is written: the specs of recipes for inputs that it has. ModelOpt's other ways to quantize inputs
#: have scales that are measured by calibration, such as "input_scale".
_INPUTS: Mapping[str, tuple[str | None, ...]] = {
    "FP8": (None, "none"),
    "FP8_PER_CHANNEL_PER_TOKEN": (None, "fp8_row"),
    "fp8_pb_wo": (None, "none"),
    "MXFP8": (None, "mxfp8"),
    "W4A16_NVFP4": (None, "none"),
    "mxfp4": (None, "none"),
    "W4A16_AWQ": (None, "none"),
    "W8A16": (None, "none"),
}
_NAME = "modelopt"


def stored(form: ValueForm) -> StoredForm:
    """What has a `quant_algo`; fused experts, whose contraction axis is the one before the last, in NVFP4."""
    match packed_floats.kind_of(form):
        case "nvfp4" if form.recipe.format == NVFP4BlockScaling(order="scales_first").format:
            return _stored_nvfp4(form)
        case "mxfp4":
            check_matrix(form, _NAME)
            parts = ("weight", "U8"), ("weight_scale", "U8")
            return packed_floats.stored_as(form, _NAME, *parts, quant_algo="mxfp4")
        case _:
            check_matrix(form, _NAME)
    kind = fp8.kind_of(form) if form.recipe.format.element == E4M3 else ""
    if kind == "mx":
        return fp8.stored_as(form, "weight", "weight_scale", dtype="U8", quant_algo="MXFP8", group_size=32)
    if kind == "tensor":
        return fp8.stored_as(form, "weight", "weight_scale", quant_algo="FP8")
    if kind == "row":
        return fp8.stored_as(form, "weight", "weight_scale", form.shape[:-1], quant_algo="FP8_PER_CHANNEL_PER_TOKEN")
    if kind == "block" and form.recipe.format.block == fp8.TILE:
        *lead, rows, columns = form.shape
        spread = (n for side in (*lead, -(-rows // fp8.TILE[0]), -(-columns // fp8.TILE[1])) for n in (side, 1))
        return fp8.stored_as(form, "weight", "weight_scale", tuple(spread), quant_algo="fp8_pb_wo")
    return _stored_integers(form)


def _stored_nvfp4(form: ValueForm) -> StoredForm:
    fused = form.is_transposed and len(form.shape) > 2
    check_matrix(form, _NAME, is_transposed=fused)
    codes, scale = ("", _FUSED) if fused else ("weight", "weight_scale")
    parts = (codes, "U8"), (scale, "F8_E4M3"), (f"{scale}_2", form.shape[:-2])
    return packed_floats.stored_as(form, _NAME, *parts, quant_algo="W4A16_NVFP4", group_size=16)


def _stored_integers(form: ValueForm) -> StoredForm:
    """Signed integers without offset: of 8 bits with a scale per row, of 4 bits with one per group."""
    kind = integers.kind_of(form)
    is_plain = kind is not None and kind.signed and kind.offset == "none"
    if kind is None or not is_plain or (kind.bits, kind.group is None) not in ((8, True), (4, False)):
        raise refused(form, _NAME)
    if kind.bits == 8:
        if len(form.shape) > 2:
            raise refused(form, _NAME, "its 8-bit integers are matrices; stacks of experts are 'fp8_row' there")
        return integers.stored_as(form, "weight", "weight_scale", form.shape[:-1], quant_algo="W8A16")
    *lead, rows, columns = form.shape
    size = kind.group or columns
    if rows % 2 or columns % size:
        raise refused(form, _NAME, f"two rows are a byte there, and groups of {size} are whole; use 'fp8_row'")
    entries = {
        "weight_scale": Entry(kind.scale_dtype, (*lead, rows, columns // size)),
        "weight": Entry("U8", (*lead, rows // 2, columns)),
    }
    algorithm = {"quant_algo": "W4A16_AWQ", "group_size": size, "has_zero_point": False, "pre_quant_scale": False}
    return StoredForm(entries, algorithm)


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, Any]:
    """Codes and scales as they are; 4-bit integers with two rows to a byte, in place of two columns."""
    scale_end, codes_end = list(stored.entries)[:2]
    scale, codes = stored.entries[scale_end], stored.entries[codes_end]
    if codes.dtype in fp8.FORMATS:
        return fp8.write(st, stored)
    if codes.dtype == "I8":
        return integers.write(st, stored)
    if scale.dtype in SCALE_DTYPES:
        rows = integers.split(words(st)["data"])[..., : codes.shape[-1]]
        packed = rows[..., ::2, :] | (rows[..., 1::2, :] << 4)
        return {**parts_of(st, stored, scale=scale_end), codes_end: packed}
    return packed_floats.write(st, stored, is_transposed=scale_end == _FUSED)


def config(stored: Mapping[str, StoredForm], plain: Sequence[str], activations: str | None) -> dict[str, dict[str, Any]]:
    """The `quant_algo` of all modules, or of each under "MIXED_PRECISION": in hf_quant_config.json, and flat in config.json."""
    layers = {module: dict(one.settings) for module, one in stored.items()}
    for algorithm in dict.fromkeys(layer["quant_algo"] for layer in layers.values()):
        inputs(_NAME, activations, dict.fromkeys(_INPUTS[algorithm], algorithm))
    first = next(iter(layers.values()), {"quant_algo": None})
    same = all(layer == first for layer in layers.values())
    said = first if same else {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    producer = {"name": "modelopt", "version": "0.47.0"}  # whose layout it is: engines ask for the name
    excluded = sorted(plain)
    listed = {"quant_algo": said["quant_algo"], "kv_cache_quant_algo": None, **said, "exclude_modules": excluded}
    flat = {"quant_method": "modelopt", **said, "ignore": excluded, "producer": producer}
    return {
        "config.json": {"quantization_config": flat},
        "hf_quant_config.json": {"producer": producer, "quantization": listed},
    }
