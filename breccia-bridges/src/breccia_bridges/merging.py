"""Add a low-rank change to a quantized matrix: codes whose sum of errors, along the change, is close to zero.

Rounding each sum to the nearest code loses most of a change that is small beside the step between codes: each code stays. Here
codes are chosen column by column with error feedback (GPTQ: Frantar et al., arXiv:2210.17323), under the second moment
aᵀ a + damping of a change b a. Errors e then nearly vanish along the inputs that the change reads, e aᵀ, and so does their
product with the change. With a second moment of low rank, feedback needs no matrix larger than (rank, rank).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from breccia import BrecciaError, Codec, LayoutError, ScaledTensor, cast, dequantize
from breccia.backend import components
from breccia.internal import affine, part_grids, with_parts

from .adapters import LowRank

#: What is added to the diagonal of the second moment, as a share of its mean.
DAMPING = 0.1


@dataclass(frozen=True)
class Survival:
    """How much of a change survives, as sums over elements; of several tensors, `+` adds them.

    wanted: of d², d the change. along: of d (q - w), for the decoded values w before and q after. missed: of (q - w - d)².
    """

    wanted: float = 0.0
    along: float = 0.0
    missed: float = 0.0

    @classmethod
    def of(cls, before: np.ndarray, after: np.ndarray, change: np.ndarray) -> Survival:
        d, made = change.astype(np.float64), after.astype(np.float64) - before
        return cls(float((d * d).sum()), float((d * made).sum()), float(np.square(made - d).sum()))

    def __add__(self, other: Survival) -> Survival:
        return Survival(self.wanted + other.wanted, self.along + other.along, self.missed + other.missed)

    @property
    def share(self) -> float:
        """The projection of what changed on the change, as a share of it: 1 where all survives, 0 where nothing does."""
        return self.along / self.wanted if self.wanted else 1.0

    @property
    def error(self) -> float:
        """The norm of what is changed otherwise, as a multiple of that of the change."""
        return math.sqrt(self.missed / self.wanted) if self.wanted else 0.0


@dataclass(frozen=True)
class Merged:
    """A tensor with a change. blocks: those of the scale. changed: of them, those with a change. rescaled: with a new scale."""

    tensor: ScaledTensor
    survival: Survival
    blocks: int
    changed: int
    rescaled: int


def merged(st: ScaledTensor, change: LowRank) -> Merged:
    """The quantized matrix with the change added, under the same recipe. change: of its shape.

    Blocks without a change keep their codes and scales. Others keep their scale while their values fit under it, and get the
    one of a cast where they do not; the scale of the whole tensor stays beside scales of blocks.

    Raises UnsupportedError for formats whose blocks choose between two codecs.
    """
    before, wanted = dequantize(st), change.matrix()
    target = before + wanted
    blocks = _Blocks.of(st)
    of_blocks = blocks.any(wanted != 0)
    is_new = blocks.spread(of_blocks)
    scaled, rescaled = _rescaled(st, target, blocks, is_new)
    zero, step = affine.affine(scaled)
    codes, axis = affine.codes_of(scaled), st.axis
    codes, target, zero, step, is_new = (part if axis == -1 else part.T for part in (codes, target, zero, step, is_new))
    inputs = change.a if axis == -1 else change.mT.a
    found = with_feedback(codes, target, zero, step, is_new, inputs, st.recipe.format.element)
    tensor = affine.with_codes(scaled, np.ascontiguousarray(found if axis == -1 else found.T))
    survival = Survival.of(before, dequantize(tensor), wanted)
    return Merged(tensor, survival, of_blocks.size, int(of_blocks.sum()), rescaled)


def with_feedback(
    codes: np.ndarray, target: np.ndarray, zero: np.ndarray, step: np.ndarray, is_new: np.ndarray, a: np.ndarray, codec: Codec
) -> np.ndarray:
    """Codes, int32, of each row of `target`; where `is_new` is False, and under a step of 0 or NaN, those that are given.

    A code that stands for n decodes to zero + step * n. Columns of small inputs come first: those that follow make up for their
    errors with fewer codes. A number between two codes gets the lower one.
    """
    numbers, known = affine.numbers_of_codec(codec)
    middles = (numbers[1:] + numbers[:-1]) / 2
    square = (a * a).sum(0)
    rest = a @ a.T + DAMPING * max(float(square.mean()), float(np.finfo(np.float64).tiny)) * np.eye(len(a))
    usable = np.isfinite(step) & (step != 0) & is_new
    # Columns are read one by one.
    target, zero, step, usable = (np.ascontiguousarray(part.T) for part in (target, zero, step, usable))
    found = np.ascontiguousarray(codes.T)
    owed = np.zeros((target.shape[1], len(a)))  # errors of the columns so far, along a
    for j in np.argsort(square, kind="stable"):
        if usable[j].any():
            wanted = target[j] - owed @ np.linalg.solve(rest, a[:, j])
            divisor = np.where(usable[j], step[j], 1)
            index = np.searchsorted(middles, (wanted - zero[j]) / divisor)
            error = np.where(usable[j], zero[j] + divisor * numbers[index] - target[j], 0)
            found[j] = np.where(usable[j], known[index], found[j])
            owed += error[:, None] * a[:, j]
        rest -= np.outer(a[:, j], a[:, j])
    return found.T


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a tensor's scale: the edges along each axis; each element where a layout has no order of blocks.

    sides: the elements of a block along each axis. shape: of the tensor.
    """

    sides: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, st: ScaledTensor) -> _Blocks:
        shape = tuple(st.shape)
        try:
            grid = part_grids(st)["scale"]
        except LayoutError:
            return cls((1,) * len(shape), shape)
        codes = {along.axis: along.codes for along in grid}
        return cls(tuple(min(codes.get(axis) or n, n) for axis, n in enumerate(shape)), shape)

    def any(self, mask: np.ndarray) -> np.ndarray:
        """Of each block, whether the mask is True anywhere."""
        for axis, side in enumerate(self.sides):
            mask = np.logical_or.reduceat(mask, np.arange(0, self.shape[axis], side), axis=axis)
        return mask

    def spread(self, of_blocks: np.ndarray) -> np.ndarray:
        """Of each element, the value of its block."""
        for axis, side in enumerate(self.sides):
            of_blocks = of_blocks.repeat(side, axis)
        return of_blocks[tuple(slice(0, n) for n in self.shape)]


