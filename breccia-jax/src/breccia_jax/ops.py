"""The backend primitives of `breccia.arrays.ops.Ops` on JAX, traceable throughout (`any` and `to_numpy` read values)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from breccia import OptionError, UnsupportedError
from breccia.backend import F32_INF, NUMPY, ROUNDER, Array, Ops
from breccia.internal import MAGNITUDE, MANTISSA, NORMAL

#: On CPUs XLA's reduction of a block is scalar; comparing halves from 128 down to 16 is six times faster (measured).
#: Longer axes may be sharded over the devices, which would have to exchange halves.
_SHORTEST, _CHUNK, _LONGEST = 16, 128, 256
#: Of blocks along an axis before the last, XLA reduces up to this length by vectors; halves of longer ones are compared five
#: times as fast. The last two numbers are reduced: XLA repeats comparisons, but no reduction, in what uses the result. Casts in
#: blocks of 128 then take a third of the time (measured: jax 0.10).
_ACROSS = 32
_ROUNDER = np.float32(ROUNDER)
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.int32}


class _JaxOps(Ops):
    native_float8 = True

    def f32(self, x: Array) -> Array:
        return x.astype(jnp.float32)

    def to_float(self, x: Array, dtype: str) -> Array:
        return x.astype(dtype)

    def bitcast_to_int(self, x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    def bitcast_to_float(self, i: Array) -> Array:
        return lax.bitcast_convert_type(i, jnp.float32)

    def load(self, stored: Array) -> Array:
        word = _WORDS[stored.dtype.itemsize]
        return lax.bitcast_convert_type(stored, word).astype(jnp.int32)

    def store(self, codes: Array, dtype: str) -> Array:
        kind = jnp.dtype(dtype)
        return lax.bitcast_convert_type(codes.astype(_WORDS[kind.itemsize]), kind)

    def take(self, table: tuple[int, ...], codes: Array) -> Array:
        items = np.array(table, np.uint32).view(np.int32)
        if len(items) not in (2, 4, 8, 16):
            return jnp.asarray(items).at[codes].get(mode="promise_in_bounds", wrap_negative_indices=False)
        # By selects, which vectorize on a CPU; XLA takes seconds to compile constant tensors.
        values: list[Array] = list(items)
        for bit in range(len(items).bit_length() - 1):
            values = [jnp.where((codes >> bit) & 1 != 0, *pair[::-1]) for pair in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    def where(self, condition: Array, a: Any, b: Any) -> Array:
        return jnp.where(condition, a, b)

    def minimum(self, a: Array, b: Any) -> Array:
        return jnp.minimum(a, b)

    def maximum(self, a: Array, b: Any) -> Array:
        return jnp.maximum(a, b)

    def div(self, a: Array, b: Any) -> Array:
        a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
        return _divided(a, b)

    def amax(self, i: Array, axes: tuple[int, ...]) -> Array:
        if math.prod(i.shape) == 0:
            return jnp.max(i, axis=axes, keepdims=True, initial=0)
        inside = {axis % i.ndim for axis in axes}
        shape = [1 if axis in inside else n for axis, n in enumerate(i.shape)]
        length = i.shape[-1]
        chunk = _chunk(length)
        if i.ndim - 1 in inside and chunk >= _SHORTEST:
            i = jnp.reshape(i, (*i.shape[:-1], length // chunk, chunk))
            inside.add(i.ndim - 1)
            for half in (chunk >> 1, chunk >> 2, chunk >> 3):
                i = jnp.maximum(i[..., :half], i[..., half:])
        elif length == 1 and i.ndim >= 3 and i.ndim - 3 in inside and (chunk := _chunk(i.shape[-3])) > _ACROSS:
            split = i.ndim - 3
            inside = {axis + (axis > split) for axis in inside} | {split + 1}
            count = i.shape[split] // chunk
            i = jnp.reshape(i, (*i.shape[:split], count, chunk, *i.shape[-2:]))
            while chunk > 1 and count * chunk > 2:
                chunk //= 2
                i = jnp.maximum(i[..., :chunk, :, :], i[..., chunk:, :, :])
        return jnp.reshape(jnp.max(i, axis=tuple(inside)), shape)

    def reshape(self, a: Array, shape: tuple[int, ...]) -> Array:
        return jnp.reshape(a, shape)

    def pad(self, a: Array, widths: tuple[int, ...]) -> Array:
        return jnp.pad(a, [(0, w) for w in widths])

    def concat(self, parts: list[Array], axis: int = -1) -> Array:
        return _as(jnp.concatenate([_bytes(p) for p in parts], axis=axis), parts[0].dtype)

    def gather(self, a: Array, index: tuple[int, ...] | Array, axis: int) -> Array:
        if isinstance(index, tuple):
            return _as(jnp.take(_bytes(a), np.array(index, np.int32), axis=axis), a.dtype)
        # As `jnp.take`, which fills what is out of range with NaN: all ones is NaN in scales of every format.
        items = _bytes(a).at[(*(slice(None),) * axis, index)].get(mode="fill", wrap_negative_indices=False)
        return _as(items, a.dtype)

    def readable(self, a: Array) -> bool:
        return not isinstance(a, Tracer)

    def broadcast(self, a: Array, shape: tuple[int, ...]) -> Array:
        return jnp.broadcast_to(a, shape)

    def int_to_float(self, i: Array) -> Array:
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
        one_row = a.ndim == b.ndim == 2 and a.shape[0] == 1 and _chunk(b.shape[0]) >= _SHORTEST
        return _row_product(a, b) if one_row else dot(a, b)

    def transpose(self, a: Array, axes: tuple[int, ...]) -> Array:
        return jnp.transpose(a, axes)

    def fold(self, function: Callable[..., tuple[Array, ...]], start: tuple[Array, ...], items: Array) -> tuple[Array, ...]:
        return lax.scan(lambda results, item: (function(*results, item), None), start, items)[0]

    def native_round(self, y: Array, bits: int) -> Array | None:
        if bits != 8:  # XLA on CPUs then packs codes four times as slowly (measured: jax 0.10)
            return None
        # XLA on GPUs makes 255 of every number that is rounded by an addition and stored in a byte (measured: jax 0.11.2).
        return lax.platform_dependent(y, cpu=_rounded_by_addition, default=_rounded)

    def pack_bits(self, codes: Array, bits: int) -> Array:
        # Bitcast via one wider item: XLA on CPUs computes and reads every other code separately, which takes
        # five times as long (measured: jax 0.10 and 0.11).
        count = codes.shape[-1]
        if count not in _WORDS or not _static(codes):
            return super().pack_bits(codes, bits)
        item = lax.bitcast_convert_type(lax.optimization_barrier(codes.astype(jnp.uint8)), _WORDS[count]).astype(jnp.int32)
        word = item & 0xFF
        for i in range(1, count):
            word = word | ((item >> (8 * i)) & 0xFF) << (i * bits)
        return word

    def unpack_bits(self, word: Array, bits: int, count: int) -> Array:
        if count not in _WORDS or not _static(word):
            return super().unpack_bits(word, bits, count)
        mask = (1 << bits) - 1
        item = word & mask
        for i in range(1, count):
            item = item | ((word >> (i * bits)) & mask) << (8 * i)
        return lax.bitcast_convert_type(item.astype(_WORDS[count]), jnp.uint8).astype(jnp.int32)

    def seed(self, seed: Any) -> Any:
        if not jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            return seed
        words = jax.random.key_data(seed)
        if words.shape != (2,):
            raise OptionError(
                f"seed must be one key of two words; got keys of shape {tuple(seed.shape)} and dtype {seed.dtype}. "
                "jax.random.bits(key, (2,), 'uint32') draws two words from any key.",
                shape=tuple(seed.shape),
                dtype=str(seed.dtype),
            )
        return words

    def words(self, seed: Any) -> tuple[Any, Any]:
        if not hasattr(seed, "shape"):
            return super().words(seed)
        if seed.shape == (2,):
            low, high = seed[0], seed[1]
        else:  # a traced integer; the upper word of a signed 32-bit one is its sign extension
            wide = seed.dtype.itemsize > 4
            low, high = seed, (seed >> 32 if wide else seed >> 31 if seed.dtype.kind == "i" else seed * 0)
        return low.astype(jnp.int32), high.astype(jnp.int32)

    def to_int32(self, x: Any) -> Any:
        return x.astype(jnp.int32) if hasattr(x, "astype") else int(x)

    def any(self, condition: Array) -> bool:
        return bool(_concrete(condition).any())

    def to(self, a: Array, device: Any) -> Array:
        try:
            return a if device is None else jax.device_put(a, jax.devices(device)[0] if isinstance(device, str) else device)
        except (RuntimeError, TypeError, ValueError, AssertionError) as e:  # JAX asserts that a spec fits the rank
            raise OptionError(f"JAX cannot use device {device!r}: {e}", device=str(device)) from e

    def beside(self, a: Array, device: Any) -> Any:
        return (
            shared_out(device.mesh, device.spec, a.shape, device.memory_kind) if isinstance(device, NamedSharding) else device
        )

    def from_numpy(self, a: Array, codec_dtype: str | None = None) -> Array:
        """The array on the default device, copied once; `jnp.asarray` makes two copies, and a view by JAX another one."""
        with jax.ensure_compile_time_eval():
            return jax.device_put(a.view(jnp.dtype(codec_dtype)) if codec_dtype else a, may_alias=False)

    def to_numpy(self, a: Array) -> Array:
        return NUMPY.to_numpy(_concrete(a))

    def view(self, a: Array, dtype: str) -> Array:
        return lax.bitcast_convert_type(a, jnp.dtype(dtype))


def _rounded_by_addition(y: Array) -> Array:
    return lax.bitcast_convert_type(y + _ROUNDER, jnp.int32) - int(_ROUNDER.view(np.int32))


def _rounded(y: Array) -> Array:
    return lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)


def names_of(axis: Any) -> tuple[str, ...]:
    """The mesh axes along which an axis of an array is sharded."""
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)


def shared_out(mesh: Any, spec: Any, shape: tuple[int, ...], memory_kind: str | None = None) -> NamedSharding:
    """The sharding of an array along the axes of `spec` that its shards divide."""

    axes = [
        axis if n % math.prod(mesh.shape[name] for name in names_of(axis)) == 0 else None
        for axis, n in zip(spec, shape, strict=False)
    ]
    return NamedSharding(mesh, PartitionSpec(*axes), memory_kind=memory_kind)


def dot(a: Array, b: Array) -> Array:
    """a @ b in FP32."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


