"""The backend primitives of `breccia.arrays.ops.Ops` on torch. Arrays stay on their device; only `any` synchronizes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from breccia import Codec, OptionError, UnsupportedError
from breccia.backend import E4M3, E5M2, F16, Array, Ops, dtype_name
from breccia.internal import bit_pattern

from . import container

container.register()

#: Is a tensor under a functorch transform? Its type is the same, and torch has no public API for this.
wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore


_innermost: Any = torch._C._functorch.peek_interpreter_stack  # pyright: ignore


def transforming() -> bool:
    """Is a functorch transform active? It may wrap newly created tensors; torch has no public API for this."""
    return _innermost() is not None


def opaque(*tensors: Array) -> str | None:
    """The kind of the first tensor whose memory a kernel cannot read; None if all are readable."""
    for x in tensors:
        if type(x) not in PLAIN:
            return f"a {type(x).__name__}"
    if _innermost() is not None and any(map(wrapped, tensors)):
        return "a tensor of a functorch transform"
    return None


def is_captured(x: Array) -> bool:
    """Whether operations on the tensor are recorded in a CUDA graph, which the host cannot read in."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def groups_of(offsets: Array) -> list[tuple[int, int]] | None:
    """(First row, row after the last one) of each group, by the rows where they end; empty ones may be (n, n) or less.

    None where the ends cannot be read: in transforms and graphs. Elsewhere the host waits for the device.
    """
    if opaque(offsets) is not None or offsets.is_meta or torch.compiler.is_compiling() or is_captured(offsets):
        return None
    groups: list[tuple[int, int]] = []
    start = 0
    for end in offsets.tolist():
        groups.append((start, end))
        start = max(start, end)
    return groups


def capability(device: Any) -> tuple[int, int] | None:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device) if getattr(device, "type", "") == "cuda" else None


#: Types of tensors with values in memory.
PLAIN = (torch.Tensor, torch.nn.Parameter)

#: Integer dtypes for bit patterns, by item size.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

#: The dtypes that NumPy lacks, and those of their bit patterns.
BIT_PATTERNS = {
    dtype: getattr(torch, bit_pattern(name))
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and bit_pattern(name) != name
}

#: Codecs that torch's native cast converts to as the contract requires (in range), faster than integer arithmetic.
_CONVERTED = (E4M3, E5M2, F16)
#: Elements counted at a time: beyond 2^32 of them torch.arange is wrong on CUDA (measured: torch 2.11, H200).
_SPAN = 1 << 30


