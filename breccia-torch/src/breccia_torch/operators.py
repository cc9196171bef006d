"""The `breccia::` operators: ops over flat tensors and a recipe's JSON, and the substitutes of ops in `torch.compile`.

A compiler sees one operator per op and none of its Python; the operator selects the kernel at run time, as in eager mode.
Schemas are append-only. In place of an op of `breccia`, Dynamo traces the function of that name here, which only does
arithmetic on shapes and calls operators.
"""

from __future__ import annotations

import dataclasses
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import breccia
from breccia import backend
from breccia.backend import (
    DEFAULT,
    FIELDS,
    TENSOR,
    Array,
    Block,
    CastOptions,
    Layout,
    ScaledTensor,
    ScalingRecipe,
    Stored,
    TensorPair,
    UnsupportedError,
    as_recipe,
    calls,
    checks,
    components,
    contraction_axis,
    keeps_parts,
    output_dtype,
    packing,
    part_shapes,
    reference,
)

from .frontend import clipped_gradient, grouped_gradients, product_gradients, round_trip, within_scales
from .ops import TORCH

_SIGN = 1 << 63


# ------------------------------------------------------------------------------------------------ the operators


@torch.library.custom_op("breccia::cast", mutates_args=())
def _cast(
    x: Tensor, recipe: str, axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str
) -> list[Tensor]:
    """The components of `breccia.cast(x, ...)`, in order. `seed` has 64 bits; its sign is the highest."""
    return _cast_parts(calls.cast(x.detach(), _recipe(recipe), _eager(axis, scale, rounding, seed, nonfinite)))


@_cast.register_fake
def _(x: Tensor, recipe: str, axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str) -> list[Tensor]:
    of = _recipe(recipe)
    checks.check_cast(x, of)
    shapes = part_shapes(of.format, checks.fitted_layout(of, tuple(x.shape), axis), tuple(x.shape), axis)
    dtypes = TORCH.dtypes(of.format)
    parts = [x.new_empty(shape, dtype=getattr(torch, dtypes[name])) for name, shape in shapes.items()]
    return [x.new_empty(parts[0].mT.shape, dtype=parts[0].dtype).mT, *parts[1:]] if axis == -2 else parts


@torch.library.custom_op("breccia::cast_pair", mutates_args=())
def _cast_pair(
    x: Tensor, recipe: str, rounding: str, seed: int | None, nonfinite: str, scale: Tensor | None = None
) -> list[Tensor]:
    """The components of both tensors of `breccia.cast_pair(x, ...)`, one tensor after the other."""
    pair = calls.cast_pair(x.detach(), _recipe(recipe), _eager(-1, scale, rounding, seed, nonfinite))
    return [part for st in pair for part in _cast_parts(st)]


@_cast_pair.register_fake
def _(
    x: Tensor, recipe: str, rounding: str, seed: int | None, nonfinite: str, scale: Tensor | None = None
) -> list[Tensor]:
    options = (recipe, scale, rounding, seed, nonfinite)
    return [part for axis in (-1, -2) for part in torch.ops.breccia.cast(x, options[0], axis, *options[1:])]


@torch.library.custom_op("breccia::record_amax", mutates_args=())
def _record_amax(x: Tensor, recipe: str, amaxes: Tensor | None, scale: Tensor | None, number: float) -> list[Tensor]:
    """The amaxes and the scale of `AmaxHistory.update`. number: the scale, if it is no tensor."""
    before = number if scale is None else scale
    return list(calls.record_amax(x.detach(), _recipe(recipe), () if amaxes is None else amaxes, before))


@_record_amax.register_fake
def _(x: Tensor, recipe: str, amaxes: Tensor | None, scale: Tensor | None, number: float) -> list[Tensor]:
    length: int = _recipe(recipe).amax_history_len  # pyright: ignore
    kept = 0 if amaxes is None else min(amaxes.shape[0], length - 1)
    return [x.new_empty(shape, dtype=torch.float32) for shape in ((kept + 1,), ())]


