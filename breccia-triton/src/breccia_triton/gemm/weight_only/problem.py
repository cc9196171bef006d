"""What products of activations and a weight in storage "mma_16x128" have in common: their facts, operands and arguments."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from breccia import ScaledTensor
from breccia.backend import Block, dtype_name

from ...launch.executable import Enqueue, Executable
from . import plans as weight_plans
from .plans import WeightFormat


class Weight(ctypes.Structure):
    """The kernels' `Weight`."""

    _fields_ = (
        ("chunks", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("tensor_scale", ctypes.c_void_p),
        ("factor", ctypes.c_float),
        ("divides", ctypes.c_int),
    )

    @classmethod
    def of(cls, weight_format: WeightFormat) -> Weight:
        """One without addresses."""
        return cls(None, None, None, weight_format.factor, int(weight_format.divides))

    def slots(self, weight_format: WeightFormat) -> list[Any]:
        """Its addresses that calls set, in the order of `stored`: chunks, flags and the tensor's scale if there is one."""
        return [(self, "chunks"), (self, "rows"), *([(self, "tensor_scale")] if weight_format.global_scale else [])]


@dataclass(frozen=True)
class Problem:
    """A product of activations (..., K) by a weight's transpose (K, N), of which there may be one for each group of rows.

    act, out, bias: dtypes by name; bias is None where there is none. block: of the weight's scales, along K.
    """

    format: WeightFormat
    block: Block
    lead: tuple[int, ...]
    m: int
    n: int
    k: int
    act: str
    out: str
    bias: str | None
    device: torch.device

    @staticmethod
    def of(a: Any, b: ScaledTensor, bias: Any, out_dtype: str) -> Problem:
        k, n = b.shape[-2:]
        added = None if bias is None else dtype_name(bias)
        block, lead = b.layout.plain.block(-2), tuple(a.shape[:-1])
        return Problem(
            weight_format_in(b), block, lead, a.shape[:-1].numel(), n, k, dtype_name(a), out_dtype, added, b.data.device
        )  # fmt: skip

    def executable(self, enqueue: Enqueue, plan: Any, scratch: bool = False) -> Executable:
        """The product by `enqueue`, whose kernels write rows that lie apart. scratch: it takes memory for a decoded weight."""
        return Executable(
            self.device, (*self.lead, self.n), self.out, enqueue, plan, rows=True, scratch=scratch or self.k % 8 != 0
        )

    def activations(self, a: Any) -> tuple[Any, int]:
        """(`a` with adjacent numbers in its rows, which begin at multiples of 16 bytes; numbers from one row to the next)."""
        if not self.k % 8 and a.is_contiguous() and a.data_ptr() % 16 == 0:
            return a, self.k
        x = a if a.ndim == 2 else a.reshape(self.m, self.k)
        if self.k % 8:
            x = torch.nn.functional.pad(x, (0, -self.k % 8))
        else:
            rows = self.m == 1 or (x.stride(0) % 8 == 0 and x.stride(0) >= self.k)
            if x.stride(1) != 1 or not rows or x.data_ptr() % 16:
                x = x.clone(memory_format=torch.contiguous_format)
        return x, x.stride(0) if self.m > 1 else x.shape[1]

    def pitch(self, y: Any) -> int:
        """Numbers from one row of a result to the next."""
        return self.n if y.is_contiguous() else y.stride(0)


def sizes(*numbers: int) -> list[Any]:
    """Integers as arguments of a kernel."""
    return [*map(ctypes.c_int, numbers)]


class Launches(dict[Any, Any]):
    """What `prepare` returns, by its arguments: `launches[ldx, ldy]`. They are few, distances of rows."""

    def __init__(self, prepare: Callable[..., Any]) -> None:
        super().__init__()
        self._prepare = prepare

    def __missing__(self, facts: tuple[Any, ...]) -> Any:
        prepared = self[facts] = self._prepare(*facts)
        return prepared


def weight_format_in(b: ScaledTensor) -> WeightFormat:
    """The format of a weight's transpose, as the kernels know it."""
    weight_format = weight_plans.weight_format_of(b.recipe.format, b.layout.plain.block(-2))
    assert not isinstance(weight_format, str), weight_format  # `accepts` has asked
    return weight_format


def stored(b: ScaledTensor) -> tuple[Any, Any, bool]:
    """(The chunks of a weight, its flags, whether the chunks were written before the kernel ahead.)"""
    data = b.data
    settled, rows = _settled(data), b.scale.contiguous()
    if data.data_ptr() % 16 or not data.is_contiguous():
        data, settled = data.clone(memory_format=torch.contiguous_format), False
    return data, rows, settled


def addresses_of(data: Any, rows: Any, global_scale: Any) -> tuple[int, ...]:
    """The numbers for `Weight.slots`."""
    if global_scale is None:
        return data.data_ptr(), rows.data_ptr()
    return data.data_ptr(), rows.data_ptr(), global_scale.data_ptr()


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