class _TorchOps(Ops):
    native_float8 = True

    def f32(self, x: Array) -> Array:
        need_dense(x)
        return x if x.dtype == torch.float32 else x.to(torch.float32)

    def to_float(self, x: Array, dtype: str) -> Array:
        return x.to(getattr(torch, dtype))

    def bitcast_to_int(self, x: Array) -> Array:
        return _as(x, torch.int32)

    def bitcast_to_float(self, i: Array) -> Array:
        return _as(i, torch.float32)

    def load(self, stored: Array) -> Array:
        width = stored.element_size()
        codes = _as(stored, WORDS[width]).to(torch.int32)
        return codes & 0xFFFF if width == 2 else codes

    def store(self, codes: Array, dtype: str) -> Array:
        kind = getattr(torch, dtype)
        return _as(codes.to(WORDS[kind.itemsize]), kind)

    def take(self, table: tuple[int, ...], codes: Array) -> Array:
        # A fake tensor needs a fake table, and a table made under a fake mode or transform must not outlive it.
        tensor_of = _table if type(codes) in PLAIN and not transforming() else _table.__wrapped__
        return tensor_of(table, codes.device)[codes.long()]

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return torch.where(condition, a, b)

    def minimum(self, a: Array, b: Any) -> Array:
        return torch.minimum(a, b) if isinstance(b, torch.Tensor) else a.clamp(max=b)

    def maximum(self, a: Array, b: Any) -> Array:
        return torch.maximum(a, b) if isinstance(b, torch.Tensor) else a.clamp(min=b)

    def div(self, a: Array, b: Any) -> Array:
        # On CUDA, torch divides by a Python number by multiplying by its reciprocal (measured: torch 2.11, H200).
        like = a if isinstance(a, torch.Tensor) else b
        p, q = (
            x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=torch.float32, device=like.device) for x in (a, b)
        )
        return torch.div(p, q)

    def amax(self, i: Array, axes: tuple[int, ...]) -> Array:
        if i.numel() == 0:
            inside = {a % i.ndim for a in axes}
            return i.new_zeros([1 if a in inside else n for a, n in enumerate(i.shape)])
        return i.amax(dim=axes, keepdim=True)

    def native_cast(self, y: Array, codec: Codec) -> Array | None:
        if codec not in _CONVERTED or y.device.type not in ("cpu", "cuda"):
            return None
        return self.load(y.clamp(-codec.max, codec.max).to(getattr(torch, self.storage(codec))))

    def reshape(self, a: Array, shape: tuple[int, ...]) -> Array:
        return a.reshape(shape)

    def pad(self, a: Array, widths: tuple[int, ...]) -> Array:
        return torch.nn.functional.pad(a, [w for width in reversed(widths) for w in (0, width)])

    def concat(self, parts: list[Array], axis: int = -1) -> Array:
        return _as(torch.cat([_bytes(p) for p in parts], dim=axis), parts[0].dtype)

    def gather(self, a: Array, index: tuple[int, ...] | Array, axis: int) -> Array:
        if isinstance(index, tuple):
            index = torch.tensor(index, dtype=torch.int64, device=a.device)
        return _as(_bytes(a).index_select(axis, index), a.dtype)

    def readable(self, a: Array) -> bool:
        return opaque(a) is None and a.device.type != "meta" and not torch.compiler.is_compiling()

    def broadcast(self, a: Array, shape: tuple[int, ...]) -> Array:
        return a.expand(shape)

    def int_to_float(self, i: Array) -> Array:
        return i.to(torch.float32)

    def counter(self, like: Array) -> tuple[Array, Array]:
        count = like.numel()
        i = torch.arange(min(count, _SPAN), dtype=torch.int64, device=like.device)
        if count > _SPAN:
            starts = torch.arange(0, count, _SPAN, dtype=torch.int64, device=like.device)
            i = (starts[:, None] + i).reshape(-1)[:count]
        i = i.reshape(like.shape)
        return i.to(torch.int32), (i >> 32).to(torch.int32)

    def constant(self, value: float, like: Array) -> Array:
        return torch.full((), value, dtype=torch.float32, device=like.device)

    def matmul(self, a: Array, b: Array) -> Array:
        if autocast_dtype(a) is None:
            return torch.matmul(a, b)
        with torch.autocast(a.device.type, enabled=False):  # autocast would multiply in a narrower dtype
            return torch.matmul(a, b)

    def grouped_matmul(self, a: Array, b: Array, offsets: Array) -> Array:
        groups = groups_of(offsets)
        if groups is None:
            return super().grouped_matmul(a, b, offsets)
        product = a.new_zeros((a.shape[0], b.shape[-1]))
        for matrix, (start, end) in zip(b, groups, strict=True):
            if end > start:
                product[start:end] = self.matmul(a[start:end], matrix)
        return product

    def k_grouped_matmul(self, a: Array, b: Array, offsets: Array) -> Array:
        groups = groups_of(offsets)
        if groups is None:
            return super().k_grouped_matmul(a, b, offsets)
        products = a.new_zeros((len(groups), a.shape[0], b.shape[-1]))
        for product, (start, end) in zip(products, groups, strict=True):
            if end > start:
                product.copy_(self.matmul(a[:, start:end], b[start:end]))
        return products

    def transpose(self, a: Array, axes: tuple[int, ...]) -> Array:
        return a.permute(axes)

    def portable(self, a: Array) -> Array:
        if type(a) in PLAIN and a.nbytes < a.untyped_storage().nbytes():
            a = a.clone()  # a part of a larger tensor, all of which pickle would store
        return _bytes(a)  # pickle's copy of a storage of float8 fails (torch 2.11 to 2.13)

    def view(self, a: Array, dtype: str) -> Array:
        return _as(a, getattr(torch, dtype))

    def strides(self, a: Array) -> tuple[int, ...] | None:
        return tuple(stride * a.itemsize for stride in a.stride())

    def address(self, a: Array) -> int | None:
        return a.data_ptr() if opaque(a) is None else None

    def words(self, seed: Any) -> tuple[Any, Any]:
        if not isinstance(seed, torch.Tensor) or not seed.is_cuda:
            return super().words(seed)
        words = seed.to(torch.int32)  # the host would wait for them
        return words[0], words[1]

    def to_int32(self, x: Any) -> Any:
        return x.to(torch.int32) if isinstance(x, torch.Tensor) else int(x)

    def any(self, condition: Array) -> bool:
        if condition.is_meta:
            raise UnsupportedError("tensors on the meta device have no values, which this option reads; leave it out.")
        return bool(condition.any())

    def assign(self, out: Array, value: Array) -> None:
        need_dense(out)
        out.copy_(value)

    def to(self, a: Array, device: Any) -> Array:
        try:
            return a if device is None else a.to(torch.device(device))
        except (RuntimeError, TypeError, AssertionError) as e:  # AssertionError: torch built without CUDA
            raise OptionError(f"torch cannot use device {device!r}: {e}", device=device) from e

    def from_numpy(self, a: Array, codec_dtype: str | None = None) -> Array:
        tensor = torch.from_numpy(np.require(a, requirements="W") if a.ndim else np.array(a))
        return self.view(tensor, codec_dtype) if codec_dtype else tensor

    def to_numpy(self, a: Array) -> Array:
        need_dense(a)
        if a.is_meta:
            raise UnsupportedError("a tensor on the meta device has no values; pass one on another device.", found="meta")
        return _as(a.detach().cpu(), BIT_PATTERNS.get(a.dtype, a.dtype)).numpy()


