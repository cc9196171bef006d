"""Mixtures of experts in transformers: a forward function of their modules that multiplies with `breccia.grouped_matmul`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import breccia

from ..experts import routed, training_layer
from ..nn import ScaledExperts
from ..storing import IMPLEMENTATION

#: What transformers calls this implementation.
NAME = IMPLEMENTATION
#: The attribute of a module of experts with f(parameter, rows, offsets), which reads their inputs: rows sorted by expert, and
#: the end of each expert's rows.
OBSERVER = "breccia_observer"


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The output of a module of experts, for tokens of shape (tokens, hidden_size).

    top_k_index, top_k_weights: each token's experts and their weights, (tokens, k). An index of `num_experts` or more
        belongs to no expert here (expert parallelism) and adds nothing.
    """

    observe = getattr(self, OBSERVER, None)

    def experts(rows: Tensor, offsets: Tensor, which: Tensor) -> Tensor:
        def product(x: Tensor, name: str) -> Tensor:
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
            if observe is not None:
                observe(name, x, offsets)
            if (layer := training_layer(self, name)) is not None:
                y = layer(x, offsets)
            elif isinstance(weight, ScaledExperts):
                y = weight.grouped_matmul(x, offsets, self.is_transposed)
            else:
                y = breccia.grouped_matmul(x, weight if self.is_transposed else weight.mT, offsets, x.dtype)
            return y if bias is None else y + bias[which]

        inner = self._apply_gate(product(rows, "gate_up_proj")) if self.has_gate else self.act_fn(product(rows, "up_proj"))
        outer = product(inner, "down_proj")
        return self.post_expert_norm(outer) if self.has_post_expert_norm else outer

    return routed(hidden_states, top_k_index, top_k_weights, self.num_experts, experts)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
