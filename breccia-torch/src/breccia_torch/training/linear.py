"""`TrainingLinear`: an `nn.Linear` whose three GEMMs multiply low-precision operands, and its gradient.

    forward    y  = x @ w.T           rows of x, rows of w
    backward   dx = dy @ w            rows of dy, columns of w
               dw = dy.T @ x          columns of dy, columns of x

x and dy are cast once for both of their GEMMs, w once per optimizer step. Of x, the 8-bit columns are kept for the backward
pass. `operands` casts, `state` has histories and counters, and the recipe says the rest.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from breccia import BrecciaError, ShapeError, TrainingRecipe

from ..ops import autocast_dtype
from . import graphs
from . import state as steps
from .layer import TrainingLayer
from .operands import (
    ROWS,
    Context,
    Operand,
    cast_operand,
    cast_weight,
    columns_of,
    kept_of,
    multiply,
    operand_of,
    parts_of,
)
from .state import StepState


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    how: Context,
    dtype: torch.dtype,
    *,
    need_x: bool,
    need_w: bool,
    record: bool,
    holds: bool = False,
) -> tuple[Tensor, list[Tensor], Operand | None]:
    """(y in `dtype`, what `backward` needs of x, columns of the weight to hold) for x (M, K), weight (N, K) and bias (N,).

    need_x, need_w: the gradients that the backward pass will compute. The second needs the components of the columns of x.
    record: a backward pass may follow, which notes amaxes for the scales of later steps. holds: where a CUDA graph has the
    weight, the caller holds its columns for `backward`, since nothing else keeps them. Otherwise the third result is None.
    """
    captured = steps.in_graphs(weight)
    of_x = cast_operand(how, "input", x, columns=need_w, record=record)
    w_rows, w_columns = cast_weight(how, weight, captured=captured, columns=need_x and (holds or not captured))
    fast = "output" in how.recipe.fast_accumulation
    y = multiply(of_x.rows, w_rows.mT, dtype, None if bias is None else bias.detach(), fast=fast)
    return y, kept_of(of_x), w_columns if captured else None


def backward(
    dy: Tensor,
    weight: Tensor,
    kept: list[Tensor],
    how: Context,
    dtype: torch.dtype,
    main: Tensor | None,
    need_x: bool,
    w_columns: Operand | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(dx in `dtype`, dw in the dtype of the weight) for dy (M, N). kept, w_columns: what `forward` returned.

    dx is None unless `need_x`. dw is None without columns, and with `main`, an FP32 tensor that it is added to.
    """
    kept, of_input = columns_of(how.recipe, kept)
    dy_rows, dy_columns, of_gradient = cast_operand(how, "gradient", dy, rows=need_x, columns=bool(kept), record=True)
    steps.note_batch(how, of_input, of_gradient)
    if how.draws is not None:
        steps.count_pass(how, weight)
    dx = dw = None
    fast = how.recipe.fast_accumulation
    if need_x:
        if w_columns is None:
            _, w_columns = cast_weight(how, weight, captured=steps.in_graphs(weight), rows=False)
        dx = multiply(dy_rows, w_columns, dtype, fast="grad_input" in fast)
    if kept:
        assert dy_columns is not None
        x_columns = operand_of(kept, how.recipe.uses("input")[1], (len(dy), weight.shape[-1]))
        dtype = weight.dtype if main is None else torch.float32
        dw = multiply(dy_columns.mT, x_columns, dtype, fast="grad_weight" in fast)
        if main is not None:
            main.add_(dw)
            dw = None
    return dx, dw


graphs.WAYS["linear"] = forward, backward


