"""Memory and streams of the devices of torch, with little work per call."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A new tensor in C order; on CUDA, of the current device."""
    if device.type != "cuda" or _empty is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return _empty(shape, _strides(shape), dtype)


def allocator(shape: Sequence[int], dtype: torch.dtype, device: torch.device, columns: bool = False) -> Callable[[], Any]:
    """What `empty` of these arguments calls. columns: they are contiguous, not the rows."""
    if columns:
        *lead, along = _strides((*shape[:-2], shape[-1], shape[-2]))
        strides = (*lead[:-1], along, lead[-1])
        if device.type != "cuda" or _empty is None:
            return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
        return partial(_empty, shape, strides, dtype)
    if device.type != "cuda" or _empty is None:
        return partial(torch.empty, shape, dtype=dtype, device=device)
    return partial(_empty, shape, _strides(shape), dtype)


def workspace(device: torch.device, stream: int) -> tuple[Any, Any]:
    """Int32 arrays on a device for the use of one thread and stream: two zeros, which a kernel has to leave as zeros; and one
    number, which a kernel leaves to the next one."""
    if device.type != "cuda":
        return _workspace(device)
    if torch.cuda.is_current_stream_capturing():  # a graph may be replayed on any stream
        return _unused.taken(device)
    arrays = _workspaces.arrays.get((device, stream))
    if arrays is None:
        _unused.provide(device)
        arrays = _workspaces.arrays[device, stream] = _workspace(device)
    return arrays


def _workspace(device: torch.device) -> tuple[Any, Any]:
    return _parts(torch.zeros(_LENGTH, dtype=torch.int32, device=device))


def _parts(zeros: Any) -> tuple[Any, Any]:
    return zeros[:2], zeros[4:5]  # 16 divides the address of both


#: Numbers of a workspace.
_LENGTH = 8


class _Workspaces(threading.local):
    """The workspaces of one thread."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[torch.device, int], tuple[Any, Any]] = {}


class _Unused:
    """Workspaces for calls that are captured in graphs: each belongs to one call of one graph.

    They hold zeros before the capture. A new one would be filled with zeros by every replay, which takes about a microsecond.
    """

    #: How many a device has. Later calls fill their own with zeros.
    COUNT = 4096

    def __init__(self) -> None:
        self._zeros: dict[torch.device, tuple[Any, Iterator[int]]] = {}

    def provide(self, device: torch.device) -> None:
        """Make the workspaces of a device. Called outside captures."""
        if device not in self._zeros:
            zeros = torch.zeros(self.COUNT, _LENGTH, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # graphs are replayed on other streams
            self._zeros[device] = zeros, iter(range(self.COUNT))

    def taken(self, device: torch.device) -> tuple[Any, Any]:
        """A workspace that no other call has."""
        zeros, places = self._zeros.get(device, (None, iter(())))
        place = next(places, None)
        return _workspace(device) if place is None else _parts(zeros[place])


_unused = _Unused()
_workspaces = _Workspaces()


#: What the code of torch.compile allocates with: a third of the time of `torch.empty`.
_empty: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # pyright: ignore[reportAttributeAccessIssue]


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(reversed((*shape[1:], 1)), mul))[::-1] if shape else ()


def index_of(device: torch.device) -> int | None:
    """The index of a CUDA device; None for others, on which kernels are interpreted."""
    return device.index if device.type == "cuda" else None


def elsewhere(index: int | None) -> bool:
    """Whether the device with an index, as `index_of` returns it, has to be made the current one"""
    return index is not None and index != _current_index()


def stream_of(index: int | None) -> int:
    """The current stream of the device with an index."""
    return 0 if index is None else _current_stream(index)


#: torch without CUDA lacks them.
_current_index: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """The current stream of a device."""
    return stream_of(index_of(device))


def on(device: torch.device) -> Any:
    """A context in which a device is the current one."""
    return torch.cuda.device(device) if elsewhere(index_of(device)) else _HERE


_HERE = nullcontext()
