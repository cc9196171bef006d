"""Products of activations and weights in storage "mma_16x128" on CUDA tensors of torch; see cuda/weight_only.cuh.

What a call is compiled for is decided once for its shapes and dtypes; a call then passes addresses.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from typing import Any

import torch

from breccia import ScaledTensor
from breccia.backend import FLOAT32, ProductOptions, checks, dtype_name
from breccia.internal import storages

from . import weight_plans as plans
from .choices import codecs_of, name_of
from .cuda import compiler, program
from .decoded_matmul import DecodedCall, DecodedCodesCall
from .launch import Remembered, elsewhere, on, stream_of
from .operands import need_one_device, parts_of
from .weight_plans import Config, Operand
from .weight_products import Product, operand_in, stored


def weight_only_matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`a @ b + bias` as `breccia.matmul` documents it. a: (..., M, K); b: a weight's transpose, (K, N)."""
    out_dtype, bias, out = options
    data, points, global_scale = b.data, b.zero_point, b.global_scale
    key = (
        a.shape, a.dtype, data.shape, b.layout.interned_key, b.recipe.interned_key, out_dtype, data.device,
        None if bias is None else (bias.shape, bias.dtype), None if points is None else points.dtype,
        None if global_scale is None else global_scale.device,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        checks.check_matmul(a, b, bias)
        need_one_device(a.device, [*parts_of("b", b), ("bias", bias)])
        # Zero-points of other libraries may have any dtype, which no fact of a call says.
        taken = points is None or points.dtype == torch.uint8
        call = _calls.keep(key, prepared(a, b, bias, out_dtype) if taken else storages.matmul)
    if not isinstance(call, Call | DecodedCall | DecodedCodesCall):
        return call(a, b, options)
    if elsewhere(call.index):
        with torch.cuda.device(call.index):
            return call(a, b, bias, out)
    return call(a, b, bias, out)


def weight_only_grouped(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """`grouped_matmul` as `breccia.grouped_matmul` documents it. The device reads `offsets`; the host waits for nothing.

    a: (M, K). b: the weights' transposes, (E, K, N). offsets: (E,).
    """
    out_dtype, _, out = options
    data, points, global_scale = b.data, b.zero_point, b.global_scale
    key = (
        "grouped", a.shape, a.dtype, data.shape, b.layout.interned_key, b.recipe.interned_key, out_dtype, data.device,
        offsets.shape, offsets.dtype, None if points is None else points.dtype,
        None if global_scale is None else global_scale.device,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        checks.check_grouped(a, b, offsets)
        need_one_device(a.device, [*parts_of("b", b), ("offsets", offsets)])
        taken = points is None or points.dtype == torch.uint8
        call = _calls.keep(key, GroupedCall(a, b, out_dtype) if taken else storages.grouped_matmul)
    if not isinstance(call, GroupedCall):
        return call(a, b, offsets, options)
    with on(call.device):
        return call(a, b, offsets, out)


def prepared(a: Any, b: ScaledTensor, bias: Any, out_dtype: str) -> Call | DecodedCall | DecodedCodesCall:
    """The call that measured configurations or the rule choose."""
    operand, (k, n), m, act = operand_in(b), b.shape, a.shape[:-1].numel(), dtype_name(a)
    direct = bias is None and act == out_dtype == "bfloat16"
    name = name_of(torch.cuda.get_device_properties(b.data.device))
    config = plans.config_of(operand, codecs_of(b.recipe.format), m, n, k, name, act, direct)
    if isinstance(config, plans.Decoded):
        return DecodedCall(a, b, out_dtype)
    if isinstance(config, plans.DecodedCodes):
        return DecodedCodesCall(a, b, bias, out_dtype)
    return Call(a, b, bias, out_dtype, config)


#: Prepared calls, by the facts that they depend on.
_calls = Remembered()


class _Groups(ctypes.Structure):
    """The kernels' `Groups`."""

    _fields_ = (
        ("ends", ctypes.c_void_p),
        ("chunks", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("tensor_scale", ctypes.c_uint64),
        ("count", ctypes.c_int),
    )


class Call(Product):
    """A kernel of `matmul` and its arguments."""

    def __init__(self, a: Any, b: ScaledTensor, bias: Any, out_dtype: str, config: Config) -> None:
        super().__init__(a, b, out_dtype)
        self.config = config
        kind = None if bias is None else dtype_name(bias)
        self.function = function(self.operand, self.config, self.act, out_dtype, kind, self)
        values = [self.weight, *([self.map] if self.config.wide else []), self.x, self.bias, self.y, *self.sizes]
        grid, threads, cluster = self.config.grid(self.m, self.n), self.config.threads, self.config.split
        self.launches = [self.function.prepare(grid, threads, values, 0, cluster, early) for early in (False, True)]

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
            y = self._result(out)
            pitches = pitch, y.stride(0) if m > 1 else n
        tensor_scale = b.global_scale
        data, rows, settled = stored(b)
        if bias is not None:
            bias = bias.contiguous()
        launch = self.launches[settled]
        with self.turn:
            self.need_free()
            self.busy = True
            try:
                weight = self.weight
                weight.chunks, weight.rows = data.data_ptr(), rows.data_ptr()
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
            finally:
                self.busy = False
        return y if out is None else self._returned(y, out)


class GroupedCall(Product):
    """A kernel of `grouped_matmul` and its arguments. It reads weights after the kernel ahead, which may write the offsets."""

    def __init__(self, a: Any, b: ScaledTensor, out_dtype: str, config: Config | None = None) -> None:
        """config: instead of the one that is chosen."""
        super().__init__(a, b, out_dtype)
        groups = b.shape[0]
        self.config = config or plans.grouped_config_of(self.operand, self.m, groups, self.n, self.k)
        self.function = function(self.operand, self.config, self.act, out_dtype, None, self, grouped=True)
        self.groups = _Groups(count=groups)
        map_ = [self.map] if self.config.wide else []
        values = [self.weight, self.groups, *map_, self.x, self.bias, self.y, *self.sizes]
        grid, cluster = self.config.grid_of_groups(self.m, groups, self.n), self.config.split
        self.launch = self.function.prepare(grid, self.config.threads, values, 0, cluster, True)

    def __call__(self, a: Any, b: ScaledTensor, offsets: Any, out: Any) -> Any:
        """The product, on the current device."""
        x, y = self._activations(a), self._result(out)
        ends = offsets.to(torch.int32).contiguous()
        data, rows, tensor_scale = _matrices(b.data, 3), _matrices(b.scale, 2), b.global_scale
        with self.turn:
            self.need_free()
            self.busy = True
            try:
                weight, groups = self.weight, self.groups
                weight.chunks, weight.rows = data.data_ptr(), rows.data_ptr()
                groups.ends, groups.chunks, groups.rows = ends.data_ptr(), data.stride(0), rows.stride(0)
                if tensor_scale is not None:
                    weight.tensor_scale = tensor_scale.data_ptr()
                    groups.tensor_scale = tensor_scale.stride(0) if tensor_scale.ndim else 0
                self._set(x, y)
                self.launch.config.stream = stream_of(self.index)
                self.launch()
            finally:
                self.busy = False
        return self._returned(y, out)


def _matrices(x: Any, axes: int) -> Any:
    """`x` with its last axes in C order, at multiples of 16 bytes where they are chunks; the matrices may lie apart."""
    strides, length = [], 1
    for n in reversed(x.shape[1:]):
        strides.append(length)
        length *= n
    if x.stride()[1:] == tuple(reversed(strides)) and (axes == 2 or (x.data_ptr() % 16 == 0 == x.stride(0) % 16)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def function(
    operand: Operand, config: Config, act: str, out: str, bias: str | None, call: Any, grouped: bool = False
) -> Any:  # fmt: skip
    """The compiled kernel. call: has the device and m."""
    macros = plans.macros_of(operand, config, act, out, bias, grouped)
    # A part of the rows of a group may have as many as a batch.
    shared = config.shared(operand, config.batch if grouped else call.m)
    return program.function(source_of(config), f"weight_only_{config.kind}", macros, shared, call.device)


def source_of(config: Config) -> compiler.Source:
    """The source of a configuration's kernel."""
    headers = (("wgmma.cuh", plans.wgmma_header(config.batch)),) if config.wide else ()
    return program.source_of(f"weight_only_{config.kind}.cu", headers)
