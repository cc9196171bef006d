"""bitsandbytes' weights in NF4, its own FP4 and LLM.int8(), as transformers, `Linear4bit` and `Linear8bitLt` write them.

4-bit weights: `up.weight` has two codes to a byte, the even index in the high nibble, as a column (N · K / 2, 1) of uint8 or of
the dtype `bnb_4bit_quant_storage`; beside it are `up.weight.absmax`, `up.weight.quant_map` and
`up.weight.quant_state.bitsandbytes__nf4`, JSON in bytes. Blocks run over the flattened weight, so rows must be whole blocks.

A nested absmax ("double quantization") is decoded as bitsandbytes computes it, in FP32: number of the code · number of its
block + offset. No recipe has scales of scales: these scales are FP32, four times as large as their codes, so that a tensor in
blocks of 64 grows from 4.13 bits per value to 4.5.

LLM.int8() has `up.weight`, (N, K) in int8, and `up.SCB`, the FP32 absmax of each row. bitsandbytes computes code · absmax ·
FP32(1 / 127) in this order and rounds twice. An absmax that FP16 has, because it was measured on FP16 weights, is held in FP16
under a scale of the tensor, which all kernels know; others in FP32, and the constant is the factor of the format.

Source: bitsandbytes 0.50.2, run on a CPU. Neither it nor torch is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import DialectError, Format, NF4Scaling, ScaledTensor, ScalingRecipe, UnsupportedError
from breccia.backend import Array, Entry, StoredForm, StoredValue, ValueForm, ops_of
from breccia.internal import FLOAT_CODECS, parsed_json

from ..recipes import BNB_INT8_SCALE, BnbFP4Scaling, BnbINT8Scaling
from ..safetensors_file import byte_count
from ..safetensors_file import read as loaded
from ..text import spelled
from . import writing
from .scales import RowReader, assembled, check_scale

#: Recipes by bitsandbytes' quant_type.
RECIPES: Mapping[str, type[NF4Scaling] | type[BnbFP4Scaling]] = {"nf4": NF4Scaling, "fp4": BnbFP4Scaling}
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_STATE = ".quant_state.bitsandbytes__"
_NESTED = (".nested_absmax", ".nested_quant_map")
_AGAIN = "Download the checkpoint again."
_DTYPES = {codec.name: str(codec.dtype) for codec in FLOAT_CODECS.values()}


def table_of(recipe: ScalingRecipe) -> list[float]:
    """The numbers of all codes, which FP32 holds."""
    element = recipe.format.element
    return [element.value(code) for code in range(1 << element.bits)]


def kind_of(fmt: Format) -> str | None:
    """bitsandbytes' quant_type of a format's codes; None if it has none."""
    return next((kind for kind, known in RECIPES.items() if known().format.element == fmt.element), None)


def swapped(data: Array) -> Array:
    """The two nibbles of each byte exchanged."""
    return (data >> 4) | (data << 4)


def decoded_absmax(codes: Array, table: Array, absmax: Array, block: int, offset: Any) -> Array:
    """The FP32 absmax of each block of a nested one, in bitsandbytes' order of operations.

    codes: uint8, (n,). table: the numbers of the 256 codes. absmax: FP32, one per `block` codes.
    """
    ops, count = ops_of(codes), codes.shape[0]
    scale = ops.reshape(ops.broadcast(ops.reshape(absmax, (-1, 1)), (absmax.shape[0], block)), (-1,))[:count]
    return ops.gather(table, ops.load(codes), 0) * scale + offset


def form(value: StoredValue) -> ValueForm:
    """For 4 bits, what the quant_state says, which is read: quant_type, blocksize and shape."""
    if "SCB" in value.entries:
        return _int8_form(value)
    state = _state(value)
    shape: tuple[int, ...] = tuple(state["shape"])
    block: int = state["blocksize"]
    value.need(
        block in _BLOCKS, f"its blocksize is {block}; bitsandbytes has {', '.join(map(str, _BLOCKS))}. {_AGAIN}", block=block
    )
    if len(shape) < 2 or shape[-1] % block:
        raise UnsupportedError(
            f"its shape {spelled(shape)} has blocks of {block} over its flattened values, which reach across rows: no layout "
            "describes them. Convert the original checkpoint, or quantize it with a blocksize that divides its rows.",
            name=value.name,
        )
    numbers, codes = math.prod(shape), value.entries[""]
    value.need(
        2 * byte_count(codes.dtype, codes.shape) == numbers,
        f"its codes are {codes.dtype} of shape {spelled(codes.shape)}; shape {spelled(shape)} needs half as many bytes as "
        f"numbers. {_AGAIN}",
    )
    value.need(".absmax" in value.entries, f"no file has its '.absmax'. {_AGAIN}")
    value.need_shape(".absmax", (numbers // block,))
    absmax, is_nested = value.entries[".absmax"].dtype, "nested_blocksize" in state
    nested = [end for end in _NESTED if end in value.entries]
    value.need(
        absmax == ("U8" if is_nested else "F32") and len(nested) == (2 if is_nested else 0),
        f"'.absmax' is {absmax} with {' and '.join(map(repr, nested)) or 'no nested parts'}, and the quant_state has "
        f"{'a' if is_nested else 'no'} nested_blocksize; an absmax is F32, or U8 with {' and '.join(map(repr, _NESTED))}. "
        f"{_AGAIN}",
    )
    if is_nested:
        value.need_shape(".nested_absmax", (-(-numbers // block // state["nested_blocksize"]),))
        value.need_shape(".nested_quant_map", (256,))
    return ValueForm(RECIPES[state["quant_type"]](block_size=block), shape)


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Every code keeps its number; the nibbles of each byte are swapped. A nested absmax is decoded, others are as stored."""
    if "SCB" in value.entries:
        if form.recipe.format.global_scale is None:
            return assembled(form, value.view("weight"), value["SCB"])
        constant = np.asarray(BNB_INT8_SCALE, np.float32)
        return assembled(form, value.view("weight"), value["SCB"].astype(np.float16), global_scale=constant)
    reader = rows(value, form)
    assert reader is not None
    st = reader(slice(0, math.prod(form.shape[:-1])))
    return assembled(form, st.data.reshape(*form.shape[:-1], -1), st.scale)


