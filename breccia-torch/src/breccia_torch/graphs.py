"""What `torch.compile` traces in place of the ops of `breccia` and of the methods of a ScaledTensor.

In place of a function marked by `breccia.tracing`, Dynamo traces the function of that name here, which only does arithmetic on
shapes and calls the operators of `operators`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import breccia
from breccia.backend import (
    FIELDS,
    TENSOR,
    Array,
    Block,
    Layout,
    ScaledTensor,
    Stored,
    TensorPair,
    UnsupportedError,
    checks,
    contraction_axis,
    keeps_parts,
    output_dtype,
    packing,
)

from .describing import constant, fields_of, json_of, layout_json, named
from .operators import SIGN, layout_of, recipe_of
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
def _facts(kind: Any, fields: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[int, int], Block]:
    """Of a recipe: the components of a cast, the (codes, bytes) of a packing group, and the block."""
    fmt = kind(*fields).format
    return tuple(fmt.parts), packing(fmt.element), fmt.scale.block


@constant
def _fitted(kind: Any, fields: tuple[Any, ...], axis: int, ndim: int, sides: tuple[int, int]) -> Layout:
    """The layout of a cast of `ndim` axes, the last two with lengths equivalent to these."""
    if ndim == 1 and kind(*fields).layout.block() != TENSOR:  # a row of a matrix, which `requantize` takes
        return breccia.cast(np.zeros((1, sides[-1]), np.float32), kind(*fields))[0].layout
    return checks.fitted_layout(kind(*fields), (1,) * (ndim - 2) + sides[-min(ndim, 2) :], axis)


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
    if type(st.layout) is Stored and st.layout.data_axes:
        m, k = st.layout.matrix
        lead = tuple(st.data.shape[: st.data.ndim - st.layout.data_axes])
        return (*lead, m, k) if st.axis == -1 else (*lead, k, m)
    _, (codes, size), _ = _facts(type(st.recipe), fields_of(st.recipe))
    shape = list(st.data.shape)
    shape[st.axis] = shape[st.axis] // size * codes - st.padding
    return tuple(shape)


@constant
def _refuse(op: str, name: str) -> None:
    raise UnsupportedError(f"{op}: {name}= is not supported inside torch.compile; leave it out.")


def _plain_call(op: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            _refuse(op, name)


@constant
def _negative(axis: int, ndim: int) -> int:
    return contraction_axis(axis, ndim)


def _options(x: Array, axis: int, scale: Any, rounding: str, seed: Any, nonfinite: str) -> tuple[Any, ...]:
    """The option arguments of an operator that casts."""
    if isinstance(scale, (int, float)):
        scale = torch.full((), float(scale), dtype=torch.float32, device=x.device)
    if seed is not None and seed >= SIGN:
        seed = seed - 2 * SIGN
    along = -1 if axis in (-1, x.ndim - 1) else -2 if axis in (-2, x.ndim - 2) else _negative(axis, x.ndim)
    return along, scale, rounding, seed, nonfinite


def cast(
    x: Array,
    recipe: Any,
    *,
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    storage: str = "plain",
    out: Any = None,
    prefer: Any = None,
) -> ScaledTensor:
    """`breccia.cast` under a compiler."""
    recipe = named(recipe)
    _plain_call("cast", storage=_other_than_plain(storage), out=out, prefer=prefer)
    kind, fields = type(recipe), fields_of(recipe)
    options = _options(x, axis, scale, rounding, seed, nonfinite)
    parts = torch.ops.breccia.cast(x, json_of(kind, fields), *options)
    return _written(parts, recipe, x.shape, options[0])


def _written(parts: list[Tensor], recipe: Any, shape: Any, axis: int) -> ScaledTensor:
    """The tensor of the components of a cast of an array of `shape`."""
    kind, fields = type(recipe), fields_of(recipe)
    names, (group, _), (m, k) = _facts(kind, fields)
    along, across = _side(shape[axis], k), _side(shape[-3 - axis] if len(shape) > 1 else 1, m)
    layout = _fitted(kind, fields, axis, len(shape), (across, along) if axis == -1 else (along, across))
    found = dict(zip(names, parts))  # noqa: B905
    offset, global_scale = found.get("zero_point"), found.get("global_scale")
    return ScaledTensor.from_parts(
        found["data"], found["scale"], recipe, layout, offset, global_scale, axis, -shape[axis] % group
    )


def _held(x: Any) -> Any:
    """The ScaledTensor that a layer's weight contains; others unchanged."""
    return x if isinstance(x, (ScaledTensor, Tensor)) else getattr(x, "__scaled_tensor__", x)


