"""GPTQ for any recipe: codes with error feedback, under scales that are given (Frantar et al., arXiv:2210.17323)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from breccia import Codec, ScaledTensor
from breccia.internal import affine

from .moments import Moments

#: Columns whose errors are added up before they reach the columns after them.
_STEP = 128
#: How often damping grows tenfold where the second moment cannot be inverted.
_TRIES = 6
#: A column that the ones before it give to this share of its mean square says nothing new; and what is added meanwhile, so that
#: FP64 can factorize a singular matrix.
_DEPENDENT, _JITTER = 1e-9, 1e-11


class Damped(NamedTuple):
    """A second moment that can be inverted: the mean of x xᵀ plus `damping` times its mean diagonal on the diagonal.

    grown: how often damping grew tenfold, since the factorization failed.
    """

    second: Tensor
    inverse: Tensor
    damping: float
    grown: int


class Correction(NamedTuple):
    """How a matrix got its codes. damping: None where it keeps those of the cast. grown: see `Damped`.

    rank: of the second moment, or None without one.
    """

    damping: float | None = None
    grown: int = 0
    rank: int | None = None


def damped(moments: Moments, damping: float, order: Tensor) -> Damped | None:
    """The damped second moment, with its rows and columns in `order`, and the upper Cholesky factor of its inverse.

    Fewer tokens than columns say less, and leave directions of which nothing is known: damping grows by the columns for each
    token. It grows tenfold while the factorization fails. None for inputs that are all zero, or if it fails six times.
    """
    mean = (moments.second / max(1, moments.count))[order][:, order]
    unit = float(mean.diagonal().mean())
    if unit == 0.0:
        return None
    columns = len(mean)
    damping *= max(1.0, columns / max(1, moments.count))
    for grown in range(_TRIES):
        second = mean.clone()
        second.diagonal().add_(damping * unit)
        lower, failed = torch.linalg.cholesky_ex(second)
        if not int(failed):
            inverse, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(torch.isfinite(inverse).all()):
                return Damped(second, inverse, damping, grown)
        damping *= 10
    return None


def rank(second: Tensor) -> int:
    """The dimensions that inputs span: the columns of their second moment that others do not give."""
    norms = second.diagonal().sqrt()
    scales = torch.where(norms > 0, 1 / norms, 0)
    correlation = second * scales * scales[:, None]
    correlation.diagonal().add_(_JITTER)
    factor, failed = torch.linalg.cholesky_ex(correlation)
    sound = int(failed) - 1 if int(failed) else len(factor)
    return int((factor.diagonal()[:sound].square() > _DEPENDENT).sum())


def feedback(weight: Tensor, zero: Tensor, step: Tensor, inverse: Tensor, codec: Codec) -> Tensor:
    """The codes, int32, of each row of `weight`: nearest, column by column, each with the errors of the columns before it.

    weight, zero, step: FP32, (rows, columns); a code that stands for n decodes to zero + step * n. inverse: the upper Cholesky
    factor of the inverse of the damped second moment, FP64. A number between two codes gets the lower one. Under a step of 0
    or NaN, the code is 0, and the error is not fed on.
    """
    numbers, codes = (torch.from_numpy(part).to(weight.device) for part in affine.numbers_of_codec(codec))
    middles = (numbers[1:] + numbers[:-1]) / 2
    nothing = int(numbers.abs().argmin())
    usable = torch.isfinite(step) & (step != 0)
    reciprocal = torch.where(usable, 1 / step, 0)
    weight, factor = weight.clone(), inverse.float()
    written = torch.empty(weight.shape, dtype=torch.int32, device=weight.device)
    for start in range(0, weight.shape[1], _STEP):
        end = min(start + _STEP, weight.shape[1])
        block = weight[:, start:end]
        errors = torch.zeros_like(block)
        for j in range(end - start):
            column, of = block[:, j], start + j
            index = torch.bucketize((column - zero[:, of]) * reciprocal[:, of], middles)
            index = torch.where(usable[:, of], index, nothing)
            written[:, of] = codes[index]
            value = zero[:, of] + step[:, of] * numbers[index]
            error = torch.where(usable[:, of], (column - value) / factor[of, of], 0)
            errors[:, j] = error
            block[:, j + 1 :] -= error[:, None] * factor[of, of + 1 : end]
        weight[:, end:] -= errors @ factor[start:end, end:]
    return written


def output_error(difference: Tensor, second: Tensor) -> float:
    """The sum of squares of difference @ x over the tokens whose sum (or mean) of x xᵀ is `second`."""
    return float(((difference @ second.to(difference.dtype)) * difference).sum(dtype=torch.float64))


def corrected(
    weight: Tensor, scaled: ScaledTensor, moments: Sequence[Moments], damping: float, by_importance: bool
) -> tuple[ScaledTensor, list[Correction]]:
    """A cast with its codes chosen again, under its scales, and how each matrix got its codes.

    weight: FP32, (rows, columns), or (matrices, rows, columns) with the moments of each. by_importance: columns of large inputs
    first, rather than in their order. A matrix keeps the codes of the cast where it has no moments, where these cannot be
    inverted, and where feedback would not lower the error of its outputs: its damping is None.
    """
    parts = (torch.from_numpy(part).to(weight.device).reshape(weight.shape) for part in affine.affine(scaled))
    zero, step = parts
    stack = weight if weight.ndim == 3 else weight[None]
    codes = torch.from_numpy(affine.codes_of(scaled).astype(np.int32)).reshape(stack.shape)
    used: list[Correction] = []
    for n, (matrix, of) in enumerate(zip(stack, moments, strict=True)):
        used.append(Correction())
        if of.count == 0:
            continue
        used[-1] = Correction(rank=rank(of.second))
        columns = torch.arange(matrix.shape[1], device=weight.device)
        order = torch.argsort(of.second.diagonal(), descending=True, stable=True) if by_importance else columns
        moment = damped(of, damping, order)
        if moment is None:
            continue
        matrix, z, s = (part[:, order] for part in (matrix, zero.reshape(stack.shape)[n], step.reshape(stack.shape)[n]))
        found = feedback(matrix, z, s, moment.inverse, scaled.recipe.format.element)
        before, after = (_decoded(c, z, s, scaled.recipe.format.element) for c in (codes[n].to(order.device)[:, order], found))
        if output_error(matrix - after, moment.second) < output_error(matrix - before, moment.second):
            codes[n][:, order.cpu()] = found.cpu()
            used[-1] = used[-1]._replace(damping=moment.damping, grown=moment.grown)
    return affine.with_codes(scaled, codes.reshape(weight.shape).numpy()), used


def _decoded(codes: Tensor, zero: Tensor, step: Tensor, codec: Codec) -> Tensor:
    """What codes decode to, in FP32."""
    table = torch.tensor([codec.value(code) for code in range(1 << codec.bits)], device=codes.device)
    return zero + step * torch.nan_to_num(table[(codes & ((1 << codec.bits) - 1)).long()])
