"""The operators that torch.compile sees of a layer in training: one each way, with the functions of eager mode in them.

They write to `pending` and to `main` without declaring it. A declared change would have to be undone and redone around gradients,
which fails for a layer that is called twice. Nothing else in a graph reads either: `pending` is a maximum, and `main` is read by
the optimizer.
"""

# Parameters of operators have the types of their schemas.
# ruff: noqa: ANN001
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .operands import Context, declared, empty_parts, recipe_of
from .state import StepState

_STATE = "Tensor? amaxes, Tensor? pending, Tensor? draws, Tensor? main"


def linear(x: Tensor, weight: Tensor, bias: Any, recipe: str, state: StepState | None, main: Any) -> Tensor:
    """The layer in a graph, for x (M, K). recipe: as JSON."""
    training = torch.is_grad_enabled()
    buffers = (None, None, None) if state is None else state.tensors()
    keep = training and weight.requires_grad
    return torch.ops.breccia.training_linear(x, weight, bias, *buffers, main, recipe, keep, training)[0]


def _linear(x, weight, bias, amaxes, pending, draws, main, recipe, keep: bool, record: bool) -> list[Tensor]:
    from . import linear as layer

    how = Context(recipe_of(recipe), amaxes, pending, draws)
    y, kept = layer.forward(x, weight, bias, how, x.dtype, keep=keep, record=record)
    return [y, *_owned(kept, how, keep)]


def _owned(kept: list[Tensor], how: Context, keep: bool) -> list[Tensor]:
    """The components as `_linear_fake` promises them: none for an operand in high precision, which is x itself."""
    column = declared(how.recipe, "input")[1]
    if not keep or column.recipe is None:
        return []
    data, *others = kept
    return [data.mT.contiguous().mT if column.axis == -2 else data, *(part.contiguous() for part in others)]


def _linear_fake(x, weight, bias, amaxes, pending, draws, main, recipe, keep: bool, record: bool) -> list[Tensor]:
    column = declared(recipe_of(recipe), "input")[1]
    kept = empty_parts(x, column, x.shape) if keep and column.recipe is not None else []
    return [x.new_empty(x.shape[0], weight.shape[0]), *kept]


def _backward(dy, weight, kept, amaxes, pending, draws, main, recipe, dtype, need_x: bool) -> list[Tensor]:
    from . import linear as layer

    how = Context(recipe_of(recipe), amaxes, pending, draws)
    dx, dw = layer.backward(dy, weight, kept, how, dtype, main, need_x)
    return [dy.new_empty(0) if v is None else v.contiguous() for v in (dx, dw)]


def _backward_fake(dy, weight, kept, amaxes, pending, draws, main, recipe, dtype, need_x: bool) -> list[Tensor]:
    dx = dy.new_empty((dy.shape[0], weight.shape[1]) if need_x else 0, dtype=dtype if need_x else None)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if kept and main is None else dy.new_empty(0)
    return [dx, dw]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias, amaxes, pending, draws, main, ctx.recipe, keep, _ = inputs
    kept = output[1:] or ([x] if keep else [])
    ctx.save_for_backward(weight, amaxes, pending, draws, main, *kept)
    ctx.dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradients: Any) -> tuple[Any, ...]:
    dy = gradients[0]
    weight, amaxes, pending, draws, main, *kept = ctx.saved_tensors
    need_x, need_w, need_bias, *others = ctx.needs_input_grad
    dx, dw = torch.ops.breccia.training_linear_backward(
        dy, weight, kept if need_w else [], amaxes, pending, draws, main, ctx.recipe, ctx.dtype, need_x
    )
    dbias = dy.float().sum(0).to(ctx.bias_dtype) if need_bias else None
    return dx if need_x else None, dw if need_w and main is None else None, dbias, *(None for _ in others)


def _register() -> None:
    forward: Any = torch.library.custom_op(
        "breccia::training_linear",
        _linear,
        mutates_args=(),
        schema=f"(Tensor x, Tensor weight, Tensor? bias, {_STATE}, str recipe, bool keep, bool record) -> Tensor[]",
    )
    forward.register_fake(_linear_fake)
    forward.register_autograd(_gradients, setup_context=_keep)
    backward: Any = torch.library.custom_op(
        "breccia::training_linear_backward",
        _backward,
        mutates_args=(),
        schema=f"(Tensor dy, Tensor weight, Tensor[] kept, {_STATE}, str recipe, ScalarType dtype, bool need_x) -> Tensor[]",
    )
    backward.register_fake(_backward_fake)


_register()
