"""Which calls the products of other libraries take, and what these libraries call a format. Imports none of them, nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from breccia import Format
from breccia.backend import BF16, E2M1, E4M3, E8M0, F16, F32, INT4, TENSOR, UINT4, Block, Call
from breccia_triton.gemm.fp8.plans import codec_of, kinds

#: humming's products have tiles of so many columns and multiply steps of K of this length; its blocks are these tall.
_COLUMNS, _STEP, _TALL = 64, 128, 128
#: Group sizes of torch's INT4, and how many columns and elements along K it packs together.
_GROUPS, _PACKED_COLUMNS, _PACKED = (32, 64, 128, 256), 8, 32
#: DeepGEMM stores rows of BF16 in units of 16 bytes.
_STORED = 8


def _refused_operands(call: Call) -> str | None:
    """Why no library multiplies these operands, whatever their formats."""
    assert call.b is not None
    if call.a.empty or call.b.empty:
        return "the generic algorithm runs for empty operands"
    return "it multiplies one matrix of b" if len(call.b.shape) > 2 else None


# ------------------------------------------------------------------------------------------------ humming-kernels


#: humming's configurations of a weight and of activations, by kinds of scales. Without a group size each row has a scale.
HUMMING_PAIRS: Mapping[tuple[str, str], tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    ("1x128", "128x128"): (
        {"dtype": "float8e4m3", "group_size": _STEP, "group_size_n": _TALL},
        {"dtype": "float8e4m3", "group_size": _STEP},
    ),
    ("row", "row"): ({"dtype": "float8e4m3"}, {"dtype": "float8e4m3"}),
}


def accepts_humming_fp8(call: Call) -> str | None:
    """Why humming does not multiply two FP8 tensors, or None."""
    if why := _refused_pair(call, HUMMING_PAIRS.keys(), "humming") or _refused_operands(call):
        return why
    assert call.b is not None
    return _refused_lengths(call, _TALL if kinds(call.a, call.b)[1] == "128x128" else _COLUMNS, "humming")


def _refused_pair(call: Call, pairs: Any, who: str) -> str | None:
    assert call.b is not None
    scales = kinds(call.a, call.b)
    if isinstance(scales, str):
        return scales
    if scales not in pairs:
        return f"{who} has no form for scales {scales[0]} times {scales[1]}"
    if (codec_of(call.a), codec_of(call.b)) != ("e4m3", "e4m3"):
        return f"{who} is called for E4M3 codes only"
    dtype = str(call.option("out_dtype", "float32"))
    return None if dtype == "bfloat16" else f"{who} writes bfloat16; this product is to be {dtype}"


def _refused_lengths(call: Call, columns: int, who: str) -> str | None:
    assert call.b is not None
    if len(call.b.shape) < 2:  # `explain` of recipes alone
        return None
    k, n = call.b.shape[-2:]
    if k % _STEP or n % columns:
        return f"{who} is called for K in multiples of {_STEP} and N of {columns}; got K = {k}, N = {n}"
    return None


#: humming's names of codes.
_HUMMING_CODES = {INT4: "int4", UINT4: "uint4", E2M1: "float4e2m1", E4M3: "float8e4m3"}


@lru_cache(maxsize=256)
def humming_weight(fmt: Format, block: Block) -> Mapping[str, Any] | str:
    """humming's configuration of a weight for activations of 16 bits; or why there is none. block: of scales along K."""
    codec, scale, global_scale = fmt.element, fmt.scale, fmt.global_scale
    dtype = _HUMMING_CODES.get(codec)  # pyright: ignore[reportArgumentType, reportCallIssue]
    offset = "zero_point" if codec == UINT4 else "none"
    if (
        dtype is None
        or fmt.offset != offset
        or scale.convention != "multiplier"
        or (global_scale is not None and global_scale.convention != "multiplier")
    ):
        return (
            f"humming is not called for {codec.name} codes with offset {fmt.offset!r} and scales that are {scale.convention}s"
        )
    sized = {"dtype": dtype, "group_size": block[1]}
    if codec in (INT4, UINT4) and scale.codec in (F16, BF16, F32) and global_scale is None and block[0] == 1:
        zero = {"has_zero_point": True} if codec == UINT4 else {}
        if block[1] in (32, 64, 128):
            return {**sized, **zero}
        if block[1] is None:
            return {"dtype": dtype, **zero}
    if codec in (E2M1, E4M3) and scale.codec == E8M0 and block == (1, 32) and global_scale is None:
        return {**sized, "scale_dtype": "float8e8m0"}
    if codec == E2M1 and scale.codec == E4M3 and block == (1, 16) and (global_scale is None or global_scale.codec == F32):
        two = {} if global_scale is None else {"scale_2_type": "tensor"}
        return {**sized, "scale_dtype": "float8e4m3", **two}
    if codec == E4M3 and scale.codec == F32 and block == (_TALL, _STEP) and global_scale is None:
        return {**sized, "group_size_n": _TALL}
    shape = "tensor" if block == TENSOR else "x".join("all" if n is None else f"{n}" for n in block)
    return f"humming is not called for {codec.name} codes with {scale.codec.name} scales of {shape}"


