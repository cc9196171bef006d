"""`TrainingExperts`: the weights of a mixture of experts, whose grouped GEMMs multiply low-precision operands both ways.

    forward    y[e]  = x[e] @ w[e].T      grouped along M
    backward   dx[e] = dy[e] @ w[e]       grouped along M
               dw[e] = dy[e].T @ x[e]     grouped along K, which is M of the layer

x[e] are the rows of expert e. Blocks of columns run along them, so each expert's rows begin at a whole block: rows of zeros lie
between. One cast then serves all experts, and its shapes do not depend on how many rows each has.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from breccia import BrecciaError, ScaledTensor, ShapeError, TrainingRecipe
from breccia.backend import calls, checks, composites, product_options

from ..ops import autocast_dtype
from . import graphs
from . import state as steps
from .layer import TrainingLayer
from .operands import (
    Context,
    Operand,
    cast_operand,
    cast_weight,
    columns_of,
    kept_of,
    multiply,
    operand_of,
    spread_count,
    step_of,
)


class Places(NamedTuple):
    """Where rows lie among rows of zeros. total: the number of all rows. of_rows: (M,) the place of each; `total` for none.

    offsets: (E,) int32, the end of each expert's rows there, a multiple of `step`.
    """

    total: int
    of_rows: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, count: int, offsets: Tensor, recipe: TrainingRecipe) -> Places:
        """The places of `count` rows, sorted by expert, of which those of expert e end at offsets[e]."""
        step = step_of(recipe, offsets.device.type)
        ends = offsets.long()
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        spread_ends = torch.cumsum((ends - starts + step - 1) // step * step, 0)
        shift = torch.cat([torch.cat([spread_ends.new_zeros(1), spread_ends[:-1]]) - starts, ends.new_zeros(1)])
        total = spread_count(count, len(offsets), recipe, offsets.device.type)
        row = torch.arange(count, device=offsets.device)
        expert = torch.searchsorted(ends, row, right=True)
        return cls(total, torch.where(expert < len(ends), row + shift[expert], total), spread_ends.to(torch.int32))

    def spread(self, x: Tensor) -> Tensor:
        """(M, K) to (total, K): the rows at their places, zeros elsewhere."""
        return x.new_zeros(self.total + 1, x.shape[1]).index_copy_(0, self.of_rows, x)[:-1]

    def gathered(self, y: Tensor) -> Tensor:
        """Inverse of `spread`; rows that belong to no expert are zero."""
        rows = y.index_select(0, self.of_rows.clamp(max=self.total - 1)) if self.total else y.new_zeros(0, y.shape[1])
        return torch.where((self.of_rows < self.total)[:, None], rows, 0)


def forward(
    x: Tensor, weight: Tensor, offsets: Tensor, how: Context, dtype: torch.dtype, *, need_x: bool, need_w: bool, record: bool
) -> tuple[Tensor, list[Tensor]]:
    """As `linear.forward`: (y, what `backward` needs of x) for x (M, K), weight (E, N, K) and offsets (E,)."""
    checks.check_grouped(x, weight.mT, offsets)
    places = Places.of(len(x), offsets, how.recipe)
    of_x = cast_operand(how, "input", places.spread(x), columns=need_w, record=record)
    captured = steps.in_graphs(weight)
    w_rows, _ = cast_weight(how, weight, captured=captured, columns=need_x and not captured)
    y = calls.grouped_matmul(of_x.rows, w_rows.mT, places.offsets, product_options(str(dtype).removeprefix("torch.")))
    return places.gathered(y), kept_of(of_x)


def backward(
    dy: Tensor, weight: Tensor, kept: list[Tensor], how: Context, dtype: torch.dtype, main: Any, need_x: bool, offsets: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dw) as `linear.backward` returns them. The ends of the experts' rows are read to the host."""
    places = Places.of(len(dy), offsets, how.recipe)
    kept, of_input = columns_of(how.recipe, kept)
    of_dy = cast_operand(how, "gradient", places.spread(dy), rows=need_x, columns=bool(kept), record=True)
    steps.note_batch(how, of_input, of_dy.amax)
    if how.draws is not None:
        steps.count_pass(how, weight)
    dx = dw = None
    if need_x:
        _, w_columns = cast_weight(how, weight, captured=steps.in_graphs(weight), rows=False)
        options = product_options(str(dtype).removeprefix("torch."))
        dx = places.gathered(calls.grouped_matmul(of_dy.rows, w_columns, places.offsets, options))
    if kept:
        assert of_dy.columns is not None
        x_columns = operand_of(kept, how.recipe.uses("input")[1], (places.total, weight.shape[-1]))
        wanted = weight.dtype if main is None else torch.float32
        fast = "grad_weight" in how.recipe.fast_accumulation
        dw = _weight_gradient(of_dy.columns, x_columns, places, wanted, fast)
        if main is not None:
            main.add_(dw)
            dw = None
    return dx, dw


def _weight_gradient(dy_columns: Operand, x_columns: Operand, places: Places, dtype: torch.dtype, fast: bool) -> Tensor:
    """dw (E, N, K) in `dtype`; zeros for experts without rows. fast: as of `multiply`."""
    if x_columns.device.type == "cpu":  # where products decode their operands: once for all experts
        options = product_options(str(dtype).removeprefix("torch."))
        return composites.k_grouped_matmul(dy_columns.mT, x_columns, places.offsets, options)
    pairs = zip(*(by_expert(columns, places) for columns in (dy_columns, x_columns)), strict=True)
    return torch.stack([multiply(g.mT, a, dtype, fast=fast) for g, a in pairs])


