"""The ops below frontends: `calls.cast(x, recipe, options, prefer=...)` selects a kernel in the table and calls it.

There is one function for each op that the registry knows, with the arguments of its `breccia.operations.Operation`, then its
options. Arguments are not checked here and gradients are not handled. Frontends and kernels composed of other ops call these
functions, and so do plug-ins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ..arrays.frameworks import dtype_name, framework_of
from ..errors import BrecciaError, UnknownNameError
from ..operations import OPERATIONS, Operation, Result
from ..options import DEFAULT, PLAIN
from ..recipes import ScalingRecipe
from ..targets import load
from ..tensors.checks import need_one_device
from ..tensors.components import is_row
from ..tensors.tensor import ScaledTensor
from .kernel import Prefer
from .registry import registry
from .table import Chosen

Array = Any


def runner_of(op: Operation) -> Callable[[tuple[Any, ...], Prefer], Any]:
    """Calls of an op: f((*arguments, options), prefer)."""
    second, target, has_options = op.second, op.target, bool(op.options)
    first = op.arguments[0][0]
    scaled = first in op.scaled
    rows, reduces = scaled and op.second is None, bool(op.derivative_options)

    check = _check_of(op)

    def run(arguments: tuple[Any, ...], prefer: Prefer) -> Any:
        if reduces and arguments[-1] is not DEFAULT:
            arguments = (*arguments[:-1], op.for_kernels(arguments[-1]))
        a = arguments[0]
        array = a
        if scaled and isinstance(a, ScaledTensor):
            array = a.data_source
            if rows and array.ndim == 1 and is_row(a):  # kernels receive matrices
                return load("breccia.kernels.composites:of_row")(partial(_starred, run, prefer), arguments)
        chosen = registry().table.choose(
            op,
            framework_of(array, first).name,
            a,
            None if second is None else arguments[second],
            None if target is None else arguments[target],
            arguments[-1] if has_options else DEFAULT,
            prefer,
        )
        if chosen.traced:
            print(chosen.traced, file=sys.stderr)
        try:
            result = chosen.function(*arguments)
        except BrecciaError:
            raise
        except Exception as e:
            need_one_device(**{name: arguments[n] for name, n in op.scaled.items()})
            chosen.failed(e)  # errors that are not breccia's own get a note naming the kernel
            raise
        if chosen.checked:
            check(chosen, arguments, result)
            if chosen.audited:
                load("breccia.kernels.audit:check")(op, chosen, arguments, result)
        return result

    return run


def _starred(run: Callable[[tuple[Any, ...], Prefer], Any], prefer: Prefer, *arguments: Any) -> Any:
    return run(arguments, prefer)


def function_of(op: Operation) -> Callable[..., Any]:
    """The function of an op: f(*arguments, options, prefer=None). The options may be left out."""
    run, least, default = runner_of(op), len(op.arguments), op.default

    def call(*arguments: Any, prefer: Prefer = None) -> Any:
        if default is not None and len(arguments) == least:
            arguments = (*arguments, default)
        return run(arguments, prefer)

    call.__name__ = call.__qualname__ = op.name
    call.__doc__ = f"The op {op.name}: {', '.join(name for name, _ in op.arguments)}{', options' * bool(op.options)}."
    return call


# -- results ---------------------------------------------------------------------------------------------------------
# The results of plug-ins' kernels are checked here: a wrong shape would be noticed far from the kernel, or never.


Check = Callable[[Chosen, tuple[Any, ...], Any], None]


def _check_of(op: Operation) -> Check:
    """A function that raises KernelError unless a kernel's results for some arguments are what the op returns."""
    checks = [_check_of_tensor(op, result) if result.tensor else _check_of_array(op, result) for result in op.results]
    if len(checks) == 1:
        return checks[0]
    kinds = ", ".join("a ScaledTensor" if result.tensor else "an array" for result in op.results)

    def check(chosen: Chosen, arguments: tuple[Any, ...], results: Any) -> None:
        if type(results) is not tuple or len(results) != len(checks):  # pyright: ignore[reportUnknownArgumentType]
            raise chosen.refused(f"{op.name} returns a tuple of {kinds}, not {results!r:.80}.")
        for each, result in zip(checks, results, strict=True):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            each(chosen, arguments, result)

    return check


def _check_of_tensor(op: Operation, result: Result) -> Check:
    count, target, stores = len(op.arguments), op.target, op.stores
    assert target is not None

    def check(chosen: Chosen, arguments: tuple[Any, ...], tensor: Any) -> None:
        axis = op.axis_of(result, arguments)
        storage = arguments[-1].storage if stores else PLAIN
        _expect_tensor(chosen, tensor, arguments[target], result.shape_of(arguments[:count]), axis, storage)

    return check


def _check_of_array(op: Operation, result: Result) -> Check:
    count, dtype, shape = len(op.arguments), result.dtype, result.shape

    def check(chosen: Chosen, arguments: tuple[Any, ...], array: Any) -> None:
        expected = arguments[0].shape if shape is None else load(shape)(*arguments[:count])
        of = arguments[-1].out_dtype if dtype == "option" else dtype_name(arguments[0]) if dtype == "first" else dtype
        _expect_array(chosen, array, tuple(expected), of)

    return check


def _expect_tensor(chosen: Chosen, tensor: Any, recipe: ScalingRecipe, expected: Any, axis: int, storage: str) -> None:
    if not isinstance(tensor, ScaledTensor):
        raise chosen.refused(f"{chosen.kernel.op} returns a ScaledTensor, not {type(tensor).__name__}.")
    if tensor.recipe is not recipe and tensor.recipe != recipe:
        raise chosen.refused(f"{chosen.kernel.op} was to write {recipe!r}; the result has {tensor.recipe!r}.")
    shape = tuple(tensor.shape)
    if shape != expected:
        raise chosen.refused(f"{chosen.kernel.op} of shape {expected} gave a tensor of shape {shape}.")
    if tensor.axis != axis:
        raise chosen.refused(f"{chosen.kernel.op} was to write blocks along axis {axis}; the result has axis {tensor.axis}.")
    if tensor.storage != storage:
        raise chosen.refused(f"{chosen.kernel.op} was to write {storage!r} storage; the result is in {tensor.storage!r}.")


def _expect_array(chosen: Chosen, array: Any, shape: tuple[int, ...], dtype: str) -> None:
    if not hasattr(array, "shape") or isinstance(array, ScaledTensor):
        raise chosen.refused(f"{chosen.kernel.op} returns an array, not {type(array).__name__}.")
    if tuple(array.shape) != shape:
        raise chosen.refused(f"{chosen.kernel.op} gives shape {shape}; got {tuple(array.shape)}.")
    if dtype_name(array) != dtype:
        raise chosen.refused(f"{chosen.kernel.op} was asked for {dtype}; got {dtype_name(array)}.")


# -- the functions ---------------------------------------------------------------------------------------------------

#: Of core's ops; those of plug-ins are looked up when they are called, since the registry may be replaced.
_FUNCTIONS = {name: function_of(op) for name, op in OPERATIONS.items()}

cast = _FUNCTIONS["cast"]
cast_pair = _FUNCTIONS["cast_pair"]
dequantize = _FUNCTIONS["dequantize"]
requantize = _FUNCTIONS["requantize"]
matmul = _FUNCTIONS["matmul"]


def __getattr__(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return function_of(registry().operation(name))
    except UnknownNameError as e:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {e}") from None