def accepts_humming(call: Call) -> str | None:
    """Why humming does not multiply activations by a weight, or None."""
    if why := _refused_activations(call, ("bfloat16", "float16"), "humming"):
        return why
    assert call.b is not None and call.b.recipe is not None
    fmt = call.b.recipe.format
    if call.a.dtype == "float16" and fmt.scale.codec in (F32, E8M0):
        return f"humming would round {fmt.scale.codec.name} scales to float16, which has a smaller range"
    if call.b.layout is None:
        return None
    config = humming_weight(fmt, call.b.layout.plain.block(-2))
    return (
        config
        if isinstance(config, str)
        else _refused_lengths(call, _TALL if "group_size_n" in config else _COLUMNS, "humming")
    )


def _refused_activations(call: Call, dtypes: tuple[str, ...], who: str) -> str | None:
    a, b = call.a, call.b
    if b is None or b.recipe is None:
        return "the second operand is a plain array; the kernel takes a quantized weight there, x @ w.mT"
    if why := _refused_operands(call):
        return why
    if b.shape and b.axis != -2:
        return "the weight has to be a transposed matrix, w.mT, with blocks along K"
    if a.dtype not in dtypes:
        return f"{who} multiplies activations of {' and '.join(dtypes)}; these are {a.dtype}"
    if (dtype := str(call.option("out_dtype", "float32"))) != a.dtype:
        return f"{who} writes the dtype of the activations, {a.dtype}; this product is to be {dtype}"
    return None


# ------------------------------------------------------------------------------------------------ torch


def accepts_int4(call: Call) -> str | None:
    """Why torch's INT4 product does not multiply activations by a weight, or None."""
    if why := _refused_activations(call, ("bfloat16",), "torch"):
        return why
    assert call.b is not None and call.b.recipe is not None
    fmt = call.b.recipe.format
    if fmt.element not in (INT4, UINT4) or fmt.global_scale is not None:
        return f"it multiplies INT4 and UINT4 codes, not {fmt.element.name}" + (" under two scales" if fmt.global_scale else "")
    if fmt.scale.codec not in (F16, BF16, F32) or fmt.scale.convention != "multiplier":
        return f"it reads scales that multiply; these are {fmt.scale.codec.name} ({fmt.scale.convention})"
    if call.b.layout is None or not call.b.shape:
        return None
    height, width = call.b.layout.plain.block(-2)
    if height != 1 or width not in _GROUPS:
        return f"it has groups of {', '.join(map(str, _GROUPS))} along K; these are {call.b.layout.plain}"
    k, n = call.b.shape
    if k % max(width, _PACKED) or n % _PACKED_COLUMNS:
        return f"it takes K in whole groups and N in multiples of {_PACKED_COLUMNS}; got K = {k}, N = {n}"
    return None


# ------------------------------------------------------------------------------------------------ DeepGEMM


def accepts_deep_gemm(call: Call) -> str | None:
    """Why DeepGEMM does not multiply two FP8 tensors, or None."""
    if why := _refused_pair(call, (("1x128", "128x128"),), "DeepGEMM") or _refused_operands(call):
        return why
    return _refused_lengths(call, _STORED, "DeepGEMM")
