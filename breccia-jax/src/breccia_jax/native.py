"""Calls of NumPy's kernels from functions that XLA compiled for a CPU, through the handler of breccia-native."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from breccia.backend import targets

from .primitive import Program, Shapes

#: The name of the handler of breccia-native among XLA's.
TARGET = "breccia_native"


class NumPyProgram(Program, Protocol):
    """A program whose kernels are NumPy's."""

    @property
    def operands(self) -> Shapes: ...

    def text(self) -> str:
        """What another process can read it from: compiled functions may be cached on disk."""
        ...

    def run(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """By NumPy's kernels: write the results."""
        ...


class OnCPU:
    """How the programs of `breccia_jax.cpu` are compiled."""

    @property
    def platform(self) -> str:
        return "cpu"

    def lowered(self: NumPyProgram, context: Any, *arrays: Any) -> Any:
        _register()
        return jax.ffi.ffi_lowering(TARGET)(context, *arrays, call=self.text())


@lru_cache
def _register() -> None:
    # References, not imports: breccia-native is optional, and what it lacks is a reason in `breccia.explain`.
    jax.ffi.register_ffi_target(TARGET, targets.load("breccia_native.xla_calls:cpu_handler")(_answer), platform="cpu")


def _answer(text: str, arrays: tuple[memoryview, ...], results: tuple[memoryview, ...]) -> None:
    """Run the program `text` on memory of XLA."""
    program = _read(text)
    operands = [as_numpy(np.frombuffer(a, np.uint8), *of) for a, of in zip(arrays, program.operands, strict=True)]
    written = [as_numpy(np.frombuffer(a, np.uint8), *of) for a, of in zip(results, program.results, strict=True)]
    program.run(operands, written)


def as_numpy(memory: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array of bytes as one of that shape and dtype."""
    return memory.view(jnp.dtype(dtype)).reshape(shape)


@lru_cache(maxsize=1024)
def _read(text: str) -> NumPyProgram:
    return targets.load("breccia_jax.cpu:read")(text)