@torch.library.custom_op("breccia::cast_and_record", mutates_args=())
def _cast_and_record(
    x: Tensor,
    recipe: str,
    amaxes: Tensor | None,
    scale: Tensor | None,
    number: float,
    axis: int,
    rounding: str,
    seed: int | None,
    nonfinite: str,
) -> list[Tensor]:
    """The components of the cast of `AmaxHistory.cast`, then its amaxes and its scale."""
    before, options = number if scale is None else scale, _eager(axis, None, rounding, seed, nonfinite)
    held = () if amaxes is None else amaxes
    st, *recorded = calls.cast_and_record(x.detach(), _recipe(recipe), held, before, options)
    return [*_cast_parts(st), *recorded]


@_cast_and_record.register_fake
def _(
    x: Tensor, recipe: str, amaxes: Tensor | None, scale: Tensor | None, number: float, axis: int, *options: Any
) -> list[Tensor]:
    parts = torch.ops.breccia.cast(x, recipe, axis, None, *options)
    return [*parts, *torch.ops.breccia.record_amax(x, recipe, amaxes, scale, number)]


@torch.library.custom_op("breccia::dequantize", mutates_args=())
def _dequantize(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int, dtype: str) -> Tensor:
    """`breccia.dequantize` of the tensor of these components."""
    return calls.dequantize(_from_parts([p.detach() for p in parts], recipe, layout, axis, padding), dtype).contiguous()


@_dequantize.register_fake
def _(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int, dtype: str) -> Tensor:
    shape = _from_parts(parts, recipe, layout, axis, padding).shape
    return parts[0].new_empty(shape, dtype=getattr(torch, dtype))


@torch.library.custom_op("breccia::requantize", mutates_args=())
def _requantize(
    parts: list[Tensor],
    recipe: str,
    layout: str,
    axis: int,
    padding: int,
    into: str,
    scale: Tensor | None,
    rounding: str,
    seed: int | None,
    nonfinite: str,
) -> list[Tensor]:
    """The components of `breccia.requantize` of the tensor of these components to the recipe `into`."""
    options = _eager(-1, scale, rounding, seed, nonfinite)
    found = _parts(calls.requantize(_from_parts(parts, recipe, layout, axis, padding), _recipe(into), options))
    taken = {part.data_ptr() for part in parts}  # an operator must not return a view of an input
    return [part.clone() if part.data_ptr() in taken else part for part in found]


@_requantize.register_fake
def _(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int, into: str, *options: Any) -> list[Tensor]:
    given = CastOptions(scale=options[0])
    st = _from_parts(parts, recipe, layout, axis, padding)
    if st.ndim == 1 and st.layout.block() != TENSOR:  # as `composites.requantize_row`
        found = reference.requantize(st.reshape(1, *st.shape), _recipe(into), given)[0]
    else:
        found = reference.requantize(st, _recipe(into), given)
    return [torch.empty_like(part, memory_format=torch.contiguous_format) for part in _parts(found)]


@torch.library.custom_op("breccia::matmul", mutates_args=())
def _matmul(
    a: list[Tensor],
    a_recipe: str,
    a_layout: str,
    a_axis: int,
    a_tail: int,
    b: list[Tensor],
    b_recipe: str,
    b_layout: str,
    b_axis: int,
    b_tail: int,
    dtype: str,
) -> Tensor:
    """`breccia.matmul`; an operand with recipe "" is an array, the only item of its list."""
    left, right = _given(a, a_recipe, a_layout, a_axis, a_tail), _given(b, b_recipe, b_layout, b_axis, b_tail)
    return calls.matmul(left, right, None, dtype).contiguous()


@_matmul.register_fake
def _(a: list[Tensor], *rest: Any) -> Tensor:
    return _fake_product(a[0], _operand(a, *rest[:4]), _operand(*rest[4:9]), None, rest[9])


@torch.library.custom_op("breccia::biased_matmul", mutates_args=())
def _biased_matmul(
    a: list[Tensor],
    a_recipe: str,
    a_layout: str,
    a_axis: int,
    a_tail: int,
    b: list[Tensor],
    b_recipe: str,
    b_layout: str,
    b_axis: int,
    b_tail: int,
    dtype: str,
    bias: Tensor,
) -> Tensor:
    """`breccia.matmul` with a bias."""
    left, right = _given(a, a_recipe, a_layout, a_axis, a_tail), _given(b, b_recipe, b_layout, b_axis, b_tail)
    return calls.matmul(left, right, bias.detach(), dtype).contiguous()


