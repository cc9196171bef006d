"""Rotations: orthogonal matrices that mix neighbours along the contraction axis, so that outliers spread over their block."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import RecipeError
from .fp32 import f32

#: The lengths of blocks that recipes rotate; 0 is no rotation.
ROTATIONS = (0, 16, 32, 64, 128)


@dataclass(frozen=True)
class Rotation:
    """A Hadamard matrix with random signs, for each block of `block` elements along the contraction axis.

    The stored numbers are H D x / sqrt(block), with H the Hadamard matrix in Sylvester's order and D a diagonal of signs, the
    same for all blocks: Threefry-2x32 with the key `seed` draws them (docs/spec/numerics.md, section 5.7). Elements
    after the last whole block are stored as they are. Source: QuIP# (arXiv:2402.04396), QuaRot (arXiv:2404.00456).
    """

    block: int
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 2 or self.block & (self.block - 1):
            raise RecipeError(f"a rotation's block is a power of two from 2 on; got {self.block!r}.", block=self.block)
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 64:
            raise RecipeError(f"a rotation's seed is an integer of 0 to 2^64 - 1; got {self.seed!r}.", rotation_seed=self.seed)

    @property
    def factor(self) -> float:
        """1 / sqrt(block), as FP32: a power of two for blocks of 16 and 64."""
        return f32(1 / math.sqrt(self.block))

    def whole(self, length: int) -> int:
        """How many of `length` elements lie in whole blocks."""
        return length - length % self.block


def rotation_of(block: int, seed: int) -> Rotation | None:
    """The rotation that two fields of a recipe declare. Raises RecipeError for no seed, and for a seed without a rotation."""
    if block == 0 and seed == 0:
        return None
    rotation = Rotation(block or 2, seed)  # refuses what is no seed, without a rotation too
    if block:
        return rotation
    raise RecipeError(
        f"rotation_seed={seed} draws the signs of a rotation, and rotation is 0; set rotation, or omit the seed.",
        rotation_seed=seed,
    )
