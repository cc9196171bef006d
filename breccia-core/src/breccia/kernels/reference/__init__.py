"""The generic algorithm: every recipe on every framework, in backend primitives (`Ops`).

It implements the contract of docs/spec/numerics.md with arithmetic that any array library has. Kernels must write
the same bytes. Nothing here depends on a particular recipe or framework.

Shapes: blocks run along K, the last axis (arrays are swapped first where `axis=-2`). An array is *split* into
(..., M/m, m, K/k, k), padded with zeros to whole blocks; scales broadcast as (..., M/m, 1, K/k, 1). Per-tensor scales need no
split and broadcast from the left.
"""

from __future__ import annotations

from .casting import (
    assign,
    assigned,
    block_scales,
    cast,
    check_supplied,
    global_scale_of,
    refuse_nonfinite,
    sensed,
)
from .composed import cast_pair, cast_ste, extremes
from .decoding import apply_scale, dequantize, multiplier, offset_of_blocks, offsets_of, result, scales_of_blocks
from .packing import pack, unpack
from .products import cast_matmul, grouped_matmul, k_grouped_matmul, matmul, product, values
from .random_words import random_words
from .recording import cast_and_record, cast_pair_and_record, record_amax, scales_of_amaxes
from .records import scale_values
from .requantizing import GENERIC, Primitives, requantize
from .rotating import rotated, unrotated
from .searching import LIGHTEST, SMALLEST, weights_of
from .tiles import Tiles

__all__ = [
    "GENERIC",
    "LIGHTEST",
    "SMALLEST",
    "Primitives",
    "Tiles",
    "apply_scale",
    "assign",
    "assigned",
    "block_scales",
    "cast",
    "cast_and_record",
    "cast_matmul",
    "cast_pair",
    "cast_pair_and_record",
    "cast_ste",
    "check_supplied",
    "dequantize",
    "extremes",
    "global_scale_of",
    "grouped_matmul",
    "k_grouped_matmul",
    "matmul",
    "multiplier",
    "offset_of_blocks",
    "offsets_of",
    "pack",
    "product",
    "random_words",
    "record_amax",
    "refuse_nonfinite",
    "requantize",
    "result",
    "rotated",
    "scale_values",
    "scales_of_amaxes",
    "scales_of_blocks",
    "sensed",
    "unpack",
    "unrotated",
    "values",
    "weights_of",
]
