"""What a cast of given numbers would decode to, slab by slab."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from breccia import ScaledTensor, ScalingRecipe, cast, dequantize
from breccia.backend import TENSOR, components
from breccia.internal import measuring

from .measure import Numbers
from .safetensors_file import Shape


@dataclass(frozen=True)
class Recast:
    """The numbers of a cast. A slab is the whole tensor if its elements share a scale.

    each: whether each matrix of a stack has a scale of its own.
    """

    source: Numbers
    recipe: ScalingRecipe
    axis: int
    unit: int | None
    each: bool

    @classmethod
    def of(cls, source: Numbers, recipe: ScalingRecipe, like: ScaledTensor) -> Recast:
        """A cast to a recipe, with blocks along the axis of `like`, and scales of the whole tensor where it has them."""
        shared = recipe.format.levels[0].block == TENSOR
        of_tensor = like.scale if like.global_scale is None else like.global_scale
        unit = None if shared else measuring.Source(like).unit
        return cls(source, recipe, like.axis, unit, shared and len(components(like)["data"].shape) > 2 and of_tensor.ndim > 0)

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def values(self, slab: measuring.Slab) -> np.ndarray:
        x = np.ascontiguousarray(self.source.values(slab), np.float32)
        if self.each:
            return np.stack([self._decoded(matrix) for matrix in x])
        return self._decoded(x)

    def _decoded(self, x: np.ndarray) -> np.ndarray:
        return dequantize(cast(x, self.recipe, axis=self.axis))
