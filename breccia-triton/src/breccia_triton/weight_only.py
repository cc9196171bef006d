"""`matmul` of activations and a weight in storage "mma_16x128" on CUDA tensors of torch; see cuda/weight_only.cuh.

What a call is compiled for is decided once for its shapes and dtypes; a call then passes addresses.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from breccia.backend import ScaledTensor, checks, composites, dtype_name, output_dtype, reference
from breccia_torch.ops import TORCH

from . import weight_plans as plans
from .choices import codecs_of
from .cuda import program
from .cuda.driver import TensorMap, driver
from .launch import Remembered, allocator, elsewhere, empty, index_of, stream_of
from .weight_plans import Config, Operand


def weight_only_matmul(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """`a @ b + bias` as `breccia.matmul` documents it. a: (..., M, K); b: a weight's transpose, (K, N)."""
    data, points = b.data, b.zero_point
    key = (
        a.shape, a.dtype, data.shape, b.layout.interned_key, b.recipe.interned_key, out_dtype, data.device,
        None if bias is None else (bias.shape, bias.dtype), None if points is None else points.dtype, b.global_scale is None,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        checks.check_matmul(a, b, bias)
        # Zero-points of other libraries may have any dtype, which no fact of a call says.
        taken = points is None or points.dtype == torch.uint8
        call = _calls.keep(key, Call(a, b, bias, output_dtype(out_dtype)) if taken else composites.matmul_plain)
    if not isinstance(call, Call):
        return call(a, b, bias, out_dtype, out)
    if elsewhere(call.index):
        with torch.cuda.device(call.index):
            return call(a, b, bias, out)
    return call(a, b, bias, out)


#: Prepared calls, by the facts that they depend on.
_calls = Remembered()


class _Weight(ctypes.Structure):
    """The kernels' `Weight`."""

    _fields_ = (
        ("chunks", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("tensor_scale", ctypes.c_void_p),
        ("factor", ctypes.c_float),
        ("divides", ctypes.c_int),
    )


class Call:
    """What products of equal shapes, dtypes and recipe have in common: a kernel and its arguments."""

    def __init__(self, a: Any, b: ScaledTensor, bias: Any, out_dtype: str, config: Config | None = None) -> None:
        """config: instead of the one that is chosen."""
        k, n = b.shape
        fmt, block = b.recipe.format, b.layout.plain.block(-2)
        operand = plans.operand_of(fmt, block)
        assert not isinstance(operand, str), operand  # `accepts` has asked
        self.device, self.operand, self.lead = b.data.device, operand, tuple(a.shape[:-1])
        self.m, self.n, self.k = a.shape[:-1].numel(), n, k
        self.act, self.out_dtype = dtype_name(a), out_dtype
        self.dtype = getattr(torch, out_dtype)
        self.index = index_of(self.device)
        self.allocated = allocator((*self.lead, n), self.dtype, self.device)
        name = torch.cuda.get_device_name(self.device)
        self.config = config or plans.config_of(operand, codecs_of(fmt), self.m, n, k, name)
        self.function = function(operand, self.config, self.act, out_dtype, None if bias is None else dtype_name(bias), self)
        self.weight = _Weight(None, None, None, operand.factor, int(operand.divides))
        self.x, self.bias, self.y = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.ldx, self.ldy = ctypes.c_int(), ctypes.c_int(n)
        sizes = [*map(ctypes.c_int, (self.m, n, k)), self.ldx, self.ldy]
        self.map, self.maps = TensorMap(), dict[tuple[int, ...], TensorMap]()
        values = [self.weight, *([self.map] if self.config.wide else []), self.x, self.bias, self.y, *sizes]
        grid, threads, split = self.config.grid(self.m, n), self.config.threads, self.config.split
        self.launches = [self.function.prepare(grid, threads, values, 0, split, early) for early in (False, True)]
        self.turn = threading.Lock()  # the arguments of a launch are set in place
        self.pitches = 0, n

    def __call__(self, a: Any, b: ScaledTensor, bias: Any, out: Any) -> Any:
        """The product, on the current device."""
        address, m, n, k = a.data_ptr(), self.m, self.n, self.k
        if k % 8 or address % 16 or not a.is_contiguous():
            a = self._activations(a)
            address, pitch = a.data_ptr(), a.stride(0) if m > 1 else a.shape[1]
        else:
            pitch = k
        if out is None:
            y, pitches = self.allocated(), (pitch, n)
        else:
            y = out if self._writable(out) else empty((m, n), self.dtype, self.device)
            pitches = pitch, y.stride(0) if m > 1 else n
        data, rows, tensor_scale = b.data, b.scale.contiguous(), b.global_scale
        chunks = data.data_ptr()
        if chunks % 16 or not data.is_contiguous():
            data = data.clone(memory_format=torch.contiguous_format)
            chunks, launch = data.data_ptr(), self.launches[False]
        else:
            launch = self.launches[_settled(data)]
        if bias is not None:
            bias = bias.contiguous()
        with self.turn:
            weight = self.weight
            weight.chunks, weight.rows = chunks, rows.data_ptr()
            if tensor_scale is not None:
                weight.tensor_scale = tensor_scale.data_ptr()
            if bias is not None:
                self.bias.value = bias.data_ptr()
            self.x.value, self.y.value = address, y.data_ptr()
            if pitches != self.pitches:
                self.pitches = self.ldx.value, self.ldy.value = pitches
            if self.config.wide:
                self._describe(address, pitch)
            launch.config.stream = stream_of(self.index)
            launch()
        if out is None or y is out:
            return y
        if len(self.lead) != 1:
            y = y.view(*self.lead, n)
        return reference.result(TORCH, y, self.out_dtype, out)

    def _writable(self, out: Any) -> bool:
        """Whether the kernel can write into `out`"""
        return (
            tuple(out.shape) == (self.m, self.n)
            and out.dtype == self.dtype
            and out.device == self.device
            and out.stride(1) == 1
            and (self.m == 1 or out.stride(0) >= self.n)
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

    def _describe(self, *place: int) -> None:
        """Describe the activations at an address, with rows so many elements apart, to the copy engine."""
        found = self.maps.get(place)
        if found is None:
            if len(self.maps) >= _PLACES:
                self.maps.clear()
            box = self.config.batch, 64
            found = driver().tensor_map(place[0], self.act, (self.m, self.k), place[1:], box, 128, 128)
            self.maps[place] = found
        ctypes.memmove(self.map.words, found.words, ctypes.sizeof(TensorMap))


#: Addresses of activations that are remembered for each call.
_PLACES = 256


def _settled(data: Any) -> bool:
    """Whether the weight was written before the kernel ahead: only then may it be read before that one ends.

    A weight that was changed counts as written just now at its next product.
    """
    version = 0 if data.is_inference() else data._version
    if getattr(data, "_breccia_multiplied", None) == version:
        return True
    data._breccia_multiplied = version
    return False


def function(operand: Operand, config: Config, act: str, out: str, bias: str | None, call: Any) -> Any:
    """The compiled kernel. call: has the device and m."""
    kind, headers = "small", ()
    if config.wide:
        kind, headers = "wide", (("wgmma.cuh", plans.wgmma_header(config.batch)),)
    source = program.source_of(f"weight_only_{kind}.cu", headers)
    macros = plans.macros_of(operand, config, act, out, bias)
    return program.function(source, f"weight_only_{kind}", macros, config.shared(operand, call.m), call.device)