def _flat(x: Any) -> tuple[Any, ...]:
    """The operator arguments that describe an operand."""
    x = _held(x)
    if not isinstance(x, ScaledTensor):
        return [x], "", "", -1, 0
    parts = [part for part in (x.data, x.scale, x.zero_point, x.global_scale) if part is not None]
    return parts, json_of(type(x.recipe), fields_of(x.recipe)), layout_json(x.layout), x.axis, x.padding


def transposed(layout: Any) -> Layout:
    """`layout.mT` under a compiler."""
    return _transposed(layout_json(layout))


@constant
def _transposed(text: str) -> Layout:
    return layout_of(text).mT


def cast_pair(
    x: Array,
    recipe: Any,
    *,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    storage: str = "plain",
    prefer: Any = None,
) -> TensorPair:
    """`breccia.cast_pair` under a compiler."""
    recipe = named(recipe)
    _plain_call("cast_pair", storage=_other_than_plain(storage), prefer=prefer)
    kind, fields = type(recipe), fields_of(recipe)
    _, scale, *options = _options(x, -1, scale, rounding, seed, nonfinite)
    parts = torch.ops.breccia.cast_pair(x, json_of(kind, fields), *options, scale)
    half = len(parts) // 2
    shape = tuple(x.shape)
    return TensorPair(_written(parts[:half], recipe, shape, -1), _written(parts[half:], recipe, shape, -2))


def record_amax(x: Array, recipe: Any, amaxes: Any, scale: Any) -> tuple[Array, Array]:
    """`breccia.AmaxHistory.update` under a compiler."""
    amaxes, scale = torch.ops.breccia.record_amax(x, json_of(type(recipe), fields_of(recipe)), *_recorded(amaxes, scale))
    return amaxes, scale


def _recorded(amaxes: Any, scale: Any) -> tuple[Any, Any, float]:
    """(amaxes, scale, number) as operators take them."""
    tensor = isinstance(scale, Tensor)
    return amaxes if isinstance(amaxes, Tensor) else None, scale if tensor else None, 1.0 if tensor else float(scale)


def cast_and_record(x: Array, recipe: Any, amaxes: Any, scale: Any, **options: Any) -> tuple[ScaledTensor, Array, Array]:
    """`breccia.AmaxHistory.cast` under a compiler."""
    return _cast_and_recorded(x, recipe, amaxes, scale, **options)


def _cast_and_recorded(
    x: Array,
    recipe: Any,
    amaxes: Any,
    scale: Any,
    axis: int = -1,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    storage: str = "plain",
    out: Any = None,
    prefer: Any = None,
) -> tuple[ScaledTensor, Array, Array]:
    _plain_call("AmaxHistory.cast", storage=_other_than_plain(storage), out=out, prefer=prefer)
    options = _options(x, axis, None, rounding, seed, nonfinite)
    text = json_of(type(recipe), fields_of(recipe))
    found = torch.ops.breccia.cast_and_record(x, text, *_recorded(amaxes, scale), options[0], *options[2:])
    return _written(found[:-2], recipe, x.shape, options[0]), found[-2], found[-1]


def dequantize(st: Any, *, out_dtype: Any = "float32", out: Any = None, prefer: Any = None) -> Array:
    """`breccia.dequantize` under a compiler."""
    _plain_call("dequantize", out=out, prefer=prefer)
    return torch.ops.breccia.dequantize(*_flat(st), _dtype_name(out_dtype))