def by_expert(columns: Operand, places: Places) -> list[Operand]:
    """The columns of each expert: (its rows, K)."""
    ends = places.offsets.tolist()
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    rest = [places.total - sum(sizes)]
    split = columns.split([*sizes, *rest], 0) if isinstance(columns, ScaledTensor) else torch.split(columns, [*sizes, *rest])
    return list(split)[: len(sizes)]


graphs.WAYS["experts"] = forward, backward


class _Experts(torch.autograd.Function):
    """The experts in eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, how: Context, dtype: Any, record: bool) -> Tensor:
        need_x, need_w, *_ = ctx.needs_input_grad
        y, kept = forward(x, weight, offsets, how, dtype, need_x=need_x, need_w=need_w, record=record)
        ctx.save_for_backward(weight, offsets, *kept)
        ctx.weight, ctx.how, ctx.dtype = weight, how, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, offsets, *kept = ctx.saved_tensors
        need_x, *_ = ctx.needs_input_grad
        main = graphs.main_grad_of(ctx.weight) if columns_of(ctx.how.recipe, kept)[0] else None
        dx, dw = backward(gradients[0], ctx.weight, kept, ctx.how, ctx.dtype, main, need_x, offsets)
        return dx, dw, None, None, None, None


class TrainingExperts(TrainingLayer):
    """The weights of `num_experts` linear layers, which train in low precision under a `breccia.TrainingRecipe`.

    weight: a Parameter of shape (num_experts, out_features, in_features), drawn as that of `nn.Linear`. Calls take x of shape
    (M, in_features), rows sorted by expert, and offsets of shape (num_experts,), int32: the end of each expert's rows, as
    `breccia.grouped_matmul` takes them. They return (M, out_features); rows that belong to no expert are zero. Experts without
    rows get a gradient of zero. Per-tensor recipes have one scale for all experts.

    The backward pass reads the offsets to the host. Raises what `TrainingLinear` raises.

        >>> import torch, breccia_torch
        >>> experts = breccia_torch.nn.TrainingExperts(4, 128, 256, recipe="fp8_block")
        >>> offsets = torch.tensor([10, 10, 25, 32], dtype=torch.int32)  # the second expert has no rows
        >>> experts(torch.randn(32, 128), offsets).sum().backward()
        >>> experts.weight.grad[1].any()
        tensor(False)
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: TrainingRecipe | str,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype))
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        self.begin(recipe, seed)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        try:
            return self._product(x, offsets)
        except BrecciaError as e:
            raise self.failed(e) from e

    def _product(self, x: Tensor, offsets: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[1] != self.in_features:
            raise ShapeError(f"the experts take x of shape (M, {self.in_features}); got {tuple(x.shape)}.")
        dtype = autocast_dtype(x) or x.dtype
        if torch.compiler.is_compiling():
            return graphs.linear(x.to(dtype), self.weight, None, self.recipe_text, self.state, offsets)
        self.check_plain(x)
        return cast("Tensor", _Experts.apply(x.to(dtype), self.weight, offsets, self.context, dtype, torch.is_grad_enabled()))

    @torch.no_grad()
    def gemm_operands(self, x: Tensor, dy: Tensor, offsets: Tensor) -> dict[str, tuple[Any, Any]]:
        """What the grouped GEMMs of a step multiply, for x (M, in_features) and dy (M, out_features).

        Returns (a, b) by GEMM. "output" and "grad_input": a has the rows with zeros between, b is (E, K, N) and (E, N, K), and
        `grouped_offsets` are the ends of the experts' rows: (offsets, None). "grad_weight": lists, an item for each expert.
        """
        places = Places.of(len(x), offsets, self.recipe)
        of_x, of_w, of_dy = (
            cast_operand(self.context, tensor, v)
            for tensor, v in (("input", places.spread(x)), ("weight", self.weight), ("gradient", places.spread(dy)))
        )
        return {
            "output": (of_x.rows, of_w.rows.mT),
            "grad_input": (of_dy.rows, of_w.columns),
            "grad_weight": ([g.mT for g in by_expert(of_dy.columns, places)], by_expert(of_x.columns, places)),
            "grouped_offsets": (places.offsets, None),
        }

    def extra_repr(self) -> str:
        sides = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{self.num_experts} experts, {sides}, recipe={self.recipe!r}"


class ParameterExperts(TrainingExperts):
    """`TrainingExperts` of a 3-D Parameter that another module has, and keeps under its name; its own is a state at most.

    Wrappers may put another tensor in the Parameter's place, as FSDP does, so it is looked up in each call.
    """

    owner: tuple[nn.Module, str]
    #: What transformers ran the module by before this layer.
    implementation: Any

    @classmethod
    def of(cls, module: nn.Module, leaf: str, recipe: TrainingRecipe | str, *, seed: int | None = None, name: str = "") -> Self:
        """For the Parameter `leaf` (num_experts, out_features, in_features) of `module`."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.owner = module, leaf  # in a tuple, so that it is no submodule
        self.implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
        self.num_experts, self.out_features, self.in_features = self.weight.shape
        self.begin(recipe, seed, name)
        self.train(module.training)
        return self

    @property
    def weight(self) -> nn.Parameter:  # pyright: ignore[reportIncompatibleVariableOverride]
        module, leaf = self.owner
        return cast("nn.Parameter", getattr(module, leaf))
