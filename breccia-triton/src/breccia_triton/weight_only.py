"""Products of activations and weights in storage "mma_16x128" on CUDA tensors of torch; see cuda/weight_only.cuh.

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
from .cuda import compiler, program
from .cuda.driver import TensorMap, driver
from .launch import Remembered, allocator, elsewhere, empty, index_of, on, stream_of
from .operands import need_one_device, parts_of
from .weight_plans import Config, Operand


def weight_only_matmul(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """`a @ b + bias` as `breccia.matmul` documents it. a: (..., M, K); b: a weight's transpose, (K, N)."""
    data, points, outer = b.data, b.zero_point, b.global_scale
    key = (
        a.shape, a.dtype, data.shape, b.layout.interned_key, b.recipe.interned_key, out_dtype, data.device,
        None if bias is None else (bias.shape, bias.dtype), None if points is None else points.dtype,
        None if outer is None else outer.device,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        checks.check_matmul(a, b, bias)
        need_one_device(a.device, [*parts_of("b", b), ("bias", bias)])
        # Zero-points of other libraries may have any dtype, which no fact of a call says.
        taken = points is None or points.dtype == torch.uint8
        call = _calls.keep(key, prepared(a, b, bias, output_dtype(out_dtype)) if taken else composites.matmul_plain)
    if not isinstance(call, Call | DecodedCall):
        return call(a, b, bias, out_dtype, out)
    if elsewhere(call.index):
        with torch.cuda.device(call.index):
            return call(a, b, bias, out)
    return call(a, b, bias, out)


def weight_only_grouped(a: Any, b: Any, offsets: Any, out_dtype: str = "float32", out: Any = None) -> Any:
    """`grouped_matmul` as `breccia.grouped_matmul` documents it. The device reads `offsets`; the host waits for nothing.

    a: (M, K). b: the weights' transposes, (E, K, N). offsets: (E,).
    """
    data, points, outer = b.data, b.zero_point, b.global_scale
    key = (
        "grouped", a.shape, a.dtype, data.shape, b.layout.interned_key, b.recipe.interned_key, out_dtype, data.device,
        offsets.shape, offsets.dtype, None if points is None else points.dtype, None if outer is None else outer.device,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        checks.check_grouped(a, b, offsets)
        need_one_device(a.device, [*parts_of("b", b), ("offsets", offsets)])
        taken = points is None or points.dtype == torch.uint8
        call = _calls.keep(key, GroupedCall(a, b, output_dtype(out_dtype)) if taken else composites.grouped_matmul_plain)
    if not isinstance(call, GroupedCall):
        return call(a, b, offsets, out_dtype, out)
    with on(call.device):
        return call(a, b, offsets, out)


def prepared(a: Any, b: ScaledTensor, bias: Any, out_dtype: str) -> Call | DecodedCall:
    """The call that measured configurations or the rule choose."""
    operand, (k, n), m = _operand(b), b.shape, a.shape[:-1].numel()
    direct = bias is None and dtype_name(a) == out_dtype == "bfloat16"
    name = torch.cuda.get_device_name(b.data.device)
    config = plans.config_of(operand, codecs_of(b.recipe.format), m, n, k, name, direct)
    return DecodedCall(a, b, out_dtype) if isinstance(config, plans.Decoded) else Call(a, b, bias, out_dtype, config)


def _operand(b: ScaledTensor) -> Operand:
    operand = plans.operand_of(b.recipe.format, b.layout.plain.block(-2))
    assert not isinstance(operand, str), operand  # `accepts` has asked
    return operand


#: Prepared calls, by the facts that they depend on.
_calls = Remembered()


class Weight(ctypes.Structure):
    """The kernels' `Weight`."""

    _fields_ = (
        ("chunks", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("tensor_scale", ctypes.c_void_p),
        ("factor", ctypes.c_float),
        ("divides", ctypes.c_int),
    )


class _Groups(ctypes.Structure):
    """The kernels' `Groups`."""

    _fields_ = (
        ("ends", ctypes.c_void_p),
        ("chunks", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("tensor_scale", ctypes.c_uint64),
        ("count", ctypes.c_int),
    )


class Product:
    """What products of equal shapes, dtypes and recipe have in common."""

    config: Config

    def __init__(self, a: Any, b: ScaledTensor, out_dtype: str) -> None:
        self.k, self.n = b.shape[-2:]
        self.operand = _operand(b)
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
        self.turn = threading.Lock()  # the arguments of a launch are set in place
        self.pitches = 0, self.n

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
        found = self.maps.get(place)
        if found is None:
            if len(self.maps) >= _PLACES:
                self.maps.clear()
            box = self.config.batch, 64
            found = driver().tensor_map(place[0], self.act, (self.m, self.k), place[1:], box, 128, 128)
            self.maps[place] = found
        ctypes.memmove(self.map.words, found.words, ctypes.sizeof(TensorMap))


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
        return y if out is None else self._returned(y, out)


class DecodedCall(Product):
    """A pass that decodes a weight to BF16, cuBLAS's product with BF16 activations, and a launch over rows with flags."""

    def __init__(self, a: Any, b: ScaledTensor, out_dtype: str) -> None:
        super().__init__(a, b, out_dtype)
        source, macros = program.source_of("weight_only_decode.cu"), plans.macros_of_decoding(self.operand)
        decode, mend = (program.function(source, f"weight_only_{name}", macros, 0, self.device) for name in ("decode", "mend"))
        self.values = ctypes.c_void_p()
        _, n, k, *_ = self.sizes
        rows, chunks = -(-self.n // plans.ROWS), -(-self.k // plans.COLUMNS)
        none, scales = ctypes.c_int(0), ctypes.c_void_p()  # they are part of the values
        values = [self.weight, self.values, scales, n, k, none, none, ctypes.c_int(CHUNKS)]
        self.decode = decode.prepare((rows, -(-chunks // CHUNKS), 1), 128, values)
        operands = [self.weight, self.x, self.bias, self.y, *self.sizes]
        self.mend = mend.prepare((rows, min(TURNS, -(-self.m // 64)), 1), 256, operands)

    def __call__(self, a: Any, b: ScaledTensor, bias: Any, out: Any) -> Any:
        """The product, on the current device. bias: None."""
        from .bf16_matmul import multiply

        x, y = self._activations(a), self._result(out)
        values = empty((self.n, self.k), torch.bfloat16, self.device)
        data, rows, _ = stored(b)
        with self.turn:
            self.weight.chunks, self.weight.rows = data.data_ptr(), rows.data_ptr()
            self.values.value, self.x.value, self.y.value = values.data_ptr(), x.data_ptr(), y.data_ptr()
            self.ldx.value, self.ldy.value = x.stride(0), y.stride(0)
            self.decode.config.stream = self.mend.config.stream = stream_of(self.index)
            self.decode()
            multiply(x, values.mT, y)
            self.mend()
        return self._returned(y, out)


#: Chunks of a block that decodes, one after the other; blocks along the rows of x that mend.
CHUNKS, TURNS = 4, 8


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
            weight, groups = self.weight, self.groups
            weight.chunks, weight.rows = data.data_ptr(), rows.data_ptr()
            groups.ends, groups.chunks, groups.rows = ends.data_ptr(), data.stride(0), rows.stride(0)
            if tensor_scale is not None:
                weight.tensor_scale = tensor_scale.data_ptr()
                groups.tensor_scale = tensor_scale.stride(0) if tensor_scale.ndim else 0
            self._set(x, y)
            self.launch.config.stream = stream_of(self.index)
            self.launch()
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

    A weight that was changed counts as written just now at its next product.
    """
    version = 0 if data.is_inference() else data._version
    if getattr(data, "_breccia_multiplied", None) == version:
        return True
    data._breccia_multiplied = version
    return False


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
