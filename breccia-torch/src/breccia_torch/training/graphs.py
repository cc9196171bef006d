"""The operators that torch.compile sees of a layer in training: one each way, with the functions of eager mode in them.

They write to `pending`, `words` and `main` without declaring it: with declared changes, autograd refuses a layer that is called
twice before its backward pass. Nothing else in a graph reads them: `pending` is a maximum, `words` are the layer's own, and
`main` is the optimizer's.
"""

# Parameters of operators have the types of their schemas.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from breccia import DelayedScaling, UnsupportedError

from .operands import Context, columns_of, empty_parts, recipe_of, spread_count
from .state import StepState

#: The (forward, backward) functions of layers by name; the modules of these enter them.
WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_STATE = (
    "Tensor? offsets, Tensor? amaxes, Tensor? scales, Tensor? pending, Tensor? draws, Tensor? words, Tensor? main, str recipe"
)


def linear(x: Tensor, weight: Tensor, bias: Any, recipe: str, state: StepState | None, offsets: Tensor | None = None) -> Tensor:
    """The layer in a graph, for x (M, K). recipe: its text. offsets: of experts.

    Where x takes no gradient, that of the weight is `weight.grad` in spite of a `main_grad`: graphs omit an operator whose
    results nothing uses.
    """
    training = torch.is_grad_enabled()
    main = main_grad_of(weight) if x.requires_grad else None
    buffers = (None,) * 5 if state is None else state.tensors()
    needs = training and x.requires_grad, training and weight.requires_grad
    return torch.ops.breccia.training_linear(x, weight, bias, offsets, *buffers, main, recipe, *needs, training)[0]


def _forward(
    x, weight, bias, offsets, amaxes, scales, pending, draws, words, main, recipe, need_x, need_w, record
) -> list[Tensor]:
    how = Context(recipe_of(recipe), amaxes, scales, pending, draws, words)
    needs = {"need_x": need_x, "need_w": need_w, "record": record}
    if offsets is None:
        y, kept, _ = WAYS["linear"][0](x, weight, bias, how, x.dtype, **needs)
    else:
        y, kept = WAYS["experts"][0](x, weight, offsets, how, x.dtype, **needs)
    column = how.recipe.uses("input")[1]
    if need_w and column.recipe is None and offsets is None:  # x itself, which an operator must not return
        return [y, *kept[1:]]
    if not kept:
        return [y]
    data, *others = kept  # with the strides of `_forward_fake`
    data = data.mT.contiguous().mT if need_w and column.recipe is not None else data.contiguous()
    return [y, data, *(part.contiguous() for part in others)]


def _forward_fake(
    x, weight, bias, offsets, amaxes, scales, pending, draws, words, main, recipe, need_x, need_w, record
) -> list[Tensor]:
    column, m, k = recipe_of(recipe).uses("input")[1], *x.shape
    if offsets is not None:
        m = spread_count(m, len(weight), recipe_of(recipe), x.device.type)
    kept: list[Tensor] = []
    if need_w and column.recipe is not None:
        kept = empty_parts(x, column, (m, k))
    elif need_w and offsets is not None:
        kept = [x.new_empty(m, k)]
    if record and isinstance(recipe_of(recipe).input, DelayedScaling):
        kept.append(x.new_empty(1, dtype=torch.float32))
    return [x.new_empty(x.shape[0], weight.shape[-2]), *kept]


def _backward(dy, weight, kept, offsets, amaxes, scales, pending, draws, words, main, recipe, dtype, need_x) -> list[Tensor]:
    how = Context(recipe_of(recipe), amaxes, scales, pending, draws, words)
    if offsets is None:
        results = WAYS["linear"][1](dy, weight, kept, how, dtype, main, need_x)
    else:
        results = WAYS["experts"][1](dy, weight, kept, how, dtype, main, need_x, offsets)
    return [dy.new_empty(0) if v is None else v.contiguous() for v in results]


def _backward_fake(
    dy, weight, kept, offsets, amaxes, scales, pending, draws, words, main, recipe, dtype, need_x
) -> list[Tensor]:
    dx = dy.new_empty((dy.shape[0], weight.shape[-1]) if need_x else 0, dtype=dtype if need_x else None)
    need_w = columns_of(recipe_of(recipe), kept)[0] and main is None
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_w else dy.new_empty(0)
    return [dx, dw]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, bias, offsets, amaxes, scales, pending, draws, words, main, ctx.recipe, _, need_w, _ = inputs
    plain = need_w and offsets is None and recipe_of(ctx.recipe).uses("input")[1].recipe is None
    kept = [x, *output[1:]] if plain else output[1:]
    ctx.save_for_backward(weight, offsets, amaxes, scales, pending, draws, words, main, *kept)
    ctx.dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype


def _gradients(ctx: Any, gradients: Any) -> tuple[Any, ...]:
    dy = gradients[0]
    weight, offsets, amaxes, scales, pending, draws, words, main, *kept = ctx.saved_tensors
    need_x, need_w, need_bias, *others = ctx.needs_input_grad
    dx, dw = torch.ops.breccia.training_linear_backward(
        dy, weight, kept, offsets, amaxes, scales, pending, draws, words, main, ctx.recipe, ctx.dtype, need_x
    )
    dbias = dy.float().sum(0).to(ctx.bias_dtype) if need_bias else None
    return dx if need_x else None, dw if need_w and main is None else None, dbias, *(None for _ in others)


def main_grad_of(weight: Any) -> Tensor | None:
    """The FP32 tensor beside a weight that gradients accumulate into, as Megatron's optimizers have it; or None."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return None
    if main.dtype != torch.float32 or main.shape != weight.shape:
        raise UnsupportedError(
            f"main_grad of a weight is an FP32 tensor of its shape {tuple(weight.shape)}; got {main.dtype} {tuple(main.shape)}."
        )
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    return main


def _register() -> None:
    forward: Any = torch.library.custom_op(
        "breccia::training_linear",
        _forward,
        mutates_args=(),
        schema=f"(Tensor x, Tensor weight, Tensor? bias, {_STATE}, bool need_x, bool need_w, bool record) -> Tensor[]",
    )
    forward.register_fake(_forward_fake)
    forward.register_autograd(_gradients, setup_context=_keep)
    backward: Any = torch.library.custom_op(
        "breccia::training_linear_backward",
        _backward,
        mutates_args=(),
        schema=f"(Tensor dy, Tensor weight, Tensor[] kept, {_STATE}, ScalarType dtype, bool need_x) -> Tensor[]",
    )
    backward.register_fake(_backward_fake)


_register()
