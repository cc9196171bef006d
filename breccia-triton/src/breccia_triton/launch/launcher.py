"""Compiling and launching Triton kernels with little work per call.

Triton's own launch path inspects every argument at every call. Here the constants, the types of arguments and their alignment
are decided once; a call passes addresses and integers. Compiled kernels are cached on disk by Triton.
"""

# pyright: basic, reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from functools import lru_cache, partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, ClassVar

import torch
import triton
from triton.compiler import ASTSource
from triton.runtime import cache

from ..facts import INTERPRETED
from .generated import defined
from .package_key import remembered
from .triton_launch import WARP, Launch

#: Versions of Triton whose launcher has the arguments that `Launcher` passes.
_KNOWN = "3.6."
if not INTERPRETED and triton.__version__.startswith(_KNOWN):
    # The function that Triton's compiler calls for its key. Half of the time of the first call of a process.
    cache.triton_key = remembered(cache.triton_key, Path(triton.__file__).parent, triton.__version__)


class Launcher:
    """A prepared launch, compiled for one device.

    run: f(stream, *values), which enqueues the kernel on the current device. values: as of `__call__`; none are interpreted.
    """

    def __init__(self, launch: Launch, target: Any = None) -> None:
        self.launch = launch
        self.names: Sequence[str] = launch.function.arg_names
        self.fixed = launch.fixed
        self.varying = [name for name in launch.arguments if name not in self.fixed]
        self.run: Callable[..., None] = self._interpreted if INTERPRETED else self._first
        if not INTERPRETED:
            arguments, constants = launch.arguments, launch.constants
            absent = {name: None for name in self.names if name not in arguments and name not in constants}
            values = {**constants, **absent}
            signature = {name: "constexpr" if name in values else arguments[name].type for name in self.names}
            divisible = {
                (i,): [["tt.divisibility", 16]] for i, n in enumerate(self.names) if n in arguments and arguments[n].aligned
            }
            self.key: Any = (
                launch.function, tuple(launch.arguments.items()), tuple(launch.constants.items()), launch.warps, launch.stages,
                launch.together, target,
            )  # fmt: skip
            self.compiled = _compiled.get(self.key)
            if self.compiled is None:
                source = ASTSource(launch.function, signature, values, divisible)
                options = launch.options(_wave() if target is None else target.warp_size)
                self.compiled = _compiled.keep(self.key, triton.compile(source, target=target, options=options))

    def __call__(self, stream: int, values: Iterable[Any]) -> None:
        """Launch on the current device. values: tensors' addresses and integers, in the order of `arguments`, but those of
        `launch.integers`, which are the same in every launch."""
        self.run(stream, *values)

    def _interpreted(self, stream: int, *values: Any) -> None:
        launch = self.launch
        rest = {name: launch.constants.get(name) for name in self.names if name not in launch.arguments}
        launch.function[launch.programs](**dict(zip(self.varying, values, strict=True)), **self.fixed, **rest)

    def _first(self, stream: int, *values: Any) -> None:
        """The first launch loads the module on the current device."""
        self.run = self._loaded()
        self.run(stream, *values)

    def _loaded(self) -> Callable[..., None]:
        place = self.key, torch.cuda.current_device()
        compiled = _modules.get(place)
        if compiled is None:
            compiled = _modules.keep(place, copy(self.compiled))  # loaded on one device
        launcher = compiled.run  # loads the module
        handle, metadata = compiled.function, compiled.packed_metadata
        hooks = (metadata, None, None, None)
        scratch = [getattr(launcher, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]
        if triton.__version__.startswith(_KNOWN) and scratch == [0, 0]:
            # Its compiled part, without the Python around it, which allocates memory that these kernels do not need.
            fixed = (handle, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *hooks)
            return self._written_out(launcher.launch, fixed)
        return self._written_out(launcher, (handle, *hooks))

    def _written_out(self, run: Any, fixed: Sequence[Any]) -> Callable[..., None]:
        """A function of the stream and the values alone. Its text has no numbers: they differ by lengths alone."""
        held = {f"_{n}": value for n, value in enumerate((*self.launch.programs, *fixed))}
        held |= {f"_{name}": number for name, number in self.fixed.items()}
        passed = [name if name in self.varying else f"_{name}" if name in self.fixed else "None" for name in self.names]
        first, rest = [f"_{n}" for n in range(3)], [f"_{n}" for n in range(3, 3 + len(fixed))]
        text = f"def run({', '.join(['_stream', *self.varying])}):\n    _run({', '.join([*first, '_stream', *rest, *passed])})"
        return defined(text, {**held, "_run": run})


def _wave() -> int:
    """Threads of a warp of the current device."""
    return WARP if torch.version.hip is None else torch.cuda.get_device_properties().warp_size


class Remembered(dict[Any, Any]):
    """What has been prepared, by the facts of calls. Where it is full, the oldest entry makes room."""

    _all: ClassVar[list[Remembered]] = []

    def __init__(self) -> None:
        super().__init__()
        self._all.append(self)

    @classmethod
    def forget(cls) -> None:
        """Let all of them start anew."""
        for each in cls._all:
            each.clear()

    def keep(self, key: Any, value: Any) -> Any:
        if len(self) >= _REMEMBERED:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread may have changed it meanwhile
                del self[next(iter(self))]
        self[key] = value
        return value


_REMEMBERED = 4096
#: Compiled kernels, by all that they are compiled for, and those that are loaded, by that and the device. A call with other
#: lengths alone takes the same one: Triton would look for it on disk, which takes milliseconds.
_compiled, _modules = Remembered(), Remembered()


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
