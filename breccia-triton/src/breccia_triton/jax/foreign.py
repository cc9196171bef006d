"""Products of JAX on CUDA by torch's kernels: those in CUDA C++, and cuBLAS in BF16. XLA passes addresses and its stream.

A compiled function holds a call with a text that says what to multiply, so that another process can run it from JAX's cache on
disk. The handler, of breccia-native, gives the text and the addresses to `_enqueue`, which makes tensors of torch at these
addresses, and enqueues what torch would. Copies of operands and decoded weights are in memory of torch's allocator, besides
XLA's. In the host's memory, for tests, it calls the op.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from breccia import KernelError, ScaledTensor
from breccia.backend import (
    FLOAT32,
    PLAIN,
    TENSOR,
    Metadata,
    ProductOptions,
    Shape,
    calls,
    checks,
    composites,
    dtype_name,
    product_options,
    reference,
    targets,
)

from ..facts import Hardware
from ..gemm.bf16 import matmul as bf16
from ..gemm.contiguous import ContiguousOperand
from ..gemm.fp8 import matmul as fp8
from ..gemm.fp8 import plans
from ..gemm.weight_only import matmul as weight_only
from ..launch.cache import Remembered
from .calls import Shapes, components, is_array, placeholder, shapes_of, tensor_of
from .launch import OnGPU, capability, run

#: The name of the handler among XLA's.
TARGET = "breccia_products"
#: The op of a product through BF16, whose `b` is the second operand. That of other ops is its transpose, with K last.
THROUGH_BF16 = "matmul_bf16"


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it, of two FP8 tensors."""
    bias = options.bias
    checks.check_matmul(a, b, bias)
    first, second = (plans.kind_of(st.recipe, st.layout, st.axis)[0] for st in (a, b))
    turned = bias is None and plans.turns((first, second))  # the kernel multiplies b.mT by a.mT
    factors, added = (b.mT, a) if turned else (a, b.mT), {} if bias is None else {"bias": bias}
    product = _product("matmul", *factors, added, options)
    if product is None:
        return composites.matmul(a, b, options)
    return jnp.swapaxes(product, -1, -2) if turned else product


def weight_only_matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it, of an array by the transpose of a weight in storage "mma_16x128"."""
    checks.check_matmul(a, b, options.bias)
    added = {} if options.bias is None else {"bias": options.bias}
    product = _product("matmul", a, b.mT, added, options) if _has_points_of_bytes(b) else None
    return composites.matmul(a, b.to_plain(), options) if product is None else product


def grouped_matmul(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """`grouped_matmul` as `breccia.grouped_matmul` documents it, of FP8 tensors, or by weights in storage "mma_16x128"."""
    checks.check_grouped(a, b, offsets)
    ends = jnp.asarray(offsets, jnp.int32) if is_array(offsets) else offsets
    product = _product("grouped_matmul", a, b.mT, {"offsets": ends}, options) if _has_points_of_bytes(b) else None
    return composites.grouped_matmul(a, b.to_plain(), offsets, options) if product is None else product


def _has_points_of_bytes(b: ScaledTensor) -> bool:
    """Whether zero-points, if there are any, have the dtype that the kernels of stored weights read."""
    return b.zero_point is None or b.layout.storage == PLAIN or dtype_name(b.zero_point) == "uint8"


def matmul_bf16(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it, of quantized operands and BF16 arrays, through BF16."""
    checks.check_matmul(a, b, options.bias)
    product = _product(THROUGH_BF16, a, b, {} if options.bias is None else {"bias": options.bias}, options)
    return composites.matmul(a, b, options) if product is None else product


def _product(op: str, a: Any, b: Any, added: dict[str, Any], options: ProductOptions) -> Any:
    """The product of a by b, or b.mT (see THROUGH_BF16); None under `out=`, and where an operand is no array of JAX."""
    first, second = (components(x) if isinstance(x, ScaledTensor) else {"x": x} for x in (a, b))
    arrays = [*first.values(), *second.values(), *added.values()]
    if options.out is not None or not all(map(is_array, arrays)):
        return None
    metadata = tuple(Metadata.of(x) if isinstance(x, ScaledTensor) else None for x in (a, b))
    shapes = shapes_of(first), shapes_of(second), shapes_of(added)
    call = Product(op, metadata[0], metadata[1], *shapes, options.out_dtype)
    return run(call, arrays)[0]


