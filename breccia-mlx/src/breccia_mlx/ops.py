"""The backend primitives of `breccia.arrays.ops.Ops` on MLX. MLX has no float8 dtypes: codes and 8-bit scales are uint8."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from breccia import OptionError, ScaledTensor, UnsupportedError
from breccia.backend import Array, Metadata, Ops, components, dtype_name
from breccia.internal import bit_pattern

_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.int32}


class _MlxOps(Ops):
    def f32(self, x: Array) -> Array:
        return x.astype(mx.float32)

    def to_float(self, x: Array, dtype: str) -> Array:
        return x.astype(getattr(mx, dtype))

    def bitcast_to_int(self, x: Array) -> Array:
        # Bits have no derivative. MLX has no gradient rule for views and raises; with stop_gradient codes are constants.
        return mx.stop_gradient(x).view(mx.int32)

    def bitcast_to_float(self, i: Array) -> Array:
        return i.view(mx.float32)

    def load(self, stored: Array) -> Array:
        return stored.view(_WORDS[stored.dtype.size]).astype(mx.int32)

    def store(self, codes: Array, dtype: str) -> Array:
        kind = getattr(mx, dtype)
        return codes.astype(_WORDS[kind.size]).view(kind)

    def take(self, table: tuple[int, ...], codes: Array) -> Array:
        return _table(table)[codes]

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return mx.where(condition, a, b)

    def minimum(self, a: Array, b: Any) -> Array:
        return mx.minimum(a, b)

    def maximum(self, a: Array, b: Any) -> Array:
        return mx.maximum(a, b)

    def div(self, a: Array, b: Any) -> Array:
        return mx.divide(a, b)

    def amax(self, i: Array, axes: tuple[int, ...]) -> Array:
        if i.size == 0:
            inside = {a % i.ndim for a in axes}
            return mx.zeros([1 if a in inside else n for a, n in enumerate(i.shape)], mx.int32)
        return mx.max(i, axis=axes, keepdims=True)

    def reshape(self, a: Array, shape: tuple[int, ...]) -> Array:
        return mx.reshape(a, shape)

    def pad(self, a: Array, widths: tuple[int, ...]) -> Array:
        return mx.pad(a, [(0, w) for w in widths])

    def concat(self, parts: list[Array], axis: int = -1) -> Array:
        return mx.concatenate(parts, axis=axis)

    def items(self, a: Array, axis: int) -> list[Array]:
        # Under mx.vmap, shifts of one strided number by a constant read beyond the constant.
        each = super().items(a, axis)
        return [mx.contiguous(item) for item in each] if each and each[0].size == 1 else each

    def gather(self, a: Array, index: tuple[int, ...] | Array, axis: int) -> Array:
        return mx.take(a, mx.array(np.array(index, np.int32)) if isinstance(index, tuple) else index, axis=axis)

    def readable(self, a: Array) -> bool:
        return opaque(a) != _PLACEHOLDER

    def broadcast(self, a: Array, shape: tuple[int, ...]) -> Array:
        return mx.broadcast_to(a, shape)

    def int_to_float(self, i: Array) -> Array:
        return i.astype(mx.float32)

    def counter(self, like: Array) -> tuple[Array, Array]:
        # Mapped like `like`: under mx.vmap, `&` and `>>` of a mapped and an unmapped array read out of bounds of the latter.
        i = mx.reshape(mx.arange(like.size, dtype=mx.int64), like.shape) + (self.bitcast_to_int(like) & 0).astype(mx.int64)
        return (i & 0xFFFFFFFF).astype(mx.uint32).view(mx.int32), (i >> 32).astype(mx.int32)

    def constant(self, value: float, like: Array) -> Array:
        return mx.array(value, mx.float32)

    def matmul(self, a: Array, b: Array) -> Array:
        return mx.matmul(a, b)

    def transpose(self, a: Array, axes: tuple[int, ...]) -> Array:
        return mx.transpose(a, axes)

    def itemsize(self, a: Array) -> int:
        return a.dtype.size

    def seed(self, seed: Any) -> Any:
        if not isinstance(seed, mx.array) or opaque(seed) != _PLACEHOLDER:
            return seed
        if seed.shape not in ((), (2,)) or not mx.issubdtype(seed.dtype, mx.integer):
            raise OptionError(
                f"seed must be an integer, or an array of two 32-bit words; got {seed.dtype} of shape {seed.shape}.",
                shape=seed.shape,
                dtype=str(seed.dtype),
            )
        if seed.shape:
            return seed
        wide = seed.astype(mx.int64)  # the upper word of a signed integer is its sign extension
        return mx.stack([wide & 0xFFFFFFFF, wide >> 32]).astype(mx.uint32)

    def words(self, seed: Any) -> tuple[Any, Any]:
        if not isinstance(seed, mx.array) or opaque(seed) != _PLACEHOLDER:
            return super().words(seed)
        low, high = (seed[n].astype(mx.uint32).view(mx.int32) for n in (0, 1))
        return low, high

    def mapped_like(self, a: Array, b: Array) -> Array:
        return mx.where(b == b, a, a)  # see `counter`

    def to_int32(self, x: Any) -> Any:
        return x.astype(mx.int32) if isinstance(x, mx.array) else int(x)

    def any(self, condition: Array) -> bool:
        try:
            return bool(mx.any(condition).item())
        except ValueError as e:  # MLX has no API that says whether an array is a placeholder
            if "transformations" not in str(e):
                raise
            raise UnsupportedError(
                "this call reads values, which arrays do not have inside mx.compile and mx.vmap; call it outside, or leave out "
                f"the option that requires it (for example, use nonfinite='propagate'). MLX says: {e}"
            ) from e

    def to(self, a: Array, device: Any) -> Array:
        if device is None or isinstance(device, mx.Device | mx.DeviceType) or device == "cpu":
            return a
        raise OptionError(
            "MLX arrays lie in memory that all devices share, so they take device 'cpu', mx.cpu, mx.gpu or None; got "
            f"{device!r}. Use mx.set_default_device to choose where kernels run.",
            device=str(device),
        )

    def from_numpy(self, a: Array, codec_dtype: str | None = None) -> Array:
        array = mx.array(a)
        return self.view(array, codec_dtype) if codec_dtype and hasattr(mx, codec_dtype) else array

    def to_numpy(self, a: Array) -> Array:
        return np.array(self.view(a, bit_pattern(dtype_name(a))))

    def view(self, a: Array, dtype: str) -> Array:
        return a if dtype_name(a) == dtype else a.view(getattr(mx, dtype))


@lru_cache(maxsize=64)
def _table(table: tuple[int, ...]) -> Array:
    return mx.array(np.array(table, np.uint32).view(np.int32))


def devices() -> list[str]:
    """The default MLX device, for `breccia doctor`."""
    return [mx.default_device().type.name]


def opaque(*arrays: Array) -> str | None:
    """Why NumPy cannot read the memory of `arrays`, which are evaluated; None if it can."""
    if _local.__dict__.get("tracing") or is_exporting():
        return _PLACEHOLDER
    if mx.default_device().type != mx.cpu:
        return "an array of MLX's GPU"
    try:
        mx.eval(*arrays)
    except ValueError as e:  # MLX has no API that says whether an array is a placeholder
        if "transformations" not in str(e):
            raise
        return _PLACEHOLDER
    return None


@contextmanager
def together(*operands: Any) -> Generator[None]:
    """If an operand is a placeholder, `opaque` describes all arrays as one.

    Else a compiled function would contain the decoded values of a weight that it captures, instead of its codes.
    """
    parts = [
        part for x in operands if x is not None for part in (components(x).values() if isinstance(x, ScaledTensor) else (x,))
    ]
    outer = _local.__dict__.get("tracing", False)
    _local.tracing = outer or opaque(*parts) == _PLACEHOLDER
    try:
        yield
    finally:
        _local.tracing = outer


@contextmanager
def exporting() -> Generator[None]:
    """`opaque` describes all arrays as placeholders: MLX would write views that were evaluated in the order of their memory."""
    outer = is_exporting()
    _local.exporting = True
    try:
        yield
    finally:
        _local.exporting = outer


def is_exporting() -> bool:
    """Whether a function is being exported by `breccia_mlx.export_function` in this thread"""
    return _local.__dict__.get("exporting", False)


def in_c_order(st: ScaledTensor) -> ScaledTensor:
    """`st` with components in memory in C order, those of its `.mT` where blocks run along axis -2. Placeholders stay."""
    turned = st.mT if st.axis == -2 and len(st.shape) > 1 else st
    parts = components(turned)
    try:
        mx.eval(*parts.values())
    except ValueError as e:
        if "transformations" not in str(e):
            raise
        return st
    parts = {name: mx.contiguous(part) for name, part in parts.items()}
    mx.eval(*parts.values())
    contiguous = Metadata.of(turned).assembled(**parts)
    return contiguous if turned is st else contiguous.mT


_PLACEHOLDER = "a placeholder of mx.compile or mx.vmap"
_local = threading.local()


MLX = _MlxOps()
