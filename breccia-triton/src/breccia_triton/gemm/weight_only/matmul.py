"""Products of activations and weights in storage "mma_16x128" on CUDA tensors of torch; see weight_only.cuh.

What a call is compiled for is decided once for its shapes and dtypes; a call then passes addresses.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from typing import Any

import torch

from breccia import ScaledTensor
from breccia.backend import FLOAT32, ProductOptions, checks
from breccia.internal import storages

from ...launch import compiler, program
from ...launch.cache import Remembered
from ...launch.driver import MovableMap, driver
from ...launch.executable import Executable
from ...operands import need_one_device, parts_of
from ...tuning.choices import codecs_of
from ...tuning.measurements import name_of
from .. import wgmma
from . import decoded, plans
from .plans import Config
from .problem import Launches, Problem, Weight, addresses_of, sizes, stored


def weight_only_matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`a @ b + bias` as `breccia.matmul` documents it. a: (..., M, K); b: a weight's transpose, (K, N)."""
    out_dtype, bias, out = options
    call = prepared(a, b, bias, out_dtype)
    return call(a, b, bias, out) if isinstance(call, Executable) else call(a, b, options)


def weight_only_grouped(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """`grouped_matmul` as `breccia.grouped_matmul` documents it. The device reads `offsets`; the host waits for nothing.

    a: (M, K). b: the weights' transposes, (E, K, N). offsets: (E,).
    """
    out_dtype, _, out = options
    call = prepared(a, b, offsets, out_dtype, True)
    return call(a, b, offsets, out) if isinstance(call, Executable) else call(a, b, offsets, options)


def prepared(a: Any, b: Any, added: Any, out_dtype: str, of_groups: bool = False) -> Any:
    """The product of operands with these facts, made where no earlier call had them; or the generic algorithm.

    added: the bias or None, or the offsets of groups.
    """
    data, points, global_scale = b.data, b.zero_point, b.global_scale
    key = (
        of_groups, a.shape, a.dtype, data.shape, b.layout.interned_key, b.recipe.interned_key, out_dtype, a.device, data.device,
        None if added is None else (added.shape, added.dtype, added.device), None if points is None else points.dtype,
        None if global_scale is None else global_scale.device,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        (checks.check_grouped if of_groups else checks.check_matmul)(a, b, added)
        need_one_device(a.device, [*parts_of("b", b), ("offsets" if of_groups else "bias", added)])
        if points is not None and points.dtype != torch.uint8:
            # Zero-points of other libraries may have any dtype, which no fact of a call says.
            call = storages.grouped_matmul if of_groups else storages.matmul
        else:
            call = grouped(a, b, out_dtype) if of_groups else executable(a, b, added, out_dtype)
        _calls.keep(key, call)
    return call


def repeated(a: Any, b: Any, bias: Any, out_dtype: str) -> Executable | None:
    """The call that repeats this product for a layer of torch; None where the generic algorithm computes it."""
    call = prepared(a, b, bias, out_dtype)
    return call if isinstance(call, Executable) else None


def executable(a: Any, b: ScaledTensor, bias: Any, out_dtype: str, config: plans.Algorithm | None = None) -> Executable:
    """The product under a configuration: by default the one that measurements or the rule choose."""
    problem = Problem.of(a, b, bias, out_dtype)
    if config is None:
        direct = bias is None and problem.act == out_dtype == "bfloat16"
        name = name_of(torch.cuda.get_device_properties(problem.device))
        sides = problem.m, problem.n, problem.k
        config = plans.config_of(problem.format, codecs_of(b.recipe.format), *sides, name, problem.act, direct)
    if isinstance(config, plans.Decoded):
        return decoded.decoded(problem)
    return decoded.decoded_codes(problem) if isinstance(config, plans.DecodedCodes) else _fused(problem, config)


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


def _fused(problem: Problem, config: Config) -> Executable:
    """The product by one kernel, which decodes in registers."""
    weight_format, kernel = problem.format, function(problem, config)
    shape = config.grid(problem.m, problem.n), config.threads

    @Launches
    def launches(ldx: int, ldy: int) -> list[Any]:
        """The launch that reads the weight after the kernel ahead of it has ended, and the one that reads it before."""
        runs: list[Any] = []
        for early in (False, True):
            weight, arguments, slots = _arguments(problem, config, ldx, ldy)
            runs.append(
                kernel.prepare(*shape, [weight, *arguments], [*weight.slots(weight_format), *slots], config.split, early).run
            )
        return runs

    n, k = problem.n, problem.k

    def enqueue(stream: int, a: Any, b: Any, added: Any, to: Any) -> None:
        x = a.data_ptr()
        if k % 8 or x % 16 or not a.is_contiguous():
            a, ldx = problem.activations(a)
            x = a.data_ptr()
        else:
            ldx = k
        data, rows, settled = stored(b)
        run = launches[ldx, n if to.is_contiguous() else to.stride(0)][settled]
        scale = b.global_scale
        if added is None and scale is None:  # most calls, written out: they are bound by the host
            return run(stream, data.data_ptr(), rows.data_ptr(), x, to.data_ptr())
        added = None if added is None else added.contiguous()
        last = () if added is None else (added.data_ptr(),)
        run(stream, *addresses_of(data, rows, scale), x, to.data_ptr(), *last)

    return problem.executable(enqueue, config)


def _arguments(problem: Problem, config: Config, ldx: int, ldy: int) -> tuple[Weight, list[Any], list[Any]]:
    """(The weight, the other arguments, their slots: activations, result, and the bias if there is one.)"""
    x, bias, y, m, k = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), problem.m, problem.k
    maps: list[Any] = []
    if config.wide:
        maps = [MovableMap(driver(), problem.act, (m, k), (ldx,), (config.batch, 64), 128, 128)]
    arguments = [*maps, x, bias, y, *sizes(m, problem.n, k, ldx, ldy)]
    return Weight.of(problem.format), arguments, [[x, *maps], y, *([] if problem.bias is None else [bias])]


def grouped(a: Any, b: ScaledTensor, out_dtype: str, config: Config | None = None) -> Executable:
    """The product of groups of rows under a configuration: by default the one that the rule chooses.

    It reads weights after the kernel ahead, which may write the offsets.
    """
    problem, count = Problem.of(a, b, None, out_dtype), b.shape[0]
    weight_format, m, n = problem.format, problem.m, problem.n
    chosen = config or plans.grouped_config_of(weight_format, m, count, n, problem.k)
    kernel, shape = function(problem, chosen, grouped=True), (chosen.grid_of_groups(m, count, n), chosen.threads)

    @Launches
    def launches(ldx: int, ldy: int) -> Any:
        weight, arguments, slots = _arguments(problem, chosen, ldx, ldy)
        groups = _Groups(count=count)
        slots += [(groups, "ends"), (groups, "chunks"), (groups, "rows")]
        slots += [(groups, "tensor_scale")] if weight_format.global_scale else []
        values = [weight, groups, *arguments]
        return kernel.prepare(*shape, values, [*weight.slots(weight_format), *slots], chosen.split, True).run

    def enqueue(stream: int, a: Any, b: Any, offsets: Any, to: Any) -> None:
        x, ldx = problem.activations(a)
        ends, scale = offsets.to(torch.int32).contiguous(), b.global_scale
        data, rows = _matrices(b.data, 3), _matrices(b.scale, 2)
        apart = [data.stride(0), rows.stride(0)]
        if scale is not None:
            apart.append(scale.stride(0) if scale.ndim else 0)
        weight = addresses_of(data, rows, scale)
        launches[ldx, problem.pitch(to)](stream, *weight, x.data_ptr(), to.data_ptr(), ends.data_ptr(), *apart)

    return problem.executable(enqueue, chosen)


def _matrices(x: Any, axes: int) -> Any:
    """`x` with its last axes in C order, at multiples of 16 bytes where they are chunks; the matrices may lie apart."""
    strides, length = [], 1
    for n in reversed(x.shape[1:]):
        strides.append(length)
        length *= n
    if x.stride()[1:] == tuple(reversed(strides)) and (axes == 2 or (x.data_ptr() % 16 == 0 == x.stride(0) % 16)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def function(problem: Problem, config: Config, grouped: bool = False) -> Any:
    """The compiled kernel."""
    macros = plans.macros_of(problem.format, config, problem.act, problem.out, problem.bias, grouped)
    # A part of the rows of a group may have as many as a batch.
    shared = config.shared(problem.format, config.batch if grouped else problem.m)
    return program.function(source_of(config), f"weight_only_{config.kind}", macros, shared, problem.device)


def source_of(config: Config) -> compiler.CudaSource:
    """The source of a configuration's kernel."""
    headers = (("wgmma.cuh", wgmma.header_for_registers(config.batch)),) if config.wide else ()
    return program.source_of(plans.SOURCES / f"weight_only_{config.kind}.cu", headers)
