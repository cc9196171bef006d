"""What `torch.compile` traces in place of the ops of `breccia` and of the methods of a ScaledTensor.

In place of a function marked by `breccia.tracing`, Dynamo traces the function of that name here, which only does arithmetic on
shapes and calls the operators of `operators`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import breccia
from breccia import InStorage, Layout, OptionError, ScaledTensor, TensorPair, UnsupportedError
from breccia.backend import OPERATIONS, TENSOR, Array, Block, Operation, checks, contraction_axis, packing
from breccia.internal import FIELDS, keeps_parts, output_dtype, suggestion

from .describing import as_recipe as as_recipe
from .describing import constant, keep, layout_text, named, recall, recipe_text
from .describing import recipe as recipe
from .operators import SIGN, layout_of, operator_of, recipe_of
from .views import T as T
from .views import __getitem__ as __getitem__
from .views import __init__ as __init__
from .views import __iter__ as __iter__
from .views import concat as concat
from .views import dtype as dtype
from .views import framework as framework
from .views import mT as mT
from .views import nbytes as nbytes
from .views import ndim as ndim
from .views import reshape as reshape
from .views import select as select
from .views import split as split
from .views import stack as stack
from .views import storage as storage
from .views import to as to
from .views import to_plain as to_plain
from .views import to_storage as to_storage


@constant
def _facts(recipe: str) -> tuple[tuple[str, ...], tuple[int, int], Block]:
    """Of a recipe: the components of a cast, the (codes, bytes) of a packing group, and the block."""
    fmt = recipe_of(recipe).format
    return tuple(fmt.parts), packing(fmt.element), fmt.block


@constant
def _fitted(recipe: str, axis: int, ndim: int, sides: tuple[int, int]) -> str:
    """The name of the layout of a cast of `ndim` axes, the last two with lengths equivalent to these."""
    if ndim == 1 and recipe_of(recipe).layout.block() != TENSOR:  # a row of a matrix, which `requantize` takes
        return keep(breccia.cast(np.zeros((1, sides[-1]), np.float32), recipe_of(recipe))[0].layout)
    return keep(checks.fitted_layout(recipe_of(recipe), (1,) * (ndim - 2) + sides[-min(ndim, 2) :], axis))


def _side(length: Any, block: int | None) -> int:
    """A concrete stand-in for a symbolic dimension with the same divisibility."""
    if block is None or block == 1:
        return 1
    return block if length % block == 0 else block + 1


def fill(
    self: ScaledTensor,
    data: Any,
    scale: Any,
    recipe: Any,
    layout: Any,
    zero_point: Any,
    global_scale: Any,
    axis: int,
    padding: int,
) -> None:
    """`breccia.tensors.tensor.fill` under a compiler, which does not support slots."""
    values = (data, scale, recipe, layout, zero_point, global_scale, axis, padding)
    for name, value in zip(FIELDS, values):  # noqa: B905 (Dynamo lacks strict=)
        object.__setattr__(self, name, value)
    object.__setattr__(self, "held", None)


def logical_shape(st: ScaledTensor) -> tuple[int, ...]:
    """`st.shape` under a compiler, which does not support cached properties."""
    if type(st.layout) is InStorage and st.layout.data_axes:
        m, k = st.layout.matrix
        lead = tuple(st.data.shape[: st.data.ndim - st.layout.data_axes])
        return (*lead, m, k) if st.axis == -1 else (*lead, k, m)
    _, (codes, size), _ = _facts(recipe_text(st.recipe))
    shape = list(st.data.shape)
    shape[st.axis] = shape[st.axis] // size * codes - st.padding
    return tuple(shape)


# ------------------------------------------------------------------------------------------------ ops


def function_of(op: Operation) -> Callable[..., Any]:
    """What compilers trace for an op: a function with the arguments of the public one, which calls its operator.

    It is made before anything is traced, and holds only constants of the graph.
    """
    operator, name = operator_of(op), op.name
    kinds = tuple(kind.value for _, kind in op.arguments)
    options, produces = op.options, "out_dtype" in op.options
    tensors = tuple(result.tensor for result in op.results)
    axes = tuple(result.axis for result in op.results)
    takes_axis, keeps = "axis" in op.options, op.target is not None and not op.casts
    constants = op.derivative is None and not op.product
    allowed = (*options, "prefer", *(("out_dtype",) if produces else ()))

    def traced(*arguments: Any, **keywords: Any) -> Any:
        if produces and len(arguments) > len(kinds):
            keywords["out_dtype"], arguments = arguments[len(kinds)], arguments[: len(kinds)]
        _check_options(name, allowed, tuple([key for key, value in keywords.items() if _is_set(key, value)]))
        first, recipe, text = _tensor_of(arguments[0]), None, ""
        flat: list[Any] = []
        for kind, x in zip(kinds, arguments):  # noqa: B905 (Dynamo lacks strict=)
            if kind == "array":
                flat.append(x)
            elif kind == "recipe":
                recipe = named(x)
                text = recipe_text(recipe)
                flat.append(text)
            elif kind == "beside":
                if not isinstance(x, Tensor) and not (isinstance(x, (tuple, list)) and len(x) == 0):
                    _refuse_beside(name)
                flat.append(x if isinstance(x, Tensor) else None)
            elif kind == "number":
                tensor = isinstance(x, Tensor)
                flat += [x if tensor else None, 1.0 if tensor else float(x)]
            else:
                flat += _flat(x)
        if constants:
            flat = [_constant(x) for x in flat]
        if keeps and keywords.get("scale") is None and keywords.get("nonfinite", "propagate") == "propagate":
            renamed = _renamed(first, recipe, text)
            if renamed is not None:
                return renamed
        like = first.data if isinstance(first, ScaledTensor) else first
        axis = first.axis if isinstance(first, ScaledTensor) else -1
        if takes_axis:
            axis = _along(keywords.get("axis", -1), like.ndim)
        extra = _flat_options(options, like, axis, keywords)
        outputs = operator(*flat, *[_constant(x) for x in extra] if constants else extra)
        if tensors == (False,):
            return outputs
        results: list[Any] = []
        shape = logical_shape(first) if isinstance(first, ScaledTensor) else tuple(first.shape)
        count = 0 if recipe is None else len(_facts(text)[0])
        start = 0
        for is_tensor, own in zip(tensors, axes):  # noqa: B905
            if is_tensor:
                results.append(_written(outputs[start : start + count], recipe, text, shape, axis if own is None else own))
            else:
                results.append(outputs[start])
            start += count if is_tensor else 1
        return results[0] if len(results) == 1 else tuple(results)

    return traced


@constant
def _refuse_beside(op: str) -> None:
    raise UnsupportedError(f"{op} inside torch.compile takes a torch array, or () for none, beside its operand; convert it.")


def _constant(x: Any) -> Any:
    """An argument of an operator without a gradient, which would be asked for one in the backward pass."""
    if isinstance(x, list):
        return [_constant(part) for part in x]
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


def _is_set(name: str, value: Any) -> bool:
    """Whether an option has another value than its default. The defaults of the other options do not matter here."""
    return not (value is None or value is False or (name == "storage" and value == "plain"))


#: Options that operators do not take.
_ELSEWHERE = ("storage", "out", "prefer", "require_exact", "group_index")


@constant
def _check_options(op: str, known: tuple[str, ...], names: tuple[str, ...]) -> None:
    for name in names:
        if name in _ELSEWHERE and (name in known or name in ("prefer", "group_index")):
            raise UnsupportedError(f"{op}: {name}= is not supported inside torch.compile; leave it out.")
        if name not in known:
            raise OptionError(f"{op} has no option {name!r}{suggestion(name, list(known))}", option=name)


def _along(axis: int, ndim: int) -> int:
    return -1 if axis in (-1, ndim - 1) else -2 if axis in (-2, ndim - 2) else _negative(axis, ndim)


@constant
def _negative(axis: int, ndim: int) -> int:
    return contraction_axis(axis, ndim)


def _flat_options(options: tuple[str, ...], like: Tensor, axis: int, keywords: dict[str, Any]) -> list[Any]:
    """The option arguments of an operator, in the order of its schema (`operators.schema_of`)."""
    flat: list[Any] = []
    for name in options:
        value = keywords.get(name)
        if name == "axis":
            flat.append(axis)
        elif name == "scale":
            number = isinstance(value, (int, float))
            flat.append(torch.full((), float(value), dtype=torch.float32, device=like.device) if number else value)
        elif name == "seed":
            if isinstance(value, torch.Tensor):
                raise UnsupportedError("inside torch.compile seed= is a number; got a tensor. Cast outside, or pass a number.")
            flat.append(value - 2 * SIGN if value is not None and value >= SIGN else value)
        elif name == "rounding":
            flat.append("nearest" if value is None else value)
        elif name == "nonfinite":
            flat.append("propagate" if value is None else value)
        elif name == "clip":
            bounds = (0.0, 0.0) if value is None or isinstance(value, str) else value
            flat += ["" if value is None else value if isinstance(value, str) else "element", *bounds]
        elif name == "out_dtype":
            flat.append(_dtype_name("float32" if value is None else value))
        elif name in ("bias", "importance"):
            flat.append(value)
    return flat


def _renamed(st: ScaledTensor, recipe: Any, text: str) -> ScaledTensor | None:
    """`st` under the recipe, whose JSON is the text, if all that changes is the name of the format."""
    if type(st.layout) is InStorage or not _keeps(*_flat(st)[1:4], text):
        return None
    return ScaledTensor.from_parts(st.data, st.scale, recipe, st.layout, st.zero_point, st.global_scale, st.axis, st.padding)


@constant
def _keeps(recipe: str, layout: str, axis: int, into: str) -> bool:
    return keeps_parts(recipe_of(recipe), layout_of(layout), axis, recipe_of(into))


def _written(parts: list[Tensor], recipe: Any, text: str, shape: Any, axis: int) -> ScaledTensor:
    """The tensor of the components of a cast of an array of `shape`. text: the JSON of the recipe."""
    names, (group, _), (m, k) = _facts(text)
    along, across = _side(shape[axis], k), _side(shape[-3 - axis] if len(shape) > 1 else 1, m)
    layout = recall(_fitted(text, axis, len(shape), (across, along) if axis == -1 else (along, across)))
    components = dict(zip(names, parts))  # noqa: B905
    offset, global_scale = components.get("zero_point"), components.get("global_scale")
    return ScaledTensor.from_parts(
        components["data"], components["scale"], recipe, layout, offset, global_scale, axis, -shape[axis] % group
    )


def _tensor_of(x: Any) -> Any:
    """The ScaledTensor that a layer's weight contains; others unchanged."""
    return x if isinstance(x, (ScaledTensor, Tensor)) else getattr(x, "__scaled_tensor__", x)


