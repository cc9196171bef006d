"""What public ops do with their arguments: check them, make options of them, and call the frontend of their framework."""

from __future__ import annotations

from numbers import Real
from typing import Any

from . import targets
from .arrays.frameworks import Framework, common_framework, ops_of, same_framework, shape_of
from .dispatch import calls
from .dispatch.facts import array_of
from .dispatch.kernel import Prefer
from .dispatch.registry import registry
from .errors import UnsupportedError
from .kernels.checks import check_history
from .options import COLUMNS, DEFAULT, PLAIN, CastOptions
from .tensors.checks import contraction_axis
from .tensors.tensor import ScaledTensor, scaled


def run(op: str, framework: Framework, arguments: tuple[Any, ...], prefer: Prefer) -> Any:
    """The op by the framework's frontend, or by `calls` where it has none."""
    known = registry()
    function = known.functions.get((op, framework.name))
    if function is None:
        home = calls if framework.frontend is None else targets.load_module(framework.frontend)
        function = known.functions[op, framework.name] = home.runner_of(known.operation(op))
    return function(arguments, prefer)


def cast_options(
    x: Any,
    axis: int,
    scale: Any,
    rounding: str,
    seed: Any,
    nonfinite: str,
    storage: str,
    out: Any,
    of_tensor: bool = False,
    importance: Any = None,
) -> CastOptions:
    """The options of an op that casts `x`."""
    if not of_tensor:
        check_array(x)
    if (
        scale is None
        and out is None
        and seed is None
        and type(axis) is int
        and (axis == -1 or (axis == -2 and len(shape_of(x)) > 1))
        and rounding == "nearest"
        and nonfinite == "propagate"
        and storage == PLAIN
        and importance is None
    ):
        return DEFAULT if axis == -1 else COLUMNS
    if hasattr(seed, "dtype"):
        seed = ops_of(x.data_source if of_tensor else x).seed(seed)
    if isinstance(scale, Real) and not isinstance(scale, bool):  # NumPy's numbers too, for arrays of any framework
        scale = float(scale)
    options = CastOptions(axis, scale, rounding, seed, nonfinite, storage, out, importance=importance)
    if storage != PLAIN:
        registry().look_up("breccia_storages", storage, "storage")
    axis = contraction_axis(axis, len(shape_of(x)))
    return options if type(options.axis) is int and axis == options.axis else options.replace(axis=axis)


def framework_of_steps(x: Any, amaxes: Any, scale: Any) -> Framework:
    """The framework of an array and of its amax history. Raises for a history that is none, or of another framework."""
    history = check_history(amaxes, scale)
    return common_framework(x, *history.values()) or same_framework({"x": x, **history})


def check_array(x: Any) -> None:
    """Raise for a ScaledTensor in place of an array to cast."""
    if isinstance(x, ScaledTensor):
        raise UnsupportedError("x is a ScaledTensor already: breccia.requantize(x, recipe) converts it to another recipe.")


def arrays_of(**operands: Any) -> dict[str, Any]:
    """By name, the array that determines the framework and device of an operand. Operands that are None are left out."""
    return {name: array_of(x) for name, x in operands.items() if x is not None}


def need_scaled(op: str, st: Any) -> ScaledTensor:
    """The ScaledTensor that `st` contains. Raises UnsupportedError."""
    tensor = scaled(st)
    if not isinstance(tensor, ScaledTensor):
        raise UnsupportedError(
            f"{op} takes a ScaledTensor, got {type(st).__name__}; quantize an array with breccia.cast, or wrap buffers with "
            "breccia.from_buffer."
        )
    return tensor
