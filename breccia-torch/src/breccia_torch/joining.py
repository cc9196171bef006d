"""One product for layers that multiply the same input, such as an attention's projections to queries, keys and values.

A product of one row by a small weight takes less time than its call, its threads and the rounding of its input. Layers that are
joined keep their names and their weights, whose components become views of one weight's: states, files and copies stay as they
were. The bits of a product do not depend on the other rows of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

import breccia
from breccia import BrecciaError, ScalingRecipe

from . import frontend
from .nn import ScaledLinear, ScaledWeight

#: Layers of a module that multiply the same input, which it does not change in between, in the order of their calls.
SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


class Joined:
    """The product of one row by the weights of several layers, which the first of them computes for all.

    For more rows, for tensors that need gradients or are transformed, and once a weight has another memory, layers multiply by
    themselves. Raises what `breccia.concat` raises for their weights.
    """

    def __init__(self, layers: Sequence[ScaledLinear]) -> None:
        whole = breccia.concat([layer.weight.tensor for layer in layers])
        like = nn.Linear(layers[0].in_features, whole.shape[0], False, "meta", layers[0].weight.dtype)
        self._layer = ScaledLinear.in_place_of(like, ScaledWeight(whole))
        sizes = [layer.out_features for layer in layers]
        self._rows = list(zip(accumulate(sizes, initial=0), sizes, strict=False))
        self._weights = [layer.weight for layer in layers]
        for weight, rows in zip(self._weights, whole.split(sizes), strict=True):
            weight.take(rows)
        self._codes = [weight.data for weight in self._weights]
        self._transposes = [weight.transposed for weight in self._weights]
        self._ready: tuple[Tensor, Tensor] | None = None

    def product(self, at: int, x: Tensor) -> Tensor | None:
        """The product of layer `at`, if it takes the input that the first layer took last; else None."""
        if at == 0:
            self._ready = (x, self._layer.forward(x)) if self._multiplies(x) else None
        ready = self._ready
        if ready is None or ready[0] is not x:
            return None
        if at == len(self._rows) - 1:
            self._ready = None
        return ready[1].narrow(-1, *self._rows[at])

    def _multiplies(self, x: Tensor) -> bool:
        """Whether `x` is a row that needs no gradient, and all layers have the memory of the whole."""
        if x.numel() != self._layer.in_features:
            return False
        if torch.compiler.is_compiling():  # transposes are made anew, and addresses are unknown
            same = all(weight.data is codes for weight, codes in zip(self._weights, self._codes, strict=True))
            return same and self._layer.is_one_operator(x)
        same = all(weight.transposed is known for weight, known in zip(self._weights, self._transposes, strict=True))
        return same and frontend.is_constant(x)


def join(model: nn.Module) -> None:
    """Let the layers of `SHARING` in each module multiply one row together, those of each recipe, in place.

    Layers stay as they are that are no plain ScaledLinears on the CPU, that have a bias or cast their inputs, and whose weights
    are not rows of one tensor, such as those with differing scales for the whole tensor.
    """
    for module in model.modules():
        for names in SHARING:
            alike: dict[ScalingRecipe, list[ScaledLinear]] = {}
            for layer in (getattr(module, name, None) for name in names):
                if _may_join(layer):
                    alike.setdefault(layer.weight.recipe, []).append(layer)
            for layers in alike.values():
                if len(layers) == 1:
                    continue
                try:
                    joined = Joined(layers)
                except BrecciaError:
                    continue
                for at, layer in enumerate(layers):
                    layer.joined = joined, at


def _may_join(layer: Any) -> TypeGuard[ScaledLinear]:
    if type(layer) is not ScaledLinear or layer.bias is not None or layer.activation is not None:
        return False
    weight = layer.weight
    return type(weight) is ScaledWeight and weight.keeps_transpose and weight.device.type == "cpu"
