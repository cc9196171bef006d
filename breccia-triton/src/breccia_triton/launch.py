"""Compiling and launching Triton kernels with little work per call.

Triton's own launch path inspects every argument at every call. Here the constants, the types of arguments and their alignment
are decided once; a call passes addresses and integers. Compiled kernels are cached on disk by Triton.
"""

# pyright: basic, reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter, mul
from pathlib import Path
from typing import Any, ClassVar

import torch
import triton
from triton.compiler import ASTSource
from triton.runtime import cache

from .facts import INTERPRETED
from .package_key import remembered
from .prepare import Launch

#: Versions of Triton whose launcher has the arguments that `Launcher` passes.
_KNOWN = "3.6."
if not INTERPRETED and triton.__version__.startswith(_KNOWN):
    # The function that Triton's compiler calls for its key. Half of the time of the first call of a process.
    cache.triton_key = remembered(cache.triton_key, Path(triton.__file__).parent, triton.__version__)


class Launcher:
    """A prepared launch, compiled for one device."""

    def __init__(self, launch: Launch, target: Any = None) -> None:
        self.launch, self.programs = launch, launch.programs
        self.names: Sequence[str] = launch.function.arg_names
        self.given = list(launch.arguments)
        self._run: Any = None
        if not INTERPRETED:
            arguments, constants = launch.arguments, launch.constants
            absent = {name: None for name in self.names if name not in arguments and name not in constants}
            values = {**constants, **absent}
            signature = {name: "constexpr" if name in values else arguments[name].type for name in self.names}
            divisible = {
                (i,): [["tt.divisibility", 16]] for i, n in enumerate(self.names) if n in arguments and arguments[n].aligned
            }
            source = ASTSource(launch.function, signature, values, divisible)
            self.compiled = triton.compile(source, target=target, options=launch.options)
            # None comes first in the values, for parameters that are absent.
            self._placed = itemgetter(*(self.given.index(name) + 1 if name in arguments else 0 for name in self.names))

    def __call__(self, stream: int, values: Sequence[Any]) -> None:
        """Launch on the current device. values: tensors' addresses and integers, in the order of `arguments`."""
        if INTERPRETED:
            rest = {name: self.launch.constants.get(name) for name in self.names if name not in self.given}
            self.launch.function[self.programs](**dict(zip(self.given, values, strict=True)), **rest)
            return
        run = self._run or self._start()
        run(*self.programs, stream, *self._fixed, *self._placed((None, *values)))

    def _start(self) -> Any:
        compiled = self.compiled
        launcher = compiled.run  # loads the module on the current device
        handle, metadata = compiled.function, compiled.packed_metadata
        hooks = (metadata, None, None, None)
        scratch = [getattr(launcher, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]
        if triton.__version__.startswith(_KNOWN) and scratch == [0, 0]:
            # Its compiled part, without the Python around it, which allocates memory that these kernels do not need.
            self._fixed = (handle, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *hooks)
            self._run = launcher.launch
        else:
            self._fixed = (handle, *hooks)
            self._run = launcher
        return self._run


class Remembered(dict[Any, Any]):
    """What has been prepared, by the facts of calls; it starts anew when it is full."""

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
            self.clear()
        self[key] = value
        return value


_REMEMBERED = 4096


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A new tensor in C order; on CUDA, of the current device."""
    if device.type != "cuda" or _empty is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return _empty(shape, _strides(shape), dtype)


def workspace(device: torch.device, stream: int) -> Any:
    """Two int32 zeros on a device, which a kernel has to leave as zeros: for the use of one stream."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a graph may be replayed on any stream
        return torch.zeros(2, dtype=torch.int32, device=device)
    found = _workspaces.get((device.index, stream))
    if found is None:
        found = _workspaces[device.index, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return found


_workspaces: dict[tuple[int, int], Any] = {}


#: What the code of torch.compile allocates with: a third of the time of `torch.empty`.
_empty: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # pyright: ignore[reportAttributeAccessIssue]


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(reversed((*shape[1:], 1)), mul))[::-1] if shape else ()


def current_stream(device: torch.device) -> int:
    """The current stream of a device."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def on(device: torch.device) -> Any:
    """A context in which a device is the current one."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else _HERE


_HERE = nullcontext()
