"""`mx.quantized_matmul` of integers without a bias, for which MLX has no mode: as affine codes, which MLX decodes exactly.

MLX decodes an affine code u to fl(fl(u · s) + b). The integer u - z times a scale is that with b = -z · s, where z is the
zero-point, or half the range for codes in two's complement, whose top bit is flipped. Nothing is rounded if s has at most 16
significant bits, since u and z have 8:

* A scale in FP16 is s itself. The product is then a sum of K terms of the contract's numbers, in some order.
* For other scales, s is the power of two in the scale, and the rest of it, m, multiplies the sum over a block. There are P sums
  of n = K / P terms; a row with one scale has two. A term is rounded n times in its sum, in any order, then for m and in P - 1
  additions, and the contract's number is itself rounded once more: n + P + 1 times, where the bound allows K
  (docs/spec/numerics.md, section 9). Hence the product requires n + P + 1 <= K.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from breccia import Integer, ScaledTensor
from breccia.backend import BF16, F16, F32
from breccia.internal import NORMAL

from .ops import MLX

Array = Any

_GROUPS = (128, 64, 32)
#: FP32 bits of the exponents of s: its product with 8-bit integers is a finite normal number, or 0.
_EXPONENT, _LARGEST = 0x7F800000, 0x7B800000


class Parts(NamedTuple):
    """How the columns of a weight are divided: `sums` of `length` terms, in MLX's groups of `group`.

    s_is_scale: whether s is the scale itself, not the power of two in it.
    """

    sums: int
    length: int
    group: int
    s_is_scale: bool


def parts(w: Any) -> Parts | None:
    """The parts of a weight, the second operand of a call or a ScaledTensor; None if MLX cannot multiply by it."""
    fmt, k = w.recipe.format, w.shape[-2]
    element, (height, width) = fmt.element, fmt.scale.block
    if type(element) is not Integer or element.bits not in (4, 8) or element.fraction_bits or fmt.offset == "bias":
        return None
    if len(fmt.levels) > 1 or fmt.scale.convention != "multiplier" or fmt.scale.codec not in (F32, F16, BF16):
        return None
    if height != 1 or not w.layout.in_order or w.layout.partial or w.layout.block(-2) != (1, width):
        return None
    block = width or k
    s_is_scale = fmt.scale.codec == F16
    length = k if s_is_scale else block if block < k else k // 2
    group = next((g for g in _GROUPS if block % g == 0 and length % g == 0), None)
    if not length or k % length or group is None or not (s_is_scale or length + k // length + 1 <= k):
        return None
    return Parts(k // length, length, group, s_is_scale)


def product(x: Array, w: ScaledTensor, how: Parts) -> Array:
    """`x @ w` for FP32 `x` (..., K) and `w` (K, N), in the parts of `w`."""
    rows, element = w.mT, w.recipe.format.element
    assert isinstance(element, Integer)
    count, length, group, s_is_scale = how
    words = mx.reshape(rows.data.view(mx.uint32), (rows.shape[0], count, -1)).swapaxes(0, 1)
    middle = 0
    if element.signed:
        middle = 1 << (element.bits - 1)
        words = words ^ mx.array(0xFFFFFFFF // ((1 << element.bits) - 1) * middle, mx.uint32)
    scale = MLX.f32(rows.scale)
    inside = scale if s_is_scale else power_of_two(scale)
    zero = middle if rows.zero_point is None else MLX.f32(rows.zero_point) + middle
    scales, biases = (_in_groups(part, how) for part in (inside, -zero * inside))
    y = mx.quantized_matmul(
        mx.reshape(x, (-1, count, length)).swapaxes(0, 1), words, scales, biases, group_size=group, bits=element.bits
    )
    if not s_is_scale:
        y = y * mx.expand_dims(mx.reshape(scale / inside, (rows.shape[0], -1)).T, 1)
    return mx.reshape(y.sum(axis=0) if count > 1 else y, (*x.shape[:-1], rows.shape[0]))


def power_of_two(scale: Array) -> Array:
    """The power of two in FP32 scales, in a range where products with integers are normal numbers."""
    bits = mx.minimum(mx.maximum(MLX.bitcast_to_int(scale) & _EXPONENT, NORMAL), _LARGEST)
    return bits.view(mx.float32)


def _in_groups(numbers: Array, how: Parts) -> Array:
    """Numbers of the blocks of each row, (N, blocks) or (N,), as (parts, N, groups of a part)."""
    numbers = mx.reshape(numbers, (len(numbers), -1))
    each = how.sums * how.length // how.group // numbers.shape[1]
    repeated = mx.repeat(numbers, each, axis=1) if each > 1 else numbers
    return mx.reshape(repeated, (len(numbers), how.sums, -1)).swapaxes(0, 1)
