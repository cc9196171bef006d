"""The `breccia::` operators: ops over flat tensors and a recipe's JSON. `graphs` has the functions that call them.

A compiler sees one operator per op and none of its Python; the operator selects the kernel at run time, as in eager mode.
Schemas are append-only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from breccia.backend import (
    DEFAULT,
    TENSOR,
    CastOptions,
    Layout,
    ScaledTensor,
    ScalingRecipe,
    calls,
    checks,
    components,
    packing,
    part_shapes,
    reference,
)

from .frontend import clipped_gradient, grouped_gradients, product_gradients, round_trip, within_scales
from .ops import TORCH

#: The sign of a seed of 64 bits.
SIGN = 1 << 63


# ------------------------------------------------------------------------------------------------ the operators


@torch.library.custom_op("breccia::cast", mutates_args=())
def _cast(
    x: Tensor, recipe: str, axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str
) -> list[Tensor]:
    """The components of `breccia.cast(x, ...)`, in order. `seed` has 64 bits; its sign is the highest."""
    return _cast_parts(calls.cast(x.detach(), recipe_of(recipe), _eager(axis, scale, rounding, seed, nonfinite)))


@_cast.register_fake
def _(x: Tensor, recipe: str, axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str) -> list[Tensor]:
    of = recipe_of(recipe)
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
    pair = calls.cast_pair(x.detach(), recipe_of(recipe), _eager(-1, scale, rounding, seed, nonfinite))
    return [part for st in pair for part in _cast_parts(st)]


@_cast_pair.register_fake
def _(x: Tensor, recipe: str, rounding: str, seed: int | None, nonfinite: str, scale: Tensor | None = None) -> list[Tensor]:
    options = (recipe, scale, rounding, seed, nonfinite)
    return [part for axis in (-1, -2) for part in torch.ops.breccia.cast(x, options[0], axis, *options[1:])]


@torch.library.custom_op("breccia::record_amax", mutates_args=())
def _record_amax(x: Tensor, recipe: str, amaxes: Tensor | None, scale: Tensor | None, number: float) -> list[Tensor]:
    """The amaxes and the scale of `AmaxHistory.update`. number: the scale, if it is no tensor."""
    before = number if scale is None else scale
    return list(calls.record_amax(x.detach(), recipe_of(recipe), () if amaxes is None else amaxes, before))


@_record_amax.register_fake
def _(x: Tensor, recipe: str, amaxes: Tensor | None, scale: Tensor | None, number: float) -> list[Tensor]:
    length: int = recipe_of(recipe).amax_history_len  # pyright: ignore
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
    st, *recorded = calls.cast_and_record(x.detach(), recipe_of(recipe), held, before, options)
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
    found = _parts(calls.requantize(_from_parts(parts, recipe, layout, axis, padding), recipe_of(into), options))
    taken = {part.data_ptr() for part in parts}  # an operator must not return a view of an input
    return [part.clone() if part.data_ptr() in taken else part for part in found]


@_requantize.register_fake
def _(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int, into: str, *options: Any) -> list[Tensor]:
    given = CastOptions(scale=options[0])
    st = _from_parts(parts, recipe, layout, axis, padding)
    if st.ndim == 1 and st.layout.block() != TENSOR:  # as `composites.requantize_row`
        found = reference.requantize(st.reshape(1, *st.shape), recipe_of(into), given)[0]
    else:
        found = reference.requantize(st, recipe_of(into), given)
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
    return calls.cast_matmul(x.detach(), recipe_of(recipe), right, added, dtype).contiguous()


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
        of = recipe_of(ctx.recipe)
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
    return round_trip(x.detach(), recipe_of(recipe), _clip(clip, low, high), options).contiguous()


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
    return within_scales(x.detach(), recipe_of(recipe), _eager(axis, scale, rounding, seed, nonfinite)).contiguous()


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
    of = recipe_of(recipe)
    named = dict(zip(of.format.parts, parts, strict=True))
    return ScaledTensor.from_parts(recipe=of, layout=layout_of(layout), axis=axis, padding=padding, **named)


def _operand(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int) -> ScaledTensor | Tensor:
    return _from_parts(parts, recipe, layout, axis, padding) if recipe else parts[0]


def _given(parts: list[Tensor], recipe: str, layout: str, axis: int, padding: int) -> ScaledTensor | Tensor:
    """A detached operand, as kernels receive it.

    Tensors that take no gradient stay the same objects: a kernel may keep on a weight that it has multiplied by it before.
    """
    return _operand([part.detach() if part.requires_grad else part for part in parts], recipe, layout, axis, padding)


@lru_cache(maxsize=512)
def recipe_of(text: str) -> ScalingRecipe:
    """The recipe of that JSON."""
    return ScalingRecipe.from_json(text)


@lru_cache(maxsize=512)
def layout_of(text: str) -> Layout:
    """The layout of that JSON."""
    return Layout.from_json(text)


def _eager(axis: int, scale: Tensor | None, rounding: str, seed: int | None, nonfinite: str) -> CastOptions:
    """The options of an op from the arguments of its operator."""
    if axis == -1 and scale is None and rounding == "nearest" and nonfinite == "propagate":
        return DEFAULT
    return CastOptions(axis, scale, rounding, None if seed is None else seed % (2 * SIGN), nonfinite)


def enable_compile() -> None:
    """Deprecated: does nothing. `torch.compile` captures the ops of breccia without it."""
