"""Compiling and launching Triton kernels with little work per call.

Triton's own launch path inspects every argument at every call. Here the constants, the types of arguments and their alignment
are decided once; a call passes addresses and integers. Compiled kernels are cached on disk by Triton.
"""

# pyright: basic, reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter, mul
from typing import Any

import torch
import triton
from triton.compiler import ASTSource

#: Whether Triton interprets kernels, on tensors of any device: slowly, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
#: Versions of Triton whose launcher has the arguments that `Launcher` passes.
_KNOWN = "3.6."
#: Products and sums stay apart: the contract rounds both.
OPTIONS = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Argument:
    """The type of an argument as Triton spells it ("*bf16", "i32"), and whether 16 divides it."""

    type: str
    aligned: bool = False


class Launcher:
    """One kernel with its constants, for one device.

    arguments: of the run-time parameters by name; parameters that are absent are None in the kernel. constants: by name.
    """

    def __init__(
        self, function: Any, arguments: dict[str, Argument], constants: dict[str, Any], warps: int = 4, target: Any = None
    ) -> None:
        self.function, self.constants = function, constants
        self.names: Sequence[str] = function.arg_names
        self.given = list(arguments)
        self._launch: Any = None
        if not INTERPRETED:
            absent = {name: None for name in self.names if name not in arguments and name not in constants}
            values = {**constants, **absent}
            signature = {name: "constexpr" if name in values else arguments[name].type for name in self.names}
            divisible = {
                (i,): [["tt.divisibility", 16]] for i, n in enumerate(self.names) if n in arguments and arguments[n].aligned
            }
            source = ASTSource(function, signature, values, divisible)
            self.compiled = triton.compile(source, target=target, options={"num_warps": warps, **OPTIONS})
            # None comes first in the values, for parameters that are absent.
            self._placed = itemgetter(*(self.given.index(name) + 1 if name in arguments else 0 for name in self.names))

    def __call__(self, programs: tuple[int, int, int], stream: int, values: Sequence[Any]) -> None:
        """Launch on the current device. values: tensors' addresses and integers, in the order of `arguments`."""
        if INTERPRETED:
            self.function[programs](**dict(zip(self.given, values, strict=True)), **self._rest())
            return
        launch = self._launch or self._start()
        launch(*programs, stream, *self._fixed, *self._placed((None, *values)))

    def _start(self) -> Any:
        compiled = self.compiled
        launcher = compiled.run  # loads the module on the current device
        handle, metadata = compiled.function, compiled.packed_metadata
        hooks = (metadata, None, None, None)
        scratch = [getattr(launcher, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]
        if triton.__version__.startswith(_KNOWN) and scratch == [0, 0]:
            # Its compiled part, without the Python around it, which allocates memory that these kernels do not need.
            self._fixed = (handle, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *hooks)
            self._launch = launcher.launch
        else:
            self._fixed = (handle, *hooks)
            self._launch = launcher
        return self._launch

    def _rest(self) -> dict[str, Any]:
        return {name: self.constants.get(name) for name in self.names if name not in self.given}


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


def type_of(dtype: torch.dtype) -> str:
    """Triton's pointer to numbers of a floating dtype."""
    return {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
