"""Products as they run: the kernels of a plan, prepared once for calls with equal facts, on tensors of torch."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch

from breccia import ShapeError
from breccia.backend import dtype_name

from ..operands import writable
from ..specs import Unsupported
from .cache import Remembered
from .device import allocator, elsewhere, index_of, stream_of

#: f(stream, a, b, added, to): enqueues what writes the result for a and b into `to`, on the current device. added: the bias, or
#: the offsets of groups, or None. Returns None, or the result where torch allocates it: `to` is None then.
Enqueue = Callable[[int, Any, Any, Any, Any], Any]


class Executable:
    """An op whose kernels are compiled and loaded, for operands with equal facts: it allocates the result, and launches.

    rows: rows of a result that a kernel writes may lie apart. allocates: whether torch does, within `enqueue`. scratch: whether
    `enqueue` takes memory from torch, for copies of operands or decoded ones. plan: what was prepared, for tests and
    benchmarks.
    """

    __slots__ = ("allocated", "device", "dtype", "enqueue", "index", "plan", "rows", "scratch", "shape")

    def __init__(
        self, device: torch.device, shape: tuple[int, ...], dtype: str, enqueue: Enqueue, plan: Any = None, rows: bool = False,
        allocates: bool = False, scratch: bool = False,
    ) -> None:  # fmt: skip
        self.device, self.shape, self.dtype = device, shape, getattr(torch, dtype)
        self.index = index_of(device)
        self.allocated: Callable[[], Any] = NoneType if allocates else allocator(shape, self.dtype, device)
        self.enqueue, self.plan, self.rows, self.scratch = enqueue, plan, rows, scratch

    def __call__(self, a: Any, b: Any, added: Any, out: Any) -> Any:
        """The product, in `out` if given. Raises ShapeError where `out` cannot hold it."""
        if elsewhere(self.index):
            with torch.cuda.device(self.index):
                return self(a, b, added, out)
        if out is None:
            to = self.allocated()
            own = self.enqueue(stream_of(self.index), a, b, added, to)
            return to if own is None else own
        check_out(out, self.shape, self.dtype)
        to = out if self._writable(out) else self.allocated()
        own = self.enqueue(stream_of(self.index), a, b, added, to)
        return out if to is out else out.copy_(to if own is None else own)

    def _writable(self, out: Any) -> bool:
        if self.allocated is NoneType:
            return False
        if not self.rows:
            return writable(out, self.shape, self.dtype, self.device)
        rows, columns = out.shape[0], out.shape[-1]
        apart = out.ndim == 2 and out.stride(1) == 1 and (rows == 1 or out.stride(0) >= columns)
        return out.device == self.device and (apart or out.is_contiguous())


def check_out(out: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ShapeError unless `out` can hold the result."""
    if tuple(out.shape) != shape or out.dtype != dtype:
        actual = f"{tuple(out.shape)} and {dtype_name(out)}"
        raise ShapeError(f"out= must have shape {shape} and dtype {str(dtype).removeprefix('torch.')}; got {actual}.")


def remembered(executables: Remembered, key: Any, make: Callable[[], Executable]) -> Executable | str:
    """The executable for calls with the facts of a key; or the reason, where `make` raises Unsupported."""
    known = executables.get(key)
    if known is None:
        try:
            known = make()
        except Unsupported as e:
            known = str(e)
        executables.keep(key, known)
    return known
