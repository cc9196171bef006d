"""What products of activations and a weight in storage "mma_16x128" have in common: operands, results and their arguments."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from typing import Any

import torch

from breccia import KernelError, ScaledTensor
from breccia.backend import dtype_name, reference
from breccia.internal import reentrant
from breccia_torch.ops import TORCH

from . import weight_plans as plans
from .cuda.driver import TensorMap, driver
from .launch import allocator, empty, index_of
from .weight_plans import Config, Operand


class Weight(ctypes.Structure):
    """The kernels' `Weight`."""

    _fields_ = (
        ("chunks", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("tensor_scale", ctypes.c_void_p),
        ("factor", ctypes.c_float),
        ("divides", ctypes.c_int),
    )


class Product:
    """What products of equal shapes, dtypes and recipe have in common."""

    config: Config

    def __init__(self, a: Any, b: ScaledTensor, out_dtype: str) -> None:
        self.k, self.n = b.shape[-2:]
        self.operand = operand_in(b)
        self.device, self.lead = b.data.device, tuple(a.shape[:-1])
        self.m = a.shape[:-1].numel()
        self.act, self.out_dtype = dtype_name(a), out_dtype
        self.dtype = getattr(torch, out_dtype)
        self.index = index_of(self.device)
        self.allocated = allocator((*self.lead, self.n), self.dtype, self.device)
        self.weight = Weight(None, None, None, self.operand.factor, int(self.operand.divides))
        self.x, self.bias, self.y = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.ldx, self.ldy = ctypes.c_int(), ctypes.c_int(self.n)
        self.sizes = [*map(ctypes.c_int, (self.m, self.n, self.k)), self.ldx, self.ldy]
        self.map, self.maps = TensorMap(), dict[tuple[int, ...], TensorMap]()
        # The arguments of a launch are set in place: one thread at a time, and no call in the middle of another one.
        self.turn, self.busy = reentrant(), False
        self.pitches = 0, self.n

    def need_free(self) -> None:
        """Raise KernelError if this thread is in the middle of a call."""
        if self.busy:
            raise KernelError(
                "a signal handler or a finalizer called for a product while the same one was being launched in this thread; "
                "call it after the handler has returned."
            )

    def _activations(self, a: Any) -> Any:
        """`a` as a matrix whose rows are adjacent numbers at multiples of 16 bytes."""
        x = a if a.ndim == 2 else a.reshape(self.m, self.k)
        if self.k % 8:
            return torch.nn.functional.pad(x, (0, -self.k % 8))
        rows = self.m == 1 or (x.stride(0) % 8 == 0 and x.stride(0) >= self.k)
        if x.stride(1) != 1 or not rows or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        return x

    def _writable(self, out: Any) -> bool:
        """Whether the kernel can write into `out`"""
        return (
            tuple(out.shape) == (self.m, self.n)
            and out.dtype == self.dtype
            and out.device == self.device
            and out.stride(1) == 1
            and (self.m == 1 or out.stride(0) >= self.n)
        )

    def _result(self, out: Any) -> Any:
        """What the kernel writes into: `out` where it can."""
        return out if out is not None and self._writable(out) else empty((self.m, self.n), self.dtype, self.device)

    def _returned(self, y: Any, out: Any) -> Any:
        """The result of the call, from what the kernel has written."""
        if y is out:
            return out
        if len(self.lead) != 1:
            y = y.view(*self.lead, self.n)
        return y if out is None else reference.result(TORCH, y, self.out_dtype, out)

    def _set(self, x: Any, y: Any) -> None:
        """The arguments of a launch that describe activations and result."""
        self.x.value, self.y.value = x.data_ptr(), y.data_ptr()
        pitch = x.stride(0) if self.m > 1 else x.shape[1]
        self.ldx.value, self.ldy.value = pitch, y.stride(0) if self.m > 1 else self.n
        if self.config.wide:
            self._describe(x.data_ptr(), pitch)

    def _describe(self, *place: int) -> None:
        """Describe the activations at an address, with rows so many elements apart, to the copy engine."""
        tensor_map = self.maps.get(place)
        if tensor_map is None:
            if len(self.maps) >= _PLACES:
                self.maps.clear()
            box = self.config.batch, 64
            tensor_map = driver().tensor_map(place[0], self.act, (self.m, self.k), place[1:], box, 128, 128)
            self.maps[place] = tensor_map
        ctypes.memmove(self.map.words, tensor_map.words, ctypes.sizeof(TensorMap))


def operand_in(b: ScaledTensor) -> Operand:
    """The format of a weight's transpose, as the kernels know it."""
    operand = plans.operand_of(b.recipe.format, b.layout.plain.block(-2))
    assert not isinstance(operand, str), operand  # `accepts` has asked
    return operand


#: Addresses of activations that are remembered for each call.
_PLACES = 256


def stored(b: ScaledTensor) -> tuple[Any, Any, bool]:
    """(The chunks of a weight, its flags, whether the chunks were written before the kernel ahead.)"""
    data = b.data
    settled, rows = _settled(data), b.scale.contiguous()
    if data.data_ptr() % 16 or not data.is_contiguous():
        data, settled = data.clone(memory_format=torch.contiguous_format), False
    return data, rows, settled


def _settled(data: Any) -> bool:
    """Whether the weight was written before the kernel ahead: only then may it be read before that one ends.

    A weight that was changed or got other memory counts as written just now at its next product; one of inference mode, which
    does not count its changes, always does.
    """
    if data.is_inference():
        return False
    state = data._version, data.data_ptr()  # `data.data = ...` keeps the object and its version
    if getattr(data, "_breccia_multiplied", None) == state:
        return True
    data._breccia_multiplied = state
    return False