def autocast_dtype(x: Array) -> torch.dtype | None:
    """The dtype of autocast on `x`'s device; None if it is off."""
    if not _autocasting():
        return None
    kind = x.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


#: Is autocast on for any device? torch has no public API for this.
_autocasting: Any = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # pyright: ignore


def need_dense(x: Array) -> None:
    """Raise UnsupportedError for a sparse or nested tensor."""
    if x.is_nested:
        raise UnsupportedError(
            f"x is a nested tensor of {x.size(0)} parts ({x.layout}); breccia computes on dense ones: pass each part of "
            "x.unbind(), or x.to_padded_tensor(0.0).",
            found=x.layout,
        )
    if x.layout is not torch.strided:
        raise UnsupportedError(
            f"x is a sparse tensor ({x.layout}); breccia computes on dense ones: pass x.to_dense().", found=x.layout
        )


def _as(x: Array, dtype: torch.dtype) -> Array:
    """Bitcast to another dtype of the same width."""
    if x.dtype == dtype:
        return x
    return torch.ops.breccia.view_as(x, dtype) if wrapped(x) else x.view(dtype)


@torch.library.custom_op("breccia::view_as", mutates_args=())
def _view_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy, as operators cannot return views. Functorch has no rule for `Tensor.view(dtype)` in torch 2.11."""
    return x.view(dtype).clone()


@_view_as.register_fake
def _(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype)


@_view_as.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    return torch.ops.breccia.view_as(x, dtype), in_dims[0]


def _bytes(a: Array) -> Array:
    """A float8 array as uint8, since not every torch function on every device takes float8."""
    return _as(a, torch.uint8) if dtype_name(a).startswith("float8") else a


@lru_cache(maxsize=64)
def _table(table: tuple[int, ...], device: torch.device) -> Array:
    return torch.tensor(np.array(table, np.uint32).view(np.int32), device=device)


def devices() -> list[str]:
    """The available torch devices, for `breccia doctor`."""
    descriptions = [f"cpu, {torch.get_num_threads()} threads"]
    for n in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(n)
        descriptions.append(f"cuda:{n} {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    return [*descriptions, "mps"] if torch.backends.mps.is_available() else descriptions


TORCH = _TorchOps()
