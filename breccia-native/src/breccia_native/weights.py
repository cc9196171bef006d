"""A quantized weight as the compiled kernels read it: its arrays, and the numbers that say what they mean."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from breccia import PowerOfTwo, ScaledTensor
from breccia.backend import NUMPY, TENSOR, Array, reference, threads
from breccia.internal import InternedKey

from . import columns, products
from .facts import NO_CODES, Codes, codes_of, factor_of, kind_of

#: The numbers of products.c for encodings of codes, scales, offsets and activations, by name.
KINDS = {name: number for number, name in enumerate(products.kinds())}
BIAS = 2
_ROLES = {"none": 0, "zero_point": 1, "bias": BIAS}
#: The smallest scale, other than zero, whose products with codes are normal numbers.
_LEAST = 2.0**-100
EMPTY = np.empty(0, np.float32)
#: Bytes below which one thread transposes as fast as several.
_FOR_TURNING = 1 << 21
#: Plans that are kept.
_REMEMBERED = 256
#: The names of the kinds of offsets by dtype.
OFFSETS = {np.dtype(np.uint8): "u8", np.dtype(np.int8): "i8", np.dtype(np.float16): "f16", np.dtype(np.float32): "f32"}
#: The kinds of floating-point scales by dtype, in native byte order; uint16 holds bit patterns of BF16.
SCALES = {np.dtype(np.float32): KINDS["f32"], np.dtype(np.float16): KINDS["f16"], np.dtype(np.uint16): KINDS["bf16"]}


class Plan(NamedTuple):
    """What a recipe tells the kernel. width: the bits of a stored code. block: codes under a scale of records, or None."""

    kind: int
    width: int
    table: Array
    scale_kind: int
    scale_table: Array
    divides: bool
    least: float
    role: int
    factor: float
    scale_codes: Codes
    offset_codes: Codes
    block: int | None


_plans: dict[InternedKey, Plan] = {}


def plan_of(st: ScaledTensor) -> Plan:
    """What the recipe of a weight tells the kernel, remembered for each recipe."""
    key = st.recipe.interned_key
    plan = _plans.get(key)
    if plan is None:
        fmt = st.recipe.format
        kind, scale_kind = kind_of(fmt.element), kind_of(fmt.block_levels[0].codec)
        # Powers of two are exact in any product with a code, however small.
        exact = isinstance(fmt.scale.codec, PowerOfTwo) and fmt.global_scale is None and fmt.scale.convention == "multiplier"
        plan = Plan(
            KINDS[kind],
            fmt.element.bits,
            _table(fmt.element) if kind.startswith("table") else EMPTY,
            KINDS[scale_kind],
            _table(fmt.scale.codec) if scale_kind == "table8" else EMPTY,
            fmt.scale.convention == "divisor",
            0.0 if exact and fmt.offset != "bias" else _LEAST,
            _ROLES[fmt.offset],
            factor_of(fmt, None if fmt.global_scale is None else 1.0),
            codes_of(fmt, "scale"),
            codes_of(fmt, "zero_point"),
            None if fmt.scale_record is None else fmt.scale.block[1],
        )
        if len(_plans) >= _REMEMBERED:
            _plans.clear()
        _plans[key] = plan
    return plan


def _table(codec: Any) -> Array:
    """The numbers of a codec, as many as codes of 4 or 8 bits have."""
    table = np.zeros(16 if codec.bits <= 4 else 256, np.uint32)
    table[: len(codec.table)] = codec.table
    return table.view(np.float32)


class Weight(NamedTuple):
    """The arguments of `products.multiply` that describe a weight."""

    data: Array
    kind: int
    width: int
    table: Array
    scale: Array
    scale_kind: int
    scale_table: Array
    scale_codes: Codes
    block: int
    tall: int
    divides: bool
    factor: float
    least: float
    offset: Array
    offset_kind: int
    offset_codes: Codes
    role: int


def weight_of(st: ScaledTensor, n: int, k: int) -> Weight:
    """The matrix `st`, (N, K), with codes and scales copied unless they are in C order."""
    plan = plan_of(st)
    tall, block = st.layout.block(st.axis)
    per_tensor = (tall, block) == TENSOR
    factor = plan.factor
    if st.global_scale is not None:
        factor = factor_of(st.recipe.format, float(st.global_scale))
    offset, offset_kind = offset_of(st, plan)
    scale, scale_kind = scale_of(st, plan)
    return Weight(
        _in_rows(st.data),
        plan.kind,
        plan.width,
        plan.table,
        _in_rows(scale),
        scale_kind,
        plan.scale_table,
        plan.scale_codes,
        plan.block or (k if block is None else block),
        n if per_tensor or tall is None else tall,
        plan.divides,
        fp32(factor),
        plan.least,
        np.ascontiguousarray(offset),
        offset_kind,
        plan.offset_codes,
        plan.role,
    )


def _in_rows(data: Array) -> Array:
    """Codes or scales in C order, copied if they have another."""
    if data.flags.c_contiguous:
        return data
    if data.itemsize != 1 or not data.T.flags.c_contiguous:
        return np.ascontiguousarray(data)
    copy = np.empty(data.shape, data.dtype)  # NumPy copies transposes byte by byte
    columns.turn(data.T, data.shape[1], data.shape[0], copy, threads.get_num_threads() if data.size >= _FOR_TURNING else 1)
    return copy


def scale_of(st: ScaledTensor, plan: Plan) -> tuple[Array, int]:
    """Scales in a dtype that the kernels read, and the number of its encoding: that of the array, not of the recipe.

    A floating-point scale may have another dtype than the recipe's, the other byte order, and any address.
    """
    scale = st.scale
    if scale.itemsize == 1:
        return scale, plan.scale_kind
    kind = SCALES.get(scale.dtype)
    if kind is None:  # NumPy's dtype of BF16 has no buffer
        return st.recipe.format.scale.codec.read(NUMPY, scale), KINDS["f32"]
    return scale if scale.flags.aligned else scale.copy(), kind


def offset_of(st: ScaledTensor, plan: Plan) -> tuple[Array, int]:
    """Zero-points or biases in a dtype that the kernels read, or nothing; and the number of its encoding."""
    if st.zero_point is None:
        return EMPTY, KINDS["f32"]
    if plan.offset_codes != NO_CODES:
        return st.zero_point, KINDS[kind_of(st.recipe.format.offset_levels[0].codec)]
    offset = np.asarray(st.zero_point)
    if offset.dtype not in OFFSETS:
        offset = reference.offsets_of(NUMPY, offset)
    elif not offset.flags.aligned:
        offset = offset.copy()
    return offset, KINDS[OFFSETS[offset.dtype]]


def fp32(factor: float) -> float:
    """`factor` rounded to FP32, which may overflow."""
    return math.copysign(math.inf, factor) if 2.0**128 <= abs(factor) < math.inf else factor
