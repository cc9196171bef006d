"""Products of FP8 tensors of JAX on CUDA by the kernels of torch, CUDA C++ and cuBLAS: XLA passes their addresses and its stream.

A compiled function holds a call with a text that says what to multiply, so that another process can run it from JAX's cache on
disk. The handler, of breccia-native, gives the text and the addresses to `_enqueue`, which makes tensors of torch of them, in
place, and calls the op. Which kernel runs is up to torch's table of kernels.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from breccia.backend import (
    FLOAT32,
    Metadata,
    ProductOptions,
    Shape,
    calls,
    checks,
    composites,
    product_options,
    reference,
    targets,
)

from ..facts import Hardware
from .calls import Shapes, assembled, components, is_array, placeholder, shapes_of
from .launch import OnGPU, run

#: The name of the handler among XLA's.
TARGET = "breccia_torch_products"
#: How many lists of addresses a product remembers the tensors of. XLA's buffers return to the same few addresses.
_REMEMBERED = 128


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it, of two FP8 tensors."""
    out_dtype, bias, out = options
    checks.check_matmul(a, b, bias)
    added = {} if bias is None else {"bias": bias}
    product = None if out is not None else _product("matmul", a, b.mT, added, out_dtype)
    return composites.matmul(a, b, options) if product is None else product


def grouped_matmul(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """`grouped_matmul` as `breccia.grouped_matmul` documents it, of two FP8 tensors."""
    checks.check_grouped(a, b, offsets)
    fits = options.out is None
    product = _product("grouped_matmul", a, b.mT, {"offsets": offsets}, options.out_dtype) if fits else None
    return composites.grouped_matmul(a, b, offsets, options) if product is None else product


def _product(op: str, a: Any, b: Any, added: dict[str, Any], dtype: str) -> Any:
    """The product of a by b.mT, or None where an operand is no array of JAX."""
    first, second = components(a), components(b)
    arrays = [*first.values(), *second.values(), *added.values()]
    if not all(map(is_array, arrays)):
        return None
    call = Product(op, Metadata.of(a), Metadata.of(b), shapes_of(first), shapes_of(second), shapes_of(added), dtype)
    return run(call, arrays)[0]


@dataclass(frozen=True)
class Product(OnGPU):
    """A call of `matmul` or `grouped_matmul` of a by b.mT.

    first, second: the arrays of a and of b. added: the bias, or the offsets.
    """

    op: str
    a: Metadata
    b: Metadata
    first: Shapes
    second: Shapes
    added: Shapes
    dtype: str

    @property
    def results(self) -> tuple[tuple[Shape, str], ...]:
        a, b = (tuple(placeholder(*each).shape) for each in ((self.a, self.first), (self.b, self.second)))
        lead = () if self.op == "grouped_matmul" else jnp.broadcast_shapes(a[:-2], b[:-2])
        return (((*lead, a[-2], b[-2]), self.dtype),)

    def generic(self, *arrays: Any) -> list[Any]:
        n, m = len(self.first), len(self.first) + len(self.second)
        a, b = self._tensor(self.a, self.first, arrays[:n]), self._tensor(self.b, self.second, arrays[n:m])
        if self.op == "grouped_matmul":
            return [reference.grouped_matmul(a, b.mT, arrays[m], product_options(self.dtype))]
        return [reference.matmul(a, b.mT, product_options(self.dtype, *arrays[m:]))]

    @staticmethod
    def _tensor(metadata: Metadata, shapes: Shapes, arrays: tuple[Any, ...]) -> Any:
        return assembled(metadata, dict(zip((name for name, _, _ in shapes), arrays, strict=True)))

    def kernels(self, hardware: Hardware, *arrays: Any) -> list[Any]:
        _register("CUDA")
        ((shape, dtype),) = self.results
        return [jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))(*arrays, call=self.text())]

    def text(self) -> str:
        """What `_read` takes. Arrays are listed as (shape, dtype)."""
        operands = [(metadata.to_json(), [shape for _, shape, _ in shapes]) for metadata, shapes in self._scaled]
        added = [(shape, dtype) for _, shape, dtype in self.added]
        return json.dumps([self.op, operands, added, self.results[0]], separators=(",", ":"))

    @property
    def _scaled(self) -> tuple[tuple[Metadata, Shapes], tuple[Metadata, Shapes]]:
        return (self.a, self.first), (self.b, self.second)