@jax.custom_batching.custom_vmap
def _row_product(a: Array, b: Array) -> Array:
    """(1, K) by (K, N). On CPUs as a sum of products, by which XLA decodes `b` while it reads the codes: five times as fast as
    to decode a weight and then to multiply it (measured).
    """
    return lax.platform_dependent(a, b, cpu=_summed, default=dot)


@_row_product.def_vmap
def _(size: int, mapped: list[bool], a: Array, b: Array) -> tuple[Array, bool]:
    """Several rows are a product of matrices."""
    return jax.vmap(dot, in_axes=tuple(0 if one else None for one in mapped))(a, b), True


def _summed(a: Array, b: Array) -> Array:
    chunk = half = _chunk(b.shape[0])
    products = jnp.reshape(jnp.swapaxes(a, 0, 1) * b, (-1, chunk, b.shape[1]))
    while half > 1:  # pairs first: XLA adds the items of an axis one by one
        half //= 2
        products = products[:, :half] + products[:, half:]
    return jnp.reshape(jnp.sum(products, (0, 1)), (1, b.shape[1]))


def _chunk(length: Any) -> int:
    """The largest power of two up to `_CHUNK` by which an axis is cut; its shards are cut by it too."""
    if not isinstance(length, int):
        return 1
    if length > _LONGEST:
        length = length // jax.device_count() if length % jax.device_count() == 0 else 1
    return min(length & -length, _CHUNK)