def _flat(x: Any) -> tuple[Any, ...]:
    """The operator arguments that describe an operand."""
    x = _tensor_of(x)
    if not isinstance(x, ScaledTensor):
        return [x], "", "", -1, 0
    parts = [part for part in (x.data, x.scale, x.zero_point, x.global_scale) if part is not None]
    return parts, recipe_text(x.recipe), layout_text(x.layout), x.axis, x.padding


def transposed(layout: Any) -> Layout:
    """`layout.mT` under a compiler."""
    return recall(_transposed(layout_text(layout)))


@constant
def _transposed(text: str) -> str:
    return keep(layout_of(text).mT)


def cast_ste_clipped(
    x: Array,
    recipe: Any,
    clip_min: float | None = None,
    clip_max: float | None = None,
    *,
    clip: str = "element",
    **options: Any,
) -> Array:
    """`breccia.cast_ste_clipped` under a compiler."""
    recipe = named(recipe)
    low, high = _bounds(recipe_text(recipe), clip_min, clip_max, clip)
    return cast_ste(x, recipe, clip="scale" if clip == "scale" else (low, high), **options)


@constant
def _bounds(recipe: str, low: float | None, high: float | None, clip: str) -> tuple[float, float]:
    return checks.clip_bounds(recipe_of(recipe), low, high, clip) or (0.0, 0.0)


@constant
def _dtype_name(dtype: Any) -> str:
    return output_dtype(dtype)


_traced = {name: function_of(op) for name, op in OPERATIONS.items()}
cast, dequantize, requantize = _traced["cast"], _traced["dequantize"], _traced["requantize"]
matmul, cast_matmul, grouped_matmul = _traced["matmul"], _traced["cast_matmul"], _traced["grouped_matmul"]
cast_ste, record_amax, cast_and_record = _traced["cast_ste"], _traced["record_amax"], _traced["cast_and_record"]
cast_pair_and_record = _traced["cast_pair_and_record"]


def cast_pair(x: Array, recipe: Any, **options: Any) -> TensorPair:
    """`breccia.cast_pair` under a compiler."""
    return TensorPair(*_traced["cast_pair"](x, recipe, **options))