@lru_cache
def _register(platform: str) -> None:
    # A reference, not an import: breccia-native is optional, and what it lacks is a reason in `breccia.explain`.
    jax.ffi.register_ffi_target(TARGET, targets.load("breccia_native.xla_calls:cuda_handler")(_enqueue), platform=platform)


# ------------------------------------------------------------------------------------------------ when XLA runs it


def _enqueue(text: str, arguments: tuple[int, ...], results: tuple[int, ...], stream: int | None) -> None:
    """Enqueue the product `text` of arrays at these addresses. stream: None for memory of the host."""
    _read(text)(arguments + results, stream)


@lru_cache(maxsize=1024)
def _read(text: str) -> Enqueued:
    op, operands, added, (shape, dtype) = json.loads(text)
    return Enqueued(op, [(Metadata.from_json(of), shapes) for of, shapes in operands], added, shape, dtype)


class Enqueued:
    """A product as it runs: tensors of torch in XLA's memory, and the op. Arguments: as `Product.text` lists them."""

    def __init__(self, op: str, scaled: Any, added: Any, shape: Any, dtype: str) -> None:
        from breccia_torch.ops import TORCH

        self.op, self.dtype, self.shape = op, dtype, shape
        self.call: Callable[..., Any] = getattr(calls, op)
        #: (metadata, the dtype and the shape of each component) of both operands.
        self.scaled = []
        for metadata, shapes in scaled:
            fmt = metadata.recipe.format
            dtypes = TORCH.dtypes(fmt)
            self.scaled.append((metadata, [(name, dtypes[name], s) for name, s in zip(fmt.parts, shapes, strict=True)]))
        self.added = [(of, s) for s, of in added]
        self._known: OrderedDict[Any, tuple[Any, ...]] = OrderedDict()

    def __call__(self, addresses: tuple[int, ...], stream: int | None) -> None:
        device = _device(stream)
        key = device, addresses
        arguments = self._known.get(key)
        if arguments is None:
            arguments = self._known[key] = self._arguments(addresses, device)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        with nullcontext() if stream is None else _current(stream, device):
            self.call(*arguments)

    def _arguments(self, addresses: tuple[int, ...], device: str) -> tuple[Any, ...]:
        rest, tensors = list(addresses), []
        for metadata, parts in self.scaled:
            tensors.append(metadata.assembled(**{name: tensor_at(rest.pop(0), s, of, device) for name, of, s in parts}))
        added = [tensor_at(rest.pop(0), s, of, device) for of, s in self.added]
        out = tensor_at(rest.pop(0), self.shape, self.dtype, device)
        a, b = tensors
        if self.op == "grouped_matmul":
            return a, b.mT, *added, ProductOptions(self.dtype, out=out)
        return a, b.mT, ProductOptions(self.dtype, *added, out=out) if added else ProductOptions(self.dtype, out=out)


def _device(stream: int | None) -> str:
    """The device that XLA has made the current one."""
    import torch

    return "cpu" if stream is None else f"cuda:{torch.cuda.current_device()}"


@lru_cache(maxsize=64)
def _external(stream: int, device: str) -> Any:
    import torch

    return torch.cuda.ExternalStream(stream, device=device)


def _current(stream: int, device: str) -> Any:
    """A context in which torch enqueues on XLA's stream."""
    import torch

    return torch.cuda.stream(_external(stream, device))


class _Memory:
    """Bytes of a device, as torch reads them (the interface of CUDA arrays of Numba)."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}


def tensor_at(address: int, shape: Shape, dtype: str, device: str) -> Any:
    """A tensor of torch in C order at an address. It does not own the memory."""
    import torch

    kind = getattr(torch, dtype)
    count = math.prod(shape) * kind.itemsize
    if device == "cpu":
        memory = torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
    else:
        memory = torch.as_tensor(_Memory(address, count), device=device)
    return memory.view(kind).reshape(tuple(shape))