@dataclass(frozen=True)
class Product(OnGPU):
    """A call of `matmul` or `grouped_matmul` of a by b.mT, or of `matmul_bf16` of a by b.

    a, b: None for an array. first, second: their arrays. added: the bias, or the offsets.
    """

    op: str
    a: Metadata | None
    b: Metadata | None
    first: Shapes
    second: Shapes
    added: Shapes
    dtype: str

    @property
    def results(self) -> tuple[tuple[Shape, str], ...]:
        a, b = (tuple(placeholder(*each).shape) for each in ((self.a, self.first), (self.b, self.second)))
        lead = () if self.op == "grouped_matmul" else jnp.broadcast_shapes(a[:-2], b[:-2])
        return (((*lead, a[-2], b[-1 if self.op == THROUGH_BF16 else -2]), self.dtype),)

    def lowered(self, context: Any, *arrays: Any) -> Any:
        fits = self.op == THROUGH_BF16 or capability() == plans.HOPPER
        return super().lowered(context, *arrays) if fits else None

    def batched(self, arrays: Sequence[Any], axes: Sequence[int | None]) -> list[Any] | None:
        """One product, with the examples as a leading axis of the operands that have them."""
        n, m = len(self.first), len(self.first) + len(self.second)
        mapped = [any(axis is not None for axis in some) for some in (axes[:n], axes[n:m], axes[m:])]
        leads = [placeholder(*each).shape[:-2] for each in ((self.a, self.first), (self.b, self.second))]
        if self.op == "grouped_matmul" or mapped[2]:
            return None
        for metadata, has_examples in zip((self.a, self.b), mapped, strict=False):
            if metadata is None or not has_examples:
                continue
            if metadata.layout.storage != PLAIN or (self.op == THROUGH_BF16 and _has_tensor_scale(metadata)):
                return None
        if mapped[0] and mapped[1]:
            if leads[0] != leads[1]:
                return None
        else:
            one, many = leads if mapped[1] else leads[::-1]  # of the operand that all examples share, and of the other
            if math.prod(one) != 1 or len(one) > len(many):
                return None
        count = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
        moved: list[Any] = []
        for i, (a, axis) in enumerate(zip(arrays, axes, strict=True)):
            if axis is not None:
                moved.append(jnp.moveaxis(a, axis, 0))
            else:
                moved.append(jnp.broadcast_to(a, (count, *a.shape)) if i < m and mapped[i >= n] else a)

        def shapes(described: Shapes, arrays: Sequence[Any]) -> Shapes:
            return tuple((name, a.shape, dtype) for (name, _, dtype), a in zip(described, arrays, strict=True))

        return run(replace(self, first=shapes(self.first, moved[:n]), second=shapes(self.second, moved[n:m])), moved)

    def generic(self, *arrays: Any) -> list[Any]:
        n, m = len(self.first), len(self.first) + len(self.second)
        a, b = tensor_of(self.a, self.first, arrays[:n]), tensor_of(self.b, self.second, arrays[n:m])
        b = b.to_plain() if isinstance(b, ScaledTensor) else b
        if self.op == "grouped_matmul":
            return [reference.grouped_matmul(a, b.mT, arrays[m], product_options(self.dtype))]
        b = b if self.op == THROUGH_BF16 else b.mT
        return [reference.matmul(a, b, product_options(self.dtype, *arrays[m:]))]

    def kernels(self, hardware: Hardware, *arrays: Any) -> list[Any]:
        _register("CUDA")
        ((shape, dtype),) = self.results
        operands = [(self.a and self.a.to_json(), self.first), (self.b and self.b.to_json(), self.second)]
        # Another process may read it: JAX keeps what it has compiled on disk.
        text = json.dumps([self.op, operands, self.added, shape, dtype], separators=(",", ":"))
        return [jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))(*arrays, call=text)]


def _has_tensor_scale(operand: Metadata) -> bool:
    """Whether an operand has a scale of the whole tensor: each example has its own, and decoding to BF16 reads one."""
    return operand.recipe.format.global_scale is not None or operand.layout.block(operand.axis) == TENSOR


@lru_cache
def _register(platform: str) -> None:
    """Give XLA the handler. platform: "CUDA"; or "cpu" for tests, whose products are in the host's memory."""
    # A reference, not an import: breccia-native is optional, and what it lacks is a reason in `breccia.explain`.
    handler = targets.load("breccia_native.xla_calls:cuda_handler")
    jax.ffi.register_ffi_target(TARGET, handler(partial(_enqueue, platform == "cpu")), platform=platform)


# ------------------------------------------------------------------------------------------------ when XLA runs it

#: What enqueues a product, by its text, its device and all addresses: XLA's buffers return to the same few addresses.
_known = Remembered()


