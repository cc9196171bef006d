"""The `breccia::` operators: verbs over flat tensors and a recipe's JSON, and what `torch.compile` puts in a verb's place.

A compiler sees one operator for a verb and none of its Python; which kernel serves is found inside the operator, as in eager
mode. Schemas are append-only. Where Dynamo meets a verb of `breccia` it traces the function of that name here instead, which
does nothing but arithmetic on shapes and calls of operators.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

import breccia
from breccia import api, tensor
from breccia.errors import UnsupportedError
from breccia.frameworks import output_dtype
from breccia.grids import packed_length, packing
from breccia.kernels import reference
from breccia.layouts import Layout
from breccia.ops import Array
from breccia.recipes import ScalingRecipe
from breccia.tensor import FIELDS, ScaledTensor, contraction_axis, held

from .gradients import clipped
from .ops import TORCH

_SIGN = 1 << 63


# ------------------------------------------------------------------------------------------------ the operators


@torch.library.custom_op("breccia::cast", mutates_args=())
def _cast(
    x: Tensor, recipe: str, axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str
) -> list[Tensor]:
    """The parts of `breccia.cast(x, ...)` that there are, in their order. `seed` holds 64 bits, its sign being the highest."""
    return list(held(breccia.cast(x, _recipe(recipe), **_eager(axis, scale, rounding, seed, nonfinite))).values())


@_cast.register_fake
def _(x: Tensor, recipe: str, axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str) -> list[Tensor]:
    of = _recipe(recipe)
    reference.check_cast(x, of)
    fmt, shape = of.format, list(x.shape)
    layout = reference.fitted_layout(of, tuple(shape), axis)
    scales = layout.scale_shapes(tuple(shape), axis)[0]
    shape[axis] = packed_length(fmt.element, shape[axis])
    stored = {"data": (tuple(shape), TORCH.storage(fmt.element)), "scale": (scales, TORCH.storage(fmt.scale.codec))}
    if fmt.offset != "none":
        stored["zero_point"] = (scales, stored["scale"][1] if fmt.offset == "bias" else "uint8")
    if fmt.global_scale is not None:
        stored["global_scale"] = ((), TORCH.storage(fmt.global_scale.codec))
    return [x.new_empty(size, dtype=getattr(torch, dtype)) for size, dtype in stored.values()]


@torch.library.custom_op("breccia::dequantize", mutates_args=())
def _dequantize(
    data: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    recipe: str,
    layout: str,
    axis: int,
    tail: int,
    dtype: str,
) -> Tensor:
    """`breccia.dequantize` of the tensor of these parts."""
    parts = (data, scale, _recipe(recipe), _layout(layout), zero_point, global_scale, axis, tail)
    return breccia.dequantize(ScaledTensor.assemble(*parts), out_dtype=dtype)


@_dequantize.register_fake
def _(
    data: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    recipe: str,
    layout: str,
    axis: int,
    tail: int,
    dtype: str,
) -> Tensor:
    codes, size = packing(_recipe(recipe).format.element)
    shape = list(data.shape)
    shape[axis] = shape[axis] // size * codes - tail
    return data.new_empty(shape, dtype=getattr(torch, dtype))


@torch.library.custom_op("breccia::cast_ste", mutates_args=())
def _cast_ste(
    x: Tensor,
    recipe: str,
    low: float | None,
    high: float | None,
    axis: int,
    scale: Tensor | None,
    rounding: str,
    seed: int | None,
    nonfinite: str,
) -> Tensor:
    """`breccia.cast_ste(x, ...)`; the gradient passes where `x` lies in [low, high], or everywhere."""
    return breccia.cast_ste(x.detach(), _recipe(recipe), **_eager(axis, scale, rounding, seed, nonfinite))


@_cast_ste.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.low, ctx.high, *_ = inputs
    if ctx.low is not None:
        ctx.save_for_backward(x)


def _pass(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    if ctx.low is not None:
        (x,) = ctx.saved_tensors
        gradient = clipped(gradient, x, ctx.low, ctx.high)
    return gradient, *(None,) * 8


_cast_ste.register_autograd(_pass, setup_context=_keep)


@cache
def _recipe(text: str) -> ScalingRecipe:
    return ScalingRecipe.from_json(text)


@cache
def _layout(text: str) -> Layout:
    return Layout.from_json(text)


def _eager(axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str) -> dict[str, Any]:
    """The options of a verb from those of its operator."""
    unsigned = None if seed is None else seed % (2 * _SIGN)
    return {"axis": axis, "scale": scale, "rounding": rounding, "seed": unsigned, "nonfinite": nonfinite}


# ------------------------------------------------------------------------------------------------ what Dynamo traces


def _constant(function: Any) -> Any:
    """A function that Dynamo calls, and does not look into: its arguments are constants, and so is what it gives."""
    return torch.compiler.assume_constant_result(function)


@_constant
def _names(kind: type) -> tuple[str, ...]:
    """The fields of a recipe or layout class."""
    return tuple(f.name for f in dataclasses.fields(kind))


@_constant
def _text(kind: type, fields: tuple[Any, ...]) -> str:
    """The JSON of the recipe or layout with these fields."""
    return kind(*fields).to_json()


@_constant
def _facts(kind: Any, fields: tuple[Any, ...]) -> tuple[tuple[str, ...], int, tuple[int | None, int | None]]:
    """Of a recipe: the parts that a cast gives, the codes of one packing group, and the block."""
    fmt = kind(*fields).format
    given = {"zero_point": fmt.offset != "none", "global_scale": fmt.global_scale is not None}
    return ("data", "scale", *(name for name, there in given.items() if there)), packing(fmt.element)[0], fmt.scale.block


@_constant
def _fitted(kind: Any, fields: tuple[Any, ...], axis: int, ndim: int, sides: tuple[int, int]) -> Layout:
    """The layout of a cast of `ndim` axes, of which the two last may have these lengths."""
    return reference.fitted_layout(kind(*fields), (1,) * (ndim - 2) + sides[-min(ndim, 2) :], axis)


def _fields(declared: Any) -> tuple[Any, ...]:
    return tuple([getattr(declared, name) for name in _names(type(declared))])


def _side(length: Any, block: int | None) -> int:
    """A length that blocks cut as they cut `length`, which a compiler may not know."""
    if block is None or block == 1:
        return 1
    return block if length % block == 0 else block + 1


def fill(self: ScaledTensor, *values: Any) -> None:
    """`breccia.tensor.fill` under a compiler, which knows no slots."""
    for name, value in zip(FIELDS, values):  # noqa: B905 (Dynamo knows no strict=)
        object.__setattr__(self, name, value)


@_constant
def _refuse(verb: str, name: str) -> None:
    raise UnsupportedError(f"{verb}: {name}= is for calls outside torch.compile; leave it out.")


def _plain_call(verb: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            _refuse(verb, name)


@_constant
def _negative(axis: int, ndim: int) -> int:
    return contraction_axis(axis, ndim)


def _options(x: Array, axis: int, scale: Any, rounding: str, seed: Any, nonfinite: str) -> tuple[Any, ...]:
    """The last arguments of an operator that casts."""
    if isinstance(scale, (int, float)):
        scale = torch.full((), float(scale), dtype=torch.float32, device=x.device)
    if seed is not None and seed >= _SIGN:
        seed = seed - 2 * _SIGN
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
    out: Any = None,
    prefer: Any = None,
) -> ScaledTensor:
    """`breccia.cast` under a compiler."""
    _plain_call("cast", out=out, prefer=prefer)
    kind, fields = type(recipe), _fields(recipe)
    options = _options(x, axis, scale, rounding, seed, nonfinite)
    parts = torch.ops.breccia.cast(x, _text(kind, fields), *options)
    names, group, (m, k) = _facts(kind, fields)
    axis = options[0]
    rows = x.shape[-3 - axis] if x.ndim > 1 else 1
    along, across = _side(x.shape[axis], k), _side(rows, m)
    layout = _fitted(kind, fields, axis, x.ndim, (across, along) if axis == -1 else (along, across))
    found = dict(zip(names, parts))  # noqa: B905
    offset, coarse = found.get("zero_point"), found.get("global_scale")
    tail = -x.shape[axis] % group
    return ScaledTensor.assemble(found["data"], found["scale"], recipe, layout, offset, coarse, axis, tail)


def dequantize(st: Any, *, out_dtype: Any = "float32", out: Any = None, prefer: Any = None) -> Array:
    """`breccia.dequantize` under a compiler."""
    _plain_call("dequantize", out=out, prefer=prefer)
    texts = _text(type(st.recipe), _fields(st.recipe)), _text(type(st.layout), _fields(st.layout))
    dtype = _dtype_name(out_dtype)
    return torch.ops.breccia.dequantize(st.data, st.scale, st.zero_point, st.global_scale, *texts, st.axis, st.tail, dtype)


def matmul(a: Any, b: Any, out_dtype: Any = "float32", *, out: Any = None, prefer: Any = None) -> Array:
    """`breccia.matmul` under a compiler."""
    _plain_call("matmul", out=out, prefer=prefer)
    left, right = (dequantize(x) if isinstance(x, ScaledTensor) else x.to(torch.float32) for x in (a, b))
    return torch.matmul(left, right).to(getattr(torch, _dtype_name(out_dtype)))


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
    _plain_call("cast_ste", prefer=prefer)
    text = _text(type(recipe), _fields(recipe))
    return torch.ops.breccia.cast_ste(x, text, None, None, *_options(x, axis, scale, rounding, seed, nonfinite))


def cast_ste_clipped(
    x: Array,
    recipe: Any,
    clip_min: float | None = None,
    clip_max: float | None = None,
    *,
    axis: int = -1,
    scale: Any = None,
    rounding: str = "nearest",
    seed: int | None = None,
    nonfinite: str = "propagate",
    prefer: Any = None,
) -> Array:
    """`breccia.cast_ste_clipped` under a compiler."""
    _plain_call("cast_ste_clipped", prefer=prefer)
    kind, fields = type(recipe), _fields(recipe)
    low, high = _bounds(kind, fields, clip_min, clip_max)
    options = _options(x, axis, scale, rounding, seed, nonfinite)
    return torch.ops.breccia.cast_ste(x, _text(kind, fields), low, high, *options)


@_constant
def _bounds(kind: Any, fields: tuple[Any, ...], low: float | None, high: float | None) -> tuple[float, float]:
    return reference.clip_bounds(kind(*fields), low, high)


@_constant
def _dtype_name(dtype: Any) -> str:
    return output_dtype(dtype)


@cache
def register() -> None:
    """Let Dynamo trace the functions here in the place of the verbs."""
    for traced in (cast, dequantize, matmul, cast_ste, cast_ste_clipped):
        torch.compiler.substitute_in_graph(getattr(api, traced.__name__))(traced)
    torch.compiler.substitute_in_graph(tensor.fill)(fill)