def _static(a: Array) -> bool:
    """Are its lengths numbers? Exported functions may have symbols, of which XLA finds no bitcast to items of another size."""
    return all(isinstance(n, int) for n in a.shape)


def _bytes(a: Array) -> Array:
    """Float8 as bit patterns: XLA on CPUs concatenates float8 via wider floats, which changes NaNs (measured: jax 0.10)."""
    return lax.bitcast_convert_type(a, jnp.uint8) if a.dtype.itemsize == 1 and a.dtype.kind not in "iub" else a


def _as(a: Array, dtype: Any) -> Array:
    return a if a.dtype == dtype else lax.bitcast_convert_type(a, dtype)


def _concrete(a: Array) -> Array:
    """`a`, if its values are concrete. Raises UnsupportedError for a tracer."""
    if isinstance(a, Tracer):
        raise UnsupportedError(
            "this call reads values, which a traced JAX function does not have; call it outside jit and vmap, or leave out the "
            "option that requires it (for example, use nonfinite='propagate')."
        )
    return a


@jax.jit
def _divided(a: Array, b: Array) -> Array:
    """fl(a / b), for operands of one shape.

    XLA's division is not IEEE: it replaces equal known divisors by one reciprocal, and on CUDA it is always approximate (30 %
    of quotients of random numbers differ in the last bit: jax 0.11, H200). On CPUs it is, for a divisor that the compiler does
    not know.
    """
    return lax.platform_dependent(a, b, cpu=_opaque, default=_corrected)


