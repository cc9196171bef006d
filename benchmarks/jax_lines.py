"""Casts in a few lines of jax.numpy, as a user would write them. They ignore NaN, subnormal numbers and exact quotients.

Each cast takes a matrix and the axis of its blocks, -1 or -2, and returns codes, scales and the recipe's other components.
Sides must be multiples of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

FP8, FP4 = jnp.float8_e4m3fn, jnp.float4_e2m1fn
Array = Any
Cast = Callable[[Array, int], Any]
#: The numbers of NF4 (QLoRA, arXiv 2305.14314, appendix E).
_BELOW = (-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0)
_ABOVE = (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1)
NF4 = np.array((*_BELOW, *_ABOVE), np.float32)


def in_blocks(x: Array, block: int | None, axis: int) -> tuple[Array, int]:
    """(the matrix with one more axis, the axis within a block). block: its length; None for the whole axis."""
    size = x.shape[axis] if block is None else block
    return (x.reshape(x.shape[0], -1, size), 2) if axis == -1 else (x.reshape(-1, size, x.shape[1]), 1)


def largest(x: Array, block: int | None, axis: int) -> tuple[Array, Array]:
    """(blocks, their largest magnitudes)."""
    t, within = in_blocks(x, block, axis)
    return t, jnp.max(jnp.abs(t), axis=within, keepdims=True)


def packed(codes: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Pack two 4-bit codes into each byte along the axis."""
    pairs = codes.reshape(shape[0], -1, 2) if axis == -1 else codes.reshape(-1, 2, shape[1]).swapaxes(1, 2)
    if pairs.dtype == FP4:
        return lax.bitcast_convert_type(pairs, jnp.uint8)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def fp8(block: int | None) -> Cast:
    def cast(x: Array, axis: int) -> Any:
        t, amax = largest(x, block, axis)
        scale = amax / 448
        return jnp.clip(t * (1 / scale), -448, 448).astype(FP8).reshape(x.shape), scale

    return cast


def fp8_current(x: Array, axis: int) -> Any:
    scale = jnp.max(jnp.abs(x)) / 448
    return jnp.clip(x * (1 / scale), -448, 448).astype(FP8), scale


def mx(dtype: Any, top: float) -> Cast:
    def cast(x: Array, axis: int) -> Any:
        t, amax = largest(x, 32, axis)
        bits = lax.bitcast_convert_type(amax * np.float32(1 / top), jnp.int32)
        exponent = jnp.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 0, 254)
        t = jnp.clip(t * lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32), -top, top)
        codes = jnp.round(t * 64).astype(dtype) if dtype == jnp.int8 else t.astype(dtype)
        return packed(codes, x.shape, axis) if dtype == FP4 else codes.reshape(x.shape), exponent.astype(jnp.uint8)

    return cast


def nvfp4(x: Array, axis: int) -> Any:
    tensor = jnp.max(jnp.abs(x)) / (448 * 6)
    t, amax = largest(x, 16, axis)
    scale = (amax / 6 / tensor).astype(FP8)
    codes = jnp.clip(t * (1 / (scale.astype(jnp.float32) * tensor)), -6, 6).astype(FP4)
    return packed(codes, x.shape, axis), scale, tensor


def integers(bits: int, block: int | None, dtype: Any) -> Cast:
    top = 2 ** (bits - 1) - 1

    def cast(x: Array, axis: int) -> Any:
        t, amax = largest(x, block, axis)
        scale = (amax / top).astype(dtype)
        codes = jnp.clip(jnp.round(t * (1 / scale.astype(jnp.float32))), -top, top).astype(jnp.int8)
        return packed(codes, x.shape, axis) if bits == 4 else codes.reshape(x.shape), scale

    return cast


def int4_asymmetric(x: Array, axis: int) -> Any:
    t, within = in_blocks(x, 128, axis)
    low = jnp.minimum(jnp.min(t, axis=within, keepdims=True), 0)
    high = jnp.maximum(jnp.max(t, axis=within, keepdims=True), 0)
    scale = ((high - low) / 15).astype(jnp.float16)
    inverse = 1 / scale.astype(jnp.float32)
    zero = jnp.clip(jnp.round(-low * inverse), 0, 15)
    codes = jnp.clip(jnp.round(t * inverse) + zero, 0, 15).astype(jnp.uint8)
    return packed(codes, x.shape, axis), scale, zero.astype(jnp.uint8)


def nf4(x: Array, axis: int) -> Any:
    t, scale = largest(x, 64, axis)
    t = t * (1 / scale)
    codes = sum((t > middle).astype(jnp.uint8) for middle in (NF4[1:] + NF4[:-1]) / 2)
    return packed(codes, x.shape, axis), scale


#: Casts by the recipe's spec. `mxfp6` is missing, since JAX has no 6-bit dtype.
LINES: dict[str, Cast] = {
    "fp8_current": fp8_current,
    "fp8_row": fp8(None),
    "fp8_block": fp8(128),
    "mxfp8": mx(FP8, 448.0),
    "mxfp4": mx(FP4, 6.0),
    "mxint8": mx(jnp.int8, 127 / 64),
    "nvfp4": nvfp4,
    "int4": integers(4, 128, jnp.float16),
    "int4,symmetric=false,signed=false": int4_asymmetric,
    "int8": integers(8, None, jnp.float32),
    "nf4": nf4,
}
