"""The JAX primitive of calls with kernels, and their launches through jax-triton.

Which implementation runs is known only when a function is compiled: kernels where it is compiled for one CUDA device, else the
generic algorithm, which XLA partitions over devices, and `jax.vmap` batches.
"""

# pyright: basic, reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import jax
import triton
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import AxisType

from .facts import Hardware
from .plans import LEAST
from .prepare import Launch

Array = Any


class Implemented(Protocol):
    """A call with two implementations that return the same arrays. It is hashable: JAX caches what it compiles by it."""

    @property
    def results(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """(shape, dtype) of each array."""
        ...

    def generic(self, *arrays: Array) -> list[Array]:
        """By the generic algorithm."""
        ...

    def kernels(self, hardware: Hardware, *arrays: Array) -> list[Array]:
        """By kernels for this hardware."""
        ...


def run(call: Implemented, arrays: Sequence[Array]) -> list[Array]:
    """The results of a call, eager or traced. Gradients are the frontend's: kernels see none."""
    arrays = [lax.stop_gradient(a) for a in arrays]
    meshes = [mesh for a in arrays if not (mesh := jax.typeof(a).sharding.mesh).empty]
    if not meshes:
        return _call.bind(*arrays, call=call, avals=tuple(ShapedArray(shape, jax.numpy.dtype(d)) for shape, d in call.results))
    if any(AxisType.Explicit in mesh.axis_types for mesh in meshes):  # shardings are part of types, which XLA must not change
        return call.generic(*arrays)
    # In `shard_map` the types say along which axes of the mesh the results vary.
    return _call.bind(*arrays, call=call, avals=tuple(jax.make_jaxpr(call.generic)(*arrays).out_avals))


_call = Primitive("breccia_triton")
_call.multiple_results = True
_call.def_impl(partial(xla.apply_primitive, _call))


@_call.def_abstract_eval
def _(*arrays: Any, call: Implemented, avals: tuple[ShapedArray, ...]) -> list[ShapedArray]:
    return list(avals)


def _batched(arrays: Any, axes: Any, *, call: Implemented, avals: Any) -> tuple[list[Array], list[int]]:
    return jax.vmap(call.generic, in_axes=tuple(axes))(*arrays), [0] * len(avals)


def _lowered(context: mlir.LoweringRuleContext, *arrays: Any, call: Implemented, avals: Any) -> Any:
    runs = alone(context) and capability() >= LEAST
    chosen = partial(call.kernels, hardware()) if runs else call.generic
    return mlir.lower_fun(chosen, multiple_results=True)(context, *arrays)


batching.primitive_batchers[_call] = _batched
mlir.register_lowering(_call, _lowered)


def alone(context: mlir.LoweringRuleContext) -> bool:
    """Whether code is compiled for one CUDA device, or for each device apart (`shard_map`), and not for export.

    XLA cannot partition a kernel, and exported functions hold no kernels of a plug-in.
    """
    module = context.module_context
    platforms = module.platforms if context.platforms is None else context.platforms
    if tuple(platforms) != ("cuda",) or module.lowering_parameters.for_export:
        return False
    axes = module.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):
        return math.prod(n for name, n in axes.mesh.shape.items() if name not in axes.manual_axes) == 1
    return getattr(axes, "num_devices", 1) == 1


def hardware() -> Hardware:
    """What kernels may use: that of the first GPU, for which jax-triton compiles."""
    return Hardware(True, capability() >= (8, 9))


@lru_cache
def capability() -> tuple[int, int]:
    """The compute capability of the first GPU."""
    major, minor = jax.local_devices(backend="cuda")[0].compute_capability.split(".")
    return int(major), int(minor)


def launched(
    launch: Launch, inputs: Mapping[str, Array], outputs: Mapping[str, jax.ShapeDtypeStruct], zeroed: Collection[str] = (),
    integers: Sequence[int] = (),
) -> dict[str, Array]:  # fmt: skip
    """The outputs of a kernel, by the names of its parameters. zeroed: outputs that are zeros before it runs.

    integers: those after `launch.integers`.
    """
    given = {name: inputs[name] for name in launch.arguments if name in inputs}
    constants = dict(launch.constants)
    for name, n in numbers_of(launch, (*inputs, *outputs), integers).items():
        # jax-triton does not tell the compiler which integers 16 divides, without which rows are not loaded by vectors.
        (constants if launch.arguments[name].aligned else given)[name] = n
    first = (*given, *outputs)
    major, minor = capability()
    absent = {name: None for name in launch.function.arg_names if name not in first and name not in constants}
    found = _jax_triton().triton_call(
        *given.values(),
        kernel=_ordered(launch.function, first),
        out_shape=list(outputs.values()),
        grid=launch.programs,
        compute_capability=10 * major + minor,
        zeroed_outputs=tuple(i for i, name in enumerate(outputs) if name in zeroed),
        **launch.options,
        **constants,
        **absent,
    )
    return dict(zip(outputs, found, strict=True))


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
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if kept is not None:
            os.environ["TRITON_CACHE_DIR"] = kept
    return jax_triton