@_biased_matmul.register_fake
def _(a: list[Tensor], *rest: Any) -> Tensor:
    return _fake_product(a[0], _operand(a, *rest[:4]), _operand(*rest[4:9]), rest[10], rest[9])


def _fake_product(like: Tensor, left: Any, right: Any, bias: Any, dtype: str) -> Tensor:
    checks.check_matmul(left, right, bias)
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return like.new_empty((*lead, left.shape[-2], right.shape[-1]), dtype=getattr(torch, dtype))


@torch.library.custom_op("breccia::cast_matmul", mutates_args=())
def _cast_matmul(
    x: Tensor,
    recipe: str,
    b: list[Tensor],
    b_recipe: str,
    b_layout: str,
    b_axis: int,
    b_tail: int,
    dtype: str,
    bias: Tensor | None,
) -> Tensor:
    """`breccia.cast_matmul`; `b` is passed as in `breccia::matmul`."""
    right, added = _given(b, b_recipe, b_layout, b_axis, b_tail), None if bias is None else bias.detach()
    return calls.cast_matmul(x.detach(), _recipe(recipe), right, added, dtype).contiguous()


@_cast_matmul.register_fake
def _(x: Tensor, recipe: str, b: list[Tensor], *rest: Any) -> Tensor:
    return _fake_product(x, x, _operand(b, *rest[:4]), rest[5], rest[4])


@torch.library.custom_op("breccia::grouped_matmul", mutates_args=())
def _grouped_matmul(
    a: list[Tensor],
    a_recipe: str,
    a_layout: str,
    a_axis: int,
    a_tail: int,
    b: list[Tensor],
    b_recipe: str,
    b_layout: str,
    b_axis: int,
    b_tail: int,
    offsets: Tensor,
    dtype: str,
) -> Tensor:
    """`breccia.grouped_matmul`; operands are passed as in `breccia::matmul`."""
    left, right = _given(a, a_recipe, a_layout, a_axis, a_tail), _given(b, b_recipe, b_layout, b_axis, b_tail)
    return calls.grouped_matmul(left, right, offsets, dtype).contiguous()


@_grouped_matmul.register_fake
def _(a: list[Tensor], *rest: Any) -> Tensor:
    left, right, offsets = _operand(a, *rest[:4]), _operand(*rest[4:9]), rest[9]
    checks.check_grouped(left, right, offsets)
    return a[0].new_empty((left.shape[0], right.shape[-1]), dtype=getattr(torch, rest[10]))


# Gradients in graphs are those of the frontend, over operators. Operands are lists of components and their metadata.


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias = inputs[0], inputs[5], inputs[11] if len(inputs) > 11 else None
    ctx.save_for_backward(*a, *b, bias)
    ctx.split, ctx.operand_metadata = len(a), (inputs[1:5], inputs[6:10])


def _product_gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *saved, bias = ctx.saved_tensors
    first, second = ctx.operand_metadata
    a, b = _operand(saved[: ctx.split], *first), _operand(saved[ctx.split :], *second)
    needed = _any(ctx.needs_input_grad[0]), _any(ctx.needs_input_grad[5]), bias is not None
    left, right, added = product_gradients(_product, gradient, a, b, bias, needed)
    lists = [[None] * ctx.split if left is None else [left], [None] * (len(saved) - ctx.split) if right is None else [right]]
    return lists[0], *(None,) * 4, lists[1], *(None,) * 5, *(() if bias is None else (added,))


def _any(needed: Any) -> bool:
    return any(needed) if isinstance(needed, list | tuple) else bool(needed)


def _product(a: Any, b: Any) -> Tensor:
    """A product as an operator."""
    return torch.ops.breccia.matmul(*_listed(a), *_listed(b), "float32")


def _listed(x: Any) -> tuple[Any, ...]:
    """The operator arguments that describe an operand."""
    if not isinstance(x, ScaledTensor):
        return [x], "", "", -1, 0
    return list(components(x).values()), x.recipe.to_json(), x.layout.to_json(), x.axis, x.padding


