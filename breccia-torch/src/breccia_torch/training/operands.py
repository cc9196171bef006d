"""The operands of the three GEMMs: x, w and dy, cast as a `TrainingRecipe` declares, each once for both of its orientations."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from breccia import DelayedScaling, NoKernelError, ScaledTensor, ScalingRecipe, TrainingRecipe, UnknownNameError
from breccia.backend import (
    DEFAULT,
    CastOptions,
    Rotation,
    calls,
    checks,
    components,
    packing,
    part_shapes,
    product_options,
    registry,
)
from breccia.internal import GemmOperand, rotating

from ..operators import json_in
from ..ops import TORCH
from . import state as steps

#: An operand of a GEMM: quantized, or an array for high precision.
Operand = ScaledTensor | Tensor


class Context(NamedTuple):
    """What casts of a layer depend on beside their tensor: its recipe, and the buffers of its `StepState`."""

    recipe: TrainingRecipe
    amaxes: Tensor | None = None
    scales: Tensor | None = None
    pending: Tensor | None = None
    draws: Tensor | None = None
    words: Tensor | None = None


@lru_cache(maxsize=64)
def recipe_of(text: str) -> TrainingRecipe:
    """The training recipe of a text (`operators.text_of`)."""
    return TrainingRecipe.from_json(json_in(text))


class CastOperand(NamedTuple):
    """The rows and the columns of a tensor, None for what was not asked for; and its amax (1,) for its history, or None."""

    rows: Any
    columns: Any
    amax: Tensor | None = None


def cast_operand(
    how: Context, tensor: str, x: Tensor, *, rows: bool = True, columns: bool = True, record: bool = False
) -> CastOperand:
    """The operands of a tensor (..., M, K). Rows and columns of equal recipes come from one `cast_pair`.

    record: find the amax too, if the tensor has a history.
    """
    first, second, alike = _uses(how.recipe, tensor)
    x = x.detach()
    options = DEFAULT
    if "stochastic" in (first.rounding, second.rounding):
        assert how.draws is not None
        options = CastOptions(rounding="stochastic", seed=steps.next_seed(how))
    paired = rows and columns and alike
    record = record and isinstance(getattr(how.recipe, tensor), DelayedScaling)
    delayed = first.recipe if isinstance(first.recipe, DelayedScaling) else second.recipe
    if isinstance(delayed, DelayedScaling):
        scale = steps.delayed_scale(how, tensor, delayed, x)
        if record and x.is_cuda:  # one read
            if paired:
                return CastOperand(*calls.cast_pair_and_record(x, delayed, (), scale, options)[:3])
            if rows and not columns and first.recipe is not None:
                cast, amax, _ = calls.cast_and_record(x, delayed, (), scale, options)
                return CastOperand(cast, None, amax)
        options = options.replace(scale=scale)
    amax = steps.amax_of(x) if record else None
    if paired:
        of_rows, of_columns = calls.cast_pair(x, first.recipe, options)
        return CastOperand(of_rows, of_columns, amax)
    cast = _cast(x, first, options) if rows or second.from_codes else None
    source = calls.dequantize(cast) if second.from_codes and columns else x
    return CastOperand(cast if rows else None, _cast(source, second, options) if columns else None, amax)


@lru_cache(maxsize=256)
def _uses(recipe: TrainingRecipe, tensor: str) -> tuple[GemmOperand, GemmOperand, bool]:
    """The rows and the columns of a tensor, and whether both are quantized in the same way."""
    first, second = recipe.uses(tensor)
    return first, second, first.recipe is not None and first == second._replace(axis=-1)


def _cast(x: Tensor, operand: GemmOperand, options: CastOptions) -> Operand:
    if operand.recipe is None:
        return x
    options = options if operand.axis == -1 else options.replace(axis=-2)
    if operand.rotation is None:
        return calls.cast(x, operand.recipe, options)
    recipe = _rotating(operand.recipe, operand.rotation)
    if recipe is not None:
        return rotating.renamed(calls.cast(x, recipe, options), operand.recipe)
    return calls.cast(rotating.rotated(x, operand.rotation, operand.axis), operand.recipe, options)


@lru_cache(maxsize=64)
def _rotating(recipe: ScalingRecipe, rotation: Rotation) -> ScalingRecipe | None:
    """The recipe with the rotation, whose cast may have a kernel; None where its class has none, or it has one of its own."""
    known: Any = recipe
    if recipe.format.rotation is not None or not {"rotation", "rotation_seed"} <= {field.name for field in fields(known)}:
        return None
    return replace(known, rotation=rotation.block, rotation_seed=rotation.seed)


def kept_of(x: CastOperand) -> list[Tensor]:
    """What a forward pass keeps of x: the components of its columns, and its amax where later scales of x come from it."""
    return [*([] if x.columns is None else parts_of(x.columns)), *([] if x.amax is None else [x.amax])]


def columns_of(recipe: TrainingRecipe, kept: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """(the components of columns, the amax) in what a forward pass kept before a backward pass."""
    return (kept[:-1], kept[-1]) if isinstance(recipe.input, DelayedScaling) else (kept, None)


class _Kept:
    """What is kept of a weight: what it was when it was cast, and its casts (rows, columns) by recipe and history."""

    __slots__ = ("casts", "now", "weight")

    def __init__(self, weight: Tensor, now: tuple[Any, ...]) -> None:
        self.weight, self.now = WeakIdRef(weight, partial(_forget, id(weight))), now
        self.casts: dict[Any, tuple[Any, Any]] = {}


#: By the ids of weights. A dictionary of weak keys takes several times as long to look up, in each pass of each layer.
_weights: dict[int, _Kept] = {}
#: The weights that were cast last.
_last: deque[Any] = deque(maxlen=256)


def _forget(number: int, _: Any = None) -> None:
    _weights.pop(number, None)


def forget_casts() -> None:
    """Let go of the casts of all weights. The next pass of a layer casts its weight again."""
    _weights.clear()
    _last.clear()


def cast_weight(how: Context, weight: Tensor, *, captured: bool, rows: bool = True, columns: bool = True) -> tuple[Any, Any]:
    """(rows, columns) of a weight, cast once until it changes: an optimizer steps, or anything writes to it in place.

    Values written through `weight.data` are noticed at the end of the step. Layers that share a weight share its casts. Casts
    of a weight without memory, as fully_shard leaves it after a pass, are let go when the next weight is cast.

    captured: what `steps.in_graphs` says of the weight. Then nothing is kept here: each call casts what it asks for. The rows
    are asked for first, so they record the amax.
    """
    if captured:
        return _noted(how, cast_operand(how, "weight", weight, rows=rows, columns=columns, record=rows))
    now = weight.data_ptr(), weight.dtype, weight._version, steps.generation
    of_weight = _weights.get(id(weight))
    if of_weight is None or of_weight.now != now or of_weight.weight() is not weight:
        of_weight = _weights[id(weight)] = _Kept(weight, now)
    key = (how.recipe, None) if how.amaxes is None else (how.recipe, id(how.amaxes), how.amaxes._version)
    kept = of_weight.casts.get(key, (None, None))
    missing = rows and kept[0] is None, columns and kept[1] is None
    if any(missing):
        while _last and ((last := _last[-1]()) is None or not last.data_ptr()):
            _last.pop()
            if last is not None:
                _forget(id(last))
        _last.append(of_weight.weight)
        cast = _noted(how, cast_operand(how, "weight", weight, rows=missing[0], columns=missing[1], record=True))
        kept = of_weight.casts[key] = (cast[0] if missing[0] else kept[0], cast[1] if missing[1] else kept[1])
    return kept


def _noted(how: Context, weight: CastOperand) -> tuple[Any, Any]:
    """The rows and the columns, after the amax is noted."""
    steps.note_weight(how, weight.amax)
    return weight.rows, weight.columns


#: The products with fast accumulation. torch's takes the host longer, because it searches for an algorithm in each call.
FAST = ("cuda.fp8_matmul_fast", "torch.scaled_mm_fast")
#: Operands that none of them takes, of the last calls. To find that out takes longer than a small product.
_refused: set[Any] = set()
_REMEMBERED = 1024


def multiply(a: Any, b: Any, dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool = False) -> Tensor:
    """`a @ b + bias`, accumulated in FP32 and rounded once; of two arrays, torch's product in `dtype`.

    fast: sums may stay in tensor cores, if the device has such a product of quantized operands.
    """
    if isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor):
        options = product_options(str(dtype).removeprefix("torch."), bias)
        if fast:
            key = registry().table, a.recipe, b.recipe, a.shape, b.shape, a.data.device, dtype, bias is None
            if key not in _refused:
                with suppress(NoKernelError, UnknownNameError):  # without breccia-triton the names are unknown
                    return calls.matmul(a, b, options, prefer=FAST)
                if len(_refused) >= _REMEMBERED:
                    _refused.clear()
                _refused.add(key)
        return calls.matmul(a, b, options)
    a, b = a.to(dtype), b.to(dtype)
    return torch.mm(a, b) if bias is None else torch.addmm(bias.to(dtype), a, b)


# ------------------------------------------------------------------------------------------------ numbers of rows

#: What GEMMs need the number of rows to be a multiple of, by type of device; rows of zeros are added.
ROWS = {"cuda": 16}


def step_of(recipe: TrainingRecipe, device: str) -> int:
    """What each expert's rows are a multiple of: the blocks and rotations along M, and what GEMMs of the device need."""
    sides = [ROWS.get(device, 1)]
    for tensor in ("input", "gradient"):
        column = recipe.uses(tensor)[1]
        length = None if column.recipe is None else column.recipe.format.block[1]
        sides += [length or 1, 1 if column.rotation is None else column.rotation.block]
    return math.lcm(*sides)