def _opaque(a: Array, b: Array) -> Array:
    """a / b, for a divisor that the compiler does not know, not even under vmap, where `a` alone may have the mapped axis."""
    return a / lax.optimization_barrier(lax.select(a == a, b, b))


def _corrected(a: Array, b: Array) -> Array:
    """fl(a / b), from a quotient of significands that is corrected in integers."""
    u, v = (lax.bitcast_convert_type(x, jnp.int32) for x in (a, b))
    sign = (u ^ v) & ~MAGNITUDE
    u, v = u & MAGNITUDE, v & MAGNITUDE
    m, n = (u & MANTISSA) | NORMAL, (v & MANTISSA) | NORMAL
    below = m < n
    m = jnp.where(below, m * 2, m)  # m / n in [1, 2)
    by = n.astype(jnp.float32)

    # 25 bits: 24, and a rounding bit. A quotient within 2^-21 of the exact one leaves a remainder of at most 16 n, which fits
    # int32 although m * 2^24 overflows; the second quotient is then within one of the exact one.
    quotient = (m.astype(jnp.float32) / by * 2.0**24).astype(jnp.int32)
    rest = (m << 24) - quotient * n
    more = jnp.floor(rest.astype(jnp.float32) / by).astype(jnp.int32)
    quotient, rest = quotient + more, rest - more * n

    def corrected(_: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        quotient, rest = state
        step = (rest >= n).astype(jnp.int32) - (rest < 0).astype(jnp.int32)
        return quotient + step, rest - step * n

    quotient, rest = lax.fori_loop(0, 2, corrected, (quotient, rest))
    up = (quotient & 1) & ((rest != 0) | ((quotient >> 1) & 1))
    exponent = (u >> 23) - (v >> 23) + 126 - below  # the implicit bit of the significand adds the last 1
    bits = (exponent << 23) + (quotient >> 1) + up
    bits = jnp.where(exponent < 0, 0, jnp.where(bits >= F32_INF, F32_INF, bits))
    bits = jnp.where(exponent >= 254, F32_INF, bits)
    normal = (u >= NORMAL) & (v >= NORMAL) & (u < F32_INF) & (v < F32_INF)
    return jnp.where(normal, lax.bitcast_convert_type(bits | sign, jnp.float32), a / b)  # zeros, Inf and NaN: no rounding


def _times(low: Array, high: Array, n: Any) -> tuple[Array, Array]:
    """(high, low) * n modulo 2^64 on uint32 words, by 16-bit halves. n: a length, which may be a symbol."""
    mask = 0xFFFF
    n = n & 0xFFFFFFFF if isinstance(n, int) else jnp.asarray(n).astype(jnp.uint32)
    n0, n1 = n & mask, (n >> 16) & mask
    a0, a1 = low & mask, low >> 16
    p00, p01, p10, p11 = a0 * n0, a0 * n1, a1 * n0, a1 * n1
    middle = (p00 >> 16) + (p01 & mask) + (p10 & mask)
    return (p00 & mask) | (middle << 16), high * n + p11 + (p01 >> 16) + (p10 >> 16) + (middle >> 16)


def device() -> str:
    """The kind of device that traced arrays are assumed to be on."""
    return {"gpu": "cuda"}.get(kind := jax.default_backend(), kind)


def capability(device: Any) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, or of the first one where it is the kind of device of traced arrays."""
    if device == "cuda":
        device = jax.local_devices()[0]
    major, _, minor = str(getattr(device, "compute_capability", None)).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def devices() -> list[str]:
    """The available JAX devices, for `breccia doctor`."""
    return [f"{d.platform}:{d.id} {d.device_kind}".removesuffix(f" {d.platform}") for d in jax.devices()]


JAX = _JaxOps()