def rows(value: StoredValue, form: ValueForm) -> RowReader | None:
    """What reads rows of 4 bits. Codes of LLM.int8() stay as they are."""
    if "SCB" in value.entries:
        return None
    table, numbers = table_of(form.recipe), value[".quant_map"].tolist()
    value.need(
        numbers == table,
        f"'.quant_map' has other numbers than bitsandbytes' table of this type: {short(numbers)}, for {short(table)}. {_AGAIN}",
    )
    codes, length = value.view("").reshape(-1).view(np.uint8), form.shape[-1]
    block, absmax = form.recipe.format.scale.block[1] or 1, _absmax(value)

    def some(rows: slice) -> ScaledTensor:
        first, end = rows.start * length, rows.stop * length
        data = swapped(loaded(codes[first // 2 : end // 2])).reshape(-1, length // 2)
        scale = absmax(first // block, end // block)
        check_scale(value, ".absmax", scale, first // block)
        return assembled(replace(form, shape=(len(data), length)), data, scale)

    return some


def _absmax(value: StoredValue) -> Callable[[int, int], np.ndarray]:
    """What reads the FP32 absmax of a range of blocks."""
    stored = value.view(".absmax")
    if stored.dtype != np.uint8:
        return lambda first, end: loaded(stored[first:end])
    state, coarse, numbers = _state(value), value[".nested_absmax"], value[".nested_quant_map"]
    for name, part in zip(_NESTED, (coarse, numbers), strict=True):
        check_scale(value, name, part)
    inner, offset = state["nested_blocksize"], np.float32(state["nested_offset"])

    def nested(first: int, end: int) -> np.ndarray:
        block = first // inner
        codes = loaded(stored[block * inner : end])
        return decoded_absmax(codes, numbers, coarse[block : -(-end // inner)], inner, offset)[first - block * inner :]

    return nested


def _int8_form(value: StoredValue) -> ValueForm:
    """Codes (N, K) and `SCB`, an absmax for each row, which is read."""
    shape, absmax = value.entries["weight"].shape, value.entries["SCB"].dtype
    value.need(len(shape) == 2, f"its codes have shape {spelled(shape)}; a weight of LLM.int8() is a matrix. {_AGAIN}")
    value.need(absmax == "F32", f"'SCB' is {absmax}; bitsandbytes has F32 there. {_AGAIN}")
    value.need_shape("SCB", (shape[0],), (shape[0], 1))
    if "weight_format" in value.entries:
        value.need_shape("weight_format", (), (1,))
        order = int(value["weight_format"].reshape(()))
        if order != 0:
            raise UnsupportedError(
                f"its codes are in the order {order} of old releases of bitsandbytes; only 0, by rows, can be read. Convert "
                "the original checkpoint.",
                name=value.name,
            )
    scale = value["SCB"]
    check_scale(value, "SCB", scale)
    with np.errstate(over="ignore"):
        narrow = scale.astype(np.float16).astype(np.float32)
    return ValueForm(BnbINT8Scaling("fp16" if np.array_equal(narrow, scale) else "fp32"), shape)


def _state(value: StoredValue) -> dict[str, Any]:
    """The checked quant_state."""
    ends = [end for end in value.entries if end.startswith(_STATE)]
    value.need(
        len(ends) == 1,
        f"it has {len(ends)} quant_states; a weight has one, named {_STATE}nf4 or {_STATE}fp4. {_AGAIN}",
    )
    (end,) = ends
    value.need(".quant_map" in value.entries, f"no file has its '.quant_map'. {_AGAIN}")
    value.need_shape(".quant_map", (16,))
    for part in (".quant_map", *_NESTED):
        if part in value.entries:
            dtype = value.entries[part].dtype
            value.need(dtype == "F32", f"{part!r} is {dtype}; bitsandbytes has F32 there. {_AGAIN}")
    try:
        listed = parsed_json(value[end].tobytes().decode())
    except ValueError as e:
        raise DialectError(f"{end!r} holds JSON in bytes; they are not ({e}). {_AGAIN}", name=value.name) from e
    state: dict[str, Any] = listed if isinstance(listed, dict) else {}
    kind, block, shape = (state.get(key) for key in ("quant_type", "blocksize", "shape"))
    value.need(
        kind == end.removeprefix(_STATE) and _is_length(block) and isinstance(shape, list) and all(map(_is_length, shape)),
        f"{end!r} has quant_type {end.removeprefix(_STATE)!r}, a blocksize and a shape; got {short(state)}. {_AGAIN}",
    )
    if value.settings.get("load_in_4bit") and "bnb_4bit_quant_type" in value.settings:
        named = value.settings["bnb_4bit_quant_type"]
        value.need(named == kind, f"{end!r} says {kind!r}, and the config says bnb_4bit_quant_type {short(named)}. {_AGAIN}")
    if any(key.startswith("nested_") for key in state):
        inner, offset, dtype = (state.get(f"nested_{key}") for key in ("blocksize", "offset", "dtype"))
        value.need(
            _is_length(inner) and isinstance(offset, int | float) and math.isfinite(offset) and dtype == "float32",
            f"{end!r} has nested_blocksize, a finite nested_offset, and nested_dtype 'float32'; got {short(state)}. {_AGAIN}",
        )
    return state


def _is_length(n: Any) -> bool:
    return type(n) is int and n > 0


def stored(form: ValueForm) -> StoredForm:
    """A weight of 4 bits without a nested absmax, or one of LLM.int8(). Raises UnsupportedError for other formats."""
    writing.check(form, "bitsandbytes", _misfit)
    kind, shape = kind_of(form.recipe.format), form.shape
    if kind is None:
        entries = {"SCB": Entry("F32", shape[:1]), "weight": Entry("I8", shape), "weight_format": Entry("U8", ())}
        return StoredForm(entries, {"kind": "int8"})
    numbers, block = math.prod(shape), form.recipe.format.scale.block[1] or 1
    state = {"quant_type": kind, "blocksize": block, "dtype": _DTYPES[form.dtype], "shape": list(shape)}
    entries = {
        "": Entry("U8", (numbers // 2, 1)),
        ".absmax": Entry("F32", (numbers // block,)),
        ".quant_map": Entry("F32", (16,)),
        f"{_STATE}{kind}": Entry("U8", (len(json.dumps(state)),)),
    }
    return StoredForm(entries, {"kind": kind, "state": state})


def _misfit(form: ValueForm) -> str | None:
    fmt, shape, kind = form.recipe.format, form.shape, kind_of(form.recipe.format)
    block = fmt.scale.block[1]
    if kind is not None and block in _BLOCKS:
        known = [RECIPES[kind](block_size=block).format]
    else:
        known = [BnbINT8Scaling(dtype).format for dtype in ("fp32", "fp16")]
    if fmt not in known:
        return (
            f"it holds NF4 and its own FP4 with an FP32 absmax per {', '.join(map(str, _BLOCKS[:-1]))} or "
            f"{_BLOCKS[-1]} codes, and 8-bit integers whose absmax it multiplies by 1 / 127; {form.recipe.spec!r} is none of "
            "these."
        )
    if form.is_transposed:
        return "it has its blocks along the last axis; those of this value run along axis -2."
    if kind is None and len(shape) != 2:
        return f"a weight of LLM.int8() is a matrix; this value has shape {spelled(shape)}."
    if len(shape) < 2 or not all(shape) or (block is not None and shape[-1] % block):
        return f"it holds (..., M, K) in whole blocks of K; blocks of {block} do not divide shape {spelled(shape)}."
    if form.fitted_layout.plain != form.recipe.layout.fitted(shape):
        return f"it has blocks of neighboring columns; this value has {form.layout!r}."
    return None


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """Codes with the nibbles of each byte swapped, or as they are; absmax as it is.

    Raises UnsupportedError for a `bnb_int8` tensor whose scale is not bitsandbytes' constant: one that a cast wrote.
    """
    if "SCB" in stored.entries:
        constant = st.global_scale
        if constant is not None and float(constant) != BNB_INT8_SCALE:
            raise UnsupportedError(
                f"bitsandbytes multiplies absmax by {BNB_INT8_SCALE!r}; the scale of this tensor is {float(constant)!r}. "
                "Give the recipe 'bnb_int8,scale_dtype=fp32'.",
                found=float(constant),
            )
        absmax = st.scale.reshape(-1).astype(np.float32)
        return {"SCB": absmax, "weight": st.data, "weight_format": np.zeros((), np.uint8)}
    state: dict[str, Any] = stored.settings["state"]
    return {
        "": swapped(st.data.reshape(-1, 1)),
        ".absmax": st.scale.reshape(-1),
        ".quant_map": np.array(table_of(st.recipe), np.float32),
        f"{_STATE}{state['quant_type']}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def config(stored: Mapping[str, StoredForm], plain: Sequence[str], activations: str | None) -> dict[str, dict[str, Any]]:
    """A `BitsAndBytesConfig`, which has one type for all modules.

    Layers of 4 bits leave inputs as they are, and multiply in the dtype of the model. LLM.int8() quantizes inputs to 8 bits.
    """
    kinds = {form.settings["kind"]: module for module, form in stored.items()}
    if len(kinds) > 1:
        listed = ", ".join(f"{kind} in {module}" for kind, module in kinds.items())
        raise UnsupportedError(
            f"a bitsandbytes checkpoint has one type for all modules; got {listed}. Give all the same one, nf4, bnb_fp4 or "
            "bnb_int8, and leave others out (--exclude)."
        )
    (kind,) = kinds
    writing.inputs("bitsandbytes", activations, dict.fromkeys((None, "int8" if kind == "int8" else "none")))
    settings: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
        "llm_int8_skip_modules": sorted(plain),
    }
    if kind == "int8":
        settings |= {"llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False}
    else:
        state = next(iter(stored.values())).settings["state"]
        settings |= {
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_compute_dtype": state["dtype"],
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_use_double_quant": False,
        }
    return {"config.json": {"quantization_config": settings}}
