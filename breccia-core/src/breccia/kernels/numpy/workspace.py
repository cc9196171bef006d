"""Work space of the NumPy kernels: per-thread buffers, the chunk size, and shared constants."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from ...arrays.ops import Array
from ...fp32 import F32_INF, MAGNITUDE, NORMAL
from ...locks import cached_property
from ..threads import get_num_threads

#: Elements of a chunk: with several threads, and with one. The buffers of one thread fit the L2 cache. Larger chunks
#: with several threads mean less GIL contention.
CHUNK, ALONE = 1 << 18, 1 << 16
#: The number of threads beyond which GIL contention outweighs the gain (16 cores: 4 as fast as 2 or faster, 8 slower than 1).
MOST_THREADS = 4
#: The maximum bytes of the buffers of all threads together, and the bytes per element.
_BUFFERS, _PER_ELEMENT = 12 << 20, 24
_T = TypeVar("_T")
U1, U2, U4, U8, I4, F4 = np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.float32
F32_DTYPE = np.dtype(F4)
EXPONENT = F32_INF
MAGNITUDE_BITS = U4(MAGNITUDE)
ONE, UNIT = np.ones(1, F4), F4(1.0)
#: The maximum number of entries of a cache (plans, their layouts, tables).
_REMEMBERED = 256


class Buffers:
    """Work space of one thread for chunks of up to `size` elements, aligned for the widest vectors.

    Each is made when it is first used: compiled kernels use few of them.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // 16) * 16
        self._value = -1

    def _aligned(self, dtype: Any) -> Array:
        raw = np.empty(self.size * np.dtype(dtype).itemsize + 64, U1)
        start = -raw.ctypes.data % 64
        return raw[start : start + self.size * np.dtype(dtype).itemsize].view(dtype)

    @cached_property
    def source(self) -> Array:
        """FP32 numbers that were read."""
        return self._aligned(U4)

    @cached_property
    def scaled(self) -> Array:
        """FP32 numbers times the inverse scales of their blocks."""
        return self._aligned(U4)

    @cached_property
    def a(self) -> Array:
        """Words of any use."""
        return self._aligned(U4)

    @cached_property
    def b(self) -> Array:
        """Words of any use."""
        return self._aligned(U4)

    @cached_property
    def _level(self) -> Array:
        return self._aligned(U4)

    @cached_property
    def codes(self) -> Array:
        """Codes, one a byte."""
        return self._aligned(U1)

    @cached_property
    def sign(self) -> Array:
        """Bytes of any use."""
        return self._aligned(U1)

    def level(self, value: int, n: int) -> Array:
        """`n` times the uint32 `value`: NumPy's maximum of two arrays is three times as fast as of an array and a constant."""
        if value != self._value:
            self._level.fill(value)
            self._value = value
        return self._level[:n]


_thread_local = threading.local()


def take_buffers(size: int) -> Buffers:
    """This thread's buffers, or new ones while a call has them: a signal handler or a finalizer may run in the middle of it."""
    buffers: Buffers | None = vars(_thread_local).pop("buffers", None)
    return Buffers(size) if buffers is None or buffers.size < size else buffers


def return_buffers(buffers: Buffers) -> None:
    """Keep buffers for the next call of this thread."""
    _thread_local.buffers = buffers


def thread_count() -> int:
    """The maximum number of threads of NumPy kernels."""
    return min(get_num_threads(), MOST_THREADS)


def chunk_size() -> int:
    """Elements of a chunk."""
    threads = thread_count()
    return min(CHUNK, ALONE) if threads == 1 else min(CHUNK, _BUFFERS // (_PER_ELEMENT * threads))


def times_scale(values: Array, per_block: Array, k: int, out: Array) -> None:
    """`values` times the scale of their block of `k`, all 1-D, into `out`."""
    if k >= 32:
        np.multiply(values.reshape(-1, k), per_block[:, None], out=out.reshape(-1, k))
    else:  # NumPy's loop over a short block costs more than expanding the scales
        np.multiply(values, per_block.repeat(k), out=out)


def flushed(work: Buffers, source: Array) -> Array:
    """`source` with numbers below 2^-126 flushed to zeros of the same sign, in `work.source`; overwrites `work.a`."""
    u = source.view(U4)
    n = u.size
    tiny = np.bitwise_and(u, MAGNITUDE, out=work.a[:n]) < NORMAL
    signs = np.bitwise_and(u, ~U4(MAGNITUDE), out=work.a[:n])
    clean = work.source[:n]
    np.copyto(clean, u)
    np.copyto(clean, signs, where=tiny)
    return clean.view(F4)


def block_amax(work: Buffers, n: int, k: int) -> Array:
    """Largest of each `k` of the first `n` uint32 in `work.a`, which is overwritten, as is `work.b`."""
    a, b = work.a, work.b
    if n == k:
        return a[:n].max(keepdims=True)
    if k > 16 or k & (k - 1):
        return np.maximum.reduceat(a[:n], _starts(n, k))
    step = k // 2
    while step:
        np.maximum(a[: n - step], a[step:n], out=b[: n - step])
        a, b, step = b, a, step // 2
    return a[:n:k].copy()


@lru_cache(maxsize=64)
def _starts(n: int, k: int) -> Array:
    return np.arange(0, n, k)


def remembered(store: dict[Any, _T], key: Any, make: Callable[..., _T], *arguments: Any) -> _T:
    """The entry of `store` at `key`, made from the arguments on first use."""
    entry = store.get(key)
    if entry is None:
        if len(store) >= _REMEMBERED:
            store.clear()
        entry = store[key] = make(*arguments)
    return entry
