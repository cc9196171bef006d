"""Ops: the backend primitives that the generic algorithm is written in, and their implementation in NumPy.

To support a framework, implement these primitives for its arrays under these laws (breccia.testing checks them):

* Integers are int32. `+ - * & | ^ ~ << >>` and comparisons work between arrays and Python scalars without
  promotion; `<<`, `+` and `*` wrap; `>>` is arithmetic. `& | ^ << >>` combine arrays of the same origin only, and `where`
  others: MLX's `vmap` miscomputes them between a mapped array and one that is not.
* FP32 `+`, `-`, `*` and `div` round once, as IEEE 754 says; nothing is fused, reassociated or replaced by a reciprocal.
* `bitcast_to_int` and `bitcast_to_float` are inverse and change no bit, NaN payloads and subnormals included.
* `amax` is an integer maximum, so a NaN's bits survive it.
"""

# NumPy's annotations of functions over `Any` are unknown to pyright; arrays here are `Any` by design.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np

from ..codecs import Codec
from ..errors import OptionError, UnsupportedError
from ..formats import Format
from ..siblings import ML_DTYPES
from .frameworks import bit_pattern, dtype_name

Array = Any


class Ops(Protocol):
    """The backend primitives. Implementations inherit from it for the few that are derived from others."""

    #: Whether the framework has float8 dtypes. If so, 8-bit codes are stored in them, else as uint8.
    native_float8: ClassVar[bool] = False
    #: The storage dtype of BF16: its bit pattern where the framework has no such dtype.
    bfloat16: ClassVar[str] = "bfloat16"

    def storage(self, codec: Codec) -> str:
        """Name of the dtype that codes of `codec` are stored in."""
        if codec.bits < 8 or codec.dtype is None or (codec.dtype.startswith("float8") and not self.native_float8):
            return "uint8"
        return self.bfloat16 if codec.dtype == "bfloat16" else codec.dtype

    def dtypes(self, fmt: Format) -> dict[str, str]:
        """Name of the dtype that each component of a format is stored in."""
        return {name: "uint8" if codec is None else self.storage(codec) for name, codec in fmt.parts.items()}

    # -- primitives that every framework implements --------------------------------------------------------------

    def f32(self, x: Array) -> Array:
        """`x` (float32, float16 or bfloat16) as FP32, exactly."""
        ...

    def to_float(self, x: Array, dtype: str) -> Array:
        """FP32 `x` rounded to the floating dtype named, to nearest, ties to even."""
        ...

    def bitcast_to_int(self, x: Array) -> Array:
        """FP32 to its bit pattern, int32."""
        ...

    def bitcast_to_float(self, i: Array) -> Array:
        """int32 bit pattern to FP32."""
        ...

    def load(self, stored: Array) -> Array:
        """Bit patterns of an array of 8-, 16- or 32-bit items, as int32 (zero-extended below 32 bits)."""
        ...

    def store(self, codes: Array, dtype: str) -> Array:
        """Inverse of `load`: int32 bit patterns into an array of the named dtype."""
        ...

    def take(self, table: tuple[int, ...], codes: Array) -> Array:
        """int32 `table[codes]`."""
        ...

    def where(self, condition: Array, a: Any, b: Any) -> Array: ...

    def minimum(self, a: Array, b: Any) -> Array: ...

    def maximum(self, a: Array, b: Any) -> Array: ...

    def div(self, a: Array, b: Any) -> Array:
        """IEEE FP32 division, also by a scalar and by a broadcast array."""
        ...

    def amax(self, i: Array, axes: tuple[int, ...]) -> Array:
        """Maximum of non-negative int32 over `axes`, which stay with length 1; 0 over nothing."""
        ...

    def reshape(self, a: Array, shape: tuple[int, ...]) -> Array: ...

    def pad(self, a: Array, widths: tuple[int, ...]) -> Array:
        """`a` with `widths[i]` zeros appended along each axis i."""
        ...

    def concat(self, parts: list[Array], axis: int = -1) -> Array:
        """Arrays of one dtype, float8 dtypes included, joined along an axis."""
        ...

    def gather(self, a: Array, index: tuple[int, ...] | Array, axis: int) -> Array:
        """The positions `index` (from 0, in range) of an axis, in that order. For any dtype, float8 included.

        index: numbers, or a 1-D int32 array whose values cannot be read. Those out of range follow the framework.
        """
        ...

    def broadcast(self, a: Array, shape: tuple[int, ...]) -> Array: ...

    def int_to_float(self, i: Array) -> Array:
        """An integer array's values (below 2^24 in magnitude) as FP32."""
        ...

    def counter(self, like: Array) -> tuple[Array, Array]:
        """(low, high) int32 halves of each element's 64-bit C-order index in `like`'s shape, on its device."""
        ...

    def constant(self, value: float, like: Array) -> Array:
        """An FP32 array of shape () holding `value`, on `like`'s device."""
        ...

    def matmul(self, a: Array, b: Array) -> Array:
        """FP32 product with FP32 accumulation."""
        ...

    def any(self, condition: Array) -> bool:
        """Is any element true? Reads the value: for eager calls only."""
        ...

    def assign(self, out: Array, value: Array) -> None:
        """Copy `value` into `out` in place, or raise UnsupportedError where arrays are immutable."""
        raise UnsupportedError(f"{type(out).__module__.partition('.')[0]} arrays are immutable; call without out=.")

    def to(self, a: Array, device: Any) -> Array:
        """`a` on `device`, in the framework's notation; None does not move it. Raises OptionError for an unknown device."""
        ...

    def beside(self, a: Array, device: Any) -> Any:
        """Where scales `a` go if their codes go to `device`. A sharding may be one of axes that scales do not have."""
        return device

    def from_numpy(self, a: Array, codec_dtype: str | None = None) -> Array:
        """A NumPy array as this framework's, sharing memory where possible; viewed as the named dtype if given."""
        ...

    def to_numpy(self, a: Array) -> Array:
        """An array of this framework as NumPy's, float8 and bfloat16 as uint8 and uint16 bit patterns."""
        ...

    def to_int32(self, x: Any) -> Any:
        """Integers in FP32 (an array, or a Python number) as int32."""
        ...

    def transpose(self, a: Array, axes: tuple[int, ...]) -> Array:
        """Permute axes; for int32 and FP32."""
        ...

    # -- derived primitives ----------------------------------------------------------------------------------

    def native_cast(self, y: Array, codec: Codec) -> Array | None:
        """int32 codes of finite FP32 `y` by a native dtype cast, nearest and saturating; None where it has none."""
        return None

    def native_round(self, y: Array, bits: int) -> Array | None:
        """int32 of FP32 `y`, ties to even, for codes of `bits` bits, by a native rounding; None where that is not faster."""
        return None

    def items(self, a: Array, axis: int) -> list[Array]:
        """The items at each position of axis -1 or -2, without the axis."""
        return [a[..., i] if axis == -1 else a[..., i, :] for i in range(a.shape[axis])]

    def fold(self, function: Callable[..., tuple[Array, ...]], start: tuple[Array, ...], items: Array) -> tuple[Array, ...]:
        """`start` with `function`, f(*results so far, item) -> results, applied for each item along the first axis of `items`.

        A framework that compiles may compile the function once.
        """
        results = start
        for i in range(items.shape[0]):
            results = function(*results, items[i])
        return results

    def pack_bits(self, codes: Array, bits: int) -> Array:
        """int32 words of the codes along the last axis, less than 2^bits each, the first in the lowest bits; 24 bits in all."""
        word, *others = self.items(codes, -1)
        for i, code in enumerate(others, 1):
            word = word | (code << (i * bits))
        return word

    def unpack_bits(self, word: Array, bits: int, count: int) -> Array:
        """Inverse of `pack_bits`: `count` codes along a new last axis."""
        mask = (1 << bits) - 1
        return self.concat([self.reshape((word >> (i * bits)) & mask, (*word.shape, 1)) for i in range(count)])

    def seed(self, seed: Any) -> Any:
        """An array given as a seed, as an integer or an array of its low and high 32 bits."""
        return seed

    def words(self, seed: Any) -> tuple[Any, Any]:
        """(low, high) int32 words of a seed in 0 .. 2^64 - 1, or of an array of them."""
        words = map(int, seed if hasattr(seed, "shape") else (seed, seed >> 32))
        low, high = ((word & 0xFFFFFFFF) - ((word & 0x80000000) << 1) for word in words)
        return low, high

    def mapped_like(self, a: Array, b: Array) -> Array:
        """`a`, mapped by vmap wherever `b` is, for frameworks whose vmap is wrong for `a | b` otherwise."""
        return a

    def grouped_matmul(self, a: Array, b: Array, offsets: Array) -> Array:
        """FP32 rows of `a` (M, K), in groups that end at `offsets` (E,), times the matrices of `b` (E, K, N); zeros beyond."""
        ends = self.to_int32(offsets)
        row = self.reshape(self.counter(a[:, :1])[0], (a.shape[0], 1))
        total = start = None
        for e in range(b.shape[0]):
            end = ends[e]
            inside = row < end if start is None else (row >= start) & (row < end)
            product = self.where(inside, self.matmul(a, b[e]), 0.0)
            total, start = product if total is None else self.where(inside, product, total), end
        return self.broadcast(self.constant(0.0, a), (a.shape[0], b.shape[-1])) if total is None else total

    def k_grouped_matmul(self, a: Array, b: Array, offsets: Array) -> Array:
        """FP32 columns of `a` (N, M) times rows of `b` (M, K), in groups of M that end at `offsets` (E,): (E, N, K).

        Inf and NaN stay in their group.
        """
        ends, (n, m), k = self.to_int32(offsets), a.shape, b.shape[-1]
        place = self.counter(b[:, :1])[0]
        row, column = self.reshape(place, (m, 1)), self.reshape(place, (1, m))
        products: list[Array] = []
        start: Any = 0
        for e in range(offsets.shape[0]):
            left = self.where((column >= start) & (column < ends[e]), a, 0.0)
            right = self.where((row >= start) & (row < ends[e]), b, 0.0)
            products.append(self.reshape(self.matmul(left, right), (1, n, k)))
            start = ends[e]
        return self.concat(products, 0) if products else self.broadcast(self.constant(0.0, a), (0, n, k))

    def portable(self, a: Array) -> Array:
        """`a` in a form that pickle supports: itself, or a zero-copy uint8 view where pickle does not know the dtype."""
        return a

    def from_portable(self, a: Array, dtype: str) -> Array:
        """Inverse of `portable`, for an array of the named dtype."""
        return self.view(a, dtype)

    def view(self, a: Array, dtype: str) -> Array:
        """The items of `a`, bit for bit, as another dtype of their size; zero-copy where the framework has views."""
        return a if dtype_name(a) == dtype else a.view(dtype)

    def readable(self, a: Array) -> bool:
        """Whether `a` has values, as arguments of functions that are traced or compiled have not."""
        return True

    def itemsize(self, a: Array) -> int:
        """Bytes of one item."""
        return a.dtype.itemsize

    def strides(self, a: Array) -> tuple[int, ...] | None:
        """Strides in bytes; None where the framework has none."""
        return None

    def address(self, a: Array) -> int | None:
        """Memory address of the first item; None where the framework does not expose it."""
        return None

    def swap(self, a: Array) -> Array:
        """The last two axes swapped; a view where the framework has views."""
        return a.swapaxes(-1, -2)

    def errstate(self) -> AbstractContextManager[Any]:
        """A context without floating-point warnings: the contract allows overflow and NaN as results."""
        return nullcontext()

    def is_bit_pattern(self, stored: Array) -> bool:
        """Whether `stored` is a 16-bit float stored as its uint16 bit pattern"""
        return dtype_name(stored) == "uint16"