def _enqueue(host: bool, text: str, arguments: tuple[int, ...], results: tuple[int, ...], stream: int | None) -> None:
    """Enqueue the product `text` of arrays at these addresses. host: they are in the host's memory, and there is no stream."""
    if host != (stream is None):
        raise KernelError("XLA gives a product on CUDA a stream, and one in the host's memory none; it did not here.")
    index = None if stream is None else torch.cuda.current_device()  # XLA has made it the current one
    key = text, index, arguments, results
    enqueue = _known.get(key)
    if enqueue is None:
        operands = _tensors(text, (*arguments, *results), "cpu" if index is None else f"cuda:{index}")
        enqueue = _known.keep(key, _in_memory(*operands) if stream is None else _on_device(stream, *operands))
    enqueue(stream)


@lru_cache(maxsize=1024)
def _read(text: str) -> tuple[str, list[tuple[Metadata | None, Shapes]], Shapes, Shape, str]:
    """(The op, the operands, what is added to the call, the shape and dtype of the result) of a product."""
    op, operands, *rest = json.loads(text)
    return op, [(None if metadata is None else Metadata.from_json(metadata), each) for metadata, each in operands], *rest


def _tensors(text: str, addresses: tuple[int, ...], device: str) -> tuple[str, Any, Any, Any, Any]:
    """(the op, both operands, what is added to the call, the result) of a text and the addresses of its arrays."""
    op, operands, added, shape, dtype = _read(text)
    each = iter(addresses)

    def tensors(shapes: Shapes) -> list[Any]:
        return [tensor_at(next(each), shape, dtype, device) for _, shape, dtype in shapes]

    def operand(metadata: Metadata | None, shapes: Shapes) -> Any:
        # Inference mode does not count changes. So a weight is never taken for one that was written before the kernel ahead.
        with torch.inference_mode():
            return tensor_of(metadata, shapes, tensors(shapes))

    a, b = (operand(*described) for described in operands)
    (more,) = tensors(added) or (None,)
    out = tensor_at(next(each), shape, dtype, device)
    return op, a, b if op == THROUGH_BF16 else b.mT, more, out


def _in_memory(op: str, a: Any, b: Any, added: Any, out: Any) -> Callable[[Any], None]:
    dtype = dtype_name(out)
    if op == "grouped_matmul":
        return lambda stream: calls.grouped_matmul(a, b, added, ProductOptions(dtype, out=out))
    return lambda stream: calls.matmul(a, b, ProductOptions(dtype, added, out))


def _on_device(stream: int, op: str, a: Any, b: Any, added: Any, out: Any) -> Callable[[Any], None]:
    dtype = dtype_name(out)
    with _current(stream, out.device):  # what prepares may copy operands, to see what they become
        if op == THROUGH_BF16:
            a, b = ContiguousOperand(a, False), ContiguousOperand(b, True)  # no copies: arrays of JAX are in C order
            executable = bf16.prepared(a, b, added, dtype)
            if isinstance(executable, str):
                raise KernelError(f"XLA called a product through BF16 that has no kernel: {executable}. Prefer another kernel.")
        elif b.layout.storage != PLAIN:
            executable = weight_only.prepared(a, b, added, dtype, op == "grouped_matmul")
        else:
            bias, offsets = (None, added) if op == "grouped_matmul" else (added, None)
            executable = fp8.prepared(a, b, bias, dtype, offsets)

    def enqueue(stream: int) -> None:
        executable.enqueue(stream, a, b, added, out)

    return _on_streams(out.device, enqueue) if op == THROUGH_BF16 or executable.scratch else enqueue


def _on_streams(device: Any, enqueue: Callable[[int], Any]) -> Callable[[int], None]:
    """`enqueue` with the stream as torch's current one."""

    def enqueue_there(stream: int) -> None:
        with _current(stream, device):
            enqueue(stream)

    return enqueue_there


def _current(stream: int, device: Any) -> Any:
    """A context in which a stream of XLA is torch's current one: torch allocates for that."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))


class _Memory:
    """Bytes of a device, as torch reads them (the interface of CUDA arrays of Numba)."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}


def tensor_at(address: int, shape: Shape, dtype: str, device: str) -> Any:
    """A tensor of torch in C order at an address. It does not own the memory."""
    kind = getattr(torch, dtype)
    count = math.prod(shape) * kind.itemsize
    if count == 0:
        return torch.empty(tuple(shape), dtype=kind, device=device)
    if device == "cpu":
        memory = torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
    else:
        memory = torch.as_tensor(_Memory(address, count), device=device)
    return memory.view(kind).reshape(tuple(shape))