def _rescaled(st: ScaledTensor, target: np.ndarray, blocks: _Blocks, is_new: np.ndarray) -> tuple[ScaledTensor, int]:
    """The tensor with the scales of a cast in blocks that `target` exceeds, and how many these are."""
    numbers, _ = affine.numbers_of_codec(st.recipe.format.element)
    zero, step = affine.affine(st)
    ends = (numbers[0] - (numbers[1] - numbers[0]) / 2, numbers[-1] + (numbers[-1] - numbers[-2]) / 2)
    low, high = np.sort([zero + step * end for end in ends], axis=0)
    grown = blocks.any(is_new & ((target < low) | (target > high)))
    if not grown.any():
        return st, 0
    try:
        again = cast(target, st.recipe, axis=st.axis, scale=st.global_scale)
    except BrecciaError:  # a recipe that is only decoded: values saturate
        return st, 0
    old, new = components(st), components(again)
    if again.layout != st.layout or {k: (v.shape, v.dtype) for k, v in old.items()} != {
        k: (v.shape, v.dtype) for k, v in new.items()
    }:
        return st, 0
    parts, grids = dict(old), part_grids(st)
    for name in old.keys() - {"data", "global_scale"}:
        chosen = grown
        for axis in reversed(range(len(blocks.shape))):
            along = next((one for one in grids[name] if one.axis == axis), None)
            chosen = np.logical_or.reduce(chosen, axis) if along is None else chosen.repeat(along.items, axis)
        parts[name] = np.where(chosen, new[name], old[name])
    return with_parts(st, parts), int(grown.sum())
