"""JAX's way of saying the words of `breccia.ops.Ops`, traceable throughout (`any` and `to_numpy` read values)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from breccia.errors import UnsupportedError
from breccia.frameworks import dtype_name
from breccia.ops import Array, Ops

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.int32}


class _JaxOps(Ops):
    native_float8 = True

    def f32(self, x: Array) -> Array:
        return x.astype(jnp.float32)

    def to_float(self, x: Array, dtype: str) -> Array:
        return x.astype(dtype)

    def bits(self, x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    def unbits(self, i: Array) -> Array:
        return lax.bitcast_convert_type(i, jnp.float32)

    def load(self, stored: Array) -> Array:
        word = _WORDS[stored.dtype.itemsize]
        return lax.bitcast_convert_type(stored, word).astype(jnp.int32)

    def store(self, codes: Array, dtype: str) -> Array:
        kind = jnp.dtype(dtype)
        return lax.bitcast_convert_type(codes.astype(_WORDS[kind.itemsize]), kind)

    def take(self, table: tuple[int, ...], codes: Array) -> Array:
        return jnp.asarray(np.array(table, np.uint32).view(np.int32))[codes]

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return jnp.where(condition, a, b)

    def minimum(self, a: Array, b: Any) -> Array:
        return jnp.minimum(a, b)

    def maximum(self, a: Array, b: Any) -> Array:
        return jnp.maximum(a, b)

    def div(self, a: Array, b: Any) -> Array:
        # XLA turns division by a constant, a scalar or a broadcast into multiplication by its reciprocal, which rounds
        # differently. A divisor that depends on the dividend stays a division under jit and vmap (measured, jax 0.10.2).
        return a / (a * 0.0 + b)

    def amax(self, i: Array, axes: tuple[int, ...]) -> Array:
        return jnp.max(i, axis=axes, keepdims=True, initial=0)

    def reshape(self, a: Array, shape: tuple[int, ...]) -> Array:
        return jnp.reshape(a, shape)

    def pad(self, a: Array, widths: tuple[int, ...]) -> Array:
        return jnp.pad(a, [(0, w) for w in widths])

    def concat(self, parts: list[Array]) -> Array:
        return jnp.concatenate(parts, axis=-1)

    def broadcast(self, a: Array, shape: tuple[int, ...]) -> Array:
        return jnp.broadcast_to(a, shape)

    def number(self, i: Array) -> Array:
        return i.astype(jnp.float32)

    def counter(self, like: Array) -> tuple[Array, Array]:
        # 64-bit indices from 32-bit words (JAX has no int64 by default): index = index * n + i, axis by axis.
        low = high = jnp.zeros((1,) * like.ndim, jnp.uint32)
        for axis, n in enumerate(like.shape):
            i = lax.broadcasted_iota(jnp.uint32, [n if a == axis else 1 for a in range(like.ndim)], axis)
            low, high = _times(low, high, n)
            total = low + i
            low, high = total, high + (total < i).astype(jnp.uint32)
        words = (jnp.broadcast_to(w, like.shape) for w in (low, high))
        low, high = (lax.bitcast_convert_type(w, jnp.int32) for w in words)
        return low, high

    def constant(self, value: float, like: Array) -> Array:
        return jnp.asarray(value, jnp.float32)

    def matmul(self, a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

    def whole(self, x: Any) -> Any:
        return x.astype(jnp.int32) if hasattr(x, "astype") else int(x)

    def any(self, condition: Array) -> bool:
        if isinstance(condition, Tracer):
            raise UnsupportedError(
                "nonfinite='raise' reads values, which a traced JAX function does not have; use nonfinite='propagate' "
                "inside jit."
            )
        return bool(condition.any())

    def from_numpy(self, a: Array, codec_dtype: str | None = None) -> Array:
        array = jnp.asarray(a)
        return lax.bitcast_convert_type(array, jnp.dtype(codec_dtype)) if codec_dtype else array

    def to_numpy(self, a: Array) -> Array:
        array, name = np.asarray(a), dtype_name(a)
        if name == "bfloat16":
            return array.view(np.uint16)
        return array.view(np.uint8) if name.startswith("float8") else array


def _times(low: Array, high: Array, n: int) -> tuple[Array, Array]:
    """(high, low) * n modulo 2^64 on uint32 words, by 16-bit halves."""
    mask = 0xFFFF
    n0, n1 = n & mask, (n >> 16) & mask
    a0, a1 = low & mask, low >> 16
    p00, p01, p10, p11 = a0 * n0, a0 * n1, a1 * n0, a1 * n1
    middle = (p00 >> 16) + (p01 & mask) + (p10 & mask)
    return (p00 & mask) | (middle << 16), high * (n & 0xFFFFFFFF) + p11 + (p01 >> 16) + (p10 >> 16) + (middle >> 16)


JAX = _JaxOps()
