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
from typing import Any

import torch
import triton
from triton.compiler import ASTSource

#: Whether Triton interprets kernels, on tensors of any device: slowly, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
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
        if not INTERPRETED:
            absent = {name: None for name in self.names if name not in arguments and name not in constants}
            values = {**constants, **absent}
            signature = {name: "constexpr" if name in values else arguments[name].type for name in self.names}
            divisible = {
                (i,): [["tt.divisibility", 16]] for i, n in enumerate(self.names) if n in arguments and arguments[n].aligned
            }
            source = ASTSource(function, signature, values, divisible)
            self.compiled = triton.compile(source, target=target, options={"num_warps": warps, **OPTIONS})
            self._order = [name if name in arguments else None for name in self.names]
            self._started = False

    def __call__(self, programs: tuple[int, int, int], stream: int, *values: Any) -> None:
        """Launch on the current device. values: tensors' addresses and integers, in the order of `arguments`."""
        if INTERPRETED:
            self.function[programs](**dict(zip(self.given, values, strict=True)), **self._rest())
            return
        if not self._started:
            self._start()
        self._run(*programs, stream, self._handle, self._metadata, None, None, None, *self._placed(values))

    def _start(self) -> None:
        compiled = self.compiled
        self._run = compiled.run  # loads the module on the current device
        self._handle, self._metadata = compiled.function, compiled.packed_metadata
        self._started = True

    def _placed(self, values: Sequence[Any]) -> list[Any]:
        found = iter(values)
        return [None if name is None else next(found) for name in self._order]

    def _rest(self) -> dict[str, Any]:
        return {name: self.constants.get(name) for name in self.names if name not in self.given}


def type_of(dtype: torch.dtype) -> str:
    """Triton's pointer to numbers of a floating dtype."""
    return {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
