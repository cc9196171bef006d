"""The JAX primitive of calls that run NumPy's kernels inside compiled functions.

Which implementation runs is known only when a function is compiled: the kernels where it is compiled for one CPU device, or for
each device apart (`shard_map`); else the generic algorithm, which XLA partitions over devices and `jax.export` writes to files.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import AxisType

from breccia.backend import targets

Array = Any
#: (shape, dtype) of each array.
Shapes = tuple[tuple[tuple[int, ...], str], ...]


class Program(Protocol):
    """A call with two implementations that return the same arrays. It is hashable: JAX caches what it compiles by it."""

    @property
    def operands(self) -> Shapes: ...

    @property
    def results(self) -> Shapes: ...

    def text(self) -> str:
        """What another process can read it from: compiled programs may be cached on disk."""
        ...

    def generic(self, *arrays: Array) -> list[Array]:
        """By the generic algorithm, on JAX arrays."""
        ...

    def batched(self, arrays: Sequence[Array], axes: Sequence[int | None]) -> list[Array] | None:
        """The results of a batch along axis 0, by another call; None leaves the batch to the generic algorithm."""
        ...

    def run(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """By NumPy's kernels: write the results."""
        ...


def traced(program: Program, arrays: Sequence[Array]) -> list[Array]:
    """The results of a call inside a traced function. Gradients are the frontend's: kernels see none."""
    arrays = [lax.stop_gradient(a) for a in arrays]
    meshes = [mesh for a in arrays if not (mesh := jax.typeof(a).sharding.mesh).empty]
    if any(AxisType.Explicit in mesh.axis_types for mesh in meshes):  # shardings are part of types, which XLA must not change
        return program.generic(*arrays)
    if meshes:  # in `shard_map` types say along which axes of the mesh results vary
        avals = tuple(jax.make_jaxpr(program.generic)(*arrays).out_avals)
    else:
        avals = tuple(ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in program.results)
    return _call.bind(*arrays, program=program, avals=avals)


_call = Primitive("breccia_cpu")
_call.multiple_results = True
_call.def_impl(partial(xla.apply_primitive, _call))


@_call.def_abstract_eval
def _(*arrays: Any, program: Program, avals: tuple[Any, ...]) -> list[Any]:
    return list(avals)


def _batched(arrays: Any, axes: Any, *, program: Program, avals: Any) -> tuple[list[Array], list[int]]:
    found = program.batched(arrays, axes)
    if found is None:
        found = jax.vmap(program.generic, in_axes=tuple(axes))(*arrays)
    return found, [0] * len(avals)


def _lowered(context: Any, *arrays: Any, program: Program, avals: Any) -> Any:
    if _alone(context):
        _register()
        return jax.ffi.ffi_lowering(TARGET)(context, *arrays, call=program.text())
    return mlir.lower_fun(program.generic, multiple_results=True)(context, *arrays)


batching.primitive_batchers[_call] = _batched
mlir.register_lowering(_call, _lowered)


def _alone(context: Any) -> bool:
    """Whether code is compiled for one CPU device, or for each device apart (`shard_map`), and not for export."""
    module = context.module_context
    platforms = module.platforms if context.platforms is None else context.platforms
    if tuple(platforms) != ("cpu",) or module.lowering_parameters.for_export:
        return False
    axes = module.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):
        return math.prod(n for name, n in axes.mesh.shape.items() if name not in axes.manual_axes) == 1
    return getattr(axes, "num_devices", 1) == 1


#: The name of the handler of breccia-native among XLA's.
TARGET = "breccia_native"


@lru_cache
def _register() -> None:
    # References, not imports: breccia-native is optional, and what it lacks is a reason in `breccia.explain`.
    targets.load("breccia_native.xla_calls:answer_with")(_answer)
    jax.ffi.register_ffi_target(TARGET, targets.load("breccia_native.xla_calls:handler")(), platform="cpu")


def _answer(text: str, arrays: tuple[memoryview, ...], results: tuple[memoryview, ...]) -> None:
    """Run the program `text` on memory of XLA."""
    program = _read(text)
    given = [as_numpy(np.frombuffer(a, np.uint8), *of) for a, of in zip(arrays, program.operands, strict=True)]
    written = [as_numpy(np.frombuffer(a, np.uint8), *of) for a, of in zip(results, program.results, strict=True)]
    program.run(given, written)


def as_numpy(memory: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array of bytes as one of that shape and dtype."""
    return memory.view(jnp.dtype(dtype)).reshape(shape)


@lru_cache(maxsize=1024)
def _read(text: str) -> Program:
    return targets.load("breccia_jax.cpu:read")(text)