def spread_count(count: int, experts: int, recipe: TrainingRecipe, device: str) -> int:
    """The number of rows with zeros between, an upper bound that is the same for all `offsets`."""
    step = step_of(recipe, device)
    return (count + experts * (step - 1)) // step * step


# ------------------------------------------------------------------------------------------------ as lists of tensors


def parts_of(operand: Operand) -> list[Tensor]:
    """The components of an operand, in order; an array is the only one. The inverse of `operand_of`."""
    return list(components(operand).values()) if isinstance(operand, ScaledTensor) else [operand]


def operand_of(parts: Sequence[Tensor], of: GemmOperand, shape: tuple[int, ...]) -> Operand:
    """The operand with these components. shape: of the tensor."""
    if of.recipe is None:
        return parts[0]
    layout = checks.fitted_layout(of.recipe, shape, of.axis)
    named = dict(zip(of.recipe.format.parts, parts, strict=True))
    padding = -shape[of.axis] % packing(of.recipe.format.element)[0]
    return ScaledTensor.from_parts(recipe=of.recipe, layout=layout, axis=of.axis, padding=padding, **named)


def empty_parts(like: Tensor, of: GemmOperand, shape: tuple[int, ...]) -> list[Tensor]:
    """Tensors of the shapes, dtypes and strides of an operand's components, for compilers."""
    assert of.recipe is not None
    shapes = part_shapes(of.recipe.format, checks.fitted_layout(of.recipe, shape, of.axis), shape, of.axis)
    dtypes = TORCH.dtypes(of.recipe.format)
    data, *others = [like.new_empty(s, dtype=getattr(torch, dtypes[name])) for name, s in shapes.items()]
    return [data.new_empty(data.mT.shape).mT if of.axis == -2 else data, *others]
