"""The JAX primitive of calls that run by kernels of one kind of device inside compiled functions.

Which implementation runs is known only when a function is compiled: the kernels where it is compiled for one device of their
platform, or for each device apart (`shard_map`); else the generic algorithm, which XLA partitions over devices and `jax.export`
writes to files. The kernels of breccia-jax for CPUs and of breccia-triton for GPUs both run in this way.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import AxisType

Array = Any
#: (shape, dtype) of each array.
Shapes = tuple[tuple[tuple[int, ...], str], ...]


class Program(Protocol):
    """A call with two implementations that return the same arrays. It is hashable: JAX caches what it compiles by it."""

    @property
    def platform(self) -> str:
        """XLA's name of the devices that the kernels run on: "cpu", "cuda"."""
        ...

    @property
    def results(self) -> Shapes: ...

    def generic(self, *arrays: Array) -> list[Array]:
        """By the generic algorithm, on JAX arrays."""
        ...

    def batched(self, arrays: Sequence[Array], axes: Sequence[int | None]) -> list[Array] | None:
        """The results of a batch, examples along axis 0, by another call; None leaves the batch to the generic algorithm."""
        ...

    def lowered(self, context: Any, *arrays: Any) -> Any:
        """By kernels: the results of a lowering rule of JAX. None where they do not run on this device."""
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


_call = Primitive("breccia")
_call.multiple_results = True
_call.def_impl(partial(xla.apply_primitive, _call))


@_call.def_abstract_eval
def _(*arrays: Any, program: Program, avals: tuple[Any, ...]) -> list[Any]:
    return list(avals)


def _batched(arrays: Any, axes: Any, *, program: Program, avals: Any) -> tuple[list[Array], list[int]]:
    results = program.batched(arrays, axes)
    if results is None:
        results = jax.vmap(program.generic, in_axes=tuple(axes))(*arrays)
    return results, [0] * len(avals)


def _lowered(context: Any, *arrays: Any, program: Program, avals: Any) -> Any:
    results = program.lowered(context, *arrays) if runs_kernels(context, program.platform) else None
    return mlir.lower_fun(program.generic, multiple_results=True)(context, *arrays) if results is None else results


batching.primitive_batchers[_call] = _batched
mlir.register_lowering(_call, _lowered)


def runs_kernels(context: Any, platform: str) -> bool:
    """Whether code is compiled for one device of this platform, or for each device apart (`shard_map`), and not for export.

    XLA cannot partition a kernel, and exported functions hold no kernels of a plug-in.
    """
    module = context.module_context
    platforms = module.platforms if context.platforms is None else context.platforms
    if tuple(platforms) != (platform,) or module.lowering_parameters.for_export:
        return False
    axes = module.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):
        return math.prod(n for name, n in axes.mesh.shape.items() if name not in axes.manual_axes) == 1
    return getattr(axes, "num_devices", 1) == 1
