"""Calls with kernels inside compiled functions, by the primitive of breccia-jax, and their launches through jax-triton."""

# pyright: basic, reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import triton
from jax.interpreters import mlir

from breccia.backend import targets
from breccia.internal import once

from ..availability import LEAST
from ..facts import Hardware
from ..launch.triton_launch import Launch

Array = Any


def run(program: OnGPU, arrays: Sequence[Array]) -> list[Array]:
    """The results of a call, eager or traced."""
    return _traced()(program, arrays)


@once
def _traced() -> Callable[[OnGPU, Sequence[Array]], list[Array]]:
    # A reference, not an import: breccia-jax is optional, and is installed where a JAX array gets here.
    return targets.load("breccia_jax.primitive:traced")


class OnGPU(ABC):
    """A `breccia_jax.primitive.Program` whose kernels are launched by jax-triton."""

    @property
    def platform(self) -> str:
        return "cuda"

    @property
    @abstractmethod
    def results(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """(shape, dtype) of each array."""

    @abstractmethod
    def generic(self, *arrays: Array) -> list[Array]:
        """By the generic algorithm."""

    @abstractmethod
    def kernels(self, hardware: Hardware, *arrays: Array) -> list[Array]:
        """By kernels for this hardware."""

    def batched(self, arrays: Sequence[Array], axes: Sequence[int | None]) -> list[Array] | None:
        return None

    def lowered(self, context: Any, *arrays: Any) -> Any:
        if capability() < LEAST:
            return None
        return mlir.lower_fun(partial(self.kernels, hardware()), multiple_results=True)(context, *arrays)


def hardware() -> Hardware:
    """What kernels may use: that of the first GPU, for which jax-triton compiles."""
    return Hardware(True, capability() >= (8, 9))


@lru_cache
def capability() -> tuple[int, int]:
    """The compute capability of the first GPU."""
    return targets.load("breccia_jax.ops:capability")(jax.local_devices(backend="cuda")[0])


def launched(
    launch: Launch, inputs: Mapping[str, Array], outputs: Mapping[str, jax.ShapeDtypeStruct], zeroed: Collection[str] = (),
    integers: Sequence[int] = (),
) -> dict[str, Array]:  # fmt: skip
    """The outputs of a kernel, by the names of its parameters. zeroed: outputs that are zeros before it runs.

    integers: those after `launch.integers`.
    """
    operands = {name: inputs[name] for name in launch.arguments if name in inputs}
    constants = dict(launch.constants)
    for name, n in numbers_of(launch, (*inputs, *outputs), integers).items():
        # jax-triton does not tell the compiler which integers 16 divides, without which rows are not loaded by vectors.
        (constants if launch.arguments[name].aligned else operands)[name] = n
    first = (*operands, *outputs)
    major, minor = capability()
    absent = {name: None for name in launch.function.arg_names if name not in first and name not in constants}
    results = _jax_triton().triton_call(
        *operands.values(),
        kernel=_ordered(launch.function, first),
        out_shape=list(outputs.values()),
        grid=launch.programs,
        compute_capability=10 * major + minor,
        zeroed_outputs=tuple(i for i, name in enumerate(outputs) if name in zeroed),
        **launch.options(),
        **constants,
        **absent,
    )
    return dict(zip(outputs, results, strict=True))


def numbers_of(launch: Launch, arrays: Collection[str], integers: Sequence[int]) -> dict[str, int]:
    """The integers that a kernel is passed, by the names of its parameters. arrays: parameters that are arrays."""
    names = [name for name in launch.arguments if name not in arrays]
    return dict(zip(names, (*launch.integers, *integers), strict=True))


class _Ordered(triton.JITFunction):
    """A kernel whose first parameters are `first`: jax-triton passes inputs, then outputs, and constants by name."""

    def __init__(self, kernel: Any, first: tuple[str, ...]) -> None:
        super().__init__(kernel.fn)
        self._first = first
        self.params.sort(key=lambda parameter: self._place(parameter.name))
        self.arg_names = [parameter.name for parameter in self.params]

    def _place(self, name: str) -> int:
        return self._first.index(name) if name in self._first else len(self._first)

    def parse(self) -> Any:
        """The syntax tree, from which Triton compiles."""
        tree: Any = super().parse()
        tree.body[0].args.args.sort(key=lambda parameter: self._place(parameter.arg))
        return tree


#: The same object for the same kernel, since jax-triton compiles each object once.
_ordered = lru_cache(maxsize=None)(_Ordered)


@lru_cache
def _jax_triton() -> Any:
    """The module. Its import takes Triton's cache on disk away from all of the process, which keeps it here."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if folder is not None:
            os.environ["TRITON_CACHE_DIR"] = folder
    return jax_triton