_matmul.register_autograd(_product_gradients, setup_context=_keep_operands)
_biased_matmul.register_autograd(_product_gradients, setup_context=_keep_operands)


def _keep_cast_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.recipe, b, *ctx.operand_metadata = inputs[:7]
    ctx.save_for_backward(x, *b, inputs[8])


def _cast_product_gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, *b, bias = ctx.saved_tensors
    right, wanted = _operand(b, *ctx.operand_metadata), _any(ctx.needs_input_grad[2])
    written = x
    if wanted:
        parts = torch.ops.breccia.cast(x, ctx.recipe, -1, None, "nearest", None, "propagate")
        of = _recipe(ctx.recipe)
        layout = checks.fitted_layout(of, tuple(x.shape), -1)
        written = _from_parts(parts, ctx.recipe, layout.to_json(), -1, -x.shape[-1] % packing(of.format.element)[0])
    needed = ctx.needs_input_grad[0], wanted, bias is not None
    first, second, added = product_gradients(_product, gradient, x, right, bias, needed, written)
    return first, None, [None] * len(b) if second is None else [second], *(None,) * 5, added


_cast_matmul.register_autograd(_cast_product_gradients, setup_context=_keep_cast_operands)


def _keep_groups(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offsets = inputs[0], inputs[5], inputs[10]
    ctx.save_for_backward(*a, *b, offsets)
    ctx.split, ctx.operand_metadata = len(a), (inputs[1:5], inputs[6:10])


def _group_gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *saved, offsets = ctx.saved_tensors
    first, second = ctx.operand_metadata
    a, b = _operand(saved[: ctx.split], *first), _operand(saved[ctx.split :], *second)
    needed = _any(ctx.needs_input_grad[0]), _any(ctx.needs_input_grad[5])
    left, right = grouped_gradients(_grouped, gradient, a, b, offsets, needed, _values)
    lists = [[None] * ctx.split if left is None else [left], [None] * (len(saved) - ctx.split) if right is None else [right]]
    return lists[0], *(None,) * 4, lists[1], *(None,) * 6


def _grouped(a: Any, b: Any, offsets: Tensor) -> Tensor:
    return torch.ops.breccia.grouped_matmul(*_listed(a), *_listed(b), offsets, "float32")


def _values(x: Any) -> Tensor:
    """An operand in FP32."""
    return torch.ops.breccia.dequantize(*_listed(x), "float32") if isinstance(x, ScaledTensor) else x.float()


_grouped_matmul.register_autograd(_group_gradients, setup_context=_keep_groups)


@torch.library.custom_op("breccia::cast_ste", mutates_args=())
def _cast_ste(
    x: Tensor,
    recipe: str,
    axis: int,
    scale: Tensor | None,
    rounding: str,
    seed: int | None,
    nonfinite: str,
    clip: str,
    low: float,
    high: float,
) -> Tensor:
    """`breccia.cast_ste(x, ...)`. The gradient passes everywhere (`clip` is ""), or as in `breccia.cast_ste_clipped`."""
    options = _eager(axis, scale, rounding, seed, nonfinite)
    return round_trip(x.detach(), _recipe(recipe), _clip(clip, low, high), options).contiguous()


def _clip(clip: str, low: float, high: float) -> Any:
    """The clip as the frontend represents it."""
    return None if not clip else clip if clip == "scale" else (low, high)


@_cast_ste.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("breccia::within_scales", mutates_args=())
def _within_scales(
    x: Tensor, recipe: str, axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str
) -> Tensor:
    """Mask of elements that do not saturate under the scales of their blocks."""
    return within_scales(x.detach(), _recipe(recipe), _eager(axis, scale, rounding, seed, nonfinite)).contiguous()


@_within_scales.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.recipe, ctx.axis, scale, *ctx.options, ctx.clip, ctx.low, ctx.high = inputs
    if ctx.clip:
        ctx.save_for_backward(x, scale)


def _pass(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    clip = _clip(ctx.clip, ctx.low, ctx.high)
    if clip is not None:
        x, scale = ctx.saved_tensors
        options = (ctx.recipe, ctx.axis, scale, *ctx.options)
        gradient = clipped_gradient(torch.ops.breccia.within_scales, gradient, x, clip, *options)
    return gradient, *(None,) * 9


_cast_ste.register_autograd(_pass, setup_context=_keep)


def _each(operator: Any) -> Any:
    """The vmap rule of operators that see one example at a time: per-tensor scales are per example."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        def at(argument: Any, axis: Any, i: int) -> Any:
            if isinstance(argument, list):
                return [at(item, axis[n], i) for n, item in enumerate(argument)] if axis is not None else argument
            return argument if axis is None else argument.select(axis, i)

        def example(i: int) -> list[Any]:
            return [at(a, axis, i) for a, axis in zip(arguments, in_dims, strict=True)]

        return torch.stack([operator(*example(i)) for i in range(info.batch_size)]), 0

    return rule


_cast_ste.register_vmap(_each(torch.ops.breccia.cast_ste))
_within_scales.register_vmap(_each(torch.ops.breccia.within_scales))
_dequantize.register_vmap(_each(torch.ops.breccia.dequantize))
_matmul.register_vmap(_each(torch.ops.breccia.matmul))
_biased_matmul.register_vmap(_each(torch.ops.breccia.biased_matmul))
_cast_matmul.register_vmap(_each(torch.ops.breccia.cast_matmul))


def _parts(st: ScaledTensor) -> list[Tensor]:
    """Contiguous, as the fake implementations promise: compilers rely on strides."""
    return [part.contiguous() for part in components(st).values()]


def _cast_parts(st: ScaledTensor) -> list[Tensor]:
    """As `_parts`, but codes of a block are next to each other, as products read them: along axis -2 columns are contiguous."""
    data, *parts = components(st).values()
    data = data.mT.contiguous().mT if st.axis == -2 else data.contiguous()
    return [data, *(part.contiguous() for part in parts)]


def _from_parts(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int) -> ScaledTensor:
    of = _recipe(recipe)
    named = dict(zip(of.format.parts, parts, strict=True))
    return ScaledTensor.from_parts(recipe=of, layout=_layout(layout), axis=axis, padding=padding, **named)


def _operand(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int) -> ScaledTensor | Tensor:
    return _from_parts(parts, recipe, layout, axis, padding) if recipe else parts[0]


def _given(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int) -> ScaledTensor | Tensor:
    """A detached operand, as kernels receive it.

    Tensors that take no gradient stay the same objects: a kernel may keep on a weight that it has multiplied by it before.
    """
    return _operand([part.detach() if part.requires_grad else part for part in parts], recipe, layout, axis, padding)


@lru_cache(maxsize=512)
def _recipe(text: str) -> ScalingRecipe:
    return ScalingRecipe.from_json(text)


@lru_cache(maxsize=512)
def _layout(text: str) -> Layout:
    return Layout.from_json(text)


def _eager(axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str) -> CastOptions:
    """The options of an op from the arguments of its operator."""
    if axis == -1 and scale is None and rounding == "nearest" and nonfinite == "propagate":
        return DEFAULT
    return CastOptions(axis, scale, rounding, None if seed is None else seed % (2 * _SIGN), nonfinite)


# ------------------------------------------------------------------------------------------------ what Dynamo traces


def _constant(function: Any) -> Any:
    """A function that Dynamo calls but does not trace: its arguments and result are constants."""
    return torch.compiler.assume_constant_result(function)


def _named(recipe: Any) -> Any:
    """The recipe, of which only the name may have been given."""
    return _of_name(recipe) if isinstance(recipe, str) else recipe


@_constant
def _of_name(name: str) -> ScalingRecipe:
    return as_recipe(name)


@_constant
def _names(kind: type) -> tuple[str, ...]:
    """The fields of a recipe or layout class."""
    return tuple(f.name for f in dataclasses.fields(kind))


@_constant
def _text(kind: type, fields: tuple[Any, ...]) -> str:
    """The JSON of the recipe or layout with these fields."""
    return kind(*fields).to_json()


@_constant
def _facts(kind: Any, fields: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[int, int], Block]:
    """Of a recipe: the components of a cast, the (codes, bytes) of a packing group, and the block."""
    fmt = kind(*fields).format
    return tuple(fmt.parts), packing(fmt.element), fmt.scale.block


@_constant
def _fitted(kind: Any, fields: tuple[Any, ...], axis: int, ndim: int, sides: tuple[int, int]) -> Layout:
    """The layout of a cast of `ndim` axes, the last two with lengths equivalent to these."""
    if ndim == 1 and kind(*fields).layout.block() != TENSOR:  # a row of a matrix, which `requantize` takes
        return breccia.cast(np.zeros((1, sides[-1]), np.float32), kind(*fields))[0].layout
    return checks.fitted_layout(kind(*fields), (1,) * (ndim - 2) + sides[-min(ndim, 2) :], axis)


def _fields(declared: Any) -> tuple[Any, ...]:
    return tuple([_known(getattr(declared, name)) for name in _names(type(declared))])


def _known(value: Any) -> Any:
    """A field's value; a symbolic integer of Dynamo is specialized to its concrete value."""
    return range(value).stop if isinstance(value, int) and not isinstance(value, bool) else value


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
    _, (codes, size), _ = _facts(type(st.recipe), _fields(st.recipe))
    shape = list(st.data.shape)
    shape[st.axis] = shape[st.axis] // size * codes - st.padding
    return tuple(shape)


@_constant
def _refuse(op: str, name: str) -> None:
    raise UnsupportedError(f"{op}: {name}= is not supported inside torch.compile; leave it out.")


def _plain_call(op: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            _refuse(op, name)


@_constant
def _negative(axis: int, ndim: int) -> int:
    return contraction_axis(axis, ndim)


def _options(x: Array, axis: int, scale: Any, rounding: str, seed: Any, nonfinite: str) -> tuple[Any, ...]:
    """The option arguments of an operator that casts."""
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
    storage: str = "plain",
    out: Any = None,
    prefer: Any = None,
) -> ScaledTensor:
    """`breccia.cast` under a compiler."""
    recipe = _named(recipe)
    _plain_call("cast", storage=_other_than_plain(storage), out=out, prefer=prefer)
    kind, fields = type(recipe), _fields(recipe)
    options = _options(x, axis, scale, rounding, seed, nonfinite)
    parts = torch.ops.breccia.cast(x, _text(kind, fields), *options)
    return _written(parts, recipe, x.shape, options[0])


def _written(parts: list[Tensor], recipe: Any, shape: Any, axis: int) -> ScaledTensor:
    """The tensor of the components of a cast of an array of `shape`."""
    kind, fields = type(recipe), _fields(recipe)
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
    return parts, _text(type(x.recipe), _fields(x.recipe)), _layout_text(x.layout), x.axis, x.padding


def _layout_text(layout: Any) -> str:
    """The JSON of a layout, including a storage layout."""
    if type(layout) is not Stored:
        return _text(type(layout), _fields(layout))
    plain = _text(type(layout.layout), _fields(layout.layout))
    return _stored_text(plain, layout.storage, tuple([_known(n) for n in layout.matrix]), _known(layout.data_axes))


@_constant
def _stored_text(plain: str, storage: str, matrix: tuple[int, ...], data_axes: int) -> str:
    return Stored(_layout(plain), storage, matrix, data_axes).to_json()


def transposed(layout: Any) -> Layout:
    """`layout.mT` under a compiler."""
    return _transposed(_layout_text(layout))


@_constant
def _transposed(text: str) -> Layout:
    return _layout(text).mT


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
    recipe = _named(recipe)
    _plain_call("cast_pair", storage=_other_than_plain(storage), prefer=prefer)
    kind, fields = type(recipe), _fields(recipe)
    _, scale, *options = _options(x, -1, scale, rounding, seed, nonfinite)
    parts = torch.ops.breccia.cast_pair(x, _text(kind, fields), *options, scale)
    half = len(parts) // 2
    shape = tuple(x.shape)
    return TensorPair(_written(parts[:half], recipe, shape, -1), _written(parts[half:], recipe, shape, -2))


def record_amax(x: Array, recipe: Any, amaxes: Any, scale: Any) -> tuple[Array, Array]:
    """`breccia.AmaxHistory.update` under a compiler."""
    amaxes, scale = torch.ops.breccia.record_amax(x, _text(type(recipe), _fields(recipe)), *_recorded(amaxes, scale))
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
    text = _text(type(recipe), _fields(recipe))
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
    st, recipe = _held(st), _named(recipe)
    given = _other_than_plain(storage)
    _plain_call("requantize", require_exact=require_exact or None, storage=given, out=out, prefer=prefer)
    flat = _flat(st)
    kind, fields = type(recipe), _fields(recipe)
    if type(st.layout) is not Stored and scale is None and nonfinite == "propagate" and _keeps(*flat[1:4], kind, fields):
        return ScaledTensor.from_parts(
            st.data, st.scale, recipe, st.layout, st.zero_point, st.global_scale, st.axis, st.padding
        )
    options = _options(st.data, st.axis, scale, rounding, seed, nonfinite)
    parts = torch.ops.breccia.requantize(*flat, _text(kind, fields), *options[1:])
    return _written(parts, recipe, logical_shape(st), st.axis)


@_constant
def _keeps(recipe: str, layout: str, axis: int, kind: Any, fields: tuple[Any, ...]) -> bool:
    return keeps_parts(_recipe(recipe), _layout(layout), axis, kind(*fields))


def matmul(a: Any, b: Any, out_dtype: Any = "float32", *, bias: Any = None, out: Any = None, prefer: Any = None) -> Array:
    """`breccia.matmul` under a compiler."""
    _plain_call("matmul", out=out, prefer=prefer)
    flat = (*_flat(a), *_flat(b), _dtype_name(out_dtype))
    return torch.ops.breccia.matmul(*flat) if bias is None else torch.ops.breccia.biased_matmul(*flat, bias)


def cast_matmul(x: Array, recipe: Any, b: Any, out_dtype: Any = "float32", *, bias: Any = None, prefer: Any = None) -> Array:
    """`breccia.cast_matmul` under a compiler."""
    recipe = _named(recipe)
    _plain_call("cast_matmul", prefer=prefer)
    text = _text(type(recipe), _fields(recipe))
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
    recipe = _named(recipe)
    _plain_call("cast_ste", prefer=prefer)
    text = _text(type(recipe), _fields(recipe))
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
    recipe = _named(recipe)
    _plain_call("cast_ste_clipped", prefer=prefer)
    kind, fields = type(recipe), _fields(recipe)
    bounds = _bounds(kind, fields, clip_min, clip_max, clip)
    options = _options(x, axis, scale, rounding, seed, nonfinite)
    return torch.ops.breccia.cast_ste(x, _text(kind, fields), *options, clip, *bounds)


def _other_than_plain(storage: str) -> str | None:
    return None if storage == "plain" else storage


@_constant
def _bounds(kind: Any, fields: tuple[Any, ...], low: float | None, high: float | None, clip: str) -> tuple[float, float]:
    return checks.clip_bounds(kind(*fields), low, high, clip) or (0.0, 0.0)


@_constant
def _dtype_name(dtype: Any) -> str:
    return output_dtype(dtype)


#: The substitutes, by op name.
_TRACED = (cast, cast_pair, dequantize, requantize, matmul, cast_matmul, grouped_matmul, cast_ste, cast_ste_clipped)


@cache
def enable_compile() -> None:
    """Let `torch.compile` capture the ops of breccia without graph breaks, with `fullgraph=True` and dynamic batches.

    Call it once, before compiling a function that uses them. It loads Dynamo, which takes a second, so `import breccia` does
    not call it. Quantized layers need no call.
    """
    for traced in _TRACED:
        torch.compiler.substitute_in_graph(getattr(breccia, traced.__name__))(traced)
    for traced in (cast_and_record, fill, logical_shape, record_amax, transposed):
        torch.compiler.substitute_in_graph(getattr(backend, traced.__name__))(traced)


@_constant
def enable_in_trace() -> None:
    """`enable_compile`, called by Dynamo while it traces a layer: it substitutes what it reaches afterwards."""
    enable_compile()