class _NumpyOps(Ops):
    """Shared with the NumPy kernels; imports NumPy, so it is itself imported on first use only."""

    bfloat16 = "uint16"

    def f32(self, x: Array) -> Array:
        if dtype_name(x) == "bfloat16":
            return self.bitcast_to_float(self.load(x) << 16)
        return x.astype(np.float32, copy=False)

    def to_float(self, x: Array, dtype: str) -> Array:
        if dtype == "bfloat16":
            return x.astype(_ml_dtype(dtype))
        return x.astype(dtype, copy=False)

    def bitcast_to_int(self, x: Array) -> Array:
        return x.view(np.int32)

    def bitcast_to_float(self, i: Array) -> Array:
        return i.view(np.float32)

    def load(self, stored: Array) -> Array:
        a = np.asarray(stored)
        words = np.ascontiguousarray(a) if a.dtype.byteorder == ">" else a
        if words.dtype.byteorder == ">":
            words = words.astype(words.dtype.newbyteorder("="))
        return words.view(f"u{words.dtype.itemsize}").astype(np.int32 if words.dtype.itemsize < 4 else "u4").view("i4")

    def store(self, codes: Array, dtype: str) -> Array:
        width = np.dtype(dtype).itemsize
        return codes.astype(f"u{width}").view(dtype) if width < 4 else codes.view(dtype)

    def take(self, table: tuple[int, ...], codes: Array) -> Array:
        return _table(table)[codes]

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return np.where(condition, a, b)

    def minimum(self, a: Array, b: Any) -> Array:
        return np.minimum(a, b)

    def maximum(self, a: Array, b: Any) -> Array:
        return np.maximum(a, b)

    def div(self, a: Array, b: Any) -> Array:
        return np.divide(a, b, dtype=np.float32)

    def amax(self, i: Array, axes: tuple[int, ...]) -> Array:
        return np.max(i, axis=axes, keepdims=True, initial=0)

    def reshape(self, a: Array, shape: tuple[int, ...]) -> Array:
        return np.reshape(a, shape)

    def pad(self, a: Array, widths: tuple[int, ...]) -> Array:
        return np.pad(a, [(0, w) for w in widths])

    def concat(self, parts: list[Array], axis: int = -1) -> Array:
        return np.concatenate(parts, axis=axis)

    def gather(self, a: Array, index: tuple[int, ...], axis: int) -> Array:
        return np.take(a, np.array(index, np.intp), axis=axis)

    def broadcast(self, a: Array, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(np.asarray(a), shape)

    def int_to_float(self, i: Array) -> Array:
        return np.asarray(i).astype(np.float32)

    def counter(self, like: Array) -> tuple[Array, Array]:
        i = np.arange(like.size, dtype=np.uint64).reshape(like.shape)
        return (i & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32), (i >> np.uint64(32)).astype(np.int32)

    def constant(self, value: float, like: Array) -> Array:
        return np.asarray(value, np.float32)

    def matmul(self, a: Array, b: Array) -> Array:
        return np.matmul(a, b)

    def grouped_matmul(self, a: Array, b: Array, offsets: Array) -> Array:
        products = np.zeros((a.shape[0], b.shape[-1]), np.float32)
        start = 0
        for matrix, end in zip(b, offsets.tolist(), strict=True):
            if end > start:
                np.matmul(a[start:end], matrix, out=products[start:end])
            start = max(start, end)
        return products

    def k_grouped_matmul(self, a: Array, b: Array, offsets: Array) -> Array:
        products = np.zeros((len(offsets), a.shape[0], b.shape[-1]), np.float32)
        start = 0
        for product, end in zip(products, offsets.tolist(), strict=True):
            if end > start:
                np.matmul(a[:, start:end], b[start:end], out=product)
            start = max(start, end)
        return products

    def transpose(self, a: Array, axes: tuple[int, ...]) -> Array:
        return np.transpose(a, axes)

    def strides(self, a: Array) -> tuple[int, ...] | None:
        return a.strides

    def address(self, a: Array) -> int | None:
        return a.__array_interface__["data"][0]

    def to_int32(self, x: Any) -> Any:
        return x.astype(np.int32) if hasattr(x, "astype") else int(x)

    def any(self, condition: Array) -> bool:
        return bool(np.any(condition))

    def assign(self, out: Array, value: Array) -> None:
        np.copyto(out, value, casting="equiv")  # of either byte order

    def errstate(self) -> AbstractContextManager[Any]:
        return np.errstate(all="ignore")

    def to(self, a: Array, device: Any) -> Array:
        if device not in (None, "cpu"):
            raise OptionError(f"NumPy arrays are on the 'cpu'; got device {device!r}.", device=device)
        return a

    def from_numpy(self, a: Array, codec_dtype: str | None = None) -> Array:
        return self.view(a, codec_dtype) if codec_dtype else a

    def to_numpy(self, a: Array) -> Array:
        name = dtype_name(a)
        words = bit_pattern(name)
        return np.asarray(a) if words == name else np.asarray(a).view(words)


@lru_cache(maxsize=64)
def _table(table: tuple[int, ...]) -> Array:
    return np.array(table, np.uint32).view(np.int32)


def _ml_dtype(dtype: str) -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise UnsupportedError(
            f"NumPy itself has no {dtype}; the dtype comes with ml_dtypes: {ML_DTYPES.remedy}.",
            dtype=dtype,
        ) from None
    return getattr(ml_dtypes, dtype)


NUMPY = _NumpyOps()