def requantize(
    st: Any,
    recipe: Any,
    *,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    require_exact: bool = False,
    storage: str = "plain",
    out: Any = None,
    prefer: Any = None,
) -> ScaledTensor:
    """`breccia.requantize` under a compiler."""
    st, recipe = _held(st), named(recipe)
    given = _other_than_plain(storage)
    _plain_call("requantize", require_exact=require_exact or None, storage=given, out=out, prefer=prefer)
    flat = _flat(st)
    kind, fields = type(recipe), fields_of(recipe)
    if type(st.layout) is not Stored and scale is None and nonfinite == "propagate" and _keeps(*flat[1:4], kind, fields):
        return ScaledTensor.from_parts(
            st.data, st.scale, recipe, st.layout, st.zero_point, st.global_scale, st.axis, st.padding
        )
    options = _options(st.data, st.axis, scale, rounding, seed, nonfinite)
    parts = torch.ops.breccia.requantize(*flat, json_of(kind, fields), *options[1:])
    return _written(parts, recipe, logical_shape(st), st.axis)


@constant
def _keeps(recipe: str, layout: str, axis: int, kind: Any, fields: tuple[Any, ...]) -> bool:
    return keeps_parts(recipe_of(recipe), layout_of(layout), axis, kind(*fields))


def matmul(a: Any, b: Any, out_dtype: Any = "float32", *, bias: Any = None, out: Any = None, prefer: Any = None) -> Array:
    """`breccia.matmul` under a compiler."""
    _plain_call("matmul", out=out, prefer=prefer)
    flat = (*_flat(a), *_flat(b), _dtype_name(out_dtype))
    return torch.ops.breccia.matmul(*flat) if bias is None else torch.ops.breccia.biased_matmul(*flat, bias)


def cast_matmul(x: Array, recipe: Any, b: Any, out_dtype: Any = "float32", *, bias: Any = None, prefer: Any = None) -> Array:
    """`breccia.cast_matmul` under a compiler."""
    recipe = named(recipe)
    _plain_call("cast_matmul", prefer=prefer)
    text = json_of(type(recipe), fields_of(recipe))
    return torch.ops.breccia.cast_matmul(x, text, *_flat(b), _dtype_name(out_dtype), bias)


def grouped_matmul(a: Any, b: Any, offsets: Array, out_dtype: Any = "float32", *, out: Any = None, prefer: Any = None) -> Array:
    """`breccia.grouped_matmul` under a compiler."""
    _plain_call("grouped_matmul", out=out, prefer=prefer)
    return torch.ops.breccia.grouped_matmul(*_flat(a), *_flat(b), offsets, _dtype_name(out_dtype))


def cast_ste(
    x: Array,
    recipe: Any,
    *,
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    prefer: Any = None,
) -> Array:
    """`breccia.cast_ste` under a compiler."""
    recipe = named(recipe)
    _plain_call("cast_ste", prefer=prefer)
    text = json_of(type(recipe), fields_of(recipe))
    return torch.ops.breccia.cast_ste(x, text, *_options(x, axis, scale, rounding, seed, nonfinite), "", 0.0, 0.0)


def cast_ste_clipped(
    x: Array,
    recipe: Any,
    clip_min: float | None = None,
    clip_max: float | None = None,
    *,
    clip: str = "element",
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    prefer: Any = None,
) -> Array:
    """`breccia.cast_ste_clipped` under a compiler."""
    recipe = named(recipe)
    _plain_call("cast_ste_clipped", prefer=prefer)
    kind, fields = type(recipe), fields_of(recipe)
    bounds = _bounds(kind, fields, clip_min, clip_max, clip)
    options = _options(x, axis, scale, rounding, seed, nonfinite)
    return torch.ops.breccia.cast_ste(x, json_of(kind, fields), *options, clip, *bounds)


def _other_than_plain(storage: str) -> str | None:
    return None if storage == "plain" else storage


@constant
def _bounds(kind: Any, fields: tuple[Any, ...], low: float | None, high: float | None, clip: str) -> tuple[float, float]:
    return checks.clip_bounds(kind(*fields), low, high, clip) or (0.0, 0.0)


@constant
def _dtype_name(dtype: Any) -> str:
    return output_dtype(dtype)