class _Linear(torch.autograd.Function):
    """The layer in eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Context, dtype: Any, record: bool) -> Tensor:
        need_x, need_w, *_ = ctx.needs_input_grad
        needs = {"need_x": need_x, "need_w": need_w, "record": record}
        y, kept, w_columns = forward(x, weight, bias, how, dtype, **needs, holds=True)
        of_w = [] if w_columns is None else parts_of(w_columns)
        # The saved weight is for autograd's check that nothing writes to it before the backward pass. Checkpoints would
        # return it as another object, whose casts nobody has kept.
        ctx.save_for_backward(weight, *of_w, *kept)
        ctx.weight, ctx.how, ctx.dtype, ctx.bias, ctx.parts_of_w = weight, how, x.dtype, bias, len(of_w)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, *saved = ctx.saved_tensors
        of_w, kept = saved[: ctx.parts_of_w], saved[ctx.parts_of_w :]
        recipe, weight = ctx.how.recipe, ctx.weight
        w_columns = operand_of(of_w, recipe.uses("weight")[1], tuple(weight.shape)) if of_w else None
        need_x, _, need_bias, *_ = ctx.needs_input_grad
        main = graphs.main_grad_of(weight) if columns_of(recipe, kept)[0] else None
        dx, dw = backward(gradients[0], weight, kept, ctx.how, ctx.dtype, main, need_x, w_columns)
        return dx, dw, gradients[0].float().sum(0).to(ctx.bias.dtype) if need_bias else None, None, None, None


class TrainingLinear(nn.Linear, TrainingLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`nn.Linear` that trains in low precision under a `breccia.TrainingRecipe`.

    The arguments are those of `nn.Linear`, and `recipe`, a recipe or the name of a preset. The weight and the bias are
    Parameters in high precision, so optimizers, clipping, averages, tying and `state_dict` work as ever. Inputs are FP32, FP16
    or BF16 of shape (..., in_features); the output has their dtype, or autocast's. Where the weight has an FP32 `main_grad`,
    its gradient is added to that, and `weight.grad` stays None.

    Raises what `TrainingRecipe` raises; calls raise ShapeError for another number of features, and what `breccia.cast` and
    `breccia.matmul` raise, with the name of the layer.

        >>> import torch, breccia_torch
        >>> layer = breccia_torch.nn.TrainingLinear(128, 256, recipe="fp8_block")
        >>> layer(torch.randn(32, 128)).sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([256, 128])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: TrainingRecipe | str,
        seed: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.begin(recipe, seed)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: TrainingRecipe | str, *, seed: int | None = None, name: str = "") -> Self:
        """A layer with the Parameters, the mode and the hooks of `linear`."""
        self = cls.__new__(cls)
        self.__dict__.update(linear.__dict__)
        self._modules = dict(linear._modules)
        self.begin(recipe, seed, name)
        return self

    def reset_parameters(self) -> None:
        """Draw new weights, as `nn.Linear` does, and forget histories."""
        super().reset_parameters()
        state: StepState | None = self.__dict__.get("_modules", {}).get("state")
        if state is not None:
            state.reset(int(torch.randint(1 << 62, ())) if self.recipe.stochastic else 0)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not x.ndim or x.shape[-1] != self.in_features:
            raise self.failed(ShapeError(f"the layer has {self.in_features} features; got x of shape {tuple(x.shape)}."))
        dtype = autocast_dtype(x) or x.dtype
        m = x.shape[:-1].numel()
        rows = x if x.dtype == dtype else x.to(dtype)
        rows = rows if x.ndim == 2 else rows.reshape(m, self.in_features)
        missing = -m % ROWS.get(x.device.type, 1)
        if missing:
            rows = nn.functional.pad(rows, (0, 0, 0, missing))
        if torch.compiler.is_compiling():
            y = graphs.linear(rows, self.weight, self.bias, self.recipe_text, self.state)
        else:
            try:
                self.check_plain(x)
                y: Any = _Linear.apply(rows, self.weight, self.bias, self.context, dtype, torch.is_grad_enabled())
            except BrecciaError as e:
                raise self.failed(e) from e
        if x.ndim == 2 and not missing:
            return y
        # No view to autograd: fully_shard warns of views, as writes to them in place would drop its hooks.
        return torch.ops.aten._unsafe_view(y[:m] if missing else y, (*x.shape[:-1], self.out_features))

    @torch.no_grad()
    def gemm_operands(self, x: Tensor, dy: Tensor) -> dict[str, tuple[Operand, Operand]]:
        """What the three GEMMs of a step multiply, for x (..., in_features) and dy (..., out_features).

        Returns (a, b) by GEMM: "output", (M, K) by (K, N); "grad_input", (M, N) by (N, K); "grad_weight", (N, M) by (M, K).
        `breccia.matmul(a, b)` is the GEMM. Random numbers are those of the next backward pass. Nothing is recorded.

            >>> import torch, breccia_torch
            >>> layer = breccia_torch.nn.TrainingLinear(128, 256, bias=False, recipe="fp8_block")
            >>> x, dy = torch.randn(32, 128), torch.randn(32, 256)
            >>> operands = layer.gemm_operands(x, dy)
            >>> operands["grad_weight"][0].shape
            (256, 32)
            >>> torch.equal(breccia.matmul(*operands["output"]), layer(x))
            True
        """
        dtype = autocast_dtype(x) or x.dtype
        x, dy = x.to(dtype).reshape(-1, self.in_features), dy.reshape(-1, self.out_features)
        of_x, of_w, of_dy = (
            cast_operand(self.context, tensor, v) for tensor, v in (("input", x), ("weight", self.weight), ("gradient", dy))
        )
        return {
            "output": (of_x.rows, of_w.rows.mT),
            "grad_input": (of_dy.rows, of_w.columns),
            "grad_weight": (of_dy.columns.mT, of_x.columns),
        }

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe!r}"
